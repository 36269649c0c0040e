"""Several saves in flight: commits stay in order, and what rests on a failed save falls with it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.checkpointer.orbax_compat.items import StepItems
from cnr_jax.checkpointer.saving import launch
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.saving.pipeline import SavePipeline
from cnr_jax.checkpointer.saving.retirement import Retirement
from cnr_jax.errors import OptionError, SaveError
from cnr_jax.repository.committer import RenameCommitter
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.parent_rows import ParentRows

from .conftest import PROCESS_MANIFEST, Gate, Keep


class Held:
    """Storage in which the manifests of chosen steps wait, each at a gate of its own."""

    def __init__(self, storage: Any, *steps: int) -> None:
        self.gates = {step: Gate() for step in steps}
        for gate in self.gates.values():
            gate.shut()
        self._calling = storage.calling(self._wait, PROCESS_MANIFEST)

    def _wait(self, call: Any) -> None:
        for step, gate in self.gates.items():
            if f"/{step}." in call.path:
                gate.passes()

    def __enter__(self) -> dict[int, Gate]:
        self._calling.__enter__()
        return self.gates

    def __exit__(self, *error: Any) -> None:
        for gate in self.gates.values():
            gate.open()
        self._calling.__exit__(*error)


def flying(manager: Any) -> list[int]:
    return [save.step for save in manager._saves.pipeline.in_flight()]


def test_three_saves_are_in_flight_and_are_committed_in_order(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run, told = tiny_run(), list[Any]()
    manager = opened(run, max_in_flight=3, on_save=told.append)
    run.run(manager, [1])
    with Held(storage, 2, 3, 4) as gates:
        for step in (2, 3, 4):
            run.train(step)
            assert not manager._saves.pipeline.is_full
            assert run.save(manager, step)
        assert flying(manager) == [2, 3, 4] and manager._saves.pipeline.is_full
        assert manager.is_saving_in_progress() and manager.latest_step() == 1
        for step in (4, 3):
            assert gates[step].reached.wait(30)
            gates[step].open()
        assert manager.all_steps() == [1] and [each.step for each in told] == [1]
        gates[2].open()
        manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3, 4]
    assert [each.step for each in told] == [1, 2, 3, 4]
    assert [each.parent for each in told] == [None, 1, 2, 3]
    histories = [run.manifest(manager, step).history for step in (1, 2, 3, 4)]
    for before, after in itertools.pairwise(histories):
        assert after[:-1] == before, "histories tell of what is committed"
    for step in (1, 2, 3, 4):
        run.check(manager, step)
    assert cnr.verify(manager.directory) == ()


POLICIES = [cnr.Consecutive(), cnr.OneShot(), cnr.Intermittent()]


@pytest.mark.parametrize("failing", [2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_save_that_fails_takes_down_what_rests_on_it_and_the_next_has_its_rows(
    tiny_run: Any, opened: Any, storage: Any, policy: Any, failing: int
) -> None:
    run, told = tiny_run(), list[Any]()
    manager = opened(run, policy=policy, max_in_flight=3, on_save=told.append)
    run.run(manager, [1])
    with Held(storage, 2, 3, 4) as gates:
        for step in (2, 3, 4):
            run.train(step)
            assert run.save(manager, step)
        parents = {step: parent_in_flight(manager, step) for step in (2, 3, 4)}
        gates[failing].open(OSError(28, "no space left"))
        for step in (2, 3, 4):
            gates[step].may_pass.set()
        with pytest.raises(SaveError, match="no space left") as caught:
            manager.wait_until_finished()
    assert caught.value.step == failing
    manager.check_for_errors()
    manager.wait_until_finished()
    fallen = {failing}
    for step, parent in parents.items():
        fallen |= {step} if parent in fallen else set()
    if isinstance(policy, cnr.Consecutive):
        assert fallen == set(range(failing, 5))
    else:
        assert fallen == {failing}, "all rest on the full one"
    assert manager.all_steps() == sorted({1, 2, 3, 4} - fallen)
    assert manager.should_save(4) == (4 in fallen), "the step of a failed save is due"
    run.run(manager, [5, 6])
    assert manager.all_steps() == sorted({1, 2, 3, 4, 5, 6} - fallen)
    assert [each.step for each in told] == manager.all_steps()
    for step in manager.all_steps():
        run.check(manager, step)
    assert cnr.verify(manager.directory) == ()


def parent_in_flight(manager: Any, step: int) -> int | None:
    (save,) = [s for s in manager._saves.pipeline.in_flight() if s.step == step]
    parent = save.plan.parent
    return parent and int(parent.directory)


def test_a_save_that_is_taken_down_while_it_is_staged_falls_with_the_other(
    tiny_run: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staging is cancelled, which is no error of its own, and none that asyncio raises."""
    run, is_staging, has_failed = tiny_run(), threading.Event(), threading.Event()
    real_write, real_start = SavePipeline._write, StepItems._start
    real_fail = SavePipeline._fail

    def write(self: Any, save: Any) -> None:
        if save.step == 2:
            assert is_staging.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_write(self, save)

    def fail(self: Any, save: Any, error: BaseException) -> None:
        real_fail(self, save, error)
        has_failed.set()

    async def start(self: Any, folder: Any, args: Any, begun: Any) -> None:
        await real_start(self, folder, args, begun)
        if Path(folder).parent.name.startswith("3.") or "/3." in str(folder):
            is_staging.set()
            while not has_failed.is_set():
                await asyncio.sleep(0.01)

    manager = opened(run, policy=cnr.Consecutive(), max_in_flight=2)
    run.run(manager, [1])
    monkeypatch.setattr(SavePipeline, "_write", write)
    monkeypatch.setattr(SavePipeline, "_fail", fail)
    monkeypatch.setattr(StepItems, "_start", start)
    for step in (2, 3):
        run.train(step)
        assert run.save(manager, step)
    with pytest.raises(SaveError, match="No space left"):
        manager.wait_until_finished()
    manager.wait_until_finished()
    monkeypatch.undo()
    run.train(4)
    assert run.save(manager, 4)
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 4]
    run.check(manager, 4)


