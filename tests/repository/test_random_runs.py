"""Random programs on one root: whatever runs do there, none loses a step to another.

No Orbax and no files: ledger, planner and retention as the handler drives them, held against a
book that is kept by other rules. The same with Orbax is in tests/testing/test_machine.py.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from cnr_jax import errors
from cnr_jax.policy import Consecutive, Full, OneShot
from cnr_jax.repository.index.entries import Entry, branch_of, entry_of
from cnr_jax.repository.index.folders import Folder
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.planner import Planner
from cnr_jax.repository.index.retention import ChainPreservation
from cnr_jax.repository.index.runs import note_restored

from .conftest import make_manifest, table

POLICIES = (Full(), OneShot(), Consecutive(), Consecutive(max_chain=2))


@dataclasses.dataclass
class Info:
    step: int


@dataclasses.dataclass
class Program:
    """One process that uses the root: what it holds in memory."""

    planner: Planner
    new_run: bool
    keep: int | None
    min_fulls: int
    lineage: str
    clock: int = 0
    # By the book: whose state it is, None for one that was made anew; and what the program may
    # save to.
    whose: int | None = None
    joined: int | None = None
    # By the book: uuids of the saves that led to the state, oldest first; None: not known.
    line: list[str] | None = None


class Root:
    """The root, and the book of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = Ledger()
        # Nothing is there: the ledger alone is asked.
        self.path = self.ledger.root = Path("root")
        self.policy = self.random.choice(POLICIES)
        # By uuid: the run that saved it, and its step.
        self.run_of: dict[str, int] = {}
        # By uuid: the saves that led to one, itself last.
        self.lines: dict[str, list[str] | None] = {}
        self.step_of: dict[str, int] = {}
        # Runs that have saved a lower step after a higher one: numbers do not tell which was first.
        self.erratic: set[int] = set()
        self.earlier: dict[str, Entry] = {}
        self.aside: set[str] = set()
        self.restored: dict[str, tuple[str, int]] = {}
        self.runs = 0
        self.counts: Counter[str] = Counter()
        self.open()

    def draw(self) -> None:
        acts = [self.save] * 8 + [self.open, self.restore, self.restore]
        acts += [self.begin_again, self.look, self.foreign, self.lend]
        self.random.choice(acts)()

    def uuids(self) -> set[str]:
        return {entry.uuid for entry in self.ledger.committed()}

    # ---- what programs do -------------------------------------------------------------------

    def open(self) -> None:
        """Another process, with a state made anew."""
        min_fulls = self.random.choice([1, 2, 3])
        new_run = self.random.random() < 0.3
        self.program = Program(
            planner=Planner(
                self.policy, min_fulls=min_fulls, tables=(table(),), new_run=new_run
            ),
            min_fulls=min_fulls,
            new_run=new_run,
            keep=self.random.choice([None, 1, 2, 3]),
            lineage=secrets.token_hex(16),
        )
        self.program.planner.guarded = True
        # Nothing of another process's memory is left.
        self.restored = {}

    def begin_again(self) -> None:
        """The same process makes its state anew."""
        program = self.program
        program.lineage, program.clock = secrets.token_hex(16), 0
        program.whose = program.line = None

    def restore(self) -> None:
        found = self.ledger.restorable()
        if not found:
            return
        entry, program = self.random.choice([found[-1], *found]), self.program
        self._restored(program, entry)
        program.whose = program.joined

    def look(self) -> None:
        """Restores a step, and goes on with the state there was."""
        found = self.ledger.restorable()
        if found:
            lineage, clock = self.program.lineage, self.program.clock
            self._restored(self.program, self.random.choice(found))
            self.program.line = None
            self.program.lineage, self.program.clock = lineage, clock

    def lend(self) -> None:
        """Another manager of the process restores, and this one goes on with that."""
        found = self.ledger.restorable()
        if found:
            entry, program = self.random.choice(found), self.program
            other = dataclasses.replace(program, planner=Planner(self.policy))
            program.line = None
            self._restored(other, entry)
            program.lineage, program.clock = other.lineage, other.clock
            program.whose = self.run_of[entry.uuid]

    def _restored(self, program: Program, entry: Entry) -> None:
        chain = list(reversed(self.ledger.chain(entry)))
        program.lineage, program.clock = secrets.token_hex(16), len(chain)
        program.planner.restored(program.lineage, chain, unchanged=True)
        program.joined = self.run_of[entry.uuid]
        program.line = self.lines[entry.uuid]
        self.restored[program.lineage] = entry.run, program.joined

    def foreign(self) -> None:
        number = self.random.randrange(40)
        name = str(number)
        if name not in self.ledger.directories():
            folder = Folder(
                path=Path(name),
                item="state",
                held=("state",),
                below={"state": ("notes.txt",)},
                why="not ours",
            )
            self.ledger.note_folder(name, folder)

    def save(self) -> None:
        program, before = self.program, self.uuids()
        step = self.random.choice([self._next(), self._next(), 0, 1, 5, 20, 35])
        program.clock += 1
        known = self.restored.get(program.lineage)
        if known:
            note_restored(self.path, program.lineage, known[0], None)
        stamps = program.lineage, program.clock
        # Whether the run that the program is in has got as far as this step, or farther.
        own = [
            e for e in self.ledger.committed() if self.run_of[e.uuid] == program.joined
        ]
        repeats = bool(own) and step <= own[-1].step
        must_be_refused = (
            program.joined is None
            and not program.new_run
            and program.whose is None
            and bool(before)
        )
        try:
            plan = program.planner.plan(self.ledger, str(step), stamps, stamps)
        except errors.UsedRootError:
            assert must_be_refused
            self.counts["refused"] += 1
            assert self.uuids() == before
            return
        except errors.DependentsExistError:
            self.counts["in the way"] += 1
            assert self.uuids() == before
            return
        assert not must_be_refused
        moved = [self.ledger.entries[name] for name in plan.abandoned]
        fulls = self._fulls(program.line)
        for entry in moved:
            self.ledger.forget(entry.directory)
        self.ledger.begin(plan.entry)
        dropped = self._dropped(program)
        if self.random.random() < 0.2:
            self._fail(plan, moved)
            assert self.uuids() == before
            self.counts["failed"] += 1
            return
        entry = self._commit(plan, dropped)
        self._check(program, entry, moved, plan.earlier, before, repeats)
        self._check_branch(program, entry, fulls)

    def _next(self) -> int:
        steps = [entry.step for entry in self.ledger.committed()]
        return max(steps, default=0) + self.random.randrange(3)

    def _dropped(self, program: Program) -> set[str]:
        inner = program.keep and ocp.checkpoint_managers.LatestN(program.keep)
        policy = ChainPreservation(
            inner, lambda: self.ledger, min_fulls=program.min_fulls
        )
        names = self.ledger.directories()
        infos = sorted((Info(int(name)) for name in names), key=lambda info: info.step)
        keeps = policy.should_preserve(infos)
        assert all(
            keep or str(info.step) in self.ledger.doomed
            for info, keep in zip(infos, keeps, strict=True)
        )
        return {str(i.step) for i, keep in zip(infos, keeps, strict=True) if not keep}

    def _fail(self, plan: Any, moved: list[Entry]) -> None:
        self.ledger.forget(plan.directory)
        self.ledger.doomed.clear()
        for entry in reversed(moved):
            self.ledger.add(entry)

    def _commit(self, plan: Any, dropped: set[str]) -> Entry:
        above = self.ledger.entries.get(plan.parent.directory) if plan.parent else None
        manifest = make_manifest(
            plan.step,
            above,
            uuid=plan.uuid,
            clock=plan.clock,
            parent_clock=plan.parent.clock if plan.parent else 0,
            generation=plan.generation,
            lineage=plan.lineage,
            history=(
                *self.program.planner.history_before(plan),
                *make_manifest(plan.step, above).history[-1:],
            ),
            run=plan.run or None,
            forks=plan.forks,
        )
        entry = entry_of(plan.directory, manifest)
        self.ledger.forget(plan.directory)
        self.ledger.doomed.clear()
        self.ledger.add(entry)
        for name in dropped:
            self.ledger.forget(name)
        self.program.planner.saved(plan, entry)
        return entry

    # ---- what must hold ---------------------------------------------------------------------

    def _check(
        self,
        program: Program,
        entry: Entry,
        moved: list[Entry],
        earlier: str,
        before: set[str],
        repeats: bool,
    ) -> None:
        aside = {each.uuid for each in moved}
        begins = program.whose is None and (program.joined is None or repeats)
        if program.joined is None and program.new_run:
            begins = True
        own = program.whose if program.whose is not None else program.joined
        if begins:
            self.runs += 1
        run = self.runs if begins else own
        assert run is not None
        self.run_of[entry.uuid] = run
        if earlier:
            assert program.new_run and program.joined is None and aside == before
            self.earlier |= {each.uuid: each for each in moved}
            self.counts["new run"] += 1
        else:
            # A rollback, or a loop that begins again, of this very run.
            left = program.joined if begins else run
            assert {self.run_of[uuid] for uuid in aside} <= {left}
            self.counts["aside"] += bool(aside)
        gone = before - self.uuids() - aside
        assert {self.run_of[uuid] for uuid in gone} <= {run}, "another run lost a step"
        self.counts["dropped"] += bool(gone)
        self.counts["others kept"] += bool(
            {self.run_of[uuid] for uuid in self.uuids()} - {run}
        )
        program.joined = program.whose = run
        self.aside |= aside
        # One id for one run, and one run for one id.
        ids = {(e.run, self.run_of[e.uuid]) for e in self.ledger.committed()}
        assert len({i for i, _ in ids}) == len({r for _, r in ids}) == len(ids)
        self._check_chains()

    def _fulls(self, line: list[str] | None) -> int:
        """How many full steps that led to a state are there."""
        there = {e.uuid for e in self.ledger.committed() if e.parent is None}
        return len(there.intersection(line or ()))

    def _check_branch(self, program: Program, entry: Entry, fulls: int) -> None:
        """The newest branch is what the book says, and has its full steps.

        Args:
            program: that has saved.
            entry: what it has saved.
            fulls: how many there were before that.
        """
        before = program.line
        if sum(run == self.run_of[entry.uuid] for run in self.run_of.values()) == 1:
            before = []  # the first one of its run
        line = None if before is None else [*before, entry.uuid]
        self.lines[entry.uuid] = program.line = line
        self.step_of[entry.uuid] = entry.step
        steps = [self.step_of[uuid] for uuid in line or ()]
        if sorted(set(steps)) != steps:
            self.erratic.add(self.run_of[entry.uuid])
        if line is None or self.run_of[entry.uuid] in self.erratic:
            return
        if entry.parent is not None:
            assert fulls >= program.min_fulls, "a delta, and too few full ones"
        branch = {each.uuid for each in branch_of(entry, self.ledger.committed())}
        assert branch == self.uuids() & set(line), "another branch than by the book"
        least = min(program.min_fulls, fulls + (entry.parent is None))
        assert self._fulls(line) >= least, "too few full ones are kept"
        self.counts["branches"] += len(branch) > 1
        self.counts["full ones"] += entry.parent is not None and least > 1

    def _check_chains(self) -> None:
        """Every listed step leads to a full one, by names and uuids alone."""
        there = {(e.directory, e.uuid): e for e in self.ledger.committed()}
        for entry in self.ledger.committed():
            at: Entry = entry
            for _ in range(len(there)):
                if at.parent is None:
                    break
                key = at.parent.directory, at.parent.uuid
                assert key in there, f"{entry.directory} has lost its chain"
                at = there[key]
            assert at.parent is None
        assert len(self.ledger.restorable()) == len(there)


def play(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        root = Root(seed)
        try:
            for _ in range(root.random.randrange(5, 40)):
                root.draw()
        except AssertionError as error:
            raise AssertionError(f"program {seed}: {error}") from error
        counts += root.counts
    return counts


EVERYTHING = {
    *("refused", "in the way", "failed", "new run", "aside", "dropped", "others kept"),
    *("branches", "full ones"),
}


def test_no_run_loses_a_step_to_another() -> None:
    counts = play(range(250))
    assert counts.keys() >= EVERYTHING, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_run_loses_a_step_to_another_in_ten_thousand_programs() -> None:
    counts = play(range(1_000_000, 1_010_000))
    assert counts.keys() >= EVERYTHING, counts
