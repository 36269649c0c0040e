"""Sums over rows, taken in lanes: what the searches for a grid spend their time on.

XLA's CPU backend keeps the lanes in vector registers, and computes all sums of a call in
one loop; a reduction for each sum would compute anew what their terms have in common, and
a single one over the last axis would run element by element. Measured 2 to 3 times faster
for two to five sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 8


def in_lanes(rows: jax.Array) -> jax.Array:
    """Returns rows with as many zeros after them as fill the last lanes."""
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % LANES)))


def sums(dim: int, *terms: jax.Array) -> Sequence[jax.Array]:
    """Returns the sum of each term over each row, [rows].

    Args:
        dim: columns that count; those that `in_lanes` added do not.
        terms: [rows, width], all finite in those columns. One that is summed alone is
            faster with another beside it.
    """
    rows, width = terms[0].shape
    if width > dim:
        weight = (np.arange(width) < dim).astype(np.float32)[None, :]
        terms = tuple(term * weight for term in terms)
    lanes = (rows, width // LANES, LANES)
    return _sum_each(_sum_each([term.reshape(lanes) for term in terms]))


def _sum_each(terms: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Sums every term over axis 1, in one loop."""
    return lax.reduce(
        tuple(terms),
        (np.float32(0),) * len(terms),
        lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True)),
        (1,),
    )
