"""From a train state to what one process writes of it: which rows, in which order.

The blocking part of a save: choose the rows of each tile by their stamps, and gather them into
chunks before the next train step can donate the buffers. Nothing is communicated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax import errors
from cnr_jax.format.manifest import (
    DenseLeaf,
    LeafEntry,
    NamedConfiguration,
    TableEntry,
)
from cnr_jax.options import WIDEST, Options
from cnr_jax.repository.rows_writer import RunPlan
from cnr_jax.rows.codecs import Codec, Raw
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.buffers import Buffers
from cnr_jax.rows.gather.chunk import Chunk, Program, Run, Way, Where
from cnr_jax.rows.gather.device import device_programs
from cnr_jax.rows.gather.encode import host_programs
from cnr_jax.rows.gather.rounding import comparing_program, sample_positions
from cnr_jax.rows.tiling import LocalShards, OwnTile, ShardsOf
from cnr_jax.rows.touched import Touched
from cnr_jax.state.paths import flatten_paths
from cnr_jax.state.table import Leaf, Tables

Arrays = Mapping[str, Mapping[str, jax.Array]]


def table_entries(tables: Tables) -> tuple[TableEntry, ...]:
    """The tables as a manifest lists them."""
    return tuple(
        TableEntry(
            name=table.name,
            rows=table.rows,
            padded_rows=table.padded_rows,
            layout=NamedConfiguration(
                name=table.layout.name, configuration=table.layout.configuration()
            ),
            leaves=tuple(_leaf_entry(leaf) for leaf in table.leaves),
        )
        for table in tables.values()
    )


def _leaf_entry(leaf: Leaf) -> LeafEntry:
    return LeafEntry(
        name=leaf.name, path=leaf.path, shape=leaf.shape, dtype=leaf.dtype.name
    )


# Shards up to this size are copied to the host whole: each shape and device would need programs
# of its own, a tenth of a second each, which makes minutes of a thousand tables.
SMALL_SHARD_BYTES = 1 << 20


def staging(options: Options) -> Way:
    """Where rows of a shard are hashed, gathered and encoded.

    Behind training on CPU, at once on the device elsewhere unless the shard is small.
    """

    def way(device: jax.Device, size: int) -> Where:
        if options.staging != "auto":
            return options.staging
        small = size <= SMALL_SHARD_BYTES
        return "host" if small or device.platform == "cpu" else "device"

    return way


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """What this process writes, and where it takes it from.

    Attributes:
        plans: one for each tile of this process; those with rows in the order of chunks.
        runs: the rows themselves; they refer to the state's buffers.
    """

    plans: tuple[RunPlan, ...]
    runs: tuple[Run, ...]

    @property
    def on_host(self) -> bool:
        """Whether all rows are encoded on the host."""
        return all(run.where == "host" for run in self.runs)

    def chunks(self, buffers: Buffers) -> Iterator[Chunk]:
        """Gathers the rows; to be used up before the state can be donated."""
        return host.gather_chunks(self.runs, buffers)


# Sorted positions within a tile that are to be saved, None for all; asked for each tile.
Choose = Callable[[OwnTile], np.ndarray | None]


def capture(
    tiles: Iterable[OwnTile],
    shards: ShardsOf,
    choose: Choose,
    options: Options,
    widths: Mapping[str, int],
) -> Capture:
    """Takes stock of the rows that this process writes.

    Args:
        tiles: what this process saves of the state.
        shards: of the leaves of tables.
        choose: which rows; the same object for all tiles of the same rows of a table.
        options: codecs and staging.
        widths: of codes, by table, where options leave them to the number of restores.
    """
    codecs, way = _Codecs(options, widths), staging(options)
    plans = [
        _plan(tile, shards(tile.table.name, tile.leaf.name), choose(tile), codecs, way)
        for tile in tiles
    ]
    # Rows of one group follow each other, so that they share chunks and programs.
    plans.sort(key=lambda pair: _order(*pair))
    if any(run.where == "device" for _, run in plans):
        plans = _with_samples(plans)
    return Capture(
        plans=tuple(plan for plan, _ in plans),
        runs=tuple(run for plan, run in plans if plan.count),
    )


def sample_of(plans: Sequence[RunPlan]) -> np.ndarray:
    """Positions of the sampled rows among all rows of a save: rows of tables that are rounded."""
    return sample_positions(
        [plan.count for plan in plans],
        [plan.width for plan in plans],
        [is_rounded(plan) for plan in plans],
    )


def is_rounded(plan: RunPlan) -> bool:
    """Whether rows of a table, rather than of a slot, are stored otherwise than they are."""
    return not plan.is_slot and not isinstance(plan.codec, Raw)


def _with_samples(plans: list[tuple[RunPlan, Run]]) -> list[tuple[RunPlan, Run]]:
    """Tells runs that are encoded on devices, from where rows do not come, which to keep."""
    positions = sample_of([plan for plan, _ in plans])
    ends = np.cumsum([plan.count for plan, _ in plans])
    parts = np.split(positions, np.searchsorted(positions, ends))
    return [
        (plan, dataclasses.replace(run, sampled=part - (end - plan.count)))
        if len(part) and run.where == "device"
        else (plan, run)
        for (plan, run), part, end in zip(plans, parts[:-1], ends, strict=True)
    ]


class _Codecs:
    """The codec of each tile; tiles are thousands, codecs a few."""

    def __init__(self, options: Options, widths: Mapping[str, int]) -> None:
        self._codec_for, self._widths = functools.cache(options.codec_for), widths

    def of(self, tile: OwnTile) -> Codec:
        width = math.prod(stop - start for start, stop in tile.piece.box[1:])
        leaf, table = tile.leaf, tile.table.name
        bits = self._widths.get(table)
        return self._codec_for(table, leaf.name, width, leaf.dtype, bits)


def too_wide(arrays: Arrays, options: Options) -> dict[str, int]:
    """Leaves of tables whose rows are stored exactly only because they are so wide.

    Returns:
        The elements of a row, or of the part of it that a device holds, by table and leaf.
    """
    found: dict[str, int] = {}
    for table, leaves in arrays.items():
        for leaf, array in leaves.items():
            width = math.prod(array.sharding.shard_shape(array.shape)[1:])
            codec = options.codec_for(table, leaf, min(width, WIDEST), array.dtype)
            if width > WIDEST and not isinstance(codec, Raw):
                found[f"{table}/{leaf}"] = width
    return found


def _plan(
    tile: OwnTile,
    shards: LocalShards,
    positions: np.ndarray | None,
    codecs: _Codecs,
    way: Way,
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
    )
    return plan, run


def _order(plan: RunPlan, run: Run) -> tuple[Any, ...]:
    return (
        plan.count == 0,
        run.where,
        _rank(plan.codec, plan.dtype),
        plan.width,
        plan.table,
        plan.is_slot,
        plan.leaf,
        plan.box,
    )


@functools.cache
def _rank(codec: Codec, dtype: np.dtype) -> tuple[str, str]:
    return repr(codec), dtype.name


def programs(
    tiles: Iterable[OwnTile], options: Options, widths: Mapping[str, int]
) -> Iterator[Program]:
    """What choosing, gathering and encoding rows of these tiles needs, however many they are.

    Args:
        tiles: of leaves whose sharding is known.
        options: codecs and staging.
        widths: of codes, by table, where options leave them to the number of restores.
    """
    codecs, way = _Codecs(options, widths), staging(options)
    for tile in tiles:
        leaf, device = tile.leaf, tile.piece.device
        codec = codecs.of(tile)
        assert leaf.sharding is not None and tile.table.leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape)
        width = math.prod(shape[1:])
        if leaf.name == "table" and not isinstance(codec, Raw):
            yield comparing_program(codec, leaf.dtype, width)
        if way(device, math.prod(shape) * leaf.dtype.itemsize) == "host":
            yield from host_programs(codec, leaf.dtype, width)
        else:
            yield from device_programs(codec, shape, leaf.dtype, device)
        rows = tile.table.leaf.sharding.shard_shape(tile.table.leaf.shape)[0]
        if way(device, 4 * rows) == "device":
            yield host.stamps_program(rows, device)


def dense_leaves(dense: Mapping[str, Any]) -> tuple[DenseLeaf, ...]:
    """Describes every leaf that is not part of a table.

    Raises:
        StateMismatchError: if one is of a kind that cannot be saved.
    """
    return tuple(_dense_leaf(path, leaf) for path, leaf in flatten_paths(dense))


def _dense_leaf(path: tuple[str, ...], leaf: Any) -> DenseLeaf:
    if isinstance(leaf, str):
        return DenseLeaf(path=path, kind="text", shape=(), dtype="str", value=leaf)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        name = str(jax.random.key_impl(leaf))
        return DenseLeaf(path=path, kind="key", shape=leaf.shape, dtype=name)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        name = np.dtype(leaf.dtype).name
        if 0 in leaf.shape:
            raise errors.StateMismatchError(
                f"leaf {'/'.join(path)} of the state cannot be saved\n"
                f"  got {name}{list(leaf.shape)}, expected an array with elements:"
                " Orbax saves no empty ones"
            )
        if np.dtype(leaf.dtype).kind not in "OSUMm":
            return DenseLeaf(path=path, kind="array", shape=leaf.shape, dtype=name)
    elif isinstance(leaf, (bool, int, float)):
        name = type(leaf).__name__
        return DenseLeaf(path=path, kind="scalar", shape=(), dtype=name)
    raise errors.StateMismatchError(
        f"leaf {'/'.join(path)} of the state cannot be saved\n"
        f"  got {type(leaf).__name__}, expected an array, a number, a PRNG key or a string"
    )


def without_texts(dense: Mapping[str, Any]) -> dict[str, Any]:
    """The dense leaves that Orbax stores: all but strings, which the manifest holds."""
    found: dict[str, Any] = {}
    for key, value in dense.items():
        if isinstance(value, Mapping):
            inner = without_texts(value)
            if inner:
                found[key] = inner
        elif not isinstance(value, str):
            found[key] = value
    return found


def check_touched(touched: Touched, tables: Tables) -> None:
    """Checks that `touched` was made for these tables.

    Raises:
        TouchedError: naming tables that are missing, unknown, or stored in another way.
    """
    if not isinstance(touched, Touched):
        raise errors.TouchedError(
            f"touched is {type(touched).__name__}, expected what init_touched returns"
        )
    stamps = touched.stamps
    problems = [f"{name}: not in touched" for name in tables if name not in stamps]
    problems += [f"{name}: not a table here" for name in stamps if name not in tables]
    problems += [
        f"{name}: got {stamps[name].shape[0]} stamps, expected {table.padded_rows}"
        for name, table in tables.items()
        if name in stamps and stamps[name].shape != (table.padded_rows,)
    ]
    # Rows stored by another layout would be saved under the ids of other rows.
    problems += [
        f"{table.name}: got row layout {table.layout},"
        f" expected {tables[table.name].layout}"
        for table in touched.tables
        if table.name in tables and table.layout != tables[table.name].layout
    ]
    if problems:
        raise errors.TouchedError(
            "touched does not belong to these tables\n  "
            + "\n  ".join(problems)
            + "\n  hint: make it with init_touched(state, tables)"
        )


def full_fp32_bytes(tables: Tables, dense: Sequence[DenseLeaf]) -> int:
    """Bytes of a plain full save: tables in float32, slots and dense leaves as they are."""
    size = 0
    for table in tables.values():
        size += int(np.prod(table.leaf.shape, dtype=np.int64)) * 4
        size += sum(slot.nbytes for slot in table.slots)
    for leaf in dense:
        if leaf.kind == "array":
            size += int(np.prod(leaf.shape, dtype=np.int64)) * _itemsize(leaf.dtype)
    return size


def _itemsize(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize
