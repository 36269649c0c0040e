"""A grid of equidistant levels per row: how it is stored, chosen from a range, and read.

A row has a `scale` and an `offset` in steps, and its code `q` of `bits` bits reads as

    x = scale * ((q - (2**bits - 1) / 2) + offset)        in float32, in this order,

then clamped to the finite range of the table's dtype and rounded to it. An addition
followed by a multiplication cannot be fused, so every platform reads the same bits.
`scale` alone carries the magnitude: bfloat16 has the exponents of float32, while
`offset` is a plain number of steps, for which float16 has the better precision.

Codes of 2, 3, 4 or 8 bits are packed on the device. A row is one little-endian bit string: code
`i` fills bits `[i * bits, (i + 1) * bits)`, and bit `k` of the string is bit `k % 8` of byte
`k // 8`. So an earlier code sits in the lower bits of a byte. A row ends on a byte boundary, its
last byte padded with zero bits, so that rows can be gathered and concatenated without touching
their bits. This order is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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
from cnr_jax.rows.codecs.dither import thresholds
from cnr_jax.rows.codecs.lanes import extremes, sums

# A scale within these keeps all arithmetic of encode and decode among normal float32 numbers
# (the smallest nonzero |q - mid + offset| is 2**-25). So platforms that flush denormals agree
# with those that do not, and reciprocals do not underflow.
_MIN_SCALE = 2.0**-100
_MAX_SCALE = 2.0**100
# The smallest whole number of bytes that whole codes fill: {bits: (codes, bytes)}.
_GROUPS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 8: (1, 1)}

WIDTHS = tuple(_GROUPS)


class Grid(NamedTuple):
    """Scale and offset of rows, which place their levels: float32 with the values stored."""

    scale: jax.Array
    offset: jax.Array


class Metadata(NamedTuple):
    """Dtypes of scale and offset, and the limit up to which offsets are precise."""

    scale_dtype: np.dtype
    offset_dtype: np.dtype
    offset_limit: float

    def round_scale(self, scale: jax.Array) -> jax.Array:
        """Returns scales rounded so that `scale_dtype` stores them exactly."""
        return _rounded(scale, self.scale_dtype)

    def round_offset(self, offset: jax.Array) -> jax.Array:
        """Returns offsets rounded so that `offset_dtype` stores them exactly."""
        return _rounded(offset, self.offset_dtype)

    def usable(self, grid: Grid) -> jax.Array:
        """Whether scale and offset are within their limits; False also for NaN."""
        in_range = (grid.scale >= _MIN_SCALE) & (grid.scale <= _MAX_SCALE)
        return in_range & (jnp.abs(grid.offset) < self.offset_limit)

    def between(self, low: jax.Array, high: jax.Array, levels: int) -> Grid:
        """Returns the grid of `levels + 1` levels whose ends are nearest to `low` and `high`."""
        scale = self.round_scale((high - low) / levels)
        return Grid(scale, self.round_offset((low + (high - low) * 0.5) / scale))


def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    # Not a cast there and back: XLA may drop such a pair
    # (`xla_allow_excess_precision`), and rows would be coded for metadata other than
    # what is stored.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


class Judged(NamedTuple):
    """Grids of rows, and the squared error of each row on its grid, in a unit of the row's own."""

    error: jax.Array
    grid: Grid

    def or_better(self, other: Judged, metadata: Metadata) -> Judged:
        """Returns for each row the grid of less error, if usable; an error of NaN is never less."""
        better = metadata.usable(other.grid) & (other.error < self.error)
        return jax.tree.map(lambda a, b: jnp.where(better, b, a), self, other)


METADATA = {
    # Half a float16 ulp below 1024 is 1/4 step: an end of the range is missed by less
    # than half a step even together with the bfloat16 scale (see the proof in
    # `Asymmetric`).
    16: Metadata(np.dtype(jnp.bfloat16), np.dtype(np.float16), 1024.0),
    # Five float32 roundings of numbers below 2**15 are 5/512 step.
    32: Metadata(np.dtype(np.float32), np.dtype(np.float32), 32768.0),
}


