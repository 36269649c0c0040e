"""Codecs of which saves store differences to the integers of what they rest on."""

from __future__ import annotations

import hashlib
from typing import TypeGuard

import numpy as np

from cnr_jax.rows.codecs.lattice import SAMPLE_ROWS, Lattice, Parts
from cnr_jax.rows.codecs.moments import Octave, Unit

# Each has `summed`, the parts of what lies below that a digest is taken of, in order; `on_step`,
# whether `encode_on` is given steps, and not integers below; and the methods `difference`, `add`.
Residual = Lattice | Octave | Unit


def is_on_step(codec: object) -> TypeGuard[Lattice]:
    """Whether all rows of a tile are encoded on one step, which is chosen from a sample."""
    return isinstance(codec, Residual) and codec.on_step


class Digest:
    """Digest of what lies below rows, in their order: 8 hex digits of each summed part."""

    def __init__(self, codec: Residual) -> None:
        self._of = {name: hashlib.blake2b(digest_size=4) for name in codec.summed}

    def update(self, parts: Parts) -> None:
        """Takes more rows."""
        for name, found in self._of.items():
            if name in parts:
                found.update(np.ascontiguousarray(parts[name]).data)

    def hexdigest(self) -> str:
        """The digest of all rows so far."""
        return "".join(found.hexdigest() for found in self._of.values())


def costs_less(difference: np.ndarray, integers: np.ndarray) -> bool:
    """Whether differences are likely to take fewer bits than the integers alone."""
    every = -(-len(integers) // SAMPLE_ROWS)
    bits = [
        np.log2(1 + 2 * np.abs(each[::every].astype(np.float32))).sum()
        for each in (difference, integers)
    ]
    return bool(bits[0] < bits[1])
