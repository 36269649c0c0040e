"""Encoding of chunks that were gathered on the host, on their way there, and their errors.

In the background, chunk by chunk, so that a train step queued in between waits for little.

Both a row and its codes are at hand only on their way to storage. There a sample is decoded, by
the program that a restore decodes with, and compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded, Raw
from cnr_jax.rows.gather.chunk import Chunk
from cnr_jax.rows.gather.motion import LEAST_MOVED, FollowedRows, Motion, TileRef
from cnr_jax.rows.tiling import (
    Program,
    chunk_rows,
    compiled,
    host_device,
    padded,
    program_rows,
)
from cnr_jax.texts import logger

_log = logger(__name__)

SAMPLE_ROWS = 16_384
# Of wide rows fewer are looked at: 16 MiB of float32 take some milliseconds.
_SAMPLE_ELEMENTS = 1 << 22
# Rows compared at once, of which a small save has fewer: to start a batch takes a millisecond.
_BATCH_ROWS = 2048

# Codec, dtype and width: what decides on the program.
_Group = tuple[Codec, np.dtype, int]


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, rows: jax.Array, *keys: jax.Array) -> Encoded:
    """Encodes rows; by a codec that dithers with their keys, if they are given."""
    return codec.encode(rows, *keys)


class EncodedChunk(NamedTuple):
    """A chunk on the host, without its padding.

    Attributes:
        parts: parts of the codes, each `[count, width of the part]`.
        escaped: positions of escaped rows.
        rows: the escaped rows themselves; None if there are none.
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
    """Starts to encode a chunk, without waiting; None if it is stored as it is."""
    if chunk.encoded is not None:
        return chunk.encoded
    if isinstance(chunk.codec, Raw):
        return None
    given = [chunk.rows] if chunk.keys is None else [chunk.rows, chunk.keys]
    return _encode(chunk.codec, *jax.device_put(given, device))


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


def host_programs(
    codec: Codec, dtype: np.dtype, width: int, dithers: bool
) -> Iterator[Program]:
    """Programs that encode chunks of such rows on the host."""
    if not isinstance(codec, Raw):
        large = chunk_rows(width, dtype.itemsize)
        for rows in {program_rows(1, large), large}:
            yield _encode_zeros, (codec, dtype, width, rows, dithers)


def _encode_zeros(
    codec: Codec, dtype: np.dtype, width: int, rows: int, dithers: bool
) -> None:
    keys = np.zeros(rows, np.uint32) if dithers else None
    chunk = Chunk(codec=codec, count=1, rows=np.zeros((rows, width), dtype), keys=keys)
    list(encode_chunks([chunk], host_device()))


class RowErrors(NamedTuple):
    """Relative errors `||row - read|| / ||row||` of sampled rows.

    Attributes:
        rows: number of rows compared; rows of zeros, which are exact, do not count.
        mean: mean of their errors; None if there are none.
        worst: the greatest of them; None if there are none.
    """

    rows: int
    mean: float | None
    worst: float | None


