"""Capture of a train state: which rows of it one process writes, and in which order.

This is the blocking part of a save. It chooses the rows of each tile by their stamps, and gathers
them into chunks before the next train step can donate the buffers. Nothing is communicated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax.encoding import Encoding
from cnr_jax.repository.parent_rows import TileKey
from cnr_jax.repository.run_plan import RunPlan
from cnr_jax.rows.codecs import Codec, Dithering, Raw
from cnr_jax.rows.codecs.base import WIDEST
from cnr_jax.rows.codecs.dither import Dither, dither_seed, row_keys
from cnr_jax.rows.codecs.lattice import SAMPLE_ROWS
from cnr_jax.rows.codecs.moments import Unit
from cnr_jax.rows.codecs.residual import Residual, is_on_step
from cnr_jax.rows.gather.chunk import HostRows, KeysOf, Run
from cnr_jax.rows.gather.encode import (
    Sample,
    sample_positions,
)
from cnr_jax.rows.gather.host import Chosen
from cnr_jax.rows.gather.motion import FollowedRows, TileRef, rows_at, spread
from cnr_jax.rows.shards import Shards, Tiling
from cnr_jax.rows.tiling import (
    Arrays,
    Box,
    OwnTile,
)
from cnr_jax.state.table import Leaf, Table, Tables
from cnr_jax.texts import logger

_log = logger(__name__)


class Coding:
    """Coding of the tiles of one tiling: how their rows are encoded, and the order of writing.

    It is made once, and again when the codecs of a run change. It holds no arrays.

    Args:
        tiling: tiles that this process saves.
        encoding: encoding of rows in a save.
        widths: bits of codes, by table, where options leave these to the number of restores.
        dither: which codes of tables are dithered.

    Attributes:
        codecs: codec of each tile.
        keys_of: for each tile, the function that gives keys of its rows; None: codes are the
            nearest.
        kinds: for each kind of tiles, which share chunks and compiled programs, the numbers of its
            tiles; all in the order in which they are written.
    """

    def __init__(
        self,
        tiling: Tiling,
        encoding: Encoding,
        widths: Mapping[str, int],
        dither: Dither,
    ) -> None:
        self.tiling, self._encoding, self._widths = tiling, encoding, dict(widths)
        self._dither = dither
        codecs = list(map(Codecs(encoding, widths).of, tiling.tiles))
        self._beside = _beside(tiling, codecs)
        # Means are counted in parts of the roots of the squares beside them. Without these they
        # are stored exactly.
        self.codecs = tuple(
            Raw() if isinstance(codec, Unit) and number not in self._beside else codec
            for number, codec in enumerate(codecs)
        )
        self.keys_of = tuple(
            keys_of(tile.table, tile.piece.box, dither.lineage)
            if is_dithered(tile.leaf, codec, dither.most_bits)
            else None
            for tile, codec in zip(tiling.tiles, self.codecs, strict=True)
        )
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number in sorted(range(len(tiling.tiles)), key=self._order):
            kinds.setdefault(self._kind(number), []).append(number)
        self.kinds = tuple(np.array(numbers, np.int64) for numbers in kinds.values())

    def is_of(
        self,
        tiling: Tiling,
        encoding: Encoding,
        widths: Mapping[str, int],
        dither: Dither,
    ) -> bool:
        """Whether this coding was made of these arguments."""
        return (
            self.tiling is tiling
            and self._dither == dither
            and self._widths == widths
            and self._encoding == encoding
        )

    def beside(self, number: int) -> TileKey | None:
        """The tile of squares beside whose rows those of a tile of means are stored, or None."""
        if number not in self._beside:
            return None
        tile = self.tiling.tiles[self._beside[number]]
        return tile.table.name, tile.leaf.name, tile.piece.box

    def _kind(self, number: int) -> tuple[Any, ...]:
        tile, codec = self.tiling.tiles[number], self.codecs[number]
        return (
            self.tiling.wheres[number],
            *_rank(codec, tile.leaf.dtype),
            _width(tile),
            self.keys_of[number] is not None,
        )

    def _order(self, number: int) -> tuple[Any, ...]:
        tile = self.tiling.tiles[number]
        leaf = tile.leaf.name
        place = tile.table.name, leaf != "table", leaf, tile.piece.box
        return *self._kind(number), *place


class Rows:
    """The rows that one save writes of each tile, by position, without their values.

    Args:
        coding: how the rows are encoded.
        chosen: which rows are chosen.

    Attributes:
        kinds: for each kind, the numbers of its tiles with rows, in the order of chunks.
        counts: number of rows of each tile.
    """

    def __init__(self, coding: Coding, chosen: Chosen) -> None:
        tiling = coding.tiling
        self._coding, self._positions = coding, chosen.positions
        self.counts = chosen.counts[np.array(tiling.range_of, np.int64)]
        some = [numbers[self.counts[numbers] > 0].tolist() for numbers in coding.kinds]
        self.kinds = [numbers for numbers in some if numbers]
        self._samples: dict[int, np.ndarray] = {}

    def positions(self, number: int) -> np.ndarray | None:
        """Positions of the rows of a tile that are written; None: all of them."""
        return self._positions[self._coding.tiling.range_of[number]]

    def plans(self) -> tuple[RunPlan, ...]:
        """Plans of all tiles: those with rows in the order of chunks, then the empty ones."""
        empty = [
            number
            for numbers in self._coding.kinds
            for number in numbers[self.counts[numbers] == 0].tolist()
        ]
        order = itertools.chain(*self.kinds, empty)
        return tuple(map(self._plan, order))

    def _plan(self, number: int) -> RunPlan:
        tile, codec = self._coding.tiling.tiles[number], self._coding.codecs[number]
        is_late = _gathered(codec) != codec
        return RunPlan(
            table=tile.table.name,
            leaf=tile.leaf.name,
            box=tile.piece.box,
            positions=self.positions(number),
            count=int(self.counts[number]),
            codec=codec,
            dtype=tile.leaf.dtype,
            keys_of=self._coding.keys_of[number] if is_late else None,
            sample=self._samples.get(number),
            beside=self._coding.beside(number),
        )

    def sources(self, shards: Shards, *, looks: bool = False) -> list[HostRows | Run]:
        """Sources of the rows, in the order of chunks; they refer to the buffers of the state.

        Args:
            shards: shards of the state.
            looks: whether to look if the steps of tables still suit their rows.
        """
        found: list[HostRows | Run] = []
        for numbers in self.kinds:
            if is_on_step(self._coding.codecs[numbers[0]]):
                self._sample(numbers, shards, looks=looks)
            if self._coding.tiling.wheres[numbers[0]] == "host":
                found.append(self._on_host(numbers, shards))
            else:
                found += [self._on_device(number, shards) for number in numbers]
        return found

    def _sample(self, numbers: Sequence[int], shards: Shards, *, looks: bool) -> None:
        """Keeps a sample of all rows of tiles whose steps are chosen anew, or looked at."""
        for number in numbers:
            if looks or self.positions(number) is None:
                # The same rows each time: their step is the same as long as they are.
                start, stop = self._coding.tiling.tiles[number].rows
                at = spread(stop - start, SAMPLE_ROWS)
                self._samples[number] = rows_at(shards, number, at)

    def _on_host(self, numbers: Sequence[int], shards: Shards) -> HostRows:
        coding, tiling, words = self._coding, shards.tiling, shards.words
        tile, codec = tiling.tiles[numbers[0]], coding.codecs[numbers[0]]
        gathered = _gathered(codec)
        keys = [coding.keys_of[n] for n in numbers if gathered == codec]
        return HostRows(
            codec=gathered,
            dtype=tile.leaf.dtype,
            width=_width(tile),
            words=[found for n in numbers if (found := words[n]) is not None],
            firsts=[tiling.firsts[n] for n in numbers],
            positions=[self._positions[tiling.range_of[n]] for n in numbers],
            counts=self.counts[numbers].tolist(),
            keys_of=[found for found in keys if found is not None] or None,
        )

    def _on_device(self, number: int, shards: Shards) -> Run:
        coding, tiling = self._coding, shards.tiling
        start, stop = tiling.tiles[number].rows
        codec = coding.codecs[number]
        gathered = _gathered(codec)
        return Run(
            data=shards.data[number],
            first=tiling.firsts[number],
            rows=stop - start,
            positions=self.positions(number),
            codec=gathered,
            keys_of=coding.keys_of[number] if gathered == codec else None,
        )


def _gathered(codec: Codec) -> Codec:
    """The codec by which rows are encoded where they are gathered.

    Rows that are stored as differences are encoded later, on the host, where the parent's rows are.
    """
    return Raw() if isinstance(codec, Residual) else codec


def with_samples(sources: Sequence[HostRows | Run], sample: Sample) -> list[Any]:
    """Adds to runs on devices which of their rows the sample takes.

    Such runs are encoded there, so the rows themselves do not come to the host otherwise.
    """
    positions, found, start = sample.positions, list[HostRows | Run](), 0
    for each in sources:
        if isinstance(each, HostRows):
            start += sum(each.counts)
            found.append(each)
            continue
        stop = start + each.count
        first, last = np.searchsorted(positions, (start, stop))
        if first < last and not isinstance(each.codec, Raw):
            part = positions[first:last] - start
            each = dataclasses.replace(each, sampled=part)
        found.append(each)
        start = stop
    return found


def sample_of(plans: Sequence[RunPlan], followed: FollowedRows | None) -> Sample:
    """Samples the rows of a save that are compared with their codes, or whose motion is measured.

    Args:
        plans: plans of the save, in order.
        followed: rows whose motion is measured; None: none.
    """
    counts = [plan.count for plan in plans]
    starts = np.cumsum([0, *counts])
    compared = sample_positions(
        counts, [plan.width for plan in plans], [is_rounded(plan) for plan in plans]
    )
    tiles, parts = list[TileRef](), [np.empty((3, 0), np.int64)]
    for plan, start in zip(plans, starts, strict=False):
        if followed is not None and not plan.is_slot and plan.count:
            tile = plan.table, plan.box
            at = followed.among(tile, plan.positions)
            if len(at):
                in_tile = at if plan.positions is None else plan.positions[at]
                numbers = np.full(len(at), len(tiles))
                parts.append(np.stack([at + start, in_tile, numbers]))
                tiles.append(tile)
    ours, *known = np.concatenate(parts, axis=1)
    positions = np.union1d(compared, ours)
    in_tile, of_tiles = np.full((2, len(positions)), -1)
    where = np.searchsorted(positions, ours)
    in_tile[where], of_tiles[where] = known
    is_compared = np.zeros(len(positions), bool)
    is_compared[np.searchsorted(positions, compared)] = True
    names = sorted({plan.table for plan in plans})
    index = {name: i for i, name in enumerate(names)}
    tables = np.asarray([index[plan.table] for plan in plans], np.int64)
    return Sample(
        positions=positions,
        tables=tables[np.searchsorted(starts[1:], positions, side="right")],
        names=names,
        compared=is_compared,
        followed=of_tiles,
        tiles=tiles,
        in_tile=in_tile,
    )


def is_rounded(plan: RunPlan) -> bool:
    """Whether a plan is for rows of a table, not of a slot, that are not stored raw."""
    return not plan.is_slot and not isinstance(plan.codec, Raw)


class Codecs:
    """Finds the codec of each tile, and shares it: there are thousands of tiles but few codecs."""

    def __init__(self, encoding: Encoding, widths: Mapping[str, int]) -> None:
        self._codec_for, self._widths = functools.cache(encoding.codec_for), widths

    def of(self, tile: OwnTile) -> Codec:
        """The codec of the rows of a tile."""
        leaf, table = tile.leaf, tile.table.name
        bits, moment = self._widths.get(table), tile.table.moment(leaf.name)
        return self._codec_for(table, leaf.name, _width(tile), leaf.dtype, bits, moment)


def _beside(tiling: Tiling, codecs: Sequence[Codec]) -> dict[int, int]:
    """Numbers of the tiles of means, each with that of the tile of squares of the same rows.

    Tiles of means are left out if their squares are sharded otherwise, or have another codec.
    """
    if not any(isinstance(codec, Unit) for codec in codecs):
        return {}
    places = {
        (tile.table.name, tile.leaf.name, tile.piece.box): number
        for number, tile in enumerate(tiling.tiles)
    }
    found: dict[int, int] = {}
    for number, (tile, codec) in enumerate(zip(tiling.tiles, codecs, strict=True)):
        squares = dict(tile.table.moments).get(tile.leaf.name)
        other = places.get((tile.table.name, squares or "", tile.piece.box))
        if not isinstance(codec, Unit) or other is None:
            continue
        if (
            codecs[other] == codec.squares
            and tiling.range_of[other] == tiling.range_of[number]
            and tiling.wheres[other] == tiling.wheres[number]
        ):
            found[number] = other
    return found


def _width(tile: OwnTile) -> int:
    """Number of elements in a row of a tile."""
    return math.prod(stop - start for start, stop in tile.piece.box[1:])


def say_at_first(arrays: Arrays, tables: Tables | None, encoding: Encoding) -> None:
    """Logs, before the first save, what makes all saves larger than they might be."""
    _say_too_wide(arrays, encoding)
    for text in tables.doubts if tables and jax.process_index() == 0 else ():
        _log.warning("%s", text)


def _say_too_wide(arrays: Arrays, encoding: Encoding) -> None:
    """Logs which leaves have rows so wide that they are stored exactly, whatever their codec.

    The width is the number of elements of a row, or of the part of it that a device holds.
    """
    found: dict[str, int] = {}
    for table, leaves in arrays.items():
        for leaf, array in leaves.items():
            width = math.prod(array.sharding.shard_shape(array.shape)[1:])
            codec = encoding.codec_for(table, leaf, min(width, WIDEST), array.dtype)
            if width > WIDEST and not isinstance(codec, Raw):
                found[f"{table}/{leaf}"] = width
    if found and jax.process_index() == 0:
        _log.warning(
            "rows of more than %s elements are stored exactly, whatever codec is asked"
            " for: %s. To store them in few bits split or reshape them to narrower rows;"
            " TableOptions(codec='raw') says that exact is meant",
            f"{WIDEST:,}",
            ", ".join(f"{name} of {width:,}" for name, width in found.items()),
        )


def is_dithered(leaf: Leaf, codec: Codec, most_bits: int) -> bool:
    """Whether codes of a leaf are dithered; slots always take the nearest code.

    Args:
        leaf: the leaf, a table or slot.
        codec: codec of its rows.
        most_bits: most bits of a code that is dithered, as in `Dither`.
    """
    return leaf.name == "table" and _bits_to_dither(codec) <= most_bits


@functools.cache
def _bits_to_dither(codec: Codec) -> float:
    """Bits of a codec's codes if they can be dithered, else infinity.

    Cached, as it is asked for each tile, and `isinstance` with a protocol takes long.
    """
    return codec.bits if isinstance(codec, Dithering) else math.inf


def keys_of(table: Table, box: Box, lineage: str) -> KeysOf:
    """Makes a function that gives the keys of rows, by their positions in a box of a table.

    Args:
        table: the table.
        box: start and stop in each dimension, as a device encodes its rows.
        lineage: lineage in which codes are dithered.
    """

    # The seed is the same for all rows. It is made with the first of them, and so never for a tile
    # of which no row is saved.
    @functools.cache
    def seed() -> np.uint32:
        column = 0
        for (start, _), size in zip(box[1:], table.leaf.shape[1:], strict=True):
            column = column * size + start
        return dither_seed(lineage, table.name, column)

    def keys(positions: np.ndarray) -> np.ndarray:
        rows = np.asarray(table.layout.to_logical(positions + box[0][0]))
        return row_keys(seed(), rows)

    return keys


@functools.cache
def _rank(codec: Codec, dtype: np.dtype) -> tuple[str, str]:
    return repr(codec), dtype.name