def checked_metadata_bits(bits: int, metadata_bits: int | None) -> int:
    """Returns the bits of scale and offset each, by default 16 where codes have up to 4 bits.

    Raises:
        ValueError: if codes cannot have `bits` bits, or their metadata not `metadata_bits`.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits is {bits}, expected one of {WIDTHS}")
    legal = (32,) if bits == 8 else (16, 32)
    if metadata_bits is None:
        return legal[0]
    if metadata_bits not in legal:
        raise ValueError(
            f"metadata_bits is {metadata_bits}, expected one of {legal} for"
            f" codes of {bits} bits"
        )
    return metadata_bits


class OnGrid:
    """Base of codecs whose rows have a range of their own, such as `Asymmetric`.

    Attributes:
        bits: width of a code.
        metadata_bits: width of scale and of offset, set by `checked_metadata_bits`.
    """

    __slots__ = ()
    bits: int
    metadata_bits: int | None

    def __post_init__(self) -> None:
        # The default is resolved here, so that equal codecs compare, hash and compile as one.
        kind: Any = type(self)
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        counts = [name for name in fields if fields[name] in ("int", "int | None")]
        take_integers(self, *counts)
        bits = checked_metadata_bits(self.bits, self.metadata_bits)
        object.__setattr__(self, "metadata_bits", bits)
        for name in counts:
            value = getattr(self, name)
            if value is not None and integer(value) is None:
                raise ValueError(f"{name} is {value!r}, expected an integer")

    @property
    def _metadata(self) -> Metadata:
        assert self.metadata_bits is not None  # __post_init__ resolves the default
        return METADATA[self.metadata_bits]

    def configuration(self) -> Configuration:
        """Returns all fields of the codec, a dataclass; a new field changes what is stored.

        Reading needs bits, metadata_bits and the levels of a codebook. Other fields only say
        how the codes were chosen.
        """
        kind: Any = type(self)
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: getattr(self, name) for name in names}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `codes` (uint8, packed), `scale` and `offset` (one each per row).

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        return {
            "codes": Part(np.dtype(np.uint8), packed_width(dim, self.bits)),
            "scale": Part(self._metadata.scale_dtype, 1),
            "offset": Part(self._metadata.offset_dtype, 1),
        }

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        A decoded value past the largest finite one (float16 rows near 65504) is clamped
        to it, which only brings it closer to the value that was encoded.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if the codes do not have the width that `dim` and `bits` give.
        """
        codes = unpack(jnp.asarray(parts["codes"]), self.bits, dim)
        centred = codes.astype(jnp.float32) - 0.5 * (2**self.bits - 1)
        return read_stored(centred, parts, dtype)


class Ranged(NamedTuple):
    """Rows and what is known of them before the search for a grid.

    Attributes:
        x: float32[rows, dim].
        low, high: least and greatest element, [rows].
        total: sum of the elements, [rows].
        grid: grid from the least to the greatest element.
        held: whether that grid is usable and the row finite, [rows].
        zero: whether all elements are zeros, [rows].
    """

    x: jax.Array
    low: jax.Array
    high: jax.Array
    total: jax.Array
    grid: Grid
    held: jax.Array
    zero: jax.Array


def ranged(rows: jax.Array, levels: int, metadata: Metadata) -> Ranged:
    """Returns rows with their extremes, and for each row the grid over its whole range."""
    check_dtype(rows.dtype)
    low, high, total, finite, zero = extremes(rows)
    grid = metadata.between(low, high, levels)
    held = metadata.usable(grid) & finite
    return Ranged(rows.astype(jnp.float32), low, high, total, grid, held, zero)


