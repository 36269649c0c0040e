"""From a chain of checkpoints to a train state: what fits where, and what does not.

Everything is compared with the manifest before anything is read, so a state that does not match
is refused with all its differences at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from cnr_jax import errors
from cnr_jax.format.manifest import DenseLeaf, Manifest, TableEntry
from cnr_jax.repository.checked import numpy_dtype
from cnr_jax.repository.replay.encoded import Target
from cnr_jax.repository.replay.leaves import restore_leaves, restore_stamps
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.touched import stamp_sharding
from cnr_jax.state.layouts import layout_from
from cnr_jax.state.table import Table, Tables, flatten_paths, merge, nest

_log = logging.getLogger(__name__)
_CAST_HINT = (
    ". Values would change in the dtypes of the state: pass those that were saved (64 bits"
    " need jax_enable_x64), or Restore(..., cast=True) to convert values as astype does"
)
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be restored, checked against the checkpoint.

    Attributes:
        tables: leaves to rebuild: table, leaf name, and the abstract array.
        targets: rows and layout of each table that is rebuilt.
        dense: paths to restore, with the abstract leaf.
        texts: strings, by path.
        kept: leaves of the given state that the checkpoint does not hold.
        exact: the restored tables are all of the checkpoint's, bit for bit.
    """

    tables: tuple[tuple[str, str, jax.ShapeDtypeStruct], ...]
    targets: Mapping[str, Target]
    dense: Mapping[Path, Any]
    texts: Mapping[Path, str]
    kept: Mapping[Path, Any]
    exact: bool


def match(
    manifest: Manifest,
    state: Any,
    tables: Tables,
    *,
    partial: bool,
    cast: bool,
    step: str,
) -> Wanted:
    """Compares a state with a checkpoint.

    Args:
        manifest: of the checkpoint.
        state: abstract or concrete pytree to restore into.
        tables: where the tables of the checkpoint are in `state`.
        partial: restore what both have; what only `state` has must be concrete and is kept.
        cast: convert tables also to dtypes that cannot hold all values, with a warning.
        step: the checkpoint's name, for errors.

    Raises:
        StateMismatchError: with every difference.
    """
    problems: list[str] = []
    leaves: dict[Path, Any] = dict(flatten_paths(state))
    wanted: list[tuple[str, str, jax.ShapeDtypeStruct]] = []
    targets: dict[str, Target] = {}
    exact = set(tables) == {entry.name for entry in manifest.tables}
    casts: list[str] = []
    for entry in manifest.tables:
        table = tables.get(entry.name)
        held = [] if table is None else [x for x in table.leaves if x.path in leaves]
        # Of a table that is not asked for itself, slots may be.
        if table is None or not (held if partial else table.path in leaves):
            exact = False
            if not partial:
                problems.append(f"table {entry.name!r}: not in the state")
            continue
        targets[entry.name] = Target(
            rows=table.rows, layout=table.layout, padded_rows=table.padded_rows
        )
        exact &= _match_table(entry, table, leaves, wanted, problems, casts, partial)
    if not cast:
        problems += casts
    dense, texts = _match_dense(manifest.dense_leaves, leaves, problems, partial)
    kept = _kept(leaves, problems, partial)
    if problems:
        other_rows = [
            entry.name
            for entry in manifest.tables
            if entry.name in targets and targets[entry.name].rows != entry.rows
        ]
        raise errors.StateMismatchError(
            f"the state does not match checkpoint {step} ({len(problems)} differences)\n  "
            + "\n  ".join(problems)
            + f"\n  hint: {_way_out(other_rows, partial)}"
            + (_CAST_HINT if casts and not cast else "")
        )
    if casts:
        _log.warning(
            "tables of checkpoint %s are converted to dtypes that cannot hold all of their"
            " values: %s",
            step,
            "; ".join(casts),
        )
    return Wanted(
        tables=tuple(wanted),
        targets=targets,
        dense=dense,
        texts=texts,
        kept=kept,
        exact=exact,
    )


def _way_out(other_rows: Sequence[str], partial: bool) -> str:
    """What to do about a state that does not match.

    Args:
        other_rows: tables of another number of rows.
        partial: whether what both have was asked for already.
    """
    if other_rows:
        return (
            "tables are restored with the rows they were saved with, with partial=True"
            " too. To go on with another number: restore the old state (Restore() gives all"
            f" of it), copy the rows of {', '.join(other_rows)} into arrays of the new size,"
            " and save that state with new tables and touched rows, find_tables and"
            " init_touched, to another root"
        )
    if partial:
        return (
            "partial=True leaves alone what only one of both has. What both have must"
            " match: leave such a leaf out of the state, or pass it as it was saved"
        )
    return (
        "pass the state that was saved, or Restore(..., partial=True) to restore what both"
        " have"
    )


