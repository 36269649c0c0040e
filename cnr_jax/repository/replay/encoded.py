"""What rows of a region a chain holds, how they are encoded, and how they look when merged."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cnr_jax import errors
from cnr_jax.format.tiles import Box, PartRef, Segment
from cnr_jax.repository.chunk_files import numpy_dtype
from cnr_jax.repository.replay.overlap import (
    Index,
    Target,
    length,
    overlap,
    placement,
    shared_columns,
)
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.codecs import Codec, Part, Raw


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How rows are encoded, and which columns of theirs are wanted.

    Without slots, so that what follows from the attributes is worked out once.

    Attributes:
        trailing: shape of a row as it was encoded.
        columns: start and stop of the wanted ones, for each dimension of `trailing`.
        dtype: of the rows.
    """

    codec: Codec
    trailing: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]
    dtype: np.dtype

    @functools.cached_property
    def width(self) -> int:
        """Elements of an encoded row."""
        return int(np.prod(self.trailing, dtype=np.int64))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row, of its wanted columns."""
        return tuple(stop - start for start, stop in self.columns)

    @functools.cached_property
    def parts(self) -> dict[str, Part]:
        """The parts of encoded rows."""
        return self.codec.parts(self.width, self.dtype)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of an encoded row, all parts together."""
        return self.codec.row_bytes(self.width, self.dtype)

    def room(
        self,
        rows: int,
        make: Callable[[tuple[int, int], np.dtype], np.ndarray] = np.empty,
    ) -> dict[str, np.ndarray]:
        """An array for each part of so many rows."""
        return {n: make((rows, p.width), p.dtype) for n, p in self.parts.items()}

    @functools.cached_property
    def slices(self) -> tuple[slice, ...]:
        """The wanted columns, as an index."""
        return tuple(slice(start, stop) for start, stop in self.columns)


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """Rows of another encoding than most: `parts[name][i]` is row `rows[i]` of the region."""

    encoding: Encoding
    rows: np.ndarray
    parts: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """All rows of a region, encoded.

    Attributes:
        encoding: of the rows in `parts`.
        parts: `[rows, width of the part]`, aligned; of no meaning where a patch has the row.
        patches: the other rows, no row in two of them; one patch for each encoding.
    """

    encoding: Encoding
    parts: Mapping[str, np.ndarray]
    patches: tuple[Patch, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Rows of a region that one segment holds: `index` of the segment goes to `at`.

    Attributes:
        first: the rows come from the full checkpoint, which holds all rows.
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


def held_rows(
    chain: Sequence[StepReader], table: str, leaf: str, target: Target, box: Box
) -> tuple[Held, ...]:
    """What a chain holds of a region, in the order in which it applies."""
    found: list[Held] = []
    for reader in chain:
        entry = reader.tables[table]
        dtype = reader.dtype(table, leaf)
        place = placement(entry, target)
        for process, tile in reader.tiles(entry, leaf):
            columns = shared_columns(tile.box[1:], box[1:])
            if columns is None:
                continue
            trailing = tuple(stop - start for start, stop in tile.box[1:])
            for segment in tile.segments:
                codec = reader.codec(process, segment.codec)
                stored, encoding = _encodings(codec, trailing, columns, dtype)
                if place is not None:  # row by row: lists of them all are made
                    count = reader.count(process, segment.row_ids)
                    _check_stored(reader, process, segment, stored, 0, count)
                index, at = overlap(reader, process, tile, segment, place, box[0])
                if not length(index):
                    continue
                rows = (
                    (index.start, index.stop)
                    if isinstance(index, slice)
                    else (int(index[0]), int(index[-1]) + 1)
                )
                _check_stored(reader, process, segment, stored, *rows)
                first = reader is chain[0] and segment is tile.segments[0]
                found.append(
                    Held(reader, process, segment, encoding, stored, index, at, first)
                )
    return tuple(found)


def part_ref(
    reader: StepReader, process: int, segment: Segment, name: str, part: Part
) -> PartRef:
    """Where a part of a segment lies.

    Raises:
        FormatError: if the segment has no such part, or it is of another dtype.
    """
    ref = segment.parts.get(name)
    arrays = reader.processes[process].arrays
    if ref is None or numpy_dtype(arrays[ref.array].dtype) != part.dtype:
        got = "nothing" if ref is None else f"array {ref.array}"
        raise errors.FormatError(
            f"{os.fspath(reader.directory)}: part {name!r} of a segment does not fit"
            f" its codec\n  got {got}, expected {part.dtype}",
            path=os.fspath(reader.directory),
        )
    return ref


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
        ref = part_ref(reader, process, segment, name, part)
        start, stop = (ref.offset + row * part.width for row in (first, last))
        reader.check_stored(process, ref.array, start, stop)


@functools.lru_cache(maxsize=1024)
def _encodings(
    codec: Codec,
    trailing: tuple[int, ...],
    columns: tuple[tuple[int, int], ...],
    dtype: np.dtype,
) -> tuple[Encoding, Encoding]:
    """The encoding of rows as they are stored, and as they are once they were read.

    Raw rows are cut to the wanted columns as they are read.
    """
    stored = Encoding(codec, trailing, columns, dtype)
    if not isinstance(codec, Raw):
        return stored, stored
    whole = tuple((0, size) for size in stored.shape)
    if whole == columns and stored.shape == trailing:
        return stored, stored
    return stored, Encoding(codec, stored.shape, whole, dtype)
