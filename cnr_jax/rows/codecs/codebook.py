"""Codebook codec: one set of levels for all rows of a table, with a scale and offset per row.

Where elements gather about the middle of their row's range, levels that are denser there err
less than equidistant ones. The codebook is in the configuration, so it costs a row nothing.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from cnr_jax.rows.codecs import grid as grids
from cnr_jax.rows.codecs.base import Configuration, Encoded
from cnr_jax.rows.codecs.refit import refit

_ITERATIONS = 100
# Standard deviations that the normal rows of the default levels reach on either side: half the
# mean range of 64 draws.
_REACH = 2.4
_DRAWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCodebook(grids.OnGrid):
    """Quantization to the nearest of 2**bits levels, which all rows share.

    A row is stored as codes `q`, a `scale` and an `offset`, as by `Asymmetric`, and read as

        x = scale * (levels[q] + offset)                      in float32, in this order,

    then clamped to the finite range of the table's dtype and rounded to it. The rows that
    `Asymmetric` escapes are escaped here too, and least squares refine scale and offset in
    the same way.

    **Error bound.** With `step` as for `Asymmetric`, and `gap` the greater of half the
    largest distance of two neighbouring levels and the distance of the outer ones from
    the ends, -(2**bits - 1) / 2 and (2**bits - 1) / 2, before the rounding to the
    table's dtype: `||x - read(x)||_2 <= (gap + 0.35) * step * sqrt(dim)`.

    Attributes:
        bits: width of a code.
        levels: 2**bits ascending float32 numbers, in steps from the middle of the range;
            see `fit`. By default those of Lloyd and Max for normal rows of some 64
            elements.
        refits: number of fits by least squares, each one pass over the rows.
        metadata_bits: see `Asymmetric`.

    Example:
        >>> rows = np.random.default_rng(0).laplace(size=(1000, 64)).astype(np.float32)
        >>> codec = SharedCodebook.fit(rows, bits=2)
        >>> [f"{level:.1f}" for level in codec.levels]
        ['-1.0', '-0.3', '0.3', '1.0']
        >>> parts = codec.encode(jnp.asarray(rows)).parts
        >>> error = codec.decode(parts, dim=64, dtype=jnp.float32) - rows
        >>> f"{float(jnp.linalg.norm(error, axis=1).mean()):.1f}"
        '4.3'

    Source: S. Lloyd, "Least squares quantization in PCM", and J. Max, "Quantizing for
    minimum distortion" (1960).
    """

    name: ClassVar[str] = "cnr.codebook"
    bits: int = 4
    levels: tuple[float, ...] | None = None
    refits: int = 3
    metadata_bits: int | None = None

    def __post_init__(self) -> None:
        grids.OnGrid.__post_init__(self)
        levels = _normal_levels(self.bits) if self.levels is None else self.levels
        levels = tuple(float(np.float32(level)) for level in levels)
        object.__setattr__(self, "levels", levels)
        if self.refits < 0:
            raise ValueError(f"refits is {self.refits}, expected 0 or more")
        end = 0.5 * (2**self.bits - 1)
        if (
            len(levels) != 2**self.bits
            or not all(a < b for a, b in itertools.pairwise(levels))
            or not (-end <= levels[0] and levels[-1] <= end)
        ):
            raise ValueError(
                f"levels are {levels}, expected {2**self.bits} ascending numbers from"
                f" {-end} to {end}"
            )

    @classmethod
    def fit(cls, rows: ArrayLike, bits: int) -> SharedCodebook:
        """Returns the codec with the levels of least squared error for a sample of rows.

        Each row is scaled to the range of the levels, and Lloyd's algorithm is run on the
        elements of all rows together.

        Args:
            rows: float[rows, dim]; rows that are constant or not finite are left out. A
                few thousand rows suffice.
            bits: width of a code.

        Raises:
            ValueError: if the rows have fewer than 2**bits different elements.
        """
        grids.checked_metadata_bits(bits, None)
        x = np.asarray(rows).astype(np.float64)
        x = x[np.isfinite(x).all(axis=1)]
        low, high = x.min(axis=1, initial=np.inf), x.max(axis=1, initial=-np.inf)
        x, low, high = (part[high > low] for part in (x, low, high))
        unit = (x - low[:, None]) / (high - low)[:, None] - 0.5
        values = np.unique((unit * (2**bits - 1)).astype(np.float32))
        if len(values) < 2**bits:
            raise ValueError(
                f"the sample has {len(values)} different elements, expected {2**bits} or more"
            )
        return cls(bits=bits, levels=_lloyd(unit.ravel() * (2**bits - 1), bits))

    def configuration(self) -> Configuration:
        """Returns all four fields, the levels as a list; reading needs all but refits."""
        levels = list(self._book.levels)
        return {**grids.OnGrid.configuration(self), "levels": levels}

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        count = 2**self.bits - 1
        given = grids.ranged(rows, count, self._metadata)
        grid = given.grid
        if self.refits:
            step = (given.high - given.low) / count
            start = jax.tree.map(lambda a: a[None], grid)
            grid = refit(given, start, step, self.refits, self._book, self._metadata)
        factor, shift = grids.placing(grid, self._book)
        place = given.x * factor[:, None] + shift[:, None]
        place = jnp.where(given.held[:, None], place, 0.0)
        packed = grids.pack(self._book.index(place).astype(jnp.uint8), self.bits)
        # Scale 0 times a number not below zero reads +0.0. No level is below -count / 2.
        metadata = grids.stored(grid, given.held, self._metadata, 0.5 * count)
        escaped = ~(given.held | given.zero)
        return Encoded({"codes": packed, **metadata}, escaped)

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if the codes do not have the width that `dim` and `bits` give.
        """
        codes = grids.unpack(jnp.asarray(parts["codes"]), self.bits, dim)
        return grids.read_stored(self._book.value(codes), parts, dtype)

    @property
    def _book(self) -> _Book:
        assert self.levels is not None  # __post_init__ resolves the default
        return _Book(self.levels)


