"""Every codec but `Raw` and `Asymmetric` (`test_codecs.py`): bounds, reading, search.

Arguments and shapes, which cost no compilation, are those of every codec.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cnr_jax.errors import FormatError
from cnr_jax.rows.codecs import (
    Asymmetric,
    BFloat16,
    Codec,
    Greedy,
    KMeans,
    Log,
    Raw,
    SharedCodebook,
    Symmetric,
    bytes_of,
    codec_from,
    make_codec,
)
from cnr_jax.rows.codecs.grid import unpack

from ..conftest import each_of

FLOAT32, BFLOAT16, FLOAT16 = (
    np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16)
)
ROWS, DIM = 12, 21  # one shape, so that few programs are compiled
GRIDS = [
    (Symmetric(bits=3), FLOAT32),
    (Symmetric(bits=8), FLOAT16),
    (Greedy(bits=3, bins=12), FLOAT32),
    (Greedy(bits=2, bins=12, ratio=1.0), BFLOAT16),
    (KMeans(bits=2, iterations=5), FLOAT32),
    (KMeans(bits=3, iterations=5, metadata_bits=32), FLOAT16),
    (SharedCodebook(bits=2), FLOAT32),
    (SharedCodebook(bits=3, refits=0), BFLOAT16),
]
SLOTS = [
    (codec, dtype)
    for codec in (BFloat16(), Log(bits=8), Log(bits=16))
    for dtype in (FLOAT32, BFLOAT16, FLOAT16)
]


@partial(jax.jit, static_argnums=0)
def encode(codec: Codec, rows):
    return codec.encode(rows)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(codec: Codec, parts, dim: int, dtype: np.dtype):
    return codec.decode(parts, dim=dim, dtype=dtype)


def bits_of(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def wide(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def forall_rows(rows_of, dtype: np.dtype, check) -> None:
    """Calls `check` with batches of rows of every kind."""
    quietly = settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    quietly(given(rows_of(dtype, ROWS, DIM))(check))()


def spacing(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """One ulp of `dtype` at float64 values."""
    info = jnp.finfo(dtype)
    magnitude = np.maximum(np.abs(values), float(info.tiny))
    return 2.0 ** (np.floor(np.log2(magnitude)) - info.nmant)


def mean_l2(codec: Codec, rows: np.ndarray) -> float:
    encoded = encode(codec, rows)
    assert not np.asarray(encoded.escaped).any()
    back = decode(codec, encoded.parts, rows.shape[1], rows.dtype)
    return float(np.linalg.norm(wide(back) - wide(rows), axis=1).mean())


# --- codecs with a grid ---


def read_with_numpy(codec, parts, dim: int, dtype: np.dtype) -> np.ndarray:
    """The formulas of the specification, in float32."""
    codes = np.asarray(unpack(parts["codes"], codec.bits, dim))
    if isinstance(codec, KMeans):
        book = np.asarray(parts["codebook"]).astype(np.float32)
        centred = np.take_along_axis(book, codes.astype(np.int64), 1)
    elif isinstance(codec, SharedCodebook):
        centred = np.array(codec.levels, np.float32)[codes]
    else:
        centred = codes.astype(np.float32) - np.float32((2**codec.bits - 1) / 2)
    if not isinstance(codec, Symmetric):
        centred = centred + np.asarray(parts["offset"]).astype(np.float32)
    x = np.asarray(parts["scale"]).astype(np.float32) * centred
    if dtype == FLOAT16:
        x = x.clip(np.float32(-65504), np.float32(65504))
    return x.astype(dtype)


def step_of(codec, exact: np.ndarray) -> np.ndarray:
    if isinstance(codec, Symmetric):
        spread = 2 * np.abs(exact).max(1)
    else:
        spread = exact.max(1) - exact.min(1)
    return spread / (2**codec.bits - 1)


def bound_in_steps(codec) -> float:
    """Of the root of the mean square of a row's errors."""
    if isinstance(codec, Symmetric):
        return 0.51
    if isinstance(codec, SharedCodebook):
        gaps = np.diff(codec.levels).max() / 2
        ends = (2**codec.bits - 1) / 2 - min(codec.levels[-1], -codec.levels[0])
        return max(gaps, ends) + 0.35
    return 0.54


