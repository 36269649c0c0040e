"""Rounds a train state as a restore would, without a checkpoint, and counts its bytes.

Rows are encoded and decoded where they are, and keep their shardings. As in a save, each device
sees only its part of a row.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from cnr_jax.checkpointer.saving.capture import is_dithered, keys_of
from cnr_jax.checkpointer.tuning import of_all
from cnr_jax.encoding import Encoding
from cnr_jax.rows.codecs import Raw, bytes_of
from cnr_jax.rows.codecs.dither import Dither
from cnr_jax.rows.rounding import Off, Rounded, rounded
from cnr_jax.rows.tiling import Box, boxes_of, own_settings
from cnr_jax.state.table import Leaf, Table, Tables, merge, split


class RowBytes(NamedTuple):
    """Bytes that a full save takes for the rows of a state, and how far off they then are.

    Attributes:
        tables: bytes of encoded rows of tables, and of rows that are stored exactly beside them.
        slots: the same for optimizer slots.
        off: errors of the rows of tables.
    """

    tables: int
    slots: int
    off: Off


def restored(
    state: Any, tables: Tables, encoding: Encoding, dither: Dither
) -> tuple[Any, list[RestoredLeaf]]:
    """Rounds a state as a save and a restore would.

    Args:
        state: concrete state, which stays as it is. Leaves that are stored exactly are in both.
        tables: tables of the state.
        encoding: encoding of its rows.
        dither: dither of the codes of tables.

    Returns:
        The state, and its tables and slots once more, to ask for `row_bytes`.
    """
    arrays, dense = split(state, tables)
    leaves = [
        RestoredLeaf(table, leaf, arrays[name][leaf.name], encoding, dither)
        for name, table in tables.items()
        for leaf in table.leaves
    ]
    for each in leaves:
        arrays[each.table.name][each.leaf.name] = each.array
    return merge(state, tables, arrays, dense), leaves


@own_settings()
def row_bytes(leaves: list[RestoredLeaf]) -> RowBytes:
    """Counts bytes and errors of all rows on all processes; all must call it."""
    sums = np.zeros((jax.process_count(), len(leaves), len(Off._fields)))
    sums[jax.process_index()] = [each.off for each in leaves]
    by_leaf = of_all(sums).transpose(1, 0, 2).tolist()
    off, sizes = Off(), {True: 0, False: 0}
    for leaf, of_processes in zip(leaves, by_leaf, strict=True):
        found = functools.reduce(Off.and_of, (Off(*each) for each in of_processes))
        is_slot = leaf.leaf.name != "table"
        sizes[is_slot] += leaf.bytes(int(found.escaped))
        if not is_slot:
            off = off.and_of(found)
    return RowBytes(sizes[False], sizes[True], off)


class RestoredLeaf:
    """Table or slot as a codec restores it.

    Attributes:
        array: its restored rows, sharded as they were; the given ones if they are stored exactly.
        is_dithered: whether its codes are dithered.
        is_rounded: whether a codec rounds its rows.
    """

    def __init__(
        self,
        table: Table,
        leaf: Leaf,
        array: jax.Array,
        encoding: Encoding,
        dither: Dither,
    ) -> None:
        width = math.prod(array.sharding.shard_shape(array.shape)[1:])
        codec = encoding.codec_for(table.name, leaf.name, width, leaf.dtype)
        self.table, self.leaf, self.array = table, leaf, array
        self._codec, self._width = codec, width
        self._rounded: Rounded | None = None
        self.is_dithered = is_dithered(leaf, codec, dither.most_bits)

        def keys(box: Box) -> np.ndarray:
            rows = np.arange(box[0][1] - box[0][0])
            return keys_of(table, box, dither.lineage)(rows)

        self.is_rounded = not isinstance(codec, Raw)
        if self.is_rounded:
            self._rounded = rounded(codec, array, keys if self.is_dithered else None)
            self.array = self._rounded.rows

    @property
    def off(self) -> Off:
        """Errors of the rows on this process; waits for them."""
        return self._rounded.off() if self._rounded else Off()

    def bytes(self, escaped: int) -> int:
        """Bytes of all rows in a full save, if so many of them are escaped."""
        boxes = boxes_of(self.array.sharding, self.leaf.shape)
        rows = sum(box[0][1] - box[0][0] for box in boxes)
        dtype = self.leaf.dtype
        coded = rows * bytes_of(self._codec.parts(self._width, dtype))
        return coded + escaped * self._width * dtype.itemsize
