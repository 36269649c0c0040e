"""Reports of saves and restores by table and phase, and the file of metrics in a root."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.errors import OptionError

METRICS = "cnr_jax.metrics.jsonl"
PHASES = ["find_secs", "gather_secs", "encode_secs", "write_secs", "commit_secs"]


def make_state() -> dict[str, Any]:
    """Two tables, of which one has slots of its own shape, as optax's optimizers keep them."""
    keys = jax.random.split(jax.random.key(0), 4)
    user = jax.random.normal(keys[0], (400, 16))
    return {
        "params": {
            "user": user,
            "item": jax.random.normal(keys[1], (100, 8)),
            "w": jnp.ones(5),
        },
        "opt": {
            "sum_of_squares": {"user": jax.random.uniform(keys[2], user.shape) + 0.01},
            "mu": {"user": jax.random.normal(keys[3], user.shape)},
            "last_seen": {"user": jnp.arange(400.0) - 7},
        },
    }


def changed(state: Any, touched: Any, ids: dict[str, list[int]]) -> tuple[Any, Any]:
    """The state with some rows moved, which are recorded."""
    params = dict(state["params"])
    for name, rows in ids.items():
        params[name] = params[name].at[np.array(rows, np.int32)].add(1.0)
    recorded = {name: jnp.array(rows, jnp.int32) for name, rows in ids.items()}
    return {**state, "params": params}, cnr.record(touched, recorded)


