"""From a train state to what one process writes of it: which rows, in which order.

The blocking part of a save: choose the rows of each tile by their stamps, and gather them into
chunks before the next train step can donate the buffers. Nothing is communicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from cnr_jax import errors
from cnr_jax.format.manifest import (
    DenseLeaf,
    LeafEntry,
    NamedConfiguration,
    TableEntry,
)
from cnr_jax.options import Options
from cnr_jax.paths import flatten_paths
from cnr_jax.repository.write import RunPlan
from cnr_jax.rows import gather
from cnr_jax.rows.gather import Chunk, Run, Where
from cnr_jax.rows.tiling import Piece, shard_on, tile_leaf
from cnr_jax.rows.touched import Touched, stamp_sharding
from cnr_jax.table import Leaf, Table, Tables

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


def staging_where(arrays: Arrays, options: Options) -> Where:
    """Where rows are encoded: behind training on CPU, at once on the device elsewhere."""
    if options.staging != "auto":
        return options.staging
    leaves = [leaf for table in arrays.values() for leaf in table.values()]
    platforms = {d.platform for leaf in leaves for d in leaf.sharding.device_set}
    return "host" if platforms <= {"cpu"} else "device"


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """What this process writes, and where it takes it from.

    Attributes:
        plans: one for each tile of this process; those with rows in the order of chunks.
        runs: the rows themselves; they refer to the state's buffers.
        where: where rows are encoded.
    """

    plans: tuple[RunPlan, ...]
    runs: tuple[Run, ...]
    where: Where

    def chunks(self) -> Iterator[Chunk]:
        """Gathers the rows; to be used up before the state can be donated."""
        return gather.gather_chunks(self.runs, self.where)


def capture(
    tables: Tables,
    arrays: Arrays,
    stamps: Mapping[str, jax.Array],
    parent_clock: int | None,
    options: Options,
) -> Capture:
    """Chooses the rows that this process writes.

    Args:
        tables: the tables of the state.
        arrays: their leaves, by table and leaf name.
        stamps: of each table.
        parent_clock: rows with a greater stamp are written; None for all rows.
        options: codecs and staging.
    """
    where = staging_where(arrays, options)
    plans: list[tuple[RunPlan, Run]] = []
    for table in tables.values():
        chosen: dict[tuple[int, int], np.ndarray | None] = {}
        for leaf in table.leaves:
            array = arrays[table.name][leaf.name]
            for piece in own_pieces(
                table, leaf, array.sharding, stamps[table.name].sharding
            ):
                rows = piece.box[0]
                if rows not in chosen:
                    chosen[rows] = _choose(
                        stamps[table.name], rows, parent_clock, where
                    )
                plans.append(_plan(table, leaf, piece, array, chosen[rows], options))
    # Rows of one group follow each other, so that they share chunks and programs.
    plans.sort(key=lambda pair: _order(pair[0]))
    return Capture(
        plans=tuple(plan for plan, _ in plans),
        runs=tuple(run for plan, run in plans if plan.count),
        where=where,
    )


def own_pieces(
    table: Table, leaf: Leaf, sharding: Sharding, stamps: Sharding
) -> list[Piece]:
    """The tiles of a leaf that this process writes."""
    pieces = tile_leaf(f"{table.name}.{leaf.name}", leaf.shape, sharding, stamps)
    here = jax.process_index()
    return [piece for piece in pieces if piece.device.process_index == here]


def _choose(
    stamps: jax.Array, rows: tuple[int, int], parent_clock: int | None, where: Where
) -> np.ndarray | None:
    if parent_clock is None:
        return None
    positions = gather.touched_positions(stamps, rows, parent_clock, where)
    return None if len(positions) == rows[1] - rows[0] else positions


def _plan(
    table: Table,
    leaf: Leaf,
    piece: Piece,
    array: jax.Array,
    positions: np.ndarray | None,
    options: Options,
) -> tuple[RunPlan, Run]:
    data, first = shard_on(array, piece.device)
    start, stop = piece.box[0]
    width = int(np.prod([b - a for a, b in piece.box[1:]], dtype=np.int64))
    codec = options.codec_for(table.name, leaf.name, width, leaf.dtype)
    plan = RunPlan(
        table=table.name,
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
    )
    return plan, run


def _order(plan: RunPlan) -> tuple[Any, ...]:
    return (
        plan.count == 0,
        repr(plan.codec),
        plan.dtype.name,
        plan.width,
        plan.table,
        plan.is_slot,
        plan.leaf,
        plan.box,
    )


def warm_up(tables: Tables, options: Options) -> None:
    """Compiles all that saves of these tables need, for every number of touched rows.

    Nothing is done for leaves whose sharding is not known.
    """
    done: set[Any] = set()
    for table in tables.values():
        for leaf in table.leaves:
            if leaf.sharding is None or table.leaf.sharding is None:
                continue
            stamps = stamp_sharding(table.leaf.sharding, table.leaf.shape)
            for piece in own_pieces(table, leaf, leaf.sharding, stamps):
                _warm_up_piece(table, leaf, piece, stamps, options, done)


def _warm_up_piece(
    table: Table,
    leaf: Leaf,
    piece: Piece,
    stamps: Sharding,
    options: Options,
    done: set[Any],
) -> None:
    width = int(np.prod([b - a for a, b in piece.box[1:]], dtype=np.int64))
    codec = options.codec_for(table.name, leaf.name, width, leaf.dtype)
    on_host = options.staging == "host" or (
        options.staging == "auto" and piece.device.platform == "cpu"
    )
    if on_host:
        key: Any = (codec, leaf.dtype, width)
        if key not in done:
            gather.warm_up_host(codec, leaf.dtype, width)
    else:
        assert leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape)
        rows = stamps.shard_shape((table.padded_rows,))[0]
        key = (codec, leaf.dtype, shape, rows, piece.device)
        if key not in done:
            gather.warm_up_device(codec, shape, leaf.dtype, piece.device)
            gather.warm_up_stamps(rows, piece.device)
    done.add(key)


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


def check_tiling(
    tables: Tables, arrays: Arrays, stamps: Mapping[str, jax.Array]
) -> None:
    """Checks that for every row some process holds both its values and its stamp.

    Raises:
        TableError: naming the leaf for which none does.
    """
    for table in tables.values():
        for leaf in table.leaves:
            sharding = arrays[table.name][leaf.name].sharding
            own_pieces(table, leaf, sharding, stamps[table.name].sharding)


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
