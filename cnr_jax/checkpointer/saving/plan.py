"""How the processes of a run come to one plan of a save, or to the same error.

Every process says what only it can know; process 0 compares, decides and tells all. No device
computation takes part, so nothing waits for the train step.
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
from cnr_jax.repository.index.planner import Planner, SavePlan, motion_of
from cnr_jax.repository.layout import check_is_free
from cnr_jax.repository.step import read_manifest, read_processes
from cnr_jax.repository.store import can
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.codecs import Raw
from cnr_jax.texts import logger

_log = logger(__name__)
# Beside the digests of leaves: they cannot be paths of these.
_ASKED = "/asked"
_TRACKING = "/tracking"
_DOUBT = "/doubt"
# Of a wait that is worth a line in the log; Orbax's own.
_LONG_SECS = 1.0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Planning:
    """Makes one plan for all processes, after which all know the same steps.

    Process 0 finds out what became of the last save, claims the root, plans, and makes room;
    other processes take over what it found.

    Args:
        channel: to the other processes.
        writer: where saves go.
        lifecycle: is settled by each plan.
        planner: decides, on process 0.
        widening: puts the width of codes into the plan.
        interval: to the next save, if that is decided too.
    """

    _channel: Channel
    _writer: RootWriter
    _lifecycle: Lifecycle
    _planner: Planner
    _widening: Widening
    _interval: Interval | None = None
    # Of checkpoints that a delta of all bits was to rest on, whether they hold all bits.
    _exact: dict[str, bool] = dataclasses.field(default_factory=dict, init=False)

    def foreseen(self) -> tuple[int | None, int]:
        """The width of codes in the next save, where options leave it open, and what it dithers.

        The second is the width of the widest codes that are dithered.

        Before the first restore of a run that has been saved: as it will be after that, and so is
        what options do not give.
        """
        ledger, planner = self._writer.ledger, self._planner
        restores, motion = planner.restores, planner.motion
        before = planner.motion_before
        runs = self._planner.runs
        if ledger is not None and runs.current is None and not runs.new_run:
            found = [entry for entry in ledger.restorable() if entry.known]
            if found and (newest := found[-1].manifest):
                # What does not go together is an error of the restore.
                with contextlib.suppress(errors.OptionError):
                    self._widening.inherit(newest.encoding)
                if not restores:
                    restores = newest.restores + 1
                    motion = before = motion_of(ledger.chain(found[-1])[::-1])
        widening = self._widening
        return widening.bits(restores, motion), widening.dithered_bits(restores, before)

    def wait(self, until_there_is_room: Callable[[], None]) -> None:
        """Waits for saves before; should that raise, the other processes hear of it."""
        started = time.perf_counter()
        try:
            until_there_is_room()
        except errors.CnrError as error:
            # Other processes may know of no error, such as one in deleting old steps, or of another
            # one. Without a state they agree on a nonce instead, and hear of it there.
            self.refuse(error)
            if self._interval is not None:
                self._interval.start_at(None)  # all raise it, and the next step is due
            raise
        waited_secs = time.perf_counter() - started
        if waited_secs > _LONG_SECS:
            # Begins as Orbax's own does, which programs may look for in logs.
            _log.warning(
                "Waiting for previous save to complete took %.1f seconds. Where that is often so,"
                " save less often; Options(max_in_flight=...) helps where storage answers late",
                waited_secs,
            )

    def refuse(self, obstacle: errors.CnrError) -> None:
        """Tells the other processes, which prepare a save, that this one does not."""
        if jax.process_count() > 1:
            with contextlib.suppress(errors.CnrError):
                self._agree({}, obstacle)

    def raise_on_all(self, obstacle: errors.CnrError) -> NoReturn:
        """Raises on all processes why this one cannot save, or what keeps another from it."""
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
        """The plan of process 0, which first finds out what became of saves that are over.

        Also how long that has waited for each other process; 0 on others.

        Args:
            directory: of the step.
            found: what this process has to save. Leaves that are not global must be the same
                everywhere, and rows that changed be found in the same way.
            urgent: as in `Planner.plan`.
            full: the same.
            exact: the same.

        Raises:
            CnrError: the same on all processes, if one has an obstacle or nothing can be
                planned.
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
                # Whatever it is, such as a folder that cannot be renamed.
                raise save_error(error, step_number(directory)) from error

        told = self._agree(said, None, decide)
        # Who lists steps for its manager looks at it.
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
        """What process 0 decides, and all are told.

        Waits for saves in flight if this one does not go on from the last of them, or moves steps
        aside.
        """
        lifecycle, committed = self._lifecycle, list[str]()
        gaps: tuple[tuple[str, str], ...] = ()
        while True:
            # Retention, which decides in the background, comes before all of it or after.
            with self._writer.looking:
                committed += lifecycle.settle()
                flying = lifecycle.open
                if not flying or (
                    step_number(directory) > flying[-1].step
                    and self._planner.goes_on(found.stamps)
                ):
                    ledger = self._claimed(directory, found)
                    gaps += self._writer.note_gaps()
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
        """The error that says which steps may lack rows, as process 0 alone knows."""

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
        # Under a plain manager of Orbax the last save is settled by the next plan only.
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
        """What is in the root, once it is claimed for a save."""
        if self._planner.runs.current is None:
            # First: who claims a root ends the saves of the run that is at work there.
            self._planner.runs.check_origin(self._writer.refreshed(), found.touched)
        # A plain manager of Orbax is making the folder of this save by now.
        ledger = self._writer.claim(None if self._lifecycle.managed else directory)
        if self._writer.place is not None:
            check_is_free(self._writer.place.root, directory)
        self._look_again(ledger, found.stamps.lineage)
        return ledger

    def _prepared(self, plan: SavePlan) -> SavePlan:
        """A plan with the widths of its codes, for which there is room in the root."""
        self._widening.inherit(plan.encoding)
        self._widening.say_inherited("in the run that goes on")
        plan = self._widening.widened(plan, self._planner.branches[plan.lineage])
        # Before other processes hear of the plan, and of an error here instead.
        self._writer.move_aside(plan)
        return plan

    def _look_again(self, ledger: Ledger, lineage: str) -> None:
        """Looks at the chain that a save may rest on, where the save before has not.

        Training waits: in an object store, where each file is a request, only if it has to. What
        is not seen here is seen right before the commit.
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
        """Whether all rows of a chain are stored raw; not if that cannot be read."""
        place = self._writer.place
        assert place is not None
        for entry in chain:
            if entry.uuid not in self._exact:
                if not entry.is_committed:
                    return False  # it is being written
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
    """Checks that all processes hold the same host-local leaves, and find rows alike.

    Raises:
        StateMismatchError: naming leaves that differ: only one could be saved.
        OptionError: if tracking differs, or what was asked for.
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
    """The plan that process 0 sent."""
    parent, forks = document["parent"], document["forks"]
    encoding = document["encoding"]
    return SavePlan(
        **{
            **document,
            "parent": ParentRef(**parent) if parent else None,
            "abandoned": tuple(document["abandoned"]),
            "forks": None if forks is None else tuple(Fork(**each) for each in forks),
            "encoding": encoding and encoding_told(encoding),
        }
    )
