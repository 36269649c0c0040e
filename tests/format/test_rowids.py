"""Row ids: every set comes back, in the smallest form; no bytes decode to nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cnr_jax.errors import FormatError
from cnr_jax.format.rowids import FORMS, decode_rowids, encode_rowids

from ..conftest import each_of

LIMIT = 2**63 - 1  # the largest int64


def ids(*positions: int) -> NDArray[np.int64]:
    return np.array(positions, np.int64)


def as_bytes(*values: int) -> NDArray[np.uint8]:
    return np.array(values, np.uint8)


def varint(value: int) -> list[int]:
    """The textbook loop, as an oracle."""
    out: list[int] = []
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return [*out, value]


def gaps_bytes(positions: list[int]) -> list[int]:
    before = -1
    out: list[int] = []
    for position in positions:
        out += varint(position - before - 1)
        before = position
    return out


def bitmap_bytes(positions: list[int], rows: int) -> list[int]:
    return list(sum(1 << p for p in positions).to_bytes((rows + 7) // 8, "little"))


@st.composite
def tiles(draw: st.DrawFn) -> tuple[list[int], int]:
    """Sorted positions and the rows of their tile: small and dense, or huge."""
    rows = draw(st.integers(1, 200) | st.integers(1, 2**40))
    chosen = draw(st.sets(st.integers(0, rows - 1), max_size=64))
    return sorted(chosen), rows


@given(tiles())
@example(([], 0))
@example(([0], 1))
@example((list(range(8)), 8))
@example((list(range(200)), 200))
def test_every_set_comes_back(tile: tuple[list[int], int]) -> None:
    positions, rows = tile
    form, data = encode_rowids(ids(*positions), rows)
    decoded = decode_rowids(form, data, rows, len(positions))
    assert decoded.dtype == np.int64
    assert decoded.tolist() == positions


@given(tiles())
def test_the_smallest_form_is_taken_and_laid_out_as_specified(
    tile: tuple[list[int], int],
) -> None:
    positions, rows = tile
    form, data = encode_rowids(ids(*positions), rows)
    assert data.dtype == np.uint8
    gaps = gaps_bytes(positions)
    if len(positions) in (0, rows):
        assert (form, data.size) == ("all" if positions else "none", 0)
    elif len(gaps) < (rows + 7) // 8:
        assert (form, data.tolist()) == ("gaps", gaps)
    else:
        assert (form, data.tolist()) == ("bitmap", bitmap_bytes(positions, rows))


def test_bitmap_wins_a_tie() -> None:
    assert encode_rowids(ids(0, 9), 16)[0] == "bitmap"  # 2 bytes either way
    assert encode_rowids(ids(0, 9), 17)[0] == "gaps"
    # 19 bytes either way, one gap being two bytes long.
    positions = ids(*range(17), 145)
    assert encode_rowids(positions, 152)[0] == "bitmap"
    assert encode_rowids(positions, 153)[0] == "gaps"


def test_tile_without_rows_holds_none() -> None:
    assert encode_rowids(ids(), 0)[0] == "none"


@each_of("bits", range(1, 63))
def test_gaps_around_every_power_of_two_come_back(bits: int) -> None:
    for first in (2**bits - 1, 2**bits):
        form, data = encode_rowids(ids(0, first), LIMIT)
        assert (form, data.tolist()) == ("gaps", gaps_bytes([0, first]))
        assert decode_rowids(form, data, LIMIT, 2).tolist() == [0, first]


def test_sets_longer_than_a_block_come_back(tiny_limits: Any) -> None:
    positions = np.cumsum(np.tile([1, 127, 128, 129, 40_000], 9)).astype(np.int64)
    whole = encode_rowids(positions, 10**6)
    tiny_limits(row_id_block=4)
    form, data = encode_rowids(positions, 10**6)
    assert (form, data.tolist()) == (whole[0], whole[1].tolist())
    assert form == "gaps"
    assert (decode_rowids(form, data, 10**6, positions.size) == positions).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_positions_of_any_integer_width_are_written_alike(dtype: type) -> None:
    for positions, rows in (([1, 2, 200], 10**6), ([1, 2, 5], 9)):
        form, data = encode_rowids(np.array(positions, dtype), rows)
        want_form, want = encode_rowids(ids(*positions), rows)
        assert (form, data.tolist()) == (want_form, want.tolist())


def test_encoding_leaves_the_positions_as_they_were() -> None:
    positions = ids(3, 7, 1000)
    encode_rowids(positions, 10**6)
    assert positions.tolist() == [3, 7, 1000]


@each_of(
    ("positions", "problem"),
    [
        (ids(1, 1), "strictly increasing"),
        (ids(5, 2), "strictly increasing"),
        (ids(0, 100), "outside the tile"),
        (ids(-1, 3), "outside the tile"),
        (ids(3, -1), "outside the tile"),
        (ids(LIMIT, -LIMIT), "outside the tile"),
        (np.array([2**64 - 1], np.uint64), "outside the tile"),
        (np.array([1.0]), "not a list of integers"),
        (np.array([True]), "not a list of integers"),
        (np.array([[1]]), "not a list of integers"),
    ],
)
def test_encoding_refuses_what_is_no_sorted_set(
    positions: NDArray[np.int64], problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        encode_rowids(positions, 100)


@each_of(
    ("form", "data", "rows", "count", "problem"),
    [
        ("roaring", as_bytes(), 10, 0, "unknown form"),
        ("all", as_bytes(), 10, 9, "number of row ids"),
        ("all", as_bytes(0), 10, 10, "length"),
        ("none", as_bytes(), 10, 1, "number of row ids"),
        ("none", as_bytes(0), 10, 0, "length"),
        ("gaps", as_bytes(1), 10, -1, "cannot hold"),
        ("gaps", as_bytes(1), 10, 11, "cannot hold"),
        ("gaps", as_bytes(), -1, 0, "cannot hold"),
        ("bitmap", as_bytes(1), 9, 1, "length of the bitmap"),
        ("bitmap", as_bytes(1, 0, 0), 9, 1, "length of the bitmap"),
        ("bitmap", as_bytes(1, 2), 9, 1, "past the end"),
        ("bitmap", as_bytes(1, 1), 9, 1, "number of row ids"),
        ("bitmap", as_bytes(1, 0), 9, 2, "number of row ids"),
        ("gaps", as_bytes(1, 1), 10, 1, "number of row ids"),
        ("gaps", as_bytes(1), 10, 2, "number of row ids"),
        ("gaps", as_bytes(1, 0x80), 10, 1, "length of the gaps"),
        ("gaps", as_bytes(0x80), 10, 0, "length of the gaps"),
        ("gaps", as_bytes(10), 10, 1, "past the end"),
        ("gaps", as_bytes(8, 1), 10, 2, "past the end"),
        ("gaps", as_bytes(0x81, 0), 10, 1, "shortest form"),
        ("gaps", as_bytes(*[0x81] * 9, 1), LIMIT, 1, "too long"),
    ],
)
def test_decoding_refuses(
    form: str, data: NDArray[np.uint8], rows: int, count: int, problem: str
) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        decode_rowids(form, data, rows, count)
    assert caught.value.kind == "row_ids"


@each_of(
    "gaps",
    [
        [LIMIT],
        [LIMIT, 0],
        [LIMIT, LIMIT],
        [LIMIT, LIMIT, 5],
        [LIMIT - 1, 0],
        [5, LIMIT - 5, 5],
        [2**62] * 8,
    ],
)
def test_gaps_that_overflow_int64_are_refused(gaps: list[int]) -> None:
    data = as_bytes(*[byte for gap in gaps for byte in varint(gap)])
    for rows in (100, LIMIT):
        with pytest.raises(FormatError, match="past the end"):
            decode_rowids("gaps", data, rows, len(gaps))


def test_decoding_refuses_data_that_is_not_bytes() -> None:
    for data in (np.zeros(1, np.int64), np.zeros((1, 1), np.uint8)):
        with pytest.raises(FormatError, match="byte array"):
            decode_rowids("gaps", data, 10, 1)  # pyright: ignore[reportArgumentType]


def test_decoding_takes_a_form_that_is_not_the_smallest() -> None:
    every = decode_rowids("bitmap", as_bytes(0xFF, 0x01), 9, 9)
    assert every.tolist() == list(range(9))
    assert decode_rowids("gaps", as_bytes(0, 0), 2, 2).tolist() == [0, 1]
    assert decode_rowids("bitmap", as_bytes(0), 3, 0).tolist() == []


def assert_refused_or_sound(
    form: str, data: NDArray[np.uint8], rows: int, count: int
) -> bool:
    """Returns whether the bytes were refused; fails if they decode to nonsense."""
    try:
        decoded = decode_rowids(form, data, rows, count)
    except FormatError:
        return True
    assert decoded.dtype == np.int64
    assert decoded.size == count
    assert (np.diff(decoded) > 0).all()
    assert all(0 <= position < rows for position in decoded.tolist())
    return False


# One encoding per form with bytes; the gaps have varints of one to four bytes.
SMALL = {
    "bitmap": ([0, 1, 4, 9, 10], 13),
    "gaps": ([3, 4, 200, 40_000, 3_000_000], 3_000_400),
}


@pytest.mark.parametrize("form", SMALL)
def test_every_truncation_is_refused(form: str) -> None:
    positions, rows = SMALL[form]
    got_form, data = encode_rowids(ids(*positions), rows)
    assert got_form == form
    for length in range(data.size):
        assert assert_refused_or_sound(form, data[:length], rows, len(positions))


@pytest.mark.parametrize("form", SMALL)
def test_every_bit_flip_is_refused_or_decodes_to_a_sound_set(form: str) -> None:
    positions, rows = SMALL[form]
    _, data = encode_rowids(ids(*positions), rows)
    refused = 0
    for bit in range(data.size * 8):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        refused += assert_refused_or_sound(form, flipped, rows, len(positions))
        if form == "bitmap":  # one row more or less never matches the count
            assert refused == bit + 1
    assert refused > 0


@given(
    form=st.sampled_from([*FORMS, "other"]),
    data=st.binary(max_size=24),
    rows=st.integers(0, 80) | st.integers(0, LIMIT),
    count=st.integers(0, 12),
)
def test_arbitrary_bytes_are_refused_or_decode_to_a_sound_set(
    form: str, data: bytes, rows: int, count: int
) -> None:
    assert_refused_or_sound(form, np.frombuffer(data, np.uint8), rows, count)
