"""Rebuilding table leaves from a chain, for any sharding, without a whole table in memory.

For each part of a leaf that a local device holds, the chain is replayed from the full
checkpoint on: of every stored tile the rows that fall into the part are read, decoded and put in
place. Later checkpoints overwrite earlier ones. Nothing is communicated between processes.

Differs from Check-N-Run in: 1. the part, not the table, is the unit, so any mesh can read what
any other wrote; 2. codes, not decoded rows, cross to an accelerator.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from cnr_jax import errors
from cnr_jax.format.manifest import TableEntry
from cnr_jax.format.tiles import Box, PartRef, Segment, Tile
from cnr_jax.layouts import RowLayout, layout_from
from cnr_jax.repository.assemble import Block, Columns, Rows, new_rows
from cnr_jax.repository.step import StepReader
from cnr_jax.repository.store import numpy_dtype
from cnr_jax.rows.codecs import Part, codec_from
from cnr_jax.rows.gather import chunk_rows
from cnr_jax.rows.tiling import boxes_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A table as it is wanted: how many rows, and where logical rows lie.

    Attributes:
        rows: logical rows; equal to the checkpoint's.
        layout: may differ from the checkpoint's.
        padded_rows: stored rows; may differ too. New padding is zero.
    """

    rows: int
    layout: RowLayout
    padded_rows: int


def restore_leaf(
    chain: Sequence[StepReader],
    table: str,
    leaf: str,
    target: Target,
    abstract: jax.ShapeDtypeStruct,
) -> jax.Array:
    """One leaf of a table, sharded as `abstract` says.

    Args:
        chain: the checkpoints to replay, the full one first.
        table: name of the table.
        leaf: `"table"` or the name of a slot.
        target: rows and layout that are wanted.
        abstract: shape, dtype and sharding; `shape[0]` is `target.padded_rows`.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    sharding = abstract.sharding
    assert isinstance(sharding, Sharding)
    arrays: dict[jax.Device, jax.Array] = {}
    for box, devices in boxes_of(sharding, abstract.shape).items():
        local = [d for d in devices if d.process_index == jax.process_index()]
        if not local:
            continue
        rows = new_rows(box, np.dtype(abstract.dtype), local[0])
        for reader in chain:
            _replay(reader, table, leaf, target, box, rows)
        part = rows.result()
        for device in local:
            arrays[device] = jax.device_put(part, device)
    order = [d for d in sharding.addressable_devices_indices_map(abstract.shape)]
    return jax.make_array_from_single_device_arrays(
        abstract.shape, sharding, [arrays[device] for device in order]
    )


def restore_stamps(
    chain: Sequence[StepReader], table: str, target: Target, sharding: Sharding
) -> jax.Array:
    """Stamps under which the next delta is right, whichever of `chain` is its parent.

    The clock is counted anew: 0 for the full checkpoint, 1 for the first delta, and so on. A
    row gets the number of the newest checkpoint that holds it, so rows stamped after checkpoint
    `k` are those in which a later one differs from it.

    Returns:
        int32[target.padded_rows], sharded as `sharding` says.
    """
    shape = (target.padded_rows,)
    arrays: dict[jax.Device, jax.Array] = {}
    for box, devices in boxes_of(sharding, shape).items():
        local = [d for d in devices if d.process_index == jax.process_index()]
        if not local:
            continue
        stamps = restored_stamps(chain, table, target, box[0])
        for device in local:
            arrays[device] = jax.device_put(stamps, device)
    order = [d for d in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in order]
    )


def restored_stamps(
    chain: Sequence[StepReader], table: str, target: Target, rows: tuple[int, int]
) -> np.ndarray:
    """The stamps of `restore_stamps` for some rows, int32[rows[1] - rows[0]]."""
    stamps = np.zeros(rows[1] - rows[0], np.int32)
    for clock, reader in enumerate(chain[1:], start=1):
        for at in _rows_in(reader, table, target, rows):
            stamps[at] = clock
    return stamps


def _rows_in(
    reader: StepReader, table: str, target: Target, rows: tuple[int, int]
) -> Iterator[np.ndarray | slice]:
    """Rows within `rows` of which a checkpoint holds any leaf, relative to the first.

    Tiles of different leaves may hold different rows: see SPEC, section 8.
    """
    place = _placement(_entry(reader, table), target)
    done: set[tuple[int, tuple[int, int], int]] = set()
    for process, tile in _tiles(reader, table):
        for segment in tile.segments:
            key = (process, tile.box[0], segment.row_ids)
            if key not in done:
                done.add(key)
                yield _overlap(reader, process, tile, segment, place, rows)[1]


def _entry(reader: StepReader, table: str) -> TableEntry:
    entry = reader.manifest.table(table)
    assert entry is not None, table
    return entry


def _tiles(
    reader: StepReader, table: str, leaf: str | None = None
) -> Iterator[tuple[int, Tile]]:
    """Tiles of a table, or of one leaf of it, each with the process that wrote it."""
    for process in reader.processes:
        for tile in process.tiles:
            if tile.table == table and leaf in (None, tile.leaf):
                yield process.process, tile


def _placement(
    entry: TableEntry, target: Target
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Maps stored rows to wanted ones, -1 for padding; None where they are the same."""
    saved = layout_from(entry.layout.name, entry.layout.configuration)
    if saved == target.layout and entry.padded_rows == target.padded_rows:
        return None

    def place(stored: np.ndarray) -> np.ndarray:
        logical = saved.to_logical(stored)
        known = logical < min(entry.rows, target.rows)
        return np.where(
            known, target.layout.to_physical(np.where(known, logical, 0)), -1
        )

    return place


