"""Row ids as users have them: bags, masks, ragged batches, several features of a table.

Everything here turns such ids into stored rows of one table, wrapped and clamped as by JAX
indexing. What cannot be ids is rejected while the train step is traced. `cnr_jax.optim` reads ids
by the same functions: a row that it changes must be one that `record` stamps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from cnr_jax.errors import CnrError, TouchedError
from cnr_jax.state.layouts import RowLayout
from cnr_jax.state.table import few, index_dtype
from cnr_jax.texts import logger

_log = logger(__name__)


class Lookup(NamedTuple):
    """Row ids with entries that do not count: masked, or ragged.

    Attributes:
        ids: integer[...], row ids.
        where: bool[...], broadcast to the shape of `ids` by numpy's rules (aligned at the last
            axis). Entries that are False are ignored.
        row_splits: integer[n + 1], for ragged `ids` of one dimension: row `i` holds entries
            `row_splits[i]` up to `row_splits[i + 1]`. Entries at or past `row_splits[-1]` are
            padding and ignored.
    """

    ids: Any
    where: Any = None
    row_splits: Any = None


# One feature, or several that share a table.
Ids: TypeAlias = Union[ArrayLike, Lookup, "Sequence[Ids]"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StampedTable:
    """Facts about a table that `record` needs, static under `jax.jit`.

    Attributes:
        name: the table's name.
        padded_rows: rows of the stored array, and so the number of stamps.
        lookup_rows: number of rows by which ids wrap and clamp: the stored rows if ids
            index them directly, the logical rows if a layout is in between.
        layout: map from logical row ids to stored rows.
    """

    name: str
    padded_rows: int
    lookup_rows: int
    layout: RowLayout


def lookups(ids: Ids, label: str) -> Iterator[tuple[str, Lookup]]:
    """Yields every feature in `ids` with a label for error messages."""
    if isinstance(ids, Lookup):
        yield label, ids
    # A list of plain integers is one feature; any other list is a list of features.
    elif isinstance(ids, list | tuple) and not all(isinstance(i, int) for i in ids):
        for index, part in enumerate(ids):
            yield from lookups(part, f"{label}[{index}]")
    elif not isinstance(ids, list | tuple) or ids:
        yield label, Lookup(ids)


def stored_rows(lookup: Lookup, table: StampedTable, label: str) -> jax.Array:
    """Returns integer[n]: the stored rows of a lookup, `padded_rows` where masked."""
    ids = _integers(lookup.ids, label)
    wrapped = in_range(
        ids, table.lookup_rows, index_dtype(table.name, table.padded_rows)
    )
    rows = table.layout.to_physical(wrapped)
    keep = _counted(lookup, ids.shape, label)
    if keep is not None:
        # Not -1, as scatter would wrap it to the last row before it drops anything.
        rows = jnp.where(keep, rows, table.padded_rows)
    return rows.reshape(-1)


def report_strays(lookup: Lookup, table: StampedTable, label: str) -> None:
    """Logs a warning of ids that are negative or out of range, once the ids are known.

    It does not look at masked entries. Under `jax.jit` it copies the ids to the host in each call.
    """
    ids = _integers(lookup.ids, label)
    keep = _counted(lookup, ids.shape, label)

    def report(ids: Any, keep: Any) -> None:
        ids = np.asarray(ids).reshape(-1)
        if keep is not None:
            ids = ids[np.asarray(keep).reshape(-1)]
        # Compared as Python's integers: ids of 8 bits do not hold the number of rows.
        named = [
            (int(i), int(n))
            for i, n in zip(*np.unique(ids, return_counts=True), strict=True)
        ]
        rows = table.lookup_rows
        found = {
            "negative, which count from the end": [
                x for x in named if -rows <= x[0] < 0
            ],
            "out of range": [x for x in named if not -rows <= x[0] < rows],
        }
        parts = [
            f"{sum(count for _, count in each):,} {what}"
            f" ({few(f'{i}' + f' {n} times' * (n > 1) for i, n in each)})"
            for what, each in found.items()
            if each
        ]
        if parts:
            what = "; ".join(parts)
            _log.warning("%s: %d ids of %d rows, %s", label, len(ids), rows, what)

    jax.debug.callback(report, ids, keep)


def in_range(ids: jax.Array, rows: int, dtype: DTypeLike) -> jax.Array:
    """Returns `ids` wrapped and clamped to [0, rows), in a dtype that holds `rows`."""
    # Only in such a dtype are `ids + rows` and the bound below right.
    if jnp.iinfo(ids.dtype).max < rows:
        ids = ids.astype(dtype)
    if jnp.issubdtype(ids.dtype, jnp.signedinteger):
        ids = jnp.where(ids < 0, ids + rows, ids)
    # The clip comes before the cast, lest a wide id turns into another row's.
    return jnp.clip(ids, 0, rows - 1).astype(dtype)


def _counted(lookup: Lookup, shape: tuple[int, ...], label: str) -> jax.Array | None:
    """Returns bool[shape]: which entries count; None if all do."""
    keep = None
    if lookup.where is not None:
        where = replicated(as_array(lookup.where, f"mask of {label}"))
        if where.dtype != jnp.bool_:
            raise TouchedError(
                f"mask of {label} is {where.dtype}, expected bool\n"
                "  hint: compare it, as in `where != 0`"
            )
        if not broadcasts_to(where.shape, shape):
            raise TouchedError(
                f"mask of {label} does not fit the ids\n"
                f"  got {list(where.shape)}, expected it to broadcast to {list(shape)}"
            )
        keep = jnp.broadcast_to(where, shape)
    if lookup.row_splits is not None:
        splits = _integers(lookup.row_splits, f"row_splits of {label}")
        if len(shape) != 1 or splits.ndim != 1 or splits.size == 0:
            raise TouchedError(
                f"row_splits of {label} do not fit the ids\n"
                f"  got row_splits{list(splits.shape)} with ids{list(shape)}, "
                "expected one dimension each and at least one split"
            )
        # The clip comes before the cast, lest a wide count wraps into a small one.
        wide = splits if jnp.iinfo(splits.dtype).bits >= 32 else splits.astype("int32")
        count = jnp.clip(wide[-1], 0, shape[0]).astype(jnp.int32)
        ragged = jnp.arange(shape[0], dtype=jnp.int32) < count
        keep = ragged if keep is None else keep & ragged
    return keep


def _integers(values: Any, label: str) -> jax.Array:
    array = as_array(values, label)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        hint = (
            "\n  hint: pass a mask beside the ids, as `Lookup(ids, where=mask)`"
            if array.dtype == jnp.bool_
            else ""
        )
        raise TouchedError(f"{label} are {array.dtype}, expected integers{hint}")
    return replicated(array)


def as_array(
    values: Any, label: str, error: type[CnrError] = TouchedError
) -> jax.Array:
    """Returns `values` as an array, or raises `error` about `label`."""
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError, OverflowError) as cause:
        raise error(
            f"{label} cannot be made an array\n  got {type(values).__name__}: {cause}"
        ) from cause


def broadcasts_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of this shape broadcasts to the shape `target`."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def replicated(array: jax.Array, columns: Sequence[Any] = ()) -> jax.Array:
    """Returns an array replicated on all devices; `columns` are axes that split last dimensions."""
    # With explicit mesh axes, arrays of unlike shardings do not combine, and a scatter
    # of sharded ids is refused. Elsewhere the compiler gathers the ids by itself.
    where = explicit_sharding(array)
    if where is None:
        return array
    spec = [None] * (array.ndim - len(columns)) + list(columns)
    return jax.sharding.reshard(array, NamedSharding(where.mesh, P(*spec)))


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Returns the sharding in an array's type if its mesh has explicit axes; else None."""
    sharding: Any = jax.typeof(array).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None
