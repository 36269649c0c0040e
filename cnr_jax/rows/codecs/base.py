"""Base of codecs, which map rows to fixed-width parts and back, and the codec `Raw`.

A codec is pure and jit-able. It is a frozen, hashable value, so it can be a static argument
of a jitted function. On disk it is a name and a configuration. Every part has a fixed width
per row, so rows of different saves can be concatenated, sliced and gathered without decoding.
Rows that a codec cannot hold within its error bound are *escaped*: the caller stores them raw
beside the parts and overwrites what `decode` returns for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# Its values have only types that JSON reads back as they were written.
Configuration = dict[str, int | float | str | list[float]]
# Dtypes of rows that quantizers accept.
DTYPES = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))
# The most elements of a row for which codecs state their error; expert weights may have millions.
WIDEST = 1 << 16
_FLOAT16_MAX = float(np.finfo(np.float16).max)


class Part(NamedTuple):
    """One of the arrays that encoded rows consist of.

    Attributes:
        dtype: dtype of the array.
        width: elements per row; the array is `dtype[rows, width]`.
        compression: compression of this array, whichever the other arrays get; None: the same.
        shared: whether the array is stored with the rows of another leaf.
    """

    dtype: np.dtype
    width: int
    compression: str | None = None
    shared: bool = False


class Encoded(NamedTuple):
    """Encoded rows, a pytree.

    Attributes:
        parts: arrays `dtype[rows, width]` by their names, as `Codec.parts` describes them.
        escaped: bool[rows]; True where the parts do not hold the row. The parts of an
            escaped row are finite and decode to zeros.
    """

    parts: dict[str, jax.Array]
    escaped: jax.Array


@runtime_checkable
class Codec(Protocol):
    """Encodes rows of a table or of an optimizer slot."""

    name: ClassVar[str]
    """The codec's name on disk."""

    def configuration(self) -> Configuration:
        """Returns the values that, with the name, suffice to make an equal codec again."""
        ...

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns the parts of encoded rows of `dim` elements of `dtype`."""
        ...

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes `dtype[rows, dim]`. Jit-able; no shape depends on values."""
        ...

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]` from the parts. Jit-able.

        The same parts give the same bits on every platform. The values returned for escaped
        rows have no meaning.
        """
        ...


@runtime_checkable
class Dithering(Codec, Protocol):
    """A codec whose codes can be dithered."""

    dithers: ClassVar[Literal[True]]
    """Set where that is so."""

    @property
    def bits(self) -> int:
        """Width of a code."""
        ...

    def encode(self, rows: jax.Array, keys: jax.Array | None = None) -> Encoded:
        """Encodes `dtype[rows, dim]` to the nearest codes, or dithered by `keys` (`row_keys`)."""
        ...


def bytes_of(parts: Mapping[str, Part]) -> int:
    """Returns the bytes of one encoded row, in all parts that are not shared."""
    own = (part for part in parts.values() if not part.shared)
    return sum(part.width * part.dtype.itemsize for part in own)


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of rows to be quantized, as `np.dtype`.

    Raises:
        TypeError: if the dtype is not float32, bfloat16 or float16.
    """
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        names = ", ".join(str(known) for known in DTYPES)
        raise TypeError(
            f"rows of {dtype} cannot be quantized, expected one of {names}\n"
            "  hint: use the codec 'raw' for other dtypes."
        )
    return dtype


def rounded_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 numbers rounded to `dtype`, to nearest even; finite ones stay finite.

    Only float16 needs a clip: the float32 numbers that codecs decode to are below 2**116.
    """
    if dtype == np.float16:
        x = jnp.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX)
    return x.astype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Stores rows of any dtype as they are; the default for optimizer slots.

    Nothing is computed, so no denormal is flushed, no NaN quieted and no number rounded.

    Example:
        >>> encoded = Raw().encode(jnp.array([[1.0, -0.0]]))
        >>> encoded.parts["rows"].tolist(), encoded.escaped.tolist()
        ([[1.0, -0.0]], [False])
    """

    name: ClassVar[str] = "cnr.raw"

    def configuration(self) -> Configuration:
        """Returns the empty configuration: there is nothing to configure."""
        return {}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns the one part `rows`: `dtype[rows, dim]`."""
        return {"rows": Part(np.dtype(dtype), dim)}

    def encode(self, rows: jax.Array) -> Encoded:
        """Returns the rows themselves; none is escaped."""
        return Encoded({"rows": rows}, jnp.zeros(rows.shape[0], jnp.bool_))

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns the rows themselves.

        Raises:
            ValueError: if the part is not `dtype[rows, dim]`, as a conversion would not be
                exact.
        """
        rows = parts["rows"]
        if rows.dtype != np.dtype(dtype) or rows.shape[1:] != (dim,):
            raise ValueError(
                f"raw rows are {rows.dtype}{list(rows.shape)}, expected"
                f" {np.dtype(dtype)}[rows, {dim}]"
            )
        return jnp.asarray(rows)
