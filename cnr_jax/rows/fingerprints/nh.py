"""Universal hashing of rows of words: NH sums, folded into two lanes of 32 bits.

Construction. A row is a sequence of words X of 2w bits, w being 16 or 32. With low(x) and
high(x) for the halves of a word, and all mod 2^2w,

    S = sum over the words of all leaves of low(X + K) * high(X + K)

where K, of 2w bits, is drawn for each word and sum. There are four sums of words of 32 bits, or
two of words of 64 bits. Either way each lane is made of 64 bits of sums, with halves L and H:

    lane = high((L + A) * (H + B) + C)        mod 2^64

with A, B and C, of 64 bits, drawn for each lane. The sum is NH, and what follows is
pair-multiply-shift. Rows of more than `_WIDE` words are cut into blocks. The hash of a
block, under keys that blocks share, takes the place of its words.

Bound. Over random keys a lane misses a change with probability 2^-31 at most, and both lanes
with 2^-62 (2^-61 where blocks are cut), whatever the rows are. Proof: let a word have changed.
If its low half has, then for each low half of K at most one high half of K gives the sum the
same value again, by the lemma of NH. If only its high half has, then for each high half of K
at most one low half does. So a sum stays the same with 2^-w at most, and all sums of a lane
with 2^-32. If they differ, the lane stays the same with 2^-32 at most. Keys are drawn by
Threefry from a seed, which must not depend on the values.

Words of 32 bits need no arithmetic of 64 bits, which not all devices have. Words of 64 bits
are two to three times faster on CPU.

Sources: Black et al., UMAC: fast and secure message authentication (CRYPTO '99); Thorup,
High speed hashing for integers and strings (arXiv:1504.06804); Salmon et al., Parallel
random numbers: as easy as 1, 2, 3 (SC '11).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# In words: rows up to `_WIDE` are hashed at once, others in blocks.
_WIDE = 4096
_BLOCK = 1024
# On CPU, sums over up to this many words are fused with all that is done with them.
_NARROW = 16
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_16 = np.uint32(16)
_LOW_16 = np.uint32(0xFFFF)


def hash_words(
    leaves: Sequence[jax.Array], seed: jax.Array, *, tagged: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns hashes, and tags uint8[rows, leaves] if `tagged`.

    Hashes are uint32[rows, 2]; for words of 64 bits uint64[rows], with the first lane low.

    Args:
        leaves: words [rows, ...] of one dtype, uint32 or uint64.
        seed: uint32[2].
        tagged: whether to return 8 bits of a hash of each leaf.
    """
    words = [_shorten(leaf, seed) for leaf in leaves]
    dtype = words[0].dtype
    *keys, last = _keys(seed, 0, [*(x.shape[1:] for x in words), (3,)], dtype)
    sums = [_sums(x, k, range(1, x.ndim)) for x, k in zip(words, keys, strict=True)]
    whole = [functools.reduce(jnp.add, parts) for parts in zip(*sums, strict=True)]
    one, two = _lanes(whole, last)
    hashes = _joined(one, two) if dtype == jnp.uint64 else _columns([one, two])
    if not tagged:
        return hashes, None
    tags = _columns([_lanes(parts, last)[0] for parts in sums])
    return hashes, (tags >> np.uint32(24)).astype(jnp.uint8)


