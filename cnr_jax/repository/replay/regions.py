"""Regions, the parts of a leaf that this process holds, and the newest rows of each, still encoded.

Encoded rows are several times smaller than decoded ones, so a chain is replayed on codes, in host
memory. Each row is then decoded once, however many checkpoints hold it. Most rows of a region have
one *encoding*. Rows that are stored in another way (escaped rows, another codec in a later
checkpoint) are kept beside them as patches, unless a newer checkpoint holds them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from cnr_jax import errors
from cnr_jax.format.boxes import Box
from cnr_jax.repository.replay.encoded import (
    Encoding,
    Held,
    Index,
    Merged,
    Patch,
    Target,
    as_array,
    held_rows,
    picked,
    shared_columns,
    split_columns,
)
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store import can
from cnr_jax.rows.codecs import Raw
from cnr_jax.rows.codecs.residual import Digest
from cnr_jax.rows.codecs.sparse import RowsAt, SparseRows, items
from cnr_jax.rows.tiling import aligned_empty, boxes_of

# Encoded bytes read at once where they are put in place one by one: few enough to stay in
# cache on their way, many enough to hide the cost of a read.
BLOCK_BYTES = 4 << 20
# Encoded bytes that are being read while earlier ones are put in place.
AHEAD_BYTES = 32 << 20
# Where a row goes that is read only to be checked.
_DROPPED = -1
# Owner of a row that no segment holds.
_NOBODY = -1
# Functions that wait for parts of rows and return them, by the names of the parts.
_Layer = Mapping[str, Callable[[], np.ndarray | SparseRows]]


@dataclasses.dataclass(frozen=True, slots=True)
class WantedLeaf:
    """Leaf to be restored, and the chain that it is restored from.

    Attributes:
        own: an array of the leaf's shape, dtype and sharding, whose values fill the rows that
            no checkpoint holds; None: these are zeros.
    """

    chain: Sequence[StepReader]
    table: str
    name: str
    target: Target
    dtype: np.dtype
    stored_dtype: np.dtype
    own: jax.Array | None = None

    def held(self, box: Box) -> tuple[Held, ...]:
        """Returns what each segment of the chain holds of a region."""
        return held_rows(self.chain, self.table, self.name, self.target, box)

    def empty(self, box: Box) -> Encoding:
        """The encoding of rows of a region that no checkpoint holds."""
        shape = shape_of(box)[1:]
        return Encoding(Raw(), shape, tuple((0, n) for n in shape), self.stored_dtype)

    def encoding(self, box: Box) -> Encoding:
        """The encoding of most rows of a region."""
        return self._main(self.held(box), box)

    def _main(self, held: Sequence[Held], box: Box) -> Encoding:
        """The encoding in which rows are added, if any are, else that of the first rows held."""
        adding = list({each.encoding: None for each in held if each.adds})
        if len(adding) > 1:
            where = os.fspath(self.chain[-1].directory)
            raise errors.FormatError(
                f"{where}: rows of {self.table}.{self.name} are added in"
                f" {len(adding)} encodings, expected one",
                path=where,
            )
        found = adding or [each.encoding for each in held[:1]]
        return found[0] if found else self.empty(box)

    def merged(self, box: Box, main: Encoding | None = None) -> Merged:
        """Merges the newest copy of each row of a region.

        Args:
            box: box of the region.
            main: encoding that most rows are to have; None: that of `encoding`.

        Raises:
            IntegrityError: if data is missing or damaged.
            FormatError: if segments do not fit their codecs.
        """
        found = self.overlaid(box, main)
        if self.own is not None or not len(found.left):
            return found
        empty = self.empty(box)
        zeros = Patch(empty, found.left, empty.room(len(found.left), np.zeros))
        patches = tuple(_joined([*found.patches, zeros]))
        return dataclasses.replace(found, patches=patches, left=found.left[:0])

    def overlaid(
        self, box: Box, main: Encoding | None = None, sums: Sums | None = None
    ) -> Merged:
        """Merges the newest copy of each row of a region that the chain holds; others are left.

        Args:
            box: box of the region.
            main: see `merged`.
            sums: sums of the leaf whose next block of rows this is; None: the region is merged
                alone, and only segments of which it has all rows are checked.

        Raises:
            IntegrityError, FormatError: as `merged`.
        """
        held, rows = self.held(box), box[0][1] - box[0][0]
        if main is None:
            main = self._main(held, box)
        # Squares and means share parts. They are added up for the first of both leaves.
        names = [n for n in getattr(main.codec, "summed", ()) if n in main.parts]
        mine = [each.sources(names) for each in held if each.encoding == main]
        sources = box, main.columns, tuple(mine)
        known = None
        if sums is None and len(names) == len(main.parts):
            known = self.target.take_sums(sources)
        if known is not None:
            parts = dict(zip(names, known, strict=True))
        else:
            parts = main.room(rows, aligned_empty)
        covered = sum(each.count for each in held if each.first)
        owners = _Owners(rows, covered, len(held))
        queue = _Queue(AHEAD_BYTES if sums is None else self._ahead_of_block())
        others: list[Held] = []
        below = sums or Sums()
        compared = _compared(held, main, rows) if sums is None else set(map(id, held))
        for each in held:
            if each.encoding == main:
                owners.claim(each.at, 0)
                if known is not None:
                    pass  # added up with the other leaf
                elif each.adds:
                    digest = below.digest(each) if id(each) in compared else None
                    queue.extend(_addings(each, parts, names, digest))
                else:
                    queue.extend(_readings(each, parts, direct=each.first))
            else:
                others.append(each)
                owners.claim(each.at, len(others))
        queue.drain()
        if sums is None:
            below.check()
        if sums is None and any(part.shared for part in main.parts.values()):
            self.target.keep_sums(sources, tuple(parts[name] for name in names))
        patches = _patches(others, owners)
        return Merged(main, parts, tuple(_joined(patches)), owners.unclaimed())

    def _ahead_of_block(self) -> int:
        """Bytes that are read ahead where a region is one block of many.

        For slices of rows whole chunks are read, so in a long chain these few bytes may take many
        times as much memory. A disk answers at once, so little is gained by more.
        """
        is_near = can(self.chain[-1].directory).cheap_looks
        return AHEAD_BYTES // 4 if is_near else AHEAD_BYTES


def _compared(held: Sequence[Held], main: Encoding, rows: int) -> set[int]:
    """Chooses the segments whose rows below are compared with their digests, by `id`.

    A row is right if it is right when the last segment that has it is added. So segments are left
    out if later ones that are compared, or that replace rows, have all their rows.
    """
    found, later = set[int](), np.zeros(rows, np.bool_)
    for each in reversed(held):
        if each.encoding != main:
            continue
        if each.adds:
            if later[each.at].all() or not each.is_whole:
                continue
            found.add(id(each))
        later[each.at] = True
    return found


class Sums:
    """Digests of the rows below segments that are added, over all blocks of rows of a leaf.

    Attributes:
        over: checkpoints whose segments are compared; None: all.
    """

    def __init__(self) -> None:
        self.over: Sequence[StepReader] | None = None
        self._seen: dict[tuple[object, ...], tuple[Held, Digest]] = {}

    def digest(self, held: Held) -> Digest | None:
        """Digest that gets the rows below those rows of a segment that the next block has."""
        if self.over is not None and held.reader not in self.over:
            return None
        where = sorted((n, p.array, p.offset) for n, p in held.segment.parts.items())
        key = (held.reader.manifest.uuid, held.process, *where)
        return self._seen.setdefault(key, (held, held.digest()))[1]

    def check(self) -> None:
        """Checks all segments, once all of their rows were taken.

        Raises:
            IntegrityError: if a segment is added to other rows than it was taken from.
        """
        for held, digest in self._seen.values():
            held.check_below(digest)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Part of a leaf, cut by columns into pieces with a main encoding each: see `split_columns`."""

    box: Box
    pieces: tuple[Box, ...]
    encodings: tuple[Encoding, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the region."""
        return self.box[0][1] - self.box[0][0]

    @property
    def alike(self) -> tuple[object, ...]:
        """Key that is equal for regions that one program can decode."""
        cuts = tuple(
            (columns.start, columns.stop)
            for piece in self.pieces
            for columns in columns_in(self.box, piece)
        )
        return shape_of(self.box), cuts, self.encodings


def region_of(leaf: WantedLeaf, box: Box) -> Region:
    """Cuts a region into pieces and looks up how they are encoded."""
    pieces = split_columns(leaf.chain, leaf.table, leaf.name, box)
    return Region(box, pieces, tuple(leaf.encoding(piece) for piece in pieces))


def local_boxes(
    sharding: Sharding, shape: tuple[int, ...]
) -> dict[Box, list[jax.Device]]:
    """The regions that this process holds, each with its local devices."""
    here = jax.process_index()
    found: dict[Box, list[jax.Device]] = {}
    for box, devices in boxes_of(sharding, shape).items():
        local = [device for device in devices if device.process_index == here]
        if local:
            found[box] = local
    return found


def global_array(
    shape: tuple[int, ...],
    sharding: Sharding,
    dtype: DTypeLike,
    arrays: Mapping[jax.Device, jax.Array],
) -> jax.Array:
    """Makes an array from its regions on local devices, of which there may be none."""
    order = sharding.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in order], dtype=np.dtype(dtype)
    )


def shape_of(box: Box) -> tuple[int, ...]:
    """Number of elements of a box in each dimension."""
    return tuple(stop - start for start, stop in box)


def columns_in(box: Box, piece: Box) -> tuple[slice, ...]:
    """Index of the columns of a piece within its region, `box`."""
    return tuple(
        slice(a - c, b - c) for (a, b), (c, _) in zip(piece[1:], box[1:], strict=True)
    )


def fill(out: np.ndarray, box: Box, own: jax.Array, rows: np.ndarray) -> None:
    """Gives rows of a region the values that they have in an array, a block at a time.

    Args:
        out: array of the region, written in place.
        box: box of the region: one that a local device holds of `own`, or all of `own`.
        own: array with the values; its shards in `box` are on devices of this process.
        rows: rows to be filled, sorted, relative to the region.
    """
    shards = {shard.device: shard.data for shard in own.addressable_shards}
    step = max(1, BLOCK_BYTES // max(1, out[:1].nbytes))
    for part, devices in local_boxes(own.sharding, own.shape).items():
        if shared_columns(part, box) is None:
            continue
        values = np.asarray(shards[devices[0]])
        shift, columns = part[0][0] - box[0][0], columns_in(box, part)
        first, last = np.searchsorted(rows, (shift, shift + len(values)))
        copy = functools.partial(_copy, values, out[:, *columns], shift)
        wanted = (rows[i : min(i + step, last)] for i in range(first, last, step))
        # All cores copy, as memory that nobody has used before takes the time.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(copy, wanted))


def _copy(values: np.ndarray, out: np.ndarray, shift: int, rows: np.ndarray) -> None:
    """Copies some rows; row `shift` of `out` is the first of `values`."""
    low, high = int(rows[0]), int(rows[-1]) + 1
    if high - low == len(rows):  # a run, as new rows are
        out[low:high] = values[low - shift : high - shift]
    else:
        out[rows] = values[rows - shift]


def _patches(others: Sequence[Held], owners: _Owners) -> list[Patch]:
    """Makes a patch of those rows of each segment that no newer segment holds.

    All other rows are read and checked too, so damage is found no matter what came later.
    """
    found: list[Patch] = []
    queue = _Queue(AHEAD_BYTES)
    for owner, each in enumerate(others, 1):
        mine = owners.mine(each.at, owner)
        rows = as_array(each.at)[mine]
        parts = each.encoding.room(len(rows))
        at = np.where(mine, np.cumsum(mine) - 1, _DROPPED)
        queue.extend(_readings(dataclasses.replace(each, at=at), parts, direct=False))
        if len(rows):
            found.append(Patch(each.encoding, rows, parts))
    queue.drain()
    return found


def _joined(patches: Sequence[Patch]) -> Iterator[Patch]:
    """Joins patches, and yields one for each encoding."""
    encodings: dict[Encoding, list[Patch]] = {}
    for patch in patches:
        encodings.setdefault(patch.encoding, []).append(patch)
    for encoding, same in encodings.items():
        if len(same) == 1:
            yield same[0]
            continue
        rows = np.concatenate([patch.rows for patch in same])
        parts = {
            name: np.concatenate([patch.parts[name] for patch in same])
            for name in encoding.parts
        }
        yield Patch(encoding, rows, parts)


class _Owners:
    """Owner of each row, the segment with its newest copy: 0 for all of the main encoding.

    Owners are noted only once they matter, which is never if all rows have the main encoding.
    """

    def __init__(self, rows: int, covered: int, segments: int) -> None:
        self._rows = rows
        # The narrowest dtype, as there is an owner for each row, and filling takes time.
        self._dtype = np.min_scalar_type(-1 - segments)
        self._of: np.ndarray | None = None
        if covered != rows:
            self._of = np.full(rows, _NOBODY, self._dtype)

    def claim(self, at: Index, owner: int) -> None:
        if self._of is None and owner:
            self._of = np.zeros(self._rows, self._dtype)
        if self._of is not None:
            self._of[at] = owner

    def mine(self, at: Index, owner: int) -> np.ndarray:
        assert self._of is not None
        return self._of[at] == owner

    def unclaimed(self) -> np.ndarray:
        if self._of is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._of == _NOBODY)


class _Queue:
    """Queue that puts rows in place in the order in which they came, while later ones are read.

    Args:
        ahead_bytes: limit of the bytes that are read.
    """

    def __init__(self, ahead_bytes: int) -> None:
        self._ahead_bytes = ahead_bytes
        self._waiting: collections.deque[tuple[int, Callable[[], None]]] = (
            collections.deque()
        )
        self._nbytes = 0

    def extend(self, readings: Iterator[tuple[int, Callable[[], None]]]) -> None:
        """Adds readings, each started as it is drawn, and ends the oldest beyond the limit."""
        for nbytes, end in readings:
            self._waiting.append((nbytes, end))
            self._nbytes += nbytes
            while self._nbytes > self._ahead_bytes:
                self._end()

    def drain(self) -> None:
        """Ends all readings."""
        while self._waiting:
            self._end()

    def _end(self) -> None:
        nbytes, end = self._waiting.popleft()
        self._nbytes -= nbytes
        end()


def _readings(
    held: Held, parts: Mapping[str, np.ndarray], *, direct: bool
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Starts to read the rows of a segment, block by block.

    Args:
        held: the rows.
        parts: arrays that they are put into.
        direct: whether nothing else is written to these rows before, so that runs may be read
            straight into `parts`.

    Yields:
        Encoded bytes of a block, and a function that waits for it and puts it in place.
    """
    run = isinstance(held.index, slice) and isinstance(held.at, slice)
    direct = direct and run and held.encoding == held.stored
    row_bytes = held.stored.row_bytes
    step = max(1, (AHEAD_BYTES // 2 if direct else BLOCK_BYTES) // row_bytes)
    for start, stop, pick, at in _blocks(held.index, held.at, step):
        if not direct and not isinstance(at, slice):
            pick, at = _kept(pick, at)
        block = _started(held, start, stop, parts, at if direct else None)
        put = functools.partial(_put, block, held, parts, None if direct else pick, at)
        yield (stop - start) * row_bytes, put


def _addings(
    held: Held,
    parts: Mapping[str, np.ndarray],
    names: Sequence[str],
    digest: Digest | None,
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Starts to read rows that are added, block by block, and yields as `_readings` does.

    Args:
        held: the rows.
        parts: arrays that they are added to.
        names: names of the parts that are summed.
        digest: gets these parts of the rows below, block by block; None: they are not compared.
    """
    row_bytes = held.stored.row_bytes
    step = max(1, BLOCK_BYTES // row_bytes)
    for start, stop, pick, at in _blocks(held.index, held.at, step):
        block = _started_layer(held, start, stop, sparse=isinstance(pick, slice))
        rows = RowsAt(parts, at)

        def add(block: _Layer = block, rows: RowsAt = rows, pick: Index = pick) -> None:
            if digest is not None:
                for name in names:
                    for some in rows.pieces(name):
                        digest.update({name: some})
            held.add(_layer(block, held, pick), rows)

        yield (stop - start) * row_bytes, add


def _started(
    held: Held,
    start: int,
    stop: int,
    parts: Mapping[str, np.ndarray] | None = None,
    at: Index | None = None,
) -> dict[str, Callable[[], np.ndarray]]:
    """Starts to read rows of a segment, straight to rows `at` of `parts` if these are given."""
    block: dict[str, Callable[[], np.ndarray]] = {}
    for name, part in held.stored.parts.items():
        array, offset = held.reader.part(held.process, held.segment, name, part)
        first, last = (offset + row * part.width for row in (start, stop))
        out = parts[name][at].reshape(-1) if parts and at is not None else None
        block[name] = array.start(first, last, out)
    return block


def _started_layer(
    held: Held, start: int, stop: int, *, sparse: bool
) -> dict[str, Callable[[], np.ndarray | SparseRows]]:
    """Starts to read rows of a segment; if `sparse`, packed parts come without rows of zeros."""
    block = dict[str, Callable[[], np.ndarray | SparseRows]]()
    for name, part in held.stored.parts.items():
        array, offset = held.reader.part(held.process, held.segment, name, part)
        first, last = (offset + row * part.width for row in (start, stop))
        found = array.start_rows(first, last, part.width) if sparse else None
        block[name] = found or array.start(first, last)
    return block


def _layer(
    block: _Layer, held: Held, pick: Index
) -> dict[str, np.ndarray | SparseRows]:
    """Waits until a block is read; returns the parts of its rows."""
    found = dict[str, np.ndarray | SparseRows]()
    for name, reading in block.items():
        part = reading()
        if isinstance(part, np.ndarray):
            part = part.reshape(-1, held.stored.parts[name].width)[pick]
        found[name] = part
    return found


def _put(
    block: Mapping[str, Callable[[], np.ndarray]],
    held: Held,
    parts: Mapping[str, np.ndarray],
    pick: Index | None,
    at: Index,
) -> None:
    """Waits until a block is read, and puts its rows in place; `pick` None: they are there."""
    for name, reading in block.items():
        values = reading()
        if pick is None:
            continue
        rows = values.reshape(-1, held.stored.parts[name].width)
        if held.stored != held.encoding:
            whole = rows.reshape(-1, *held.stored.trailing)
            cut = whole[(slice(None), *held.stored.slices)]
            rows = np.ascontiguousarray(cut).reshape(len(rows), -1)
        items(parts[name])[at] = items(rows)[pick]


def _blocks(
    index: Index, at: Index, step: int
) -> Iterator[tuple[int, int, Index, Index]]:
    """Yields runs of at most `step` rows of a segment, which together have all rows of `index`.

    Yields:
        Start and stop of the run, which of its rows are wanted, and where they go.
    """
    if isinstance(index, slice):
        for start in range(index.start, index.stop, step):
            stop = min(start + step, index.stop)
            here = picked(at, start - index.start, stop - index.start)
            yield start, stop, slice(None), here
        return
    low = 0
    while low < len(index):
        start = int(index[low])
        high = int(np.searchsorted(index, start + step))
        stop = int(index[high - 1]) + 1
        yield start, stop, index[low:high] - start, picked(at, low, high)
        low = high


def _kept(pick: Index, at: np.ndarray) -> tuple[Index, np.ndarray]:
    kept = at != _DROPPED
    if kept.all():
        return pick, at
    return (np.flatnonzero(kept) if isinstance(pick, slice) else pick[kept]), at[kept]
