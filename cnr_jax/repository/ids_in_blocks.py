"""Row ids of a tile, read block by block, so that tiles of any size take the same memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cnr_jax import errors
from cnr_jax.format import rowids
from cnr_jax.format.tiles import RowIds

# Bytes of row ids that are read at a time; more than an id takes.
READ_BYTES = 1 << 16


class IdsInBlocks:
    """Row ids of a tile for blocks of its rows, which mostly come in their order.

    Args:
        ids: the entry of the row ids in the manifest, in form `bitmap` or `gaps`.
        rows: number of rows of the tile.
        read: function that returns the bytes of the array of row ids from one offset to another.
    """

    def __init__(
        self, ids: RowIds, rows: int, read: Callable[[int, int], np.ndarray]
    ) -> None:
        self._ids, self._rows, self._read = ids, rows, read
        self._restart()

    def _restart(self) -> None:
        # Bytes that are read, and the number of ids in them that are known no more: those of rows
        # before `_first`. In form `gaps`, the others, and the first row that may be in later bytes.
        self._at = self._before = self._first = self._next = 0
        self._found = np.empty(0, np.int64)

    def between(self, first: int, last: int) -> tuple[int, np.ndarray]:
        """The number of ids before a block of rows, and those in it, int64, sorted.

        Raises:
            FormatError: if the bytes are no row ids; or, once the last block is asked for, if they
                are not as many as the manifest says.
        """
        if self._ids.form == "bitmap" and self._ids.bytes != -(-self._rows // 8):
            raise errors.FormatError(
                "row ids have no bit for each row\n"
                f"  expected {self._rows:,} bits, got {self._ids.bytes:,} bytes",
                kind="row_ids",
            )
        if first < self._first:
            self._restart()
        read = self._bits if self._ids.form == "bitmap" else self._gaps
        before, found = read(first, last)
        self._first = first
        if last == self._rows and before + len(found) != self._ids.count:
            raise errors.FormatError(
                "row ids are of other rows than they say\n"
                f"  expected {self._ids.count:,}, got {before + len(found):,}",
                kind="row_ids",
            )
        return before, found

    def _bits(self, first: int, last: int) -> tuple[int, np.ndarray]:
        low = first // 8
        while self._at < low:
            stop = min(low, self._at + READ_BYTES)
            self._before += int(self._unpacked(self._at, stop).sum())
            self._at = stop
        found = np.flatnonzero(self._unpacked(low, -(-last // 8))) + 8 * low
        start, stop = np.searchsorted(found, (first, last)).tolist()
        if last == self._rows and stop < len(found):
            raise errors.FormatError(
                f"row ids mark rows past the end of a tile of {self._rows:,}",
                kind="row_ids",
            )
        return self._before + start, found[start:stop]

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        return np.unpackbits(self._bytes(start, stop), bitorder="little")

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        found = self._read(self._ids.offset + start, self._ids.offset + stop)
        if found.dtype != np.uint8:
            raise errors.FormatError(
                f"row ids are stored as {found.dtype}, expected uint8", kind="row_ids"
            )
        return found

    def _gaps(self, first: int, last: int) -> tuple[int, np.ndarray]:
        kept = [self._from(first, self._found)]
        while self._at < self._ids.bytes and (self._next < last or last == self._rows):
            kept.append(self._from(first, self._more_gaps()))
        self._found = np.concatenate(kept)
        stop = int(np.searchsorted(self._found, last))
        return self._before, self._found[:stop]

    def _from(self, first: int, found: np.ndarray) -> np.ndarray:
        """Ids from a row on; counts those before it."""
        start = int(np.searchsorted(found, first))
        self._before += start
        return found[start:]

    def _more_gaps(self) -> np.ndarray:
        """Reads and decodes ids, as many as end within some bytes."""
        stop = min(self._ids.bytes, self._at + READ_BYTES)
        read = self._bytes(self._at, stop)
        ends = np.flatnonzero(read < 0x80)
        if len(ends) and stop < self._ids.bytes:
            read = read[: int(ends[-1]) + 1]
        found = rowids.decode_rowids("gaps", read, self._rows - self._next, len(ends))
        found += self._next
        self._at += len(read)
        self._next = int(found[-1]) + 1
        return found
