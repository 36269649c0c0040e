"""Row ids on disk: a sorted set of positions within a tile, in few bytes.

Four forms, named in the manifest beside the number of rows they hold:

* `all`, `none`: every row of the tile, or no row. No bytes.
* `bitmap`: one bit per row of the tile, bit `i % 8` of byte `i // 8`, counted from the
  lowest; the bits past the last row are 0.
* `gaps`: the first position, then for each further one its distance from the one
  before, less one. Each is an unsigned LEB128 varint in its shortest form.

The invariant to remember: decoding any bytes gives exactly `count` positions, strictly
increasing and all within the tile, or it raises `FormatError`.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cnr_jax.errors import FormatError

RowIdForm = Literal["all", "none", "bitmap", "gaps"]
"""How a set of row ids is written."""

FORMS: tuple[str, ...] = get_args(RowIdForm)

# Positions are int64, so 9 groups of 7 bits hold every one of them.
_MAX_VARINT_BYTES = 9

# Varints written at once: keeps temporaries at some tens of MiB. Arbitrary.
_BLOCK_IDS = 1 << 20


def encode_rowids(
    positions: NDArray[np.integer[Any]], rows: int
) -> tuple[RowIdForm, NDArray[np.uint8]]:
    """Writes row positions in the smallest form.

    Args:
        positions: integer[n], strictly increasing, each in 0 ... rows - 1.
        rows: rows of the tile.

    Returns:
        The form's name and its bytes, uint8[...]. If a bitmap and gaps have equal length,
        the bitmap is taken. A tile without rows holds `"none"`.

    Raises:
        FormatError: if `positions` are not strictly increasing rows of the tile.

    Example:
        >>> form, data = encode_rowids(np.array([3, 4, 1000]), rows=100_000)
        >>> form, data.tolist()  # 3, then 4 - 3 - 1, then 1000 - 4 - 1 = 7 * 128 + 99
        ('gaps', [3, 0, 227, 7])
        >>> form, data = encode_rowids(np.array([0, 1, 9]), rows=10)
        >>> form, data.tolist()
        ('bitmap', [3, 2])
    """
    gaps = _gaps_of(positions, rows)
    count = gaps.size
    if count == 0:
        return "none", np.empty(0, np.uint8)
    if count == rows:
        return "all", np.empty(0, np.uint8)
    bitmap_bytes = _bitmap_bytes(rows)
    # A varint takes a byte at least: no need to measure gaps that cannot win.
    if count < bitmap_bytes and _varint_bytes(gaps) < bitmap_bytes:
        return "gaps", _write_varints(gaps)
    mask = np.zeros(rows, np.bool_)
    mask[positions] = True
    return "bitmap", np.packbits(mask, bitorder="little")


def decode_rowids(
    form: str, data: NDArray[np.uint8], rows: int, count: int
) -> NDArray[np.int64]:
    """Reads row positions, checking every rule of the form.

    Args:
        form: name of the form, one of `FORMS`. Need not be the smallest one.
        data: uint8[...], the bytes of this set and nothing else.
        rows: rows of the tile.
        count: number of positions that the manifest promises.

    Returns:
        int64[count], strictly increasing, each in 0 ... rows - 1.

    Raises:
        FormatError: if the form is unknown, or bytes, `rows` and `count` do not agree.

    Example:
        >>> data = np.array([3, 0, 227, 7], np.uint8)
        >>> decode_rowids("gaps", data, rows=100_000, count=3).tolist()
        [3, 4, 1000]
    """
    if data.dtype != np.uint8 or data.ndim != 1:
        raise _error(
            "the bytes are not a byte array", f"uint8[n], got {data.dtype}{data.shape}"
        )
    if not 0 <= count <= rows:
        raise _error(
            f"a tile of {rows:,} rows cannot hold {count:,} row ids",
            f"a count from 0 to {rows:,}",
        )
    if form == "all":
        _expect("length of form 'all'", data.size, 0)
        _expect("number of row ids in form 'all'", count, rows)
        return np.arange(rows, dtype=np.int64)
    if form == "none":
        _expect("length of form 'none'", data.size, 0)
        _expect("number of row ids in form 'none'", count, 0)
        return np.empty(0, np.int64)
    if form == "bitmap":
        return _decode_bitmap(data, rows, count)
    if form == "gaps":
        return _decode_gaps(data, rows, count)
    raise _error("unknown form", f"one of {', '.join(FORMS)}, got {form!r}")


def _decode_bitmap(data: NDArray[np.uint8], rows: int, count: int) -> NDArray[np.int64]:
    _expect("length of the bitmap in bytes", data.size, _bitmap_bytes(rows))
    if rows % 8 and int(data[-1]) >> (rows % 8):
        raise _error(
            "the bitmap marks rows past the end of the tile",
            f"zero bits past row {rows - 1:,}, got last byte {int(data[-1]):#04x}",
        )
    marked = np.unpackbits(data, count=rows, bitorder="little").view(np.bool_)
    positions = np.flatnonzero(marked)
    _expect("number of row ids in the bitmap", positions.size, count)
    return positions.astype(np.int64, copy=False)


def _decode_gaps(data: NDArray[np.uint8], rows: int, count: int) -> NDArray[np.int64]:
    positions = _read_varints(data, count)
    # In place: gaps, then distances, then positions counted from 1. A distance is at
    # most 2**63, so the first sum that does not fit int64 turns negative. So both the
    # minimum and the last position are checked.
    positions += 1
    np.cumsum(positions, out=positions)
    if count and (int(positions.min()) < 1 or int(positions[-1]) > rows):
        raise _error(
            "the gaps lead past the end of the tile", f"positions below {rows:,}"
        )
    positions -= 1
    return positions


def _gaps_of(positions: NDArray[np.integer[Any]], rows: int) -> NDArray[np.int64]:
    """Returns int64[n], the first position and the distances less one; checks order."""
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise _error(
            "positions are not a list of integers",
            f"integer[n], got {positions.dtype}{positions.shape}",
        )
    ids = positions.astype(np.int64, copy=False)
    gaps = ids.copy()
    if ids.size == 0:
        return gaps
    # Range first: differences of values within a tile cannot overflow.
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise _error(
            "positions lie outside the tile",
            f"0 to {rows - 1:,}, got {low:,} to {high:,}",
        )
    gaps[1:] -= ids[:-1]
    gaps[1:] -= 1
    if ids.size > 1 and int(gaps[1:].min()) < 0:
        at = int(np.argmax(gaps[1:] < 0))
        raise _error(
            "positions are not strictly increasing",
            f"more than {int(ids[at]):,} after it, got {int(ids[at + 1]):,}",
        )
    return gaps


def _bitmap_bytes(rows: int) -> int:
    return (rows + 7) // 8


def _varint_groups(values: NDArray[np.int64]) -> int:
    """Returns how many 7-bit groups the largest value takes."""
    return max(1, (int(values.max()).bit_length() + 6) // 7)


def _varint_bytes(values: NDArray[np.int64]) -> int:
    longer = range(1, _varint_groups(values))
    return values.size + sum(
        int(np.count_nonzero(values >= 1 << 7 * group)) for group in longer
    )


def _write_varints(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    blocks = range(0, values.size, _BLOCK_IDS)
    return np.concatenate([_write_block(values[i : i + _BLOCK_IDS]) for i in blocks])


def _write_block(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Lays out one column per group, then drops the groups a value does not need."""
    groups = _varint_groups(values)
    codes = np.empty((values.size, groups), np.uint8)
    used = np.empty((values.size, groups), np.bool_)
    used[:, 0] = True
    for group in range(groups):
        codes[:, group] = (values >> 7 * group) & 0x7F
        if group + 1 < groups:
            used[:, group + 1] = values >= 1 << 7 * (group + 1)
            # The top bit says that another group follows.
            codes[:, group] |= used[:, group + 1].astype(np.uint8) << 7
    return codes[used]


