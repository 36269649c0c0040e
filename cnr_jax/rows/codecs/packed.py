"""Packing of rows of small integers into bytes, by zstd streams of rows and columns that are alike.

Differences of codes are small where a row has hardly moved, and large where it was met for the
first time; columns differ as much. So rows are sorted into classes and columns into groups, and the
integers of a class and a group form one stream, column by column. In a stream an integer takes 2, 4
or 8 bits, or all the bits of its dtype. The largest symbol stands for an integer that does not fit;
such integers follow after all symbols. zstd finds Huffman codes for bytes of up to four integers.

Classes are learnt from the rows themselves: each class is a table of costs, and a row belongs to
the class in which it costs least. A reader needs only the class of each row, not the costs, so the
writer chooses how to learn them.

Differs from a plain zstd of the same bytes: a difference of trained tables takes a fifth less.
"""

from __future__ import annotations

import importlib
import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from cnr_jax import errors
from cnr_jax.rows.codecs.sparse import SparseRows, items, taken

# The most classes, beside that of rows of zeros, and the most groups of columns: a nibble each.
CLASSES, GROUPS = 8, 8
_MOST = 15
# Integers for which one more class is learnt: each class costs the tables of its streams.
_LEARNT_ELEMENTS = 1 << 13
# Largest magnitude up to which integers are told apart; rows from which classes are learnt; and
# rounds.
_TAIL, _SAMPLE_ROWS, _ROUNDS = 7, 1 << 12, 12
# Share of integers at and above a magnitude that need not be told apart: each one counted takes
# time, and at this share a thousandth of the bytes is all that telling more apart would save.
_FEW = 0.05
# Integers that are counted at once, and bytes, or at least rows, that are transposed at once, to
# stay in the cache; and bytes by which columns are longer than needed, as columns of a power of two
# share its lines.
_COUNTED_ELEMENTS, _TURNED_BYTES, _TURNED_ROWS, _APART_BYTES = 1 << 18, 1 << 15, 512, 64
# Bytes of symbols that are spread at once, and the shifts and masks that spread each to a byte.
_SPREAD_BYTES = 1 << 15
_SPREADS = {2: ((12, 0x000F000F), (6, 0x03030303)), 4: ((4, 0x0F0F),)}
# Largest share of integers that may not fit their symbols, by bits of a symbol.
_ESCAPES = {2: 0.02, 4: 0.03, 8: 0.01}
# Parameters with which zstd mostly finds Huffman codes: matches are few, so their table is small.
_MATCHES = {
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
}
_HEADER, _STREAM = struct.Struct("<IBBI"), struct.Struct("<BII")


def pack_rows(rows: np.ndarray) -> bytes:
    """Packs integers.

    Args:
        rows: int8 or int16 `[rows, width]`, with at least one row and one column.

    Returns:
        Bytes from which `unpack_rows` makes the same rows.

    Raises:
        OptionError: if zstandard is not installed.
    """
    count, width = rows.shape
    item, rows = rows.dtype, _narrow(np.ascontiguousarray(rows))
    alive = np.flatnonzero(_are_alive(rows))
    classes, columns = np.zeros(count, np.uint8), np.zeros(width, np.uint8)
    if len(alive):
        found, columns = _classes(rows, alive), _groups(rows, alive)
        classes[alive] = found
        turned = _turned(rows, alive[np.argsort(found, kind="stable")])
    groups = int(columns.max()) + 1
    packer = _make_packer()
    squeezed = packer.compress(_nibbles(classes).data)
    out = [_HEADER.pack(width, groups, int(classes.max()), len(squeezed))]
    out += [_nibbles(columns).tobytes()] * (groups > 1) + [squeezed]
    for first, last in _ranges(classes[alive]):
        for group in range(groups):
            values = turned[columns == group, first:last].reshape(-1)
            out += _stream(values, item, packer)
    return b"".join(out)