def encode(
    given: Ranged,
    grid: Grid,
    bits: int,
    metadata: Metadata,
    keys: jax.Array | None = None,
) -> Encoded:
    """Returns the codes of rows on a grid; rows that are neither held nor zero are escaped.

    Args:
        given: the rows.
        grid: grid of their levels.
        bits: width of a code.
        metadata: dtypes of scale and offset.
        keys: uint32[rows] of `row_keys`, by which codes are dithered; None: the nearest codes.
    """
    levels = Even(2**bits - 1)
    # Rows of zeros and escaped rows have scale 0, with which a code above the middle reads +0.0.
    factor, shift = placing(grid, levels)
    factor = jnp.where(given.held, factor, 0.0)[:, None]
    shift = jnp.where(given.held, shift, float(levels.last))[:, None]
    x = jnp.where(given.held[:, None], given.x, 0.0)
    place = x * factor + shift
    if keys is None:
        codes = levels.nearest(place)
    else:
        codes = levels.dithered(place, thresholds(keys, x.shape[1]))
    # The cast keeps whole numbers, and takes the whole part of dithered ones; none is below zero.
    packed = pack(codes.astype(jnp.uint8), bits)
    return Encoded(
        {"codes": packed, **stored(grid, given.held, metadata)},
        ~(given.held | given.zero),
    )


def stored(
    grid: Grid, held: jax.Array, metadata: Metadata, other_offset: float = 0.0
) -> dict[str, jax.Array]:
    """Returns the parts `scale` and `offset`; rows not held get scale 0 and `other_offset`."""
    scale = jnp.where(held, grid.scale, 0.0)
    offset = jnp.where(held, grid.offset, other_offset)
    return {
        "scale": scale[:, None].astype(metadata.scale_dtype),
        "offset": offset[:, None].astype(metadata.offset_dtype),
    }


def read_stored(
    centred: jax.Array, parts: Mapping[str, jax.Array], dtype: DTypeLike
) -> jax.Array:
    """Returns the rows, `dtype[rows, dim]`, from codes less the middle, float32[rows, dim]."""
    dtype = check_dtype(dtype)
    scale = jnp.asarray(parts["scale"]).astype(jnp.float32)
    offset = jnp.asarray(parts["offset"]).astype(jnp.float32)
    # The stored format's formula: an addition, then a multiplication.
    return rounded_to(scale * (centred + offset), dtype)


class Levels(Protocol):
    """Levels that codes stand for, as a search needs them to code elements."""

    @property
    def last(self) -> int:
        """The greatest code."""
        ...

    @property
    def middle(self) -> float:
        """Value of the middle of all levels, in steps."""
        ...

    def nearest(self, place: jax.Array) -> jax.Array:
        """Returns the value of the level nearest to a place, in steps; both float32."""
        ...


class Even(NamedTuple):
    """Levels one step apart, from 0: their values are their codes."""

    last: int

    @property
    def middle(self) -> float:
        """See `Levels`."""
        return 0.5 * self.last

    def nearest(self, place: jax.Array) -> jax.Array:
        """Returns the code, a whole number, nearest to a place."""
        return self._clipped(lax.round(place, lax.RoundingMethod.TO_NEAREST_EVEN))

    def dithered(self, place: jax.Array, h: jax.Array) -> jax.Array:
        """Returns numbers whose whole parts are the codes of places; h in [0, 1), see `dither`."""
        return self._clipped(place + h)

    def _clipped(self, code: jax.Array) -> jax.Array:
        # Not `jnp.clip`, which passes NaN on and so costs twice as much.
        code = jnp.where(code > self.last, float(self.last), code)
        return jnp.where(code < 0, 0.0, code)


def placing(grid: Grid, levels: Levels) -> tuple[jax.Array, jax.Array]:
    """Returns factor and shift: `x * factor + shift` is the place of x on `levels`, in scales."""
    # The barrier keeps the division to one per row: fused, it would run for each element.
    return lax.optimization_barrier((1.0 / grid.scale, levels.middle - grid.offset))


def squared_errors(
    x: jax.Array, candidates: Sequence[Grid], dim: int, levels: Levels
) -> Sequence[jax.Array]:
    """Returns the squared error of each row on each grid, in squared scales of the grid, [rows].

    Args:
        x: [rows, width], see `in_lanes`.
        candidates: grids of arrays [rows]. Pass two at a time: their sums stay in registers.
        dim: number of columns that count.
        levels: levels that codes stand for.
    """
    terms: list[jax.Array] = []
    for grid in candidates:
        factor, shift = placing(grid, levels)
        place = x * factor[:, None] + shift[:, None]
        terms.append(jnp.square(place - levels.nearest(place)))
    return sums(dim, *terms)