def _match_table(
    entry: TableEntry,
    table: Table,
    leaves: dict[Path, Any],
    wanted: list[tuple[str, str, jax.ShapeDtypeStruct]],
    problems: list[str],
    casts: list[str],
    partial: bool,
) -> bool:
    """Takes the leaves of one table out of `leaves`; returns whether it comes back exactly."""
    saved = {leaf.name: leaf for leaf in entry.leaves}
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    exact = layout == table.layout and entry.padded_rows == table.padded_rows
    if table.rows != entry.rows:
        problems.append(
            f"table {entry.name!r}: {entry.rows:,} rows in the checkpoint,"
            f" {table.rows:,} in the state"
        )
    for leaf in table.leaves:
        if leaf.path not in leaves:
            continue
        if leaf.name not in saved:
            continue  # stays among the leaves, and is kept or reported there
        value = leaves.pop(leaf.path)
        stored = saved.pop(leaf.name)
        if value.shape[:1] != leaf.shape[:1]:
            problems.append(
                f"{'/'.join(leaf.path)}: {value.shape[0]:,} rows in the state, but"
                f" {leaf.shape[0]:,} in the tables of this manager: pass"
                " Restore(..., tables=find_tables(state, ...))"
            )
        if value.shape[1:] != stored.shape[1:]:
            problems.append(
                f"{'/'.join(leaf.path)}: rows of shape {list(stored.shape[1:])} in the"
                f" checkpoint, {list(value.shape[1:])} in the state"
            )
        # What JAX makes of it: without x64, 64 bits are cut to 32.
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        if not _holds_all(numpy_dtype(stored.dtype), dtype):
            casts.append(
                f"{'/'.join(leaf.path)}: {stored.dtype} in the checkpoint, {dtype.name} in"
                " the state"
            )
        # A chain is of one set of tables: elsewhere in the state is another one.
        exact &= dtype.name == stored.dtype and leaf.path == stored.path
        wanted.append((entry.name, leaf.name, _abstract(value)))
    for name in saved:
        exact = False
        if not partial:
            problems.append(f"table {entry.name!r}: slot {name!r} is not in the state")
    return exact


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


def _match_dense(
    saved: Sequence[DenseLeaf],
    leaves: dict[Path, Any],
    problems: list[str],
    partial: bool,
) -> tuple[dict[Path, Any], dict[Path, str]]:
    """Takes the dense leaves that the checkpoint holds out of `leaves`."""
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
        elif not _holds(value, leaf):
            kind = "" if leaf.kind == "array" else f"{leaf.kind} "
            problems.append(
                f"{'/'.join(leaf.path)}: {kind}{leaf.dtype} in the checkpoint,"
                f" {getattr(value, 'dtype', type(value).__name__)} in the state"
            )
        else:
            dense[leaf.path] = value
    return dense, texts


def _holds(value: Any, leaf: DenseLeaf) -> bool:
    """Whether a leaf like `value` can hold what was saved: Orbax converts without a word."""
    dtype = getattr(value, "dtype", None)
    if leaf.kind == "text" or isinstance(value, str):
        return False
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if leaf.kind == "key" or is_key:
        known = isinstance(value, jax.Array) and is_key
        same = not known or str(jax.random.key_impl(value)) == leaf.dtype
        return leaf.kind == "key" and is_key and same
    wanted = dtype if dtype is not None else type(value)
    fraction = jnp.issubdtype(numpy_dtype(leaf.dtype), jnp.inexact)
    return not fraction or jnp.issubdtype(wanted, jnp.inexact)


def _kept(
    leaves: Mapping[Path, Any], problems: list[str], partial: bool
) -> dict[Path, Any]:
    """Leaves that the checkpoint does not hold: kept where that was asked for and possible."""
    for path, value in leaves.items():
        if not partial:
            problems.append(f"{'/'.join(path)}: not in the checkpoint")
        elif isinstance(value, jax.ShapeDtypeStruct):
            problems.append(
                f"{'/'.join(path)}: not in the checkpoint, and abstract: pass a value to keep"
            )
    return dict(leaves)


def rebuild(
    chain: Sequence[StepReader], wanted: Wanted
) -> dict[str, dict[str, jax.Array]]:
    """The table leaves, by table and leaf name."""
    found: dict[str, dict[str, jax.Array]] = {}
    leaves = [
        (table, leaf, wanted.targets[table], abstract)
        for table, leaf, abstract in wanted.tables
    ]
    # What a cast makes of values that do not fit was asked for, and is warned of once.
    with np.errstate(over="ignore", invalid="ignore"):
        arrays = restore_leaves(chain, leaves)
    for (table, leaf, _, _), array in zip(leaves, arrays, strict=True):
        found.setdefault(table, {})[leaf] = array
    return found


def read_stamps(
    chain: Sequence[StepReader], wanted: Wanted, tables: Tables
) -> tuple[dict[str, Sharding], dict[str, Any]]:
    """Shardings and values of the stamps under which the next delta is right.

    Tables that were not restored get stamps of zero.
    """
    shardings: dict[str, Sharding] = {}
    stamps: dict[str, Any] = {}
    abstract = {table: array for table, leaf, array in wanted.tables if leaf == "table"}
    for name, table in tables.items():
        array = abstract.get(name)
        source = array.sharding if array is not None else table.leaf.sharding
        source = source or SingleDeviceSharding(jax.local_devices()[0])
        shardings[name] = stamp_sharding(source, table.leaf.shape)
        if array is None:
            stamps[name] = np.zeros(table.padded_rows, np.int32)
    names = [name for name in tables if name not in stamps]
    restored = restore_stamps(
        chain, [(name, wanted.targets[name], shardings[name]) for name in names]
    )
    stamps |= dict(zip(names, restored, strict=True))
    return shardings, stamps


def assemble(
    state: Any,
    wanted: Wanted,
    tables: Tables,
    arrays: Mapping[str, Mapping[str, jax.Array]],
    dense: Mapping[str, Any],
) -> Any:
    """The state, in the structure of the one that was asked for.

    Args:
        state: abstract or concrete; gives the structure.
        wanted: as `match` returned it for this state.
        tables: gives the paths of table leaves.
        arrays: the table leaves, by table and leaf name.
        dense: the restored dense leaves as nested dicts.
    """
    rest = {**wanted.kept, **wanted.texts, **dict(flatten_paths(dense))}
    return merge(state, tables, arrays, nest(rest.items()))
