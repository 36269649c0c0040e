"""One-dimensional zarr v3 arrays with crc32c, as `ArrayWriter` and `ArrayReader` open them.

The checksum is the outermost codec: where chunks are compressed it is that of the compressed
bytes, so nothing is handed to a decompressor that was not compared first.

The checksum that the `crc32c` codec puts at the end of each chunk is read back and named in the
process manifest: so a reader can tell a whole chunk of another array, place or run from the right
one.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.tiles import ArrayEntry
from cnr_jax.repository.checked import check_size, reading
from cnr_jax.repository.files import AnyPath, kvstore_spec

# Bytes of a chunk at most. 16 MiB chunks write at disk speed, and a read of part of a
# tile costs at most one chunk more than the part; 1 MiB chunks are 2 to 3 times slower.
CHUNK_BYTES = 16 << 20
# Least bytes of an array that is compressed. What says so takes about 100 bytes of metadata and
# manifest, and zstd seldom gains 10 % of codes.
COMPRESSED_LEAST_BYTES = 1 << 10
# Level 1 takes in 0.6 GB/s a core of codes and gives out 0.55; `tests/benchmarks/entropy.py` has
# others.
_CODECS = {names.ZSTD: {"name": "zstd", "configuration": {"level": 1}}}
# Bytes that zstd makes of one at most: a block of 128 KiB takes 4.
_ZSTD_MOST = 1 << 15
# What zarr v3 calls zero where it is not a number.
_ZEROS = {"bool": False, "complex64": [0, 0], "complex128": [0, 0]}


@functools.cache
def context(cached: bool = True) -> ts.Context:
    """Limits of our own, so that a save does not take all cores from training."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 8},
            "data_copy_concurrency": {"limit": 2},
            # The directory is private until Orbax renames it: no other writer exists.
            "file_io_locking": {"mode": "none"},
            # Neighbouring shards read the two halves of one chunk.
            "cache_pool": {"total_bytes_limit": (128 << 20) if cached else 0},
        }
    )


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a stored dtype name, bfloat16 and float8 included.

    Raises:
        FormatError: if there is no such dtype.
    """
    try:
        return jnp.dtype(name)
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


def _metadata(
    dtype: str, length: int, chunk: int, compression: str | None
) -> dict[str, Any]:
    codecs = [_CODECS[compression]] if compression is not None else []
    return {
        "shape": [length],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _ZEROS.get(dtype, 0),
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            *codecs,
            {"name": "crc32c"},
        ],
    }


def spec_of(
    path: AnyPath, dtype: str, length: int, chunk: int, compression: str | None = None
) -> dict[str, Any]:
    """What TensorStore has to know of an array to open it."""
    return {
        "driver": "zarr3",
        "kvstore": kvstore_spec(path),
        "metadata": _metadata(dtype, length, chunk, compression),
        # A missing chunk is an error, never a chunk of zeros; so zeros must be written.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


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
