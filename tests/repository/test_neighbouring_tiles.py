"""Neighbouring tiles that are read as one, and those that must not be."""

from __future__ import annotations

import dataclasses

import numpy as np

from cnr_jax.format.tiles import PartRef, RowIds, Segment, Tile
from cnr_jax.repository.step_reader import as_one, ids_of, joined_positions, runs

from ..conftest import each_of

ROW_IDS = (
    RowIds(form="all", offset=0, bytes=0, count=8),
    RowIds(form="bitmap", offset=0, bytes=1, count=3),
)
WIDTHS = {"codes": 2, "scale": 1}


def tile(start: int, row_ids: int, before: int, **changes: object) -> Tile:
    """A tile of 8 rows, `before` rows of whose leaf lie before it in the arrays."""
    parts = {
        name: PartRef(array=name, offset=100 + before * width)
        for name, width in WIDTHS.items()
    }
    segment = Segment(codec=0, row_ids=row_ids, parts=parts)
    made = Tile(
        table="user",
        leaf="table",
        box=((start, start + 8), (0, 4)),
        segments=(segment,),
    )
    return dataclasses.replace(made, **changes)


def test_tiles_that_follow_each_other_are_one() -> None:
    tiles = [tile(0, 0, 0), tile(8, 1, 8), tile(16, 0, 11)]
    assert list(runs(tiles, ROW_IDS, WIDTHS)) == [tiles]
    one = as_one(tiles, -1)
    assert one.box == ((0, 24), (0, 4))
    assert one.segments[0].row_ids == -1
    assert one.segments[0].parts == tiles[0].segments[0].parts
    assert ids_of(tiles) == ((0, 8), (1, 8), (0, 8))


@each_of(
    "second",
    [
        tile(16, 0, 8),  # rows are missing between
        tile(8, 0, 9),  # lies elsewhere in the arrays
        tile(8, 0, 8, box=((8, 16), (0, 2))),
        tile(8, 0, 8, segments=()),
        tile(8, 0, 8, segments=tile(8, 0, 8).segments * 2),
        tile(
            8, 0, 8, segments=(dataclasses.replace(tile(8, 0, 8).segments[0], codec=1),)
        ),
    ],
)
def test_other_tiles_stay_apart(second: Tile) -> None:
    tiles = [tile(0, 0, 0), second]
    assert list(runs(tiles, ROW_IDS, WIDTHS)) == [[tiles[0]], [second]]


def test_positions_are_counted_from_the_first_row_of_the_run() -> None:
    stored = {0: None, 1: np.array([1, 5])}
    both = joined_positions([(1, 8), (0, 3), (1, 8)], lambda i, rows: stored[i])
    assert both is not None
    assert both.tolist() == [1, 5, 8, 9, 10, 12, 16]
    assert joined_positions([(0, 8), (0, 8)], lambda i, rows: stored[i]) is None
