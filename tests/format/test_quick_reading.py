"""Tiles and row ids that are read quickly are those without a problem, and read alike."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from cnr_jax.format import tiles
from cnr_jax.format.fields import Fields

from ..conftest import each_of

PART = {"array": "codes", "offset": 3}
TILE: dict[str, Any] = {
    "table": "user",
    "leaf": "table",
    "box": [0, 8, 0, 4],
    "segments": [{"codec": 0, "row_ids": 1, "parts": {"codes": PART}}],
}
ROW_IDS: dict[str, Any] = {"form": "gaps", "offset": 0, "bytes": 4, "count": 2}
WRONG = (None, True, -1, 1.0, 7, "", "gaps", [], {}, [1], [2, 1], [0, True], [{}])
PLACES = (
    *((key,) for key in TILE),
    *(("segments", 0, key) for key in ("codec", "row_ids", "parts")),
    ("segments", 0, "parts", "codes"),
    *(("segments", 0, "parts", "codes", key) for key in PART),
)


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return value


def slowly(read: Any, item: Any) -> Any:
    """What `read` makes of an item, None where it has a problem."""
    problems: list[str] = []
    found = read(Fields(item, "item", problems))
    return None if problems else found


@each_of("place", PLACES)
def test_a_tile_is_read_quickly_if_it_has_no_problem(place: tuple[Any, ...]) -> None:
    for new in WRONG:
        item = changed(TILE, place, new)
        assert tiles._quick_tile(item) == slowly(tiles._read_tile, item), new


def test_row_ids_are_read_quickly_if_they_have_no_problem() -> None:
    for key, new in itertools.product(ROW_IDS, WRONG):
        item = {**ROW_IDS, key: new}
        assert tiles._quick_row_ids(item) == slowly(tiles._read_row_ids, item), item


def test_whole_items_and_things_that_are_no_objects() -> None:
    for item in (TILE, ROW_IDS, *WRONG):
        assert tiles._quick_tile(item) == slowly(tiles._read_tile, item)
        assert tiles._quick_row_ids(item) == slowly(tiles._read_row_ids, item)
    assert tiles._quick_tile(TILE) is not None
    assert tiles._quick_row_ids(ROW_IDS) is not None
