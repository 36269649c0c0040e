"""Chunks of rows, and dense leaves, on their way from the training thread to the writing thread.

Rows are on their device, or in the host's memory. The training thread puts chunks into a `Stage`,
and the writing thread takes them out. The chunks in between are bounded in bytes: past the limit
the training thread waits, so a save that does not fit into memory streams through it instead.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded

# Of positions within a tile, the keys of these rows.
KeysOf = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """Rows of tiles that are gathered in host memory and saved with one codec, tile by tile.

    Attributes:
        codec: codec by which they are encoded.
        dtype: dtype of their elements.
        width: number of elements in a row.
        words: rows of each tile's shard, see `row_words`.
        firsts: row of its shard at which each tile starts.
        positions: sorted int64 positions of each tile's saved rows; None: all.
        counts: number of each tile's saved rows; no tile is without any.
        keys_of: function that returns the keys of each tile's rows; None: codes are not dithered.
    """

    codec: Codec
    dtype: np.dtype
    width: int
    words: Sequence[np.ndarray]
    firsts: Sequence[int]
    positions: Sequence[np.ndarray | None]
    counts: Sequence[int]
    keys_of: Sequence[KeysOf] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The rows of one tile that are gathered and encoded on their device.

    Attributes:
        data: the shard that holds the tile, on its device.
        first: row of `data` at which the tile starts.
        rows: number of rows of the tile.
        positions: sorted int64 positions within the tile; None for all rows.
        codec: codec by which they are encoded.
        sampled: sorted indices of the saved rows that are also kept as they are; None: none.
        keys_of: function from positions within the tile to their keys, if codes are dithered.
    """

    data: jax.Array
    first: int
    rows: int
    positions: np.ndarray | None
    codec: Codec
    sampled: np.ndarray | None = None
    keys_of: KeysOf | None = None

    @property
    def count(self) -> int:
        """Number of rows to be saved."""
        return self.rows if self.positions is None else len(self.positions)

    @property
    def width(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.data.shape[1:])

    def keys(self, start: int, stop: int) -> np.ndarray:
        """Keys of some of the saved rows, uint32."""
        assert self.keys_of is not None
        if self.positions is None:
            return self.keys_of(np.arange(start, stop))
        return self.keys_of(self.positions[start:stop])


