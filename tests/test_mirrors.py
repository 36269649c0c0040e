"""Mirrors: what is committed is copied behind training, and comes back where it is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.saving import lifecycle
from cnr_jax.cli.app import app
from cnr_jax.format import names
from cnr_jax.repository.committer import ConditionalCommitter
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.markers import is_committed
from cnr_jax.repository.mirroring import copier as copier_module
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.mirroring.step_files import Meter
from cnr_jax.repository.store import can, exists, names_in, store_of
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from . import mirror_program
from .bucket_proxy import Proxy
from .conftest import Gate, case_of, each_of, until, xla_flags
from .test_buckets import held

PROGRAM = Path(mirror_program.__file__)


@pytest.fixture(params=["disk", "bucket"])
def far(request: Any, tmp_path: Path) -> epath.Path:
    """Where a mirror is: another folder, and a bucket."""
    if request.param == "disk":
        return epath.Path(tmp_path / "far")
    return request.getfixturevalue("bucket") / "runs/far"


# For tests of what is the same wherever the mirror is: others try what stores do differently.
mostly_on_disk = pytest.mark.parametrize(
    "far", ["disk", pytest.param("bucket", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Where mirrors wait before they copy a file, while it is shut."""
    gate, take = Gate(), Meter.take

    def held_back(self: Meter, count: int) -> None:
        gate.passes()
        take(self, count)

    monkeypatch.setattr(Meter, "take", held_back)
    yield gate
    gate.open()


def caught_up(manager: Any) -> None:
    until(lambda: manager.mirror_report.lag_steps == 0)


def steps_in(root: Any) -> list[str]:
    return [name for name in held(epath.Path(root)) if names.may_be_step(name)]


def harm(root: Any) -> list[str]:
    return [f"{p.directory} {p.kind}" for p in cnr.verify(root) if p.consequence]


