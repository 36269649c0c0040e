"""Entropy stages that TensorStore brings, as zarr v3 codecs, and what each does to given bytes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np
import tensorstore as ts

# What a stage must gain of all bytes of a save, and how fast it must be, to be worth an option.
LEAST_GAIN = 0.05
LEAST_MB_PER_SEC = 500.0

Stage = dict[str, Any]


def _blosc(name: str, level: int, shuffle: str, itemsize: int) -> Stage:
    sizes = {"typesize": itemsize, "blocksize": 0}
    chosen = {"cname": name, "clevel": level, "shuffle": shuffle}
    return {"name": "blosc", "configuration": {**chosen, **sizes}}


def stages(itemsize: int) -> dict[str, Stage]:
    """All stages for elements of `itemsize` bytes, by name."""
    found: dict[str, Stage] = {
        "zstd 1": {"name": "zstd", "configuration": {"level": 1}},
        "zstd 3": {"name": "zstd", "configuration": {"level": 3}},
        "gzip 1": {"name": "gzip", "configuration": {"level": 1}},
        "blosc lz4 bits": _blosc("lz4", 5, "bitshuffle", itemsize),
        "blosc zstd 1": _blosc("zstd", 1, "noshuffle", itemsize),
    }
    if itemsize > 1:
        found["blosc zstd 1 bytes"] = _blosc("zstd", 1, "shuffle", itemsize)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """What a stage made of an array.

    Attributes:
        share: bytes after it / bytes before.
        encode_mb_per_sec: bytes before, by seconds of one core; 0: not measured.
        decode_mb_per_sec: the same of reading it back.
    """

    share: float
    encode_mb_per_sec: float
    decode_mb_per_sec: float

    def gain(self, part: float) -> float:
        """Share of a whole that is gained, of which these bytes are `part`."""
        return (1 - self.share) * part

    def pays(self, gain: float) -> bool:
        """Whether a gain of the whole is enough, and came fast enough both ways."""
        rate = min(self.encode_mb_per_sec, self.decode_mb_per_sec)
        return gain >= LEAST_GAIN and rate > LEAST_MB_PER_SEC


def apply(stage: Stage, values: np.ndarray, turns: int) -> Staged:
    """Stores values as one chunk through a stage, in memory, and reads them back.

    Seconds are CPU seconds of the whole process, so other load weighs little on them; what
    TensorStore itself does for a chunk is in them too.

    Args:
        stage: one of `stages`.
        values: of any dtype that zarr knows, [n]; not empty.
        turns: repetitions; the median is taken.

    Raises:
        RuntimeError: if other values come back.
    """
    times: list[tuple[float, float]] = []
    size = 0
    for _ in range(turns):
        store = _store(stage, values)
        start = time.process_time()
        store.write(values, can_reference_source_data_indefinitely=True).result()
        middle = time.process_time()
        back = store.read().result()
        times.append((middle - start, time.process_time() - middle))
        if not np.array_equal(back.view(np.uint8), values.view(np.uint8)):
            raise RuntimeError(f"{stage} does not give back what it was given")
        size = _stored_bytes(store)
    rates = (
        values.nbytes / 1e6 / statistics.median(secs)
        for secs in zip(*times, strict=True)
    )
    return Staged(size / values.nbytes, *rates)


def _stored_bytes(store: ts.TensorStore) -> int:
    """Bytes of its chunk."""
    kept = store.kvstore
    assert kept is not None
    chunks = [key for key in kept.list().result() if key.startswith(b"c")]
    return sum(len(kept.read(key).result().value) for key in chunks)


def _store(stage: Stage, values: np.ndarray) -> ts.TensorStore:
    """An array of one chunk in a memory of its own; nothing is cached, one thread works."""
    limits = {
        "data_copy_concurrency": {"limit": 1},
        "cache_pool": {"total_bytes_limit": 0},
    }
    endian = {"endian": "little"} if values.dtype.itemsize > 1 else {}
    shape = [len(values)]
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://",
        "metadata": {
            "shape": shape,
            "data_type": values.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": endian}, stage],
        },
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, create=True, context=ts.Context(limits)).result()


def entropy_bits(codes: np.ndarray, bits: int) -> float:
    """Order-0 entropy in bits for each code: the least any code-by-code coder can take."""
    counts = np.bincount(codes.ravel(), minlength=1 << bits)
    shares = counts[counts > 0] / codes.size
    return float(-(shares * np.log2(shares)).sum()) + 0.0
