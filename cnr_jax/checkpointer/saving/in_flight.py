"""The save in flight: all that is known of one save, from its plan until its outcome is known."""

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
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.layout import Place
from cnr_jax.repository.rows_writer import Written
from cnr_jax.repository.step import read_committed
from cnr_jax.repository.store import can
from cnr_jax.repository.store.checked import means_damage
from cnr_jax.telemetry import SaveReport
from cnr_jax.waiting import STOP_SECS, Gate, Job


def _do_nothing() -> None:
    """Default of `SaveInFlight.release`: nobody waits for a save that writes nothing."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class SaveInFlight(PipelinedSave):
    """One save and all that is known of it; Orbax takes the object for the save's future.

    The thread that saves makes it, and the writing thread fills in what it has written.
    `Lifecycle` finds out, once, what became of the save. Under a plain Orbax manager it is in no
    pipeline.

    Attributes:
        item: name of the item that holds the state.
        decided: plan by which the state is saved; None if the save holds only other items.
        dense_leaves: dense leaves of the state, as the manifest lists them.
        tracking: how changed rows were found.
        recorded_clock: clock of the touched rows, if the save uses any.
        info: description of the step for Orbax policies, until the step is one of the root; None
            under a plain Orbax manager.
        step_items: items that a manager of ours saves, until the save is over.
        rows: approximate number of rows that all processes together write.
        started_secs: reading of `time.perf_counter` when the save was asked for.
        wait_secs: seconds that it has waited for the train step that made the state.
        agree_secs: seconds that process 0 has waited for each other process to plan it, on average.
        blocking_secs: seconds that it has held training up, without `wait_secs`; None: not known.
        trained: train steps between the save before and this one.
        over_at_secs: reading of `time.perf_counter` when nothing was written or removed for it any
            more; None: not yet.
        at_once: number of saves in flight while it is written, with itself; 0: not measured.
        writing: job of the thread that writes its state.
        release: function that ends the writing of rows and frees any thread that waits for it.
        launched: gate that opens when the blocking part of the save is over.
        returned: gate that opens when training goes on.
        stopped: reason why the writing must end, if it must.
        write_error: why not all processes have written their part; known once writing is over.
        written: what this process has written, once it has.
        chain: committed checkpoints that a restore of it needs, its parent first.
        beside: newest full checkpoints of its branch that are not in `chain`.
        harm: gap in it or in its chain that was found after its commit.
        made: manifest that this process has written of it, for all processes.
        manifest: manifest of the save, once the commit is seen.
        report: report of what is known so far; None once handed over, or without a state.
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
    over_at_secs: float | None = None
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
        """Place of the state once the save is committed."""
        return Place(self.attempt.root, self.attempt.directory, self.item)

    @property
    def plan(self) -> SavePlan:
        """Plan by which the state is saved."""
        assert self.decided is not None
        return self.decided

    @property
    def rests_on(self) -> str | None:
        """Nonce of the save whose step is its parent; None if it has no parent."""
        parent = self.decided.parent if self.decided else None
        return parent.uuid if parent else None

    # What Orbax asks of a future.

    def result(self, timeout: float | None = None) -> None:
        """Waits until all processes have written their part.

        Raises:
            SaveError: if a process could not write its part.
            TimeoutError: if it takes longer than `timeout` seconds.
        """
        if not self.writing.wait(timeout):
            raise TimeoutError(f"step {self.step} was not written in {timeout:g} s")
        if self.write_error is not None:
            raise self.write_error

    def cancel(self) -> None:
        """Makes the save fail; writing ends soon after."""
        self.give_up(concurrent.futures.CancelledError("the save was cancelled"))

    # What the blocking part and the end of the save ask of the writing thread.

    def give_up(self, why: BaseException) -> None:
        """Makes the save fail for a reason; an earlier reason stays."""
        self.stopped = self.stopped or why
        self.release()

    def stop(self) -> None:
        """Makes the save fail unless it has ended, and waits until its writing has stopped.

        A plain Orbax manager raises the first error while other parts may still be writing. Their
        directory has the name that the same step uses when it is saved again.
        """
        self.cancel()
        self.launched.open()
        if not self.writing.give_up():
            self.writing.wait(STOP_SECS)

    def reason(self) -> errors.SaveError:
        """Error that says why the save was not committed, as far as this process knows."""
        reason = self.write_error or RuntimeError("it was not committed")
        return save_error(reason, self.step, os.fspath(self.place.path))

    def committed_manifest(self) -> Manifest | None:
        """Manifest of the save if its commit can be seen, else None."""
        root, directory, item = self.place.root, self.place.directory, self.place.item
        if self.is_committed and self.made and not can(root).cheap_looks:
            return self.made
        try:
            manifest = read_committed(root, directory, item)
        except (errors.CnrError, OSError) as error:
            # The file was whole at the commit: somebody has removed or damaged it since.
            return self.made if self.is_committed and means_damage(error) else None
        return manifest if manifest.uuid == self.plan.uuid else None

    def free(self) -> None:
        """Frees what was needed only to write the save and to find out what became of it."""
        self.written = self.made = self.manifest = None
        self.stopped = self.write_error = None
        self.chain, self.beside = (), ()
        self.release = _do_nothing

    def know(self, **found: Any) -> None:
        """Adds to the report what was found out; only one thread at a time may call this."""
        if self.report is not None:
            self.report = dataclasses.replace(self.report, **found)

    def note_commit(self) -> None:
        """Notes in the report how long the commit took since all processes had written."""
        if self.agreed_at_secs is not None:
            self.know(commit_secs=time.perf_counter() - self.agreed_at_secs)
