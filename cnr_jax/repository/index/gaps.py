"""Whether the files that checkpoints name are still there: what a writer looks at around a commit.

A delta is worth what the checkpoints that it rests on are worth, and other programs may take files
from these, as one does that cleans scratch space. A writer that trusted its memory would go on
saving deltas that nobody can restore. So it looks at presence and size of the files, which costs a
call each; what is in them, a restore checks.
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
    """A file that a checkpoint names, and that is not there as it was written.

    Attributes:
        directory: of the step.
        uuid: of the checkpoint.
        path: of the file, below the root, the step directory first.
        text: what is wrong with it, in a line.
    """

    directory: str
    uuid: str
    path: str
    text: str

    @property
    def harms_chain(self) -> bool:
        """Whether what rests on the step cannot be restored either."""
        return self.path.split("/")[2:3] != [names.DENSE]


class Gaps:
    """What was found missing of the checkpoints of one root.

    It may be looked for in any thread, also in several at once; meanwhile what was found may be
    taken by the one that plans the next save.

    Attributes:
        is_stale: whether the root was read anew, so that what was found before is forgotten.
    """

    def __init__(self) -> None:
        # Of checkpoints that were written here or looked at, by uuid: manifests are read once.
        self._files: dict[str, StepFiles] = {}
        # By uuid and path: all that was found, and what of it was not taken yet.
        self._found: dict[tuple[str, str], Gap] = {}
        self._left: dict[tuple[str, str], Gap] = {}
        # While one of these changes; not while storage is looked at.
        self._noting = threading.Lock()
        self.is_stale = False

    def forget(self) -> None:
        """The root was read anew, and with it what was known to be missing is forgotten."""
        with self._noting:
            self.is_stale = True
            self._found.clear()

    def taken(self) -> Set[Gap]:
        """What was found and taken: whoever took it knows."""
        with self._noting:
            return {gap for key, gap in self._found.items() if key not in self._left}

    def beside(self, known: Set[Gap]) -> tuple[Gap, ...]:
        """What was found and is not among these, whether it was taken since or not."""
        with self._noting:
            return tuple(gap for gap in self._found.values() if gap not in known)

    def take(self) -> tuple[Gap, ...]:
        """What was found since it was taken last."""
        with self._noting:
            found, self._left = self._left, {}
        return tuple(found.values())

    def know(
        self,
        manifest: Manifest,
        processes: Sequence[ProcessManifest],
        manifest_bytes: int,
    ) -> None:
        """Notes the files of a checkpoint that was just written: its manifests need not be read."""
        with self._noting:
            self._files[manifest.uuid] = _whole(manifest, processes, manifest_bytes)

    def look(
        self, place: Place, entries: Iterable[Entry], *, dense: bool = True
    ) -> tuple[Gap, ...]:
        """Looks whether checkpoints are complete.

        Args:
            place: of a save: its root and item are meant.
            entries: checkpoints that are committed by now, the most important first.
            dense: whether dense leaves are looked for too; what rests on a checkpoint needs
                none of its own.

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
            # But for those that were written, or looked at by another thread, meanwhile.
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
                # What storage does not give out is not known to be missing.
                _log.debug("step %s was not looked at: %s", entry.directory, error)
                return None
            file = getattr(error, "path", None) or os.fspath(item / names.MANIFEST)
            above = os.fspath(place.root).rstrip("/") + "/"
            text = str(error).partition("\n")[0].removeprefix(above)
            return Gap(entry.directory, entry.uuid, file.removeprefix(above), text)
        return None


def _read(place: Place, entry: Entry) -> StepFiles:
    """The files of a checkpoint, from its manifests.

    Raises:
        CnrError: if these are damaged, or another checkpoint is in its place.
        OSError: if storage does not give them out.
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
    """All files of a checkpoint, its manifest with them."""
    files = files_of(manifest, processes)
    return files._replace(rows=((names.MANIFEST, manifest_bytes), *files.rows))