@dataclass(frozen=True, slots=True)
class _Book:
    """Levels at any distances, in ascending order, in the form that `refit` takes."""

    levels: tuple[float, ...]
    middle: float = 0.0

    @property
    def last(self) -> int:
        """See `Levels`."""
        return len(self.levels) - 1

    def index(self, place: jax.Array) -> jax.Array:
        """Returns the number of the level nearest to a place in steps."""
        levels = np.array(self.levels, np.float32)
        # The search begins at the same bound for all elements. If XLA knew the bounds, it would
        # look that bound up for each element while it compiles: minutes for large chunks.
        bounds = lax.optimization_barrier(jnp.asarray(0.5 * (levels[1:] + levels[:-1])))
        return jnp.searchsorted(bounds, place, method="scan_unrolled")

    def value(self, index: jax.Array) -> jax.Array:
        """Returns the levels with these numbers, float32."""
        return jnp.asarray(self.levels, jnp.float32)[index]

    def nearest(self, place: jax.Array) -> jax.Array:
        """Returns the level nearest to a place in steps from the middle."""
        return self.value(self.index(place))


def _lloyd(values: np.ndarray, bits: int) -> tuple[float, ...]:
    """Returns the 2**bits levels that Lloyd's algorithm finds for values, computed in float64."""
    values = np.sort(values)
    before = np.concatenate([[0.0], np.cumsum(values)])
    different = np.unique(values)
    starts = (np.arange(2**bits) + 0.5) / 2**bits
    # Quantiles of the different values, so that no two levels start, or end, at the same value.
    levels = different[(starts * len(different)).astype(np.int64)]
    for _ in range(_ITERATIONS):
        bounds = 0.5 * (levels[1:] + levels[:-1])
        ends = np.concatenate([[0], np.searchsorted(values, bounds), [len(values)]])
        members = np.diff(ends)
        means = np.diff(before[ends]) / np.maximum(members, 1)
        levels = np.where(members > 0, means, levels)
    return tuple(levels.tolist())


@functools.cache
def _normal_levels(bits: int) -> tuple[float, ...]:
    draw = statistics.NormalDist().inv_cdf
    draws = np.array([draw((i + 0.5) / _DRAWS) for i in range(_DRAWS)])
    half = 0.5 * (2**bits - 1)
    return _lloyd(draws.clip(-_REACH, _REACH) / _REACH * half, bits)
