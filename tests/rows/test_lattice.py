"""Rows on a lattice: their error, their exact bits, sums of differences, packed bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_jax import errors
from cnr_jax.rows.codecs import Codec, make_codec, packed
from cnr_jax.rows.codecs.dither import row_keys
from cnr_jax.rows.codecs.lattice import Lattice
from cnr_jax.rows.codecs.packed import pack_rows, unpack_rows
from cnr_jax.rows.codecs.residual import Digest, costs_less
from cnr_jax.rows.codecs.sparse import RowsAt, SparseRows, joined_rows

from ..conftest import each_of

pytest.importorskip("zstandard")

BITS = (2, 3, 4, 8)


def trained(rows: int, dim: int = 32, seed: int = 0) -> np.ndarray:
    """Rows of uneven size, some of which no lattice of the others holds."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, dim)) * 0.05 * rng.gamma(2, 0.5, size=(rows, 1))
    x[:4], x[4, 1], x[5, 2] = 0, np.nan, -np.inf
    x[6], x[7], x[8:20] = x[6] * 1e7, x[7] * 1e-7, x[8:20] * 0.05
    return x.astype(np.float32)


# One program each: operation by operation, each shape would be compiled dozens of times.
@partial(jax.jit, static_argnums=0)
def step_of(codec: Lattice, rows: Any) -> jax.Array:
    return codec.step(rows)


@partial(jax.jit, static_argnums=0)
def encode_on(codec: Lattice, rows: Any, step: Any, *keys: Any) -> Any:
    return codec.encode_on(rows, step, *keys)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(codec: Codec, parts: Any, dim: int, dtype: Any) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)


