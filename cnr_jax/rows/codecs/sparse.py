"""Rows of encoded parts that are read, replaced and added to in place, and sparse rows.

Differences are mostly rows of zeros. `SparseRows` leaves those out and notes where the others are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cnr_jax import errors

# Bytes of rows that are taken and added at once, so few that they stay in the processor's cache.
_CACHED_BYTES = 1 << 17


def items(rows: np.ndarray) -> np.ndarray:
    """Views rows as opaque items, which numpy moves whole without looking at their numbers."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]


def taken(rows: np.ndarray, at: np.ndarray | slice) -> np.ndarray:
    """Returns the rows at some positions, integers or a slice; a view where they are a slice."""
    return rows[at] if isinstance(at, slice) else np.take(rows, at, axis=0)


@dataclasses.dataclass(frozen=True, slots=True)
class SparseRows:
    """Rows of integers, stored without the rows of zeros.

    Attributes:
        count: number of all rows.
        at: sorted positions of the stored rows.
        values: the stored rows, `[len(at), width]`, in their dtype or a narrower one.
    """

    count: int
    at: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.at.nbytes + self.values.nbytes

    def between(self, first: int, last: int) -> SparseRows:
        """The rows from `first` up to, but without, `last`."""
        a, b = np.searchsorted(self.at, (first, last)).tolist()
        return SparseRows(last - first, self.at[a:b] - first, self.values[a:b])

    def put(self, out: np.ndarray) -> None:
        """Writes all rows, those of zeros too, into `out`, `[count, width]`."""
        if len(self.at) == self.count:
            out[...] = self.values
            return
        out[...] = 0
        items(out)[self.at] = items(self.values.astype(out.dtype, copy=False))

    def put_elements(self, start: int, stop: int, out: np.ndarray) -> None:
        """Writes elements `start` to `stop`, counted through all rows, into `out`, of that size."""
        width = self.values.shape[1]
        first, last = start // width, -(-stop // width)
        some, is_whole = self.between(first, last), not (start % width or stop % width)
        rows = out if is_whole else np.empty((last - first) * width, out.dtype)
        some.put(rows.reshape(-1, width))
        if not is_whole:
            out[...] = rows[start - first * width : stop - first * width]


def joined_rows(parts: Sequence[SparseRows], width: int) -> SparseRows:
    """Joins sparse rows of `width` elements, one part after the other.

    Raises:
        FormatError: if the rows of a part have another width.
    """
    for each in parts:
        if each.values.shape[1] != width:
            got = each.values.shape[1]
            raise errors.FormatError(
                f"packed rows have {got} integers, expected {width}"
            )
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(each.count for each in parts)])
    at = [each.at + start for each, start in zip(parts, starts[:-1], strict=True)]
    values = np.concatenate([each.values for each in parts])
    return SparseRows(int(starts[-1]), np.concatenate(at), values)


class RowsAt:
    """Selection of rows of encoded parts, each row at most once.

    Args:
        parts: arrays `[rows, width]` by their names, changed in place.
        at: positions of the selected rows.
    """

    def __init__(self, parts: Mapping[str, np.ndarray], at: np.ndarray | slice) -> None:
        self._parts, self._at = parts, at

    def take(self, name: str, some: np.ndarray | None = None) -> np.ndarray:
        """Returns the rows, or `some` of them, of a part; do not write to them."""
        return taken(self._parts[name], self._where(some))

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yields the rows of a part, a few at a time; do not write to them."""
        if isinstance(self._at, slice):
            yield self.take(name)
            return
        for some in self._few(name, len(self._at)):
            yield taken(self._parts[name], self._at[some])

    def put(
        self,
        name: str,
        rows: np.ndarray | SparseRows,
        some: np.ndarray | None = None,
    ) -> None:
        """Replaces the rows, or `some` of them, of a part by others."""
        room = self._parts[name]
        if isinstance(rows, np.ndarray):
            items(room)[self._where(some)] = items(rows)
            return
        values, places = rows.values.astype(room.dtype, copy=False), items(room)
        places[self._at] = np.zeros(1, places.dtype)
        places[self._where(rows.at)] = items(values)

    def add(self, name: str, rows: np.ndarray | SparseRows) -> None:
        """Adds other rows to those of a part; sums that overflow wrap round."""
        values, at = rows, self._at
        if isinstance(rows, SparseRows):
            values = rows.values
            at = self._where(rows.at if len(rows.at) < rows.count else None)
        assert isinstance(values, np.ndarray)
        room = self._parts[name]
        if isinstance(at, slice):
            room[at] += values
            return
        for some in self._few(name, len(at)):
            where = at[some]
            items(room)[where] = items(taken(room, where) + values[some])

    def _few(self, name: str, count: int) -> Iterator[slice]:
        """Slices of rows of a part, so few that they stay in the processor's cache."""
        room = self._parts[name]
        few = max(1, _CACHED_BYTES // (room.shape[1] * room.itemsize))
        return (slice(i, i + few) for i in range(0, count, few))

    def _where(self, some: np.ndarray | None) -> np.ndarray | slice:
        if some is None:
            return self._at
        if isinstance(self._at, slice):
            return some + self._at.start
        return self._at[some]
