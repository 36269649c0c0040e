"""Row fingerprints. `python tests/rows/test_fingerprint.py --full` runs the whole campaign."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import TableError
from cnr_jax.rows.fingerprint import (
    changed_rows,
    finalise,
    hash_rows,
    partial,
    stamp_changed,
)

SEED = np.array([0x01234567, 0x89ABCDEF], np.uint32)
U = np.uint32


# --- The reference: the same hash in numpy, from the module's docstring ------------------


def threefry(key: Any, high: int, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32-20 of the counters (high, low)."""
    ks = [U(key[0]), U(key[1]), U(key[0]) ^ U(key[1]) ^ U(0x1BD11BDA)]
    x, y = np.zeros_like(low) + U(high) + ks[0], low + ks[1]
    rotations = [(13, 15, 26, 6), (17, 29, 16, 24)]
    for i in range(5):
        for r in rotations[i % 2]:
            x = x + y
            y = ((y << U(r)) | (y >> U(32 - r))) ^ x
        x, y = x + ks[(i + 1) % 3], y + ks[(i + 2) % 3] + U(i + 1)
    return x, y


def words_of(leaf: np.ndarray) -> tuple[np.ndarray, bool]:
    """uint32[rows, words], and whether they use all 32 bits."""
    flat = np.ascontiguousarray(leaf).reshape(leaf.shape[0], -1)
    size = flat.dtype.itemsize
    if size >= 4:
        return flat.view(U), True
    return flat.view(f"u{size}").astype(U), False


def reference(leaves: Sequence[np.ndarray], seed: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        total = np.zeros((leaves[0].shape[0], 2), U)
        for index, leaf in enumerate(leaves):
            u, wide = words_of(leaf)
            k = threefry(seed, index, np.array([0xFFFFFFFF], U))[0][0]
            position = np.arange(u.shape[1], dtype=U)
            a, c = threefry(seed, index, position * U(2))
            b, d = threefry(seed, index, position * U(2) + U(1))
            if wide:
                y = u + k
                x = y * (U(2) * y + U(1))
                x = (x ^ (x >> U(16))) * U(0x9E3779B1)
                z = x >> U(16)
            else:
                y = u * U(0x9E3779B1) + k
                x, z = y ^ (y >> U(16)), u
            total[:, 0] += (a * x + b * z).sum(1, dtype=U)
            total[:, 1] += (c * x + d * z).sum(1, dtype=U)
        h = total ^ (total >> U(16))
        h = h * U(0x85EBCA6B)
        h = (h ^ (h >> U(13))) * U(0xC2B2AE35)
        return h ^ (h >> U(16))


def test_reference_draws_keys_as_jax_does() -> None:
    key = jax.random.wrap_key_data(jnp.asarray(SEED), impl="threefry2x32")
    with np.errstate(over="ignore"):
        drawn = [int(word[0]) for word in threefry(SEED, 0, np.array([77], U))]
    assert jax.random.key_data(jax.random.fold_in(key, 77)).tolist() == drawn


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Any bits at all: NaNs, infinities and denormals are among them."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


DTYPES = [
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.int8,
    jnp.uint16,
    jnp.int32,
    jnp.uint32,
    jnp.bool_,
    jnp.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_hash_equals_reference_bit_for_bit(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    shapes = [(5, 6), (5,), (5, 2, 3)]
    leaves = [random_bits(rng, shape, dtype) for shape in shapes]
    got = hash_rows([jnp.asarray(leaf) for leaf in leaves], SEED)
    assert got.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(got), reference(leaves, SEED))


def test_hash_covers_64_bit_elements_where_enabled() -> None:
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        leaves = [random_bits(rng, (4, 3), t) for t in (np.float64, np.int64)]
        leaves += [random_bits(rng, (4, 3), np.float32)]
        got = hash_rows([jnp.asarray(leaf) for leaf in leaves], SEED)
        assert got.dtype == jnp.uint32
        np.testing.assert_array_equal(np.asarray(got), reference(leaves, SEED))
        with_32 = hash_rows([jnp.asarray(leaves[2])], SEED)
    without = hash_rows([jnp.asarray(leaves[2])], SEED)
    np.testing.assert_array_equal(np.asarray(with_32), np.asarray(without))


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.float4_e2m1fn])
def test_every_value_below_a_byte_has_its_own_hash(dtype: Any) -> None:
    codes = np.arange(16, dtype=np.uint8)[:, None]
    hashes = np.asarray(hash_rows([jnp.asarray(codes.view(dtype))], SEED))
    values = np.unique(codes.view(dtype).astype(np.float32).view(np.uint32))
    assert len(np.unique(hashes, axis=0)) == len(values) == 16