def encoded(
    codec: Lattice, rows: np.ndarray, step: Any, keys: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    given = (rows, np.float32(step)) if keys is None else (rows, np.float32(step), keys)
    found = encode_on(codec, *given)
    return {n: np.asarray(p) for n, p in found.parts.items()}, np.asarray(found.escaped)


@pytest.mark.slow
@each_of("bits", BITS)
def test_mean_error_is_that_of_adaptive_codes(bits: int) -> None:
    rows = trained(4000)[20:]
    codec, adaptive = Lattice(bits=bits), make_codec("adaptive", bits)
    parts, escaped = encoded(codec, rows, step_of(codec, rows))
    assert not escaped.any()
    found: list[float] = []
    for each, of in ((codec, parts), (adaptive, adaptive.encode(rows).parts)):
        read = np.asarray(each.decode(of, dim=rows.shape[1], dtype=np.float32))
        found.append(float(np.linalg.norm(rows - read, axis=1).mean()))
    assert found[0] == pytest.approx(found[1], rel=0.05)


@each_of("bits", BITS)
@each_of("dtype", [np.float32, jnp.bfloat16])
def test_restored_rows_are_on_the_same_step_while_many_stay(
    bits: int, dtype: type
) -> None:
    codec, rng = Lattice(bits=bits), np.random.default_rng(3)
    rows = jnp.asarray(trained(4_096)).astype(dtype)
    step = step_of(codec, rows)
    parts, escaped = encoded(codec, np.asarray(rows), step)
    restored = np.asarray(decode(codec, parts, 32, np.dtype(dtype))).copy()
    restored[escaped] = np.asarray(rows)[escaped]
    assert step_of(codec, restored) == step
    moved = restored.astype(np.float32)
    moved[rng.random(4_096) < 0.8] += rng.normal(scale=0.3 * float(step), size=32)
    moved = moved.astype(dtype)
    assert step_of(codec, moved) == step
    # A step that is much too fine is not kept, however many rows lie on it.
    parts, _ = encoded(codec, np.asarray(rows), step / 4)
    finer = np.asarray(decode(codec, parts, 32, np.dtype(dtype)))
    assert step_of(codec, finer) > 0.8 * float(step)


@each_of("bits", BITS)
@each_of("off", [0.02, 0.05, 0.1, 0.3])
def test_rows_near_multiples_of_a_step_do_not_make_it_coarse(
    bits: int, off: float
) -> None:
    """All have moved since they were restored, by less than a step."""
    codec, rng = Lattice(bits=bits), np.random.default_rng(4)
    rows = trained(4_096)[20:]
    for _ in range(3):
        step = float(step_of(codec, rows))
        parts, _ = encoded(codec, rows, step)
        read = np.asarray(decode(codec, parts, 32, np.dtype(np.float32)))
        rows = read + rng.normal(scale=off * step, size=read.shape).astype(np.float32)
    fresh = float(step_of(codec, trained(4_096)[20:]))
    assert 0.6 * fresh < step_of(codec, rows) < 1.3 * fresh


@pytest.mark.slow
def test_few_rows_of_another_magnitude_do_not_choose_the_step() -> None:
    rows, codec = trained(1000)[20:], Lattice(bits=4)
    alike = float(step_of(codec, rows))
    rows[:5] *= 1e6
    assert float(step_of(codec, rows)) == pytest.approx(alike, rel=0.02)


@each_of(
    ("values", "step"),
    [((0.0, 0.0), 1.0), ((3.0, 1.5), 0.5), ((np.nan, 3.0), 0.5)],
)
def test_rows_of_one_value_each_have_a_step_too(
    values: tuple[float, float], step: float
) -> None:
    rows = np.repeat(np.float32([values]).T, 4, axis=1)
    assert float(step_of(Lattice(bits=4), rows)) == pytest.approx(step, rel=0.01)


@each_of("bits", [2, 8])
@each_of("dithers", [False, True])
def test_rows_are_within_the_bound_and_the_others_escaped(
    bits: int, dithers: bool
) -> None:
    rows, codec = trained(500), Lattice(bits=bits)
    keys = row_keys(np.uint32(7), np.arange(len(rows))) if dithers else None
    parts, escaped = encoded(codec, rows, step_of(codec, rows[20:]), keys)
    assert np.flatnonzero(escaped).tolist() == [4, 5, 6, 7]
    assert not parts["integers"][escaped].any()
    read = decode(codec, parts, rows.shape[1], np.float32)
    off = np.abs(rows - np.asarray(read))[~escaped]
    assert (off <= (1.01 if dithers else 0.51) * parts["scale"][~escaped]).all()
    largest = np.abs(rows[20:]).max(axis=1, keepdims=True)
    assert (parts["scale"][20:] <= largest / (2 ** (bits - 2) - 0.5)).all()
    assert (read[:4] == 0).all()


@each_of("bits", BITS)
@each_of("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_values_are_exact_products_rounded_once(bits: int, dtype: type) -> None:
    codec, rng = Lattice(bits=bits), np.random.default_rng(bits)
    item = codec.parts(16, dtype)["integers"].dtype
    limits = np.iinfo(item)
    integers = rng.integers(limits.min, limits.max + 1, (256, 16), item)
    steps = np.exp2(rng.uniform(-100, 100, (256, 1))).astype(jnp.bfloat16)
    scale = steps.astype(np.float32) * np.exp2(-rng.integers(0, 8, (256, 1)))
    scale = scale.astype(np.float32)
    exact = integers.astype(np.float64) * scale
    if np.dtype(dtype) == np.float16:
        exact = np.clip(exact, -65504, 65504)
    assert (exact.astype(np.float32) == exact).all()
    parts = {"integers": integers, "scale": scale}
    read = np.asarray(decode(codec, parts, 16, dtype))
    assert read.tobytes() == exact.astype(np.float32).astype(dtype).tobytes()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(BITS), st.integers(1, 5))
def test_differences_add_up_whatever_lies_below(
    seed: int, bits: int, layers: int
) -> None:
    """Also where scales change, and where integers are so far apart that they wrap round."""
    codec, rng = Lattice(bits=bits), np.random.default_rng(seed)
    item = codec.parts(8, np.float32)["integers"].dtype
    limits = np.iinfo(item)

    def some() -> dict[str, np.ndarray]:
        scale = np.float32(0.375) * np.exp2(-rng.integers(0, 8, (40, 1)))
        integers = rng.integers(limits.min, limits.max + 1, (40, 8), item)
        return {"integers": integers, "scale": scale.astype(np.float32)}

    below = some()
    for _ in range(layers):
        new = some()
        stored = codec.difference(new, below)
        codec.add(stored, RowsAt(below, slice(0, 40)))
        np.testing.assert_array_equal(below["integers"], new["integers"])
        np.testing.assert_array_equal(below["scale"], new["scale"])


def test_a_dithered_row_that_stays_keeps_its_integers() -> None:
    rows, codec = trained(200), Lattice(bits=4)
    step = step_of(codec, rows[20:])
    keys = row_keys(np.uint32(1), np.arange(len(rows)))
    first, _ = encoded(codec, rows, step, keys)
    again, _ = encoded(codec, rows.copy(), step, keys)
    assert not codec.difference(again, first)["integers"].any()


def test_digest_tells_any_other_integer_and_any_other_scale() -> None:
    rng = np.random.default_rng(0)
    parts = {
        "integers": rng.integers(-9, 9, (30, 5), np.int8),
        "scale": np.full((30, 1), 0.5, np.float32),
    }

    def of(*some: dict[str, np.ndarray]) -> str:
        digest = Digest(Lattice())
        for each in some:
            digest.update(each)
        return digest.hexdigest()

    whole = of(parts)
    first, last = (
        {n: p[some] for n, p in parts.items()} for some in (slice(9), slice(9, None))
    )
    assert of(first, last) == whole and len(whole) == 16
    for name in parts:
        other = {n: p.copy() for n, p in parts.items()}
        other[name][17, 0] *= -2
        other[name][17, 0] -= 1
        assert of(other) != whole


def test_integers_alone_are_stored_where_differences_cost_more() -> None:
    rng = np.random.default_rng(0)
    one, other = (rng.integers(-9, 9, (300, 8), np.int8) for _ in range(2))
    assert not costs_less(one - other, one)
    assert costs_less(one // 4, one)


# Packed rows.


def skewed(rows: int, width: int, seed: int, dtype: np.dtype) -> np.ndarray:
    """Integers as differences are: of some rows and columns large, of many zeros."""
    rng = np.random.default_rng(seed)
    spread = rng.gamma(0.5, 1, (rows, 1)) * np.exp2(rng.normal(size=width))
    found = np.rint(rng.laplace(size=(rows, width)) * spread)
    found[rng.random(rows) < 0.1] = 0
    limits = np.iinfo(dtype)
    return found.clip(limits.min, limits.max).astype(dtype)


def unpacked(data: bytes, elements: int, dtype: np.dtype) -> np.ndarray:
    """All rows, those of zeros among them."""
    found = unpack_rows(data, elements, dtype)
    out = np.full((found.count, found.values.shape[1]), 9, dtype)
    found.put(out)
    assert found.values.any(axis=1).all()
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 70),
    st.integers(0, 2**31),
    st.sampled_from([np.dtype(np.int8), np.dtype(np.int16)]),
    st.sampled_from([0.0, 0.3, 3.0, 90.0, 20000.0]),
)
def test_packed_rows_are_read_as_they_were(
    rows: int, width: int, seed: int, dtype: np.dtype, times: float
) -> None:
    limits = np.iinfo(dtype)
    some = skewed(rows, width, seed, np.dtype(np.int16)) * times
    given_rows = some.clip(limits.min, limits.max).astype(dtype)
    data = pack_rows(given_rows)
    read = unpacked(data, given_rows.size, dtype)
    np.testing.assert_array_equal(read, given_rows)


