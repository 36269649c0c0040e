"""Plans of what is written for the tiles of a save."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from cnr_jax.format.boxes import Box
from cnr_jax.repository.parent_rows import TileKey
from cnr_jax.rows.codecs import Codec
from cnr_jax.rows.gather.chunk import KeysOf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What is written for one tile: the rows of one run, and where they belong.

    Attributes:
        box: the tile, start and stop in each dimension of the leaf.
        positions: sorted positions within the tile; None for all rows. Runs of one row range
            share the same object, and then the row ids are stored once.
        count: rows; zero writes a tile without segments.
        dtype: of the leaf.
        keys_of: function that returns the keys of rows by their positions, if they are encoded
            here and are to be dithered.
        sample: rows of the tile from which a step is chosen; None: the first that come.
        beside: the tile of another leaf, earlier in the order, that has shared parts of its rows;
            None: there are none.
    """

    table: str
    leaf: str
    box: Box
    positions: np.ndarray | None
    count: int
    codec: Codec
    dtype: np.dtype
    keys_of: KeysOf | None = None
    sample: np.ndarray | None = None
    beside: TileKey | None = None

    @property
    def key(self) -> TileKey:
        """The tile."""
        return self.table, self.leaf, self.box

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.box[0][1] - self.box[0][0]

    @property
    def width(self) -> int:
        """Elements in a row of the tile."""
        return math.prod(stop - start for start, stop in self.box[1:])

    @property
    def is_slot(self) -> bool:
        """Whether this is an optimizer slot rather than the table itself."""
        return self.leaf != "table"
