"""Hashing the rows of tiles where they lie: on their device, or in host memory by chunks.

On CPU rows are hashed chunk by chunk from a view of the buffer, by one program for all tables
of the same row shape: a thousand tables of distinct lengths cost no compilation each. On
accelerators one program hashes a whole shard.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.meshes import outside_mesh
from cnr_jax.rows.chunk import (
    SMALL_ROWS,
    Program,
    Way,
    Where,
    aligned_empty,
    host_device,
    padded,
)
from cnr_jax.rows.fingerprint import (
    changed_rows,
    flips_on_host,
    hash_on_host,
    hash_rows,
    hash_with_tags,
)
from cnr_jax.rows.tiling import LocalShards, OwnTile, bytes_in

# Bytes of rows that are hashed at once on the host. A call costs as much as hashing half a MiB to
# one; a pass against a sum, measured on 2 cores, bfloat16 of dim 16, medians of two rounds: 3.3 and
# 2.4 in chunks of 8 MiB, 3.2 and 2.9 in 32 MiB, 2.9 and 2.9 in 64 MiB.
CHUNK_BYTES = 64 << 20
# Chunks that are being hashed or compared.
_AHEAD = 3
# Of a chunk of which fewer rows differ, one in this many, only theirs are kept.
_FEW = 8

Arrays = Mapping[str, Mapping[str, jax.Array]]
# A shard, the row of it at which a tile starts, and the rows of the tile.
Part = tuple[jax.Array, int, int]


# Hashes and, if asked for, tags uint8[rows, tiles]: on a device an array each, of hashes
# uint32[rows, 2]; on the host a list of chunks, of hashes uint64[rows].
Hashes = jax.Array | list[np.ndarray]


class Hashed(NamedTuple):
    """Rows of the tiles of one group, hashed.

    Attributes:
        hashes: of each row; None if there are flips.
        tags: of each row and tile, if asked for.
        differ: what `changed_of` makes positions of, on the host positions by chunk; None
            if nothing was compared.
        flips: bits in which hashes differ from those before, by chunk: of the rows of
            `differ`, or of all rows. With them `settled` makes hashes.
    """

    hashes: Hashes | None
    tags: Hashes | None = None
    differ: Hashes | None = None
    flips: list[np.ndarray] | None = None


def hash_tiles(
    tiles: Sequence[OwnTile],
    arrays: Arrays,
    where: Where,
    seed: np.ndarray,
    *,
    before: Hashes | None,
    tagged: bool,
) -> Hashed:
    """Hashes the rows that tiles of one group make up.

    Args:
        tiles: of one group.
        arrays: the leaves, by table and leaf name.
        where: on the device or in host memory.
        seed: uint32[2].
        before: hashes to compare with, made in the same way.
        tagged: whether to make tags.

    Returns:
        What is on a device is not waited for.
    """
    parts = [_part(arrays[tile.table.name][tile.leaf.name], tile) for tile in tiles]
    if where == "host":
        assert not isinstance(before, jax.Array)
        return _hash_on_host(parts, seed, before, tagged)
    assert not isinstance(before, list)
    return _hash_on_device(parts, seed, before, tagged)


def _part(array: jax.Array, tile: OwnTile) -> tuple[jax.Array, int, int]:
    """The shard that holds a tile, where the tile starts in it, and how many rows it has."""
    data, first = LocalShards(array).on(tile.piece.device)
    start, stop = tile.rows
    return data, start - first, stop - start


def _hash_on_device(
    parts: Sequence[Part], seed: np.ndarray, before: jax.Array | None, tagged: bool
) -> Hashed:
    data = tuple(part[0] for part in parts)
    device = data[0].device
    assert isinstance(device, jax.Device)
    kinds = tuple((x.shape, x.dtype, first, rows) for x, first, rows in parts)
    program = _device_program(kinds, device, tagged)
    hashes, tags = program(data, jax.device_put(seed, device))
    differ = None
    if before is not None:
        differ = _bits_program(hashes.shape[0], device)(hashes, before)
    return Hashed(hashes, tags, differ)


# Compiled ahead of time and kept, as programs that gather are: see rows/gather.py.
@functools.cache
def _device_program(
    parts: tuple[tuple[tuple[int, ...], np.dtype, int, int], ...],
    device: jax.Device,
    tagged: bool,
) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    def hash_parts(
        data: tuple[jax.Array, ...], seed: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        leaves = [
            x[first : first + rows] if (first, rows) != (0, x.shape[0]) else x
            for x, (_, _, first, rows) in zip(data, parts, strict=True)
        ]
        return _hash(leaves, seed, tagged)

    sharding = jax.sharding.SingleDeviceSharding(device)
    data = tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, _, _ in parts
    )
    seed = jax.ShapeDtypeStruct((2,), np.uint32, sharding=sharding)
    return jax.jit(hash_parts).lower(data, seed).compile()


def _hash(
    leaves: Sequence[jax.Array], seed: jax.Array, tagged: bool
) -> tuple[jax.Array, jax.Array | None]:
    return hash_with_tags(leaves, seed) if tagged else (hash_rows(leaves, seed), None)


@outside_mesh()
def _hash_on_host(
    parts: Sequence[Part],
    seed: np.ndarray,
    before: list[np.ndarray] | None,
    tagged: bool,
) -> Hashed:
    """Hashes chunk by chunk, so that one program serves tables of any number of rows.

    Without tags hashes are compared as they are made, which spares a second pass over them
    and the memory they would take beside those of before.
    """
    rows = parts[0][2]
    made: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    there = jax.device_put(seed, host_device())
    step = _host_rows([x for x, _, _ in parts])
    ahead: collections.deque[Callable[[], None]] = collections.deque()
    for start in range(0, rows, step):
        count = min(step, rows - start)
        size = _size(count, step)
        chunk = _chunk(parts, start, count, size)
        old = None if before is None else before[start // step]
        if old is None or tagged:
            hashes, tags = hash_on_host(chunk, there, tagged=tagged)
            append = functools.partial(_append, made, old, start, count, hashes, tags)
        else:
            flips = flips_on_host(chunk, there, padded(old, size))
            append = functools.partial(_append_flips, made, start, count, flips)
        ahead.append(append)
        # A chunk is compared while others are hashed, and no computation of another thread
        # queues behind more than these.
        if len(ahead) == _AHEAD:
            ahead.popleft()()
    for append in ahead:
        append()
    found = {name: made.get(name) for name in Hashed._fields}
    return Hashed(**found)


def _append(
    made: dict[str, list[np.ndarray]],
    before: np.ndarray | None,
    start: int,
    count: int,
    hashes: jax.Array,
    tags: jax.Array | None,
) -> None:
    """Waits for a chunk, and appends it to what was made of those before it."""
    made["hashes"].append(_front(hashes, count))
    if tags is not None:
        made["tags"].append(_front(tags, count))
    if before is not None:
        differ = np.flatnonzero(made["hashes"][-1] != before)
        made["differ"].append(np.add(differ, start, out=differ))


def _append_flips(
    made: dict[str, list[np.ndarray]], start: int, count: int, flips: jax.Array
) -> None:
    """Waits for the flips of a chunk, and appends them to those before it."""
    found = _front(flips, count)
    differ = np.flatnonzero(found != 0)
    few = len(differ) * _FEW < count
    made["flips"].append(found[differ] if few else found)
    made["differ"].append(np.add(differ, start, out=differ))


def settled(hashed: Hashed, before: Hashes | None) -> Hashed:
    """What is to be remembered of `hashed`: all hashes, and tags.

    Args:
        hashed: as `hash_tiles` returned it.
        before: what it was compared with, which must not be used any more.
    """
    if hashed.flips is None:
        return hashed._replace(differ=None)
    assert isinstance(before, list) and isinstance(hashed.differ, list)
    hashes, start = [], 0
    for old, differ, flips in zip(before, hashed.differ, hashed.flips, strict=True):
        chunk = old if old.flags.writeable else _own(old)
        if len(flips) == len(chunk):
            np.bitwise_xor(chunk, flips, out=chunk)
        else:
            chunk[differ - start] ^= flips
        hashes.append(chunk)
        start += len(chunk)
    return Hashed(hashes)


def _own(values: np.ndarray) -> np.ndarray:
    """A copy that may be changed, and which a program need not copy again."""
    copy = aligned_empty(values.shape, values.dtype)
    copy[...] = values
    return copy


def _chunk(
    parts: Sequence[Part], start: int, count: int, size: int
) -> list[np.ndarray]:
    """Some rows of all parts, as views where nothing is to be padded."""
    # Views live for one chunk only: see `_copy_rows` in rows/gather.py.
    return [
        padded(np.asarray(x)[first + start : first + start + count], size)
        for x, first, _ in parts
    ]


def _host_rows(data: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Rows of a large chunk: a multiple of the rows of a small one, or a power of two."""
    width = sum(
        int(np.prod(x.shape[1:], dtype=np.int64)) * np.dtype(x.dtype).itemsize
        for x in data
    )
    rows = max(1, CHUNK_BYTES // max(1, width))
    if rows >= SMALL_ROWS:
        return rows - rows % SMALL_ROWS
    return 1 << (rows.bit_length() - 1)


def _size(count: int, step: int) -> int:
    """Rows of the program that hashes a chunk: few sizes, none far larger than the chunk."""
    size = SMALL_ROWS
    while size < count:
        size *= 8
    return min(size, step)


def _front(found: jax.Array, count: int) -> np.ndarray:
    """The first of the results, without keeping the others."""
    whole = np.asarray(found)
    return whole if len(whole) == count else whole[:count].copy()


def changed_of(differ: Hashes, rows: int) -> np.ndarray:
    """Sorted positions of rows that changed; waits for the device."""
    if isinstance(differ, list):
        return np.concatenate(differ)
    bits = np.unpackbits(np.asarray(differ), count=rows, bitorder="little")
    return np.flatnonzero(bits)


def tags_of(tags: Hashes, positions: np.ndarray) -> np.ndarray:
    """Tags of some rows, uint8[positions, tiles]; waits for the device."""
    whole = np.concatenate(tags) if isinstance(tags, list) else np.asarray(tags)
    return whole[positions]


def bytes_of(hashes: Hashes | None) -> int:
    """Bytes held."""
    if hashes is None:
        return 0
    parts = hashes if isinstance(hashes, list) else [hashes]
    return sum(part.nbytes for part in parts)


@functools.cache
def _bits_program(rows: int, device: jax.Device) -> Callable[..., jax.Array]:
    def bits(now: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.packbits(changed_rows(now, before), bitorder="little")

    sharding = jax.sharding.SingleDeviceSharding(device)
    hashes = jax.ShapeDtypeStruct((rows, 2), np.uint32, sharding=sharding)
    return jax.jit(bits).lower(hashes, hashes).compile()


def programs(
    groups: Iterable[Sequence[OwnTile]], way: Way, tagged: bool
) -> Iterator[Program]:
    """What hashing tiles like these needs, of leaves whose sharding is known."""
    for tiles in groups:
        device = tiles[0].piece.device
        shapes = [_shard_shape(tile) for tile in tiles]
        rows = tiles[0].rows[1] - tiles[0].rows[0]
        if way(device, bytes_in(tiles)) == "device":
            parts = tuple(
                (shape, tile.leaf.dtype, _first(tile, shape), rows)
                for tile, shape in zip(tiles, shapes, strict=True)
            )
            yield _device_program, (parts, device, tagged)
            yield _bits_program, (rows, device)
            continue
        kinds = tuple((s[1:], t.leaf.dtype) for s, t in zip(shapes, tiles, strict=True))
        step = _host_rows([jax.ShapeDtypeStruct((1, *s), dtype) for s, dtype in kinds])
        # The first chunk and the last.
        for count in (min(step, rows), rows % step or step):
            yield _hash_zeros, (kinds, _size(count, step), tagged)


def _hash_zeros(
    kinds: Sequence[tuple[tuple[int, ...], np.dtype]], rows: int, tagged: bool
) -> None:
    chunk = [np.zeros((rows, *shape), dtype) for shape, dtype in kinds]
    seed = jax.device_put(np.zeros(2, np.uint32), host_device())
    with outside_mesh():
        hash_on_host(chunk, seed, tagged=tagged)
        if not tagged:
            flips_on_host(chunk, seed, aligned_empty((rows,), np.dtype(np.uint64)))


def _shard_shape(tile: OwnTile) -> tuple[int, ...]:
    assert tile.leaf.sharding is not None
    return tile.leaf.sharding.shard_shape(tile.leaf.shape)


def _first(tile: OwnTile, shape: tuple[int, ...]) -> int:
    """Row of its shard at which a tile starts: shards are all alike and in order."""
    return tile.rows[0] % shape[0]
