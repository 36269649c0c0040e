"""Planning of a save: all processes of a run come to one plan, or to the same error.

Every process sends what only it can know. Process 0 compares, decides, and sends its decision to
all. No device computation takes part, so nothing waits for the train step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Channel, agree, on_primary
from cnr_jax.checkpointer.save_errors import save_error
from cnr_jax.checkpointer.saving.dense import digest_of_local, is_host_local
from cnr_jax.checkpointer.saving.interval import Interval
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.checkpointer.tracking.tracker import ChangedRows
from cnr_jax.format.encodings import encoding_told
from cnr_jax.format.manifest import Fork, ParentRef
from cnr_jax.format.names import step_number
from cnr_jax.repository.index import suspects
from cnr_jax.repository.index.entries import Entry, entry_of
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.planner import Planner, motion_of
from cnr_jax.repository.index.save_plan import MergedBaseline, SavePlan
from cnr_jax.repository.layout import check_is_free
from cnr_jax.repository.step import read_manifest, read_processes
from cnr_jax.repository.store import can
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.codecs import Raw
from cnr_jax.texts import logger

_log = logger(__name__)
# Keys of messages beside the digests of leaves; they cannot be paths of leaves.
_ASKED = "/asked"
_TRACKING = "/tracking"
_DOUBT = "/doubt"
# Seconds of a wait that is worth a line in the log; the same as in Orbax.
_LONG_SECS = 1.0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Planning:
    """Makes one plan for all processes, after which all know the same steps.

    Process 0 finds out what became of the last save, claims the root, plans, and moves steps out of
    the way. The other processes take over what it found.

    Args:
        channel: channel to the other processes.
        writer: writer of the root.
        lifecycle: lifecycle of saves; each plan settles those that are over.
        planner: planner that decides, on process 0.
        widening: puts the width of codes into the plan.
        interval: interval to the next save, if the manager decides that too.
    """

    _channel: Channel
    _writer: RootWriter
    _lifecycle: Lifecycle
    _planner: Planner
    _widening: Widening
    _interval: Interval | None = None
    # Whether a checkpoint stores all rows raw, by uuid; asked for the chain of an exact delta.
    _exact: dict[str, bool] = dataclasses.field(default_factory=dict, init=False)

    def foreseen(self) -> tuple[int | None, int]:
        """Foresees the width of "auto" codes in the next save, and the widest that are dithered.

        If the root holds a run that was not restored yet, both are as they will be after that
        restore. Options that are not given are then taken from that run.
        """
        ledger, planner = self._writer.ledger, self._planner
        restores, motion = planner.restores, planner.motion
        before = planner.motion_before
        runs = self._planner.runs
        if ledger is not None and runs.current is None and not runs.new_run:
            found = [entry for entry in ledger.restorable() if entry.known]
            if found and (newest := found[-1].manifest):
                # Options that do not go together raise an error in the restore, not here.
                with contextlib.suppress(errors.OptionError):
                    self._widening.inherit(newest.encoding)
                if not restores:
                    restores = newest.restores + 1
                    motion = before = motion_of(ledger.chain(found[-1])[::-1])
        widening = self._widening
        return widening.bits(restores, motion), widening.dithered_bits(restores, before)

    def wait(self, until_there_is_room: Callable[[], None]) -> None:
        """Waits for the saves before this one; if that raises, the other processes hear of it."""
        started = time.perf_counter()
        try:
            until_there_is_room()
        except errors.CnrError as error:
            # Other processes may know of no error, such as one in deleting old steps, or of another
            # one. In a save without a state they agree on a nonce, and hear of the error there.
            self.refuse(error)
            if self._interval is not None:
                self._interval.start_at(
                    None
                )  # all raise the error, and the next step is due
            raise
        waited_secs = time.perf_counter() - started
        if waited_secs > _LONG_SECS:
            # Begins like the line of Orbax, which programs may look for in logs.
            _log.warning(
                "Waiting for previous save to complete took %.1f seconds. Where that is often so,"
                " save less often; Options(max_in_flight=...) helps where storage answers late",
                waited_secs,
            )

    def refuse(self, obstacle: errors.CnrError) -> None:
        """Tells the other processes, which prepare a save, that this one cannot; raises nothing."""
        if jax.process_count() > 1:
            with contextlib.suppress(errors.CnrError):
                self._agree({}, obstacle)

    def raise_on_all(self, obstacle: errors.CnrError) -> NoReturn:
        """Raises an error on all processes: this obstacle, or that of another process."""
        self._agree({}, obstacle)
        raise obstacle

    def agree(
        self,
        directory: str,
        found: ChangedRows,
        *,
        urgent: bool,
        full: bool,
        exact: bool,
    ) -> tuple[SavePlan, float]:
        """Agrees on the plan of process 0, which first settles saves that are over.

        Args:
            directory: name of the step's directory.
            found: what this process has to save. Leaves that are not global must be the same on
                all processes, and all must find changed rows in the same way.
            urgent: as in `Planner.plan`.
            full: as in `Planner.plan`.
            exact: as in `Planner.plan`.

        Returns:
            The plan; and on process 0 the seconds that it waited for the others, divided by their
            number, else 0.

        Raises:
            CnrError: the same on all processes, if one of them meets an obstacle or nothing can
                be planned.
            SaveError: if a process does not answer.
            StateMismatchError: if leaves that are not global differ between processes.
            OptionError: if processes find changed rows in different ways, or are asked for
                different saves.
        """
        said = {
            _TRACKING: found.mode,
            _DOUBT: found.doubt,
            _ASKED: f"full={full}, exact={exact}",
        }
        if jax.process_count() > 1:
            said |= {
                "/".join(leaf.path): digest_of_local(value)
                for leaf, value in found.dense
                if is_host_local(value)
            }

        started, heard_secs = time.perf_counter(), 0.0

        def decide(told: Sequence[Mapping[str, str]]) -> dict[str, Any]:
            nonlocal heard_secs
            heard_secs = time.perf_counter() - started
            try:
                check_told(told)
                doubts = filter(None, (each[_DOUBT] for each in told))
                asked = {"urgent": urgent, "full": full, "exact": exact}
                return self._decided(directory, found, next(doubts, ""), asked)
            except errors.CnrError:
                raise
            except Exception as error:
                # Any other error, such as a folder that cannot be renamed.
                raise save_error(error, step_number(directory)) from error

        told = self._agree(said, None, decide)
        # The manager that lists steps looks at this.
        self._writer.changed = self._lifecycle.managed and told["changed"]
        if self._interval is not None:
            self._interval.settle(step_number(directory), *told["interval"])
        if jax.process_index() == 0:
            others = jax.process_count() - 1
            return told["plan"], heard_secs / others if others else 0.0
        plan = _plan_of(told["plan"])
        self._widening.inherit(plan.encoding)
        self._lifecycle.settle_as(told["committed"], told["flying"])
        with self._writer.looking:
            self._writer.know(told["known"], told["gaps"])
            self._lifecycle.decided(plan)
        return plan, 0.0

    def _decided(
        self, directory: str, found: ChangedRows, doubt: str, asked: Mapping[str, bool]
    ) -> dict[str, Any]:
        """Decides on process 0; returns what all processes are told.

        Waits for the saves in flight if this one does not go on from the last of them, or moves
        steps aside.
        """
        lifecycle, committed = self._lifecycle, list[str]()
        gaps: tuple[tuple[str, str], ...] = ()
        while True:
            # Retention, which decides in the background, comes before all of this or after it.
            with self._writer.looking:
                committed += lifecycle.settle()
                flying = lifecycle.open
                if not flying or (
                    step_number(directory) > flying[-1].step
                    and self._planner.goes_on(found.stamps)
                ):
                    ledger = self._claimed(directory, found)
                    gaps += self._writer.note_gaps()
                    lifecycle.look_for_baseline()
                    plan = self._planner.plan(
                        ledger,
                        directory,
                        found.stamps,
                        found.touched,
                        doubt=doubt or lifecycle.doubt,
                        is_exact=self._is_exact,
                        **asked,
                    )
                    if not (flying and plan.abandoned):
                        known = sorted(ledger.all_directories())
                        plan = self._prepared(plan)
                        lifecycle.decided(plan)
                        return {
                            "plan": plan,
                            "committed": committed,
                            "flying": [each.plan.uuid for each in flying],
                            "known": known,
                            "changed": self._writer.changed,
                            "interval": self._interval and self._interval.decided(),
                            "gaps": gaps,
                        }
            lifecycle.wait()

    def _agree(
        self,
        said: Mapping[str, str],
        obstacle: errors.CnrError | None,
        decide: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        try:
            return agree(self._channel, obstacle, said, decide)
        except errors.AuditError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: errors.AuditError) -> errors.CnrError:
        """Adds to an error which steps may lack rows, which only process 0 knows."""

        def explain() -> errors.CnrError:
            try:
                self._explain(error)
            except Exception:
                _log.exception("what only this process knows of an error is not known")
            return error

        found = on_primary(self._channel, explain)
        return error if found is error else errors.CnrError.from_json(found)

    def _explain(self, error: errors.AuditError) -> None:
        ledger, place = self._writer.ledger, self._writer.place
        if not ledger or not place:
            return
        self._writer.noted = True
        branch = self._planner.branches.get(error.lineage)
        clocks = dict(branch.parents) if branch else {}
        committed = ledger.committed()
        # Under a plain Orbax manager the last save is settled only by the next plan.
        for flight in self._lifecycle.open:
            manifest = flight.committed_manifest()
            if manifest is None:
                continue
            entry = entry_of(flight.place.directory, manifest)
            committed = [*committed, entry]
            committed = [e for e in committed if e.directory not in ledger.doomed]
            if flight.plan.lineage == error.lineage:
                clocks[entry.uuid] = flight.plan.clock
        suspects.explain(error, place.root, committed, clocks)

    def _claimed(self, directory: str, found: ChangedRows) -> Ledger:
        """Claims the root for a save; returns its ledger."""
        if self._planner.runs.current is None:
            # Before the claim, which ends the saves of any run that is at work there.
            self._planner.runs.check_origin(self._writer.refreshed(), found.touched)
        # A plain Orbax manager is making the folder of this save by now.
        ledger = self._writer.claim(None if self._lifecycle.managed else directory)
        if self._writer.place is not None:
            check_is_free(self._writer.place.root, directory)
        self._look_again(ledger, found.stamps.lineage)
        return ledger

    def _prepared(self, plan: SavePlan) -> SavePlan:
        """Puts the widths of codes into a plan, and moves steps out of its way."""
        self._widening.inherit(plan.encoding)
        self._widening.say_inherited("in the run that goes on")
        plan = self._widening.widened(plan, self._planner.branches[plan.lineage])
        # Before the other processes hear of the plan: if this fails, they hear of the error.
        self._writer.move_aside(plan)
        return plan

    def _look_again(self, ledger: Ledger, lineage: str) -> None:
        """Looks at the chain that a save may rest on, unless the save before has looked at it.

        Training waits for this. So in an object store, where each file is a request, it is done
        only if it has to be. A gap that is not seen here is seen right before the commit.
        """
        place = self._writer.place
        if place is None:
            return
        branch = self._planner.branches.get(lineage)
        tip = (
            ledger.entries.get(branch.tip.directory) if branch and branch.tip else None
        )
        is_seen = self._lifecycle.managed or not can(place.root).cheap_looks
        if tip is not None and (self._writer.gaps.is_stale or not is_seen):
            self._writer.gaps.look(place, ledger.chain(tip))

    def _is_exact(self, chain: Sequence[Entry]) -> bool:
        """Whether all rows of a chain are stored raw; False if that cannot be read."""
        place = self._writer.place
        assert place is not None
        for entry in chain:
            if entry.uuid not in self._exact:
                if not entry.is_committed:
                    return False  # the checkpoint is still being written
                directory = place.root / entry.directory / place.item
                try:
                    manifest = entry.manifest or read_manifest(directory)
                    processes = read_processes(directory, manifest)
                except (errors.CnrError, OSError) as error:
                    _log.warning("which rows are rounded is not known: %s", error)
                    return False
                found = {codec.name for each in processes for codec in each.codecs}
                self._exact[entry.uuid] = found <= {Raw.name}
        return all(self._exact[entry.uuid] for entry in chain)


def check_told(told: Sequence[Mapping[str, str]]) -> None:
    """Checks that all processes have equal host-local leaves, and find changed rows alike.

    Raises:
        StateMismatchError: if leaves differ, as only one process could save its own; names them.
        OptionError: if processes track rows in different ways, or are asked for different saves.
    """
    first, *others = told
    for process, digests in enumerate(others, start=1):
        if digests.get(_TRACKING) != first.get(_TRACKING):
            raise errors.OptionError(
                "processes find changed rows in different ways\n"
                f"  got {digests.get(_TRACKING)!r} on process {process},"
                f" {first.get(_TRACKING)!r} on process 0\n"
                "  hint: pass the same options, and touched everywhere or nowhere"
            )
        if digests.get(_ASKED) != first.get(_ASKED):
            raise errors.OptionError(
                "processes are asked for different saves\n"
                f"  got {digests.get(_ASKED)} on process {process},"
                f" {first.get(_ASKED)} on process 0\n"
                "  hint: pass the same full= and exact= to Save everywhere"
            )
        paths = (first.keys() | digests.keys()) - {_DOUBT}
        different = sorted(p for p in paths if digests.get(p) != first.get(p))
        if different:
            raise errors.StateMismatchError(
                f"leaves of the state differ between process 0 and process {process}\n"
                f"  {', '.join(different)}\n"
                "  hint: make them global arrays, or save them as an item of their own"
            )


def _plan_of(document: dict[str, Any]) -> SavePlan:
    """Makes the plan that process 0 sent as JSON."""
    parent, forks = document["parent"], document["forks"]
    encoding, baseline = document["encoding"], document["baseline"]
    return SavePlan(
        **{
            **document,
            "parent": ParentRef(**parent) if parent else None,
            "abandoned": tuple(document["abandoned"]),
            "forks": None if forks is None else tuple(Fork(**each) for each in forks),
            "encoding": encoding and encoding_told(encoding),
            "baseline": MergedBaseline(**baseline) if baseline else None,
        }
    )
