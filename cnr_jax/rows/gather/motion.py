"""Motion of rows from one restore to the next, compared with the error of codes.

Rounding harms a training whose rows have moved little before they are rounded again: each restore
adds its error to what was learnt in between. This can be measured. The process keeps a sample of
rows as they were when the run began, or was restored, and compares it with the same rows in each
save, which gathers them anyway.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cnr_jax.rows.codecs.base import DTYPES, WIDEST, Raw
from cnr_jax.rows.gather.chunk import Run
from cnr_jax.rows.gather.device import rows_of
from cnr_jax.rows.shards import Shards, Tiling
from cnr_jax.rows.tiling import Box

KEPT_BYTES = 4 << 20
"""Of float32 rows that each process keeps at most."""
_MOST_ROWS = 16_384  # of a tile
LEAST_MOVED = 16
"""Rows of a process that tell anything: fewer are chance."""


class Motion(NamedTuple):
    """Motion of the rows of a sample.

    Attributes:
        rows: number of rows that moved, and that could be coded.
        even_bits: about the width of codes whose error equals the motion of the rows: the mean
            over these rows of `log2(error / motion)`. `error` is the root mean square error of
            dithered codes with a single step over the range of a row. `motion` is the distance
            that the row has moved. Codes of b bits have 2**b - 1 steps, so their error is
            `2**even_bits / (2**b - 1)` of the motion.
    """

    rows: int
    even_bits: float


# A tile, named by its table and its box.
TileRef = tuple[str, Box]


class FollowedRows:
    """Sample of rows of each table of this process, as they were at the beginning.

    The choice of rows never changes. Their values are set by a restore before anything is saved,
    or else by the thread that writes the first save. A restore makes a new object, and leaves this
    one to a save that is still being written. Two threads use one object only if the thread of a
    failed save hangs; at worst a row then has the value that either of two saves had.

    Args:
        tiling: tiling of what this process saves.
        lineage: lineage of the stamps of the rows; each restore begins another one.
    """

    def __init__(self, tiling: Tiling, lineage: str) -> None:
        self.lineage, self._tiling = lineage, tiling
        # The numbers of tiles. Rows that no codec takes are not followed: nothing need be known of
        # them, and one of them may take all the room.
        own = {
            ref: number
            for number, tile in enumerate(tiling.tiles)
            if tile.leaf.name == "table"
            and tile.leaf.dtype in DTYPES
            and _width(ref := (tile.table.name, tile.piece.box)) <= WIDEST
        }
        width = sum(map(_width, own))
        # If one row of each tile would be too much, only some of the tiles are followed.
        some = -(-4 * width // KEPT_BYTES)
        each = KEPT_BYTES // max(1, 4 * width) or 1
        self._tiles: dict[TileRef, int] = {}
        self._positions: dict[TileRef, np.ndarray] = {}
        left = KEPT_BYTES
        for key, number in list(own.items())[:: max(1, some)]:
            start, stop = tiling.tiles[number].rows
            followed = spread(stop - start, min(each, _MOST_ROWS))
            size = 4 * _width(key) * len(followed)
            # The tiles that were chosen may be wider than others, and even one row too wide.
            if size <= left:
                self._tiles[key], self._positions[key] = number, followed
                left -= size
        self._before: dict[TileRef, np.ndarray] = {}

    def are_of(self, tiling: Tiling, lineage: str) -> bool:
        """Whether the followed rows belong to tiles of this tiling, and to this lineage."""
        if lineage != self.lineage or tiling is self._tiling:
            return lineage == self.lineage
        # Another tiling may have the same tiles: then nothing has to be chosen anew.
        there = {(tile.table.name, tile.piece.box) for tile in tiling.tiles}
        return self._tiles.keys() <= there

    def begin(self, shards: Shards) -> None:
        """Keeps the values of all followed rows now; waits for the computation that makes them.

        Args:
            shards: shards of the tiling from which the rows were chosen.
        """
        for key, number in self._tiles.items():
            found = rows_at(shards, number, self._positions[key])
            self._before[key] = found.astype(np.float32)

    def among(self, tile: TileRef, positions: np.ndarray | None) -> np.ndarray:
        """Positions of the followed rows among the saved ones of a tile: int64, sorted.

        Args:
            tile: tile of the rows.
            positions: positions of the rows that are saved, sorted; None: all.
        """
        followed = self._positions.get(tile, np.empty(0, np.int64))
        if positions is None or not len(followed):
            return followed
        at = np.searchsorted(positions, followed)
        here = at < len(positions)
        here[here] = positions[at[here]] == followed[here]
        return at[here]

    def even_bits(
        self, tile: TileRef, positions: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        """Returns `log2(error / motion)` of each row for which it is finite, float64; see `Motion`.

        Rows without a value yet, as at the beginning of a run, get the value that they have now.

        Args:
            tile: tile of the rows.
            positions: positions of the rows in the tile, all of them followed.
            rows: values of the rows now.
        """
        followed = self._positions[tile]
        if tile not in self._before:
            unknown = np.full((len(followed), rows.shape[1]), np.nan, np.float32)
            self._before[tile] = unknown
        at = np.searchsorted(followed, positions)
        before = self._before[tile][at]
        is_new = np.isnan(before).all(axis=1)
        # Squares may overflow, and rows may not be finite.
        with np.errstate(all="ignore"):
            if is_new.any():
                self._before[tile][at[is_new]] = before[is_new] = rows[is_new]
            now = rows.astype(np.float64)
            motion = np.square(now - before).sum(axis=1)
            reach = now.max(axis=1) - now.min(axis=1)
            # The mean squared error of an element is a sixth of the squared step: the mean of
            # f (1 - f) over all fractions f.
            error = np.square(reach) * (now.shape[1] / 6)
            found = 0.5 * np.log2(error / motion)
        return found[np.isfinite(found)]


def rows_at(shards: Shards, number: int, positions: np.ndarray) -> np.ndarray:
    """Returns rows of a tile unencoded, on the host; waits for the computation that makes them.

    Args:
        shards: shards of the state.
        number: number of the tile in their tiling.
        positions: positions of the rows in the tile, sorted.
    """
    tiling, data = shards.tiling, shards.data[number]
    first = tiling.firsts[number]
    if tiling.wheres[number] == "device":
        start, stop = tiling.tiles[number].rows
        run = Run(
            data=data,
            first=first,
            rows=stop - start,
            positions=positions,
            codec=Raw(),
        )
        return rows_of(run)
    words = shards.words[number]
    assert words is not None
    return words[positions + first].view(data.dtype)


def _width(tile: TileRef) -> int:
    """Number of elements in a row of a tile."""
    _, box = tile
    return math.prod(stop - start for start, stop in box[1:])


def spread(rows: int, count: int) -> np.ndarray:
    """Returns the positions of `count` evenly spread rows, int64; of all if there are fewer."""
    count = min(rows, count)
    return np.arange(count, dtype=np.int64) * rows // max(1, count)
