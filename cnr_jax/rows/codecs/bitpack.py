"""Codes of 2, 3, 4 or 8 bits to bytes and back, on the device.

A row is one little-endian bit string: code `i` fills bits `[i * bits, (i + 1) * bits)`,
and bit `k` of the string is bit `k % 8` of byte `k // 8`. So an earlier code sits in
the lower bits of a byte. A row ends on a byte boundary, its last byte padded with zero
bits, so that rows can be gathered and concatenated without touching their bits. This
order is stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# The smallest whole number of bytes that whole codes fill: {bits: (codes, bytes)}.
_GROUPS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 8: (1, 1)}

WIDTHS = tuple(_GROUPS)


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
    """Joins the last axis, fields of `bits` bits, lowest first, to one word each.

    As a reduction: slices joined by `|` read well, but XLA computes whatever produces
    the fields anew for each slice, which made 3 bits ten times slower.
    """
    dtype = np.dtype(dtype)
    shifts = (np.arange(fields.shape[-1]) * bits).astype(dtype)
    shifted = fields.astype(dtype) << lax.broadcast_in_dim(shifts, fields.shape, (2,))
    return lax.reduce(shifted, dtype.type(0), lax.bitwise_or, (2,))


def _spread(word: jax.Array, pieces: int, bits: int) -> jax.Array:
    """Splits each word into `pieces` fields of `bits` bits, lowest first, in place."""
    shifts = np.arange(pieces, dtype=word.dtype) * np.array(bits, word.dtype)
    mask = np.array((1 << bits) - 1, word.dtype)
    rows, words = word.shape
    shape = (rows, words, pieces)
    fields = lax.broadcast_in_dim(word, shape, (0, 1)) >> lax.broadcast_in_dim(
        shifts, shape, (2,)
    )
    return (fields & mask).reshape(rows, words * pieces)
