"""Plans of what a save writes for its tiles."""

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
    """Plan of a run, the rows that are written for one tile, and where they belong.

    Attributes:
        table: name of the table.
        leaf: `"table"`, or the name of the slot.
        box: box of the tile, start and stop in each dimension of the leaf.
        positions: sorted positions of the rows within the tile; None: all rows. Runs of the same
            rows share the object, so that row ids are stored once.
        count: number of rows; with 0, a tile without segments is written.
        codec: codec of the rows.
        dtype: dtype of the leaf.
        keys_of: function that returns the keys of rows by their positions, if the writing thread
            encodes and dithers the rows.
        sample: rows of the tile from which a step is chosen, or that tell whether the step of the
            parent still suits them; None: the first that come, and nothing tells.
        beside: tile of another leaf, earlier in the order, that holds shared parts of these rows;
            None: no parts are shared.
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
        """Table, leaf and box of the tile."""
        return self.table, self.leaf, self.box

    @property
    def rows(self) -> int:
        """Number of rows of the tile, whether they are written or not."""
        return self.box[0][1] - self.box[0][0]

    @property
    def width(self) -> int:
        """Number of elements in a row of the tile."""
        return math.prod(stop - start for start, stop in self.box[1:])

    @property
    def elements(self) -> int:
        """Number of elements of the tile, whether they are written or not."""
        return self.rows * self.width

    @property
    def is_slot(self) -> bool:
        """Whether this is an optimizer slot rather than the table itself."""
        return self.leaf != "table"
