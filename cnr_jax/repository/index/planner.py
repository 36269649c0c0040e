"""What the next save is: full or delta, on which parent, in which generation.

The policy proposes; this module knows what is legal. A parent is legal for a state if the state's
`touched` rows are counted from it: it was saved in the same lineage, or is the step that was
restored, or rests beneath that. Whatever is not provably legal becomes a full save, with the
reason in the log and the manifest: doubt costs bytes, never rows.
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
    Fork,
    HistoryEntry,
    Kind,
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
from cnr_jax.texts import logger

_log = logger(__name__)
ALL_BITS = "all bits were asked for"
"""In the reason of each exact save: manifests do not say otherwise that it was one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One save as it was decided, the same on every process.

    Attributes:
        uuid: of the save.
        directory: of the step.
        lineage: of the stamps that choose rows.
        clock: of the stamps that choose rows, in this save.
        parent: that a delta rests on; None: the save is full.
        generation: of its branch.
        codec: that the policy names; None: the one of the options.
        policy: name of the one that decided.
        reason: why the save is what it is.
        restores: how often a run was restored along this chain.
        run: that this save belongs to; empty: the one of steps whose manifests name none.
        forks: where the branch of this save leaves older ones.
        exact: rows are stored raw, whatever their codecs.
        encoding: of the run that goes on, for what options do not give; None: none does.
        auto_bits: width of codes that options leave to the number of restores, but for small
            tables; None if they leave none to it.
        dithered_bits: width of the widest codes that are dithered; 0: none are. The same for all
            saves of a lineage.
        abandoned: step directories to rename aside before this one is written; where it has a name
            of its own, those that its commit leaves behind.
        earlier: folder of the root that `abandoned` are moved into instead, because a new run
            begins; empty if none does.
    """

    uuid: str
    directory: str
    lineage: str
    clock: int
    parent: ParentRef | None
    generation: int
    codec: str | None
    policy: str
    reason: str
    restores: int
    run: str
    forks: tuple[Fork, ...] | None
    exact: bool
    encoding: EncodingEntry | None
    auto_bits: int | None = None
    dithered_bits: int = 0
    abandoned: tuple[str, ...]
    earlier: str

    @property
    def step(self) -> int:
        """Number of the step."""
        return names.step_number(self.directory)

    @property
    def leaves_behind(self) -> bool:
        """Whether `abandoned` stay where they are, and the commit leaves them behind."""
        return names.branch_generation(self.directory) > 0

    @property
    def kind(self) -> Kind:
        """Full, or a delta on its parent."""
        return "full" if self.parent is None else "delta"

    @property
    def entry(self) -> Entry:
        """Of the save as long as it is being written."""
        return Entry(
            directory=self.directory,
            step=self.step,
            uuid=self.uuid,
            generation=self.generation,
            parent=self.parent,
            run=self.run,
            forks=self.forks,
        )


class Begun(NamedTuple):
    """A save that has begun, and whose outcome is not known.

    Attributes:
        rows: that it writes, about; 0 until they are chosen.
    """

    plan: SavePlan
    rows: int = 0

    def foreseen(self, before: Sequence[HistoryEntry]) -> HistoryEntry:
        """What the history will say of it, if a row takes what it took in the last saves.

        Args:
            before: of the branch, committed. If there is none, a byte a row will do: nothing else
                is compared with it then.
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
    """Plans the saves of one root, on the process that decides.

    Args:
        policy: proposes full or delta.
        nonce: 24 hex digits that are unique to this run of the program.
        min_fulls: saves are full until a branch has so many full ones.
        tables: that are saved, as manifests list them.
        new_run: a run begins here, whatever the root holds, unless one is restored.

    Attributes:
        tables: that are saved, as manifests list them.
        guarded: retention is known to keep parents.
        runs: tells the run of a save.
        branches: of each lineage that may go on, what is known of it by what is committed.
        begun: saves whose outcome is not known yet, by uuid, in order.
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

    def goes_on(self, stamps: Stamps) -> bool:
        """Whether a save can be planned as if all were committed that has begun.

        Not the first of a lineage, nor one that goes back: what that is, and where it goes, is
        known once what was before is committed, or has failed.
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
            ledger: of the root.
            directory: of the step, by its plain name.
            stamps: lineage (32 hex digits) and clock of those that choose rows; the lineage is
                empty if there were none before, and then one is drawn.
            touched: lineage and clock of the touched rows that go with the state, whether they
                choose rows or not; None without any.
            doubt: why a delta might miss rows; empty: it would not.
            urgent: the run is about to end: a delta, where one is legal.
            full: a full save, whatever the policy says and however urgent it is.
            exact: all bits, whatever the codecs: full, unless a chain holds all bits already.
            is_exact: whether a chain holds all bits; asked only where that matters.

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
        generation = rollback.generation_of_next(ledger, branch.tip, self._nonce)
        is_first = self.runs.current is None
        begins = run != self.runs.current and bool(left)
        directory, abandoned = rollback.room_for(
            ledger, branch.tip, directory, generation, run, left
        )
        self.runs.tries(directory)
        gone = {entry.directory for entry in abandoned}
        if full:
            decision = full_because("a full save was asked for")
        else:
            decision = self._decide(ledger, branch, step, doubt, urgent, begins)
        parent = self._parent(ledger, branch, decision)
        if exact:
            reason = f"{decision.reason}; {ALL_BITS}"
            if parent and not is_exact(ledger.chain(ledger.entries[parent.directory])):
                reason = f"{ALL_BITS}, and the chain has rounded rows"
                decision, parent = full_because(reason), None
            decision = dataclasses.replace(decision, reason=reason)
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
        )

    def begins(self, plan: SavePlan) -> None:
        """Notes a save that begins: the next may rest on it."""
        self.begun[plan.uuid] = Begun(plan)

    def staged(self, uuid: str, rows: int) -> None:
        """Notes about how many rows a save writes that has begun."""
        if (begun := self.begun.get(uuid)) is not None:
            self.begun[uuid] = begun._replace(rows=rows)

    def failed(self, uuid: str) -> None:
        """Notes a save that failed: neither it is a parent, nor what rests on it."""
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
        # Else of a save of too few rows: these tell nothing.
        branch.motion_since = entry.manifest.motion or branch.motion_since
        self.runs.saved(plan.lineage, plan.run)
        branch.history, branch.no_parents = entry.manifest.history, ""

    def history_before(self, plan: SavePlan) -> tuple[HistoryEntry, ...]:
        """What the history of a save says of those before it that are known to be committed."""
        return self.branches[plan.lineage].history if plan.parent else ()

    def restored(
        self,
        lineage: str,
        chain: Sequence[Entry],
        *,
        unchanged: bool,
        encoding: EncodingEntry | None = None,
    ) -> None:
        """Notes that the state of `chain[-1]` goes on as `lineage`.

        All other lineages end: whoever goes on with the restored state but with touched rows
        from before looks just like whoever only evaluated it, and would lose rows.

        Args:
            lineage: the fresh lineage of the restored touched rows.
            chain: the full checkpoint first, the restored one last; clocks count 0, 1, ...
            unchanged: whether the tables are those that the chain holds, and changed rows found
                as they were. If not (other rows, dtypes, names, not all leaves), no checkpoint
                is a legal parent.
            encoding: of its rows.
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

        It goes on with the run of the newest checkpoint beside it; if there is none, a run
        begins with it.

        Args:
            lineage: the fresh lineage of the restored touched rows.
            entry: of the step.
            ledger: of its root, as far as it is known.
        """
        own = [e.run for e in ledger.committed() if e.known] if ledger else []
        self.runs.restored(lineage, own[-1] if own else secrets.token_hex(16), None)
        self.end_lineages(0)
        why = f"step {entry.step} is of plain Orbax, and no delta can rest on it"
        self.branches = {lineage: Branch(tip=entry, no_parents=why)}

    def end_lineages(self, restores: int) -> None:
        """Forgets all legal parents: the state may have been replaced from elsewhere.

        Args:
            restores: how often that state was restored, this time included.
        """
        self._most_restores = max(self._most_restores, restores)
        self.branches = {}

    @property
    def restores(self) -> int:
        """How often the state was restored that is saved next, as far as can be foreseen."""
        known = (branch.restores for branch in self.branches.values())
        return max(known, default=self._most_restores)

    @property
    def motion(self) -> SampledMotion | None:
        """How far rows of the state that is saved next move, as far as can be foreseen."""
        known = [motion for b in self.branches.values() if (motion := b.motion())]
        return known[-1] if known else None

    @property
    def motion_before(self) -> SampledMotion | None:
        """How far they had moved until the last restore, as far as can be foreseen."""
        known = [b.motion_before for b in self.branches.values() if b.motion_before]
        return known[-1] if known else None

    def _branch(self, lineage: str, clock: int) -> Branch:
        """The branch of a lineage; a fresh one where the state went back in memory.

        Rows of the time in between then have stamps that say nothing about the checkpoints
        taken before, and that stays so if this save fails and the clock catches up.
        """
        # Whether a lineage from nowhere goes on with what was restored cannot be seen.
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
        """A branch as it is once all is committed that has begun in its lineage."""
        before = branch.history
        for begun in self.begun.values():
            plan = begun.plan
            if plan.lineage != lineage:
                continue
            history = branch.history if plan.parent else ()
            branch = dataclasses.replace(
                branch,
                parents={**branch.parents, plan.uuid: plan.clock},
                tip=plan.entry,
                history=(*history, begun.foreseen(before)),
                last_clock=plan.clock,
            )
        return branch

    def _legal(self, ledger: Ledger, branch: Branch) -> list[Entry]:
        """Legal parents that are there or being written, and do not go."""
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

    def _seen(self, ledger: Ledger, branch: Branch) -> list[SaveRecord]:
        """The saves of a branch since its latest full one, as the policy sees them."""
        there = {entry.step: entry for entry in self._legal(ledger, branch)}
        foreseen = {each.step: each.bytes for each in branch.history}

        def restored(step: int) -> tuple[int, int] | None:
            entry = there.get(step)
            if entry is None or not ledger.carries(entry):
                return None
            # What is committed rests on nothing that is not; chains may be long.
            flying = itertools.takewhile(
                lambda each: not each.is_committed, ledger.along(entry)
            )
            more = sum(foreseen.get(each.step, 0) for each in flying)
            return ledger.depth(entry.directory), ledger.restore_bytes(entry) + more

        return records(branch.history, restored)

    def _why_no_parent(self, ledger: Ledger, branch: Branch, decision: Decision) -> str:
        """Why the parent that a decision names is none."""
        for entry in self._legal(ledger, branch):
            if entry.step == decision.parent:
                return (
                    f"step {entry.step} is no parent any more: {ledger.obstacle(entry)}"
                )
        return f"step {decision.parent} is not a legal parent any more"

    def _obstacle(
        self, ledger: Ledger, branch: Branch, doubt: str, begins: bool
    ) -> str | None:
        """Why no delta is possible, whatever the policy says; None if one is."""
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
            # What deltas rest on is one, unless dense files of it are gone.
            return ledger.harm_of(ledger.chain(branch.tip)[-1]) is not None
        flying = (e for e in ledger.in_flight() if e.uuid in branch.parents)
        found = branch_of(branch.tip, [*ledger.restorable(), *flying])
        return sum(each.stands_alone for each in found) < self._min_fulls

    def _parent(
        self, ledger: Ledger, branch: Branch, decision: Decision
    ) -> ParentRef | None:
        """The parent a decision names, if it is legal and its chain is whole."""
        for entry in self._legal(ledger, branch):
            if entry.step == decision.parent and ledger.carries(entry):
                return ParentRef(
                    directory=entry.directory,
                    uuid=entry.uuid,
                    clock=branch.parents[entry.uuid],
                )
        return None


def motion_of(chain: Sequence[Entry]) -> SampledMotion | None:
    """How far rows had moved in the last step of a chain, which may hold too few to tell.

    Then by the newest one before it that is of the same lineage: of others it was another way.
    """
    known = [entry.known for entry in reversed(chain) if entry.known]
    same = (each.motion for each in known if each.lineage == known[0].lineage)
    return next((motion for motion in same if motion is not None), None)