def _read_varints(data: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(data < 0x80)
    _expect("number of row ids in the gaps", ends.size, count)
    _expect("length of the gaps in bytes", data.size, int(ends[-1]) + 1 if count else 0)
    if data.size == count:  # no varint is longer than a byte
        return data.astype(np.int64)
    starts = np.empty_like(ends)
    starts[0] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    lengths = ends - starts + 1
    if int(lengths.max()) > _MAX_VARINT_BYTES:
        raise _error(
            "a varint is too long",
            f"at most {_MAX_VARINT_BYTES} bytes, got {int(lengths.max())}",
        )
    values = (data[starts] & 0x7F).astype(np.int64)
    left = np.flatnonzero(lengths > 1)
    if (data[ends[left]] == 0).any():
        raise _error("a varint is not in its shortest form", "no zero group at its end")
    group = 1
    while left.size:
        part = (data[starts[left] + group] & 0x7F).astype(np.int64)
        values[left] |= part << 7 * group
        group += 1
        left = left[lengths[left] > group]
    return values


def _expect(what: str, got: int, expected: int) -> None:
    if got != expected:
        raise _error(f"wrong {what}", f"{expected:,}, got {got:,}")


def _error(fact: str, expected: str) -> FormatError:
    return FormatError(f"row ids: {fact}\n  expected {expected}", kind="row_ids")
