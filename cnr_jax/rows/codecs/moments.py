"""Moments of gradients as integers: squares by their logarithms, means by the roots of these.

Adam keeps two slots as large as the table: a mean of gradients (*mu*) and one of their squares
(*nu*). It moves all elements of both in each step, so that their bits never stay; but what they
are to training does. nu is divided by, under a root, so what counts is its size: `Octave` numbers
it by *places* on a logarithmic scale. In a save a row has its places relative to its *centre*, and
where a gradient is missing nu decays as all others do: its centre moves, and its integers stay.
mu is at most a few times the root of nu, and has long come to zero where there was no gradient:
`Unit` counts it in eighths of that root, as it is read. So rows that training has left alone are
zeros, of which `packed.py` makes next to nothing.

Nothing of the optimizer is needed to read: how far centres moved is stored, not computed.

Differs from Check-N-Run in: it treats the slots of sparse optimizers alone, and as rows of tables.
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
# Roots have so many bits that times an integer of 7 they are exact in float32.
_ROOT_BITS = 16
# Where nu reads as zero, mu does up to here: over the least root that is divided by, Adam's
# epsilon of 1e-8, it moves an element by a ten thousand millionth of the rate.
_NO_MEAN = 2.0**-60
# Roots below are of gradients that are well below one; and so many elements tell what they are of.
_SMALL_ROOT, _LEAST_BESIDE = 0.1, 64
# What is found of elements, and then of rows.
_BAD, _KNOWN, _FAR = 1, 2, 4
# Further than all places.
_BEYOND = 1 << 30
# Values that are told apart by comparisons.
_FEW = 8
# Rows whose motion tells how far centres move, and places that they move at most.
_SHIFT_ROWS, _SHIFTS = 512, 512
# A prime by which places of rows are multiplied.
_SPREAD = 2_654_435_761


@dataclass(frozen=True, slots=True, kw_only=True)
class Octave:
    """Numbers elements that are never negative by their logarithms, zero exactly.

    An element is stored as an integer `q`: 0 for zero, else it has the place
    `p = centre + q - (q > 0)` and stands for `2**(p / places)`. The centre is one of each row,
    which rows of a single element do not have: it is 0.

    **Error bound.** To nearest, `|x - read(x)| <= (2**(0.52 / places) - 1) x`: 20 % at 2 places,
    0.15 % at 256. Encoded over what lies below, a row none of whose elements is further than one
    place from what is read there, decayed as most are, keeps it: 42 %, 0.28 %. Elements below
    2**-126 read as zero. Escaped are rows that have an element that is negative or not finite,
    rounds to 2**128, or is 2**15 places from its centre.

    Attributes:
        places: to an octave: a power of two up to 256.

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
        """Returns `integers` and, unless rows have one element, `centre`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        return _places_parts(dim, "integers")

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim] on nothing; the class says which rows are escaped.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        nothing = jnp.zeros((rows.shape[0], 1), jnp.int16)
        return self.encode_on(rows, jnp.zeros(rows.shape, jnp.int16), nothing)

    def encode_on(
        self, rows: jax.Array, below: jax.Array, centre: jax.Array
    ) -> Encoded:
        """Encodes rows so that they differ little from what lies below them.

        Args:
            rows: float32, bfloat16 or float16.
            below: int16[rows, dim], the integers of these rows there; zeros where there are none.
            centre: int16[rows, 1], their centres.
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
        """What is to be added to what lies below so that `parts` come out."""
        return {name: part - below[name] for name, part in parts.items()}

    def add(self, layer: Layer, rows: RowsAt) -> None:
        """Makes the parts of rows of what lies there, given differences to it."""
        for name, part in layer.items():
            rows.add(name, part)

    def _placed(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Places, not rounded, which elements are zeros, and which have none."""
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
        """The whole number of places by which most elements have moved, int32."""
        if rows.shape[1] == 1:
            return jnp.int32(0)
        places, zero, bad = self._placed(rows)
        counts = ~(zero | bad | (below == 0))
        return _commonest(places - _place(below, centre), counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Counts elements in parts of the roots of others, which `Octave` stores in another leaf.

    An element is `q * root / steps`, `q` an integer and root that of the same element of the
    squares as it is read; zero where that is. Of the parts, `octaves` and `centre` are those of
    the squares, and stored with them once.

    **Error bound.** `|x - read(x)| <= 0.51 / steps * root`, before the rounding to the dtype; where
    squares read as zero, 2**-60. Escaped are rows that have an element that is not finite, beyond
    127 steps, or further than 2**-60 from zero where squares read as zero. And all rows where the
    others are no squares, but the largest gradients, as optax's `adamax` keeps in the same place.

    Attributes:
        steps: to a root: a power of two up to 64.
        places: to an octave of the squares.

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
        """Returns `integers`, `octaves` and, unless rows have one element, `centre`.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        check_dtype(dtype)
        own = {"integers": Part(np.dtype(np.int8), dim, "packed_rows")}
        shared = _places_parts(dim, "octaves").items()
        return own | {name: part._replace(shared=True) for name, part in shared}

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim] as if the squares were their own.

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
        """Encodes rows by the integers and centres of the squares, int16."""
        check_dtype(rows.dtype)
        x = rows.astype(jnp.float32)
        root = _power(octaves, centre, 2 * self.places, _ROOT_BITS)
        known = root > 0
        counts = jnp.round(x * self.steps / jnp.where(known, root, 1.0))
        finite = jnp.isfinite(x)
        held = jnp.where(
            known, jnp.abs(counts) <= np.iinfo(np.int8).max, jnp.abs(x) <= _NO_MEAN
        )
        # Whether what has these roots are no squares of gradients, but the largest of them: no
        # mean is above those. Beside squares most are far above, while gradients are below one.
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
        # Exact, so that no platform and no fusion rounds it in another way.
        counts = jnp.asarray(parts["integers"]).astype(jnp.float32) / self.steps
        return rounded_to(counts * root, dtype)

    def difference(self, parts: Parts, below: Parts) -> dict[str, np.ndarray]:
        """What is to be added: the squares hold it, and counts are stored as they are."""
        del below
        return dict(parts)

    def add(self, layer: Layer, rows: RowsAt) -> None:
        """Makes the parts of rows of what lies there: those of the squares are added to it."""
        for name, part in layer.items():
            (rows.add if name in self.summed else rows.put)(name, part)