def must_be_escaped(codec, rows: np.ndarray) -> np.ndarray:
    if not isinstance(codec, Symmetric):
        same = {"bits": codec.bits, "metadata_bits": codec.metadata_bits}
        return np.asarray(encode(Asymmetric(**same, refits=0), rows).escaped)
    finite = np.isfinite(wide(rows)).all(1)
    step = step_of(codec, np.where(finite[:, None], wide(rows), 1))
    return ~finite | ((step != 0) & ((step < 2.0**-100) | (step > 2.0**100)))


@pytest.mark.parametrize(("codec", "dtype"), GRIDS, ids=str)
def test_rows_on_a_grid_are_within_their_bound(codec, dtype, rows_of):
    def check(rows):
        encoded = encode(codec, rows)
        escaped = np.asarray(encoded.escaped)
        back = decode(codec, encoded.parts, DIM, dtype)
        zero = (wide(rows) == 0).all(1)
        exact = np.where(escaped[:, None], 0, wide(rows))
        step = step_of(codec, exact)

        unrounded = wide(decode(codec, encoded.parts, DIM, FLOAT32))
        error = np.where(escaped[:, None], 0, unrounded - exact)
        bound = bound_in_steps(codec)
        if isinstance(codec, Symmetric):
            assert (np.abs(error) <= bound * step[:, None]).all()
        norm = np.linalg.norm(error, axis=1)
        assert (norm <= bound * step * np.sqrt(DIM)).all()

        np.testing.assert_array_equal(escaped, must_be_escaped(codec, rows))
        assert (bits_of(back)[zero | escaped] == 0).all()
        with np.errstate(under="ignore"):
            expected = read_with_numpy(codec, encoded.parts, DIM, dtype)
        np.testing.assert_array_equal(bits_of(back), bits_of(expected))

    forall_rows(rows_of, dtype, check)


# --- codecs for slots ---


@pytest.mark.parametrize(("codec", "dtype"), SLOTS, ids=str)
def test_elements_of_slots_are_within_their_bound(codec, dtype, rows_of):
    def check(rows):
        signed = isinstance(codec, BFloat16)
        # Half of the rows as they are, so that negative elements are met.
        rows[::2] = np.abs(rows[::2])
        encoded = encode(codec, rows)
        escaped = np.asarray(encoded.escaped)
        back = np.asarray(decode(codec, encoded.parts, DIM, dtype))
        exact = wide(rows)
        finite = np.isfinite(exact).all(1)
        if signed:
            largest = 2.0**128 * (1 - 2.0**-9)
            expected = ~finite | (np.abs(exact) >= largest).any(1)
            relative = np.full((len(rows), 1), 2.0**-8)
            floor = 2.0**-134
        else:
            least = float(np.finfo(np.float32).tiny)
            places = 256 * (np.log2(np.maximum(exact, least)) + 126)
            out = (exact < 0) | ((exact > 0) & (exact < least)) | (places > 65023.49)
            expected = ~finite | out.any(1)
            near = ((places > 65023.4) & (places < 65023.6)).any(1)
            expected = np.where(near, escaped, expected)
            stride = np.asarray(encoded.parts.get("stride", np.ones((len(rows), 1))))
            relative = 2.0 ** ((stride / 2 + 0.02) / 256) - 1
            floor = 0.0
        np.testing.assert_array_equal(escaped, expected)

        kept, held = exact[~escaped], back[~escaped]
        assert np.isfinite(wide(held)).all()
        allowed = np.abs(kept) * relative[~escaped] + floor
        if dtype != FLOAT32 and not (signed and dtype == BFLOAT16):
            allowed += spacing(np.abs(kept) + allowed, dtype)
        assert (np.abs(wide(held) - kept) <= allowed).all()
        zero = rows[~escaped] == 0
        assert (held[zero] == 0).all()
        if signed:
            np.testing.assert_array_equal(np.signbit(held), np.signbit(kept))
            if dtype == BFLOAT16:
                np.testing.assert_array_equal(bits_of(held), bits_of(rows[~escaped]))
        else:
            assert not np.signbit(wide(held)).any()
        assert (bits_of(back[escaped]) == 0).all()

    forall_rows(rows_of, dtype, check)


def test_bfloat16_is_rounded_to_nearest_even_down_to_denormals():
    words = np.random.default_rng(0).integers(0, 2**32, (256, DIM), np.uint32)
    words[0] = np.arange(DIM) * 0x8000 + 0x8000  # ties, among denormals
    rows = words.view(np.float32)
    rows[~np.isfinite(rows) | (np.abs(rows) > 3e38)] = 1
    encoded = encode(BFloat16(), rows)
    assert not np.asarray(encoded.escaped).any()
    with np.errstate(under="ignore"):
        expected = rows.astype(BFLOAT16)
    np.testing.assert_array_equal(bits_of(encoded.parts["rows"]), bits_of(expected))
    back = decode(BFloat16(), encoded.parts, DIM, FLOAT32)
    np.testing.assert_array_equal(bits_of(back), bits_of(expected.astype(np.float32)))


