"""Logarithmic codes for elements that are never negative: accumulators of squares.

Optimizers divide by the root of an accumulator. So its relative error is what counts, and
the elements of one row may be many powers of ten apart.
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

from cnr_jax.integers import integer, take_integers
from cnr_jax.rows.codecs.base import (
    Configuration,
    Encoded,
    Part,
    check_dtype,
    rounded_to,
)

WIDTHS = (8, 16)
# Places are numbered from 2**-126, the least normal float32 number, 256 to an octave, so
# that all 254 octaves fit into 16 bits.
_PER_OCTAVE = 256
_LAST_PLACE = 254 * _PER_OCTAVE - 1
_MANTISSA_BITS = 23
_ONE = 127 << _MANTISSA_BITS
_LEAST_NORMAL = 1 << _MANTISSA_BITS
# Bits of 2**(i / 256), in [1, 2), rounded to float32. It is a table because platforms compute
# exponentials differently.
_TABLE = np.exp2(np.arange(_PER_OCTAVE) / _PER_OCTAVE).astype(np.float32).view(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Stores elements that are never negative as logarithms; zero is exact.

    A place `p` stands for

        2**(p // 256 - 126) * float32(2**((p % 256) / 256))

    With 16 bits a code is 0 for zero, else `p + 1`. With 8 bits a row has a greatest place
    `top` and a `stride`; a code is 0 for zero, else stands for
    `p = max(0, top - (255 - code) * stride)`. Decoded values are rounded to the table's dtype.

    A row is escaped if one of its elements is negative, not finite, above 2**127.99, or a
    float32 denormal. -0.0 reads as +0.0.

    **Error bound.** `|x - read(x)| <= (2**((stride / 2 + 0.02) / 256) - 1) x` before the
    rounding to the table's dtype, where stride is 1 with 16 bits: 0.15 %. With 8 bits it
    is the number of places between the least and the greatest nonzero element of the
    row, over 254, rounded up: 1.5 % where they are 10**3 apart, 3.0 % at 10**6,
    5.8 % at 10**12. Proof: the nearest place differs by at most half a stride (the
    greatest element by half a place), and the logarithm of a mantissa in [1, 2), times 256
    and added to a number below 2**16, by less than 0.02 places from the exact one.

    Attributes:
        bits: width of a code, 8 or 16. With 8 bits a row takes 4 bytes more.

    Example:
        >>> import jax.numpy as jnp
        >>> codec = Log(bits=8)
        >>> encoded = codec.encode(jnp.array([[0.0, 0.25, 1.0, 4.0]]))
        >>> {name: part.tolist() for name, part in encoded.parts.items()}
        {'codes': [[0, 50, 153, 255]], 'top': [[32768]], 'stride': [[5]]}
        >>> read = codec.decode(encoded.parts, dim=4, dtype=jnp.float32)
        >>> [f"{x:.3f}" for x in read[0]]
        ['0.000', '0.249', '1.005', '4.000']
    """

    name: ClassVar[str] = "cnr.log"
    bits: int = 16

    def __post_init__(self) -> None:
        take_integers(self, "bits")
        if integer(self.bits) not in WIDTHS:
            raise ValueError(f"bits is {self.bits}, expected one of {WIDTHS}")

    def configuration(self) -> Configuration:
        """Returns bits."""
        return {"bits": self.bits}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `codes` (uint8 or uint16), and with 8 bits also `top` and `stride` (uint16).

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        codes = {"codes": Part(np.dtype(f"uint{self.bits}"), dim)}
        if self.bits == 16:
            return codes
        one = Part(np.dtype(np.uint16), 1)
        return {**codes, "top": one, "stride": one}

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        check_dtype(rows.dtype)
        bits = lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.int32)
        zero = (bits & np.iinfo(np.int32).max) == 0
        place = _place(bits)
        # The bits, as integers, are negative for negative elements, and greatest for infinity and
        # NaN.
        within = (bits >= _LEAST_NORMAL) & (lax.round(place) <= _LAST_PLACE)
        within &= bits < 255 << _MANTISSA_BITS
        held = jnp.all(zero | within, axis=1, keepdims=True)
        coded, escaped = held & ~zero, ~held[:, 0]
        nearest = lax.round(place)
        if self.bits == 16:
            codes = jnp.where(coded, nearest + 1.0, 0.0)
            return Encoded({"codes": codes.astype(jnp.uint16)}, escaped)
        top = jnp.max(jnp.where(coded, nearest, 0.0), axis=1, keepdims=True)
        least = jnp.min(jnp.where(coded, nearest, top), axis=1, keepdims=True)
        stride = jnp.maximum(1.0, jnp.ceil((top - least) / 254.0))
        codes = jnp.clip(255.0 - lax.round((top - place) / stride), 1.0, 255.0)
        parts = {
            "codes": jnp.where(coded, codes, 0.0).astype(jnp.uint8),
            "top": top.astype(jnp.uint16),
            "stride": stride.astype(jnp.uint16),
        }
        return Encoded(parts, escaped)

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if a row does not have `dim` codes.
        """
        dtype = check_dtype(dtype)
        codes = jnp.asarray(parts["codes"]).astype(jnp.int32)
        if codes.shape[1:] != (dim,):
            raise ValueError(f"rows have {codes.shape[1]} codes, expected {dim}")
        if self.bits == 16:
            place = codes - 1
        else:
            top, stride = (
                jnp.asarray(parts[name]).astype(jnp.int32) for name in ("top", "stride")
            )
            place = top - (255 - codes) * stride
        # Codes that no encoder writes must still read as the same number on every platform.
        place = jnp.clip(place, 0, _LAST_PLACE)
        octave = (place // _PER_OCTAVE - 126) << _MANTISSA_BITS
        bits = jnp.asarray(_TABLE)[place % _PER_OCTAVE] + octave
        return rounded_to(
            lax.bitcast_convert_type(jnp.where(codes > 0, bits, 0), jnp.float32), dtype
        )


def _place(bits: jax.Array) -> jax.Array:
    """Returns the unrounded places of float32 numbers, given by their bits; float32."""
    octave = (bits >> _MANTISSA_BITS) - 1
    mantissa = lax.bitcast_convert_type(
        (bits & (_LEAST_NORMAL - 1)) | _ONE, jnp.float32
    )
    return octave.astype(jnp.float32) * _PER_OCTAVE + jnp.log2(mantissa) * _PER_OCTAVE
