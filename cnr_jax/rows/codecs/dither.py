"""Dither: a threshold between two levels, above which an element is rounded up.

If an element moves by less than half a step between two restores, rounding to nearest puts it back
at each restore, and it never moves. With dither its code is `floor(place + h)`, `h` in [0, 1). If
training has moved the element by a part of a step, its code moves by a whole step with that part as
the probability, so it is right in the mean.

`h` is a hash of the row's key and of the column, not a random number. As long as the key stays, an
element that does not move keeps its code, and a delta its bytes. The levels span the whole range of
a row, since each restore would put back the elements that a narrower range clips.

Measured in docs/accuracy.md. Source: dithered (stochastic) rounding is old; see L. Schuchman,
"Dither signals and their effect on quantization noise" (1964).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Both are odd. Multiples of the first, modulo 2**32, differ for all rows. Multiples of the second,
# the golden ratio, fill [0, 2**32) evenly, however many there are.
_ROW, _COLUMN = np.uint32(0x85EBCA6B), np.uint32(0x9E3779B9)
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_FRACTION_BITS = 24  # of a float32 below 1


class Dither(NamedTuple):
    """Dither of a save: the widths of codes that it dithers, and what their hash depends on.

    Attributes:
        lineage: lineage of the save, 32 hex digits; see `dither_seed`.
        most_bits: width of the widest codes that are dithered; wider ones are rounded to nearest.
    """

    lineage: str
    most_bits: int


def dither_seed(lineage: str, table: str, column: int = 0) -> np.uint32:
    """Returns the seed of the keys of a table's rows in one lineage.

    Args:
        lineage: 32 hex digits; each restore begins a new lineage.
        table: name of the table.
        column: first column of the rows in the whole leaf. Where columns are sharded, each part
            has keys of its own.
    """
    text = f"{lineage} {column} {table}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=4).digest()
    return np.uint32(int.from_bytes(digest, "little"))


def row_keys(seed: np.uint32, rows: np.ndarray) -> np.ndarray:
    """Returns the keys of rows, uint32[rows].

    Args:
        seed: see `dither_seed`.
        rows: logical row ids, integers; ids that are 2**32 apart have the same key.
    """
    return rows.astype(np.uint32) * _ROW + seed


def thresholds(keys: jax.Array, width: int) -> jax.Array:
    """Returns the threshold h of each element, float32[rows, width] in [0, 1). Jit-able.

    Over lineages h is uniform in [0, 1) for each element, and independent for elements of different
    rows. The thresholds of one row are evenly spread too, at one addition an element.

    Args:
        keys: uint32[rows], see `row_keys`.
        width: number of columns. Static.
    """
    # Source: C. Wellons, "Prospecting for Hash Functions": lowbias32.
    mixed = keys.astype(jnp.uint32)
    mixed = (mixed ^ (mixed >> 16)) * _FIRST
    mixed = (mixed ^ (mixed >> 15)) * _SECOND
    mixed = mixed ^ (mixed >> 16)
    columns = np.arange(width, dtype=np.uint32) * _COLUMN
    # 24 bits fit a signed integer, and processors convert signed ones to floats several at a time.
    bits = (mixed[:, None] + columns[None]) >> (32 - _FRACTION_BITS)
    return bits.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-_FRACTION_BITS)
