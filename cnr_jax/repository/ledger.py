"""Which checkpoints a root holds and which depend on which.

Read from the manifests at start and kept up to date by saves, alike on every process. Retention
asks it what must be kept; the planner asks it which parents still exist.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest, ParentRef
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.step import read_manifest

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

    Attributes:
        entries: committed checkpoints, and at most one that is being written.
        unreadable: step directories whose manifest is missing or damaged, with the reason.
            Nothing older than these may be deleted: they might depend on it.
        pending: the save that is being written.
        doomed: step directories that are deleted once the pending save is committed.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.unreadable: dict[str, str] = {}
        self.pending: Entry | None = None
        self.doomed: set[str] = set()

    @classmethod
    def load(cls, root: AnyPath, item: str) -> Ledger:
        """Reads the manifests of all step directories below `root`."""
        ledger = cls()
        if not root.exists():
            return ledger
        for path in sorted(root.iterdir(), key=lambda path: path.name):
            if _is_step(path):
                ledger.read(root, path.name, item)
        return ledger

    def read(self, root: AnyPath, directory: str, item: str) -> None:
        """Reads one step directory, replacing what was known of it."""
        self.forget(directory)
        try:
            manifest = read_manifest(root / directory / item)
        except (errors.CnrError, OSError) as error:
            self.unreadable[directory] = str(error)
            _log.warning("step %s cannot be restored: %s", directory, error)
        else:
            self.entries[directory] = entry_of(directory, manifest)

    def begin(self, entry: Entry) -> None:
        """Notes a save that is being written."""
        self.pending = entry
        self.entries[entry.directory] = entry

    def settle(self, root: AnyPath, item: str) -> Entry | None:
        """Finds out whether the save that was being written is committed.

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
        except (errors.CnrError, OSError):
            return None
        # An older step may stand where a failed save was to be.
        self.entries[entry.directory] = entry_of(entry.directory, manifest)
        if manifest.uuid != entry.uuid:
            return None
        for directory in doomed:
            self.forget(directory)
        return self.entries[entry.directory]

    def forget(self, directory: str) -> None:
        """Drops a step directory that is gone or about to be."""
        self.entries.pop(directory, None)
        self.unreadable.pop(directory, None)

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

    def by_step(self, step: int) -> Entry | None:
        """The entry of a step; of the highest generation, should there be several."""
        found = [entry for entry in self.entries.values() if entry.step == step]
        return max(found, key=lambda entry: entry.order) if found else None

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
        """Whether the chain of an entry leads to a full checkpoint."""
        chain = self.chain(entry)
        return all(e.manifest for e in chain) and chain[-1].parent is None

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


def find_item(root: AnyPath) -> str | None:
    """The item of a root's steps that holds a checkpoint of this library, if any does."""
    if not root.exists():
        return None
    for step in sorted(root.iterdir(), key=lambda path: path.name, reverse=True):
        if _is_step(step):
            for item in sorted(step.iterdir(), key=lambda path: path.name):
                if (item / names.MANIFEST).exists():
                    return item.name
    return None


def _is_step(path: AnyPath) -> bool:
    """Whether a path may be a committed step: a folder that ends in a number."""
    name = path.name
    if names.TEMPORARY_SUFFIX in name or names.ABANDONED_MARK in name:
        return False
    return name[-1:].isdigit() and path.is_dir()


def describe(entries: Collection[Entry]) -> str:
    """Step directories for an error text, oldest first."""
    ordered = sorted(entries, key=lambda entry: entry.order)
    return ", ".join(entry.directory for entry in ordered)


def rename_aside(root: AnyPath, entry: Entry) -> str:
    """Moves a step directory of an abandoned branch out of the way; nothing is deleted.

    Returns:
        Its new name.
    """
    name = names.abandoned(entry.directory, entry.generation, entry.uuid)
    (root / entry.directory).rename(root / name)
    _log.warning(
        "step %s of an abandoned branch is now %s",
        entry.directory,
        os.fspath(root / name),
    )
    return name
