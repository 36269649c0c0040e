"""Hashing rows in host memory chunk by chunk: what differs is found, whichever way is taken."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cnr_jax.rows.fingerprints import chunks as module
from cnr_jax.rows.fingerprints.chunks import hash_chunks
from cnr_jax.rows.fingerprints.hash import differ_on_host, hash_on_host
from cnr_jax.rows.fingerprints.tiles import Hashed, settled

SEED = np.array([3, 4], np.uint32)
# Rows of 18 bytes, with a slot: chunks of 512 rows are asked for what differs, 16 rows at once
# are hashed again.
DIM = 7
KINDS = [((DIM,), jnp.bfloat16), ((), jnp.float32)]


@pytest.fixture
def small_chunks(tiny_limits: Any) -> None:
    tiny_limits(
        hashed_chunk_bytes=512 * (DIM * 2 + 4),
        hashed_again_rows=16,
        hashed_many_rows=512,
    )


def leaves(rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    return [
        rng.random((rows, DIM), np.float32).astype(jnp.bfloat16),
        rng.random(rows, np.float32),
    ]


def look(
    arrays: list[np.ndarray], skipped: int, before: list[np.ndarray] | None
) -> Hashed:
    rows = len(arrays[0]) - 2 * skipped
    parts = [(jnp.asarray(x), skipped, rows) for x in arrays]
    return hash_chunks(parts, SEED, before, tagged=False)


def true_hashes(arrays: list[np.ndarray], skipped: int) -> np.ndarray:
    own = [x[skipped : len(x) - skipped] for x in arrays]
    return np.array(hash_on_host(own, jnp.asarray(SEED), tagged=False)[0])


# Nothing, single rows, some (chunk borders among them), much at the front, all, and again few.
CHANGES: list[Any] = [
    [],
    [0],
    [511, 512, 1023, 1024, 1500],
    np.arange(0, 512, 9),
    np.arange(700),
    slice(None),
    np.arange(0, 1501, 100),
]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("skipped", [0, 5])
def test_rows_that_differ_are_found_and_all_hashes_kept(skipped: int) -> None:
    arrays = leaves(1501 + 2 * skipped)
    kept = settled(look(arrays, skipped, None), None).hashes
    assert isinstance(kept, list) and [len(x) for x in kept] == [512, 512, 477]
    for number, change in enumerate(CHANGES):
        leaf = number % 2
        rows = np.arange(1501)[change] + skipped
        arrays[leaf] = arrays[leaf].copy()
        arrays[leaf][rows] = -arrays[leaf][rows]
        found = look(arrays, skipped, kept)
        assert isinstance(found.differ, list)
        assert np.concatenate(found.differ).tolist() == (rows - skipped).tolist()
        kept = settled(found, kept).hashes
        assert np.array_equal(np.concatenate(kept), true_hashes(arrays, skipped))


@pytest.mark.usefixtures("small_chunks")
def test_a_look_that_is_not_kept_changes_nothing() -> None:
    arrays = leaves(1501)
    kept = settled(look(arrays, 0, None), None).hashes
    assert isinstance(kept, list)
    copies = [chunk.copy() for chunk in kept]
    look([-x for x in arrays], 0, kept)
    assert all(np.array_equal(x, y) for x, y in zip(kept, copies, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [1, 300, 512, 1501, 5000])
def test_a_look_compiles_nothing_after_the_warm_up(rows: int) -> None:
    for program in PROGRAMS:
        program.clear_cache()
    for program, args in module.chunk_programs(KINDS, rows, tagged=False):
        program(*args)
    compiled = [f._cache_size() for f in PROGRAMS]
    arrays = leaves(rows)
    kept = settled(look(arrays, 0, None), None).hashes
    for change in ([0], slice(None)):
        arrays[0] = arrays[0].copy()
        arrays[0][change] = -arrays[0][change]
        assert isinstance(kept, list)
        kept = settled(look(arrays, 0, kept), kept).hashes
    assert [f._cache_size() for f in PROGRAMS] == compiled


def test_hashes_that_compare_are_those_that_are_returned() -> None:
    arrays, seed = leaves(600), jnp.asarray(SEED)
    hashes = np.asarray(hash_on_host(arrays, seed, tagged=False)[0])
    differ = differ_on_host(arrays, seed, hashes ^ np.uint64(1 << 40))
    assert np.asarray(differ).all()
    assert not np.asarray(differ_on_host(arrays, seed, hashes)).any()


def _programs() -> list[Any]:
    from cnr_jax.rows.fingerprints import hash as hashes

    return [hashes._hash_views, hashes._differ_views]


PROGRAMS = _programs()
