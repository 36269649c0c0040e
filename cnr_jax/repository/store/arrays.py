"""One-dimensional zarr v3 arrays with crc32c: appended to by a save, read in slices by a restore.

The checksum is the outermost codec. Where chunks are compressed it covers the compressed bytes, so
a decompressor gets only bytes that were compared first. Chunks are written once, whole, from memory
that nobody changes afterwards. Chunks that are read are compared with the manifest.

TensorStore writes and reads the files. Where it does not reach a store, it turns elements into
chunks and back in memory, so that one client speaks to the store, with one set of keys.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import tensorstore as ts

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.tiles import ArrayEntry, Compressed
from cnr_jax.repository.store import (
    AnyPath,
    can,
    in_memory,
    read_all,
    size_of,
    store_of,
    write_durably,
)
from cnr_jax.repository.store.array_specs import spec_of
from cnr_jax.repository.store.checked import (
    check_chunk_file,
    damage,
    file_bytes,
    kind_of,
    means_damage,
    numpy_dtype,
    reading,
    stored_crc32c,
)
from cnr_jax.repository.store.kept_chunks import ChunkValues, KeptChunks, context
from cnr_jax.rows.codecs.packed import unpack_rows
from cnr_jax.rows.codecs.sparse import SparseRows, joined_rows

# Most bytes of a chunk: 16 MiB write at disk speed, 1 MiB 2 to 3 times slower, each synced.
CHUNK_BYTES = 16 << 20
# An array is cut into this many chunks, if each has `LEAST_CHUNK_BYTES`: to read a few rows takes
# whole chunks. Of 4 M x 64 at 4 bits, 100 neighbours then take 6 % of the bytes, not 22 % as with
# chunks of 16 MiB. A save takes 1.05 times as long until it is durable, a restore 0.85.
CHUNKS = 24
LEAST_CHUNK_BYTES = 2 << 20
# Least bytes of an array that is compressed. Compression adds about 100 bytes to metadata and
# manifest, and zstd seldom gains 10 % of codes.
COMPRESSED_LEAST_BYTES = 1 << 10
# Chunks of one array in flight: one is written while the next is filled.
_IN_FLIGHT = 3
# Slices of at most this many bytes are cut from whole chunks, which are kept: a separate read
# costs 0.2 ms, as much as reading 1 MiB more.
SMALL_READ_BYTES = 1 << 20
_Decoded = TypeVar("_Decoded")


def chunk_length(length: int, itemsize: int, limit_bytes: int = CHUNK_BYTES) -> int:
    """Number of elements in a chunk: chunks of equal size, padded by less than an element each.

    zarr stores the last chunk of a regular grid whole. So with a fixed chunk size, an array just
    over the limit would take twice its bytes.

    Example:
        >>> chunk_length(17, 1, limit_bytes=16)
        9
        >>> [chunk_length(mib << 20, 1) >> 20 for mib in (1, 8, 48, 1024)]
        [1, 2, 2, 16]
    """
    nbytes = length * itemsize
    chunks = max(-(-nbytes // limit_bytes), min(CHUNKS, nbytes // LEAST_CHUNK_BYTES))
    return max(1, -(-length // max(1, chunks)))


class ArrayWriter:
    """Writer that appends to one array; `finish` makes it durable and describes it.

    Args:
        path: directory of the array.
        dtype: dtype of its elements.
        length: number of elements to append. If `exact` is False, the most there can be: chunks
            then have a quarter of `CHUNK_BYTES`, as few may come, and the array is cut at the end.
        compression: `"zstd"` compresses chunks with it if that pays, elements of several bytes
            with their bytes apart. None does not compress.
        syncs: whether files are synced as they are written; if not, the caller must do it.
    """

    def __init__(
        self,
        path: AnyPath,
        dtype: str,
        length: int,
        *,
        exact: bool = True,
        compression: str | None = None,
        syncs: bool = True,
    ) -> None:
        self._path, self._dtype, self._length = path, dtype, length
        self._exact, self._compression = exact, compression
        # No cache: it would keep what was written, and so all memory that was passed as a view.
        self._context = context(0, syncs=syncs)
        self._is_in_memory = store_of(path).kvstore(path) is None
        if self._is_in_memory:
            self._context = ts.Context()  # a memory of its own
        self._item = numpy_dtype(dtype)
        if compression is not None and self._item.itemsize > 1:
            self._compression = names.BLOSC
        limit = CHUNK_BYTES if exact else CHUNK_BYTES // 4
        if exact:
            self._chunk = chunk_length(length, self._item.itemsize, limit)
        else:
            self._chunk = max(1, min(length, limit // self._item.itemsize))
        self._buffer = np.empty(self._chunk, self._item)
        self._filled = self._written = 0
        # Functions that wait until a chunk is on storage.
        self._pending: collections.deque[Callable[[], Any]] = collections.deque()
        # Sizes and checksums of chunks that were made in memory.
        self._made: list[tuple[int, int]] = []
        self._metadata: bytes | None = None
        # Created on storage while rows are encoded; if nothing may come, only when something does.
        self._store = self._create() if exact and length else None

    def _create(self) -> ts.Future[ts.TensorStore]:
        if self._length * self._item.itemsize < COMPRESSED_LEAST_BYTES:
            self._compression = None
        spec = spec_of(
            self._path, self._dtype, self._length, self._chunk, self._compression
        )
        return ts.open(spec, create=True, context=self._context)

    @property
    def position(self) -> int:
        """Number of elements appended so far, the offset of the next one."""
        return self._written + self._filled

    def append(self, values: np.ndarray, *, copies: bool = True) -> None:
        """Appends `values`, flattened; they must have the array's dtype.

        Args:
            values: values to append.
            copies: whether to copy them, so that they may be changed afterwards. If not, only a
                part of a chunk is copied; whole ones must not change until they are on storage.
        """
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.dtype != self._item:
            raise TypeError(f"{self._path.name}: got {flat.dtype}, not {self._item}")
        start = 0
        while start < flat.size:
            whole = flat[start : start + self._chunk]
            if not copies and not self._filled and whole.size == self._chunk:
                self._write(whole)
                start += whole.size
                continue
            count = min(flat.size - start, self._chunk - self._filled)
            self._buffer[self._filled : self._filled + count] = flat[
                start : start + count
            ]
            self._filled += count
            start += count
            if self._filled == self._chunk:
                self._flush()

    def drain(self) -> None:
        """Waits until the caller may change all that was appended without a copy."""
        while self._pending:
            self._pending.popleft()()

    def _flush(self) -> None:
        self._write(self._buffer[: self._filled])
        # A new buffer: TensorStore still refers to the old one.
        self._buffer = np.empty(self._chunk, self._item)
        self._filled = 0

    def _write(self, values: np.ndarray) -> None:
        if self._store is None:
            self._store = self._create()
        stop = self._written + values.size
        write = self._store.result()[self._written : stop].write(
            values, can_reference_source_data_indefinitely=True
        )
        if self._is_in_memory:
            write.result()
            self._pending.append(self._put(self._written // self._chunk))
        else:
            self._pending.append(write.commit.result)
        while len(self._pending) > _IN_FLIGHT:
            self._pending.popleft()()
        self._written = stop

    def _put(self, chunk: int) -> Callable[[], Any]:
        """Starts to store a chunk made in memory; returns a function that waits for that."""
        assert self._store is not None
        data = in_memory.take(self._store.result(), f"c/{chunk}")
        self._made.append((len(data), int.from_bytes(data[-4:], "little")))
        file = self._path / "c" / str(chunk)
        return in_memory.start(write_durably, file, data).result

    def end(self) -> None:
        """Starts to write the remaining elements; nothing may be appended after that."""
        if self._store is None and self._filled:
            self._length = self._chunk = self._filled
        if self._filled:
            self._flush()
        if self._is_in_memory and self._store is not None and self._metadata is None:
            self._shrink()
            self._metadata = in_memory.take(self._store.result(), "zarr.json")
            file = self._path / "zarr.json"
            put = in_memory.start(write_durably, file, self._metadata)
            self._pending.append(put.result)

    def _shrink(self) -> None:
        """Cuts the array to the number of elements that came, if that was not known before."""
        if self._written < self._length and not self._exact:
            assert self._store is not None
            self._store.result().resize(
                exclusive_max=[self._written],
                resize_metadata_only=True,
                shrink_only=True,
            ).result()

    def finish(self) -> ArrayEntry | None:
        """Waits until the whole array is on storage.

        Returns:
            Entry of the array for the process manifest; None if nothing was appended or expected,
            and so nothing was written.
        """
        self.end()
        if self._store is None:
            return None
        self.drain()
        if self._exact and self._written != self._length:
            raise RuntimeError(
                f"{self._path.name}: {self._written} of {self._length} were appended"
            )
        if not self._is_in_memory:
            self._shrink()
        self._store = None
        return self._describe()

    def stop(self) -> None:
        """Waits until nothing is being written, and frees the elements that were not."""
        if self._store is not None:
            self._store.exception()
        while self._pending:
            with contextlib.suppress(Exception):
                self._pending.popleft()()
        self._store, self._buffer = None, np.empty(0, self._item)

    def _describe(self) -> ArrayEntry:
        made, metadata = self._made, self._metadata
        if metadata is None:
            metadata = read_all(self._path / "zarr.json")
            for i in range(-(-self._written // self._chunk)):
                file = self._path / "c" / str(i)
                size = size_of(file) if self._compression is not None else 0
                made.append((size, stored_crc32c(self._path, i)))
        compressed = None
        if self._compression is not None:
            sizes = tuple(size for size, _ in made)
            compressed = Compressed(codec=self._compression, bytes=sizes)
        return ArrayEntry(
            dtype=self._dtype,
            length=self._written,
            chunk=self._chunk,
            metadata_bytes=len(metadata),
            metadata_sha256=hashlib.sha256(metadata).hexdigest(),
            crc32c=tuple(checksum for _, checksum in made),
            compressed=compressed,
        )


class ArrayReader:
    """Reader of slices of an array that a process manifest describes.

    It does not read `zarr.json`: the manifest, whose digest was checked, has all that is needed. So
    damage to `zarr.json` cannot change what is read.

    Args:
        path: directory of the array.
        entry: entry of the array in the process manifest.
        verify: whether each chunk's checksum is compared with the manifest's. TensorStore
            compares the chunk's data with its checksum in any case.
        kept: cache of the chunks that small slices are cut from; None for one of its own.
    """

    def __init__(
        self,
        path: AnyPath,
        entry: ArrayEntry,
        *,
        verify: bool = True,
        kept: KeptChunks | None = None,
    ) -> None:
        self._path, self._entry, self._verify = path, entry, verify
        self._kept = kept if kept is not None else KeptChunks()
        self._dtype = numpy_dtype(entry.dtype)
        # Chunks whose files were found with the right sizes.
        self._stored: set[int] = set()
        compression = entry.compressed.codec if entry.compressed else None
        spec = spec_of(path, entry.dtype, entry.length, entry.chunk, compression)
        # Reads and unpackings, by chunk, that were started before the chunk is asked for.
        self._ahead: dict[int, Future[bytes]] = {}
        self._unpacking: dict[int, Future[SparseRows]] = {}
        self._store: ts.TensorStore | None = None
        # Without a store, the spec of an array of one chunk, which decodes each file that was read.
        self._spec, self._is_packed = spec, compression == names.PACKED_ROWS
        if self._is_packed or store_of(path).kvstore(path) is None:
            spec["metadata"]["shape"] = [entry.chunk]
            return
        # Not in the spec, where `open=True` would override it, and read zarr.json.
        self._store = ts.open(
            spec, open=True, assume_metadata=True, context=self._kept.context
        ).result()

    @property
    def read_bytes(self) -> int:
        """Bytes of the chunks that were read so far, each counted once."""
        sizes = file_bytes(self._entry)
        return sum(sizes[chunk] for chunk in self._stored)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads and checks elements `start` to `stop`, which are read-only. Raises as `start`."""
        return self.start(start, stop)()

    def start(
        self, start: int, stop: int, out: np.ndarray | None = None
    ) -> Callable[[], np.ndarray]:
        """Starts to read elements `start` to `stop`.

        Args:
            start: index of the first element.
            stop: index after the last element.
            out: array `[stop - start]` of the array's dtype that takes them; None for an array of
                their own, which callers must not write to.

        Returns:
            Function that waits for the elements and returns them; raises IntegrityError as this.

        Raises:
            IntegrityError: if a chunk is missing, damaged or not the one of this array.
            FormatError: if the slice is not inside the array.
        """
        # A packed chunk has to be unpacked as a whole, which is done once.
        if self._is_packed:
            return self._start_unpacking(start, stop, out)
        if (stop - start) * self._dtype.itemsize > SMALL_READ_BYTES:
            return self._start(start, stop, out)
        found = self._small(start, stop)
        if out is not None:
            out[...] = found
        return lambda: found if out is None else out

    def start_rows(
        self, start: int, stop: int, width: int
    ) -> Callable[[], SparseRows] | None:
        """Starts to read elements `start` to `stop` as rows, without rows of zeros.

        Returns:
            As `start`; None if the array is not packed, or the slice or chunks cut a row.
        """
        if not self._is_packed or any(
            n % width for n in (start, stop, self._entry.chunk)
        ):
            return None
        self._unpack_ahead(start, stop)

        def result() -> SparseRows:
            found = list[SparseRows]()
            for chunk, low, high in self._cuts(start, stop):
                rows = self._kept.get(self, chunk, self.chunk)
                assert isinstance(rows, SparseRows)
                found.append(rows.between(low // width, high // width))
            return joined_rows(found, width)

        return result

    def _start_unpacking(
        self, start: int, stop: int, out: np.ndarray | None
    ) -> Callable[[], np.ndarray]:
        self._unpack_ahead(start, stop)

        def result() -> np.ndarray:
            target = np.empty(stop - start, self._dtype) if out is None else out
            for chunk, low, high in self._cuts(start, stop):
                rows = self._kept.get(self, chunk, self.chunk)
                assert isinstance(rows, SparseRows)
                at = chunk * self._entry.chunk - start
                rows.put_elements(low, high, target[at + low : at + high])
            return target

        return result

    def _unpack_ahead(self, start: int, stop: int) -> None:
        """Starts to unpack the chunks of some elements in other threads, within the limit."""
        self.check_stored(start, stop)
        nbytes = self._entry.chunk * self._dtype.itemsize
        for chunk, _, _ in self._cuts(start, stop):
            known = chunk in self._unpacking or self._kept.has(self, chunk)
            if not known and self._kept.has_room_ahead(nbytes):
                self._kept.ahead_bytes += nbytes
                if chunk not in self._ahead:
                    self._ahead[chunk] = in_memory.start(self._read_file, chunk)
                unpack = in_memory.start_unpacking
                self._unpacking[chunk] = unpack(self._unpacked, chunk)

    def _unpacked(self, chunk: int) -> SparseRows:
        """Reads and unpacks a packed chunk."""
        ahead = self._ahead.pop(chunk, None)
        data = self._read_file(chunk) if ahead is None else ahead.result()
        count = min(self._entry.chunk, self._entry.length - chunk * self._entry.chunk)

        def unpacked(data: bytes) -> SparseRows:
            return unpack_rows(in_memory.unchecked(data), count, self._dtype)

        return self._decoded(chunk, data, unpacked)

    def _cuts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Chunks with elements `start` to `stop`, and the start and stop of these in each."""
        size = self._entry.chunk
        for chunk in range(start // size, -(-stop // size) if start < stop else 0):
            yield chunk, max(0, start - chunk * size), min(size, stop - chunk * size)

    def _small(self, start: int, stop: int) -> np.ndarray:
        """Reads a few elements, cut from whole chunks that are kept."""
        self.check_stored(start, stop)
        found = list[np.ndarray]()
        for chunk, low, high in self._cuts(start, stop):
            values = self._kept.get(self, chunk, self.chunk)
            assert isinstance(values, np.ndarray)
            found.append(values[low:high])
        if len(found) == 1:
            return found[0]
        return np.concatenate([*found, np.empty(0, self._dtype)])

    def chunk(self, chunk: int) -> ChunkValues:
        """Reads a whole chunk from storage and checks it; any thread may call this.

        Raises:
            IntegrityError: if it is missing, damaged or not the one of this array.
        """
        unpacking = self._unpacking.pop(chunk, None)
        if unpacking is not None:
            self._kept.ahead_bytes -= self._entry.chunk * self._dtype.itemsize
            return unpacking.result()
        if self._is_packed:
            return self._unpacked(chunk)
        start = chunk * self._entry.chunk
        stop = min(start + self._entry.chunk, self._entry.length)
        return self._start(start, stop, None)()

    def read_ahead(self, limit_bytes: int) -> int:
        """Starts to read all chunks where each is a request, if they fit; returns their bytes."""
        sizes = file_bytes(self._entry)
        if self._store is not None or sum(sizes) > limit_bytes:
            return 0
        for chunk in range(len(sizes)):
            self._ahead[chunk] = in_memory.start(self._read_file, chunk)
        return sum(sizes)

    def check_stored(self, start: int, stop: int) -> None:
        """Checks that the chunks of elements `start` to `stop` are files of the right sizes.

        Raises:
            IntegrityError: if one is missing, is not a file, or has another size.
            FormatError: if the slice is not inside the array.
        """
        if not 0 <= start <= stop <= self._entry.length:
            where = os.fspath(self._path)
            raise errors.FormatError(
                f"{where}: elements {start} to {stop} are outside the array of"
                f" {self._entry.length}",
                path=where,
            )
        size = self._entry.chunk
        for chunk in range(start // size, -(-stop // size)):
            if chunk not in self._stored:
                # Elsewhere this takes a request for each chunk, so only large ones are checked.
                # Small ones cannot promise much, as each takes some bytes of the manifest.
                nbytes = size * self._dtype.itemsize
                if can(self._path).cheap_looks or nbytes > 4 * CHUNK_BYTES:
                    check_chunk_file(self._path, self._entry, chunk)
                self._stored.add(chunk)

    def _start(
        self, start: int, stop: int, out: np.ndarray | None
    ) -> Callable[[], np.ndarray]:
        self.check_stored(start, stop)
        size = self._entry.chunk
        chunks = range(start // size, (stop - 1) // size + 1)
        if self._store is None:
            return self._fetch(chunks, start, stop, out)
        if self._entry.compressed is not None:
            # A decompressor gets only bytes that were compared first.
            self._check(chunks)
        source = self._store[start:stop]
        future: ts.Future[Any] | ts.WriteFutures
        if out is None:
            future = source.read()
        else:
            target = ts.array(out, copy=False, write=True, context=context())
            future = target.write(source.translate_to[0])

        def result() -> np.ndarray:
            try:
                found = future.result()
            except ValueError as error:
                if not means_damage(error):
                    raise
                self._check(chunks)  # its error names the chunk
                text = str(error).splitlines()[0][:300]
                fact = f"is damaged in elements {start} to {stop}\n  {text}"
                raise damage(
                    self._path, fact, kind_of(error, "data_damaged")
                ) from error
            # Compared after the read, because a file may have been replaced before it.
            self._check(chunks)
            return np.asarray(found) if out is None else out

        return result

    def _fetch(
        self, chunks: range, start: int, stop: int, out: np.ndarray | None
    ) -> Callable[[], np.ndarray]:
        """Starts to read whole chunks; the result decodes them in memory."""
        size = self._entry.chunk
        fetched = [
            self._ahead.pop(chunk, None) or in_memory.start(self._read_file, chunk)
            for chunk in chunks
        ]

        def result() -> np.ndarray:
            target = np.empty(stop - start, self._dtype) if out is None else out
            for chunk, each in zip(chunks, fetched, strict=True):
                values = self._decoded(chunk, each.result(), self._elements)
                at = chunk * size - start
                part = values[max(0, -at) : stop - chunk * size]
                target[max(0, at) : max(0, at) + part.size] = part
            return target

        return result

    def _read_file(self, chunk: int) -> bytes:
        """Reads the file of a chunk, and checks its size."""
        file = self._path / "c" / str(chunk)
        with reading(file):
            data = read_all(file)
        expected = file_bytes(self._entry)[chunk]
        if len(data) != expected:
            fact = f"has another size\n  got {len(data)} bytes, expected {expected}"
            raise damage(file, fact)
        return data

    def _elements(self, data: bytes) -> np.ndarray:
        return in_memory.elements(self._spec, data)

    def _decoded(
        self, chunk: int, data: bytes, decode: Callable[[bytes], _Decoded]
    ) -> _Decoded:
        """Checks and decodes a chunk."""
        if self._verify:
            # A decompressor gets only bytes that were compared first.
            self._compare(chunk, int.from_bytes(data[-4:], "little"))
        try:
            return decode(data)
        except errors.CnrError:
            raise  # a package is missing, which does not mean damage
        except ValueError as error:
            text = str(error).splitlines()[0][:300]
            file = self._path / "c" / str(chunk)
            raise damage(file, f"is damaged\n  {text}", "data_damaged") from error

    def _check(self, chunks: range) -> None:
        """Compares the checksums of chunks with the manifest's, if `verify` is set."""
        for chunk in chunks if self._verify else ():
            self._compare(chunk, stored_crc32c(self._path, chunk))

    def _compare(self, chunk: int, got: int) -> None:
        """Compares the checksum of a chunk with the manifest's."""
        expected = self._entry.crc32c[chunk]
        if got != expected:
            raise errors.IntegrityError(
                f"chunk {chunk} of {os.fspath(self._path)} is not the one that was"
                f" saved\n  got crc32c {got:08x}, expected {expected:08x}",
                kind="foreign_chunk",
                path=os.fspath(self._path / "c" / str(chunk)),
            )
