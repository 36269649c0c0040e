"""Dense leaves of a restored step, as a state wants them, whoever has written them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cnr_jax.checkpointer.orbax_compat.dense import (
    DenseStore,
    abstract_dense,
    fallback_sharding,
)
from cnr_jax.checkpointer.restoring.fitting import as_wanted, dtype_in
from cnr_jax.checkpointer.restoring.match import Wanted
from cnr_jax.format.manifest import DenseLeaf
from cnr_jax.repository.replay import dense as tiles
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store.checked import Seal, numpy_dtype
from cnr_jax.state.table import Path, flatten_paths


class DenseSource:
    """Reads the dense leaves of one step.

    Args:
        reader: reader of the step.
        orbax: reader of dense leaves that Orbax has written.
        is_read: whether any dense leaves are wanted.

    Raises:
        IntegrityError: if files of them are missing or have changed, as far as that shows without
            reading all of them.
    """

    def __init__(self, reader: StepReader, orbax: DenseStore, *, is_read: bool) -> None:
        self._reader, self._orbax = reader, orbax
        self._tiles: tiles.StoredDense | None = None
        self._seal: Seal | None = None
        if not is_read:
            return
        if reader.manifest.has_dense_tiles:
            self._tiles = tiles.StoredDense(reader)
            self._tiles.check_stored()
        else:
            self._seal = reader.check_dense()

    def numbers(self, leaves: Sequence[DenseLeaf]) -> dict[Path, bool | int | float]:
        """Numbers of Python as they were saved."""
        if self._tiles is not None:
            return {leaf.path: self._tiles.value(leaf.path) for leaf in leaves}
        return self._orbax.numbers(self._reader.directory, leaves, self._seal)

    def read(self, wanted: Wanted, *, everything: bool) -> dict[Path, Any]:
        """Reads all other leaves, by path.

        Args:
            wanted: leaves that were asked for.
            everything: whether no state was given: then all leaves come as they were saved, and
                arrays of jax on one device, or on all devices of several processes.

        Raises:
            IntegrityError: if their data is missing or damaged.
        """
        if self._tiles is not None:
            return self._read_tiles(self._tiles, wanted, everything)
        leaves = None if everything else wanted.asked
        directory = self._reader.directory
        rest = self._orbax.restore_sealed(directory, leaves, self._seal)
        found = dict(flatten_paths(rest))
        if everything:
            return found
        return {path: as_wanted(x, wanted.dense[path]) for path, x in found.items()}

    def _read_tiles(
        self, stored: tiles.StoredDense, wanted: Wanted, everything: bool
    ) -> dict[Path, Any]:
        found: dict[Path, Any] = {}
        arrays: list[tiles.Wanted] = []
        for leaf in self._reader.manifest.dense_leaves:
            path = leaf.path
            if leaf.kind == "text" or not (everything or path in wanted.asked):
                continue
            array = _as_saved(leaf) if everything else _as_array(leaf, wanted)
            if array is not None:
                arrays.append(array)
            elif everything:
                found[path] = stored.value(path)
            else:
                found[path] = as_wanted(stored.value(path), wanted.dense[path])
        for each, array in zip(arrays, stored.arrays(arrays), strict=True):
            found[each.path] = array
        return found


def _as_array(leaf: DenseLeaf, wanted: Wanted) -> tiles.Wanted | None:
    """Abstract jax array that a leaf is wanted as; None: it stays on the host."""
    value = wanted.dense[leaf.path]
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return None
    dtype = None if leaf.kind == "key" else dtype_in(value)
    return tiles.Wanted(leaf.path, dtype, abstract_dense(value).sharding)


def _as_saved(leaf: DenseLeaf) -> tiles.Wanted | None:
    """Abstract jax array of a saved leaf; None: it was none, or jax lacks its dtype now."""
    if leaf.kind == "key":
        return tiles.Wanted(leaf.path, None, fallback_sharding())
    if leaf.kind == "scalar" or leaf.numpy:
        return None
    dtype: np.dtype = numpy_dtype(leaf.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    return tiles.Wanted(leaf.path, dtype, fallback_sharding())
