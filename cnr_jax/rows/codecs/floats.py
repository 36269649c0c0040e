"""The dtypes that quantizers take, and rounding to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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


def rounded_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 numbers in `dtype`, to nearest even, the finite ones finite.

    Float32 numbers that the codecs read are below 2**116, which only float16 is short of.
    """
    if dtype == np.float16:
        x = jnp.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX)
    return x.astype(dtype)
