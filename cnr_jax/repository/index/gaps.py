"""Missing files of checkpoints, which a writer looks for around each commit.

A delta is worth no more than the checkpoints that it rests on, and other programs may delete files
of these, such as one that cleans scratch space. A writer that trusted its memory would go on saving
deltas that nobody can restore. So it checks that the files exist and have the right sizes, which
costs one call for each. Only a restore checks their contents.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Sequence, Set

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest
from cnr_jax.format.tiles import ProcessManifest
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.layout import Place
from cnr_jax.repository.step import (
    StepFiles,
    files_of,
    read_processes,
    read_step,
)
from cnr_jax.repository.store import size_of
from cnr_jax.repository.store.checked import check_files, means_damage
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A file that a checkpoint names, and that is missing or not as it was written.

    Attributes:
        directory: name of the step directory.
        uuid: uuid of the checkpoint.
        path: path of the file below the root, the step directory first.
        text: what is wrong with the file, in one line.
    """

    directory: str
    uuid: str
    path: str
    text: str

    @property
    def harms_chain(self) -> bool:
        """Whether checkpoints that rest on the step cannot be restored either."""
        return self.path.split("/")[2:3] != [names.DENSE]


class Gaps:
    """Gaps that were found in the checkpoints of one root.

    Any number of threads may look for gaps at once. Meanwhile the thread that plans the next save
    may take those that were found.

    Attributes:
        is_stale: whether the root was read anew, which makes this forget what it found before.
    """

    def __init__(self) -> None:
        # Files of checkpoints that were written here or looked at, by uuid: each manifest is read
        # once.
        self._files: dict[str, StepFiles] = {}
        # Gaps by uuid and path: all that were found, and those of them that nobody took yet.
        self._found: dict[tuple[str, str], Gap] = {}
        self._left: dict[tuple[str, str], Gap] = {}
        # Held while one of these changes, and not while a thread waits for storage.
        self._noting = threading.Lock()
        self.is_stale = False

    def forget(self) -> None:
        """Forgets all gaps, since the root was read anew."""
        with self._noting:
            self.is_stale = True
            self._found.clear()

    def taken(self) -> Set[Gap]:
        """Gaps that were found and taken, so that the planning thread knows them."""
        with self._noting:
            return {gap for key, gap in self._found.items() if key not in self._left}

    def beside(self, known: Set[Gap]) -> tuple[Gap, ...]:
        """Gaps that were found and are not in `known`, taken since or not."""
        with self._noting:
            return tuple(gap for gap in self._found.values() if gap not in known)

    def take(self) -> tuple[Gap, ...]:
        """Takes the gaps that were found since the last call."""
        with self._noting:
            found, self._left = self._left, {}
        return tuple(found.values())

    def know(
        self,
        manifest: Manifest,
        processes: Sequence[ProcessManifest],
        manifest_bytes: int,
    ) -> None:
        """Notes the files of a checkpoint just written, so that `look` reads no manifests of it."""
        with self._noting:
            self._files[manifest.uuid] = _whole(manifest, processes, manifest_bytes)

    def look(
        self, place: Place, entries: Iterable[Entry], *, dense: bool = True
    ) -> tuple[Gap, ...]:
        """Looks for gaps in checkpoints.

        Args:
            place: place of a save, of which only the root and the item are used.
            entries: checkpoints that are committed by now, the most important first.
            dense: whether to look for the files of dense leaves too. Checkpoints that rest on
                another one do not need its dense leaves.

        Returns:
            One gap of each checkpoint that has any, whether it was found before or not.
        """
        found: list[Gap] = []
        looked: dict[str, StepFiles] = {}
        with self._noting:
            before = [*self._files] if dense else []
        for entry in entries:
            if entry.orbax:
                continue
            gap = self._gap_of(place, entry, looked, dense=dense)
            if gap is not None:
                key = gap.uuid, gap.path
                with self._noting:
                    if key not in self._found:
                        self._found[key] = self._left[key] = gap
                    found.append(self._found[key])
        with self._noting:
            # Keeps those that were written meanwhile, or looked at by another thread.
            for uuid in before:
                self._files.pop(uuid, None)
            self._files |= looked
            self.is_stale = self.is_stale and not dense
        return tuple(found)

    def _gap_of(
        self, place: Place, entry: Entry, looked: dict[str, StepFiles], *, dense: bool
    ) -> Gap | None:
        item = place.root / entry.directory / place.item
        try:
            files = self._files.get(entry.uuid) or _read(place, entry)
            looked[entry.uuid] = files
            check_files(item, (*files.rows, *(files.dense if dense else ())))
        except (errors.CnrError, OSError) as error:
            if not means_damage(error):
                # A file that storage does not give out need not be missing.
                _log.debug("step %s was not looked at: %s", entry.directory, error)
                return None
            file = getattr(error, "path", None) or os.fspath(item / names.MANIFEST)
            above = os.fspath(place.root).rstrip("/") + "/"
            text = str(error).partition("\n")[0].removeprefix(above)
            return Gap(entry.directory, entry.uuid, file.removeprefix(above), text)
        return None


def _read(place: Place, entry: Entry) -> StepFiles:
    """Reads from its manifests which files a checkpoint has.

    Raises:
        CnrError: if the manifests are damaged, or another checkpoint is in its place.
        OSError: if storage does not give the manifests out.
    """
    item = place.root / entry.directory / place.item
    manifest = read_step(place.root, entry.directory, place.item)
    if manifest.uuid != entry.uuid:
        where = os.fspath(item / names.MANIFEST)
        raise errors.IntegrityError(
            f"{where} is of another checkpoint\n"
            f"  got uuid {manifest.uuid}, expected {entry.uuid}",
            kind="foreign_step",
            path=where,
        )
    size = size_of(item / names.MANIFEST)
    return _whole(manifest, read_processes(item, manifest), size)


def _whole(
    manifest: Manifest, processes: Sequence[ProcessManifest], manifest_bytes: int
) -> StepFiles:
    """All files of a checkpoint, its manifest included."""
    files = files_of(manifest, processes)
    return files._replace(rows=((names.MANIFEST, manifest_bytes), *files.rows))
