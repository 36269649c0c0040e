"""From a train state to what one process writes of it: which rows, in which order.

The blocking part of a save: choose the rows of each tile by their stamps, and gather them into
chunks before the next train step can donate the buffers. Nothing is communicated. What that needs
compiled is compiled before the first save: when a manager is made, or restores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.checkpointer.tracking.tracker import Choose
from cnr_jax.encoding import Encoding
from cnr_jax.options import Options
from cnr_jax.repository.rows_writer import RunPlan
from cnr_jax.rows.codecs import Codec, Dithering, Raw
from cnr_jax.rows.codecs.base import WIDEST
from cnr_jax.rows.codecs.dither import dither_seed, row_keys
from cnr_jax.rows.fingerprints import rotation
from cnr_jax.rows.fingerprints import tiles as tile_hashes
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.chunk import Chunk, Run
from cnr_jax.rows.gather.device import device_programs
from cnr_jax.rows.gather.encode import (
    Sample,
    comparing_program,
    host_programs,
    sample_positions,
)
from cnr_jax.rows.gather.host import Buffers
from cnr_jax.rows.gather.motion import FollowedRows, TileRef
from cnr_jax.rows.tiling import (
    Arrays,
    Box,
    LocalShards,
    OwnTile,
    Program,
    ShardsOf,
    Way,
    group_tiles,
    own_settings,
    own_tiles,
    placing,
)
from cnr_jax.rows.touched import stamp_sharding
from cnr_jax.state.table import Leaf, Table, Tables
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """What this process writes, and where it takes it from.

    Attributes:
        plans: one for each tile of this process; those with rows in the order of chunks.
        runs: the rows themselves; they refer to the state's buffers.
        sample: of the rows, where devices keep it; None: it may be chosen later, by `sample_of`.
    """

    plans: tuple[RunPlan, ...]
    runs: tuple[Run, ...]
    sample: Sample | None = None

    @property
    def on_host(self) -> bool:
        """Whether all rows are encoded on the host."""
        return all(run.where == "host" for run in self.runs)

    def chunks(self, buffers: Buffers) -> Iterator[Chunk]:
        """Gathers the rows; to be used up before the state can be donated."""
        return host.gather_chunks(self.runs, buffers)


def capture(
    tiles: Iterable[OwnTile],
    shards: ShardsOf,
    choose: Choose,
    encoding: Encoding,
    widths: Mapping[str, int],
    staging: str,
    dithered_in: str | None = None,
    followed: FollowedRows | None = None,
) -> Capture:
    """Takes stock of the rows that this process writes.

    Args:
        tiles: what this process saves of the state.
        shards: of the leaves of tables.
        choose: which rows; the same object for all tiles of the same rows of a table.
        encoding: of rows in this save.
        widths: of codes, by table, where these are left to the number of restores.
        staging: where rows are encoded, as in options.
        dithered_in: lineage, if codes of tables are dithered; None: they are the nearest.
        followed: rows whose motion is looked at; None: none.
    """
    codecs, way = _Codecs(encoding, widths), placing(staging)
    plans = [
        _plan(
            tile,
            shards(tile.table.name, tile.leaf.name),
            choose(tile),
            codecs,
            way,
            dithered_in,
        )
        for tile in tiles
    ]
    # Rows of one group follow each other, so that they share chunks and programs.
    plans.sort(key=lambda pair: _order(*pair))
    sample = None
    if any(run.where == "device" for _, run in plans):
        sample = sample_of([plan for plan, _ in plans], followed)
        plans = _with_samples(plans, sample)
    return Capture(
        plans=tuple(plan for plan, _ in plans),
        runs=tuple(run for plan, run in plans if plan.count),
        sample=sample,
    )


def sample_of(plans: Sequence[RunPlan], followed: FollowedRows | None) -> Sample:
    """Which rows of a save are compared with their codes, and whose motion is looked at.

    Args:
        plans: of the save, in order.
        followed: rows whose motion is looked at; None: none.
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
    """Whether rows of a table, rather than of a slot, are stored otherwise than they are."""
    return not plan.is_slot and not isinstance(plan.codec, Raw)


