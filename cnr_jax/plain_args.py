"""Orbax's own restore arguments for a train state, taken where a restore can do what they ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.state.table import Path, flatten_paths, key_strings

RESTORE = "cnr_jax.args.Restore(state)"
# Orbax's own arguments for whole states.
STATES_SAVED = ocp.args.StandardSave, ocp.args.PyTreeSave
STATES_RESTORED = ocp.args.StandardRestore, ocp.args.PyTreeRestore


def state_of_pytree(asked: ocp.args.PyTreeRestore) -> tuple[Any, bool]:
    """Returns the state that `PyTreeRestore` asks for, and whether it is a part of what is stored.

    Raises:
        OptionError: if it asks for something that a restore of a state cannot do.
    """
    is_part = asked.transforms == {} and asked.transforms_default_to_original
    if (asked.transforms is not None and not is_part) or asked.legacy_transform_fn:
        raise not_taken(
            "PyTreeRestore",
            "its transforms",
            "cnr_jax.args.Restore(state, partial=True, rename=...)",
        )
    state = asked.item
    if asked.restore_args is not None:
        given: dict[Path, Any] = dict(flatten_paths(asked.restore_args))
        state = asked.restore_args if state is None else state
        if not all(path in given for path, _ in flatten_paths(state)):
            what = "restore_args of another structure than its item"
            raise not_taken("PyTreeRestore", what, RESTORE)
        state = jax.tree_util.tree_map_with_path(
            lambda keys, leaf: _as_restored(leaf, given[key_strings(keys)]), state
        )
    elif state is not None:
        state = jax.tree.map(_as_given, state)
    return state, is_part or bool(asked.partial_restore)


@dataclasses.dataclass(frozen=True, slots=True)
class AsStored:
    """A leaf that takes its shape from the checkpoint, as `PyTreeRestore` allows.

    Attributes:
        dtype: dtype to restore it in; None: the stored one.
        sharding: sharding to restore it with; None: one device.
        shape: shape that it has to have, if that is known.
        on_host: whether to restore it as an array of numpy.
    """

    dtype: Any = None
    sharding: jax.sharding.Sharding | None = None
    shape: tuple[int, ...] | None = None
    on_host: bool = False

    def like(self, stored: ocp.metadata.value.Metadata | None) -> Any:
        """The abstract leaf, with the stored shape and dtype where none is asked for.

        Args:
            stored: Orbax's metadata of the leaf; None: there is none, and the result is refused.
        """
        if isinstance(stored, ocp.metadata.value.StringMetadata):
            return ""
        if isinstance(stored, ocp.metadata.value.ScalarMetadata):
            return np.zeros((), stored.dtype).item()
        if not isinstance(stored, ocp.metadata.value.ArrayMetadata):
            return jax.ShapeDtypeStruct((), np.float32)
        shape, dtype = stored.shape, stored.dtype
        if _is_key(dtype):
            return jax.ShapeDtypeStruct(shape, dtype)
        dtype = dtype if self.dtype is None else self.dtype
        shape = shape if self.shape is None else self.shape
        if self.on_host:
            return np.broadcast_to(np.zeros((), dtype), shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)


def with_stored_shapes(state: Any, stored: Callable[[], Mapping[Path, Any]]) -> Any:
    """Gives leaves `AsStored` of a state the shapes and dtypes of a checkpoint.

    Args:
        state: state that is asked for.
        stored: function that reads Orbax's metadata of each leaf of the checkpoint, by path; it is
            called only if it is needed.
    """
    if not any(isinstance(leaf, AsStored) for leaf in jax.tree.leaves(state)):
        return state
    found = stored()
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: (
            leaf.like(found.get(key_strings(keys)))
            if isinstance(leaf, AsStored)
            else leaf
        ),
        state,
    )


def _has_shape(leaf: Any) -> bool:
    if isinstance(leaf, ocp.RestoreArgs):
        return False  # these are arguments, and no leaf
    return all(getattr(leaf, name, None) is not None for name in ("shape", "dtype"))


def _as_given(leaf: Any) -> Any:
    """A leaf of an item without restore arguments; `AsStored` if it says no shape."""
    if leaf is ocp.PLACEHOLDER:
        hint = "cnr_jax.args.Restore(state, partial=True), and a state without these leaves"
        raise not_taken("PyTreeRestore", "placeholders", hint)
    is_number_or_text = isinstance(leaf, bool | int | float | str)
    return leaf if _has_shape(leaf) or is_number_or_text else AsStored()


def _as_restored(leaf: Any, asked: ocp.RestoreArgs) -> Any:
    """A leaf of a state with the dtype and sharding that Orbax's arguments give it."""
    kind, dtype = asked.restore_type, asked.dtype
    if kind in (bool, int, float, str):
        return leaf if isinstance(leaf, kind) else kind()
    leaf = _as_given(leaf)
    if _has_shape(leaf) and _is_key(leaf.dtype):
        return leaf  # the arguments are those of its data
    if kind is np.ndarray and not _has_shape(leaf):
        return AsStored(dtype, on_host=True)
    if kind not in (None, jax.Array) and not isinstance(leaf, kind):
        raise not_taken("PyTreeRestore", f"restore_type={kind!r}", RESTORE)
    if kind is not jax.Array and dtype is None and _has_shape(leaf):
        return leaf
    if kind is not jax.Array and isinstance(leaf, np.ndarray):
        return leaf.astype(dtype)
    where: Any = getattr(asked, "sharding", None)
    mesh: Any = getattr(asked, "mesh", None)
    if where is None and mesh is not None:
        where = jax.NamedSharding(mesh, getattr(asked, "mesh_axes", None) or jax.P())
    where = getattr(leaf, "sharding", None) if where is None else where
    if where is not None and not isinstance(where, jax.sharding.Sharding):
        raise not_taken("PyTreeRestore", f"sharding={where!r}", RESTORE)
    shape = getattr(asked, "global_shape", None)
    if not _has_shape(leaf):
        return AsStored(dtype, where, shape)
    shape = leaf.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, dtype or leaf.dtype, sharding=where)


def _is_key(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def not_taken(name: str, what: str, hint: str) -> errors.OptionError:
    """Error that says by what a state is not restored, and by what it is."""
    with_what = f" with {what}" if what else ""
    return errors.OptionError(
        f"a state that cnr_jax saved is not restored by {name}{with_what}\n"
        f"  hint: args={hint}; shapes, dtypes and shardings are those of the state's leaves"
    )


def name_of(args: Any) -> str:
    """Name of a class of arguments, as users write it."""
    return type(args).__name__.removesuffix("Args")
