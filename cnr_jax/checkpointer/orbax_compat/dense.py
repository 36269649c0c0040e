"""Everything that is not a table, through Orbax's own handler."""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.places import DensePath
from cnr_jax.format import names
from cnr_jax.format.manifest import DenseLeaf
from cnr_jax.repository.store import AnyPath, exists, locks_files, syncs_directories
from cnr_jax.repository.store.checked import Seal, kind_of, means_damage, numpy_dtype
from cnr_jax.rows.tiling import host_device
from cnr_jax.state.table import Path, flatten_paths, nest


def is_host_local(leaf: Any) -> bool:
    """Whether a leaf is one process's own in a run of several processes.

    Such are numbers, strings, numpy arrays, and arrays that no jitted step has returned yet: a
    fresh PRNG key, a counter.
    """
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return not is_global and jax.process_count() > 1


def digest_of_local(leaf: Any) -> str:
    """Digest of the values of a host-local leaf, to compare between processes."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        data = f"{type(leaf).__name__} {leaf!r}".encode()
    else:
        values = np.asarray(_key_data(leaf) if isinstance(leaf, jax.Array) else leaf)
        data = f"{values.dtype}{values.shape}".encode() + values.tobytes()
    return hashlib.sha256(data).hexdigest()


def replicated(leaf: Any) -> Any:
    """A host-local array as a global one, equal on all processes; other leaves as is.

    Orbax saves only global arrays. No communication: every process has the values.
    """
    if not isinstance(leaf, jax.Array) or not is_host_local(leaf):
        return leaf
    data = np.asarray(_key_data(leaf))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_callback(data.shape, everywhere, lambda i: data[i])
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return array


def _key_data(leaf: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _standard_handler() -> ocp.StandardCheckpointHandler:
    """Orbax's standard handler without replica-parallel writes.

    By default each replica of a replicated array writes a slice of it, which compiles a small
    program for each device and shape in the blocking part of the first save: 2.8 s for a small
    model on 8 CPU devices, of 3.0 s in all. The dense part is small; the first replica writes it.
    """
    types = ocp.type_handlers
    arrays: Any = copy.copy(types.get_type_handler(jax.Array))
    arrays._use_replica_parallel = False
    scalars = types.get_type_handler(int)
    registry = types.create_type_handler_registry(
        (int, scalars),
        (float, scalars),
        (np.number, types.get_type_handler(np.number)),
        (np.ndarray, types.get_type_handler(np.ndarray)),
        (jax.Array, arrays),
    )
    handler: Any = ocp.StandardCheckpointHandler()
    handler._impl = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    return handler


# What Orbax opens all arrays with that it writes.
_CONTEXTS = (
    tensorstore_utils._BASE_TS_CONTEXT,
    tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT,
)
_changing = threading.Lock()
# How many saves that are being begun or ended ask for each of them.
_asked: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def as_storage_allows(directory: AnyPath) -> Iterator[None]:
    """Has Orbax's arrays be opened so that they can be written where some calls do not work.

    TensorStore takes syncing of folders and locks of the system for granted. Without the former
    it is to sync nothing: what is written there is synced by us. The latter it can replace.

    Args:
        directory: below which they are written.
    """
    wanted: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # of which who writes there says more
        if not syncs_directories(directory):
            wanted["file_io_sync"] = False
        if not locks_files(directory):
            wanted["file_io_locking"] = {"mode": "lockfile"}
    with _changing:
        _asked.update(wanted.keys())
        for each in _CONTEXTS:
            each.update(wanted)
    try:
        yield
    finally:
        with _changing:
            _asked.subtract(wanted.keys())
            for key in wanted:
                if not _asked[key]:
                    for each in _CONTEXTS:
                        each.pop(key, None)


class DenseStore:
    """Everything that is not a table, through Orbax's own handler, below the item."""

    def __init__(self) -> None:
        self._handler = _standard_handler()

    async def save(self, directory: AnyPath, dense: Mapping[str, Any]) -> list[Any]:
        """Starts a save; returns futures that complete when it is written."""
        if not dense:
            return []
        args: Any = ocp.args.StandardSave(jax.tree.map(replicated, dict(dense)))
        path: Any = directory / names.DENSE
        with as_storage_allows(directory):
            return list(await self._handler.async_save(path, args=args) or [])

    def finalize(self, directory: AnyPath) -> None:
        """Completes a save of all processes."""
        path: Any = DensePath(directory / names.DENSE)
        if exists(path):
            with as_storage_allows(directory):
                self._handler.finalize(path)

    def restore(self, directory: AnyPath, abstract: Mapping[str, Any] | None) -> Any:
        """Restores the leaves of `abstract`, or for None all of them, as `as_stored` says."""
        path: Any = DensePath(directory / names.DENSE)
        handler: Any = self._handler
        handler = handler._impl
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
        if seal is None or not seal.named:
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
        handler: Any = _standard_handler()
        try:
            return dict(flatten_paths(handler._impl.restore(self._path, args=args)))
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
