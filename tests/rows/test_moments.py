"""Moments of gradients as integers: their errors, exact bits, sums of differences, quiet rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cnr_jax.rows.codecs import Encoded, codec_from
from cnr_jax.rows.codecs.moments import Octave, Unit
from cnr_jax.rows.codecs.residual import Digest
from cnr_jax.rows.codecs.sparse import RowsAt

DTYPES = (np.float32, jnp.bfloat16, np.float16)


def squares(count: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows of uneven size; the first ones hold what is no square, or is hardly one."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal(size=(count, 1)) * 4 - 20) * rng.chisquare(1, (count, dim))
    rows[0], rows[1, -1], rows[2, 0] = 0, 0, np.inf
    rows[3, 0], rows[4, 0], rows[5, 0] = -1e-30, 1e-42, np.nan
    rows[6], rows[7, 0] = 2.0**-126, np.finfo(np.float32).max
    return rows.astype(np.float32)


# One program each: operation by operation, each shape would be compiled dozens of times.
@partial(jax.jit, static_argnums=0)
def encode_on(codec: Octave | Unit, rows: Any, integers: Any, centre: Any) -> Encoded:
    return codec.encode_on(rows, integers, centre)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(codec: Octave | Unit, parts: Any, dim: int, dtype: Any) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)


def over(
    codec: Octave, rows: np.ndarray, below: dict[str, np.ndarray] | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parts of rows over those below, and which rows are escaped."""
    known = below or {}
    integers = known.get("integers", np.zeros(rows.shape, np.int16))
    centre = known.get("centre", np.zeros((len(rows), 1), np.int16))
    return on_host(encode_on(codec, rows, integers, centre))


def on_host(found: Encoded) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts = {name: np.asarray(part) for name, part in found.parts.items()}
    return parts, np.asarray(found.escaped)


@pytest.mark.parametrize("dim", [1, 5])
@pytest.mark.parametrize("places", [1, 2, 16, 256])
def test_squares_read_within_their_bound(places: int, dim: int) -> None:
    rows, codec = squares(2000, dim), Octave(places=places)
    parts, escaped = over(codec, rows)
    read = np.asarray(decode(codec, parts, dim, np.float32))
    assert set(np.flatnonzero(escaped)) <= {2, 3, 5, 7}
    assert escaped[[2, 5]].all()
    kept = ~escaped
    off = np.abs(read - rows)[kept]
    assert (off <= (2 ** (0.52 / places) - 1) * rows[kept] + 2.0**-126).all()
    assert (read[kept] == 0).tolist() == (rows[kept] < 2.0**-126).tolist()
    assert not parts["integers"][escaped].any()


@pytest.mark.parametrize("places", [2, 256])
def test_places_have_the_same_bits_everywhere(places: int) -> None:
    """Worked out on the host in double precision, which needs no table."""
    q = np.arange(-32767, 32768, 7, dtype=np.int16).reshape(-1, 1)
    read = np.asarray(decode(Octave(places=places), {"integers": q}, 1, np.float32))
    wide = q.astype(np.int64)
    p = np.clip(wide - (wide > 0), -126 * places, 128 * places - 1)
    expected = np.where(wide == 0, 0, np.exp2(p / places)).astype(np.float32)
    assert read.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 6])
def test_means_read_within_their_bound(dim: int, dtype: type) -> None:
    rng = np.random.default_rng(1)
    codec, rows = Unit(steps=8), squares(2000, dim, seed=2)
    known, _ = over(codec.squares, rows)
    means = np.sqrt(np.abs(np.nan_to_num(rows, posinf=0))) * rng.normal(size=rows.shape)
    means[10, 0], means[11, 0] = np.nan, 1e9 * np.sqrt(rows[11, 0])
    means[0, 0], means[1, -1] = 1e-19, 1e-3
    with np.errstate(over="ignore"):
        means = means.astype(dtype)
    given = known["integers"], known.get("centre", np.zeros((len(rows), 1), np.int16))
    parts, escaped = on_host(encode_on(codec, means, *given))
    assert escaped[[1, 10, 11]].all()
    assert not escaped[0] or dtype == np.float16
    read = np.asarray(decode(codec, parts, dim, dtype)).astype(np.float64)
    shown = np.asarray(decode(codec.squares, known, dim, np.float32))
    kept, exact = ~escaped, means.astype(np.float64)
    rounding = {2: float(jnp.finfo(dtype).eps), 4: 1e-7}[np.dtype(dtype).itemsize]
    most = 0.511 / 8 * np.sqrt(shown) + np.abs(exact) * rounding + 2.0**-24
    assert (np.abs(read - exact)[kept] <= most[kept]).all()
    # A product of so few bits is exact, whatever it is computed in.
    root = np.asarray(
        decode(Octave(places=4), {n: known[n] for n in known}, dim, np.float32)
    ).astype(np.float64)
    steps = 2.0**15
    exponent = np.floor(np.log2(np.where(root > 0, root, 1)))
    root = np.round(root / 2**exponent * steps) / steps * 2**exponent
    expected = (parts["integers"] / 8.0 * root).astype(np.float32).astype(dtype)
    if dtype != np.float16:  # which clips
        assert read.tobytes() == expected.astype(np.float64).tobytes()