@dataclasses.dataclass(slots=True)
class Chunk:
    """Chunk of rows: up to a fixed number of consecutive rows of one group.

    Attributes:
        count: number of rows; anything after them is padding.
        rows: host array `[at least count, width]`; None if `encoded` holds the rows.
        encoded: rows encoded on the device; None if they are encoded later.
        escaped_rows: the rows themselves, on the device, if some were escaped.
        sampled: rows of the chunk that are in the sample of the save, in order, if `rows` does
            not hold them; anything after them is padding.
        keys: keys of `rows`, uint32, if their codes are to be dithered.
    """

    codec: Codec
    count: int
    rows: np.ndarray | None = None
    encoded: Encoded | None = None
    escaped_rows: jax.Array | None = None
    sampled: jax.Array | None = None
    keys: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on host and device that this chunk keeps."""
        size = self.rows.nbytes if self.rows is not None else 0
        size += self.escaped_rows.nbytes if self.escaped_rows is not None else 0
        size += self.sampled.nbytes if self.sampled is not None else 0
        size += self.keys.nbytes if self.keys is not None else 0
        if self.encoded is not None:
            size += sum(part.nbytes for part in self.encoded.parts.values())
        return size


@dataclasses.dataclass(slots=True)
class DenseBytes:
    """Bytes of dense leaves, which nobody changes any more: uint8, of one dimension."""

    data: np.ndarray

    @property
    def nbytes(self) -> int:
        """Number of bytes, whoever else keeps them."""
        return self.data.nbytes


def parted(
    items: Iterable[Chunk | DenseBytes],
) -> tuple[Iterator[Chunk], Iterator[DenseBytes]]:
    """Splits a stage into its rows and the dense leaves after them, to be used up in that order.

    Example:
        >>> from cnr_jax.rows.codecs import Raw
        >>> rows, dense = parted([Chunk(codec=Raw(), count=1), DenseBytes(np.zeros(3, np.uint8))])
        >>> [chunk.count for chunk in rows], [some.nbytes for some in dense]
        ([1], [3])
    """
    source, first = iter(items), list[DenseBytes]()

    def rows() -> Iterator[Chunk]:
        for item in source:
            if isinstance(item, DenseBytes):
                first.append(item)
                return
            yield item

    def dense() -> Iterator[DenseBytes]:
        while first:
            yield first.pop()
        for item in source:
            assert isinstance(item, DenseBytes)
            yield item

    return rows(), dense()


class Stage:
    """A queue of chunks and dense bytes, bounded in bytes, between two threads.

    Args:
        limit_bytes: bytes that may wait. One chunk larger than the limit still passes, alone.
        timeout_secs: how long `put` waits for room before it gives up.
        patient: whether the reader gets nothing until all is in, or there is no room for more.
            If both threads want the same cores, training then waits for one of them alone.

    Example:
        >>> from cnr_jax.rows.codecs import Raw
        >>> stage = Stage(100)
        >>> stage.put(Chunk(codec=Raw(), count=1, rows=np.zeros((1, 3), np.uint8)))
        True
        >>> stage.close()
        >>> [chunk.nbytes for chunk in stage]
        [3]
    """

    def __init__(
        self, limit_bytes: int, timeout_secs: float = 1200.0, *, patient: bool = False
    ) -> None:
        self._limit = limit_bytes
        self._timeout = timeout_secs
        self._items: collections.deque[Chunk | DenseBytes] = collections.deque()
        # Locked itself, not through the condition: that would be left locked by an interrupt which
        # comes where Python has just locked it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._held = 0
        self._closed = False
        self._failed = False
        self._started = not patient

    def put(self, item: Chunk | DenseBytes) -> bool:
        """Adds an item, waiting for room; returns False if the reader has given up.

        Raises:
            TimeoutError: if nothing was taken out for `timeout_secs`.
        """
        with self._lock:
            if not self._has_room(item):
                self._start()
            room = self._changed.wait_for(lambda: self._has_room(item), self._timeout)
            if not room:
                raise TimeoutError(
                    f"what was staged was not written for {self._timeout:g} s"
                )
            if self._failed:
                return False
            self._items.append(item)
            self._held += item.nbytes
            self._changed.notify_all()
            return True

    def _has_room(self, item: Chunk | DenseBytes) -> bool:
        fits = self._held == 0 or self._held + item.nbytes <= self._limit
        return self._failed or fits

    def _start(self) -> None:
        self._started = True
        self._changed.notify_all()

    def wait(self) -> None:
        """Waits until there is something for the reader, or nothing will come."""
        with self._lock:
            self._changed.wait_for(self._is_ready)

    def _is_ready(self) -> bool:
        return bool(self._started and self._items) or self._closed or self._failed

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will be put."""
        return self._closed

    def close(self) -> None:
        """Says that nothing more will be put."""
        with self._lock:
            self._closed = True
            self._start()

    def fail(self) -> None:
        """Says that nothing more will be taken: drops what waits and frees `put`."""
        with self._lock:
            self._failed = True
            self._items.clear()
            self._changed.notify_all()

    def abort(self) -> None:
        """Says that what was put is not all there will be: the reader must not finish."""
        self.fail()
        self.close()

    def __iter__(self) -> Iterator[Chunk | DenseBytes]:
        """Takes items until closed; an item counts as held until the next one is asked for.

        Raises:
            RuntimeError: if the other thread gave up before it had put everything.
        """
        while True:
            with self._lock:
                self._changed.wait_for(self._is_ready)
                if self._failed:
                    raise RuntimeError("staging was given up before all rows were in")
                if not self._items:
                    return
                item = self._items.popleft()
            size = item.nbytes
            yield item
            del item
            with self._lock:
                self._held -= size
                self._changed.notify_all()
