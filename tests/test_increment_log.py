"""A log of increments: chains are merged beside the run, and a later save brings the baseline."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import errors, handler
from cnr_jax.checkpointer.saving import lifecycle, meter
from cnr_jax.checkpointer.saving import merging as merging_module
from cnr_jax.checkpointer.saving.merging import Merging
from cnr_jax.cli.app import app
from cnr_jax.cli.report import panels
from cnr_jax.format import names
from cnr_jax.goodput.cost import cost_of
from cnr_jax.goodput.measured import measured_profile
from cnr_jax.goodput.measurements import read_measurements
from cnr_jax.goodput.records import profile_of
from cnr_jax.policy import Decision, SaveRecord
from cnr_jax.repository.compaction.baseline import Request, write_baseline
from cnr_jax.repository.course import course_of
from cnr_jax.repository.description import amount
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.save_plan import MergedBaseline
from cnr_jax.repository.replay import regions
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import names_in
from cnr_jax.testing import damage, inprocess
from cnr_jax.testing.faults import Fault

from .conftest import Gate, each_of, left_in, merged, skip_below, until
from .test_compaction import CUTS, Run, assert_same, kinds
from .test_mirrors import caught_up

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")


def log_of(run: Any, root: Any, steps: int, **options: Any) -> list[cnr.SaveReport]:
    """Trains and saves by a log of increments whose merges end before the next save."""
    found = []
    given = {"policy": cnr.IncrementLog(merge_at=3), **options}
    with run.open(root, **given) as manager:
        for step in range(steps):
            run.run(manager, [step])
            found.append(manager.last_report)
            merged(manager)
    return found


# ---- what a save brings along -------------------------------------------------------------


def test_training_writes_one_baseline_and_restores_stay_short(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    reports = log_of(run, tmp_path, 10)
    assert [each.kind for each in reports] == [
        *("full", "delta", "delta"),
        *("full", "delta", "delta"),
        *("full", "delta", "delta"),
        "full",
    ]
    for step, report in enumerate(reports):
        item = tmp_path / str(step) / "default"
        manifest, files = read_manifest(item), [*item.rglob("*")]
        on_disk = sum(each.stat().st_size for each in files if each.is_file())
        assert report.total_bytes + report.merged_bytes == on_disk
        brings = step % 3 == 0 and step > 0
        assert (report.merged_bytes > 0) == brings
        assert (
            report.parent is None if brings else step == 0 or report.parent == step - 1
        )
        assert (names.BASELINE in manifest.required_features) == brings
        if step:
            assert 6 <= report.rows <= 10, "rows that training has changed"
            assert report.total_bytes < 1.2 * reports[1].total_bytes
    assert "the chain of step 8 is merged: 3 checkpoints" in reports[9].reason
    assert left_in(tmp_path) == []
    assert cnr.verify(tmp_path) == ()
    with run.open(tmp_path) as manager:
        for step in range(10):
            run.check(manager, step)
    # A step that brings its baseline along needs no other.
    for step in range(9):
        shutil.rmtree(tmp_path / str(step))
    with run.open(tmp_path) as manager:
        assert manager.latest_step() == 9
        run.check(manager, 9)


@pytest.mark.parametrize(
    "codec", ["adaptive", "lattice", "lattice moments", "kmeans", "raw", "bfloat16"]
)
def test_a_log_restores_to_the_bits_of_the_chain_without_merges(
    tmp_path: Path, quick: None, codec: str
) -> None:
    codec, *slots = codec.split()
    options = {
        "codec": codec,
        "tracking": "fingerprint",
        **({"slot_codec": "moments"} if slots else {}),
    }
    roots = {
        tmp_path / "log": cnr.IncrementLog(merge_at=3),
        tmp_path / "chain": cnr.Consecutive(),
    }
    for root, policy in roots.items():
        run = Run(root)
        run.cut = P("r")
        given = cnr.Options(policy=policy, **options)
        with cnr.CheckpointManager(root, tables=run.tables, options=given) as manager:
            for step in range(8):
                run.train()
                manager.save(step, args=cnr.args.Save(run.state()))
                merged(manager)
    log, chain = roots
    expected = dict.fromkeys(map(str, range(8)), "delta")
    assert kinds(chain) == {**expected, "0": "full"}
    assert kinds(log) == {**expected, "0": "full", "3": "full", "6": "full"}
    for step in range(8):
        truth = Run(chain).restored(step)
        for cut in CUTS if step in (3, 7) else CUTS[:1]:
            assert_same(Run(log).restored(step, cut), truth)
        for table in ("t", "u"):
            rows = np.arange(0, 96, 5)
            read = cnr.read_rows(log, table, rows, step=step)
            assert read.tobytes() == truth[f"['{table}']"][::5].tobytes()
    assert cnr.verify(log) == ()
    # It is a chain like others: compaction and export take it.
    last = Run(log).restored(7)
    cnr.compact(log, writer_is_dead=True)
    assert_same(Run(log).restored(7), last)


def test_a_baseline_of_another_mesh_lies_in_layers(tmp_path: Path, quick: None) -> None:
    skip_below(4)
    run, options = Run(tmp_path), {"codec": "lattice", "slot_codec": "moments"}
    run.cut = P("r")
    run.save(options, saves=2)
    run.cut = P(None, "c")
    given = {
        **options,
        "tracking": "fingerprint",
        "policy": cnr.IncrementLog(merge_at=3),
    }
    with cnr.CheckpointManager(
        tmp_path, tables=run.tables, options=cnr.Options(**given)
    ) as manager:
        manager.restore(None, args=cnr.args.Restore(run.state()))
        for _ in range(8):
            run.train()
            manager.save(run.step, args=cnr.args.Save(run.state()))
            baseline = merged(manager)
            assert baseline is None or baseline.layers >= 1
            run.step += 1
            # What is written is what the chain of deltas has, so the last save is the truth.
            kept = run.restored(run.step - 1, P(None))
            run.cut = P(None, "c")
            for cut in (P("r"), P("r", "c")):
                assert_same(run.restored(run.step - 1, cut), kept)
            run.cut = P(None, "c")
    assert list(kinds(tmp_path).values()).count("full") == 4
    assert cnr.verify(tmp_path) == ()


def test_retention_lets_go_of_what_was_merged(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    with run.open(
        tmp_path, {"max_to_keep": 1}, policy=cnr.IncrementLog(merge_at=3)
    ) as manager:
        for step in range(14):
            run.run(manager, [step])
            merged(manager)
            there = [n for n in os.listdir(tmp_path) if names.may_be_step(n)]
            assert len(there) <= 3
            run.check(manager, step)
    assert cnr.verify(tmp_path) == ()


def test_saves_go_on_while_a_chain_is_merged(
    tiny_run: Any, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save that brings the baseline holds the rows of those that came meanwhile too."""
    run, gate, made = tiny_run(), Gate(), Merging._made

    def held(self: Merging, root: Any, given: list[str]) -> Any:
        found = made(self, root, given)
        gate.passes()
        return found

    monkeypatch.setattr(Merging, "_made", held)
    gate.shut()
    with run.open(
        tmp_path, policy=cnr.IncrementLog(merge_at=3), max_in_flight=2
    ) as manager:
        run.run(manager, range(5))
        assert manager.last_report.kind == "delta"
        gate.open()
        assert merged(manager).directory == "2"
        run.run(manager, [5])
        assert (manager.last_report.kind, manager.last_report.parent) == ("full", None)
        run.run(manager, [6])
        assert manager.last_report.parent == 5
        for step in range(7):
            run.check(manager, step)
    assert cnr.verify(tmp_path) == ()


