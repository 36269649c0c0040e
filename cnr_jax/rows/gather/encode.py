"""Encoding of chunks that were gathered on the host, and errors of rows on their way to storage.

Chunks are encoded in the background, one by one, so that a train step in between waits for little.

Only on the way to storage are both a row and its codes at hand. There a sample is decoded, by the
program with which a restore decodes, and compared.
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
# Fewer wide rows are looked at: 16 MiB of float32 take some milliseconds.
_SAMPLE_ELEMENTS = 1 << 22
# Rows compared at once; a small save has fewer. It takes a millisecond to start a batch.
_BATCH_ROWS = 2048

# Codec, dtype and width, which determine the program.
_Group = tuple[Codec, np.dtype, int]


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, rows: jax.Array, *keys: jax.Array) -> Encoded:
    """Encodes rows, with their keys if they are given, by which the codec dithers."""
    return codec.encode(rows, *keys)


class EncodedChunk(NamedTuple):
    """A chunk on the host, without its padding.

    Attributes:
        parts: parts of the codes, each `[count, width of the part]`.
        escaped: positions of escaped rows in the chunk, int64.
        rows: the escaped rows unencoded; None if no row is escaped.
    """

    parts: dict[str, np.ndarray]
    escaped: np.ndarray
    rows: np.ndarray | None


def encode_chunks(
    chunks: Iterable[Chunk], device: jax.Device
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Encodes chunks that are not encoded yet, each while the caller uses the one before.

    No more than two chunks are queued: on CPU a train step waits for everything queued before it.
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
    """Starts to encode a chunk, without waiting; None if its rows are stored unencoded."""
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
    """Yields the programs that encode chunks of rows of this codec, dtype and width on the host."""
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
        mean: mean of their errors; None if no row was compared.
        worst: greatest of their errors; None if no row was compared.
    """

    rows: int
    mean: float | None
    worst: float | None


def sample_positions(
    counts: Sequence[int], widths: Sequence[int], rounded: Sequence[bool]
) -> np.ndarray:
    """Returns positions of evenly spread rows, counted through all runs, one after the other.

    There are at most `SAMPLE_ROWS` of them, all in runs whose rows are rounded.

    Args:
        counts: number of rows of each run.
        widths: number of elements in a row of each run.
        rounded: whether the rows of each run are rounded; only such rows are sampled.

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
    """Sample of the rows of a save, which is looked at on the way to storage.

    Attributes:
        positions: positions of its rows among all rows of the save, sorted.
        tables: table of each row, as an index into `names`.
        names: names of tables.
        compared: whether each row is compared with what its codes read as.
        followed: tile of each row, as an index into `tiles`; -1: the row is not followed.
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
    """Comparison of sampled rows with what their codes read as, and with their earlier values.

    It never raises: if it fails, the save goes on without it.

    Args:
        sample: sample of the rows of the save.
        followed: followed rows with their earlier values; None if no row is followed.
    """

    def __init__(self, sample: Sample, followed: FollowedRows | None = None) -> None:
        self._sample, self._followed = sample, followed
        self._waiting: dict[_Group, list[tuple[np.ndarray, ...]]] = {}
        # Pairs of the tables and the errors of rows.
        self._errors: list[tuple[np.ndarray, np.ndarray]] = []
        self._motions: dict[int, list[np.ndarray]] = {}
        self._failed = False

    def add(self, chunk: Chunk, encoded: EncodedChunk, done: int) -> None:
        """Takes the sampled rows of a chunk whose first row is at position `done` of the save."""
        positions = self._sample.positions
        first, last = np.searchsorted(positions, (done, done + chunk.count))
        if first < last:
            self._attempt(lambda: self._take(chunk, encoded, done, slice(first, last)))

    def result(self) -> tuple[RowErrors | None, dict[str, RowErrors]]:
        """Returns the errors of all compared rows, and those of each table by its name.

        They are None and empty if there was nothing to compare, or if the comparison failed.
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
        """Returns the motion of each table's followed rows; empty if too few rows have moved."""
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
        # The unencoded rows were gathered on the host, are stored so, or were kept on the device.
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
        """Notes how far those of the sampled rows that are followed have moved."""
        sample, followed = self._sample, self._followed
        if followed is None:
            return
        mine = np.flatnonzero(sample.followed[which] >= 0)
        numbers, starts = np.unique(sample.followed[which][mine], return_index=True)
        # A chunk may hold rows of thousands of tiles; the rows of a tile are side by side.
        parts = np.split(mine, starts[1:])
        for number, part in zip(numbers.tolist(), parts, strict=False):
            at = part + which.start
            found = followed.even_bits(
                sample.tiles[number], sample.in_tile[at], rows[part]
            )
            # All rows of `at` are of one tile, hence of one table.
            self._motions.setdefault(int(sample.tables[at[0]]), []).append(found)

    def _compare(self, group: _Group) -> None:
        """Compares the waiting rows of a group, in batches of one size."""
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
            # Escaped rows are stored raw, so they have no error, even with NaN and infinities.
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
    """Returns relative errors of rows, float64[rows]; NaN for rows of zeros."""
    # Rows are compared as restored, since steps of the smallest numbers of a dtype are part of the
    # error, and in double precision, since squares may overflow a float. Rows that are not finite
    # are stored raw, whatever codes read as; some NaN cannot even be converted without a warning.
    with np.errstate(all="ignore"):
        rows = rows.astype(np.float64)
        off = rows - read
        # Sums of squares, without an array of the squares.
        error, norm = (np.einsum("ij,ij->i", x, x) for x in (off, rows))
        return np.where(norm > 0, np.sqrt(error / norm), np.nan)


@functools.cache
def _program(
    codec: Codec, dtype: np.dtype, width: int, size: int
) -> Callable[..., jax.Array]:
    """Compiled function that decodes `size` rows from their parts, in the order of the names."""
    parts = codec.parts(width, dtype)
    names = sorted(parts)

    def read(*stored: jax.Array) -> jax.Array:
        coded = dict(zip(names, stored, strict=True))
        return codec.decode(coded, dim=width, dtype=dtype)

    arrays = [((size, parts[name].width), parts[name].dtype) for name in names]
    return compiled(read, host_device(), *arrays)


def comparing_program(codec: Codec, dtype: np.dtype, width: int) -> Program:
    """Program that decodes rows of this codec, dtype and width in order to compare them."""
    return _program, (codec, dtype, width, _batch_rows((codec, dtype, width)))
