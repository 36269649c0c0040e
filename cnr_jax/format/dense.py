"""Tiles of dense leaves: parts of leaves, and their places in the bytes of a process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from cnr_jax import errors
from cnr_jax.format.boxes import Box, cover_problems
from cnr_jax.format.fields import Fields, is_integer
from cnr_jax.format.manifest import DenseLeaf

# Bytes of a number of Python, by its type: an integer in two's complement.
SCALAR_BYTES = {"bool": 1, "int": 16, "float": 8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseTile:
    """Tile of a dense leaf: its part `box`, and its bytes in the array of its process.

    Attributes:
        leaf: index into the dense leaves of the manifest.
        box: start and stop in each dimension of the leaf.
        offset: offset of its first byte.
        bytes: number of its bytes.
    """

    leaf: int
    box: Box
    offset: int
    bytes: int

    @property
    def element_bytes(self) -> int:
        """Bytes of each element of the leaf."""
        return self.bytes // math.prod(stop - start for start, stop in self.box)


def read_dense_tile(fields: Fields) -> DenseTile:
    """Reads the tile of a dense leaf from a process manifest."""
    flat = fields.integers("box")
    box = tuple(zip(flat[::2], flat[1::2], strict=False))
    tile = DenseTile(
        leaf=fields.integer("leaf"),
        box=box,
        offset=fields.integer("offset"),
        bytes=fields.integer("bytes", minimum=1),
    )
    if len(flat) % 2 or any(start >= stop for start, stop in box):
        fields.problems.append(
            f"{fields.where}.box: expected start and stop of each dimension,"
            f" got {list(flat)}"
        )
        return dataclasses.replace(tile, box=())
    if tile.bytes % math.prod(stop - start for start, stop in box):
        fields.problems.append(
            f"{fields.where}.bytes: expected as many for each element of the box,"
            f" got {tile.bytes}"
        )
    return tile


def quick_dense_tile(item: Any) -> DenseTile | None:
    """Reads a tile without problems, as `read_dense_tile` does; None for any other."""
    try:
        leaf, flat = item["leaf"], item["box"]
        offset, size = item["offset"], item["bytes"]
    except (KeyError, TypeError):
        return None
    if not (is_integer(leaf) and is_integer(offset) and is_integer(size, 1)):
        return None
    if type(flat) is not list or len(cast("list[Any]", flat)) % 2:
        return None
    bounds = cast("list[int]", flat)
    if not all(map(is_integer, bounds)):
        return None
    box = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    if any(start >= stop for start, stop in box):
        return None
    if size % math.prod(stop - start for start, stop in box):
        return None
    return DenseTile(leaf=leaf, box=box, offset=offset, bytes=size)


def check_dense_cover(
    leaves: Sequence[DenseLeaf], tiles: Iterable[DenseTile], where: str
) -> None:
    """Checks that the tiles of all processes cover every dense leaf exactly once.

    Texts have no tiles: the manifest holds them.

    Args:
        leaves: dense leaves of the manifest.
        tiles: tiles of all processes.
        where: name of the checkpoint in errors.

    Raises:
        ManifestError: naming each leaf that is not covered, covered twice, or whose elements have
            another size than those of its tiles.
    """
    by_leaf: dict[int, list[DenseTile]] = {}
    for tile in tiles:
        by_leaf.setdefault(tile.leaf, []).append(tile)
    problems: list[str] = []
    for i, leaf in enumerate(leaves):
        if leaf.kind == "text":
            continue
        name, found = "/".join(leaf.path), by_leaf.pop(i, [])
        problems += cover_problems(name, leaf.shape, [tile.box for tile in found])
        sizes = sorted({tile.element_bytes for tile in found})
        if len(sizes) > 1:
            problems.append(f"{name}: tiles have elements of {sizes} bytes")
        if leaf.kind == "scalar" and sizes not in ([], [SCALAR_BYTES.get(leaf.dtype)]):
            problems.append(f"{name}: {sizes} bytes are no {leaf.dtype}")
    problems += [f"{i}: not a dense leaf that has tiles" for i in sorted(by_leaf)]
    if problems:
        raise errors.ManifestError(
            f"the tiles of {where} do not cover its dense leaves", problems
        )
