"""Dense leaves of a state on their way to the writing thread: which parts, and their bytes.

The blocking part of a save keeps what it saves, so that the next train step can donate the arrays.
A leaf in host memory is kept by a view: if a donated buffer has a view, XLA takes new memory in its
place. A leaf on another device is copied to the host. An array of numpy, which a program may change
in place, is copied too.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from cnr_jax.format.boxes import Box
from cnr_jax.format.dense import SCALAR_BYTES, DenseTile
from cnr_jax.format.manifest import DenseLeaf
from cnr_jax.repository.staging import DenseBytes
from cnr_jax.rows import tiling
from cnr_jax.rows.gather.host import Buffers
from cnr_jax.rows.shards import local_shards_of
from cnr_jax.rows.tiling import boxes_of

# Bytes that are on their way from a device while those before them are handed over.
_AHEAD_BYTES = 64 << 20
# Leaves of at most so many bytes are handed over together. To hand one over costs more than to copy
# it.
_TINY_BYTES = 4 << 10
# Bytes that an array of the state may keep on the host after it was saved.
_SMALL_BYTES = 64 << 10


class Piece(NamedTuple):
    """A part of a dense leaf that this process saves, and what holds its values."""

    tile: DenseTile
    data: jax.Array | np.ndarray


def is_host_local(leaf: Any) -> bool:
    """Whether a leaf belongs to one process alone, in a run of several processes.

    Such leaves are numbers, strings, numpy arrays, and arrays that no jitted step has returned yet,
    such as a fresh PRNG key or a counter.
    """
    if jax.process_count() == 1:
        return False
    return not (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)


def digest_of_local(leaf: Any) -> str:
    """Digest of the values of a host-local leaf, by which processes compare theirs."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        data = f"{type(leaf).__name__} {leaf!r}".encode()
    else:
        values = np.asarray(_key_data(leaf) if isinstance(leaf, jax.Array) else leaf)
        data = f"{values.dtype}{values.shape}".encode() + values.tobytes()
    return hashlib.sha256(data).hexdigest()


def _key_data(leaf: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def pieces_of(leaves: Sequence[tuple[DenseLeaf, Any]]) -> list[Piece]:
    """The parts of dense leaves that this process saves; all processes save each element once.

    Nothing is communicated: of the processes that have a part, the first one saves it.

    Args:
        leaves: dense leaves as the manifest lists them, each with its value.
    """
    found: list[Piece] = []
    offset = 0
    for i, (leaf, value) in enumerate(leaves):
        if leaf.kind == "text" or (is_host_local(value) and jax.process_index() != 0):
            continue
        for box, data, nbytes in _parts(leaf, value):
            tile = DenseTile(leaf=i, box=box, offset=offset, bytes=nbytes)
            found.append(Piece(tile, data))
            offset += nbytes
    return found


def _parts(
    leaf: DenseLeaf, value: Any
) -> Iterator[tuple[Box, jax.Array | np.ndarray, int]]:
    """The parts of a leaf that this process saves, what holds them, and their bytes."""
    if not isinstance(value, jax.Array):
        whole = tuple((0, size) for size in leaf.shape)
        data = _scalar(value) if leaf.kind == "scalar" else _native(value)
        yield whole, data, data.nbytes
        return
    array = _key_data(value) if leaf.kind == "key" else value
    for box, number, elements in _own_parts(array.sharding, array.shape):
        data, nbytes = array.addressable_data(number), elements * array.dtype.itemsize
        # A key counts as one element, however many words it has.
        yield box[: len(leaf.shape)], data, nbytes


@functools.lru_cache(maxsize=1 << 14)
def _own_parts(
    sharding: Sharding, shape: tuple[int, ...]
) -> tuple[tuple[Box, int, int], ...]:
    """The parts of an array that this process saves, with number of shard and of elements.

    Cached, as it is the same in each save: to ask jax takes 20 us for each of thousands of leaves.
    """
    local, here = local_shards_of(sharding, shape), jax.process_index()
    # A part of which this process has the first device is one that it saves. An array of its own is
    # all on its devices.
    return tuple(
        (box, local[devices[0]][0], math.prod(stop - start for start, stop in box))
        for box, devices in boxes_of(sharding, shape).items()
        if devices[0].process_index == here
    )


def _scalar(value: bool | int | float) -> np.ndarray:
    """The bytes of a Python number."""
    if isinstance(value, float):
        data = struct.pack("<d", value)
    else:
        size = SCALAR_BYTES["bool" if isinstance(value, bool) else "int"]
        data = int(value).to_bytes(size, "little", signed=size > 1)
    return np.frombuffer(data, np.uint8)


def _native(value: np.ndarray | np.generic) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder())


