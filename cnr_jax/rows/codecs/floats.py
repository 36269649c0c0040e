"""What every quantizer asks of its rows: their dtype, and whether they are finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

DTYPES = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))
_FLOAT16_MAX = float(np.finfo(np.float16).max)


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of rows to be quantized.

    Raises:
        TypeError: if it is not float32, bfloat16 or float16.
    """
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        names = ", ".join(str(known) for known in DTYPES)
        raise TypeError(
            f"rows of {dtype} cannot be quantized, expected one of {names}\n"
            "  hint: use the codec 'raw' for other dtypes."
        )
    return dtype


def magnitude_bits(rows: jax.Array) -> tuple[jax.Array, float]:
    """Returns the bits of |element| as float32 numbers, and those of infinity.

    Bits, not values: denormals compare equal to zero where they are flushed, and whether a
    maximum propagates NaN is the compiler's choice. As float32 numbers, whose maximum XLA's
    CPU backend vectorises, unlike that of integers. The conversion is monotonic, and exact
    for the bits of zero and of infinity; what it rounds up to infinity are the 64 largest
    finite float32 numbers.
    """
    integer = np.dtype(f"int{8 * rows.dtype.itemsize}")
    infinity = float(np.array(np.inf, rows.dtype).view(integer))
    bits = lax.bitcast_convert_type(rows, integer) & np.iinfo(integer).max
    return bits.astype(jnp.float32), infinity


def rounded_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 numbers in `dtype`, to nearest even, the finite ones finite.

    Float32 numbers that the codecs read are below 2**116, which only float16 is short of.
    """
    if dtype == np.float16:
        x = jnp.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX)
    return x.astype(dtype)
