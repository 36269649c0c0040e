"""States and tables made from a manifest, for a restore without a state or without tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.leaves import leaf_metadata
from cnr_jax.format.manifest import DenseLeaf, Manifest
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.state.layouts import Identity, layout_from
from cnr_jax.state.table import Leaf, Table, Tables, flatten_paths, nest

Path = tuple[str, ...]


def tables_of(manifest: Manifest) -> Tables:
    """Tables of a checkpoint, on one device."""
    where = SingleDeviceSharding(jax.local_devices()[0])
    found: dict[str, Table] = {}
    for entry in manifest.tables:
        leaf, *slots = (
            Leaf(
                name=leaf.name,
                path=leaf.path,
                shape=leaf.shape,
                dtype=numpy_dtype(leaf.dtype),
                sharding=where,
            )
            for leaf in entry.leaves
        )
        found[entry.name] = Table(
            name=entry.name,
            leaf=leaf,
            slots=tuple(slots),
            rows=entry.rows,
            layout=layout_from(entry.layout.name, entry.layout.configuration),
        )
    return Tables(found, [leaf.path for leaf in manifest.dense_leaves])


def tables_in(manifest: Manifest, state: Any) -> Tables:
    """Tables of a checkpoint that a state has, at the paths at which they were saved.

    They have all stored rows, with padding, or only the rows without it, as the state does.

    Raises:
        StateMismatchError: if a leaf of a table is not an array in the state.
    """
    leaves: dict[Path, Any] = dict(flatten_paths(state))
    found: dict[str, Table] = {}
    for name, table in tables_of(manifest).items():
        given = {x.path: leaves[x.path] for x in table.leaves if x.path in leaves}
        for path, value in given.items():
            if not (hasattr(value, "shape") and hasattr(value, "dtype")):
                raise errors.StateMismatchError(
                    f"{'/'.join(path)}: rows of a table in the checkpoint,"
                    f" {type(value).__name__} in the state\n"
                    "  hint: pass an array, or jax.ShapeDtypeStruct(shape, dtype), such as"
                    " item_metadata(step) tells"
                )
        rows = {value.shape[:1] for value in given.values()}
        if table.layout == Identity() and rows == {(table.rows,)}:
            leaf, *slots = (
                dataclasses.replace(each, shape=(table.rows, *each.shape[1:]))
                for each in table.leaves
            )
            table = dataclasses.replace(table, leaf=leaf, slots=tuple(slots))
        if given:
            found[name] = table
    return Tables(found, [leaf.path for leaf in manifest.dense_leaves])


def leaves_of(manifest: Manifest) -> dict[Path, Any]:
    """Orbax's metadata of each leaf of a state, by path: its shape and dtype."""
    found: dict[Path, Any] = {
        leaf.path: leaf_metadata(leaf.path, "array", leaf.shape, leaf.dtype)
        for table in manifest.tables
        for leaf in table.leaves
    }
    for leaf in manifest.dense_leaves:
        found[leaf.path] = leaf_metadata(leaf.path, leaf.kind, leaf.shape, leaf.dtype)
    return found


def metadata_of(manifest: Manifest) -> dict[str, Any]:
    """Orbax's metadata of a state: nested dicts with a shape and a dtype for each leaf."""
    return nest(leaves_of(manifest).items())


def abstract_state(manifest: Manifest, tables: Tables) -> dict[str, Any]:
    """Abstract state of everything in a checkpoint, as nested dicts by path."""
    leaves: dict[Path, Any] = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for table in tables.values()
        for leaf in table.leaves
    }
    for leaf in manifest.dense_leaves:
        leaves[leaf.path] = _stand_in(leaf)
    return nest(leaves.items())


def _stand_in(leaf: DenseLeaf) -> Any:
    """Placeholder with a dense leaf's shape and kind; the leaf itself takes its place."""
    if leaf.kind == "text":
        return leaf.value
    if leaf.kind == "key":
        return jax.ShapeDtypeStruct(leaf.shape, jax.random.key(0).dtype)
    # An abstract array takes no memory, whatever shape the manifest names: its files may hold less.
    return jax.ShapeDtypeStruct(leaf.shape, np.float32)
