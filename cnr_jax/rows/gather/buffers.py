"""Host memory for gathered rows that is used again by the next save.

Fresh memory is slow where the system has to fetch it: every page is zeroed, and a virtual machine
that hands free memory back to its host gets it again at a few hundred MB/s (0.2 GB/s measured on
one that copies rows at 3 GB/s). Training would wait for that in every save.
"""

from __future__ import annotations

import collections
import math

import numpy as np

from cnr_jax.rows.gather import chunk
from cnr_jax.rows.gather.chunk import aligned_empty


class Buffers:
    """Hands out memory for chunks, and takes it back when nothing refers to it any more.

    Nobody has to say when that is: what was handed out may be on its way through an encoder or
    a file while the save that asked for it is long reported.

    Args:
        keep_bytes: that may lie idle.

    Example:
        >>> buffers = Buffers(1 << 30)
        >>> rows = buffers.empty((8192, 64), np.dtype(np.float32))
        >>> del rows
        >>> buffers.idle_bytes
        2097152
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        # One size for all: that of large chunks of any width.
        self._size = chunk.CHUNK_BYTES
        # Taken from and added to by several threads, and added to wherever a last reference
        # goes, which may be within a call of the same thread: so there is no lock.
        self._idle: collections.deque[np.ndarray] = collections.deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next save."""
        return len(self._idle) * self._size

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """As `aligned_empty`; of memory that was used before, if there is some."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._size // 2 < nbytes <= self._size:
            return aligned_empty(shape, dtype)
        try:
            memory = self._idle.pop()
        except IndexError:
            # Not several chunks in one piece: for 4 MiB and more numpy asks for huge pages, and
            # while the kernel moved memory to make them, a full of 1 GB took up to three times
            # as long.
            memory = aligned_empty((self._size,), np.dtype(np.uint8))
        lent = np.asarray(_Lent(memory, self))
        return lent[:nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Gives idle memory back to the system, and keeps none any more."""
        self._keep_bytes = 0
        self._idle.clear()

    def _take_back(self, memory: np.ndarray) -> None:
        if self.idle_bytes + self._size <= self._keep_bytes:
            self._idle.append(memory)


class _Lent:
    """What arrays over lent memory refer to: it goes when the last of them does."""

    def __init__(self, memory: np.ndarray, owner: Buffers) -> None:
        self._memory, self._owner = memory, owner
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._owner._take_back(self._memory)
