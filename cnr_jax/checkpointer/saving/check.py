"""All that one process can find wrong with a train state alone, before anything is decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.core import Tracer

from cnr_jax import errors
from cnr_jax.args import NOT_IN_JIT
from cnr_jax.checkpointer.describe import dense_leaves
from cnr_jax.format.manifest import DenseLeaf, Tracking
from cnr_jax.rows.touched import Touched
from cnr_jax.state.split import split
from cnr_jax.state.table import Tables


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedState:
    """A train state that can be saved, split.

    Attributes:
        arrays: tables and their slots, by table and leaf.
        dense: everything else, as nested dicts.
        dense_leaves: how the manifest describes that.
    """

    arrays: dict[str, dict[str, jax.Array]]
    dense: dict[str, Any]
    dense_leaves: tuple[DenseLeaf, ...]


def check(
    state: Any, touched: Touched | None, tables: Tables, tracking: Tracking
) -> CheckedState:
    """All checks of form that a process can do alone, before anything is decided or written.

    Raises:
        StateMismatchError, TouchedError, TableError: if the state cannot be saved.
    """
    if isinstance(state, Touched):
        raise errors.StateMismatchError(
            "the state is Touched: it and the touched rows are swapped\n"
            "  hint: cnr_jax.args.Save(state, touched)"
        )
    if isinstance(state, tuple | list) and touched is None:
        both = cast("Sequence[Any]", state)
        if len(both) == 2 and isinstance(both[1], Touched):
            raise errors.StateMismatchError(
                f"the state is a {type(state).__name__} of a state and touched rows\n"
                "  hint: pass the two, cnr_jax.args.Save(state, touched); of what restore"
                " returned, Save(*restored)"
            )
    _check_alive(state, "state")
    arrays, dense = split(state, tables)
    leaves = dense_leaves(dense)
    if tracking != "fingerprint":
        if touched is None:
            raise errors.TouchedError(
                f"a run with tracking={tracking!r} cannot be saved without touched rows\n"
                "  hint: cnr.args.Save(state, touched), with touched from init_touched or"
                " a restore; or Options(tracking='fingerprint'), which needs none"
            )
        _check_alive(touched, "touched")
        _check_touched(touched, tables)
    return CheckedState(arrays=arrays, dense=dense, dense_leaves=leaves)


def is_alive(tree: Any) -> bool:
    """Whether all leaves are arrays that hold something, none donated or being traced."""
    return all(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and not leaf.is_deleted()
        for leaf in jax.tree_util.tree_leaves(tree)
    )


def check_concrete(state: Any, touched: Any) -> None:
    """Checks that there are values to be saved.

    Raises:
        StateMismatchError, TouchedError: if there are tracers, inside `jax.jit`.
    """
    for tree, what, kind in (
        (state, "state", errors.StateMismatchError),
        (touched, "touched", errors.TouchedError),
    ):
        # Paths are slow to make, and only needed for the message.
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, Tracer):
                raise kind(
                    f"{what}{jax.tree_util.keystr(path)} is a tracer, which has no value"
                    f" to save\n{NOT_IN_JIT}"
                )


def _check_alive(tree: Any, what: str) -> None:
    """Checks that no array was donated: saving it would fail halfway."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise errors.StateMismatchError(
                f"{what}{jax.tree_util.keystr(path)} was donated to a computation\n"
                "  hint: save what the train step returned, not what it was given"
            )


def _check_touched(touched: Touched, tables: Tables) -> None:
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