def _with_samples(
    plans: list[tuple[RunPlan, Run]], sample: Sample
) -> list[tuple[RunPlan, Run]]:
    """Tells runs that are encoded on devices, from where rows do not come, which to keep."""
    positions = sample.positions
    ends = np.cumsum([plan.count for plan, _ in plans])
    parts = np.split(positions, np.searchsorted(positions, ends))
    return [
        (plan, dataclasses.replace(run, sampled=part - (end - plan.count)))
        if len(part) and run.where == "device" and not isinstance(run.codec, Raw)
        else (plan, run)
        for (plan, run), part, end in zip(plans, parts[:-1], ends, strict=True)
    ]


class _Codecs:
    """The codec of each tile; tiles are thousands, codecs a few."""

    def __init__(self, encoding: Encoding, widths: Mapping[str, int]) -> None:
        self._codec_for, self._widths = functools.cache(encoding.codec_for), widths

    def of(self, tile: OwnTile) -> Codec:
        width = math.prod(stop - start for start, stop in tile.piece.box[1:])
        leaf, table = tile.leaf, tile.table.name
        bits = self._widths.get(table)
        return self._codec_for(table, leaf.name, width, leaf.dtype, bits)


def say_at_first(arrays: Arrays, tables: Tables | None, encoding: Encoding) -> None:
    """Says, before the first save, what makes all of them larger than they might be."""
    _say_too_wide(arrays, encoding)
    for text in tables.doubts if tables and jax.process_index() == 0 else ():
        _log.warning("%s", text)