class Run:
    """A full save, a delta, a restore of the latter: what managers and the file tell of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        state = make_state()
        tables = cnr.find_tables(state, ["user", "item"])
        touched = cnr.init_touched(state, tables)
        heard: dict[str, float] = {}
        options = cnr.Options(bits=4, metrics=True)

        listeners: Any = jax.monitoring

        def listen(name: str, value: float, **facts: Any) -> None:
            heard[name] = value

        listeners.register_scalar_listener(listen)
        listeners.register_event_duration_secs_listener(listen)
        try:
            with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
                assert manager.last_restore is None
                self.reports = []
                for step in (0, 1):
                    ids = {"user": [1, 2, 5], "item": []} if step else {}
                    state, touched = changed(state, touched, ids)
                    manager.save(step, args=cnr.args.Save(state, touched))
                    manager.wait_until_finished()
                    assert manager.last_report is not None
                    self.reports.append(manager.last_report)
                self.restored = manager.restore(None, args=cnr.args.Restore(state))
                assert manager.last_restore is self.restored.report
        finally:
            listeners.unregister_scalar_listener(listen)
            listeners.unregister_event_duration_listener(listen)
        self.state, self.heard = state, heard


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("metrics"))


def off(rows: Any, read: Any) -> np.ndarray:
    rows, read = (np.asarray(x, np.float64) for x in (rows, read))
    return np.linalg.norm(rows - read, axis=1) / np.linalg.norm(rows, axis=1)


def test_a_report_tells_of_each_table(run: Run) -> None:
    full, delta = run.reports
    for report, rows in ((full, {"user": 400, "item": 100}), (delta, {"user": 3})):
        assert {t.name: t.saved_rows for t in report.tables if t.saved_rows} == rows
        assert sum(table.saved_rows for table in report.tables) == report.rows
        parts = [table.table_bytes + table.slot_bytes for table in report.tables]
        # Checksums, metadata and what fills chunks up are of no table.
        assert 0 < sum(parts) <= report.table_bytes + report.slot_bytes
    user = next(table for table in delta.tables if table.name == "user")
    assert user.saved_share == 3 / 400
    # Rows of the delta are restored as it holds them.
    read = run.restored.state["params"]["user"]
    errors = off(run.state["params"]["user"], read)[[1, 2, 5]]
    assert user.sample_rows == 3
    assert user.mean_row_error == pytest.approx(errors.mean(), rel=1e-4)
    assert user.worst_row_error == pytest.approx(errors.max(), rel=1e-4)
    # What describe reads of the manifests is the same.
    described = {s.step: s for s in cnr.describe(run.root).steps}
    assert described[0].tables == full.tables and described[1].tables == delta.tables


def test_a_report_tells_of_each_phase(run: Run) -> None:
    for report in run.reports:
        secs = {phase: getattr(report, phase) for phase in PHASES}
        assert all(each >= 0 for each in secs.values())
        assert report.find_secs > 0 and report.gather_secs > 0
        assert report.write_secs > 0 and report.commit_secs > 0
        assert report.find_secs + report.gather_secs <= report.blocking_secs
        assert report.find_secs >= report.fingerprint_secs


def test_a_restore_tells_what_it_read_and_how_far_off_rows_are(run: Run) -> None:
    report = run.restored.report
    assert (report.step, report.kind, report.chain) == (1, "delta", (0, 1))
    assert report.passed_over == () and report.run == run.reports[0].run
    assert 0 < report.rows_secs < report.total_secs
    parts = report.open_secs + report.rows_secs + report.dense_secs
    assert 0 < parts <= report.total_secs
    steps = [*run.root.glob("[01]/default/rows.*/*/c/*")]
    rows_bytes = sum(path.stat().st_size for path in steps)
    # Neither of a parent, nor what is for other readers.
    dense = [*run.root.glob("1/default/dense/*/c/*")]
    dense_bytes = sum(path.stat().st_size for path in dense)
    assert 0 < dense_bytes < run.reports[1].dense_bytes
    listed = [*run.root.glob("[01]/default/manifest.p*.json")]
    manifest_bytes = sum(path.stat().st_size for path in listed)
    assert report.bytes_read == rows_bytes + dense_bytes + manifest_bytes
    full, delta = ({t.name: t for t in each.tables} for each in run.reports)
    user, item = (
        next(t for t in report.tables if t.name == n) for n in ("user", "item")
    )
    assert (user.rows, user.sample_rows) == (400, 403)
    assert user.worst_row_error == max(
        full["user"].worst_row_error or 0, delta["user"].worst_row_error or 0
    )
    assert (item.rows, item.mean_row_error) == (100, full["item"].mean_row_error)
    text = str(report)
    assert text.startswith("step 1 restored: chain 0, 1, ") and "\n" not in text
    assert "rows rounded by" in text


def test_a_save_that_is_larger_than_a_plain_one_says_so(run: Run) -> None:
    report = run.reports[0]
    for state_bytes, said in ((3, "3.0x smaller"), (1, "1.0x smaller")):
        same = dataclasses.replace(report, state_bytes=state_bytes * report.total_bytes)
        assert f"({said})" in str(same)
    half = dataclasses.replace(report, state_bytes=report.total_bytes // 2)
    assert "(2.0x larger)" in str(half) and "smaller" not in str(half)


def test_reports_are_values_of_json(run: Run) -> None:
    for report in (*run.reports, run.restored.report):
        document = report.asdict()
        assert json.loads(json.dumps(document)) == document
        assert "\n" not in str(report)
    scalars = run.reports[1].scalars()
    assert all(type(value) in (int, float) for value in scalars.values())
    assert scalars["rows"] == 3 and scalars["tables/user/saved_share"] == 3 / 400
    assert scalars["reduction"] == run.reports[1].reduction and "step" not in scalars
    assert run.restored.report.scalars()["chain_length"] == 2
    document = run.reports[1].asdict()
    assert document["total_bytes"] == run.reports[1].total_bytes
    assert document["reduction"] == run.reports[1].reduction
    assert document["tables"][0]["saved_share"] == run.reports[1].tables[0].saved_share


def test_jax_monitoring_hears_of_phases_and_restores(run: Run) -> None:
    report, restored = run.reports[-1], run.restored.report
    for phase in PHASES:
        name = f"/cnr_jax/save/{phase.removesuffix('_secs')}_duration_secs"
        assert run.heard[name] == getattr(report, phase)
    assert run.heard["/cnr_jax/save/mean_row_error"] == report.mean_row_error
    assert run.heard["/cnr_jax/restore/bytes_read"] == restored.bytes_read
    assert run.heard["/cnr_jax/restore/chain_length"] == 2
    assert run.heard["/cnr_jax/restore/duration_secs"] == restored.total_secs
    # As Orbax calls it, for its exporters.
    assert run.heard["/jax/orbax/read/total_duration_secs"] == restored.total_secs
    blocking = report.blocking_secs - report.wait_secs
    assert run.heard["/jax/orbax/write/blocking_duration_secs"] == blocking
    total = report.total_secs + report.commit_secs
    assert run.heard["/jax/orbax/write/total_duration_secs"] == total


# ---- the file of metrics --------------------------------------------------------------------


def test_the_file_has_a_line_for_each_save_and_restore(run: Run) -> None:
    lines = cnr.read_metrics(run.root)
    assert [(each["event"], each["step"]) for each in lines] == [
        ("save", 0),
        ("save", 1),
        ("restore", 1),
    ]
    for line, report in zip(lines, (*run.reports, run.restored.report), strict=True):
        known = report.asdict()
        for table in known["tables"]:
            table.pop("leaves", None)
        assert line.pop("written_at_unix_secs") > 1e9
        assert line == {"event": line["event"], **known}
    # It is no part of a checkpoint, and nobody's step.
    assert cnr.verify(run.root) == ()
    assert [step.step for step in cnr.describe(run.root).steps] == [0, 1]


def test_what_a_killed_program_left_of_a_line_is_passed_over(tmp_path: Path) -> None:
    state = {"user": jnp.zeros((8, 4))}
    tables = cnr.find_tables(state, ["user"])

    def save(step: int) -> None:
        options = cnr.Options(codec="raw", metrics=True)
        with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
            if step:
                manager.restore(None, args=cnr.args.Restore(state))
            manager.save(step, args=cnr.args.Save(state))

    save(0)
    whole = (tmp_path / METRICS).read_bytes()
    assert whole.count(b"\n") == 1
    for end in (1, len(whole) // 2, len(whole) - 2):
        (tmp_path / METRICS).write_bytes(whole + whole[:end])
        assert [line["step"] for line in cnr.read_metrics(tmp_path)] == [0]
    save(1)
    found = [(line["event"], line["step"]) for line in cnr.read_metrics(tmp_path)]
    assert found == [("save", 0), ("restore", 0), ("save", 1)]
    assert (tmp_path / METRICS).read_bytes().startswith(whole + whole[:-2] + b"\n{")


def test_steps_that_are_passed_over_and_a_new_run_are_told_apart(
    tmp_path: Path,
) -> None:
    state = {"user": jnp.ones((8, 4))}
    tables, raw = cnr.find_tables(state, ["user"]), {"codec": "raw", "metrics": True}
    options = cnr.Options(policy=cnr.Full(), **raw)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in (0, 1):
            manager.save(step, args=cnr.args.Save(state))
    (chunk,) = tmp_path.glob("1/default/rows.*/raw.rows.float32/c/0")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        restored = manager.restore(None, args=cnr.args.Restore(state))
        assert (restored.report.step, restored.report.passed_over) == (0, (1,))
        assert str(restored.report).endswith("; passed over 1")
    anew = cnr.Options(new_run=True, **raw)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=anew) as manager:
        manager.save(0, args=cnr.args.Save(state))
    lines = cnr.read_metrics(tmp_path)
    assert [line["event"] for line in lines] == ["save", "save", "restore", "save"]
    first, second, restore, other = (line["run"] for line in lines)
    assert first == second == restore != other
    assert lines[2]["passed_over"] == [1]


def test_without_the_option_and_from_readers_nothing_is_written(
    run: Run, tmp_path: Path
) -> None:
    before = (run.root / METRICS).read_bytes()
    with cnr.CheckpointManager(run.root, options=cnr.Options(metrics=True)) as reader:
        restored = reader.restore(0)
        assert reader.last_restore is restored.report
        assert restored.report.chain == (0,)
    only = ocp.CheckpointManagerOptions(read_only=True)
    tables = cnr.find_tables(run.state, ["user", "item"])
    with cnr.CheckpointManager(
        run.root,
        tables=tables,
        options=cnr.Options(metrics=True),
        orbax_options=only,
    ) as reader:
        reader.restore(1, args=cnr.args.Restore(run.state))
    with cnr.CheckpointManager(
        tmp_path / "other", tables=tables, options=cnr.Options(metrics=True)
    ) as other:
        other.restore(1, args=cnr.args.Restore(run.state), directory=run.root)
        assert other.last_restore is not None
    assert (run.root / METRICS).read_bytes() == before
    assert not (tmp_path / "other" / METRICS).exists()
    state = {"user": jnp.zeros((8, 4))}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path / "new", tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    assert cnr.read_metrics(tmp_path / "new") == []
    assert not (tmp_path / "new" / METRICS).exists()


def test_metrics_that_cannot_be_kept_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"metrics is 'x\.jsonl', expected True or"):
        cnr.Options(metrics="x.jsonl")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        OptionError, match=r"metrics cannot be kept in gs://(?s:.*)on_save="
    ):
        cnr.CheckpointManager("gs://bucket/run", options=cnr.Options(metrics=True))
    with pytest.raises(cnr.errors.NoStepError, match="no folder"):
        cnr.read_metrics(tmp_path / "none")
    (tmp_path / "cnr_jax.metrics.jsonl").mkdir()
    with pytest.raises(cnr.errors.IntegrityError, match="is not a file"):
        cnr.read_metrics(tmp_path)


def test_a_file_that_cannot_be_written_costs_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / METRICS).mkdir()
    state = {"user": jnp.zeros((8, 4))}
    tables = cnr.find_tables(state, ["user"])
    heard: list[int] = []
    options = cnr.Options(
        metrics=True, on_save=lambda report: heard.append(report.step)
    )
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        assert manager.save(0, args=cnr.args.Save(state))
    assert heard == [0] and cnr.describe(tmp_path).latest_step == 0
    assert "the report of step 0 was not delivered" in caplog.text
    with pytest.raises(cnr.errors.IntegrityError, match="is not a file"):
        cnr.read_metrics(tmp_path)


# ---- slots ----------------------------------------------------------------------------------


def test_exact_slots_that_are_most_of_a_delta_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cnr_jax")
    state = make_state()
    ids = {"user": list(range(0, 400, 2))}
    kept: dict[str, Any] = {}
    for slot_codec in ("raw", "auto"):
        tables = cnr.find_tables(state, ["user", "item"])
        touched = cnr.init_touched(state, tables)
        options = cnr.Options(codec="raw", slot_codec=slot_codec)
        reports: list[cnr.SaveReport] = []
        root, now = tmp_path / slot_codec, state
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            for step in range(3):
                manager.save(step, args=cnr.args.Save(now, touched))
                manager.wait_until_finished()
                assert manager.last_report is not None
                reports.append(manager.last_report)
                now, touched = changed(now, touched, ids)
            restored = manager.restore(0, args=cnr.args.Restore(state)).state
        kept[slot_codec] = reports
        hints = [r.message for r in caplog.records if "slot_codec='auto'" in r.message]
        assert len(hints) == 1, "of the first delta that is so, and of no other manager"
    exact, auto = kept["raw"][1], kept["auto"][1]
    # 33 elements of slots in each of 200 rows, and 16 of the table.
    assert exact.exact_slot_bytes == 200 * 33 * 4
    assert "of its bytes are optimizer slots that are stored exactly" in exact.hint
    assert exact.asdict()["hint"] == exact.hint
    assert auto.hint == "" and auto.exact_slot_bytes == 200 * 4
    user = next(table for table in auto.tables if table.name == "user")
    codecs = {leaf.name.rpartition("/")[2]: leaf.codecs for leaf in user.leaves}
    assert codecs["sum_of_squares"] == ("log 16 bits",)
    assert codecs["mu"] == ("adaptive 8 bits",)
    assert codecs["last_seen"] == ("raw",)
    opt, want = restored["opt"], state["opt"]
    squares = np.asarray(opt["sum_of_squares"]["user"] / want["sum_of_squares"]["user"])
    assert 0 < np.abs(squares - 1).max() < 0.0016
    assert 0 < off(want["mu"]["user"], opt["mu"]["user"]).max() < 0.01
    assert np.array_equal(opt["last_seen"]["user"], want["last_seen"]["user"])


# ---- dashboards -----------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_reads_what_the_guide_says_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    reader: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    guide = Path(__file__).parents[1] / "docs" / "guides" / "metrics.md"
    (code,) = re.findall(
        r"```python\n(from tensorboardX.*?)```", guide.read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"cnr": cnr}
    exec(code, given)
    state = make_state()
    tables, reports = cnr.find_tables(state, ["user", "item"]), list[cnr.SaveReport]()
    with cnr.CheckpointManager(
        tmp_path / "run", tables=tables, options=given["options"]
    ) as manager:
        for step in (3, 8):
            manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            assert manager.last_report is not None
            reports.append(manager.last_report)
    given["writer"].close()
    found = reader.EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    # A delta has a parent, which a full save lacks.
    wanted = {name for report in reports for name in report.scalars()}
    assert set(found.Tags()["scalars"]) == {f"checkpoint/{name}" for name in wanted}
    for name in wanted:
        got = [(e.step, e.value) for e in found.Scalars(f"checkpoint/{name}")]
        numbers = [(report.step, report.scalars().get(name)) for report in reports]
        told = [
            (step, pytest.approx(x, rel=1e-6)) for step, x in numbers if x is not None
        ]
        assert got == told
