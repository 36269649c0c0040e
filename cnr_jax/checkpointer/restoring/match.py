"""Match of a train state and a checkpoint: the place of each leaf, and what does not fit.

Everything is compared with the manifest before anything is read, so a state that does not match
is refused with all its differences at once.

Tables are matched by name and rows by number, unless `Restore` says otherwise: see moved.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.args import Restore
from cnr_jax.checkpointer.restoring.fitting import (
    asked,
    dtype_in,
    misfit,
    mismatch,
    uneven,
    unknown_to_jax,
)
from cnr_jax.checkpointer.restoring.moved import (
    match_ids,
    match_missing,
    match_rows_of_dense_leaves,
    names_in_state,
)
from cnr_jax.format.manifest import DenseLeaf, Manifest, TableEntry
from cnr_jax.repository.replay.encoded import Target
from cnr_jax.repository.replay.leaves import Abstract, abstract_of
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.state.layouts import layout_from
from cnr_jax.state.table import Leaf, Table, Tables, flatten_paths

# What to do about a state that does not match, by whether what both have was asked for.
_WAY_OUT = {
    False: "pass the state that was saved, or Restore(..., partial=True) to restore what both"
    " have",
    True: "partial=True leaves alone what only one of both has. What both have must match: leave"
    " such a leaf out of the state, or pass it as it was saved",
}
_EVEN_HINT = (
    "pass a sharding whose axes divide the shape; a table is padded to a multiple of its shards"
    " before the first save, and TableSpec(rows=...) says how many of its rows are real"
)
_MOST_HINTS = 4  # if many tables differ alike, hints about the first ones suffice
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Leaves to be restored, checked against the checkpoint.

    Attributes:
        tables: tables of the state, matched.
        dense: dense leaves of the state to restore, by path.
        asked: leaves to ask of Orbax for those that are not numbers of Python.
        numbers: leaves that are numbers of Python, whose stored values decide whether they fit.
        texts: strings, by path.
        kept: leaves of the given state that the checkpoint does not hold.
        casts: leaves whose dtypes cannot hold all values that are stored.
    """

    tables: MatchedTables
    dense: Mapping[Path, Any]
    asked: Mapping[Path, Any]
    numbers: Sequence[DenseLeaf]
    texts: Mapping[Path, str]
    kept: Mapping[Path, Any]
    casts: Sequence[str]


def match(
    manifest: Manifest, state: Any, tables: Tables, args: Restore, step: str
) -> Wanted:
    """Compares a state with a checkpoint.

    Args:
        manifest: manifest of the checkpoint.
        state: abstract or concrete pytree to restore into.
        tables: where the tables of the checkpoint are in `state`.
        args: arguments of the restore: `partial`, `cast`, `rename` and `ids`.
        step: the checkpoint's name, for errors.

    Raises:
        StateMismatchError: if they differ; names every difference. If only dtypes differ, and
            Python numbers are yet to be read, it is raised later, with those of the numbers.
    """
    leaves: dict[Path, Any] = dict(flatten_paths(state))
    saved = manifest.dense_leaves
    found = _match_tables(manifest.tables, saved, tables, leaves, args)
    problems, casts = found.problems, found.casts
    dense, texts = _match_dense(saved, leaves, found, args.partial)
    kept = kept_leaves(leaves, problems, args.partial)
    arrays, numbers = _fit_dense(saved, {} if args.state is None else dense, casts)
    # The numbers that are yet to be read may add to the casts.
    if problems or (casts and not args.cast and not numbers):
        hints = list(dict.fromkeys(found.hints or [_WAY_OUT[args.partial]]))
        told = () if args.cast else casts
        raise mismatch(step, problems, told, hints[:_MOST_HINTS])
    return Wanted(
        tables=found,
        dense=dense,
        asked=arrays,
        numbers=numbers,
        texts=texts,
        kept=kept,
        casts=casts,
    )


def _fit_dense(
    saved: Sequence[DenseLeaf], dense: Mapping[Path, Any], casts: list[str]
) -> tuple[dict[Path, Any], list[DenseLeaf]]:
    """Chooses what to ask of Orbax for dense leaves, and which are numbers; notes `casts`."""
    arrays: dict[Path, Any] = {}
    numbers: list[DenseLeaf] = []
    for leaf in saved:
        if leaf.path not in dense:
            continue
        value = dense[leaf.path]
        if leaf.kind == "array":
            stored = numpy_dtype(leaf.dtype)
            if told := misfit(stored, value):
                casts.append(f"{'/'.join(leaf.path)}: {told}")
            arrays[leaf.path] = asked(stored, value)
        elif leaf.kind == "scalar" and type(value).__name__ != leaf.dtype:
            numbers.append(leaf)
        else:
            arrays[leaf.path] = value
    return arrays, numbers


