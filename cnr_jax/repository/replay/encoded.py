"""Stored rows that a region of a leaf takes: which they are, where they go, how they are encoded.

This is arithmetic on tiles, row ids and layouts. The only arrays that it reads are row ids.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cnr_jax import errors
from cnr_jax.format.boxes import Box
from cnr_jax.format.manifest import TableEntry
from cnr_jax.format.tiles import Segment, Tile
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.codecs import Codec, Part, Raw, bytes_of
from cnr_jax.rows.codecs.lattice import Layer
from cnr_jax.rows.codecs.residual import Digest, Residual
from cnr_jax.rows.codecs.sparse import RowsAt
from cnr_jax.state.layouts import Identity, RowLayout, layout_from

Index = np.ndarray | slice
# Regions of a table for which it is kept where their rows come from: mostly, the rows of its next
# leaf come from there too. Bounds host memory.
_KEPT_REGIONS = 16


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Target:
    """A table as it is wanted: how many rows, where they lie, and which stored rows they take.

    Attributes:
        rows: number of logical rows.
        layout: layout of the rows; may differ from the checkpoint's.
        padded_rows: number of stored rows; may differ too.
        taken: integer[rows], the checkpoint's logical row that each logical row takes, -1: none;
            None: each takes the row of its own number, as far as the checkpoint has it.
    """

    rows: int
    layout: RowLayout
    padded_rows: int
    taken: np.ndarray | None = None
    _origins: dict[Any, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    _sums: dict[Any, tuple[np.ndarray, ...]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    # By the id of the entry, which cannot be hashed: each segment of each leaf asks about it.
    _unmoved: dict[int, tuple[TableEntry, int | None]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def unmoved(self, entry: TableEntry) -> int | None:
        """Number of first rows that stay where they are stored, while later ones take no row.

        None: rows move, and `origins` returns where they come from.
        """
        known = self._unmoved.get(id(entry))
        if known is None:
            known = self._unmoved[id(entry)] = entry, self._unmoved_of(entry)
        return known[1]

    def _unmoved_of(self, entry: TableEntry) -> int | None:
        saved = _layout(entry)
        if self.taken is not None or saved != self.layout:
            return None
        if (entry.rows, entry.padded_rows) == (self.rows, self.padded_rows):
            return self.padded_rows
        return min(entry.rows, self.rows) if saved == Identity() else None

    def keep_sums(self, sources: object, sums: tuple[np.ndarray, ...]) -> None:
        """Keeps parts of a region that another leaf shares, by the sources of their sums."""
        if len(self._sums) == _KEPT_REGIONS:
            self._sums.clear()
        self._sums[sources] = sums

    def take_sums(self, sources: object) -> tuple[np.ndarray, ...] | None:
        """Returns kept parts and forgets them, as two leaves share them; None: none are kept."""
        return self._sums.pop(sources, None)

    def origins(
        self, entry: TableEntry, rows: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the stored rows that rows `rows[0]` to `rows[1]` take, and which row takes each.

        Returns:
            Stored rows, sorted, once for each row that takes them; and those rows, relative to
            `rows[0]`. Rows that take none, such as padding, are left out.
        """
        saved = _layout(entry)
        key = saved, entry.rows, rows
        if key not in self._origins:
            if len(self._origins) == _KEPT_REGIONS:
                self._origins.clear()
            logical = self.layout.to_logical(np.arange(*rows))
            known = logical < self.rows
            taken = np.where(known, logical, -1)
            if self.taken is not None:
                taken[known] = self.taken[logical[known]]
            at = np.flatnonzero((taken >= 0) & (taken < entry.rows))
            stored = saved.to_physical(taken[at])
            order = np.argsort(stored, kind="stable")
            largest = max(entry.padded_rows, self.padded_rows)
            dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
            self._origins[key] = stored[order].astype(dtype), at[order].astype(dtype)
        return self._origins[key]


def _layout(entry: TableEntry) -> RowLayout:
    return layout_from(entry.layout.name, entry.layout.configuration)


