"""Reading the arrays of a checkpoint, and of the chain it rests on.

Neighbouring tiles of one process are joined: their rows are read and placed in one go. A table that
is split over the devices of a process has a tile for each of them, but the rows of these tiles
usually lie one after the other in the process's arrays. The time to read a small table depends on
the number of its tiles.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cnr_jax import errors
from cnr_jax.format import names, rowids
from cnr_jax.format.manifest import Manifest
from cnr_jax.format.tiles import RowIds, Segment, Tile
from cnr_jax.garbage import without_collections
from cnr_jax.repository.ids_in_blocks import IdsInBlocks
from cnr_jax.repository.index.resolve import resolve_chain
from cnr_jax.repository.step import read_processes
from cnr_jax.repository.store import AnyPath, asking_once, store_of
from cnr_jax.repository.store.arrays import ArrayReader
from cnr_jax.repository.store.checked import (
    about,
    numpy_dtype,
)
from cnr_jax.repository.store.kept_chunks import KeptChunks
from cnr_jax.rows.codecs import Codec, Part, codec_from


def open_chain(
    root: AnyPath,
    directory: str,
    item: str,
    *,
    verify: bool = True,
    kept: KeptChunks | None = None,
) -> tuple[StepReader, ...]:
    """Opens readers of the checkpoints to replay, the full one first and `directory` last.

    Args:
        root: root that holds the step directories.
        directory: name of the step directory to restore.
        item: name of the item in each step directory.
        verify: whether chunks are compared with the checksums in the manifests.
        kept: cache of chunks from which small slices are cut; None: a new one.

    Raises:
        ChainError, IntegrityError, ManifestError: as `resolve_chain`, and if a process manifest
            of the chain is missing or damaged.
    """
    kept = kept if kept is not None else KeptChunks()
    readers: list[StepReader] = []
    with without_collections(), asking_once():
        chain = resolve_chain(root, directory, item)
        store_of(root).fetch(
            root / name / item / process.path
            for name, manifest in chain
            for process in manifest.processes
        )
        for name, manifest in chain:
            where = root / name / item
            with about(where):
                readers.append(StepReader(where, manifest, verify=verify, kept=kept))
    return tuple(readers)


class StepReader:
    """Reader of one checkpoint.

    Args:
        directory: directory of the item.
        manifest: manifest of the checkpoint, as `read_manifest` returned it.
        verify: whether chunks are compared with the checksums in the manifest.
        kept: cache of chunks from which small slices are cut.

    Attributes:
        directory: as given.
        manifest: as given.
        tables: entries of the manifest, by the names of tables.
        dtypes: dtypes in which leaves were saved, by table and leaf.
        processes: manifests of all processes.
        in_blocks: whether rows are asked for block by block. Then long lists of row ids are read
            block by block too, and not kept, unless rows are laid out in another way now.
    """

    def __init__(
        self, directory: AnyPath, manifest: Manifest, *, verify: bool, kept: KeptChunks
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.tables = {entry.name: entry for entry in manifest.tables}
        self._verify, self._kept = verify, kept
        self._arrays: dict[tuple[int, str], ArrayReader] = {}
        self._dense: dict[int, ArrayReader] = {}
        self._ids: dict[tuple[int, int, int], np.ndarray | None] = {}
        self._blocks: dict[tuple[int, int, int], IdsInBlocks] = {}
        self.in_blocks = False
        self._codecs: dict[tuple[int, int], Codec] = {}
        self.dtypes = {
            (entry.name, leaf.name): numpy_dtype(leaf.dtype)
            for entry in manifest.tables
            for leaf in entry.leaves
        }
        self.processes = read_processes(directory, manifest)
        self._joined: dict[tuple[str, str], list[tuple[int, Tile]]] = {}
        self._joined_index: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        self._joined_ids: list[tuple[tuple[int, int], ...]] = []
        self._tiles: dict[tuple[str, str], list[tuple[int, Tile]]] = {}
        for process in self.processes:
            for tile in process.tiles:
                found = self._tiles.setdefault((tile.table, tile.leaf), [])
                found.append((process.process, tile))
        for found in self._tiles.values():
            if any(tile.layer for _, tile in found):
                found.sort(key=lambda each: each[1].layer)

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks that were read so far, each counted once."""
        readers = [*self._arrays.values(), *self._dense.values()]
        return sum(reader.read_bytes for reader in readers)

    def tiles(self, table: str, leaf: str) -> list[tuple[int, Tile]]:
        """Tiles of a leaf, each with the process that wrote it.

        Neighbours are joined where they can be. So these are not the tiles of the manifests, but
        hold the same rows in the same places. Lower layers come before higher ones.

        Raises:
            FormatError: if a codec is not known.
        """
        key = (table, leaf)
        if key not in self._joined:
            self._joined[key] = list(self._join(key))
        return self._joined[key]

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
                widths = widths_of(codec, tiles[0].width, self.dtypes[key])
            for run in runs(tiles, self.processes[process].row_ids, widths):
                if len(run) == 1:
                    yield process, run[0]
                    continue
                ids = ids_of(run)
                # A table and its slots mostly hold the same rows, whose ids are decoded once.
                new = -1 - len(self._joined_ids)
                index = self._joined_index.setdefault((process, ids), new)
                if index == new:
                    self._joined_ids.append(ids)
                yield process, as_one(run, index)

    def layers(self, table: str, leaf: str) -> list[StepReader]:
        """Readers of a leaf, one for each layer, the lowest layer first."""
        tiles = self._tiles[table, leaf]
        found: list[StepReader] = []
        for layer in sorted({tile.layer for _, tile in tiles}):
            view = copy.copy(self)
            own = [each for each in tiles if each[1].layer == layer]
            view._tiles, view._joined = {(table, leaf): own}, {}
            found.append(view)
        return found

    def codec(self, process: int, index: int) -> Codec:
        """The codec that a process manifest lists at an index.

        Raises:
            FormatError: if the codec is not known, or its configuration does not fit it.
        """
        key = (process, index)
        if key not in self._codecs:
            named = self.processes[process].codecs[index]
            with about(self.directory / names.process_manifest(process)):
                self._codecs[key] = codec_from(named.name, named.configuration)
        return self._codecs[key]

    def part(
        self, process: int, segment: Segment, name: str, part: Part
    ) -> tuple[ArrayReader, int]:
        """The array that a part of a segment is in, and the element at which it begins.

        Raises:
            FormatError: if the segment has no such part, or it is of another dtype.
        """
        ref = segment.parts.get(name)
        arrays = self.processes[process].arrays
        if ref is None or numpy_dtype(arrays[ref.array].dtype) != part.dtype:
            got = "nothing" if ref is None else f"array {ref.array}"
            where = os.fspath(self.directory)
            raise errors.FormatError(
                f"{where}: part {name!r} of a segment does not fit its codec\n"
                f"  got {got}, expected {part.dtype}",
                path=where,
            )
        return self.array(process, ref.array), ref.offset

    def array(self, process: int, array: str) -> ArrayReader:
        """Opens an array of rows or row ids of one process."""
        key = (process, array)
        if key not in self._arrays:
            entry = self.processes[process].arrays[array]
            path = self.directory / names.rows_directory(process) / array
            self._arrays[key] = ArrayReader(
                path, entry, verify=self._verify, kept=self._kept
            )
        return self._arrays[key]

    def read_ahead(self, limit_bytes: int) -> int:
        """Starts to read arrays of rows that fit into the limit; returns the bytes left of it."""
        for process in self.processes:
            for name in process.arrays:
                array = self.array(process.process, name)
                limit_bytes -= array.read_ahead(limit_bytes)
        return limit_bytes

    def dense_array(self, process: int) -> ArrayReader:
        """Opens the array of dense leaves of one process, which must have written some as tiles."""
        if process not in self._dense:
            part = self.processes[process].dense
            assert part is not None
            path = self.directory / names.dense_array(process)
            self._dense[process] = ArrayReader(
                path, part.array, verify=self._verify, kept=self._kept
            )
        return self._dense[process]

    def count(self, process: int, index: int) -> int:
        """Number of rows that row ids `index` of a tile stand for; see `positions`."""
        listed = self.processes[process].row_ids
        if index >= 0:
            return listed[index].count
        return sum(listed[one].count for one, _ in self._joined_ids[-1 - index])

    def lists_all_of_some(self, process: int, index: int) -> bool:
        """Whether a list of the rows would contain all rows of a tile that has no list of its own.

        That is so if some of the joined tiles have all of their rows, and others do not.
        """
        listed = self.processes[process].row_ids
        ids = self._joined_ids[-1 - index] if index < 0 else ()
        return len({listed[one].form == "all" for one, _ in ids}) > 1

    def positions(self, process: int, index: int, rows: int) -> np.ndarray | None:
        """Sorted positions that row ids `index` stand for in a tile of `rows` rows.

        Args:
            process: index of the process that wrote the tile.
            index: index in the tile's segment; negative in a tile that was joined.
            rows: number of rows of the tile.

        Returns:
            int64 positions, or None for all rows.
        """
        key = (process, index, rows)
        if key not in self._ids:
            if index < 0:
                ids = self._joined_ids[-1 - index]
                decode = functools.partial(self._decode, process)
                self._ids[key] = joined_positions(ids, decode)
            else:
                self._ids[key] = self._decode(process, index, rows)
        return self._ids[key]

    def forget_positions(self) -> None:
        """Forgets lists of rows, which nobody will ask for any more."""
        self._ids.clear()
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """Forgets how far row ids were read; another block is found from the first one again."""
        self._blocks.clear()

    def positions_between(
        self, process: int, index: int, rows: int, first: int, last: int
    ) -> tuple[int, np.ndarray] | None:
        """The number of positions of row ids before a block of rows, and the positions in it.

        Args:
            process: see `positions`.
            index: see `positions`.
            rows: see `positions`.
            first: position at which the block begins.
            last: position at which it ends.

        Returns:
            The number, and int64 positions in the tile. None if all positions are better read at
            once, by `positions`.
        """
        if not self.in_blocks or last - first == rows:
            return None
        tiles = self._joined_ids[-1 - index] if index < 0 else ((index, rows),)
        listed = self.processes[process].row_ids
        if all(listed[one].form in ("all", "none") for one, _ in tiles):
            return None
        found, before, start = list[np.ndarray](), 0, 0
        for one, count in tiles:
            low, high = max(first - start, 0), min(last - start, count)
            if low >= count:
                before += listed[one].count
                self._blocks.pop((process, one, count), None)  # blocks go on from here
            elif low < high:
                earlier, own = self._in_block(process, one, count, low, high)
                before += earlier
                found.append(own + start)
            start += count
        return before, np.concatenate(found)

    def _in_block(
        self, process: int, index: int, rows: int, first: int, last: int
    ) -> tuple[int, np.ndarray]:
        """`positions_between` of a tile that was not joined."""
        ids: RowIds = self.processes[process].row_ids[index]
        if ids.form not in ("bitmap", "gaps") or not ids.bytes:
            found = self._decode(process, index, rows)
            return (first, np.arange(first, last)) if found is None else (0, found)
        key = process, index, rows
        if key not in self._blocks:
            array = self.array(process, names.ROW_IDS_ARRAY)
            self._blocks[key] = IdsInBlocks(ids, rows, array.read)
        with self._about_ids(process, index):
            return self._blocks[key].between(first, last)

    def _decode(self, process: int, index: int, rows: int) -> np.ndarray | None:
        ids: RowIds = self.processes[process].row_ids[index]
        data = np.empty(0, np.uint8)
        if ids.bytes:
            stop = ids.offset + ids.bytes
            data = self.array(process, names.ROW_IDS_ARRAY).read(ids.offset, stop)
        if ids.form == "all" and ids.count == rows and not ids.bytes:
            return None  # every row, without a list of them
        with self._about_ids(process, index):
            return rowids.decode_rowids(ids.form, data, rows, ids.count)

    @contextlib.contextmanager
    def _about_ids(self, process: int, index: int) -> Iterator[None]:
        """Says in errors which row ids they are about."""
        try:
            yield
        except errors.FormatError as error:
            path = self.directory / names.rows_directory(process) / names.ROW_IDS_ARRAY
            where = os.fspath(path)
            message = f"{where}: entry {index}: {error}"
            raise errors.FormatError(message, kind=error.kind, path=where) from error


