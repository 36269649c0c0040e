"""Which checkpoints rest on which, how long the chains are, and what is wrong with them.

Pure, without disk: a caller that reads a root notes here what it found, and then asks.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from cnr_jax.format import names
from cnr_jax.repository.index.entries import (
    Entry,
    Summary,
    branch_of,
    chain_of,
    order,
    parent_of,
    tables_digest,
)
from cnr_jax.repository.index.folders import Folder


class Flaw(NamedTuple):
    """Reason why a checkpoint cannot rest on the parent that it names.

    Attributes:
        kind: stable identifier of the reason.
        text: the reason in one line.
    """

    kind: Literal[
        "parent_missing",
        "not_readable",
        "foreign_parent",
        "circle",
        "tables_differ",
    ]
    text: str


class Harm(NamedTuple):
    """Damage that was found in the files of a checkpoint.

    Attributes:
        reason: what is wrong, in one line.
        itself_alone: whether only the checkpoint itself is lost, and others can still rest on it.
        unread: whether storage failed to read it, which may pass.
    """

    reason: str
    itself_alone: bool
    unread: bool = False


class Standing(NamedTuple):
    """Sums over the chain of an entry.

    Attributes:
        depth: number of entries in the chain, the entry itself included.
        rooted: whether the chain leads to an entry without a parent.
        whole: whether it is rooted, has no damage, and contains no save that is being written.
        rows_bytes: bytes of the rows of the whole chain.
    """

    depth: int
    rooted: bool
    whole: bool
    rows_bytes: int

    def with_child(self, entry: Entry, *, sound: bool) -> Standing:
        """Standing of the chain with one more entry, which may be its first."""
        return Standing(
            depth=self.depth + 1,
            rooted=self.rooted or entry.stands_alone,
            whole=(self.whole or entry.stands_alone) and sound,
            rows_bytes=self.rows_bytes + entry.rows_bytes,
        )


# Why a copy of a step, or one that was renamed, is not restored.
STRAY = "it is not called as the other steps are: no manager lists it"
NOWHERE = Standing(depth=0, rooted=False, whole=False, rows_bytes=0)


@dataclasses.dataclass(slots=True)
class Derived:
    """Answers derived from the entries and the known damage in one pass over them.

    Attributes:
        version: version of the chains when the pass began.
        committed: committed entries, newest last.
        restorable: entries that can be restored, newest last.
        by_step: entries of each step, mostly one.
        children: directories of the entries that rest on an entry, by its directory.
        wanted: directories of parents that are missing, or were missing once.
        standing: standing of every entry, by directory.
    """

    version: int
    committed: list[Entry]
    restorable: list[Entry]
    by_step: dict[int, list[Entry]]
    children: dict[str, list[str]]
    wanted: set[str]
    standing: dict[str, Standing]

    def grow(self, entry: Entry, above: Entry | None, *, sound: bool) -> bool:
        """Adds an entry, if no other rests on it and no committed one is newer.

        Each save adds such an entry and drops it again. In a root of thousands of steps, a full
        pass for each would cost more than all else that a save does.

        Args:
            entry: entry of a directory that has none yet.
            above: its parent, if that is known.
            sound: whether it is committed and free of damage.

        Returns:
            Whether nothing else changes; if False, the entry was not added.
        """
        newest = self.committed[-1] if self.committed else entry
        is_older = order(entry) < order(newest)
        is_wanted = entry.directory in self.wanted or bool(entry.stands_for)
        if is_wanted or above is entry or is_older:
            return False
        standing = self.standing[above.directory] if above else NOWHERE
        standing = standing.with_child(entry, sound=sound)
        self.standing[entry.directory] = standing
        self.by_step.setdefault(entry.step, []).append(entry)
        if above is not None:
            self.children.setdefault(above.directory, []).append(entry.directory)
        elif entry.parent is not None:
            self.wanted.add(entry.parent.directory)
        if entry.is_committed:
            self.committed.append(entry)
            if standing.whole:
                self.restorable.append(entry)
        return True

    def shrink(self, entry: Entry, above: Entry | None) -> bool:
        """Drops an entry, if no other rests on it and no committed one is newer.

        Returns:
            Whether nothing else changes; if False, the entry was not dropped.
        """
        if self.children.get(entry.directory):
            return False
        if entry.is_committed:
            if self.committed[-1] is not entry:
                return False
            self.committed.pop()
            if self.restorable and self.restorable[-1] is entry:
                self.restorable.pop()
        del self.standing[entry.directory]
        self.by_step[entry.step].remove(entry)
        if above is not None:
            self.children[above.directory].remove(entry.directory)
        return True


def _derive(
    version: int,
    entries: Sequence[Entry],
    is_sound: Callable[[Entry, Entry | None], bool],
    is_harmed: Callable[[Entry], object],
) -> Derived:
    """Derives the answers from all entries.

    Args:
        version: version of the chains.
        entries: one entry for each directory.
        is_sound: tells of an entry, and its parent if that is known, whether it is undamaged.
        is_harmed: tells whether an entry cannot be restored itself.
    """
    known = {entry.directory: entry for entry in entries}
    above = {entry.directory: parent_of(entry, known) for entry in entries}
    by_step: dict[int, list[Entry]] = {}
    children: dict[str, list[str]] = {}
    wanted: set[str] = set()
    for entry in entries:
        by_step.setdefault(entry.step, []).append(entry)
        parent = above[entry.directory]
        if parent is not None:
            children.setdefault(parent.directory, []).append(entry.directory)
        elif entry.parent is not None:
            wanted.add(entry.parent.directory)
    standing = _standing(entries, above, is_sound)
    committed = [entry for entry in entries if entry.is_committed]
    committed.sort(key=order)
    return Derived(
        version=version,
        committed=committed,
        restorable=[
            entry
            for entry in committed
            if standing[entry.directory].whole and not is_harmed(entry)
        ],
        by_step=by_step,
        children=children,
        wanted=wanted,
        standing=standing,
    )


def _standing(
    entries: Sequence[Entry],
    above: Mapping[str, Entry | None],
    is_sound: Callable[[Entry, Entry | None], bool],
) -> dict[str, Standing]:
    """Standings of all entries, parents first, so that each entry is looked at once."""
    found: dict[str, Standing] = {}
    for entry in entries:
        path: list[Entry] = []
        standing = NOWHERE  # also of parents that lead in a circle
        for each in chain_of(entry, lambda e: above[e.directory]):
            if each.directory in found:
                standing = found[each.directory]
                break
            path.append(each)
        for below in reversed(path):
            sound = is_sound(below, above[below.directory])
            standing = standing.with_child(below, sound=sound)
            found[below.directory] = standing
    return found


class Chains:
    """Checkpoints by their step directories, and their known damage.

    The first question after a change costs one pass over the entries; later ones are look-ups.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._folders: dict[str, Folder] = {}
        # By directory and uuid: of two copies only one may be damaged, and a directory may get
        # another step.
        self._harms: dict[tuple[str, str], Harm] = {}
        # Whether a child and its parent hold the same tables: comparing thousands takes long.
        self._alike: dict[tuple[str, str], bool] = {}
        # Counts changes of the entries and the damage. It grows after each change; if it grew
        # before, what another thread derives meanwhile would pass for current. No call may come
        # between the two, since an interrupt may come in a call.
        self._version = 0
        self._derived: Derived | None = None

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Committed checkpoints, and those that are being written, by directory."""
        return types.MappingProxyType(self._entries)

    @property
    def folders(self) -> Mapping[str, Folder]:
        """Step directories whose manifest could not be read."""
        return types.MappingProxyType(self._folders)

    # Changes.

    def add(self, entry: Entry) -> None:
        """Adds an entry, and forgets what was known of its directory."""
        self.forget(entry.directory)
        derived = self._current()
        self._entries[entry.directory] = entry
        self._version += 1
        if derived is not None and self.harm_of(entry) is None:
            above = parent_of(entry, self._entries)
            if derived.grow(entry, above, sound=self._is_sound(entry, above)):
                derived.version = self._version

    def note_folder(self, directory: str, folder: Folder) -> None:
        """Notes a step directory whose manifest cannot be read."""
        self.forget(directory)
        self._folders[directory] = folder

    def forget(self, directory: str) -> None:
        """Drops a step directory that is gone or about to be."""
        self.drop(directory)
        self._folders.pop(directory, None)

    def drop(self, directory: str) -> None:
        """Drops an entry, if there is one."""
        entry = self._entries.get(directory)
        if entry is None:
            return
        derived, above = self._current(), parent_of(entry, self._entries)
        del self._entries[directory]
        self._version += 1
        if derived is not None and derived.shrink(entry, above):
            derived.version = self._version

    def note_damage(self, path: str, reason: str, *, unread: bool = False) -> None:
        """Notes damage to a file or folder.

        Args:
            path: path of it below the root, the step directory first.
            reason: what is wrong, in one line.
            unread: whether storage failed to read it.
        """
        directory, *rest = path.split("/")
        alone = rest[1:2] == [names.DENSE]
        self.note_harm(directory, Harm(reason, itself_alone=alone, unread=unread))

    def note_harm(self, directory: str, harm: Harm) -> None:
        """Notes damage of a step, unless worse damage of it is known already."""
        entry = self._entries.get(directory)
        known = self.harm_of(entry) if entry is not None else None
        if entry is None or (known and harm.itself_alone and not known.itself_alone):
            return
        self._harms[directory, entry.uuid] = harm
        self._version += 1

    def note_strays(self) -> None:
        """Notes as damaged the steps whose names no manager that saved here would give them."""
        for directory in self.strays():
            if self.harm_of(self._entries[directory]) is None:
                self.note_harm(directory, Harm(STRAY, itself_alone=True))

    def take_back_unread(self) -> bool:
        """Forgets damage that was a failure of storage; returns whether there was any."""
        unread = [key for key, harm in self._harms.items() if harm.unread]
        for key in unread:
            del self._harms[key]
            self._version += 1
        return bool(unread)

    def take_back(self, directories: Iterable[str]) -> None:
        """Forgets the damage of steps that are whole again."""
        whole = {*directories}
        for key in [each for each in self._harms if each[0] in whole]:
            del self._harms[key]
            self._version += 1

    def become(self, fresh: Chains) -> None:
        """Takes over entries, folders and damage from chains that were read anew."""
        self._entries, self._folders = fresh._entries, fresh._folders
        self._harms, self._alike = fresh._harms, {}
        self._version += 1

    # Questions.

    def committed(self) -> list[Entry]:
        """Committed checkpoints, newest last."""
        return list(self._derive().committed)

    def in_flight(self) -> list[Entry]:
        """Checkpoints that are being written, in the order in which they began."""
        return [entry for entry in self._entries.values() if not entry.is_committed]

    def head(self) -> Entry | None:
        """The newest committed checkpoint of the highest generation."""
        committed = self._derive().committed
        return committed[-1] if committed else None

    def strays(self) -> set[str]:
        """Directories of checkpoints that are not named like the steps of the root: copies.

        Steps of Orbax are left out: a root may begin with them, whatever their names.
        """
        own = [entry for entry in self._derive().committed if not entry.orbax]
        parents = (entry.parent.directory for entry in own if entry.parent)
        return names.strays((entry.directory for entry in own), parents)

    def restorable(self) -> list[Entry]:
        """Committed checkpoints whose chains are complete and without known damage.

        Newest last.
        """
        return list(self._derive().restorable)

    def newest(self) -> Entry | None:
        """The newest checkpoint that can be restored: what `restore(None)` takes."""
        restorable = self._derive().restorable
        return restorable[-1] if restorable else None

    def branch(self) -> list[Entry]:
        """Checkpoints of the newest branch, oldest first, that can be restored."""
        newest = self.newest()
        return branch_of(newest, self._derive().restorable) if newest else []

    def harm_of(self, entry: Entry) -> Harm | None:
        """Damage that was found in the files of a checkpoint; None if there is none."""
        return self._harms.get((entry.directory, entry.uuid))

    def flaw(self, entry: Entry) -> Flaw | None:
        """Reason why a checkpoint cannot rest on the parent that it names; None if it can."""
        parent = entry.parent
        if parent is None:
            return None
        name, above = parent.directory, self._above(entry)
        if above is None and name in self._folders:
            return Flaw("not_readable", f"its parent {name} cannot be read")
        if above is None and name not in self._entries:
            return Flaw("parent_missing", f"its parent {name} is missing")
        if above is None:
            text = f"{name} is not the parent it was saved with"
            return Flaw("foreign_parent", text)
        if entry in self.along(above):
            return Flaw("circle", "its parents lead in a circle")
        if not self._are_alike(entry, above):
            text = f"its tables are not those of its parent {name}"
            return Flaw("tables_differ", text)
        return None

    def obstacle(self, entry: Entry) -> str:
        """Why a checkpoint cannot be restored, in one line; empty if it can."""
        harm = self.harm_of(entry)
        if harm is not None and not harm.itself_alone:
            return harm.reason
        if flaw := self._flaw_text(entry):
            return flaw
        for each in reversed(self.chain(entry)):
            below = f"it rests on {each.directory}, which"
            known = self.harm_of(each)
            if known is not None and not known.itself_alone:
                return f"{below} is damaged: {known.reason}"
            if flaw := self._flaw_text(each):
                return f"{below} cannot be restored: {flaw}"
        return "" if harm is None else harm.reason

    def obstacles(self) -> list[tuple[str, str]]:
        """Step directories that cannot be restored, with the reasons.

        Checkpoints come first, then folders without a readable manifest, both newest first.
        """
        good = {entry.directory for entry in self._derive().restorable}
        bad = [e for e in reversed(self.committed()) if e.directory not in good]
        found = [(entry.directory, self.obstacle(entry)) for entry in bad]
        for name in sorted(self._folders, key=names.step_number, reverse=True):
            found.append((name, self._folders[name].why.partition("\n")[0]))
        return found

    def _flaw_text(self, entry: Entry) -> str:
        flaw = self.flaw(entry)
        return flaw.text if flaw is not None else ""

    def by_step(self, step: int) -> Entry | None:
        """Entry of a step; if there are several, that of the highest generation.

        Of a step and its copies it takes one without damage.
        """
        found = self._derive().by_step.get(step)
        if not found or len(found) == 1:
            return found[0] if found else None
        return max(found, key=lambda each: (order(each), self.harm_of(each) is None))

    def chain(self, entry: Entry) -> list[Entry]:
        """An entry and those that it rests on, as far as they are known, the entry first."""
        return list(self.along(entry))

    def along(self, entry: Entry) -> Iterator[Entry]:
        """Iterates over the chain, so that a caller may stop where it has been before."""
        return chain_of(entry, self._above)

    def is_whole(self, entry: Entry) -> bool:
        """Whether the chain of an entry leads to a full checkpoint without any damage."""
        known = self._entries.get(entry.directory) is entry
        return known and self._derive().standing[entry.directory].whole

    def carries(self, entry: Entry) -> bool:
        """Whether a save may rest on an entry, provided that all saves in flight commit."""
        for each in self.along(entry):
            if each.is_committed:
                return self.is_whole(each)
            if each.stands_alone:
                return True
        return False

    def orphans(self) -> list[Entry]:
        """Entries that cannot be restored for want of a parent, oldest first."""
        standing = self._derive().standing
        found = [e for e in self._entries.values() if not standing[e.directory].rooted]
        return sorted(found, key=order)

    def dependents(self, directory: str) -> list[Entry]:
        """Every entry whose chain contains `directory`, except its own, newest first."""
        children, found, left = self._derive().children, {directory}, [directory]
        while left:
            new = [name for name in children.get(left.pop(), ()) if name not in found]
            found.update(new)
            left += new
        if len(found) == 1:
            return []
        found.remove(directory)
        entries = [e for e in self._entries.values() if e.directory in found]
        return sorted(entries, key=order, reverse=True)

    def heirs(self, directory: str) -> list[str]:
        """Directories whose chains name `directory`, whatever that holds now.

        It is among them itself, if anything is known of it.
        """

        def above(entry: Entry) -> Entry | None:
            named = entry.parent.directory if entry.parent else ""
            return self._entries.get(named) or self._above(entry)

        found = [directory] if directory in self._folders else []
        for entry in self._entries.values():
            chain = list(chain_of(entry, above))
            last = chain[-1].parent
            named = {each.directory for each in chain}
            if directory in named or (last is not None and last.directory == directory):
                found.append(entry.directory)
        return found

    def depth(self, directory: str) -> int:
        """Number of entries in the chain of a step directory, its own included; 0 without one."""
        return self._derive().standing.get(directory, NOWHERE).depth

    @staticmethod
    def own_bytes(entry: Entry) -> int:
        """Bytes of an entry itself: its rows and its dense leaves."""
        dense_bytes = entry.known.totals.dense_bytes if entry.known else 0
        return entry.rows_bytes + dense_bytes

    def restore_bytes(self, entry: Entry) -> int:
        """Most bytes that a restore of an entry reads: rows of its chain, its own dense leaves."""
        standing = self._derive().standing.get(entry.directory, NOWHERE)
        dense_bytes = entry.known.totals.dense_bytes if entry.known else 0
        return standing.rows_bytes + dense_bytes

    def closure(self, directories: Iterable[str]) -> set[str]:
        """The given directories and all that they rest on."""
        found = set(directories)
        for directory in list(found):
            entry = self._entries.get(directory)
            for each in self.along(entry) if entry is not None else ():
                if each is not entry and each.directory in found:
                    break  # all that this one rests on is in `found`, or will be
                found.add(each.directory)
        return found

    def _above(self, entry: Entry) -> Entry | None:
        return parent_of(entry, self._entries)

    def _is_sound(self, entry: Entry, above: Entry | None) -> bool:
        """Whether an entry is committed, free of known damage, and fits its parent."""
        harm = self.harm_of(entry)
        if not entry.is_committed or (harm is not None and not harm.itself_alone):
            return False
        return above is None or self._are_alike(entry, above)

    def _are_alike(self, entry: Entry, above: Entry) -> bool:
        """Whether an entry and its parent hold the same tables; True if that is not known."""
        one, other = entry.known, above.known
        if one is None or other is None:
            return True
        key = entry.uuid, above.uuid
        if key not in self._alike:
            # A summary knows its tables by their digest alone.
            if isinstance(one, Summary) or isinstance(other, Summary):
                self._alike[key] = tables_digest(one) == tables_digest(other)
            else:
                self._alike[key] = one.tables == other.tables
        return self._alike[key]

    def _current(self) -> Derived | None:
        """The derived answers, if they are up to date; else None."""
        known = self._derived
        return known if known is not None and known.version == self._version else None

    def _derive(self) -> Derived:
        """The derived answers for the entries as they are now."""
        known = self._current()
        if known is not None:
            return known
        # Read first: an entry that another thread adds meanwhile must make this out of date.
        version = self._version
        entries = list(self._entries.values())
        found = self._derived = _derive(version, entries, self._is_sound, self.harm_of)
        return found
