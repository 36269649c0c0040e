"""Grids refined by least squares: codes fixed, the best scale and offset, codes anew.

With the codes of a row fixed, the scale and offset of least squared error have a closed
form; coded anew for them, the error can only fall further. That ends in the nearest of
many local minima, so the search starts from several grids, goes on from the one whose
solution is best, and moves past the solution (`_OVERSHOOT`). Each fit, from a start or
from where the search has come, is one pass over the rows. What is judged is the solution
for the codes, whose error follows from the sums; the best one of all is kept, the grid
over the whole range included.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from cnr_jax.rows.codecs.grid import (
    Grid,
    Judged,
    Levels,
    Metadata,
    Ranged,
    placing,
)
from cnr_jax.rows.codecs.lanes import in_lanes, in_one_loop, sums

# Of 1, 1.5, 2, 2.5, 3 and 4 the best or close to it, for normal and for trained rows of
# 16 to 128 columns at 2 to 4 bits: codes that are about to change make moves too small.
_OVERSHOOT = 2.0

# Factors by which a scale changes in one fit at most: outliers at 2 bits would throw it
# past zero.
_FARTHEST = (0.6, 1.6)

# Up to which a row's error is told as a difference of sums, which saves a term of each pass:
# of more levels or columns it would be too small a part of them.
_MOST_LEVELS = 16
_MOST_COLUMNS = 512

_T = TypeVar("_T")

# Of the spread of codes: two that are one apart give 1/2, two levels of a codebook less.
# One code throughout leaves the slope open.
_LEAST_SPREAD = 1e-3


def refit(
    given: Ranged,
    starts: Grid,
    step: jax.Array,
    fits: int,
    levels: Levels,
    metadata: Metadata,
) -> Grid:
    """Returns the grid of least squared error among those the search meets.

    Args:
        given: the rows, with the grid over the whole range of each.
        starts: grids from which the search starts, [starts, rows].
        step: an unrounded scale of the rows, [rows]; errors are compared in it.
        fits: number of passes over the rows, at least as many as starts.
        levels: levels that codes stand for.
        metadata: dtypes of scale and offset.
    """
    dim = given.x.shape[1]
    x = in_lanes(given.x)
    count = len(starts.scale)
    factor, shift = placing(given.grid, levels)
    place = x * factor[:, None] + shift[:, None]
    error = jnp.square(place - levels.nearest(place))
    error, p, pp = sums(dim, error, place, place * place)
    places = _Places(given.grid, p, pp)
    best = Judged(error * jnp.square(given.grid.scale / step), given.grid)
    nowhere = Judged(jnp.full_like(error, jnp.inf), given.grid)

    def improve(i: jax.Array, carry: tuple[Judged, Judged]) -> tuple[Judged, Judged]:
        best, ahead = carry
        starting = i < count
        start = jax.tree.map(lambda a: a[jnp.minimum(i, count - 1)], starts)
        grid = _where(starting, start, ahead.grid)
        found = _sums(x, places, grid, dim, levels)
        solved = _moved(grid, found, 1.0, dim, levels, metadata)
        error = _error_at(solved, grid, found, dim, levels)
        error *= jnp.square(grid.scale / step)
        beyond = _moved(grid, found, _OVERSHOOT, dim, levels, metadata)
        behind = starting & ~(error < ahead.error)
        return in_one_loop(
            (
                best.or_better(Judged(error, solved), metadata),
                _where(behind, ahead, Judged(error, beyond)),
            )
        )

    # A loop rather than copies of its body: compiling takes a third of the time.
    return lax.fori_loop(0, fits, improve, (best, nowhere))[0].grid


def _where(condition: jax.Array, a: _T, b: _T) -> _T:
    return jax.tree.map(lambda p, q: jnp.where(condition, p, q), a, b)


class _Places(NamedTuple):
    """Places of elements on a grid: sums of them and of their squares, [rows]."""

    grid: Grid
    p: jax.Array
    pp: jax.Array

    def on(self, grid: Grid, dim: int, levels: Levels) -> tuple[jax.Array, jax.Array]:
        """Returns both sums of the places on another grid."""
        ratio = self.grid.scale / grid.scale
        move = levels.middle - grid.offset
        move -= ratio * (levels.middle - self.grid.offset)
        p = ratio * self.p + dim * move
        return p, ratio * (ratio * self.pp + move * self.p) + move * p


class _Sums(NamedTuple):
    """Sums over a row, [rows]: e, what is between an element and its code c, in scales."""

    e: jax.Array
    ee: jax.Array
    ec: jax.Array
    c: jax.Array
    cc: jax.Array


def _sums(x: jax.Array, places: _Places, grid: Grid, dim: int, levels: Levels) -> _Sums:
    """Returns what one pass sums; the rest follows from the places on any grid."""
    factor, shift = placing(grid, levels)
    place = x * factor[:, None] + shift[:, None]
    code = levels.nearest(place)
    terms = [place * code, code, code * code]
    # Else squared errors are so large a part of squared places that a difference tells them.
    if levels.last >= _MOST_LEVELS or x.shape[1] > _MOST_COLUMNS:
        terms.append(jnp.square(place - code))
    pc, c, cc, *exact = sums(dim, *terms)
    p, pp = places.on(grid, dim, levels)
    ee = exact[0] if exact else pp - 2.0 * pc + cc
    return _Sums(p - c, ee, pc - cc, c, cc)


def _moved(
    grid: Grid, found: _Sums, by: float, dim: int, levels: Levels, metadata: Metadata
) -> Grid:
    """Returns a stored grid, `by` times as far in scale as the best for the codes.

    It fits what is left between elements and codes, which is small: nothing cancels.
    """
    mean_c = found.c / dim
    spread = found.cc - found.c * mean_c
    slope = jnp.where(
        spread > _LEAST_SPREAD, (found.ec - found.e * mean_c) / spread, 0.0
    )
    scale = metadata.round_scale(grid.scale * jnp.clip(1.0 + by * slope, *_FARTHEST))
    # The best offset for the scale as it is stored: it meets the mean of the row.
    centred = mean_c - levels.middle
    mean = grid.scale * (centred + grid.offset + found.e / dim)
    return Grid(scale, metadata.round_offset(mean / scale - centred))


def _error_at(
    new: Grid, grid: Grid, found: _Sums, dim: int, levels: Levels
) -> jax.Array:
    """Returns the squared error of the codes for `grid` read on `new`, in its scales.

    An element is `c + e` scales from the start of the old grid, and the new one reads its
    code `stretch * (c - middle) + move` farther than the old one.
    """
    middle = levels.middle
    ratio = new.scale / grid.scale
    stretch, move = ratio - 1.0, ratio * new.offset - grid.offset
    c = found.c - middle * dim
    cc = found.cc - 2.0 * middle * found.c + middle * middle * dim
    ec = found.ec - middle * found.e
    return (
        found.ee
        + stretch * (stretch * cc - 2.0 * ec + 2.0 * move * c)
        + move * (move * dim - 2.0 * found.e)
    )
