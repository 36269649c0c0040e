"""Codec that keeps sign, exponent and eight bits of precision, in half the bytes of float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cnr_jax.rows.codecs.base import (
    Configuration,
    Encoded,
    Part,
    check_dtype,
    rounded_to,
)

_INFINITY = 0x7F80


@dataclass(frozen=True, slots=True, kw_only=True)
class BFloat16:
    """Stores rows rounded to bfloat16, to nearest even; meant for optimizer slots.

    A row is escaped if one of its elements is not finite, or would not be once it is rounded.

    **Error bound.** `|x - read(x)| <= 2**-8 |x|` for every element but float32 denormals,
    which are rounded to a multiple of 2**-133. Zeros keep their sign. Rows of float16
    are rounded twice, which adds half an ulp of float16.

    Example:
        >>> encoded = BFloat16().encode(jnp.array([[1.0, 0.1, -0.0]]))
        >>> encoded.parts["rows"].tolist()
        [[1.0, 0.10009765625, -0.0]]
    """

    name: ClassVar[str] = "cnr.bfloat16"

    def configuration(self) -> Configuration:
        """Returns the empty configuration: there is nothing to configure."""
        return {}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns the one part `rows`: `bfloat16[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        return {"rows": Part(np.dtype(jnp.bfloat16), dim)}

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim].

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        check_dtype(rows.dtype)
        # Rounding is done on integers, so that no platform flushes denormals.
        bits = lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.uint32)
        if rows.dtype == jnp.bfloat16:
            upper = lax.bitcast_convert_type(rows, jnp.uint16)
        else:
            even = (bits >> 16) & 1
            # The sum may wrap a NaN around to zero, so `finite` below also looks at `bits`.
            upper = ((bits + 0x7FFF + even) >> 16).astype(jnp.uint16)
        finite = ((bits >> 16) & _INFINITY) != _INFINITY
        finite &= (upper & _INFINITY) != _INFINITY
        held = jnp.all(finite, axis=1)
        upper = jnp.where(held[:, None], upper, jnp.uint16(0))
        return Encoded({"rows": lax.bitcast_convert_type(upper, jnp.bfloat16)}, ~held)

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if the part does not have `dim` columns.
        """
        dtype = check_dtype(dtype)
        rows = jnp.asarray(parts["rows"])
        if rows.shape[1:] != (dim,):
            raise ValueError(f"rows are {rows.shape[1]} wide, expected {dim}")
        if dtype == jnp.bfloat16:
            return rows
        upper = lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.uint32)
        return rounded_to(lax.bitcast_convert_type(upper << 16, jnp.float32), dtype)
