"""Lattice of a table: rows as integers on one step, of which later saves store differences.

All elements of a table are multiples of one *step*. A full save chooses it from a sample of the
rows, so that their mean error is that of `adaptive` codes of 2, 3, 4 or 8 bits. A row that is much
smaller than most has a finer scale: the step is halved up to seven times. So a row is a vector of
integers, and some saves later a vector of nearly the same integers. A save stores the difference to
its parent, modulo the 256 (at 8 bits 65,536) values that an integer has. So any number of
differences add up without rounding and without overflow.

A step has 8 significant bits and an integer 7 (at 8 bits 15), so their product is exact in float32.
So a row has the same bits on all platforms, whether or not the product is fused with what follows.

Differs from Check-N-Run in: one step for a table takes the place of a range for each row. With
entropy coding (`packed.py`) that takes fewer bits for the same error, also without differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cnr_jax.rows.codecs.asymmetric import Asymmetric
from cnr_jax.rows.codecs.base import (
    Configuration,
    Encoded,
    Part,
    check_dtype,
    rounded_to,
)
from cnr_jax.rows.codecs.dither import thresholds
from cnr_jax.rows.codecs.lanes import extremes
from cnr_jax.rows.codecs.sparse import RowsAt, SparseRows

# Rows of a table from which its step is chosen.
SAMPLE_ROWS = 1 << 14
_HALVINGS = 7
# Rows with more than this many times the median error do not count in the choice of a step.
_FAR = 16.0
# Steps, as shares of the first guess, on which rows err as on it; and the share of their errors
# below which its own is none to go by.
_NEAR, _LITTLE = (0.71, 0.84), 0.9
# How many times that of `adaptive` codes the error may be on a step that is kept, instead of one
# chosen anew: within these bounds rows lose little, or take at most 0.6 bits too much.
SUITS = (2 / 3, 3 / 2)
# Steps within these bounds on either side of a bfloat16; rows that are tried on each of them; and
# the share that has to lie on one so that it is kept: of all, and of as many as lie on any.
_NEIGHBOURS, _TRIED_ROWS, _MANY, _NEARLY_ALL = 75, 256, 1 / 8, 0.9
# Products of integers and steps within these bounds, halved or not, are normal numbers.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100

Parts = Mapping[str, np.ndarray]
# Parts of rows to be added to the rows below; those that are stored sparse lack rows of zeros.
Layer = Mapping[str, np.ndarray | SparseRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """Integers on one step for a table, stored as differences to those of the parent.

    `encode` and `decode` take the same arguments as those of other codecs. The parts are
    `integers`, packed, and `scale`, the step of each row: that of its table, halved for small rows.
    A row is escaped if it is not finite, reaches beyond the integers, or is too small for seven
    halvings; its integers are zeros.

    **Error bound.** For a row that is not escaped, before the rounding to the table's dtype:
    `|x - read(x)| <= 0.51 * scale` for every element, or `1.01 * scale` if dithered. The scale is
    at most `max|x| / (2**(bits - 2) - 0.5)`: at 4 bits 2.2 times the step of `Symmetric`.

    Attributes:
        bits: width of the `adaptive` codes whose mean error the rows have: 2, 3, 4 or 8.

    Example:
        >>> encoded = Lattice(bits=4).encode(jnp.array([[0.5, -1.0, 0.25, 1.0]]))
        >>> {name: part.tolist() for name, part in encoded.parts.items()}
        {'integers': [[8, -16, 4, 16]], 'scale': [[0.0625]]}
    """

    name: ClassVar[str] = "cnr.lattice"
    dithers: ClassVar[Literal[True]] = True
    summed: ClassVar[tuple[str, ...]] = ("integers", "scale")
    on_step: ClassVar[Literal[True]] = True
    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise ValueError(f"bits is {self.bits}, expected 2, 3, 4 or 8")

    def configuration(self) -> Configuration:
        """Returns bits, which tell a reader whether integers have 8 or 16 bits."""
        return {"bits": self.bits}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `integers` and `scale` (one per row).

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        return {
            "integers": Part(self._dtype, dim, "packed_rows"),
            "scale": Part(np.dtype(np.float32), 1, "zstd"),
        }

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(np.int16 if self.bits == 8 else np.int8)

    def step(self, rows: jax.Array) -> jax.Array:
        """Returns the step at which rows have the mean error of `adaptive` codes. Jit-able.

        If many rows already lie on another step, not far from it, that one is taken: rows that have
        been restored and not trained since stay as they are.

        Args:
            rows: float[rows, dim]; rows that are not finite do not count.
        """
        dim = rows.shape[1]
        adaptive = Asymmetric(bits=self.bits).at_dim(dim)
        encoded = adaptive.encode(rows)
        read = adaptive.decode(encoded.parts, dim=dim, dtype=np.float32)
        x = rows.astype(jnp.float32)
        off = jnp.where(encoded.escaped, 0, jnp.linalg.norm(x - read, axis=1))
        # A few rows of another magnitude must not decide for all others.
        typical = jnp.nanmedian(jnp.where(off > 0, off, np.nan))
        kept = (off > 0) & (off <= _FAR * typical)
        wanted = _mean(off, kept)
        step = jnp.maximum(wanted * np.float32((12 / dim) ** 0.5), _SMALLEST)

        def error(step: jax.Array) -> jax.Array:
            on = self.encode_on(rows, step)
            read = self.decode(on.parts, dim=dim, dtype=np.float32)
            off = jnp.where(kept, jnp.linalg.norm(x - read, axis=1), 0)
            return _mean(off, kept & ~on.escaped)

        # A correction: errors fill a step evenly only where rows span many steps, and some rows
        # have a finer scale. But rows that have just been restored lie at or near multiples of an
        # earlier step. If that is this one they hardly err, which says nothing of later rows.
        found = error(step)
        others = jnp.stack([error(step * near) / near for near in _NEAR]).max()
        found = jnp.where(found < _LITTLE * others, others, found)
        step = jnp.where(found > 0, step * wanted / found, step)
        # Where every row has one value throughout, the step comes from a range about zero.
        wide = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0.0)
        wide = jnp.where(wide > 0, wide / (0.5 * (2**self.bits - 1)), 1.0)
        step = jnp.where(kept.any(), step, wide)
        bounded = jnp.clip(step, _SMALLEST, _LARGEST)
        return self._of_many(rows, bounded.astype(jnp.bfloat16))

    def _of_many(self, rows: jax.Array, step: jax.Array) -> jax.Array:
        """Returns the coarsest step near a bfloat16 one on which many rows lie, else that one."""
        tried = rows[:: max(1, len(rows) // _TRIED_ROWS)]
        bits = lax.bitcast_convert_type(step, jnp.uint16).astype(jnp.int32)
        # The coarsest first: rows lie on the half of their step too.
        near = bits + jnp.arange(_NEIGHBOURS, -_NEIGHBOURS - 1, -1)
        steps = lax.bitcast_convert_type(near << 16, jnp.float32)
        steps = jnp.clip(steps, _SMALLEST, _LARGEST)

        def share(step: jax.Array) -> jax.Array:
            on = self.encode_on(tried, step)
            read = self.decode(on.parts, dim=tried.shape[1], dtype=tried.dtype)
            lie = (read == tried).all(axis=1) & (tried != 0).any(axis=1)
            return jnp.mean(lie & ~on.escaped)

        shares = lax.map(share, steps)
        enough = shares >= jnp.maximum(_NEARLY_ALL * shares.max(), _MANY)
        found = steps[jnp.argmax(enough)]
        return jnp.where(enough.any(), found, step.astype(jnp.float32))

    def encode(self, rows: jax.Array, keys: jax.Array | None = None) -> Encoded:
        """Encodes float[rows, dim] as a table of its own; the class says which rows are escaped.

        Args:
            rows: float32, bfloat16 or float16.
            keys: uint32[rows], see `row_keys`: integers are dithered; None: they are the nearest.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        check_dtype(rows.dtype)
        return self.encode_on(rows, self.step(rows), keys)

    def encode_on(
        self, rows: jax.Array, step: jax.Array, keys: jax.Array | None = None
    ) -> Encoded:
        """Encodes rows as `encode` does, on a given step: one for all rows, or float32[rows].

        Where an element is halfway between two integers, platforms may choose differently.
        """
        low, high, _, finite, zero = extremes(rows)
        places = jnp.maximum(-low, high) / step
        # At 4 bits the largest integer of a row is 4 or more, so its scale is at most about twice
        # that of a range about zero of its own.
        least = np.float32(2 ** (self.bits - 2) - 0.5)
        finer = [(places * 2.0**n < least).astype(jnp.int32) for n in range(_HALVINGS)]
        halvings = jnp.where(zero, 0, sum(finer))
        most = np.iinfo(self._dtype).max
        places = places * _power(halvings)
        escaped = ~finite | (places > most - 1) | ((places < least) & ~zero)
        t = rows.astype(jnp.float32) * (_power(halvings) / step)[:, None]
        t = (
            jnp.round(t)
            if keys is None
            else jnp.floor(t + thresholds(keys, t.shape[1]))
        )
        integers = jnp.where(escaped[:, None], 0, t).astype(self._dtype)
        scale = step * _power(jnp.where(escaped, 0, -halvings))
        return Encoded({"integers": integers, "scale": scale[:, None]}, escaped)

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        del dim
        dtype = check_dtype(dtype)
        # The product is exact, so no platform and no fusion rounds it in another way.
        rows = jnp.asarray(parts["integers"]).astype(jnp.float32)
        return rounded_to(rows * jnp.asarray(parts["scale"]), dtype)

    # The methods below run on the host, on numpy arrays of the parent and of the save on top.

    def difference(self, parts: Parts, below: Parts) -> dict[str, np.ndarray]:
        """Returns `parts` with the integers that `add` adds to those below to get `parts` back."""
        integers, scale, before = below["integers"], parts["scale"], below["scale"]
        if len(moved := _moved(before, scale)):
            integers = integers.copy()
            integers[moved] = _rescaled(integers[moved], before[moved], scale[moved])
        return {**parts, "integers": parts["integers"] - integers}

    def add(self, layer: Layer, rows: RowsAt) -> None:
        """Turns the parts below, in place, into those of the save whose differences are given."""
        scale, before = layer["scale"], rows.take("scale")
        assert isinstance(scale, np.ndarray)
        if len(moved := _moved(before, scale)):
            found = rows.take("integers", moved)
            found = _rescaled(found, before[moved], scale[moved])
            rows.put("integers", found, moved)
            rows.put("scale", scale[moved], moved)
        rows.add("integers", layer["integers"])


def _mean(values: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(kept, values, 0).sum() / jnp.maximum(kept.sum(), 1)


def _power(exponents: jax.Array) -> jax.Array:
    """Returns 2 to the power of small integers, exactly, which `exp2` does not promise."""
    return lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)


def _moved(before: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns the positions of rows whose scale differs from the one below."""
    return np.flatnonzero(before[:, 0] != scale[:, 0])


def _rescaled(
    integers: np.ndarray, before: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Returns integers on another scale, which is finer or coarser by a power of two."""
    finer = np.log2(before / scale).astype(np.int32)
    wide = integers.astype(np.int32)
    up, down = np.maximum(finer, 0), np.maximum(-finer, 0)
    # Halves are rounded up. Overflows wrap round, both where a difference is taken and added.
    return (((wide << up) + (1 << down >> 1)) >> down).astype(integers.dtype)
