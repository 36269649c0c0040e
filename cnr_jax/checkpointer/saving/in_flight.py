"""One save and all that is known of it, from its plan until it is known what became of it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.items import StepItems
from cnr_jax.checkpointer.orbax_compat.steps import StepInfo
from cnr_jax.checkpointer.save_errors import save_error
from cnr_jax.checkpointer.saving.pipeline import PipelinedSave
from cnr_jax.format.manifest import DenseLeaf, Manifest, Tracking
from cnr_jax.goodput.measured import Trained
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.gaps import Gap
from cnr_jax.repository.index.planner import SavePlan
from cnr_jax.repository.layout import Place
from cnr_jax.repository.rows_writer import Written
from cnr_jax.repository.step import read_committed
from cnr_jax.repository.store import can
from cnr_jax.repository.store.checked import means_damage
from cnr_jax.telemetry import SaveReport
from cnr_jax.waiting import STOP_SECS, Gate, Job


def _do_nothing() -> None:
    """Nobody waits for a save that writes nothing."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class SaveInFlight(PipelinedSave):
    """One save, and all that is known of it: what Orbax takes for its future.

    It is made by the thread that saves; the thread that writes it fills in what it has written.
    What became of it is found out once, by `Lifecycle`. Under a plain manager of Orbax it is in no
    pipeline.

    Attributes:
        item: that holds the state.
        decided: how its state is saved; None if none is part of it, but other items.
        dense_leaves: of the state, which belong to no table, as the manifest lists them.
        tracking: how changed rows were found.
        recorded_clock: of the touched rows, if there are any that were used.
        info: of the step, as policies are told of it until it is one of the root; None under a
            plain manager.
        step_items: that a manager of ours saves, as long as it is not over.
        rows: that it writes, about, with those of other processes.
        started_secs: reading of `time.perf_counter` when the save was asked for.
        wait_secs: how long it has waited for the train step that made the state.
        agree_secs: how long process 0 has waited for each other one to plan it.
        blocking_secs: how long it has held training up, but for `wait_secs`; None: not known.
        trained: train steps between the save before and this one.
        at_once: saves in flight while it is written, itself among them; 0: not measured.
        writing: of its state, by a thread of its own.
        release: ends the writing of rows, and frees whoever waits for it to go on.
        launched: opened when the blocking part of the save is over.
        returned: opened when training goes on.
        stopped: why its writing must end, if it must.
        write_error: why not all processes have written their part; known once that is over.
        written: what this process has written, once it has.
        chain: committed checkpoints that it cannot be restored without, its parent first.
        beside: newest full ones of its branch that it does not rest on.
        harm: what was found missing of it, or of what it rests on, once it was committed.
        made: the manifest that this process has written of it, for all.
        manifest: of the save, once it is seen to be committed.
        report: what is known of it so far; None once it is handed over, and without a state.
    """

    item: str
    decided: SavePlan | None = None
    dense_leaves: tuple[DenseLeaf, ...] = ()
    tracking: Tracking = "recorded"
    recorded_clock: int | None = None
    info: StepInfo | None = None
    step_items: StepItems | None = None
    rows: int = 0
    started_secs: float = 0.0
    wait_secs: float = 0.0
    agree_secs: float = 0.0
    blocking_secs: float | None = None
    trained: tuple[Trained, ...] = ()
    at_once: float = 0.0
    writing: Job = dataclasses.field(default_factory=Job)
    release: Callable[[], None] = _do_nothing
    launched: Gate = dataclasses.field(default_factory=Gate)
    returned: Gate = dataclasses.field(default_factory=Gate)
    stopped: BaseException | None = None
    write_error: errors.SaveError | concurrent.futures.CancelledError | None = None
    written: Written | None = None
    chain: tuple[Entry, ...] = ()
    beside: tuple[Entry, ...] = ()
    harm: Gap | None = None
    made: Manifest | None = None
    manifest: Manifest | None = None
    report: SaveReport | None = None

    @property
    def place(self) -> Place:
        """Where it will be once it is committed."""
        return Place(self.attempt.root, self.attempt.directory, self.item)

    @property
    def plan(self) -> SavePlan:
        """How its state is saved."""
        assert self.decided is not None
        return self.decided

    @property
    def rests_on(self) -> str | None:
        """The nonce of the save whose step is its parent; None if it rests on no other."""
        parent = self.decided.parent if self.decided else None
        return parent.uuid if parent else None

    # What Orbax asks of a future.

    def result(self, timeout: float | None = None) -> None:
        """Waits until all processes have written their part.

        Raises:
            SaveError: if one has not.
            TimeoutError: if it takes longer than `timeout` seconds.
        """
        if not self.writing.wait(timeout):
            raise TimeoutError(f"step {self.step} was not written in {timeout:g} s")
        if self.write_error is not None:
            raise self.write_error

    def cancel(self) -> None:
        """Makes the save fail; nothing is written any more soon after."""
        self.give_up(concurrent.futures.CancelledError("the save was cancelled"))

    # What the blocking part of the save, and its end, ask of its writing.

    def give_up(self, why: BaseException) -> None:
        """Makes the save fail for a reason, unless there is one already."""
        self.stopped = self.stopped or why
        self.release()

    def stop(self) -> None:
        """Makes the save fail if it has not ended, and waits until nothing is written.

        A plain manager of Orbax raises the first error while other parts may still be writing,
        into a directory whose name the same step uses when it is saved again.
        """
        self.cancel()
        self.launched.open()
        if not self.writing.give_up():
            self.writing.wait(STOP_SECS)

    def reason(self) -> errors.SaveError:
        """Why the save was not committed, as far as this process knows."""
        reason = self.write_error or RuntimeError("it was not committed")
        return save_error(reason, self.step, os.fspath(self.place.path))

    def committed_manifest(self) -> Manifest | None:
        """Its manifest, if it is seen to be committed."""
        root, directory, item = self.place.root, self.place.directory, self.place.item
        if self.is_committed and self.made and not can(root).cheap_looks:
            return self.made
        try:
            manifest = read_committed(root, directory, item)
        except (errors.CnrError, OSError) as error:
            # It was there when it was committed: somebody has taken or harmed it since.
            return self.made if self.is_committed and means_damage(error) else None
        return manifest if manifest.uuid == self.plan.uuid else None

    def free(self) -> None:
        """Frees what only its writing, and finding out what became of it, needed."""
        self.written = self.made = self.manifest = None
        self.stopped = self.write_error = None
        self.chain, self.beside = (), ()
        self.release = _do_nothing

    def know(self, **found: Any) -> None:
        """Takes into its report what was found out; one thread at a time does."""
        if self.report is not None:
            self.report = dataclasses.replace(self.report, **found)

    def note_commit(self) -> None:
        """Notes how long it took to commit what all processes have written."""
        if self.agreed_at_secs is not None:
            self.know(commit_secs=time.perf_counter() - self.agreed_at_secs)
