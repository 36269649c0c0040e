"""One-dimensional zarr v3 arrays with crc32c, as `ArrayWriter` and `ArrayReader` open them.

The checksum is the outermost codec: where chunks are compressed it is that of the compressed
bytes, so nothing is handed to a decompressor that was not compared first.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import tensorstore as ts

from cnr_jax.format import names
from cnr_jax.repository.files import AnyPath, is_local

# Least bytes of an array that is compressed. What says so takes about 100 bytes of metadata and
# manifest, and zstd seldom gains 10 % of codes.
COMPRESSED_LEAST_BYTES = 1 << 10
# Level 1 takes in 0.6 GB/s a core of codes and gives out 0.55; `tests/benchmarks/entropy.py` has
# others.
_CODECS = {names.ZSTD: {"name": "zstd", "configuration": {"level": 1}}}
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


def spec_of(
    path: AnyPath, dtype: str, length: int, chunk: int, compression: str | None = None
) -> dict[str, Any]:
    """What TensorStore has to know of an array to open it."""
    where = os.fspath(path)
    store: str | dict[str, str] = where if where.endswith("/") else f"{where}/"
    if is_local(path):
        store = {"driver": "file", "path": f"{os.path.abspath(where)}/"}
    grid = {"name": "regular", "configuration": {"chunk_shape": [chunk]}}
    metadata = {
        "shape": [length],
        "data_type": dtype,
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _ZEROS.get(dtype, 0),
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            *([_CODECS[compression]] if compression is not None else []),
            {"name": "crc32c"},
        ],
    }
    return {
        "driver": "zarr3",
        "kvstore": store,
        "metadata": metadata,
        # A missing chunk is an error, never a chunk of zeros; so zeros must be written.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
