"""What Orbax's own arguments ask for of a train state: taken where a restore can do it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax import errors

RESTORE = "cnr_jax.args.Restore(state)"
# Of Orbax's own arguments those for whole states.
STATES_SAVED = ocp.args.StandardSave, ocp.args.PyTreeSave
STATES_RESTORED = ocp.args.StandardRestore, ocp.args.PyTreeRestore


def state_of_pytree(asked: ocp.args.PyTreeRestore) -> tuple[Any, bool]:
    """The state that `PyTreeRestore` asks for, and whether for a part of what is stored.

    Raises:
        OptionError: if it asks for what is no part of a state.
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
        try:
            state = jax.tree.map(_as_restored, state, asked.restore_args)
        except errors.OptionError:
            raise
        except ValueError as error:
            what = "restore_args of another structure than its item"
            raise not_taken("PyTreeRestore", what, RESTORE) from error
    return state, is_part or bool(asked.partial_restore)


def _as_restored(leaf: Any, asked: ocp.RestoreArgs) -> Any:
    """A leaf of a state with the dtype and sharding that Orbax's arguments give it."""
    kind, dtype = asked.restore_type, asked.dtype
    if kind not in (None, jax.Array) and not isinstance(leaf, kind):
        raise not_taken("PyTreeRestore", f"restore_type={kind!r}", RESTORE)
    if (kind is not jax.Array and dtype is None) or not hasattr(leaf, "dtype"):
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
    shape = getattr(asked, "global_shape", None) or leaf.shape
    return jax.ShapeDtypeStruct(shape, dtype or leaf.dtype, sharding=where)


def not_taken(name: str, what: str, hint: str) -> errors.OptionError:
    """The error that says that a state is not restored so, and by what it is."""
    with_what = f" with {what}" if what else ""
    return errors.OptionError(
        f"a state that cnr_jax saved is not restored by {name}{with_what}\n"
        f"  hint: args={hint}; shapes, dtypes and shardings are those of the state's leaves"
    )


def name_of(args: Any) -> str:
    """What a user calls the class of arguments."""
    return type(args).__name__.removesuffix("Args")
