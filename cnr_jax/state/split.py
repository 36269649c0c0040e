"""Taking a train state apart into table leaves and the dense rest, and together again.

Every leaf of a state is in exactly one of the two, so that a checkpoint holds all of it, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from cnr_jax.errors import StateMismatchError
from cnr_jax.state.paths import flatten_paths
from cnr_jax.state.table import Leaf, Tables


def split(state: Any, tables: Tables) -> tuple[dict[str, dict[str, Any]], dict]:
    """Takes a state apart into table leaves and the dense rest.

    Args:
        state: a state like the one `tables` was found in, concrete or abstract.
        tables: from `find_tables`.

    Returns:
        `{table: {leaf name: array}}`, and the dense leaves as nested dicts by part
        of their path. Nodes without leaves (`None`, empty tuples) are in neither.

    Raises:
        StateMismatchError: if a table's leaf is missing or has another shape or dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": jnp.zeros((8, 2)), "step": 3}
        >>> leaves, dense = split(state, find_tables(state, ["user"]))
        >>> leaves["user"]["table"].shape, dense
        ((8, 2), {'step': 3})
    """
    leaves = dict(flatten_paths(state))
    rows: dict[str, dict[str, Any]] = {
        name: {leaf.name: _take(leaves, name, leaf) for leaf in table.leaves}
        for name, table in tables.items()
    }
    dense: dict[str, Any] = {}
    for path, value in leaves.items():
        if not path:
            raise StateMismatchError("the state is a single leaf, expected a tree")
        node = dense
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return rows, dense


def _take(leaves: dict[tuple[str, ...], Any], table: str, leaf: Leaf) -> Any:
    where = "/".join(leaf.path)
    if leaf.path not in leaves:
        raise StateMismatchError(
            f"table {table!r}: the state has no leaf {where}\n"
            "  hint: call find_tables again when the model or the optimizer changed."
        )
    value = leaves.pop(leaf.path)
    expected = (leaf.shape, leaf.dtype)
    is_array = isinstance(value, jax.Array | jax.ShapeDtypeStruct)
    if not is_array or (tuple(value.shape), value.dtype) != expected:
        got = f"{type(value).__name__} " * (not is_array)
        if hasattr(value, "dtype"):
            got += f"{value.dtype}{list(value.shape)}"
        raise StateMismatchError(
            f"table {table!r}: leaf {where} is not the array it was found as\n"
            f"  got {got.strip()}, expected {leaf.dtype}{list(leaf.shape)}"
        )
    return value


def merge(
    abstract_state: Any,
    tables: Tables,
    table_leaves: Mapping[str, Mapping[str, Any]],
    dense: Mapping[str, Any],
) -> Any:
    """Puts a state together again: the inverse of `split`.

    Args:
        abstract_state: a state of the wanted structure; its leaves are not used.
        tables: from `find_tables`.
        table_leaves: `{table: {leaf name: value}}`.
        dense: nested dicts by path part.

    Returns:
        A state with the structure of `abstract_state` and the given leaves.

    Raises:
        StateMismatchError: if a leaf of `abstract_state` was not given, or a given leaf
            has no place in it.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": jnp.zeros((8, 2)), "step": 3}
        >>> tables = find_tables(state, ["user"])
        >>> merge(state, tables, *split(state, tables))["step"]
        3
    """
    given = dict(_dense_leaves(abstract_state, dense))
    paths = {(n, leaf.name): leaf.path for n, t in tables.items() for leaf in t.leaves}
    for name, leaves in table_leaves.items():
        for leaf, value in leaves.items():
            given[paths.get((name, leaf), (name, leaf))] = value
    wanted = [path for path, _ in flatten_paths(abstract_state)]
    missing = [path for path in wanted if path not in given]
    extra = set(given) - set(wanted)
    if missing or extra:
        raise StateMismatchError(
            "the leaves given and the abstract state disagree\n"
            f"  missing: {_few(missing)}\n  without a place: {_few(sorted(extra))}"
        )
    treedef = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(treedef, [given[path] for path in wanted])


def _dense_leaves(
    abstract_state: Any, dense: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Lists the dense leaves by path; a value may itself be a mapping or None."""
    ends = {path for path, _ in flatten_paths(abstract_state)}
    pending: list[tuple[tuple[str, ...], Any]] = [((), dense)]
    while pending:
        path, node = pending.pop()
        if path in ends or not isinstance(node, Mapping):
            yield path, node
        else:
            pending += [((*path, str(key)), child) for key, child in node.items()]


def _few(paths: Sequence[tuple[str, ...]]) -> str:
    shown = [f"{'/'.join(path)}" for path in paths[:4]]
    return (
        ", ".join(shown + [f"and {len(paths) - 4} more"] * (len(paths) > 4)) or "none"
    )
