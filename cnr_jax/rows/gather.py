"""Selecting touched rows, gathering them into fixed-size chunks, and encoding these.

Rows are gathered in the blocking part of a save, before the next train step can donate the
buffers they are in. What is gathered are fresh copies; nothing here outlives the call but those.

Two ways, chosen by platform. On CPU rows are gathered by numpy from a view of the buffer and
encoded later, behind training: gathering needs no compilation, so a thousand tables of distinct
shapes cost none, and rows of all tables of one width share the chunks. On accelerators rows are
gathered and encoded at once on their device and only encoded bytes cross to the host.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded, Raw
from cnr_jax.rows.tiling import LocalShards

Where = Literal["host", "device"]
# Bytes of decoded rows in a chunk: large enough to hide the cost of a dispatch, small enough
# to stay in cache while it is encoded. Measured on 2 CPU cores, 4 bits, dim 64: 0.67 GB/s in
# chunks of 2 MiB, 0.45 GB/s in chunks of 16 MiB.
CHUNK_BYTES = 2 << 20
# Rows of the small chunk that holds the rest of a group, so that few touched rows cost little.
SMALL_ROWS = 512
# That gather on the host.
_THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The rows of one tile that are saved with one codec.

    Attributes:
        data: the shard that holds the tile, on its device.
        first: row of `data` at which the tile starts.
        rows: rows of the tile.
        positions: sorted int64 positions within the tile; None for all rows.
        codec: how they are encoded.
    """

    data: jax.Array
    first: int
    rows: int
    positions: np.ndarray | None
    codec: Codec

    @property
    def count(self) -> int:
        """Rows to be saved."""
        return self.rows if self.positions is None else len(self.positions)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.data.shape[1:])

    @property
    def group(self) -> tuple[Codec, np.dtype, int]:
        """Runs of one group share chunks and compiled programs."""
        return self.codec, np.dtype(self.data.dtype), self.width


@dataclasses.dataclass(slots=True)
class Chunk:
    """Up to a fixed number of consecutive rows of one group.

    Attributes:
        count: rows that are meant; what follows them is padding.
        rows: host array `[at least count, width]`; None where `encoded` holds the rows.
        encoded: encoded on the device; None where they are encoded later.
        escaped_rows: the rows themselves, on the device, where some were escaped.
    """

    codec: Codec
    count: int
    rows: np.ndarray | None = None
    encoded: Encoded | None = None
    escaped_rows: jax.Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on host and device that this chunk keeps."""
        size = self.rows.nbytes if self.rows is not None else 0
        size += self.escaped_rows.nbytes if self.escaped_rows is not None else 0
        if self.encoded is not None:
            size += sum(part.nbytes for part in self.encoded.parts.values())
        return size


def chunk_rows(width: int, itemsize: int) -> int:
    """Rows of a large chunk: a power of two, one where rows are very wide.

    Example:
        >>> chunk_rows(64, 4)
        8192
    """
    rows = max(1, CHUNK_BYTES // max(1, width * itemsize))
    return 1 << (rows.bit_length() - 1)


def program_rows(count: int, large: int) -> int:
    """Rows of the chunk, large or small, that holds `count` rows, at most `large`.

    Example:
        >>> program_rows(300, 8192), program_rows(600, 8192), program_rows(2, 4)
        (512, 8192, 4)
    """
    small = min(SMALL_ROWS, large)
    return small if count <= small else large


def touched_positions(
    stamps: LocalShards, rows: tuple[int, int], clock: int, where: Where
) -> np.ndarray:
    """Positions within `rows` whose stamp is greater than `clock`, sorted, int64.

    Waits for the computation that produced `stamps`.
    """
    data, first = stamps.holding(rows)
    part = slice(rows[0] - first, rows[1] - first)
    if where == "host":
        mask = np.asarray(data)[part] > clock
    else:
        program = _bits_program(data.shape, data.device)
        bits = np.asarray(program(data, jax.device_put(np.int32(clock), data.device)))
        mask = np.unpackbits(bits, count=data.shape[0], bitorder="little")[part]
    return np.flatnonzero(mask)


def _touched_bits(stamps: jax.Array, clock: jax.Array) -> jax.Array:
    """One bit a row, eight to a byte: the host needs 1/32 of the stamps' bytes."""
    return jnp.packbits(stamps > clock, bitorder="little")


