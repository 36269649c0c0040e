"""Moments of gradients as integers: squares as logarithms, means in parts of the squares' roots.

Adam keeps two slots as large as the table: a mean of gradients (*mu*) and one of their squares
(*nu*). It moves all elements of both in each step, so their bits always change, although what they
mean to training may not. Adam divides by the root of nu, so only the size of nu counts: `Octave`
numbers it by *places* on a logarithmic scale. A save stores the places of a row relative to its
*centre*. A row without a gradient decays as all others do: its centre moves, its integers stay.
mu is at most a few times the root of nu, and has long decayed to zero where there was no gradient:
`Unit` counts it in eighths of that root, as a restore reads it. So rows that training has left
alone are zeros, which `packed.py` packs into next to nothing.

A reader needs nothing of the optimizer: how far centres moved is stored, not computed.

Differs from Check-N-Run in: that treats only the slots of sparse optimizers, and as table rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cnr_jax.integers import take_integers
from cnr_jax.rows.codecs.base import (
    Configuration,
    Encoded,
    Part,
    check_dtype,
    rounded_to,
)
from cnr_jax.rows.codecs.lattice import Layer, Parts
from cnr_jax.rows.codecs.sparse import RowsAt

_MOST_PLACES = 256
_MANTISSA_BITS = 23
_ONE = 127 << _MANTISSA_BITS
_LEAST_NORMAL = 1 << _MANTISSA_BITS
# Octaves of normal float32 numbers.
_LOWEST, _HIGHEST = -126, 127
# Bits of a root: its product with an integer of 7 bits is exact in float32.
_ROOT_BITS = 16
# Where nu reads as zero, mu up to this size does too. Divided by Adam's epsilon of 1e-8, the least
# divisor, such a mu moves an element by a ten thousand millionth of the rate.
_NO_MEAN = 2.0**-60
# Roots below the first are of gradients well below one. It takes the second number of elements to
# tell whether roots are of squares.
_SMALL_ROOT, _LEAST_BESIDE = 0.1, 64
# Flags of elements, and of the rows that have such elements.
_BAD, _KNOWN, _FAR = 1, 2, 4
# A number beyond all places.
_BEYOND = 1 << 30
# The most values that are looked up by comparisons.
_FEW = 8
# Rows in the sample that shows how far centres move, and the most places that they move.
_SHIFT_ROWS, _SHIFTS = 512, 512
# A prime: its multiples, modulo the number of rows, pick the rows of a sample.
_SPREAD = 2_654_435_761


@dataclass(frozen=True, slots=True, kw_only=True)
class Octave:
    """Stores elements that are never negative as integer logarithms; zero is exact.

    An element is stored as an integer `q`: 0 for zero, else it has the place
    `p = centre + q - (q > 0)` and stands for `2**(p / places)`. Each row has one centre; it is 0,
    and is not stored, where rows have a single element.

    **Error bound.** To nearest, `|x - read(x)| <= (2**(0.52 / places) - 1) x`: 20 % at 2 places,
    0.15 % at 256. A row that is encoded over the integers below keeps them if no element is further
    than one place from what they read as, decayed as most are: 42 %, 0.28 %. Elements below
    2**-126 read as zero. A row is escaped if one of its elements is negative or not finite,
    rounds to 2**128, or is 2**15 places from its centre.

    Attributes:
        places: number of places in an octave: a power of two up to 256.

    Example:
        >>> encoded = Octave(places=2).encode(jnp.array([[0.0, 0.5, 1.0, 8.0]]))
        >>> {name: part.tolist() for name, part in encoded.parts.items()}
        {'integers': [[0, -3, -1, 6]], 'centre': [[1]]}
    """

    name: ClassVar[str] = "cnr.octave"
    summed: ClassVar[tuple[str, ...]] = ("integers", "centre")
    on_step: ClassVar[Literal[False]] = False
    places: int = 2

    def __post_init__(self) -> None:
        take_integers(self, "places")
        _check_power(self.places, "places", _MOST_PLACES)

    def configuration(self) -> Configuration:
        """Returns places."""
        return {"places": self.places}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `integers` and, unless rows have a single element, `centre`; all are int16.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        return _places_parts(dim, "integers")

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim] with no rows below; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        nothing = jnp.zeros((rows.shape[0], 1), jnp.int16)
        return self.encode_on(rows, jnp.zeros(rows.shape, jnp.int16), nothing)

    def encode_on(
        self, rows: jax.Array, below: jax.Array, centre: jax.Array
    ) -> Encoded:
        """Encodes rows so that they differ little from the rows below them.

        Args:
            rows: float32, bfloat16 or float16, [rows, dim].
            below: int16[rows, dim], the integers of the rows below; zeros where there are none.
            centre: int16[rows, 1], the centres of the rows below.
        """
        check_dtype(rows.dtype)
        some = _some(len(rows))
        shift = self._shift(rows[some], below[some], centre[some])
        places, zero, bad = self._placed(rows)
        whole = jnp.round(places).astype(jnp.int32)
        was_zero, moved = below == 0, places - _place(below, centre) - shift
        near = jnp.where(zero | was_zero, zero == was_zero, jnp.abs(moved) <= 1)
        flags = bad * _BAD + ~was_zero * _KNOWN + ~near * _FAR
        flags, count, total, low, high = _reduced(
            flags,
            (~zero).astype(jnp.int32),
            places,
            jnp.where(zero, _BEYOND, whole),
            jnp.where(zero, -_BEYOND, whole),
        )
        known, keeps = flags & _KNOWN > 0, flags & (_KNOWN | _FAR) == _KNOWN
        found = jnp.zeros(len(rows), jnp.int32)
        if rows.shape[1] > 1:
            mean = jnp.round(total / jnp.maximum(count, 1)).astype(jnp.int32)
            moves = centre[:, 0].astype(jnp.int32) + shift
            found = jnp.where(known, moves, mean).astype(jnp.int16).astype(jnp.int32)
        most = np.iinfo(np.int16).max
        beyond = (high - found >= most) | (low - found < -most)
        lost = (flags & _BAD > 0) | (beyond & ~keeps & (count > 0))
        off = whole - found[:, None]
        integers = jnp.where(zero, 0, off + (off >= 0))
        integers = jnp.where(keeps[:, None], below, integers)
        integers = jnp.where(lost[:, None], 0, integers).astype(jnp.int16)
        parts = {"integers": integers}
        if rows.shape[1] > 1:
            parts["centre"] = jnp.where(lost, 0, found)[:, None].astype(jnp.int16)
        return Encoded(parts, lost)

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        del dim
        dtype = check_dtype(dtype)
        integers = jnp.asarray(parts["integers"])
        return rounded_to(_power(integers, parts.get("centre"), self.places), dtype)

    def difference(self, parts: Parts, below: Parts) -> dict[str, np.ndarray]:
        """Returns what `add` adds to the parts below to get `parts` back."""
        return {name: part - below[name] for name, part in parts.items()}

    def add(self, layer: Layer, rows: RowsAt) -> None:
        """Turns the parts below, in place, into those of the save whose differences are given."""
        for name, part in layer.items():
            rows.add(name, part)

    def _placed(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns unrounded places, which elements are zeros, and which have no place."""
        bits = lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.int32)
        size = bits & jnp.int32(0x7FFFFFFF)
        zero = size < _LEAST_NORMAL
        bad = ((bits < 0) & ~zero) | (size >= 255 << _MANTISSA_BITS)
        one = (size & (_LEAST_NORMAL - 1)) | _ONE
        mantissa = lax.bitcast_convert_type(one, jnp.float32)
        octave = ((size >> _MANTISSA_BITS) - 127).astype(jnp.float32)
        places = jnp.where(zero | bad, 0.0, (octave + jnp.log2(mantissa)) * self.places)
        return places, zero, bad | (jnp.round(places) >= (_HIGHEST + 1) * self.places)

    def _shift(self, rows: jax.Array, below: jax.Array, centre: jax.Array) -> jax.Array:
        """Returns the whole number of places by which most elements have moved, int32."""
        if rows.shape[1] == 1:
            return jnp.int32(0)
        places, zero, bad = self._placed(rows)
        counts = ~(zero | bad | (below == 0))
        return _commonest(places - _place(below, centre), counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Counts means in parts of the roots of squares, which `Octave` stores in another leaf.

    An element is `q * root / steps`, with an integer `q` and the root of the same element of the
    squares as it is read; it is zero where that is. The parts `octaves` and `centre` are those of
    the squares, and are stored once, with them.

    **Error bound.** `|x - read(x)| <= 0.51 / steps * root`, before the rounding to the dtype; where
    squares read as zero, 2**-60. A row is escaped if one of its elements is not finite, beyond
    127 steps, or further than 2**-60 from zero where squares read as zero. All rows are escaped if
    the others are not squares but the largest gradients, which `adamax` of optax keeps there.

    Attributes:
        steps: number of steps in a root: a power of two up to 64.
        places: number of places in an octave of the squares.

    Example:
        >>> squares = Octave(places=2).encode(jnp.array([[0.0, 0.25, 4.0]])).parts
        >>> means = jnp.array([[0.0, 0.25, -2.0]])
        >>> encoded = Unit(steps=8).encode_on(means, squares["integers"], squares["centre"])
        >>> encoded.parts["integers"].tolist()
        [[0, 4, -8]]
    """

    name: ClassVar[str] = "cnr.unit"
    summed: ClassVar[tuple[str, ...]] = ("octaves", "centre")
    on_step: ClassVar[Literal[False]] = False
    steps: int = 8
    places: int = 2

    def __post_init__(self) -> None:
        take_integers(self, "steps", "places")
        _check_power(self.steps, "steps", 64)
        _check_power(self.places, "places", _MOST_PLACES)

    @property
    def squares(self) -> Octave:
        """The codec of the squares."""
        return Octave(places=self.places)

    def configuration(self) -> Configuration:
        """Returns steps and places."""
        return {"steps": self.steps, "places": self.places}

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `integers`, `octaves` and, unless rows have a single element, `centre`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        own = {"integers": Part(np.dtype(np.int8), dim, "packed_rows")}
        shared = _places_parts(dim, "octaves").items()
        return own | {name: part._replace(shared=True) for name, part in shared}

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim] as if the squares were those of the rows themselves.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        check_dtype(rows.dtype)
        squares = self.squares.encode(jnp.square(rows.astype(jnp.float32))).parts
        none = jnp.zeros((rows.shape[0], 1), jnp.int16)
        return self.encode_on(rows, squares["integers"], squares.get("centre", none))

    def encode_on(
        self, rows: jax.Array, octaves: jax.Array, centre: jax.Array
    ) -> Encoded:
        """Encodes rows, given the integers and centres of the squares, both int16."""
        check_dtype(rows.dtype)
        x = rows.astype(jnp.float32)
        root = _power(octaves, centre, 2 * self.places, _ROOT_BITS)
        known = root > 0
        counts = jnp.round(x * self.steps / jnp.where(known, root, 1.0))
        finite = jnp.isfinite(x)
        held = jnp.where(
            known, jnp.abs(counts) <= np.iinfo(np.int8).max, jnp.abs(x) <= _NO_MEAN
        )
        # Detects slots that are no squares of gradients but the largest gradients: no mean is above
        # those. Most means are far above the squares, as long as gradients are below one.
        largest = jnp.square(root)
        size = jnp.where(known & (root < _SMALL_ROOT), jnp.abs(x), 0)
        above = size > largest * 1.5
        near = (size > largest / 64) & ~above
        flags, near, sized = _reduced(
            ~(finite & held) * _BAD + above * _FAR,
            near.astype(jnp.int32),
            (size > 0).astype(jnp.int32),
        )
        most = jnp.maximum(sized.sum() / 2, _LEAST_BESIDE)
        beside_largest = (near.sum() >= most) & ~(flags & _FAR > 0).any()
        escaped = (flags & _BAD > 0) | beside_largest
        kept = known & ~escaped[:, None]
        integers = jnp.where(kept, counts, 0).astype(jnp.int8)
        parts = {"integers": integers, "octaves": octaves}
        if rows.shape[1] > 1:
            parts["centre"] = centre
        return Encoded(parts, escaped)

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        del dim
        dtype = check_dtype(dtype)
        octaves = jnp.asarray(parts["octaves"])
        root = _power(octaves, parts.get("centre"), 2 * self.places, _ROOT_BITS)
        # The product is exact, so no platform and no fusion rounds it in another way.
        counts = jnp.asarray(parts["integers"]).astype(jnp.float32) / self.steps
        return rounded_to(counts * root, dtype)

    def difference(self, parts: Parts, below: Parts) -> dict[str, np.ndarray]:
        """Returns `parts`: counts are stored as they are, and the squares hold differences."""
        del below
        return dict(parts)

    def add(self, layer: Layer, rows: RowsAt) -> None:
        """Turns the parts below, in place, into the save's: adds squares, replaces counts."""
        for name, part in layer.items():
            (rows.add if name in self.summed else rows.put)(name, part)


def _reduced(
    flags: jax.Array, count: jax.Array, total: jax.Array, *bounds: jax.Array
) -> Sequence[jax.Array]:
    """Reduces over each row, in one loop: flags of any element, two sums, and least and greatest.

    With a loop for each, XLA's CPU backend would compute anew what they have in common.
    """

    def meet(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        found = a[0] | b[0], a[1] + b[1], a[2] + b[2]
        if bounds:
            found += jnp.minimum(a[3], b[3]), jnp.maximum(a[4], b[4])
        return found

    terms = flags, count, total, *bounds
    start = (0, 0, 0, _BEYOND, -_BEYOND)[: len(terms)]
    first = [np.array(x, term.dtype) for x, term in zip(start, terms, strict=True)]
    return lax.reduce(terms, tuple(first), meet, (1,))


def _places_parts(dim: int, integers: str) -> dict[str, Part]:
    int16 = np.dtype(np.int16)
    if dim == 1:
        # Not packed rows: for single elements the classes of rows would take more than they save.
        return {integers: Part(int16, dim, "zstd")}
    return {
        integers: Part(int16, dim, "packed_rows"),
        "centre": Part(int16, 1, "zstd"),
    }


def _check_power(value: int, name: str, most: int) -> None:
    if not 1 <= value <= most or value & (value - 1):
        raise ValueError(f"{name} is {value}, expected a power of two up to {most}")


def _place(integers: jax.Array, centre: jax.Array | None) -> jax.Array:
    """Returns the places of integers, int32; of no meaning where an integer is zero."""
    q = integers.astype(jnp.int32)
    place = q - (q > 0)
    return place if centre is None else place + jnp.asarray(centre).astype(jnp.int32)


def _power(
    integers: jax.Array,
    centre: jax.Array | None,
    per_octave: int,
    bits: int = _MANTISSA_BITS + 1,
) -> jax.Array:
    """Returns `2**(place / per_octave)`, float32, rounded to `bits` bits; 0 for integer 0."""
    place = _place(integers, centre)
    # Places that no encoder writes must still read as the same number on every platform.
    place = jnp.clip(place, _LOWEST * per_octave, (_HIGHEST + 1) * per_octave - 1)
    octave = (place >> (per_octave.bit_length() - 1)) << _MANTISSA_BITS
    found = _looked_up(_mantissas(per_octave, bits), place & (per_octave - 1)) + octave
    found = jnp.where(integers == 0, 0, found)
    return lax.bitcast_convert_type(found, jnp.float32)


def _looked_up(values: np.ndarray, at: jax.Array) -> jax.Array:
    """Returns `values[at]`; few values are looked up by comparisons, which is faster."""
    if len(values) > _FEW:
        return jnp.asarray(values)[at]
    found = jnp.full(at.shape, values[0])
    for i, value in enumerate(values[1:], start=1):
        found = jnp.where(at == i, value, found)
    return found


@functools.cache
def _mantissas(per_octave: int, bits: int) -> np.ndarray:
    """Returns the bits of `2**(i / per_octave)`, rounded to `bits` significant bits, int32.

    It is a table because platforms compute exponentials differently.
    """
    steps = 2.0 ** (bits - 1)
    found = np.exp2(np.arange(per_octave) / per_octave)
    return (np.round(found * steps) / steps).astype(np.float32).view(np.int32)


def _some(rows: int) -> np.ndarray:
    """Returns positions of a sample, not evenly spread, as the rows that were looked up may be."""
    return np.arange(min(rows, _SHIFT_ROWS)) * _SPREAD % max(rows, 1)


def _commonest(moved: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the whole number to which most of those that count are nearest, int32."""
    whole = jnp.clip(jnp.round(moved), -_SHIFTS, _SHIFTS).astype(jnp.int32) + _SHIFTS
    votes = jnp.bincount(
        jnp.where(counts, whole, 2 * _SHIFTS + 1).ravel(), length=2 * _SHIFTS + 1
    )
    # Elements that moved beyond the bounds are as good as new, so they have no vote.
    votes = votes.at[jnp.array([0, 2 * _SHIFTS])].set(0)
    return jnp.where(votes.any(), jnp.argmax(votes) - _SHIFTS, 0).astype(jnp.int32)
