"""How the processes of a run come to one plan of a save, or to the same error.

Every process says what only it can know; process 0 compares, decides and tells all. No device
computation takes part, so nothing waits for the train step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Channel, agree, on_primary
from cnr_jax.checkpointer.orbax_compat.dense import digest_of_local, is_host_local
from cnr_jax.checkpointer.save_errors import save_error
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.format.manifest import Fork, HistoryEntry, ParentRef
from cnr_jax.options import Options
from cnr_jax.policy.bits import FALLBACK_BITS, small_tables
from cnr_jax.repository.lineage import suspects
from cnr_jax.repository.lineage.entries import Entry, entry_of
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Plan, Planner, Request
from cnr_jax.repository.step import read_processes
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.codecs import Raw, bytes_of
from cnr_jax.state.table import Tables, flatten_paths
from cnr_jax.texts import logger

_log = logger(__name__)
# Beside the digests of leaves, of which they cannot be the paths.
_ASKED = "/asked"
_TRACKING = "/tracking"
_DOUBT = "/doubt"
_NAMED_TABLES = 12  # arbitrary: enough to see what kind of tables they are


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
    """

    _channel: Channel
    _writer: RootWriter
    _lifecycle: Lifecycle
    _planner: Planner
    _widening: Widening
    # Of checkpoints that a delta of all bits was to rest on, whether they hold all bits.
    _exact: dict[str, bool] = dataclasses.field(default_factory=dict, init=False)

    def wait(self, until_finished: Callable[[], None]) -> None:
        """Waits for the save before; should that raise, the other processes hear of it."""
        try:
            until_finished()
        except errors.CnrError as error:
            # Other processes may know of no error, such as one in deleting old steps, or of another
            # one. Without a state they come to `Barriers.begin` instead, and hear of it there.
            self.refuse(error)
            raise

    def refuse(self, obstacle: errors.CnrError) -> None:
        """Tells the other processes, which prepare a save, that this one does not."""
        if jax.process_count() > 1:
            with contextlib.suppress(errors.CnrError):
                self.agree(obstacle, {}, "", "", None)

    def agree(
        self,
        obstacle: errors.CnrError | None,
        dense: Mapping[str, Any],
        tracking: str,
        doubt: str,
        request: Request | None,
    ) -> Plan:
        """The plan of process 0, which first finds out what became of the last save.

        Args:
            obstacle: why this process cannot save, if it cannot.
            dense: of the state; leaves that are not global must be the same everywhere.
            tracking: how this process finds changed rows; all must do it alike.
            doubt: why this process doubts its stamps; empty if it does not.
            request: what is asked for; None with an obstacle.

        Raises:
            CnrError: the same on all processes, if one has an obstacle or nothing can be
                planned.
            SaveError: if a process does not answer.
            StateMismatchError: if leaves that are not global differ between processes.
            OptionError: if processes find changed rows in different ways, or are asked for
                different saves.
        """
        said = {_TRACKING: tracking, _DOUBT: doubt, _ASKED: ""}
        if request is not None:
            said[_ASKED] = f"full={request.full}, exact={request.exact}"
        if jax.process_count() > 1 and obstacle is None:
            said |= {
                "/".join(path): digest_of_local(leaf)
                for path, leaf in flatten_paths(dense)
                if is_host_local(leaf)
            }

        def decide(told: Sequence[Mapping[str, str]]) -> Plan:
            assert request is not None
            try:
                check_told(told)
                doubts = filter(None, (each[_DOUBT] for each in told))
                return self._decide(request, next(doubts, ""))
            except errors.CnrError:
                raise
            except Exception as error:
                # Whatever it is, such as a folder that cannot be renamed.
                raise save_error(error, request.step) from error

        try:
            plan = agree(self._channel, obstacle, said, decide)
        except errors.AuditError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error
        if not isinstance(plan, Plan):
            plan = _plan_of(plan)
        self._writer.changed = False
        if jax.process_index() != 0:
            self._lifecycle.settle_as(plan.committed)
            self._writer.know(plan.known, plan.gaps)
        return plan

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
        flight = self._lifecycle.flight
        manifest = flight.committed_manifest() if flight else None
        if flight and manifest:
            entry = entry_of(flight.place.directory, manifest)
            committed = [*committed, entry]
            committed = [e for e in committed if e.directory not in ledger.doomed]
            if flight.plan.lineage == error.lineage:
                clocks[entry.uuid] = flight.plan.clock
        suspects.explain(error, place.root, committed, clocks)

    def _decide(self, request: Request, doubt: str) -> Plan:
        committed = self._lifecycle.settle()
        if self._planner.runs.current is None:
            # First: who claims a root ends the saves of the run that is at work there.
            self._planner.runs.check_origin(self._writer.refreshed(), request.origin)
        # A plain manager of Orbax is making the folder of this save by now.
        own = None if self._lifecycle.managed else request.directory
        ledger = self._writer.claim(own)
        self._look_again(ledger, request)
        gaps = self._writer.note_gaps()
        asked = dataclasses.replace(request, doubt=doubt or self._lifecycle.doubt)
        plan = self._planner.plan(ledger, asked, committed, self._is_exact)
        plan = self._widening.widened(plan)
        plan = dataclasses.replace(plan, changed=self._writer.changed, gaps=gaps)
        # Before other processes hear of the plan, and of an error here instead.
        self._writer.move_aside(plan)
        return plan

    def _look_again(self, ledger: Ledger, request: Request) -> None:
        """Looks at the chain that a save may rest on, where the save before has not."""
        branch = self._planner.branches.get(request.lineage)
        tip = (
            ledger.entries.get(branch.tip.directory) if branch and branch.tip else None
        )
        is_due = self._writer.gaps.is_stale or not self._lifecycle.managed
        if is_due and tip is not None and self._writer.place is not None:
            self._writer.gaps.look(self._writer.place, ledger.chain(tip))

    def _is_exact(self, chain: Sequence[Entry]) -> bool:
        """Whether all rows of a chain are stored raw; not if that cannot be read."""
        place = self._writer.place
        assert place is not None
        for entry in chain:
            if entry.uuid not in self._exact:
                assert entry.manifest is not None
                directory = place.root / entry.directory / place.item
                try:
                    processes = read_processes(directory, entry.manifest)
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


