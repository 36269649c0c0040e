"""Chunks of arrays that are kept while slices are cut from them, and limits of TensorStore."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import numpy as np
import tensorstore as ts

from cnr_jax.rows.codecs.sparse import SparseRows

# Its elements, or where it is packed its rows.
ChunkValues = np.ndarray | SparseRows

# Bytes of chunks that TensorStore may keep: neighbouring shards read the two halves of one chunk.
CACHE_BYTES = 128 << 20
# Bytes of chunks that a restore keeps: those of the handful of arrays of a chain that are read
# side by side.
KEPT_BYTES = 192 << 20


@functools.cache
def context(cache_bytes: int = CACHE_BYTES, *, syncs: bool = True) -> ts.Context:
    """Limits of our own, so that a save does not take all cores; `syncs`: what it writes."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 8},
            "data_copy_concurrency": {"limit": 2},
            # The directory is of one attempt at a save: no other writer exists.
            "file_io_locking": {"mode": "none"},
            "file_io_sync": syncs,
            "cache_pool": {"total_bytes_limit": cache_bytes},
        }
    )


class KeptChunks:
    """Whole chunks that are kept while small slices are cut from them: those used last.

    A chunk is read and checked whole however little of it is wanted, and a read costs as much
    as to cut thousands of slices. The chunks may be of any number of arrays.

    Args:
        limit_bytes: of all of them together; the one used last is kept whatever its size.
        cache_bytes: of what TensorStore reads, which it may keep beside them; `context` says it.
    """

    def __init__(
        self, limit_bytes: int = KEPT_BYTES, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._limit_bytes, self.context = limit_bytes, context(cache_bytes)
        self._nbytes = 0
        # Bytes of chunks that are being unpacked for those that ask soon.
        self.ahead_bytes = 0
        self._chunks = collections.OrderedDict[tuple[object, int], ChunkValues]()

    def has(self, array: object, chunk: int) -> bool:
        """Whether a chunk is at hand."""
        return (array, chunk) in self._chunks

    def get(
        self, array: object, chunk: int, read: Callable[[int], ChunkValues]
    ) -> ChunkValues:
        """A chunk of an array, from `read` where it is not at hand; not to be written to."""
        key = (array, chunk)
        found = self._chunks.get(key)
        if found is not None:
            self._chunks.move_to_end(key)
            return found
        found = read(chunk)
        if isinstance(found, np.ndarray):
            found.setflags(write=False)
        self._chunks[key] = found
        self._nbytes += found.nbytes
        while self._nbytes > self._limit_bytes and len(self._chunks) > 1:
            self._nbytes -= self._chunks.popitem(last=False)[1].nbytes
        return found
