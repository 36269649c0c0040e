"""What becomes of a save is known as soon as it is: reports, failures, and who hears of them."""

from __future__ import annotations

import errno
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.errors import CallError, SaveError
from cnr_jax.testing.faults import Call, Fault
from cnr_jax.testing.inprocess import failing, watching

from .conftest import each_of

# Orbax leaves coroutines behind when a save fails.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def until(found: Callable[[], Any]) -> Any:
    """What becomes true without a call of a manager."""
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.01)
    return found()


def step_of(report: cnr.SaveReport | None) -> int:
    return -1 if report is None else report.step


# ---- what is counted ------------------------------------------------------------------------


@each_of(
    ("ids", "where", "saved"),
    [
        ([3, 5, -1, -1], [True, True, False, False], [3, 5]),
        ([3, 5, 40, 40], [True, True, False, False], [3, 5]),
        # As indexing takes them: row 39, twice.
        ([3, 5, -1, 40], None, [3, 5, 39]),
    ],
)
def test_padding_of_ids_counts_only_where_it_is_not_masked(
    tmp_path: Path, ids: list[int], where: list[bool] | None, saved: list[int]
) -> None:
    root = tmp_path / f"{ids} {where}"
    state = {"user": jnp.zeros((40, 4))}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    with cnr.CheckpointManager(root, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
        mask = None if where is None else jnp.array(where)
        looked_up = cnr.Lookup(jnp.array(ids), where=mask)
        touched = cnr.record(touched, {"user": looked_up})
        state = {"user": state["user"].at[jnp.array([3, 5])].add(1.0)}
        manager.save(1, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        report = manager.last_report
    assert report is not None and report.rows == len(saved)
    assert report.tables[0].saved_rows == len(saved)
    assert cnr.changed_rows(root, 1, "user").tolist() == saved


def test_a_step_that_holds_a_padded_table_whole_holds_all_of_it(tmp_path: Path) -> None:
    state = {"user": jnp.zeros((40, 4))}
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(rows=30)})
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
    (table,) = cnr.describe(tmp_path).steps[0].tables
    assert (table.rows, table.saved_rows, table.saved_share) == (30, 40, 1.0)


# ---- as soon as it is known -----------------------------------------------------------------


