"""Hashing the rows of tiles where they lie: on their device, or in host memory by chunks.

On CPU rows are hashed chunk by chunk from a view of the buffer, by one program for all tables
of the same row shape: a thousand tables of distinct lengths cost no compilation each. On
accelerators one program hashes a whole shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.rows.fingerprint import changed_rows, hash_rows, hash_with_tags
from cnr_jax.rows.gather import Where, host_device, program_rows
from cnr_jax.rows.tiling import OwnTile, shard_on

# Bytes of rows that are hashed at once on the host.
CHUNK_BYTES = 4 << 20

Arrays = Mapping[str, Mapping[str, jax.Array]]
# A shard, the row of it at which a tile starts, and the rows of the tile.
Part = tuple[jax.Array, int, int]


def hash_tiles(
    tiles: Sequence[OwnTile],
    arrays: Arrays,
    where: Where,
    seed: np.ndarray,
    *,
    tagged: bool,
) -> tuple[jax.Array | np.ndarray, jax.Array | np.ndarray | None]:
    """Hashes of the rows that tiles of one group make up.

    Returns:
        uint32[rows, 2], and uint8[rows, tiles] of tags if `tagged`; on the device, not
        waited for, or on the host.
    """
    parts = [_part(arrays[tile.table.name][tile.leaf.name], tile) for tile in tiles]
    run = _hash_on_host if where == "host" else _hash_on_device
    return run(parts, seed, tagged)


def _part(array: jax.Array, tile: OwnTile) -> tuple[jax.Array, int, int]:
    """The shard that holds a tile, where the tile starts in it, and how many rows it has."""
    data, first = shard_on(array, tile.piece.device)
    start, stop = tile.rows
    return data, start - first, stop - start


def _hash_on_device(
    parts: Sequence[Part], seed: np.ndarray, tagged: bool
) -> tuple[jax.Array, jax.Array | None]:
    data = tuple(part[0] for part in parts)
    program = _device_program(
        tuple((x.shape, x.dtype, first, rows) for x, first, rows in parts),
        data[0].device,
        tagged,
    )
    return program(data, jax.device_put(seed, data[0].device))


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


def _hash_on_host(
    parts: Sequence[Part], seed: np.ndarray, tagged: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Hashes chunk by chunk, so that one program serves tables of any number of rows."""
    rows = parts[0][2]
    hashes = np.empty((rows, 2), np.uint32)
    tags = np.empty((rows, len(parts)), np.uint8) if tagged else None
    step = _host_rows([x for x, _, _ in parts])
    for start, chunk in _host_chunks(parts, rows, step):
        count = min(step, rows - start)
        some, marks = _hash_chunk(chunk, seed, tagged)
        hashes[start : start + count] = np.asarray(some)[:count]
        if tags is not None:
            tags[start : start + count] = np.asarray(marks)[:count]
    return hashes, tags


def _host_rows(data: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Rows of a large chunk: a power of two."""
    width = sum(
        int(np.prod(x.shape[1:], dtype=np.int64)) * np.dtype(x.dtype).itemsize
        for x in data
    )
    return 1 << (max(1, CHUNK_BYTES // max(1, width)).bit_length() - 1)


def _host_chunks(
    parts: Sequence[Part], rows: int, step: int
) -> Iterator[tuple[int, tuple[jax.Array, ...]]]:
    device = host_device()
    for start in range(0, rows, step):
        count = min(step, rows - start)
        size = program_rows(count, step)
        # Views live for one chunk only: see `_copy_rows` in rows/gather.py.
        chunk = tuple(
            _padded(np.asarray(x)[first + start : first + start + count], size)
            for x, first, _ in parts
        )
        yield start, jax.device_put(chunk, device)


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    if len(values) == rows:
        return values
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


@functools.partial(jax.jit, static_argnums=2)
def _hash_chunk(
    leaves: tuple[jax.Array, ...], seed: jax.Array, tagged: bool
) -> tuple[jax.Array, jax.Array | None]:
    return _hash(leaves, seed, tagged)


def changed_bits(
    now: jax.Array | np.ndarray, before: jax.Array | np.ndarray
) -> jax.Array | np.ndarray:
    """Which rows' hashes differ: bool[rows] on the host, on a device bits for `mask_of`."""
    if isinstance(now, np.ndarray):
        return now.view(np.uint64)[:, 0] != np.asarray(before).view(np.uint64)[:, 0]
    device = now.device
    assert isinstance(device, jax.Device)
    return _bits_program(now.shape[0], device)(now, before)


@functools.cache
def _bits_program(rows: int, device: jax.Device) -> Callable[..., jax.Array]:
    def bits(now: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.packbits(changed_rows(now, before), bitorder="little")

    sharding = jax.sharding.SingleDeviceSharding(device)
    hashes = jax.ShapeDtypeStruct((rows, 2), np.uint32, sharding=sharding)
    return jax.jit(bits).lower(hashes, hashes).compile()


def mask_of(bits: jax.Array | np.ndarray, rows: int) -> np.ndarray:
    """bool[rows] on the host; waits for the device."""
    if isinstance(bits, np.ndarray):
        return bits
    mask = np.unpackbits(np.asarray(bits), count=rows, bitorder="little")
    return mask.view(bool)


def warm_up(groups: Iterable[Sequence[OwnTile]], where: Where, tagged: bool) -> None:
    """Compiles what hashing tiles like these needs, of leaves whose sharding is known."""
    seed = np.zeros(2, np.uint32)
    done: set[tuple[tuple[tuple[int, ...], np.dtype], ...]] = set()
    for tiles in groups:
        shapes = [_shard_shape(tile) for tile in tiles]
        rows = tiles[0].rows[1] - tiles[0].rows[0]
        if where == "device":
            parts = tuple(
                (shape, tile.leaf.dtype, _first(tile, shape), rows)
                for tile, shape in zip(tiles, shapes, strict=True)
            )
            _device_program(parts, tiles[0].piece.device, tagged)
            _bits_program(rows, tiles[0].piece.device)
            continue
        kinds = tuple((s[1:], t.leaf.dtype) for s, t in zip(shapes, tiles, strict=True))
        if kinds not in done:
            done.add(kinds)
            _warm_up_host(kinds, seed, tagged)


def _warm_up_host(
    kinds: Sequence[tuple[tuple[int, ...], np.dtype]], seed: np.ndarray, tagged: bool
) -> None:
    large = _host_rows([jax.ShapeDtypeStruct((1, *s), dtype) for s, dtype in kinds])
    for rows in {program_rows(1, large), large}:
        chunk = tuple(np.zeros((rows, *shape), dtype) for shape, dtype in kinds)
        _hash_chunk(jax.device_put(chunk, host_device()), seed, tagged)


def _shard_shape(tile: OwnTile) -> tuple[int, ...]:
    assert tile.leaf.sharding is not None
    return tile.leaf.sharding.shard_shape(tile.leaf.shape)


def _first(tile: OwnTile, shape: tuple[int, ...]) -> int:
    """Row of its shard at which a tile starts: shards are all alike and in order."""
    return tile.rows[0] % shape[0]
