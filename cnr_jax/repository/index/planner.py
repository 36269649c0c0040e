"""Plans of saves: full or delta, on which parent, in which generation.

The policy proposes, and this module knows what is legal. A parent is legal for a state if the
`touched` rows of the state are counted from it: it was saved in the same lineage, or is the
restored step, or is in the chain of that. If no parent is provably legal, the save is full, and the
log and the manifest say why. So doubt costs bytes, never rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cnr_jax.format import names
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.format.manifest import (
    HistoryEntry,
    ParentRef,
    SampledMotion,
    TableEntry,
)
from cnr_jax.integers import LARGEST
from cnr_jax.policy import Decision, Policy, SaveRecord
from cnr_jax.policy.baseline import NO_BASELINE, full_because
from cnr_jax.repository.index import rollback
from cnr_jax.repository.index.entries import (
    Branch,
    Entry,
    branch_of,
    forks_of_next,
    records,
)
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.runs import Runs, Stamps
from cnr_jax.repository.index.save_plan import MergedBaseline, SavePlan
from cnr_jax.texts import logger

_log = logger(__name__)
ALL_BITS = "all bits were asked for"
"""In the reason of each exact save: manifests do not say otherwise that it was one."""


class Begun(NamedTuple):
    """A save that has begun, and whose outcome is not known.

    Attributes:
        rows: about how many rows it writes; 0 until they are chosen.
    """

    plan: SavePlan
    rows: int = 0

    def foreseen(self, before: Sequence[HistoryEntry]) -> HistoryEntry:
        """Forecast of its history entry, if a row takes as much as in the last save with rows.

        Args:
            before: committed history of the branch. If no save in it has rows, the forecast is a
                byte a row, which will do, since nothing else is compared with it then.
        """
        last = next((each for each in reversed(before) if each.rows), None)
        share = self.rows / last.rows if last else 1.0
        return HistoryEntry(
            step=self.plan.step,
            kind=self.plan.kind,
            bytes=round(share * last.bytes) if last else self.rows,
            rows=self.rows,
            secs=share * last.secs if last else float(self.rows),
        )


class Planner:
    """Planner of the saves of one root, on the process that decides.

    Args:
        policy: policy that proposes full or delta.
        nonce: 24 hex digits that are unique to this run of the program.
        min_fulls: number of full saves that a branch needs before it gets a delta.
        tables: saved tables, as manifests list them.
        new_run: whether a run begins here, whatever the root holds, unless one is restored.

    Attributes:
        tables: saved tables, as manifests list them.
        guarded: whether retention is known to keep parents.
        runs: runs of the root, which tell the run of a save.
        branches: branch of each lineage that may go on, by what is committed of it.
        begun: saves whose outcome is not known yet, by uuid, in order.
        baseline: merged baseline that waits for a save of its lineage; None: none does.
    """

    def __init__(
        self,
        policy: Policy,
        nonce: str | None = None,
        min_fulls: int = 1,
        tables: tuple[TableEntry, ...] = (),
        *,
        new_run: bool = False,
    ) -> None:
        self._policy, self._min_fulls, self.tables = policy, min_fulls, tables
        self._nonce = nonce or secrets.token_hex(12)
        self._attempt = 0
        self._most_restores = 0
        self.guarded = False
        self.runs = Runs(self._nonce, new_run=new_run)
        self.branches: dict[str, Branch] = {}
        self.begun: dict[str, Begun] = {}
        self.baseline: MergedBaseline | None = None

    def goes_on(self, stamps: Stamps) -> bool:
        """Whether a save can be planned as if all saves that have begun were committed.

        The first save of a lineage cannot, nor one that goes back: its plan depends on whether the
        saves before it are committed or have failed.
        """
        lineage, clock = stamps
        branch, begun = self.branches.get(lineage), [*self.begun.values()]
        if branch is None or branch.tip is None or not begun:
            return False
        last = begun[-1].plan
        return last.lineage == lineage and last.clock <= clock

    def plan(
        self,
        ledger: Ledger,
        directory: str,
        stamps: Stamps,
        touched: Stamps | None = None,
        *,
        doubt: str = "",
        urgent: bool = False,
        full: bool = False,
        exact: bool = False,
        is_exact: Callable[[Sequence[Entry]], bool] = lambda chain: False,
    ) -> SavePlan:
        """Decides about one save.

        Args:
            ledger: ledger of the root.
            directory: plain name of the step directory.
            stamps: lineage (32 hex digits) and clock of the stamps that choose rows. If there were
                none before, the lineage is empty, and the planner draws one.
            touched: lineage and clock of the touched rows that go with the state, whether they
                choose rows or not; None without any.
            doubt: why a delta might miss rows; empty if it would not.
            urgent: whether the run is about to end: then a delta, where one is legal.
            full: whether to save full, whatever the policy says and however urgent it is.
            exact: whether to save all bits, which takes a full save unless the chain holds them.
            is_exact: tells whether a chain holds all bits; called only where that matters.

        Raises:
            DependentsExistError: if a step is in the way that a kept one depends on.
            UsedRootError: if the root holds a run that this save is not known to go on with.
        """
        step, (lineage, clock) = names.step_number(directory), stamps
        lineage = lineage or secrets.token_hex(16)
        self._attempt += 1
        uuid = f"{self._nonce}{self._attempt:08x}"
        run, left = self.runs.of_save(ledger, touched, step, uuid)
        branch = self._branch(lineage, clock)
        branch.forget_parents(ledger.entries)
        branch = self._ahead(branch, lineage)
        is_first = self.runs.current is None
        begins = run != self.runs.current and bool(left)
        if begins:
            # No save can rest on what makes way for it, whatever fingerprints know of that.
            branch = Branch(restores=branch.restores)
        generation = rollback.generation_of_next(ledger, branch.tip, self._nonce)
        directory, abandoned = rollback.room_for(
            ledger, branch.tip, directory, generation, run, left
        )
        self.runs.tries(directory)
        gone = {entry.directory for entry in abandoned}
        baseline = self._usable(ledger, branch, doubt, asked=full or exact or urgent)
        if full:
            decision = full_because("a full save was asked for")
        elif baseline is not None:
            decision = _bringing(baseline)
        else:
            decision = self._decide(ledger, branch, step, doubt, urgent, begins)
        parent = self._parent(ledger, branch, decision)
        if exact:
            decision, parent = _in_all_bits(ledger, decision, parent, is_exact)
        self.runs.carries(uuid, touched)
        return SavePlan(
            uuid=uuid,
            directory=directory,
            lineage=lineage,
            clock=clock,
            parent=parent,
            generation=generation,
            codec=decision.codec,
            policy=self._policy.name,
            reason=decision.reason,
            restores=branch.restores,
            abandoned=tuple(e.directory for e in abandoned),
            run=run,
            earlier=names.earlier_run(uuid) if left and is_first else "",
            exact=exact,
            forks=forks_of_next(
                branch.tip,
                [e for e in ledger.committed() if e.directory not in gone],
                run=run,
                lineage=lineage,
                generation=generation,
                step=step,
            ),
            encoding=self.runs.encoding_of(run),
            merges=decision.merge and not urgent,
            baseline=baseline,
        )

    def begins(self, plan: SavePlan) -> None:
        """Notes a save that begins, so that the next may rest on it."""
        self.begun[plan.uuid] = Begun(plan)
        if plan.baseline is not None:
            self.baseline = None

    def staged(self, uuid: str, rows: int) -> None:
        """Notes about how many rows a save writes, if it has begun."""
        if (begun := self.begun.get(uuid)) is not None:
            self.begun[uuid] = begun._replace(rows=rows)

    def failed(self, uuid: str) -> None:
        """Notes a save that failed: neither it nor any save that rests on it can be a parent."""
        self.begun.pop(uuid, None)
        for each in [*self.begun.values()]:
            if each.plan.parent is not None and each.plan.parent.uuid == uuid:
                self.failed(each.plan.uuid)

    def saved(self, plan: SavePlan, entry: Entry) -> None:
        """Notes a committed save: from now on it may be a parent in its lineage."""
        assert entry.manifest is not None
        self.begun.pop(plan.uuid, None)
        branch = self.branches.setdefault(plan.lineage, Branch())
        branch.parents[entry.uuid] = plan.clock
        branch.tip, branch.last_clock = entry, plan.clock
        branch.restores = plan.restores
        # A save of too few rows tells nothing about motion, so what is known before it stays.
        branch.motion_since = entry.manifest.motion or branch.motion_since
        self.runs.saved(plan.lineage, plan.run, plan.uuid)
        branch.history, branch.no_parents = entry.manifest.history, ""

    def history_before(self, plan: SavePlan) -> tuple[HistoryEntry, ...]:
        """History of the committed saves that a planned save follows; empty if it is full."""
        return self.branches[plan.lineage].history if plan.rests_on else ()

    def restored(
        self,
        lineage: str,
        chain: Sequence[Entry],
        *,
        unchanged: bool,
        encoding: EncodingEntry | None = None,
    ) -> None:
        """Notes that the state of `chain[-1]` goes on as `lineage`.

        All other lineages end. A loop that goes on with the restored state, but with touched rows
        from before the restore, looks like one that only evaluated the state, and would lose rows.

        Args:
            lineage: fresh lineage of the restored touched rows.
            chain: chain of the restored step, the full checkpoint first; clocks count 0, 1, ...
            unchanged: whether the tables are those of the chain, and changed rows are found in the
                same way. If not (other rows, dtypes, names, not all leaves), no checkpoint is a
                legal parent.
            encoding: encoding of its rows.
        """
        tip = chain[-1]
        assert tip.manifest is not None
        self.runs.restored(lineage, tip.run, encoding)
        branch = Branch(tip=tip, restores=min(tip.manifest.restores + 1, LARGEST))
        branch.motion_before = motion_of(chain)
        self.end_lineages(branch.restores)
        if unchanged:
            branch.parents = {entry.uuid: clock for clock, entry in enumerate(chain)}
            branch.history = tip.manifest.history
            branch.last_clock = len(chain) - 1
        else:
            branch.no_parents = (
                f"what was restored from step {tip.step} differs from it,"
                " or tracking does"
            )
        self.branches = {lineage: branch}

    def adopted(self, lineage: str, entry: Entry, ledger: Ledger | None) -> None:
        """Notes that the state of a step of plain Orbax goes on as `lineage`.

        It goes on in the run of the newest checkpoint beside it. If there is none, a run begins
        with it.

        Args:
            lineage: fresh lineage of the restored touched rows.
            entry: entry of the step.
            ledger: ledger of its root; None if it is not known.
        """
        own = [e.run for e in ledger.committed() if e.known] if ledger else []
        self.runs.restored(lineage, own[-1] if own else secrets.token_hex(16), None)
        self.end_lineages(0)
        why = f"step {entry.step} is of plain Orbax, and no delta can rest on it"
        self.branches = {lineage: Branch(tip=entry, no_parents=why)}

    def end_lineages(self, restores: int) -> None:
        """Forgets all legal parents, since the state may have been replaced from elsewhere.

        Args:
            restores: how often the new state was restored, this time included.
        """
        self._most_restores = max(self._most_restores, restores)
        self.branches = {}

    @property
    def restores(self) -> int:
        """How often the state that is saved next was restored, as far as can be foreseen."""
        known = (branch.restores for branch in self.branches.values())
        return max(known, default=self._most_restores)

    @property
    def motion(self) -> SampledMotion | None:
        """Forecast of how far rows of the state that is saved next move; None if not known."""
        known = [motion for b in self.branches.values() if (motion := b.motion())]
        return known[-1] if known else None

    @property
    def motion_before(self) -> SampledMotion | None:
        """How far rows of that state had moved up to the last restore; None if not known."""
        known = [b.motion_before for b in self.branches.values() if b.motion_before]
        return known[-1] if known else None

    def _branch(self, lineage: str, clock: int) -> Branch:
        """Branch of a lineage; a fresh one if the state went back in memory.

        Rows that changed in between then have stamps that say nothing about the checkpoints taken
        before. That stays so if this save fails and the clock catches up.
        """
        # An unknown lineage may go on with what was restored, so it counts all restores.
        unknown = Branch(restores=self._most_restores)
        branch = self.branches.setdefault(lineage, unknown)
        if clock < branch.last_clock:
            why = f"the clock of the stamps went back, from {branch.last_clock} to {clock}"
            branch = dataclasses.replace(
                branch, parents={}, tip=None, history=(), last_clock=-1, no_parents=why
            )
            self.branches[lineage] = branch
        return branch

    def _ahead(self, branch: Branch, lineage: str) -> Branch:
        """Branch as it will be once all saves that have begun in its lineage are committed."""
        before = branch.history
        for begun in self.begun.values():
            plan = begun.plan
            if plan.lineage != lineage:
                continue
            history = branch.history if plan.rests_on else ()
            branch = dataclasses.replace(
                branch,
                parents={**branch.parents, plan.uuid: plan.clock},
                tip=plan.entry,
                history=(*history, begun.foreseen(before)),
                last_clock=plan.clock,
            )
        return branch

    def _legal(self, ledger: Ledger, branch: Branch) -> list[Entry]:
        """Legal parents that are committed or being written, and that retention keeps."""
        known = (*ledger.committed(), *ledger.in_flight())
        return [
            entry
            for entry in known
            if entry.uuid in branch.parents and entry.directory not in ledger.doomed
        ]

    def _decide(
        self,
        ledger: Ledger,
        branch: Branch,
        step: int,
        doubt: str,
        urgent: bool,
        begins: bool,
    ) -> Decision:
        reason = self._obstacle(ledger, branch, doubt, begins)
        if reason is None and not urgent:
            reason = _outgrown(ledger, branch.tip)
        if reason is None:
            decision = self._policy.decide(self._seen(ledger, branch))
            if urgent and decision.kind == "full" and branch.tip is not None:
                sooner = dataclasses.replace(
                    decision,
                    kind="delta",
                    parent=branch.tip.step,
                    reason="the run is about to end, and a delta is written sooner",
                )
                if self._parent(ledger, branch, sooner) is not None:
                    return sooner
            if decision.kind == "full":
                return decision
            legal = self._parent(ledger, branch, decision) is not None
            if legal and (urgent or not self._lacks_fulls(ledger, branch)):
                return decision
            reason = self._why_no_parent(ledger, branch, decision)
            if legal:
                reason = (
                    f"min_fulls={self._min_fulls}, and the branch has fewer full ones that"
                    " restore"
                )
        _log.info("step %d is saved full: %s", step, reason)
        return full_because(reason)

    def _usable(
        self, ledger: Ledger, branch: Branch, doubt: str, *, asked: bool
    ) -> MergedBaseline | None:
        """The merged baseline, if a save of a branch may rest on its step; else None.

        The step must be in the chain of the tip: after a newer full save a delta on that is
        smaller.

        Args:
            ledger: ledger of the root.
            branch: branch of the save.
            doubt: as in `plan`.
            asked: whether a full, exact or urgent save was asked for; these bring none.
        """
        found, tip = self.baseline, branch.tip
        if asked or found is None or tip is None:
            return None
        if self._obstacle(ledger, branch, doubt, begins=False) is not None:
            return None
        if _outgrown(ledger, tip) or not self._is_below(found, tip, ledger):
            return None
        parent = self._parent(ledger, branch, _bringing(found))
        return found if parent is not None and parent.uuid == found.uuid else None

    def without_stale(self, ledger: Ledger) -> MergedBaseline | None:
        """Forgets the merged baseline if no branch goes on from its step; returns it then."""
        found = self.baseline
        tips = [b.tip for b in self.branches.values() if b.tip is not None]
        if found is None or any(self._is_below(found, tip, ledger) for tip in tips):
            return None
        self.baseline = None
        return found

    def is_shortened(self, plan: SavePlan, ledger: Ledger) -> bool:
        """Whether the chain of a save is about to be shortened: a later save brings a baseline."""
        found = self.baseline
        if found is not None and self._is_below(found, plan.entry, ledger):
            return True
        return any(
            each.plan.baseline is not None and each.plan.lineage == plan.lineage
            for each in self.begun.values()
        )

    @staticmethod
    def _is_below(found: MergedBaseline, tip: Entry, ledger: Ledger) -> bool:
        return any(each.uuid == found.uuid for each in ledger.along(tip))

    def _seen(self, ledger: Ledger, branch: Branch) -> list[SaveRecord]:
        """Records for the policy of the saves of a branch since its latest full one."""
        there = {entry.step: entry for entry in self._legal(ledger, branch)}
        foreseen = {each.step: each.bytes for each in branch.history}

        def restored(step: int) -> tuple[int, int] | None:
            entry = there.get(step)
            if entry is None or not ledger.carries(entry):
                return None
            # A committed entry rests on committed ones only, so the walk may end there.
            flying = itertools.takewhile(
                lambda each: not each.is_committed, ledger.along(entry)
            )
            more = sum(foreseen.get(each.step, 0) for each in flying)
            return ledger.depth(entry.directory), ledger.restore_bytes(entry) + more

        return records(branch.history, restored)

    def _why_no_parent(self, ledger: Ledger, branch: Branch, decision: Decision) -> str:
        """Why a save cannot rest on the parent that a decision names."""
        for entry in self._legal(ledger, branch):
            if entry.step == decision.parent:
                return (
                    f"step {entry.step} is no parent any more: {ledger.obstacle(entry)}"
                )
        return f"step {decision.parent} is not a legal parent any more"

    def _obstacle(
        self, ledger: Ledger, branch: Branch, doubt: str, begins: bool
    ) -> str | None:
        """Why no delta is possible, whatever the policy says; None if one may be."""
        if not branch.parents:
            if branch.no_parents:
                return branch.no_parents
            if ledger.head() is None:
                return NO_BASELINE
            if begins:
                return "a new run begins"
            return "the stamps are not counted from any checkpoint here"
        if not self.guarded:
            return "retention might delete parents: no policy of cnr_jax was asked yet"
        if doubt:
            return doubt
        tip = branch.tip
        if tip is not None and tip.uuid in self.begun:
            return None
        if tip is None or tip.manifest is None or tip.manifest.tables != self.tables:
            return "the tables are not those of the checkpoint before"
        return None

    def _lacks_fulls(self, ledger: Ledger, branch: Branch) -> bool:
        """Whether the branch has fewer full checkpoints that restore than it should have."""
        if branch.tip is None:
            return False
        if self._min_fulls == 1:
            # The full checkpoint below the tip is the one, unless its dense files are gone.
            return ledger.harm_of(ledger.chain(branch.tip)[-1]) is not None
        flying = (e for e in ledger.in_flight() if e.uuid in branch.parents)
        found = branch_of(branch.tip, [*ledger.restorable(), *flying])
        return sum(each.stands_alone for each in found) < self._min_fulls

    def _parent(
        self, ledger: Ledger, branch: Branch, decision: Decision
    ) -> ParentRef | None:
        """Parent that a decision names; None if it is not legal or its chain is not whole."""
        for entry in self._legal(ledger, branch):
            if entry.step == decision.parent and ledger.carries(entry):
                return ParentRef(
                    directory=entry.directory,
                    uuid=entry.uuid,
                    clock=branch.parents[entry.uuid],
                )
        return None


def _outgrown(ledger: Ledger, tip: Entry | None) -> str | None:
    """Why a delta on a step would take too many bits, or be too far off; None if it would not.

    The whole chain tells, as saves in flight rest on the one that has found it.
    """
    chain = ledger.along(tip) if tip is not None else ()
    found = {
        name for e in chain if e.manifest is not None for name in e.manifest.outgrown
    }
    if not found:
        return None
    return f"rows have grown out of the steps of {', '.join(sorted(found))}"


def _in_all_bits(
    ledger: Ledger,
    decision: Decision,
    parent: ParentRef | None,
    is_exact: Callable[[Sequence[Entry]], bool],
) -> tuple[Decision, ParentRef | None]:
    """Decision and parent of a save of all bits: it is full if its chain has rounded rows."""
    if parent and not is_exact(ledger.chain(ledger.entries[parent.directory])):
        return full_because(f"{ALL_BITS}, and the chain has rounded rows"), None
    reason = f"{decision.reason}; {ALL_BITS}"
    return dataclasses.replace(decision, reason=reason), parent


def _bringing(baseline: MergedBaseline) -> Decision:
    """Decision for a delta that brings a merged baseline along."""
    step = names.step_number(baseline.directory)
    reason = f"the chain of step {step} is merged: {baseline.merged} checkpoints"
    return Decision(kind="delta", parent=step, reason=reason)


def motion_of(chain: Sequence[Entry]) -> SampledMotion | None:
    """How far rows had moved in the last step of a chain; None if no step tells.

    Else the newest before it of the same lineage tells: others count from another restore.
    """
    known = [entry.known for entry in reversed(chain) if entry.known]
    same = (each.motion for each in known if each.lineage == known[0].lineage)
    return next((motion for motion in same if motion is not None), None)