def unpack_rows(data: bytes | np.ndarray, elements: int, dtype: np.dtype) -> SparseRows:
    """Returns the rows that `pack_rows` packed.

    Args:
        data: bytes from `pack_rows`, also as uint8.
        elements: number of integers in all rows together.
        dtype: int8 or int16.

    Raises:
        FormatError: if the bytes are not those of `elements` integers.
    """
    reader = _Reader(data)
    width, groups, most, size = reader.struct(_HEADER)
    if not width or elements % width:
        raise _wrong(f"rows of {width} integers, {elements} in all")
    if not 1 <= groups <= _MOST + 1 or most > _MOST:
        raise _wrong(f"{groups} groups of columns and {most} classes")
    rows = elements // width
    columns = np.zeros(width, np.uint8)
    if groups > 1:
        columns = _unnibbled(reader.take(-(-width // 2)), width)
    classes = _unnibbled(reader.decompressed(size, -(-rows // 2)), rows)
    ours = [np.flatnonzero(columns == group) for group in range(groups)]
    sizes = [len(group) for group in ours]
    if sum(sizes) < width or not all(sizes) or classes.max(initial=0) > most:
        raise _wrong("a class or a group that is not there")
    alive = np.flatnonzero(classes)
    classes = classes[alive]
    out = np.empty((len(alive), width), np.int8)
    order = np.argsort(classes, kind="stable")
    for first, last in _ranges(classes):
        turned = _columns(last - first, width, out.dtype)
        for group in ours:
            part = _unstream(reader, len(group) * (last - first), dtype)
            if part.itemsize > turned.itemsize:
                turned = turned.astype(dtype)
            turned[group] = part.reshape(len(group), -1)
        if turned.itemsize > out.itemsize:
            out = out.astype(dtype)
        _put_columns(turned, order[first:last], out)
    if reader.left:
        raise _wrong(f"{reader.left} bytes more than its streams take")
    out.setflags(write=False)
    return SparseRows(rows, alive, out)


def _put_columns(columns: np.ndarray, at: np.ndarray, out: np.ndarray) -> None:
    """Writes rows that are given as columns, `[width, rows]`, to the rows `at` of `out`."""
    room, columns = items(out), columns.astype(out.dtype, copy=False)
    for some in _turns(len(at), len(columns) * columns.itemsize):
        room[at[some]] = items(np.ascontiguousarray(columns[:, some].T))


# Classes and groups.


def _narrow(rows: np.ndarray) -> np.ndarray:
    """Returns rows as int8, which halves int16, if all integers fit symbols of 8 bits."""
    if rows.itemsize > 1 and max(-int(rows.min()), int(rows.max())) < 1 << 7:
        return rows.astype(np.int8)
    return rows


def _are_alive(rows: np.ndarray) -> np.ndarray:
    """Whether each row has an integer that is not zero."""
    size = math.gcd(rows.shape[1] * rows.itemsize, 8)
    words, found = rows.view(f"u{size}"), np.empty(len(rows), np.bool_)
    for some in _blocks(*rows.shape):
        block = words[some]
        ored = block[:, 0].copy()
        for word in block.T[1:]:
            ored |= word
        found[some] = ored != 0
    return found


def _blocks(count: int, width: int) -> Iterator[slice]:
    """Slices of rows that are counted at once."""
    at_once = max(_TURNED_ROWS, _COUNTED_ELEMENTS // width)
    return (slice(i, i + at_once) for i in range(0, count, at_once))


def _ranges(classes: np.ndarray) -> Iterator[tuple[int, int]]:
    """First row and end of each class that has rows, were the rows sorted by class."""
    ends = np.cumsum(np.bincount(classes, minlength=_MOST + 1)).tolist()
    return ((a, b) for a, b in itertools.pairwise(ends) if a < b)


def _classes(rows: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Learns classes from the rows at some positions; returns the class of each, uint8, from 1."""
    count, width = len(alive), rows.shape[1]
    classes = min(CLASSES, 1 + count * width // _LEARNT_ELEMENTS)
    found = np.ones(count, np.uint8)
    if classes > 1:
        sample = _turned(rows, _sample(alive))
        tail = _tail(sample)
        learnt = _learnt(_counts(sample, tail), classes)
        for some in _blocks(count, width):
            every = count == len(rows)
            turned = _turned(rows[some]) if every else _turned(rows, alive[some])
            counts = _counts(turned, tail)
            found[some] += _cheapest(counts, *learnt)
    return found


def _sample(alive: np.ndarray) -> np.ndarray:
    return alive[:: -(-len(alive) // _SAMPLE_ROWS)]


def _tail(sample: np.ndarray) -> int:
    """Returns the magnitude from which on integers need not be told apart."""
    tail, few = _TAIL, _FEW * sample.size
    while (
        tail > 2
        and np.count_nonzero((sample >= tail - 1) | (sample <= 1 - tail)) <= few
    ):
        tail -= 1
    return tail


def _counts(turned: np.ndarray, tail: int) -> np.ndarray:
    """Counts integers in each row; those beyond the tail count as the tail.

    Args:
        turned: rows as columns, `[width, rows]`.
        tail: magnitude, at most 127.

    Returns:
        float32[integers, rows], for the integers from -tail to tail.
    """
    if turned.itemsize > 1:
        turned = np.clip(turned, -tail, tail).astype(np.int8)
    dtype = np.uint8 if len(turned) < 256 else np.uint32
    found = np.empty((2 * tail + 1, turned.shape[1]), np.float32)
    for i, value in enumerate(range(-tail, tail + 1)):
        if not value:
            continue  # zeros are the rest, see below
        compare = (
            np.equal
            if abs(value) < tail
            else np.less_equal
            if i == 0
            else np.greater_equal
        )
        equal = compare(turned, np.int8(value)).view(np.uint8)
        found[i] = np.add.reduce(equal, axis=0, dtype=dtype)
    found[tail] = 0
    found[tail] = len(turned) - found.sum(axis=0)
    return found


def _learnt(counts: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Learns the cost of each integer in a class, float32[classes, integers], and of each class.

    Learning is expectation maximization with hard assignments. It starts from classes of equally
    many rows, by the sum of their magnitudes.
    """
    tail = len(counts) // 2
    sizes = np.abs(np.arange(-tail, tail + 1, dtype=np.float32)) @ counts
    bounds = np.quantile(sizes, np.linspace(0, 1, classes + 1)[1:-1])
    of = np.searchsorted(bounds, sizes)
    width = counts[:, 0].sum()
    for _ in range(_ROUNDS):
        member = (of == np.arange(classes)[:, None]).astype(np.float32)
        sums, rows = member @ counts.T + 0.5, member.sum(axis=1) + 0.5
        bits = -np.log2(sums / sums.sum(axis=1, keepdims=True))
        own = -np.log2(rows / rows.sum())
        # Whole numbers below 2**24 with the class in the lowest bits, so a minimum tells the class.
        scale = np.float32(2**23 / (width * bits.max() + own.max()) // CLASSES)
        bits = np.round(bits * scale) * CLASSES
        own = np.round(own * scale) * CLASSES + np.arange(classes, dtype=np.float32)
        of = _cheapest(counts, bits, own)
    return bits, own


def _cheapest(counts: np.ndarray, costs: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Returns the class in which each row costs least, uint8, from 0."""
    least = np.minimum.reduce(costs @ counts + own[:, None], axis=0)
    return (least.astype(np.int32) & CLASSES - 1).astype(np.uint8)


def _groups(rows: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Returns the group of each column, uint8: one for each octave of the mean magnitude."""
    count, width = len(alive), rows.shape[1]
    if count * width < CLASSES * _LEARNT_ELEMENTS:
        return np.zeros(width, np.uint8)
    sample = taken(rows, _sample(alive)).astype(np.int32)
    means = np.abs(sample).mean(axis=0) + 0.02
    octaves = np.round(np.log2(means)).astype(np.int64)
    lowest = max(int(octaves.min()), int(octaves.max()) - GROUPS + 1)
    _, found = np.unique(np.maximum(octaves, lowest), return_inverse=True)
    return found.astype(np.uint8)


def _turned(rows: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
    """Returns the rows at some positions, or all, transposed: `[width, rows]`."""
    count = len(rows) if at is None else len(at)
    found = _columns(count, rows.shape[1], rows.dtype)
    for some in _turns(count, rows.shape[1] * rows.itemsize):
        found[:, some] = taken(rows, some if at is None else at[some]).T
    return found


def _turns(count: int, row_bytes: int) -> Iterator[slice]:
    """Slices of rows that are transposed at once."""
    at_once = max(_TURNED_ROWS, _TURNED_BYTES // row_bytes)
    return (slice(i, i + at_once) for i in range(0, count, at_once))


def _columns(rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Makes an empty array for the columns of `rows` rows, `[width, rows]`."""
    return np.empty((width, rows + _APART_BYTES // dtype.itemsize), dtype)[:, :rows]


# Streams.


def _stream(values: np.ndarray, item: np.dtype, packer: Any) -> Iterator[bytes]:
    """Yields the header, the symbols, and the integers that do not fit these, stored as `item`."""
    whole, unsigned = 8 * item.itemsize, np.dtype(f"u{values.itemsize}")
    for bits, share in _ESCAPES.items():
        if bits >= whole:
            continue
        largest = (1 << bits - 1) - 1
        symbols = values.view(unsigned) + unsigned.type(largest)
        # Too small ones too, as negative numbers wrap round.
        is_over = symbols > 2 * largest
        if np.count_nonzero(is_over) <= share * len(values):
            over = np.flatnonzero(is_over)
            rest = values[over].astype(item)
            symbols[over] = 2 * largest + 1
            packed = _packed(symbols.astype(np.uint8, copy=False), bits)
            break
    else:
        bits, rest, packed = whole, values[:0], _planes(values)
    squeezed = packer.compress(packed.data)
    escaped = packer.compress(_planes(rest).data) if len(rest) else b""
    yield _STREAM.pack(bits, len(squeezed), len(escaped))
    yield from (squeezed, escaped)


def _unstream(reader: _Reader, count: int, dtype: np.dtype) -> np.ndarray:
    """Reads the integers of a stream, whose escapes are of `dtype`; as int8 where they fit."""
    bits, size, escaped = reader.struct(_STREAM)
    whole = 8 * dtype.itemsize
    if bits == whole and not escaped:
        return _unplaned(reader.decompressed(size, count * dtype.itemsize), dtype)
    if bits not in _ESCAPES or bits >= whole:
        raise _wrong(f"a stream of {bits} bits")
    packed = reader.decompressed(size, -(-count * bits // 8))
    values = _unpacked(packed, bits)[:count]
    # At 8 bits the escape symbol reads as -128, which no other symbol does.
    is_over = values.view(np.uint8) == (1 << bits - 1)
    if is_over.any() != bool(escaped):
        raise _wrong(f"{escaped} bytes of what does not fit its symbols")
    if escaped:
        over = np.flatnonzero(is_over)
        rest = reader.decompressed(escaped, len(over) * dtype.itemsize)
        found = _unplaned(rest, dtype)
        if not np.array_equal(found, found.astype(np.int8)):
            values = values.astype(dtype)
        values[over] = found
    return values


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns the integers that packed symbols stand for, int8."""
    largest = np.uint8((1 << bits - 1) - 1)
    if bits == 8:
        return (packed - largest).view(np.int8)
    found = np.empty(len(packed), f"<u{8 // bits}")
    for start in range(0, len(packed), _SPREAD_BYTES):
        some = found[start : start + _SPREAD_BYTES]
        some[...] = packed[start : start + _SPREAD_BYTES]
        for shift, mask in _SPREADS[bits]:
            some |= some << shift
            some &= mask
        symbols = some.view(np.uint8)
        symbols -= largest
    return found.view(np.int8)


def _packed(symbols: np.ndarray, bits: int) -> np.ndarray:
    """Packs symbols of 2, 4 or 8 bits into bytes, the first in the lowest bits."""
    if bits == 8:
        return symbols
    size = -(-len(symbols) * bits // 8)
    if len(symbols) % 4:
        symbols = np.concatenate([symbols, np.zeros(-len(symbols) % 4, np.uint8)])
    if bits == 4:
        words = symbols.view("<u2")
        return (words | words >> 4).astype(np.uint8)[:size]
    words = symbols.view("<u4")
    words = words | words >> 6
    return (words | words >> 12).astype(np.uint8)[:size]


def _planes(values: np.ndarray) -> np.ndarray:
    """Returns the lowest bytes of all integers, then the highest, uint8."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.reshape(-1)


def _unplaned(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    *lower, highest = data.reshape(dtype.itemsize, -1)
    found = highest.astype(f"<u{dtype.itemsize}", copy=False)
    for plane in reversed(lower):
        found <<= 8
        found |= plane
    return found.view(dtype)


def _nibbles(values: np.ndarray) -> np.ndarray:
    return _packed(values, 4)


def _unnibbled(data: np.ndarray, count: int) -> np.ndarray:
    return np.stack([data & 15, data >> 4], axis=1).reshape(-1)[:count]


# Bytes.


def zstandard() -> Any:
    """Returns the module zstandard, which compresses streams.

    Raises:
        OptionError: if the module is not installed.
    """
    try:
        # Imported only here: users who do not save on a lattice need not have it.
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise errors.OptionError(
            "rows on a lattice, and moments, need zstandard, which is not installed\n"
            '  hint: pip install "cnr-jax[lattice]"',
            kind="not_installed",
        ) from error


def _make_packer() -> Any:
    module = zstandard()
    return module.ZstdCompressor(
        compression_params=module.ZstdCompressionParameters(
            **_MATCHES, strategy=module.STRATEGY_FAST, write_content_size=False
        )
    )


class _Reader:
    """Reader of packed rows, which takes bytes from the front."""

    def __init__(self, data: bytes | np.ndarray) -> None:
        self._data, self._at = np.frombuffer(data, np.uint8), 0
        self._unpacker = zstandard().ZstdDecompressor()

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> np.ndarray:
        if size > self.left:
            raise _wrong(f"{self.left} bytes, expected {size} more")
        self._at += size
        return self._data[self._at - size : self._at]

    def decompressed(self, size: int, expected: int) -> np.ndarray:
        """Takes `size` bytes and returns the `expected` bytes to which they decompress."""
        data, module = self.take(size).data, zstandard()
        try:
            # zstd heeds `max_output_size` only if the frame does not state its own length.
            said = module.frame_content_size(data)
            if said not in (-1, expected):
                raise _wrong(f"a stream of {said} bytes, expected {expected}")
            found = self._unpacker.decompress(
                data, max_output_size=expected, allow_extra_data=False
            )
        except module.ZstdError as error:
            raise _wrong(f"a stream that zstd does not read: {error}") from error
        if len(found) != expected:
            raise _wrong(f"a stream of {len(found)} bytes, expected {expected}")
        return np.frombuffer(found, np.uint8)

    def struct(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size).data)


def _wrong(got: str) -> errors.FormatError:
    return errors.FormatError(f"packed rows are not as expected: got {got}")
