"""Rebuilding of table leaves from a chain, for any sharding.

A *region* is the part of a leaf that a local device holds. The rows of the chain that fall into it
are read and merged while they are encoded, later checkpoints over earlier ones, and then decoded
where they stay. Processes do not communicate.

For small leaves calls count, not bytes. So if all devices of a small leaf are local, it is put
together as one array on the host, which JAX cuts; one call decodes rows of many leaves; and no
program is compiled for the shape of a leaf.

Differs from Check-N-Run in: 1. the region, not the table, is the unit, so any mesh can read what
any other wrote; 2. a row is decoded once, however long the chain; 3. codes, not decoded rows,
cross to an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from cnr_jax.format.boxes import Box
from cnr_jax.garbage import without_collections
from cnr_jax.repository.dtypes import converted
from cnr_jax.repository.replay import on_device
from cnr_jax.repository.replay.encoded import (
    Index,
    Merged,
    Target,
    overlap,
    split_columns,
)
from cnr_jax.repository.replay.on_host import Decoding, decode_all, decodings, host_rows
from cnr_jax.repository.replay.regions import (
    Region,
    WantedLeaf,
    columns_in,
    fill,
    global_array,
    local_boxes,
    region_of,
    shape_of,
)
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.codecs import Raw
from cnr_jax.rows.tiling import aligned_empty, in_host_memory, in_memory_of

# Decoded bytes of a leaf on this process below which it is decoded on the host. To compile a
# program for its shape (0.1 s) would take longer, and a thousand tables would need a thousand.
SMALL_BYTES = 64 << 20
# Encoded bytes of an accelerator's region that are merged at once: bounds host memory.
SLAB_BYTES = 64 << 20
# Encoded bytes of regions on CPU that are merged before they are decoded: bounds host memory.
HOST_BYTES = 4 << 30
# Decoded bytes of leaves that are put together at a time. Their encoded rows are all in memory,
# and nothing of a batch is on its device before all of it is decoded.
BATCH_BYTES = 128 << 20
# Shape, dtype and sharding of an array that is put together.
Abstract = jax.ShapeDtypeStruct | jax.Array


def abstract_of(value: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf of a state; on one device if it has no sharding."""
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def restore_leaves(
    chain: Sequence[StepReader],
    wanted: Sequence[tuple[str, str, Target, Abstract]],
) -> list[jax.Array]:
    """Restores leaves of tables with the wanted shardings. May return before they are decoded.

    Args:
        chain: the checkpoints to replay, the full one first.
        wanted: for each leaf the name of its table in the chain; `"table"` or the name of a slot;
            rows and layout that are wanted; and shape, dtype and sharding, where `shape[0]` is
            the target's `padded_rows`. If an array gives the latter, rows that take none of the
            chain's have its values. Otherwise such rows are zeros.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    leaves = [
        WantedLeaf(
            chain,
            table,
            name,
            target,
            np.dtype(abstract.dtype),
            chain[0].dtypes[table, name],
            abstract if isinstance(abstract, jax.Array) else None,
        )
        for table, name, target, abstract in wanted
    ]
    small = {i for i, leaf in enumerate(leaves) if _is_small(leaf, wanted[i][3])}
    together = restore_small([(leaves[i], wanted[i][3]) for i in sorted(small)])
    return [
        next(together) if i in small else _restore_large(leaf, wanted[i][3])
        for i, leaf in enumerate(leaves)
    ]


def _is_small(leaf: WantedLeaf, abstract: Abstract) -> bool:
    """Whether the regions of a leaf on this process are small enough to be decoded on the host."""
    elements = sum(math.prod(shape_of(box)) for box in host_boxes(abstract))
    return elements * leaf.dtype.itemsize < SMALL_BYTES


def _restore_large(wanted: WantedLeaf, abstract: Abstract) -> jax.Array:
    sharding = abstract.sharding
    assert isinstance(sharding, Sharding)
    arrays: dict[jax.Device, jax.Array] = {}
    large: dict[tuple[object, ...], list[tuple[jax.Device, Region]]] = {}
    for box, devices in local_boxes(sharding, abstract.shape).items():
        region = region_of(wanted, box)
        raw = isinstance(region.encodings[0].codec, Raw)
        if in_host_memory(sharding) or (
            _is_host(devices[0]) and (raw or len(region.pieces) > 1)
        ):
            # Raw rows need no program, and no single call could return several pieces at once. What
            # is kept in memory of the host may not fit into that of its device.
            rows = _host_region(wanted, region)
            for device in devices:
                place = in_memory_of(device, sharding)
                arrays[device] = jax.device_put(rows, place)
        else:
            group = large.setdefault(region.alike, [])
            group.extend((device, region) for device in devices)
    for group in large.values():
        for batch in _batches(group):
            arrays |= _decoded(wanted, batch)
    return global_array(abstract.shape, sharding, abstract.dtype, arrays)


def _host_region(leaf: WantedLeaf, region: Region) -> np.ndarray:
    rows = region.rows
    if len(region.pieces) == 1:
        merged = leaf.merged(region.box)
        return _finished(leaf, region.box, host_rows(merged, rows, None), merged.left)
    out = aligned_empty(shape_of(region.box), leaf.dtype)
    left = np.empty(0, np.int64)
    for piece in region.pieces:
        columns = columns_in(region.box, piece)
        merged = leaf.merged(piece)
        host_rows(merged, rows, out[:, *columns])
        left = (
            merged.left
        )  # alike in all pieces: a row is stored with all of its columns
    return _finished(leaf, region.box, out, left)


def _finished(
    leaf: WantedLeaf, box: Box, rows: np.ndarray, left: np.ndarray
) -> np.ndarray:
    """Converts decoded rows of a region to the wanted dtype, and fills in those that are left."""
    rows = converted(rows, leaf.dtype)
    if leaf.own is not None and len(left):
        fill(rows, box, leaf.own, left)
    return rows


def _is_host(device: jax.Device) -> bool:
    """Whether the device's memory is that of the host."""
    return device.platform == "cpu"


