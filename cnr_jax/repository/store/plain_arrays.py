"""Arrays of any shape in zarr v3, written block by block for readers other than this library."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from cnr_jax.repository.store.kept_chunks import context

# Blocks of one array in flight: one is written while the next is decoded.
_IN_FLIGHT = 1


@functools.cache
def zarr_holds(dtype: np.dtype) -> bool:
    """Whether TensorStore can store a dtype in zarr v3.

    Example:
        >>> zarr_holds(np.dtype("bfloat16")), zarr_holds(np.dtype("datetime64[s]"))
        (True, False)
    """
    try:
        ts.open(_spec("memory://", (1,), dtype, 1, {}), create=True).result()
    except (ValueError, TypeError):
        return False
    return True


def write_array(
    path: Path,
    shape: Sequence[int],
    dtype: np.dtype,
    blocks: Iterable[np.ndarray],
    chunk_rows: int,
    attributes: Mapping[str, Any],
    axes: Sequence[str] | None = None,
) -> None:
    """Writes an array as a folder of its own, which the caller has to sync.

    Args:
        path: path of the folder.
        shape: shape of the array.
        dtype: dtype of the array.
        blocks: values in the order of the first axis, `chunk_rows` entries of it in each block but
            the last. An array without axes is a single block.
        chunk_rows: entries of the first axis in a chunk.
        attributes: attributes to store with the array.
        axes: names of its axes; None if they have none.

    Once this returns or raises, nothing is written any more, so that the folder can be removed.

    Raises:
        ValueError: from TensorStore, if storage does not take the array.
    """
    where = {"driver": "file", "path": f"{path}/"}
    spec = _spec(where, shape, dtype, chunk_rows, attributes)
    if axes is not None:
        spec["metadata"]["dimension_names"] = list(axes)
    own = context(cache_bytes=0, syncs=False)
    store = ts.open(spec, create=True, context=own).result()
    pending: collections.deque[ts.WriteFutures] = collections.deque()
    start = 0
    try:
        for block in blocks:
            target = store[start : start + len(block)] if shape else store
            # Nobody changes a block after it was yielded.
            writing = target.write(block, can_reference_source_data_indefinitely=True)
            pending.append(writing)
            start += len(block) if shape else 0
            while len(pending) > _IN_FLIGHT:
                pending[0].result()
                pending.popleft()
        for writing in pending:
            writing.result()
    except BaseException:
        # Pending writes would put files into a folder that the caller is removing.
        for writing in pending:
            with contextlib.suppress(Exception):
                writing.result()
        raise


def _spec(
    kvstore: Any,
    shape: Sequence[int],
    dtype: np.dtype,
    chunk_rows: int,
    attributes: Mapping[str, Any],
) -> dict[str, Any]:
    rows = [max(1, min(chunk_rows, shape[0]))] if shape else []
    chunk = [*rows, *(max(1, size) for size in shape[1:])]
    return {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "attributes": dict(attributes),
        },
        # Otherwise TensorStore leaves out chunks of zeros, and a lost chunk looks like one.
        "store_data_equal_to_fill_value": True,
    }