def test_a_failure_is_raised_by_the_next_save_while_others_are_in_flight(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.OneShot(), max_in_flight=3)
    run.run(manager, [1])
    with Held(storage, 2, 3) as gates:
        for step in (2, 3):
            run.train(step)
            assert run.save(manager, step)
        manager.check_for_errors()
        gates[2].open(OSError(28, "no space left"))
        failed = manager._saves.pipeline.in_flight()[0]
        assert failed.thread.wait(30)
        run.train(4)
        with pytest.raises(SaveError, match="no space left"):
            run.save(manager, 4)
        assert flying(manager) == [3]
        run.train(5)
        assert run.save(manager, 5) and flying(manager) == [3, 5]
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 3, 5]
    run.check(manager, 5)


def test_what_rests_on_a_dropped_save_is_dropped_too_and_the_next_is_full(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run, told = tiny_run(), list[Any]()
    manager = opened(run, max_in_flight=3, on_save=told.append)
    run.run(manager, [1])
    with Held(storage, 2, 3) as gates:
        for step in (2, 3):
            run.train(step)
            assert run.save(manager, step)
        for file in Path(manager.directory).glob("1/default/rows.p00000/**/c/0"):
            file.unlink()
        gates[2].open()
        gates[3].open()
        manager.wait_until_finished()
    run.run(manager, [4])
    assert [(each.step, each.outcome) for each in told[1:]] == [
        (2, "dropped"),
        (3, "dropped"),
        (4, "committed"),
    ]
    assert told[-1].kind == "full" and manager.all_steps() == [4]
    run.check(manager, 4)


def test_nothing_is_committed_on_a_step_that_may_not_last(
    tiny_run: Any, opened: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settle = tiny_run(), RenameCommitter.settle

    def failing(committer: Any, attempt: Any) -> None:
        if attempt.directory == "2":
            raise OSError(5, "not synced")
        settle(committer, attempt)

    monkeypatch.setattr(RenameCommitter, "settle", failing)
    manager = opened(run, max_in_flight=3)
    run.run(manager, [1])
    with Held(storage, 2, 3) as gates:
        for step in (2, 3):
            run.train(step)
            assert run.save(manager, step)
        for gate in gates.values():
            gate.open()
        for kind, text in (
            ("after_commit", "not synced"),
            ("save_failed", "step 3 is not saved: the save before may not be durable"),
        ):
            with pytest.raises(SaveError, match=text) as caught:
                manager.wait_until_finished()
            assert caught.value.kind == kind
    run.run(manager, [4])
    assert manager.all_steps() == [1, 2, 4] and manager.last_report.kind == "full"
    run.check(manager, 4)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_retention_keeps_what_saves_in_flight_rest_on_and_ends_as_with_one(
    tiny_run: Any, opened: Any, storage: Any, tmp_path: Path, policy: Any
) -> None:
    left = {}
    for most in (1, 3):
        run, root = tiny_run(), tmp_path / str(most)
        keeps = ocp.checkpoint_managers.LatestN(2)
        manager = opened(
            run, root, policy=policy, max_in_flight=most, preservation_policy=keeps
        )
        run.run(manager, [1])
        for first in (2, 5, 8):
            with Held(storage, *((first,) if most == 3 else ())) as gates:
                for step in range(first, first + 3):
                    run.train(step)
                    assert run.save(manager, step)
                if most == 3:
                    assert flying(manager) == [first, first + 1, first + 2]
                    gates[first].open()
                manager.wait_until_finished()
        left[most] = manager.all_steps()
        for step in left[most]:
            run.check(manager, step)
        assert cnr.verify(root) == ()
        there = [int(path.name) for path in root.iterdir() if path.name.isdigit()]
        assert sorted(there) == left[most]
    if not isinstance(policy, cnr.Intermittent):  # which goes by bytes that it foresees
        assert left[1] == left[3]


def test_what_saves_before_it_have_let_go_of_is_not_missing(
    tiny_run: Any, opened: Any, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each save in flight knows of full steps beside which it was planned."""
    run = tiny_run()
    kept = ocp.checkpoint_managers.LatestN(2)
    manager = opened(run, policy=cnr.Full(), max_in_flight=2, preservation_policy=kept)
    run.run(manager, [1, 2])
    with Held(storage, 3, 4) as gates:
        for step in (3, 4):
            run.train(step)
            assert run.save(manager, step)
        for step in (3, 4):
            gates[step].open()
        manager.wait_until_finished()
    assert manager.all_steps() == [3, 4]
    assert [m for m in caplog.messages if "whole" in m or "any more" in m] == []


def test_only_a_step_that_others_took_is_said_to_be_gone(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.Full())
    run.run(manager, [1, 2, 3])
    root, ledger = Path(manager.directory), manager._listing.ledger
    ledger.doomed["1"] = ledger.entries["3"].uuid
    for step in (1, 2):
        shutil.rmtree(root / str(step))
    caplog.clear()
    ledger.refresh(root, "default")
    assert caplog.messages == ["step 2 is not in the root any more"]
    assert set(ledger.entries) == {"3"}


def test_a_step_stays_as_long_as_a_save_in_flight_rests_on_it(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run, rule = tiny_run(), Keep(*range(9))
    manager = opened(run, max_in_flight=3, preservation_policy=rule)
    run.run(manager, [1])
    with Held(storage, 3) as gates:
        for step in (2, 3):
            run.train(step)
            assert run.save(manager, step)
        rule.steps = set()  # from the commit of 2 on nothing is to stay
        first = manager._saves.pipeline.unnoted()[0]
        assert gates[3].reached.wait(30)
        assert first.thread.wait(30) and first.is_committed
        assert manager.all_steps() == [1, 2]
        rule.steps = {3}
        gates[3].open()
        manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3]
    run.check(manager, 3)


def test_the_last_whole_step_stays_though_another_save_is_planned_before_it_would_go(
    tiny_run: Any, opened: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gate = tiny_run(), Gate()
    settle, remove = RenameCommitter.settle, Retirement.remove
    root = storage.below / "root"

    def harming(committer: Any, attempt: Any) -> None:
        if attempt.directory == "1":
            for file in root.glob("1/default/rows.p00000/**/c/0"):
                file.unlink()
        settle(committer, attempt)

    def waiting(retirement: Any, steps: Any) -> list[int]:
        gate.passes()
        return remove(retirement, steps)

    monkeypatch.setattr(RenameCommitter, "settle", harming)
    monkeypatch.setattr(Retirement, "remove", waiting)
    manager = opened(run, policy=cnr.Full(), max_in_flight=3, max_to_keep=1)
    run.run(manager, [0])
    gate.shut()
    with Held(storage, 2) as gates:
        for step in (1, 2):
            if step == 2:
                assert gate.reached.wait(30), "1 has been looked at"
            run.train(step)
            assert run.save(manager, step)
        first = manager._saves.pipeline.unnoted()[0]
        assert first.step == 1 and not first.is_over
        gate.open()
        assert first.thread.wait(30)
        assert (root / "0").exists()
        assert cnr.verify(root)[0].directory == "1"
        run.check(manager, 0)
        gates[2].open()
        manager.wait_until_finished()
    assert manager.all_steps() == [2] and not (root / "0").exists()
    run.check(manager, 2)


def test_a_save_on_what_another_one_was_first_to_miss_is_no_committed_one(
    tiny_run: Any, opened: Any, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told, gate = tiny_run(), list[Any](), Gate()
    root, look_after = storage.below / "root", Lifecycle.look_after
    settle = RenameCommitter.settle

    def late(lifecycle: Any, flight: Any, *args: Any) -> None:
        if flight.step == 2:
            gate.passes()
        look_after(lifecycle, flight, *args)

    def harming(committer: Any, attempt: Any) -> None:
        if attempt.directory == "3":
            for file in root.glob("1/default/rows.p00000/**/c/0"):
                file.unlink()
            gate.open()
        settle(committer, attempt)

    monkeypatch.setattr(Lifecycle, "look_after", late)
    monkeypatch.setattr(RenameCommitter, "settle", harming)
    manager = opened(run, max_in_flight=3, on_save=told.append)
    run.run(manager, [1])
    gate.shut()
    for step in (2, 3):
        run.train(step)
        assert run.save(manager, step)
    manager.wait_until_finished()
    assert [(each.step, each.outcome) for each in told] == [
        (1, "committed"),
        (2, "dropped"),
        (3, "dropped"),
    ]
    run.run(manager, [4])
    assert manager.last_report.kind == "full"
    run.check(manager, 4)


def test_what_rests_on_a_step_that_goes_is_asked_for_while_no_save_is_planned(
    tiny_run: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked, hidden_by = tiny_run(), list[bool](), Ledger.hidden_by
    manager = opened(run, policy=cnr.Full(), max_in_flight=3, max_to_keep=1)
    looking = manager._saves._writer.looking

    def is_free() -> bool:
        if free := looking.acquire(blocking=False):
            looking.release()
        return free

    def hidden(ledger: Ledger, directory: str) -> list[str]:
        with ThreadPoolExecutor(1) as another:
            asked.append(another.submit(is_free).result())
        return hidden_by(ledger, directory)

    monkeypatch.setattr(Ledger, "hidden_by", hidden)
    run.run(manager, [1, 2])
    assert manager.all_steps() == [2] and asked == [False]


def test_after_a_restore_each_save_that_moves_steps_aside_goes_alone(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run, max_in_flight=3)
    run.run(manager, [1, 2, 3, 4])
    run.restore(manager, 2)
    run.salt = 1
    for step in (3, 4):
        run.train(step)
        assert run.save(manager, step)
        assert flying(manager) in ([step], []), "it has waited for the one before"
    with Held(storage, 5, 6, 7) as gates:
        for step in (5, 6, 7):
            run.train(step)
            assert run.save(manager, step)
        assert flying(manager) == [5, 6, 7]
        for gate in gates.values():
            gate.open()
        manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3, 4, 5, 6, 7]
    assert {run.manifest(manager, step).generation for step in (3, 5, 7)} == {2}
    for step in (1, 2, 3, 4, 5, 6, 7):
        run.check(manager, step)


def test_a_rollback_in_memory_waits_for_the_saves_in_flight(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run, max_in_flight=3)
    run.run(manager, [1])
    kept = run.state, run.touched
    for step in (2, 3):
        run.train(step)
        assert run.save(manager, step)
    run.state, run.touched = kept
    run.salt = 1
    for step in (4, 5, 6):
        run.train(step)
        assert run.save(manager, step)
    manager.wait_until_finished()
    assert run.manifest(manager, 4).parent is None
    assert "went back" in run.manifest(manager, 4).reason
    assert [run.manifest(manager, s).parent.directory for s in (5, 6)] == ["4", "5"]
    for step in manager.all_steps():
        run.check(manager, step)


def test_a_save_without_a_state_goes_alone(
    tiny_run: Any, storage: Any, tmp_path: Path
) -> None:
    run, options = tiny_run(), cnr.Options(codec="raw", max_in_flight=3)
    with cnr.CheckpointManager(
        tmp_path / "root", tables=run.tables, options=options, item="state"
    ) as manager:

        def save(step: int, *, alone: bool) -> None:
            run.train(step)
            items: Any = {"notes": ocp.args.JsonSave({"step": step})}
            if not alone:
                items["state"] = cnr.args.Save(run.state, run.touched)
                run.truth[step] = run.values()
            assert manager.save(step, args=ocp.args.Composite(**items))

        save(1, alone=False)
        manager.wait_until_finished()
        with Held(storage, 2, 3) as gates:
            save(2, alone=False)
            save(3, alone=False)
            assert flying(manager) == [2, 3]
            for gate in gates.values():
                threading.Timer(0.2, gate.open).start()
            save(4, alone=True)
            assert flying(manager) in ([], [4])
            save(5, alone=False)
            assert flying(manager) in ([], [5])
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 5]
        assert sorted(manager.metadata(3).item_metadata) == ["notes", "state"]
        for step in (1, 2, 3, 5):
            args = ocp.args.Composite(state=cnr.args.Restore(run.state))
            run.same(manager.restore(step, args=args).state.state, run.truth[step])


def test_a_save_is_skipped_only_if_as_many_are_written_as_may_be(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run, max_in_flight=2, when_busy="skip")
    run.run(manager, [1])
    with Held(storage, 2, 3) as gates:
        saved = []
        for step in (2, 3, 4):
            run.train(step)
            saved.append(run.save(manager, step))
        assert saved == [True, True, False] and not manager.should_save(3)
        for gate in gates.values():
            gate.open()
        manager.wait_until_finished()
    run.run(manager, [5])
    assert manager.all_steps() == [1, 2, 3, 5]
    run.check(manager, 5)


def test_a_signal_ends_saves_in_flight_and_one_more(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run, max_in_flight=3, save_on_sigterm=True, save_interval_steps=2)
    run.run(manager, [0])
    with Held(storage, 2, 4) as gates:
        for step in (2, 4):
            run.train(step)
            assert run.save(manager, step)
        assert flying(manager) == [2, 4]
        os.kill(os.getpid(), signal.SIGTERM)
        run.train(5)
        for gate in gates.values():
            threading.Timer(0.2, gate.open).start()
        assert manager.reached_preemption(5) and run.save(manager, 5)
    assert not manager.is_saving_in_progress()
    assert manager.all_steps() == [0, 2, 4, 5]
    run.check(manager, 5)


def test_a_plain_manager_writes_one_at_a_time(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run()
    options = cnr.Options(codec="raw", policy=cnr.Consecutive(), max_in_flight=3)
    registry = cnr.handler_registry(run.tables, options)
    keeps = registry.preservation_policy(None)
    with ocp.CheckpointManager(
        tmp_path / "plain",
        options=ocp.CheckpointManagerOptions(preservation_policy=keeps),
        handler_registry=registry,
    ) as manager:
        run.run(manager, [1, 2, 3])
        assert run.manifest(manager, 3).parent is not None
        for step in (1, 2, 3):
            run.check(manager, step)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True, None])
def test_other_numbers_of_saves_are_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="max_in_flight"):
        cnr.Options(max_in_flight=wrong)


@pytest.mark.timeout(100)
def test_differences_wait_no_longer_than_the_save_that_they_rest_on(
    tiny_run: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before its rows are there, and nobody tells the one that waits."""
    pytest.importorskip("zstandard")
    run, asked = tiny_run(), threading.Event()
    write, of = launch._write_rows, ParentRows.of

    def ends(flight: Any, *args: Any) -> None:
        if flight.step == 2:
            assert asked.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(flight, *args)

    def asks(self: Any, root: Any, item: str, parent: Any, keys: Any) -> Any:
        if parent.directory == "2":
            asked.set()
        return of(self, root, item, parent, keys)

    kept = {"policy": cnr.Consecutive(), "codec": "lattice", "bits": 8}
    manager = opened(run, **kept, max_in_flight=2)
    run.run(manager, [1])
    monkeypatch.setattr(launch, "_write_rows", ends)
    monkeypatch.setattr(ParentRows, "of", asks)
    for step in (2, 3):
        run.train(step)
        assert run.save(manager, step)
    with pytest.raises(SaveError, match="No space left"):
        manager.wait_until_finished()
    manager.wait_until_finished()
    run.run(manager, [4])
    assert manager.all_steps() == [1, 4]
