"""Dense leaves that Orbax has written, as it did until steps stored them as tiles."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.places import DensePath
from cnr_jax.format import names
from cnr_jax.format.manifest import DenseLeaf
from cnr_jax.repository.store import AnyPath, exists
from cnr_jax.repository.store.checked import Seal, kind_of, means_damage, numpy_dtype
from cnr_jax.rows.tiling import host_device
from cnr_jax.state.table import Path, flatten_paths, nest


def _standard_handler() -> Any:
    """Orbax's handler of a tree of arrays and numbers, for reading.

    With a registry of its own: what a program registers for its types is not asked.
    """
    types = ocp.type_handlers
    kinds = (int, float, np.number, np.ndarray, jax.Array)
    known = [(kind, types.get_type_handler(kind)) for kind in kinds]
    registry = types.create_type_handler_registry(*known)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class DenseStore:
    """Reads dense leaves that Orbax has written, below the item."""

    def __init__(self) -> None:
        self._handler = _standard_handler()

    def restore(self, directory: AnyPath, abstract: Mapping[str, Any] | None) -> Any:
        """Restores the leaves of `abstract`, or for None all of them, as `as_stored` says."""
        path: Any = DensePath(directory / names.DENSE)
        handler = self._handler
        if abstract is None:
            if not exists(path):
                return {}
            asked = jax.tree.map(as_stored, handler.metadata(path).tree)
            return restored(handler, path, None, asked)
        if not abstract:
            return {}
        # Leaves that are stored but not asked for are left out, which a standard handler
        # refuses. Shapes may not differ: they are compared before.
        item = dict(abstract)
        asked = ocp.checkpoint_utils.construct_restore_args(item)
        return restored(handler, path, item, asked, partial_restore=True)

    def restore_sealed(
        self, directory: AnyPath, leaves: Mapping[Path, Any] | None, seal: Seal | None
    ) -> Any:
        """Restores leaves from files that were checked, if these are still the same.

        Args:
            directory: of the item.
            leaves: what to restore, by path; None: all of them, on one device.
            seal: of the files; None: they were not checked, and nothing is wanted of them.

        Raises:
            IntegrityError: if the files have changed, or Orbax cannot read them though they
                are as they were saved.
        """
        if seal is None or not seal.manifest.dense_files:
            return {}  # whatever somebody has put there
        abstract = None
        if leaves is not None:
            abstract = nest(
                (path, abstract_dense(leaf)) for path, leaf in leaves.items()
            )
        with self._reading(directory, seal, is_asked=leaves is not None):
            return self.restore(directory, abstract)

    def numbers(
        self, directory: AnyPath, leaves: Sequence[DenseLeaf], seal: Seal | None
    ) -> dict[Path, bool | int | float]:
        """Numbers of Python as they were saved; as `restore_sealed`."""
        if seal is None or not leaves:
            return {}
        store = DenseOnHost(directory, leaves, sys.maxsize)
        with self._reading(directory, seal, is_asked=False):
            return {leaf.path: store.read(leaf.path) for leaf in leaves}

    @contextlib.contextmanager
    def _reading(
        self, directory: AnyPath, seal: Seal, *, is_asked: bool
    ) -> Iterator[None]:
        """Checks the files after they were read; tells what Orbax raises as what it means.

        Args:
            directory: of the item.
            seal: of the files.
            is_asked: an error may be due to what was asked for.
        """
        try:
            yield
        except Exception as error:
            seal.check()  # if it raises, it says why
            if not means_damage(error) or (is_asked and self._can_be_read(directory)):
                raise
            where = os.fspath(directory / names.DENSE)
            raise errors.IntegrityError(
                f"{where} cannot be read, though its files are those that were saved\n"
                f"  {type(error).__name__}: {error}",
                kind=kind_of(error, "dense_unreadable"),
                path=where,
            ) from error
        seal.check()

    def _can_be_read(self, directory: AnyPath) -> bool:
        """Whether what Orbax cannot do is due to what was asked for, such as a sharding."""
        try:
            self.restore(directory, None)
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Frees what the handler holds."""
        self._handler.close()


class DenseOnHost:
    """Dense leaves of a step as they were saved, on the host, a few at a time.

    Args:
        directory: of the item.
        leaves: that are asked for, in the order in which they will be.
        group_bytes: of leaves that are read in one call; one that has more is read alone.
    """

    def __init__(
        self, directory: AnyPath, leaves: Sequence[DenseLeaf], group_bytes: int
    ) -> None:
        self._path: Any = DensePath(directory / names.DENSE)
        self._leaves, self._group_bytes = leaves, group_bytes
        self._held: dict[Path, Any] = {}

    def read(self, path: Path) -> Any:
        """One leaf: a numpy array, a number, or keys on the CPU. Frees those read before.

        Raises:
            Exception: of Orbax, if its files cannot be read.
        """
        if path not in self._held:
            self._held = self._read(path)
        return self._held[path]

    def _read(self, first: Path) -> dict[Path, Any]:
        at = next(i for i, leaf in enumerate(self._leaves) if leaf.path == first)
        nbytes, wanted, asked = 0, {}, {}
        for leaf in self._leaves[at:]:
            dtype = numpy_dtype("uint8" if leaf.kind == "key" else leaf.dtype)
            nbytes += math.prod(leaf.shape) * dtype.itemsize
            if wanted and nbytes > self._group_bytes:
                break
            wanted[leaf.path], asked[leaf.path] = _on_host(leaf)
        args = ocp.args.PyTreeRestore(
            item=nest(wanted.items()),
            restore_args=nest(asked.items()),
            partial_restore=True,
        )
        handler = _standard_handler()
        try:
            return dict(flatten_paths(handler.restore(self._path, args=args)))
        finally:
            handler.close()


def _on_host(leaf: DenseLeaf) -> tuple[Any, ocp.RestoreArgs]:
    """What Orbax is to restore a leaf into, and how, so that no accelerator holds it."""
    if leaf.kind == "scalar":
        return 0, ocp.RestoreArgs()
    if leaf.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.dtype))
        where = jax.sharding.SingleDeviceSharding(host_device())
        return key, ocp.ArrayRestoreArgs(sharding=where)
    return np.empty(0), ocp.RestoreArgs(restore_type=np.ndarray)


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
    """How Orbax restores a leaf of which nothing is said: with all of its values.

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


def fallback_sharding() -> jax.sharding.Sharding:
    """Where leaves go of which nothing says where: one device, or all of several processes."""
    if jax.process_count() == 1:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