def sample_positions(
    counts: Sequence[int], widths: Sequence[int], rounded: Sequence[bool]
) -> np.ndarray:
    """Positions of evenly spread rows among those of all runs, one run after the other.

    There are at most `SAMPLE_ROWS`, of the runs that are rounded.

    Args:
        counts: number of rows of each run.
        widths: number of elements in each of its rows.
        rounded: whether its rows are rounded, and count.

    Example:
        >>> sample_positions([2, 3, 2], [4, 4, 4], [True, False, True]).tolist()
        [0, 1, 5, 6]
    """
    all_counts = np.asarray(counts, np.int64)
    ours = np.where(np.asarray(rounded, bool), all_counts, 0)
    total = int(ours.sum())
    if not total:
        return np.empty(0, np.int64)
    width = max(1, int(ours @ np.asarray(widths, np.int64)) // total)
    stride = -(-total // max(1, min(SAMPLE_ROWS, _SAMPLE_ELEMENTS // width)))
    ranks = np.arange(stride // 2, total, stride)
    ends = np.cumsum(ours)
    runs = np.searchsorted(ends, ranks, side="right")
    return ranks - (ends - ours)[runs] + (np.cumsum(all_counts) - all_counts)[runs]


class Sample(NamedTuple):
    """Sample of the rows of a save, which is looked at on their way.

    Attributes:
        positions: positions of its rows among all rows of the save, sorted.
        tables: table of each row, as an index into `names`.
        names: names of tables.
        compared: whether each row is compared with what its codes read as.
        followed: tile of each row, as an index into `tiles`; -1: its motion is not looked at.
        tiles: tiles whose rows are followed, in the order of their rows.
        in_tile: position of each row in its tile, if it is followed.
    """

    positions: np.ndarray
    tables: np.ndarray
    names: Sequence[str]
    compared: np.ndarray
    followed: np.ndarray
    tiles: Sequence[TileRef]
    in_tile: np.ndarray


class Comparison:
    """Compares sampled rows with what their codes read as, and with what they were.

    It never raises: a save goes on without it.

    Args:
        sample: sample of the rows of the save.
        followed: followed rows, as they were; None if none is followed.
    """

    def __init__(self, sample: Sample, followed: FollowedRows | None = None) -> None:
        self._sample, self._followed = sample, followed
        self._waiting: dict[_Group, list[tuple[np.ndarray, ...]]] = {}
        # With the tables of the rows.
        self._errors: list[tuple[np.ndarray, np.ndarray]] = []
        self._motions: dict[int, list[np.ndarray]] = {}
        self._failed = False

    def add(self, chunk: Chunk, encoded: EncodedChunk, done: int) -> None:
        """Takes the sampled rows of a chunk that begins at position `done`."""
        positions = self._sample.positions
        first, last = np.searchsorted(positions, (done, done + chunk.count))
        if first < last:
            self._attempt(lambda: self._take(chunk, encoded, done, slice(first, last)))

    def result(self) -> tuple[RowErrors | None, dict[str, RowErrors]]:
        """Errors of all rows, and of each table whose rows were compared.

        They are None and empty if there was nothing to sample, or if comparing failed.
        """
        self._attempt(lambda: [self._compare(group) for group in self._waiting])
        if self._failed or not self._sample.compared.any():
            return None, {}
        if not self._errors:
            return RowErrors(0, None, None), {}
        tables, errors = map(np.concatenate, zip(*self._errors, strict=True))
        by_table = {n: _joined(each) for n, each in self._by_table(tables, errors)}
        return _joined(errors), by_table

    def motions(self) -> dict[str, Motion]:
        """Motion of the followed rows of each table; empty if too few have moved."""
        found: dict[str, Motion] = {}
        for table, parts in self._motions.items():
            bits = np.concatenate(parts)
            if len(bits):
                found[self._sample.names[table]] = Motion(len(bits), float(bits.mean()))
        enough = sum(each.rows for each in found.values()) >= LEAST_MOVED
        return found if enough and not self._failed else {}

    def _by_table(
        self, tables: np.ndarray, values: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        for index in np.unique(tables).tolist():
            yield str(self._sample.names[index]), values[tables == index]

    def _attempt(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception:
            self._failed = True
            _log.debug("the error of rounded rows was not measured", exc_info=True)

    def _take(
        self, chunk: Chunk, encoded: EncodedChunk, done: int, which: slice
    ) -> None:
        sample = self._sample
        at = sample.positions[which] - done  # within the chunk
        # The rows themselves: gathered on the host, stored as they are, or kept on the device.
        if chunk.rows is not None:
            rows = chunk.rows[at]
        elif isinstance(chunk.codec, Raw):
            rows = encoded.parts["rows"][at]
        elif chunk.sampled is not None:
            at = at[: chunk.sampled.shape[0]]
            which = slice(which.start, which.start + len(at))
            rows = np.asarray(chunk.sampled)[: len(at)]
        else:
            return
        self._follow(rows, which)
        compared, tables = sample.compared[which], sample.tables[which]
        if isinstance(chunk.codec, Raw) or not compared.any():
            return
        rows, at, tables = rows[compared], at[compared], tables[compared]
        parts = [encoded.parts[name][at] for name in sorted(encoded.parts)]
        group = (chunk.codec, rows.dtype, rows.shape[1])
        waiting = self._waiting.setdefault(group, [])
        waiting.append((rows, tables, np.isin(at, encoded.escaped), *parts))
        if sum(len(each[0]) for each in waiting) >= _batch_rows(group):
            self._compare(group)

    def _follow(self, rows: np.ndarray, which: slice) -> None:
        """Notes how far the followed ones among sampled rows have moved."""
        sample, followed = self._sample, self._followed
        if followed is None:
            return
        mine = np.flatnonzero(sample.followed[which] >= 0)
        numbers, starts = np.unique(sample.followed[which][mine], return_index=True)
        # A chunk may hold rows of thousands of tiles, those of one side by side.
        parts = np.split(mine, starts[1:])
        for number, part in zip(numbers.tolist(), parts, strict=False):
            at = part + which.start
            found = followed.even_bits(
                sample.tiles[number], sample.in_tile[at], rows[part]
            )
            # All of one tile, hence of one table.
            self._motions.setdefault(int(sample.tables[at[0]]), []).append(found)

    def _compare(self, group: _Group) -> None:
        """Compares what waits of a group, in batches of one size."""
        waiting, self._waiting[group] = self._waiting[group], []
        if not waiting:
            return
        rows, tables, exact, *parts = (
            np.concatenate(each) for each in zip(*waiting, strict=True)
        )
        size = _batch_rows(group)
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            values = [padded(each[some], size) for each in parts]
            read = _program(*group, size)(*jax.device_put(values, host_device()))
            found = _relative(rows[some], np.asarray(read)[: len(rows[some])])
            # Rows that a codec cannot hold are stored as they are, NaN and infinities too.
            found = np.where(exact[some], 0.0, found)
            known = ~np.isnan(found)
            self._errors.append((tables[some][known], found[known]))


def _joined(errors: np.ndarray) -> RowErrors:
    if not len(errors):
        return RowErrors(0, None, None)
    mean = float(errors.mean(dtype=np.float64))
    return RowErrors(len(errors), mean, float(errors.max()))


def _batch_rows(group: _Group) -> int:
    _, dtype, width = group
    return min(_BATCH_ROWS, chunk_rows(width, dtype.itemsize))


def _relative(rows: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Relative errors of rows, float64[rows]; NaN of rows of zeros."""
    # As they are restored, and in double precision: the steps of the smallest numbers of a
    # dtype are part of the error, and a float may not hold squares of what it holds.
    # Rows that are not finite are stored as they are, whatever codes read as; some NaN cannot
    # even be converted without a warning.
    with np.errstate(all="ignore"):
        rows = rows.astype(np.float64)
        off = rows - read
        # Sums of squares, without an array of these.
        error, norm = (np.einsum("ij,ij->i", x, x) for x in (off, rows))
        return np.where(norm > 0, np.sqrt(error / norm), np.nan)


@functools.cache
def _program(
    codec: Codec, dtype: np.dtype, width: int, size: int
) -> Callable[..., jax.Array]:
    """So many rows of a batch, given the parts of their codes in order of their names."""
    parts = codec.parts(width, dtype)
    names = sorted(parts)

    def read(*stored: jax.Array) -> jax.Array:
        coded = dict(zip(names, stored, strict=True))
        return codec.decode(coded, dim=width, dtype=dtype)

    arrays = [((size, parts[name].width), parts[name].dtype) for name in names]
    return compiled(read, host_device(), *arrays)


def comparing_program(codec: Codec, dtype: np.dtype, width: int) -> Program:
    """Program that compares such rows with what their codes read as."""
    return _program, (codec, dtype, width, _batch_rows((codec, dtype, width)))
