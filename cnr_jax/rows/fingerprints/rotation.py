"""Rotating look at rows: reads as many as a save can afford, and compares them by their hashes.

The rows of each group of tiles are cut into blocks of consecutive rows. Each look reads two
windows of a few blocks: the newer window of the look before, and the next one. It compares both
with the hashes that are kept of them, and replaces these. So in a round two looks in a row read
each row. The first compares it with its hash of a round ago, and finds rows that moved once. The
second compares it with its hash of the look before, and finds rows that keep moving, whenever they
were recorded. The blocks of a window lie far apart, as rows that belong together often lie
together. Groups that fit into their share of the limit are read whole, by every look.

The cost of a look follows from the limit alone. Rows are copied before they are hashed, as the
next train step may be given their memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from cnr_jax.rows.fingerprints.hash import hash_on_host
from cnr_jax.rows.fingerprints.watch import Differing
from cnr_jax.rows.fingerprints.windows import (
    Read,
    Ring,
    Words,
    rings_of,
    windows_of,
    words_of,
)
from cnr_jax.rows.gather.device import gather_program
from cnr_jax.rows.shards import Shards, Tiling, row_words
from cnr_jax.rows.tiling import (
    OwnTile,
    Program,
    Way,
    aligned_empty,
    group_tiles,
    host_device,
    place_of,
)

# Bytes of rows that are hashed at once, and a divisor of the number of rows: so programs are few.
_CHUNK_BYTES = 16 << 20
_CHUNK_ROWS = 64
# Stamps of differing rows that are gathered at once on a device.
_STAMPS = 8192
# Half of a hash is kept. It misses a change with probability 2^-31, which is nothing beside the
# probability that the row is not read.
_KEPT = np.uint64(0xFFFFFFFF)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """Look at a part of the rows of this process at one moment.

    Attributes:
        differing: rows that differ from what was kept, for each ring.
        anew: whether nothing was kept of these tiles, and so nothing compared.
        read_rows: number of rows that were hashed.
        read_bytes: bytes of these rows, by device.
        tiling: tiling of the rows.
        rings: rings of all groups, as they are once this look is kept.
        read: blocks that were read, for each ring.
    """

    differing: tuple[Differing, ...]
    anew: bool
    read_rows: int
    read_bytes: Mapping[jax.Device, int]
    tiling: Tiling
    rings: tuple[Ring, ...]
    read: tuple[Read, ...]


class Rotation:
    """Remembers a rotating part of the rows of this process.

    Looking changes nothing. Only `keep` makes a look count, so a save that is refused in between
    leaves no trace.

    Args:
        limit_bytes: bytes of rows that a look reads on each device; two rows of each group are
            read even if its share does not hold them.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax.rows.shards import Shards, Tiling
        >>> from cnr_jax.state.find import find_tables
        >>> state = {"user": jnp.zeros((4, 2))}
        >>> tables, where = find_tables(state, ["user"]), state["user"].sharding
        >>> rotation, way = Rotation(1 << 20), lambda device, size: "host"
        >>> tiling = Tiling(tables, {"user": {"table": where}}, {"user": where}, way)
        >>> rows = Shards(tiling, {"user": {"table": state["user"]}})
        >>> rotation.keep(rotation.look(rows), 7)
        >>> rows = Shards(tiling, {"user": {"table": state["user"].at[2].add(1)}})
        >>> [(d.rows, d.since) for d in rotation.look(rows).differing]
        [(array([2]), array([7]))]
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._seed, self._start = _draw()
        self._tiling: Tiling | None = None
        self._rings: tuple[Ring, ...] = ()
        # Kept, as fresh memory can take longer than copying the rows.
        self._buffers: dict[tuple[Words, int], list[np.ndarray]] = {}

    def look(self, shards: Shards, *, anew: bool = False) -> Glimpse:
        """Hashes a part of the rows and compares it with what was kept.

        Waits for the computation that makes the arrays. They may be donated afterwards.

        Args:
            shards: shards of the state that this process saves.
            anew: whether what was kept is out of date.
        """
        tiling, before, rings = shards.tiling, self._tiling, self._rings
        anew |= before is None
        if before is not None and before is not tiling:
            anew |= before.boxes != tiling.boxes
        if anew:
            rings = rings_of(tiling.groups, self._limit_bytes, self._start)
        read = self._read(shards, rings)
        read_bytes: Counter[jax.Device] = Counter()
        for ring, found in zip(rings, read, strict=True):
            read_bytes.update(ring.bytes_in(found))
        return Glimpse(
            differing=tuple(
                ring.differing(found) for ring, found in zip(rings, read, strict=True)
            ),
            anew=anew,
            read_rows=sum(found.hashes.size for found in read),
            read_bytes=read_bytes,
            tiling=tiling,
            rings=rings,
            read=read,
        )

    def keep(self, glimpse: Glimpse, clock: int) -> None:
        """Remembers what `glimpse` saw.

        Args:
            glimpse: glimpse of this rotation, with nothing kept since.
            clock: clock of the touched rows that go with it.
        """
        self._tiling, self._rings = glimpse.tiling, glimpse.rings
        for ring, read in zip(glimpse.rings, glimpse.read, strict=True):
            ring.keep(read, clock)

    def _read(self, shards: Shards, rings: Sequence[Ring]) -> tuple[Read, ...]:
        due = [ring.due() for ring in rings]
        # Rings whose rows have the same words are hashed together, by one program.
        alike: dict[Words, list[int]] = {}
        for number, ring in enumerate(rings):
            alike.setdefault(ring.words, []).append(number)
        sources = list(map(functools.partial(_sources, shards), rings, due))
        found: dict[int, Read] = {}
        for words, members in alike.items():
            most = sum(
                len(rings[n].groups) * rings[n].window.read_rows for n in members
            )
            wanted = itertools.chain.from_iterable(sources[n] for n in members)
            rows = sum(
                len(rings[n].groups) * len(due[n]) * rings[n].window.block
                for n in members
            )
            hashes, tags = self._hash(words, _program_rows(words, most), rows, wanted)
            done = 0
            for n in members:
                shape = (len(rings[n].groups), len(due[n]), rings[n].window.block)
                part = slice(done, done + math.prod(shape))
                done = part.stop
                found[n] = Read(
                    due[n],
                    hashes[part].reshape(shape),
                    tags[part].reshape(*shape, len(words)),
                )
        return tuple(found[number] for number in range(len(rings)))

    def _hash(
        self, words: Words, size: int, rows: int, wanted: Iterable[Sequence[_Source]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and tags all rows that are wanted, in order.

        Args:
            words: words of a row.
            size: number of rows of the program.
            rows: number of rows that are wanted.
            wanted: for each group, the source of each leaf.
        """
        seed = jax.device_put(self._seed, host_device())
        hashes = np.empty(rows, np.uint32)
        tags = np.empty((rows, len(words)), np.uint8)
        buffers = self._buffers.get((words, size))
        if buffers is None:
            # Zeros, so that what follows the last row is not whatever memory held.
            buffers = self._buffers[words, size] = _zeros(words, size)
        filled = done = 0
        for sources in wanted:
            taken, count = 0, len(sources[0][1])
            while taken < count:
                stop = min(count, taken + size - filled)
                end = filled + stop - taken
                for (view, at), out in zip(sources, buffers, strict=True):
                    # "clip" skips a bounds check that copies.
                    view.take(at[taken:stop], 0, out[filled:end], "clip")
                taken, filled = stop, end
                if filled == size or done + filled == rows:
                    made, marks = hash_on_host(buffers, seed, tagged=True)
                    assert marks is not None
                    hashes[done : done + filled] = np.asarray(made)[:filled] & _KEPT
                    tags[done : done + filled] = np.asarray(marks)[:filled]
                    done, filled = done + filled, 0
        return hashes, tags


# The words of rows in host memory, and which of them are read.
_Source = tuple[np.ndarray, np.ndarray]


def _sources(
    shards: Shards, ring: Ring, blocks: np.ndarray
) -> Iterable[Sequence[_Source]]:
    """Finds the sources of the leaves of each group of a ring; devices begin to gather at once."""
    tiling, words = shards.tiling, shards.words
    rows, size = ring.window.rows_in(blocks), ring.window.read_rows
    numbers = [tiling.numbers[group] for group in ring.groups]
    gathered = {
        n: _gathered(shards.data[n], rows + tiling.firsts[n], size)
        for n in itertools.chain.from_iterable(numbers)
        if words[n] is None
    }
    every, firsts = np.arange(len(rows)), tiling.firsts
    return (
        [
            (row_words(np.asarray(gathered[n])), every)
            if (view := words[n]) is None
            else (view, rows + firsts[n] if firsts[n] else rows)
            for n in of_group
        ]
        for of_group in numbers
    )


def _gathered(data: jax.Array, rows: np.ndarray, size: int) -> jax.Array:
    """Gathers rows of a shard on their device; other rows after them fill the program up."""
    device = data.device
    assert isinstance(device, jax.Device)
    index = np.zeros(size, np.int32)
    index[: len(rows)] = rows
    program = gather_program(data.shape, np.dtype(data.dtype), device, size)
    found = program(data, jax.device_put(index, device))
    found.copy_to_host_async()
    return found


def stamps_of(shards: Shards, differing: Differing) -> np.ndarray:
    """Stamps of the rows that differ, int32[rows]."""
    found = np.empty(len(differing.rows), np.int32)
    if not len(found):
        return found
    tiling, parts = shards.tiling, shards.stamp_parts
    of_groups = [tiling.range_of[tiling.numbers[g][0]] for g in differing.groups]
    ranges = np.array(of_groups, np.int64)[differing.numbers]
    part_of, in_part = tiling.part_of[ranges], tiling.starts[ranges] + differing.rows
    # Stamps in host memory part by part, those on devices (-1) group by group.
    for part in np.unique(part_of[part_of >= 0]).tolist():
        some = part_of == part
        found[some] = parts[part][in_part[some]]
    for _, some in differing.runs() if (part_of < 0).any() else ():
        number = int(ranges[some.start])
        if part_of[some.start] >= 0:
            continue
        data = shards.stamps[number]
        at = differing.rows[some] + tiling.stamps[number][1]
        for start in range(0, len(at), _STAMPS):
            part = np.asarray(_gathered(data, at[start : start + _STAMPS], _STAMPS))
            left = found[some][start : start + _STAMPS]
            left[...] = part[: len(left), 0]
    return found


def _draw() -> tuple[np.ndarray, int]:
    """Draws a hash seed and the row at which rounds begin, anew in each process."""
    return np.frombuffer(secrets.token_bytes(8), np.uint32), secrets.randbits(32)


def _program_rows(words: Words, rows: int) -> int:
    """Number of rows hashed at once, if a look reads at most `rows` rows of these words."""
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
    """Yields the programs that a look at these tiles needs; their leaves have known shardings."""
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
            size = math.prod(shape) * leaf.dtype.itemsize
            if place_of(way, group.device, size, [leaf.sharding]) == "device":
                rows = windows[group].read_rows
                yield gather_program, (shape, leaf.dtype, group.device, rows)
            stamps = whole.sharding.shard_shape(whole.shape)[:1]
            if way(group.device, 4 * stamps[0]) == "device":
                stamp = np.dtype(np.int32)
                yield gather_program, (stamps, stamp, group.device, _STAMPS)
