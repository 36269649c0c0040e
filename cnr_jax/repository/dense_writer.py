"""Writing the dense leaves of one process: their bytes one after the other, in one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cnr_jax.format import names
from cnr_jax.format.dense import DenseTile
from cnr_jax.format.tiles import DensePart
from cnr_jax.repository.store import AnyPath, sync_directory, sync_tree
from cnr_jax.repository.store.arrays import CHUNK_BYTES, ArrayWriter


class DenseWriter:
    """Writer of the dense leaves of one process, tile after tile.

    Args:
        directory: directory of the item; it must exist.
        process: index of this process.
        tiles: tiles in the order of their bytes; none: nothing is written.
        compression: compression of the array; None: none.
        syncs: whether files are synced with their folders as they are written.
    """

    def __init__(
        self,
        directory: AnyPath,
        process: int,
        tiles: Sequence[DenseTile],
        *,
        compression: str | None,
        syncs: bool,
    ) -> None:
        self._path = directory / names.dense_array(process)
        self._tiles, self._syncs = tuple(tiles), syncs
        self._writer: ArrayWriter | None = None
        if tiles:
            length = tiles[-1].offset + tiles[-1].bytes
            self._writer = ArrayWriter(
                self._path, "uint8", length, compression=compression, syncs=syncs
            )

    def append(self, data: np.ndarray) -> None:
        """Writes the next bytes, which must not change any more."""
        assert self._writer is not None
        self._writer.append(data, copies=False)
        if data.nbytes > CHUNK_BYTES:
            # A write in progress keeps all of `data` in memory, which counts as free from now on.
            self._writer.drain()

    def end(self) -> None:
        """Starts to write what is left; nothing more may be appended."""
        if self._writer is not None:
            self._writer.end()

    def finish(self) -> DensePart | None:
        """Waits until all is on storage; returns None if there was nothing to write."""
        if self._writer is None:
            return None
        array = self._writer.finish()
        assert array is not None
        if self._syncs:
            # As for rows: TensorStore syncs each file with its folder, but not the folders above.
            sync_directory(self._path)
        else:
            sync_tree(self._path)
        sync_directory(self._path.parent)
        return DensePart(array=array, tiles=self._tiles)

    def stop(self) -> None:
        """Waits until nothing is being written."""
        if self._writer is not None:
            self._writer.stop()
