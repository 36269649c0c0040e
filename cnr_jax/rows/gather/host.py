"""Selecting touched rows, gathering them into fixed-size chunks, and the memory for these.

Rows are gathered in the blocking part of a save, before the next train step can donate the
buffers they are in. Gathered rows are fresh copies; nothing else here outlives the call.

There are two ways, chosen by platform and size. On CPU numpy gathers rows from a view of the
buffer, and they are encoded later, in the background. That needs no compilation, not even for a
thousand tables of distinct shapes, and rows of all tables of one width share chunks. On
accelerators rows are gathered and encoded at once on their device, and only encoded bytes cross to
the host. Small shards go the first way there too, from a copy, as programs for each cost more.

The next save uses the memory again. Fresh memory is slow where the system has to fetch it: every
page is zeroed, and a virtual machine that hands free memory back to its host gets it again at a few
hundred MB/s (0.2 GB/s measured on one that copies rows at 3 GB/s). Training would wait for that in
every save.
"""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.rows import tiling
from cnr_jax.rows.gather.chunk import Chunk, HostRows, Run
from cnr_jax.rows.gather.device import DEVICE_BYTES, gather_on_device
from cnr_jax.rows.shards import Shards, Tiling, row_words
from cnr_jax.rows.tiling import (
    Program,
    aligned_empty,
    chunk_rows,
    compiled,
    program_rows,
)

# Threads that gather on the host.
_THREADS = min(4, os.cpu_count() or 1)
# Fewer chunks than this are filled in less time than threads need to start.
_FEW_CHUNKS = 3
# Bytes of rows per tile: with fewer on average, threads wait for each other's Python.
_SMALL_PIECE_BYTES = 64 << 10


class Chosen:
    """Rows that are saved, for each range of a tiling.

    Args:
        tiling: tiling that is saved.
        positions: sorted int64 positions of the rows within each range; None: all rows.

    Attributes:
        positions: positions of each range; None if all rows are saved. Tiles of one range share
            the same object.
        counts: int64[ranges], number of rows that are saved.
    """

    def __init__(self, tiling: Tiling, positions: Sequence[np.ndarray | None]) -> None:
        rows = tiling.range_rows.tolist()
        self.positions = [
            None if found is None or len(found) == whole else found
            for found, whole in zip(positions, rows, strict=True)
        ]
        counts = [
            whole if found is None else len(found)
            for found, whole in zip(self.positions, rows, strict=True)
        ]
        self.counts = np.array(counts, np.int64)


def touched_positions(shards: Shards, clock: int) -> list[np.ndarray]:
    """Returns the rows of each range whose stamp is greater than `clock`: sorted int64 positions.

    Waits for the computation that produced the stamps.
    """
    tiling, rows = shards.tiling, shards.tiling.range_rows.tolist()
    bits: dict[int, jax.Array] = {}
    # All devices are set to work before the first one is waited for.
    for number, (where, _) in enumerate(tiling.stamps):
        if where == "device":
            bits[number] = _touched_bits(shards.stamps[number], clock)
    found: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    for numbers, stamps in zip(
        tiling.parts, shards.stamp_parts if tiling.parts else (), strict=True
    ):
        # The stamps of many ranges are searched at once, and the positions then cut apart.
        positions = np.flatnonzero(stamps > clock)
        stops = np.cumsum(tiling.range_rows[numbers])
        ends = np.searchsorted(positions, stops)
        counts = np.diff(ends, prepend=0)
        positions -= np.repeat(tiling.starts[numbers], counts)
        begins = (ends - counts).tolist()
        for number, begin, end in zip(
            numbers.tolist(), begins, ends.tolist(), strict=True
        ):
            found[number] = positions[begin:end]
    for number, touched in bits.items():
        first, size = tiling.stamps[number][1], shards.stamps[number].shape[0]
        whole = np.unpackbits(np.asarray(touched), count=size, bitorder="little")
        # numpy finds what is true among bools several times as fast as among integers.
        mine = whole[first : first + rows[number]].view(np.bool_)
        found[number] = np.flatnonzero(mine)
    return found


def gather_chunks(rows: Iterable[HostRows | Run], buffers: Buffers) -> Iterator[Chunk]:
    """Yields all rows, in order, in chunks.

    On the host a chunk may hold rows of several tiles, in memory from `buffers`. On a device each
    tile has its own chunks. The first of them stay there until they are written, as training waits
    for copies of the others.
    """
    room = DEVICE_BYTES
    for some in rows:
        if isinstance(some, HostRows):
            yield from _gather_on_host(some, buffers)
            continue
        for chunk in gather_on_device(some):
            room -= chunk.nbytes
            if room < 0:
                chunk.leave_device()
            yield chunk