def overlap(
    reader: StepReader,
    process: int,
    tile: Tile,
    segment: Segment,
    target: Target,
    rows: tuple[int, int],
) -> tuple[Index, Index]:
    """Finds the rows of a segment that rows `rows[0]` to `rows[1]` of a target take.

    Returns:
        Sorted indices into the segment, repeated if several rows take the same one; and the rows
        that they go to, relative to `rows[0]`. Slices where they are runs.
    """
    entry = reader.tables[tile.table]
    start, stop = tile.box[0]
    unmoved = target.unmoved(entry)
    if unmoved is not None:
        first = max(start, rows[0]) - start
        last = min(stop, rows[1], unmoved) - start
        if first >= last:
            return slice(0, 0), slice(0, 0)
        shift, count = start - rows[0], stop - start
        ids = process, segment.row_ids, count
        if (block := reader.positions_between(*ids, first, last)) is not None:
            before, found = block
            return slice(before, before + len(found)), found + shift
        positions = listed_rows(reader, process, tile, segment)
        if positions is None:
            return slice(first, last), slice(first + shift, last + shift)
        # Positions are sorted, so those within a range are a run.
        if last - first < count:
            first, last = np.searchsorted(positions, (first, last)).tolist()
        else:
            first, last = 0, len(positions)
        return slice(first, last), positions[first:last] + shift
    positions = listed_rows(reader, process, tile, segment)
    stored, at = target.origins(entry, rows)
    if positions is None:
        # The bounds are in the dtype of `stored`, or numpy would copy all of it.
        first, last = np.searchsorted(stored, np.array((start, stop), stored.dtype))
        return stored[first:last] - np.int64(start), at[first:last]
    held = (positions + start).astype(stored.dtype)
    first, last = np.searchsorted(stored, held), np.searchsorted(stored, held, "right")
    times = last - first
    index = np.repeat(np.arange(len(held)), times)
    earlier = np.cumsum(times) - times
    return index, at[np.arange(len(index)) + np.repeat(first - earlier, times)]


