"""The cheapest of a codec's parameters whose error on some rows is close to the best.

Source: Check-N-Run (NSDI'22), which tunes its search on a sample of the rows. How it weighs error
against time is not known; here the cost is counted in rounds, not in seconds, so that the choice
depends on the rows alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from cnr_jax.rows.codecs import Asymmetric, Codec, Greedy, KMeans
from cnr_jax.rows.gather.chunk import chunk_rows, padded

# What is tried. The greedy search gains nothing from more bins on trained rows.
_ITERATIONS = (0, 1, 2, 3, 4, 6, 8)
_REFITS = (0, 1, 2, 3, 4, 5, 7, 9)
_BINS = (5, 10, 15, 25, 45)
_RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)
# Encoded at a time, as long as these are no more bytes than a chunk of a save.
_MOST_ROWS = 4096


class Variant(NamedTuple):
    """A codec as it might be configured.

    Attributes:
        codec: of one kind and width in all variants.
        rounds: of its search; the cost, of which each round is as much as any other.
    """

    codec: Codec
    rounds: int


class Tried(NamedTuple):
    """A variant and its mean l2 error of a row."""

    codec: Codec
    rounds: int
    error: float


class Choice(NamedTuple):
    """The variant that was chosen, and all that were tried, in the order given."""

    chosen: Tried
    tried: tuple[Tried, ...]

    @property
    def best_error(self) -> float:
        """The least error of all that were tried."""
        return min(each.error for each in self.tried)


def variants(codec: Codec) -> Sequence[Variant]:
    """Returns what might be chosen in the place of a codec, none for most kinds.

    Example:
        >>> [variant.codec.refits for variant in variants(Asymmetric(bits=2))]
        [0, 1, 2, 3, 4, 5, 7, 9]
    """
    if isinstance(codec, Asymmetric) and codec.refits != 0:
        return [Variant(dataclasses.replace(codec, refits=n), n) for n in _REFITS]
    if isinstance(codec, KMeans) and codec.iterations:
        return [
            Variant(dataclasses.replace(codec, iterations=n), n) for n in _ITERATIONS
        ]
    if isinstance(codec, Greedy):
        return [
            Variant(dataclasses.replace(codec, bins=bins, ratio=ratio), moves)
            for bins in _BINS
            for ratio in _RATIOS
            if (moves := int(bins * ratio + 1e-9))
        ]
    return []


def cheapest(rows: np.ndarray, found: Sequence[Variant], within: float) -> Choice:
    """Returns the variant of fewest rounds among those close to the best.

    Args:
        rows: float[rows, dim], of a dtype that the codecs encode.
        found: what is tried, at least one.
        within: how much greater than the least error the chosen one may be, as a share of it.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
        >>> cheapest(rows, variants(Asymmetric(bits=2)), within=0.05).chosen.rounds
        2
    """
    tried = tuple(Tried(*each, mean_error(each.codec, rows)) for each in found)
    limit = (1.0 + within) * min(each.error for each in tried)
    close = [each for each in tried if each.error <= limit]
    return Choice(min(close, key=lambda each: (each.rounds, each.error)), tried)


def mean_error(codec: Codec, rows: np.ndarray) -> float:
    """Returns the mean l2 error of a row; escaped rows, which are stored exactly, have none."""
    dim = rows.shape[1]
    size = min(chunk_rows(dim, rows.dtype.itemsize), _MOST_ROWS)
    norms = np.zeros(len(rows))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        back, escaped = _there_and_back(codec, padded(part, size))
        held = ~np.asarray(escaped)[: len(part)]
        # In double precision: squares of what a float holds may not fit into one.
        off = np.asarray(back)[: len(part)][held].astype(np.float64) - part[held]
        norms[start : start + size][held] = np.linalg.norm(off, axis=1)
    return float(norms.mean())


@functools.partial(jax.jit, static_argnums=0)
def _there_and_back(codec: Codec, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    encoded = codec.encode(rows)
    back = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
    return back, encoded.escaped
