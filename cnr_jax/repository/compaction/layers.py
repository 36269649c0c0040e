"""Which rows of a chain lie together in a merged checkpoint: bands of rows, and layers of each.

Rows are encoded over the columns of a tile. Where all checkpoints of a chain cut a leaf into the
same columns, one layer of tiles holds the newest copy of each row. A checkpoint with other cuts,
which another mesh has made, begins a layer over those before it: encoded rows cannot be cut
without decoding them, and exact ones that are cut already may be newer in some columns alone.
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
        readers: the lowest first.
        columns: of each tile.
        base: the same of lower layers of the same columns, on whose integers rows of this one may
            be added.
    """

    readers: list[StepReader]
    columns: tuple[Box, ...]
    base: tuple[StepReader, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """Rows of a leaf that no tile of a chain has in part.

    Attributes:
        rows: start and stop.
        layers: the lowest first.
    """

    rows: tuple[int, int]
    layers: tuple[Layer, ...]


def bands_of(chain: Sequence[StepReader], table: str, leaf: str) -> Iterator[Band]:
    """The bands of a leaf, from its first row to its last.

    Args:
        chain: the full checkpoint first.
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
    """Whether rows can lie in tiles of these columns.

    Args:
        columns: of the tiles.
        held: columns of the rows, and whether they cannot be cut.
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
    """Whether a tile has rows that cannot be cut to some of their columns as they are stored."""
    codecs = (reader.codec(process, segment.codec) for segment in tile.segments)
    return any(not isinstance(codec, Raw) for codec in codecs)