def _reduced(
    flags: jax.Array, count: jax.Array, total: jax.Array, *bounds: jax.Array
) -> Sequence[jax.Array]:
    """Reduces each over each row: flags of any, two sums, and least and greatest; in one loop.

    XLA's CPU backend would compute anew for each what they have in common.
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
        # Classes of rows would take more than they save.
        return {integers: Part(int16, dim, "zstd")}
    return {
        integers: Part(int16, dim, "packed_rows"),
        "centre": Part(int16, 1, "zstd"),
    }


def _check_power(value: int, name: str, most: int) -> None:
    if not 1 <= value <= most or value & (value - 1):
        raise ValueError(f"{name} is {value}, expected a power of two up to {most}")


def _place(integers: jax.Array, centre: jax.Array | None) -> jax.Array:
    """Places of integers that are not zero, int32."""
    q = integers.astype(jnp.int32)
    place = q - (q > 0)
    return place if centre is None else place + jnp.asarray(centre).astype(jnp.int32)


def _power(
    integers: jax.Array,
    centre: jax.Array | None,
    per_octave: int,
    bits: int = _MANTISSA_BITS + 1,
) -> jax.Array:
    """2 to the power of places of which so many are an octave, float32; 0 where there is none."""
    place = _place(integers, centre)
    # What no encoder writes must not read as another number of another platform.
    place = jnp.clip(place, _LOWEST * per_octave, (_HIGHEST + 1) * per_octave - 1)
    octave = (place >> (per_octave.bit_length() - 1)) << _MANTISSA_BITS
    found = _looked_up(_mantissas(per_octave, bits), place & (per_octave - 1)) + octave
    found = jnp.where(integers == 0, 0, found)
    return lax.bitcast_convert_type(found, jnp.float32)


def _looked_up(values: np.ndarray, at: jax.Array) -> jax.Array:
    """Some of few values, which is faster without a table."""
    if len(values) > _FEW:
        return jnp.asarray(values)[at]
    found = jnp.full(at.shape, values[0])
    for i, value in enumerate(values[1:], start=1):
        found = jnp.where(at == i, value, found)
    return found


@functools.cache
def _mantissas(per_octave: int, bits: int) -> np.ndarray:
    """Bits of `2**(i / per_octave)`, rounded to so many significant bits.

    In a table, because an exponential is not the same on all platforms.
    """
    steps = 2.0 ** (bits - 1)
    found = np.exp2(np.arange(per_octave) / per_octave)
    return (np.round(found * steps) / steps).astype(np.float32).view(np.int32)


def _some(rows: int) -> np.ndarray:
    """Some of the rows, not evenly spread, as rows that were looked up may be."""
    return np.arange(min(rows, _SHIFT_ROWS)) * _SPREAD % max(rows, 1)


def _commonest(moved: jax.Array, counts: jax.Array) -> jax.Array:
    """The whole number nearest to most of those that count, int32."""
    whole = jnp.clip(jnp.round(moved), -_SHIFTS, _SHIFTS).astype(jnp.int32) + _SHIFTS
    votes = jnp.bincount(
        jnp.where(counts, whole, 2 * _SHIFTS + 1).ravel(), length=2 * _SHIFTS + 1
    )
    # What moved further than can be told is as good as new.
    votes = votes.at[jnp.array([0, 2 * _SHIFTS])].set(0)
    return jnp.where(votes.any(), jnp.argmax(votes) - _SHIFTS, 0).astype(jnp.int32)