@each_of("dtype", ["int8", "int16"])
@each_of("zeros", [True, False])
def test_many_rows_take_about_the_entropy_of_their_classes(
    dtype: str, zeros: bool
) -> None:
    rows = skewed(20_000, 32, 0, np.dtype(dtype))
    if not zeros:
        rows[~rows.any(axis=1), 0] = 1
    data = pack_rows(rows)
    np.testing.assert_array_equal(unpacked(data, rows.size, rows.dtype), rows)
    _, counts = np.unique(rows, return_counts=True)
    share = counts / rows.size
    # One code for all rows takes this much; rows and columns that are alike take less.
    assert len(data) * 8 / rows.size < 0.9 * -(share * np.log2(share)).sum()


def test_every_extreme_integer_survives() -> None:
    for dtype in (np.int8, np.int16):
        limits = np.iinfo(dtype)
        rows = np.array([[limits.min, limits.max, 0, -1]] * 3 + [[1, 0, 0, -1]] * 90)
        packed = pack_rows(rows.astype(dtype))
        np.testing.assert_array_equal(
            unpacked(packed, rows.size, np.dtype(dtype)), rows
        )


def test_damaged_bytes_are_an_error_and_never_a_crash() -> None:
    rows = skewed(400, 16, 3, np.dtype(np.int8))
    data, rng = pack_rows(rows), np.random.default_rng(0)
    for cut in (0, 5, 9, 30, len(data) - 1):
        with pytest.raises(errors.FormatError, match="packed rows"):
            unpack_rows(data[:cut], rows.size, rows.dtype)
    with pytest.raises(errors.FormatError, match="1 bytes more"):
        unpack_rows(data + b"\0", rows.size, rows.dtype)
    with pytest.raises(errors.FormatError, match="packed rows"):
        unpack_rows(data, rows.size + 16, rows.dtype)
    for _ in range(300):
        wrong = bytearray(data)
        wrong[rng.integers(len(wrong))] ^= 1 << rng.integers(8)
        try:
            found = unpack_rows(bytes(wrong), rows.size, rows.dtype)
        except errors.FormatError:
            continue
        assert found.count == len(rows)  # a checksum comes before, and finds these


