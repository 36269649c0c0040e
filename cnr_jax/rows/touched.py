"""Touched rows: a stamp for each row of a table, and a clock that `record` advances.

`record` runs in the train step, on the device, and writes the new clock to the stamps of the rows
that were looked up. A checkpoint stores the clock at which it was taken. The rows of a delta are
those with a stamp greater than the clock of its parent. Other modules select and gather these rows.

To remember: a save clears nothing here, so a save that fails loses nothing. Stamps compare only
with the clocks of checkpoints that have the same lineage.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import TouchedError
from cnr_jax.rows.lookups import (
    Ids,
    StampedTable,
    explicit_sharding,
    lookups,
    report_strays,
    stored_rows,
)
from cnr_jax.state.layouts import Identity
from cnr_jax.state.table import Table, Tables, check_tables, index_dtype, split

# The clock stops here and never wraps. Far below int32's end, so that `clock + 1` and
# comparisons of stamps cannot overflow; a step every millisecond gets here in 12 days.
CLOCK_LIMIT = 2**30


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["stamps", "clock", "lineage"],
    meta_fields=["tables"],
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Touched:
    """Touched rows: when each row was last looked up, as a pytree beside the train state.

    The stamp of a row is the clock of the last `record` that named it, or 0 for never. The clock
    counts calls of `record`, not steps. Make the touched rows with `init_touched`, and donate them
    to the train step together with the state.

    Attributes:
        stamps: by table, int32[padded_rows], sharded as the rows of the table are. The index is the
            stored row, that is, the row after the table's layout.
        clock: int32[], 0 to `CLOCK_LIMIT`.
        lineage: uint32[4], 128 random bits. Stamps may be compared with the clock of a checkpoint
            only if both have the same lineage.
        tables: static description of the tables, in the order of their names.
    """

    stamps: dict[str, jax.Array]
    clock: jax.Array
    lineage: jax.Array
    tables: tuple[StampedTable, ...]

    def __repr__(self) -> str:
        """Tables and their rows, not stamps: these are many, and may be traced or elsewhere."""
        tables = (f"{t.name}: {t.padded_rows:,} rows" for t in self.tables)
        return f"<Touched {', '.join(tables)}>"


def init_touched(state: Any, tables: Tables) -> Touched:
    """Makes touched rows for a state of which no row was looked up yet.

    The stamps are placed as the rows of the tables in `state` are: over the same mesh and devices,
    replicated over axes that split columns, and uncommitted where the table is. They are in device
    memory even if the table is kept on the host. The call draws a new lineage, so with several
    processes every process must make it.

    Args:
        state: train state, of concrete arrays.
        tables: tables that `find_tables` found in a state of this structure.

    Returns:
        The touched rows: stamps int32[padded_rows] of zeros by table, clock 0 and a fresh lineage.

    Raises:
        StateMismatchError: if `state` and `tables` do not match.
        TouchedError: if called inside `jax.jit`, or if the sharding of a table is of a kind from
            which the sharding of its rows cannot be read.

    Example:
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": {"embedding": jnp.zeros((6, 2))}}
        >>> touched = init_touched(state, find_tables(state, ["user"]))
        >>> touched = record(touched, {"user": jnp.array([4, 0])})
        >>> touched = record(touched, {"user": jnp.array([4])})
        >>> touched.stamps["user"].tolist(), clock_of(touched)
        ([1, 0, 0, 0, 2, 0], 2)
    """
    check_tables(tables)
    leaves, _ = split(state, tables)
    arrays = {name: leaves[name][table.leaf.name] for name, table in tables.items()}
    _require_concrete(arrays.values(), "init_touched")
    shardings = {
        name: stamp_sharding(array.sharding, array.shape) if array.committed else None
        for name, array in arrays.items()
    }
    return _assemble(_stamped_tables(tables), shardings)


def seeded(
    tables: Tables,
    shardings: Mapping[str, Sharding | None],
    stamps: Mapping[str, np.ndarray | jax.Array],
    clock: int,
) -> Touched:
    """Returns `touched` for restored tables, with given stamps and a fresh lineage.

    With several processes every one of them must make this call, with equal arguments.

    Args:
        tables: the tables of the state that was restored.
        shardings: by table, the sharding of its *stamps* (see `stamp_sharding`); None
            leaves them uncommitted on the default device.
        stamps: by table, integer[padded_rows], no value above `clock`. Numpy arrays
            are copied; JAX arrays may be taken over, so do not use them afterwards.
        clock: clock of the restored checkpoint, 0 to `CLOCK_LIMIT`.

    Raises:
        TouchedError: if stamps are missing or of another shape, or the clock is out of
            its range.

    Example:
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": {"embedding": jnp.zeros((3, 2))}}
        >>> tables = find_tables(state, ["user"])
        >>> touched = seeded(tables, {"user": None}, {"user": np.array([7, 0, 9])}, 9)
        >>> touched.stamps["user"].tolist(), clock_of(touched)
        ([7, 0, 9], 9)
    """
    if not 0 <= clock <= CLOCK_LIMIT:
        raise TouchedError(f"clock {clock} is outside its range\n  0 to {CLOCK_LIMIT}")
    for given, what in ((shardings, "shardings"), (stamps, "stamps")):
        if set(given) != set(tables):
            raise TouchedError(
                f"{what} do not fit the tables\n"
                f"  got {sorted(given)}, expected {sorted(tables)}"
            )
    for name, table in tables.items():
        if stamps[name].shape != (table.padded_rows,) or stamps[name].dtype.kind != "i":
            raise TouchedError(
                f"stamps of table {name!r} do not fit it\n"
                f"  got {stamps[name].dtype}{list(stamps[name].shape)}, "
                f"expected integers[{table.padded_rows}]"
            )
    return _assemble(_stamped_tables(tables), shardings, stamps, clock)


def reset_touched(touched: Touched) -> Touched:
    """Makes touched rows start anew: stamps and clock 0, and a fresh lineage.

    Call it if a state was changed without `record` (rolled back to a copy in memory, rows assigned
    by hand), or if the clock is at its limit. The next save is then full. With several processes
    every process must make this call.

    Raises:
        TouchedError: if called inside `jax.jit`, or with something other than touched rows.

    Example:
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": {"embedding": jnp.zeros((3, 2))}}
        >>> touched = init_touched(state, find_tables(state, ["user"]))
        >>> touched = record(touched, {"user": jnp.array([1])})
        >>> reset = reset_touched(touched)
        >>> reset.stamps["user"].tolist(), lineage_hex(reset) == lineage_hex(touched)
        ([0, 0, 0], False)
    """
    _check_is_touched(touched)
    _require_concrete([touched.clock, *touched.stamps.values()], "reset_touched")
    shardings = {
        name: array.sharding if array.committed else None
        for name, array in touched.stamps.items()
    }
    return _assemble(touched.tables, shardings)


def record(touched: Touched, ids: Mapping[str, Ids], *, check: bool = False) -> Touched:
    """Records look-ups: advances the clock, and stamps the looked-up rows with it.

    Call it under `jax.jit`, in the step that *applies* the update of these rows, on global arrays
    (not inside `shard_map`). Donate `touched`: the stamps are then written in place, by one scatter
    a table. Sharded ids are gathered, stamps never are. Tables on different devices cannot be in
    one `jax.jit`: for them call `record` outside of it.

    Ids mean what they mean in `table[ids]`, with V rows (those of the stored array, or the logical
    rows if the table has a layout): -V to -1 mark the row that they wrap to, ids of V or more mark
    row V - 1, ids below -V mark row 0. Only masked entries are ignored. `jnp.take` with
    `mode="clip"` or `"wrap"` reads other rows for ids out of [0, V): pass such ids already clipped
    or wrapped.

    Args:
        touched: touched rows, from `init_touched`, a restore, or an earlier call.
        ids: by table, integers of any shape and width; a sequence of such for features that share a
            table; a `Lookup` for masked or ragged ids. Tables that are not named are left alone.
        check: whether to log a warning for each table with ids that are negative or out of range:
            how many, and which. Use it to find mistakes only, as it copies the ids of each call to
            the host. Under `jax.jit` warnings come when the step has run; `jax.effects_barrier()`
            waits for them.

    Returns:
        The touched rows, with the same structure, shapes, dtypes and shardings. The clock stops at
        `CLOCK_LIMIT`; after that every save must be full.

    Raises:
        TouchedError: at trace time, if an argument is of another kind, a table is unknown, ids are
            not integers, a mask does not fit the ids, or stamps have another length than their
            table.

    Example:
        >>> from cnr_jax import Lookup, find_tables
        >>> state = {"item": {"embedding": jnp.zeros((5, 2))}}
        >>> touched = init_touched(state, find_tables(state, ["item"]))
        >>> bag = Lookup(jnp.array([[1, 3], [2, 0]]), where=jnp.array([[1, 0], [1, 0]]) > 0)
        >>> jax.jit(record)(touched, {"item": [bag, jnp.array([-1])]}).stamps["item"]
        Array([0, 1, 1, 0, 1], dtype=int32)
    """
    _check_arguments(touched, ids)
    tables = {table.name: table for table in touched.tables}
    unknown = sorted(set(ids) - set(tables))
    if unknown:
        raise TouchedError(
            f"table {unknown[0]!r} is not tracked\n"
            f"  got ids of {sorted(ids)}, tracked: {sorted(tables)}"
        )
    # Outside of `jit` each number below is a transfer.
    with jax.transfer_guard("allow"):
        clock = jnp.minimum(touched.clock, CLOCK_LIMIT - 1) + 1
        stamps = dict(touched.stamps)
        for name, given in ids.items():
            table = tables[name]
            _check_length(stamps[name], table)
            features = list(lookups(given, f"ids of table {name!r}"))
            rows = [stored_rows(lookup, table, label) for label, lookup in features]
            if check:
                for label, lookup in features:
                    report_strays(lookup, table, label)
            if rows:
                flat = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
                own = stamps[name]
                stamps[name] = _stamp(own, _beside(own, flat), _beside(own, clock))
    return dataclasses.replace(touched, stamps=stamps, clock=clock)


def stamp_sharding(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """Returns the sharding of a table's stamps: that of its rows, in device memory.

    Args:
        sharding: sharding of the table, a `NamedSharding` or any sharding on one device.
        shape: shape of the table, (padded_rows, ...).

    Raises:
        TouchedError: if the sharding is of another kind, or does not split the rows
            evenly.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
        >>> tuple(stamp_sharding(NamedSharding(mesh, P("data", "model")), (8, 4)).spec)
        ('data',)
    """
    if not isinstance(sharding, NamedSharding):
        if len(sharding.device_set) == 1:
            return SingleDeviceSharding(next(iter(sharding.device_set)))
        raise TouchedError(
            f"the sharding of a table's rows cannot be read from {sharding}\n"
            "  hint: place the table with a jax.sharding.NamedSharding"
        )
    rows = NamedSharding(sharding.mesh, P(*sharding.spec[:1]))
    try:
        rows.shard_shape(tuple(shape[:1]))
    except ValueError as error:
        raise TouchedError(
            f"{shape[0]} rows cannot be split evenly by {sharding.spec} "
            f"over the mesh {dict(sharding.mesh.shape)}\n"
            "  hint: pad the table to a multiple of the number of row shards"
        ) from error
    return rows


def lineage_hex(touched: Touched) -> str:
    """Returns the lineage as 32 hex digits; waits for the device."""
    words = np.asarray(touched.lineage.addressable_data(0))
    return "".join(f"{int(word):08x}" for word in words)


def clock_of(touched: Touched) -> int:
    """Returns the clock as a Python int; waits for the device."""
    return int(np.asarray(touched.clock.addressable_data(0)))


def _stamp(stamps: jax.Array, rows: jax.Array, clock: jax.Array) -> jax.Array:
    """Returns `stamps` with `clock` at `rows`; rows out of range are dropped."""
    # `set`, not `max`, though the clock is the greatest stamp and both give the same: for an
    # operation that commutes, XLA scatters each device's share of the ids into stamps of its
    # own, and then all-reduces all stamps (seen in the HLO of jax 0.10.2).
    return stamps.at[rows].set(
        clock, mode="drop", out_sharding=explicit_sharding(stamps)
    )


def _check_is_touched(touched: Any, *, swapped: bool = False) -> None:
    if not isinstance(touched, Touched):
        raise TouchedError(
            f"touched is {type(touched).__name__}, expected what init_touched returns\n"
            + "  hint: record(touched, ids)" * swapped
            + "  hint: touched = cnr_jax.init_touched(state, tables)" * (not swapped)
        )


def _check_arguments(touched: Any, ids: object) -> None:
    """Checks that `record` was given touched rows, and ids by table."""
    _check_is_touched(touched, swapped=isinstance(ids, Touched))
    if not isinstance(ids, Mapping):
        name = touched.tables[0].name if touched.tables else "table"
        raise TouchedError(
            f"ids are {type(ids).__name__}, expected a dict of ids by table\n"
            f"  hint: record(touched, {{{name!r}: ids}})"
        )


def _beside(stamps: jax.Array, values: jax.Array) -> jax.Array:
    """Returns `values` on the devices of `stamps`, as tables may be on different devices.

    Within `jax.jit` all arrays are on the same devices, and nothing is moved.
    """
    if isinstance(stamps, Tracer) or isinstance(values, Tracer):
        return values
    sharding = stamps.sharding
    if not values.committed or values.sharding.device_set == sharding.device_set:
        return values
    named = isinstance(sharding, NamedSharding)
    return jax.device_put(
        values, NamedSharding(sharding.mesh, P()) if named else sharding
    )


def _check_length(stamps: jax.Array, table: StampedTable) -> None:
    if stamps.shape != (table.padded_rows,):
        raise TouchedError(
            f"stamps of table {table.name!r} have another shape than its rows\n"
            f"  got {list(stamps.shape)}, expected [{table.padded_rows}]\n"
            "  hint: call `record` on global arrays, outside of `shard_map`"
        )


def _require_concrete(arrays: Iterable[Any], caller: str) -> None:
    for array in arrays:
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            # Inside jit the lineage would be a constant that all calls share.
            raise TouchedError(
                f"{caller} needs concrete arrays\n  got {type(array).__name__}\n"
                "  hint: call it outside of jax.jit, on the state itself"
            )


def _stamped_tables(tables: Mapping[str, Table]) -> tuple[StampedTable, ...]:
    stamped = tuple(
        StampedTable(
            name=name,
            padded_rows=table.padded_rows,
            lookup_rows=(
                table.padded_rows if isinstance(table.layout, Identity) else table.rows
            ),
            layout=table.layout,
        )
        for name, table in sorted(tables.items())
    )
    for table in stamped:
        # Raises here rather than in the middle of a train step.
        index_dtype(table.name, table.padded_rows)
    return stamped


# Stamps are made on the host, and this is where they go to devices.
@jax.transfer_guard("allow")
def _assemble(
    tables: tuple[StampedTable, ...],
    shardings: Mapping[str, Sharding | None],
    stamps: Mapping[str, np.ndarray | jax.Array] | None = None,
    clock: int = 0,
) -> Touched:
    if stamps is None:
        # Views of a single zero: only the shards of this process ever take memory.
        zero = np.zeros((), np.int32)
        stamps = {t.name: np.broadcast_to(zero, (t.padded_rows,)) for t in tables}
    placed = {name: _place(stamps[name], shardings[name]) for name in sorted(stamps)}
    committed = [s for s in shardings.values() if s is not None]
    scalars = None
    if committed:
        first = committed[0]
        named = isinstance(first, NamedSharding)
        scalars = NamedSharding(first.mesh, P()) if named else first
    return Touched(
        stamps=placed,
        clock=_place(np.asarray(clock, np.int32), scalars),
        lineage=_place(_draw_lineage(), scalars),
        tables=tables,
    )


def _place(values: np.ndarray | jax.Array, sharding: Sharding | None) -> jax.Array:
    """Returns `values` as an array with `sharding`, int32 unless unsigned."""
    if isinstance(values, jax.Array):
        is_there = values.committed and values.sharding == sharding
        if is_there and values.dtype == jnp.int32:
            return values
        return jax.device_put(values.astype(jnp.int32), sharding)
    dtype = np.uint32 if values.dtype == np.uint32 else np.int32
    # Copies, as on CPU the result may share memory with the array it is made from.
    if sharding is None:
        return jax.device_put(np.array(values, dtype))
    return jax.make_array_from_callback(
        values.shape,
        sharding,
        lambda index: np.array(values[index], dtype),
        # A process that holds no shard could not infer it.
        dtype=dtype,
    )


def _draw_lineage() -> np.ndarray:
    """Returns uint32[4]: random bits of process 0, the same in every process."""
    words = np.frombuffer(secrets.token_bytes(16), np.uint32)
    if jax.process_count() > 1:
        words = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return words
