"""Selecting touched rows, gathering them into fixed-size chunks, and the memory for these.

Rows are gathered in the blocking part of a save, before the next train step can donate the
buffers they are in. What is gathered are fresh copies; nothing here outlives the call but those.

Two ways, chosen by platform and size. On CPU rows are gathered by numpy from a view of the buffer
and encoded later, in the background: gathering needs no compilation, so a thousand tables of
distinct shapes cost none, and rows of all tables of one width share the chunks. On accelerators
rows are gathered and encoded at once on their device and only encoded bytes cross to the host;
small shards go the first way there too, from a copy, because programs for each cost more.

The next save uses the memory again. Fresh memory is slow where the system has to fetch it: every
page is zeroed, and a virtual machine that hands free memory back to its host gets it again at a few
hundred MB/s (0.2 GB/s measured on one that copies rows at 3 GB/s). Training would wait for that in
every save.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.rows import tiling
from cnr_jax.rows.codecs import Codec
from cnr_jax.rows.gather.chunk import Chunk, Run
from cnr_jax.rows.gather.device import gather_on_device
from cnr_jax.rows.tiling import (
    LocalShards,
    Program,
    Way,
    aligned_empty,
    chunk_rows,
    compiled,
    in_chunks,
    program_rows,
)

# That gather on the host.
_THREADS = min(4, os.cpu_count() or 1)


def touched_positions(
    stamps: LocalShards, rows: tuple[int, int], clock: int, way: Way
) -> np.ndarray:
    """Positions within `rows` whose stamp is greater than `clock`, sorted, int64.

    Waits for the computation that produced `stamps`.
    """
    data, first = stamps.holding(rows)
    part = slice(rows[0] - first, rows[1] - first)
    device = data.device
    assert isinstance(device, jax.Device)
    if way(device, data.nbytes) == "host":
        mask = np.asarray(data)[part] > clock
    else:
        program = _bits_program(data.shape, device)
        bits = np.asarray(program(data, jax.device_put(np.int32(clock), device)))
        mask = np.unpackbits(bits, count=data.shape[0], bitorder="little")[part]
    return np.flatnonzero(mask)


def gather_chunks(runs: Sequence[Run], buffers: Buffers) -> Iterator[Chunk]:
    """Yields the rows of all runs, in order, in chunks.

    Runs must be sorted by group. On the host a chunk holds rows of several runs of a group, in
    memory from `buffers`; on a device each run has its own.
    """
    for (where, *_), group in itertools.groupby(runs, lambda run: run.group):
        if where == "host":
            yield from _gather_on_host(list(group), buffers)
        else:
            for run in group:
                yield from gather_on_device(run)


def _gather_on_host(runs: Sequence[Run], buffers: Buffers) -> Iterator[Chunk]:
    """Yields the rows of runs of one group, several chunks being filled at a time."""
    _, codec, dtype, width, _ = runs[0].group
    large = chunk_rows(width, dtype.itemsize)
    left = sum(run.count for run in runs)
    for run in runs:
        # On CPU there is a view, and nothing to wait for.
        if next(iter(run.data.devices())).platform != "cpu":
            run.data.copy_to_host_async()
    filling: collections.deque[Future[Chunk]] = collections.deque()
    # Copying waits for memory, and for the pages of fresh buffers: two threads take half the
    # time of one. The pool is left only when no thread looks into a table any more.
    with ThreadPoolExecutor(_THREADS, "cnr_gather") as pool:
        for slices in in_chunks(runs, large):
            count = sum(stop - start for _, start, stop in slices)
            shape = (program_rows(min(left, large), large), width)
            left -= count
            rows = buffers.empty(shape, dtype)
            filling.append(pool.submit(_fill, codec, rows, count, slices))
            # Else the last one would be in use until all are taken.
            del rows
            if len(filling) > 2 * _THREADS:
                yield filling.popleft().result()
        while filling:
            yield filling.popleft().result()


def _bit_view(array: np.ndarray) -> np.ndarray:
    """The same rows as unsigned integers: numpy copies them faster, and never as numbers."""
    flat = array.reshape(array.shape[0], -1)
    # Of complex numbers of 128 bits each part is one.
    return flat.view(f"u{min(array.dtype.itemsize, 8)}")


def _fill(
    codec: Codec,
    rows: np.ndarray,
    count: int,
    slices: Sequence[tuple[Run, int, int]],
) -> Chunk:
    # Rows past the last are encoded too, as whatever they are, and dropped: zeros are quick.
    rows[count:] = 0
    dithers = slices[0][0].keys_of is not None
    keys = np.zeros(len(rows), np.uint32) if dithers else None
    bits, at = _bit_view(rows), 0
    for run, start, stop in slices:
        part = slice(at, at + stop - start)
        _copy_rows(run, start, bits[part])
        if keys is not None:
            keys[part] = run.keys(start, stop)
        at = part.stop
    return Chunk(codec=codec, count=count, rows=rows, keys=keys)


def _copy_rows(run: Run, done: int, out: np.ndarray) -> None:
    """Copies rows `done` and following of a run into `out`, as bits."""
    # The view lives for this call only: a view that is alive when the buffer is donated
    # makes XLA copy the whole table instead of reusing it.
    view = _bit_view(np.asarray(run.data))
    if run.positions is None:
        start = run.first + done
        out[...] = view[start : start + len(out)]
    else:
        index = run.positions[done : done + len(out)] + run.first
        # "clip" skips a bounds check that copies; positions are within the tile.
        np.take(view, index, axis=0, out=out, mode="clip")


def copied_rows(run: Run) -> np.ndarray:
    """The rows of a run that are to be saved, as they are."""
    rows = np.empty((run.count, run.width), run.data.dtype)
    _copy_rows(run, 0, _bit_view(rows))
    return rows


@functools.cache
def _bits_program(
    shape: tuple[int, ...], device: jax.Device
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def touched_bits(stamps: jax.Array, clock: jax.Array) -> jax.Array:
        # One bit a row, eight to a byte: the host needs 1/32 of the stamps' bytes.
        return jnp.packbits(stamps > clock, bitorder="little")

    return compiled(touched_bits, device, (shape, np.int32), ((), np.int32))


def stamps_program(rows: int, device: jax.Device) -> Program:
    """What choosing rows of a shard of this many stamps on a device needs."""
    return _bits_program, ((rows,), device)


class Buffers:
    """Hands out memory for chunks, and takes it back when nothing refers to it any more.

    Nobody has to say when that is: what was handed out may be on its way through an encoder or
    a file while the save that asked for it is long reported.

    Args:
        keep_bytes: that may lie idle.

    Example:
        >>> buffers = Buffers(1 << 30)
        >>> rows = buffers.empty((8192, 64), np.dtype(np.float32))
        >>> del rows
        >>> buffers.idle_bytes
        2097152
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        # One size for all: that of large chunks of any width.
        self._size = tiling.CHUNK_BYTES
        # Taken from and added to by several threads, and added to wherever a last reference
        # goes, which may be within a call of the same thread: so there is no lock.
        self._idle: collections.deque[np.ndarray] = collections.deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next save."""
        return len(self._idle) * self._size

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """As `aligned_empty`; of memory that was used before, if there is some."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._size // 2 < nbytes <= self._size:
            return aligned_empty(shape, dtype)
        try:
            memory = self._idle.pop()
        except IndexError:
            # Not several chunks in one piece: for 4 MiB and more numpy asks for huge pages, and
            # while the kernel moved memory to make them, a full of 1 GB took up to three times
            # as long.
            memory = aligned_empty((self._size,), np.dtype(np.uint8))
        lent = np.asarray(_Lent(memory, self))
        return lent[:nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Gives idle memory back to the system, and keeps none any more."""
        self._keep_bytes = 0
        self._idle.clear()

    def _take_back(self, memory: np.ndarray) -> None:
        if self.idle_bytes + self._size <= self._keep_bytes:
            self._idle.append(memory)


class _Lent:
    """What arrays over lent memory refer to: it goes when the last of them does."""

    def __init__(self, memory: np.ndarray, owner: Buffers) -> None:
        self._memory, self._owner = memory, owner
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner._take_back(self._memory)
