"""K-means of the elements of each row, which gives every row a codebook of its own.

It sets the bar for error at few bits, at a price in time and bytes: each row stores 2**bits
values beside its codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cnr_jax.rows.codecs import grid as grids
from cnr_jax.rows.codecs.base import Encoded, Part
from cnr_jax.rows.codecs.lanes import in_lanes, sums

# Not 8 bits: 256 values for a row take more bytes than most rows.
WIDTHS = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class KMeans(grids.OnGrid):
    """Quantization to the nearest of 2**bits values, which each row has for itself.

    A row is stored as codes `q`, a `codebook` in ascending order, and a `scale` and an
    `offset` as by `Asymmetric`, and read as

        x = scale * (codebook[q] + offset)                    in float32, in this order,

    then clamped to the finite range of the table's dtype and rounded to it. The rows that
    `Asymmetric` escapes are escaped here too.

    Lloyd's algorithm finds the values from two starts: quantiles of the row, and the levels
    of `Asymmetric` without refits. The better result is kept.

    **Error bound.** `||x - read(x)||_2 <= 0.54 * step * sqrt(dim)` as for the refits of
    `Asymmetric`: starting from its levels, no iteration makes the error greater, and rounding
    a codebook to float16 moves its values, all below 8 steps, by 2**-9 steps at most.

    Attributes:
        bits: width of a code: 2, 3 or 4.
        iterations: number of iterations of Lloyd's algorithm; 15 as in the paper.
        metadata_bits: 16 (bfloat16 scale, float16 offset and codebook) or 32 (float32).

    Example:
        >>> codec = KMeans(bits=2)
        >>> rows = jnp.array([[0.0, 0.1, 0.5, 0.6, 3.0, 3.1, 8.0, 8.0]])
        >>> parts = codec.encode(rows).parts
        >>> read = codec.decode(parts, dim=8, dtype=jnp.float32)
        >>> [f"{x:.2f}" for x in read[0]]
        ['0.05', '0.05', '0.55', '0.55', '3.05', '3.05', '8.00', '8.00']

    Source: Check-N-Run (NSDI'22), non-uniform quantization; S. Lloyd, "Least squares
    quantization in PCM", IEEE Transactions on Information Theory 28 (1982).
    """

    name: ClassVar[str] = "cnr.kmeans"
    bits: int = 2
    iterations: int = 15
    metadata_bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"bits is {self.bits}, expected one of {WIDTHS}")
        grids.OnGrid.__post_init__(self)
        if self.iterations < 0:
            raise ValueError(f"iterations is {self.iterations}, expected 0 or more")

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `codes` (uint8, packed), `scale`, `offset` and `codebook` (2**bits).

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        book = Part(self._metadata.offset_dtype, 2**self.bits)
        return {**grids.OnGrid.parts(self, dim, dtype), "codebook": book}

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        levels = 2**self.bits - 1
        given = grids.ranged(rows, levels, self._metadata)
        factor, shift = 1.0 / given.grid.scale, -given.grid.offset
        steps = given.x * factor[:, None] + shift[:, None]
        steps = jnp.where(given.held[:, None], steps, 0.0)
        book = _codebook(steps, levels, self.iterations, self._metadata)
        codes = jnp.zeros(steps.shape, jnp.uint8)
        for above in _above(steps, book):
            codes += above.astype(jnp.uint8)
        parts = {
            "codes": grids.pack(codes, self.bits),
            **grids.stored(given.grid, given.held, self._metadata),
            "codebook": book.astype(self._metadata.offset_dtype),
        }
        return Encoded(parts, ~(given.held | given.zero))

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if the codes do not have the width that `dim` and `bits` give.
        """
        codes = grids.unpack(jnp.asarray(parts["codes"]), self.bits, dim)
        book = jnp.asarray(parts["codebook"]).astype(jnp.float32)
        centred = jnp.take_along_axis(book, codes.astype(jnp.int32), axis=1)
        return grids.read_stored(centred, parts, dtype)


def _codebook(
    steps: jax.Array, levels: int, iterations: int, metadata: grids.Metadata
) -> jax.Array:
    """Returns the better of two codebooks for each row, float32[rows, 2**bits], as stored."""
    dim = steps.shape[1]
    x = in_lanes(steps)
    places = (np.arange(levels + 1) + 0.5) / (levels + 1) * dim
    quantiles = jnp.sort(steps, axis=1)[:, places.astype(np.int32)]
    even = jnp.arange(levels + 1, dtype=jnp.float32)[None] - 0.5 * levels
    even = jnp.broadcast_to(even, quantiles.shape)
    books = [
        metadata.round_offset(
            lax.fori_loop(0, iterations, lambda _, book: _lloyd(x, book, dim), start)
        )
        for start in (quantiles, even)
    ]
    errors = [_squared_error(x, book, dim) for book in books]
    return jnp.where((errors[0] < errors[1])[:, None], *books)


def _above(x: jax.Array, book: jax.Array) -> list[jax.Array]:
    """Returns, for each bound between two values, which elements are above it."""
    bounds = 0.5 * (book[:, 1:] + book[:, :-1])
    return [x > bounds[:, k : k + 1] for k in range(bounds.shape[1])]


def _lloyd(x: jax.Array, book: jax.Array, dim: int) -> jax.Array:
    """Moves every value to the mean of the elements nearest to it, if there are any."""
    above = _above(x, book)
    counts = [each.astype(jnp.float32) for each in above]
    members = sums(dim, jnp.ones_like(x), *counts)
    totals = sums(dim, x, *(jnp.where(each, x, 0.0) for each in above))
    # Both count the elements above each bound. Those above the next bound belong to the next value.
    members, totals = (
        -jnp.diff(jnp.stack(found, axis=1), axis=1, append=0.0)
        for found in (members, totals)
    )
    return jnp.where(members > 0, totals / members, book)


def _squared_error(x: jax.Array, book: jax.Array, dim: int) -> jax.Array:
    read = book[:, :1]
    for k, above in enumerate(_above(x, book)):
        read = jnp.where(above, book[:, k + 1 : k + 2], read)
    error = x - read
    return sums(dim, error * error, error)[0]
