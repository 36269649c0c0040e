"""Windows of a rotating look: the blocks of rows that it reads, and the kept hashes of all rows.

Everything here is arithmetic of numpy on positions and hashes; see rotation.py for how rows are
read, and for why two windows are read at a time.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from cnr_jax.rows.fingerprints.watch import Differing
from cnr_jax.rows.shards import row_words
from cnr_jax.rows.tiling import Group, OwnTile, bytes_in

# Blocks of a window, about, and the bytes that a block has at least: a page of memory.
_BLOCKS = 8
_BLOCK_BYTES = 4096
# A group that is read whole has one block.
_WHOLE = np.zeros(1, np.int64)

# For each leaf of a group, the words of a row and their dtype.
Words = tuple[tuple[int, str], ...]


def words_of(tiles: Iterable[OwnTile]) -> Words:
    """Returns the number and dtype of the words that are hashed for a row of each tile."""
    found = []
    for tile in tiles:
        shape = [stop - start for start, stop in tile.piece.box[1:]]
        size = math.prod(shape) * tile.leaf.dtype.itemsize
        words = row_words(np.empty((0, size), np.uint8))
        found.append((words.shape[1], words.dtype.name))
    return tuple(found)


class Window(NamedTuple):
    """Window of a group: how many blocks it has, and of which size.

    Attributes:
        rows: number of rows of the group.
        block: number of rows of a block. The last block overlaps the one before it, if it must.
        blocks: number of blocks of a window; a look reads two windows.
    """

    rows: int
    block: int
    blocks: int

    @property
    def count(self) -> int:
        """Number of blocks of the group."""
        return -(-self.rows // self.block)

    @property
    def read_rows(self) -> int:
        """Number of rows that a look reads, at most."""
        return self.block * min(self.count, 2 * self.blocks)

    def first(self, block: ArrayLike) -> Any:
        """First row of a block, or of each of several."""
        return np.minimum(np.multiply(block, self.block), self.rows - self.block)

    def rows_in(self, blocks: np.ndarray) -> np.ndarray:
        """The rows of some blocks, in order."""
        return (self.first(blocks)[:, None] + np.arange(self.block)).ravel()

    def visited(self, number: int, start: int) -> list[int]:
        """Blocks of the window of this number, in rounds that begin at `start`."""
        count, step = self.count, _stride(self.count)
        first = start + number * self.blocks
        visits = range(first, first + min(self.blocks, count))
        return [visit * step % count for visit in visits]


@functools.cache
def _stride(count: int) -> int:
    """Chooses a step that visits each of `count` blocks once, and neighbours far apart in time."""
    step = max(1, round(count * 0.618))  # the golden ratio spreads visits best
    while math.gcd(step, count) > 1:
        step += 1
    return step


def windows_of(
    groups: Mapping[Group, Sequence[OwnTile]], limit_bytes: int
) -> dict[Group, Window]:
    """Chooses the window of each group.

    All groups of a device have the same share. What a small group leaves of it goes to the others.

    Args:
        groups: groups of one process.
        limit_bytes: bytes that a look reads on each device; two rows of each group are read even
            if its share does not hold them.
    """
    sizes = {group: bytes_in(tiles) for group, tiles in groups.items()}
    number = Counter(group.device for group in groups)
    left = dict.fromkeys(number, limit_bytes)
    found: dict[Group, Window] = {}
    for group in sorted(groups, key=lambda group: sizes[group]):
        rows, device = group.rows[1] - group.rows[0], group.device
        share, row_bytes = left[device] // number[device], sizes[group] // rows
        window = Window(rows, rows, 1)
        if rows * max(1, row_bytes) > share:
            wanted = max(1, share // (2 * max(1, row_bytes)))
            least = min(wanted, -(-_BLOCK_BYTES // max(1, row_bytes)))
            block = max(least, wanted // _BLOCKS)
            window = Window(rows, block, max(1, wanted // block))
        left[device] -= min(share, window.read_rows * row_bytes)
        number[device] -= 1
        found[group] = window
    return {group: found[group] for group in groups}


class Read(NamedTuple):
    """Blocks that were read: hashes uint32[groups, blocks, rows], tags uint8[..., leaves]."""

    blocks: np.ndarray
    hashes: np.ndarray
    tags: np.ndarray


class Ring:
    """Hashes of the rows of groups that have the same words and the same window.

    Tables of one shape are compared together, since most of a table's cost is time in Python.

    Args:
        words: words of the groups.
        window: window by which they are read.
        groups: groups with their tiles.
        start: start of the first round.
    """

    def __init__(
        self,
        words: Words,
        window: Window,
        groups: Mapping[Group, Sequence[OwnTile]],
        start: int,
    ) -> None:
        self.words, self.window, self.groups = words, window, tuple(groups)
        self._names = [tuple(t.leaf.name for t in own) for own in groups.values()]
        self._number, self._start = 0, start % window.count
        self._row_bytes: Counter[jax.Device] = Counter()
        for group, own in groups.items():
            size = bytes_in(own) // (group.rows[1] - group.rows[0])
            self._row_bytes[group.device] += size
        shape = (len(groups), window.count, window.block)
        # Memory takes no room before it is written to.
        self._hashes = np.empty(shape, np.uint32)
        self._tags = np.empty((*shape, len(words)), np.uint8)
        # Clock at which the hashes of each block were taken; -1: not yet.
        self._clocks = np.full(window.count, -1, np.int64)

    def due(self) -> np.ndarray:
        """Blocks to be read now: those of the window that was read last, and of the next."""
        if self.window.count == 1:
            return _WHOLE
        numbers = range(max(0, self._number - 1), self._number + 1)
        blocks = [b for n in numbers for b in self.window.visited(n, self._start)]
        return np.array(list(dict.fromkeys(blocks)), np.int64)

    def bytes_in(self, read: Read) -> dict[jax.Device, int]:
        """Bytes that were read, by device."""
        rows = len(read.blocks) * self.window.block
        return {device: rows * size for device, size in self._row_bytes.items()}

    def differing(self, read: Read) -> Differing:
        """Finds the rows that differ from what is kept of them."""
        known = self._clocks[read.blocks] >= 0
        compared = min(self.window.rows, int(known.sum()) * self.window.block)
        differ = self._hashes[:, read.blocks] != read.hashes
        differ &= known[:, None]
        numbers, at, offsets = np.nonzero(differ)
        rows = self.window.first(read.blocks[at]) + offsets
        # Where the last block overlaps another, a row may come twice.
        _, first = np.unique(numbers * self.window.rows + rows, return_index=True)
        numbers, at, offsets = numbers[first], at[first], offsets[first]
        blocks = read.blocks[at]

        def leaves(which: np.ndarray) -> np.ndarray:
            group, row = numbers[which], offsets[which]
            then = self._tags[group, blocks[which], row]
            return then != read.tags[group, at[which], row]

        return Differing(
            groups=self.groups,
            names=self._names,
            numbers=numbers,
            rows=rows[first],
            since=self._clocks[blocks],
            leaves=leaves,
            compared=compared,
        )

    def keep(self, read: Read, clock: int) -> None:
        """Remembers what was read at a clock."""
        self._hashes[:, read.blocks] = read.hashes
        self._tags[:, read.blocks] = read.tags
        self._clocks[read.blocks] = clock
        self._number += 1


def rings_of(
    groups: Mapping[Group, Sequence[OwnTile]], limit_bytes: int, start: int
) -> tuple[Ring, ...]:
    """Makes empty rings for all groups at once: how much of one is read depends on the others."""
    windows = windows_of(groups, limit_bytes)
    alike: dict[tuple[Words, Window], dict[Group, Sequence[OwnTile]]] = {}
    for group, own in groups.items():
        alike.setdefault((words_of(own), windows[group]), {})[group] = own
    return tuple(
        Ring(words, window, members, start)
        for (words, window), members in alike.items()
    )