def _gather_on_host(some: HostRows, buffers: Buffers) -> Iterator[Chunk]:
    """Yields rows in chunks; several chunks are filled at a time where tiles are large."""
    ends = np.cumsum(some.counts)
    total = int(ends[-1]) if len(ends) else 0
    large = chunk_rows(some.width, some.dtype.itemsize)
    calls: list[_Filling] = []
    for start in range(0, total, large):
        stop = min(start + large, total)
        first, last = np.searchsorted(ends, (start, stop - 1), side="right").tolist()
        done = start - int(ends[first]) + some.counts[first]
        size = program_rows(min(total - start, large), large)
        calls.append(_Filling(first, last, done, stop - start, size))

    def fill(call: _Filling) -> Chunk:
        # Buffers are asked for one by one, or all would be in use until the last is yielded.
        rows = buffers.empty((call.size, some.width), some.dtype)
        return _fill(some, rows, call)

    pieces = total * some.width * some.dtype.itemsize // _SMALL_PIECE_BYTES
    if len(calls) < _FEW_CHUNKS or len(some.counts) > pieces:
        # Threads do not pay: they take as long to start, or copies wait for Python, not memory.
        yield from map(fill, calls)
        return
    filling: collections.deque[Future[Chunk]] = collections.deque()
    # Copying waits for memory, and for the pages of fresh buffers: two threads take half the
    # time of one. The pool is left only when no thread looks into a table any more.
    with ThreadPoolExecutor(_THREADS, "cnr_gather") as pool:
        for call in calls:
            filling.append(pool.submit(fill, call))
            if len(filling) > 2 * _THREADS:
                yield filling.popleft().result()
        while filling:
            yield filling.popleft().result()


class _Filling(NamedTuple):
    """Contents of a chunk that is being filled.

    Attributes:
        first: tile of its first row.
        last: tile of its last row.
        done: number of rows of the first tile that are in earlier chunks.
        count: number of its rows.
        size: number of rows that its memory holds.
    """

    first: int
    last: int
    done: int
    count: int
    size: int


def _fill(some: HostRows, rows: np.ndarray, call: _Filling) -> Chunk:
    # Padding is encoded too, whatever its values, and then dropped: zeros are quick to encode.
    rows[call.count :] = 0
    keys = None if some.keys_of is None else np.zeros(len(rows), np.uint32)
    words, at, done = row_words(rows), 0, call.done
    for tile in range(call.first, call.last + 1):
        stop = min(at + some.counts[tile] - done, call.count)
        end, out = done + stop - at, words[at:stop]
        first, positions = some.firsts[tile], some.positions[tile]
        if positions is None:
            out[...] = some.words[tile][first + done : first + end]
        else:
            if end - done < len(positions):
                positions = positions[done:end]
            # "clip" avoids the bounds check, which copies; positions are within the tile.
            index = positions + first if first else positions
            some.words[tile].take(index, 0, out, "clip")
        if keys is not None:
            assert some.keys_of is not None
            if positions is None:
                positions = np.arange(done, end)
            keys[at:stop] = some.keys_of[tile](positions)
        at, done = stop, 0
    return Chunk(codec=some.codec, count=call.count, rows=rows, keys=keys)


def _touched_bits(stamps: jax.Array, clock: int) -> jax.Array:
    """Starts to mark the stamps of a shard that are greater than `clock`, one bit each."""
    device = stamps.device
    assert isinstance(device, jax.Device)
    program = _bits_program(stamps.shape, device)
    return program(stamps, jax.device_put(np.int32(clock), device))


@functools.cache
def _bits_program(
    shape: tuple[int, ...], device: jax.Device
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def touched_bits(stamps: jax.Array, clock: jax.Array) -> jax.Array:
        # One bit a row, eight to a byte: the host gets 1/32 of the stamps' bytes.
        return jnp.packbits(stamps > clock, bitorder="little")

    return compiled(touched_bits, device, (shape, np.int32), ((), np.int32))


def stamps_program(rows: int, device: jax.Device) -> Program:
    """Program that finds the touched rows of a shard with this many stamps on a device."""
    return _bits_program, ((rows,), device)


class Buffers:
    """Pool of memory for chunks, which takes memory back when nothing refers to it any more.

    Nobody has to return memory: it may still be on its way through an encoder or a file when
    the save that asked for it is long reported.

    Args:
        keep_bytes: the most bytes that may lie idle.

    Example:
        >>> buffers = Buffers(1 << 30)
        >>> rows = buffers.empty((8192, 64), np.dtype(np.float32))
        >>> del rows
        >>> buffers.idle_bytes
        2097152
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        # All buffers have one size, that of large chunks of any width.
        self._size = tiling.CHUNK_BYTES
        # Several threads take from it and add to it. A thread adds wherever a last reference goes,
        # perhaps within another call here of its own, so there is no lock.
        self._idle: collections.deque[np.ndarray] = collections.deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next save."""
        return len(self._idle) * self._size

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns memory as `aligned_empty` does, but takes idle memory if there is some."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._size // 2 < nbytes <= self._size:
            return aligned_empty(shape, dtype)
        try:
            memory = self._idle.pop()
        except IndexError:
            # Not several chunks in one piece: from 4 MiB on numpy asks for huge pages. While the
            # kernel moved memory to make them, a full of 1 GB took up to three times as long.
            memory = aligned_empty((self._size,), np.dtype(np.uint8))
        lent = np.asarray(_Lent(memory, self))
        return lent[:nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Gives idle memory back to the system, and keeps none from now on."""
        self._keep_bytes = 0
        self._idle.clear()

    def _take_back(self, memory: np.ndarray) -> None:
        if self.idle_bytes + self._size <= self._keep_bytes:
            self._idle.append(memory)


class _Lent:
    """Owner of lent memory, to which arrays refer; it is deleted with the last of them."""

    def __init__(self, memory: np.ndarray, owner: Buffers) -> None:
        self._memory, self._owner = memory, owner
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner._take_back(self._memory)