def bytes_of(
    pieces: Sequence[Piece], limit_bytes: int, buffers: Buffers
) -> Iterator[DenseBytes]:
    """Yields the bytes of all pieces, in order.

    Args:
        pieces: pieces of all leaves.
        limit_bytes: bytes that may wait to be written. A larger piece is handed over in copies of
            its parts, as the memory of the parts that are written could not be freed otherwise.
        buffers: buffers that give memory for copies.
    """
    left = collections.deque(pieces)
    ahead = collections.deque[tuple[int, jax.Array | np.ndarray]]()
    room = min(limit_bytes, _AHEAD_BYTES)
    tiny, most = list[np.ndarray](), min(limit_bytes, tiling.CHUNK_BYTES)
    while left or ahead:
        while left and (not ahead or left[0].tile.bytes <= room):
            tile, data = left.popleft()
            room -= tile.bytes
            ahead.append((tile.bytes, _begun(data, limit_bytes)))
        nbytes, data = ahead.popleft()
        room += nbytes
        is_tiny = nbytes <= min(_TINY_BYTES, limit_bytes)
        if is_tiny:
            tiny.append(_flat(data))
        if tiny and (not is_tiny or len(tiny) * _TINY_BYTES >= most):
            yield DenseBytes(np.concatenate(tiny))
            tiny.clear()
        if not is_tiny:
            yield from _bytes_of(data, limit_bytes, buffers)
    if tiny:
        yield DenseBytes(np.concatenate(tiny))


def _begun(data: jax.Array | np.ndarray, limit_bytes: int) -> jax.Array | np.ndarray:
    """Starts the copy of an array to the host, if it needs one; returns what to read it from."""
    if isinstance(data, np.ndarray) or _is_buffer(data):
        return data
    if data.nbytes > _SMALL_BYTES:
        # An array keeps its copy for numpy as long as it lives, and this one goes with the save.
        data = jax.make_array_from_single_device_arrays(
            data.shape, data.sharding, [data]
        )
    if not tiling.is_on_host(data) and data.nbytes <= limit_bytes:
        data.copy_to_host_async()
    return data


def _is_buffer(data: jax.Array) -> bool:
    """Whether Python can read the memory of an array on one device without a call of jax."""
    return data.dtype.isbuiltin == 1 and tiling.is_on_host(data)


def _bytes_of(
    data: jax.Array | np.ndarray, limit_bytes: int, buffers: Buffers
) -> Iterator[DenseBytes]:
    if isinstance(data, np.ndarray):
        yield from _copies(_flat(data), buffers)
    elif data.nbytes <= limit_bytes or not data.ndim:
        yield DenseBytes(_flat(data))
    elif tiling.is_on_host(data) or tiling.in_host_memory(data.sharding):
        yield from _copies(_flat(data), buffers)
    else:
        rows = max(1, min(limit_bytes, _AHEAD_BYTES) * len(data) // data.nbytes)
        for start in range(0, len(data), rows):
            size = min(rows, len(data) - start)
            # `data[start : start + size]` would be compiled for each start.
            part = jax.lax.dynamic_slice_in_dim(data, start, size)
            yield DenseBytes(_flat(part))


def _flat(data: jax.Array | np.ndarray) -> np.ndarray:
    """The bytes of an array; a view where it is in host memory, in C order."""
    if isinstance(data, jax.Array) and _is_buffer(data):
        buffer: Any = data
        try:
            return np.frombuffer(buffer, np.uint8)
        except (BufferError, ValueError):
            pass  # the array has no such view
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _copies(flat: np.ndarray, buffers: Buffers) -> Iterator[DenseBytes]:
    """Yields copies of bytes, one for each chunk."""
    for start in range(0, flat.size, tiling.CHUNK_BYTES):
        part = flat[start : start + tiling.CHUNK_BYTES]
        copy = buffers.empty(part.shape, part.dtype)
        copy[...] = part
        yield DenseBytes(copy)