def test_means_alone_are_counted_in_roots_of_their_own_squares() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    codec = Unit(steps=8)
    parts, escaped = on_host(jax.jit(codec.encode)(rows))
    read = np.asarray(decode(codec, parts, 4, np.float32))
    assert not escaped.any()
    np.testing.assert_allclose(read, rows, rtol=0.1)


@pytest.mark.parametrize("dim", [1, 4])
def test_differences_add_up(dim: int) -> None:
    codec = Octave(places=256)
    below, _ = over(codec, squares(500, dim))
    new, _ = over(codec, squares(500, dim, seed=5)[::-1].copy(), below)
    stored = codec.difference(new, below)
    total = {name: part.copy() for name, part in below.items()}
    codec.add(stored, RowsAt(total, slice(0, len(new["integers"]))))
    for name, part in total.items():
        assert part.tobytes() == new[name].tobytes(), name
    for kind in (codec, Unit(places=256)):
        digest = Digest(kind)
        digest.update({"octaves": below["integers"], **below})
        assert len(digest.hexdigest()) == 16


def test_rows_without_gradients_are_not_stored() -> None:
    """They decay with all others: that is the centre's doing, in one number for all of them."""
    codec, rows = Octave(places=2), squares(3000, 8)[10:]
    below, _ = over(codec, rows)
    later = (rows * 0.999**2000).astype(np.float32)  # 2.9 octaves
    touched = np.arange(0, len(rows), 5)
    later[touched] = squares(3000, 8, seed=3)[10:][touched]
    later[touched[::2]] *= 2.0**20
    new, _ = over(codec, later, below)
    stored, still = codec.difference(new, below), np.ones(len(rows), bool)
    still[touched] = False
    assert not stored["integers"][still].any()
    assert (stored["centre"] == -6).all()
    assert stored["integers"][touched].any(axis=1).mean() > 0.9
    read = np.asarray(decode(codec, new, 8, np.float32))
    within = np.abs(np.log2(read[later > 0] / later[later > 0]))
    assert within.max() <= 0.51


def test_a_row_that_was_nothing_has_a_centre_of_its_own() -> None:
    codec, rows = Octave(places=2), squares(100, 8)[10:]
    nothing = {
        "integers": np.zeros(rows.shape, np.int16),
        "centre": np.zeros((len(rows), 1), np.int16),
    }
    first, again = over(codec, rows)[0], over(codec, rows, nothing)[0]
    for name in first:
        assert first[name].tobytes() == again[name].tobytes()
    assert len(np.unique(first["centre"])) > 10


@pytest.mark.parametrize(
    "given", [{"places": 3}, {"places": 512}, {"places": 0}, {"steps": 6, "places": 2}]
)
def test_what_is_no_power_of_two_is_refused(given: dict[str, int]) -> None:
    kind = Unit if "steps" in given else Octave
    with pytest.raises(ValueError, match="power of two"):
        kind(**given)


@pytest.mark.parametrize("codec", [Octave(places=16), Unit(steps=4, places=1)])
def test_codecs_are_read_by_name_and_configuration(codec: Octave | Unit) -> None:
    assert codec_from(codec.name, codec.configuration()) == codec
    with pytest.raises(TypeError, match="cannot be quantized"):
        codec.encode(jnp.zeros((2, 2), jnp.int32))
