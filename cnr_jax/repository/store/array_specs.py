"""Specs of arrays, from which TensorStore makes or opens them."""

from __future__ import annotations

from typing import Any

from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, in_memory, store_of
from cnr_jax.repository.store.checked import numpy_dtype

# Level 1 of zstd compresses 0.6 GB/s of codes a core, and decompresses 0.55 GB/s;
# `tests/benchmarks/entropy.py` measures other levels. The high bytes of numbers repeat, so they are
# packed apart from the low ones. float32 rows then take 0.84 of their bytes instead of 0.93, and
# are read some times faster.
_PLANES = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle"}
# Bytes of a block that is packed so. With 32 KiB, blosc's own choice, nothing is gained.
_PLANES_BLOCK_BYTES = 1 << 20
# What zarr v3 calls zero where it is not a number.
_ZEROS = {"bool": False, "complex64": [0, 0], "complex128": [0, 0]}


def spec_of(
    path: AnyPath, dtype: str, length: int, chunk: int, compression: str | None = None
) -> dict[str, Any]:
    """Spec by which TensorStore makes or opens an array.

    Raises:
        OptionError: if TensorStore does not take the path.
    """
    grid = {"name": "regular", "configuration": {"chunk_shape": [chunk]}}
    metadata = {
        "shape": [length],
        "data_type": dtype,
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "fill_value": _ZEROS.get(dtype, 0),
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            *([_codec(compression, dtype)] if compression is not None else []),
            {"name": "crc32c"},
        ],
    }
    return {
        "driver": "zarr3",
        "kvstore": store_of(path).kvstore(path) or in_memory.FOLDER,
        "metadata": metadata,
        # A missing chunk is an error, never a chunk of zeros; so zeros must be written.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def _codec(compression: str, dtype: str) -> dict[str, Any]:
    """Zarr codec that compresses the chunks."""
    if compression == names.ZSTD:
        return {"name": "zstd", "configuration": {"level": 1}}
    if compression == names.PACKED_ROWS:
        # TensorStore does not know this codec: see packed_arrays.py.
        return {"name": "cnr_jax.packed_rows", "configuration": {}}
    sizes = {
        "typesize": numpy_dtype(dtype).itemsize,
        "blocksize": _PLANES_BLOCK_BYTES,
    }
    return {"name": "blosc", "configuration": _PLANES | sizes}
