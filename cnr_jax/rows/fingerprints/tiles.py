"""Hashing the rows of tiles where they lie: on their device, or in host memory by chunks.

On an accelerator one program hashes all rows of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from cnr_jax.rows.fingerprints.chunks import (
    Hashed,
    Hashes,
    Span,
    chunk_programs,
    hash_chunks,
)
from cnr_jax.rows.fingerprints.hash import changed_rows, hash_rows, hash_with_tags
from cnr_jax.rows.tiling import (
    OwnTile,
    Program,
    Way,
    Where,
    aligned_empty,
    bytes_in,
    compiled,
    in_host_memory,
    place_of,
)


def hash_tiles(
    spans: Sequence[Span],
    device: jax.Device,
    where: Where,
    seed: np.ndarray,
    *,
    before: Hashes | None,
    tagged: bool,
) -> Hashed:
    """Hashes rows, each of them made up of a row of every tile of a group.

    Args:
        spans: the rows of each tile, all of one group.
        device: device that they are on.
        where: place of the work, on the device or in host memory.
        seed: uint32[2].
        before: hashes to compare with, made in the same way.
        tagged: whether to make tags.

    Returns:
        Hashes, tags and differences; those on a device are not waited for.
    """
    if where == "host":
        assert not isinstance(before, jax.Array)
        return hash_chunks(spans, seed, before, tagged)
    kinds = tuple((x.shape, x.dtype, first, rows) for x, first, rows in spans)
    program = _device_program(kinds, device, tagged)
    data = [_on_device(x, device) for x, _, _ in spans]
    hashes, tags = program(jax.device_put(seed, device), *data)
    differ = None
    if before is not None:
        differ = _bits_program(hashes.shape[0], device)(hashes, before)
    return Hashed(hashes, tags, differ)


def _on_device(data: jax.Array, device: jax.Device) -> jax.Array:
    """A shard in memory of its device, where it is for as long as it is hashed if not anyway."""
    if not in_host_memory(data.sharding):
        return data
    own = device.default_memory().kind
    return jax.device_put(data, SingleDeviceSharding(device, memory_kind=own))


@functools.cache
def _device_program(
    spans: tuple[tuple[tuple[int, ...], np.dtype, int, int], ...],
    device: jax.Device,
    tagged: bool,
) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
    def hash_spans(
        seed: jax.Array, *data: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        leaves = [
            x[first : first + rows] if (first, rows) != (0, x.shape[0]) else x
            for x, (_, _, first, rows) in zip(data, spans, strict=True)
        ]
        if tagged:
            return hash_with_tags(leaves, seed)
        return hash_rows(leaves, seed), None

    arrays = [(shape, dtype) for shape, dtype, _, _ in spans]
    return compiled(hash_spans, device, ((2,), np.uint32), *arrays)


def settled(hashed: Hashed, before: Hashes | None) -> Hashed:
    """Returns the hashes and tags of all rows, to be remembered.

    Args:
        hashed: result of `hash_tiles`.
        before: hashes that it was compared with, which must not be used any more.
    """
    if not isinstance(hashed.hashes, list) or not isinstance(hashed.differ, list):
        return hashed._replace(differ=None)
    assert isinstance(before, list)
    hashes, start = [], 0
    for old, new, differ in zip(before, hashed.hashes, hashed.differ, strict=True):
        hashes.append(
            _renewed(old, new, differ - start) if len(new) < len(old) else new
        )
        start += len(old)
    return hashed._replace(hashes=hashes, differ=None)


def _renewed(old: np.ndarray, new: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Replaces some rows of `old`, in place if that is possible."""
    if not old.flags.writeable:
        # A copy that may be changed, and that a program need not copy again.
        copy = aligned_empty(old.shape, old.dtype)
        copy[...] = old
        old = copy
    old[rows] = new
    return old


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


@functools.cache
def _bits_program(rows: int, device: jax.Device) -> Callable[..., jax.Array]:
    def bits(now: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.packbits(changed_rows(now, before), bitorder="little")

    hashes = (rows, 2), np.uint32
    return compiled(bits, device, hashes, hashes)


def programs(
    groups: Iterable[Sequence[OwnTile]], way: Way, tagged: bool
) -> Iterator[Program]:
    """Yields the programs that hash tiles like these; their leaves have known shardings."""
    for tiles in groups:
        device = tiles[0].piece.device
        shapes: list[tuple[int, ...]] = []
        for tile in tiles:
            assert tile.leaf.sharding is not None
            shapes.append(tile.leaf.sharding.shard_shape(tile.leaf.shape))
        rows = tiles[0].rows[1] - tiles[0].rows[0]
        held = [tile.leaf.sharding for tile in tiles if tile.leaf.sharding]
        if place_of(way, device, bytes_in(tiles), held) == "device":
            # Shards are of one size and in order: the remainder is the row of its shard at which
            # a tile starts.
            spans = tuple(
                (shape, tile.leaf.dtype, tile.rows[0] % shape[0], rows)
                for tile, shape in zip(tiles, shapes, strict=True)
            )
            yield _device_program, (spans, device, tagged)
            yield _bits_program, (rows, device)
            continue
        kinds = tuple((s[1:], t.leaf.dtype) for s, t in zip(shapes, tiles, strict=True))
        yield from chunk_programs(kinds, rows, tagged)