def packed_width(dim: int, bits: int) -> int:
    """Returns the bytes that `dim` codes of `bits` bits take.

    Example:
        >>> packed_width(64, 4), packed_width(9, 3)
        (32, 4)
    """
    _group(bits)
    return -(-dim * bits // 8)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs one code per element into bytes.

    Args:
        codes: uint8[rows, dim], each below `2**bits`; higher bits would spill into the
            neighbouring codes.
        bits: 2, 3, 4 or 8. Static.

    Returns:
        uint8[rows, packed_width(dim, bits)].

    Example:
        >>> pack(jnp.array([[1, 2, 15]], jnp.uint8), bits=4).tolist()
        [[33, 15]]
    """
    per_group, group_bytes = _group(bits)
    rows, dim = codes.shape
    if bits == 8:
        return codes
    codes = _pad_columns(codes, per_group)
    groups = codes.reshape(rows, codes.shape[1] // per_group, per_group)
    word = _join(groups, jnp.uint32 if group_bytes > 1 else jnp.uint8, bits)
    if group_bytes == 1:
        return word
    out = _spread(word, group_bytes, 8).astype(jnp.uint8)
    return out[:, : packed_width(dim, bits)]


def unpack(packed: jax.Array, bits: int, dim: int) -> jax.Array:
    """Returns the `dim` codes of every row; the inverse of `pack`.

    Args:
        packed: uint8[rows, packed_width(dim, bits)].
        bits: 2, 3, 4 or 8. Static.
        dim: codes per row. Static.

    Returns:
        uint8[rows, dim].

    Example:
        >>> unpack(jnp.array([[33, 15]], jnp.uint8), bits=4, dim=3).tolist()
        [[1, 2, 15]]
    """
    per_group, group_bytes = _group(bits)
    rows, width = packed.shape
    if width != packed_width(dim, bits):
        raise ValueError(
            f"packed rows are {width} bytes wide, expected"
            f" {packed_width(dim, bits)} for {dim} codes of {bits} bits"
        )
    if bits == 8:
        return packed
    word = packed
    if group_bytes > 1:
        padded = _pad_columns(packed, group_bytes)
        groups = padded.shape[1] // group_bytes
        word = _join(padded.reshape(rows, groups, group_bytes), jnp.uint32, 8)
    return _spread(word, per_group, bits)[:, :dim].astype(jnp.uint8)


def _group(bits: int) -> tuple[int, int]:
    if bits not in _GROUPS:
        raise ValueError(
            f"codes of {bits} bits cannot be packed, expected one of {WIDTHS}"
        )
    return _GROUPS[bits]


def _pad_columns(array: jax.Array, multiple: int) -> jax.Array:
    missing = -array.shape[1] % multiple
    return jnp.pad(array, ((0, 0), (0, missing))) if missing else array


def _join(fields: jax.Array, dtype: DTypeLike, bits: int) -> jax.Array:
    """Joins the fields of the last axis, of `bits` bits each, lowest first, into one word.

    It is a reduction: slices joined by `|` would read well, but XLA computes whatever produces
    the fields anew for each slice, which made 3 bits ten times slower.
    """
    dtype = np.dtype(dtype)
    shifts = (np.arange(fields.shape[-1]) * bits).astype(dtype)
    shifted = fields.astype(dtype) << lax.broadcast_in_dim(shifts, fields.shape, (2,))
    return lax.reduce(shifted, dtype.type(0), lax.bitwise_or, (2,))


def _spread(word: jax.Array, pieces: int, bits: int) -> jax.Array:
    """Splits each word into `pieces` fields of `bits` bits, lowest first, which take its place."""
    shifts = np.arange(pieces, dtype=word.dtype) * np.array(bits, word.dtype)
    mask = np.array((1 << bits) - 1, word.dtype)
    rows, words = word.shape
    shape = (rows, words, pieces)
    fields = lax.broadcast_in_dim(word, shape, (0, 1)) >> lax.broadcast_in_dim(
        shifts, shape, (2,)
    )
    return (fields & mask).reshape(rows, words * pieces)
