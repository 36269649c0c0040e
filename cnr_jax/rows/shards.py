"""Shards that a save reads: their tiles, looked up once, and their rows.

A save of thousands of tiles must not ask jax about each of them. So facts that follow from tables
and shardings alone are kept by number in a `Tiling`, and the arrays of one state in `Shards`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from cnr_jax import errors
from cnr_jax.rows.tiling import (
    Arrays,
    Box,
    Group,
    Piece,
    Rows,
    Shardings,
    Way,
    Where,
    box_of,
    group_tiles,
    own_tiles,
    place_of,
)
from cnr_jax.state.table import Tables

# Stamps of ranges with up to this many rows are copied, to be compared together: for so few rows a
# call of numpy takes longer than its work.
_SMALL_RANGE = 1 << 14


class Spot(NamedTuple):
    """Place of an array's rows: the number of a local shard, and the row it starts with."""

    shard: int
    first: int


@functools.lru_cache(maxsize=4096)
def local_shards_of(
    sharding: Sharding, shape: tuple[int, ...]
) -> Mapping[jax.Device, tuple[int, Box]]:
    """Number and box of the shard on each device of this process, in jax's order of shards."""
    # In this order jax itself reads the shards of a whole array.
    indices = sharding.addressable_devices_indices_map(shape)
    return {
        device: (number, box_of(index or (), shape))
        for number, (device, index) in enumerate(indices.items())
    }


def spot_on(sharding: Sharding, shape: tuple[int, ...], device: jax.Device) -> Spot:
    """Finds the place of an array on a device of this process.

    Raises:
        TableError: if it has no shard there.
    """
    boxes = local_shards_of(sharding, shape)
    if device not in boxes:
        raise errors.TableError(f"the array has no shard on {device}")
    number, box = boxes[device]
    return Spot(number, box[0][0])


def spot_of(sharding: Sharding, shape: tuple[int, ...], rows: tuple[int, int]) -> Spot:
    """Finds the place of some rows of an array on this process.

    Raises:
        TableError: if no shard holds all of them.
    """
    for number, box in local_shards_of(sharding, shape).values():
        start, stop = box[0]
        if start <= rows[0] and rows[1] <= stop:
            return Spot(number, start)
    raise errors.TableError(f"rows {rows[0]} to {rows[1]} are not on this process")


def local_shards(array: jax.Array) -> Sequence[jax.Array]:
    """The shards of an array on this process, by their number in `Spot`."""
    return _ways_to_shards(array.sharding)(array)


def _ways_to_shards(
    sharding: Sharding,
) -> Callable[[jax.Array], Sequence[jax.Array]]:
    """Makes a function that finds the shards of arrays with this sharding in the quickest way."""
    count = len(sharding.addressable_devices)
    if len(sharding.device_set) == 1:
        return lambda array: (array,)
    if sharding.is_fully_replicated:
        # `addressable_data` gives the first shard for every number.
        return lambda array: [shard.data for shard in array.addressable_shards]
    return lambda array: [array.addressable_data(number) for number in range(count)]