def test_bits_count_not_values() -> None:
    bits = np.array([0, 1 << 31, 0x7FC00000, 0x7FC00001, 0x7F800001, 1, 2], U)
    leaf = jnp.asarray(bits.view(np.float32))  # 0, -0, three NaNs, two denormals
    hashes = np.asarray(hash_rows([leaf], SEED))
    assert len(np.unique(hashes, axis=0)) == len(bits)


def test_hash_depends_on_position_leaf_and_seed() -> None:
    one = jnp.zeros((1, 4)).at[0, 1].set(1)
    two = jnp.zeros((1, 4)).at[0, 2].set(1)
    other = np.array([SEED[1], SEED[0]], U)
    pairs = [([one], SEED), ([two], SEED), ([one], other)]
    pairs += [([one, two], SEED), ([two, one], SEED)]
    hashes = [np.asarray(hash_rows(leaves, seed)) for leaves, seed in pairs]
    for left, right in itertools.combinations(hashes, 2):
        assert (left != right).all()


# --- Tiles -------------------------------------------------------------------------------

WIDTH = 6
TILED = [
    random_bits(np.random.default_rng(3), (3, WIDTH), jnp.float32),
    random_bits(np.random.default_rng(4), (3, WIDTH), jnp.bfloat16),
    random_bits(np.random.default_rng(5), (3,), jnp.float32),
]
CUTS = st.sets(st.integers(1, WIDTH - 1))


@settings(max_examples=20, deadline=None)
@given(first=CUTS, second=CUTS, rng=st.randoms(use_true_random=False))
def test_any_column_split_in_any_order_gives_the_same_hash(
    first: set[int], second: set[int], rng: Any
) -> None:
    tiles: list[tuple[Any, int, int]] = [(TILED[2], 2, 0)]
    for index, cuts in enumerate((first, second)):
        for start, stop in itertools.pairwise([0, *sorted(cuts), WIDTH]):
            tiles.append((TILED[index][:, start:stop], index, start))
    rng.shuffle(tiles)
    parts = [partial(jnp.asarray(t), i, start, SEED) for t, i, start in tiles]
    got = finalise(functools.reduce(jnp.add, parts))
    np.testing.assert_array_equal(np.asarray(got), reference(TILED, SEED))


def test_boxes_of_more_dimensions_add_up() -> None:
    leaf = random_bits(np.random.default_rng(6), (3, 2, 4), jnp.float32)
    boxes = [(slice(i, i + 1), slice(j, j + 2)) for i in (0, 1) for j in (0, 2)]
    parts = [
        partial(
            jnp.asarray(leaf[:, a, b]), 0, (a.start, b.start), SEED, row_shape=(2, 4)
        )
        for a, b in boxes
    ]
    got = finalise(functools.reduce(jnp.add, parts))
    np.testing.assert_array_equal(np.asarray(got), reference([leaf], SEED))


# --- Shardings ---------------------------------------------------------------------------

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-",
    "reduce-scatter",
)


