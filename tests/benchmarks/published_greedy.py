"""The greedy search of Check-N-Run as published, which `codecs.py` times beside ours."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from cnr_jax.rows.codecs import Encoded, Greedy
from cnr_jax.rows.codecs.grid import METADATA, ranged
from cnr_jax.rows.codecs.grid import encode as encode_on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published(Greedy):
    """The greedy search as published: one candidate after the other, none rounded as stored.

    What it finds is stored as `Greedy` stores it. Rows that are not finite or constant are
    none of its business.
    """

    def encode(self, rows: jax.Array) -> Encoded:
        """Encodes rows on the grids of the search."""
        levels, metadata = 2**self.bits - 1, METADATA[16]
        grid = metadata.between(*self._range(rows), levels)
        return encode_on(ranged(rows, levels, metadata), grid, self.bits, metadata)

    def _range(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        low, high = rows.min(axis=1), rows.max(axis=1)
        notch = (high - low) / self.bins

        def move(_: int, carry: tuple) -> tuple:
            low, high, least, best_low, best_high = carry
            raised = self._error(rows, low + notch, high)
            lowered = self._error(rows, low, high - notch)
            low = jnp.where(raised < lowered, low + notch, low)
            high = jnp.where(raised < lowered, high, high - notch)
            error = jnp.minimum(raised, lowered)
            best_low = jnp.where(error < least, low, best_low)
            best_high = jnp.where(error < least, high, best_high)
            return low, high, jnp.minimum(error, least), best_low, best_high

        # The last move would leave no range.
        moves = min(int(self.bins * self.ratio), self.bins - 1)
        start = (low, high, self._error(rows, low, high), low, high)
        return jax.lax.fori_loop(0, moves, move, start)[3:]

    def _error(self, rows: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        levels = 2**self.bits - 1
        scale = ((high - low) / levels)[:, None]
        codes = jnp.clip(jnp.round((rows - low[:, None]) / scale), 0, levels)
        return jnp.linalg.norm(codes * scale + low[:, None] - rows, axis=1)