def gather_chunks(runs: Sequence[Run], where: Where) -> Iterator[Chunk]:
    """Yields the rows of all runs, in order, in chunks.

    Runs must be sorted by group. On the host a chunk holds rows of several runs of a group;
    on a device each run has its own.
    """
    if where == "device":
        for run in runs:
            yield from _device_chunks(run)
        return
    for _, group in itertools.groupby(runs, lambda run: run.group):
        yield from _host_chunks(list(group))


def _bit_view(array: np.ndarray) -> np.ndarray:
    """The same rows as unsigned integers: numpy copies them faster, and never as numbers."""
    flat = array.reshape(array.shape[0], -1)
    return flat.view(f"u{array.dtype.itemsize}")


class _Piece(NamedTuple):
    """Consecutive rows of a run, from `done` on, and where in a chunk they go."""

    run: Run
    done: int
    count: int
    at: int


def _host_chunks(runs: Sequence[Run]) -> Iterator[Chunk]:
    """Fills chunks with the rows of runs of one group, several at a time."""
    codec, dtype, width = runs[0].group
    large = chunk_rows(width, dtype.itemsize)
    left = sum(run.count for run in runs)
    filling: collections.deque[Future[Chunk]] = collections.deque()
    # Copying waits for memory, and for the pages of fresh buffers: two threads take half the
    # time of one. The pool is left only when no thread looks into a table any more.
    with ThreadPoolExecutor(_THREADS, "cnr_gather") as pool:
        for pieces in _pieces(runs, large):
            count = sum(piece.count for piece in pieces)
            shape = (program_rows(min(left, large), large), width)
            left -= count
            filling.append(pool.submit(_fill, codec, dtype, shape, count, pieces))
            if len(filling) > 2 * _THREADS:
                yield filling.popleft().result()
        while filling:
            yield filling.popleft().result()


def _pieces(runs: Sequence[Run], large: int) -> Iterator[list[_Piece]]:
    """What each chunk of `large` rows consists of."""
    pieces: list[_Piece] = []
    filled = 0
    for run in runs:
        done = 0
        while done < run.count:
            count = min(run.count - done, large - filled)
            pieces.append(_Piece(run, done, count, filled))
            done, filled = done + count, filled + count
            if filled == large:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def _fill(
    codec: Codec,
    dtype: np.dtype,
    shape: tuple[int, int],
    count: int,
    pieces: Sequence[_Piece],
) -> Chunk:
    # Rows past the last are encoded too, as whatever they are, and dropped: zeros are quick.
    rows = (np.empty if count == shape[0] else np.zeros)(shape, dtype)
    bits = _bit_view(rows)
    for run, done, number, at in pieces:
        _copy_rows(run, done, bits[at : at + number])
    return Chunk(codec=codec, count=count, rows=rows)


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


def _device_chunks(run: Run) -> Iterator[Chunk]:
    """Encodes a run on its device, one chunk ahead of the one that is handed out."""
    large = chunk_rows(run.width, run.data.dtype.itemsize)
    waiting: tuple[Chunk, jax.Array] | None = None
    for start in range(0, run.count, large):
        chunk, at = _device_chunk(run, start, min(large, run.count - start))
        if waiting is not None:
            yield _keep_escaped(run, *waiting)
        waiting = (chunk, at)
    if waiting is not None:
        yield _keep_escaped(run, *waiting)


def _device_chunk(run: Run, start: int, count: int) -> tuple[Chunk, jax.Array]:
    """Starts to encode `count` rows from `start` on; also returns their rows in the shard."""
    large = chunk_rows(run.width, run.data.dtype.itemsize)
    index = np.full(program_rows(count, large), run.first, np.int32)
    if run.positions is None:
        index[:count] = np.arange(start, start + count) + run.first
    else:
        index[:count] = run.positions[start : start + count] + run.first
    at = jax.device_put(index, run.data.device)
    encoded = _program_for(run, run.codec, len(index))(run.data, at)
    for array in (*encoded.parts.values(), encoded.escaped):
        array.copy_to_host_async()
    return Chunk(codec=run.codec, count=count, encoded=encoded), at


def _keep_escaped(run: Run, chunk: Chunk, at: jax.Array) -> Chunk:
    """Keeps the rows themselves where some were escaped: the shard may be donated later."""
    assert chunk.encoded is not None
    if not isinstance(run.codec, Raw):
        if np.asarray(chunk.encoded.escaped)[: chunk.count].any():
            rows = _program_for(run, Raw(), len(at))(run.data, at)
            chunk.escaped_rows = rows.parts["rows"]
    return chunk


def _program_for(
    run: Run, codec: Codec, rows: int
) -> Callable[[jax.Array, jax.Array], Encoded]:
    dtype = np.dtype(run.data.dtype)
    return _gather_program(codec, run.data.shape, dtype, run.data.device, rows)


