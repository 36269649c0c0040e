"""Row fingerprints: 64-bit hashes that tell which rows changed, whatever changed them.

A row's hash covers its values in the table and in every slot, as bits: -0.0 is not 0.0, and
NaNs differ by their payload. It is kept as two uint32 lanes, as devices have no 64-bit
arithmetic by default. Partial hashes of leaves and of column tiles add up (mod 2^32) to the
hash of the whole row, however it was split; `finalise` comes last, once.

Construction. Each element is one 32-bit word u (narrow ones zero-extended; those of 64 bits
and complex ones are two words). With a key k per leaf, and a, b, c, d per position, all mod
2^32,

    32 bits:   y = u + k;  x = y * (2y + 1);  x = (x ^ x >> 16) * 0x9E3779B1;  z = x >> 16
    narrower:  y = u * 0x9E3779B1 + k;        x = y ^ y >> 16;                 z = u
    lane 0 = sum of a * x + b * z,  lane 1 = sum of c * x + d * z

Bound. In any one changed word, let t be the smaller count of low zero bits in the differences
of x and of z; it is 15 at most. Over random a, b, c, d a lane misses the change with
probability 2^(t - 32) at most, both with 2^(2t - 64): no more than 2^-34 whatever k and the
data are. What comes before makes t small: averaged over k too, both lanes miss the worst
difference of a word with about 2^-49, and most (last bits, signs) with 2^-57 to 2^-64, both
measured. Nothing else that changes in the row can raise these numbers. Keys are drawn by
Threefry from a seed, which must not depend on the values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cnr_jax.errors import TableError

# Odd, so that multiplying by it is one-to-one; 2^32 over the golden ratio.
_SPREAD = np.uint32(0x9E3779B1)
_HALF = np.uint32(16)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# The counter of the key k of a leaf; keys of positions count up from 0.
_LEAF_KEY = np.uint32(0xFFFFFFFF)


def hash_rows(leaves: Sequence[jax.Array], seed: jax.Array | np.ndarray) -> jax.Array:
    """Returns a 64-bit hash of each row over all leaves, uint32[rows, 2].

    Reads every leaf once, and holds 8 bytes a row and leaf beside the result. Sharded rows
    stay so, without communication; where columns are sharded, XLA adds up 8 bytes a row.

    Args:
        leaves: a table and its slots, in a fixed order: arrays [rows, ...] with any
            trailing shape, of any dtype of numbers. Shapes and dtypes are not hashed.
        seed: uint32[2]; hashes of unlike seeds do not compare.

    Raises:
        TableError: if there is no leaf, a leaf has no rows or other rows than the first,
            or its dtype is not of numbers.

    Example:
        >>> table, slot = jnp.ones((3, 2)), jnp.array([1, 2, 2])
        >>> seed = np.array([1, 2], np.uint32)
        >>> hashes = hash_rows([table, slot], seed)
        >>> changed_rows(hash_rows([table.at[1, 0].set(2), slot], seed), hashes)
        Array([False,  True, False], dtype=bool)
    """
    return hash_with_tags(leaves, seed)[0]


def hash_with_tags(
    leaves: Sequence[jax.Array], seed: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Returns `hash_rows` and a tag of each row in each leaf, uint8[rows, leaves].

    Where the hashes of a row differ, the tags tell in which leaf: those of a changed leaf are
    the same with probability 2^-8. Costs little where both are wanted.

    Example:
        >>> table, slot = jnp.ones((3, 2)), jnp.array([1, 2, 2])
        >>> seed = np.array([1, 2], np.uint32)
        >>> _, old = hash_with_tags([table, slot], seed)
        >>> _, new = hash_with_tags([table.at[1, 0].set(2), slot], seed)
        >>> (new != old).tolist()
        [[False, False], [True, False], [False, False]]
    """
    if not leaves:
        raise TableError("no leaves to hash\n  expected a table and its slots")
    for index, leaf in enumerate(leaves):
        if leaf.ndim == 0 or leaf.shape[0] != leaves[0].shape[0]:
            raise TableError(
                f"leaf {index} has other rows than leaf 0\n"
                f"  got {list(leaf.shape)}, leaf 0 is {list(leaves[0].shape)}"
            )
    return _hash_rows(tuple(leaves), jnp.asarray(seed))