def test_a_report_comes_while_the_train_loop_calls_nothing(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, reports = tiny_run(), list[cnr.SaveReport]()
    told: list[str] = []

    def listen(name: str, value: float, **facts: Any) -> None:
        if name == "/cnr_jax/save/rows_touched":
            told.append(facts["kind"])

    jax.monitoring.register_scalar_listener(listen)
    caplog.set_level(logging.INFO, logger="cnr_jax")
    try:
        with run.open(tmp_path, on_save=reports.append) as manager:
            for step, kind in enumerate(["full", "delta"]):
                run.train(step)
                assert run.save(manager, step)
                until(lambda step=step: step_of(manager.last_report) == step)
                until(lambda step=step: len(reports) == len(told) == step + 1)
                assert reports[-1] is manager.last_report
                assert reports[-1].kind == told[-1] == kind
                assert str(reports[-1]) in caplog.text
                assert manager.failure is None
    finally:
        jax.monitoring.unregister_scalar_listener(listen)
    assert [report.step for report in reports] == [0, 1]


def test_a_save_that_is_not_in_the_background_is_reported_when_it_returns(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, reports = tiny_run(), list[cnr.SaveReport]()
    manager = cnr.CheckpointManager(
        tmp_path,
        tables=run.tables,
        options=cnr.Options(codec="raw", on_save=reports.append),
        orbax_options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
    )
    run.train(1)
    assert run.save(manager, 1)
    assert step_of(manager.last_report) == 1
    with failing(tmp_path, FAULTS["commit"]):
        run.train(2)
        with pytest.raises(SaveError, match=r"(?s)No space left.*hint: make room"):
            run.save(manager, 2)
    assert manager.failure is not None
    run.run(manager, [3])
    assert manager.failure is None
    assert [report.step for report in reports] == [1, 3]
    run.check(manager, 3)
    manager.close()


FAULTS = {
    "manifest": Fault("open", action="ENOSPC", match="/default/manifest.json"),
    "commit": Fault("rename", action="ENOSPC", match="2.orbax-checkpoint-tmp"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_failure_is_known_without_a_call_and_the_next_one_raises_it(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    run, reports = tiny_run(), list[cnr.SaveReport]()
    manager = run.open(tmp_path, on_save=reports.append)
    run.run(manager, [1])
    with failing(tmp_path, FAULTS[where]):
        run.train(2)
        assert run.save(manager, 2)
        known = until(lambda: manager.failure)
    assert (known.step, known.errno) == (2, errno.ENOSPC)
    # Another thread writes the line, right after it has said so to the manager.
    lines = until(
        lambda: [r.message for r in caplog.records if r.name.startswith("cnr_jax")]
    )
    assert [line for line in lines if "step 2 failed" in line] == lines
    assert len(lines) == 1 and "\n" not in lines[0] and "No space left" in lines[0]
    run.train(3)
    with pytest.raises(SaveError, match="No space left") as caught:
        run.save(manager, 3)
    assert str(caught.value) == str(known)
    manager.wait_until_finished()
    assert manager.failure is not None and str(manager.failure) == str(known)
    assert [report.step for report in reports] == [1]
    assert step_of(manager.last_report) == 1
    run.run(manager, [4])
    assert manager.failure is None
    assert [report.step for report in reports] == [1, 4]
    run.check(manager, 4)
    manager.close()
    lines = [
        r.message
        for r in caplog.records
        if r.name == "cnr_jax.checkpointer.saving.lifecycle"
    ]
    assert len(lines) == 1, "it is told once"


def test_a_commit_that_may_not_be_durable_is_a_report_and_a_failure(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run, reports = tiny_run(), list[cnr.SaveReport]()
    manager = run.open(tmp_path, on_save=reports.append)

    def fail(call: Call) -> None:
        """The step has its name when that is made durable."""
        if call.call == "fsync" and call.path == str(tmp_path):
            if (tmp_path / "1").exists():
                raise OSError(errno.EIO, "Input/output error")

    with watching(tmp_path, before=fail):
        run.train(1)
        assert run.save(manager, 1)
        known = until(lambda: manager.failure)
        assert (known.kind, known.step) == ("after_commit", 1)
        with pytest.raises(SaveError, match="is saved, but") as caught:
            manager.wait_until_finished()
    assert str(caught.value) == str(known)
    assert [report.step for report in reports] == [1]
    run.run(manager, [2])
    assert manager.failure is None
    manager.close()


def test_a_failure_that_is_kept_holds_no_train_state(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)

    def fail_with(big: Any) -> None:
        with failing(tmp_path, FAULTS["commit"]):
            run.train(2)
            run.save(manager, 2)
            until(lambda: manager.failure)
        with pytest.raises(SaveError):
            manager.wait_until_finished()

    class Big:
        """Stands for what the frames of a train loop hold."""

    big = Big()
    held = weakref.ref(big)
    fail_with(big)
    del big
    gc.collect()
    assert manager.failure is not None
    assert held() is None
    manager.close()


def test_under_a_plain_manager_the_next_save_tells(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, reports = tiny_run(), list[cnr.SaveReport]()
    options = cnr.Options(codec="raw", on_save=reports.append)
    registry = cnr.handler_registry(run.tables, options)
    manager = ocp.CheckpointManager(tmp_path, handler_registry=registry)
    run.run(manager, [1, 2, 3])
    assert [report.step for report in reports] == [1, 2]
    manager.close()


@pytest.mark.parametrize("where", FAULTS)
def test_a_failed_save_leaves_one_line_in_the_log_and_no_traceback(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    with failing(tmp_path, FAULTS[where]):
        run.train(2)
        with pytest.raises(SaveError):
            run.run(manager, [2])
    manager.close()
    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and not told[0].exc_info
    assert "the save of step 2 failed; OSError: [Errno 28]" in told[0].message


def test_errors_of_other_managers_are_logged_as_ever(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    with run.open(tmp_path / "a") as manager:
        run.run(manager, [1])
        plain = ocp.CheckpointManager(tmp_path / "b")
        with failing(tmp_path / "b", FAULTS["commit"]):
            plain.save(2, args=ocp.args.StandardSave({"w": run.state["w"]}))
            with pytest.raises(OSError, match="No space left"):
                plain.wait_until_finished()
        plain.close()
    assert [r.name for r in caplog.records if r.exc_info] == ["absl", "absl"]


# ---- who listens ----------------------------------------------------------------------------


def test_a_slow_listener_hears_of_each_save_once_in_order_and_is_waited_for(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, heard = tiny_run(), list[tuple[int, threading.Thread]]()
    go_on = threading.Event()

    def slow(report: cnr.SaveReport) -> None:
        assert go_on.wait(120)
        time.sleep(0.02)
        heard.append((report.step, threading.current_thread()))

    manager = run.open(tmp_path, on_save=slow)
    for step in range(6):
        run.train(step)
        assert run.save(manager, step), "training does not wait for the listener"
    assert heard == []
    go_on.set()
    manager.wait_until_finished()
    assert [step for step, _ in heard] == list(range(6))
    for step in range(6, 9):
        run.train(step)
        assert run.save(manager, step)
    manager.close()
    assert [step for step, _ in heard] == list(range(9))
    (thread,) = {thread for _, thread in heard}
    assert thread is not threading.main_thread() and not thread.is_alive()


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_listener_raises_is_logged_and_harms_nothing(
    tiny_run: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    run, heard = tiny_run(), list[int]()

    def listen(report: cnr.SaveReport) -> None:
        heard.append(report.step)
        if report.step == 1:
            raise error("on purpose")

    with run.open(tmp_path, on_save=listen) as manager:
        run.run(manager, [1, 2])
        assert heard == [1, 2]
        assert "the report of step 1 was not delivered" in caplog.text
        assert "on purpose" in caplog.text
        run.check(manager, 2)


WAITING: dict[str, Callable[[Any, Any], Any]] = {
    "save": lambda manager, run: run.save(manager, 9, force=True),
    "restore": lambda manager, run: run.restore(manager, None),
    "wait_until_finished": lambda manager, run: manager.wait_until_finished(),
    "delete": lambda manager, run: manager.delete(1),
    "verify": lambda manager, run: manager.verify(),
    "reload": lambda manager, run: manager.reload(),
    "close": lambda manager, run: manager.close(),
}


def test_what_would_wait_for_its_listener_raises_there_at_once(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, found = tiny_run(), dict[str, str]()

    def listen(report: cnr.SaveReport) -> None:
        for name, call in WAITING.items():
            with pytest.raises(CallError) as caught:
                call(manager, run)
            found[name] = str(caught.value)
        # What waits for nothing is answered.
        assert manager.latest_step() in (None, 1)
        assert set(manager.all_steps()) <= {1}
        assert manager.last_report is report and manager.failure is None

    with run.open(tmp_path, on_save=listen) as manager:
        run.run(manager, [1])
        assert found.keys() == WAITING.keys()
        for name, text in found.items():
            assert text.startswith(f"{name}() was called inside on_save")
        assert "not delivered" not in caplog.text
        assert run.save(manager, 2, force=True), "nothing is left of it"
        manager.wait_until_finished()
        run.check(manager, 2)


def test_a_listener_may_use_another_manager(tiny_run: Any, tmp_path: Path) -> None:
    run, copies = tiny_run(), list[int]()
    with run.open(tmp_path / "a") as other:

        def copy(report: cnr.SaveReport) -> None:
            run.run(other, [report.step + 100])
            copies.append(report.step)

        with run.open(tmp_path / "b", on_save=copy) as manager:
            run.run(manager, [1])
        assert copies == [1]
        assert other.all_steps() == [101]


def test_a_manager_that_nobody_holds_leaves_no_thread(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, threads = tiny_run(), list[threading.Thread]()
    listen = lambda report: threads.append(threading.current_thread())  # noqa: E731
    manager = run.open(tmp_path, on_save=listen)
    run.run(manager, [1])
    held = weakref.ref(manager)
    del manager
    gc.collect()
    assert held() is None
    threads[0].join(60)
    assert not threads[0].is_alive()


PROGRAM = """
import sys
import time
import jax.numpy as jnp
import cnr_jax as cnr

state = {"user": jnp.zeros((64, 4)), "w": jnp.ones(3)}
tables = cnr.find_tables(state, ["user"])
touched = cnr.init_touched(state, tables)

def listen(report):
    time.sleep(0.3)
    print("heard of", report.step, flush=True)

manager = cnr.CheckpointManager(
    sys.argv[1], tables=tables, options=cnr.Options(on_save=listen)
)
for step in range(3):
    assert manager.save(step, args=cnr.args.Save(state, touched))
while manager.last_report is None or manager.last_report.step < 2:
    time.sleep(0.01)
print("end", flush=True)
"""


def test_a_program_that_ends_without_closing_hears_of_what_is_committed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "root")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines.index("end") < lines.index("heard of 2"), "it was told after the end"
    assert [line for line in lines if "heard" in line] == [
        f"heard of {step}" for step in range(3)
    ]
