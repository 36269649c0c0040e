"""Rows that are to be saved, on their device or in the host's memory, and chunks of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cnr_jax.rows.codecs import Codec, Encoded

# Of positions within a tile, the keys of these rows.
KeysOf = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """Rows of tiles that are gathered in host memory and saved with one codec, tile by tile.

    Attributes:
        codec: how they are encoded.
        dtype: of their elements.
        width: elements of one row.
        words: of each tile, the rows of the shard that holds it, see `row_words`.
        firsts: of each tile, the row of its shard at which it starts.
        positions: of each tile, sorted int64 positions of its rows that are saved; None: all.
        counts: of each tile, how many these are; none without rows.
        keys_of: of each tile, its keys; None: codes are not dithered.
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
    """The rows of one tile that are gathered and encoded on their device.

    Attributes:
        data: the shard that holds the tile, on its device.
        first: row of `data` at which the tile starts.
        rows: rows of the tile.
        positions: sorted int64 positions within the tile; None for all rows.
        codec: how they are encoded.
        sampled: which of the rows to be saved are also kept as they are, sorted; None: none.
        keys_of: of positions within the tile their keys, if codes are dithered.
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
        """Rows to be saved."""
        return self.rows if self.positions is None else len(self.positions)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.data.shape[1:])

    def keys(self, start: int, stop: int) -> np.ndarray:
        """Keys of some of the rows that are saved, uint32."""
        assert self.keys_of is not None
        if self.positions is None:
            return self.keys_of(np.arange(start, stop))
        return self.keys_of(self.positions[start:stop])


@dataclasses.dataclass(slots=True)
class Chunk:
    """Up to a fixed number of consecutive rows of one group.

    Attributes:
        count: rows that are meant; what follows them is padding.
        rows: host array `[at least count, width]`; None where `encoded` holds the rows.
        encoded: encoded on the device; None where they are encoded later.
        escaped_rows: the rows themselves, on the device, where some were escaped.
        sampled: rows of the chunk that are in the sample of the save, in order, where `rows`
            does not hold them; what follows them is padding.
        keys: of `rows`, uint32, where their codes are to be dithered.
    """

    codec: Codec
    count: int
    rows: np.ndarray | None = None
    encoded: Encoded | None = None
    escaped_rows: jax.Array | None = None
    sampled: jax.Array | None = None
    keys: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on host and device that this chunk keeps."""
        size = self.rows.nbytes if self.rows is not None else 0
        size += self.escaped_rows.nbytes if self.escaped_rows is not None else 0
        size += self.sampled.nbytes if self.sampled is not None else 0
        size += self.keys.nbytes if self.keys is not None else 0
        if self.encoded is not None:
            size += sum(part.nbytes for part in self.encoded.parts.values())
        return size
