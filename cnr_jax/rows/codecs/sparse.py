"""Rows of encoded parts where they lie: some of them taken, put, and added to.

Differences are mostly rows of zeros, of which there is nothing to do but to know where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from cnr_jax import errors

# Of rows that are added at once, while they are in the cache.
_ADDED_BYTES = 1 << 17


def items(rows: np.ndarray) -> np.ndarray:
    """Rows as opaque items: numpy moves them whole, and never looks at numbers."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]


def taken(rows: np.ndarray, at: np.ndarray | slice) -> np.ndarray:
    """Some of the rows."""
    return items(rows)[at].view(rows.dtype).reshape(-1, rows.shape[1])


@dataclasses.dataclass(frozen=True, slots=True)
class SparseRows:
    """Rows of integers, of which those of zeros are not there.

    Attributes:
        count: of all rows.
        at: those that are there, sorted.
        values: of these, `[len(at), width]`, in their dtype or a narrower one.
    """

    count: int
    at: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.at.nbytes + self.values.nbytes

    def between(self, first: int, last: int) -> SparseRows:
        """The rows from `first` to `last`."""
        a, b = np.searchsorted(self.at, (first, last)).tolist()
        return SparseRows(last - first, self.at[a:b] - first, self.values[a:b])

    def put(self, out: np.ndarray) -> None:
        """Puts all rows into `[count, width]`."""
        out[...] = 0
        items(out)[self.at] = items(self.values.astype(out.dtype, copy=False))

    def put_elements(self, start: int, stop: int, out: np.ndarray) -> None:
        """Puts elements `start` to `stop`, of all rows one after the other, into as many."""
        width = self.values.shape[1]
        first, last = start // width, -(-stop // width)
        some, is_whole = self.between(first, last), not (start % width or stop % width)
        rows = out if is_whole else np.empty((last - first) * width, out.dtype)
        some.put(rows.reshape(-1, width))
        if not is_whole:
            out[...] = rows[start - first * width : stop - first * width]


def joined_rows(parts: Sequence[SparseRows], width: int) -> SparseRows:
    """Rows of so many elements, one after the other.

    Raises:
        FormatError: if some have others.
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
    """Some rows of parts, each once.

    Args:
        parts: `[rows, width]` each, changed in place.
        at: which of the rows.
    """

    def __init__(self, parts: Mapping[str, np.ndarray], at: np.ndarray | slice) -> None:
        self._parts, self._at = parts, at

    def take(self, name: str, some: np.ndarray | None = None) -> np.ndarray:
        """Returns them, or some of them; not to be written to."""
        return taken(self._parts[name], self._where(some))

    def put(
        self,
        name: str,
        rows: np.ndarray | SparseRows,
        some: np.ndarray | None = None,
    ) -> None:
        """Puts others in their places, or in those of some of them."""
        room = self._parts[name]
        if isinstance(rows, np.ndarray):
            items(room)[self._where(some)] = items(rows)
            return
        values, places = rows.values.astype(room.dtype, copy=False), items(room)
        places[self._at] = np.zeros(1, places.dtype)
        places[self._where(rows.at)] = items(values)

    def add(self, name: str, rows: np.ndarray | SparseRows) -> None:
        """Adds others to them; what does not fit wraps round."""
        values, at = rows, self._at
        if isinstance(rows, SparseRows):
            values = rows.values
            at = self._where(rows.at if len(rows.at) < rows.count else None)
        assert isinstance(values, np.ndarray)
        room = self._parts[name]
        if isinstance(at, slice):
            room[at] += values
            return
        some = max(1, _ADDED_BYTES // (room.shape[1] * room.itemsize))
        for start in range(0, len(at), some):
            where = at[start : start + some]
            total = taken(room, where) + values[start : start + some]
            items(room)[where] = items(total)

    def _where(self, some: np.ndarray | None) -> np.ndarray | slice:
        if some is None:
            return self._at
        if isinstance(self._at, slice):
            return some + self._at.start
        return self._at[some]
