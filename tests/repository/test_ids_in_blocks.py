"""Row ids that are read block by block are those that are read at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cnr_jax import errors
from cnr_jax.format.rowids import encode_rowids
from cnr_jax.format.tiles import RowIds
from cnr_jax.repository import ids_in_blocks
from cnr_jax.repository.ids_in_blocks import IdsInBlocks

BEFORE = 7  # bytes of other row ids in the array


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_in_blocks, "READ_BYTES", 10)


def blocked(positions: np.ndarray, rows: int, **wrong: Any) -> IdsInBlocks:
    form, data = encode_rowids(positions, rows)
    noted = {"form": form, "bytes": len(data), "count": len(positions), **wrong}
    ids = RowIds(offset=BEFORE, **noted)
    stored = np.concatenate([np.full(BEFORE, 0xFF, np.uint8), data, [0x7F] * 20])
    return IdsInBlocks(ids, rows, lambda start, stop: stored[start:stop].astype("u1"))


@pytest.mark.parametrize("seed", range(30))
def test_blocks_have_the_ids_of_their_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([9, 100, 3_000, 100_000]))
    share = rng.choice([0.001, 0.02, 0.1, 0.5])
    positions = np.flatnonzero(rng.random(rows) < share)
    if not 0 < len(positions) < rows:
        positions = np.array([rows // 2])
    ids = blocked(positions, rows)
    some = np.unique(rng.integers(0, rows + 1, 7))
    edges = [0, *some[(some > 0) & (some < rows)].tolist(), rows]
    in_order = [*itertools.pairwise(edges)]
    # A block is asked for by several leaves, some are left out, and others come once more.
    asked = [each for each in in_order for _ in range(rng.integers(0, 3))]
    asked += [in_order[int(i)] for i in rng.integers(0, len(in_order), 5)]
    for first, last in asked:
        before, found = ids.between(first, last)
        start, stop = np.searchsorted(positions, (first, last))
        assert before == start
        np.testing.assert_array_equal(found, positions[start:stop])
        assert found.dtype == np.int64


@pytest.mark.parametrize("step", [3, 400])
def test_ids_other_than_the_manifest_says_are_refused(step: int) -> None:
    rows = 5_000
    positions = np.arange(0, rows, step)
    for wrong in (len(positions) - 1, len(positions) + 1):
        ids = blocked(positions, rows, count=wrong)
        ids.between(0, rows // 2)
        with pytest.raises(errors.FormatError, match=f"expected {wrong:,}, got"):
            ids.between(rows // 2, rows)


def test_bytes_that_are_no_ids_are_refused() -> None:
    rows = 5_000
    few, many = np.arange(0, rows, 400), np.arange(0, rows, 3)
    size = len(encode_rowids(few, rows)[1])
    with pytest.raises(errors.FormatError, match="past the end of the tile"):
        blocked(few, rows, bytes=size + 20).between(0, rows)
    # More ids come after that of the last row, in bytes that are read for the last block alone.
    ids = blocked(np.arange(0, 901, 100), 901, bytes=19)
    ids.between(0, 900)
    with pytest.raises(errors.FormatError, match="cannot hold"):
        ids.between(900, 901)
    with pytest.raises(errors.FormatError, match="no bit for each row"):
        blocked(many, rows, bytes=rows // 8 - 1).between(0, 8)
    ids = IdsInBlocks(
        RowIds(form="bitmap", offset=0, bytes=rows // 8, count=len(many)),
        rows,
        lambda start, stop: np.zeros(stop - start, np.int8),
    )
    with pytest.raises(errors.FormatError, match="expected uint8"):
        ids.between(0, 8)
    of_more = np.arange(0, rows + 3, 3)  # as many bytes
    ids = IdsInBlocks(
        RowIds(form="bitmap", offset=0, bytes=rows // 8 + 1, count=len(of_more)),
        rows + 1,
        lambda start, stop: encode_rowids(of_more, rows + 8)[1][start:stop],
    )
    with pytest.raises(errors.FormatError, match="past the end of a tile"):
        ids.between(0, rows + 1)
    with pytest.raises(errors.FormatError, match="gaps in bytes"):
        blocked(few, rows, bytes=size - 1).between(0, rows)
