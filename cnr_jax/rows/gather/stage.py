"""Chunks of rows on their way from the training thread to the writing thread.

The training thread puts chunks in, the writing thread takes them out. What is in between is
bounded in bytes: past the limit the training thread waits, so that a save which does not fit
into memory streams through it instead.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Something that takes memory while it waits."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        ...


T = TypeVar("T", bound=Sized)


class Stage(Generic[T]):
    """A queue bounded in bytes, between two threads.

    Args:
        limit_bytes: bytes that may wait. One item larger than the limit still passes, alone.
        timeout_secs: how long `put` waits for room before it gives up.
        patient: whether the reader gets nothing until all is in, or there is no room for
            more. Where both threads want the same cores, training so waits for one alone.

    Example:
        >>> import numpy as np
        >>> stage = Stage(100)
        >>> stage.put(np.zeros(3, np.uint8))
        True
        >>> stage.close()
        >>> [item.nbytes for item in stage]
        [3]
    """

    def __init__(
        self, limit_bytes: int, timeout_secs: float = 1200.0, *, patient: bool = False
    ) -> None:
        self._limit = limit_bytes
        self._timeout = timeout_secs
        self._items: collections.deque[T] = collections.deque()
        self._changed = threading.Condition()
        self._held = 0
        self._closed = False
        self._failed = False
        self._started = not patient

    def put(self, item: T) -> bool:
        """Adds an item, waiting for room; returns False if the reader has given up.

        Raises:
            TimeoutError: if nothing was taken out for `timeout_secs`.
        """
        with self._changed:
            if not self._has_room(item):
                self._start()
            room = self._changed.wait_for(lambda: self._has_room(item), self._timeout)
            if not room:
                raise TimeoutError(
                    f"staged rows were not written for {self._timeout:g} s"
                )
            if self._failed:
                return False
            self._items.append(item)
            self._held += item.nbytes
            self._changed.notify_all()
            return True

    def _has_room(self, item: T) -> bool:
        fits = self._held == 0 or self._held + item.nbytes <= self._limit
        return self._failed or fits

    def _start(self) -> None:
        self._started = True
        self._changed.notify_all()

    def start(self) -> None:
        """Lets a patient reader begin."""
        with self._changed:
            self._start()

    def close(self) -> None:
        """Says that nothing more will be put."""
        with self._changed:
            self._closed = True
            self._start()

    def fail(self) -> None:
        """Says that nothing more will be taken: drops what waits and frees `put`."""
        with self._changed:
            self._failed = True
            self._items.clear()
            self._changed.notify_all()

    def abort(self) -> None:
        """Says that what was put is not all there will be: the reader must not finish."""
        self.fail()
        self.close()

    def __iter__(self) -> Iterator[T]:
        """Takes items until closed; an item counts as held until the next one is asked for.

        Raises:
            RuntimeError: if the other thread gave up before it had put everything.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._started and self._items) or self._closed
                )
                if self._failed:
                    raise RuntimeError("staging was given up before all rows were in")
                if not self._items:
                    return
                item = self._items.popleft()
            size = item.nbytes
            yield item
            del item
            with self._changed:
                self._held -= size
                self._changed.notify_all()