def hash_and_stamp(leaves: Any, old: Any, stamps: Any, clock: Any) -> tuple[Any, Any]:
    new = hash_rows(leaves, SEED)
    return new, stamp_changed(stamps, new, old, clock)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_rows_stay_sharded_without_communication(kind: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("rows"))
    rng = np.random.default_rng(7)
    leaves = [
        random_bits(rng, (24, 5), jnp.float32),
        random_bits(rng, (24,), jnp.bfloat16),
        random_bits(rng, (24, 2, 3), jnp.int8),
    ]
    old = reference(leaves, SEED)
    old[[3, 20], [0, 1]] ^= U(1)
    args = ([*leaves], old, np.full(24, 5, np.int32))
    args = jax.device_put(args, rows)
    program = jax.jit(hash_and_stamp).lower(*args, np.int32(9)).compile()
    new, stamps = program(*args, np.int32(9))
    text = program.as_text() or ""
    assert "fusion" in text
    assert not [name for name in COLLECTIVES if name in text]
    assert new.sharding.is_equivalent_to(rows, 2)
    assert stamps.sharding.is_equivalent_to(rows, 1)
    np.testing.assert_array_equal(np.asarray(new), reference(leaves, SEED))
    assert np.flatnonzero(np.asarray(stamps) == 9).tolist() == [3, 20]
    assert sorted(set(np.asarray(stamps).tolist())) == [5, 9]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_columns_give_the_same_hash(kind: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind, kind))
    leaf = random_bits(np.random.default_rng(8), (8, 6), jnp.bfloat16)
    placed = jax.device_put(leaf, NamedSharding(mesh, P("rows", "columns")))
    got = hash_rows([placed], SEED)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("rows")), 2)
    np.testing.assert_array_equal(np.asarray(got), reference([leaf], SEED))


def test_hashing_holds_no_copy_of_the_table() -> None:
    table = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    memory = jax.jit(hash_rows).lower([table], SEED).compile().memory_analysis()
    assert memory is not None
    # Both lanes before they are interleaved, the keys of 64 columns, and what drew them.
    assert memory.temp_size_in_bytes < 4096 * 8 + 64 * 100


