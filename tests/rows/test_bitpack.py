"""Packing against a reference that writes one bit at a time."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cnr_jax.rows.codecs import grid

from ..conftest import each_of

WIDTHS = [2, 3, 4, 8]


def reference_pack(codes: np.ndarray, bits: int) -> np.ndarray:
    rows, dim = codes.shape
    out = np.zeros((rows, (dim * bits + 7) // 8), np.uint8)
    for row in range(rows):
        number = sum(int(code) << (bits * i) for i, code in enumerate(codes[row]))
        out[row] = list(number.to_bytes(out.shape[1], "little"))
    return out


@partial(jax.jit, static_argnums=1)
def there_and_back(
    codes: dict[int, jax.Array], bits: int
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Packed codes, and these unpacked, by the dim: one program for all of them."""
    packed = {dim: grid.pack(each, bits) for dim, each in codes.items()}
    return {dim: (x, grid.unpack(x, bits, dim)) for dim, x in packed.items()}


@each_of("bits", WIDTHS)
def test_every_dim_packs_like_a_little_endian_integer_and_unpacks_to_itself(bits):
    rng = np.random.default_rng(bits)
    codes = {
        dim: rng.integers(0, 2**bits, (5, dim), dtype=np.uint8)
        for dim in (*range(1, 18), *range(31, 34), *range(63, 66))
    }
    for each in codes.values():
        each[0], each[1] = 0, 2**bits - 1
    for dim, (packed, unpacked) in there_and_back(codes, bits).items():
        assert packed.dtype == unpacked.dtype == jnp.uint8
        assert packed.shape == (5, grid.packed_width(dim, bits))
        np.testing.assert_array_equal(
            packed, reference_pack(codes[dim], bits), str(dim)
        )
        np.testing.assert_array_equal(unpacked, codes[dim], str(dim))


@each_of(
    ("bits", "codes", "stored"),
    [
        (2, [1, 2, 3, 0, 3], [0b00111001, 0b00000011]),
        (3, [1, 2, 3, 4, 5, 6, 7, 0, 7], [0xD1, 0x58, 0x1F, 0x07]),
        (4, [1, 2, 15], [0x21, 0x0F]),
        (8, [7, 255], [7, 255]),
    ],
)
def test_bit_order_is_what_checkpoints_hold(bits, codes, stored):
    packed = grid.pack(jnp.array([codes], jnp.uint8), bits)
    assert packed.tolist() == [stored]


def test_padding_bits_are_zero_and_ignored():
    packed = grid.pack(jnp.full((1, 3), 7, jnp.uint8), 3)
    assert packed.tolist() == [[0xFF, 0x01]]
    dirty = packed | jnp.array([[0, 0xFE]], jnp.uint8)
    assert grid.unpack(dirty, 3, 3).tolist() == [[7, 7, 7]]


@each_of("bits", WIDTHS)
def test_no_rows_pack_to_no_rows(bits):
    packed = grid.pack(jnp.zeros((0, 9), jnp.uint8), bits)
    assert packed.shape == (0, grid.packed_width(9, bits))
    assert grid.unpack(packed, bits, 9).shape == (0, 9)


@each_of("bits", [0, 1, 5, 16])
def test_other_widths_are_refused_with_the_legal_ones(bits):
    with pytest.raises(ValueError, match=r"2, 3, 4, 8"):
        grid.packed_width(8, bits)


def test_unpack_names_both_widths_when_the_dim_does_not_fit():
    with pytest.raises(ValueError, match="5 bytes wide, expected 4 for 8 codes"):
        grid.unpack(jnp.zeros((2, 5), jnp.uint8), 4, 8)
