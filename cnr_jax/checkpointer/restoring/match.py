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
from cnr_jax.args import Restore
from cnr_jax.checkpointer.restoring.match_tables import MatchedTables, match_tables
from cnr_jax.format.manifest import DenseLeaf, Manifest
from cnr_jax.repository.checked import numpy_dtype
from cnr_jax.repository.replay.leaves import restore_leaves, restore_stamps
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.touched import stamp_sharding
from cnr_jax.state.table import Tables, flatten_paths, merge, nest

_log = logging.getLogger(__name__)
_CAST_HINT = (
    ". Values would change in the dtypes of the state: pass those that were saved (64 bits"
    " need jax_enable_x64), or Restore(..., cast=True) to convert values as astype does"
)
_MOST_HINTS = 4  # of tables that differ alike the first ones say it
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be restored, checked against the checkpoint.

    Attributes:
        tables: those of the state, matched.
        dense: paths to restore, with the abstract leaf.
        texts: strings, by path.
        kept: leaves of the given state that the checkpoint does not hold.
    """

    tables: MatchedTables
    dense: Mapping[Path, Any]
    texts: Mapping[Path, str]
    kept: Mapping[Path, Any]


def match(
    manifest: Manifest, state: Any, tables: Tables, args: Restore, step: str
) -> Wanted:
    """Compares a state with a checkpoint.

    Args:
        manifest: of the checkpoint.
        state: abstract or concrete pytree to restore into.
        tables: where the tables of the checkpoint are in `state`.
        args: what is asked for; its `partial`, `cast`, `rename` and `ids`.
        step: the checkpoint's name, for errors.

    Raises:
        StateMismatchError: with every difference.
    """
    leaves: dict[Path, Any] = dict(flatten_paths(state))
    found = match_tables(manifest.tables, tables, leaves, args)
    problems, casts = found.problems, found.casts
    if not args.cast:
        problems += casts
    dense, texts = _match_dense(manifest.dense_leaves, leaves, problems, args.partial)
    kept = _kept(leaves, problems, args.partial)
    if problems:
        hints = list(dict.fromkeys(found.hints or [_way_out(args.partial)]))
        raise errors.StateMismatchError(
            f"the state does not match checkpoint {step} ({len(problems)} differences)"
            + "".join(f"\n  {problem}" for problem in problems)
            + "".join(f"\n  hint: {hint}" for hint in hints[:_MOST_HINTS])
            + (_CAST_HINT if casts and not args.cast else "")
        )
    if casts:
        _log.warning(
            "tables of checkpoint %s are converted to dtypes that cannot hold all of their"
            " values: %s",
            step,
            "; ".join(casts),
        )
    return Wanted(tables=found, dense=dense, texts=texts, kept=kept)


def _way_out(partial: bool) -> str:
    """What to do about a state that does not match; `partial`: what both have was asked for."""
    if partial:
        return (
            "partial=True leaves alone what only one of both has. What both have must"
            " match: leave such a leaf out of the state, or pass it as it was saved"
        )
    return (
        "pass the state that was saved, or Restore(..., partial=True) to restore what both"
        " have"
    )


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
    tables = wanted.tables
    leaves = [
        (tables.stored[table], leaf, tables.targets[table], abstract)
        for table, leaf, abstract in tables.leaves
    ]
    # What a cast makes of values that do not fit was asked for, and is warned of once.
    with np.errstate(over="ignore", invalid="ignore"):
        arrays = restore_leaves(chain, leaves)
    for (table, leaf, _), array in zip(tables.leaves, arrays, strict=True):
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
    found = wanted.tables
    abstract = {table: array for table, leaf, array in found.leaves if leaf == "table"}
    for name, table in tables.items():
        array = abstract.get(name)
        source = array.sharding if array is not None else table.leaf.sharding
        source = source or SingleDeviceSharding(jax.local_devices()[0])
        shardings[name] = stamp_sharding(source, table.leaf.shape)
        if array is None:
            stamps[name] = np.zeros(table.padded_rows, np.int32)
    names = [name for name in tables if name not in stamps]
    restored = restore_stamps(
        chain, [(found.stored[n], found.targets[n], shardings[n]) for n in names]
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