def runs(
    tiles: Sequence[Tile], row_ids: Sequence[RowIds], widths: Mapping[str, int]
) -> Iterator[list[Tile]]:
    """Cuts tiles of one process and leaf into runs that can each be read like one tile.

    Args:
        tiles: tiles in the order of the manifest.
        row_ids: row ids of the process.
        widths: number of elements of each part of a row, in the codec of the first tile.

    Yields:
        Tiles that follow each other, in their rows and in their places in arrays.
    """
    run: list[Tile] = []
    for tile in tiles:
        if run and not _follows(run[-1], tile, row_ids, widths):
            yield run
            run = []
        run.append(tile)
    if run:
        yield run


def _follows(
    before: Tile, tile: Tile, row_ids: Sequence[RowIds], widths: Mapping[str, int]
) -> bool:
    if len(before.segments) != 1 or len(tile.segments) != 1:
        return False
    if tile.box[0][0] != before.box[0][1] or tile.box[1:] != before.box[1:]:
        return False
    if tile.layer != before.layer:
        return False
    first, second = before.segments[0], tile.segments[0]
    if first.codec != second.codec or first.parts.keys() != second.parts.keys():
        return False
    if first.digest or second.digest:
        return False  # a digest covers one tile
    count = row_ids[first.row_ids].count
    for name, part in first.parts.items():
        other = second.parts[name]
        if other.array != part.array or name not in widths:
            return False
        if other.offset != part.offset + count * widths[name]:
            return False
    return True


