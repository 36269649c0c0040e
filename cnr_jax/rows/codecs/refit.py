"""Refinement of grids by least squares, which alternates between codes and scale and offset.

With the codes of a row fixed, the scale and offset of least squared error have a closed
form. If the row is then coded anew, the error can only fall further. That ends in the nearest
of many local minima, so the search starts from several grids, goes on from the one whose
solution is best, and moves past the solution (`_OVERSHOOT`). Each fit, from a start or
from where the search has come, is one pass over the rows. The search judges the solution
for the codes, whose error follows from the sums. It keeps the best of all solutions and the
grid over the whole range.
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

# How far a fit moves, in times the solution's move: codes that are about to change make that too
# small. Of 1, 1.5, 2, 2.5, 3 and 4 it is the best or close to it, for normal and for trained rows
# of 16 to 128 columns at 2 to 4 bits.
_OVERSHOOT = 2.0

# Bounds of the factor by which one fit changes a scale: outliers at 2 bits would throw it
# past zero.
_FARTHEST = (0.6, 1.6)

# Limits up to which a row's error is computed as a difference of sums, which saves a term in each
# pass. With as many levels, or more columns, it would be too small a part of the sums.
_MOST_LEVELS = 16
_MOST_COLUMNS = 512

_T = TypeVar("_T")

# The least spread of codes from which a slope is computed: two codes that are one apart give
# 1/2, two levels of a codebook less. One code throughout leaves the slope open.
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
        step: an unrounded scale of the rows, [rows], in which errors are compared.
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

    # A loop compiles in a third of the time that copies of its body take.
    return lax.fori_loop(0, fits, improve, (best, nowhere))[0].grid


def _where(condition: jax.Array, a: _T, b: _T) -> _T:
    return jax.tree.map(lambda p, q: jnp.where(condition, p, q), a, b)


class _Places(NamedTuple):
    """Sums of the places of elements on a grid (p) and of their squares (pp), [rows]."""

    grid: Grid
    p: jax.Array
    pp: jax.Array

    def on(self, grid: Grid, dim: int, levels: Levels) -> tuple[jax.Array, jax.Array]:
        """Returns both sums for the places on another grid."""
        ratio = self.grid.scale / grid.scale
        move = levels.middle - grid.offset
        move -= ratio * (levels.middle - self.grid.offset)
        p = ratio * self.p + dim * move
        return p, ratio * (ratio * self.pp + move * self.p) + move * p


class _Sums(NamedTuple):
    """Sums over a row, [rows], of codes c and of the gaps e from code to element, in scales."""

    e: jax.Array
    ee: jax.Array
    ec: jax.Array
    c: jax.Array
    cc: jax.Array


def _sums(x: jax.Array, places: _Places, grid: Grid, dim: int, levels: Levels) -> _Sums:
    """Returns the sums for a grid, by one pass; those of places follow from any other grid."""
    factor, shift = placing(grid, levels)
    place = x * factor[:, None] + shift[:, None]
    code = levels.nearest(place)
    terms = [place * code, code, code * code]
    # Below these limits squared errors are so large a part of squared places that a difference
    # of sums is exact enough.
    if levels.last >= _MOST_LEVELS or x.shape[1] > _MOST_COLUMNS:
        terms.append(jnp.square(place - code))
    pc, c, cc, *exact = sums(dim, *terms)
    p, pp = places.on(grid, dim, levels)
    ee = exact[0] if exact else pp - 2.0 * pc + cc
    return _Sums(p - c, ee, pc - cc, c, cc)


def _moved(
    grid: Grid, found: _Sums, by: float, dim: int, levels: Levels, metadata: Metadata
) -> Grid:
    """Returns a grid as it is stored, moved in scale `by` times as far as is best for the codes.

    The fit is to the gaps between elements and codes, which are small, so nothing cancels.
    """
    mean_c = found.c / dim
    spread = found.cc - found.c * mean_c
    slope = jnp.where(
        spread > _LEAST_SPREAD, (found.ec - found.e * mean_c) / spread, 0.0
    )
    scale = metadata.round_scale(grid.scale * jnp.clip(1.0 + by * slope, *_FARTHEST))
    # The best offset for the rounded scale is the one that meets the mean of the row.
    centred = mean_c - levels.middle
    mean = grid.scale * (centred + grid.offset + found.e / dim)
    return Grid(scale, metadata.round_offset(mean / scale - centred))


def _error_at(
    new: Grid, grid: Grid, found: _Sums, dim: int, levels: Levels
) -> jax.Array:
    """Returns the squared error of the codes for `grid` read on `new`, in scales of `grid`.

    An element is `c + e` scales from the start of the old grid. The new grid reads its code
    `stretch * (c - middle) + move` farther than the old one does.
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
