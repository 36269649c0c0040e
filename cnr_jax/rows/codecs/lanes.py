"""Reductions over rows, taken in lanes: what quantizers spend their time on.

XLA's CPU backend keeps the lanes in vector registers, and computes all reductions of a
call in one loop; one for each would compute anew what their terms have in common, and one
over the last axis would run element by element. Measured 2 to 3 times faster for two to
four sums; more no longer fit into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 8

Terms = Sequence[jax.Array]


def in_lanes(rows: jax.Array) -> jax.Array:
    """Returns rows with as many zeros after them as fill the last lanes."""
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % LANES)))


def sums(dim: int, *terms: jax.Array) -> Terms:
    """Returns the sum of each term over each row, [rows].

    Args:
        dim: columns that count; those that `in_lanes` added do not.
        terms: [rows, width], all finite in those columns. One that is summed alone is
            slower than two.
    """
    width = terms[0].shape[1]
    if width > dim:
        weight = (np.arange(width) < dim).astype(np.float32)[None, :]
        terms = tuple(term * weight for term in terms)
    zeros = (0.0,) * len(terms)
    return _reduce(
        terms, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)]
    )


def extremes(rows: jax.Array, magnitude: jax.Array) -> Terms:
    """Returns least and greatest element of each row, and its greatest magnitude, [rows].

    Args:
        rows: float32[rows, dim]; of a row with NaN the extremes are of no meaning.
        magnitude: of each element, not NaN and at least 0.
    """

    def meet(a: Terms, b: Terms) -> Terms:
        # Not `lax.min`, which passes NaN on at twice the cost.
        low = jnp.where(a[0] < b[0], a[0], b[0])
        high, most = (jnp.where(p > q, p, q) for p, q in zip(a[1:], b[1:], strict=True))
        return [low, high, most]

    fill = ((0, 0), (0, -rows.shape[1] % LANES))
    rows, magnitude = (jnp.pad(part, fill, mode="edge") for part in (rows, magnitude))
    return _reduce([rows, rows, magnitude], (np.inf, -np.inf, 0.0), meet)


def _reduce(
    terms: Terms, start: Sequence[float], meet: Callable[[Terms, Terms], Terms]
) -> Terms:
    """Reduces each term over each row, in one loop over lanes and one within them."""
    rows, width = terms[0].shape
    lanes = [term.reshape(rows, width // LANES, LANES) for term in terms]
    first = tuple(np.float32(value) for value in start)

    def combine(a: Terms, b: Terms) -> tuple[jax.Array, ...]:
        return tuple(meet(a, b))

    partial = lax.reduce(tuple(lanes), first, combine, (1,))
    return lax.reduce(tuple(partial), first, combine, (1,))
