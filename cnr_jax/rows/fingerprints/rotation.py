"""A rotating part of the rows, remembered by hashes: what a save can afford to look at.

The rows of each group of tiles are cut into blocks of consecutive rows. Each look reads two
windows of a few blocks: the one that the look before has read last, and the next one. Both are
compared with the hashes that are kept of them, and these replaced. So every row is read twice in
a round, once a look after the time before and once a round after it: the first finds rows that
keep moving, whenever they were recorded, the second rows that moved once. The blocks of a window
lie far apart, as rows that belong together often lie together. Groups whose rows fit into their
share of the limit are read whole, by every look.

What a look costs follows from the limit alone. Rows are copied before they are hashed, as the
next train step may be given their memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cnr_jax.rows.fingerprints.hash import hash_on_host, row_words
from cnr_jax.rows.fingerprints.watch import Differing, Group, boxes_in, group_tiles
from cnr_jax.rows.gather.chunk import Program, Way, aligned_empty, host_device
from cnr_jax.rows.gather.device import gather_program
from cnr_jax.rows.mesh import outside_mesh
from cnr_jax.rows.tiling import LocalShards, OwnTile, ShardsOf, bytes_in

# Blocks of a window, and bytes below which a block is not cut: a page of memory.
_BLOCKS = 8
_BLOCK_BYTES = 4096
# Bytes of rows that are hashed at once, and what their number is a multiple of: programs are few.
_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 64
# Stamps that are gathered at once on a device, of rows that differ.
_STAMPS = 8192
_NONE = np.zeros(0, np.int64)
# The only block of a group that is read whole.
_WHOLE = np.zeros(1, np.int64)
# Of a hash, half is kept: a change is missed with a probability of 2^-31, which is nothing
# beside that of not looking at its row.
_KEPT = np.uint64(0xFFFFFFFF)

# For each leaf of a group, the words of a row and their dtype.
_Kind = tuple[tuple[int, str], ...]


class Window(NamedTuple):
    """How the rows of a group are read.

    Attributes:
        rows: of the group.
        block: rows of a block. The last one overlaps the one before it, if it must.
        blocks: that are read at once.
    """

    rows: int
    block: int
    blocks: int

    @property
    def count(self) -> int:
        """Blocks of the group."""
        return -(-self.rows // self.block)

    @property
    def read_rows(self) -> int:
        """Rows that a look reads, at most."""
        return self.block * min(self.count, 2 * self.blocks)

    def first(self, block: int) -> int:
        """The row at which a block starts."""
        return min(block * self.block, self.rows - self.block)

    def visited(self, number: int, start: int) -> list[int]:
        """Blocks of the window of this number, in rounds that begin at `start`."""
        count, step = self.count, _stride(self.count)
        first = start + number * self.blocks
        visits = range(first, first + min(self.blocks, count))
        return [visit * step % count for visit in visits]


@functools.cache
def _stride(count: int) -> int:
    """A step through so many blocks that meets each of them, neighbours far apart."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) > 1:
        step += 1
    return step


