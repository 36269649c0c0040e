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
    """Writes the tiles of one process in their order.

    Args:
        directory: of the item; it must exist.
        process: index of this process.
        tiles: one after the other; none: nothing is written.
        compression: of the array; None: none.
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
        """Writes the next bytes, which nobody may change any more."""
        assert self._writer is not None
        self._writer.append(data, copies=False)
        if data.nbytes > CHUNK_BYTES:
            # A part that is still referred to keeps all of it, which counts as written now.
            self._writer.drain()

    def end(self) -> None:
        """Starts to write what is left: nothing more is appended."""
        if self._writer is not None:
            self._writer.end()

    def finish(self) -> DensePart | None:
        """Waits until all is on storage; None where there was nothing."""
        if self._writer is None:
            return None
        array = self._writer.finish()
        assert array is not None
        if self._syncs:
            # As of rows: the folder of each file is synced with it, those above are not.
            sync_directory(self._path)
        else:
            sync_tree(self._path)
        sync_directory(self._path.parent)
        return DensePart(array=array, tiles=self._tiles)

    def stop(self) -> None:
        """Waits until nothing is being written."""
        if self._writer is not None:
            self._writer.stop()
