"""The life of a save: decided, written in the background, then committed, dropped or failed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.interrupts import Gate, Job
from cnr_jax.checkpointer.save_errors import save_error, without_frames
from cnr_jax.checkpointer.saving.calls import Listener
from cnr_jax.checkpointer.saving.check import full_fp32_bytes
from cnr_jax.format.manifest import Manifest, dump
from cnr_jax.format.names import step_number
from cnr_jax.format.tiles import ProcessManifest
from cnr_jax.options import Options
from cnr_jax.repository.commit import Facts
from cnr_jax.repository.layout import Place
from cnr_jax.repository.lineage.entries import Entry
from cnr_jax.repository.lineage.planner import Plan, Planner
from cnr_jax.repository.rows_writer import Written
from cnr_jax.repository.step import held_tables, read_committed
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.state.table import Tables
from cnr_jax.telemetry import SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)
# How long a failed save is waited for to stop writing; it does within a chunk or two.
STOP_SECS = 60.0


def _do_nothing() -> None:
    """Nobody waits for a save of which nothing is being written."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class SaveInFlight:
    """One save, and all that is known of it: what Orbax takes for its future.

    It is made by the thread that saves; the thread that writes it fills in what it has written.
    What became of it is found out once, by `Lifecycle`.

    Attributes:
        place: where it will be once it is committed.
        facts: what was decided; None if no state is part of it, but other items.
        is_open: whether its state is being written, or was and nobody has found out what became
            of it.
        blocking_secs: for which training waited.
        gather_secs: of these, for rows.
        writing: of its state, by a thread of its own.
        timeout_secs: how long that thread may wait for other processes.
        release: ends the writing of rows, and frees whoever waits for it to go on.
        launched: opened when the blocking part of the save is over.
        parts: futures of what else is being written.
        stopped: why its writing must end, if it must.
        write_error: why not all processes have written their part; known once that is over.
        written: what this process has written, once it has.
        written_secs: that this took, and what else was being written.
        agreed_at_secs: reading of `time.perf_counter` when all processes knew how it went.
        commit_secs: from then on until it was committed.
        processes: the process manifests that this process has seen by then; only the first one
            sees others than its own.
        manifest_bytes: of `manifest.json`, if this process has written it.
        synced_early: whether it was made durable before Orbax renamed it.
        is_synced: whether it was committed, and synced or found impossible to sync, before
            anything was deleted in its favour.
        is_unwanted: whether retention is to delete this very step.
        manifest: of the save, once it is seen to be committed.
        is_reported: whether its report is handed over.
        is_failure_told: whether the log says why it failed.
        outcome: what became of it, once that is known. `"dropped"`: committed, but retention
            did not keep it.
        failure: why it failed, until someone takes it to raise it.
    """

    place: Place
    facts: Facts | None = None
    is_open: bool = False
    blocking_secs: float = 0.0
    gather_secs: float = 0.0
    writing: Job = dataclasses.field(default_factory=Job)
    timeout_secs: float = 0.0
    release: Callable[[], None] = _do_nothing
    launched: Gate = dataclasses.field(default_factory=Gate)
    parts: Sequence[Any] = ()
    stopped: BaseException | None = None
    write_error: errors.SaveError | concurrent.futures.CancelledError | None = None
    written: Written | None = None
    written_secs: float = 0.0
    agreed_at_secs: float | None = None
    commit_secs: float = 0.0
    processes: Sequence[ProcessManifest] = ()
    manifest_bytes: int | None = None
    synced_early: bool = False
    is_synced: bool = False
    is_unwanted: bool = False
    manifest: Manifest | None = None
    is_reported: bool = False
    is_failure_told: bool = False
    outcome: Literal["committed", "dropped", "failed"] | None = None
    failure: errors.SaveError | None = None

    @property
    def step(self) -> int:
        """Of the save."""
        return step_number(self.place.directory)

    @property
    def plan(self) -> Plan:
        """Of its state, the same on all processes."""
        assert self.facts is not None
        return self.facts.plan

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

        Orbax raises the first error while other parts may still be writing, into a directory
        of which the same step, saved again, uses the name.
        """
        self.cancel()
        self.launched.open()
        if not self.writing.give_up():
            self.writing.wait(STOP_SECS)

    def has_failed(self) -> bool:
        """Whether all processes have heard that the save has failed; waits for their word.

        A thread that hangs, as storage may, has nothing good to say.
        """
        if not self.writing.has_begun:
            return True
        is_over = self.writing.wait(self.timeout_secs)
        return not is_over or self.write_error is not None

    def error(self) -> errors.SaveError:
        """Why the save was not committed, as far as this process knows."""
        reason = self.write_error or RuntimeError("it was not committed")
        return save_error(reason, self.step, os.fspath(self.place.path))

    def committed_manifest(self) -> Manifest | None:
        """Its manifest, if it is seen to be committed."""
        root, directory, item = self.place.root, self.place.directory, self.place.item
        try:
            manifest = read_committed(root, directory, item)
        except (errors.CnrError, OSError):
            return None
        return manifest if manifest.uuid == self.plan.uuid else None

    def end(self, outcome: Literal["committed", "dropped", "failed"]) -> None:
        """Notes what became of it, and frees what only its writing needed."""
        self.outcome = outcome
        self.written = self.manifest = self.stopped = self.write_error = None
        self.processes = ()
        self.release = _do_nothing
        self.is_open = False

    def note_commit(self) -> None:
        """Notes how long it took to commit what all processes have written."""
        if self.agreed_at_secs is not None:
            self.commit_secs = time.perf_counter() - self.agreed_at_secs

    def report(self, manifest: Manifest, tables: Tables) -> SaveReport:
        """What a committed save did."""
        assert self.facts is not None
        parent, totals = manifest.parent, manifest.totals
        own, written = self.manifest_bytes, self.written
        rounding = written.row_errors if written else None
        processes = self.processes or ([written.manifest] if written else [])
        encode_secs = written.encode_secs if written else 0.0
        waiting_secs = written.waiting_secs if written else 0.0
        if own is None:  # another process has written it
            own = len(dump(manifest))
        return SaveReport(
            step=manifest.step,
            kind=manifest.kind,
            tracking=manifest.tracking,
            parent=step_number(parent.directory) if parent else None,
            generation=manifest.generation,
            rows=totals.rows,
            table_bytes=totals.table_bytes,
            slot_bytes=totals.slot_bytes,
            dense_bytes=totals.dense_bytes,
            manifest_bytes=totals.manifest_bytes + own,
            full_fp32_bytes=full_fp32_bytes(tables, manifest.dense_leaves),
            blocking_secs=self.blocking_secs,
            fingerprint_secs=self.facts.fingerprint_secs,
            find_secs=self.facts.find_secs,
            gather_secs=self.gather_secs,
            encode_secs=encode_secs,
            write_secs=max(0.0, self.written_secs - encode_secs - waiting_secs),
            commit_secs=self.commit_secs,
            total_secs=manifest.history[-1].secs,
            reason=manifest.reason,
            restores=manifest.restores,
            run=manifest.run,
            tables=held_tables(manifest, processes) if processes else (),
            auto_bits=self.plan.auto_bits,
            sample_rows=rounding.rows if rounding else None,
            mean_row_error=rounding.mean if rounding else None,
            worst_row_error=rounding.worst if rounding else None,
        )


class Lifecycle:
    """What becomes of saves: each is committed and reported, or undone and its error kept.

    What goes on in the background is told from there, by `report_commit` and `fail`: they change
    neither the ledger nor the planner, which belong to the thread that saves.

    Args:
        writer: where saves go.
        planner: is told of committed saves.
        tables: of the handler; None: nothing is saved.
        options: of the run.

    Attributes:
        managed: whether a manager calls `synced` and `end_writing` when a save has ended.
        last: the save that was decided last, also one without a state; None if there is none.
        report: of the last save that was committed.
        last_failure: why the save that ended last failed, without frames; None if it did not.
        listener: is told of committed saves.
        doubt: why the last save may not survive a power cut, though it is committed.
    """

    def __init__(
        self,
        writer: RootWriter,
        planner: Planner,
        tables: Tables | None,
        options: Options,
    ) -> None:
        self._writer, self._planner = writer, planner
        self._tables = tables
        self.listener = Listener(options.on_save, metrics=options.metrics)
        self.report: SaveReport | None = None
        self.last_failure: errors.CnrError | None = None
        self.doubt = ""
        self.managed = False
        self.last: SaveInFlight | None = None

    @property
    def flight(self) -> SaveInFlight | None:
        """The save of a state that has begun and of which it is not known what became."""
        return self.last if self.last is not None and self.last.is_open else None

    def prepare(self, flight: SaveInFlight) -> None:
        """A save is decided; whether it begins is Orbax's to say."""
        self.last = flight

    def begin(self, flight: SaveInFlight) -> None:
        """The state of a save is about to be written."""
        assert self._writer.ledger is not None
        plan = flight.plan
        # First: what is noted in the ledger is found out about with it.
        self.last, flight.is_open = flight, True
        self._writer.ledger.begin(
            Entry(
                directory=plan.directory,
                step=plan.step,
                uuid=plan.uuid,
                generation=plan.generation,
                parent=plan.parent,
                run=plan.run,
                forks=plan.forks,
            )
        )

    def synced(self, error: OSError | None) -> None:
        """Notes that a committed save is durable, or why not: then no other may rest on it."""
        flight = self.flight
        if flight is not None:
            flight.is_synced = True
        if error is None:
            self.doubt = ""
            self._writer.committed()
        else:
            # So nothing is deleted in its favour.
            if self._writer.ledger is not None:
                self._writer.ledger.doomed.clear()
            self.doubt = f"the save before may not be durable: {error}"

    def report_commit(self) -> bool:
        """Reports the save in flight if it is seen to be committed; returns whether it is.

        In doubt it is not, and `settle` looks again.
        """
        flight = self.flight
        if flight is None or flight.is_unwanted:
            return False
        if not flight.is_reported:
            flight.note_commit()
        try:
            flight.manifest = flight.manifest or flight.committed_manifest()
        except Exception:
            # Such as memory that ran out: it is no error of the save.
            _log.debug("cannot look for step %d", flight.step, exc_info=True)
        if flight.manifest is None:
            return False
        self._report(flight, flight.manifest)
        return True

    def fail(self, error: errors.CnrError) -> None:
        """Says in the log why the save in flight, or what comes after its commit, failed."""
        self.last_failure, flight = without_frames(error), self.flight
        if flight is None or not flight.is_failure_told:
            _log.warning("%s", "; ".join(map(str.strip, str(error).splitlines())))
        if flight is not None:
            flight.is_failure_told = True

    def end_writing(self) -> None:
        """Lets other managers write: the save is committed, or it has failed."""
        if self._writer.writes:
            flight = self.flight
            if flight is not None:
                flight.stop()
            self._writer.end_writing()

    def withdraw(self) -> None:
        """Undoes what was prepared for a save that Orbax then refused."""
        self.end_writing()
        if self.flight is None:
            self._writer.undo()

    def settle(self, committed: str | None = None) -> str | None:
        """Finds out whether the last save is committed and notes it if so.

        Only to be called when no save is being written.

        Args:
            committed: uuid that process 0 found to be committed; on process 0 itself, None.

        Returns:
            Its uuid if this call found it to be committed.
        """
        flight = self.flight
        if flight is None:
            return None
        try:
            return self._settle(flight, committed)
        except Exception:
            # Once: it must not come out of every call. What an interrupt cuts short is done again.
            flight.is_open = False
            raise

    def _settle(self, flight: SaveInFlight, committed: str | None) -> str | None:
        place, plan, ledger = flight.place, flight.plan, self._writer.ledger
        assert ledger is not None  # since the save began
        dropped, seen = place.directory in ledger.doomed, None
        if self._writer.writes and self.managed:
            seen = flight.is_synced
            dropped = dropped and seen
        entry = ledger.settle(place, plan.uuid, seen, flight.manifest)
        if entry is None and dropped:
            self._writer.committed()
            _log.info("retention did not keep step %d, the newest", plan.step)
            flight.end("dropped")
            return None
        if entry is None or (committed is not None and entry.uuid != committed):
            self._undo(flight)
            return None
        self._writer.committed()
        self._planner.saved(plan, entry)
        assert entry.manifest is not None
        self._report(flight, entry.manifest)
        flight.end("committed")
        return entry.uuid

    def settle_as(self, committed: str | None) -> None:
        """Notes what process 0 found, though this process' view of the root may be older."""
        place, ledger = self._writer.place, self._writer.ledger
        assert ledger is not None and place is not None
        self.settle(committed)
        facts = self.last.facts if self.last is not None else None
        if facts is not None and committed == facts.plan.uuid:
            if facts.plan.directory not in ledger.entries:
                ledger.read(place.root, facts.plan.directory, place.item)

    def take_failure(self) -> errors.SaveError | None:
        """The error of the last save, if it failed; once."""
        if self.last is None:
            return None
        failure, self.last.failure = self.last.failure, None
        return failure

    def _undo(self, flight: SaveInFlight) -> None:
        """Keeps the error of a save until someone takes it, and removes what it wrote."""
        flight.stop()
        failure = flight.error()
        if not flight.is_failure_told:
            self.fail(failure)
        flight.failure = failure
        self._writer.discard(flight.place.directory)
        self._writer.undo()
        flight.end("failed")

    def _report(self, flight: SaveInFlight, manifest: Manifest) -> None:
        if flight.is_reported:
            return
        flight.is_reported, self.last_failure = True, None
        assert self._tables is not None
        try:
            report = flight.report(manifest, self._tables)
        except Exception:
            # The step is saved, and this may be the middle of the next save, for which other
            # processes wait.
            _log.exception("there is no report of step %d", flight.step)
            return
        self.report = report
        tell = self.listener.tell if self.managed else self.listener.tell_here
        tell(report, flight.place.root)
