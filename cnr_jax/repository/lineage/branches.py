"""Branches: what a save may rest on, and which steps led to one, without those left behind.

A rollback leaves steps behind: they stay in the root, newer by number than the step that the run
went back to, but what is saved next does not come after them. Each manifest says where its branch
left older ones; where an old one does not, step numbers decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from cnr_jax.format.manifest import Fork, HistoryEntry
from cnr_jax.repository.lineage.entries import Entry, order, parent_of
from cnr_jax.repository.lineage.ledger import Ledger

_SPARE_PARENTS = 16


@dataclasses.dataclass(slots=True, kw_only=True)
class Branch:
    """What is known of one lineage.

    Attributes:
        parents: clock of each legal parent by its uuid, counted in this lineage.
        tip: the newest checkpoint of this lineage: the last one saved, or the one restored.
        history: saves since the latest full one, the tip last.
        restores: how often a run was restored along this branch.
        last_clock: clock of the tip.
        no_parents: why the branch has no legal parents, where that is known.
    """

    parents: dict[str, int] = dataclasses.field(default_factory=dict)
    tip: Entry | None = None
    history: tuple[HistoryEntry, ...] = ()
    restores: int = 0
    last_clock: int = -1
    no_parents: str = ""

    def forget_parents(self, ledger: Ledger) -> None:
        """Drops parents that are gone, once they are as many as those that are there."""
        if len(self.parents) <= 2 * len(ledger.entries) + _SPARE_PARENTS:
            return
        there = {entry.uuid for entry in ledger.entries.values()}
        self.parents = {u: c for u, c in self.parents.items() if u in there}


def branch_of(tip: Entry, entries: Iterable[Entry]) -> list[Entry]:
    """Those of the entries that the branch of a step consists of, newest last.

    Args:
        tip: the newest step of the branch, which need not be among them.
        entries: any, also of other runs, which no branch has.
    """
    own = _of_run(tip, entries)
    last = _last_steps(tip, own)
    # Also where somebody has saved a lower step than the one before it.
    known, chain = {each.directory: each for each in own}, set[str]()
    at: Entry | None = tip
    while at is not None and at.directory not in chain:
        chain.add(at.directory)
        at = parent_of(at, known)
    return [
        each
        for each in own
        if each.step <= last.get(each.generation, -1) or each.directory in chain
    ]


def full_ones(tip: Entry, entries: Iterable[Entry]) -> list[Entry]:
    """The full checkpoints among the entries that the branch of a step has, newest last."""
    return [each for each in branch_of(tip, entries) if each.parent is None]


def forks_of_next(
    tip: Entry | None,
    entries: Sequence[Entry],
    *,
    run: str,
    lineage: str,
    generation: int,
    step: int,
) -> tuple[Fork, ...]:
    """Where the branch of the next save leaves older ones, oldest first.

    Generations of which no step is left are not named: a root that goes back every day would
    have manifests that grow forever.

    Args:
        tip: what the save goes on from; None: not known, and then it follows the newest branch
            of its run, as far as that had come before this step.
        entries: committed ones.
        run: of the save.
        lineage: of the stamps that choose its rows.
        generation: of the save.
        step: of the save.
    """
    own = [each for each in entries if each.is_of(run)]
    # A save whose commit was not seen at first is no tip, but the state has gone on from it.
    same = [e for e in own if e.manifest and e.manifest.lineage == lineage]
    tip = max([*same, *([tip] if tip else [])], key=order, default=None)
    before = tip or max(own, key=order, default=None)
    if before is None or not before.is_of(run):
        return ()
    last = _last_steps(before, _of_run(before, own))
    if tip is None:
        last = {number: min(at, step - 1) for number, at in last.items()}
    there = {each.generation for each in own}
    return tuple(
        Fork(generation=number, step=last[number])
        for number in sorted(there & last.keys())
        if number < generation and last[number] >= 0
    )


def _of_run(tip: Entry, entries: Iterable[Entry]) -> list[Entry]:
    """Entries of the run of a step that are no newer, newest last."""
    found = sorted(entries, key=order)
    run = tip.run
    if tip.orbax:  # which belongs to whatever run there is
        run = next((each.run for each in reversed(found) if not each.orbax), run)
    newest = order(tip)
    return [each for each in found if each.is_of(run) and order(each) <= newest]


def _last_steps(tip: Entry, own: Sequence[Entry]) -> dict[int, int]:
    """By generation, the last step of it that belongs to the branch of a step.

    Args:
        tip: the step.
        own: entries of its run, newest last.
    """
    if tip.forks:
        named = {fork.generation: fork.step for fork in tip.forks}
        return {**named, tip.generation: tip.step}
    # A branch begins behind the step that the run went back to, so each older one counts as far
    # as it had come before the first step of the next.
    last, first = {tip.generation: tip.step}, tip.step
    for each in reversed(own):
        if each.generation not in last and each.step < first:
            last[each.generation] = each.step
        if each.step <= last.get(each.generation, -1):
            first = min(first, each.step)
    return last
