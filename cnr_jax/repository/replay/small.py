"""Restoring leaves that are small: read and decoded together, whole, and placed at once.

For small leaves what counts is calls, not bytes. So where all devices of a leaf are local, it
is put together as one array on the host and cut by JAX; rows of many leaves are decoded by one
call; and no program is compiled for the shape of a leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from cnr_jax.format.tiles import Box
from cnr_jax.repository.replay.on_host import Decoding, decode_all, decodings
from cnr_jax.repository.replay.parts import (
    Leaf,
    columns_in,
    global_array,
    local_boxes,
    plan_part,
    shape_of,
)
from cnr_jax.rows.gather.chunk import aligned_empty

# Decoded bytes of leaves that are put together at a time. Their encoded rows are all in memory,
# and before a batch is decoded nothing of it is on its device.
BATCH_BYTES = 128 << 20


def restore_small(
    leaves: Sequence[tuple[Leaf, jax.ShapeDtypeStruct]],
) -> Iterator[jax.Array]:
    """Small leaves in the order in which they are given, sharded as they are wanted.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    batch: list[tuple[Leaf, jax.ShapeDtypeStruct]] = []
    nbytes = 0
    for leaf, abstract in leaves:
        batch.append((leaf, abstract))
        nbytes += math.prod(abstract.shape) * leaf.dtype.itemsize
        if nbytes > BATCH_BYTES:
            yield from _batch(batch)
            batch, nbytes = [], 0
    yield from _batch(batch)


def _batch(
    leaves: Sequence[tuple[Leaf, jax.ShapeDtypeStruct]],
) -> Iterator[jax.Array]:
    main: list[Decoding] = []
    patches: list[Decoding] = []
    parts = [
        {box: _part(leaf, box, main, patches) for box in host_boxes(abstract)}
        for leaf, abstract in leaves
    ]
    decode_all(main)
    decode_all(patches)
    rows = [
        {box: part.astype(leaf.dtype, copy=False) for box, part in found.items()}
        for (leaf, _), found in zip(leaves, parts, strict=True)
    ]
    yield from placed([abstract for _, abstract in leaves], rows)


def _part(
    leaf: Leaf, box: Box, main: list[Decoding], patches: list[Decoding]
) -> np.ndarray:
    """An array for a part, and in `main` and `patches` what is still to be decoded into it."""
    plan = plan_part(leaf, box)
    whole = None
    if len(plan.pieces) > 1:
        whole = aligned_empty(shape_of(box), leaf.stored_dtype)
    out = None
    for piece in plan.pieces:
        into = None if whole is None else whole[:, *columns_in(box, piece)]
        out, first, then = decodings(leaf.merged(piece), plan.rows, into)
        main += first
        patches += then
    out = out if whole is None else whole
    assert out is not None
    return out


def host_boxes(abstract: jax.ShapeDtypeStruct) -> list[Box]:
    """The parts in which an array is put together on the host; see `placed`."""
    sharding = abstract.sharding
    assert isinstance(sharding, Sharding)
    if sharding.is_fully_addressable:
        return [tuple((0, size) for size in abstract.shape)]
    return list(local_boxes(sharding, abstract.shape))


def placed(
    abstract: Sequence[jax.ShapeDtypeStruct], parts: Sequence[Mapping[Box, np.ndarray]]
) -> list[jax.Array]:
    """Arrays on their devices, each from the parts that `host_boxes` names."""
    whole: dict[int, np.ndarray] = {}
    arrays: dict[int, jax.Array] = {}
    for i, (each, found) in enumerate(zip(abstract, parts, strict=True)):
        assert isinstance(each.sharding, Sharding)
        if each.sharding.is_fully_addressable:
            whole[i] = next(iter(found.values()))
        else:
            arrays[i] = _placed(each.shape, each.sharding, found)
    # In one call: calls cost more than small arrays do.
    put = jax.device_put(whole, {i: abstract[i].sharding for i in whole})
    arrays.update(put)
    return [arrays[i] for i in range(len(arrays))]


def _placed(
    shape: tuple[int, ...], sharding: Sharding, parts: Mapping[Box, np.ndarray]
) -> jax.Array:
    arrays = {
        device: jax.device_put(parts[box], device)
        for box, devices in local_boxes(sharding, shape).items()
        for device in devices
    }
    return global_array(shape, sharding, arrays)