def _batches(
    group: list[tuple[jax.Device, Region]],
) -> Iterator[list[tuple[jax.Device, Region]]]:
    """Yields batches of devices whose regions are merged at a time."""
    device, region = group[0]
    nbytes = max(
        _slab(region, i, device) * k.row_bytes for i, k in enumerate(region.encodings)
    )
    count = max(1, HOST_BYTES // max(1, nbytes)) if region.rows else len(group)
    for start in range(0, len(group), count):
        yield group[start : start + count]


def _slab(region: Region, piece: int, device: jax.Device) -> int:
    """Number of rows of a piece that are merged at a time."""
    if _is_host(device) and len(region.pieces) == 1:
        return region.rows
    return min(region.rows, max(1, SLAB_BYTES // region.encodings[piece].row_bytes))


def _decoded(
    leaf: WantedLeaf, batch: list[tuple[jax.Device, Region]]
) -> dict[jax.Device, jax.Array]:
    """Decodes a region on each device of a batch, slab by slab."""
    devices = tuple(device for device, _ in batch)
    region = batch[0][1]
    own = None
    if leaf.own is not None:
        shards = {shard.device: shard.data for shard in leaf.own.addressable_shards}
        own = [shards[device] for device in devices]
    shape = shape_of(region.box)
    # Piece, first row and number of rows of each slab. Slabs of a piece have one size, so that one
    # program decodes them all; the last two may overlap.
    steps = [
        (piece, min(start, region.rows - size), size)
        for piece in range(len(region.pieces))
        for size in [_slab(region, piece, devices[0])]
        for start in range(0, region.rows, size)
    ]
    whole = len(steps) == 1
    into = None if whole else shape
    out = None if whole else on_device.zeros(devices, shape, leaf.dtype)()
    for piece, start, rows in steps:
        guess = on_device.ProgramKey(
            devices,
            region.encodings[piece],
            rows,
            (),
            leaf.dtype,
            into,
            own is not None,
        )
        on_device.prepare(guess)
        merged = _merged(leaf, [each for _, each in batch], piece, start, rows)
        program = on_device.with_patches(guess, merged)
        if out is not None:
            # One slab is decoded while the next is read. Without the wait, more would pile up.
            out.block_until_ready()
        columns = [s.start for s in columns_in(region.box, region.pieces[piece])]
        at = None if whole else [start, *columns]
        out = on_device.run(program, merged, out, at, own)
    assert out is not None
    return {shard.device: shard.data for shard in out.addressable_shards}


def _merged(
    leaf: WantedLeaf, regions: list[Region], piece: int, start: int, rows: int
) -> list[Merged]:
    """Merges a slab of each region; replicas of a region share the result."""
    found: dict[Box, Merged] = {}
    for region in regions:
        if region.box not in found:
            first = region.box[0][0] + start
            box = ((first, first + rows), *region.pieces[piece][1:])
            # The encoding is that of the whole region: this slab may hold only padding, or only
            # rows of a delta.
            found[region.box] = leaf.merged(box, region.encodings[piece])
    return [found[region.box] for region in regions]


@without_collections()
def restore_stamps(
    chain: Sequence[StepReader], wanted: Sequence[tuple[str, Target, Sharding]]
) -> list[jax.Array]:
    """Stamps with which the next delta is right, whichever checkpoint of `chain` is its parent.

    The clock is counted anew: 0 for the full checkpoint, 1 for the first delta, and so on. A
    row gets the number of the newest checkpoint that holds it. So rows stamped after checkpoint
    `k` are those in which later ones differ from it.

    Args:
        chain: the checkpoints that were replayed, the full one first.
        wanted: for each table its name, rows and layout, and the sharding of its stamps.

    Returns:
        For each table int32[target.padded_rows].
    """
    abstract = [
        jax.ShapeDtypeStruct((target.padded_rows,), np.int32, sharding=sharding)
        for _, target, sharding in wanted
    ]
    regions = [
        {box: restored_stamps(chain, table, target, box[0]) for box in host_boxes(each)}
        for (table, target, _), each in zip(wanted, abstract, strict=True)
    ]
    return placed(abstract, regions)


def restored_stamps(
    chain: Sequence[StepReader], table: str, target: Target, rows: tuple[int, int]
) -> np.ndarray:
    """Stamps of `restore_stamps` for rows `rows[0]` to `rows[1]`, int32[rows[1] - rows[0]]."""
    stamps = np.zeros(rows[1] - rows[0], np.int32)
    for clock, reader in enumerate(chain[1:], start=1):
        for at in _rows_in(reader, table, target, rows):
            stamps[at] = clock
    return stamps


def _rows_in(
    reader: StepReader, table: str, target: Target, rows: tuple[int, int]
) -> Iterator[Index]:
    """Yields the rows within `rows` of which a checkpoint holds any leaf, relative to `rows[0]`.

    Tiles of different leaves may hold different rows: see SPEC, section 8.
    """
    entry = reader.tables[table]
    done: set[tuple[int, tuple[int, int], int]] = set()
    for leaf in entry.leaves:
        for process, tile in reader.tiles(table, leaf.name):
            for segment in tile.segments:
                key = (process, tile.box[0], segment.row_ids)
                if key not in done:
                    done.add(key)
                    yield overlap(reader, process, tile, segment, target, rows)[1]


def restore_small(
    leaves: Sequence[tuple[WantedLeaf, Abstract]],
) -> Iterator[jax.Array]:
    """Yields small leaves in the order given, with the wanted shardings.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    batch: list[tuple[WantedLeaf, Abstract]] = []
    nbytes = 0
    for leaf, abstract in leaves:
        batch.append((leaf, abstract))
        nbytes += math.prod(abstract.shape) * leaf.dtype.itemsize
        if nbytes > BATCH_BYTES:
            yield from _batch(batch)
            batch, nbytes = [], 0
    yield from _batch(batch)


@without_collections()
def _batch(leaves: Sequence[tuple[WantedLeaf, Abstract]]) -> list[jax.Array]:
    main: list[Decoding] = []
    patches: list[Decoding] = []
    regions = [
        {box: _region(leaf, box, main, patches) for box in host_boxes(abstract)}
        for leaf, abstract in leaves
    ]
    decode_all(main)
    decode_all(patches)
    rows = [
        {box: _finished(leaf, box, *region) for box, region in found.items()}
        for (leaf, _), found in zip(leaves, regions, strict=True)
    ]
    return placed([abstract for _, abstract in leaves], rows)


def _region(
    leaf: WantedLeaf, box: Box, main: list[Decoding], patches: list[Decoding]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns an array for a region, and the rows of it that are left.

    Adds to `main` and `patches` what is still to be decoded into the array.
    """
    pieces, rows = split_columns(leaf.chain, leaf.table, leaf.name, box), box[0]
    whole = None
    if len(pieces) > 1:
        whole = aligned_empty(shape_of(box), leaf.stored_dtype)
    out = left = None
    for piece in pieces:
        into = None if whole is None else whole[:, *columns_in(box, piece)]
        merged = leaf.merged(piece)
        out, first, then = decodings(merged, rows[1] - rows[0], into)
        main += first
        patches += then
        left = merged.left
    out = out if whole is None else whole
    assert out is not None and left is not None
    return out, left


def host_boxes(abstract: Abstract) -> list[Box]:
    """Regions in which an array is put together on the host; see `placed`."""
    sharding = abstract.sharding
    assert isinstance(sharding, Sharding)
    if sharding.is_fully_addressable:
        return [tuple((0, size) for size in abstract.shape)]
    return list(local_boxes(sharding, abstract.shape))


def placed(
    abstract: Sequence[Abstract],
    regions: Sequence[Mapping[Box, np.ndarray]],
) -> list[jax.Array]:
    """Arrays on their devices, each from the regions that `host_boxes` names."""
    whole: dict[int, np.ndarray] = {}
    arrays: dict[int, jax.Array] = {}
    for i, (each, found) in enumerate(zip(abstract, regions, strict=True)):
        assert isinstance(each.sharding, Sharding)
        if each.sharding.is_fully_addressable:
            whole[i] = next(iter(found.values()))
        else:
            shards = {
                device: jax.device_put(found[box], in_memory_of(device, each.sharding))
                for box, devices in local_boxes(each.sharding, each.shape).items()
                for device in devices
            }
            arrays[i] = global_array(each.shape, each.sharding, each.dtype, shards)
    # One call puts all arrays: calls cost more than small arrays do.
    put = jax.device_put(whole, {i: abstract[i].sharding for i in whole})
    arrays.update(put)
    return [arrays[i] for i in range(len(arrays))]
