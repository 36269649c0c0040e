"""Chunks of arrays that are kept while slices are cut from them, and limits of TensorStore."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import numpy as np
import tensorstore as ts

from cnr_jax.rows.codecs.sparse import SparseRows

# Contents of a chunk: its elements, or its rows if it is packed.
ChunkValues = np.ndarray | SparseRows

# Bytes of chunks that TensorStore may keep: neighbouring shards read the two halves of one chunk.
CACHE_BYTES = 128 << 20
# Bytes of chunks that a restore keeps: enough for the handful of arrays of a chain that it reads
# side by side.
KEPT_BYTES = 192 << 20
# Bytes of packed chunks that a restore has unpacked ahead.
UNPACKED_BYTES = 32 << 20


@functools.cache
def context(cache_bytes: int = CACHE_BYTES, *, syncs: bool = True) -> ts.Context:
    """TensorStore context whose limits leave cores to training; `syncs` makes it sync files."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 8},
            "data_copy_concurrency": {"limit": 2},
            # The directory belongs to one attempt at a save, which is its only writer.
            "file_io_locking": {"mode": "none"},
            "file_io_sync": syncs,
            "cache_pool": {"total_bytes_limit": cache_bytes},
        }
    )


class KeptChunks:
    """Cache of the whole chunks used last, from which small slices are cut.

    A chunk is read and checked as a whole, however little of it is wanted, and a read costs as much
    as cutting thousands of slices. The chunks may belong to any number of arrays.

    Args:
        limit_bytes: limit of all chunks together; the one used last is kept whatever its size.
        cache_bytes: limit of what TensorStore may keep beside them, in `context`.
        unpacked_bytes: limit of packed chunks that threads unpack while those before them are used.

    Attributes:
        ahead_bytes: bytes of such chunks now.
    """

    def __init__(
        self,
        limit_bytes: int = KEPT_BYTES,
        cache_bytes: int = CACHE_BYTES,
        unpacked_bytes: int = UNPACKED_BYTES,
    ) -> None:
        self._limit_bytes, self.context = limit_bytes, context(cache_bytes)
        self._nbytes, self._unpacked_bytes = 0, unpacked_bytes
        self.ahead_bytes = 0
        self._chunks = collections.OrderedDict[tuple[object, int], ChunkValues]()

    def has_room_ahead(self, nbytes: int) -> bool:
        """Whether a packed chunk of so many bytes may be unpacked before it is asked for."""
        return self.ahead_bytes + nbytes <= self._unpacked_bytes

    def has(self, array: object, chunk: int) -> bool:
        """Whether a chunk is kept."""
        return (array, chunk) in self._chunks

    def get(
        self, array: object, chunk: int, read: Callable[[int], ChunkValues]
    ) -> ChunkValues:
        """Chunk of an array, read by `read` if it is not kept; callers must not write to it."""
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
