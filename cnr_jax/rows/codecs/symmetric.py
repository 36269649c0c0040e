"""Uniform quantization of each row over a range about zero: the paper's simplest method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cnr_jax.rows.codecs import grid as grids
from cnr_jax.rows.codecs.base import (
    Encoded,
    Part,
    check_dtype,
    rounded_to,
)
from cnr_jax.rows.codecs.lanes import extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class Symmetric(grids.OnGrid):
    """Symmetric uniform quantization per row, to codes of 2, 3, 4 or 8 bits.

    A row is stored as codes `q` and a `scale`, and read as

        x = scale * (q - (2**bits - 1) / 2)                   in float32,

    then clamped to the finite range of the table's dtype and rounded to it. The levels
    lie on both sides of zero; none is zero. A row takes two bytes less than with
    `Asymmetric` and 16-bit metadata, and has a greater error unless it is centred on zero.

    A row is escaped if it has a non-finite element, or if its step (see below) is outside
    [2**-100, 2**100] and not zero. A row of zeros is held exactly, but for the sign of -0.0.

    **Error bound.** For a row that is not escaped, with
    `step = 2 * max|x| / (2**bits - 1)`, before the rounding to the table's dtype:
    `|x - read(x)| <= 0.51 * step` for every element, or `1.01 * step` if dithered. The proof
    is that of `Asymmetric`; the offset is 0, so that d in (2) is the first term alone.

    Attributes:
        bits: width of a code.
        metadata_bits: 16 (bfloat16 scale) or 32 (float32); by default 16 up to 4 bits.
            8 bits need 32: a bfloat16 scale would miss the ends by half a step.

    Example:
        >>> codec = Symmetric(bits=2)
        >>> encoded = codec.encode(jnp.array([[-1.5, 0.25, 1.25]]))
        >>> {name: part.tolist() for name, part in encoded.parts.items()}
        {'codes': [[56]], 'scale': [[1.0]]}
        >>> codec.decode(encoded.parts, dim=3, dtype=jnp.float32).tolist()
        [[-1.5, 0.5, 1.5]]

    Source: Check-N-Run (NSDI'22), symmetric quantization per embedding vector.
    """

    name: ClassVar[str] = "cnr.symmetric"
    dithers: ClassVar[Literal[True]] = True
    bits: int = 4
    metadata_bits: int | None = None

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `codes` (uint8, packed) and `scale` (one per row).

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        found = grids.OnGrid.parts(self, dim, dtype)
        del found["offset"]
        return found

    def encode(self, rows: jax.Array, keys: jax.Array | None = None) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        check_dtype(rows.dtype)
        x = rows.astype(jnp.float32)
        low, high, total, finite, zero = extremes(rows)
        far = jnp.maximum(-low, high)
        # Half the levels divide half the range, as twice the largest magnitude may overflow.
        scale = self._metadata.round_scale(far / (0.5 * (2**self.bits - 1)))
        grid = grids.Grid(scale, jnp.zeros_like(scale))
        held = self._metadata.usable(grid) & finite
        given = grids.Ranged(x, -far, far, total, grid, held, zero)
        encoded = grids.encode(given, grid, self.bits, self._metadata, keys)
        del encoded.parts["offset"]
        return encoded

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if the codes do not have the width that `dim` and `bits` give.
        """
        dtype = check_dtype(dtype)
        codes = grids.unpack(jnp.asarray(parts["codes"]), self.bits, dim)
        scale = jnp.asarray(parts["scale"]).astype(jnp.float32)
        centred = codes.astype(jnp.float32) - 0.5 * (2**self.bits - 1)
        return rounded_to(scale * centred, dtype)
