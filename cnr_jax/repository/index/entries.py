"""The checkpoints of a root, and which led to which.

Pure, without disk. A *branch* is the steps that led to one step, without those left behind: a
rollback leaves steps in the root whose numbers are higher than that of the step that the run went
back to, and the next save does not follow from them. Each manifest says where its branch left
older ones. Where an old manifest does not, step numbers decide.
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

from cnr_jax.format import names
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
    """Part of a manifest that a catalogue repeats, beside what an `Entry` has of it.

    Attributes:
        tables: digest of the tables of the step.
        brings: whether the step brought a merged baseline along.
    """

    lineage: str
    recorded_clock: int | None
    totals: Totals
    motion: SampledMotion | None
    tables: str
    brings: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step directory.

    Attributes:
        manifest: manifest of the step; None for a save that is still being written, for a step of
            plain Orbax, and for a step known from a catalogue.
        run: run of the step; empty for the run of all steps whose manifests name none.
        forks: where its branch left older ones. Empty if no step of those is part of it, None if
            that is not known.
        orbax: name of the item of its state, if plain Orbax saved the step and it is adopted. It
            then belongs to whatever run saves beside it. Empty for a step of this library.
        summary: summary of a committed step whose manifest was not read.
        stands_for: uuids of checkpoints of the same state that this one replaces.
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
        """Whether this is the checkpoint of a uuid, or stands for it as a parent."""
        return uuid == self.uuid or uuid in self.stands_for

    @property
    def is_committed(self) -> bool:
        """Whether the step is committed, rather than being written."""
        return self.known is not None or bool(self.orbax)

    @property
    def known(self) -> Manifest | Summary | None:
        """Manifest or summary of a committed step of this library; None for any other."""
        return self.manifest or self.summary

    @property
    def stands_alone(self) -> bool:
        """Whether the step needs no other to be restored: it is full, or of plain Orbax."""
        return self.parent is None

    @property
    def has_deltas(self) -> bool:
        """Whether rows of the step were saved by deltas, also if these are merged by now."""
        if self.kind == "delta" or self.stands_for:
            return True
        known = self.known
        if isinstance(known, Summary):
            return known.brings
        return known is not None and brings_baseline(known)

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows of the step; 0 if they are not known."""
        totals = self.known.totals if self.known else None
        return totals.table_bytes + totals.slot_bytes if totals else 0

    @property
    def kind(self) -> Literal["full", "delta", "orbax"]:
        """`"full"` or `"delta"`, or `"orbax"` for an adopted step."""
        if self.orbax:
            return "orbax"
        return "full" if self.stands_alone else "delta"

    def is_of(self, run: str | None) -> bool:
        """Whether the step belongs to a run, which then may drop it or move it aside."""
        return bool(self.orbax) or self.run == run


def brings_baseline(manifest: Manifest) -> bool:
    """Whether a full checkpoint brought the rows of a merged chain along."""
    return names.BASELINE in manifest.required_features


def tables_digest(known: Manifest | Summary) -> str:
    """Digest of the tables of a checkpoint: 32 hex digits that differ if the tables do."""
    if isinstance(known, Summary):
        return known.tables
    text = json_text(to_json(known.tables))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Sort key of entries, newest last: a later generation is newer, whatever its step numbers. Each
# save calls it for every entry, so it is no Python function.
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
    """Parent of an entry, or what stands for it; None if it has none, or none is known."""
    parent = entry.parent
    if parent is None:
        return None
    above = entries.get(parent.directory)
    # Not by `answers_to`: a call would cost time for each step of a long chain.
    if above is not None and above.uuid == parent.uuid:
        return above
    for name, each in entries.items():
        # The name is compared last: most entries stand for no others.
        if each.stands_for and each.answers_to(parent.uuid):
            if plain(name) == plain(parent.directory):
                return each
    return None


