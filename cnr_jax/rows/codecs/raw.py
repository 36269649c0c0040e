"""The codec that keeps every bit: NaN payloads, signed zeros, denormals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cnr_jax.rows.codecs.base import Configuration, Encoded, Part, bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Stores rows as they are; the default for optimizer slots.

    Takes any dtype. Nothing is computed, so nothing is flushed, quieted or rounded.

    Example:
        >>> encoded = Raw().encode(jnp.array([[1.0, -0.0]]))
        >>> encoded.parts["rows"].tolist(), encoded.escaped.tolist()
        ([[1.0, -0.0]], [False])
    """

    @property
    def name(self) -> str:
        """The codec's name on disk."""
        return "cnr.raw"

    def configuration(self) -> Configuration:
        """Returns the empty configuration: there is nothing to configure."""
        return {}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns the one part `rows`: `dtype[rows, dim]`."""
        return {"rows": Part(np.dtype(dtype), dim)}

    def row_bytes(self, dim: int, dtype: DTypeLike) -> int:
        """Returns the bytes of one row."""
        return bytes_of(self.parts(dim, dtype))

    def encode(self, rows: jax.Array) -> Encoded:
        """Returns the rows themselves; none is escaped."""
        return Encoded({"rows": rows}, jnp.zeros(rows.shape[0], jnp.bool_))

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns the rows themselves.

        Raises:
            ValueError: if the part is not `dtype[rows, dim]`; a conversion would not be
                exact.
        """
        rows = parts["rows"]
        if rows.dtype != np.dtype(dtype) or rows.shape[1:] != (dim,):
            raise ValueError(
                f"raw rows are {rows.dtype}{list(rows.shape)}, expected"
                f" {np.dtype(dtype)}[rows, {dim}]"
            )
        return jnp.asarray(rows)
