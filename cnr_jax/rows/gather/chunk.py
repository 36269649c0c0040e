"""Rows that are to be saved, on their device or in host memory, and the chunks they form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded

# Function from positions within a tile to the keys of the rows there.
KeysOf = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """Rows of tiles that are gathered in host memory and saved with one codec, tile by tile.

    Attributes:
        codec: codec that encodes the rows.
        dtype: dtype of their elements.
        width: number of elements in a row.
        words: rows of each tile's shard, see `row_words`.
        firsts: row of its shard at which each tile starts.
        positions: sorted int64 positions of each tile's saved rows; None: all.
        counts: number of each tile's saved rows, at least one.
        keys_of: function that returns the keys of each tile's rows; None: codes are not dithered.
    """

    codec: Codec
    dtype: np.dtype
    width: int
    words: Sequence[np.ndarray]
    firsts: Sequence[int]
    positions: Sequence[np.ndarray | None]
    counts: Sequence[int]
    keys_of: Sequence[KeysOf] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rows of one tile that are gathered and encoded on their device.

    Attributes:
        data: the shard that holds the tile, on its device.
        first: row of `data` at which the tile starts.
        rows: number of rows of the tile.
        positions: sorted int64 positions within the tile; None for all rows.
        codec: codec that encodes the rows.
        sampled: sorted indices of the saved rows that are also kept unencoded; None: none.
        keys_of: function from positions within the tile to row keys; None: codes are not dithered.
    """

    data: jax.Array
    first: int
    rows: int
    positions: np.ndarray | None
    codec: Codec
    sampled: np.ndarray | None = None
    keys_of: KeysOf | None = None

    @property
    def count(self) -> int:
        """Number of rows to be saved."""
        return self.rows if self.positions is None else len(self.positions)

    @property
    def width(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.data.shape[1:])

    def keys(self, start: int, stop: int) -> np.ndarray:
        """Keys of the saved rows from `start` to `stop`, uint32."""
        assert self.keys_of is not None
        if self.positions is None:
            return self.keys_of(np.arange(start, stop))
        return self.keys_of(self.positions[start:stop])


@dataclasses.dataclass(slots=True)
class Chunk:
    """Chunk of rows: up to a fixed number of consecutive rows that share codec, dtype and width.

    Attributes:
        codec: codec that encodes the rows.
        count: number of rows; anything after them is padding.
        rows: host array `[at least count, width]`; None if `encoded` holds the rows.
        encoded: rows encoded on the device; None if they are encoded later.
        escaped_rows: all rows unencoded, on the device; None if no row is escaped.
        sampled: rows of the chunk that are in the sample of the save, in order, if `rows` does
            not hold them; anything after them is padding.
        keys: keys of `rows`, uint32, if their codes are to be dithered.
    """

    codec: Codec
    count: int
    rows: np.ndarray | None = None
    encoded: Encoded | None = None
    escaped_rows: jax.Array | None = None
    sampled: jax.Array | None = None
    keys: np.ndarray | None = None

    def leave_device(self) -> None:
        """Moves what is on a device to the host; waits for the copies."""
        if self.encoded is not None:
            self.encoded = jax.tree.map(np.asarray, self.encoded)
        for name in ("escaped_rows", "sampled"):
            array = getattr(self, name)
            setattr(self, name, None if array is None else np.asarray(array))

    @property
    def nbytes(self) -> int:
        """Bytes of memory, on host and device, that this chunk keeps in use."""
        size = self.rows.nbytes if self.rows is not None else 0
        size += self.escaped_rows.nbytes if self.escaped_rows is not None else 0
        size += self.sampled.nbytes if self.sampled is not None else 0
        size += self.keys.nbytes if self.keys is not None else 0
        if self.encoded is not None:
            size += sum(part.nbytes for part in self.encoded.parts.values())
        return size