def partial(
    leaf: jax.Array,
    leaf_index: int | jax.Array,
    first_column: int | jax.Array | Sequence[int],
    seed: jax.Array | np.ndarray,
    *,
    row_shape: Sequence[int] | None = None,
) -> jax.Array:
    """Returns what some columns of one leaf add to the hash, uint32[rows, 2].

    The sum of these (mod 2^32, as uint32 adds) over tiles that cover every column of every
    leaf once, passed through `finalise`, is `hash_rows` exactly.

    Args:
        leaf: [rows, ...], the whole leaf or a tile of it.
        leaf_index: position of the leaf in `hash_rows`' sequence, less than 2^32.
        first_column: where the tile starts in the row. An integer counts elements in
            C order, and then the tile must be contiguous in the row; one integer for each
            trailing dimension places a tile of any box shape. May be traced.
        seed: uint32[2].
        row_shape: trailing shape of the whole leaf; needed with several integers.

    Raises:
        TableError: if the dtype is not of numbers, or the tile cannot be placed.

    Example:
        >>> seed, leaf = np.array([1, 2], np.uint32), jnp.arange(6.0).reshape(2, 3)
        >>> left = partial(leaf[:, :2], 0, 0, seed)
        >>> right = partial(leaf[:, 2:], 0, 2, seed)
        >>> bool((finalise(left + right) == hash_rows([leaf], seed)).all())
        True
    """
    if isinstance(first_column, Sequence):
        starts = tuple(first_column)
        if row_shape is None or not len(starts) == len(row_shape) == leaf.ndim - 1:
            raise TableError(
                f"a tile {list(leaf.shape)} cannot be placed at {list(starts)}\n"
                f"  got row_shape {row_shape}, expected {leaf.ndim - 1} integers in both"
            )
        strides = [math.prod(row_shape[i + 1 :]) for i in range(len(row_shape))]
    else:
        # A contiguous tile is placed as a box at the origin of a row of its own shape.
        starts = (0,) * (leaf.ndim - 1)
        strides = [math.prod(leaf.shape[i + 1 :]) for i in range(1, leaf.ndim)]
    columns = jnp.zeros((1,) * (leaf.ndim - 1), jnp.uint32)
    for axis, (start, stride) in enumerate(zip(starts, strides, strict=True)):
        along = _u32(start) + lax.iota(jnp.uint32, leaf.shape[axis + 1])
        shape = [-1 if i == axis else 1 for i in range(leaf.ndim - 1)]
        columns = columns + (along * np.uint32(stride)).reshape(shape)
    if not isinstance(first_column, Sequence):
        columns = columns + _u32(first_column)
    return _partial(leaf, _u32(leaf_index), columns, jnp.asarray(seed))


@jax.jit
def finalise(partials: jax.Array) -> jax.Array:
    """Returns hashes from summed partial hashes, both uint32[rows, 2].

    One-to-one in each lane, so it loses nothing: it only makes every bit of a hash depend
    on every bit of the sum (the finaliser of MurmurHash3).
    """
    h = partials ^ (partials >> _HALF)
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> _HALF)


