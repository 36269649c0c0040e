"""Rows of every kind that a codec may meet."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st


def make_row(
    kind: str, rng: np.random.Generator, dtype: np.dtype, dim: int
) -> np.ndarray:
    """A float64 row of one kind; huge and tiny are meant in terms of `dtype`."""
    info = jnp.finfo(dtype)
    row = rng.normal(size=dim)
    if kind == "constant":
        row[:] = row[0]
    elif kind == "zero":
        row[:] = 0.0
    elif kind == "huge":
        row *= float(info.max) / np.abs(row).max()
    elif kind == "tiny":
        row *= float(info.tiny) * 2.0 ** rng.integers(0, 8)
    elif kind == "denormal":
        row = rng.integers(-3, 4, dim) * float(info.smallest_subnormal)
    elif kind == "shifted":
        row = row + 10.0 ** rng.uniform(0, 4)
    elif kind == "outlier":
        row[rng.integers(dim)] *= 10.0 ** rng.uniform(1, 4)
    elif kind == "scaled":
        row *= 10.0 ** rng.uniform(-4, 3)
    elif kind == "two values":
        row = np.where(row > 0, 0.75, -3.0)
    elif kind == "not finite":
        row[rng.integers(dim)] = rng.choice([np.nan, np.inf, -np.inf])
    return row


KINDS = [
    *("ordinary", "constant", "zero", "huge", "tiny", "denormal", "shifted"),
    *("outlier", "scaled", "two values", "not finite"),
]


@st.composite
def _rows_of(draw, dtype: np.dtype, count: int, dim: int) -> np.ndarray:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = np.stack([make_row(kind, rng, dtype, dim) for kind in kinds])
    largest = float(jnp.finfo(dtype).max)
    return np.where(np.isfinite(rows), rows.clip(-largest, largest), rows).astype(dtype)


@pytest.fixture(scope="session")
def rows_of():
    """Strategy of float rows, `rows_of(dtype, rows, dim)`."""
    return _rows_of
