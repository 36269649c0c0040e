"""Which checkpoints a root holds and which depend on which.

Read from the manifests at start and kept up to date by saves, alike on every process. Retention
asks it what must be kept; the planner asks it which parents still exist.
"""

from __future__ import annotations

import secrets
import types
from collections.abc import Callable, Iterable, Mapping, Set

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest
from cnr_jax.repository.index.entries import (
    NOWHERE,
    Derived,
    Entry,
    derive,
    entry_of,
    is_sound,
    orbax_entry,
    order,
    parent_of,
)
from cnr_jax.repository.layout import (
    Place,
    is_checkpoint,
    is_foreign,
    is_of_others,
    step_directories,
)
from cnr_jax.repository.orbax_steps import orbax_step, saved_by
from cnr_jax.repository.step import read_committed, read_step, without_collections
from cnr_jax.repository.store import AnyPath, exists, is_gone, store_of
from cnr_jax.repository.store.checked import UNREAD
from cnr_jax.texts import logger

_log = logger(__name__)


class Ledger:
    """The step directories of one root, by name.

    What it answers costs one pass over the entries after a change, and look-ups until the next.

    Args:
        is_step: tells names of step directories; None: all that end in a digit.
        adopts: whether steps of plain Orbax count, rather than being unreadable.

    Attributes:
        foreign: those of the unreadable ones that hold something, but nothing of this library.
        strange: those of the unreadable ones that neither this library nor Orbax has saved.
        of_others: those of the strange ones of which it is sure that no step rests on them.
        of_orbax: those of the unreadable ones that plain Orbax saved.
        withheld: those of the unreadable ones that may be whole: storage did not give them out.
        doubtful: these, and those that storage failed to read, as it may not do again.
        doomed: step directories that are deleted once the save that is being written is committed.
        leaving: step directories that retention has dropped and that may still be there.
        crowded: whether retention lets go of steps of the run, and so of what its rollbacks have
            set aside.
        run: of the save that was begun last, whose steps alone retention may drop; None: none
            was begun.
    """

    def __init__(
        self, is_step: Callable[[str], bool] | None = None, *, adopts: bool = False
    ) -> None:
        self.is_step, self.adopts = is_step or names.may_be_step, adopts
        self._entries: dict[str, Entry] = {}
        self._unreadable: dict[str, str] = {}
        self.foreign: set[str] = set()
        self.strange: set[str] = set()
        self.of_others: set[str] = set()
        self.of_orbax: set[str] = set()
        self.withheld: set[str] = set()
        self.doubtful: set[str] = set()
        self._damaged: dict[str, str] = {}
        self._spoilt: dict[str, str] = {}
        # Of these, those that storage failed to read, which it may do once and not again.
        self._unread: set[str] = set()
        self.doomed: set[str] = set()
        self.leaving: set[str] = set()
        self.crowded = False
        self.run: str | None = None
        # Of the entries and the known damage: counts their changes. After each, or what another
        # thread derives meanwhile would pass for what follows from it; and at once, without a
        # call in which an interrupt may come.
        self._version = 0
        self._derived: Derived | None = None

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Committed checkpoints, and at most one that is being written, by directory."""
        return types.MappingProxyType(self._entries)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Step directories whose manifest is missing or damaged, with the reason."""
        return types.MappingProxyType(self._unreadable)

    @property
    def unknown(self) -> Set[str]:
        """Those of the unreadable ones that may be steps.

        Nothing older than these may be deleted: they might depend on it.
        """
        return self._unreadable.keys() - self.of_others

    @property
    def damaged(self) -> Mapping[str, str]:
        """Uuids of checkpoints whose rows or process manifests are damaged, with the reason.

        Neither they nor what rests on them can be restored.
        """
        return types.MappingProxyType(self._damaged)

    @property
    def spoilt(self) -> Mapping[str, str]:
        """Uuids of checkpoints of which only `dense/` is damaged, with the reason.

        They cannot be restored, but others can rest on them.
        """
        return types.MappingProxyType(self._spoilt)

    @classmethod
    def load(
        cls,
        root: AnyPath,
        item: str,
        is_step: Callable[[str], bool] | None = None,
        *,
        adopts: bool = False,
    ) -> Ledger:
        """Reads the manifests of all step directories below `root`.

        Args:
            root: holds the step directories.
            item: name of the item in each of them.
            is_step: tells names of step directories; None: all that end in a digit.
            adopts: whether steps of plain Orbax count.

        Raises:
            OSError: if the root cannot be seen or listed.
        """
        ledger = cls(is_step, adopts=adopts)
        if not exists(root):
            return ledger
        # Joining names to paths of Orbax takes longer than to read.
        plain = store_of(root).quick(root)
        with without_collections():
            for directory in step_directories(plain, ledger.is_step):
                ledger.read(plain, directory, item)
        return ledger

    def refresh(self, root: AnyPath, item: str) -> bool:
        """Takes in which steps others have put into the root or taken from it.

        Returns:
            Whether anything has.
        """
        found = step_directories(root, self.is_step, known=self.directories())
        self.leaving &= set(found)
        return self.match(root, item, [d for d in found if d not in self.leaving])

    def match(self, root: AnyPath, item: str, directories: Iterable[str]) -> bool:
        """Knows of exactly these step directories afterwards; reads those that are new.

        And again those that storage did not let be read: a save of this run may be among them.

        Returns:
            Whether others were known before, or less of them.
        """
        known, found = self.directories(), set(directories)
        say = _log.info if self.run is None else _log.warning  # readers expect it
        for directory in known - found:
            say("step %s is not in the root any more", directory)
            self.forget(directory)
        for directory in sorted(found - known):
            say("step %s has appeared in the root", directory)
            self.read(root, directory, item)
        doubtful = sorted(self.doubtful & known)
        for directory in doubtful:
            self.read(root, directory, item)
        return known != found or not self.doubtful.issuperset(doubtful)

    def directories(self) -> set[str]:
        """All step directories that are known, readable or not."""
        return self.entries.keys() | self.unreadable.keys()

    def read(self, root: AnyPath, directory: str, item: str) -> None:
        """Reads a step directory, replacing what was known; one that is deleted by now is none."""
        told = self._unreadable.get(directory)
        self.forget(directory)
        try:
            found = orbax_step(root, directory, item) if self.adopts else None
            entry = orbax_entry(directory, found) if found else None
            entry = entry or entry_of(directory, read_step(root, directory, item))
        except (errors.CnrError, OSError) as error:
            if is_gone(root / directory):
                return
            self._unreadable[directory] = str(error)
            if is_of_others(root / directory, item):
                self.of_others.add(directory)
            if not isinstance(error, errors.CnrError):
                self.withheld.add(directory)
                self.doubtful.add(directory)
            elif error.kind == UNREAD:
                self.doubtful.add(directory)
            elif directory in self.of_others or is_foreign(root / directory):
                self.foreign.add(directory)
            if not is_checkpoint(root / directory):
                self.strange.add(directory)
            if not self.adopts and saved_by(root / directory, item) == "orbax":
                self.of_orbax.add(directory)
                text = "step %s is not looked at: plain Orbax saved it, and no Options(adopt=True)"
                _log.info(text, directory)
            elif str(error) != told:
                _log.warning("step %s cannot be restored: %s", directory, error)
        else:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Takes in an entry, in the place of what was known of its directory."""
        self.forget(entry.directory)
        derived = self._current()
        self._entries[entry.directory] = entry
        self._version += 1
        if derived is not None and entry.uuid not in self._spoilt:
            above = parent_of(entry, self._entries)
            if derived.grow(entry, above, sound=is_sound(entry, self._damaged)):
                derived.version = self._version

    def begin(self, entry: Entry) -> None:
        """Notes a save that is being written."""
        self.add(entry)
        self.run = entry.run

    def settle(
        self,
        place: Place,
        uuid: str,
        committed: bool | None = None,
        manifest: Manifest | None = None,
    ) -> Entry | None:
        """Finds out whether the save that was being written is committed.

        Args:
            place: of the save.
            uuid: of the save.
            committed: whether it is known to be, though storage may not give out its manifest:
                then what it made superfluous is gone all the same. None: not known.
            manifest: of the save, if it was seen before.

        Returns:
            Its entry with its manifest, or None if it failed; a failed save is forgotten.
        """
        self._drop(place.directory)
        try:
            manifest = manifest or read_committed(
                place.root, place.directory, place.item
            )
        except (errors.CnrError, OSError) as error:
            # Not there, rather than damaged or out of reach.
            kind = getattr(error, "kind", None)
            gone = kind in ("manifest_missing", "not_committed")
            self._let_go(committed or (committed is None and not gone))
            return None
        # An older step may stand where a failed save was to be.
        self.add(entry_of(place.directory, manifest))
        is_saved = manifest.uuid == uuid
        self._let_go(is_saved)
        # None if retention drops the very step that was saved.
        return self.entries.get(place.directory) if is_saved else None

    def _let_go(self, superfluous: bool) -> None:
        """Drops steps that are being deleted, or may be, if they are superfluous; or keeps them."""
        for directory in self.doomed if superfluous else ():
            self.leaving.add(directory)
            self.forget(directory)
        self.doomed = set()

    def forget(self, directory: str) -> None:
        """Drops a step directory that is gone or about to be."""
        self._drop(directory)
        self._unreadable.pop(directory, None)
        for kind in (self.foreign, self.strange, self.of_orbax, self.of_others):
            kind.discard(directory)
        self.withheld.discard(directory)
        self.doubtful.discard(directory)

    def _drop(self, directory: str) -> None:
        """Drops an entry, if there is one."""
        entry = self._entries.get(directory)
        if entry is None:
            return
        derived, above = self._current(), parent_of(entry, self._entries)
        del self._entries[directory]
        self._version += 1
        if derived is not None and derived.shrink(entry, above):
            derived.version = self._version

    def become(self, fresh: Ledger) -> None:
        """Takes over what was read anew; of a save that is being written nothing changes."""
        self._entries, self._unreadable = fresh._entries, fresh._unreadable
        self.foreign, self.strange = fresh.foreign, fresh.strange
        self.of_others, self.of_orbax = fresh.of_others, fresh.of_orbax
        self.withheld, self.doubtful = fresh.withheld, fresh.doubtful
        self._damaged, self._spoilt, self._unread = {}, {}, set()
        self._version += 1

    def note_damage(self, path: str, reason: str, *, unread: bool = False) -> None:
        """Notes what was found damaged.

        Args:
            path: of the file or folder below the root, its step directory first.
            reason: what is wrong, in a line.
            unread: whether storage failed to read it.
        """
        directory, *rest = path.split("/")
        entry = self.entries.get(directory)
        if entry is not None:
            only_dense = rest[1:2] == [names.DENSE]
            (self._spoilt if only_dense else self._damaged)[entry.uuid] = reason
            (self._unread.add if unread else self._unread.discard)(entry.uuid)
            self._version += 1

    def take_back_unread(self) -> bool:
        """Takes back damage that is a failure of storage; returns whether there was any."""
        unread, self._unread = self._unread, set()
        for uuid in unread:
            self._damaged.pop(uuid, None)
            self._spoilt.pop(uuid, None)
            self._version += 1
        return bool(unread)

    def doom(self, directory: str) -> None:
        """Notes that retention drops a step: at once, or with the commit of a save in flight."""
        # What is being written came last, and has no manifest.
        if not all(e.is_committed for e in reversed(self._entries.values())):
            self.doomed.add(directory)
        else:
            self.forget(directory)

    def committed(self) -> list[Entry]:
        """Committed checkpoints, newest last."""
        return list(self._derive().committed)

    def checkpoints(self) -> list[str]:
        """Step directories that hold a checkpoint of this library or of Orbax.

        Those of which nothing is known come first, then the known ones, newest first.
        """
        unknown = sorted(self.unreadable.keys() - self.strange, reverse=True)
        return [*unknown, *(entry.directory for entry in reversed(self.committed()))]

    def head(self) -> Entry | None:
        """The newest committed checkpoint of the highest generation."""
        committed = self._derive().committed
        return committed[-1] if committed else None

    def restorable(self) -> list[Entry]:
        """Committed checkpoints in whose chains nothing is missing or known to be damaged.

        Newest last.
        """
        return list(self._derive().restorable)

    def obstacle(self, entry: Entry) -> str:
        """Why a committed checkpoint is not restorable, in a line."""
        chain = self.chain(entry)
        for each in reversed(chain):
            found = self.damaged.get(each.uuid)
            if found is not None:
                below = f"it rests on {each.directory}, which is damaged: "
                return found if each is entry else f"{below}{found}"
        last = chain[-1]
        if last.parent is not None:
            heir = (
                "it" if last is entry else f"its chain ends at {last.directory}, which"
            )
            return f"{heir} rests on {last.parent.directory}, which is not there"
        return self.spoilt.get(entry.uuid, "it is not complete")

    def by_step(self, step: int) -> Entry | None:
        """The entry of a step; of the highest generation, should there be several."""
        found = self._derive().by_step.get(step)
        return max(found, key=order) if found else None

    def movable(self, directory: str) -> Entry:
        """The entry of a step directory that goes aside; made up where it is unreadable."""
        if directory in self.entries:
            return self.entries[directory]
        return Entry(
            directory=directory,
            step=names.step_number(directory),
            uuid=secrets.token_hex(16),
            generation=0,
            parent=None,
        )

    def chain(self, entry: Entry) -> list[Entry]:
        """An entry and those it rests on, as far as they are known, itself first."""
        found, seen = [entry], set[str]()
        while (above := parent_of(found[-1], self._entries)) is not None:
            if above.directory in seen or above == entry:
                break
            seen.add(above.directory)
            found.append(above)
        return found

    def is_whole(self, entry: Entry) -> bool:
        """Whether the chain of an entry leads to a full checkpoint, none of it damaged."""
        if self._entries.get(entry.directory) is entry:
            return self._derive().standing[entry.directory].whole
        above = parent_of(entry, self._entries)
        return is_sound(entry, self._damaged) and (
            entry.parent is None or (above is not None and self.is_whole(above))
        )

    def orphans(self) -> list[Entry]:
        """Entries that cannot be restored for want of a parent, oldest first."""
        standing = self._derive().standing
        found = [e for e in self._entries.values() if not standing[e.directory].rooted]
        return sorted(found, key=order)

    def dependents(self, directory: str) -> list[Entry]:
        """Every entry whose chain contains `directory`, itself left out, newest first."""
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

    def depth(self, directory: str) -> int:
        """Entries in the chain of a step directory, itself included; 0 if it has no entry."""
        return self._derive().standing.get(directory, NOWHERE).depth

    def closure(self, directories: Iterable[str]) -> set[str]:
        """The given directories and all that they rest on."""
        kept, above = set(directories), set[str]()
        for directory in kept:
            entry = self._entries.get(directory)
            while entry is not None and entry.directory not in above:
                above.add(entry.directory)
                entry = parent_of(entry, self._entries)
        return kept | above

    def _current(self) -> Derived | None:
        """What follows from the entries as they are now, if that is known."""
        known = self._derived
        return known if known is not None and known.version == self._version else None

    def _derive(self) -> Derived:
        """What follows from the entries as they are now."""
        known = self._current()
        if known is not None:
            return known
        self._derived = derive(
            self._version, list(self._entries.values()), self._damaged, self._spoilt
        )
        return self._derived
