"""One manager in many hands: threads, signal handlers and callbacks of the user."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.checkpointer.orbax_compat.places import beginning
from cnr_jax.checkpointer.saving import dense
from cnr_jax.errors import CallError, CnrError
from cnr_jax.testing.inprocess import watching

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def in_threads(*works: Callable[[], Any]) -> list[BaseException]:
    """Runs all at once; returns what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    return errors


def test_every_save_of_two_threads_that_returns_true_is_a_step(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, saved, reports = tiny_run(), list[int](), list[int]()
    run.train(0)
    args, truth = cnr.args.Save(run.state, run.touched), run.values()
    manager = run.open(tmp_path, on_save=lambda report: reports.append(report.step))

    def saves(steps: range) -> None:
        for step in steps:
            # Forced: whichever thread comes later, its step may be the smaller one.
            if manager.save(step, args=args, force=True):
                saved.append(step)

    errors = in_threads(lambda: saves(range(0, 12, 2)), lambda: saves(range(1, 12, 2)))
    manager.wait_until_finished()
    assert errors == []
    assert sorted(saved) == list(range(12))
    assert manager.all_steps() == sorted(saved)
    assert reports == saved, "in the order in which they were made"
    for step in saved:
        run.check(manager, step, {step: truth})
    manager.close()


def test_all_calls_of_many_threads_are_served_one_after_the_other(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [0])
    args, saved = cnr.args.Save(run.state, run.touched), [0]

    def save() -> None:
        for step in range(1, 7):
            # A restore by another thread ends the lineage: then the save is a full one.
            assert manager.save(step, args=args, force=True)
            saved.append(step)

    def restore() -> None:
        for _ in range(3):
            restored = manager.restore(0, args=cnr.args.Restore(run.state))
            run.same(restored.state, run.truth[0])

    def look() -> None:
        for _ in range(20):
            steps = manager.all_steps()
            assert set(steps) <= set(range(7)) and 0 in steps
            assert manager.latest_step() is not None
            manager.wait_until_finished()
            manager.check_for_errors()

    assert in_threads(save, restore, look, look) == []
    manager.wait_until_finished()
    assert set(manager.all_steps()) == set(saved) == set(range(7))
    manager.close()


def test_closing_waits_for_the_save_of_another_thread(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.train(1)
    with storage.held() as gate:

        def close() -> None:
            assert gate.reached.wait(60)
            threading.Timer(0.2, gate.open).start()
            manager.close()

        assert in_threads(lambda: run.save(manager, 1), close) == []
    assert not list(tmp_path.glob("*tmp"))
    run.check(manager, 1)


# ---- the same thread, in the middle of a call -----------------------------------------------


@contextlib.contextmanager
def handling(handler: Callable[[], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def signalled(work: Any) -> Any:
    """The same work, in the middle of which a signal comes."""

    def worked(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return work(*args, **kwargs)

    return worked


def test_a_signal_handler_that_saves_in_the_middle_of_a_save_is_told_so(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [1])
    calls: list[Callable[[], Any]] = [
        lambda: run.save(manager, 9, force=True),
        lambda: manager.restore(1),
        lambda: manager.delete(1),
        manager.close,
    ]
    told: list[str] = []

    def handler() -> None:
        for call in calls:
            with pytest.raises(CallError) as caught:
                call()
            told.append(caught.value.kind)

    with handling(handler), monkeypatch.context() as patch:
        patch.setattr(dense, "bytes_of", signalled(dense.bytes_of))
        run.train(2)
        assert run.save(manager, 2)
    assert told == ["nested"] * len(calls)
    run.run(manager, [3])
    assert manager.all_steps() == [1, 2, 3]
    run.check(manager, 2)
    run.check(manager, 3)
    manager.close()


def test_a_signal_handler_that_only_asks_harms_no_save(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = tiny_run(), list[Any]()
    manager = run.open(tmp_path)
    run.run(manager, [1])

    def handler() -> None:
        manager.wait_until_finished()
        manager.check_for_errors()
        found.append((manager.latest_step(), manager.all_steps()))

    with handling(handler), monkeypatch.context() as patch:
        patch.setattr(dense, "bytes_of", signalled(dense.bytes_of))
        run.train(2)
        assert run.save(manager, 2)
    manager.wait_until_finished()
    assert found == [(1, [1])], "one that is being written does not count"
    assert manager.all_steps() == [1, 2]
    run.check(manager, 2)
    manager.close()


def test_a_call_that_is_refused_leaves_the_next_ones_alone(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    for bad in (lambda: manager.save(-1, args=None), lambda: manager.restore(5)):
        with pytest.raises((CnrError, ValueError, TypeError)):
            bad()
    run.run(manager, [1])
    run.check(manager, 1)
    manager.close()


def test_a_callback_of_orbax_may_ask_for_steps_while_a_save_waits_for_it(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, found = tiny_run(), list[Any]()

    def asks() -> None:
        found.append((manager.latest_step(), manager.all_steps()))

    given = ocp.AsyncOptions(post_finalization_callback=asks)
    manager = cnr.CheckpointManager(
        tmp_path,
        tables=run.tables,
        options=cnr.Options(codec="raw", policy=cnr.Consecutive()),
        orbax_options=ocp.CheckpointManagerOptions(async_options=given),
    )
    for step in range(4):  # back to back: each waits for the one before
        run.train(step)
        assert run.save(manager, step)
    manager.wait_until_finished()
    assert [latest for latest, _ in found] == [None, 0, 1, 2]
    assert manager.all_steps() == [0, 1, 2, 3]
    manager.close()


def test_a_save_whose_thread_cannot_be_started_is_committed_by_its_call(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in flight: an error of the call would be of a save that is committed later."""
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [0])
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("cnr_save_"):
            raise RuntimeError("can't start new thread")
        start(thread)

    run.train(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert run.save(manager, 1)
        manager.wait_until_finished()
    assert manager.all_steps() == [0, 1] and manager.failure is None
    run.run(manager, [2])
    run.check(manager, 2)
    manager.close()


def of_two_handlers(asks: Callable[[], None], where: str) -> Any:
    """Arguments of an item whose handler asks where it saves, or where it ends that."""

    class Handler(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any = None) -> None:
            if where == "handler":
                asks()

        def restore(self, directory: Any, args: Any = None) -> Any: ...

        def finalize(self, directory: Any) -> None:
            if where == "finalize":
                asks()

    class Arguments(ocp.args.CheckpointArgs): ...

    ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)(Arguments)
    return Arguments()


@pytest.mark.parametrize("where", ["callback", "policy", "handler", "finalize"])
def test_what_a_save_waits_for_is_told_that_it_cannot_call(
    where: str, tiny_run: Any, tmp_path: Path
) -> None:
    run, told = tiny_run(), list[str]()

    def asks() -> None:
        given = cnr.args.Save(run.state, run.touched)
        for call in (
            lambda: manager.save(9, args=given),
            lambda: manager.restore(0),
            lambda: manager.delete(0),
            lambda: manager.verify(),
            lambda: manager.all_steps(read=True),
            lambda: manager.close(),
        ):
            with pytest.raises(CallError, match="a save of the same manager waits for"):
                call()
        told.append(where)

    class Policy:
        def should_preserve(self, steps: Any, *, context: Any) -> list[bool]:
            if where == "policy":
                asks()
            return [True] * len(steps)

    callback = asks if where == "callback" else None
    manager = cnr.CheckpointManager(
        tmp_path,
        tables=run.tables,
        options=cnr.Options(codec="raw", policy=cnr.Consecutive()),
        orbax_options=ocp.CheckpointManagerOptions(
            async_options=ocp.AsyncOptions(post_finalization_callback=callback),
            preservation_policy=Policy(),
        ),
        item="state",
    )
    other = of_two_handlers(asks, where)
    for step in range(2):
        run.train(step)
        state = cnr.args.Save(run.state, run.touched)
        args = ocp.args.Composite(state=state, other=other)
        errors = in_threads(
            lambda step=step, args=args: manager.save(step, args=args),
            manager.wait_until_finished,
        )
        assert not errors
        manager.wait_until_finished()
    assert told == [where] * 2
    assert manager.all_steps() == [0, 1]
    manager.close()


def test_saves_and_exports_begin_in_any_threads(
    tiny_run: Any, tmp_path: Path, unsynced: None
) -> None:
    told, saves = list[int](), range(1, 12)
    run = tiny_run()
    run.train(0)
    args, truth = cnr.args.Save(run.state, run.touched), run.values()
    source = run.open(tmp_path / "source")
    source.save(0, args=args)
    source.close()

    def on_save(report: cnr.SaveReport) -> None:
        cnr.export(tmp_path / "source", 0, tmp_path / f"told-{report.step}")
        told.append(report.step)

    managers = [
        run.open(tmp_path / "a", on_save=on_save),
        run.open(tmp_path / "b"),
        run.open(tmp_path / "c", {"enable_async_checkpointing": False}),
    ]

    def save(manager: cnr.CheckpointManager) -> None:
        for step in saves:
            manager.save(step, args=args, force=True)
        manager.wait_until_finished()

    def export(name: str) -> None:
        for number in range(6):
            cnr.export(tmp_path / "source", 0, tmp_path / f"{name}-{number}")

    works = [lambda m=manager: save(m) for manager in managers]
    works += [lambda n=name: export(n) for name in ("x", "y", "z")]
    assert in_threads(*works) == []
    assert told == list(saves)
    for manager in managers:
        assert manager.all_steps() == list(saves)
        run.check(manager, saves[-1], {saves[-1]: truth})
        manager.close()
    folders = [*tmp_path.glob("[xyz]-*"), *tmp_path.glob("told-*")]
    assert len(folders) == 3 * 6 + len(saves)
    with ocp.StandardCheckpointer() as checkpointer:
        for folder in folders:
            run.same(checkpointer.restore(folder, run.state), truth)


@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning"
)
def test_a_forked_child_is_told_that_it_cannot_save_rather_than_hanging(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(tmp_path / "root") as manager:
        run.run(manager, [1])
        args, here = cnr.args.Save(run.state, run.touched), os.getpid()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(
                20
            )  # ends a child that waits for a thread that it does not have
            for call in (
                lambda: manager.save(2, args=args),
                lambda: manager.restore(1),
                manager.wait_until_finished,
                manager.check_for_errors,
                manager.reload,
            ):
                try:
                    call()
                except CallError as error:
                    os.write(tell, f"{error.kind}: {error}\n\n".encode())
            manager.close()
            os.write(tell, b"closed")
            os._exit(0)
        os.close(tell)
        with open(told) as file:
            *errors, end = file.read().split("\n\n")
        assert os.waitpid(child, 0)[1] == 0 and end == "closed" and len(errors) == 5
        assert all(each.startswith("forked: ") for each in errors)
        assert f"expected process {here}" in errors[0] and "spawn" in errors[0]
        run.run(manager, [2])
        run.check(manager, 2)


@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning"
)
def test_a_fork_in_the_middle_of_a_beginning_leaves_the_child_free_to_begin() -> None:
    may_end, is_held = threading.Event(), threading.Event()

    def hold() -> None:
        with beginning():
            is_held.set()
            may_end.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(120)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for a thread that it does not have
        with beginning():
            os._exit(0)
    _, status = os.waitpid(child, 0)
    may_end.set()
    holder.join()
    assert status == 0


@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning"
)
def test_a_child_forked_during_a_save_asks_for_steps_and_does_not_wait(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, inside, go_on = tiny_run(), threading.Event(), threading.Event()
    with run.open(tmp_path / "root") as manager:
        run.run(manager, [1])
        run.train(2)

        def hold(call: Any) -> None:
            if call.call == "mkdir":
                inside.set()
                go_on.wait(60)

        with watching(tmp_path / "root", before=hold):
            saver = threading.Thread(target=run.save, args=(manager, 2))
            saver.start()
            assert inside.wait(60)
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends a child that waits for ever
                steps, is_saving = manager.all_steps(), manager.is_saving_in_progress()
                try:
                    manager.check_for_errors()
                except CallError as error:
                    told = error.kind
                else:
                    told = None
                seen = (steps, is_saving, told)
                os._exit(0 if seen == ([1], False, "forked") else 1)
            ended = os.waitpid(child, 0)[1]
            go_on.set()
            saver.join()
        manager.wait_until_finished()
        assert ended == 0 and manager.all_steps() == [1, 2]
