"""Row fingerprints: 64-bit hashes that tell which rows changed, whatever changed them.

A row's hash covers its values in the table and in every slot, as bits: -0.0 is not 0.0, and
NaNs differ by their payload. It is kept as two lanes of 32 bits, each a hash of its own. Over
random seeds a change is missed with probability 2^-62 at most, 2^-61 in rows of more than
4,096 words: see nh.py.

On a device elements become words of 32 bits, and no arithmetic of 64 bits is used. Rows in
host memory are viewed as words of 64 bits where they fill them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cnr_jax.errors import TableError
from cnr_jax.rows.fingerprints.nh import hash_words
from cnr_jax.rows.shards import row_words


def hash_rows(leaves: Sequence[jax.Array], seed: jax.Array | np.ndarray) -> jax.Array:
    """Returns a 64-bit hash of each row over all leaves, uint32[rows, 2].

    Reads every leaf once, and holds 16 bytes a row and leaf beside the result. Sharded rows
    stay so, without communication; columns must not be sharded.

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
    _check(leaves, seed)
    return _hash(tuple(leaves), seed, tagged=False)[0]


def hash_with_tags(
    leaves: Sequence[jax.Array], seed: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Returns `hash_rows` and a tag of each row in each leaf, uint8[rows, leaves].

    Where the hashes of a row differ, the tags tell in which leaves. The tag of a changed leaf
    stays the same with probability 2^-8.

    Example:
        >>> table, slot = jnp.ones((3, 2)), jnp.array([1, 2, 2])
        >>> seed = np.array([1, 2], np.uint32)
        >>> _, old = hash_with_tags([table, slot], seed)
        >>> _, new = hash_with_tags([table.at[1, 0].set(2), slot], seed)
        >>> (new != old).tolist()
        [[False, False], [True, False], [False, False]]
    """
    _check(leaves, seed)
    hashes, tags = _hash(tuple(leaves), seed, tagged=True)
    assert tags is not None
    return hashes, tags


def hash_on_host(
    leaves: Sequence[np.ndarray],
    seed: jax.Array,
    *,
    tagged: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns hashes of rows in host memory, and tags if `tagged`; not waited for.

    Hashes are uint64[rows]. Read them by `np.asarray`, as `jax.numpy` may have no arithmetic
    of 64 bits here. They do not compare with those of `hash_rows`. One program serves all
    leaves with the same bytes a row and the same number of rows. Rows that start at multiples
    of 64 bytes are not copied, so they must not change before the result is there.

    Args:
        leaves: arrays [rows, ...] as in `hash_rows`.
        seed: as in `hash_rows`, on the CPU device that does the work.
        tagged: whether to return the tags of `hash_with_tags` too.

    Example:
        >>> leaves, seed = [np.ones((3, 2), np.float32)], jnp.uint32([1, 2])
        >>> old, _ = hash_on_host(leaves, seed, tagged=False)
        >>> leaves = [leaves[0] + np.float32([[0], [1], [0]])]
        >>> new, _ = hash_on_host(leaves, seed, tagged=False)
        >>> np.asarray(new) != np.asarray(old)
        array([False,  True, False])
    """
    _check(leaves, seed)
    # It acts on the code inside only: what goes in and comes out keeps its dtype.
    with jax.enable_x64(True):
        # Views follow the seed to its device. To put them there first would take longer than
        # to hash a small table.
        views = tuple(row_words(leaf) for leaf in leaves)
        return _hash_views(views, seed, tagged=tagged)


def differ_on_host(
    leaves: Sequence[np.ndarray], seed: jax.Array, before: np.ndarray
) -> jax.Array:
    """Returns whether the hashes of rows differ from `before`, bool[rows]; not waited for.

    The hashes themselves are not written, which saves a third of the time for rows of 32 bytes.

    Args:
        leaves: as in `hash_on_host`.
        seed: as in `hash_on_host`.
        before: hashes uint64[rows], which must not change before the result is there.

    Example:
        >>> leaves, seed = [np.ones((3, 2), np.float32)], jnp.uint32([1, 2])
        >>> old = np.asarray(hash_on_host(leaves, seed, tagged=False)[0])
        >>> leaves = [leaves[0] + np.float32([[0], [1], [0]])]
        >>> differ_on_host(leaves, seed, old)
        Array([False,  True, False], dtype=bool)
    """
    _check(leaves, seed)
    with jax.enable_x64(True):
        return _differ_views(tuple(row_words(leaf) for leaf in leaves), seed, before)


@jax.jit
def changed_rows(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns bool[rows]: whether the hashes uint32[rows, 2] of a row differ.

    Example:
        >>> changed_rows(jnp.uint32([[1, 2], [3, 4]]), jnp.uint32([[1, 2], [3, 5]]))
        Array([False,  True], dtype=bool)
    """
    # Not `any` over the lanes: a reduction of two elements is slow on CPU.
    return (new[:, 0] != old[:, 0]) | (new[:, 1] != old[:, 1])


def _check(
    leaves: Sequence[jax.Array | np.ndarray], seed: jax.Array | np.ndarray
) -> None:
    if not leaves:
        raise TableError("no leaves to hash\n  expected a table and its slots")
    for index, leaf in enumerate(leaves):
        if leaf.ndim == 0 or leaf.shape[0] != leaves[0].shape[0]:
            raise TableError(
                f"leaf {index} has other rows than leaf 0\n"
                f"  got {list(leaf.shape)}, leaf 0 is {list(leaves[0].shape)}"
            )
    if seed.shape != (2,) or seed.dtype != jnp.uint32:
        raise TableError(f"seed is {seed.dtype}{list(seed.shape)}, expected uint32[2]")


# Jitted as a whole, lest a call outside of `jit` materialises every intermediate.
@functools.partial(jax.jit, static_argnames="tagged")
def _hash(
    leaves: tuple[jax.Array, ...], seed: jax.Array, *, tagged: bool
) -> tuple[jax.Array, jax.Array | None]:
    return hash_words([_words(leaf) for leaf in leaves], seed, tagged=tagged)


@functools.partial(jax.jit, static_argnames="tagged")
def _hash_views(
    views: tuple[jax.Array, ...], seed: jax.Array, *, tagged: bool
) -> tuple[jax.Array, jax.Array | None]:
    return hash_words(_words_of(views), seed, tagged=tagged)


@jax.jit
def _differ_views(
    views: tuple[jax.Array, ...], seed: jax.Array, before: jax.Array
) -> jax.Array:
    return hash_words(_words_of(views), seed, tagged=False)[0] != before


def _words_of(views: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns views of rows as words of 64 bits."""
    words = [view.astype(jnp.uint64) for view in views]
    # Narrower words are joined in pairs.
    return [
        w if view.dtype == jnp.uint64 else _paired(w, np.uint64(32))
        for w, view in zip(words, views, strict=True)
    ]


def _words(leaf: jax.Array) -> jax.Array:
    """Returns the bits of `leaf` as uint32[rows, ..., words]."""
    bits = _bits(leaf)
    bits = bits[:, None] if bits.ndim == 1 else bits
    if bits.dtype == jnp.uint32:
        return bits
    return _paired(bits.astype(jnp.uint32), np.uint32(16))


def _paired(bits: jax.Array, shift: np.unsignedinteger) -> jax.Array:
    """Returns words made of two elements each; only the lower half of an element is in use."""
    # Halves of the last axis are joined, since joining neighbours would move every element on a
    # device. If their number is odd, the one in the middle is in both halves.
    count = bits.shape[-1]
    half = (count + 1) // 2
    return bits[..., :half] | bits[..., count - half :] << shift


def _bits(leaf: jax.Array) -> jax.Array:
    """Returns the bits of `leaf`, of an unsigned dtype of 8, 16 or 32 bits."""
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _bits(jnp.stack([jnp.real(leaf), jnp.imag(leaf)], -1))
    if dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer):
        # Below a byte there is nothing to bitcast to; a wider type holds the same values.
        leaf = leaf.astype(jnp.int8) if jnp.iinfo(dtype).bits < 8 else leaf
    elif jnp.issubdtype(dtype, jnp.floating):
        leaf = leaf.astype(jnp.float16) if jnp.finfo(dtype).bits < 8 else leaf
    else:
        raise TableError(f"leaf of dtype {dtype} cannot be hashed, expected numbers")
    width = np.dtype(leaf.dtype).itemsize
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * min(width, 4)}"))
