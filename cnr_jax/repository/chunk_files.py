"""The files of an array's chunks: how large they are, and the checksums they end with.

The checksum that the `crc32c` codec puts at the end of each chunk is read back and named in the
process manifest: so a reader can tell a whole chunk of another array, place or run from the right
one.
"""

from __future__ import annotations

import os

# Has numpy know bfloat16 and float8 by name.
import ml_dtypes  # noqa: F401
import numpy as np

from cnr_jax import errors
from cnr_jax.format.tiles import ArrayEntry
from cnr_jax.repository.checked import check_size, reading
from cnr_jax.repository.files import AnyPath

# Bytes of a chunk at most. 16 MiB chunks write at disk speed, and a read of part of a
# tile costs at most one chunk more than the part; 1 MiB chunks are 2 to 3 times slower.
CHUNK_BYTES = 16 << 20
# Bytes that zstd makes of one at most: a block of 128 KiB takes 4.
_ZSTD_MOST = 1 << 15


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a stored dtype name, bfloat16 and float8 included.

    Raises:
        FormatError: if there is no such dtype.
    """
    try:
        return np.dtype(name)
    except TypeError as error:
        raise errors.FormatError(f"dtype {name!r} is not known") from error


def chunk_length(length: int, itemsize: int, limit_bytes: int = CHUNK_BYTES) -> int:
    """Elements of a chunk: chunks of equal size, padded by less than an element each.

    zarr stores the last chunk of a regular grid whole; with a fixed chunk size an array just
    over the limit would take twice its bytes.

    Example:
        >>> chunk_length(17, 1, limit_bytes=16)
        9
    """
    chunks = -(-length * itemsize // limit_bytes)
    return max(1, -(-length // max(1, chunks)))


def file_bytes(entry: ArrayEntry) -> tuple[int, ...]:
    """Size of each chunk's file, as the manifest says."""
    if entry.compressed is not None:
        return entry.compressed.bytes
    size = entry.chunk * numpy_dtype(entry.dtype).itemsize + 4
    return (size,) * len(entry.crc32c)


def check_chunk_file(path: AnyPath, entry: ArrayEntry, chunk: int) -> None:
    """Checks that a chunk is a file of a size from which what it is to hold can come.

    TensorStore would wait for a pipe for ever. And a manifest of a few bytes may promise rows of
    any size: before memory is taken for them, they must be there.

    Raises:
        IntegrityError: if it is not.
    """
    file = path / "c" / str(chunk)
    elements = entry.chunk * numpy_dtype(entry.dtype).itemsize
    if entry.compressed is None:
        check_size(file, elements + 4)
        return
    stored = entry.compressed.bytes[chunk]
    check_size(file, stored)
    if elements > stored * _ZSTD_MOST:
        raise errors.IntegrityError(
            f"{os.fspath(file)} cannot hold its chunk\n"
            f"  got {stored} bytes for {elements:,}, of which zstd makes at most"
            f" {stored * _ZSTD_MOST:,}",
            kind="file_damaged",
            path=os.fspath(file),
        )


def stored_crc32c(path: AnyPath, chunk: int) -> int:
    """The checksum at the end of a chunk's file.

    Raises:
        IntegrityError: if the file is missing or too short to hold one.
    """
    file = path / "c" / str(chunk)
    with reading(file), file.open("rb") as stream:
        if stream.seek(0, os.SEEK_END) < 4:
            raise errors.IntegrityError(
                f"{os.fspath(file)} is cut short",
                kind="file_damaged",
                path=os.fspath(file),
            )
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")
