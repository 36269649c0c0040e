"""Single leaves, as Orbax wants them described, and as it restores them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.repository.replay.dense_tiles import fallback_sharding
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.state.table import flatten_paths


def abstract_dense(leaf: Any) -> Any:
    """A dense leaf as Orbax wants it described: arrays abstract, other leaves as they are."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        # `jax.eval_shape` gives no sharding, and the devices of the saving run may not be here.
        where = fallback_sharding()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return leaf


def leaf_metadata(
    path: tuple[str, ...], kind: str, shape: tuple[int, ...], dtype: str
) -> ocp.metadata.value.Metadata:
    """Orbax's metadata of a leaf that a manifest lists, in a table or dense.

    A key has the dtype that keys of its kind have in a state.
    """
    metadata, name = ocp.metadata.value, "/".join(path)
    if kind == "text":
        return metadata.StringMetadata(name=name, directory=None)
    if kind == "scalar":
        found = numpy_dtype(dtype)
        return metadata.ScalarMetadata(name=name, directory=None, dtype=found)
    if kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=dtype))
        found: Any = key.dtype
    else:
        found = numpy_dtype(dtype)
    return metadata.ArrayMetadata(
        name=name, directory=None, shape=shape, sharding=None, dtype=found
    )


def as_stored(stored: ocp.metadata.value.Metadata) -> ocp.RestoreArgs:
    """Arguments by which Orbax restores a leaf as it is stored, with all of its values.

    An array stays one of jax or numpy. One of jax comes on one device, or is replicated on all
    devices of several processes. One of 64 bits becomes one of numpy if jax has only 32.
    """
    if isinstance(stored, ocp.metadata.value.StringMetadata):
        return ocp.RestoreArgs(restore_type=str)
    if isinstance(stored, ocp.metadata.value.ScalarMetadata):
        return ocp.RestoreArgs()
    dtype = getattr(stored, "dtype", None)
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    # Arrays of numpy are stored without a sharding. Orbax knows the types of other such leaves.
    kind = jax.Array if getattr(stored, "sharding", None) is not None else None
    where = fallback_sharding()
    return ocp.ArrayRestoreArgs(restore_type=kind, sharding=where, dtype=dtype)


def restored(handler: Any, path: Any, item: Any, asked: Any, **kwargs: Any) -> Any:
    """Has Orbax restore leaves, and checks that they have the dtypes that were asked for.

    Args:
        handler: handler of Orbax.
        path: path that it reads.
        item: tree of the structure to restore; None: the structure that is stored.
        asked: `RestoreArgs` for each leaf.
        **kwargs: further arguments of `PyTreeRestore`.

    Raises:
        StateMismatchError: if jax has cut 64 bits to 32.
    """
    args = ocp.args.PyTreeRestore(item=item, restore_args=asked, **kwargs)
    found = handler.restore(path, args=args)
    dtypes = {p: getattr(each, "dtype", None) for p, each in flatten_paths(asked)}
    for leaf, value in flatten_paths(found):
        dtype = dtypes.get(leaf) if isinstance(value, jax.Array) else None
        if dtype is None or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            continue
        if jax.dtypes.canonicalize_dtype(dtype) != value.dtype:
            # If an event loop is running, as in a notebook, Orbax restores in another thread.
            raise errors.StateMismatchError(
                f"{'/'.join(leaf)}: got {value.dtype}, expected {np.dtype(dtype)}: jax_enable_x64"
                " is set for this thread, and Orbax has restored in another\n"
                '  hint: jax.config.update("jax_enable_x64", True), for all threads'
            )
    return found
