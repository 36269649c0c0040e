"""Chunks of rows, and dense leaves, on their way from the thread that begins a save to the writer.

One thread puts them into a `Stage`, the other takes them out. The bytes in between are bounded, for
all saves in flight together. Past the limit the beginning of a save waits, and training with it. So
a save that does not fit into memory streams through it.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Iterator

import numpy as np

from cnr_jax.rows.gather.chunk import Chunk


@dataclasses.dataclass(slots=True)
class DenseBytes:
    """Bytes of dense leaves, which nobody changes any more: `uint8[bytes]`."""

    data: np.ndarray

    @property
    def nbytes(self) -> int:
        """Number of bytes, even if others keep them in memory too."""
        return self.data.nbytes


def parted(
    items: Iterable[Chunk | DenseBytes],
) -> tuple[Iterator[Chunk], Iterator[DenseBytes]]:
    """Parts a stage into its rows and the dense leaves after them, to be used up in this order.

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


class Room:
    """Memory for what is staged and not yet written, in all stages together.

    Args:
        limit_bytes: bytes that may wait. One chunk larger than the limit still passes, alone.

    Attributes:
        limit_bytes: as given.
        held_bytes: bytes that wait; read and changed only under the lock.
        lock: lock of all stages.
        changed: condition that is notified when one of the stages changes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        # Stages take the lock itself, not the condition: an interrupt right after Python has locked
        # a condition would leave it locked.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)


class Stage:
    """Queue of chunks and dense bytes between two threads, bounded in bytes.

    Args:
        room: room for what waits, which several stages share.
        timeout_secs: how long `put` waits for room before it gives up.
        patient: whether the reader gets nothing until all is in, or there is no room for more. If
            both threads want the same cores, training then waits for only one of them.

    Example:
        >>> from cnr_jax.rows.codecs import Raw
        >>> stage = Stage(Room(100))
        >>> stage.put(Chunk(codec=Raw(), count=1, rows=np.zeros((1, 3), np.uint8)))
        True
        >>> stage.close()
        >>> [chunk.nbytes for chunk in stage]
        [3]
    """

    def __init__(
        self, room: Room, timeout_secs: float = 1200.0, *, patient: bool = False
    ) -> None:
        self._room, self._lock, self._changed = room, room.lock, room.changed
        self._timeout = timeout_secs
        self._items: collections.deque[Chunk | DenseBytes] = collections.deque()
        self._held = 0
        self._closed = False
        self._failed = False
        self._started = not patient

    def put(self, item: Chunk | DenseBytes) -> bool:
        """Adds an item, waiting for room; returns False if the reader has given up.

        Raises:
            TimeoutError: if there was no room for `timeout_secs`.
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
            self._hold(item.nbytes)
            return True

    def _has_room(self, item: Chunk | DenseBytes) -> bool:
        held, limit = self._room.held_bytes, self._room.limit_bytes
        return self._failed or held == 0 or held + item.nbytes <= limit

    def _hold(self, more_bytes: int) -> None:
        self._held += more_bytes
        self._room.held_bytes += more_bytes
        self._changed.notify_all()

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
    def limit_bytes(self) -> int:
        """Bytes of rows and dense leaves that may wait, in all stages of the room together."""
        return self._room.limit_bytes

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
            self._hold(-self._held)

    def abort(self) -> None:
        """Says that not everything was put and nothing more will be: the reader must not finish."""
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
                if not self._failed:
                    self._hold(-size)