def shared_columns(tile: Box, region: Box) -> tuple[tuple[int, int], ...] | None:
    """Start and stop of a tile's columns that a region has, by dimension; None: it has none."""
    found: list[tuple[int, int]] = []
    for (a, b), (c, d) in zip(tile, region, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        found.append((start - a, stop - a))
    return tuple(found)


def split_columns(
    chain: Sequence[StepReader], table: str, leaf: str, box: Box
) -> tuple[Box, ...]:
    """Cuts a region into pieces so that each tile of the chain has all columns of a piece or none.

    Returns:
        Pieces of all rows of the region; the region itself where tables are split by rows only.
    """
    cuts = [{start, stop} for start, stop in box[1:]]
    for reader in chain:
        for _, tile in reader.tiles(table, leaf):
            for found, (a, b), (c, d) in zip(cuts, tile.box[1:], box[1:], strict=True):
                found.update(cut for cut in (a, b) if c < cut < d)
    runs = [itertools.pairwise(sorted(found)) for found in cuts]
    return tuple((box[0], *columns) for columns in itertools.product(*runs))


def length(index: Index) -> int:
    """Number of rows that an index picks."""
    return index.stop - index.start if isinstance(index, slice) else len(index)


def as_array(index: Index) -> np.ndarray:
    """Positions of the rows that an index picks, as an array."""
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def picked(index: Index, start: int, stop: int) -> Index:
    """Rows `start` to `stop` of those that an index picks."""
    if isinstance(index, slice):
        return slice(index.start + start, index.start + stop)
    return index[start:stop]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Encoding of rows, and which of their columns are wanted.

    The class has no slots, so that properties can be computed once and kept.

    Attributes:
        codec: codec of the rows.
        trailing: shape of a row as it was encoded.
        columns: start and stop of the wanted columns, for each dimension of `trailing`.
        dtype: dtype of the rows.
    """

    codec: Codec
    trailing: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]
    dtype: np.dtype

    @functools.cached_property
    def width(self) -> int:
        """Number of elements of a row as it was encoded."""
        return int(np.prod(self.trailing, dtype=np.int64))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the wanted columns of a row."""
        return tuple(stop - start for start, stop in self.columns)

    @functools.cached_property
    def parts(self) -> dict[str, Part]:
        """The parts of encoded rows."""
        return self.codec.parts(self.width, self.dtype)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of an encoded row, all parts together."""
        return bytes_of(self.parts)

    def room(
        self,
        rows: int,
        make: Callable[[tuple[int, int], np.dtype], np.ndarray] = np.empty,
    ) -> dict[str, np.ndarray]:
        """Makes an array for each part of `rows` rows."""
        return {n: make((rows, p.width), p.dtype) for n, p in self.parts.items()}

    @functools.cached_property
    def slices(self) -> tuple[slice, ...]:
        """The wanted columns, as an index."""
        return tuple(slice(start, stop) for start, stop in self.columns)


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """Rows with an encoding other than most: `parts[name][i]` is row `rows[i]` of the region."""

    encoding: Encoding
    rows: np.ndarray
    parts: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """All rows of a region, encoded.

    Attributes:
        encoding: encoding of the rows in `parts`.
        parts: arrays `[rows, width of the part]`, aligned; without meaning for a row that a patch
            has, or that is left.
        patches: the other rows, no row in two of them; one patch for each encoding.
        left: rows that no checkpoint holds, which the caller fills in; empty if a patch of zeros
            has them.
    """

    encoding: Encoding
    parts: Mapping[str, np.ndarray]
    patches: tuple[Patch, ...]
    left: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Rows of a region that one segment holds: rows `index` of the segment go to rows `at`.

    Attributes:
        first: whether the segment is the first of its tile in the full checkpoint, and no layer.
    """

    reader: StepReader
    process: int
    segment: Segment
    encoding: Encoding
    stored: Encoding
    index: Index
    at: Index
    first: bool

    @property
    def count(self) -> int:
        """Number of rows."""
        return length(self.index)

    @property
    def adds(self) -> bool:
        """Whether the rows are added to those before them, rather than replace them."""
        return self.segment.digest is not None

    def sources(self, parts: Sequence[str]) -> object:
        """Key of what some parts of the rows come from: equal for a leaf that shares them."""
        refs = tuple(self.segment.parts.get(name) for name in parts)
        return (
            id(self.reader),
            self.process,
            self.segment.row_ids,
            self.segment.digest,
            refs,
        )

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the segment, in the segment's order."""
        count = self.reader.count(self.process, self.segment.row_ids)
        if isinstance(self.index, slice):
            return (self.index.start, self.index.stop) == (0, count)
        return self.count == count and np.array_equal(self.index, np.arange(count))

    def add(self, layer: Layer, rows: RowsAt) -> None:
        """Adds a layer of differences, read from the segment, to the rows below, in place."""
        assert isinstance(self.encoding.codec, Residual)
        self.encoding.codec.add(layer, rows)

    def digest(self) -> Digest:
        """Makes an empty digest, to be taken of all rows below the whole segment."""
        assert isinstance(self.encoding.codec, Residual)
        return Digest(self.encoding.codec, is_crc=self.segment.below_crc32 is not None)

    def check_below(self, digest: Digest) -> None:
        """Checks that the rows below the whole segment are those its differences were taken from.

        Raises:
            IntegrityError: if they are others.
        """
        found = digest.hexdigest()
        if found != self.segment.digest:
            where = os.fspath(self.reader.directory)
            raise errors.IntegrityError(
                f"{where}: differences do not belong to the rows below them\n"
                f"  got rows of digest {found}, expected {self.segment.digest}",
                kind="foreign_rows",
                path=where,
            )


def held_rows(
    chain: Sequence[StepReader], table: str, leaf: str, target: Target, box: Box
) -> tuple[Held, ...]:
    """Returns what each segment of a chain holds of a region, in the order of application."""
    found: list[Held] = []
    moved = {id(r): target.unmoved(r.tables[table]) is None for r in chain}
    for each in stored_segments(chain, table, leaf, box[1:]):
        reader, process, tile, segment, encoding, stored = each
        if moved[id(reader)]:  # `overlap` then makes lists of all rows
            check_rows_stored(reader, process, tile, segment)
        index, at = overlap(reader, process, tile, segment, target, box[0])
        if not length(index):
            continue
        rows = (
            (index.start, index.stop)
            if isinstance(index, slice)
            else (int(index[0]), int(index[-1]) + 1)
        )
        _check_stored(reader, process, segment, stored, *rows)
        lowest = reader is chain[0] and not tile.layer
        first = lowest and segment is tile.segments[0]
        found.append(Held(reader, process, segment, encoding, stored, index, at, first))
    return tuple(found)


class StoredSegment(NamedTuple):
    """A segment of which some columns are wanted; see `Held`."""

    reader: StepReader
    process: int
    tile: Tile
    segment: Segment
    encoding: Encoding
    stored: Encoding


def stored_segments(
    chain: Sequence[StepReader], table: str, leaf: str, columns: Box
) -> Iterator[StoredSegment]:
    """Yields the segments of a chain that hold some columns, in the order in which they apply."""
    for reader in chain:
        dtype = reader.dtypes[table, leaf]
        for process, tile in reader.tiles(table, leaf):
            shared = shared_columns(tile.box[1:], columns)
            if shared is None:
                continue
            trailing = tuple(stop - start for start, stop in tile.box[1:])
            for segment in tile.segments:
                codec = reader.codec(process, segment.codec)
                if segment.digest is not None:
                    lowest = reader is chain[0] and not tile.layer
                    _check_adds(reader, codec, is_full=lowest)
                stored, encoding = _encodings(codec, trailing, shared, dtype)
                yield StoredSegment(reader, process, tile, segment, encoding, stored)


def listed_rows(
    reader: StepReader, process: int, tile: Tile, segment: Segment
) -> np.ndarray | None:
    """Sorted positions in a tile of the rows that a segment holds, int64; None for all.

    Raises:
        IntegrityError, FormatError: if row ids are missing or damaged, or fewer rows are stored.
    """
    start, stop = tile.box[0]
    if reader.lists_all_of_some(process, segment.row_ids):
        check_rows_stored(reader, process, tile, segment)
    return reader.positions(process, segment.row_ids, stop - start)


def check_rows_stored(
    reader: StepReader, process: int, tile: Tile, segment: Segment
) -> None:
    """Checks that all rows of a segment are stored, before lists of them are made.

    Raises:
        IntegrityError, FormatError: if some are not.
    """
    trailing = tuple(stop - start for start, stop in tile.box[1:])
    columns = tuple((0, size) for size in trailing)
    codec = reader.codec(process, segment.codec)
    stored = Encoding(codec, trailing, columns, reader.dtypes[tile.table, tile.leaf])
    count = reader.count(process, segment.row_ids)
    _check_stored(reader, process, segment, stored, 0, count)


def _check_adds(reader: StepReader, codec: Codec, *, is_full: bool) -> None:
    """Checks that rows of a segment may be added to the rows below them."""
    if is_full or not isinstance(codec, Residual):
        where, kind = os.fspath(reader.directory), "full" if is_full else "delta"
        raise errors.FormatError(
            f"{where}: a segment is added to others\n"
            f"  got codec {codec.name} in a {kind} checkpoint, expected one whose rows are sums,"
            " in a delta",
            path=where,
        )


def _check_stored(
    reader: StepReader,
    process: int,
    segment: Segment,
    stored: Encoding,
    first: int,
    last: int,
) -> None:
    """Checks that rows `first` to `last` of a segment are stored, before room is made for them."""
    for name, part in stored.parts.items():
        array, offset = reader.part(process, segment, name, part)
        array.check_stored(offset + first * part.width, offset + last * part.width)


@functools.lru_cache(maxsize=1024)
def _encodings(
    codec: Codec,
    trailing: tuple[int, ...],
    columns: tuple[tuple[int, int], ...],
    dtype: np.dtype,
) -> tuple[Encoding, Encoding]:
    """Returns the encoding of rows as they are stored, and as they are after reading.

    Raw rows are cut to the wanted columns while they are read.
    """
    stored = Encoding(codec, trailing, columns, dtype)
    if not isinstance(codec, Raw):
        return stored, stored
    whole = tuple((0, size) for size in stored.shape)
    if whole == columns and stored.shape == trailing:
        return stored, stored
    return stored, Encoding(codec, stored.shape, whole, dtype)
