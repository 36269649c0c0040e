"""What rows of a part a chain holds, how they are encoded, and how they look when merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from cnr_jax.format.tiles import Box, Segment
from cnr_jax.repository.overlap import (
    Index,
    Target,
    entry_of,
    length,
    overlap,
    placement,
    shared_columns,
    tiles_of,
)
from cnr_jax.repository.step import StepReader
from cnr_jax.repository.store import numpy_dtype
from cnr_jax.rows.codecs import Codec, Part, Raw, codec_from


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How rows are encoded, and which columns of theirs are wanted.

    Attributes:
        trailing: shape of a row as it was encoded.
        columns: start and stop of the wanted ones, for each dimension of `trailing`.
        dtype: of the rows.
    """

    codec: Codec
    trailing: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]
    dtype: np.dtype

    @property
    def width(self) -> int:
        """Elements of an encoded row."""
        return int(np.prod(self.trailing, dtype=np.int64))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the wanted part of a row."""
        return tuple(stop - start for start, stop in self.columns)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts of encoded rows."""
        return self.codec.parts(self.width, self.dtype)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The wanted columns, as an index."""
        return tuple(slice(start, stop) for start, stop in self.columns)


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """Rows of another kind than most: `parts[name][i]` is row `rows[i]` of the part."""

    kind: Kind
    rows: np.ndarray
    parts: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """All rows of a part, encoded.

    Attributes:
        kind: of the rows in `parts`.
        parts: `[rows, width of the part]`, aligned; of no meaning where a patch has the row.
        patches: the other rows, no row in two of them; one patch for each kind.
    """

    kind: Kind
    parts: Mapping[str, np.ndarray]
    patches: tuple[Patch, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Rows of a part that one segment holds: `index` of the segment goes to `at`.

    Attributes:
        first: the rows come from the full checkpoint, which holds all rows.
    """

    reader: StepReader
    process: int
    segment: Segment
    kind: Kind
    stored: Kind
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
    """What a chain holds of a part, in the order in which it applies."""
    found: list[Held] = []
    for reader in chain:
        entry = entry_of(reader, table)
        dtype = next(numpy_dtype(x.dtype) for x in entry.leaves if x.name == leaf)
        place = placement(entry, target)
        for process, tile in tiles_of(reader, table, leaf):
            columns = shared_columns(tile.box[1:], box[1:])
            if columns is None:
                continue
            trailing = tuple(stop - start for start, stop in tile.box[1:])
            for segment in tile.segments:
                index, at = overlap(reader, process, tile, segment, place, box[0])
                if not length(index):
                    continue
                named = reader.processes[process].codecs[segment.codec]
                codec = codec_from(named.name, named.configuration)
                stored = Kind(codec, trailing, columns, dtype)
                first = reader is chain[0] and segment is tile.segments[0]
                kind = _cut(stored)
                found.append(
                    Held(reader, process, segment, kind, stored, index, at, first)
                )
    return tuple(found)


def _cut(kind: Kind) -> Kind:
    """The kind of rows that are cut to the wanted columns as they are read, if they can be."""
    if not isinstance(kind.codec, Raw):
        return kind
    whole = tuple((0, size) for size in kind.shape)
    return Kind(kind.codec, kind.shape, whole, kind.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like `np.empty`, at an address from which JAX on CPU need not copy it."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
