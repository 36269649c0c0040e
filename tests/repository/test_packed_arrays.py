"""Arrays of packed rows: what is asked for is unpacked ahead, and damage is told by who waits."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_jax import errors
from cnr_jax.repository.store import arrays, in_memory
from cnr_jax.repository.store.arrays import ArrayReader
from cnr_jax.repository.store.kept_chunks import KeptChunks
from cnr_jax.repository.store.packed_arrays import PackedWriter

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")

WIDTH = 8


def stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: KeptChunks
) -> tuple[np.ndarray, ArrayReader]:
    """Rows in 5 chunks."""
    monkeypatch.setattr(arrays, "LEAST_CHUNK_BYTES", 1000)
    rows = np.random.default_rng(0).integers(-9, 9, (625, WIDTH), np.int8)
    rows[::3] = 0
    writer = PackedWriter(tmp_path / "array", "int8", rows.size, WIDTH)
    writer.append(rows)
    entry = writer.finish()
    assert len(entry.crc32c) == 5
    return rows.reshape(-1), ArrayReader(tmp_path / "array", entry, kept=kept)


def test_chunks_are_unpacked_ahead_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptChunks(unpacked_bytes=2100)
    values, reader = stored(tmp_path, monkeypatch, kept)
    cuts = [0, 10, 999, 1001, 2500, 2501, len(values)]
    ends = [reader.start(a, b) for a, b in itertools.pairwise(cuts)]
    assert 0 < kept.ahead_bytes <= 2100
    for (a, b), end in zip(itertools.pairwise(cuts), ends, strict=True):
        np.testing.assert_array_equal(end(), values[a:b])
    out = np.empty(1500, np.int8)
    assert reader.start(1000, 2500, out)() is out
    np.testing.assert_array_equal(out, values[1000:2500])
    assert kept.ahead_bytes == 0
    assert reader.start(7, 7)().size == 0


def test_no_more_chunks_are_unpacked_at_once_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pool in ("_requests", "_cores"):
        monkeypatch.setattr(in_memory, pool, getattr(in_memory, pool))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    in_memory._new_pools()
    values, reader = stored(tmp_path, monkeypatch, KeptChunks())
    unpack, busy, most, lock = arrays.unpack_rows, 0, 0, threading.Lock()

    def counted(*args: Any) -> Any:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.05)
        try:
            return unpack(*args)
        finally:
            with lock:
                busy -= 1

    monkeypatch.setattr(arrays, "unpack_rows", counted)
    end = reader.start(0, len(values))
    while reader._unpacking and not all(w.done() for w in reader._unpacking.values()):
        time.sleep(0.01)  # so that this thread unpacks none
    np.testing.assert_array_equal(end(), values)
    assert most == 1


def test_a_chunk_that_is_damaged_is_told_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptChunks(unpacked_bytes=2100)
    values, reader = stored(tmp_path, monkeypatch, kept)
    file = tmp_path / "array" / "c" / "1"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ends = [reader.start(a, a + 1000) for a in (0, 1000)]
    np.testing.assert_array_equal(ends[0](), values[:1000])
    with pytest.raises(errors.IntegrityError, match="is damaged"):
        ends[1]()
    assert kept.ahead_bytes == 0
