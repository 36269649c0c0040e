"""Which stored table each table of a state is restored from, and which stored row each row takes.

By name and number, unless `Restore` says otherwise: `rename` for tables, `ids` for rows.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from cnr_jax.args import Restore
from cnr_jax.format.manifest import TableEntry
from cnr_jax.repository.checked import numpy_dtype
from cnr_jax.repository.replay.encoded import Target
from cnr_jax.repository.replay.leaves import Abstract
from cnr_jax.state.layouts import layout_from
from cnr_jax.state.table import Leaf, Table, Tables

_log = logging.getLogger(__name__)
Path = tuple[str, ...]


@dataclasses.dataclass(slots=True)
class MatchedTables:
    """The tables of a state, compared with those of a checkpoint.

    Attributes:
        leaves: to be restored: table, leaf name, and the abstract array; the array of the state
            if some of its rows keep their values.
        targets: rows and layout of each table that is restored.
        stored: name of each of these tables in the checkpoint.
        exact: these tables are all of the checkpoint's, bit for bit.
        problems: what does not match.
        casts: leaves whose dtypes cannot hold all values that are stored.
        hints: what to do about problems, as far as they are of tables.
    """

    leaves: list[tuple[str, str, Abstract]] = dataclasses.field(default_factory=list)
    targets: dict[str, Target] = dataclasses.field(default_factory=dict)
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    exact: bool = True
    problems: list[str] = dataclasses.field(default_factory=list)
    casts: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)


def match_tables(
    entries: Sequence[TableEntry],
    tables: Tables,
    leaves: dict[Path, Any],
    args: Restore,
) -> MatchedTables:
    """Compares the tables of a state with those of a checkpoint.

    Args:
        entries: tables of the checkpoint.
        tables: of the state.
        leaves: of the state, by path; those that are restored are taken out.
        args: what is asked for: `partial`, `rename` and `ids`.
    """
    found, ids = MatchedTables(), args.ids or {}
    found.exact = set(tables) == {entry.name for entry in entries}
    named = _names_in_state(entries, tables, args.rename or {}, found)
    renamed = _perhaps_renamed(entries, tables, named, leaves)
    found.problems += _unknown_ids(ids, tables, named)
    for entry in entries:
        name = named[entry.name]
        table = None if name is None else tables.get(name)
        if name is None or table is None or not _is_asked_for(table, leaves, args):
            found.exact = False
            _match_missing(entry, name, renamed.get(entry.name), args.partial, found)
            continue
        found.exact &= name == entry.name
        found.stored[name] = entry.name
        new_rows = _match_rows(entry, table, ids.get(name), args.partial, found)
        _match_leaves(entry, table, new_rows, leaves, args.partial, found)
    return found


def _is_asked_for(table: Table, leaves: Collection[Path], args: Restore) -> bool:
    """Whether a state has a table; of one that is not asked for itself, slots may be."""
    asked = table.leaves if args.partial else (table.leaf,)
    return any(leaf.path in leaves for leaf in asked)


def _names_in_state(
    entries: Sequence[TableEntry],
    tables: Tables,
    rename: Mapping[str, str | None],
    found: MatchedTables,
) -> dict[str, str | None]:
    """The name that each stored table has in the state; None: it is to be left out."""
    stored = [entry.name for entry in entries]
    for old, new in rename.items():
        if old not in stored:
            found.problems.append(
                f"rename: no table {old!r} in the checkpoint, which has {_few(stored)}"
            )
        if new is not None and new not in tables:
            found.problems.append(
                f"rename: {old!r} to {new!r}, which is no table of the state: it has"
                f" {_few(tables)}"
            )
    named = {old: rename.get(old, old) for old in stored}
    for new in tables:
        old = [name for name in stored if named[name] == new]
        if len(old) > 1:
            found.problems.append(
                f"rename: tables {' and '.join(map(repr, old))} of the checkpoint would"
                f" both be {new!r}"
            )
            other = next((name for name in old if name not in rename), old[0])
            found.hints.append(
                f"rename {other!r} too, or leave it out: rename={{..., {other!r}: None}}"
            )
    return named


def _perhaps_renamed(
    entries: Sequence[TableEntry],
    tables: Tables,
    named: Mapping[str, str | None],
    leaves: Collection[Path],
) -> dict[str, Table]:
    """Stored tables that the state lacks, each with one like it that the checkpoint lacks."""
    here = {
        name
        for name, table in tables.items()
        if any(leaf.path in leaves for leaf in table.leaves)
    }
    new = [tables[name] for name in tables if name in here - set(named.values())]
    found: dict[str, Table] = {}
    for entry in entries:
        name, leaf = named[entry.name], entry.leaves[0]
        if name is None or name in here:
            continue
        alike = [table for table in new if table.leaf.shape[1:] == leaf.shape[1:]]
        alike.sort(key=lambda table: table.rows != entry.rows)
        for table in [table for table in new if table.path == leaf.path] + alike:
            found.setdefault(entry.name, table)
    return found


def _match_missing(
    entry: TableEntry,
    name: str | None,
    renamed: Table | None,
    partial: bool,
    found: MatchedTables,
) -> None:
    """Says what is wrong where the state lacks a stored table.

    Args:
        entry: of the table.
        name: that it would have in the state; None if it is to be left out.
        renamed: one of the state that it may be. Left out, it would begin anew without a word.
        partial: whether the state may lack tables.
        found: to which it is added.
    """
    if name is None or (partial and renamed is None):
        return
    if renamed is None:
        found.problems.append(f"table {entry.name!r}: not in the state")
        return
    new = renamed.name
    hint = (
        f"if table {entry.name!r} is {new!r} now, Restore(..., rename={{{entry.name!r}:"
        f" {new!r}}}); Restore(..., partial=True, rename={{{entry.name!r}: None}}) leaves it"
        " out"
    )
    same = renamed.rows == entry.rows or renamed.path == entry.leaves[0].path
    if partial and not same:
        _log.warning(
            "table %r of the checkpoint is left out, and %r keeps the values of the state; %s",
            entry.name,
            new,
            hint,
        )
        return
    found.problems.append(f"table {entry.name!r}: not in the state")
    found.hints.append(hint)


def _unknown_ids(
    ids: Mapping[str, object], tables: Tables, named: Mapping[str, str | None]
) -> Iterator[str]:
    """What is wrong with ids of tables that are not restored."""
    for name in ids:
        if name not in tables:
            new = named.get(name)
            yield f"ids: no table {name!r} in the state, which has {_few(tables)}" + (
                f"; {name!r} of the checkpoint is {new!r} there" * (new in tables)
            )
        elif name not in named.values():
            yield f"ids: the checkpoint has no table {name!r} to take rows of"


def _match_rows(
    entry: TableEntry,
    table: Table,
    ids: np.ndarray | None,
    partial: bool,
    found: MatchedTables,
) -> int:
    """Says which stored row each row of a table takes; returns how many take none."""
    where = f"table {table.name!r}"
    new_rows = max(0, table.rows - entry.rows)
    if ids is None:
        if table.rows != entry.rows and not partial:
            found.problems.append(
                f"{where}: {entry.rows:,} rows in the checkpoint,"
                f" {table.rows:,} in the state"
            )
            found.hints.append(
                "Restore(..., partial=True) takes the rows that both have, and keeps the"
                f" state's values in new ones; with ids={{{table.name!r}: ids}} row i takes"
                " row ids[i] of the checkpoint, or none for -1"
            )
    elif len(ids) != table.rows:
        found.problems.append(
            f"{where}: {len(ids):,} ids for {table.rows:,} rows in the state"
        )
    else:
        wrong = np.flatnonzero((ids < -1) | (ids >= entry.rows))
        if len(wrong):
            found.problems.append(
                f"{where}: ids[{wrong[0]}] is {ids[wrong[0]]}, expected a row of the"
                f" checkpoint, 0 to {entry.rows - 1}, or -1"
                + f"; {len(wrong):,} ids are out of range"
                * (len(wrong) > 1)
            )
        new_rows = int(np.count_nonzero(ids < 0))
    found.exact &= ids is None and table.rows == entry.rows
    found.targets[table.name] = Target(
        rows=table.rows,
        layout=table.layout,
        padded_rows=table.padded_rows,
        taken=ids,
    )
    return new_rows


def _match_leaves(
    entry: TableEntry,
    table: Table,
    new_rows: int,
    leaves: dict[Path, Any],
    partial: bool,
    found: MatchedTables,
) -> None:
    """Takes the leaves of one table, of which some rows are new, out of `leaves`."""
    saved = {leaf.name: leaf for leaf in entry.leaves}
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    found.exact &= layout == table.layout and entry.padded_rows == table.padded_rows
    for leaf in table.leaves:
        if leaf.path not in leaves:
            continue
        if leaf.name not in saved:
            continue  # stays among the leaves, and is kept or reported there
        value = leaves.pop(leaf.path)
        stored = saved.pop(leaf.name)
        where = "/".join(leaf.path)
        if value.shape[:1] != leaf.shape[:1]:
            found.problems.append(
                f"{where}: {value.shape[0]:,} rows in the state, but"
                f" {leaf.shape[0]:,} in the tables of this manager: pass"
                " Restore(..., tables=find_tables(state, ...))"
            )
        if value.shape[1:] != stored.shape[1:]:
            found.problems.append(
                f"{where}: rows of shape {list(stored.shape[1:])} in the"
                f" checkpoint, {list(value.shape[1:])} in the state"
            )
            found.hints.append(
                f"to begin table {table.name!r} anew, Restore(..., partial=True,"
                f" rename={{{entry.name!r}: None}}) leaves the stored one out"
            )
        # What JAX makes of it: without x64, 64 bits are cut to 32.
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        if not _holds_all(numpy_dtype(stored.dtype), dtype):
            found.casts.append(
                f"{where}: {stored.dtype} in the checkpoint, {dtype.name} in the state"
            )
        # A chain is of one set of tables: elsewhere in the state is another one.
        found.exact &= dtype.name == stored.dtype and leaf.path == stored.path
        wanted = _abstract(value)
        if new_rows:
            wanted = _with_values(value, leaf, new_rows, found)
        found.leaves.append((table.name, leaf.name, wanted))
    for name in saved:
        found.exact = False
        if not partial:
            found.problems.append(
                f"table {entry.name!r}: slot {name!r} is not in the state"
            )


def _with_values(
    value: Any, leaf: Leaf, new_rows: int, found: MatchedTables
) -> Abstract:
    """The leaf of a state whose new rows keep their values, if it has any."""
    if isinstance(value, np.ndarray):
        return jax.device_put(value, _abstract(value).sharding)
    if isinstance(value, jax.Array) and not value.is_deleted():
        return value
    what = "donated" if isinstance(value, jax.Array) else "abstract"
    found.problems.append(
        f"{'/'.join(leaf.path)}: {new_rows:,} rows that take none of the checkpoint's, and"
        f" {what}: pass values for them to keep"
    )
    return _abstract(value)


def _holds_all(stored: np.dtype, wanted: np.dtype) -> bool:
    """Whether each value of a dtype is one of another of the same kind."""
    if stored == wanted:
        return True
    if jnp.issubdtype(stored, jnp.floating) and jnp.issubdtype(wanted, jnp.floating):
        a, b = jnp.finfo(stored), jnp.finfo(wanted)
        return b.nmant >= a.nmant and b.maxexp >= a.maxexp and int(b.minexp) <= a.minexp
    kinds = (jnp.integer, jnp.complexfloating)
    alike = any(all(jnp.issubdtype(d, k) for d in (stored, wanted)) for k in kinds)
    return alike and np.can_cast(stored, wanted, "safe")


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _few(names: Collection[str]) -> str:
    shown = [repr(name) for name in names][:4]
    return ", ".join(shown + [f"{len(names) - 4} more"] * (len(names) > 4)) or "none"
