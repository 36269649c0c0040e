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
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from cnr_jax.rows.fingerprints.hash import hash_on_host, row_words
from cnr_jax.rows.fingerprints.watch import Differing
from cnr_jax.rows.fingerprints.windows import (
    Read,
    Ring,
    Window,
    Words,
    rings_of,
    windows_of,
    words_of,
)
from cnr_jax.rows.gather.device import gather_program
from cnr_jax.rows.tiling import (
    Group,
    LocalShards,
    OwnTile,
    Program,
    ShardsOf,
    Way,
    aligned_empty,
    boxes_in,
    group_tiles,
    host_device,
)

# Bytes of rows that are hashed at once, and what their number is a multiple of: programs are few.
_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 64
# Stamps that are gathered at once on a device, of rows that differ.
_STAMPS = 8192
# Of a hash, half is kept: a change is missed with a probability of 2^-31, which is nothing
# beside that of not looking at its row.
_KEPT = np.uint64(0xFFFFFFFF)


class _Layout:
    """The groups that tiles form, which are the same in most saves of a run."""

    def __init__(self, tiles: tuple[OwnTile, ...]) -> None:
        self.tiles, self.groups = tiles, group_tiles(tiles)
        self.boxes = {group: boxes_in(own) for group, own in self.groups.items()}


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
    rings: tuple[Ring, ...]
    read: tuple[Read, ...]


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

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._seed, self._start = _draw()
        self._layout: _Layout | None = None
        self._rings: tuple[Ring, ...] = ()
        # Fresh memory can take longer than the rows.
        self._buffers: dict[tuple[Words, int], list[np.ndarray]] = {}

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
            rings = rings_of(layout.groups, self._limit_bytes, self._start)
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
        rings: Sequence[Ring],
        shards: ShardsOf,
        way: Way,
    ) -> tuple[Read, ...]:
        due = [ring.due() for ring in rings]
        sources: list[list[list[_Source]]] = []
        # All devices gather before the first one is waited for.
        for ring, blocks in zip(rings, due, strict=True):
            starts = ring.window.first(blocks).tolist()
            sources.append(
                [
                    [
                        _source(shards, tile, ring.window, starts, way)
                        for tile in layout.groups[group]
                    ]
                    for group in ring.groups
                ]
            )
        alike: dict[Words, list[int]] = {}
        for number, ring in enumerate(rings):
            alike.setdefault(ring.words, []).append(number)
        found: dict[int, Read] = {}
        for words, members in alike.items():
            most = sum(
                len(rings[n].groups) * rings[n].window.read_rows for n in members
            )
            wanted = [
                (each, rings[n].window.block) for n in members for each in sources[n]
            ]
            hashes, tags = self._hash(words, _program_rows(words, most), wanted)
            done = 0
            for n in members:
                shape = (len(rings[n].groups), len(due[n]), rings[n].window.block)
                rows = slice(done, done + math.prod(shape))
                done = rows.stop
                found[n] = Read(
                    due[n],
                    hashes[rows].reshape(shape),
                    tags[rows].reshape(*shape, len(words)),
                )
        return tuple(found[number] for number in range(len(rings)))

    def _hash(
        self, words: Words, size: int, wanted: Sequence[tuple[Sequence[_Source], int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and tags of all rows that are wanted, in order.

        Args:
            words: of a row.
            size: rows of the program.
            wanted: what each leaf of a group is read from, and the rows of its blocks.
        """
        seed = jax.device_put(self._seed, host_device())
        rows = sum(len(sources[0].starts) * block for sources, block in wanted)
        hashes = np.empty(rows, np.uint32)
        tags = np.empty((rows, len(words)), np.uint8)
        buffers = self._buffers.get((words, size))
        if buffers is None:
            # Written to, so that what follows the last row is not whatever memory held.
            buffers = self._buffers[words, size] = _zeros(words, size)
        filled = done = 0
        for sources, block in wanted:
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
                        made, marks = hash_on_host(buffers, seed, tagged=True)
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


def _program_rows(words: Words, rows: int) -> int:
    """Rows that are hashed at once where a look reads at most so many of these words."""
    row_bytes = sum(count * np.dtype(dtype).itemsize for count, dtype in words)
    most = max(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row_bytes))
    return min(-(-rows // _CHUNK_ROWS), most // _CHUNK_ROWS) * _CHUNK_ROWS


def _zeros(words: Words, rows: int) -> list[np.ndarray]:
    found = []
    for count, dtype in words:
        buffer = aligned_empty((rows, count), np.dtype(dtype))
        buffer[...] = 0
        found.append(buffer)
    return found


def _hash_zeros(words: Words, rows: int) -> None:
    seed = jax.device_put(np.zeros(2, np.uint32), host_device())
    hash_on_host(_zeros(words, rows), seed, tagged=True)


def programs(tiles: Iterable[OwnTile], limit_bytes: int, way: Way) -> Iterator[Program]:
    """What looking at rows of these tiles needs, of leaves whose sharding is known."""
    groups = group_tiles(tiles)
    windows = windows_of(groups, limit_bytes)
    read: Counter[Words] = Counter()
    for group, own in groups.items():
        read[words_of(own)] += windows[group].read_rows
    for words, rows in read.items():
        yield _hash_zeros, (words, _program_rows(words, rows))
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
