"""Codecs whose integers a save stores as differences to those of its parent."""

from __future__ import annotations

import hashlib
from typing import TypeGuard

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
    """Digest of the rows below, in the order of the rows: 8 hex digits for each summed part."""

    def __init__(self, codec: Residual) -> None:
        self._of = {name: hashlib.blake2b(digest_size=4) for name in codec.summed}

    def update(self, parts: Parts) -> None:
        """Adds the parts of more rows to the digest."""
        for name, found in self._of.items():
            if name in parts:
                found.update(np.ascontiguousarray(parts[name]).data)

    def hexdigest(self) -> str:
        """Hex digits of the digest of all rows that were added so far."""
        return "".join(found.hexdigest() for found in self._of.values())


def costs_less(difference: np.ndarray, integers: np.ndarray) -> bool:
    """Whether the differences are likely to take fewer bits than the integers themselves."""
    every = -(-len(integers) // SAMPLE_ROWS)
    bits = [
        np.log2(1 + 2 * np.abs(each[::every].astype(np.float32))).sum()
        for each in (difference, integers)
    ]
    return bool(bits[0] < bits[1])
