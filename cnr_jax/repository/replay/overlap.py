"""Which stored rows fall into a region of a leaf, and where they go.

Pure arithmetic on tiles, row ids and layouts: nothing but row ids is read here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from cnr_jax.format.manifest import TableEntry
from cnr_jax.format.tiles import Box, Segment, Tile
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.state.layouts import RowLayout, layout_from

Index = np.ndarray | slice
RowMap = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A table as it is wanted: how many rows, and where logical rows lie.

    Attributes:
        rows: logical rows; equal to the checkpoint's.
        layout: may differ from the checkpoint's.
        padded_rows: stored rows; may differ too. New padding is zero.
    """

    rows: int
    layout: RowLayout
    padded_rows: int


def placement(entry: TableEntry, target: Target) -> RowMap | None:
    """Maps stored rows to wanted ones, -1 for padding; None where they are the same."""
    saved = layout_from(entry.layout.name, entry.layout.configuration)
    if saved == target.layout and entry.padded_rows == target.padded_rows:
        return None

    def place(stored: np.ndarray) -> np.ndarray:
        logical = saved.to_logical(stored)
        known = logical < min(entry.rows, target.rows)
        return np.where(
            known, target.layout.to_physical(np.where(known, logical, 0)), -1
        )

    return place


def overlap(
    reader: StepReader,
    process: int,
    tile: Tile,
    segment: Segment,
    place: RowMap | None,
    rows: tuple[int, int],
) -> tuple[Index, Index]:
    """Which rows of a segment fall into `rows`, and where they go.

    Returns:
        Sorted indices into the segment, and rows relative to `rows[0]`; slices where they
        are runs.
    """
    start, stop = tile.box[0]
    positions = reader.positions(process, segment.row_ids, stop - start)
    if place is None:
        first, last = max(start, rows[0]) - start, min(stop, rows[1]) - start
        if first >= last:
            return slice(0, 0), slice(0, 0)
        shift = start - rows[0]
        if positions is None:
            return slice(first, last), slice(first + shift, last + shift)
        # Positions are sorted, so those within a range are a run.
        first, last = np.searchsorted(positions, (first, last)).tolist()
        return slice(first, last), positions[first:last] + shift
    stored = np.arange(start, stop) if positions is None else positions + start
    wanted = place(stored)
    index = np.flatnonzero((wanted >= rows[0]) & (wanted < rows[1]))
    return index, wanted[index] - rows[0]


def shared_columns(tile: Box, region: Box) -> tuple[tuple[int, int], ...] | None:
    """Those of a tile's columns that a region has, in each dimension; None for no column."""
    found: list[tuple[int, int]] = []
    for (a, b), (c, d) in zip(tile, region, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        found.append((start - a, stop - a))
    return tuple(found)


def split_columns(
    chain: Sequence[StepReader], table: str, leaf: str, box: Box
) -> tuple[Box, ...]:
    """Cuts a region so that of each tile of the chain a piece has all or none of its columns.

    Returns:
        Pieces of all rows of the region; the region itself where tables are split by rows only.
    """
    cuts = [{start, stop} for start, stop in box[1:]]
    for reader in chain:
        for _, tile in reader.tiles(reader.tables[table], leaf):
            for found, (a, b), (c, d) in zip(cuts, tile.box[1:], box[1:], strict=True):
                found.update(cut for cut in (a, b) if c < cut < d)
    runs = [itertools.pairwise(sorted(found)) for found in cuts]
    return tuple((box[0], *columns) for columns in itertools.product(*runs))


def length(index: Index) -> int:
    """Number of rows that an index picks."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def as_array(index: Index) -> np.ndarray:
    """The rows that an index picks, one by one."""
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def picked(index: Index, start: int, stop: int) -> Index:
    """Rows `start` to `stop` of those that an index picks."""
    if isinstance(index, slice):
        return slice(index.start + start, index.start + stop)
    return index[start:stop]
