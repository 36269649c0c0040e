"""Row fingerprints. `python tests/rows/test_fingerprint.py --full` runs the whole campaign."""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import TableError
from cnr_jax.rows.fingerprints.hash import (
    changed_rows,
    hash_on_host,
    hash_rows,
    hash_with_tags,
)
from cnr_jax.rows.fingerprints.nh import _fold_halves
from cnr_jax.rows.shards import row_words

from ..conftest import case_of, each_of

U = np.uint32
SEED = np.array([0x01234567, 0x89ABCDEF], U)
CPU = jax.devices("cpu")[0]


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


def draw(
    seed: Any, stream: int, shapes: Sequence[tuple[int, ...]], dtype: Any
) -> list[np.ndarray]:
    """Keys of four sums of 32 bits or of two of 64 bits for each shape, [sums, *shape]."""
    count = 2 * sum(math.prod(shape) for shape in shapes)
    x, y = threefry(seed, stream, np.arange(count, dtype=U))
    keys, sums = np.concatenate([x, y]), 4
    if dtype == np.uint64:
        keys, sums = join(y, x), 2
    ends = np.cumsum([0, *(sums * math.prod(shape) for shape in shapes)])
    parts = [keys[a:b] for a, b in itertools.pairwise(ends)]
    return [part.reshape(sums, *s) for part, s in zip(parts, shapes, strict=True)]


def join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high.astype(np.uint64) << np.uint64(32)


def words_on_device(leaf: np.ndarray) -> np.ndarray:
    """uint32[rows, ..., words]: an element, half of one or two in each."""
    if leaf.dtype.kind == "c":
        leaf = np.stack([np.real(leaf), np.imag(leaf)], -1)
    leaf = leaf if leaf.ndim > 1 else leaf[:, None]
    if leaf.dtype.itemsize == 8:
        return leaf.view(U).reshape(*leaf.shape, 2)
    bits = leaf.view(f"u{leaf.dtype.itemsize}")
    return bits if bits.dtype == U else paired(bits.astype(U), 16)


