"""Single rows of a leaf, each read from the newest checkpoint of a chain that holds it.

A restore reads all of a region and lets later rows replace earlier ones. This module goes from the
newest checkpoint back, and reads from each only the chunks of rows that it has not found yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cnr_jax.format.boxes import Box
from cnr_jax.format.tiles import Segment
from cnr_jax.repository.replay.encoded import (
    Encoding,
    Target,
    listed_rows,
    shared_columns,
    split_columns,
)
from cnr_jax.repository.replay.on_host import Decoding, decode_all, host_rows
from cnr_jax.repository.replay.regions import WantedLeaf, columns_in, region_of
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store.arrays import SMALL_READ_BYTES
from cnr_jax.rows.codecs import Part
from cnr_jax.state.layouts import Identity, layout_from


def picked_rows(
    chain: Sequence[StepReader], table: str, leaf: str, stored: np.ndarray
) -> np.ndarray:
    """Returns rows of a leaf, decoded on the host; rows that no checkpoint holds are zeros.

    Args:
        chain: checkpoints of the chain, the full one first.
        table: name of the table.
        leaf: `"table"`, or the name of a slot.
        stored: stored rows to be read, int64, sorted, none twice.

    Returns:
        `[len(stored), *shape of a row]`, of the dtype that was saved.

    Raises:
        IntegrityError: if data of these rows is missing or damaged.
        FormatError: if segments do not fit their codecs.
    """
    if any(
        segment.digest
        for reader in chain
        for _, tile in reader.tiles(table, leaf)
        for segment in tile.segments
    ):
        return _merged_rows(chain, table, leaf, stored)
    entry = next(x for x in chain[0].tables[table].leaves if x.name == leaf)
    whole = tuple((0, size) for size in entry.shape)
    pieces = split_columns(chain, table, leaf, whole)
    # Rows are read before room is made for them: what a manifest promises may not be stored.
    found = [list(_found(chain, table, leaf, stored, piece)) for piece in pieces]
    out = np.zeros((len(stored), *entry.shape[1:]), chain[0].dtypes[table, leaf])
    items: list[Decoding] = []
    for piece, read in zip(pieces, found, strict=True):
        into = out[:, *(slice(start, stop) for start, stop in piece[1:])]
        items += (Decoding(e, parts, len(at), into, at) for e, parts, at in read)
    decode_all(items)
    return out


def _merged_rows(
    chain: Sequence[StepReader], table: str, leaf: str, stored: np.ndarray
) -> np.ndarray:
    """Returns rows that may be sums of differences, for which all of the chain is read."""
    entry = chain[0].tables[table]
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    count, taken = len(stored), np.asarray(layout.to_logical(stored))
    target = Target(rows=count, layout=Identity(), padded_rows=count, taken=taken)
    dtype = chain[0].dtypes[table, leaf]
    wanted = WantedLeaf(chain, table, leaf, target, dtype, dtype)
    shape = next(x.shape for x in entry.leaves if x.name == leaf)[1:]
    region = region_of(wanted, ((0, count), *((0, size) for size in shape)))
    out = np.zeros((count, *shape), dtype)
    for piece in region.pieces:
        host_rows(wanted.merged(piece), count, out[:, *columns_in(region.box, piece)])
    return out


def _found(
    chain: Sequence[StepReader], table: str, leaf: str, stored: np.ndarray, piece: Box
) -> Iterator[tuple[Encoding, dict[str, np.ndarray], np.ndarray]]:
    """Finds the encoded rows of a piece, of which each tile has all columns or none.

    Yields:
        Encoding of some rows, their parts, and their indices in `stored`.
    """
    left = np.ones(len(stored), bool)
    for reader in reversed(chain):
        dtype = reader.dtypes[table, leaf]
        for process, tile in reversed(reader.tiles(table, leaf)):
            columns = shared_columns(tile.box[1:], piece[1:])
            if columns is None or not left.any():
                continue
            start, stop = tile.box[0]
            first, last = np.searchsorted(stored, (start, stop))
            trailing = tuple(b - a for a, b in tile.box[1:])
            # If two segments of a tile hold a row, the later one counts.
            for segment in reversed(tile.segments):
                at = first + np.flatnonzero(left[first:last])
                if not len(at):
                    break
                index = stored[at] - start
                held = listed_rows(reader, process, tile, segment)
                if held is not None:
                    found = np.searchsorted(held, index)
                    is_held = found < len(held)
                    is_held[is_held] = held[found[is_held]] == index[is_held]
                    index, at = found[is_held], at[is_held]
                if not len(at):
                    continue
                left[at] = False
                codec = reader.codec(process, segment.codec)
                encoding = Encoding(codec, trailing, columns, dtype)
                parts = {
                    name: _read(reader, process, segment, name, part, index)
                    for name, part in encoding.parts.items()
                }
                yield encoding, parts, at


def _read(
    reader: StepReader,
    process: int,
    segment: Segment,
    name: str,
    part: Part,
    index: np.ndarray,
) -> np.ndarray:
    """Reads a part of the rows `index`, sorted, of a segment: `[len(index), part.width]`.

    Chunks without any of these rows are not read.
    """
    array, offset = reader.part(process, segment, name, part)
    chunk = reader.processes[process].arrays[segment.parts[name].array].chunk
    begins = offset + index * part.width
    first, last = begins // chunk, (begins + part.width - 1) // chunk
    # Reads of no more than this many bytes are cut from chunks that are kept in memory.
    block = index * part.width * part.dtype.itemsize // SMALL_READ_BYTES
    cuts = np.flatnonzero((first[1:] > last[:-1]) | (block[1:] != block[:-1])) + 1
    found: list[np.ndarray] = []
    for some in np.split(index, cuts):
        low, high = int(some[0]), int(some[-1]) + 1
        read = array.read(offset + low * part.width, offset + high * part.width)
        found.append(read.reshape(-1, part.width)[some - low])
    return np.concatenate(found)