def _overlap(
    reader: StepReader,
    process: int,
    tile: Tile,
    segment: Segment,
    place: Callable[[np.ndarray], np.ndarray] | None,
    rows: tuple[int, int],
) -> tuple[np.ndarray | slice, np.ndarray | slice]:
    """Which rows of a segment fall into `rows`, and where they go.

    Returns:
        Indices into the segment, and rows relative to `rows[0]`; slices where both are runs.
    """
    start, stop = tile.box[0]
    positions = reader.positions(process, segment.row_ids, stop - start)
    if positions is None and place is None:
        first, last = max(start, rows[0]), min(stop, rows[1])
        if first >= last:
            return slice(0, 0), slice(0, 0)
        return slice(first - start, last - start), slice(
            first - rows[0], last - rows[0]
        )
    stored = np.arange(start, stop) if positions is None else positions + start
    if place is None:
        # Positions are sorted, so those within a range are a run.
        first, last = np.searchsorted(stored, rows).tolist()
        return slice(first, last), stored[first:last] - rows[0]
    wanted = place(stored)
    index = np.flatnonzero((wanted >= rows[0]) & (wanted < rows[1]))
    return index, wanted[index] - rows[0]


def _replay(
    reader: StepReader, table: str, leaf: str, target: Target, box: Box, rows: Rows
) -> None:
    """Puts the rows that one checkpoint holds of a part in place."""
    entry = _entry(reader, table)
    dtype = next(numpy_dtype(x.dtype) for x in entry.leaves if x.name == leaf)
    place = _placement(entry, target)
    for process, tile in _tiles(reader, table, leaf):
        columns = _columns(tile.box[1:], box[1:])
        if columns is None:
            continue
        for segment in tile.segments:
            index, at = _overlap(reader, process, tile, segment, place, box[0])
            for block, where in _blocks(
                reader, process, tile, segment, dtype, index, at
            ):
                rows.put(where, columns, block)


def _columns(tile: Box, part: Box) -> Columns | None:
    """The columns that a tile and a part share; None where there are none."""
    target: list[slice] = []
    source: list[slice] = []
    for (a, b), (c, d) in zip(tile, part, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        target.append(slice(start - c, stop - c))
        source.append(slice(start - a, stop - a))
    return Columns(tuple(target), tuple(source))


def _blocks(
    reader: StepReader,
    process: int,
    tile: Tile,
    segment: Segment,
    dtype: np.dtype,
    index: np.ndarray | slice,
    at: np.ndarray | slice,
) -> Iterator[tuple[Block, np.ndarray | slice]]:
    """Reads the rows `index` of a segment, a bounded number at a time."""
    named = reader.processes[process].codecs[segment.codec]
    codec = codec_from(named.name, named.configuration)
    trailing = tuple(b - a for a, b in tile.box[1:])
    first, last = _bounds(index)
    step = chunk_rows(tile.width, dtype.itemsize)
    for start in range(first, last, step):
        stop = min(start + step, last)
        parts: dict[str, np.ndarray] = {}
        for name, part in codec.parts(tile.width, dtype).items():
            ref = _part_ref(reader, process, segment, name, part)
            offset = ref.offset + start * part.width
            values = reader.read(
                process, ref.array, offset, offset + (stop - start) * part.width
            )
            parts[name] = values.reshape(stop - start, part.width)
        where: np.ndarray | slice
        if isinstance(index, slice):
            where = _part_of(at, start - first, stop - first)
        else:
            mine = (index >= start) & (index < stop)
            parts = {name: part[index[mine] - start] for name, part in parts.items()}
            where = np.asarray(at)[mine]
        count = len(next(iter(parts.values())))
        yield Block(codec, parts, count, trailing, dtype), where


def _part_ref(
    reader: StepReader, process: int, segment: Segment, name: str, part: Part
) -> PartRef:
    """Where a part of a segment lies.

    Raises:
        FormatError: if the segment has no such part, or it is of another dtype.
    """
    ref = segment.parts.get(name)
    arrays = reader.processes[process].arrays
    if ref is None or numpy_dtype(arrays[ref.array].dtype) != part.dtype:
        got = "nothing" if ref is None else f"array {ref.array}"
        raise errors.FormatError(
            f"{os.fspath(reader.directory)}: part {name!r} of a segment does not fit its"
            f" codec\n  got {got}, expected {part.dtype}"
        )
    return ref


def _bounds(index: np.ndarray | slice) -> tuple[int, int]:
    if isinstance(index, slice):
        return index.start, index.stop
    return (int(index.min()), int(index.max()) + 1) if len(index) else (0, 0)


def _part_of(at: np.ndarray | slice, start: int, stop: int) -> np.ndarray | slice:
    if isinstance(at, slice):
        return slice(at.start + start, at.start + stop)
    return at[start:stop]
