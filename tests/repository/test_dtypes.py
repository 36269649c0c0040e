"""The rule that says which dtypes hold all values of which, on every pair that there is."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cnr_jax.repository.dtypes import converted, holds, holds_all

NUMPY = """
bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
""".split()
# Those of ml_dtypes that jax may come to know too; complex numbers of 32 bits it never has.
OTHERS = sorted(
    {
        np.dtype(kind).name
        for kind in vars(ml_dtypes).values()
        if isinstance(kind, type) and kind not in (ml_dtypes.finfo, ml_dtypes.iinfo)
    }
    - {"complex32", "bcomplex32"}
)
DTYPES = [np.dtype(name) for name in [*NUMPY, *OTHERS]]


def bits_of(dtype: np.dtype) -> int:
    digits = "".join(c if c.isdigit() else " " for c in dtype.name).split()
    return 1 if dtype == np.bool_ else int(digits[0])


def some_values(dtype: np.dtype) -> np.ndarray:
    """All values of a dtype of up to 16 bits; of others those that narrower ones may lack."""
    bits, of_two = bits_of(dtype), 2.0 ** np.arange(0, 63)
    if bits <= 16 and "float" in dtype.name:
        return np.arange(2**bits).astype(f"u{dtype.itemsize}").view(dtype)
    if dtype == np.bool_:
        return np.array([False, True])
    if "int" in dtype.name:
        info = ml_dtypes.iinfo(dtype)
        if bits <= 16:
            return np.arange(info.min, info.max + 1).astype(dtype)
        found = [
            sign * (int(x) + y) for x in of_two for y in (-1, 0, 1) for sign in (-1, 1)
        ]
        found += [info.min, info.max]
        return np.array([x for x in found if info.min <= x <= info.max], dtype)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    info = np.finfo(part)
    found = [info.max, info.min, info.smallest_subnormal, 0.0, -0.0, np.inf, np.nan]
    found += [1 + info.eps, -1 - info.eps, 1.0]
    array = np.array(found, part)
    if dtype.kind != "c":
        return array
    return np.array([complex(a, b) for a in array for b in array[::-1]], dtype)


def exact(values: np.ndarray) -> list[object]:
    """Numbers as Python's, which rounds none; NaN and -0 by name."""
    if values.dtype.kind == "c":
        return [(exact(part.real), exact(part.imag)) for part in values[:, None]]
    if "int" in values.dtype.name or values.dtype == np.bool_:
        return [int(x) for x in values]
    with np.errstate(invalid="ignore"):  # of NaN that signal
        numbers = values.astype(np.float64)
    minus_zero = (numbers == 0) & np.signbit(numbers)
    found: list[object] = numbers.tolist()
    for at in np.flatnonzero(minus_zero | np.isnan(numbers)):
        found[at] = "-0" if minus_zero[at] else "NaN"
    return found


def comes_back(values: np.ndarray, wanted: np.dtype) -> bool:
    """Whether a dtype has all of some values: converted, they are what they were."""
    if values.dtype.kind == "c":
        if wanted.kind != "c":
            return False
    elif values.dtype not in (np.int64, np.uint64):
        with np.errstate(invalid="ignore"):
            values = values.astype(np.float64)  # numpy has no direct way between some
    with np.errstate(all="ignore"):
        found = values.astype(wanted)
    if wanted.kind == "c" != values.dtype.kind:
        assert not np.imag(found).any()
        found = np.real(found)
    return exact(found) == exact(values)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_a_dtype_holds_another_if_all_values_of_that_are_the_same_in_it(
    stored: np.dtype,
) -> None:
    values = some_values(stored)
    for wanted in DTYPES:
        assert holds_all(stored, wanted) == comes_back(values, wanted), wanted


def test_it_is_an_order() -> None:
    for a, b, c in itertools.product(DTYPES, repeat=3):
        assert holds_all(a, c) or not (holds_all(a, b) and holds_all(b, c))
    assert all(holds_all(dtype, dtype) for dtype in DTYPES)


def test_what_is_no_number_holds_itself_alone() -> None:
    others = [np.dtype(x) for x in ("U3", "S2", "M8[s]", "O", [("a", "i4")], "V4")]
    for a, b in itertools.product([*others, np.dtype("int8")], others):
        assert holds_all(a, b) == (a == b)
        assert holds_all(b, a) == (a == b)


def test_numbers_of_python_hold_what_numpy_says_of_them_and_int_all_integers() -> None:
    for dtype in DTYPES:
        whole = "int" in dtype.name or dtype == np.bool_
        assert holds_all(dtype, int) == whole
        assert holds_all(dtype, float) == holds_all(dtype, np.dtype("float64"))
        assert holds_all(dtype, bool) == holds_all(dtype, np.dtype("bool"))


@pytest.mark.parametrize(
    ("number", "taken", "refused"),
    [
        (True, [bool, int, float, "int8", "bfloat16", "uint4"], ["float8_e8m0fnu"]),
        (0, [int, "uint8", "float4_e2m1fn"], [bool, "bool", "float8_e8m0fnu"]),
        (1, [float, "int2"], [bool, "bool"]),
        (255, ["uint8", "int16", "bfloat16"], ["int8", "float8_e4m3"]),
        (257, ["float16", "complex64"], ["bfloat16", "uint8"]),
        (2**31, ["uint32", "int64", float], ["int32", "float32"]),
        (2**64 - 1, [int, "uint64"], ["int64", float, "complex128"]),
        (-(2**63), [int, "int64"], ["uint64", "int32"]),
        (-0.0, [float, "float16", "complex64"], ["float8_e5m2fnuz", int, "int8"]),
        (0.1, [float, "complex128"], ["float32", int]),
        (2.0, ["float8_e8m0fnu", "float16"], [int, "int32", bool]),
        (float("nan"), ["bfloat16", "float8_e4m3fn"], ["float4_e2m1fn", "int32"]),
        (float("inf"), ["float8_e5m2"], ["float8_e4m3fn"]),
        (1e300, [float], ["float32", "bfloat16"]),
    ],
)  # fmt: skip
def test_a_number_of_python_goes_by_its_value(
    number: bool | int | float, taken: list[object], refused: list[object]
) -> None:
    def kind(x: object) -> object:
        return np.dtype(x) if isinstance(x, str) else x

    assert [x for x in taken if not holds(number, kind(x))] == []
    assert [x for x in refused if holds(number, kind(x))] == []


def test_every_dtype_is_converted_to_every_other() -> None:
    for stored, wanted in itertools.product(DTYPES, repeat=2):
        values = some_values(stored)[:4096]
        found = converted(values, wanted)
        assert found.dtype == wanted and found.shape == values.shape
        if holds_all(stored, wanted):
            assert comes_back(values, wanted) and exact(np.real(found)) == exact(
                np.real(values)
            )


def test_bits_that_are_cut_off_are_the_upper_ones() -> None:
    found = converted(np.array([7, -8, 3], "int4"), np.dtype("int2"))
    assert found.tolist() == [-1, 0, -1]
    assert converted(np.array([300]), np.dtype(jnp.int8)).tolist() == [44]
