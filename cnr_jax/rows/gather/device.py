"""Gathering and encoding of rows on the device where they are, so that only codes reach the host.

Each shard shape on a device has programs that gather, which compile quickly. Programs that encode
depend only on the width of a row, its dtype and its codec, so all tables of a device share them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cnr_jax.rows import tiling
from cnr_jax.rows.codecs import Codec, Encoded, Raw
from cnr_jax.rows.gather.chunk import Chunk, Run
from cnr_jax.rows.tiling import Program, chunk_rows, compiled, padded

# Bytes of decoded rows in the largest chunk. Each chunk costs a dozen launches and copies, and a
# wait: on a GPU milliseconds, which add up to seconds for ten thousand chunks of 2 MiB.
LARGE_BYTES = 64 << 20
# A chunk of rest may be this many times as large as its rows. To encode and send padding takes less
# time than many small chunks do.
_MOST_PADDED = 4
# Encoded bytes of a save that may wait on devices, which a train step may need as a whole.
DEVICE_BYTES = 256 << 20


def gather_on_device(run: Run) -> Iterator[Chunk]:
    """Encodes a run and yields its chunks; the next chunk is started before one is yielded."""
    waiting: tuple[Chunk, jax.Array] | None = None
    sizes = _sizes(run.width, run.data.dtype.itemsize)
    start = 0
    while start < run.count:
        size = _size(run.count - start, sizes)
        count = min(size, run.count - start)
        ahead = _encode(run, start, count, size)
        start += count
        if waiting is not None:
            yield _keep_escaped(*waiting)
        waiting = ahead
    if waiting is not None:
        yield _keep_escaped(*waiting)


def _sizes(width: int, itemsize: int) -> tuple[int, ...]:
    """Numbers of rows in the chunks that have programs, ascending."""
    middle, large = (chunk_rows(width, itemsize, n) for n in (None, LARGE_BYTES))
    return tuple(sorted({min(tiling.SMALL_ROWS, middle), middle, large}))


def _size(left: int, sizes: tuple[int, ...]) -> int:
    """Chooses the smallest chunk that holds the remaining rows, if enough of it is filled by them.

    Otherwise, it is the largest that they fill.

    Example:
        >>> [_size(left, (512, 8192, 262144)) for left in (300_000, 70_000, 9_000, 600, 3)]
        [262144, 262144, 8192, 8192, 512]
    """
    holds = next((size for size in sizes if size >= left), sizes[-1])
    filled = max((size for size in sizes if sizes[0] < size <= left), default=None)
    if filled is None or holds <= _MOST_PADDED * left:
        return holds
    return filled


def _encode(run: Run, start: int, count: int, size: int) -> tuple[Chunk, jax.Array]:
    """Starts to encode `count` rows from `start` on; also returns these rows unencoded."""
    device = run.data.device
    assert isinstance(device, jax.Device)
    rows = _gather(run, slice(start, start + count), size)
    dtype, given = np.dtype(rows.dtype), [rows]
    if run.keys_of is not None:
        keys = padded(run.keys(start, start + count), size)
        given.append(jax.device_put(keys, device))
    encoded = _encode_program(
        run.codec, run.width, dtype, device, size, len(given) > 1
    )(*given)
    for array in (*encoded.parts.values(), encoded.escaped):
        array.copy_to_host_async()
    sampled = _sampled(run, start, count)
    chunk = Chunk(codec=run.codec, count=count, encoded=encoded, sampled=sampled)
    return chunk, rows


def _gather(run: Run, which: slice | np.ndarray, size: int) -> jax.Array:
    """Gathers some of the saved rows of a run on its device, padded to `size` rows."""
    data = run.data
    dtype, device = np.dtype(data.dtype), data.device
    assert isinstance(device, jax.Device)
    index = _index(run, which, size, device)
    return gather_program(data.shape, dtype, device, size)(data, index)


def _index(
    run: Run, which: slice | np.ndarray, size: int, device: jax.Device
) -> jax.Array:
    """Indices int32[size] of some of the saved rows in the shard of a run, on its device."""
    if run.positions is not None:
        rows = run.positions[which]
    elif isinstance(which, slice):
        start = jax.device_put(np.int32(run.first + which.start), device)
        return _counting_program(device, size)(start)
    else:
        rows = which
    # One array and no more: fresh memory is slow on the host.
    index = np.empty(size, np.int32)
    np.add(rows, run.first, out=index[: len(rows)], casting="unsafe")
    index[len(rows) :] = run.first
    return jax.device_put(index, device)


def rows_of(run: Run) -> np.ndarray:
    """Returns the saved rows of a run unencoded, on the host, `[run.count, run.width]`."""
    sizes, found = _sizes(run.width, run.data.dtype.itemsize), list[np.ndarray]()
    for start in range(0, run.count, sizes[-1]):
        count = min(sizes[-1], run.count - start)
        size = next(size for size in sizes if size >= count)
        rows = _gather(run, slice(start, start + count), size)
        found.append(np.asarray(rows)[:count])
    return np.concatenate([np.empty((0, run.width), run.data.dtype), *found])


def _sampled(run: Run, start: int, count: int) -> jax.Array | None:
    """Gathers the sampled rows among `count` from `start` on, by a program that exists anyway."""
    if run.sampled is None:
        return None
    first, last = np.searchsorted(run.sampled, (start, start + count))
    if first == last:
        return None
    sizes = _sizes(run.width, run.data.dtype.itemsize)
    which = run.sampled[first:last][: sizes[-1]]
    rows = _gather(run, which, next(size for size in sizes if size >= len(which)))
    rows.copy_to_host_async()
    return rows


def _keep_escaped(chunk: Chunk, rows: jax.Array) -> Chunk:
    """Keeps the unencoded rows if some were escaped, as the shard may be donated later."""
    assert chunk.encoded is not None
    if not isinstance(chunk.codec, Raw):
        if np.asarray(chunk.encoded.escaped)[: chunk.count].any():
            chunk.escaped_rows = rows
    return chunk


@functools.cache
def gather_program(
    shape: tuple[int, ...], dtype: np.dtype, device: jax.Device, rows: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Compiled function that gathers `rows` rows of a shard, given their indices int32[rows]."""

    def gather(data: jax.Array, index: jax.Array) -> jax.Array:
        rows = data.reshape(data.shape[0], -1)
        if not (
            jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16)
        ):
            return rows.at[index].get(mode="clip")
        # As integers, since XLA may move narrow floats as wider ones, which quiets their NaNs.
        bits = lax.bitcast_convert_type(rows, f"uint{jnp.finfo(dtype).bits}")
        return lax.bitcast_convert_type(bits.at[index].get(mode="clip"), dtype)

    return compiled(gather, device, (shape, dtype), ((rows,), np.int32))


