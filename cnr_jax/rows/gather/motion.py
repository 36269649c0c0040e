"""How far rows move from one restore to the next, against the error of codes.

Rounding harms a training whose rows have moved by little when they are rounded again: as often as
the run is restored, the error comes on top of what was learnt in between. Whether that is so can
be measured: a sample of rows is kept as it was when the run began, or was restored, and compared
with what each save gathers of it anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cnr_jax.rows.codecs.base import DTYPES, Raw
from cnr_jax.rows.gather.chunk import Run
from cnr_jax.rows.gather.device import rows_of
from cnr_jax.rows.gather.host import copied_rows
from cnr_jax.rows.tiling import Box, OwnTile, ShardsOf, Way

KEPT_BYTES = 4 << 20
"""Of float32 rows that each process keeps at most."""
_MOST_ROWS = 16_384  # of a tile
LEAST_MOVED = 16
"""Rows of a process that tell anything: fewer are chance."""


class Motion(NamedTuple):
    """How far rows of a sample have moved.

    Attributes:
        rows: that moved, and of which codes could be made.
        even_bits: `log2(error / motion)`, the mean over these rows: of the error of dithered codes
            of one step over the range of a row, as a root mean square, and of the way that the row
            has gone. Codes of b bits have 2**b - 1 steps: theirs is `2**even_bits / (2**b - 1)` of
            the motion.
    """

    rows: int
    even_bits: float


# A tile by its table and its place.
Key = tuple[str, Box]


class FollowedRows:
    """Some rows of each table of this process, and what they were at the beginning.

    To be told of rows by one thread at a time.

    Args:
        tiles: what this process saves.
        lineage: of the stamps of the rows; another one begins with each restore.
    """

    def __init__(self, tiles: Iterable[OwnTile], lineage: str) -> None:
        self.lineage = lineage
        own = {
            (tile.table.name, tile.piece.box): tile
            for tile in tiles
            if tile.leaf.name == "table" and tile.leaf.dtype in DTYPES
        }
        width = sum(math.prod(b - a for a, b in box[1:]) for _, box in own)
        each = KEPT_BYTES // max(1, 4 * width)
        self._tiles = own if each else {}
        self._positions = {
            key: _spread(tile.rows[1] - tile.rows[0], min(each, _MOST_ROWS))
            for key, tile in self._tiles.items()
        }
        self._before: dict[Key, np.ndarray] = {}

    def are_of(self, tiles: Iterable[OwnTile], lineage: str) -> bool:
        """Whether these are rows of such tiles in this lineage."""
        there = {(tile.table.name, tile.piece.box) for tile in tiles}
        return lineage == self.lineage and self._tiles.keys() <= there

    def begin(self, shards: ShardsOf, way: Way) -> None:
        """Keeps what all rows are now; waits for the computation that makes them."""
        for key, tile in self._tiles.items():
            data, first = shards(key[0], tile.leaf.name).on(tile.piece.device)
            start, stop = tile.rows
            run = Run(
                data=data,
                first=start - first,
                rows=stop - start,
                positions=self._positions[key],
                codec=Raw(),
                where=way(tile.piece.device, data.nbytes),
            )
            found = rows_of(run) if run.where == "device" else copied_rows(run)
            self._before[key] = found.astype(np.float32)

    def among(self, key: Key, positions: np.ndarray | None) -> np.ndarray:
        """Which of the rows of a tile that are saved are followed: int64, sorted.

        Args:
            key: of the tile.
            positions: of the rows that are saved, sorted; None: all.
        """
        followed = self._positions.get(key, np.empty(0, np.int64))
        if positions is None or not len(followed):
            return followed
        at = np.searchsorted(positions, followed)
        here = at < len(positions)
        here[here] = positions[at[here]] == followed[here]
        return at[here]

    def has(self, key: Key) -> bool:
        """Whether it is known what rows of a tile were."""
        return key in self._before

    def moved(self, key: Key, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`log2(error / motion)` of rows, float64; of those alone that moved, and have both.

        Args:
            key: of the tile.
            positions: of the rows in it, all followed.
            rows: as they are now.
        """
        before = self._before[key][np.searchsorted(self._positions[key], positions)]
        # Squares of what a float holds may not fit into one; rows may not be finite.
        with np.errstate(all="ignore"):
            now = rows.astype(np.float64)
            motion = np.square(now - before).sum(axis=1)
            reach = now.max(axis=1) - now.min(axis=1)
            # A sixth of a step squared: the mean of f (1 - f) over all fractions f.
            error = np.square(reach) * (now.shape[1] / 6)
            found = 0.5 * np.log2(error / motion)
        return found[np.isfinite(found)]

    def keep(self, key: Key, positions: np.ndarray, rows: np.ndarray) -> None:
        """Keeps rows as they are, where the run has just begun: the first save has all.

        Args:
            key: of the tile.
            positions: of the rows in it, all followed.
            rows: as they are now.
        """
        followed = self._positions[key]
        if key not in self._before:
            # Until they have come these do not move.
            self._before[key] = np.full((len(followed), rows.shape[1]), np.nan, "f4")
        at = np.searchsorted(followed, positions)
        self._before[key][at] = rows


def _spread(rows: int, count: int) -> np.ndarray:
    """Positions of so many rows, evenly spread; of all if there are fewer."""
    count = min(rows, count)
    return np.arange(count, dtype=np.int64) * rows // max(1, count)