def _match_dense(
    saved: Sequence[DenseLeaf],
    leaves: dict[Path, Any],
    found: MatchedTables,
    partial: bool,
) -> tuple[dict[Path, Any], dict[Path, str]]:
    """Takes the dense leaves that the checkpoint holds out of `leaves`."""
    problems = found.problems
    dense: dict[Path, Any] = {}
    texts: dict[Path, str] = {}
    for leaf in saved:
        if leaf.path not in leaves:
            if not partial:
                problems.append(f"{'/'.join(leaf.path)}: not in the state")
            continue
        value = leaves.pop(leaf.path)
        if leaf.kind == "text" and isinstance(value, str):
            texts[leaf.path] = leaf.value or ""
        elif tuple(np.shape(value)) != leaf.shape:
            problems.append(
                f"{'/'.join(leaf.path)}: shape {list(leaf.shape)} in the checkpoint,"
                f" {list(np.shape(value))} in the state"
            )
        elif not _is_alike(value, leaf):
            kind = "" if leaf.kind == "array" else f"{leaf.kind} "
            problems.append(
                f"{'/'.join(leaf.path)}: {kind}{leaf.dtype} in the checkpoint,"
                f" {getattr(value, 'dtype', type(value).__name__)} in the state"
            )
        elif told := unknown_to_jax(value):
            problems.append(f"{'/'.join(leaf.path)}: {told}")
        elif told := uneven(value):
            problems.append(f"{'/'.join(leaf.path)}: {told}")
            found.hints.append(_EVEN_HINT)
        else:
            dense[leaf.path] = value
    return dense, texts


def _is_alike(value: Any, leaf: DenseLeaf) -> bool:
    """Whether a leaf is a PRNG key of the same kind, or an array or number, as the saved one is."""
    dtype = getattr(value, "dtype", None)
    if leaf.kind == "text" or isinstance(value, str):
        return False
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if leaf.kind == "key" or is_key:
        known = isinstance(value, jax.Array) and is_key
        same = not known or str(jax.random.key_impl(value)) == leaf.dtype
        return leaf.kind == "key" and is_key and same
    return True


def kept_leaves(
    leaves: Mapping[Path, Any], problems: list[str], partial: bool
) -> dict[Path, Any]:
    """Leaves that the checkpoint lacks, which keep their values; notes those that cannot."""
    for path, value in leaves.items():
        if not partial:
            problems.append(f"{'/'.join(path)}: not in the checkpoint")
        elif isinstance(value, jax.ShapeDtypeStruct):
            problems.append(
                f"{'/'.join(path)}: not in the checkpoint, and abstract: pass a value to keep"
            )
    return dict(leaves)


@dataclasses.dataclass(slots=True)
class MatchedTables:
    """Tables of a state, compared with those of a checkpoint.

    Attributes:
        leaves: leaves to be restored: table, leaf name, and the abstract array; or the array of
            the state if some of its rows keep their values.
        targets: rows and layout of each table that is restored.
        stored: name of each of these tables in the checkpoint.
        unchanged: whether these are all tables of the checkpoint, bit for bit and as they lay
            there.
        problems: differences between state and checkpoint.
        casts: leaves whose dtypes cannot hold all values that are stored.
        hints: advice about problems with tables.
    """

    leaves: list[tuple[str, str, Abstract]] = dataclasses.field(default_factory=list)
    targets: dict[str, Target] = dataclasses.field(default_factory=dict)
    stored: dict[str, str] = dataclasses.field(default_factory=dict)
    unchanged: bool = True
    problems: list[str] = dataclasses.field(default_factory=list)
    casts: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)


def _match_tables(
    entries: Sequence[TableEntry],
    dense: Sequence[DenseLeaf],
    tables: Tables,
    leaves: dict[Path, Any],
    args: Restore,
) -> MatchedTables:
    """Compares the tables of a state with those of a checkpoint.

    Args:
        entries: tables of the checkpoint.
        dense: other leaves of the checkpoint.
        tables: tables of the state.
        leaves: leaves of the state, by path; those that are restored are taken out.
        args: arguments of the restore: `partial`, `rename` and `ids`.
    """
    found, ids = MatchedTables(), args.ids or {}
    problems, hints = found.problems, found.hints
    found.unchanged = set(tables) == {entry.name for entry in entries}
    named: dict[str, str | None] = {entry.name: entry.name for entry in entries}
    if args.rename:
        named = names_in_state(entries, tables, args.rename, problems, hints)
    if ids:
        match_ids(ids, tables, named, problems)
    for entry in entries:
        name = named[entry.name]
        table = tables.get(name) if name else None
        # With `partial`, slots may be asked for without their table.
        asked = () if not table else table.leaves if args.partial else (table.leaf,)
        if table is None or not any(leaf.path in leaves for leaf in asked):
            found.unchanged = False
            match_missing(entry, named, tables, leaves, args.partial, problems, hints)
            continue
        found.unchanged &= table.name == entry.name
        found.stored[table.name] = entry.name
        taken = ids.get(table.name)
        if taken is not None or table.rows != entry.rows:
            match_rows_of_dense_leaves(
                entry, table, taken is not None, dense, leaves, problems, hints
            )
        new_rows = _match_rows(entry, table, taken, args.partial, found)
        _match_leaves(entry, table, new_rows, leaves, args.partial, found)
    return found


