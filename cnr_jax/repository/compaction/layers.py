"""Bands and layers: which rows of a chain lie together in a merged checkpoint.

Rows are encoded over the columns of a tile. If all checkpoints of a chain cut a leaf into the same
columns, one layer of tiles holds the newest copy of each row. A checkpoint with other cuts, made on
another mesh, begins a layer over those before it. Encoded rows cannot be cut without decoding them,
and exact rows that are already cut may be newer in only some of their columns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from cnr_jax.format.boxes import Box
from cnr_jax.format.tiles import Tile
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.codecs import Raw


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Checkpoints of a chain, or layers of one, that cut a band of rows into the same columns.

    Attributes:
        readers: readers of these checkpoints, the lowest first.
        columns: columns of each tile.
        base: readers of a lower layer with the same columns, and those below that. Integers of
            rows in this layer may have to be added to theirs.
    """

    readers: list[StepReader]
    columns: tuple[Box, ...]
    base: tuple[StepReader, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """Run of rows of a leaf that each tile of a chain has in full or not at all.

    Attributes:
        rows: start and stop of the run.
        layers: layers of the band, the lowest first.
    """

    rows: tuple[int, int]
    layers: tuple[Layer, ...]


def bands_of(chain: Sequence[StepReader], table: str, leaf: str) -> Iterator[Band]:
    """Yields the bands of a leaf, from its first row to its last.

    Args:
        chain: readers of the chain, the full checkpoint first.
        table: name of the table.
        leaf: `"table"`, or the name of a slot.
    """
    views = [view for reader in chain for view in reader.layers(table, leaf)]
    tiles = [(view, [tile for _, tile in view.tiles(table, leaf)]) for view in views]
    cuts = {edge for _, own in tiles for tile in own for edge in tile.box[0]}
    coded = {
        id(tile): _is_coded(view, process, tile)
        for view in views
        for process, tile in view.tiles(table, leaf)
    }
    for low, high in itertools.pairwise(sorted(cuts)):
        layers: list[Layer] = []
        for view, own in tiles:
            here = [t for t in own if t.box[0][0] < high and low < t.box[0][1]]
            if not any(tile.segments for tile in here):
                continue
            columns = tuple(tile.box[1:] for tile in here)
            held = [(t.box[1:], coded[id(t)]) for t in here if t.segments]
            if layers and _fits(layers[-1].columns, held):
                layers[-1].readers.append(view)
                continue
            alike = next((e for e in reversed(layers) if _fits(e.columns, held)), None)
            base = (*alike.base, *alike.readers) if alike else ()
            layers.append(Layer([view], columns, base))
        yield Band((low, high), tuple(layers))


def _fits(columns: Sequence[Box], held: Sequence[tuple[Box, bool]]) -> bool:
    """Whether rows can lie in tiles with these columns.

    Args:
        columns: columns of each tile.
        held: columns of the rows, and whether these are encoded, so that they cannot be cut.
    """
    return all(
        mine == theirs if coded else _is_within(mine, theirs)
        for theirs, coded in held
        for mine in columns
        if all(a < d and c < b for (a, b), (c, d) in zip(mine, theirs, strict=True))
    )


def _is_within(box: Box, other: Box) -> bool:
    return all(c <= a and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


def _is_coded(reader: StepReader, process: int, tile: Tile) -> bool:
    """Whether a tile has encoded rows, which cannot be cut to some of their columns."""
    codecs = (reader.codec(process, segment.codec) for segment in tile.segments)
    return any(not isinstance(codec, Raw) for codec in codecs)