def as_one(run: Sequence[Tile], row_ids: int) -> Tile:
    """One tile in the place of a run, with `row_ids` as the index of its row ids."""
    first, last = run[0], run[-1]
    box = ((first.box[0][0], last.box[0][1]), *first.box[1:])
    segment: Segment = dataclasses.replace(first.segments[0], row_ids=row_ids)
    return dataclasses.replace(first, box=box, segments=(segment,))


def ids_of(run: Sequence[Tile]) -> tuple[tuple[int, int], ...]:
    """For each tile of a run, the index of its row ids, and its number of rows."""
    return tuple(
        (tile.segments[0].row_ids, tile.box[0][1] - tile.box[0][0]) for tile in run
    )


def joined_positions(
    ids: Sequence[tuple[int, int]], read: Callable[[int, int], np.ndarray | None]
) -> np.ndarray | None:
    """Sorted positions in a run of tiles, relative to its first row; None for all rows.

    Args:
        ids: row ids and numbers of rows, as `ids_of` returned them.
        read: function that returns the positions of row ids in a tile of so many rows; None: all.
    """
    found = [read(index, rows) for index, rows in ids]
    if all(each is None for each in found):
        return None
    parts: list[np.ndarray] = []
    start = 0
    for (_, rows), each in zip(ids, found, strict=True):
        parts.append(start + (np.arange(rows) if each is None else each))
        start += rows
    return np.concatenate(parts)


@functools.lru_cache(maxsize=1024)
def widths_of(codec: Codec, width: int, dtype: np.dtype) -> Mapping[str, int]:
    """Number of elements in each part of a row that has `width` elements."""
    return {name: part.width for name, part in codec.parts(width, dtype).items()}
