"""What a manifest says of a train state: its tables, and the leaves that belong to none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax import errors
from cnr_jax.format.manifest import (
    DenseLeaf,
    LeafEntry,
    NamedConfiguration,
    TableEntry,
)
from cnr_jax.state.paths import flatten_paths
from cnr_jax.state.table import Leaf, Tables


def table_entries(tables: Tables) -> tuple[TableEntry, ...]:
    """The tables as a manifest lists them."""
    return tuple(
        TableEntry(
            name=table.name,
            rows=table.rows,
            padded_rows=table.padded_rows,
            layout=NamedConfiguration(
                name=table.layout.name, configuration=table.layout.configuration()
            ),
            leaves=tuple(_leaf_entry(leaf) for leaf in table.leaves),
        )
        for table in tables.values()
    )


def _leaf_entry(leaf: Leaf) -> LeafEntry:
    return LeafEntry(
        name=leaf.name, path=leaf.path, shape=leaf.shape, dtype=leaf.dtype.name
    )


def dense_leaves(dense: Mapping[str, Any]) -> tuple[DenseLeaf, ...]:
    """Describes every leaf that is not part of a table.

    Raises:
        StateMismatchError: if one is of a kind that cannot be saved.
    """
    return tuple(_dense_leaf(path, leaf) for path, leaf in flatten_paths(dense))


def _dense_leaf(path: tuple[str, ...], leaf: Any) -> DenseLeaf:
    if isinstance(leaf, str):
        return DenseLeaf(path=path, kind="text", shape=(), dtype="str", value=leaf)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        name = str(jax.random.key_impl(leaf))
        return DenseLeaf(path=path, kind="key", shape=leaf.shape, dtype=name)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        name = np.dtype(leaf.dtype).name
        if 0 in leaf.shape:
            raise errors.StateMismatchError(
                f"leaf {'/'.join(path)} of the state cannot be saved\n"
                f"  got {name}{list(leaf.shape)}, expected an array with elements:"
                " Orbax saves no empty ones"
            )
        if np.dtype(leaf.dtype).kind not in "OSUMm":
            return DenseLeaf(path=path, kind="array", shape=leaf.shape, dtype=name)
    elif isinstance(leaf, (bool, int, float)):
        name = type(leaf).__name__
        return DenseLeaf(path=path, kind="scalar", shape=(), dtype=name)
    raise errors.StateMismatchError(
        f"leaf {'/'.join(path)} of the state cannot be saved\n"
        f"  got {type(leaf).__name__}, expected an array, a number, a PRNG key or a string"
    )


def without_texts(dense: Mapping[str, Any]) -> dict[str, Any]:
    """The dense leaves that Orbax stores: all but strings, which the manifest holds."""
    found: dict[str, Any] = {}
    for key, value in dense.items():
        if isinstance(value, Mapping):
            inner = without_texts(value)
            if inner:
                found[key] = inner
        elif not isinstance(value, str):
            found[key] = value
    return found


def full_fp32_bytes(tables: Tables, dense: Sequence[DenseLeaf]) -> int:
    """Bytes of a plain full save: tables in float32, slots and dense leaves as they are."""
    size = 0
    for table in tables.values():
        size += int(np.prod(table.leaf.shape, dtype=np.int64)) * 4
        size += sum(slot.nbytes for slot in table.slots)
    for leaf in dense:
        if leaf.kind == "array":
            size += int(np.prod(leaf.shape, dtype=np.int64)) * _itemsize(leaf.dtype)
    return size


def _itemsize(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize
