"""Threads that may run or not, and waiting for them, whatever is interrupted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

# How often a wait looks again: a thread that ends it may be interrupted before it says so.
_POLL_SECS = 1.0
# How long to wait until a failed save stops writing; it does within a chunk or two.
STOP_SECS = 60.0
_NOBODY = ()


class Gate:
    """An event for threads, one of which may be interrupted: it opens once, for all.

    `threading.Event` stays locked for good if an interrupt comes where Python has just locked it.

    Attributes:
        is_open: whether it is open.
    """

    def __init__(self) -> None:
        self.is_open, self._shut = False, threading.Lock()
        self._shut.acquire()

    def open(self) -> None:
        """Lets all pass."""
        self.is_open = True
        with contextlib.suppress(RuntimeError):  # it is open
            self._shut.release()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits until it is open; returns whether it is."""
        end = None if timeout_secs is None else time.monotonic() + timeout_secs
        while not self.is_open:
            left = _POLL_SECS if end is None else end - time.monotonic()
            if left <= 0:
                return False
            if self._shut.acquire(timeout=min(left, _POLL_SECS)):
                self.open()  # for others
        return True


class Job:
    """Work of another thread, of which more is known than the thread can tell.

    After an interrupt in `Thread.start` nobody knows whether the thread runs, or is about to. After
    an interrupt in a wait for a thread, Python may take it for ended, though it goes on.
    """

    def __init__(self) -> None:
        # The thread that does it, under one key: `setdefault` finds and notes who came first.
        self._owner: dict[str, tuple[int, ...]] = {}
        self._over = Gate()

    def start(self, name: str, work: Callable[..., Any], *args: Any) -> None:
        """Lets a thread do the work. Call it again after an interrupt, in case that none does."""
        if not self.has_begun:
            threading.Thread(target=self.run, args=(work, *args), name=name).start()

    def run(self, work: Callable[..., Any], *args: Any) -> None:
        """Does the work, unless that was begun before or is given up."""
        mine = (threading.get_ident(),)
        if self._owner.setdefault("", mine) is not mine:
            return
        try:
            work(*args)
        finally:
            self._over.open()

    def give_up(self) -> bool:
        """Keeps the work from beginning; returns whether it has not begun, and never will."""
        never = self._owner.setdefault("", _NOBODY) is _NOBODY
        if never:
            self._over.open()
        return never

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Waits until the work is done or given up; returns whether it is."""
        return self.is_over or self._over.wait(timeout_secs)

    @property
    def has_begun(self) -> bool:
        """Whether somebody does the work, or has done it."""
        return self._owner.get("", _NOBODY) is not _NOBODY

    @property
    def is_over(self) -> bool:
        """Whether the work is done, or given up."""
        return self._over.is_open or self._owner.get("") is _NOBODY

    @property
    def is_here(self) -> bool:
        """Whether this thread is doing the work."""
        mine = self._owner.get("") == (threading.get_ident(),)
        return mine and not self._over.is_open


def wait_for(future: Any, check: Callable[[], None]) -> None:
    """Waits for a future, unless that waits for a process that has failed.

    A future of Orbax does: other processes write into what process 0 has made.

    Args:
        future: future of Orbax, or of Python.
        check: function that is called every second; what it raises ends the wait, and cancels the
            future.

    Raises:
        Exception: what `check` raises, or the work of the future.
    """
    while True:
        started = time.monotonic()
        try:
            future.result(timeout=_POLL_SECS)
            return
        except TimeoutError:
            if time.monotonic() - started < _POLL_SECS:
                raise  # its own work has timed out
        try:
            check()
        except Exception:
            future.cancel()
            with contextlib.suppress(BaseException):
                future.result(timeout=STOP_SECS)
            raise
