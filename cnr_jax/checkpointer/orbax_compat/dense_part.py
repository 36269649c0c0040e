"""Dense leaves of a step, whoever has written them: this library as tiles, or Orbax.

Orbax wrote them before steps stored them as tiles. Code that reads values need not know which.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.leaves import as_stored, restored
from cnr_jax.checkpointer.orbax_compat.places import DensePath
from cnr_jax.format import names
from cnr_jax.format.boxes import Box
from cnr_jax.format.manifest import DenseLeaf
from cnr_jax.repository.replay.dense_tiles import TiledDense
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store import can, exists, read_all, store_of
from cnr_jax.repository.store.checked import (
    Seal,
    kind_of,
    means_damage,
    numpy_dtype,
    sealed,
)
from cnr_jax.rows.tiling import host_device
from cnr_jax.state.table import Path, flatten_paths, nest

# Bytes of leaves that Orbax reads in one call; a call costs as much as reading a few MiB.
_GROUP_BYTES = 32 << 20


def open_dense(
    reader: StepReader, order: Sequence[DenseLeaf] | None = None
) -> TiledDense | OrbaxDense:
    """Opens the dense leaves of a step.

    Args:
        reader: reader of the step.
        order: leaves in the order in which their values will be asked for one by one; None: the
            order of the manifest.

    Raises:
        FormatError: if tiles do not cover the leaves.
    """
    if reader.manifest.has_dense_tiles:
        return TiledDense(reader)
    return OrbaxDense(reader, order)


def _standard_handler() -> Any:
    """Orbax's handler that reads trees of arrays and numbers.

    It has a registry of its own, so it uses no handler that a program registered for its types.
    """
    types = ocp.type_handlers
    kinds = (int, float, np.number, np.ndarray, jax.Array)
    known = [(kind, types.get_type_handler(kind)) for kind in kinds]
    registry = types.create_type_handler_registry(*known)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class OrbaxDense:
    """Dense leaves that Orbax has written, read by its own handler.

    The handler opens its files by itself. So they are compared with their digests before, and a
    look after each call shows whether they are still the same.

    Args:
        reader: reader of the step.
        order: see `open_dense`.
    """

    def __init__(
        self, reader: StepReader, order: Sequence[DenseLeaf] | None = None
    ) -> None:
        self._directory, self._manifest = reader.directory, reader.manifest
        listed = self._manifest.dense_leaves if order is None else order
        self._leaves = {leaf.path: leaf for leaf in listed if leaf.kind != "text"}
        self._seal: Seal | None = None
        self._held: dict[Path, Any] = {}

    @functools.cached_property
    def _path(self) -> Any:
        """Path that Orbax reads: where it cannot, a copy on a disk, which goes with this object."""
        if can(self._directory).paths:
            return DensePath(self._directory / names.DENSE)
        copy = epath.Path(tempfile.mkdtemp(prefix="cnr_jax_dense_"))
        disk = store_of(copy)
        weakref.finalize(self, disk.remove_tree, copy)
        for file in self._manifest.dense_files:
            path = copy / file.path
            disk.make_folder(path.parent)
            disk.write(path, read_all(self._directory / file.path), replaces=False)
        return DensePath(copy / names.DENSE)

    def check(self) -> None:
        """Compares all files with their digests.

        Raises:
            IntegrityError: at the first file that is missing or damaged, or that Orbax could take
                for one of these files.
        """
        self._seal = sealed(self._directory, self._manifest)

    def value(self, path: Path) -> Any:
        """Reads a leaf to the host: a numpy array, a number, or keys on the CPU.

        It keeps leaves that it has read ahead, and frees those that it had kept before.

        Raises:
            IntegrityError: if its data is missing or damaged.
        """
        if path not in self._held:
            self._held = {}
            self._held = self.values(self._group(path))
        return self._held[path]

    def values(self, paths: Iterable[Path]) -> dict[Path, Any]:
        """Reads several leaves as `value` does, in one call of Orbax."""
        both = {path: _on_host(self._leaves[path]) for path in paths}
        if not both:
            return {}
        args = ocp.args.PyTreeRestore(
            item=nest((path, item) for path, (item, _) in both.items()),
            restore_args=nest((path, asked) for path, (_, asked) in both.items()),
            partial_restore=True,
        )
        with self._reading(is_asked=False):
            with contextlib.closing(_standard_handler()) as handler:
                return dict(flatten_paths(handler.restore(self._path, args=args)))

    def part(self, path: Path, box: Box) -> Any:
        """Reads a part of a leaf that is no key, as `value` does.

        Raises:
            IntegrityError: if its data is missing or damaged.
            FormatError: if the leaf has another shape than the manifest says.
        """
        found, shape = np.asarray(self.value(path)), self._leaves[path].shape
        if found.shape != shape:
            raise errors.FormatError(
                f"array {'/'.join(path)} has the shape {list(found.shape)},"
                f" expected {list(shape)}"
            )
        return found[tuple(slice(start, stop) for start, stop in box)]

    def restore(self, asked: Mapping[Path, Any] | None) -> dict[Path, Any]:
        """Restores leaves as a state wants them.

        Args:
            asked: see `TiledDense.restore`; but where a value is no array of jax, Orbax restores
                the leaf as one of its type.

        Raises:
            IntegrityError: if the files have changed, or Orbax cannot read them though they are
                as they were saved.
        """
        # Without this, Orbax would read whatever somebody has put there.
        if not (asked is None or asked) or not self._manifest.dense_files:
            return {}
        with self._reading(is_asked=asked is not None):
            return self._restored(asked)

    def _restored(self, asked: Mapping[Path, Any] | None) -> dict[Path, Any]:
        with contextlib.closing(_standard_handler()) as handler:
            if asked is None:
                if not exists(self._path):
                    return {}
                args = jax.tree.map(as_stored, handler.metadata(self._path).tree)
                found = restored(handler, self._path, None, args)
            else:
                # Stored leaves that are not asked for are left out, which `StandardRestore` would
                # refuse. Shapes do not differ: they were compared before.
                item = nest(asked.items())
                args = ocp.checkpoint_utils.construct_restore_args(item)
                found = restored(handler, self._path, item, args, partial_restore=True)
            return dict(flatten_paths(found))

    @contextlib.contextmanager
    def _reading(self, *, is_asked: bool) -> Iterator[None]:
        """Checks the files after they were read; raises what an error of Orbax means.

        Args:
            is_asked: whether an error may be due to what was asked for.
        """
        if self._seal is None:
            self.check()
        assert self._seal is not None
        try:
            yield
        except Exception as error:
            self._seal.check()  # if it raises, it says why
            if not means_damage(error) or (is_asked and self._can_be_read()):
                raise
            where = os.fspath(self._directory / names.DENSE)
            raise errors.IntegrityError(
                f"{where} cannot be read, though its files are those that were saved\n"
                f"  {type(error).__name__}: {error}",
                kind=kind_of(error, "dense_unreadable"),
                path=where,
            ) from error
        self._seal.check()

    def _can_be_read(self) -> bool:
        """Whether Orbax can read all leaves as they are stored, so that the request is to blame."""
        try:
            self._restored(None)
        except Exception:
            return False
        return True

    def _group(self, first: Path) -> list[Path]:
        """A leaf, and as many of those that will be asked for after it as are read at once."""
        nbytes, found = 0, list[Path]()
        listed = list(self._leaves.values())
        for leaf in listed[list(self._leaves).index(first) :]:
            dtype = numpy_dtype("uint8" if leaf.kind == "key" else leaf.dtype)
            nbytes += math.prod(leaf.shape) * dtype.itemsize
            if found and nbytes > _GROUP_BYTES:
                break
            found.append(leaf.path)
        return found


def _on_host(leaf: DenseLeaf) -> tuple[Any, ocp.RestoreArgs]:
    """What Orbax is to restore a leaf into, and how, so that no accelerator holds it."""
    if leaf.kind == "scalar":
        return 0, ocp.RestoreArgs()
    if leaf.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.dtype))
        where = jax.sharding.SingleDeviceSharding(host_device())
        return key, ocp.ArrayRestoreArgs(sharding=where)
    return np.empty(0), ocp.RestoreArgs(restore_type=np.ndarray)