def words_on_host(leaf: np.ndarray) -> np.ndarray:
    """uint64[rows, words]: the bytes of rows, or two parts of 32 bits or less in each."""
    size = leaf[0].nbytes
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)
    words = np.frombuffer(leaf.tobytes(), f"u{width}").reshape(len(leaf), size // width)
    return words if width == 8 else paired(words.astype(np.uint64), 32)


def paired(bits: np.ndarray, shift: int) -> np.ndarray:
    half = (bits.shape[-1] + 1) // 2
    left, right = bits[..., :half], bits[..., bits.shape[-1] - half :]
    return left | right << bits.dtype.type(shift)


def product(y: np.ndarray, half: int) -> np.ndarray:
    """Halves of words of 2 * half bits, multiplied."""
    return (y & y.dtype.type((1 << half) - 1)) * (y >> y.dtype.type(half))


def fold(sums: np.ndarray, keys: Any, half: int = 32) -> np.ndarray:
    """The lane that the sums, of 2 * half bits, make with keys A, B and C."""
    low, high = sums & sums.dtype.type((1 << half) - 1), sums >> sums.dtype.type(half)
    mixed = (low + keys[0]) * (high + keys[1]) + keys[2]
    return (mixed & sums.dtype.type((1 << 2 * half) - 1)) >> sums.dtype.type(half)


def lanes(sums: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Both lanes, of two sums of 64 bits, or of four that are halves of such."""
    if sums.dtype == U:
        sums, keys = (join(x[::2], x[1::2]) for x in (sums, keys))
    return [fold(sums[i], keys[i]) for i in range(2)]


def sum_up(words: np.ndarray, keys: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The sums over `axes`, [sums, ...]."""
    half = words.dtype.itemsize * 4
    parts = [product(words + key, half) for key in keys]
    return np.stack([x.sum(tuple(axes), dtype=words.dtype) for x in parts])


def cut(words: np.ndarray, seed: Any) -> np.ndarray:
    """Rows of more than 4,096 words, in blocks."""
    rows, size = len(words), math.prod(words.shape[1:])
    if size <= 4096:
        return words
    rest = np.zeros((rows, 0), words.dtype)
    if not 128 <= words.shape[-1] <= 4096:
        flat, end = words.reshape(rows, size), size // 1024 * 1024
        words, rest = flat[:, :end].reshape(rows, -1, 1024), flat[:, end:]
    keys, last = draw(seed, 1, [words.shape[-1:], (3,)], words.dtype)
    one, two = lanes(sum_up(words, keys, [words.ndim - 1]), last)
    blocks = join(one, two)
    if words.dtype == U:
        blocks = np.stack([one, two], -1).astype(U)
    return np.concatenate([blocks.reshape(rows, -1), rest], 1)


def reference(
    leaves: Sequence[np.ndarray],
    seed: np.ndarray,
    words_of: Callable[[np.ndarray], np.ndarray] = words_on_device,
) -> np.ndarray:
    with np.errstate(over="ignore"):
        words = [cut(words_of(leaf), seed) for leaf in leaves]
        shapes = [*(x.shape[1:] for x in words), (3,)]
        *keys, last = draw(seed, 0, shapes, words[0].dtype)
        sums = [
            sum_up(x, k, range(1, x.ndim)) for x, k in zip(words, keys, strict=True)
        ]
        return np.stack(lanes(functools.reduce(np.add, sums), last), 1).astype(U)


def test_reference_draws_keys_as_jax_does() -> None:
    key = jax.random.wrap_key_data(jnp.asarray(SEED), impl="threefry2x32")
    with np.errstate(over="ignore"):
        drawn = [int(word[0]) for word in threefry(SEED, 0, np.array([77], U))]
    assert jax.random.key_data(jax.random.fold_in(key, 77)).tolist() == drawn


def on_cpu() -> jax.Array:
    return jax.device_put(SEED, CPU)


def as_lanes(hashes: jax.Array) -> np.ndarray:
    """Hashes of the host, uint64[rows], as uint32[rows, 2]."""
    words = np.asarray(hashes)
    assert words.dtype == np.uint64
    return words[:, None].view(U)


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
# Of each size of an element one, and what is no number; each is a compilation.
SOME_DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64]
of_some_and_all_dtypes = pytest.mark.parametrize(
    "dtypes",
    [SOME_DTYPES, pytest.param(DTYPES, marks=pytest.mark.slow)],
    ids=["some", "all"],
)


@of_some_and_all_dtypes
def test_hash_equals_reference_bit_for_bit(dtypes: list[Any]) -> None:
    for dtype in dtypes:
        rng = np.random.default_rng(1)
        shapes = [(5, 6), (5,), (5, 2, 3), (5, 7), (5, 0)]
        leaves = [random_bits(rng, shape, dtype) for shape in shapes]
        got = hash_rows([jnp.asarray(leaf) for leaf in leaves], SEED)
        assert got.dtype == jnp.uint32
        with case_of(dtype):
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


@each_of("dtype", DTYPES)
def test_host_hashes_rows_as_words_of_their_bytes(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    shapes = [(5, 16), (5,), (5, 2, 3), (5, 7), (5, 0)]
    leaves = [random_bits(rng, shape, dtype) for shape in shapes]
    got, tags = hash_on_host(leaves, on_cpu(), tagged=False)
    assert tags is None
    expected = reference(leaves, SEED, words_on_host)
    np.testing.assert_array_equal(as_lanes(got), expected)


# One block, one element more, some and a rest, some of more axes; each is a compilation.
WIDE_ROWS = [(3, 4096), (3, 4097), (3, 9001), (2, 3, 9000)]
MORE_WIDE_ROWS = [(3, 8192), (3, 8194), (2, 40, 300), (2, 3000, 3)]


@pytest.mark.parametrize(
    "shapes",
    [WIDE_ROWS, pytest.param(MORE_WIDE_ROWS, marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_wide_rows_are_cut_into_blocks(shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        leaves = [
            random_bits(np.random.default_rng(2), shape, jnp.float32),
            random_bits(np.random.default_rng(3), (shape[0], 2), jnp.float32),
        ]
        got = hash_rows([jnp.asarray(leaf) for leaf in leaves], SEED)
        want = reference(leaves, SEED)
        np.testing.assert_array_equal(np.asarray(got), want, str(shape))
        got, _ = hash_on_host(leaves, on_cpu(), tagged=False)
        want = reference(leaves, SEED, words_on_host)
        np.testing.assert_array_equal(as_lanes(got), want, str(shape))


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


def test_halves_fold_as_the_whole_does() -> None:
    """At the corners, where all carries occur, and elsewhere."""
    corners = np.array([0, 1, 1 << 31, (1 << 32) - 1], U)
    values = corners[np.indices((4,) * 8).reshape(8, -1)]
    values = np.concatenate(
        [values, random_bits(np.random.default_rng(5), (8, 1 << 16), U)], 1
    )
    low, high, lower, upper = values[0], values[1], values[2:5], values[5:]
    got = jax.jit(_fold_halves)(low, high, jnp.stack([lower, upper]))
    with np.errstate(over="ignore"):
        expected = fold(join(low, high), join(lower, upper))
    np.testing.assert_array_equal(np.asarray(got), expected)


WORDS_OF_64_BITS = re.compile(r"\b[us]64\[")


@of_some_and_all_dtypes
def test_devices_need_no_integers_of_64_bits(dtypes: list[Any]) -> None:
    for dtype in dtypes:
        shapes = [(4, 6), (4,), (4, 2, 3), (4, 9001)]
        leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        for function in (hash_rows, hash_with_tags):
            text = jax.jit(function).lower(leaves, SEED).as_text("hlo")
            with case_of(dtype):
                assert "u32[" in text
                assert not WORDS_OF_64_BITS.search(text)


def test_integers_of_64_bits_would_be_seen() -> None:
    with jax.enable_x64(True):
        word = jax.ShapeDtypeStruct((4,), jnp.uint64)
        text = jax.jit(jnp.add).lower(word, word).as_text("hlo")
    assert WORDS_OF_64_BITS.search(text)


# --- Tags --------------------------------------------------------------------------------


def test_tags_tell_which_leaf_of_a_row_changed() -> None:
    rng = np.random.default_rng(3)
    leaves = [random_bits(rng, (4096, 6), t) for t in (jnp.float32, jnp.bfloat16)]
    leaves += [random_bits(rng, (4096,), jnp.float32)]
    hashes, before = hash_with_tags([jnp.asarray(leaf) for leaf in leaves], SEED)
    assert (before.dtype, before.shape) == (jnp.uint8, (4096, 3))
    np.testing.assert_array_equal(np.asarray(hashes), reference(leaves, SEED))
    bits = leaves[1].view(np.uint16)
    bits[:, 2] ^= 1
    _, after = hash_with_tags([jnp.asarray(leaf) for leaf in leaves], SEED)
    differ = np.asarray(before) != np.asarray(after)
    assert not differ[:, [0, 2]].any()
    # 16 are expected to be the same; the chance of other than 1 to 50 is below 10^-6.
    assert 1 <= (~differ[:, 1]).sum() <= 50


def test_host_makes_the_same_hashes_with_tags_and_without() -> None:
    rng = np.random.default_rng(4)
    leaves = [random_bits(rng, (64, 8), jnp.float32), random_bits(rng, (64,), jnp.int8)]
    without, _ = hash_on_host(leaves, on_cpu(), tagged=False)
    hashes, before = hash_on_host(leaves, on_cpu(), tagged=True)
    assert (hashes.dtype, hashes.shape) == (np.uint64, (64,))
    np.testing.assert_array_equal(np.asarray(hashes), np.asarray(without))
    leaves[1][5] += 1
    _, after = hash_on_host(leaves, on_cpu(), tagged=True)
    assert np.argwhere(np.asarray(before) != np.asarray(after)).tolist() == [[5, 1]]


# --- Shardings ---------------------------------------------------------------------------

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-",
    "reduce-scatter",
)


def hash_and_compare(leaves: Any, old: Any) -> tuple[Any, Any]:
    new = hash_rows(leaves, SEED)
    return new, changed_rows(new, old)


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
    args = jax.device_put((leaves, old), rows)
    program = jax.jit(hash_and_compare).lower(*args).compile()
    new, changed = program(*args)
    text = program.as_text() or ""
    assert "fusion" in text
    assert not [name for name in COLLECTIVES if name in text]
    assert new.sharding.is_equivalent_to(rows, 2)
    assert changed.sharding.is_equivalent_to(rows, 1)
    np.testing.assert_array_equal(np.asarray(new), reference(leaves, SEED))
    assert np.flatnonzero(np.asarray(changed)).tolist() == [3, 20]


# --- Cost --------------------------------------------------------------------------------


def compiled(*shapes: tuple[int, ...]) -> Any:
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(hash_rows).lower(leaves, SEED).compile()


def test_hashing_holds_no_copy_of_the_table() -> None:
    memory = compiled((4096, 64)).memory_analysis()
    # The sums of both lanes before they are folded, the keys of 32 words, and their halves.
    assert memory.temp_size_in_bytes < 4096 * 16 + 32 * 100


def test_keys_of_wide_rows_are_few() -> None:
    memory = compiled((2, 1 << 20)).memory_analysis()
    assert memory.temp_size_in_bytes < 100_000


def test_keys_are_drawn_once_not_for_each_row() -> None:
    few, many = (compiled((rows, 64), (rows,)).cost_analysis() for rows in (512, 4096))
    # Drawing the keys of a word takes about 200 operations, hashing one 22.
    assert (many["flops"] - few["flops"]) / (4096 - 512) / 64 < 30


def test_host_hashes_views_of_rows() -> None:
    leaf = np.zeros((64, 8), jnp.bfloat16)
    for view, dtype in (
        (row_words(leaf), np.uint64),
        (row_words(leaf[:, :6].copy()), np.uint32),
    ):
        assert view.dtype == dtype
    assert np.shares_memory(row_words(leaf), leaf)
    assert np.shares_memory(row_words(leaf[16:32]), leaf)


# --- Errors ------------------------------------------------------------------------------


def host(leaves: Sequence[np.ndarray]) -> Any:
    return hash_on_host(leaves, on_cpu(), tagged=False)


@each_of(
    ("call", "message"),
    [
        (lambda x: hash_rows([], SEED), "no leaves"),
        (lambda x: hash_rows([x, x[:1]], SEED), "leaf 1 has other rows"),
        (lambda x: hash_rows([x[0, 0]], SEED), "leaf 0 has other rows"),
        (lambda x: hash_rows([x], np.zeros(3, U)), "expected uint32[2]"),
        (lambda x: hash_rows([x], np.zeros(2, np.int32)), "expected uint32[2]"),
        (lambda x: hash_rows([jax.random.split(jax.random.key(0))], SEED), "numbers"),
        (lambda x: hash_with_tags([x, x[:1]], SEED), "leaf 1 has other rows"),
        (lambda x: host([]), "no leaves"),
        (lambda x: host([np.zeros((2, 3)), np.zeros(3)]), "leaf 1 has other rows"),
    ],
)
def test_what_cannot_be_hashed_is_named(
    call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(TableError) as caught:
        call(jnp.zeros((2, 3)))
    assert message in str(caught.value)


# --- Quality -----------------------------------------------------------------------------


@pytest.mark.parametrize("half", [2, 3, 4])
def test_no_word_changes_unseen_more_often_than_the_bound_says(half: int) -> None:
    """All short words, changes and keys: of 2^2w keys 2^w at most, as nh.py argues."""
    size, count = 1 << half, 1 << 2 * half
    mask = np.uint8(count - 1)
    grid = np.ogrid[:size, :size, :count, 1:count]
    high, low, word, change = (x.astype(np.uint8) for x in grid)
    before = word + (high << half | low) & mask
    after = before + change & mask
    moved = product(after, half) - product(before, half) & mask
    only_high = np.arange(1, count) % size == 0
    # The sum of other words may move by anything, so no two keys may move this one alike.
    assert unlike(moved[..., ~only_high], axis=0)
    assert unlike(moved[..., only_high], axis=1)


def unlike(values: np.ndarray, axis: int) -> bool:
    return bool((np.diff(np.sort(values, axis), axis=axis) != 0).all())


def test_unlike_sums_have_the_same_lane_no_more_often_than_the_bound_says() -> None:
    """As above, for sums of 4 bits: 2^-2."""
    keys = np.indices((16, 16, 16)).reshape(3, -1)
    lanes = [fold(np.asarray(value), keys, 2) for value in range(16)]
    for one, two in itertools.combinations(lanes, 2):
        assert (one == two).sum() <= 16**3 // 2**2


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


def on_device(table: jax.Array, slot: jax.Array, seed: jax.Array) -> jax.Array:
    return hash_rows([table, slot], seed)


def on_host(table: jax.Array, slot: jax.Array, seed: jax.Array) -> jax.Array:
    leaves = [np.asarray(table), np.asarray(slot)]
    return jnp.asarray(as_lanes(hash_on_host(leaves, seed, tagged=False)[0]))


HASHES = {"device": on_device, "host": on_host}


@jax.jit
def compare(new: jax.Array, old: jax.Array, differs: jax.Array) -> jax.Array:
    """Counts int32[6]: changed rows, missed ones, and equal quarters of the hashes."""
    same = [(new ^ old) & 0xFFFF == 0, (new ^ old) >> 16 == 0]
    quarters = jnp.concatenate([(half & differs[:, None]).sum(0) for half in same])
    missed = (differs & ~changed_rows(new, old)).sum()
    return jnp.concatenate([jnp.stack([differs.sum(), missed]), quarters])


def campaign(
    kinds: Sequence[tuple[Change, Any]], hashed: str, pairs: int, rows: int
) -> np.ndarray:
    """Sums `compare` over at least `pairs` random changes of these kinds and dtypes."""
    total = np.zeros(6, np.int64)
    slot = jnp.arange(rows, dtype=jnp.float32)
    for batch in itertools.count():
        for number, (change, dtype) in enumerate(kinds):
            key = jax.random.fold_in(jax.random.key(batch), number)
            seed = jax.random.bits(jax.random.fold_in(key, 2), (2,))
            before, after, differs = draw_pair(change, dtype, rows, key)
            new, old = (HASHES[hashed](table, slot, seed) for table in (after, before))
            total += np.asarray(compare(new, old, differs))
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


@pytest.mark.slow
@each_of("hashed", HASHES)
@each_of("changes", [SINGLE, WHOLE])
def test_no_change_is_missed(changes: tuple[Change, ...], hashed: str) -> None:
    kinds = list(zip(changes, itertools.cycle(BITS), strict=False))
    # Each kind once, 32,768 rows of it; what is compiled takes longer than these.
    check(campaign(kinds, hashed, pairs=150_000, rows=1 << 15), "some")


def run_full() -> None:
    named = {"one or two elements": SINGLE, "whole rows": WHOLE}
    for (name, changes), hashed in itertools.product(named.items(), HASHES):
        start = time.perf_counter()
        kinds = list(itertools.product(changes, BITS))
        total = campaign(kinds, hashed, pairs=10**8, rows=1 << 19)
        line = check(total, f"{name}, hashed on {hashed}")
        print(f"{line}; {time.perf_counter() - start:.0f} s", flush=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_change_is_missed_in_a_long_campaign() -> None:
    run_full()


if __name__ == "__main__" and "--full" in sys.argv[1:]:
    run_full()