def _plan_of(document: dict[str, Any]) -> Plan:
    """The plan that process 0 sent."""
    parent, forks = document["parent"], document["forks"]
    return Plan(
        **{
            **document,
            "parent": ParentRef(**parent) if parent else None,
            "history": tuple(HistoryEntry(**entry) for entry in document["history"]),
            "abandoned": tuple(document["abandoned"]),
            "known": tuple(document["known"]),
            "forks": None if forks is None else tuple(Fork(**each) for each in forks),
            "gaps": tuple((path, text) for path, text in document["gaps"]),
        }
    )


class Widening:
    """Puts the width into plans, and says in the log when it changes, or how much all bits are.

    Args:
        options: of the run.
        tables: of the run; None: nothing is saved.

    Attributes:
        follows: whether widths depend on the restores, unless a policy names the codec.
    """

    def __init__(self, options: Options, tables: Tables | None) -> None:
        self._options, self._tables = options, tables or Tables({})
        self.follows = options.follows_restores()
        # By the codec that a policy names: it may be what makes widths follow the restores.
        self._follows: dict[str | None, bool] = {}
        self._small: dict[str | None, frozenset[str]] = {}
        self._said: int | None = None

    def bits(self, restores: int, codec: str | None = None) -> int | None:
        """The width in saves after so many restores; None if it is "auto" nowhere.

        Args:
            restores: of the run.
            codec: that the policy names, if it does.

        Raises:
            OptionError: if there is no such codec, or it leaves "auto" nothing to choose.
        """
        if codec not in self._follows:
            options = with_codec(self._options, codec)
            self._follows[codec] = options.follows_restores()
        return self._options.auto_bits(restores) if self._follows[codec] else None

    def widened(self, plan: Plan) -> Plan:
        """A plan with its width, and the reason where that is not the one for the expectation.

        Called on the process that plans: other processes are told, so that all encode alike.
        """
        if plan.exact:
            self._say_bytes(plan)
            return plan
        bits = self.bits(plan.restores, plan.codec)
        if bits is None:
            return plan
        reason, usual = plan.reason, self._options.auto_bits(0)
        expected = self._options.assumed_restores
        times = "once" if plan.restores == 1 else f"{plan.restores} times"
        if bits != usual:
            reason += f"; {bits} bits: restored {times}, {expected:g} expected"
        if bits != self._said and bits != usual:
            _log.warning(
                "from step %d on saves take %d bits, not %d: the run was restored %s,"
                " expected_restores=%g",
                plan.step,
                bits,
                usual,
                times,
                expected,
            )
        elif bits != self._said:
            given = self._options.expected_restores is not None
            _log.info(
                "%ssaves take %d bits%s, for %s%g restores",
                "" if given else "bits='auto' without expected_restores: ",
                bits,
                _but_for(self._small_tables(plan.codec), bits),
                "" if given else "up to ",
                expected,
            )
        self._said = bits
        return dataclasses.replace(plan, auto_bits=bits, reason=reason)

    def _say_bytes(self, plan: Plan) -> None:
        """Says how many bytes all rows take if all of their bits are saved."""
        if plan.kind != "full":
            return
        exact = usual = 0
        auto_bits = self.bits(plan.restores)
        widths = self.widths(auto_bits)
        for name, table in self._tables.items():
            for leaf in table.leaves:
                width, bits = math.prod(leaf.shape[1:]), widths.get(name)
                codec = self._options.codec_for(
                    name, leaf.name, width, leaf.dtype, bits
                )
                parts = codec.parts(width, leaf.dtype)
                exact += leaf.nbytes
                usual += leaf.shape[0] * bytes_of(parts)
        _log.info(
            "step %d is saved exactly: rows of tables and slots take %s bytes, with the codecs"
            " of the run %s",
            plan.step,
            f"{exact:,}",
            f"{usual:,}",
        )

    def widths(self, auto_bits: int | None, codec: str | None = None) -> dict[str, int]:
        """Bits of the codes of each table's leaves, where options leave them to the restores.

        Args:
            auto_bits: of tables that are not small; None: no bits are "auto".
            codec: that the policy names, if it does.
        """
        if auto_bits is None:
            return {}
        small = self._small_tables(codec)
        return {n: FALLBACK_BITS if n in small else auto_bits for n in self._tables}

    def _small_tables(self, codec: str | None) -> frozenset[str]:
        """Tables that have `FALLBACK_BITS` in all saves, among those whose width is "auto".

        The same on all processes: nothing but shapes of whole tables, without padding, is asked.
        """
        if codec not in self._small:
            options = with_codec(self._options, codec)
            # That a table and its slots store in "auto" bits.
            elements: dict[str, int] = {}
            for name, table in self._tables.items():
                for leaf in table.leaves:
                    width = math.prod(leaf.shape[1:])
                    if width and options.is_auto(name, leaf.name, width, leaf.dtype):
                        elements[name] = elements.get(name, 0) + table.rows * width
            self._small[codec] = small_tables(elements)
        return self._small[codec]


def options_of(options: Options, plan: Plan) -> Options:
    """Options of a save: with the codec that its policy names, or without any that rounds."""
    if not plan.exact:
        return with_codec(options, plan.codec)
    return dataclasses.replace(
        options,
        codec="raw",
        slot_codec="raw",
        tables={},
        bits=None,
        expected_restores=None,
    )


def with_codec(options: Options, codec: str | None) -> Options:
    """Options of a save for which the policy names a codec; None: they stay."""
    return options if codec is None else dataclasses.replace(options, codec=codec)


def _but_for(small: frozenset[str], bits: int) -> str:
    """Such as ` (8 for 2 small tables: day, hour)`; empty where there is nothing to say."""
    if not small or bits == FALLBACK_BITS:
        return ""
    names = sorted(small)
    shown = ", ".join(names[:_NAMED_TABLES])
    if len(names) > _NAMED_TABLES:
        shown += f" and {len(names) - _NAMED_TABLES} more"
    plural = "" if len(names) == 1 else "s"
    return f" ({FALLBACK_BITS} for {len(names)} small table{plural}: {shown})"