class Tiling:
    """Tiles of tables for one set of shardings, and all facts that follow from these alone.

    It is made once for each set. A save of thousands of tiles looks these facts up by the number of
    a tile, or of a range of rows. It holds no arrays.

    Args:
        tables: the tables of a state.
        shardings: shardings of their leaves, by table and leaf name; missing ones are left out.
        stamps: sharding of each table's stamps.
        way: function that chooses where rows on a device are handled.

    Attributes:
        tiles: tiles that this process saves, in the order of tables and leaves.
        wheres: place where each tile's rows are handled.
        firsts: row of its shard at which each tile starts.
        groups: groups of tiles with the same rows on the same device.
        numbers: numbers of the tiles of each group.
        ranges: distinct ranges of rows that tiles have.
        range_of: number of each tile's range.
        range_rows: int64[ranges], number of rows.
        stamps: place where each range's stamps are handled, and the row of their shard at which
            they start.
        parts: numbers of ranges whose stamps are handled together in host memory.
        part_of: int64[ranges], the part of each range; -1: its stamps stay on their device.
        starts: int64[ranges], the row of its part at which a range starts.

    Raises:
        TableError: if for some rows no process holds both values and stamps.
    """

    def __init__(
        self,
        tables: Tables,
        shardings: Shardings,
        stamps: Mapping[str, Sharding],
        way: Way,
    ) -> None:
        self.way = way
        self.tiles = own_tiles(tables, shardings, stamps)
        self.groups = group_tiles(self.tiles)
        of_groups: dict[Group, list[int]] = {group: [] for group in self.groups}
        ranges: dict[Rows, int] = {}
        leaves: dict[tuple[str, str], list[int]] = {}
        range_of, firsts, wheres = list[int](), list[int](), list[Where]()
        words: list[tuple[int, int, np.dtype]] = []
        for number, tile in enumerate(self.tiles):
            table, leaf, device = tile.table.name, tile.leaf, tile.piece.device
            of_groups[Group(table, device, tile.rows)].append(number)
            range_of.append(ranges.setdefault(Rows(table, tile.rows), len(ranges)))
            sharding = shardings[table][leaf.name]
            spot = spot_on(sharding, leaf.shape, device)
            leaves.setdefault((table, leaf.name), []).append(spot.shard)
            firsts.append(tile.rows[0] - spot.first)
            # The shard may have fewer columns than the leaf.
            rows, *row = sharding.shard_shape(leaf.shape)
            size, word = _row_words(tuple(row), leaf.dtype)
            nbytes = size * leaf.dtype.itemsize
            words.append((rows, nbytes // word.itemsize, word))
            wheres.append(place_of(way, device, rows * nbytes, [sharding]))
        self.numbers = {group: tuple(found) for group, found in of_groups.items()}
        self.range_of, self.firsts = tuple(range_of), tuple(firsts)
        self.wheres, self._words = tuple(wheres), tuple(words)
        self._leaves = [
            (table, leaf, _ways_to_shards(shardings[table][leaf]), found)
            for (table, leaf), found in leaves.items()
        ]
        self.ranges = tuple(ranges)
        self.range_rows = np.array([r.rows[1] - r.rows[0] for r in ranges], np.int64)
        self._place_stamps(tables, stamps)

    def _place_stamps(self, tables: Tables, stamps: Mapping[str, Sharding]) -> None:
        """Finds the place of each range's stamps, and which are compared together."""
        shards: dict[str, list[int]] = {}
        found: list[tuple[Where, int]] = []
        for table, rows in self.ranges:
            shape, sharding = tables[table].leaf.shape[:1], stamps[table]
            spot = spot_of(sharding, shape, rows)
            shards.setdefault(table, []).append(spot.shard)
            boxes = local_shards_of(sharding, shape).items()
            device = next(d for d, (number, _) in boxes if number == spot.shard)
            where = self.way(device, 4 * sharding.shard_shape(shape)[0])  # int32 stamps
            found.append((where, rows[0] - spot.first))
        self.stamps = tuple(found)
        self._stamps = [
            (table, _ways_to_shards(stamps[table]), numbers)
            for table, numbers in shards.items()
        ]
        on_host = np.array([where == "host" for where, _ in found], bool)
        is_small = on_host & (self.range_rows <= _SMALL_RANGE)
        small = np.flatnonzero(is_small)
        large = np.flatnonzero(on_host & ~is_small)
        # All small ranges are one part, each large one is a part of its own.
        self.parts = [small] * bool(len(small)) + [np.array([each]) for each in large]
        self.part_of = np.full(len(found), -1, np.int64)
        for part, numbers in enumerate(self.parts):
            self.part_of[numbers] = part
        self.starts = np.zeros(len(found), np.int64)
        sizes = self.range_rows[small]
        self.starts[small] = np.cumsum(sizes) - sizes

    @functools.cached_property
    def boxes(self) -> tuple[tuple[str, str, Piece], ...]:
        """Boxes of the tiles in their leaves, and the devices they are on."""
        return tuple((t.table.name, t.leaf.name, t.piece) for t in self.tiles)

    def data_in(self, arrays: Arrays) -> list[jax.Array]:
        """Shard of each tile, of arrays with these shardings."""
        found: list[jax.Array] = []
        for table, leaf, shards_of, numbers in self._leaves:
            found += map(shards_of(arrays[table][leaf]).__getitem__, numbers)
        return found

    def stamps_in(self, stamps: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Shard of each range's stamps."""
        found: list[jax.Array] = []
        for table, shards_of, numbers in self._stamps:
            found += map(shards_of(stamps[table]).__getitem__, numbers)
        return found

    def words_in(self, data: Sequence[jax.Array]) -> list[np.ndarray | None]:
        """Rows in host memory of each tile's shard, as `row_words`; None on a device."""
        for shard, tile, where in zip(data, self.tiles, self.wheres, strict=True):
            if where == "host" and tile.piece.device.platform != "cpu":
                shard.copy_to_host_async()
        found: list[np.ndarray | None] = []
        for shard, where, (rows, count, word) in zip(
            data, self.wheres, self._words, strict=True
        ):
            if where == "device":
                found.append(None)
                continue
            memory: Any = shard
            try:
                # The same as `row_words` of a view, in half of the time.
                found.append(np.frombuffer(memory, word).reshape(rows, count))
            except (BufferError, ValueError):  # a dtype that buffers cannot have
                found.append(row_words(np.asarray(shard)))
        return found


class Shards:
    """Shards of one state that its save reads, on this process.

    They belong to the state, and that may be donated after the save has begun, so nothing may keep
    them. They are looked up once, as jax makes the shards of an array anew each time.

    Args:
        tiling: tiling of the state.
        arrays: leaves of the state, by table and leaf name.
        stamps: stamps by table, if rows are chosen by those that `record` wrote.

    Attributes:
        data: shard of each tile.
    """

    def __init__(
        self,
        tiling: Tiling,
        arrays: Arrays,
        stamps: Mapping[str, jax.Array] | None = None,
    ) -> None:
        self.tiling = tiling
        self.data = tiling.data_in(arrays)
        self._of_tables = stamps
        self._stamps: list[jax.Array] | None = None
        self._words: list[np.ndarray | None] | None = None
        self._stamp_parts: list[np.ndarray] | None = None

    @property
    def stamps(self) -> list[jax.Array]:
        """Shard of each range's stamps.

        Raises:
            AssertionError: if no stamps were given.
        """
        if self._stamps is None:
            assert self._of_tables is not None
            self._stamps = self.tiling.stamps_in(self._of_tables)
        return self._stamps

    @property
    def words(self) -> list[np.ndarray | None]:
        """Rows of each tile's shard in host memory, as `row_words`; None on a device.

        They are views if rows are in host memory already. If a view is alive when its buffer is
        donated, XLA copies the whole table instead of reusing the buffer: see `release`.
        """
        if self._words is None:
            self._words = self.tiling.words_in(self.data)
        return self._words

    @property
    def stamp_parts(self) -> list[np.ndarray]:
        """The stamps of each part of `Tiling.parts`, int32, range by range."""
        if self._stamp_parts is None:
            tiling, shards = self.tiling, self.stamps
            rows = tiling.range_rows.tolist()
            found: list[np.ndarray] = []
            for numbers in tiling.parts:
                some: list[np.ndarray] = []
                for number in numbers.tolist():
                    first = tiling.stamps[number][1]
                    stop = first + rows[number]
                    some.append(np.asarray(shards[number])[first:stop])
                found.append(some[0] if len(some) == 1 else np.concatenate(some))
            self._stamp_parts = found
        return self._stamp_parts

    def release(self) -> None:
        """Lets go of all shards: the save has read what it needs."""
        self.data, self._words = [], None
        self._of_tables, self._stamps, self._stamp_parts = None, None, None


def row_words(leaf: np.ndarray) -> np.ndarray:
    """Returns the bytes of each row as the widest words they fill, [rows, words].

    It is a view if rows lie one after the other. numpy copies such words faster than some numbers,
    and never interprets them as numbers.

    Example:
        >>> row_words(np.zeros((3, 5), np.float16)).dtype
        dtype('uint16')
    """
    leaf = np.ascontiguousarray(leaf)
    size, word = _row_words(leaf.shape[1:], leaf.dtype)
    flat = leaf if leaf.ndim == 2 else leaf.reshape(len(leaf), size)
    return flat.view(word)


@functools.cache
def _row_words(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, np.dtype]:
    """Number of elements in a row of this shape, and the words that its bytes fill."""
    elements = math.prod(shape)
    nbytes = elements * dtype.itemsize
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return elements, np.dtype(f"u{width}")
