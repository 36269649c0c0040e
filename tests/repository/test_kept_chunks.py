"""Chunks that are kept: read once while there is room, the longest unused leaves first."""

from __future__ import annotations

import numpy as np
import pytest

from cnr_jax.repository.store.kept_chunks import KeptChunks


def test_chunks_are_read_once_until_there_is_no_room() -> None:
    reads: list[int] = []

    def read(chunk: int) -> np.ndarray:
        reads.append(chunk)
        return np.full(10, chunk, np.uint8)

    kept = KeptChunks(limit_bytes=20)
    for chunk in (0, 1, 0, 2, 0, 1):
        assert (kept.get("array", chunk, read) == chunk).all()
    assert reads == [0, 1, 2, 1]


def test_chunks_of_two_arrays_are_not_confused_and_cannot_be_written_to() -> None:
    kept = KeptChunks()
    first = kept.get("one", 0, lambda _: np.zeros(3))
    assert kept.get("other", 0, lambda _: np.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_a_chunk_larger_than_the_limit_is_given_all_the_same() -> None:
    kept = KeptChunks(limit_bytes=1)
    assert kept.get("array", 0, lambda _: np.arange(9)).tolist() == list(range(9))
