"""Adaptive asymmetric quantization by Check-N-Run's greedy search for a narrower range.

This codec is for comparison, and for those who want the paper's numbers: `Asymmetric` with
refits reaches the same error in a small part of the time. Differs from the paper in points
2 to 4 of `asymmetric.py`, and in one decision that the paper leaves open: `ratio` is the
share of the range that the search may remove, as in PyTorch's
`choose_qparams_optimized`, not the share that must remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from cnr_jax.rows.codecs import grid as grids
from cnr_jax.rows.codecs.base import Encoded
from cnr_jax.rows.codecs.lanes import in_lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy(grids.OnGrid):
    """Asymmetric quantization over the best of the ranges that a greedy search meets.

    The search starts from the least and the greatest element. Each move raises the low
    end or lowers the high end by 1/`bins` of the first range, whichever leaves the
    smaller squared error; values outside are clipped. The search always makes all its moves,
    and keeps the best of all ranges, the first one included.

    Rows are stored and read as by `Asymmetric`, with the same metadata. The same rows are
    escaped, as a range that the metadata cannot hold is never the best one. The bound for
    refits holds: `||x - read(x)||_2 <= 0.54 * step * sqrt(dim)`. Dithered codes span the
    whole range, without a search.

    Attributes:
        bits: width of a code.
        bins: number of moves that would use up the whole range, at least 1.
        ratio: share of the range that may be removed, above 0 and up to 1. The search makes
            `int(bins * ratio)` moves of two evaluations each, but at most `bins - 1`.
        metadata_bits: see `Asymmetric`.

    Example:
        >>> rows = jnp.array([[0.0, 0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 1.0]])
        >>> for codec in (Greedy(bits=2, ratio=0.01), Greedy(bits=2)):
        ...     parts = codec.encode(rows).parts
        ...     read = codec.decode(parts, dim=8, dtype=jnp.float32)
        ...     print(f"{float(jnp.linalg.norm(rows - read)):.2f}")
        0.24
        0.22

    Source: Check-N-Run (NSDI'22), adaptive asymmetric quantization, whose operating point
    the defaults are; the search is that of Guan et al., arXiv:1911.02079.
    """

    name: ClassVar[str] = "cnr.greedy"
    dithers: ClassVar[Literal[True]] = True
    bits: int = 4
    bins: int = 25
    ratio: float = 0.6
    metadata_bits: int | None = None

    def __post_init__(self) -> None:
        grids.OnGrid.__post_init__(self)
        object.__setattr__(self, "ratio", float(self.ratio))
        if self.bins < 1:
            raise ValueError(f"bins is {self.bins}, expected 1 or more")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, expected above 0 and up to 1")

    def encode(self, rows: jax.Array, keys: jax.Array | None = None) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        levels = 2**self.bits - 1
        given = grids.ranged(rows, levels, self._metadata)
        if keys is not None:
            return grids.encode(given, given.grid, self.bits, self._metadata, keys)
        # A move that leaves no range at all is no candidate.
        moves = min(int(self.bins * self.ratio + 1e-9), self.bins - 1)
        grid = _search(given, moves, self.bins, levels, self._metadata)
        return grids.encode(given, grid, self.bits, self._metadata)


def _search(
    given: grids.Ranged, moves: int, bins: int, levels: int, metadata: grids.Metadata
) -> grids.Grid:
    """Returns the grid of least squared error that the search meets, its arrays [rows]."""
    dim = given.x.shape[1]
    x, low, high = in_lanes(given.x), given.low, given.high
    notch = (high - low) / bins
    unit = 1.0 / (high - low)

    def judged(*ends: tuple[jax.Array, jax.Array]) -> list[grids.Judged]:
        found = [metadata.between(low, high, levels) for low, high in ends]
        errors = grids.squared_errors(x, found, dim, grids.Even(levels))
        units = [jnp.square(grid.scale * unit) for grid in found]
        return [
            grids.Judged(error * unit, grid)
            for error, unit, grid in zip(errors, units, found, strict=True)
        ]

    def move(_: int, carry: tuple) -> tuple:
        best, low, high = carry
        raised, lowered = judged((low + notch, high), (low, high - notch))
        raise_low = raised.error < lowered.error
        best = best.or_better(raised, metadata).or_better(lowered, metadata)
        low = jnp.where(raise_low, low + notch, low)
        return best, low, jnp.where(raise_low, high, high - notch)

    start = judged((low, high))[0]
    return lax.fori_loop(0, moves, move, (start, low, high))[0].grid