def test_chains_stay_bounded_where_merges_fail(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fails(self: Merging, root: Any, given: list[str]) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(Merging, "_made", fails)
    run = tiny_run()
    reports = log_of(run, tmp_path, 9, policy=cnr.IncrementLog(merge_at=2, max_chain=3))
    assert [each.kind for each in reports] == ["full", *["delta"] * 3] * 2 + ["full"]
    assert "no merged baseline is there" in reports[4].reason
    assert "the chain of step 1 is not merged: no room" in caplog.text


# ---- faults -------------------------------------------------------------------------------


def test_a_failed_save_takes_its_baseline_with_it(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        with inprocess.failing(tmp_path, Fault("rename", action="EIO", match="/3")):
            run.train(3)
            with pytest.raises(errors.SaveError):
                run.save(manager, 3)
                manager.wait_until_finished()
        assert merged(manager) is None
        run.run(manager, [4])
        assert (manager.last_report.kind, manager.last_report.parent) == ("delta", 2)
        assert merged(manager).directory == "4"
        run.run(manager, [5])
        assert manager.last_report.kind == "full"
        for step in (0, 1, 2, 4, 5):
            run.check(manager, step)
    assert left_in(tmp_path) == []
    assert cnr.verify(tmp_path) == ()


def test_a_baseline_that_was_cleared_away_is_forgotten(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        (folder,) = left_in(tmp_path)
        shutil.rmtree(tmp_path / folder)
        run.run(manager, [3])
        assert manager.last_report.kind == "delta"
        run.check(manager, 3)


@pytest.mark.parametrize("harm", ["manifest", "rows", "cut"])
def test_a_baseline_that_is_not_whole_is_not_brought_along(
    tiny_run: Any, tmp_path: Path, quick: None, harm: str
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        (folder,) = left_in(tmp_path)
        if harm == "manifest":
            (tmp_path / folder / "manifest.p00001.json").unlink()
        elif harm == "rows":
            shutil.rmtree(tmp_path / folder / "rows.p00001")
        else:
            (chunk, *_) = sorted((tmp_path / folder).rglob("c/0"))
            damage.truncate(chunk, 5)
        run.run(manager, [3])
        assert manager.last_report.kind == "delta"
        assert folder not in left_in(tmp_path)
        run.check(manager, 3)


@pytest.mark.parametrize("begun", [False, True])
def test_no_chain_is_merged_while_a_baseline_waits(
    tiny_run: Any, tmp_path: Path, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, merging, writing, asked = tiny_run(), Gate(), Gate(), list[str]()
    write = handler.write_manifest

    def made(self: Merging, root: Any, request: Request) -> MergedBaseline:
        asked.append(request.directory)
        merging.passes()
        return write_baseline(root, request)

    def held(directory: Any, plan: Any, *told: Any, **others: Any) -> Any:
        if plan.step in (3, 4):
            writing.passes()
        return write(directory, plan, *told, **others)

    monkeypatch.setattr(Merging, "_made", made)
    monkeypatch.setattr(handler, "write_manifest", held)
    policy = cnr.IncrementLog(merge_at=3)
    with run.open(tmp_path, policy=policy, max_in_flight=2) as manager:
        planner = manager._handler._planner
        merging.shut()
        run.run(manager, range(3))
        writing.shut()
        run.train(3)
        run.save(manager, 3)  # asks for a merge, as no baseline is there yet
        until(writing.reached.is_set)
        merging.open()
        until(lambda: planner.baseline is not None)
        if begun:
            run.train(4)
            run.save(manager, 4)  # brings it along
        writing.open()
        assert (merged(manager) is None) == begun and asked == ["2"]
        if not begun:
            run.run(manager, [4])
        assert manager.last_report.merged_bytes > 0
        run.run(manager, [5, 6])
        until(lambda: len(asked) > 1)  # by a thread, beside the run
        assert asked == ["2", "6"]
        for step in range(7):
            run.check(manager, step)
    assert left_in(tmp_path) == []


def test_a_baseline_that_touched_rows_left_behind_keeps_none_from_a_merge(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager).directory == "2"
        run.touched = cnr.reset_touched(run.touched)
        reports = []
        for step in range(3, 10):
            run.run(manager, [step])
            reports.append(manager.last_report)
            merged(manager)
        assert [bool(r.merged_bytes) for r in reports] == [False] * 3 + [
            *(True, False, False, True)
        ]
        run.check(manager, 9)
    assert left_in(tmp_path) == []


def test_no_chain_is_merged_before_the_run_ends(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    policy = cnr.IncrementLog(merge_at=2)
    with run.open(tmp_path, policy=policy, save_on_sigterm=True) as manager:
        run.run(manager, [0])
        signal.raise_signal(signal.SIGTERM)
        run.run(manager, [1])
        assert manager.last_report.kind == "delta" and merged(manager) is None
        assert manager.reached_preemption(1)


def test_rows_of_any_width_are_restored(
    tiny_run: Any, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    log_of(run, tmp_path, 6, codec="lattice", bits=8)
    want = cnr.read_rows(tmp_path, "user", [1, 2])
    monkeypatch.setattr(regions, "BLOCK_BYTES", 1)  # a row has more
    with run.open(tmp_path) as manager:
        args = cnr.args.Restore(run.state)
        rows = manager.restore(None, args=args).state["params"]["user"]["embedding"]
    np.testing.assert_array_equal(np.asarray(rows)[[1, 2]], want)


def test_profiles_take_a_baseline_for_no_write_of_training(
    tiny_run: Any, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_NOTED_SECS", 0.0)
    run = tiny_run()
    reports = log_of(run, tmp_path, 9, metrics=True)
    brought = {each.step for each in reports if each.merged_bytes}
    assert brought == {3, 6}
    noted = read_measurements(epath.Path(tmp_path))
    assert noted is not None
    assert [save.kind for save in noted.saves] == ["full", *["delta"] * 8]
    assert measured_profile(noted.saves).full_bytes == reports[0].total_bytes
    whole = [each.total_bytes + each.merged_bytes for each in reports]
    assert [save.whole_bytes for save in noted.saves] == [
        size if report.step in brought else 0
        for size, report in zip(whole, reports, strict=True)
    ]
    course = course_of(cnr.describe(tmp_path))
    assert {save.step for save in course.saves if save.merged_bytes} == brought
    (series,) = (
        each for each in panels._parts(course.saves).series if each.name == "merged"
    )
    assert sum(bool(value) for value in series.values) == len(brought)
    for each in reports:
        told = f"brings {each.merged_bytes / 1e6:.2f} MB that were merged"
        assert (told in str(each)) == (each.step in brought)
    profile, cost = profile_of(course), cost_of(course)
    assert profile is not None and cost is not None
    assert profile.full_bytes == reports[0].total_bytes
    assert profile.write.samples == 9
    shutil.rmtree(tmp_path / "3")
    without = course_of(cnr.describe(tmp_path))
    for save, then, report in zip(course.saves, without.saves, reports, strict=True):
        assert save.written_bytes == then.written_bytes == report.total_bytes
        assert save.merged_bytes == then.merged_bytes == report.merged_bytes
        assert save.total_bytes == then.total_bytes
        assert save.parts == then.parts
        assert then.kept == (save.step != 3)
    there = cost_of(without)
    assert there is not None
    # A month has as many saves as fit, and times of manifests are not quite those of lines.
    for figure in ("moved_bytes", "write_requests", "read_requests"):
        now, before = (getattr(c.own, figure) * c.interval_secs for c in (there, cost))
        assert now == pytest.approx(before), figure


@each_of("metrics", [False, True])
def test_what_compact_has_written_is_no_write_of_a_save(
    tiny_run: Any, tmp_path: Path, metrics: bool
) -> None:
    run, root = tiny_run(), tmp_path / str(metrics)
    with run.open(root, policy=cnr.Consecutive(), metrics=metrics) as manager:
        run.run(manager, range(6))
    cnr.compact(root, writer_is_dead=True)
    described = cnr.describe(root)
    step = described.steps[-1]
    assert step.step == 5
    assert step.kind == "full" and step.merged_bytes == step.total_bytes > 0
    assert [each.merged_bytes for each in described.steps[:-1]] == [0] * 5
    last = course_of(described).saves[-1]
    assert last.merged_bytes == last.total_bytes == step.total_bytes
    told = CliRunner().invoke(app, ["explain", str(root), "5"]).output
    assert "step 5: full, made by compact" in told and "as step 4 lists them" in told
    shown = CliRunner().invoke(app, ["show", str(root), "5"]).output
    assert f"dense 0 B, manifests 0 B, merged {amount(step.merged_bytes)}" in shown
    assert last.written_bytes is None and not any(
        (step.table_bytes, step.slot_bytes, step.dense_bytes, step.manifest_bytes)
    )
    damage.flip_bit(root / step.directory / "default" / "manifest.p00000.json", 9)
    (*_, step) = cnr.describe(root).steps
    assert step.problem and step.merged_bytes == step.total_bytes > 0
    shutil.rmtree(root / step.directory)
    kept = [each.step for each in course_of(cnr.describe(root)).saves]
    assert kept == [*range(5), *([5] if metrics else [])]


def test_explain_lists_no_saves_that_came_after_a_step_of_compact(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.Consecutive()) as manager:
        run.run(manager, range(5))
    cnr.compact(tmp_path, step=2, writer_is_dead=True)
    told = CliRunner().invoke(app, ["explain", str(tmp_path), "2"]).output
    assert "seen:    2 saves since the baseline, as step 1 lists them" in told


def test_no_save_brings_an_old_baseline_after_a_full_one(
    tiny_run: Any, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        run.train(3)
        manager.save(3, args=cnr.args.Save(run.state, run.touched, full=True))
        manager.wait_until_finished()
        assert manager.last_report.merged_bytes == 0
        run.run(manager, [4])
        assert (manager.last_report.kind, manager.last_report.parent) == ("delta", 3)
        assert "the merged chain of step 2 is not used: a full save" in caplog.text
        assert left_in(tmp_path) == []


def test_a_full_save_in_flight_makes_a_baseline_old(
    tiny_run: Any, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gate, write = tiny_run(), Gate(), handler.write_manifest

    def held(directory: Any, plan: Any, *told: Any, **others: Any) -> Any:
        if plan.step == 3:
            gate.passes()
        return write(directory, plan, *told, **others)

    monkeypatch.setattr(handler, "write_manifest", held)
    with run.open(
        tmp_path, policy=cnr.IncrementLog(merge_at=3), max_in_flight=2
    ) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        gate.shut()
        run.train(3)
        manager.save(3, args=cnr.args.Save(run.state, run.touched, full=True))
        run.train(4)
        run.save(manager, 4)
        gate.open()
        manager.wait_until_finished()
        report = manager.last_report
        assert (report.step, report.kind, report.parent) == (4, "delta", 3)
        run.check(manager, 4)


def test_a_damaged_chain_is_not_merged(
    tiny_run: Any, tmp_path: Path, quick: None, caplog: Any
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(2))
        (chunk, *_) = sorted((tmp_path / "1/default").rglob("rows.p*/*/c/0"))
        damage.flip_bit(chunk, 3)
        run.run(manager, [2])
        assert merged(manager) is None
        assert "the chain of step 2 is not merged" in caplog.text
    assert left_in(tmp_path) == []


def test_a_damaged_baseline_is_found_by_its_digests(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    log_of(run, tmp_path, 4)
    item = tmp_path / "3/default"
    for path in sorted(item.rglob("*")):
        if not path.is_file() or path.name == "zarr.json" or "p00001" not in str(path):
            continue
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        found = {each.directory for each in cnr.verify(tmp_path) if each.consequence}
        assert found == {"3"}, path
        path.write_bytes(data)
    assert cnr.verify(tmp_path) == ()


def test_a_run_that_goes_back_does_not_bring_the_baseline_it_left(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        run.restore(manager, 1)
        for step in (2, 3, 4, 5):
            run.run(manager, [step])
            brings = manager.last_report.merged_bytes > 0
            assert brings == (step == 3), "that of the new step 2"
            merged(manager)
        for step in (0, 1, 2, 3, 4, 5):
            run.check(manager, step)
    assert left_in(tmp_path) == []
    assert all(not each.consequence for each in cnr.verify(tmp_path))


def test_a_baseline_of_the_restored_step_is_brought_along(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None
        run.restore(manager, None)
        run.run(manager, [3])
        assert manager.last_report.merged_bytes > 0
        run.check(manager, 3)


# ---- the process --------------------------------------------------------------------------


@pytest.fixture
def may_merge(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A file that processes wait for before they merge: none ends by itself before it is there."""
    path, last = tmp_path_factory.mktemp("held") / "may_merge", "main(given)\n"
    program = merging_module._PROGRAM
    assert program.endswith(last)
    waits = f"while not os.path.exists({os.fspath(path)!r}):\n    time.sleep(0.01)\n"
    held = program.removesuffix(last) + waits + last
    monkeypatch.setattr(merging_module, "_PROGRAM", held)
    return path


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_process_of_its_own_merges(
    tiny_run: Any,
    tmp_path: Path,
    where: str,
    may_merge: Path,
    request: pytest.FixtureRequest,
) -> None:
    run, root = tiny_run(), str(tmp_path)
    if where == "bucket":
        root = str(request.getfixturevalue("bucket") / "run")
    with run.open(root, policy=cnr.IncrementLog(merge_at=2)) as manager:
        run.run(manager, range(2))
        merging = manager._handler.lifecycle.merging
        until(lambda: merging._running is not None)
        process = merging._running
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == merging_module._NICE
        may_merge.touch()
        assert merged(manager) is not None and process.returncode == 0
        run.run(manager, [2])
        assert manager.last_report.kind == "full"
        run.check(manager, 2)
    assert cnr.verify(root) == ()


def test_a_process_that_is_killed_costs_its_baseline_only(
    tiny_run: Any, tmp_path: Path, may_merge: Path, caplog: Any
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=2)) as manager:
        run.run(manager, range(2))
        merging = manager._handler.lifecycle.merging
        until(lambda: merging._running is not None)
        merging._running.kill()
        may_merge.touch()
        assert merged(manager) is None
        assert "ended with code -9" in caplog.text
        run.run(manager, [2])
        assert manager.last_report.kind == "delta"
        assert merged(manager) is not None
    assert left_in(tmp_path) == []


def test_a_manager_that_closes_ends_the_process(
    tiny_run: Any, tmp_path: Path, may_merge: Path
) -> None:
    run = tiny_run()
    with run.open(tmp_path, policy=cnr.IncrementLog(merge_at=2)) as manager:
        run.run(manager, range(2))
        merging = manager._handler.lifecycle.merging
        until(lambda: merging._running is not None)
    until(lambda: not merging.is_busy)  # `close` waits for some seconds only
    assert merging._running.returncode is not None and not may_merge.exists()
    assert left_in(tmp_path) == []


_PROGRAM = """
    import sys, time, jax.numpy as jnp, cnr_jax as cnr
    state = {"user": jnp.arange(64.0).reshape(16, 4)}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(policy=cnr.IncrementLog(merge_at=2), codec="raw")
    with cnr.CheckpointManager(sys.argv[1], tables=tables, options=options) as manager:
        for step in range(2):
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
        merging = manager._handler.lifecycle.merging
        while merging._running is None:
            time.sleep(0.01)
        print(merging._running.pid, flush=True)
        time.sleep(60)
"""


def test_the_process_ends_with_a_run_that_is_killed(
    tiny_run: Any, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(root)],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        child = int(program.stdout.readline())
        program.send_signal(signal.SIGKILL)
    until(lambda: not _is_alive(child))
    state = {"user": jax.numpy.arange(64.0).reshape(16, 4)}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(
        root, tables=tables, options=cnr.Options(codec="raw")
    ) as manager:
        state, touched = manager.restore(None, args=cnr.args.Restore(state))
        manager.save(2, args=cnr.args.Save(state, touched))
    assert left_in(root) == [], "the next save has cleared what it left"
    assert cnr.verify(root) == ()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it goes while it is read
        return False


# ---- steps of a lattice -------------------------------------------------------------------


def on_a_lattice(root: Path, growth: float, steps: int, **options: Any) -> list[Any]:
    """Reports of a run whose rows grow by a factor in each step, and the manager's history."""
    rng = np.random.default_rng(0)
    state = {"user": jax.numpy.asarray(rng.normal(size=(512, 16)), np.float32)}
    tables = cnr.find_tables(state, ["user"])
    touched, found = cnr.init_touched(state, tables), list[Any]()
    given = {"policy": cnr.IncrementLog(merge_at=3), "codec": "lattice", **options}
    with cnr.CheckpointManager(
        root, tables=tables, options=cnr.Options(on_save=found.append, **given)
    ) as manager:
        for step in range(steps):
            some = rng.choice(512, 100, replace=False)
            table = state["user"].at[some].multiply(growth)
            state = {"user": table}
            touched = cnr.record(touched, {"user": some})
            manager.save(step, args=cnr.args.Save(state, touched))
            if options.get("max_in_flight", 1) == 1 or step % 2:
                merged(manager)
        manager.wait_until_finished()
        restored = manager.restore(None, args=cnr.args.Restore(state)).state
    off = np.linalg.norm(np.asarray(restored["user"] - state["user"]), axis=1)
    norm = np.linalg.norm(np.asarray(state["user"]), axis=1)
    assert (off / norm).mean() < 0.2
    assert cnr.verify(root) == ()
    return sorted(found, key=lambda report: report.step)


@pytest.mark.parametrize("growth", [1.5, 0.67])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_training_saves_full_once_rows_have_grown_out_of_their_step(
    tmp_path: Path, quick: None, growth: float, in_flight: int
) -> None:
    reports = on_a_lattice(tmp_path, growth, 14, max_in_flight=in_flight)
    grown = [r.step for r in reports if "grown out of the steps of user" in r.reason]
    assert grown and grown[0] >= 3
    for step in grown:
        assert reports[step].kind == "full" and reports[step].rows == 512
        manifest = read_manifest(epath.Path(tmp_path) / str(step) / "default")
        assert manifest.outgrown == (), "steps were chosen anew"
    assert any(r.kind == "full" and r.rows < 512 for r in reports), "merges go on"


def test_no_chain_is_merged_whose_rows_have_grown_out_of_their_step(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, merge = list[str](), Merging.merge

    def noted(self: Merging, root: Any, plan: Any, *told: Any) -> None:
        begun.append(plan.directory)
        merge(self, root, plan, *told)

    monkeypatch.setattr(Merging, "merge", noted)
    reports = on_a_lattice(tmp_path, 1.5, 14)
    full = [r.step for r in reports if "grown out of the steps of user" in r.reason]
    assert begun and full
    assert not {str(step - 1) for step in full} & set(begun)


@pytest.mark.parametrize(("grows", "held"), [("user", 100), ("other", 4000)])
def test_few_rows_do_not_make_a_save_full(
    tmp_path: Path, quick: None, grows: str, held: int
) -> None:
    """A table that is zeros almost throughout, or is next to nothing of the state."""
    rng = np.random.default_rng(0)
    table = np.zeros((4000, 16), np.float32)
    table[rng.choice(4000, held, replace=False)] = rng.normal(size=(held, 16))
    state = {
        "user": jax.numpy.asarray(table),
        "other": jax.numpy.asarray(rng.normal(size=(400, 4)), np.float32),
    }
    tables = cnr.find_tables(state, ["user", "other"])
    touched, found = cnr.init_touched(state, tables), list[Any]()
    given = {"policy": cnr.IncrementLog(merge_at=2), "codec": "lattice"}
    options = cnr.Options(on_save=found.append, **given)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(8):
            state = {**state, grows: state[grows] * np.float32(1.6)}
            ids = np.arange(len(state[grows]))
            touched = cnr.record(touched, {grows: ids})
            manager.save(step, args=cnr.args.Save(state, touched))
            merged(manager)
    assert not [each.reason for each in found if "grown out" in each.reason]
    assert any(each.merged_bytes for each in found)


def test_rows_that_stay_as_large_stay_on_their_step(
    tmp_path: Path, quick: None
) -> None:
    reports = on_a_lattice(tmp_path, 1.02, 14)
    assert [r.step for r in reports if r.rows == 512] == [0]
    assert any(r.kind == "full" for r in reports[1:])


# ---- other places -------------------------------------------------------------------------


def test_baselines_in_a_bucket(tiny_run: Any, bucket: epath.Path, quick: None) -> None:
    run, root = tiny_run(), bucket / "run"
    reports = log_of(run, str(root), 7)
    assert [each.kind for each in reports].count("full") == 3
    told = catalogue.read(root).entries
    assert [told[str(step)].has_deltas for step in range(7)] == [False, *[True] * 6]
    with run.open(str(root)) as manager:
        for step in range(7):
            run.check(manager, step)
    assert cnr.verify(str(root)) == ()
    assert not [n for n in names_in(root) if names.TEMPORARY_SUFFIX in n]


def test_what_a_killed_run_leaves_in_a_bucket_goes_with_the_next_save(
    tiny_run: Any, bucket: epath.Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = tiny_run(), bucket / "run"

    def folders() -> list[str]:
        return [n for n in names_in(root) if names.TEMPORARY_SUFFIX in n]

    with run.open(str(root), policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.run(manager, range(3))
        assert merged(manager) is not None and len(folders()) == 1
        with monkeypatch.context() as killed:
            killed.setattr(lifecycle, "remove_baseline", lambda *told: None)
            manager.close()
    assert len(folders()) == 1
    with run.open(str(root), policy=cnr.IncrementLog(merge_at=3)) as manager:
        run.restore(manager, None)
        run.run(manager, [3])
        assert merged(manager) is not None and len(folders()) == 1
        run.check(manager, 3)
    assert folders() == []
    assert cnr.verify(str(root)) == ()


def test_a_mirror_copies_the_baseline_with_its_step(
    tiny_run: Any, tmp_path: Path, quick: None
) -> None:
    run, root, far = tiny_run(), tmp_path / "root", tmp_path / "far"
    with run.open(
        root, policy=cnr.IncrementLog(merge_at=3), mirror=str(far)
    ) as manager:
        for step in range(7):
            run.run(manager, [step])
            merged(manager)
        caught_up(manager)
    assert cnr.verify(far) == ()
    shutil.rmtree(root)
    with run.open(far) as manager:
        for step in range(7):
            run.check(manager, step)


# ---- the policy ---------------------------------------------------------------------------


def record(step: int, depth: int | None, kind: Any = "delta") -> SaveRecord:
    return SaveRecord(step=step, kind=kind, bytes=9, rows=3, secs=0.1, depth=depth)


def test_a_log_asks_for_a_merge_once_its_chain_is_long() -> None:
    policy = cnr.IncrementLog(merge_at=3)
    saves = [record(0, 1, "full")]
    assert policy.decide([]).kind == "full"
    assert policy.decide(saves) == Decision(
        kind="delta", parent=0, reason="rows since the last save (step 0)"
    )
    for step in range(1, 12):
        saves.append(record(step, step + 1))
        decision = policy.decide(saves)
        assert (decision.kind, decision.parent) == ("delta", step)
        assert decision.merge
    saves.append(record(12, 13))
    assert policy.decide(saves).kind == "full"


def test_what_a_log_cannot_be() -> None:
    for wrong in (1, 0, None, 2.5, "3"):
        with pytest.raises(errors.OptionError, match="merge_at"):
            cnr.IncrementLog(merge_at=wrong)
    with pytest.raises(errors.OptionError, match="no chain to merge"):
        Decision(kind="full", parent=None, reason="", merge=True)
