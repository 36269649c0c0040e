"""Uniform quantization of each row over a range of its own, refined by least squares.

Differs from Check-N-Run in:
1. The range is refitted by least squares (see `refit`), not shrunk greedily (25 bins, two
   evaluations a move, see `Greedy`).
2. Candidates are rounded to the stored metadata *before* they are judged, so the error
   that is minimised is the error after restoring.
3. The offset is stored in steps, not in the units of the row.
4. Rows that 2**bits equidistant values cannot hold are escaped instead of damaged.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import numpy as np

from cnr_jax.rows.codecs import grid as grids
from cnr_jax.rows.codecs.base import Configuration, Encoded
from cnr_jax.rows.codecs.refit import refit


@dataclass(frozen=True, slots=True, kw_only=True)
class Asymmetric(grids.OnGrid):
    """Asymmetric uniform quantization per row, to codes of 2, 3, 4 or 8 bits.

    A row is stored as codes `q`, a `scale` and an `offset` in steps, and read as

        x = scale * ((q - (2**bits - 1) / 2) + offset)        in float32, in this order,

    then clamped to the finite range of the table's dtype and rounded to it. An addition
    followed by a multiplication cannot be fused, so every platform reads the same bits.
    `scale` alone carries the magnitude: bfloat16 has the exponents of float32, while
    `offset` is a plain number of steps, for which float16 has the better precision.

    Some rows are escaped, that is, left to the caller to store exactly: rows with a
    non-finite element; constant rows other than zero (hence every nonzero row of one
    element); rows whose step is outside [2**-100, 2**100]; rows of denormals; and rows whose
    middle is 1024 steps or more from zero (32768 with 32-bit metadata), whose spread is below
    about 1 % of their value. A row of zeros is held exactly, but for the sign of -0.0.

    **Error bound.** For a row that is not escaped, of up to 65536 elements, with
    `step = (max - min) / (2**bits - 1)`, before the rounding to the table's dtype:

        refits == 0:  |x - read(x)| <= 0.51 * step              for every element;
        any refits:   ||x - read(x)||_2 <= 0.54 * step * sqrt(dim);
        dithered:     |x - read(x)| <= 1.01 * step              for every element.

    Rounding to bfloat16 or float16 adds at most half an ulp of that dtype per element.

    Proof. Let s, o be the stored scale and offset, L = 2**bits - 1, t = x/s - o + L/2.

    (1) Where 0 <= t <= L the nearest code is at most half a step of size s away. A dithered
        code is one of the two neighbours of t, so it is less than a whole step away.
    (2) t leaves [0, L] by at most d = (L/2) |1 - step/s| + |o - (min + max)/(2 s)|.
        With 16-bit metadata (L <= 15) the first term is at most 7.5 * 2**-8 < 0.03, the
        second half a float16 ulp below 1024, 1/4; with 32 bits both are below 2**-9. So
        d < 1/2, and clipped elements are no worse than the others.
    (3) float32 arithmetic (the reciprocal, product and sum of t, the sum and product of
        x) moves a result by at most 5 * 2**-24 * |o| steps: below 0.001 and 0.01.
    (4) s <= (1 + 2**-8) step with 16 bits, (1 + 2**-24) step with 32. Hence at most
        0.5 * 1.0040 + 0.001 and 0.5 + 0.01 steps, both <= 0.51 up to 2**-20; dithered
        1.0040 + 0.001 and 1 + 0.01 steps, both <= 1.01 up to 2**-20.
    (5) Other s, o are taken only if their summed squared error is smaller, as computed
        in places t. Places are exact to what (3) says. So is the error of an element on
        either of the two grids compared, and the root of the mean square of a row:
        0.51 + 2 * 0.01. Beyond 512 columns and at 8 bits, the sum of dim terms is exact
        to dim * 2**-24 <= 2**-8 relative, which is half that in the root: below 0.533.
        Else the sum is a difference of others, of squared places up to 15.6**2 summed in
        at most 72 additions, and of grids 2**-12 steps apart at most: exact to 0.009 dim
        squared steps, and sqrt(0.53**2 + 0.009) < 0.54.

    Attributes:
        bits: width of a code.
        refits: number of fits by least squares, each one pass over the rows. Up to three of
            them start from a range of their own; further ones go on from the best. 0 is the
            plain asymmetric quantizer. None is never stored: `at_dim` replaces it by the fewest
            fits (2 to 5, by bits and columns) that bring the mean error of trained rows of 16
            to 128 elements below that of the paper's search with 45 bins, and at 8 bits 3 %
            or more below that of the plain quantizer.
        metadata_bits: 16 (bfloat16 scale, float16 offset) or 32 (both float32). By
            default 16 up to 4 bits. 8 bits need 32: a bfloat16 scale would miss the
            ends of the range by half a step.

    Example:
        >>> import jax.numpy as jnp
        >>> codec = Asymmetric(bits=2, refits=0)
        >>> encoded = codec.encode(jnp.array([[0.0, 1.0, 3.0]]))
        >>> {name: part.tolist() for name, part in encoded.parts.items()}
        {'codes': [[52]], 'scale': [[1.0]], 'offset': [[1.5]]}
        >>> codec.decode(encoded.parts, dim=3, dtype=jnp.float32).tolist()
        [[0.0, 1.0, 3.0]]

    Source: Check-N-Run (NSDI'22), asymmetric quantization per embedding vector; the
    adaptive search is replaced by least squares, see the module.
    """

    name: ClassVar[str] = "cnr.asymmetric"
    dithers: ClassVar[Literal[True]] = True
    bits: int = 4
    refits: int | None = None
    metadata_bits: int | None = None

    def __post_init__(self) -> None:
        grids.OnGrid.__post_init__(self)
        if self.refits is not None and self.refits < 0:
            raise ValueError(f"refits is {self.refits}, expected 0 or more")

    def at_dim(self, dim: int) -> Asymmetric:
        """Returns the codec with `refits` set as it is used for rows of `dim` elements.

        Example:
            >>> [Asymmetric(bits=2).at_dim(dim).refits for dim in (16, 64, 128)]
            [3, 4, 5]
        """
        if self.refits is not None:
            return self
        fits = 2 + sum(dim > columns for columns in _COLUMNS[self.bits])
        return dataclasses.replace(self, refits=fits)

    def configuration(self) -> Configuration:
        """Returns bits, refits and metadata_bits; reading needs all but refits.

        Raises:
            ValueError: if `refits` is None, that is, left to the number of columns.
        """
        if self.refits is None:
            raise ValueError(f"{self} leaves refits to the columns, see at_dim")
        return grids.OnGrid.configuration(self)

    def encode(self, rows: jax.Array, keys: jax.Array | None = None) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Where a value is halfway between two codes, platforms may choose differently.

        Args:
            rows: float32, bfloat16 or float16.
            keys: uint32[rows], see `row_keys`: codes are dithered over the whole range of a row.
                None: each element gets the nearest code.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        levels = 2**self.bits - 1
        given = grids.ranged(rows, levels, self._metadata)
        grid = given.grid
        refits = self.at_dim(rows.shape[1]).refits
        # Dithered codes are not refitted. Each restore would put back the elements that a narrower
        # range clips, and a search that knew the keys would fit the levels to chance.
        if refits and keys is None:
            step = (given.high - given.low) / levels
            starts = _starts(given, step, refits, self.bits, self._metadata)
            evenly = grids.Even(levels)
            grid = refit(given, starts, step, refits, evenly, self._metadata)
        return grids.encode(given, grid, self.bits, self._metadata, keys)


# The most columns for which 2, 3 and 4 fits are enough, by bits. Enough is the fewest whose mean
# error, of trained rows of 16, 32, 64 and 128 columns, is below that of the greedy search with 45
# bins (at 2 bits and 16 columns two come to 1.003 of it, three to 0.993), and at 8 bits below 0.97
# of that of plain quantization. Figures above 128 columns continue the series.
_COLUMNS = {2: (0, 32, 64), 3: (16, 32, 64), 4: (32, 64, 128), 8: (64, 128, 256)}

# Where a search starts, in steps inwards from the least and from the greatest element: the mean
# of both ends at 64 columns, by how much it grows when columns double, and how far each end is
# from the mean for two starts and for three. They are best, or nearly so, for the rows above.
_INWARDS = {
    2: (0.49, 0.12, 0.12, 0.18),
    3: (0.45, 0.18, 0.165, 0.23),
    4: (0.28, 0.13, 0.20, 0.26),
    8: (0.02, 0.02, 0.22, 0.28),
}
_MOST_DOUBLINGS = 4.0


def _starts(
    given: grids.Ranged,
    step: jax.Array,
    fits: int,
    bits: int,
    metadata: grids.Metadata,
) -> grids.Grid:
    """Returns the grids from which a search starts, at most three, each [starts, rows]."""
    mean, growth, of_two, of_three = _INWARDS[bits]
    doublings = min(math.log2(given.x.shape[1] / 64), _MOST_DOUBLINGS)
    mean = max(0.0, mean + growth * doublings)
    apart = of_two if fits == 2 else of_three
    sides = {1: (0,), 2: (-1, 1)}.get(fits, (-1, 1, 0))
    aside = apart * np.array(sides, np.float32)[:, None]
    low, high, step = given.low[None], given.high[None], step[None]
    low, high = low + (mean + aside) * step, high - (mean - aside) * step
    return metadata.between(low, high, 2**bits - 1)
