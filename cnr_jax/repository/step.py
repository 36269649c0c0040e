"""Reading one checkpoint: its manifests, checked, and slices of its arrays.

Nothing is believed before its digest was compared: `manifest.json` carries its own digest and
names those of the process manifests and dense files, these name the checksums of the arrays.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator, Mapping

import numpy as np

from cnr_jax import errors
from cnr_jax.format import names, rowids
from cnr_jax.format.manifest import Manifest, TableEntry, load
from cnr_jax.format.tiles import (
    ProcessManifest,
    RowIds,
    Tile,
    box_json,
    check_cover,
    lacking_rows,
    load_process,
)
from cnr_jax.repository.array_reader import ArrayReader, KeptChunks, Reading
from cnr_jax.repository.checked import (
    Seal,
    about,
    check_dense_index,
    check_process,
    read_checked,
    reading,
    sealed,
)
from cnr_jax.repository.files import AnyPath, exists, is_local
from cnr_jax.repository.joined import (
    as_one,
    ids_of,
    joined_positions,
    runs,
    widths_of,
)
from cnr_jax.repository.store import numpy_dtype
from cnr_jax.rows.codecs import Codec, codec_from


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No search for cyclic garbage meanwhile: manifests have none.

    Those of a thousand tables are a million objects, among which it would be looked for again
    and again: a third of the time of a restore.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_manifest(directory: AnyPath) -> Manifest:
    """The manifest of a checkpoint item.

    Raises:
        IntegrityError: if there is none, or it cannot be read.
        ManifestError: if it is damaged or breaks the format's rules.
        UnsupportedVersionError: if it needs a newer reader.
    """
    path = directory / names.MANIFEST
    try:
        with reading(path):
            data = path.read_bytes()
    except errors.IntegrityError as error:
        if error.kind != "file_missing":
            raise
        raise errors.IntegrityError(
            f"{os.fspath(directory)} holds no checkpoint: {names.MANIFEST} is missing",
            kind="manifest_missing",
            path=os.fspath(path),
        ) from error
    with about(path):
        return load(data, os.fspath(path))


def read_committed(root: AnyPath, directory: str, item: str) -> Manifest:
    """The manifest of a step that Orbax has committed.

    Where directories cannot be renamed, one that holds a manifest need not be: a run may have
    been killed right before the file that commits it was written.

    Raises:
        IntegrityError: if it is missing, or the step is not committed.
        FormatError: see `read_manifest`.
    """
    manifest = read_manifest(root / directory / item)
    commit = root / directory / names.COMMITTED
    if not is_local(root) and not exists(commit):
        raise errors.IntegrityError(
            f"step {directory} was never committed: {os.fspath(commit)} is missing",
            kind="not_committed",
            path=os.fspath(commit),
        )
    return manifest


def read_step(root: AnyPath, directory: str, item: str) -> Manifest:
    """The manifest of a step, which must be that of the step whose directory it is in.

    Raises:
        IntegrityError: if it is missing, not committed, or of another step.
        FormatError: see `read_manifest`.
    """
    where = root / directory / item
    manifest = read_committed(root, directory, item)
    number = names.step_number(directory)
    if manifest.step != number:
        path = os.fspath(where / names.MANIFEST)
        raise errors.IntegrityError(
            f"{path} is of the checkpoint of another step\n"
            f"  got step {manifest.step}, expected {number}, as the folder says\n"
            "  hint: give the folder its name back, if it was copied or renamed",
            kind="foreign_step",
            path=path,
        )
    return manifest


class StepReader:
    """One checkpoint that is read from.

    Args:
        directory: of the item.
        manifest: as `read_manifest` returned it.
        verify: whether chunks are compared with the checksums in the manifest.
        kept: holds chunks that small slices are cut from.
    """

    def __init__(
        self,
        directory: AnyPath,
        manifest: Manifest,
        *,
        verify: bool,
        kept: KeptChunks,
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.tables = {entry.name: entry for entry in manifest.tables}
        self._verify, self._kept = verify, kept
        self._arrays: dict[tuple[int, str], ArrayReader] = {}
        self._ids: dict[tuple[int, int, int], np.ndarray | None] = {}
        self._codecs: dict[tuple[int, int], Codec] = {}
        self._dtypes = {
            (entry.name, leaf.name): numpy_dtype(leaf.dtype)
            for entry in manifest.tables
            for leaf in entry.leaves
        }
        self.processes = self._load_processes()
        self._joined: dict[tuple[str, str], list[tuple[int, Tile]]] = {}
        self._joined_index: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        self._joined_ids: list[tuple[tuple[int, int], ...]] = []
        self._tiles: dict[tuple[str, str], list[tuple[int, Tile]]] = {}
        for process in self.processes:
            for tile in process.tiles:
                found = self._tiles.setdefault((tile.table, tile.leaf), [])
                found.append((process.process, tile))

    def _load_processes(self) -> tuple[ProcessManifest, ...]:
        found: list[ProcessManifest] = []
        for i, expected in enumerate(self.manifest.processes):
            where = os.fspath(self.directory / expected.path)
            data = read_checked(self.directory, expected)
            with about(self.directory / expected.path):
                process = load_process(data, where)
            check_process(process, i, self.manifest.uuid, where)
            self._check_rows(process, where)
            found.append(process)
        tiles = (tile for process in found for tile in process.tiles)
        check_cover(self.manifest.tables, tiles, os.fspath(self.directory))
        return tuple(found)

    def _check_rows(self, process: ProcessManifest, where: str) -> None:
        """Rows that nothing holds would restore as zeros: a full checkpoint has none."""
        lacking = lacking_rows(process) if self.manifest.kind == "full" else []
        if lacking:
            tile = lacking[0]
            raise errors.IntegrityError(
                f"{where}: a full checkpoint lacks rows of {tile.table}.{tile.leaf}\n"
                f"  no segment of tile {box_json(tile.box)} holds all of its rows;"
                f" {len(lacking)} such tiles",
                kind="rows_missing",
                path=where,
            )

    def check_dense(self) -> Seal:
        """Checks every dense file against its digest, and that there are no others or too few.

        Returns:
            What tells afterwards whether they are still the same.

        Raises:
            IntegrityError: at the first one that is missing, damaged or not named.
        """
        files = self.manifest.dense_files
        check_dense_index(self.manifest.dense_leaves, files, self.directory)
        return sealed(self.directory, names.DENSE, files)

    def tiles(
        self, table: TableEntry, leaf: str | None = None
    ) -> list[tuple[int, Tile]]:
        """Tiles of a table, or of one leaf of it, each with the process that wrote it.

        Neighbours are joined where they can be, so these are not those of the manifests; but
        they hold the same rows in the same places.

        Raises:
            FormatError: if a codec is not known.
        """
        names = [x.name for x in table.leaves] if leaf is None else [leaf]
        found: list[tuple[int, Tile]] = []
        for name in names:
            key = (table.name, name)
            if key not in self._joined:
                self._joined[key] = list(self._join(key))
            found += self._joined[key]
        return found

    def _join(self, key: tuple[str, str]) -> Iterator[tuple[int, Tile]]:
        by_process = itertools.groupby(self._tiles[key], key=lambda each: each[0])
        for process, group in by_process:
            tiles = [tile for _, tile in group]
            if len(tiles) == 1:
                yield process, tiles[0]
                continue
            segment = tiles[0].segments[0] if tiles[0].segments else None
            widths: Mapping[str, int] = {}
            if segment is not None:
                codec = self.codec(process, segment.codec)
                widths = widths_of(codec, tiles[0].width, self._dtypes[key])
            for run in runs(tiles, self.processes[process].row_ids, widths):
                yield process, self._as_one(process, run)

    def _as_one(self, process: int, run: list[Tile]) -> Tile:
        if len(run) == 1:
            return run[0]
        ids = ids_of(run)
        # A table and its slots mostly hold the same rows: they are decoded once.
        index = self._joined_index.setdefault(
            (process, ids), -1 - len(self._joined_ids)
        )
        if -index > len(self._joined_ids):
            self._joined_ids.append(ids)
        return as_one(run, index)

    def dtype(self, table: str, leaf: str) -> np.dtype:
        """The dtype in which a leaf was saved."""
        return self._dtypes[table, leaf]

    def codec(self, process: int, index: int) -> Codec:
        """A codec that a process manifest lists.

        Raises:
            FormatError: if it is not known, or its configuration does not fit it.
        """
        key = (process, index)
        if key not in self._codecs:
            named = self.processes[process].codecs[index]
            with about(self.directory / names.process_manifest(process)):
                self._codecs[key] = codec_from(named.name, named.configuration)
        return self._codecs[key]

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

    def check_stored(self, process: int, array: str, start: int, stop: int) -> None:
        """Checks, before room is made for elements, that the files are there they come from.

        Raises:
            IntegrityError: if a file is missing, is none, or is too small.
            FormatError: if the elements are not inside the array.
        """
        self._array(process, array).check_stored(start, stop)

    def _array(self, process: int, array: str) -> ArrayReader:
        key = (process, array)
        if key not in self._arrays:
            entry = self.processes[process].arrays[array]
            path = self.directory / names.rows_directory(process) / array
            self._arrays[key] = ArrayReader(
                path, entry, verify=self._verify, kept=self._kept
            )
        return self._arrays[key]

    def count(self, process: int, index: int) -> int:
        """How many rows row ids `index` of a tile stand for; see `positions`."""
        listed = self.processes[process].row_ids
        if index >= 0:
            return listed[index].count
        return sum(listed[one].count for one, _ in self._joined_ids[-1 - index])

    def positions(self, process: int, index: int, rows: int) -> np.ndarray | None:
        """Sorted positions that row ids `index` stand for in a tile of `rows` rows.

        Args:
            process: the one that wrote the tile.
            index: as it is in the tile's segment; negative in a tile that was joined.
            rows: of the tile.

        Returns:
            int64 positions, or None for all rows.
        """
        key = (process, index, rows)
        if key not in self._ids:
            if index < 0:
                self._ids[key] = joined_positions(
                    self._joined_ids[-1 - index],
                    lambda one, count: self._decode(process, one, count),
                )
            else:
                self._ids[key] = self._decode(process, index, rows)
        return self._ids[key]

    def _decode(self, process: int, index: int, rows: int) -> np.ndarray | None:
        ids: RowIds = self.processes[process].row_ids[index]
        data = np.empty(0, np.uint8)
        if ids.bytes:
            stop = ids.offset + ids.bytes
            data = self.read(process, names.ROW_IDS_ARRAY, ids.offset, stop)
        try:
            if ids.form == "all" and ids.count == rows and not ids.bytes:
                return None  # every row, without a list of them
            return rowids.decode_rowids(ids.form, data, rows, ids.count)
        except errors.FormatError as error:
            path = self.directory / names.rows_directory(process) / names.ROW_IDS_ARRAY
            where = os.fspath(path)
            message = f"{where}: entry {index}: {error}"
            raise errors.FormatError(message, kind=error.kind, path=where) from error
