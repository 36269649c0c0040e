"""Arrays of integers whose chunks are packed row by row; `ArrayReader` reads them like others.

TensorStore does not know how they are packed, so this module makes the chunks and writes the files.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
from concurrent.futures import Future
from typing import Any

import numpy as np

from cnr_jax.format import names
from cnr_jax.format.tiles import ArrayEntry, Compressed
from cnr_jax.repository.store import (
    AnyPath,
    in_memory,
    store_of,
    sync_directory,
    write_durably,
)
from cnr_jax.repository.store.array_specs import spec_of
from cnr_jax.repository.store.arrays import chunk_length
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.rows.codecs.packed import pack_rows

# Chunks in flight: one is put while the next is packed.
_IN_FLIGHT = 3


class PackedWriter:
    """Writer that appends rows to one array; `finish` makes it durable and describes it.

    Args:
        path: directory of the array.
        dtype: dtype of its elements.
        length: number of elements that will be appended.
        width: number of elements in a row. A chunk has whole rows.
    """

    def __init__(self, path: AnyPath, dtype: str, length: int, width: int) -> None:
        self._path, self._dtype, self._length = path, dtype, length
        item = numpy_dtype(dtype)
        rows = -(-chunk_length(length, item.itemsize) // width)
        self._chunk = rows * width
        self._buffer = np.empty((rows, width), item)
        self._filled = 0
        self._pending: collections.deque[Future[Any]] = collections.deque()
        self._made: list[tuple[int, int]] = []

    def append(self, values: np.ndarray) -> None:
        """Appends rows, which the caller may change afterwards."""
        start = 0
        while start < len(values):
            count = min(len(values) - start, len(self._buffer) - self._filled)
            room = self._buffer[self._filled : self._filled + count]
            room[...] = values[start : start + count]
            self._filled += count
            start += count
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        data = in_memory.checked(pack_rows(self._buffer[: self._filled]))
        chunks = self._path / "c"
        if not self._made:
            store_of(chunks).make_folder(chunks)
        file = chunks / str(len(self._made))
        self._made.append((len(data), int.from_bytes(data[-4:], "little")))
        self._pending.append(in_memory.start(write_durably, file, data))
        while len(self._pending) > _IN_FLIGHT:
            self._pending.popleft().result()
        self._filled = 0

    def end(self) -> None:
        """Starts to write the remaining rows; nothing may be appended after that."""
        if self._filled:
            self._flush()

    def finish(self) -> ArrayEntry:
        """Waits until the whole array is on storage; returns its entry for the process manifest."""
        self.end()
        spec = spec_of(
            self._path, self._dtype, self._length, self._chunk, names.PACKED_ROWS
        )
        told = {"zarr_format": 3, "node_type": "array", **spec["metadata"]}
        metadata = json.dumps(told, sort_keys=True).encode()
        write_durably(self._path / "zarr.json", metadata)
        while self._pending:
            self._pending.popleft().result()
        sync_directory(self._path / "c")
        return ArrayEntry(
            dtype=self._dtype,
            length=self._length,
            chunk=self._chunk,
            metadata_bytes=len(metadata),
            metadata_sha256=hashlib.sha256(metadata).hexdigest(),
            crc32c=tuple(checksum for _, checksum in self._made),
            compressed=Compressed(
                codec=names.PACKED_ROWS, bytes=tuple(size for size, _ in self._made)
            ),
        )

    def stop(self) -> None:
        """Waits until nothing is being written, and frees the rows that were not."""
        while self._pending:
            with contextlib.suppress(Exception):
                self._pending.popleft().result()
        self._buffer = self._buffer[:0]
