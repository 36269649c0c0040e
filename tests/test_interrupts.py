"""Interrupts (Ctrl-C) at any moment of a call: the manager goes on, and no row is lost.

By default at some moments of each call, evenly spread; at all of them under the marker `slow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import future

import cnr_jax as cnr
from cnr_jax.errors import CnrError, SaveError
from cnr_jax.testing.faults import Call, Fault
from cnr_jax.testing.inprocess import failing, watching
from cnr_jax.testing.interrupts import Interrupt, interrupting

from .conftest import case_of

pytestmark = [
    pytest.mark.usefixtures("interruptible"),
    # What Orbax leaves behind when it is interrupted.
    pytest.mark.filterwarnings(
        "ignore:coroutine .* was never awaited:RuntimeWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ),
]
SAMPLES = 4
OWN_THREADS = "cnr_write_rows", "cnr_begin_save", "cnr_save", "cnr_report"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    gc.collect()


def save(run: Any, manager: Any) -> None:
    run.save(manager, 2)


def wait(run: Any, manager: Any) -> None:
    run.save(manager, 2)
    manager.wait_until_finished()


def restore(run: Any, manager: Any) -> None:
    run.restore(manager, 1)


def close(run: Any, manager: Any) -> None:
    run.save(manager, 2)
    manager.close()


CALLS = [save, wait, restore, close]


def play(run: Any, root: Path, call: Callable[..., None], nth: int) -> Interrupt:
    """Interrupts one call of a run, goes on, and looks at all that it has saved."""

    def open_() -> Any:
        keeps = {"max_to_keep": 2} if nth % 2 else None
        return run.open(root, keeps, max_in_flight=1 + nth % 3)

    manager = open_()
    run.run(manager, [0])
    run.train(1)
    run.save(manager, 1)
    if call is restore:
        manager.wait_until_finished()
    run.train(2)
    if call is not restore:
        run.truth[2] = run.values()
    try:
        with interrupting(nth) as interrupt:
            call(run, manager)
    except KeyboardInterrupt:
        pass
    if call is close:
        manager.close()
        manager = open_()
        run.restore(manager, None)
    for step in (3, 4, 5):
        run.train(step)
        try:
            saved = run.save(manager, step)
        except CnrError:  # of the interrupted save, or what it has left: once
            saved = run.save(manager, step)
        assert saved, f"step {step} is due"
    manager.wait_until_finished()
    assert manager.failure is None and manager.last_report.step == 5
    listed = manager.all_steps()
    manager.close()
    with cnr.CheckpointManager(root, tables=run.tables) as reader:
        assert reader.all_steps() == listed and {4, 5} <= set(listed)
        assert nth % 2 or {0, 1, 3} <= set(listed)
        for step in listed:
            restored = reader.restore(step, args=cnr.args.Restore(run.state))
            run.same(restored.state, run.truth[step])
    assert cnr.verify(root) == ()
    export_in_a_thread(root, 5, root.parent / "exported")
    wait_for_threads()
    return interrupt


def export_in_a_thread(root: Path, step: int, to: Path) -> None:
    """Exports, which begins a save of Orbax's; what interrupted ones held must be free."""
    thread = threading.Thread(target=cnr.export, args=(root, step, to), daemon=True)
    thread.start()
    thread.join(120)
    assert (to / "_METADATA").exists(), (
        "an interrupted save keeps others from beginning"
    )
    shutil.rmtree(to)


class InterruptedHandler(ocp.AsyncCheckpointHandler):
    """Interrupted by Ctrl-C while its item is saved, of which a part is being written."""

    def __init__(self) -> None:
        self.written = threading.Event()

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        async def write() -> None:
            time.sleep(0.2)
            (directory / "late").write_text("")
            self.written.set()

        await asyncio.sleep(0)
        part = future.CommitFutureAwaitingContractedSignals(write(), name="late")
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return [part]

    def save(self, directory: Any, args: Any) -> None:
        raise NotImplementedError

    def restore(self, directory: Any, args: Any = None) -> None:
        raise NotImplementedError


