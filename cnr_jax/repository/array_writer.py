"""Appends to a one-dimensional array, and says what is in it.

Chunks are written once, whole, from memory that nobody changes afterwards.
"""

from __future__ import annotations

import collections
import hashlib

import numpy as np
import tensorstore as ts

from cnr_jax.format.tiles import ArrayEntry, Compressed
from cnr_jax.repository.chunk_files import (
    CHUNK_BYTES,
    chunk_length,
    numpy_dtype,
    stored_crc32c,
)
from cnr_jax.repository.files import AnyPath, size_of
from cnr_jax.repository.store import COMPRESSED_LEAST_BYTES, context, spec_of

# Chunks of one array in flight: one is written while the next is filled.
_IN_FLIGHT = 3


class ArrayWriter:
    """Appends to one array; `finish` makes it durable and describes it.

    Args:
        path: directory of the array.
        dtype: dtype of its elements.
        length: elements that will be appended, or the most there can be where `exact` is
            False. An inexact array has chunks of a quarter of `CHUNK_BYTES`, because nothing
            may come, and is cut at the end.
        compression: how chunks are compressed; None: not. Nor is an array that is too short
            for it to pay.
    """

    def __init__(
        self,
        path: AnyPath,
        dtype: str,
        length: int,
        *,
        exact: bool = True,
        compression: str | None = None,
    ) -> None:
        self._path, self._dtype, self._length = path, dtype, length
        self._exact, self._compression = exact, compression
        self._item = numpy_dtype(dtype)
        limit = CHUNK_BYTES if exact else CHUNK_BYTES // 4
        if exact:
            self._chunk = chunk_length(length, self._item.itemsize, limit)
        else:
            self._chunk = max(1, min(length, limit // self._item.itemsize))
        self._buffer = np.empty(self._chunk, self._item)
        self._filled = 0
        self._written = 0
        self._store: ts.TensorStore | None = None
        self._pending: collections.deque[ts.WriteFutures] = collections.deque()

    @property
    def position(self) -> int:
        """Elements appended so far: the offset of what is appended next."""
        return self._written + self._filled

    def append(self, values: np.ndarray) -> None:
        """Appends a copy of `values`, flattened; they must have the array's dtype."""
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.dtype != self._item:
            raise TypeError(f"{self._path.name}: got {flat.dtype}, not {self._item}")
        start = 0
        while start < flat.size:
            count = min(flat.size - start, self._chunk - self._filled)
            self._buffer[self._filled : self._filled + count] = flat[
                start : start + count
            ]
            self._filled += count
            start += count
            if self._filled == self._chunk:
                self._flush()

    def _flush(self) -> None:
        if self._store is None:
            self._store = self._create(self._length)
        stop = self._written + self._filled
        write = self._store[self._written : stop].write(
            self._buffer[: self._filled], can_reference_source_data_indefinitely=True
        )
        self._pending.append(write)
        while len(self._pending) > _IN_FLIGHT:
            self._pending.popleft().commit.result()
        self._written = stop
        # A new buffer: TensorStore still refers to the old one.
        self._buffer = np.empty(self._chunk, self._item)
        self._filled = 0

    def _create(self, length: int) -> ts.TensorStore:
        if length * self._item.itemsize < COMPRESSED_LEAST_BYTES:
            self._compression = None
        spec = spec_of(self._path, self._dtype, length, self._chunk, self._compression)
        return ts.open(spec, create=True, context=context()).result()

    def finish(self) -> ArrayEntry | None:
        """Waits until everything is on storage.

        Returns:
            The array's entry for the process manifest; None when nothing was appended, and
            then nothing was written.
        """
        if self._store is None and self._filled and not self._exact:
            self._length = self._chunk = self._filled
        if self._filled:
            self._flush()
        if self._store is None:
            return None
        while self._pending:
            self._pending.popleft().commit.result()
        if self._exact and self._written != self._length:
            raise RuntimeError(
                f"{self._path.name}: {self._written} of {self._length} were appended"
            )
        if self._written < self._length:
            self._store.resize(
                exclusive_max=[self._written],
                resize_metadata_only=True,
                shrink_only=True,
            ).result()
        self._store = None
        return self._describe()

    def stop(self) -> None:
        """Waits until nothing is being written, and frees what was to be."""
        while self._pending:
            self._pending.popleft().commit.exception()
        self._store, self._buffer = None, np.empty(0, self._item)

    def _describe(self) -> ArrayEntry:
        metadata = (self._path / "zarr.json").read_bytes()
        chunks = range(-(-self._written // self._chunk))
        compressed = None
        if self._compression is not None:
            sizes = tuple(size_of(self._path / "c" / str(i)) for i in chunks)
            compressed = Compressed(codec=self._compression, bytes=sizes)
        return ArrayEntry(
            dtype=self._dtype,
            length=self._written,
            chunk=self._chunk,
            metadata_bytes=len(metadata),
            metadata_sha256=hashlib.sha256(metadata).hexdigest(),
            crc32c=tuple(stored_crc32c(self._path, i) for i in chunks),
            compressed=compressed,
        )
