"""Reductions over rows, taken in lanes, and other loops: where quantizers spend their time.

XLA's CPU backend keeps the lanes in vector registers, and computes all reductions of a
call in one loop. A loop for each reduction would compute anew what their terms have in common,
and one over the last axis would run element by element. Lanes were measured 2 to 3 times faster
for two to four sums; more sums no longer fit into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 8

Terms = Sequence[jax.Array]
_T = TypeVar("_T")


def in_lanes(rows: jax.Array) -> jax.Array:
    """Returns rows padded with zeros to a whole number of lanes."""
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % LANES)))


def sums(dim: int, *terms: jax.Array) -> Terms:
    """Returns the sum of each term over each row, [rows].

    Args:
        dim: number of columns that count; those that `in_lanes` added do not.
        terms: [rows, width] each, finite in the added columns too. One term alone takes
            longer than two.
    """
    zeros = (0.0,) * len(terms)
    return _reduce(
        _weighted(dim, *terms),
        zeros,
        lambda a, b: [p + q for p, q in zip(a, b, strict=True)],
    )


def in_one_loop(values: _T) -> _T:
    """Returns a tree of float32[rows] unchanged, except that -0.0 becomes 0.0.

    XLA's CPU backend has a loop for each array that it writes, and computes anew in each
    what the arrays have in common. Only the loop of a reduction writes several arrays: here
    one over two terms, the second of which is zero. Other backends run one small loop more.
    """
    arrays, tree = jax.tree.flatten(values)
    rows = arrays[0].shape[0]
    first = lax.broadcasted_iota(np.int32, (rows, 2), 1) == 0
    terms = [jnp.where(first, array[:, None], 0.0) for array in arrays]
    zeros = (np.float32(0),) * len(arrays)

    def add(a: Terms, b: Terms) -> tuple[jax.Array, ...]:
        return tuple(p + q for p, q in zip(a, b, strict=True))

    return tree.unflatten(lax.reduce(tuple(terms), zeros, add, (1,)))


class Extremes(NamedTuple):
    """Extremes of each row and more that one pass over the rows finds; all are [rows].

    Attributes:
        low, high: least and greatest element; without meaning for a row that is not finite.
        total: sum of the elements.
        finite: whether the sum is finite; it may overflow although all elements are finite.
        zero: whether all elements are zeros; denormals are not zeros.
    """

    low: jax.Array
    high: jax.Array
    total: jax.Array
    finite: jax.Array
    zero: jax.Array


def extremes(rows: jax.Array) -> Extremes:
    """Returns range and sum of each row of float[rows, dim].

    The sum tells whether a row is finite, as the compiler chooses whether extremes pass NaN
    on. The bits tell whether a row is zero: where a platform flushes denormals, these compare
    equal to zero.
    """

    def meet(a: Terms, b: Terms) -> Terms:
        # Not `lax.min`, which passes NaN on and so costs twice as much.
        low = jnp.where(a[0] < b[0], a[0], b[0])
        high = jnp.where(a[1] > b[1], a[1], b[1])
        return [low, high, a[2] + b[2], a[3] | b[3]]

    width = rows.shape[1]
    bits = lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
    fill = ((0, 0), (0, -width % LANES))
    x, bits = (jnp.pad(a, fill, mode="edge") for a in (rows.astype(jnp.float32), bits))
    terms = [x, x, *_weighted(width, x), bits]
    low, high, total, bits = _reduce(terms, (np.inf, -np.inf, 0, 0), meet)
    # The shift drops the sign, so that -0.0 is zero too.
    return Extremes(low, high, total, jnp.isfinite(total), (bits << 1) == 0)


def _weighted(dim: int, *terms: jax.Array) -> Terms:
    """Returns terms with zeros in the columns that `in_lanes` added."""
    width = terms[0].shape[1]
    if width == dim:
        return terms
    weight = (np.arange(width) < dim).astype(np.float32)[None, :]
    return tuple(term * weight for term in terms)


def _reduce(
    terms: Terms, start: Sequence[float], meet: Callable[[Terms, Terms], Terms]
) -> Terms:
    """Reduces each term over each row, in one loop over lanes and one within them."""
    rows, width = terms[0].shape
    lanes = [term.reshape(rows, width // LANES, LANES) for term in terms]
    first = tuple(
        np.array(value, term.dtype) for value, term in zip(start, terms, strict=True)
    )

    def combine(a: Terms, b: Terms) -> tuple[jax.Array, ...]:
        return tuple(meet(a, b))

    partial = lax.reduce(tuple(lanes), first, combine, (1,))
    return lax.reduce(tuple(partial), first, combine, (1,))