def test_streams_of_other_lengths_or_symbols_are_refused_before_they_are_unpacked() -> (
    None
):
    data = pack_rows(np.ones((4, 2), np.int8))
    size = packed._HEADER.unpack_from(data)[-1]
    start = packed._HEADER.size + size
    bits, length, escaped = packed._STREAM.unpack_from(data, start)
    assert start + packed._STREAM.size + length == len(data) and not escaped

    def crafted(stream: bytes) -> bytes:
        return data[:start] + packed._STREAM.pack(bits, len(stream), 0) + stream

    claims = bytes.fromhex("28b52ffde0") + (1 << 62).to_bytes(8, "little") + b"\1\0\0"
    with pytest.raises(errors.FormatError, match=f"of {1 << 62} bytes, expected 2"):
        unpack_rows(crafted(claims), 8, np.dtype(np.int8))
    # Of the symbol of what does not fit, and nothing says what that is.
    beyond = packed._make_packer().compress(b"\xff\xff")
    with pytest.raises(errors.FormatError, match="does not fit its symbols"):
        unpack_rows(crafted(beyond), 8, np.dtype(np.int8))


@each_of("dtype", ["int8", "int16"])
@each_of("share", [0.5, 1.0])
def test_rows_are_added_where_they_lie_however_many_there_are(
    dtype: str, share: float
) -> None:
    rng, count, width = np.random.default_rng(0), 30_000, 16
    limits = np.iinfo(dtype)
    room = rng.integers(limits.min, limits.max, (2 * count, width), dtype, True)
    at = np.flatnonzero(rng.random(count) < share)
    values = rng.integers(-128, 127, (len(at), width), np.int8, True)
    places = rng.permutation(2 * count)[:count]
    for where in (slice(count, 2 * count), places):
        expected = room.copy()
        expected[np.arange(2 * count)[where][at]] += values  # wraps round
        found = room.copy()
        RowsAt({"x": found}, where).add("x", SparseRows(count, at, values))
        np.testing.assert_array_equal(found, expected)


def test_a_group_of_no_columns_is_refused() -> None:
    data = pack_rows(np.ones((4, 2), np.int8))
    width, groups, most, size = packed._HEADER.unpack_from(data)
    assert (width, groups) == (2, 1)
    head, rest = packed._HEADER.pack(2, 2, most, size), data[packed._HEADER.size :]
    nothing = packed._make_packer().compress(b"")
    nothing = packed._STREAM.pack(2, len(nothing), 0) + nothing
    for columns in (b"\x00", b"\x11", b"\x20"):
        with pytest.raises(errors.FormatError, match="a group that is not there"):
            unpack_rows(head + columns + rest + nothing, 8, np.dtype(np.int8))


@pytest.mark.parametrize("at", [slice(3, 43), np.random.default_rng(1).permutation(60)])
def test_rows_that_are_not_there_are_zeros(at: np.ndarray | slice) -> None:
    """Added to rows where they lie, or put there, as if they all were given."""
    rng = np.random.default_rng(0)
    at = at if isinstance(at, slice) else np.sort(at[:40])
    rows = rng.integers(-9, 9, (40, 5), np.int8)
    rows[rng.random(40) < 0.6] = 0
    whole = SparseRows(40, np.flatnonzero(rows.any(1)), rows[rows.any(1)])
    sparse = joined_rows([whole.between(0, 11), whole.between(11, 40)], 5)
    for dtype in (np.int8, np.int16):
        for change in ("add", "put"):
            found = []
            for given_rows in (sparse, rows.astype(dtype)):
                parts = {"x": np.arange(300).reshape(60, 5).astype(dtype)}
                getattr(RowsAt(parts, at), change)("x", given_rows)
                found.append(parts["x"])
            np.testing.assert_array_equal(found[0], found[1])
            assert (found[0] != np.arange(300).reshape(60, 5).astype(dtype)).any()
    for start, stop in ((0, 200), (7, 8), (10, 35), (13, 61)):
        out = np.empty(stop - start, np.int16)
        sparse.put_elements(start, stop, out)
        np.testing.assert_array_equal(out, rows.reshape(-1)[start:stop])
    with pytest.raises(errors.FormatError, match="5 integers, expected 4"):
        joined_rows([whole], 4)