def windows_of(
    groups: Mapping[Group, Sequence[OwnTile]], limit_bytes: int
) -> dict[Group, Window]:
    """How the rows of each group are read.

    All groups of a device have the same share; what a small one leaves is for the others.

    Args:
        groups: of one process.
        limit_bytes: that a look reads on each device; two rows of each group are read even
            where its share does not hold them.
    """
    sizes = {group: bytes_in(tiles) for group, tiles in groups.items()}
    left: dict[jax.Device, int] = {}
    number: dict[jax.Device, int] = {}
    for group in groups:
        left[group.device] = limit_bytes
        number[group.device] = number.get(group.device, 0) + 1
    found: dict[Group, Window] = {}
    for group in sorted(groups, key=lambda group: sizes[group]):
        rows, device = group.rows[1] - group.rows[0], group.device
        share = left[device] // number[device]
        window = _window(rows, max(1, sizes[group] // rows), share)
        left[device] -= min(share, window.read_rows * (sizes[group] // rows))
        number[device] -= 1
        found[group] = window
    return {group: found[group] for group in groups}


def _window(rows: int, row_bytes: int, share: int) -> Window:
    if rows * row_bytes <= share:
        return Window(rows, rows, 1)
    wanted = max(1, share // (2 * row_bytes))
    least = min(wanted, -(-_BLOCK_BYTES // row_bytes))
    block = max(least, wanted // _BLOCKS)
    return Window(rows, block, max(1, wanted // block))


class _Layout:
    """The groups that tiles form, which are the same in most saves of a run."""

    def __init__(self, tiles: tuple[OwnTile, ...]) -> None:
        self.tiles, self.groups = tiles, group_tiles(tiles)
        self.boxes = {group: boxes_in(own) for group, own in self.groups.items()}


class _Read(NamedTuple):
    """Blocks of some groups: uint32[groups, blocks, rows], uint8[..., leaves]."""

    blocks: np.ndarray
    hashes: np.ndarray
    tags: np.ndarray


class _Ring:
    """What is kept of the rows of groups of one kind that are cut alike.

    What a table costs is Python's time for it: tables of one shape are compared together.

    Args:
        kind: of the groups.
        window: how they are read.
        groups: with their tiles.
        start: of the first round.
    """

    def __init__(
        self,
        kind: _Kind,
        window: Window,
        groups: Mapping[Group, Sequence[OwnTile]],
        start: int,
    ) -> None:
        self.kind, self.window, self.groups = kind, window, tuple(groups)
        self._names = [tuple(t.leaf.name for t in own) for own in groups.values()]
        self._number, self._start = 0, start % window.count
        self._row_bytes: dict[jax.Device, int] = {}
        for group, own in groups.items():
            size = bytes_in(own) // (group.rows[1] - group.rows[0])
            before = self._row_bytes.get(group.device, 0)
            self._row_bytes[group.device] = before + size
        shape = (len(groups), window.count, window.block)
        # Memory that is not written to yet is none.
        self._hashes = np.empty(shape, np.uint32)
        self._tags = np.empty((*shape, len(kind)), np.uint8)
        # At which the hashes of each block were taken; -1: not yet.
        self._clocks = np.full(window.count, -1, np.int64)

    @property
    def nbytes(self) -> int:
        return self._hashes.nbytes + self._tags.nbytes + self._clocks.nbytes

    def due(self) -> np.ndarray:
        """Blocks to be read now: those of the window that was read last, and of the next."""
        if self.window.count == 1:
            return _WHOLE
        numbers = range(max(0, self._number - 1), self._number + 1)
        blocks = [b for n in numbers for b in self.window.visited(n, self._start)]
        return np.array(list(dict.fromkeys(blocks)), np.int64)

    def bytes_in(self, read: _Read) -> dict[jax.Device, int]:
        """Bytes that were read, by device."""
        rows = len(read.blocks) * self.window.block
        return {device: rows * size for device, size in self._row_bytes.items()}

    def differing(self, read: _Read) -> dict[Group, Differing]:
        """What differs from what is kept, of all groups."""
        known = self._clocks[read.blocks] >= 0
        compared = min(self.window.rows, int(known.sum()) * self.window.block)
        differ = self._hashes[:, read.blocks] != read.hashes
        differ &= known[:, None]
        # Of most groups nothing differs: these have one answer.
        found = dict.fromkeys(
            self.groups, self._differing(read, 0, differ[0][:0], compared)
        )
        for number in np.flatnonzero(differ.any(axis=(1, 2))).tolist():
            group = self.groups[number]
            found[group] = self._differing(read, number, differ[number], compared)
        return found

    def _differing(
        self, read: _Read, number: int, differ: np.ndarray, compared: int
    ) -> Differing:
        window, clocks = self.window, self._clocks[read.blocks]
        at, offsets = np.nonzero(differ)
        blocks = read.blocks[at]
        starts = np.minimum(blocks * window.block, window.rows - window.block)
        # Where the last block overlaps another, a row may come twice.
        rows, first = np.unique(starts + offsets, return_index=True)
        at, offsets, blocks = at[first], offsets[first], blocks[first]

        def leaves(which: np.ndarray) -> np.ndarray:
            then = self._tags[number, blocks[which], offsets[which]]
            return then != read.tags[number, at[which], offsets[which]]

        return Differing(
            rows=rows,
            since=clocks[at],
            names=self._names[number],
            leaves=leaves,
            compared=compared,
        )

    def keep(self, read: _Read, clock: int) -> None:
        self._hashes[:, read.blocks] = read.hashes
        self._tags[:, read.blocks] = read.tags
        self._clocks[read.blocks] = clock
        self._number += 1


def _rings(layout: _Layout, limit_bytes: int, start: int) -> tuple[_Ring, ...]:
    """Rings of nothing yet, for all groups at once: how much is read of one rests on the others."""
    windows = windows_of(layout.groups, limit_bytes)
    alike: dict[tuple[_Kind, Window], dict[Group, tuple[OwnTile, ...]]] = {}
    for group, own in layout.groups.items():
        alike.setdefault((_kind_of(own), windows[group]), {})[group] = own
    return tuple(
        _Ring(kind, window, groups, start) for (kind, window), groups in alike.items()
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """A part of the rows of this process at one moment.

    Attributes:
        differing: by group, what differs from what was kept.
        anew: whether nothing was kept of these tiles, and so nothing compared.
        read_rows: that were hashed.
        read_bytes: of them, by device.
        layout: of what was read.
        rings: what is kept of all groups, once this is.
        read: of each ring.
    """

    differing: Mapping[Group, Differing]
    anew: bool
    read_rows: int
    read_bytes: Mapping[jax.Device, int]
    layout: _Layout
    rings: tuple[_Ring, ...]
    read: tuple[_Read, ...]


class Rotation:
    """Remembers a rotating part of the rows of this process.

    Looking changes nothing. What a look saw counts from `keep` on, so a save that is refused in
    between leaves no trace.

    Args:
        limit_bytes: of rows that a look reads on each device; two rows of each group are read
            even where its share does not hold them.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax.rows.tiling import own_tiles, shards_of
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": jnp.zeros((4, 2))}
        >>> tables, where = find_tables(state, ["user"]), state["user"].sharding
        >>> tiles = own_tiles(tables, {"user": {"table": where}}, {"user": where})
        >>> rotation, way = Rotation(1 << 20), lambda device, size: "host"
        >>> rows = shards_of({"user": {"table": state["user"]}})
        >>> rotation.keep(rotation.look(tiles, rows, way), 7)
        >>> rows = shards_of({"user": {"table": state["user"].at[2].add(1)}})
        >>> [(d.rows, d.since) for d in rotation.look(tiles, rows, way).differing.values()]
        [(array([2]), array([7]))]
    """

    @outside_mesh()
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        seed, self._start = _draw()
        self._seed = jax.device_put(seed, host_device())
        self._layout: _Layout | None = None
        self._rings: tuple[_Ring, ...] = ()
        # Fresh memory can take longer than the rows.
        self._buffers: dict[tuple[_Kind, int], list[np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes kept on the host: 4 a row, one a row and leaf, 8 a block, and what is read."""
        buffers = [each for found in self._buffers.values() for each in found]
        return sum(each.nbytes for each in [*self._rings, *buffers])

    @outside_mesh()
    def look(
        self,
        tiles: Iterable[OwnTile],
        shards: ShardsOf,
        way: Way,
        *,
        anew: bool = False,
    ) -> Glimpse:
        """Hashes a part of the rows and compares it with what was kept.

        Waits for the computation that makes the arrays. They may be donated afterwards.

        Args:
            tiles: what this process saves of the state.
            shards: of the leaves.
            way: how rows come into host memory, where they are hashed: out of a view or copy
                of their shard (`"host"`), or gathered on their device.
            anew: whether what was kept is out of date.
        """
        layout = self._layout
        tiles = tuple(tiles)
        if layout is None or layout.tiles != tiles:
            before = layout.boxes if layout else {}
            layout = _Layout(tiles)
            anew |= layout.boxes != before
        rings = self._rings
        if anew or not rings:
            anew = True
            rings = _rings(layout, self._limit_bytes, self._start)
        read = self._read(layout, rings, shards, way)
        differing: dict[Group, Differing] = {}
        read_bytes: Counter[jax.Device] = Counter()
        for ring, found in zip(rings, read, strict=True):
            differing.update(ring.differing(found))
            read_bytes.update(ring.bytes_in(found))
        return Glimpse(
            differing=differing,
            anew=anew,
            read_rows=sum(found.hashes.size for found in read),
            read_bytes=read_bytes,
            layout=layout,
            rings=rings,
            read=read,
        )

    def keep(self, glimpse: Glimpse, clock: int) -> None:
        """Remembers what `glimpse` saw.

        Args:
            glimpse: of this rotation, with nothing kept since.
            clock: of the touched rows that go with it.
        """
        self._layout, self._rings = glimpse.layout, glimpse.rings
        for ring, read in zip(glimpse.rings, glimpse.read, strict=True):
            ring.keep(read, clock)

    def _read(
        self,
        layout: _Layout,
        rings: Sequence[_Ring],
        shards: ShardsOf,
        way: Way,
    ) -> tuple[_Read, ...]:
        due = [ring.due() for ring in rings]
        sources: list[list[list[_Source]]] = []
        # All devices gather before the first one is waited for.
        for ring, blocks in zip(rings, due, strict=True):
            starts = np.minimum(
                blocks * ring.window.block, ring.window.rows - ring.window.block
            ).tolist()
            sources.append(
                [
                    [
                        _source(shards, tile, ring.window, starts, way)
                        for tile in layout.groups[group]
                    ]
                    for group in ring.groups
                ]
            )
        found: list[_Read | None] = [None] * len(rings)
        kinds: dict[_Kind, list[int]] = {}
        for number, ring in enumerate(rings):
            kinds.setdefault(ring.kind, []).append(number)
        for kind, members in kinds.items():
            most = sum(
                len(rings[n].groups) * rings[n].window.read_rows for n in members
            )
            parts = [
                (each, rings[n].window.block) for n in members for each in sources[n]
            ]
            hashes, tags = self._hash(kind, _program_rows(kind, most), parts)
            done = 0
            for n in members:
                ring = rings[n]
                shape = (len(ring.groups), len(due[n]), ring.window.block)
                rows = slice(done, done + math.prod(shape))
                done = rows.stop
                found[n] = _Read(
                    due[n],
                    hashes[rows].reshape(shape),
                    tags[rows].reshape(*shape, len(kind)),
                )
        return tuple(read for read in found if read is not None)

    def _hash(
        self, kind: _Kind, size: int, parts: Sequence[tuple[Sequence[_Source], int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and tags of all rows of some parts, in order.

        Args:
            kind: of their rows.
            size: of the program.
            parts: what each leaf of a group is read from, and the rows of its blocks.
        """
        rows = sum(len(sources[0].starts) * block for sources, block in parts)
        hashes = np.empty(rows, np.uint32)
        tags = np.empty((rows, len(kind)), np.uint8)
        buffers = self._buffers.get((kind, size))
        if buffers is None:
            # Written to, so that what follows the last row is not whatever memory held.
            buffers = _zeros(kind, size)
            self._buffers[kind, size] = buffers
        filled = done = 0
        for sources, block in parts:
            # They live for this call only: see `_copy_rows` in rows/gather/host.py.
            views = [row_words(np.asarray(source.data)) for source in sources]
            for number in range(len(sources[0].starts)):
                taken = 0
                while taken < block:
                    count = min(block - taken, size - filled)
                    for view, source, out in zip(views, sources, buffers, strict=True):
                        start = source.starts[number] + taken
                        out[filled : filled + count] = view[start : start + count]
                    taken, filled = taken + count, filled + count
                    if filled == size or done + filled == rows:
                        made, marks = hash_on_host(buffers, self._seed, tagged=True)
                        assert marks is not None
                        hashes[done : done + filled] = np.asarray(made)[:filled] & _KEPT
                        tags[done : done + filled] = np.asarray(marks)[:filled]
                        done, filled = done + filled, 0
        return hashes, tags


class _Source(NamedTuple):
    """Where the rows of a leaf are read from.

    Attributes:
        data: its shard, or rows gathered from it in the order of reading.
        starts: of the blocks therein.
    """

    data: jax.Array
    starts: Sequence[int]


def _source(
    shards: ShardsOf, tile: OwnTile, window: Window, starts: Sequence[int], way: Way
) -> _Source:
    device = tile.piece.device
    data, start = shards(tile.table.name, tile.leaf.name).on(device)
    first = tile.rows[0] - start
    if way(device, data.nbytes) == "host":
        return _Source(data, [first + each for each in starts] if first else starts)
    rows = (np.array(starts)[:, None] + np.arange(window.block)).ravel()
    gathered = _gathered(data, rows + first, window.read_rows)
    return _Source(gathered, range(0, len(rows), window.block))


def _gathered(data: jax.Array, rows: np.ndarray, size: int) -> jax.Array:
    """Rows of a shard, with others after them to fill a program; on their device."""
    device = data.device
    assert isinstance(device, jax.Device)
    index = np.zeros(size, np.int32)
    index[: len(rows)] = rows
    program = gather_program(data.shape, np.dtype(data.dtype), device, size)
    found = program(data, jax.device_put(index, device))
    found.copy_to_host_async()
    return found


def stamps_at(
    stamps: LocalShards, rows: tuple[int, int], positions: np.ndarray, way: Way
) -> np.ndarray:
    """Stamps of some rows.

    Args:
        stamps: of the table.
        rows: start and stop of the group they are in.
        positions: within the group.
        way: as in `Rotation.look`.
    """
    data, first = stamps.holding(rows)
    device, at = data.device, positions + (rows[0] - first)
    assert isinstance(device, jax.Device)
    if way(device, data.nbytes) == "host":
        return np.asarray(data)[at]
    parts = [
        np.asarray(_gathered(data, at[i : i + _STAMPS], _STAMPS))[: len(at) - i, 0]
        for i in range(0, len(at), _STAMPS)
    ]
    return np.concatenate(parts or [np.empty(0, np.int32)])


def _draw() -> tuple[np.ndarray, int]:
    """A seed of hashes, and where rounds begin: elsewhere after each restart of a run."""
    return np.frombuffer(secrets.token_bytes(8), np.uint32), secrets.randbits(32)


def _kind_of(tiles: Iterable[OwnTile]) -> _Kind:
    kinds = []
    for tile in tiles:
        shape = [stop - start for start, stop in tile.piece.box[1:]]
        size = math.prod(shape) * tile.leaf.dtype.itemsize
        words = row_words(np.empty((0, size), np.uint8))
        kinds.append((words.shape[1], words.dtype.name))
    return tuple(kinds)


def _by_kind(groups: Mapping[Group, Sequence[OwnTile]]) -> dict[_Kind, list[Group]]:
    """Groups whose rows one program hashes."""
    found: dict[_Kind, list[Group]] = {}
    for group, tiles in groups.items():
        found.setdefault(_kind_of(tiles), []).append(group)
    return found


def _program_rows(kind: _Kind, rows: int) -> int:
    """Rows that are hashed at once where a look reads at most so many of a kind."""
    row_bytes = sum(words * np.dtype(dtype).itemsize for words, dtype in kind)
    most = max(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row_bytes))
    return min(-(-rows // _CHUNK_ROWS), most // _CHUNK_ROWS) * _CHUNK_ROWS


def _zeros(kind: _Kind, rows: int) -> list[np.ndarray]:
    found = []
    for words, dtype in kind:
        buffer = aligned_empty((rows, words), np.dtype(dtype))
        buffer[...] = 0
        found.append(buffer)
    return found


def _hash_zeros(kind: _Kind, rows: int) -> None:
    seed = jax.device_put(np.zeros(2, np.uint32), host_device())
    with outside_mesh():
        hash_on_host(_zeros(kind, rows), seed, tagged=True)


def programs(tiles: Iterable[OwnTile], limit_bytes: int, way: Way) -> Iterator[Program]:
    """What looking at rows of these tiles needs, of leaves whose sharding is known."""
    groups = group_tiles(tiles)
    windows = windows_of(groups, limit_bytes)
    for kind, members in _by_kind(groups).items():
        rows = sum(windows[group].read_rows for group in members)
        yield _hash_zeros, (kind, _program_rows(kind, rows))
    for group, own in groups.items():
        for tile in own:
            leaf, whole = tile.leaf, tile.table.leaf
            assert leaf.sharding is not None and whole.sharding is not None
            shape = leaf.sharding.shard_shape(leaf.shape)
            if way(group.device, math.prod(shape) * leaf.dtype.itemsize) == "device":
                rows = windows[group].read_rows
                yield gather_program, (shape, leaf.dtype, group.device, rows)
            stamps = whole.sharding.shard_shape(whole.shape)[:1]
            if way(group.device, 4 * stamps[0]) == "device":
                stamp = np.dtype(np.int32)
                yield gather_program, (stamps, stamp, group.device, _STAMPS)