def chain_of(entry: Entry, above: Callable[[Entry], Entry | None]) -> Iterator[Entry]:
    """Yields an entry and those that it rests on, the entry first, as far as they are known.

    If the parents form a circle, each comes once. The last entry names a parent in that case, and
    also if its parent is not known.

    Args:
        entry: entry to begin with.
        above: returns the parent of an entry; None if it has none, or none is known.
    """
    # By directory, then compared as a whole: a directory may have had another entry before.
    seen: dict[str, list[Entry]] = {}
    each: Entry | None = entry
    while each is not None and each not in seen.setdefault(each.directory, []):
        seen[each.directory].append(each)
        yield each
        each = above(each)


def with_dependents(
    directories: Iterable[str], entries: Mapping[str, Entry]
) -> set[str]:
    """The given step directories and all that rest on them, as far as they are known."""
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
    """Facts about one lineage.

    Attributes:
        parents: clock of each legal parent by its uuid, counted in this lineage.
        tip: the newest checkpoint of this lineage: the last one saved, or the one restored.
        history: saves since the latest full one, the tip last.
        restores: how often a run was restored along this branch.
        last_clock: clock of the tip.
        no_parents: why the branch has no legal parents, if that is known.
        motion_before: how far rows of the restored step had moved since the restore before it;
            None if nothing was restored, or it is not known.
        motion_since: how far rows have moved since then, by the last save of this lineage that
            held enough rows to tell.
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
        """Forecast of how far rows move until the next restore; None if nothing is known.

        It is the motion up to the last restore or that since then, whichever is larger.
        """
        known = [
            each for each in (self.motion_before, self.motion_since) if each is not None
        ]
        return min(known, key=lambda each: each.even_bits, default=None)

    def forget_parents(self, entries: Mapping[str, Entry]) -> None:
        """Drops parents that are gone, once they are about as many as the entries."""
        if len(self.parents) <= 2 * len(entries) + _SPARE_PARENTS:
            return
        there = {entry.uuid for entry in entries.values()}
        self.parents = {u: c for u, c in self.parents.items() if u in there}


def branch_of(tip: Entry, entries: Iterable[Entry]) -> list[Entry]:
    """Entries that make up the branch of a step, newest last.

    Args:
        tip: the newest step of the branch, which need not be among the entries.
        entries: any entries. Those of other runs are never part of a branch.
    """
    own = _of_run(tip, entries)
    last = _last_steps(tip, own)
    # The chain belongs to the branch even if a user saved a lower step after a higher one.
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
    """Forks of the next save: where its branch leaves older ones, oldest first.

    A generation of which no step is left gets no fork. Otherwise the manifests of a run that goes
    back every day would grow forever.

    Args:
        tip: checkpoint that the save goes on from. If it is None, which is unknown, the save
            follows the newest branch of its run, up to the step before this one.
        entries: committed entries.
        run: run of the save.
        lineage: lineage of the stamps that choose its rows.
        generation: generation of the save.
        step: step of the save.
    """
    own = [each for each in entries if each.is_of(run)]
    # A save whose commit was seen late is not the tip, yet the state has gone on from it.
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
    """Entries of the run of `tip` that are not newer than it, newest last."""
    found = sorted(entries, key=order)
    run = tip.run
    if tip.orbax:  # it belongs to whatever run there is
        run = next((each.run for each in reversed(found) if not each.orbax), run)
    newest = order(tip)
    return [each for each in found if each.is_of(run) and order(each) <= newest]


def _last_steps(tip: Entry, own: Sequence[Entry]) -> dict[int, int]:
    """Last step of each generation that belongs to the branch of `tip`.

    Args:
        tip: newest step of the branch.
        own: entries of its run, newest last.
    """
    if tip.forks is not None:
        named = {fork.generation: fork.step for fork in tip.forks}
        return {**named, tip.generation: tip.step}
    # A branch begins after the step that the run went back to. So an older generation counts up
    # to the first step of the next one.
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
    """Records of a history for policies, one for each save; saves of one entry share its mean.

    Args:
        history: history of a branch.
        restored: returns depth and bytes of a restore of a step; None if they are not known.
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
