"""Dithered codes: right in the mean, bounded, and the same as long as a row and its key are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cnr_jax.rows.codecs import Asymmetric, Dithering, Greedy, Symmetric, make_codec
from cnr_jax.rows.codecs.dither import dither_seed, row_keys, thresholds
from tests.conftest import each_of

DIM, ROWS = 16, 512
LINEAGE = "0" * 31 + "1"
CODECS = [
    *(Asymmetric(bits=bits, refits=0) for bits in (2, 8)),
    Asymmetric(bits=4, refits=0),
    Symmetric(bits=4),
]


def keys_of(seed: int, rows: int = ROWS) -> jax.Array:
    lineage = f"{seed:032x}"
    return jnp.asarray(row_keys(dither_seed(lineage, "user"), np.arange(rows)))


def make_rows(seed: int = 0, rows: int = ROWS, dim: int = DIM) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, dim)) * 0.1


@functools.partial(jax.jit, static_argnums=0)
def encoded(codec: Any, rows: jax.Array, keys: jax.Array) -> Any:
    return codec.encode(rows, keys)


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(codec: Any, rows: jax.Array, *keys: jax.Array) -> Any:
    stored = codec.encode(rows, *keys)
    back = codec.decode(stored.parts, dim=rows.shape[1], dtype=rows.dtype)
    return back, stored.escaped


def read(codec: Any, rows: jax.Array, *keys: jax.Array) -> np.ndarray:
    back, escaped = there_and_back(codec, rows, *keys)
    assert not np.asarray(escaped).any()
    return np.asarray(back)


def read_all(codec: Any, rows: jax.Array, seeds: int) -> np.ndarray:
    """What rows read as by the keys of so many lineages."""
    keys = jnp.stack([keys_of(seed, len(rows)) for seed in range(seeds)])
    many = jax.jit(jax.vmap(functools.partial(there_and_back, codec, rows)))
    back, escaped = many(keys)
    assert not np.asarray(escaped).any()
    return np.asarray(back)


def step_of(codec: Any, rows: np.ndarray) -> np.ndarray:
    low, high = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
    if isinstance(codec, Symmetric):
        high = np.maximum(-low, high)
        low = -high
    return (high - low) / (2**codec.bits - 1)


def test_thresholds_are_even_for_each_element_and_independent_between_rows() -> None:
    found = np.stack([thresholds(keys_of(seed), DIM) for seed in range(400)])
    assert found.min() >= 0 and found.max() < 1
    # Of 400 draws for each of 8,192 elements: the mean and its square, and pairs of rows.
    mean, square = found.mean(0), (found**2).mean(0)
    assert np.abs(mean - 1 / 2).max() < 6 * np.sqrt(1 / 12 / 400)
    assert np.abs(square - 1 / 3).max() < 6 * np.sqrt(4 / 45 / 400)
    centred = found - 0.5
    pairs = (centred[:, :-1] * centred[:, 1:]).mean(0)
    assert np.abs(pairs).max() < 6 / 12 / np.sqrt(400)
    shares = np.histogram(found, 64, (0, 1))[0] / found.size
    assert np.abs(shares * 64 - 1).max() < 0.01


def test_keys_differ_by_lineage_table_column_and_row() -> None:
    seeds = {
        int(dither_seed(lineage, table, column))
        for lineage in (LINEAGE, "f" * 32)
        for table in ("user", "item", "\udcff")
        for column in (0, 8)
    }
    assert len(seeds) == 12
    assert dither_seed(LINEAGE, "user") == np.uint32(0xFEBBE356), (
        "it is on disk as codes"
    )
    rows = np.arange(1 << 20, dtype=np.int64) + (3 << 30)
    assert len(np.unique(row_keys(dither_seed(LINEAGE, "user"), rows))) == len(rows)


@each_of("codec", CODECS)
def test_no_element_is_a_step_off_and_rows_are_right_in_the_mean(codec: Any) -> None:
    rows = np.asarray(make_rows())
    step = step_of(codec, rows)
    seeds = 200
    back = read_all(codec, make_rows(), seeds)
    assert (np.abs(back - rows) <= 1.01 * step).all()
    off = (back.mean(0) - rows) / step
    # Of scales and offsets in 16 bits: the ends of a row may be clipped by so much.
    clipped = 0.0 if codec.metadata_bits == 32 else 0.3 if codec.bits < 8 else 0.0
    inside = (back.min(0) < rows) & (rows < back.max(0))
    assert inside.mean() > 0.8
    # At most half a step is the deviation of one draw.
    assert np.abs(off[inside]).max() < 6 * 0.5 * 1.4 / np.sqrt(seeds)
    assert abs(off[inside].mean()) < 0.005
    assert np.abs(off[~inside]).max() < 6 * 0.5 / np.sqrt(seeds) + clipped


@each_of("codec", CODECS)
def test_rows_on_their_levels_keep_their_codes_whatever_the_key(codec: Any) -> None:
    once = jnp.asarray(read(codec, make_rows()))
    ends = np.asarray(once) * 0 + step_of(codec, np.asarray(once))
    moved = np.abs(read_all(codec, once, 20) - np.asarray(once)) > 0.5 * ends
    # A threshold so close to an end that float32 cannot tell: one in some ten thousand.
    assert moved.mean() < 1e-3


def test_what_is_not_held_is_as_without_dither() -> None:
    special = np.zeros((6, 4), np.float32)
    special[1] = np.nan
    special[2] = [1, np.inf, 2, 3]
    special[3] = 7.0
    special[4] = [-0.0, 0.0, -0.0, 0.0]
    special[5] = [0, 1, 2, 3]
    for codec in CODECS:
        back, escaped = there_and_back(codec, jnp.asarray(special), keys_of(1, 6))
        _, nearest = there_and_back(codec, jnp.asarray(special))
        back = np.asarray(back)
        assert np.array_equal(escaped, nearest)
        assert back[[0, 4]].view(np.uint32).sum() == 0, "zeros read +0.0"
        assert np.isfinite(back).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes_dither_too(dtype: Any) -> None:
    rows = make_rows().astype(dtype)
    codec = Asymmetric(bits=4)
    nearest, dithered = read(codec, rows), read(codec, rows, keys_of(3))
    assert nearest.dtype == dithered.dtype == rows.dtype
    assert (nearest != dithered).mean() > 0.15


@each_of("codec", [Asymmetric(bits=3, refits=2), Greedy(bits=3)])
def test_dithered_codes_go_over_the_whole_range_without_a_search(codec: Any) -> None:
    plain = encoded(Asymmetric(bits=3, refits=0), make_rows(), keys_of(0))
    found = encoded(codec, make_rows(), keys_of(0))
    for name, part in plain.parts.items():
        assert np.array_equal(part, found.parts[name])


def test_which_codecs_dither() -> None:
    assert {n for n in ("raw", "adaptive", "asymmetric", "symmetric", "greedy", "kmeans")
            if isinstance(make_codec(n, 4), Dithering)} == {
        "adaptive", "asymmetric", "symmetric", "greedy"
    }  # fmt: skip
