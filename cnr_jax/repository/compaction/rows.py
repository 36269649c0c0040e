"""Rows of a merged checkpoint: writes the newest copy of each, as it is stored in a chain.

Nothing is decoded: codes, scales and exact rows are selected, and integers are added. Rows go
through memory block by block, so that a table of any size takes the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cnr_jax.format import names, rowids
from cnr_jax.format.boxes import Box
from cnr_jax.format.dense import DenseTile
from cnr_jax.format.manifest import NamedConfiguration
from cnr_jax.format.tiles import (
    ArrayEntry,
    PartRef,
    ProcessManifest,
    RowIds,
    Segment,
    Tile,
)
from cnr_jax.repository.compaction.layers import bands_of
from cnr_jax.repository.dense_writer import DenseWriter
from cnr_jax.repository.replay.encoded import (
    Encoding,
    StoredSegment,
    Target,
    stored_segments,
)
from cnr_jax.repository.replay.regions import Sums, WantedLeaf
from cnr_jax.repository.rows_writer import (
    SHARED,
    PartArray,
    open_part,
    part_arrays,
    part_of_array,
)
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store import AnyPath, can, syncs_directories
from cnr_jax.repository.store.arrays import ArrayWriter
from cnr_jax.repository.store.kept_chunks import UNPACKED_BYTES, KeptChunks
from cnr_jax.repository.store.packed_arrays import PackedWriter
from cnr_jax.rows.codecs import Codec
from cnr_jax.state.layouts import layout_from

# Bytes of encoded rows that are merged at a time, and of their ids. Each id is there twice while a
# block is merged: as a place in its tile, and in the block.
_BLOCK_BYTES, _BLOCK_IDS_BYTES, _ID_BYTES = 16 << 20, 64 << 20, 16
# Bytes of chunks that are kept while rows are cut from them, and that TensorStore may keep.
_KEPT_BYTES, _CACHE_BYTES = 8 * _BLOCK_BYTES, 1 << 20
# Bytes of rows in another encoding than most of their tile that wait in memory to be stored.
_BESIDE_BYTES = 8 << 20
# Suffix of the names of arrays for such rows.
_BESIDE = "beside"
# Most elements of such an array, whose length is not known before it is written.
_MOST_BESIDE = 1 << 48


@dataclasses.dataclass(slots=True)
class MergedTile:
    """A tile of the merged checkpoint, and the rows of the chain that it is made of.

    Attributes:
        wanted: its rows in the chain, with those that they may have to be added to.
        over: readers of the checkpoints, or layers, whose rows it holds; None for all of `wanted`.
        box: box of the tile.
        layer: number of its layer.
        main: encoding of most of its rows; None if it has no rows.
        count: number of its rows that any checkpoint of the chain stores in `main`.
        listed: ids of each row on average that checkpoints of the chain list.
        source: where these rows are stored in the chain, to compare it with that of another leaf.
        own: arrays of its parts, without those that are stored with another leaf.
        refs: places of its parts in the merged checkpoint, by name.
    """

    wanted: WantedLeaf
    over: tuple[StepReader, ...] | None
    box: Box
    layer: int
    main: Encoding | None
    count: int
    listed: float
    source: tuple[object, ...]
    own: tuple[PartArray, ...] = ()
    refs: dict[str, PartRef] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows that the box of the tile spans."""
        return self.box[0][1] - self.box[0][0]

    def blocks(self) -> Iterator[tuple[int, Box]]:
        """Yields blocks of its rows: the first position of each in the tile, and its box."""
        if self.main is not None:
            (low, high), *columns = self.box
            step = _BLOCK_BYTES // self.main.row_bytes
            if self.listed:  # which outweighs rows that are narrow, in a long chain
                step = min(step, int(_BLOCK_IDS_BYTES / _ID_BYTES / self.listed))
            step = max(1, step)
            for start in range(low, high, step):
                yield start - low, ((start, min(start + step, high)), *columns)

    def own_rows(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Masks of a block: rows that the tile has, and those ever stored in its main encoding."""
        own, main = np.zeros((2, box[0][1] - box[0][0]), bool)
        for each in self.wanted.held(box):
            if self.over is None or any(each.reader is r for r in self.over):
                own[each.at] = True
                if each.encoding == self.main:
                    main[each.at] = True
        return own, main


@dataclasses.dataclass(slots=True)
class _Beside:
    """Rows of a tile in another encoding than its main one, which wait to be stored."""

    encoding: Encoding
    positions: list[np.ndarray] = dataclasses.field(default_factory=list)
    parts: list[Mapping[str, np.ndarray]] = dataclasses.field(default_factory=list)
    nbytes: int = 0

    def add(self, positions: np.ndarray, parts: Mapping[str, np.ndarray]) -> None:
        """Adds rows in any order; all of them must come after those added before."""
        order = np.argsort(positions, kind="stable")
        self.positions.append(positions[order])
        self.parts.append({name: part[order] for name, part in parts.items()})
        self.nbytes += len(positions) * self.encoding.row_bytes

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Takes all rows out, in the order of their positions."""
        parts = {n: np.concatenate([p[n] for p in self.parts]) for n in self.parts[0]}
        positions = np.concatenate(self.positions)
        self.positions, self.parts, self.nbytes = [], [], 0
        return positions, parts


def cache_for_merge(root: AnyPath) -> KeptChunks:
    """Makes a cache that is large enough to merge a chain of a root, and no larger.

    Where a read takes no request, it unpacks in the thread that asks: threads that take turns with
    it would end a merge sooner by a tenth, and take a tenth more of the cores that training needs.
    """
    ahead_bytes = 0 if can(root).cheap_looks else UNPACKED_BYTES
    return KeptChunks(_KEPT_BYTES, _CACHE_BYTES, ahead_bytes)


def planned_tiles(chain: Sequence[StepReader]) -> list[list[MergedTile]]:
    """Tiles of the merged checkpoint of a chain, by leaf, each leaf from its first row."""
    return [
        list(_tiles_of(chain, table.name, leaf.name))
        for table in chain[-1].manifest.tables
        for leaf in table.leaves
    ]


def _tiles_of(
    chain: Sequence[StepReader], table: str, leaf: str
) -> Iterator[MergedTile]:
    entry, dtype = chain[-1].tables[table], chain[-1].dtypes[table, leaf]
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    target = Target(rows=entry.rows, layout=layout, padded_rows=entry.padded_rows)
    bands = list(bands_of(chain, table, leaf))
    layers = max(len(band.layers) for band in bands)
    shape = next(each.shape for each in entry.leaves if each.name == leaf)
    everything = tuple((0, size) for size in shape[1:])
    for band in bands:
        for number, layer in enumerate(band.layers):
            chain = (*layer.base, *layer.readers)
            wanted = WantedLeaf(chain, table, leaf, target, dtype, dtype)
            over = tuple(layer.readers) if layer.base else None
            for columns in layer.columns:
                yield _tile_of(wanted, over, (band.rows, *columns), number)
        for number in range(len(band.layers), layers):
            # Empty tiles, since the tiles of each layer have to cover the leaf.
            wanted = WantedLeaf((), table, leaf, target, dtype, dtype)
            yield _tile_of(wanted, None, (band.rows, *everything), number)


def _tile_of(
    wanted: WantedLeaf, over: tuple[StepReader, ...] | None, box: Box, layer: int
) -> MergedTile:
    found = [
        each
        for each in stored_segments(wanted.chain, wanted.table, wanted.name, box[1:])
        if each.tile.box[0][0] < box[0][1] and box[0][0] < each.tile.box[0][1]
    ]
    adding = [each.encoding for each in found if each.segment.digest is not None]
    own = [each for each in found if over is None or each.reader in over]
    main = next(iter([*adding, *(each.encoding for each in own)]), None)
    shares = map(_share_of_rows, found)
    listed = sum(share for share in shares if share < 1)
    tile = MergedTile(wanted, over, box, layer, main, 0, listed, ())
    same = [each for each in found if each.encoding == main]
    tile.source = (wanted.table, box, layer, *map(_source, same))
    if any(each in own and _has_all_rows(each, box) for each in same):
        tile.count = tile.rows
    else:
        tile.count = sum(int(tile.own_rows(b)[1].sum()) for _, b in tile.blocks())
    return tile


def _share_of_rows(each: StoredSegment) -> float:
    """Share of the rows of its tile that a segment has."""
    start, stop = each.tile.box[0]
    count = each.reader.count(each.process, each.segment.row_ids)
    return count / (stop - start)


def _has_all_rows(each: StoredSegment, box: Box) -> bool:
    start, stop = each.tile.box[0]
    count = each.reader.count(each.process, each.segment.row_ids)
    return count == stop - start and start <= box[0][0] and box[0][1] <= stop


def _source(each: StoredSegment) -> tuple[object, ...]:
    """Rows of a segment, and the places of its parts that two leaves may share."""
    parts = each.segment.parts
    summed = parts.get("octaves") or parts.get("integers")
    where = each.reader.manifest.uuid, each.process, each.segment.row_ids
    return *where, summed, parts.get("centre")


class MergedRows:
    """Writer of the rows of a chain as those of one checkpoint, saved by one process.

    Args:
        chain: readers of the chain, the full checkpoint first.
        directory: directory of the item to write, which must exist.
        compression: compression of arrays whose codec does not ask for another; None for none.
        process: number of that process.
    """

    def __init__(
        self,
        chain: Sequence[StepReader],
        directory: AnyPath,
        compression: str | None,
        *,
        process: int = 0,
    ) -> None:
        self._chain, self._directory, self._process = chain, directory, process
        for reader in chain:
            reader.in_blocks = True
        self._compression = compression
        self._rows = directory / names.rows_directory(process)
        self.syncs = syncs_directories(directory)
        self._codecs: dict[Codec, int] = {}
        self._ids: list[RowIds] = []
        self._id_bytes: list[np.ndarray] = []
        self._known_ids: dict[tuple[str, bytes], int] = {}
        self._writers: dict[str, ArrayWriter | PackedWriter] = {}
        self._slot_bytes: dict[str, int] = {}
        self._tiles: list[Tile] = []

    def write(self, uuid: str, *, dense: bool = True) -> ProcessManifest:
        """Writes all rows, then the dense leaves that are stored as tiles.

        Args:
            uuid: uuid of the merged checkpoint.
            dense: whether to write dense leaves.

        Returns:
            Manifest of its process, which is not written yet.

        Raises:
            IntegrityError, FormatError: if a part of the chain is missing or damaged.
        """
        copied: DenseWriter | None = None
        try:
            leaves = planned_tiles(self._chain)
            self._open(leaves)
            for leaf in leaves:
                sums = Sums()
                for tile in leaf:
                    self._write_tile(tile, sums)
                    for reader in self._chain:
                        reader.forget_blocks()
                sums.check()
                for reader in self._chain:
                    reader.forget_positions()
            self._write_ids()
            copied = self._copy_dense() if dense else None
            arrays: dict[str, ArrayEntry] = {}
            for name, writer in self._writers.items():
                entry = writer.finish()
                if entry is not None:
                    arrays[name] = entry
            part = copied.finish() if copied else None
        except BaseException:
            # The caller may remove the folder at once, so nothing may be written any more.
            for writer in (*self._writers.values(), *([copied] if copied else ())):
                writer.stop()
            raise
        return ProcessManifest(
            uuid=uuid,
            process=self._process,
            arrays=arrays,
            codecs=tuple(
                NamedConfiguration(name=c.name, configuration=c.configuration())
                for c in self._codecs
            ),
            row_ids=tuple(self._ids),
            tiles=tuple(self._tiles),
            slot_bytes=sum(
                part_of_array(arrays[name], encoded)
                for name, encoded in self._slot_bytes.items()
            ),
            dense=part,
        )

    def _open(self, leaves: Sequence[Sequence[MergedTile]]) -> None:
        """Decides where the parts of each tile start, and opens the arrays that hold them."""
        lengths: dict[str, int] = {}
        arrays: dict[str, PartArray] = {}
        known: dict[tuple[object, ...], MergedTile] = {}
        for tile in (tile for leaf in leaves for tile in leaf):
            if tile.main is None:
                continue
            shared = {n for n, part in tile.main.parts.items() if part.shared}
            beside = known.get(tile.source) if shared else None
            if beside is not None:
                tile.refs.update({n: beside.refs[SHARED[n]] for n in shared})
            else:
                known.setdefault(tile.source, tile)
            tile.own = _arrays_of(tile.main, all_parts=beside is None)
            for part in tile.own:
                start = lengths.get(part.array, 0)
                tile.refs[part.part] = PartRef(array=part.array, offset=start)
                lengths[part.array] = start + tile.count * part.width
                arrays[part.array] = part
                if tile.wanted.name != "table":
                    self._note_slot(part.array, tile.count * part.row_bytes)
        for name, part in arrays.items():
            self._writers[name] = open_part(
                self._rows / name,
                part,
                lengths[name],
                compression=self._compression,
                syncs=self.syncs,
            )

    def _note_slot(self, array: str, nbytes: int) -> None:
        self._slot_bytes[array] = self._slot_bytes.get(array, 0) + nbytes

    def _write_tile(self, tile: MergedTile, sums: Sums) -> None:
        beside = list[Segment]()
        kept = dict[Encoding, _Beside]()
        positions = list[np.ndarray]()
        sums.over = tile.over
        for first, box in tile.blocks():
            found = tile.wanted.overlaid(box, tile.main, sums)
            own, some = None, slice(None)
            if tile.count < tile.rows:
                own, main = tile.own_rows(box)
                some = np.flatnonzero(main)
                positions.append(first + some)
            for part in tile.own:
                self._writers[part.array].append(found.parts[part.part][some])
            for patch in found.patches:
                rows = kept.setdefault(patch.encoding, _Beside(patch.encoding))
                mine = slice(None) if own is None else own[patch.rows]
                parts = {name: part[mine] for name, part in patch.parts.items()}
                rows.add(first + patch.rows[mine], parts)
                if rows.nbytes > _BESIDE_BYTES:
                    beside.append(self._stored_beside(tile, rows))
        beside += [
            self._stored_beside(tile, each) for each in kept.values() if each.nbytes
        ]
        main = list[Segment]()
        if tile.main is not None and tile.count:
            ids = np.concatenate(positions) if positions else None
            codec, row_ids = self._codec(tile.main.codec), self._add_ids(ids, tile.rows)
            main = [Segment(codec=codec, row_ids=row_ids, parts=tile.refs)]
        self._tiles.append(
            Tile(
                table=tile.wanted.table,
                leaf=tile.wanted.name,
                box=tile.box,
                segments=(*main, *beside),
                layer=tile.layer,
            )
        )

    def _stored_beside(self, tile: MergedTile, rows: _Beside) -> Segment:
        """Stores rows in another encoding than the main one of their tile, as a segment."""
        positions, parts = rows.take()
        encoding, refs = rows.encoding, dict[str, PartRef]()
        for part in _arrays_of(encoding, all_parts=True):
            # In arrays of their own, since the rows of a segment must lie one after the other.
            array, values = f"{part.array}.{_BESIDE}", parts[part.part]
            writer = self._writers.get(array)
            if writer is None:
                writer = self._writers[array] = ArrayWriter(
                    self._rows / array,
                    part.dtype,
                    _MOST_BESIDE,
                    exact=False,
                    compression=self._compression,
                    syncs=self.syncs,
                )
            assert isinstance(writer, ArrayWriter)
            refs[part.part] = PartRef(array=array, offset=writer.position)
            writer.append(values)
            if tile.wanted.name != "table":
                self._note_slot(array, values.nbytes)
        return Segment(
            codec=self._codec(encoding.codec),
            row_ids=self._add_ids(positions, tile.rows),
            parts=refs,
        )

    def _codec(self, codec: Codec) -> int:
        return self._codecs.setdefault(codec, len(self._codecs))

    def _add_ids(self, positions: np.ndarray | None, rows: int) -> int:
        """Index of the ids of rows in a tile of `rows` rows; equal sets of rows share one."""
        if positions is None:
            form, data, count = "all", np.empty(0, np.uint8), rows
        else:
            form, data = rowids.encode_rowids(positions, rows)
            count = len(positions)
        key = (f"{form} {count} {rows}", data.tobytes())
        if key not in self._known_ids:
            offset = sum(map(len, self._id_bytes))
            self._known_ids[key] = len(self._ids)
            self._ids.append(
                RowIds(form=form, offset=offset, bytes=len(data), count=count)
            )
            self._id_bytes.append(data)
        return self._known_ids[key]

    def _write_ids(self) -> None:
        data = np.concatenate([*self._id_bytes, np.empty(0, np.uint8)])
        if len(data):
            name = names.ROW_IDS_ARRAY
            self._writers[name] = writer = ArrayWriter(
                self._rows / name,
                "uint8",
                len(data),
                compression=self._compression,
                syncs=self.syncs,
            )
            writer.append(data)

    def _copy_dense(self) -> DenseWriter:
        """Starts to write the dense tiles of the newest checkpoint; returns their writer."""
        last, offset = self._chain[-1], 0
        found = [(p.process, tile) for p in last.processes for tile in p.dense_tiles]
        moved = list[tuple[int, int]]()
        tiles = list[DenseTile]()
        for process, tile in found:
            moved.append((process, tile.offset))
            tiles.append(dataclasses.replace(tile, offset=offset))
            offset += tile.bytes
        writer = DenseWriter(
            self._directory, 0, tiles, compression=self._compression, syncs=self.syncs
        )
        for (process, start), tile in zip(moved, tiles, strict=True):
            array, stop = last.dense_array(process), start + tile.bytes
            for low in range(start, stop, _BLOCK_BYTES):
                writer.append(array.read(low, min(low + _BLOCK_BYTES, stop)))
        return writer


def _arrays_of(encoding: Encoding, *, all_parts: bool) -> tuple[PartArray, ...]:
    return part_arrays(
        encoding.codec, encoding.width, encoding.dtype, all_parts=all_parts
    )