@jax.jit
def changed_rows(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns bool[rows]: whether the hashes uint32[rows, 2] of a row differ.

    Example:
        >>> changed_rows(jnp.uint32([[1, 2], [3, 4]]), jnp.uint32([[1, 2], [3, 5]]))
        Array([False,  True], dtype=bool)
    """
    # Not `any` over the lanes: a reduction of two elements is slow on CPU.
    return (new[:, 0] != old[:, 0]) | (new[:, 1] != old[:, 1])


@jax.jit
def stamp_changed(
    stamps: jax.Array, new: jax.Array, old: jax.Array, clock: int | jax.Array
) -> jax.Array:
    """Returns `stamps` int32[rows], with `clock` where the hashes of a row differ.

    Cheapest under one `jit` with what makes `new`. Donating `old` there does not pay: XLA
    would put `new` in its place, and must copy it first, as both are needed here.

    Example:
        >>> new, old = jnp.uint32([[1, 2], [3, 4]]), jnp.uint32([[1, 2], [3, 5]])
        >>> stamp_changed(jnp.int32([7, 7]), new, old, 9)
        Array([7, 9], dtype=int32)
    """
    return jnp.where(changed_rows(new, old), jnp.asarray(clock, stamps.dtype), stamps)


# Jitted as a whole, lest a call outside of `jit` materialises every intermediate.
@jax.jit
def _hash_rows(
    leaves: tuple[jax.Array, ...], seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    parts = [partial(leaf, index, 0, seed) for index, leaf in enumerate(leaves)]
    tags = [finalise(part)[:, 0] >> np.uint32(24) for part in parts]
    return finalise(functools.reduce(jnp.add, parts)), jnp.stack(tags, 1).astype(
        jnp.uint8
    )


@jax.jit
def _partial(
    leaf: jax.Array, leaf_index: jax.Array, columns: jax.Array, seed: jax.Array
) -> jax.Array:
    words = _words(leaf)
    columns = jnp.broadcast_to(columns, leaf.shape[1:])
    if words.ndim > leaf.ndim:
        per_element = words.shape[leaf.ndim :]
        word = lax.iota(jnp.uint32, math.prod(per_element)).reshape(per_element)
        columns = columns.reshape(columns.shape + (1,) * word.ndim)
        columns = columns * np.uint32(word.size) + word
    key, keys = _keys(leaf_index, columns, seed)
    x, z = _mix(words, key, wide=np.dtype(leaf.dtype).itemsize >= 4)
    return _interleave(*_sum_rows(x * keys[0] + z * keys[1], x * keys[2] + z * keys[3]))


def _mix(
    words: jax.Array, key: jax.Array, *, wide: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the x and z of the module's docstring; `wide` if words use all 32 bits."""
    if not wide:
        y = words * _SPREAD + key
        return y ^ (y >> _HALF), words
    y = words + key
    x = y * (y + y + np.uint32(1))
    x = (x ^ (x >> _HALF)) * _SPREAD
    return x, x >> _HALF


def _keys(
    leaf_index: jax.Array, positions: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the key of a leaf, uint32[], and four per position, uint32[4, *positions]."""
    if seed.shape != (2,) or seed.dtype != jnp.uint32:
        raise TableError(f"seed is {seed.dtype}{list(seed.shape)}, expected uint32[2]")
    flat = positions.reshape(-1)
    counters = jnp.stack([flat * np.uint32(2), flat * np.uint32(2) + np.uint32(1)])
    counters = jnp.pad(counters, ((0, 0), (0, 1)), constant_values=_LEAF_KEY)
    # Without barriers XLA fuses the drawing into the loop over rows and repeats it for each.
    drawn = lax.optimization_barrier(_threefry(seed, leaf_index, counters))
    keys = jnp.stack([part[:-1] for words in drawn for part in words])
    # One array, not four: with more of them LLVM gives up proving that they do not overlap
    # the result, and the loop over rows is no vector code, five times slower.
    keys = lax.optimization_barrier(keys.reshape(4, *positions.shape))
    return drawn[0][0, -1], keys


def _threefry(
    key: jax.Array, high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the two words that Threefry-2x32-20 makes of each counter (high, low).

    Spelled out without a loop, as what `jax.random` does on CPU compiles for twice as long
    as all of this, which counts where tables have a thousand shapes.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC'11).
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x = jnp.broadcast_to(high + keys[0], low.shape)
    y = low + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits)))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _words(leaf: jax.Array) -> jax.Array:
    """Returns the bits of `leaf` as uint32[rows, ...], with a last axis where many a element."""
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _words(jnp.stack([jnp.real(leaf), jnp.imag(leaf)], -1))
    if dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.integer):
        # Below a byte there is nothing to bitcast to; a wider type holds the same values.
        leaf = leaf.astype(jnp.int8) if jnp.iinfo(dtype).bits < 8 else leaf
    elif jnp.issubdtype(dtype, jnp.floating):
        leaf = leaf.astype(jnp.float16) if jnp.finfo(dtype).bits < 8 else leaf
    else:
        raise TableError(f"leaf of dtype {dtype} cannot be hashed, expected numbers")
    width = np.dtype(leaf.dtype).itemsize
    if width >= 4:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * width}"))
    return bits.astype(jnp.uint32)


def _sum_rows(one: jax.Array, two: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums uint32[rows] over all but the first axis."""
    axes = tuple(range(1, one.ndim))
    if not axes:
        return one, two
    # One reduction of two operands: two sums would read the table twice, and on CPU are
    # ten times slower, as XLA does not make vector code of them.
    zero = np.uint32(0)
    sums = lax.reduce(
        (one, two), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), axes
    )
    return sums[0], sums[1]


def _interleave(one: jax.Array, two: jax.Array) -> jax.Array:
    # A select, as XLA's CPU code for `stack` branches in the innermost loop.
    lane = lax.broadcasted_iota(jnp.int32, (1, 2), 1)
    return jnp.where(lane == 0, one[:, None], two[:, None])


def _u32(value: int | jax.Array) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)
