"""Grids refined by least squares: codes fixed, the best scale and offset, codes anew.

With the codes of a row fixed, the scale and offset of least squared error have a closed
form; coded anew for them, the error can only fall further. That ends in the nearest of
many local minima, so the search starts from the best of several grids, and moves past
the solution (`_OVERSHOOT`). Each round is one pass over the rows and judges two grids:
the one they were coded for, and the solution for these codes, whose error follows from
the sums. The best one of all is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cnr_jax.rows.codecs.grid import (
    Grid,
    Judged,
    Levels,
    Metadata,
    placing,
    squared_errors,
)
from cnr_jax.rows.codecs.lanes import in_lanes, sums

# Of 1, 1.5, 2, 2.5, 3 and 4 the best or close to it, for normal and for trained rows of
# 16 to 128 columns at 2 to 4 bits: codes that are about to change make moves too small.
_OVERSHOOT = 2.0

# Factors by which a scale changes in one round at most: outliers at 2 bits would throw it
# past zero.
_FARTHEST = (0.6, 1.6)

# Of the spread of codes: two that are one apart give 1/2, two levels of a codebook less.
# One code throughout leaves the slope open.
_LEAST_SPREAD = 1e-3


def refit(
    x: jax.Array,
    first: Grid,
    starts: Sequence[Grid],
    step: jax.Array,
    rounds: int,
    levels: Levels,
    metadata: Metadata,
) -> Grid:
    """Returns the grid of least squared error among those the search meets.

    A loop rather than copies of its body: compiling takes a third of the time.

    Args:
        x: float32[rows, dim].
        first: grid from the least to the greatest element, [rows] each.
        starts: others from which the search may start.
        step: an unrounded scale of the rows, [rows]; errors are compared in it.
        rounds: passes over the rows.
        levels: what codes stand for.
        metadata: how scale and offset are stored.
    """
    dim = x.shape[1]
    x = in_lanes(x)
    best, total = _best_of([first, *starts], x, dim, step, levels, metadata)

    def improve(_: int, carry: tuple[Judged, Grid]) -> tuple[Judged, Grid]:
        best, grid = carry
        found = _sums(x, total, grid, dim, levels)
        unit = jnp.square(grid.scale / step)
        best = best.or_better(Judged(found.ee * unit, grid), metadata)
        solved = _moved(grid, found, 1.0, dim, levels, metadata)
        error = _error_at(solved, grid, found, dim, levels)
        best = best.or_better(Judged(error * unit, solved), metadata)
        return best, _moved(grid, found, _OVERSHOOT, dim, levels, metadata)

    return lax.fori_loop(0, rounds, improve, (best, best.grid))[0].grid


def _best_of(
    grids: Sequence[Grid],
    x: jax.Array,
    dim: int,
    step: jax.Array,
    levels: Levels,
    metadata: Metadata,
) -> tuple[Judged, jax.Array]:
    """Returns the best of some grids [rows], and the sum over each row."""
    best = Judged(jnp.full_like(step, jnp.inf), grids[0])
    total = jnp.zeros_like(step)
    for pair in (grids[i : i + 2] for i in range(0, len(grids), 2)):
        # The sum stands in for the other grid of a pair, which is faster than one alone.
        *errors, total = squared_errors(x, pair, dim, levels, x)
        for error, grid in zip(errors, pair, strict=True):
            unit = jnp.square(grid.scale / step)
            best = best.or_better(Judged(error * unit, grid), metadata)
    return best, total


class _Sums(NamedTuple):
    """Sums over a row, [rows]: e, what is between an element and its code c, in scales."""

    e: jax.Array
    ee: jax.Array
    ec: jax.Array
    c: jax.Array
    cc: jax.Array


def _sums(
    x: jax.Array, total: jax.Array, grid: Grid, dim: int, levels: Levels
) -> _Sums:
    factor, shift = placing(grid, levels)
    place = x * factor[:, None] + shift[:, None]
    c = levels.nearest(place)
    e = place - c
    ee, ec, c, cc = sums(dim, e * e, e * c, c, c * c)
    # Places sum to what the row's sum says: one sum less in the loop.
    return _Sums(factor * total + dim * shift - c, ee, ec, c, cc)


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
