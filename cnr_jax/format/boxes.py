"""Boxes: parts of an array, as start and stop in each of its dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]
# Overlaps that are told of: there may be as many as pairs of boxes.
_SHOWN = 3


def box_json(box: Box) -> list[int]:
    """A box as stored: start and stop of each dimension, in one flat list."""
    return [bound for pair in box for bound in pair]


def cover_problems(name: str, shape: Sequence[int], boxes: list[Box]) -> list[str]:
    """Finds why boxes do not cover each element of an array exactly once; empty if they do.

    Volumes add up to the size of the array and no two boxes overlap: together that is exact cover.

    Args:
        name: name of the array.
        shape: its shape.
        boxes: the boxes, in any order.

    Example:
        >>> cover_problems("kernel", (4, 2), [((0, 2), (0, 2)), ((2, 3), (0, 2))])
        ['kernel: tiles hold 6 elements, the leaf has 8']
    """
    for box in boxes:
        inside = len(box) == len(shape) and all(
            stop <= size for (_, stop), size in zip(box, shape, strict=True)
        )
        if not inside:
            return [f"{name}: tile {box_json(box)} is outside shape {list(shape)}"]
    # If volumes add up and no element is held twice, none is left out.
    covered = sum(math.prod(b - a for a, b in box) for box in boxes)
    size = math.prod(shape)
    if covered != size:
        return [f"{name}: tiles hold {covered} elements, the leaf has {size}"]
    return [
        f"{name}: tiles {box_json(a)} and {box_json(b)} overlap"
        for a, b in itertools.islice(_overlapping(boxes), _SHOWN)
    ]


def _overlapping(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that share an element; a sweep along the rows keeps it near linear."""
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        # Boxes that end at or above this row cannot overlap any later one.
        open_boxes = [other for other in open_boxes if other[0][1] > box[0][0]]
        for other in open_boxes:
            if all(a < d and c < b for (a, b), (c, d) in zip(other, box, strict=True)):
                yield other, box
        open_boxes.append(box)