# Programs of the device way are compiled ahead of time and kept here: calling a jitted function
# to warm it up would need an array as large as the shard.
@functools.cache
def _gather_program(
    codec: Codec, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device, rows: int
) -> Callable[[jax.Array, jax.Array], Encoded]:
    def gather_encode(data: jax.Array, index: jax.Array) -> Encoded:
        picked = data.reshape(data.shape[0], -1).at[index].get(mode="clip")
        return codec.encode(picked)

    sharding = jax.sharding.SingleDeviceSharding(device)
    data = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    index = jax.ShapeDtypeStruct((rows,), np.int32, sharding=sharding)
    return jax.jit(gather_encode).lower(data, index).compile()


@functools.cache
def _bits_program(
    shape: tuple[int, ...], device: jax.Device
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    sharding = jax.sharding.SingleDeviceSharding(device)
    stamps = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    clock = jax.ShapeDtypeStruct((), np.int32, sharding=sharding)
    return jax.jit(_touched_bits).lower(stamps, clock).compile()


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, rows: jax.Array) -> Encoded:
    return codec.encode(rows)


class EncodedChunk(NamedTuple):
    """A chunk on the host, without its padding.

    Attributes:
        parts: each `[count, width of the part]`.
        escaped: positions of escaped rows.
        rows: these rows themselves; None when there are none.
    """

    parts: dict[str, np.ndarray]
    escaped: np.ndarray
    rows: np.ndarray | None


def encode_chunks(
    chunks: Iterable[Chunk], device: jax.Device
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Encodes chunks that are not yet, each while the one before is used.

    No more than two are in the works: on CPU a train step waits for all that is queued before
    it, which are these.
    """
    waiting: tuple[Chunk, Encoded | None] | None = None
    for chunk in chunks:
        encoded = _start_encoding(chunk, device)
        if waiting is not None:
            yield waiting[0], _to_host(*waiting)
        waiting = chunk, encoded
    if waiting is not None:
        yield waiting[0], _to_host(*waiting)


def _start_encoding(chunk: Chunk, device: jax.Device) -> Encoded | None:
    """What a chunk is encoded to, not waited for; None if it is stored as it is."""
    if chunk.encoded is not None:
        return chunk.encoded
    if isinstance(chunk.codec, Raw):
        return None
    return _encode(chunk.codec, jax.device_put(chunk.rows, device))


def _to_host(chunk: Chunk, encoded: Encoded | None) -> EncodedChunk:
    count = chunk.count
    if encoded is None:
        assert chunk.rows is not None
        return EncodedChunk({"rows": chunk.rows[:count]}, np.empty(0, np.int64), None)
    parts = {name: np.asarray(part)[:count] for name, part in encoded.parts.items()}
    escaped = np.flatnonzero(np.asarray(encoded.escaped)[:count])
    if not len(escaped):
        return EncodedChunk(parts, escaped, None)
    rows = chunk.rows if chunk.rows is not None else np.asarray(chunk.escaped_rows)
    return EncodedChunk(parts, escaped, rows[escaped])


def host_device() -> jax.Device:
    """The device that encodes rows which are staged on the host."""
    return jax.local_devices(backend="cpu")[0]


def _sizes(width: int, dtype: np.dtype) -> set[int]:
    large = chunk_rows(width, dtype.itemsize)
    return {program_rows(1, large), large}


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    """`values` with rows of zeros after them, `rows` in all; itself if it has as many."""
    if len(values) == rows:
        return values
    longer = np.zeros((rows, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer


def warm_up_host(codec: Codec, dtype: np.dtype, width: int) -> None:
    """Compiles what encoding chunks of this group on the host needs."""
    device = host_device()
    if isinstance(codec, Raw):
        return
    for rows in _sizes(width, dtype):
        chunk = Chunk(codec=codec, count=1, rows=np.zeros((rows, width), dtype))
        list(encode_chunks([chunk], device))


def warm_up_device(
    codec: Codec, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device
) -> None:
    """Compiles what gathering and encoding from a shard of this shape on a device needs."""
    width = math.prod(shape[1:])
    for rows in _sizes(width, dtype):
        _gather_program(codec, shape, dtype, device, rows)
        _gather_program(Raw(), shape, dtype, device, rows)


def warm_up_stamps(rows: int, device: jax.Device) -> None:
    """Compiles what selecting rows of a shard of this many stamps on a device needs."""
    _bits_program((rows,), device)
