"""Which checkpoints a root holds and which depend on which.

Read from the manifests at start and kept up to date by saves, alike on every process. Retention
asks it what must be kept; the planner asks it which parents still exist.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest, ParentRef
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.roots import is_foreign, may_be_step, step_directories
from cnr_jax.repository.step import read_manifest, read_step

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step directory.

    Attributes:
        manifest: None for a save that is still being written.
    """

    directory: str
    step: int
    uuid: str
    generation: int
    parent: ParentRef | None
    manifest: Manifest | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Newest last: a later generation is newer, whatever its step numbers."""
        return self.generation, self.step


def entry_of(directory: str, manifest: Manifest) -> Entry:
    """The entry of a committed checkpoint."""
    return Entry(
        directory=directory,
        step=manifest.step,
        uuid=manifest.uuid,
        generation=manifest.generation,
        parent=manifest.parent,
        manifest=manifest,
    )


class Ledger:
    """The step directories of one root, by name.

    Args:
        is_step: tells names of step directories; None: all that end in a digit.

    Attributes:
        entries: committed checkpoints, and at most one that is being written.
        unreadable: step directories whose manifest is missing or damaged, with the reason.
            Nothing older than these may be deleted: they might depend on it.
        foreign: those of the unreadable ones that hold something, but nothing of this library.
        withheld: those of the unreadable ones that may be whole: storage did not give them out.
        damaged: uuids of checkpoints whose rows or process manifests were found damaged, with
            the reason: neither they nor what rests on them can be restored.
        spoilt: uuids of checkpoints of which only `dense/` was found damaged, with the reason:
            they cannot be restored, but others can rest on them.
        pending: the save that is being written.
        doomed: step directories that are deleted once the pending save is committed.
        leaving: step directories that retention has dropped and that may still be there.
    """

    def __init__(self, is_step: Callable[[str], bool] | None = None) -> None:
        self.is_step = is_step or may_be_step
        self.entries: dict[str, Entry] = {}
        self.unreadable: dict[str, str] = {}
        self.foreign: set[str] = set()
        self.withheld: set[str] = set()
        self.damaged: dict[str, str] = {}
        self.spoilt: dict[str, str] = {}
        self.pending: Entry | None = None
        self.doomed: set[str] = set()
        self.leaving: set[str] = set()

    @classmethod
    def load(
        cls, root: AnyPath, item: str, is_step: Callable[[str], bool] | None = None
    ) -> Ledger:
        """Reads the manifests of all step directories below `root`.

        Args:
            root: holds the step directories.
            item: name of the item in each of them.
            is_step: tells names of step directories; None: all that end in a digit.
        """
        ledger = cls(is_step)
        if not root.exists():
            return ledger
        for directory in step_directories(root, ledger.is_step):
            ledger.read(root, directory, item)
        return ledger

    def refresh(self, root: AnyPath, item: str) -> bool:
        """Takes in what has come to the root or gone from it by other hands than ours.

        Returns:
            Whether anything has.
        """
        found = step_directories(root, self.is_step)
        self.leaving &= set(found)
        return self.match(root, item, [d for d in found if d not in self.leaving])

    def match(self, root: AnyPath, item: str, directories: Iterable[str]) -> bool:
        """Knows of exactly these step directories afterwards; reads those that are new.

        Returns:
            Whether others were known before.
        """
        known, found = self.directories(), set(directories)
        for directory in known - found:
            _log.warning("step %s is not in the root any more", directory)
            self.forget(directory)
        for directory in sorted(found - known):
            _log.warning("step %s has appeared in the root", directory)
            self.read(root, directory, item)
        return known != found

    def directories(self) -> set[str]:
        """All step directories that are known, readable or not."""
        return self.entries.keys() | self.unreadable.keys()

    def read(self, root: AnyPath, directory: str, item: str) -> None:
        """Reads one step directory, replacing what was known of it."""
        self.forget(directory)
        try:
            manifest = read_step(root, directory, item)
        except (errors.CnrError, OSError) as error:
            self.unreadable[directory] = str(error)
            if not isinstance(error, errors.CnrError):
                self.withheld.add(directory)
            elif is_foreign(root / directory):
                self.foreign.add(directory)
            _log.warning("step %s cannot be restored: %s", directory, error)
        else:
            self.entries[directory] = entry_of(directory, manifest)

    def begin(self, entry: Entry) -> None:
        """Notes a save that is being written."""
        self.forget(entry.directory)
        self.pending = entry
        self.entries[entry.directory] = entry

    def settle(
        self, root: AnyPath, item: str, committed: bool | None = None
    ) -> Entry | None:
        """Finds out whether the save that was being written is committed.

        Args:
            root: holds the step directories.
            item: name of the item in each of them.
            committed: whether it is known to be, though storage may not give out its manifest:
                then what it made superfluous is gone all the same. None: not known.

        Returns:
            Its entry with its manifest, or None if there was none or it failed; a failed save
            is forgotten.
        """
        if self.pending is None:
            return None
        entry, self.pending = self.pending, None
        doomed, self.doomed = self.doomed, set()
        self.entries.pop(entry.directory, None)
        try:
            manifest = read_manifest(root / entry.directory / item)
        except (errors.CnrError, OSError) as error:
            if committed or (committed is None and not _is_missing(error)):
                self._let_go(doomed)
            return None
        # An older step may stand where a failed save was to be.
        self.entries[entry.directory] = entry_of(entry.directory, manifest)
        if manifest.uuid != entry.uuid:
            return None
        self._let_go(doomed)
        # None if retention drops the very step that was saved.
        return self.entries.get(entry.directory)

    def _let_go(self, doomed: Iterable[str]) -> None:
        """Drops steps that are being deleted, or may be."""
        for directory in doomed:
            self.forget(directory)
            self.leaving.add(directory)

    def forget(self, directory: str) -> None:
        """Drops a step directory that is gone or about to be."""
        self.entries.pop(directory, None)
        self.unreadable.pop(directory, None)
        self.foreign.discard(directory)
        self.withheld.discard(directory)

    def become(self, fresh: Ledger) -> None:
        """Takes over what was read anew; of a save that is being written nothing changes."""
        self.entries, self.unreadable = fresh.entries, fresh.unreadable
        self.foreign, self.withheld = fresh.foreign, fresh.withheld
        self.damaged, self.spoilt = {}, {}

    def note_damage(self, path: str, reason: str) -> None:
        """Notes what was found damaged.

        Args:
            path: of the file or folder below the root, its step directory first.
            reason: what is wrong, in a line.
        """
        directory, *rest = path.split("/")
        entry = self.entries.get(directory)
        if entry is not None:
            only_dense = rest[1:2] == [names.DENSE]
            (self.spoilt if only_dense else self.damaged)[entry.uuid] = reason

    def doom(self, directory: str) -> None:
        """Notes that retention drops a step: at once, or with the pending save's commit."""
        if self.pending is None:
            self.forget(directory)
        else:
            self.doomed.add(directory)

    def committed(self) -> list[Entry]:
        """Committed checkpoints, newest last."""
        entries = [entry for entry in self.entries.values() if entry.manifest]
        return sorted(entries, key=lambda entry: entry.order)

    def head(self) -> Entry | None:
        """The newest committed checkpoint of the highest generation."""
        committed = self.committed()
        return committed[-1] if committed else None

    def restorable(self) -> list[Entry]:
        """Committed checkpoints in whose chains nothing is missing or known to be damaged.

        Newest last.
        """
        return [
            entry
            for entry in self.committed()
            if self.is_whole(entry) and entry.uuid not in self.spoilt
        ]

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
        found = [entry for entry in self.entries.values() if entry.step == step]
        return max(found, key=lambda entry: entry.order) if found else None

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
        found = [entry]
        while (parent := found[-1].parent) is not None:
            above = self.entries.get(parent.directory)
            if above is None or above.uuid != parent.uuid or above in found:
                break
            found.append(above)
        return found

    def is_whole(self, entry: Entry) -> bool:
        """Whether the chain of an entry leads to a full checkpoint, none of it damaged."""
        chain = self.chain(entry)
        if any(e.manifest is None or e.uuid in self.damaged for e in chain):
            return False
        return chain[-1].parent is None

    def is_orphan(self, entry: Entry) -> bool:
        """Whether a parent is missing that the chain of an entry needs."""
        return self.chain(entry)[-1].parent is not None

    def orphans(self) -> list[Entry]:
        """Entries that cannot be restored for want of a parent, oldest first."""
        found = [entry for entry in self.entries.values() if self.is_orphan(entry)]
        return sorted(found, key=lambda entry: entry.order)

    def dependents(self, directory: str) -> list[Entry]:
        """Every entry whose chain contains `directory`, itself left out, newest first."""
        found = [
            entry
            for entry in self.entries.values()
            if entry.directory != directory
            and any(e.directory == directory for e in self.chain(entry))
        ]
        return sorted(found, key=lambda entry: entry.order, reverse=True)

    def closure(self, directories: Iterable[str]) -> set[str]:
        """The given directories and all that they rest on."""
        kept: set[str] = set()
        for directory in directories:
            kept.add(directory)
            if directory in self.entries:
                chain = self.chain(self.entries[directory])
                kept.update(entry.directory for entry in chain)
        return kept


def _is_missing(error: Exception) -> bool:
    """Whether a manifest is not there, rather than damaged or out of reach."""
    return getattr(error, "kind", None) == "manifest_missing"


def describe(entries: Collection[Entry]) -> str:
    """Step directories for an error text, oldest first."""
    ordered = sorted(entries, key=lambda entry: entry.order)
    return ", ".join(entry.directory for entry in ordered)


def aside_name(entry: Entry) -> str:
    """What a step directory is called once it is moved out of the way."""
    return names.abandoned(entry.directory, entry.generation, entry.uuid)


def rename_aside(root: AnyPath, entry: Entry) -> str:
    """Moves a step directory of an abandoned branch out of the way; nothing is deleted.

    Returns:
        Its new name.
    """
    name = aside_name(entry)
    (root / entry.directory).rename(root / name)
    _log.warning(
        "step %s of an abandoned branch is now %s",
        entry.directory,
        os.fspath(root / name),
    )
    return name
