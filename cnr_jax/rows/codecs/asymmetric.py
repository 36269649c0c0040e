"""Uniform quantization of each row over a range of its own, refined by least squares.

Differs from Check-N-Run in:
1. The range is not shrunk greedily (25 bins, two evaluations a move) but refitted: with
   the codes fixed, the best scale and offset have a closed form; then rows are coded
   anew. The scale moves past the solution (`_OVERSHOOT`), which codes that are about to
   change make too small a move. Four evaluations come within 4 % of the mean error of
   the paper's thirty at 64 columns, and at 4 bits and 16 columns beat it by 5 %.
2. Candidates are rounded to the stored metadata *before* they are judged, so the error
   that is minimised is the error after restoring.
3. The offset is stored in steps, not in the units of the row.
4. Rows that 2**bits equidistant values cannot hold are escaped instead of damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from cnr_jax.rows.codecs import bitpack
from cnr_jax.rows.codecs.base import Encoded, Part, bytes_of

# A scale in here keeps all arithmetic of encode and decode among normal float32 numbers
# (the smallest nonzero |q - mid + offset| is 2**-25), so platforms that flush denormals
# and those that do not agree, and reciprocals do not underflow.
_MIN_SCALE = 2.0**-100
_MAX_SCALE = 2.0**100

# Row sums are taken in this many lanes, all sums in one loop: XLA's CPU backend keeps
# the lanes in vector registers, where one reduction per sum would recompute the
# residuals for each (measured 2x at 64 columns, 4x at 100; AVX-512).
_LANES = 16

# Of 1, 1.5, 2, 2.5, 3 and 4 the best or close to it after three refits, for normal, t(4)
# and uniform rows of 16, 64 and 128 columns at 2 to 4 bits.
_OVERSHOOT = 1.5


class _Metadata(NamedTuple):
    """How scale and offset are stored, and up to where offsets are precise."""

    scale_dtype: np.dtype
    offset_dtype: np.dtype
    offset_limit: float

    def round_scale(self, scale: jax.Array) -> jax.Array:
        return _rounded(scale, self.scale_dtype)

    def round_offset(self, offset: jax.Array) -> jax.Array:
        return _rounded(offset, self.offset_dtype)

    def usable(self, scale: jax.Array, offset: jax.Array) -> jax.Array:
        """False also for NaN, which no comparison admits."""
        in_range = (scale >= _MIN_SCALE) & (scale <= _MAX_SCALE)
        return in_range & (jnp.abs(offset) < self.offset_limit)


def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    # Not a cast there and back: XLA may drop such a pair
    # (`xla_allow_excess_precision`), and rows would be coded for metadata that is not
    # what gets stored.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


_METADATA = {
    # Half a float16 ulp below 1024 is 1/4 step: an end of the range is missed by less
    # than half a step even together with the bfloat16 scale (see the proof in
    # `Asymmetric`).
    16: _Metadata(np.dtype(jnp.bfloat16), np.dtype(np.float16), 1024.0),
    # Five float32 roundings of numbers below 2**15 are 5/512 step.
    32: _Metadata(np.dtype(np.float32), np.dtype(np.float32), 32768.0),
}

_FLOAT16_MAX = float(np.finfo(np.float16).max)
_DTYPES = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asymmetric:
    """Asymmetric uniform quantization per row, to codes of 2, 3, 4 or 8 bits.

    A row is stored as codes `q`, a `scale` and an `offset` in steps, and read as

        x = scale * ((q - (2**bits - 1) / 2) + offset)        in float32, in this order,

    then clamped to the finite range of the table's dtype and rounded to it. An addition
    followed by a multiplication cannot be fused, so every platform reads the same bits.
    `scale` alone carries the magnitude: bfloat16 has the exponents of float32, while
    `offset` is a plain number of steps, for which float16 has the better precision.

    Escaped, that is left to be stored exactly beside: rows with a non-finite element;
    constant rows other than zero (hence every nonzero row of one element); rows whose
    step is outside [2**-100, 2**100]; rows of denormals; rows whose middle is 1024
    steps or more from zero (32768 with 32-bit metadata): their spread is below
    about 1 % of their value. A row of zeros is held exactly, but for the sign of -0.0.

    **Error bound.** For a row that is not escaped, of up to 65536 elements, with
    `step = (max - min) / (2**bits - 1)`, before the rounding to the table's dtype:

        refits == 0:  |x - read(x)| <= 0.51 * step              for every element;
        any refits:   ||x - read(x)||_2 <= 0.52 * step * sqrt(dim).

    Rounding to bfloat16 or float16 adds at most half an ulp of that dtype per element.

    Proof. Let s, o be the stored scale and offset, L = 2**bits - 1, t = x/s - o + L/2.

    (1) Where 0 <= t <= L the nearest code is at most half a step of size s away.
    (2) t leaves [0, L] by at most d = (L/2) |1 - step/s| + |o - (min + max)/(2 s)|.
        With 16-bit metadata (L <= 15) the first term is at most 7.5 * 2**-8 < 0.03, the
        second half a float16 ulp below 1024, 1/4; with 32 bits both are below 2**-9. So
        d < 1/2, and clipped elements are no worse than the others.
    (3) float32 arithmetic (the reciprocal, product and sum of t, the sum and product of
        x) moves a result by at most 5 * 2**-24 * |o| steps: below 0.001 and 0.01.
    (4) s <= (1 + 2**-8) step with 16 bits, (1 + 2**-24) step with 32. Hence at most
        0.5 * 1.0040 + 0.001 and 0.5 + 0.01 steps, both <= 0.51 up to 2**-20.
    (5) A refit replaces s, o only if its summed squared error, computed from the stored
        values by the formula that reads them, is smaller. The sum of dim terms in
        float32 is exact to dim * 2**-24 <= 2**-8 relative, so the l2 error grows by at
        most half that, and by 2**-8 steps an element where a compiler fuses the product
        into the residual: 0.51 * 1.002 + 0.004 < 0.52.

    Attributes:
        bits: width of a code.
        refits: rounds of least squares. 0 is the plain asymmetric quantizer; 3 takes
            the error most of the way to where it stays.
        metadata_bits: 16 (bfloat16 scale, float16 offset) or 32 (both float32). By
            default 16 up to 4 bits. 8 bits need 32: a bfloat16 scale would miss the
            ends of the range by half a step.

    Example:
        >>> codec = Asymmetric(bits=2, refits=0)
        >>> encoded = codec.encode(jnp.array([[0.0, 1.0, 3.0]]))
        >>> {name: part.tolist() for name, part in encoded.parts.items()}
        {'codes': [[52]], 'scale': [[1.0]], 'offset': [[1.5]]}
        >>> codec.decode(encoded.parts, dim=3, dtype=jnp.float32).tolist()
        [[0.0, 1.0, 3.0]]

    Source: Check-N-Run (NSDI'22), asymmetric quantization per embedding vector; the
    adaptive search is replaced by least squares, see the module.
    """

    bits: int = 4
    refits: int = 3
    metadata_bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in bitpack.WIDTHS:
            raise ValueError(f"bits is {self.bits}, expected one of {bitpack.WIDTHS}")
        if self.refits < 0:
            raise ValueError(f"refits is {self.refits}, expected 0 or more")
        legal = (32,) if self.bits == 8 else (16, 32)
        if self.metadata_bits is None:
            # Resolved here, so that equal codecs compare, hash and compile as one.
            object.__setattr__(self, "metadata_bits", legal[0])
        if self.metadata_bits not in legal:
            raise ValueError(
                f"metadata_bits is {self.metadata_bits}, expected one of {legal} for"
                f" codes of {self.bits} bits"
            )

    @property
    def name(self) -> str:
        """The codec's name on disk."""
        return "cnr.asymmetric"

    def configuration(self) -> dict[str, int | str]:
        """Returns bits, refits and metadata_bits; reading needs all but refits."""
        return {
            "bits": self.bits,
            "refits": self.refits,
            "metadata_bits": self._metadata_bits,
        }

    def parts(self, dim: int, dtype: DTypeLike) -> dict[str, Part]:
        """Returns `codes` (uint8, packed), `scale` and `offset` (one each per row).

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
        """
        _check_dtype(dtype)
        metadata = _METADATA[self._metadata_bits]
        return {
            "codes": Part(np.dtype(np.uint8), bitpack.packed_width(dim, self.bits)),
            "scale": Part(metadata.scale_dtype, 1),
            "offset": Part(metadata.offset_dtype, 1),
        }

    def row_bytes(self, dim: int, dtype: DTypeLike) -> int:
        """Returns the bytes of one encoded row: codes, scale and offset."""
        return bytes_of(self.parts(dim, dtype))

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes float[rows, dim]; the class says which rows are escaped.

        Where a value is halfway between two codes, platforms may choose differently.

        Raises:
            TypeError: if the rows are not float32, bfloat16 or float16.
        """
        _check_dtype(rows.dtype)
        metadata = _METADATA[self._metadata_bits]
        levels = 2**self.bits - 1
        x = rows.astype(jnp.float32)
        low = jnp.min(x, axis=1, keepdims=True)
        high = jnp.max(x, axis=1, keepdims=True)
        step = (high - low) / levels
        scale = metadata.round_scale(step)
        offset = metadata.round_offset((low + (high - low) * 0.5) / scale)
        # Bits, not values: denormals compare equal to zero where they are flushed, and
        # whether a minimum propagates NaN is the compiler's choice.
        magnitude, infinity = _largest_magnitude(rows)
        held = metadata.usable(scale, offset) & (magnitude < infinity)
        if self.refits:
            first = _Grid(scale, offset)
            scale, offset = _refit(x, first, step, self.refits, levels, metadata)
        # Rows of zeros and escaped rows: with scale 0 a code above the middle reads
        # +0.0.
        factor = jnp.where(held, 1.0 / scale, 0.0)
        shift = jnp.where(held, 0.5 * levels - offset, float(levels))
        codes = _nearest_code(jnp.where(held, x, 0.0), factor, shift, levels)
        parts = {
            "codes": bitpack.pack(codes.astype(jnp.uint8), self.bits),
            "scale": jnp.where(held, scale, 0.0).astype(metadata.scale_dtype),
            "offset": jnp.where(held, offset, 0.0).astype(metadata.offset_dtype),
        }
        return Encoded(parts, ~(held | (magnitude == 0))[:, 0])

    def decode(
        self, parts: Mapping[str, jax.Array], *, dim: int, dtype: DTypeLike
    ) -> jax.Array:
        """Returns `dtype[rows, dim]`.

        A decoded value past the largest finite one (float16 rows near 65504) is clamped
        to it, which only brings it closer to the value that was encoded.

        Raises:
            TypeError: if `dtype` is not float32, bfloat16 or float16.
            ValueError: if the codes have not the width that `dim` and `bits` give.
        """
        dtype = _check_dtype(dtype)
        codes = bitpack.unpack(jnp.asarray(parts["codes"]), self.bits, dim)
        scale = jnp.asarray(parts["scale"]).astype(jnp.float32)
        offset = jnp.asarray(parts["offset"]).astype(jnp.float32)
        x = _read(codes.astype(jnp.float32) - 0.5 * (2**self.bits - 1), scale, offset)
        if dtype == np.float16:
            # A scale up to 2**100 keeps the other dtypes finite.
            x = jnp.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX)
        return x.astype(dtype)

    @property
    def _metadata_bits(self) -> int:
        assert self.metadata_bits is not None  # __post_init__ resolves the default
        return self.metadata_bits


class _Grid(NamedTuple):
    """Stored scale and offset as float32[rows, 1]: where the levels of a row are."""

    scale: jax.Array
    offset: jax.Array


def _refit(
    x: jax.Array,
    first: _Grid,
    step: jax.Array,
    refits: int,
    levels: int,
    metadata: _Metadata,
) -> _Grid:
    """Returns the grid with the least squared error among `first` and its refits.

    A loop rather than copies of its body: compiling takes a third of the time.
    """
    per_step = 1.0 / step
    dim = x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, -dim % _LANES)))
    # Padding counts nowhere: it has no weight in any sum.
    weight = (np.arange(x.shape[1]) < dim).astype(np.float32)[None, :]

    def improve(_: int, carry: tuple[jax.Array, _Grid, _Grid]):
        least, best, grid = carry
        sums = _sums(x, weight, grid, per_step, levels)
        better = metadata.usable(*grid) & (sums.rr < least)
        least = jnp.where(better, sums.rr, least)
        best = _Grid(
            *(jnp.where(better, *pair) for pair in zip(grid, best, strict=True))
        )
        return least, best, _least_squares(grid, sums, step, dim, metadata)

    start = (jnp.full_like(step, jnp.inf), first, first)
    return lax.fori_loop(0, refits + 1, improve, start)[1]


class _Sums(NamedTuple):
    """Sums over a row, [rows, 1]: r residuals in steps, c codes about the middle."""

    rr: jax.Array
    r: jax.Array
    rc: jax.Array
    c: jax.Array
    cc: jax.Array


def _sums(
    x: jax.Array, weight: np.ndarray, grid: _Grid, per_step: jax.Array, levels: int
) -> _Sums:
    # The barrier keeps the division per row: fused, it would run once per element.
    factor, shift = lax.optimization_barrier(
        (1.0 / grid.scale, 0.5 * levels - grid.offset)
    )
    c = _nearest_code(x, factor, shift, levels) - 0.5 * levels
    r = (x - _read(c, *grid)) * per_step
    if not weight.all():
        r, c = r * weight, c * weight
    rows, width = x.shape
    lanes = (rows, width // _LANES, _LANES)
    terms = [term.reshape(lanes) for term in (r * r, r, r * c, c, c * c)]
    return _Sums(*(total[:, None] for total in _sum_each(_sum_each(terms))))


def _least_squares(
    grid: _Grid, sums: _Sums, step: jax.Array, dim: int, metadata: _Metadata
) -> _Grid:
    """Returns a stored grid near the best one for the codes behind `sums`.

    It fits the residuals, not the rows: they are small, so that nothing cancels.
    """
    mean_c = sums.c / dim
    spread = sums.cc - sums.c * mean_c
    # Two codes apart give at least 1/2; one code throughout leaves the slope open.
    slope = jnp.where(spread > 0.25, (sums.rc - sums.r * mean_c) / spread, 0.0)
    scale = metadata.round_scale(grid.scale + _OVERSHOOT * slope * step)
    # The best offset for the scale as it is stored: it meets the mean of the row.
    mean = grid.scale * (mean_c + grid.offset) + step * (sums.r / dim)
    return _Grid(scale, metadata.round_offset(mean / scale - mean_c))


def _nearest_code(
    x: jax.Array, factor: jax.Array, shift: jax.Array, levels: int
) -> jax.Array:
    nearest = lax.round(x * factor + shift, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.clip(nearest, 0.0, float(levels))


def _read(centred: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """The stored format's formula: an addition, then a multiplication."""
    return scale * (centred + offset)


def _sum_each(terms: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Sums every term over axis 1, in one loop."""
    return lax.reduce(
        tuple(terms),
        (np.float32(0),) * len(terms),
        lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True)),
        (1,),
    )


def _largest_magnitude(rows: jax.Array) -> tuple[jax.Array, float]:
    """Returns the bits of the largest |element| per row, [rows, 1], and those of inf.

    As float32 numbers, whose maximum XLA's CPU backend vectorises, unlike that of
    integers. The conversion is monotonic, and exact for the bits of zero and of
    infinity. What it rounds up to infinity, the largest finite float32 numbers, has no
    usable scale anyway.
    """
    integer = np.dtype(f"int{8 * rows.dtype.itemsize}")
    infinity = float(np.array(np.inf, rows.dtype).view(integer))
    bits = lax.bitcast_convert_type(rows, integer) & np.iinfo(integer).max
    return jnp.max(bits.astype(jnp.float32), axis=1, keepdims=True), infinity


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise TypeError(
            f"rows of {dtype} cannot be quantized, expected one of {names}\n"
            "  hint: use the codec 'raw' for other dtypes."
        )
    return dtype