def _match_rows(
    entry: TableEntry,
    table: Table,
    ids: np.ndarray | None,
    partial: bool,
    found: MatchedTables,
) -> int:
    """Maps each row of a table to the stored row that it takes; returns how many take none."""
    where = f"table {table.name!r}"
    new_rows = max(0, table.rows - entry.rows)  # without ids row i takes row i
    if ids is None:
        if table.rows != entry.rows and not partial:
            found.problems.append(
                f"{where}: {entry.rows:,} rows in the checkpoint,"
                f" {table.rows:,} in the state"
            )
            found.hints.append(
                "args.Restore(state, partial=True) takes the rows that both have, keeps the"
                f" state's values in new ones; with ids={{{table.name!r}: ids}} row i takes"
                " row ids[i] of the checkpoint, or none for -1"
            )
    elif len(ids) != table.rows:
        found.problems.append(
            f"{where}: {len(ids):,} ids for {table.rows:,} rows in the state"
        )
        found.hints.append(
            "each row of the state takes one id; -1: none, and keeps its value"
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
            found.hints.append(
                "row i takes row ids[i] of the checkpoint, or none for -1"
            )
        new_rows = int(np.count_nonzero(ids < 0))
    found.unchanged &= ids is None and table.rows == entry.rows
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
    """Takes the leaves of a table out of `leaves`; some of its rows may be new."""
    saved = {leaf.name: leaf for leaf in entry.leaves}
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    found.unchanged &= layout == table.layout and entry.padded_rows == table.padded_rows
    for leaf in table.leaves:
        if leaf.path not in leaves:
            continue
        if leaf.name not in saved:
            continue  # it stays in `leaves`, and is kept or reported by `kept_leaves`
        value = leaves.pop(leaf.path)
        stored = saved.pop(leaf.name)
        where = "/".join(leaf.path)
        if not hasattr(value, "shape"):
            found.problems.append(
                f"{where}: shape {list(leaf.shape)} in the checkpoint, and"
                f" {type(value).__name__} without a shape in the state"
            )
            continue
        if value.shape[:1] != leaf.shape[:1]:
            found.problems.append(
                f"{where}: {value.shape[0]:,} rows in the state, but"
                f" {leaf.shape[0]:,} in the tables that this restore goes by"
            )
            found.hints.append(
                "Restore(..., tables=find_tables(state, ...)) says what the state has"
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
        if told := unknown_to_jax(value, on_device=True):
            found.problems.append(f"{where}: {told}")
            continue
        if value.shape[:1] == leaf.shape[:1] and (told := uneven(value)):
            found.problems.append(f"{where}: {told}")
            found.hints.append(_EVEN_HINT)
            continue
        if told := misfit(numpy_dtype(stored.dtype), value, on_device=True):
            found.casts.append(f"{where}: {told}")
        same = dtype_in(value, on_device=True).name == stored.dtype
        # All steps of a chain have the same tables. A table at another path is another table.
        found.unchanged &= same and leaf.path == stored.path
        wanted = abstract_of(value)
        if new_rows:
            wanted = _with_values(value, leaf, new_rows, found)
        found.leaves.append((table.name, leaf.name, wanted))
    for name in saved:
        found.unchanged = False
        if not partial:
            found.problems.append(
                f"table {entry.name!r}: slot {name!r} is not in the state"
            )


def _with_values(
    value: Any, leaf: Leaf, new_rows: int, found: MatchedTables
) -> Abstract:
    """Leaf of a state whose new rows keep their values; notes a problem if it has none."""
    if isinstance(value, np.ndarray):
        return jax.device_put(value, abstract_of(value).sharding)
    if isinstance(value, jax.Array) and not value.is_deleted():
        return value
    what = "donated" if isinstance(value, jax.Array) else "abstract"
    found.problems.append(
        f"{'/'.join(leaf.path)}: {new_rows:,} rows that take none of the checkpoint's, and"
        f" {what}: pass values for them to keep"
    )
    found.hints.append(
        "pass arrays where rows are new, such as a state that was just made"
    )
    return abstract_of(value)
