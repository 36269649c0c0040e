"""Tables that are not restored by name and row by row: renamed, left out, grown, or by ids.

The functions find requests that cannot be met, and dense leaves whose rows would no longer fit
those of their table. None of this is needed if a state is restored as it was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from cnr_jax.format.manifest import DenseLeaf, TableEntry
from cnr_jax.state.doubts import perhaps_slot
from cnr_jax.state.table import Table, Tables, few
from cnr_jax.texts import logger

_log = logger(__name__)
Path = tuple[str, ...]


def names_in_state(
    entries: Sequence[TableEntry],
    tables: Tables,
    rename: Mapping[str, str | None],
    problems: list[str],
    hints: list[str],
) -> dict[str, str | None]:
    """Name that each stored table has in the state; None: it is to be left out.

    Args:
        entries: tables of the checkpoint.
        tables: tables of the state.
        rename: new names, as in `Restore`.
        problems: list that gets what does not fit.
        hints: list that gets advice about it.
    """
    stored = [entry.name for entry in entries]
    for old, new in rename.items():
        if old not in stored:
            problems.append(
                f"rename: no table {old!r} in the checkpoint, which has"
                f" {few(map(repr, stored))}"
            )
        if new is not None and new not in tables:
            problems.append(
                f"rename: {old!r} to {new!r}, which is no table of the state: it has"
                f" {few(map(repr, tables))}"
            )
            hints.append(
                "Restore(..., tables=find_tables(state, ...)) says where the tables are in"
                " the state"
            )
    named = {old: rename.get(old, old) for old in stored}
    for new in tables:
        old = [name for name in stored if named[name] == new]
        if len(old) > 1:
            problems.append(
                f"rename: tables {' and '.join(map(repr, old))} of the checkpoint would"
                f" both be {new!r}"
            )
            other = next((name for name in old if name not in rename), old[0])
            hints.append(
                f"rename {other!r} too, or leave it out: rename={{..., {other!r}: None}}"
            )
    return named


def match_missing(
    entry: TableEntry,
    named: Mapping[str, str | None],
    tables: Tables,
    leaves: Collection[Path],
    partial: bool,
    problems: list[str],
    hints: list[str],
) -> None:
    """Notes the problem if the state lacks a stored table.

    Args:
        entry: entry of the stored table.
        named: name that each stored table has in the state.
        tables: tables of the state.
        leaves: paths of the leaves that are asked for, of this table and those after it.
        partial: whether the state may lack tables.
        problems: list that gets the problem.
        hints: list that gets advice about it.
    """
    if named[entry.name] is None:
        return
    renamed = _perhaps_renamed(entry, named, tables, leaves)
    if renamed is None:
        if not partial:
            problems.append(f"table {entry.name!r}: not in the state")
        return
    new = renamed.name
    hint = (
        f"if table {entry.name!r} is {new!r} now, Restore(..., rename={{{entry.name!r}:"
        f" {new!r}}}); Restore(..., partial=True, rename={{{entry.name!r}: None}}) leaves it"
        " out"
    )
    same = renamed.rows == entry.rows or renamed.path == entry.leaves[0].path
    # Without the warning the table would begin anew unnoticed.
    if partial and not same:
        _log.warning(
            "table %r of the checkpoint is left out, and %r keeps the values of the state; %s",
            entry.name,
            new,
            hint,
        )
        return
    problems.append(f"table {entry.name!r}: not in the state")
    hints.append(hint)


def _perhaps_renamed(
    entry: TableEntry,
    named: Mapping[str, str | None],
    tables: Tables,
    leaves: Collection[Path],
) -> Table | None:
    """Table of the state that may be a stored one under another name."""
    leaf = entry.leaves[0]
    new = [
        table
        for name, table in tables.items()
        if name not in named.values() and any(x.path in leaves for x in table.leaves)
    ]
    alike = [table for table in new if table.leaf.shape[1:] == leaf.shape[1:]]
    alike.sort(key=lambda table: table.rows != entry.rows)
    found = [table for table in new if table.path == leaf.path] + alike
    return found[0] if found else None


def match_ids(
    ids: Mapping[str, object],
    tables: Tables,
    named: Mapping[str, str | None],
    problems: list[str],
) -> None:
    """Notes problems with ids of tables that are not restored."""
    for name in ids:
        if name not in tables:
            new = named.get(name)
            problems.append(
                f"ids: no table {name!r} in the state, which has {few(map(repr, tables))}"
                + f"; {name!r} of the checkpoint is {new!r} there" * (new in tables)
            )
        elif name not in named.values():
            problems.append(
                f"ids: the checkpoint has no table {name!r} to take rows of"
            )


def match_rows_of_dense_leaves(
    entry: TableEntry,
    table: Table,
    by_ids: bool,
    dense: Sequence[DenseLeaf],
    leaves: Mapping[Path, Any],
    problems: list[str],
    hints: list[str],
) -> None:
    """Notes dense leaves whose rows would stay in place when the rows of a table move.

    An accumulator that `find_tables` did not take for a slot, because its path does not end with
    the table's, would keep the order and number of its rows. A leaf with the table's name and as
    many rows counts as such an accumulator.

    Args:
        entry: entry of the table in the checkpoint.
        table: the table in the state.
        by_ids: whether its rows are taken by ids.
        dense: dense leaves of the checkpoint.
        leaves: leaves of the state that are asked for, by path.
        problems: list that gets the problem.
        hints: list that gets advice about it.
    """
    stored = dataclasses.replace(
        table,
        rows=entry.rows,
        leaf=dataclasses.replace(table.leaf, shape=entry.leaves[0].shape),
    )
    for leaf in dense:
        if leaf.path not in leaves or not perhaps_slot(leaf.path, leaf, stored):
            continue
        where, shape = "/".join(leaf.path), tuple(np.shape(leaves[leaf.path]))
        if not by_ids and shape == leaf.shape:
            continue
        if shape == leaf.shape:  # else it does not match anyway
            problems.append(
                f"{where}: a dense leaf, with a row for each row of table {table.name!r}, whose"
                " rows are taken by ids"
            )
        hints.append(
            f"if {where} is a slot of table {table.name!r}, pass find_tables"
            f" TableSpec(slots=[{where!r}]), restore what was saved as it was, save once, and"
            " restore that step into the new rows; if it is none, leave it out of the state,"
            " with Restore(..., partial=True)"
        )