# --- Errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: hash_rows([], SEED), "no leaves"),
        (lambda x: hash_rows([x, x[:1]], SEED), "leaf 1 has other rows"),
        (lambda x: hash_rows([x[0, 0]], SEED), "leaf 0 has other rows"),
        (lambda x: hash_rows([x], np.zeros(3, U)), "expected uint32[2]"),
        (lambda x: hash_rows([x], np.zeros(2, np.int32)), "expected uint32[2]"),
        (lambda x: hash_rows([jax.random.split(jax.random.key(0))], SEED), "numbers"),
        (lambda x: partial(x, 0, (0,), SEED), "cannot be placed"),
        (lambda x: partial(x, 0, (0, 0), SEED, row_shape=(3,)), "cannot be placed"),
    ],
)
def test_what_cannot_be_hashed_is_named(
    call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(TableError) as caught:
        call(jnp.zeros((2, 3)))
    assert message in str(caught.value)


# --- Quality -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_input_bit_flips_each_output_bit_half_of_the_time(dtype: Any) -> None:
    samples, bits = 4096, np.dtype(dtype).itemsize * 8
    unsigned = np.dtype(f"u{bits // 8}")
    base = random_bits(np.random.default_rng(9), (samples, 3), dtype)
    program = jax.jit(lambda leaf: hash_rows([leaf, leaf[:, 0]], SEED))
    before = np.asarray(program(base))
    worst = 0.0
    for bit in range(bits):
        flipped = base.view(unsigned).copy()
        flipped[:, 1] ^= unsigned.type(1 << bit)
        changed = np.asarray(program(flipped.view(dtype))) ^ before
        for lane, out in itertools.product(range(2), range(32)):
            share = float(((changed[:, lane] >> U(out)) & U(1)).mean())
            worst = max(worst, abs(share - 0.5))
    # 6 standard deviations; the chance that one of 2,048 pairs exceeds it is 4e-6.
    assert worst < 6 * 0.5 / math.sqrt(samples)


DIM = 8
BITS = {jnp.dtype(jnp.float32): jnp.uint32, jnp.dtype(jnp.bfloat16): jnp.uint16}
# Rows after a change, or before and after it, from a random key and rows.
Change = Callable[[jax.Array, jax.Array], jax.Array | tuple[jax.Array, jax.Array]]


def as_bits(table: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(table, BITS[table.dtype])


def from_bits(bits: jax.Array, like: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, like.dtype)


def places(key: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two unlike columns per row, and a bit of an element drawn from 0 to 15."""
    draw = jax.random.bits(key, (rows, 1))
    one = draw % DIM
    two = (one + 1 + (draw >> 8) % (DIM - 1)) % DIM
    return one, two, (draw >> 16) % 16


def at(column: jax.Array) -> jax.Array:
    return jnp.arange(DIM, dtype=jnp.uint32)[None] == column


def flip(table: jax.Array, mask: jax.Array, bit: Any) -> jax.Array:
    bits = as_bits(table)
    change = jnp.left_shift(
        jnp.ones((), bits.dtype), jnp.asarray(bit).astype(bits.dtype)
    )
    return from_bits(jnp.where(mask, bits ^ change, bits), table)


def last_bit(key: jax.Array, table: jax.Array) -> jax.Array:
    return flip(table, at(places(key, len(table))[0]), 0)


def sign_flip(key: jax.Array, table: jax.Array) -> jax.Array:
    top = table.dtype.itemsize * 8 - 1
    return flip(table, at(places(key, len(table))[0]), top)


def any_bit(key: jax.Array, table: jax.Array) -> jax.Array:
    one, _, bit = places(key, len(table))
    upper = (jax.random.bits(jax.random.fold_in(key, 1), (len(table), 1)) & 1) * 16
    return flip(table, at(one), (bit + upper) % (table.dtype.itemsize * 8))


def one_step(key: jax.Array, table: jax.Array) -> jax.Array:
    """One element moves a little, as in a sparse update."""
    near = (table.astype(jnp.float32) * (1 + 2**-7)).astype(table.dtype)
    return jnp.where(at(places(key, len(table))[0]), near, table)


def zero_to_two(key: jax.Array, table: jax.Array) -> jax.Array:
    """One element changes in the top bit of its exponent only."""
    return flip(table, at(places(key, len(table))[0]), table.dtype.itemsize * 8 - 2)


def swap(key: jax.Array, table: jax.Array) -> jax.Array:
    one, two, _ = places(key, len(table))
    first = jnp.take_along_axis(table, one.astype(jnp.int32), 1)
    second = jnp.take_along_axis(table, two.astype(jnp.int32), 1)
    return jnp.where(at(one), second, jnp.where(at(two), first, table))


def scale(key: jax.Array, table: jax.Array) -> jax.Array:
    factor = jax.random.choice(
        key, jnp.array([-1, 0.5, 2, 0.99, 1.01]), (len(table), 1)
    )
    return (table.astype(jnp.float32) * factor).astype(table.dtype)


def shift(key: jax.Array, table: jax.Array) -> jax.Array:
    by = jax.random.normal(key, (len(table), 1)) / 8
    return (table.astype(jnp.float32) + by).astype(table.dtype)


def compensating(key: jax.Array, table: jax.Array) -> jax.Array:
    one, two, _ = places(key, len(table))
    by = jax.random.normal(jax.random.fold_in(key, 1), (len(table), 1)) / 8
    change = jnp.where(at(one), by, jnp.where(at(two), -by, 0))
    return (table.astype(jnp.float32) + change).astype(table.dtype)


def compensating_bits(key: jax.Array, table: jax.Array) -> jax.Array:
    """As integers: one element is 2^bit units greater, another as many smaller."""
    one, two, bit = places(key, len(table))
    bits = as_bits(table)
    by = jnp.left_shift(jnp.ones((), bits.dtype), bit.astype(bits.dtype))
    change = jnp.where(at(one), by, jnp.where(at(two), -by, 0))
    return from_bits(bits + change.astype(bits.dtype), table)


def permute(key: jax.Array, table: jax.Array) -> jax.Array:
    return jax.random.permutation(key, table, axis=1, independent=True)


def rotate(key: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.roll(table, 1, axis=1)


def same_bit_twice(key: jax.Array, table: jax.Array) -> jax.Array:
    one, two, bit = places(key, len(table))
    return flip(table, at(one) | at(two), bit)


def signs_of_two(key: jax.Array, table: jax.Array) -> jax.Array:
    one, two, _ = places(key, len(table))
    return flip(table, at(one) | at(two), table.dtype.itemsize * 8 - 1)


def moved_bit(key: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A row of zeros but for one bit, and the same bit in another element."""
    one, two, bit = places(key, len(table))
    zeros = jnp.zeros_like(table)
    return flip(zeros, at(one), bit), flip(zeros, at(two), bit)


SINGLE: tuple[Change, ...] = (last_bit, sign_flip, any_bit, one_step, zero_to_two, swap)
WHOLE: tuple[Change, ...] = (
    scale,
    shift,
    compensating,
    compensating_bits,
    permute,
    rotate,
    same_bit_twice,
    signs_of_two,
    moved_bit,
)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw_pair(
    change: Change, dtype: Any, rows: int, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows before and after a change, and whether any bit of a row differs."""
    table = (jax.random.normal(key, (rows, DIM)) / 16).astype(dtype)
    result = change(jax.random.fold_in(key, 1), table)
    before, after = result if isinstance(result, tuple) else (table, result)
    return before, after, (as_bits(before) != as_bits(after)).any(1)


@jax.jit
def compare(
    before: jax.Array, after: jax.Array, differs: jax.Array, seed: jax.Array
) -> jax.Array:
    """Counts int32[6]: changed rows, missed ones, and equal quarters of the hashes."""
    slot = jnp.arange(len(before), dtype=jnp.float32)
    new, old = (hash_rows([table, slot], seed) for table in (after, before))
    same = [(new ^ old) & 0xFFFF == 0, (new ^ old) >> 16 == 0]
    quarters = jnp.concatenate([(half & differs[:, None]).sum(0) for half in same])
    missed = (differs & ~changed_rows(new, old)).sum()
    return jnp.concatenate([jnp.stack([differs.sum(), missed]), quarters])


def campaign(kinds: Sequence[tuple[Change, Any]], pairs: int, rows: int) -> np.ndarray:
    """Sums `compare` over at least `pairs` random changes of these kinds and dtypes."""
    total = np.zeros(6, np.int64)
    for batch in itertools.count():
        for number, (change, dtype) in enumerate(kinds):
            key = jax.random.fold_in(jax.random.key(batch), number)
            seed = jax.random.bits(jax.random.fold_in(key, 2), (2,))
            drawn = draw_pair(change, dtype, rows, key)
            total += np.asarray(compare(*drawn, seed))
        if total[0] >= pairs:
            return total
    raise AssertionError("unreachable")


def check(total: np.ndarray, name: str) -> str:
    changed, missed, *quarters = (int(count) for count in total)
    expected = changed / 2**16
    # Shows that the count of missed changes can be other than 0, and each lane's strength.
    assert all(abs(q - expected) < 0.1 * expected + 6 * expected**0.5 for q in quarters)
    assert missed == 0
    return (
        f"{name}: {changed:,} changes, {missed} missed; 16-bit quarters {quarters}, "
        + (f"expected {expected:,.0f} each")
    )


@pytest.mark.parametrize("changes", [SINGLE, WHOLE], ids=["single", "whole"])
def test_no_change_is_missed(changes: tuple[Change, ...]) -> None:
    kinds = list(zip(changes, itertools.cycle(BITS), strict=False))
    check(campaign(kinds, pairs=500_000, rows=1 << 15), "some")


def run_full() -> None:
    for name, changes in {"one or two elements": SINGLE, "whole rows": WHOLE}.items():
        start = time.perf_counter()
        kinds = list(itertools.product(changes, BITS))
        line = check(campaign(kinds, pairs=10**8, rows=1 << 19), name)
        print(f"{line}; {time.perf_counter() - start:.0f} s", flush=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_change_is_missed_in_a_long_campaign() -> None:
    run_full()


if __name__ == "__main__" and "--full" in sys.argv[1:]:
    run_full()
