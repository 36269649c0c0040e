"""Lifecycle of saves: each is committed and reported, or undone and its error kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Set

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.save_errors import without_frames
from cnr_jax.checkpointer.saving.chain_look import (
    chain_error,
    is_dropped,
    kept_for,
    look_after,
)
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.listener import Listener
from cnr_jax.checkpointer.saving.merging import Merging
from cnr_jax.checkpointer.saving.meter import Meter
from cnr_jax.checkpointer.saving.reporting import (
    report_of_committed,
    report_of_dropped,
    with_mirror,
)
from cnr_jax.format import names
from cnr_jax.format.manifest import HistoryEntry, Manifest
from cnr_jax.options import Options
from cnr_jax.repository.compaction.baseline import problem_of, remove_baseline
from cnr_jax.repository.index.entries import entry_of
from cnr_jax.repository.index.gaps import Gap
from cnr_jax.repository.index.planner import Planner
from cnr_jax.repository.index.save_plan import MergedBaseline, SavePlan
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.store import AnyPath
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.telemetry import SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)


class Lifecycle:
    """Lifecycle of saves: each is committed and reported, or undone and its error kept.

    Background threads report outcomes by `report_commit` and `fail`. These change neither the
    ledger nor the planner, which belong to the thread that saves.

    Args:
        writer: writer of the root.
        planner: planner, which notes saves that begin, are committed or fail.
        options: options of the run.

    Attributes:
        managed: whether a manager of ours calls `synced` and `end_writing` when a save has ended,
            and `look_before` when all of a step is synced, which is closer to the commit than the
            handler of the state can come.
        open: saves of a state that have begun and whose outcome is not known, in order. Those of
            a manager of ours are in a pipeline.
        report: report of the last save that was committed or dropped.
        last_failure: error of the save that ended last, without frames; None if it succeeded.
        merging: merges chains of committed saves, whose policy asks for it.
        listener: listener, which gets the reports of saves.
        mirror: mirror that committed saves are copied to; None: there is none, or another process
            copies.
        near_problem: why saves go to the root although `Options.near` is given; else empty.
        meter: meter, which gets what each save took; None: nobody measures it.
        doubt: why the save committed last may not survive a power cut; else empty.
    """

    def __init__(
        self,
        writer: RootWriter,
        planner: Planner,
        options: Options,
    ) -> None:
        self._writer, self._planner = writer, planner
        self._min_fulls = options.min_fulls
        self._has_said_dropped = False
        elsewhere = bool(getattr(options.policy, "elsewhere", False))
        self.merging = Merging(self._offer, elsewhere=elsewhere)
        self.listener = Listener(options.on_save, metrics=options.metrics)
        self.report: SaveReport | None = None
        self.last_failure: errors.CnrError | None = None
        self.mirror: Mirror | None = None
        self.near_problem = ""
        self.meter: Meter | None = None
        self.doubt = ""
        self.managed = False
        self.open: list[SaveInFlight] = []

    def begin(self, flight: SaveInFlight) -> None:
        """Notes that the state of a save is about to be written."""
        assert self._writer.ledger is not None
        plan = flight.plan
        flight.chain, flight.beside = kept_for(plan, self._writer.ledger)
        self.open.append(flight)
        self._writer.begin_writing(plan.uuid)

    def decided(self, plan: SavePlan) -> None:
        """Notes a decided save: retention keeps its chain, and the next save may rest on it."""
        ledger = self._writer.ledger
        assert ledger is not None
        # First: by the planner's note `_forget_planned` finds what is noted in the ledger.
        self._planner.begins(plan)
        if plan.leaves_behind:
            ledger.leave(plan.abandoned)
        for abandoned in () if plan.leaves_behind else plan.abandoned:
            ledger.forget(abandoned)
        ledger.begin(plan.entry)

    def history_before(self, flight: SaveInFlight) -> tuple[HistoryEntry, ...]:
        """History of the saves before a save, all of which are over, for its manifest."""
        found, plan = tuple(self.open), flight.plan
        for each in reversed(found[: found.index(flight)] if plan.rests_on else ()):
            made = each.made
            if each.is_committed and made is not None and made.lineage == plan.lineage:
                return made.history
        return self._planner.history_before(plan)

    def look_before(self, flight: SaveInFlight) -> None:
        """Looks right before the commit of a save whether its chain is there.

        Called on the process that commits.

        Raises:
            SaveError: if a file is missing or cut short, or the save before may not be durable.
        """
        if self.doubt and flight in self.open and flight.plan.rests_on:
            raise errors.SaveError(
                f"step {flight.step} is not saved: {self.doubt}\n"
                "  the next save is a full one, and contains its rows",
                step=flight.step,
            )
        error = chain_error(self._writer, flight) if flight in self.open else None
        if error is not None:
            if not self.managed:
                self.fail(
                    flight, error
                )  # plain Orbax does not tell this object that a save has failed
            raise error

    def look_after(
        self, flight: SaveInFlight, leaving: Collection[int], known: Set[Gap]
    ) -> None:
        """Looks after the commit of a save whether it and its chain are there.

        Called on the process that commits, in the background, before the save is reported.

        Args:
            flight: the save.
            leaving: steps that retention is about to delete.
            known: gaps that retention knew of when it decided on `leaving`.
        """
        if flight in self.open and self._see(flight) is not None:
            look_after(self._writer, flight, leaving, self._min_fulls, known)

    def synced(self, error: OSError | None) -> None:
        """Notes that a committed save is durable, or why it may not be; then no delta follows."""
        if error is None:
            self.doubt = ""
            self._writer.committed()
        else:
            self.doubt = f"the save before may not be durable: {error}"

    def report_commit(self, flight: SaveInFlight) -> None:
        """Reports a save if its commit can be seen; in doubt `settle_one` looks again."""
        if flight not in self.open or self._is_unwanted(flight):
            return
        flight.note_commit()
        manifest = self._see(flight)
        if manifest is not None:
            self._report(flight, manifest)

    def _see(self, flight: SaveInFlight) -> Manifest | None:
        """Manifest of a save if its commit can be seen, else None; kept in the save."""
        try:
            flight.manifest = flight.manifest or flight.committed_manifest()
        except Exception:
            # Such as running out of memory, which is no error of the save.
            _log.debug("cannot look for step %d", flight.step, exc_info=True)
        return flight.manifest

    def fail(self, flight: SaveInFlight, error: errors.CnrError) -> None:
        """Logs and notes why a save, or what comes after its commit, failed."""
        self.last_failure = without_frames(error)
        _log.warning("%s", "; ".join(map(str.strip, str(error).splitlines())))
        flight.error = flight.error or error
        if is_dropped(error):
            self._report_dropped(flight, error.problem, error.path)

    def report_unwanted(self, flight: SaveInFlight) -> None:
        """Reports a save if retention has not kept it."""
        if flight in self.open and self._is_unwanted(flight):
            self._tell_unwanted(flight)

    def _is_unwanted(self, flight: SaveInFlight) -> bool:
        """Whether retention deletes the very step that this save has written."""
        ledger, plan = self._writer.ledger, flight.plan
        return ledger is not None and ledger.doomed.get(plan.directory) == plan.uuid

    def _tell_unwanted(self, flight: SaveInFlight) -> None:
        if flight.report is None:
            return
        problem = "retention did not keep it: by its rule others are to stay"
        if not self._has_said_dropped:
            self._has_said_dropped = True
            _log.warning(
                "step %d was saved, and retention deleted it at once: by the rule of this run"
                " (max_to_keep, best_fn, or a policy) other steps are to stay, to which a crash"
                " takes the run back; preservation_policy=AnyPreservationPolicy(["
                "BestN(...), LatestN(1)]), of ocp.checkpoint_managers, keeps the newest too",
                flight.step,
            )
        self._report_dropped(flight, problem, None)

    def end_writing(self, *flights: SaveInFlight) -> None:
        """Ends the writing of saves, so that other managers may write."""
        for flight in flights if self._writer.writes else ():
            flight.stop()
            self._writer.end_writing(flight.attempt.nonce)

    def withdraw(self, *flights: SaveInFlight) -> bool:
        """Undoes what was prepared for saves that did not begin; returns if steps came back."""
        self.end_writing(*flights)
        self._forget_planned()
        self._writer.end_writing()
        return not self.open and self._writer.undo()

    def _forget_planned(self) -> None:
        """Forgets saves that were decided but did not begin."""
        begun, ledger = {each.plan.uuid for each in self.open}, self._writer.ledger
        for each in [e.plan for e in self._planner.begun.values()]:
            if each.uuid not in begun and ledger is not None:
                with self._writer.looking:
                    ledger.drop(each.directory)
                    ledger.part()  # the steps that it was to leave behind count again
                self._planner.failed(each.uuid)
                self._drop(each.baseline)

    def _offer(self, baseline: MergedBaseline) -> None:
        """Lets the next save bring a merged baseline along."""
        with self._writer.looking:
            before, self._planner.baseline = self._planner.baseline, baseline
        self._drop(before)

    def merge(self, root: AnyPath, save: SaveInFlight) -> None:
        """Has the chain of a committed save merged, unless a baseline is about to shorten it."""
        plan = save.decided
        assert plan is not None
        with self._writer.looking:
            ledger = self._writer.ledger
            if ledger is None or self._planner.is_shortened(plan, ledger):
                return
            # Under the lock, or one that ends right now could be followed by another one.
            self.merging.merge(root, plan, save.item, jax.process_count())

    def look_for_baseline(self) -> None:
        """Forgets the merged baseline if no save can bring it along any more.

        Such as after a rollback, or if its files are gone: who takes a root over clears them away.
        """
        ledger, place = self._writer.ledger, self._writer.place
        if ledger is None or place is None:
            return
        if (stale := self._planner.without_stale(ledger)) is not None:
            _log.warning(
                "the merged chain of step %s is not used: a full save came before it, or the run"
                " did not go on from that step",
                stale.directory,
            )
            self._drop(stale)
        found = self._planner.baseline
        if found is not None and (problem := problem_of(place.root, found)):
            _log.warning(
                "the merged chain of step %s is not used: %s", found.directory, problem
            )
            self._planner.baseline = None
            self._drop(found)

    def _drop(self, baseline: MergedBaseline | None) -> None:
        """Removes what is left of a merged baseline."""
        place = self._writer.place
        if baseline is not None and place is not None and self._writer.writes:
            remove_baseline(place.root, baseline.folder)

    def close(self) -> None:
        """Ends the merging of chains."""
        self.merging.close()
        self._drop(self._planner.baseline)
        self._planner.baseline = None

    def wait(self) -> None:
        """Waits until all saves are over."""
        for flight in tuple(self.open):
            flight.thread.wait()

    def settle(self) -> list[str]:
        """Settles all saves that are over, each by `settle_one`.

        Returns:
            Uuids of the saves that this call found to be committed.
        """
        over = [each for each in self.open if each.is_over or not self.managed]
        found = [self.settle_one(flight) for flight in over]
        self._forget_planned()
        return [uuid for uuid in found if uuid is not None]

    def settle_one(
        self, flight: SaveInFlight, committed: Collection[str] = ()
    ) -> str | None:
        """Finds out whether a save is committed, and notes it or undoes the save.

        To be called only when the save is not being written.

        Args:
            flight: the save; nothing is done if it is settled already, or has not begun.
            committed: uuids of saves that process 0 found to be committed; empty on process 0.

        Returns:
            Uuid of the save if this call found it to be committed, else None.
        """
        if flight not in self.open:
            return None
        try:
            with self._writer.looking:
                found = self._settle(flight, committed)
        except Exception:
            # The save is ended, so that later calls do not raise the error again. What an interrupt
            # cuts short, which is no Exception, is done again.
            self._end(flight)
            raise
        if jax.process_count() == 1:
            # Several processes note gaps together, with the next plan, as retention must decide
            # alike on all.
            self._writer.note_gaps()
        return found

    def _settle(self, flight: SaveInFlight, committed: Collection[str]) -> str | None:
        place, plan, ledger = flight.place, flight.plan, self._writer.ledger
        assert ledger is not None  # it is there since the save began
        dropped, seen = self._is_unwanted(flight), None
        if self._writer.writes and self.managed:
            seen = flight.is_committed
            dropped = dropped and seen
        entry = ledger.settle(place, plan.uuid, seen, flight.manifest)
        if entry is None and dropped:
            self._writer.committed()
            self._planner.failed(
                plan.uuid
            )  # no save rests on it, or the step would be there
            self._tell_unwanted(flight)
            self._end(flight)
            return None
        if entry is None or (committed and entry.uuid not in committed):
            self._undo(flight)
            return None
        self._writer.committed()
        self._planner.saved(plan, entry)
        assert entry.manifest is not None
        self._report(flight, entry.manifest)
        self._end(flight)
        return entry.uuid

    def _end(self, flight: SaveInFlight) -> None:
        """Closes a save whose outcome is known, and frees what it holds."""
        self._writer.end_writing(flight.plan.uuid)
        flight.free()
        self.open.remove(flight)

    def settle_as(self, committed: Collection[str], flying: Collection[str]) -> None:
        """Settles saves as process 0 did, even if this process sees an older state of the root.

        Args:
            committed: uuids of saves that process 0 found to be committed.
            flying: uuids of saves that were not over there.
        """
        place, ledger = self._writer.place, self._writer.ledger
        assert ledger is not None and place is not None
        for flight in [each for each in self.open if each.plan.uuid not in flying]:
            if self.managed:
                flight.thread.wait()
            self.settle_one(flight, committed)
            directory = flight.attempt.directory
            if flight.plan.uuid in committed and directory not in ledger.entries:
                with self._writer.looking:
                    ledger.read(place.root, directory, place.item)
        self._forget_planned()

    def _undo(self, flight: SaveInFlight) -> None:
        """Notes why a save failed, and removes what it wrote."""
        flight.stop()
        if flight.error is None:
            self.fail(flight, flight.reason())
        if not self.managed:
            self._writer.discard(f"{flight.place.directory}{names.TEMPORARY_SUFFIX}")
        self._planner.failed(flight.plan.uuid)
        self._drop(flight.plan.baseline)
        self._writer.undo()
        self._end(flight)

    def _report(self, flight: SaveInFlight, manifest: Manifest) -> None:
        if flight.report is None:
            return
        self.last_failure = None
        if flight.harm is not None:
            self._report_dropped(flight, flight.harm.text, flight.harm.path)
            return
        found = None
        if self.mirror is not None:
            # Outside `make`, as making the report may fail.
            found = self.mirror.note(entry_of(flight.attempt.directory, manifest))

        def make(known: SaveReport) -> SaveReport:
            tables = self._planner.tables
            made = report_of_committed(known, flight, tables, manifest)
            return with_mirror(made, found) if found is not None else made

        self._tell(flight, make)

    def _report_dropped(
        self, flight: SaveInFlight, problem: str, damaged: str | None
    ) -> None:
        self._tell(
            flight,
            lambda known: report_of_dropped(
                known, flight, self._planner.tables, problem, damaged
            ),
        )

    def _tell(
        self, flight: SaveInFlight, make: Callable[[SaveReport], SaveReport]
    ) -> None:
        """Makes the report of a save from what is known, and hands it to the listener, once."""
        known, flight.report = flight.report, None
        if known is None:
            return
        try:
            report = make(dataclasses.replace(known, near_problem=self.near_problem))
        except Exception:
            # The outcome of the save does not change. This may run in the middle of the next save,
            # for which other processes wait, so nothing is raised.
            _log.exception("there is no report of step %d", flight.step)
            return
        self.report = report
        if self.meter is not None:
            try:
                self.meter.reported(flight, report)
            except Exception:  # only advice needs the measurement
                _log.exception("what step %d took is not measured", flight.step)
        tell = self.listener.tell if self.managed else self.listener.tell_here
        tell(report, flight.place.root)
