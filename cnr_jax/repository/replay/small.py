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
from cnr_jax.repository.replay.regions import (
    WantedLeaf,
    columns_in,
    global_array,
    local_boxes,
    region_of,
    shape_of,
)
from cnr_jax.rows.gather.chunk import aligned_empty

# Decoded bytes of leaves that are put together at a time. Their encoded rows are all in memory,
# and before a batch is decoded nothing of it is on its device.
BATCH_BYTES = 128 << 20


def restore_small(
    leaves: Sequence[tuple[WantedLeaf, jax.ShapeDtypeStruct]],
) -> Iterator[jax.Array]:
    """Small leaves in the order in which they are given, sharded as they are wanted.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    batch: list[tuple[WantedLeaf, jax.ShapeDtypeStruct]] = []
    nbytes = 0
    for leaf, abstract in leaves:
        batch.append((leaf, abstract))
        nbytes += math.prod(abstract.shape) * leaf.dtype.itemsize
        if nbytes > BATCH_BYTES:
            yield from _batch(batch)
            batch, nbytes = [], 0
    yield from _batch(batch)


def _batch(
    leaves: Sequence[tuple[WantedLeaf, jax.ShapeDtypeStruct]],
) -> Iterator[jax.Array]:
    main: list[Decoding] = []
    patches: list[Decoding] = []
    regions = [
        {box: _region(leaf, box, main, patches) for box in host_boxes(abstract)}
        for leaf, abstract in leaves
    ]
    decode_all(main)
    decode_all(patches)
    rows = [
        {box: region.astype(leaf.dtype, copy=False) for box, region in found.items()}
        for (leaf, _), found in zip(leaves, regions, strict=True)
    ]
    yield from placed([abstract for _, abstract in leaves], rows)


def _region(
    leaf: WantedLeaf, box: Box, main: list[Decoding], patches: list[Decoding]
) -> np.ndarray:
    """An array for a region, and in `main` and `patches` what is still to be decoded into it."""
    region = region_of(leaf, box)
    whole = None
    if len(region.pieces) > 1:
        whole = aligned_empty(shape_of(box), leaf.stored_dtype)
    out = None
    for piece in region.pieces:
        into = None if whole is None else whole[:, *columns_in(box, piece)]
        out, first, then = decodings(leaf.merged(piece), region.rows, into)
        main += first
        patches += then
    out = out if whole is None else whole
    assert out is not None
    return out


def host_boxes(abstract: jax.ShapeDtypeStruct) -> list[Box]:
    """The regions in which an array is put together on the host; see `placed`."""
    sharding = abstract.sharding
    assert isinstance(sharding, Sharding)
    if sharding.is_fully_addressable:
        return [tuple((0, size) for size in abstract.shape)]
    return list(local_boxes(sharding, abstract.shape))


def placed(
    abstract: Sequence[jax.ShapeDtypeStruct],
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
            arrays[i] = _placed(each.shape, each.sharding, found)
    # In one call: calls cost more than small arrays do.
    put = jax.device_put(whole, {i: abstract[i].sharding for i in whole})
    arrays.update(put)
    return [arrays[i] for i in range(len(arrays))]


def _placed(
    shape: tuple[int, ...], sharding: Sharding, regions: Mapping[Box, np.ndarray]
) -> jax.Array:
    arrays = {
        device: jax.device_put(regions[box], device)
        for box, devices in local_boxes(sharding, shape).items()
        for device in devices
    }
    return global_array(shape, sharding, arrays)
