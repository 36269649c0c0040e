"""Chunks of arrays made in memory, for stores that TensorStore does not reach.

TensorStore turns elements into files and files into elements, as elsewhere. Threads of this module
put the files on storage and get them, each by a request; others, one for each core, unpack rows.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts

# TensorStore's spec of a folder in memory, which belongs to the context that opens it.
FOLDER = {"driver": "memory"}
# Most requests in flight for the arrays of one process.
_REQUESTS = 16


def _new_pools() -> None:
    global _requests, _cores
    _requests = concurrent.futures.ThreadPoolExecutor(_REQUESTS, "cnr_requests")
    # More threads than cores would only take turns, as each holds the interpreter now and then.
    ours = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if ours else os.cpu_count()
    _cores = concurrent.futures.ThreadPoolExecutor(count, "cnr_unpacking")


_new_pools()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=_new_pools
    )  # a child has no threads of its parent


def start(work: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Starts a request in another thread; makes it in this one if the program is ending."""
    return _started(_requests, work, *args)


def start_unpacking(
    work: Callable[..., Any], *args: Any
) -> concurrent.futures.Future[Any]:
    """Starts work that keeps a core busy, as `start` does; it may wait for requests."""
    return _started(_cores, work, *args)


def _started(
    pool: concurrent.futures.ThreadPoolExecutor, work: Callable[..., Any], *args: Any
) -> concurrent.futures.Future[Any]:
    try:
        return pool.submit(work, *args)
    except RuntimeError:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def take(array: ts.TensorStore, key: str) -> bytes:
    """Takes a file of an array out of memory: returns its bytes, and deletes it there."""
    made: Any = array.kvstore
    data = made.read(key).result().value
    made.delete_range(ts.KvStore.KeyRange(key, f"{key}\0")).result()
    return bytes(data)


def elements(spec: dict[str, Any], data: bytes) -> np.ndarray:
    """Elements of a chunk, decoded from its file.

    Args:
        spec: spec of an array in memory that has only this chunk.
        data: bytes of the file.

    Raises:
        ValueError: from TensorStore, if the data is damaged.
    """
    own = ts.Context()
    ts.KvStore.open(FOLDER, context=own).result().write("c/0", data).result()
    opened = ts.open(spec, open=True, assume_metadata=True, context=own).result()
    return np.asarray(opened.read().result())


def checked(data: bytes) -> bytes:
    """The given bytes, followed by their crc32c."""
    made = ts.open(_checked_spec(len(data)), create=True, context=ts.Context()).result()
    made.write(np.frombuffer(data, np.uint8)).result()
    return take(made, "c/0")


def unchecked(data: bytes) -> np.ndarray:
    """The bytes that `checked` was given, as uint8.

    Raises:
        ValueError: from TensorStore, if the data is damaged.
    """
    return elements(_checked_spec(len(data) - 4), data)


def _checked_spec(size: int) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": [size]}}
    metadata = {
        "shape": [size],
        "data_type": "uint8",
        "chunk_grid": grid,
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    return {
        "driver": "zarr3",
        "kvstore": FOLDER,
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