def test_committed_steps_are_copied_and_restore(
    tiny_run: Any, root: Path, far: epath.Path, copying: Gate
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        copying.shut()
        run.run(manager, range(4))
        copying.open()
        report = manager.last_report
        assert report.mirror_lag_steps >= 1 and report.mirror_backlog_bytes > 0
        assert report.mirror_lag_secs >= 0 and report.mirror_problem == ""
        caught_up(manager)
        # Steps are counted after they have come to be no lag.
        until(lambda: manager.mirror_report.copied_steps == 4)
    assert steps_in(far) == steps_in(root) == ["0", "1", "2", "3"]
    assert cnr.verify(far) == ()
    for step in steps_in(root):
        for folder, _, files in os.walk(root / step):
            for name in set(files).difference(names.MARKERS):
                path = (Path(folder) / name).relative_to(root)
                assert store_of(far).read(far / path) == (root / path).read_bytes()
    shutil.rmtree(root)
    with run.open(root, mirror=str(far)) as manager:
        assert manager.latest_step() == 3
        run.restore(manager, None)
        run.same(run.state, run.truth[3])
        run.run(manager, [4])
        assert manager.last_report.kind == "delta", "its chain came back"
    assert steps_in(far) == ["0", "1", "2", "3", "4"]


def test_a_step_of_a_bucket_that_is_saved_again_is_copied_again(
    tiny_run: Any, bucket: epath.Path, tmp_path: Path
) -> None:
    """No folder of a bucket shows that another step has come to lie in it."""
    run, root, far = tiny_run(), bucket / "run", tmp_path / "far"
    with run.open(str(root), mirror=far) as manager:
        run.run(manager, range(3))
        caught_up(manager)
        manager.delete(2)
        run.salt = 1
        run.run(manager, [2, 3], force=True)
        caught_up(manager)
        assert manager.mirror_report.problems == ()
        assert manager.mirror_report.skipped_steps == ()
    assert steps_in(far) == ["0", "1", "2", "3"]
    with run.open(far) as manager:
        for step in range(4):
            run.check(manager, step)


def test_a_step_of_which_there_is_no_report_is_copied(
    tiny_run: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, far = tiny_run(), tmp_path / "far"

    def fails(*_: object) -> None:
        raise MemoryError

    with run.open(root, mirror=far) as manager:
        monkeypatch.setattr(lifecycle, "report_of_committed", fails)
        run.run(manager, [0])
        assert manager.last_report is None
        until(lambda: steps_in(far) == ["0"])


def flip(root: Any, path: str) -> bytes:
    """Damages a file; returns what it held."""
    file = epath.Path(root) / path
    store = store_of(file)
    whole = store.read(file)
    store.write(file, whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], replaces=True)
    return whole


def files_of(root: Any, step: str) -> list[str]:
    """Files of a step that belong to it, but for that which commits it."""
    found = [
        str(f.relative_to(root)) for f in Path(root, step).rglob("*") if f.is_file()
    ]
    return sorted(f for f in found if not f.endswith(names.MARKERS))


def test_a_root_that_loses_its_newest_steps_takes_them_from_the_mirror(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        run.run(manager, range(4))
    shutil.rmtree(root / "3")
    (root / "2/default" / names.MANIFEST).write_bytes(b"")
    with run.open(root, mirror=str(far)) as manager:
        assert manager.latest_step() == 3
        for step in range(4):
            run.check(manager, step)
        run.restore(manager, None)
        run.same(run.state, run.truth[3])


@mostly_on_disk
def test_problems_of_both_are_told_apart(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        run.run(manager, range(3))
        caught_up(manager)
        path = next(p for p in files_of(root, "1") if "/c/" in p)
        flip(far, path)
        (problem,) = manager.verify()
        assert problem.root == str(far) and problem.directory == "1"
        assert manager.all_steps() == [0, 1, 2], "those of the root are whole"


def test_what_a_restore_finds_damaged_is_mended(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    with run.open(root, mirror=far) as manager:
        run.run(manager, range(2))
    for step in "01":
        for path in files_of(root, step):
            with case_of(path), run.open(root, mirror=far) as manager:
                whole = flip(root, path)
                run.restore(manager, None)
                run.same(run.state, run.truth[1])
                if path.endswith(("zarr.json", "_CHECKPOINT_METADATA")):
                    (root / path).write_bytes(whole)  # which no restore reads
                if step != "1" and "/dense/" in path:
                    (root / path).write_bytes(whole)  # nor these of older steps
                assert (root / path).read_bytes() == whole
                manager.verify()
    assert cnr.verify(root) == ()


@each_of("step", [1, None])
def test_what_was_noted_as_damaged_is_listed_once_it_is_mended(
    tiny_run: Any, tmp_path: Path, step: int | None
) -> None:
    run, root = tiny_run(), tmp_path / f"root{step}"
    with run.open(root, mirror=tmp_path / f"far{step}") as manager:
        run.run(manager, range(2))
        caught_up(manager)
        flip(root, next(f for f in files_of(root, "1") if "/rows.p" in f))
        assert manager.verify() and manager.latest_step() == 0
        run.restore(manager, step)
        assert manager.latest_step() == 1 and manager.all_steps() == [0, 1]


@mostly_on_disk
def test_a_single_writer_saves_after_its_mirror_has_mended_a_step(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    options = {"mirror": str(far), "single_writer": True, "policy": cnr.Full()}
    with run.open(root, **options) as manager:
        run.run(manager, range(2))
        caught_up(manager)
        flip(root, files_of(root, "1")[0])
        run.restore(manager, 1)
        run.run(manager, [2, 3])
        assert manager.latest_step() == 3


@each_of("step", [0, 2])
def test_what_was_found_damaged_before_is_mended(
    tiny_run: Any, tmp_path: Path, step: int
) -> None:
    """By `verify`, or by a restore when nobody could mend it."""
    root, far = tmp_path / f"root{step}", tmp_path / f"far{step}"
    run = tiny_run()
    with run.open(root, mirror=far) as manager:
        run.run(manager, range(3))
    with run.open(root, mirror=far) as manager:
        path = next(
            f
            for f in files_of(root, str(step))
            if "/rows.p" in f and f.endswith("/c/0")
        )
        whole = flip(root, path)
        assert manager.verify() and manager.latest_step() != 2
        run.restore(manager, None)
        run.same(run.state, run.truth[2])
        assert (root / path).read_bytes() == whole and manager.latest_step() == 2
        flip(root, path)
        shutil.move(far, tmp_path / "away")
        assert manager.verify()
        if step:
            run.restore(manager, None)
            run.same(run.state, run.truth[1])
        shutil.move(tmp_path / "away", far)
        run.restore(manager, None)
        run.same(run.state, run.truth[2])
        run.run(manager, [3])
    assert cnr.verify(root) == () and cnr.verify(far) == ()


def test_a_step_that_is_damaged_in_both_is_passed_over(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    with run.open(root, mirror=far) as manager:
        run.run(manager, range(3))
    path = next(p for p in files_of(root, "2") if "/c/" in p)
    with run.open(root, mirror=far) as manager:
        flip(root, path)
        flip(far, path)
        run.restore(manager, None)
        run.same(run.state, run.truth[1])


def test_saves_go_on_after_a_step_that_is_damaged_in_both(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    with run.open(root, mirror=far) as manager:
        run.run(manager, range(2))
        caught_up(manager)
        path = next(p for p in files_of(root, "1") if "/c/" in p)
        flip(root, path)
        flip(far, path)
        run.restore(manager, None)
        run.run(manager, [2])
        run.run(manager, [3])
        assert steps_in(root)[-2:] == ["2", "3"]


def test_a_root_that_is_full_is_told_from_a_mirror_that_is_away(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    with run.open(root, {"max_to_keep": 1}, policy=cnr.Full(), mirror=far) as manager:
        for step in range(2):
            run.run(manager, [step])
            caught_up(manager)
        full = Fault("open", action="ENOSPC", times=0, match="0.orbax")
        with inprocess.failing(root, full):
            with pytest.raises(errors.RootError, match="cannot be filled") as raised:
                run.restore(manager, 0)
        assert raised.value.path == str(root)
        for call, match in [("scandir", ""), ("open_read", "/c/")]:
            away = Fault(call, action="EMFILE", times=0, match=match)
            with case_of(call), inprocess.failing(far, away):
                with pytest.raises(errors.RootError, match="cannot be read") as raised:
                    run.restore(manager, 0)
                assert raised.value.path == str(far)
        run.run(manager, [2])
        run.restore(manager, 0)
        run.same(run.state, run.truth[0])
    assert not [each for each in names_in(epath.Path(root)) if "tmp" in each]


def test_a_mirror_in_a_bucket_that_is_not_there(
    tiny_run: Any, root: Path, s3: str
) -> None:
    run = tiny_run()
    with run.open(root) as manager:
        run.run(manager, [0])
    with pytest.raises(errors.RootError, match=r"NoSuchBucket(?s:.*)hint: make the"):
        cnr.mirror(root, "s3://nowhere/run")
    with pytest.raises(errors.RootError, match="NoSuchBucket"):
        cnr.mirror("s3://nowhere/run", root)


def test_a_copy_that_ends_with_an_error_keeps_nobody_from_the_mirror(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root) as manager:
        run.run(manager, [0])

    def follows(_: object) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cnr.mirror(root, far, follows=follows)
    assert names.WRITER not in names_in(far)


def test_a_mirror_that_cannot_be_listed_is_the_problem(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    with run.open(root) as manager:
        run.run(manager, [0])
    cnr.mirror(root, far)
    with inprocess.failing(far, Fault("scandir", action="EIO", times=0)):
        (problem,) = cnr.mirror(root, far).problems
    assert "Input/output error" in problem


def test_repair_mends_each_by_the_other(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        run.run(manager, range(3))
    held = {step: files_of(root, step) for step in "012"}
    rng = random.Random(3)
    before = {
        path: (root / path).read_bytes() for each in held.values() for path in each
    }
    for number, path in enumerate(sorted(before)):
        place = (root, far)[number % 2]
        if rng.random() < 0.5 and "_CHECKPOINT" not in path:
            flip(place, path)
        else:
            store_of(epath.Path(place)).remove_file(epath.Path(place) / path)
    assert harm(root) and harm(far)
    with pytest.raises(errors.WriterError, match="nothing was mended"):
        cnr.mirror(root, str(far), repair=True)
    report = cnr.mirror(root, str(far), repair=True, writer_is_dead=True)
    assert report.problems == () and len(report.mended) == len(before)
    for path, whole in before.items():
        for place in (epath.Path(root), far):
            assert store_of(place).read(place / path) == whole, path
    assert cnr.verify(root) == cnr.verify(far) == ()
    with run.open(root) as manager:
        for step in range(3):
            run.check(manager, step)


@mostly_on_disk
def test_repair_brings_back_what_others_rest_on(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        run.run(manager, range(4))
    shutil.rmtree(root / "1")
    assert store_of(far).remove_tree(far / "2") == []
    report = cnr.mirror(root, str(far), repair=True, writer_is_dead=True)
    assert report.problems == () and len(report.mended) == 2
    assert cnr.verify(root) == cnr.verify(far) == ()


@mostly_on_disk
def test_a_damaged_file_stops_its_own_chain_only(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root, policy=cnr.Consecutive(max_chain=2)) as manager:
        run.run(manager, range(6))
        kinds = [run.manifest(manager, step).kind for step in range(6)]
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"], kinds
    path = next(p for p in files_of(root, "1") if "/c/" in p)
    whole = flip(root, path)
    report = cnr.mirror(root, str(far))
    assert steps_in(far) == ["0", "3", "4", "5"]
    (problem,) = report.problems
    assert path in problem and report.lag_steps == 2
    assert cnr.verify(far) == ()
    (root / path).write_bytes(whole)
    assert cnr.mirror(root, str(far)).copied_steps == 2
    assert cnr.verify(far) == () and len(steps_in(far)) == 6


def test_the_mirror_goes_back_with_the_run(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        run.run(manager, range(4))
        caught_up(manager)
    left = run.truth[2]
    with run.open(root, mirror=str(far)) as manager:
        run.restore(manager, 1)
        run.salt = 1
        run.run(manager, [2])
        caught_up(manager)
        assert manager.mirror_report.problems == ()
    with run.open(str(far)) as manager:
        assert manager.latest_step() == 2 and manager.all_steps() == [0, 1, 2]
        run.check(manager, None)
        assert any((left[k] != run.truth[2][k]).any() for k in left)
    assert harm(far) == []


def test_retention_of_its_own(tiny_run: Any, root: Path, far: epath.Path) -> None:
    run, policy = tiny_run(), cnr.Consecutive(max_chain=1)
    with run.open(root, policy=policy, mirror=str(far), mirror_keep=1) as manager:
        for step in range(6):
            run.run(manager, [step])
            caught_up(manager)
        until(lambda: steps_in(far) == ["4", "5"])
        until(lambda: manager.mirror_report.removed_steps == 4)
        assert len(steps_in(root)) == 6
    assert cnr.verify(far) == ()
    fresh = far.parent / "fresh"
    report = cnr.mirror(root, str(fresh), keep=1)
    assert report.copied_steps == 2 and steps_in(fresh) == ["4", "5"]


def test_no_copy_rests_on_a_step_whose_removal_is_cut_short(
    tiny_run: Any, root: Path, bucket: epath.Path
) -> None:
    """The run goes back to a step that the mirror, which keeps fewer, has begun to remove."""
    run, far = tiny_run(), bucket / "far"
    with run.open(root, mirror=str(far), mirror_keep=1) as manager:
        run.run(manager, [0])
        caught_up(manager)
        away = Fault("unlink", action="EIO", times=0, match="/far/0/")
        with inprocess.failing(str(far), away) as refused:
            run.train(1)
            manager.save(1, args=cnr.args.Save(run.state, run.touched, full=True))
            until(lambda: refused and not is_committed(far / "0"))
        run.restore(manager, 0)
        run.run(manager, [2])
        assert manager.last_report.parent == 0
        caught_up(manager)
    assert harm(far) == []
    with run.open(str(far)) as manager:
        run.check(manager, 2)


def test_what_a_rollback_set_aside_goes_with_other_steps(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run, policy = tiny_run(), cnr.Full()
    with run.open(root, policy=policy, mirror=str(far), mirror_keep=3) as manager:
        run.run(manager, [0, 1, 2])
        caught_up(manager)
        run.restore(manager, 1)
        run.run(manager, [2, 3, 4, 5])
        caught_up(manager)
        until(lambda: steps_in(far) == ["3", "4", "5"])
    assert aside_in(far) == []
    assert aside_in(epath.Path(root)) != [], "there all steps stay"
    assert harm(far) == []


def aside_in(root: epath.Path) -> list[str]:
    return [name for name in names_in(root) if names.abandoned_step(name)]


@mostly_on_disk
def test_steps_that_the_run_saves_are_no_surprise_to_its_mirror(
    tiny_run: Any, root: Path, far: epath.Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far), mirror_keep=1) as manager:
        for step in range(4):
            run.run(manager, [step])
            caught_up(manager)
    assert not [each for each in caplog.messages if "has appeared" in each]


def test_what_may_be_of_others_does_not_make_way_for_a_copy(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    """A step of plain Orbax, and one that cannot be read where nothing tells of which run."""
    run = tiny_run()
    with run.open(root) as manager:
        run.run(manager, range(2))
    theirs, damaged = tmp_path / "orbax", tmp_path / "damaged"
    with ocp.CheckpointManager(theirs) as plain:
        plain.save(0, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with tiny_run(salt=1).open(damaged) as manager:
        other = tiny_run(salt=1)
        other.run(manager, [0])
    (damaged / "0/default" / names.MANIFEST).write_bytes(b"")
    for far in (theirs, damaged):
        before = sorted(path for path in far.rglob("*") if path.is_file())
        with case_of(far.name):
            report = cnr.mirror(root, far)
            assert report.copied_steps == 0
            assert "its name is taken" in str(report.problems)
        after = {path for path in far.rglob("*") if path.is_file()}
        assert after >= {*before} - {damaged / names.WRITER}, far
    assert ocp.CheckpointManager(theirs).all_steps() == [0]


@each_of("steps", [1, 3])
def test_a_full_step_whose_manifest_is_gone_is_healed_on_either_side(
    tiny_run: Any, tmp_path: Path, steps: int
) -> None:
    """Also where it is the only step: what is left of it tells whose it is."""
    root, far = tmp_path / f"root{steps}", tmp_path / f"far{steps}"
    run = tiny_run()
    with run.open(root, mirror=far) as manager:
        run.run(manager, range(steps))
    (far / "0/default" / names.MANIFEST).write_bytes(b"")
    assert cnr.mirror(root, far).problems == () and cnr.verify(far) == ()
    (root / "0/default" / names.MANIFEST).write_bytes(b"")
    with run.open(root, mirror=far) as manager:
        assert manager.latest_step() == steps - 1
        run.check(manager, None)
    assert cnr.verify(root) == ()


def test_repair_leaves_steps_of_another_run(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    runs, others = [tiny_run(salt=salt) for salt in (0, 1)], (1, 2)
    with runs[0].open(root) as manager:
        runs[0].run(manager, [0])
    for steps in others:
        far = tmp_path / f"far{steps}"
        other = tiny_run(salt=1)
        with other.open(far) as manager:
            other.run(manager, range(steps))
        (far / "0/default" / names.MANIFEST).write_bytes(b"")
        before = {p: p.read_bytes() for p in (far / "0").rglob("*") if p.is_file()}
        told: Any = {"repair": True, "writer_is_dead": True}
        with case_of(steps), contextlib.suppress(errors.UsedRootError):
            assert cnr.mirror(root, far, **told).copied_steps == 0
        after = {p: p.read_bytes() for p in (far / "0").rglob("*") if p.is_file()}
        assert after == before, steps


def test_a_step_of_plain_orbax_beside_those_of_the_run_stays(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    with run.open(root) as manager:
        run.run(manager, range(2))
    cnr.mirror(root, far)
    shutil.rmtree(far / "1")
    with ocp.CheckpointManager(tmp_path / "plain") as plain:
        plain.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
    shutil.copytree(tmp_path / "plain/1", far / "1")
    report = cnr.mirror(root, far)
    assert "its name is taken" in str(report.problems)
    assert not (far / "1/default" / names.MANIFEST).exists()


@mostly_on_disk
def test_a_step_of_another_root_is_no_mirror(
    tiny_run: Any, root: Path, far: epath.Path, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(str(far)) as manager:
        run.run(manager, [0])
    run = tiny_run(salt=1)
    with run.open(root) as manager:
        run.run(manager, [0])
    with pytest.raises(errors.OptionError, match="is a step of the root"):
        cnr.mirror(root, str(far / "0"))
    with pytest.raises(errors.OptionError, match="is a step of the root"):
        cnr.mirror(root, str(far / "0"), repair=True, writer_is_dead=True)
    with pytest.raises(errors.OptionError, match="is a step of the root"):
        run.open(root, mirror=str(far / "0"))
    assert steps_in(far) == ["0"] and harm(far) == []
    assert names.WRITER not in store_of(far).names_in(far / "0")


@mostly_on_disk
def test_the_mirror_keeps_as_many_fulls_as_the_root(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run, policy = tiny_run(), cnr.Consecutive(max_chain=1)
    options = {"policy": policy, "min_fulls": 2, "mirror_keep": 1}
    with run.open(root, mirror=str(far), **options) as manager:
        for step in range(7):
            run.run(manager, [step])
            caught_up(manager)
        kinds = [run.manifest(manager, step).kind for step in range(7)]
        fulls = [str(step) for step, kind in enumerate(kinds) if kind == "full"]
        until(lambda: set(steps_in(far)) == {*fulls[-2:], "6"})
        removed = 7 - len(steps_in(far))
        until(lambda: manager.mirror_report.removed_steps == removed)
    shutil.rmtree(far) if can(far).renames else store_of(far).remove_tree(far)
    with run.open(root, mirror=str(far), **options) as manager:
        until(lambda: set(steps_in(far)) == {*fulls[-2:], "6"})
        caught_up(manager)
        assert manager.mirror_report.removed_steps == 0, "none comes in vain"
    assert harm(far) == []


def test_steps_that_leave_the_root_first_are_skipped_and_reported(
    tiny_run: Any, root: Path, tmp_path: Path, copying: Gate
) -> None:
    run, far = tiny_run(), tmp_path / "far"
    copying.shut()
    with run.open(root, {"max_to_keep": 1}, policy=cnr.Full(), mirror=far) as manager:
        run.run(manager, [0])
        assert copying.reached.wait(60)  # before the step leaves the root
        run.run(manager, range(1, 5))
        assert steps_in(root) == ["4"]
        assert manager.mirror_report.lag_steps == 5
        copying.open()
        caught_up(manager)
        until(lambda: len(manager.mirror_report.skipped_steps) >= 4)
        assert sorted(manager.mirror_report.skipped_steps) == [0, 1, 2, 3]
    assert steps_in(far) == ["4"] and cnr.verify(far) == ()


def test_a_mirror_that_retention_races_holds_whole_chains_only(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run, policy = tiny_run(), cnr.Consecutive(max_chain=2)
    with run.open(
        root, {"max_to_keep": 2}, policy=policy, mirror=str(far), mirror_keep=3
    ) as manager:
        run.run(manager, range(12))
    assert "11" in steps_in(far) and harm(far) == []
    shutil.rmtree(root)
    with run.open(root, mirror=str(far)) as manager:
        run.restore(manager, None)
        run.same(run.state, run.truth[11])


@mostly_on_disk
def test_items_of_others_come_along(tiny_run: Any, root: Path, far: epath.Path) -> None:
    run = tiny_run()

    def open_() -> cnr.CheckpointManager:
        options = cnr.Options(codec="raw", mirror=str(far))
        return cnr.CheckpointManager(
            root, tables=run.tables, options=options, item="model"
        )

    with open_() as manager:
        run.train(0)
        items = ocp.args.Composite(
            model=cnr.args.Save(run.state, run.touched),
            meta=ocp.args.JsonSave({"epoch": 3}),
        )
        manager.save(0, args=items)
        run.truth[0] = run.values()
    shutil.rmtree(root)
    with open_() as manager:
        asked = ocp.args.Composite(
            model=cnr.args.Restore(run.state), meta=ocp.args.JsonRestore()
        )
        got = manager.restore(None, args=asked)
        run.same(got.model.state, run.truth[0])
        assert got.meta == {"epoch": 3}


def test_the_item_of_the_manager_is_copied(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far = tiny_run(), tmp_path / "far"

    def save(manager: Any, step: int) -> None:
        run.train(step)
        state = cnr.args.Save(run.state, run.touched)
        manager.save(step, args=ocp.args.Composite(model=state))
        manager.wait_until_finished()

    told: Any = {"tables": run.tables, "item": "model"}
    with cnr.CheckpointManager(root, **told) as manager:
        save(manager, 0)
    shutil.copytree(root / "0/model", root / "0/another")
    (root / "0" / names.ORBAX_METADATA).unlink()
    options = cnr.Options(mirror=far)
    with cnr.CheckpointManager(root, options=options, **told) as manager:
        asked = ocp.args.Composite(model=cnr.args.Restore(run.state))
        run.state, run.touched = manager.restore(None, args=asked).model
        save(manager, 1)
        caught_up(manager)
        assert steps_in(far) == ["0", "1"]


@mostly_on_disk
def test_a_step_that_the_root_let_go_of_is_restored_by_its_number(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    options = {"policy": cnr.Consecutive(max_chain=1), "mirror": str(far)}
    with run.open(root, {"max_to_keep": 1}, **options) as manager:
        for step in range(6):
            run.run(manager, [step])
            caught_up(manager)
        assert "1" not in steps_in(root) and "1" in steps_in(far)
        run.restore(manager, 1)
        run.same(run.state, run.truth[1])
        run.salt = 5
        run.run(manager, [2])
        caught_up(manager)
        assert manager.mirror_report.problems == ()
        assert manager.latest_step() == 2
    with run.open(str(far)) as manager:
        assert manager.latest_step() == 2
        run.check(manager, None)


# ---- who else is there ----------------------------------------------------------------------


def test_of_two_mirrors_into_one_place_the_first_is_told(
    tiny_run: Any, root: Path, far: epath.Path, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(root, mirror=str(far)) as manager:
        run.run(manager, [0])
        caught_up(manager)
        shutil.copytree(root, tmp_path / "copy")
        with run.open(tmp_path / "copy", mirror=str(far)) as second:
            run.restore(second, None)
            run.run(second, [1])
            caught_up(second)
            run.run(manager, [1])
            until(lambda: manager.mirror_report.problems)
            assert "taken over" in manager.mirror_report.problems[0]
            run.run(manager, [2])
            assert manager.last_report.mirror_problem


@pytest.mark.parametrize("step", [0, 5])
def test_of_two_runs_that_find_a_mirror_empty_one_copies_there(
    tiny_run: Any,
    root: Path,
    far: epath.Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    """Whatever the steps of the other are called."""
    run, other = tiny_run(), tiny_run(salt=1)
    with run.open(root) as manager, other.open(tmp_path / "other") as second:
        run.run(manager, [0])
        other.run(second, [step])
        one, two = (Mirror(epath.Path(m.directory), far) for m in (manager, second))
        found = two._copier.lacking

        def lacking(*how: Any) -> Any:
            one.catch_up()
            return found(*how)

        monkeypatch.setattr(two._copier, "lacking", lacking)
        assert "another run" in two.catch_up().problems[0]
        assert isinstance(two.lost, errors.UsedRootError) and one.lost is None
        run.run(manager, [1])
        report = one.catch_up()
        assert (report.problems, report.copied_steps) == ((), 2)
        for each in (one, two):
            each.close(0)
    assert steps_in(far) == ["0", "1"]
    run.check(manager, None)
    assert cnr.verify(far) == ()


@mostly_on_disk
def test_a_mirror_of_another_run_is_left_alone(
    tiny_run: Any, root: Path, far: epath.Path, tmp_path: Path
) -> None:
    run, other = tiny_run(), tiny_run(salt=1)
    with other.open(tmp_path / "other", mirror=str(far)) as manager:
        other.run(manager, range(2))
    with run.open(root) as manager:
        run.run(manager, [0])
    with pytest.raises(errors.UsedRootError, match="another run"):
        cnr.mirror(root, str(far))
    with pytest.raises(errors.UsedRootError, match="another run"):
        run.open(root, mirror=str(far))
    with other.open(str(far)) as manager:
        other.check(manager, None)


@pytest.mark.parametrize("below", ["", "far"])
def test_roots_must_lie_apart(tiny_run: Any, root: Path, below: str) -> None:
    with pytest.raises(errors.OptionError, match="lies in the other"):
        tiny_run().open(root, mirror=root / below)


@pytest.mark.parametrize(
    "options",
    [
        {"mirror": 3},
        {"mirror_keep": 1},
        {"mirror": "far", "mirror_keep": 0},
        {"mirror": "far", "mirror_bytes_per_sec": 0.5},
        {"mirror": "ftp://far"},
        {"near": "near", "mirror": "far"},
        {"near": "near", "near_steps": 0},
        {"near": "near", "new_run": True},
        {"near": "near", "adopt": True},
        {"near_steps": 5},
        {"near": "s3://bucket/near"},
        {"near": "near", "preservation_policy": ocp.checkpoint_managers.LatestN(1)},
    ],
)
def test_options_that_cannot_work(tiny_run: Any, root: Path, options: Any) -> None:
    with pytest.raises(errors.OptionError):
        tiny_run().open(root, **options)


@pytest.mark.parametrize("name", ["mirror", "near"])
def test_a_registry_for_plain_orbax_takes_no_other_roots(
    tiny_run: Any, tmp_path: Path, name: str
) -> None:
    options = cnr.Options(**{name: tmp_path / name})
    with pytest.raises(errors.OptionError, match=f"{name} is"):
        cnr.handler_registry(tiny_run().tables, options)


# ---- mirrors that are slow, or away -----------------------------------------------------------


@pytest.fixture
def proxied(
    s3: str, bucket: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Proxy, str]]:
    """A mirror behind a proxy, and its URL."""
    proxy = Proxy(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy, f"{bucket}/far"
    proxy.close()


def test_a_copy_whose_commit_is_in_doubt_is_looked_for(
    tiny_run: Any, root: Path, proxied: tuple[Proxy, str], impatient: None
) -> None:
    """The answer to its commit is lost, and then the service is away."""
    run, (proxy, url) = tiny_run(), proxied
    with run.open(root) as manager:
        run.run(manager, range(3))
    mirror, puts, away = Mirror(root, open_root(url)), list[str](), list[bool]()

    def harm(kind: str, path: str, _: int) -> Any:
        if kind == "PUT" and path.endswith(f"/1/{names.ATTEMPT}"):
            puts.append(path)
            if len(puts) == 2:
                away.append(True)
                return "drop"
        return 503 if away else None

    proxy.harm = harm
    assert mirror.catch_up().problems
    proxy.harm = lambda *_: None
    assert mirror.catch_up().problems == () and mirror.lost is None
    assert steps_in(url) == ["0", "1", "2"] and cnr.verify(url) == ()
    mirror.close(1)


def test_a_mirror_that_has_lost_its_target_commits_no_copy(
    tiny_run: Any, root: Path, bucket: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one has begun on the same step, and then removed what that rests on."""
    run, gate, publish = tiny_run(), Gate(), ConditionalCommitter.publish
    far, copy_all = bucket / "far", copier_module.copy_files

    def late(self: Any, attempt: Any, *told: Any) -> None:
        if attempt.directory == "2":
            monkeypatch.setattr(ConditionalCommitter, "publish", publish)
            gate.passes()
        publish(self, attempt, *told)

    def fails(source: Any, *told: Any, **kwargs: Any) -> Any:
        if source.name == "2":
            raise OSError("away")
        return copy_all(source, *told, **kwargs)

    monkeypatch.setattr(ConditionalCommitter, "publish", late)
    with run.open(root) as manager, ThreadPoolExecutor(1) as pool:
        run.run(manager, range(3))
        first, second = Mirror(root, far), Mirror(root, far, keep=1)
        gate.shut()
        copied = pool.submit(first.catch_up)
        assert gate.reached.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(copier_module, "copy_files", fails)
            assert second.catch_up().problems
        run.train(3)
        full = cnr.args.Save(run.state, run.touched, full=True)
        assert manager.save(3, args=full)
        manager.wait_until_finished()
        assert second.catch_up().problems == () and steps_in(far) == ["2", "3"]
        gate.open()
        assert copied.result().problems and first.lost is not None
        first.close(1)
        second.close(1)
    assert harm(far) == []


def test_a_slow_mirror_holds_no_save_up_and_is_warned_of_once(
    tiny_run: Any,
    root: Path,
    proxied: tuple[Proxy, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, (proxy, url), answers = tiny_run(), proxied, threading.Event()
    with run.open(root, mirror=url, timeout_secs=1) as manager:
        run.run(manager, [0])
        caught_up(manager)
        proxy.harm = lambda *_: None if answers.wait(50) else 500
        with caplog.at_level(logging.WARNING):
            run.run(manager, range(1, 9))
        assert proxy.harmed == 0, "no save has waited for it"
        assert manager.last_report.mirror_lag_steps == 8
        falls = [r.getMessage() for r in caplog.records if "falls behind" in r.msg]
        assert len(falls) == 1 and "steps of" in falls[0]
    answers.set()
    with run.open(root, mirror=url) as manager:
        until(lambda: manager.mirror_report.copied_steps >= 7)
    assert cnr.verify(url) == () and len(steps_in(url)) == 9


def test_a_mirror_gets_no_more_bytes_in_a_second_than_its_manager_is_told(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, far, limit = tiny_run(), tmp_path / "far", 10_000
    with run.open(root, mirror=far, mirror_bytes_per_sec=limit) as manager:
        run.run(manager, [0, 1, 2])
    sizes = [(root / f).stat().st_size for s in "012" for f in files_of(root, s)]
    # What is written first is paid for before.
    least = 0.8 * (sum(sizes) - max(sizes)) / limit
    assert secs_of_copy(far) >= least >= 1
    assert steps_in(far) == ["0", "1", "2"] and cnr.verify(far) == ()


def secs_of_copy(root: Path) -> float:
    """Seconds from the first to the last file that was written in the steps of a root."""
    files = [root / path for step in steps_in(root) for path in files_of(root, step)]
    found = [path.stat().st_mtime for path in files]
    return max(found) - min(found)


def test_a_mirror_that_is_away_hides_no_steps(
    tiny_run: Any, root: Path, proxied: tuple[Proxy, str]
) -> None:
    run, (proxy, url) = tiny_run(), proxied
    with run.open(root, mirror=url) as manager:
        run.run(manager, range(2))
    proxy.harm = lambda *_: 403
    with run.open(root, mirror=url) as manager:
        run.restore(manager, None)
        run.run(manager, [2])
        until(lambda: manager.mirror_report.problems)
        assert manager.last_report.kind == "delta"
    shutil.rmtree(root)
    with pytest.raises(errors.RootError, match="cannot be read"):
        run.open(root, mirror=url)
    proxy.harm = lambda *_: None
    with run.open(root, mirror=url) as manager:
        assert manager.latest_step() == 1, "the last one could not be copied"


@contextlib.contextmanager
def started(
    root: Any, *, salt: int = 1, saves: int = 0, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A program that saves until it is killed, which it is in the end; or so often."""
    found = [str(PROGRAM.parents[1]), *filter(None, sys.path)]
    own = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),
        "PYTHONPATH": os.pathsep.join(found),
    }
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, (root, repr(options), salt, saves))],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 0


def line_of(program: subprocess.Popen[str], word: str) -> str:
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(f"no {word!r}, ended with {program.wait()}")


def test_a_copy_that_is_killed_goes_on_where_it_was(
    root: Path, proxied: tuple[Proxy, str]
) -> None:
    kill_a_copy(root, *proxied, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_of("seed", range(1, 11))
def test_a_copy_that_is_killed_anywhere_goes_on_where_it_was(
    tmp_path: Path, proxied: tuple[Proxy, str], seed: int
) -> None:
    proxy, url = proxied
    kill_a_copy(tmp_path / f"root{seed}", proxy, f"{url}{seed}", seed)


def kill_a_copy(root: Path, proxy: Proxy, url: str, seed: int) -> None:
    """No file of a step that has arrived is put again, whenever the copy was ended."""
    rng = random.Random(seed)
    count = rng.randrange(1, 14)  # files of a step: seven or more
    with started(root, saves=3, mirror=url, mirror_bytes_per_sec=30_000) as program:
        line_of(program, "ready")
        while len(files_put(proxy, url)) < count:
            assert program.poll() is None
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
    until(lambda: not proxy._under_way)
    before, begin = files_put(proxy, url), len(proxy.log)
    arrived = {path for path in before if exists(epath.Path(url) / path)}
    assert len(before) - len(arrived) <= 4, "which were on their way"
    report = cnr.mirror(root, url)
    assert report.problems == () and report.lag_steps == 0
    after = files_put(proxy, url, begin)
    assert not arrived.intersection(after), (before, after)
    assert len(after) == len({*after})
    assert steps_in(url) == steps_in(root) and cnr.verify(url) == ()


def files_put(proxy: Proxy, url: str, begin: int = 0) -> list[str]:
    """Paths of files of steps that were put into a root; not of claims, catalogues and commits."""
    below = f"/{url.removeprefix('s3://')}/"
    put = [path for kind, path in proxy.log[begin:] if kind == "PUT"]
    found = [path.removeprefix(below) for path in put if path.startswith(below)]
    return [path for path in found if "/" in path and not path.endswith(names.MARKERS)]


@mostly_on_disk
def test_the_mirror_has_what_is_reported_when_the_root_is_lost(
    root: Path, far: epath.Path
) -> None:
    for seed in range(2):
        with started(root, mirror=str(far)) as program:
            if seed:
                line_of(program, "restored")
            line_of(program, "ready")
            step, lag, left = 0, 1, random.Random(seed).randrange(1, 4)
            while left > 0 or lag > step:
                _, step, _, lag = map(_number, line_of(program, "saved").split())
                left -= 1
            if not seed:
                with pytest.raises(errors.WriterError, match="nothing was copied"):
                    cnr.mirror(root, far)
        shutil.rmtree(root)
        assert harm(far) == []
        newest = cnr.describe(str(far)).latest_step
        assert newest is not None and newest >= step - lag


# ---- the command ------------------------------------------------------------------------------


@mostly_on_disk
def test_the_command_copies_and_mends(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root) as manager:
        run.run(manager, range(3))
    result = CliRunner().invoke(app, ["mirror", str(root), str(far), "--keep", "2"])
    assert result.exit_code == 0 and "3 steps copied" in result.output
    path = next(p for p in files_of(root, "1") if "/c/" in p)
    flip(far, path)
    words = ["mirror", str(root), str(far), "--repair", "--writer-is-dead"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "mended" in result.output
    assert cnr.verify(far) == ()
    result = CliRunner().invoke(app, ["mirror", str(root), str(far), "--json"])
    assert result.exit_code == 0 and '"copied_steps": 0' in result.output
    flip(far, path)
    flip(root, path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 3 and "not done: step 1" in result.output