@functools.cache
def _counting_program(
    device: jax.Device, rows: int
) -> Callable[[jax.Array], jax.Array]:
    """Compiled function that returns the indices of `rows` rows from the given one on."""

    def count(start: jax.Array) -> jax.Array:
        return start + jnp.arange(rows, dtype=jnp.int32)

    return compiled(count, device, ((), np.int32))


@functools.cache
def _encode_program(
    codec: Codec,
    width: int,
    dtype: np.dtype,
    device: jax.Device,
    rows: int,
    dithers: bool,
) -> Callable[..., Encoded]:
    """Compiled function that encodes rows, given the rows and, if it dithers, their keys."""
    given: list[Any] = [((rows, width), dtype)]
    if dithers:
        given.append(((rows,), np.uint32))
    return compiled(codec.encode, device, *given)


def device_programs(
    codec: Codec,
    shape: tuple[int, ...],
    dtype: np.dtype,
    device: jax.Device,
    dithers: bool,
) -> Iterator[Program]:
    """Yields the programs that gather and encode rows of a shard of this shape on a device."""
    width = math.prod(shape[1:])
    for rows in _sizes(width, dtype.itemsize):
        yield _counting_program, (device, rows)
        yield gather_program, (shape, dtype, device, rows)
        yield _encode_program, (codec, width, dtype, device, rows, dithers)