def _shorten(words: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns `words` [rows, ...]; if a row has too many, the hashes of its blocks."""
    rows, *shape = words.shape
    size = math.prod(shape)
    if size <= _WIDE:
        return words
    rest = None
    if not _BLOCK // 8 <= shape[-1] <= _WIDE:
        flat = words.reshape(rows, size)
        end = size - size % _BLOCK
        words, rest = flat[:, :end].reshape(rows, -1, _BLOCK), flat[:, end:]
    key, last = _keys(seed, 1, [words.shape[-1:], (3,)], words.dtype)
    one, two = _lanes(_sums(words, key, [words.ndim - 1]), last)
    if words.dtype == jnp.uint64:
        short = _joined(one, two)
    else:
        short = jnp.stack([one, two], -1)
    short = short.reshape(rows, -1)
    return short if rest is None else jnp.concatenate([short, rest], 1)


def _sums(
    words: jax.Array, keys: jax.Array, axes: Sequence[int]
) -> tuple[jax.Array, ...]:
    """Returns the sums over `axes`, one for each of keys [sums, ...]."""
    if words.dtype == jnp.uint64 and words.ndim == 2 and 0 < words.shape[1] <= _NARROW:
        columns = [words[:, i] for i in range(words.shape[1])]
        return tuple(
            functools.reduce(
                jnp.add, [_product(x, keys[i, j]) for j, x in enumerate(columns)]
            )
            for i in range(keys.shape[0])
        )
    products = [_product(words, keys[i]) for i in range(keys.shape[0])]
    # One reduction of several operands: a reduction for each would read the table each time.
    return tuple(
        lax.reduce(
            products,
            [words.dtype.type(0)] * len(products),
            lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
            tuple(axes),
        )
    )


def _product(words: jax.Array, key: jax.Array) -> jax.Array:
    if key.ndim:
        key = jnp.expand_dims(key, range(words.ndim - key.ndim))
    half = words.dtype.type(words.dtype.itemsize * 4)
    low = words.dtype.type((1 << int(half)) - 1)
    keyed = words + key
    return (keyed & low) * (keyed >> half)


def _lanes(sums: Sequence[jax.Array], keys: jax.Array) -> list[jax.Array]:
    """Returns both lanes, uint32[rows], of two sums of 64 bits or four of 32 bits."""
    if sums[0].dtype == jnp.uint64:
        return [_fold(each, keys[i]) for i, each in enumerate(sums)]
    return [_fold_halves(sums[i], sums[i + 1], keys[i : i + 2]) for i in (0, 2)]


def _fold(sums: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns the lane of sums uint64[rows], with A, B and C at the front of `keys`."""
    low = sums & np.uint64(0xFFFFFFFF)
    product = (low + keys[0]) * ((sums >> np.uint64(32)) + keys[1]) + keys[2]
    return (product >> np.uint64(32)).astype(jnp.uint32)


def _fold_halves(low: jax.Array, high: jax.Array, keys: jax.Array) -> jax.Array:
    """`_fold` of two sums uint32[rows] in arithmetic of 32 bits.

    Low halves of A, B and C are at the front of `keys[0]`, high halves of `keys[1]`.
    """
    lower, upper = keys[0], keys[1]
    x_low, y_low = low + lower[0], high + lower[1]
    x_high = upper[0] + (x_low < lower[0]).astype(jnp.uint32)
    y_high = upper[1] + (y_low < lower[1]).astype(jnp.uint32)
    carry = (x_low * y_low + lower[2] < lower[2]).astype(jnp.uint32)
    upper_product = _high(x_low, y_low) + x_low * y_high + x_high * y_low
    return upper_product + upper[2] + carry


def _high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of products of 32 bits by 32 bits."""
    a_low, a_high = a & _LOW_16, a >> _16
    b_low, b_high = b & _LOW_16, b >> _16
    one = a_high * b_low + (a_low * b_low >> _16)
    two = a_low * b_high + (one & _LOW_16)
    return a_high * b_high + (one >> _16) + (two >> _16)


def _keys(
    seed: jax.Array, stream: int, shapes: Sequence[tuple[int, ...]], dtype: Any
) -> list[jax.Array]:
    """Returns keys of all sums for each shape, [sums, *shape]: 128 bits for each element."""
    count = 2 * sum(math.prod(shape) for shape in shapes)
    drawn = _threefry(seed, np.uint32(stream), lax.iota(jnp.uint32, count))
    # Joined and behind barriers, so that XLA draws keys once, and not again for each row.
    joined = lax.optimization_barrier(jnp.concatenate(drawn))
    if dtype == jnp.uint64:
        joined = _joined(joined[count:], joined[:count])
        joined = lax.optimization_barrier(joined)
    sums = 2 if dtype == jnp.uint64 else 4
    ends = np.cumsum([sums * math.prod(shape) for shape in shapes])[:-1].tolist()
    parts = jnp.split(joined, ends)
    return [x.reshape(sums, *s) for x, s in zip(parts, shapes, strict=True)]


def _threefry(
    key: jax.Array, high: np.uint32, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the two words that Threefry-2x32-20 makes of each counter (high, low).

    Spelled out without a loop: on CPU the code of `jax.random` takes twice as long to compile
    as all of this, which counts if tables have a thousand shapes.
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


def _columns(columns: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays [rows] as the columns of one."""
    # By selects, as XLA's CPU code for `stack` branches in the innermost loop.
    index = lax.broadcasted_iota(jnp.int32, (1, len(columns)), 1)
    joined = columns[0][:, None]
    for number, column in enumerate(columns[1:], 1):
        joined = jnp.where(index == number, column[:, None], joined)
    return joined


def _joined(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns words of 64 bits, joined from their halves."""
    low, high = (lax.convert_element_type(x, jnp.uint64) for x in (low, high))
    return low | high << np.uint64(32)