@pytest.mark.parametrize("bits", [8, 16])
def test_places_of_logarithms_read_as_specified(bits):
    codec = Log(bits=bits)
    rng = np.random.default_rng(1)
    parts = {
        name: rng.integers(0, np.iinfo(part.dtype).max, (64, part.width), part.dtype)
        for name, part in codec.parts(32, FLOAT32).items()
    }
    q = parts["codes"].astype(np.int64)
    if bits == 16:
        q[q > 65024] = 65024
        parts["codes"] = q.astype(np.uint16)
        p = q - 1
    else:
        parts["top"] = parts["top"].clip(0, 65023)
        p = parts["top"].astype(int) - (255 - q) * parts["stride"].astype(int)
        p = p.clip(0)
    mantissa = np.float32(2.0 ** ((p % 256) / 256)).astype(np.float64)
    expected = np.where(q > 0, mantissa * 2.0 ** (p // 256 - 126), 0)
    back = decode(codec, parts, 32, FLOAT32)
    np.testing.assert_array_equal(wide(back), expected)


def test_mantissas_of_logarithms_are_rounded_correctly():
    from decimal import Decimal, getcontext

    getcontext().prec = 60
    from cnr_jax.rows.codecs.log import _TABLE

    root = Decimal(2)
    for _ in range(8):
        root = root.sqrt()
    for i, got in enumerate(_TABLE.view(np.float32)):
        exact = root**i
        neighbours = [np.nextafter(got, np.float32(end)) for end in (0, 2)]
        distance = abs(Decimal(float(got)) - exact)
        assert all(distance < abs(Decimal(float(n)) - exact) for n in neighbours)


def test_slots_of_one_element_take_two_bytes_and_rows_of_them_less_than_raw():
    assert (
        bytes_of(Log().parts(1, FLOAT32)) == bytes_of(BFloat16().parts(1, FLOAT32)) == 2
    )
    assert bytes_of(Log(bits=8).parts(64, FLOAT32)) == 68


# --- searches ---


def greedy_with_numpy(row: np.ndarray, codec: Greedy) -> float:
    """The least l2 error that the search meets, in float64 but for what is stored."""
    levels = 2**codec.bits - 1

    def error(low: float, high: float) -> float:
        scale = np.float64((high - low) / levels).astype(BFLOAT16).astype(np.float64)
        offset = np.float16((low + high) / 2 / scale).astype(np.float64)
        place = row / scale - offset + levels / 2
        codes = np.clip(np.rint(place), 0, levels)
        return float(np.linalg.norm(row - scale * (codes - levels / 2 + offset)))

    low, high = row.min(), row.max()
    notch = (high - low) / codec.bins
    best = error(low, high)
    for _ in range(min(int(codec.bins * codec.ratio + 1e-9), codec.bins - 1)):
        raised, lowered = error(low + notch, high), error(low, high - notch)
        low, high = (low + notch, high) if raised < lowered else (low, high - notch)
        best = min(best, raised, lowered)
    return best


@pytest.mark.parametrize("codec", [Greedy(bits=2, bins=16, ratio=1.0), Greedy(bits=4)])
def test_greedy_search_is_that_of_numpy(codec):
    rows = np.random.default_rng(2).standard_t(4, (60, DIM)).astype(np.float32)
    encoded = encode(codec, rows)
    back = wide(decode(codec, encoded.parts, DIM, FLOAT32))
    got = np.linalg.norm(back - wide(rows), axis=1)
    wanted = np.array([greedy_with_numpy(wide(row), codec) for row in rows])
    # Where two moves are as good, float32 may take the other one.
    assert (np.abs(got / wanted - 1) < 1e-4).mean() >= 0.95
    assert abs(got.mean() / wanted.mean() - 1) < 2e-3


def kmeans_with_numpy(row: np.ndarray, k: int, iterations: int) -> float:
    places = ((np.arange(k) + 0.5) / k * len(row)).astype(int)
    starts = np.sort(row)[places], np.linspace(row.min(), row.max(), k)
    errors = []
    for book in starts:
        for _ in range(iterations):
            nearest = np.searchsorted((book[1:] + book[:-1]) / 2, row)
            members = [row[nearest == i] for i in range(k)]
            means = [
                m.mean() if len(m) else b for m, b in zip(members, book, strict=True)
            ]
            book = np.array(means)
        errors.append(np.linalg.norm(np.abs(row - book[:, None]).min(axis=0)))
    return min(errors)


@pytest.mark.parametrize("bits", [2, 4])
def test_kmeans_finds_the_codebooks_of_numpy(bits):
    codec = KMeans(bits=bits, metadata_bits=32)
    rows = np.random.default_rng(3).standard_t(4, (40, DIM)).astype(np.float32)
    encoded = encode(codec, rows)
    back = wide(decode(codec, encoded.parts, DIM, FLOAT32))
    got = np.linalg.norm(back - wide(rows), axis=1)
    wanted = [kmeans_with_numpy(wide(row), 2**bits, codec.iterations) for row in rows]
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)


def test_fitted_levels_are_a_fixed_point_and_no_other_levels_are_better():
    rows = np.random.default_rng(4).laplace(size=(500, DIM)).astype(np.float32)
    codec = SharedCodebook.fit(rows, bits=2)
    unit = (rows - rows.min(1, keepdims=True)) / np.ptp(rows, axis=1, keepdims=True)
    values = wide(unit * 3 - 1.5).ravel()
    levels = np.array(codec.levels)
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
    means = [values[nearest == i].mean() for i in range(4)]
    np.testing.assert_allclose(means, levels, atol=2e-3)

    def error_with(levels: np.ndarray) -> float:
        """In float64, of rows that are not fitted again."""
        off = np.abs(values[:, None] - levels).min(axis=1).reshape(rows.shape)
        return float((np.linalg.norm(off, axis=1) * np.ptp(rows, axis=1) / 3).mean())

    plain = dataclasses.replace(codec, refits=0)
    best = error_with(levels)
    assert mean_l2(plain, rows) == pytest.approx(best, rel=0.01)
    for k, move in itertools.product(range(4), (-0.05, 0.05)):
        assert best < error_with(levels + move * (np.arange(4) == k))


# Each width and each dim once; the search is slow to compile.
SEARCHED = [(2, 64), (3, 16), (4, 128)]


@pytest.mark.parametrize(
    "cases",
    [
        SEARCHED,
        pytest.param(
            sorted({*itertools.product([2, 3, 4], [16, 64, 128])} - {*SEARCHED}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "others"],
)
def test_adaptive_codec_errs_no_more_than_the_greedy_search(cases):
    for bits, dim in cases:
        rows = np.random.default_rng(6).normal(size=(2048, dim)).astype(np.float32)
        greedy = mean_l2(Greedy(bits=bits, bins=45, ratio=1.0), rows)
        assert mean_l2(make_codec("adaptive", bits), rows) <= greedy, (bits, dim)


def test_order_of_errors_is_that_of_the_paper():
    rng = np.random.default_rng(5)
    rows = (rng.normal(size=(1000, 64)) + 0.5).astype(np.float32)
    names = ("symmetric", "asymmetric", "adaptive", "kmeans")
    errors = [mean_l2(make_codec(name, 2), rows) for name in names]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] > 1.3 * errors[2]


# --- names and arguments ---


@each_of("codec", [c for c, _ in [*GRIDS, *SLOTS]])
def test_spec_through_json_leads_back_to_an_equal_codec(codec):
    again = codec_from(codec.name, json.loads(json.dumps(codec.configuration())))
    assert again == codec and hash(again) == hash(codec)
    assert isinstance(codec, Codec)


def test_names_of_options_are_those_of_the_codecs():
    assert make_codec("symmetric", 4) == Symmetric(bits=4)
    assert make_codec("greedy", 2) == Greedy(bits=2, bins=25, ratio=0.6)
    assert make_codec("kmeans", 3) == KMeans(bits=3)
    assert make_codec("codebook", 8) == SharedCodebook(bits=8)
    assert make_codec("bfloat16", 4) == BFloat16()
    assert make_codec("log", 4) == Log(bits=16)
    assert make_codec("log8", 4) == Log(bits=8)
    assert make_codec("raw", 4) == Raw()


@each_of(
    ("make", "message"),
    [
        (lambda: make_codec("zip", 4), "'raw', 'symmetric', 'asymmetric', 'adaptive'"),
        (
            lambda: make_codec("adaptive", 5),
            r"bits is 5, expected one of \(2, 3, 4, 8\)",
        ),
        (lambda: Asymmetric(refits=-1), "refits is -1"),
        (lambda: Asymmetric(bits=8, metadata_bits=16), r"expected one of \(32,\)"),
        (lambda: Asymmetric(metadata_bits=8), r"expected one of \(16, 32\)"),
        (lambda: Greedy(bins=0), "bins is 0"),
        (lambda: Greedy(ratio=0.0), "ratio is 0.0, expected above 0 and up to 1"),
        (lambda: Greedy(bits=8, metadata_bits=16), r"expected one of \(32,\)"),
        (lambda: Symmetric(bits=5), r"bits is 5, expected one of \(2, 3, 4, 8\)"),
        (lambda: KMeans(bits=8), r"bits is 8, expected one of \(2, 3, 4\)"),
        (lambda: KMeans(iterations=-1), "iterations is -1"),
        (lambda: Log(bits=4), r"bits is 4, expected one of \(8, 16\)"),
        (lambda: SharedCodebook(bits=2, levels=(0.0, 1.0)), "expected 4 ascending"),
        (lambda: SharedCodebook(bits=2, levels=(0, 1, 1, 1.2)), "4 ascending"),
        (lambda: SharedCodebook(bits=2, levels=(0, 1, 2, 3)), "from -1.5 to 1.5"),
        (lambda: SharedCodebook.fit(np.ones((5, 4)), 2), "0 different elements"),
        (lambda: make_codec("kmeans", 8), "bits is 8"),
    ],
)
def test_illegal_arguments_are_named_with_the_legal_ones(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_stored_ratio_must_be_a_number():
    configuration = Greedy().configuration()
    with pytest.raises(FormatError, match="'ratio': 'float'"):
        codec_from("cnr.greedy", {**configuration, "ratio": "0.6"})


@each_of("codec", [Asymmetric(), Symmetric(), Greedy(), BFloat16(), Log()])
def test_integer_rows_are_refused_with_a_hint(codec):
    with pytest.raises(TypeError, match=r"rows of int32.*\n.*use the codec 'raw'"):
        codec.encode(jnp.ones((2, 4), jnp.int32))


@each_of(
    ("codec", "dtype"),
    [
        *((Asymmetric(bits=3), dtype) for dtype in (FLOAT32, BFLOAT16, FLOAT16)),
        *GRIDS,
        *SLOTS[::3],
    ],
)
def test_parts_are_as_described_without_rows_and_under_strict_promotion(codec, dtype):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        shape = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((0, 11), dtype))
        described = codec.parts(11, dtype)
        assert {n: (p.dtype, p.shape) for n, p in shape.parts.items()} == {
            n: (p.dtype, (0, p.width)) for n, p in described.items()
        }
        assert shape.escaped.shape == (0,)
        back = jax.eval_shape(
            partial(codec.decode, dim=11, dtype=dtype),
            {
                n: jax.ShapeDtypeStruct((0, p.width), p.dtype)
                for n, p in described.items()
            },
        )
        assert (back.shape, back.dtype) == ((0, 11), dtype)


def gathers_known_to_the_compiler(jaxpr, known_inputs=()) -> list[str]:
    """Look-ups at places that do not depend on the rows, which XLA makes as it compiles."""
    known = set(known_inputs) | set(jaxpr.constvars)
    found = []
    for equation in jaxpr.eqns:
        is_known = [
            isinstance(x, jax.extend.core.Literal) or x in known
            for x in equation.invars
        ]
        for inner in jax.tree.leaves(
            equation.params,
            is_leaf=lambda x: isinstance(
                x, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr
            ),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if isinstance(inner, jax.extend.core.Jaxpr):
                # Of a scan this is the first turn, which XLA sees where all are unrolled.
                same = len(inner.invars) == len(is_known)
                given = zip(inner.invars, is_known, strict=True) if same else ()
                found += gathers_known_to_the_compiler(
                    inner, [x for x, sure in given if sure]
                )
        if equation.primitive.name == "optimization_barrier" or not all(is_known):
            continue
        known.update(equation.outvars)
        if equation.primitive.name == "gather":
            found.append(str(equation))
    return found


@each_of("bits", [2, 3, 4, 8])
def test_codebook_leaves_no_look_up_of_a_whole_chunk_to_the_compiler(bits):
    traced = jax.make_jaxpr(make_codec("codebook", bits).encode)(np.ones((32, 16), "f"))
    assert gathers_known_to_the_compiler(traced.jaxpr) == []
