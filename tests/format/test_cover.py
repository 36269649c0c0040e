"""Tiles of all processes cover every leaf exactly; the check of it finds every fault."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_jax import errors
from cnr_jax.format.manifest import LeafEntry, NamedConfiguration, TableEntry
from cnr_jax.format.tiles import Box, Tile, check_cover

from ..conftest import each_of


def table_of(*shapes: tuple[int, ...], name: str = "user") -> TableEntry:
    leaves = tuple(
        LeafEntry(
            name=f"slot{i}" if i else "table", path=(str(i),), shape=s, dtype="float32"
        )
        for i, s in enumerate(shapes)
    )
    layout = NamedConfiguration(name="identity", configuration={})
    rows = shapes[0][0]
    return TableEntry(
        name=name, rows=rows, padded_rows=rows, layout=layout, leaves=leaves
    )


def tile(box: Box, leaf: str = "table", name: str = "user") -> Tile:
    return Tile(table=name, leaf=leaf, box=box, segments=())


def problems(shape: tuple[int, ...], boxes: list[Box]) -> list[str]:
    try:
        check_cover([table_of(shape)], map(tile, boxes), "step 7")
    except errors.ManifestError as error:
        assert "step 7" in str(error)
        return list(error.problems)
    return []


def test_each_layer_of_a_leaf_covers_it() -> None:
    def layered(*boxes: tuple[int, Box]) -> list[Tile]:
        return [dataclasses.replace(tile(box), layer=layer) for layer, box in boxes]

    whole, left, right = ((0, 4), (0, 6)), ((0, 4), (0, 3)), ((0, 4), (3, 6))
    table = [table_of((4, 6))]
    check_cover(table, layered((0, whole), (2, left), (2, right)), "step 7")
    for wrong in (
        [(0, whole), (1, left)],
        [(0, whole), (1, left), (1, whole)],
        [(1, whole)],
    ):
        with pytest.raises(errors.ManifestError):
            check_cover(table, layered(*wrong), "step 7")


def grid(cuts: list[list[int]]) -> list[Box]:
    """All boxes of a grid, cut at the given places of each dimension."""
    spans = [list(itertools.pairwise(places)) for places in cuts]
    return [tuple(box) for box in itertools.product(*spans)]


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    cuts = [
        sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        for size in shape
    ]
    return shape, cuts


@given(shapes_and_cuts(), st.randoms(use_true_random=False))
def test_any_grid_covers_in_any_order(case: tuple, random) -> None:
    shape, cuts = case
    boxes = grid(cuts)
    random.shuffle(boxes)
    assert problems(shape, boxes) == []


@given(shapes_and_cuts(), st.data())
def test_a_missing_tile_is_a_gap(case: tuple, data: st.DataObject) -> None:
    shape, cuts = case
    boxes = grid(cuts)
    boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    (problem,) = problems(shape, boxes)
    assert "tiles hold" in problem


@given(shapes_and_cuts(), st.data())
def test_a_tile_given_twice_is_found(case: tuple, data: st.DataObject) -> None:
    shape, cuts = case
    boxes = grid(cuts)
    boxes.append(data.draw(st.sampled_from(boxes)))
    assert problems(shape, boxes)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    data=st.data(),
)
@settings(max_examples=150)
def test_verdict_is_that_of_counting_every_element(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    def span(size: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(
            lambda pair: pair[0] < pair[1]
        )

    boxes = data.draw(st.lists(st.tuples(*map(span, shape)), min_size=1, max_size=5))
    counts = np.zeros(shape, int)
    for (a, b), (c, d) in boxes:
        counts[a:b, c:d] += 1
    assert (problems(shape, boxes) == []) == bool((counts == 1).all())


def test_overlap_with_the_right_volume_is_found() -> None:
    boxes: list[Box] = [((0, 2), (0, 4)), ((1, 3), (0, 4))]
    assert problems((4, 4), boxes) == [
        "user.table: tiles [0, 2, 0, 4] and [1, 3, 0, 4] overlap"
    ]


def test_columns_that_overlap_are_found() -> None:
    boxes: list[Box] = [((0, 4), (0, 3)), ((0, 2), (2, 4))]
    assert "overlap" in problems((4, 4), boxes)[0]


@each_of("box", [((0, 5), (0, 4)), ((0, 4), (0, 5)), ((0, 4),), ((0, 4),) * 3])
def test_tile_outside_its_leaf_is_found(box: Box) -> None:
    (problem,) = problems((4, 4), [box])
    assert "outside shape [4, 4]" in problem


def test_all_leaves_are_reported_together() -> None:
    tables = [table_of((4, 2), (4,)), table_of((3, 2), name="item")]
    tiles = [
        tile(((0, 4), (0, 1))),
        tile(((0, 4),), leaf="slot1"),
        tile(((0, 1),), leaf="slot9"),
        tile(((0, 1), (0, 1)), name="gone"),
    ]
    with pytest.raises(errors.ManifestError) as caught:
        check_cover(tables, tiles, "step 7")
    assert sorted(caught.value.problems) == [
        "gone.table: not a leaf of this step",
        "item.table: tiles hold 0 elements, the leaf has 6",
        "user.slot9: not a leaf of this step",
        "user.table: tiles hold 4 elements, the leaf has 8",
    ]


def test_many_tiles_are_checked_in_near_linear_time() -> None:
    boxes: list[Box] = [((i, i + 1), (0, 8)) for i in range(20_000)]
    started = time.perf_counter()
    assert problems((20_000, 8), boxes) == []
    # About 0.05 s; pairwise comparison would take minutes.
    assert time.perf_counter() - started < 5