def _say_too_wide(arrays: Arrays, encoding: Encoding) -> None:
    """Says which leaves have rows so wide that they are stored exactly, whatever their codec.

    Counted are the elements of a row, or of the part of it that a device holds.
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


def _plan(
    tile: OwnTile,
    shards: LocalShards,
    positions: np.ndarray | None,
    codecs: _Codecs,
    way: Way,
    dithered_in: str | None,
) -> tuple[RunPlan, Run]:
    leaf, piece = tile.leaf, tile.piece
    data, first = shards.on(piece.device)
    start, stop = tile.rows
    codec = codecs.of(tile)
    plan = RunPlan(
        table=tile.table.name,
        leaf=leaf.name,
        box=piece.box,
        positions=positions,
        count=stop - start if positions is None else len(positions),
        codec=codec,
        dtype=leaf.dtype,
    )
    run = Run(
        data=data,
        first=start - first,
        rows=stop - start,
        positions=positions,
        codec=codec,
        where=way(piece.device, data.nbytes),
        keys_of=keys_of(tile.table, piece.box, dithered_in)
        if dithered_in and can_dither(leaf, codec)
        else None,
    )
    return plan, run


def can_dither(leaf: Leaf, codec: Codec) -> bool:
    """Whether codes of a leaf can be dithered: of slots they are always the nearest."""
    return leaf.name == "table" and _dithers(codec)


@functools.cache
def _dithers(codec: Codec) -> bool:
    """Asked for each tile: to compare an object with a protocol takes as long as a plan."""
    return isinstance(codec, Dithering)


def keys_of(table: Table, box: Box, lineage: str) -> Callable[[np.ndarray], np.ndarray]:
    """What gives the keys of rows of a table, by their positions in a box of it.

    Args:
        table: the table.
        box: start and stop in each dimension, as a device encodes its rows.
        lineage: in which codes are dithered.
    """

    # What is the same for all rows is made with the first of them, outside the blocking part of
    # most saves, and not for tiles of which none is saved.
    def keys(positions: np.ndarray) -> np.ndarray:
        column = 0
        for (start, _), size in zip(box[1:], table.leaf.shape[1:], strict=True):
            column = column * size + start
        seed = dither_seed(lineage, table.name, column)
        rows = np.asarray(table.layout.to_logical(positions + box[0][0]))
        return row_keys(seed, rows)

    return keys


def _order(plan: RunPlan, run: Run) -> tuple[Any, ...]:
    return (
        plan.count == 0,
        run.where,
        _rank(plan.codec, plan.dtype),
        plan.width,
        run.keys_of is not None,
        plan.table,
        plan.is_slot,
        plan.leaf,
        plan.box,
    )


@functools.cache
def _rank(codec: Codec, dtype: np.dtype) -> tuple[str, str]:
    return repr(codec), dtype.name


def programs(
    tiles: Iterable[OwnTile],
    encoding: Encoding,
    widths: Mapping[str, int],
    staging: str,
    *,
    dithers: bool,
) -> Iterator[Program]:
    """What choosing, gathering and encoding rows of these tiles needs, however many they are.

    Args:
        tiles: of leaves whose sharding is known.
        encoding: of rows.
        widths: of codes, by table, where these are left to the number of restores.
        staging: where rows are encoded, as in options.
        dithers: whether codes of tables are dithered.
    """
    codecs, way = _Codecs(encoding, widths), placing(staging)
    for tile in tiles:
        leaf, device = tile.leaf, tile.piece.device
        codec = codecs.of(tile)
        assert leaf.sharding is not None and tile.table.leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape)
        width = math.prod(shape[1:])
        if leaf.name == "table" and not isinstance(codec, Raw):
            yield comparing_program(codec, leaf.dtype, width)
        dithered = dithers and can_dither(leaf, codec)
        if way(device, math.prod(shape) * leaf.dtype.itemsize) == "host":
            yield from host_programs(codec, leaf.dtype, width, dithered)
        else:
            yield from device_programs(codec, shape, leaf.dtype, device, dithered)
        rows = tile.table.leaf.sharding.shard_shape(tile.table.leaf.shape)[0]
        if way(device, 4 * rows) == "device":
            yield host.stamps_program(rows, device)


class Warmth:
    """What saves of a run need compiled, for every number of changed rows, and what is.

    Nothing is done for leaves whose sharding is not known.

    Args:
        tables: that are saved.
        options: of the run.
        widening: knows the codecs, and the width of each table's codes.

    Attributes:
        done_for: widths of codes, and whether these are dithered, for which all is compiled.
    """

    def __init__(self, tables: Tables, options: Options, widening: Widening) -> None:
        self._options, self._widening = options, widening
        self._done: set[Program] = set()
        self.done_for: set[tuple[int | None, bool]] = set()
        # For which that is so: a restore may bring others.
        self._encoding = widening.encoding
        stamps = {
            name: stamp_sharding(table.leaf.sharding, table.leaf.shape)
            for name, table in tables.items()
            if table.leaf.sharding is not None
        }
        shardings = {
            name: {x.name: x.sharding for x in tables[name].leaves if x.sharding}
            for name in stamps
        }
        self._tiles = own_tiles(tables, shardings, stamps)

    def hashes(self) -> Iterator[Program]:
        """What finding changed rows needs."""
        options, way = self._options, placing(self._options.staging)
        asked = options.tracking
        groups = group_tiles(self._tiles).values()
        if asked in (None, "fingerprint"):
            yield from tile_hashes.programs(groups, way, tagged=False)
        if asked == "audited":
            yield from tile_hashes.programs(groups, way, tagged=True)
        if asked in (None, "recorded") and options.audit_bytes:
            yield from rotation.programs(self._tiles, options.audit_bytes, way)

    def warm_up(self, auto_bits: int | None, restores: int) -> None:
        """Compiles what is not yet.

        Args:
            auto_bits: width of codes where options leave it to the number of restores, but
                for small tables. Others are compiled only when they come: each takes as long
                as the first.
            restores: of the run that is saved next.
        """
        encoding = self._widening.encoding
        if encoding is not self._encoding:
            self._encoding = encoding
            self.done_for.clear()
        dithers = encoding.dithers(restores)
        if (auto_bits, dithers) in self.done_for:
            return
        of_tables, staging = self._widening.widths(auto_bits), self._options.staging
        needed = programs(self._tiles, encoding, of_tables, staging, dithers=dithers)
        if not self._done:
            needed = itertools.chain(needed, self.hashes())
        missing = [p for p in dict.fromkeys(needed) if p not in self._done]
        if self._done and missing:
            kind = "dithered codes" if dithers else "codes"
            bits = "" if auto_bits is None else f" of {auto_bits} bits"
            _log.info("compiling for %s%s", kind, bits)
        # XLA compiles each on one core.
        with ThreadPoolExecutor(os.cpu_count(), "cnr_compile") as pool:
            for done in [pool.submit(_compile, *each) for each in missing]:
                done.result()
        self._done.update(missing)
        self.done_for.add((auto_bits, dithers))


# Settings are those of a thread, unless they are of all.
@own_settings()
def _compile(program: Callable[..., object], args: tuple[Any, ...]) -> None:
    program(*args)
