"""Reading one checkpoint: its manifests, checked, and slices of its arrays.

Nothing is believed before its digest was compared: `manifest.json` carries its own digest and
names those of the process manifests and dense files, these name the checksums of the arrays.
"""

from __future__ import annotations

import os

import numpy as np

from cnr_jax import errors
from cnr_jax.format import names, rowids
from cnr_jax.format.manifest import Manifest, load
from cnr_jax.format.tiles import ProcessManifest, RowIds, check_cover, load_process
from cnr_jax.repository.files import AnyPath, check_file, read_checked
from cnr_jax.repository.store import ArrayReader, Reading


def read_manifest(directory: AnyPath) -> Manifest:
    """The manifest of a checkpoint item.

    Raises:
        IntegrityError: if there is none.
        ManifestError: if it is damaged or breaks the format's rules.
        UnsupportedVersionError: if it needs a newer reader.
    """
    path = directory / names.MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise errors.IntegrityError(
            f"{os.fspath(directory)} holds no checkpoint: {names.MANIFEST} is missing",
            kind="manifest_missing",
        ) from error
    return load(data, os.fspath(path))


class StepReader:
    """One checkpoint that is read from.

    Args:
        directory: of the item.
        manifest: as `read_manifest` returned it.
        verify: whether chunks are compared with the checksums in the manifest.
    """

    def __init__(
        self, directory: AnyPath, manifest: Manifest, *, verify: bool = True
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self._verify = verify
        self._arrays: dict[tuple[int, str], ArrayReader] = {}
        self._ids: dict[tuple[int, int, int], np.ndarray | None] = {}
        self.processes = self._load_processes()

    def _load_processes(self) -> tuple[ProcessManifest, ...]:
        found: list[ProcessManifest] = []
        for i, expected in enumerate(self.manifest.processes):
            where = os.fspath(self.directory / expected.path)
            process = load_process(read_checked(self.directory, expected), where)
            if process.uuid != self.manifest.uuid or process.process != i:
                raise errors.ManifestError(
                    f"{where} belongs to another checkpoint\n"
                    f"  got process {process.process} of {process.uuid},"
                    f" expected process {i} of {self.manifest.uuid}"
                )
            found.append(process)
        tiles = (tile for process in found for tile in process.tiles)
        check_cover(self.manifest.tables, tiles, os.fspath(self.directory))
        return tuple(found)

    def check_dense(self) -> None:
        """Checks every dense file against its digest.

        Raises:
            IntegrityError: at the first one that is missing or damaged.
        """
        for expected in self.manifest.dense_files:
            check_file(self.directory, expected)

    def read(self, process: int, array: str, start: int, stop: int) -> np.ndarray:
        """Elements `start` to `stop` of an array of one process, checked."""
        return self._array(process, array).read(start, stop)

    def start(
        self,
        process: int,
        array: str,
        start: int,
        stop: int,
        out: np.ndarray | None = None,
    ) -> Reading:
        """Starts to read elements of an array of one process; see `ArrayReader.start`."""
        return self._array(process, array).start(start, stop, out)

    def _array(self, process: int, array: str) -> ArrayReader:
        key = (process, array)
        if key not in self._arrays:
            entry = self.processes[process].arrays[array]
            path = self.directory / names.rows_directory(process) / array
            self._arrays[key] = ArrayReader(path, entry, verify=self._verify)
        return self._arrays[key]

    def positions(self, process: int, index: int, rows: int) -> np.ndarray | None:
        """Sorted positions that row ids `index` stand for in a tile of `rows` rows.

        Returns:
            int64 positions, or None for all rows.
        """
        key = (process, index, rows)
        if key not in self._ids:
            self._ids[key] = self._decode(
                process, self.processes[process].row_ids[index], rows
            )
        return self._ids[key]

    def _decode(self, process: int, ids: RowIds, rows: int) -> np.ndarray | None:
        if ids.form == "all":
            if ids.count != rows:
                raise errors.FormatError(
                    f"{os.fspath(self.directory)}: row ids 'all' of {ids.count} rows"
                    f" for a tile of {rows}"
                )
            return None
        data = np.empty(0, np.uint8)
        if ids.bytes:
            stop = ids.offset + ids.bytes
            data = self.read(process, names.ROW_IDS_ARRAY, ids.offset, stop)
        return rowids.decode_rowids(ids.form, data, rows, ids.count)
