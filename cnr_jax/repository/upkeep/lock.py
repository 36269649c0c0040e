"""A lock that is held while a save is being written.

The claim tells a writer that it lost the root; until it notices, it goes on writing files, under
names that the new writer uses too. So the new one waits for this lock. The system frees it
when a process ends, however it ends. Where there are no locks, there is nothing to wait for.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from typing import Any

from cnr_jax.format import names
from cnr_jax.repository.files import AnyPath, is_local

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl: Any = None

_log = logging.getLogger(__name__)
_POLL_SECS = 0.02


class WritingLock:
    """The lock of one root, as one manager sees it."""

    def __init__(self, root: AnyPath) -> None:
        self._path = root / names.WRITER_LOCK
        self._supported = fcntl is not None and is_local(root)
        self._descriptor: int | None = None

    def acquire(self, timeout_secs: float) -> bool:
        """Waits until no other manager is writing.

        Returns:
            Whether that is so; False after `timeout_secs`. True without waiting where the file
            system knows no locks.
        """
        if self._descriptor is not None or not self._supported:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(os.fspath(self._path), flags, 0o666)
        deadline = time.monotonic() + timeout_secs
        try:
            while not self._try(descriptor):
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(_POLL_SECS)
        except BaseException:
            os.close(descriptor)
            raise
        if self._supported:
            self._descriptor = descriptor
            _held.add(self)
        else:
            os.close(descriptor)
        return True

    def _try(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return False
            _log.info("no locks in %s: %s", os.fspath(self._path.parent), error)
            self._supported = False
        return True

    @property
    def is_held(self) -> bool:
        """Whether this manager holds it."""
        return self._descriptor is not None

    @property
    def is_proof(self) -> bool:
        """Whether holding it means something: not where there are no locks."""
        return self._supported

    def release(self) -> None:
        """Lets others write; does nothing if the lock is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Explicitly: a forked child may have inherited the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: lets go of the descriptor, which leaves the parent's lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[WritingLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


# A worker that outlives a killed trainer, such as one that loads data, must not hold its lock.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
