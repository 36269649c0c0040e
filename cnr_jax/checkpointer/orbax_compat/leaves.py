"""How Orbax is told of single leaves, and what it says of them."""

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
    """A dense leaf as Orbax wants to be told of it: abstract arrays, other leaves as is."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        # As `jax.eval_shape` makes them: the devices of the saving run may not be here.
        where = fallback_sharding()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return leaf


def leaf_metadata(
    path: tuple[str, ...], kind: str, shape: tuple[int, ...], dtype: str
) -> ocp.metadata.value.Metadata:
    """What Orbax's metadata are of a leaf of a manifest, of a table or dense.

    Of a key the dtype is that of keys of its kind, as a state has them.
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
    """How Orbax restores a leaf that nothing is said of: with all of its values.

    As an array of jax or numpy, as it was; of jax on one device, or replicated on all of several
    processes; of 64 bits, where jax has only 32, of numpy.
    """
    if isinstance(stored, ocp.metadata.value.StringMetadata):
        return ocp.RestoreArgs(restore_type=str)
    if isinstance(stored, ocp.metadata.value.ScalarMetadata):
        return ocp.RestoreArgs()
    dtype = getattr(stored, "dtype", None)
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    # Of numpy's arrays no sharding is stored; what else has none, Orbax knows the type of.
    kind = jax.Array if getattr(stored, "sharding", None) is not None else None
    where = fallback_sharding()
    return ocp.ArrayRestoreArgs(restore_type=kind, sharding=where, dtype=dtype)


def restored(handler: Any, path: Any, item: Any, asked: Any, **kwargs: Any) -> Any:
    """What Orbax restores, in the dtypes that were asked for.

    Args:
        handler: of Orbax.
        path: that it reads.
        item: gives the structure; None: as it is stored.
        asked: `RestoreArgs` for each leaf.
        **kwargs: of `PyTreeRestore`.

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
            # Where an event loop runs, as in a notebook, Orbax restores in another thread.
            raise errors.StateMismatchError(
                f"{'/'.join(leaf)}: got {value.dtype}, expected {np.dtype(dtype)}: jax_enable_x64"
                " is set for this thread, and Orbax has restored in another\n"
                '  hint: jax.config.update("jax_enable_x64", True), for all threads'
            )
    return found
