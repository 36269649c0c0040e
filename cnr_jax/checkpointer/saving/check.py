"""Checks of a train state that is to be saved, and its description for the manifest.

The checks are all those that a process can make alone, before anything is decided.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from cnr_jax import errors
from cnr_jax.format.manifest import (
    DenseLeaf,
    LeafEntry,
    NamedConfiguration,
    TableEntry,
    Tracking,
)
from cnr_jax.integers import NOT_IN_JIT
from cnr_jax.repository.store.plain_arrays import zarr_holds
from cnr_jax.rows.tiling import Arrays
from cnr_jax.rows.touched import Touched
from cnr_jax.state.structure import Form, differences
from cnr_jax.state.table import Path, Tables, flatten_paths, split
from cnr_jax.texts import count_of


def check(
    state: Any, touched: Touched | None, tables: Tables, tracking: Tracking
) -> tuple[Arrays, list[tuple[DenseLeaf, Any]]]:
    """Checks the form of a state and its touched rows, before anything is decided or written.

    Returns:
        Tables and their slots, by table and leaf; and the dense leaves in the order of the tree,
        each as the manifest describes it, with its value.

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
    of_dense = flatten_paths(dense)
    leaves = dense_leaves(of_dense)
    if tables.forms is not None:
        _check_structure(of_dense, tables.forms)
    values = [value for _, value in of_dense]
    if tracking != "fingerprint":
        if touched is None:
            raise errors.TouchedError(
                f"a run with tracking={tracking!r} cannot be saved without touched rows\n"
                "  hint: cnr.args.Save(state, touched), with touched from init_touched or"
                " a restore; or Options(tracking='fingerprint'), which needs none"
            )
        _check_alive(touched, "touched")
        _check_touched(touched, tables)
    return arrays, list(zip(leaves, values, strict=True))


def _check_structure(
    dense: Sequence[tuple[Path, Any]], forms: Mapping[Path, Form]
) -> None:
    """Checks that the dense leaves are those of the state in which the tables were found.

    Raises:
        StateMismatchError: if they are not; names each that is missing, new, or of another shape
            or dtype.
    """
    problems = differences(forms, dense)
    if problems:
        raise errors.StateMismatchError(
            "the state does not have the structure in which the tables were found"
            f" ({count_of(len(problems), 'difference')})\n  "
            + "\n  ".join(problems)
            + "\n  hint: save what the train step returns, whole; where the model or the"
            " optimizer changed, make a manager with find_tables of the new state"
        )


def check_concrete(state: Any, touched: Any) -> None:
    """Checks that a state and its touched rows have values that can be saved.

    Raises:
        StateMismatchError, TouchedError: if one has tracers, as inside `jax.jit`.
    """
    for tree, what, kind in (
        (state, "state", errors.StateMismatchError),
        (touched, "touched", errors.TouchedError),
    ):
        # Paths are slow to make, and needed only for the message.
        if not [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Tracer)]:
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, Tracer):
                raise kind(
                    f"{what}{jax.tree_util.keystr(path)} is a tracer, which has no value"
                    f" to save\n{NOT_IN_JIT}"
                )


def _check_alive(tree: Any, what: str) -> None:
    """Checks that no array was donated; to save such an array would fail halfway.

    Raises:
        StateMismatchError: if one was; names the first.
    """
    leaves = jax.tree.leaves(tree)
    if not [x for x in leaves if isinstance(x, jax.Array) and x.is_deleted()]:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise errors.StateMismatchError(
                f"{what}{jax.tree_util.keystr(path)} was donated to a computation\n"
                "  hint: save what the train step returned, not what it was given"
            )


def _check_touched(touched: Touched, tables: Tables) -> None:
    """Checks that `touched` was made for these tables.

    Raises:
        TouchedError: if it was not; names tables that are missing, unknown, or of another layout.
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


def table_entries(tables: Tables) -> tuple[TableEntry, ...]:
    """Entries of the tables, as a manifest lists them."""
    return tuple(
        TableEntry(
            name=table.name,
            rows=table.rows,
            padded_rows=table.padded_rows,
            layout=NamedConfiguration(
                name=table.layout.name, configuration=table.layout.configuration()
            ),
            leaves=tuple(
                LeafEntry(
                    name=leaf.name,
                    path=leaf.path,
                    shape=leaf.shape,
                    dtype=leaf.dtype.name,
                )
                for leaf in table.leaves
            ),
        )
        for table in tables.values()
    )


def dense_leaves(dense: Sequence[tuple[Path, Any]]) -> tuple[DenseLeaf, ...]:
    """Describes every dense leaf, for the manifest.

    Args:
        dense: path and value of each leaf.

    Raises:
        StateMismatchError: if a leaf is of a kind that cannot be saved.
    """
    return tuple(_dense_leaf(path, leaf) for path, leaf in dense)


@functools.lru_cache(maxsize=1 << 14)
def _array_leaf(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, is_numpy: bool | None
) -> DenseLeaf | None:
    """Describes an array, for the manifest; None if zarr has no such dtype.

    Cached, as the description is the same in each save.
    """
    if not zarr_holds(dtype):
        return None
    return DenseLeaf(
        path=path, kind="array", shape=shape, dtype=dtype.name, numpy=is_numpy
    )


def _dense_leaf(path: tuple[str, ...], leaf: Any) -> DenseLeaf:
    if isinstance(leaf, str):
        return DenseLeaf(path=path, kind="text", shape=(), dtype="str", value=leaf)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and 0 in leaf.shape:
        raise errors.StateMismatchError(
            f"leaf {'/'.join(path)} of the state cannot be saved\n"
            f"  got {leaf.dtype.name}{list(leaf.shape)}, expected an array with elements:"
            " plain Orbax, for which a step may be exported, has no empty ones"
        )
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        name = str(jax.random.key_impl(leaf))
        return DenseLeaf(path=path, kind="key", shape=leaf.shape, dtype=name)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        is_numpy = None if isinstance(leaf, jax.Array) else True
        if found := _array_leaf(path, leaf.shape, np.dtype(leaf.dtype), is_numpy):
            return found
    elif isinstance(leaf, (bool, int, float)):
        # A number of a subclass, such as of an enumeration, is saved as the plain number.
        name = next(t.__name__ for t in (bool, int, float) if isinstance(leaf, t))
        if not isinstance(leaf, int) or -(2**63) <= leaf < 2**64:
            return DenseLeaf(path=path, kind="scalar", shape=(), dtype=name)
        raise errors.StateMismatchError(
            f"leaf {'/'.join(path)} of the state cannot be saved\n"
            f"  got an integer of {leaf.bit_length()} bits, expected -2**63 to 2**64 - 1\n"
            "  hint: save it as a string"
        )
    got = type(leaf).__name__
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        got = f"{got} of {leaf.dtype}"
    raise errors.StateMismatchError(
        f"leaf {'/'.join(path)} of the state cannot be saved\n"
        f"  got {got}, expected an array, a number, a PRNG key or a string"
    )
