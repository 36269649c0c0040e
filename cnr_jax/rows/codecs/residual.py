"""Codecs whose integers a save stores as differences to those of its parent."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, TypeGuard

import numpy as np

from cnr_jax.rows.codecs.lattice import SAMPLE_ROWS, Lattice, Parts
from cnr_jax.rows.codecs.moments import Octave, Unit

# Each has `summed`, names of the parts of the rows below of which a digest is taken, in order;
# `on_step`, whether `encode_on` takes steps rather than the integers below; and the methods
# `difference` and `add`.
Residual = Lattice | Octave | Unit


def is_on_step(codec: object) -> TypeGuard[Lattice]:
    """Whether a codec encodes all rows of a tile on one step, which is chosen from a sample."""
    return isinstance(codec, Residual) and codec.on_step


class Digest:
    """Digest of the rows below, in the order of the rows: 8 hex digits for each summed part.

    Args:
        codec: codec of the rows.
        is_crc: whether it is of CRC-32s; else of BLAKE2b, as earlier revisions wrote it.
    """

    def __init__(self, codec: Residual, *, is_crc: bool = True) -> None:
        self._of: dict[str, Any] = {
            name: _Crc32() if is_crc else hashlib.blake2b(digest_size=4)
            for name in codec.summed
        }

    def update(self, parts: Parts) -> None:
        """Adds the parts of more rows to the digest."""
        for name, found in self._of.items():
            if name in parts:
                found.update(np.ascontiguousarray(parts[name]).data)

    def hexdigest(self) -> str:
        """Hex digits of the digest of all rows that were added so far."""
        return "".join(found.hexdigest() for found in self._of.values())


class _Crc32:
    """CRC-32 with the methods of `hashlib`: four times as fast as BLAKE2b."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def costs_less(difference: np.ndarray, integers: np.ndarray) -> bool:
    """Whether the differences are likely to take fewer bits than the integers themselves."""
    every = -(-len(integers) // SAMPLE_ROWS)
    bits = [
        np.log2(1 + 2 * np.abs(each[::every].astype(np.float32))).sum()
        for each in (difference, integers)
    ]
    return bool(bits[0] < bits[1])
