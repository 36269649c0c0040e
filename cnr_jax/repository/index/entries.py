"""The checkpoints of a root, and which led to which.

Pure, without disk. A *branch* is the steps that led to one, without those left behind: a rollback
leaves steps in the root that are newer by number than the step that the run went back to, but what
is saved next does not come after them. Each manifest says where its branch left older ones; where
an old one does not, step numbers decide.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Literal

from cnr_jax.format.fields import json_text
from cnr_jax.format.manifest import (
    Fork,
    HistoryEntry,
    Manifest,
    ParentRef,
    SampledMotion,
    Totals,
    to_json,
)
from cnr_jax.format.names import plain, step_number
from cnr_jax.policy import SaveRecord
from cnr_jax.repository.orbax_steps import OrbaxStep

_SPARE_PARENTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a catalogue says of a step beside what leads to which, as its manifest does.

    Attributes:
        tables: digest of its tables.
    """

    lineage: str
    recorded_clock: int | None
    totals: Totals
    motion: SampledMotion | None
    tables: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step directory.

    Attributes:
        manifest: None for a save that is still being written, for a step of plain Orbax, and for
            one that a catalogue tells of.
        run: that it belongs to; empty: the one of all steps whose manifests name none.
        forks: where its branch left older ones; empty: no step of them is part of it. None: not
            known.
        orbax: the item of its state, if plain Orbax saved it and it is adopted: then it belongs
            to whatever run saves beside it. Empty: it is of this library.
        summary: of a committed step whose manifest was not read.
        stands_for: uuids of checkpoints of the same state in whose place it is.
    """

    directory: str
    step: int
    uuid: str
    generation: int
    parent: ParentRef | None
    manifest: Manifest | None = None
    run: str = ""
    forks: tuple[Fork, ...] | None = None
    orbax: str = ""
    summary: Summary | None = None
    stands_for: tuple[str, ...] = ()

    def answers_to(self, uuid: str) -> bool:
        """Whether what rests on a checkpoint can rest on this one."""
        return uuid == self.uuid or uuid in self.stands_for

    @property
    def is_committed(self) -> bool:
        """Whether it is there, rather than being written."""
        return self.known is not None or bool(self.orbax)

    @property
    def known(self) -> Manifest | Summary | None:
        """What is known of it, where it is committed and of this library."""
        return self.manifest or self.summary

    @property
    def stands_alone(self) -> bool:
        """Whether it can be restored without any other: it is full, or of plain Orbax."""
        return self.parent is None

    @property
    def rows_bytes(self) -> int:
        """Bytes of its rows, as far as they are known."""
        totals = self.known.totals if self.known else None
        return totals.table_bytes + totals.slot_bytes if totals else 0

    @property
    def kind(self) -> Literal["full", "delta", "orbax"]:
        """`"full"` or `"delta"`, or `"orbax"` for one that was adopted."""
        if self.orbax:
            return "orbax"
        return "full" if self.stands_alone else "delta"

    def is_of(self, run: str | None) -> bool:
        """Whether a run counts it among its steps, and may drop it or move it aside."""
        return bool(self.orbax) or self.run == run


def tables_digest(known: Manifest | Summary) -> str:
    """What tells the tables of a checkpoint from others."""
    if isinstance(known, Summary):
        return known.tables
    text = json_text(to_json(known.tables))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Sorts entries, newest last: a later generation is newer, whatever its step numbers. It is asked of
# all entries in every save.
order: Callable[[Entry], tuple[int, int]] = operator.attrgetter("generation", "step")


def entry_of(directory: str, manifest: Manifest) -> Entry:
    """The entry of a committed checkpoint."""
    return Entry(
        directory=directory,
        step=manifest.step,
        uuid=manifest.uuid,
        generation=manifest.generation,
        parent=manifest.parent,
        manifest=manifest,
        run=manifest.run or "",
        forks=manifest.forks,
        stands_for=manifest.stands_for or (),
    )


def orbax_entry(directory: str, step: OrbaxStep) -> Entry:
    """The entry of an adopted step: a baseline of the first branch, on which no delta rests."""
    return Entry(
        directory=directory,
        step=step_number(directory),
        uuid=step.uuid,
        generation=1,
        parent=None,
        orbax=step.item,
    )


def parent_of(entry: Entry, entries: Mapping[str, Entry]) -> Entry | None:
    """The entry that one rests on, if it is known, or one that stands for that."""
    parent = entry.parent
    if parent is None:
        return None
    above = entries.get(parent.directory)
    # Without a call: it is asked for each step of long chains.
    if above is not None and above.uuid == parent.uuid:
        return above
    for name, each in entries.items():
        # The name is compared last: of most nothing stands for others.
        if each.stands_for and each.answers_to(parent.uuid):
            if plain(name) == plain(parent.directory):
                return each
    return None


def chain_of(entry: Entry, above: Callable[[Entry], Entry | None]) -> Iterator[Entry]:
    """An entry and those that it rests on, itself first, as far as they are known.

    Where parents lead in a circle, each once; the last one has a parent then, as it has where that
    is not known.

    Args:
        entry: to begin with.
        above: the parent of an entry; None: it has none, or none is known.
    """
    # By directory and else as a whole: one may stand where another was saved before.
    seen: dict[str, list[Entry]] = {}
    each: Entry | None = entry
    while each is not None and each not in seen.setdefault(each.directory, []):
        seen[each.directory].append(each)
        yield each
        each = above(each)


def with_dependents(
    directories: Iterable[str], entries: Mapping[str, Entry]
) -> set[str]:
    """Step directories, and all that rest on them, as far as they are known."""
    children: dict[str, list[str]] = {}
    for entry in entries.values():
        if (above := parent_of(entry, entries)) is not None:
            children.setdefault(above.directory, []).append(entry.directory)
    found = set(directories)
    left = [*found]
    while left:
        new = [name for name in children.get(left.pop(), ()) if name not in found]
        found.update(new)
        left += new
    return found


def named(entries: Collection[Entry]) -> str:
    """Step directories for an error text, oldest first."""
    ordered = sorted(entries, key=order)
    return ", ".join(entry.directory for entry in ordered)


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
        motion_before: how far rows had moved, since the restore before, in the step that was
            restored; None: it is not known, or none was.
        motion_since: how far they have since, as the last save of this lineage saw it that held
            rows enough to tell.
    """

    parents: dict[str, int] = dataclasses.field(default_factory=dict)
    tip: Entry | None = None
    history: tuple[HistoryEntry, ...] = ()
    restores: int = 0
    last_clock: int = -1
    no_parents: str = ""
    motion_before: SampledMotion | None = None
    motion_since: SampledMotion | None = None

    def motion(self) -> SampledMotion | None:
        """How far rows are going to move until the next restore, as far as that is known.

        As far as until the last one, or as they have already.
        """
        known = [
            each for each in (self.motion_before, self.motion_since) if each is not None
        ]
        return min(known, key=lambda each: each.even_bits, default=None)

    def forget_parents(self, entries: Mapping[str, Entry]) -> None:
        """Drops parents that are gone, once they are as many as those that are there."""
        if len(self.parents) <= 2 * len(entries) + _SPARE_PARENTS:
            return
        there = {entry.uuid for entry in entries.values()}
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
    known = {each.directory: each for each in own}
    chain = {e.directory for e in chain_of(tip, lambda e: parent_of(e, known))}
    return [
        each
        for each in own
        if each.step <= last.get(each.generation, -1) or each.directory in chain
    ]


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

    Generations without a step that is left are not named: a root that goes back every day would
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
    same = [e for e in own if e.known and e.known.lineage == lineage]
    tip = max([*same, *([tip] if tip else [])], key=order, default=None)
    before = tip or max(own, key=order, default=None)
    if before is None or not before.is_of(run):
        return ()
    newest = order(before)
    own = sorted((e for e in own if order(e) <= newest), key=order)
    last = _last_steps(before, own)
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
    if tip.forks is not None:
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


def records(
    history: Iterable[HistoryEntry],
    restored: Callable[[int], tuple[int, int] | None] = lambda step: None,
) -> list[SaveRecord]:
    """A history as policies see it, save by save; of several in one entry the mean of each.

    Args:
        history: of a branch.
        restored: depth and bytes of a restore of a step; None: not known.
    """
    found: list[SaveRecord] = []
    for entry in history:
        depth, restore_bytes = restored(entry.step) or (None, None)
        record = SaveRecord(
            step=entry.step,
            kind=entry.kind,
            bytes=round(entry.bytes / entry.saves),
            rows=round(entry.rows / entry.saves),
            secs=entry.secs / entry.saves,
            depth=depth,
            restore_bytes=restore_bytes,
        )
        found += [record] * entry.saves
    return found
