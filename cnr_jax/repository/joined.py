"""Neighbouring tiles of one process, joined: their rows are read and placed in one go.

A table that is split over the devices of a process has a tile for each of them, but their rows
usually lie one after the other in the process's arrays. For a small table what counts is the
number of tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cnr_jax.format.tiles import RowIds, Segment, Tile
from cnr_jax.rows.codecs import Codec


def runs(
    tiles: Sequence[Tile], row_ids: Sequence[RowIds], widths: Mapping[str, int]
) -> Iterator[list[Tile]]:
    """Cuts tiles of one process and leaf into runs, each of which is like one tile.

    Args:
        tiles: in the order of the manifest.
        row_ids: of the process.
        widths: elements that each part of a row has in the codec of the first tile.

    Yields:
        Tiles whose rows and whose places in the arrays follow each other.
    """
    run: list[Tile] = []
    for tile in tiles:
        if run and not _follows(run[-1], tile, row_ids, widths):
            yield run
            run = []
        run.append(tile)
    if run:
        yield run


def _follows(
    before: Tile, tile: Tile, row_ids: Sequence[RowIds], widths: Mapping[str, int]
) -> bool:
    if len(before.segments) != 1 or len(tile.segments) != 1:
        return False
    if tile.box[0][0] != before.box[0][1] or tile.box[1:] != before.box[1:]:
        return False
    first, second = before.segments[0], tile.segments[0]
    if first.codec != second.codec or first.parts.keys() != second.parts.keys():
        return False
    count = row_ids[first.row_ids].count
    for name, part in first.parts.items():
        other = second.parts[name]
        if other.array != part.array or name not in widths:
            return False
        if other.offset != part.offset + count * widths[name]:
            return False
    return True


def as_one(run: Sequence[Tile], row_ids: int) -> Tile:
    """The tile that a run is like, its rows named by `row_ids`."""
    first, last = run[0], run[-1]
    box = ((first.box[0][0], last.box[0][1]), *first.box[1:])
    segment: Segment = dataclasses.replace(first.segments[0], row_ids=row_ids)
    return dataclasses.replace(first, box=box, segments=(segment,))


def ids_of(run: Sequence[Tile]) -> tuple[tuple[int, int], ...]:
    """Row ids of each tile of a run, and its number of rows."""
    return tuple(
        (tile.segments[0].row_ids, tile.box[0][1] - tile.box[0][0]) for tile in run
    )


def joined_positions(
    ids: Sequence[tuple[int, int]], read: Callable[[int, int], np.ndarray | None]
) -> np.ndarray | None:
    """Sorted positions in a run of tiles, relative to its first row; None for all rows.

    Args:
        ids: as `ids_of` returned them.
        read: positions of row ids in one tile of so many rows; None for all.
    """
    found = [read(index, rows) for index, rows in ids]
    if all(each is None for each in found):
        return None
    parts: list[np.ndarray] = []
    start = 0
    for (_, rows), each in zip(ids, found, strict=True):
        parts.append(start + (np.arange(rows) if each is None else each))
        start += rows
    return np.concatenate(parts)


@functools.lru_cache(maxsize=1024)
def widths_of(codec: Codec, width: int, dtype: np.dtype) -> Mapping[str, int]:
    """Elements of each part of a row of `width` elements."""
    return {name: part.width for name, part in codec.parts(width, dtype).items()}
