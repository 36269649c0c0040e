"""Hashing rows in host memory, chunk by chunk, from views of their buffers.

One program serves all tables of the same row shape, so a thousand tables of distinct lengths need
no compilation each. Rows that are compared with earlier hashes are not all hashed twice: a byte a
row says which rows differ, and only those are hashed again.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cnr_jax.rows.fingerprints.hash import differ_on_host, hash_on_host
from cnr_jax.rows.shards import row_words
from cnr_jax.rows.tiling import SMALL_ROWS, Program, aligned_empty, host_device, padded

# Bytes of rows that are hashed at once. A call costs as much as hashing half a MiB to one MiB. A
# pass takes 2.3 to 2.5 times as long as a sum in chunks of 16 or 32 MiB, and 2.1 times in 64 MiB
# (2 cores, bfloat16 of dim 16, medians of four rounds).
CHUNK_BYTES = 64 << 20
# Chunks that are being hashed or compared.
_AHEAD = 3
# If fewer than one row in this many differs in a chunk, only these rows are hashed again.
_FEW = 8
# Rows that are hashed again at once.
_AGAIN_ROWS = 8 * SMALL_ROWS
# Chunks of at least this many rows are first compared; for smaller ones that saves nothing.
_MANY_ROWS = 8 * _AGAIN_ROWS

# A shard, the row of it at which a tile starts, and the rows of the tile.
Span = tuple[jax.Array, int, int]


# Hashes, or tags uint8[rows, tiles]. On a device they are one array, of hashes uint32[rows, 2]. On
# the host they are a list of chunks, of hashes uint64[rows].
Hashes = jax.Array | list[np.ndarray]


class Hashed(NamedTuple):
    """Hashes of the rows of one group's tiles.

    Attributes:
        hashes: hash of each row. On the host, if something was compared, some chunks have only
            the hashes of rows that differ; `settled` adds the others.
        tags: tag of each row and tile, if asked for.
        differ: marks from which `changed_of` makes positions; on the host, positions by chunk.
            None if nothing was compared.
    """

    hashes: Hashes
    tags: Hashes | None = None
    differ: Hashes | None = None


def hash_chunks(
    spans: Sequence[Span],
    seed: np.ndarray,
    before: list[np.ndarray] | None,
    tagged: bool,
) -> Hashed:
    """Hashes rows, each of them made up of a row of every span.

    Args:
        spans: spans of leaves in a fixed order.
        seed: uint32[2].
        before: all hashes by chunk, to compare with.
        tagged: whether to make tags.
    """
    work = _Work(spans, jax.device_put(seed, host_device()), before, tagged)
    for start in range(0, spans[0][2], work.step):
        work.start(start)
    return work.finish()


class _Work:
    def __init__(
        self,
        spans: Sequence[Span],
        seed: jax.Array,
        before: list[np.ndarray] | None,
        tagged: bool,
    ) -> None:
        self.step = _chunk_rows([x for x, _, _ in spans])
        self._spans = spans
        self._seed = seed
        self._before = before
        self._tagged = tagged
        self._ahead: collections.deque[Callable[[], None]] = collections.deque()
        # For each chunk, pieces that are being hashed, each with its number of rows that count.
        self._hashes: list[list[tuple[jax.Array, int]]] = []
        self._tags: list[np.ndarray] = []
        self._differ: list[np.ndarray] = []
        # Whether so many rows differed in the chunk before that comparing first saves nothing.
        self._much = False

    def start(self, start: int) -> None:
        """Starts the chunk that begins at a row; waits for the oldest if enough are ahead."""
        count = min(self.step, self._spans[0][2] - start)
        size = _size(count, self.step)
        chunk = self._chunk(start, count, size)
        old = None if self._before is None else self._before[start // self.step]
        if old is None or self._tagged or self._much or size < _MANY_ROWS:
            made = hash_on_host(chunk, self._seed, tagged=self._tagged)
            end = functools.partial(self._end_whole, start, count, old, *made)
        else:
            differ = differ_on_host(chunk, self._seed, padded(old, size))
            end = functools.partial(self._end_compared, start, count, differ)
        self._ahead.append(end)
        # A chunk is compared while others are hashed. Computations of other threads queue behind
        # these few at most.
        if len(self._ahead) == _AHEAD:
            self._ahead.popleft()()

    def finish(self) -> Hashed:
        # Taken off, as entries hold this object, and it holds the leaves of the state.
        while self._ahead:
            self._ahead.popleft()()
        hashes = [
            pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            for pieces in (
                [_front(*piece) for piece in chunk] or [np.zeros(0, np.uint64)]
                for chunk in self._hashes
            )
        ]
        return Hashed(
            hashes,
            self._tags if self._tagged else None,
            None if self._before is None else self._differ,
        )

    def _end_whole(
        self,
        start: int,
        count: int,
        old: np.ndarray | None,
        hashes: jax.Array,
        tags: jax.Array | None,
    ) -> None:
        self._hashes.append([(hashes, count)])
        if tags is not None:
            self._tags.append(_front(tags, count))
        if old is not None:
            self._note(start, count, np.asarray(hashes)[:count] != old)

    def _end_compared(self, start: int, count: int, differ: jax.Array) -> None:
        positions = self._note(start, count, np.asarray(differ)[:count])
        if self._much:
            size = _size(count, self.step)
            chunk = self._chunk(start, count, size)
            hashes, _ = hash_on_host(chunk, self._seed, tagged=False)
            self._hashes.append([(hashes, count)])
        else:
            self._hashes.append(list(self._hash_again(positions)))

    def _note(self, start: int, count: int, differ: np.ndarray) -> np.ndarray:
        positions = np.flatnonzero(differ)
        self._much = len(positions) * _FEW >= count
        self._differ.append(np.add(positions, start, out=positions))
        return positions

    def _hash_again(self, positions: np.ndarray) -> Iterator[tuple[jax.Array, int]]:
        for done in range(0, len(positions), _AGAIN_ROWS):
            some = positions[done : done + _AGAIN_ROWS]
            rows = [_rows_at(span, some) for span in self._spans]
            yield hash_on_host(rows, self._seed, tagged=False)[0], len(some)

    def _chunk(self, start: int, count: int, size: int) -> list[np.ndarray]:
        """Returns some rows of all spans, as views if they need no padding."""
        # Views live for one chunk only, see `Shards.words`.
        return [
            padded(np.asarray(x)[first + start : first + start + count], size)
            for x, first, _ in self._spans
        ]


def _rows_at(span: Span, positions: np.ndarray) -> np.ndarray:
    """Copies some rows into an array of the size of a program; the rest of it has no meaning."""
    data, first, rows = span
    words = row_words(np.asarray(data)[first : first + rows])
    copy = aligned_empty((_AGAIN_ROWS, words.shape[1]), words.dtype)
    # "clip" skips a bounds check that copies.
    np.take(words, positions, axis=0, out=copy[: len(positions)], mode="clip")
    return copy


def _chunk_rows(data: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Number of rows in a large chunk: a multiple of those in a small one, or a power of two."""
    width = sum(
        int(np.prod(x.shape[1:], dtype=np.int64)) * np.dtype(x.dtype).itemsize
        for x in data
    )
    rows = max(1, CHUNK_BYTES // max(1, width))
    if rows >= SMALL_ROWS:
        return rows - rows % SMALL_ROWS
    return 1 << (rows.bit_length() - 1)


def _size(count: int, step: int) -> int:
    """Number of rows of the program that hashes a chunk: few sizes, each 8 times the one before."""
    size = SMALL_ROWS
    while size < count:
        size *= 8
    return min(size, step)


def _front(found: jax.Array, count: int) -> np.ndarray:
    """Returns the first `count` results, without keeping the others."""
    whole = np.asarray(found)
    return whole if len(whole) == count else whole[:count].copy()


def chunk_programs(
    kinds: Sequence[tuple[tuple[int, ...], np.dtype]], rows: int, tagged: bool
) -> Iterator[Program]:
    """Yields the programs that hash `rows` rows of leaves with these row shapes and dtypes."""
    step = _chunk_rows([jax.ShapeDtypeStruct((1, *s), dtype) for s, dtype in kinds])
    # The first chunk and the last.
    for count in (min(step, rows), rows % step or step):
        size = _size(count, step)
        yield _hash_zeros, (kinds, size, tagged)
        if size >= _MANY_ROWS and not tagged:
            yield _hash_zeros, (kinds, _AGAIN_ROWS, tagged)


def _hash_zeros(
    kinds: Sequence[tuple[tuple[int, ...], np.dtype]], rows: int, tagged: bool
) -> None:
    chunk = [np.zeros((rows, *shape), dtype) for shape, dtype in kinds]
    seed = jax.device_put(np.zeros(2, np.uint32), host_device())
    hash_on_host(chunk, seed, tagged=tagged)
    if rows >= _MANY_ROWS and not tagged:
        differ_on_host(chunk, seed, np.zeros(rows, np.uint64))
