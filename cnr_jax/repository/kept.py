"""Whole chunks that are kept while small slices are cut from them.

A chunk is read and checked whole however little of it is wanted, and a read costs as much as to
cut thousands of slices. So the chunks that were used last are kept, up to a limit.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

# Bytes of chunks that a restore keeps: those of the handful of arrays of a chain that are read
# side by side.
KEPT_BYTES = 192 << 20


class KeptChunks:
    """The chunks that were used last, of any number of arrays.

    Args:
        limit_bytes: of all of them together; the one used last is kept whatever its size.
    """

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._nbytes = 0
        self._chunks: collections.OrderedDict[tuple[object, int], np.ndarray] = (
            collections.OrderedDict()
        )

    def get(
        self, array: object, chunk: int, read: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        """A chunk of an array, from `read` where it is not at hand; not to be written to."""
        key = (array, chunk)
        found = self._chunks.get(key)
        if found is not None:
            self._chunks.move_to_end(key)
            return found
        found = read(chunk)
        found.setflags(write=False)
        self._chunks[key] = found
        self._nbytes += found.nbytes
        while self._nbytes > self._limit_bytes and len(self._chunks) > 1:
            self._nbytes -= self._chunks.popitem(last=False)[1].nbytes
        return found