@ocp.args.register_with_handler(InterruptedHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class InterruptedItem(ocp.args.CheckpointArgs):
    pass


def test_errors_of_an_interrupted_save_are_not_those_of_the_next(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, saved = tiny_run(), [1, 3]
    with run.open(tmp_path / "root") as manager:
        for step in (1, 2, 3):
            run.train(step)
            run.truth[step] = run.values()
            items = {"default": cnr.args.Save(run.state, run.touched)}
            if step == 2:
                items["other"] = InterruptedItem()
                with pytest.raises(KeyboardInterrupt):
                    manager.save(step, args=ocp.args.Composite(**items))
                # It had begun by then, or not.
                manager.wait_until_finished()
                saved = [*manager.all_steps(), 3]
                continue
            assert manager.save(step, args=ocp.args.Composite(**items))
            manager.wait_until_finished()
        assert manager.all_steps() == saved
        run.check(manager, 3)


def wait_for_threads() -> None:
    """None is left of a manager that is closed: a program would never end."""
    end = time.monotonic() + 20
    while left := [t for t in threading.enumerate() if t.name.startswith(OWN_THREADS)]:
        assert time.monotonic() < end, left
        time.sleep(0.005)


@pytest.mark.parametrize(
    "call",
    [
        save,
        restore,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (wait, close)),
    ],
)
def test_after_an_interrupt_the_manager_goes_on(
    tiny_run: Any, tmp_path: Path, call: Callable[..., None]
) -> None:
    moments = play(tiny_run(), tmp_path / "none", call, 1 << 30).moments
    assert moments > SAMPLES
    # By an odd number: `play` retains all steps or few, as the moment is even or odd.
    for nth in range(1, moments, moments // SAMPLES | 1):
        with case_of(nth):
            play(tiny_run(), tmp_path / str(nth), call, nth)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("call", CALLS)
def test_after_an_interrupt_at_any_moment_the_manager_goes_on(
    tiny_run: Any, tmp_path: Path, call: Callable[..., None]
) -> None:
    nth = 1
    while True:
        with case_of(nth):
            interrupt = play(tiny_run(), tmp_path / str(nth), call, nth)
        if not interrupt.where:
            return
        nth += 1


def test_an_interrupt_while_a_failure_is_noted_does_not_hide_it(
    tiny_run: Any, tmp_path: Path, unsynced: None
) -> None:
    """Told once, by the wait that was interrupted or the next; and what is due stays right."""
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [0])
    nth, step, raised = 1, 0, False
    while not raised:
        for fails in (True, False):
            step += 1
            run.train(step)
            fault = Fault("rename", action="EIO", match=f"{step}.orbax")
            with failing(tmp_path, fault) if fails else contextlib.nullcontext():
                run.save(manager, step)
                while manager.is_saving_in_progress():
                    time.sleep(0.001)
            told = list[str]()
            with contextlib.suppress(KeyboardInterrupt), noting(told):
                with interrupting(nth) as interrupt:
                    manager.wait_until_finished()
            # From here on the failure is on its way out, and the interrupt takes its place.
            raised = raised or "_raise_failure, c_return" in interrupt.where
            out = ("_raise_failure, return", "Saves.wait, return", "finished, return")
            raised = raised or (fails and interrupt.where.endswith(out))
            raised = raised or (fails and not interrupt.where)
            for _ in range(2):
                with noting(told):
                    manager.wait_until_finished()
            assert len(told) == fails or raised, f"{nth}: {interrupt.where}"
            assert manager.should_save(step) == fails, f"{nth}: {interrupt.where}"
        nth += 23  # a wait has some 15 moments more each time, as there are more steps
    manager.close()
    assert nth > 100


class HangingHandler(InterruptedHandler):
    """Waits for what never comes while its item is saved."""

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        await asyncio.sleep(60)
        raise AssertionError("waited for what never comes")


@ocp.args.register_with_handler(HangingHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class HangingItem(ocp.args.CheckpointArgs):
    pass


def test_an_interrupt_before_other_items_are_staged_keeps_them_from_hanging(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = cnr.CheckpointManager(tmp_path, tables=run.tables, item="state")
    run.train(0)
    state = cnr.args.Save(run.state, run.touched)

    def interrupt(call: Call) -> None:
        if call.call == "mkdir" and manager._saves.pipeline._beginning._why is None:
            signal.raise_signal(signal.SIGINT)
            # Who waits is told of it before the folders are there.
            while manager._saves.pipeline._beginning._why is None:
                time.sleep(0.001)

    started = time.monotonic()
    with watching(tmp_path, before=interrupt), pytest.raises(KeyboardInterrupt):
        manager.save(0, args=ocp.args.Composite(other=HangingItem(), state=state))
    assert time.monotonic() - started < 30
    assert manager.save(0, args=ocp.args.Composite(state=state))
    manager.wait_until_finished()
    assert manager.all_steps() == [0]
    manager.close()


@contextlib.contextmanager
def noting(told: list[str]) -> Iterator[None]:
    """Notes which error of a save is raised."""
    try:
        yield
    except SaveError as error:
        told.append(str(error))
