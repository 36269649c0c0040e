"""Dtypes that hold all values of another: a restore converts to them without being asked.

The rule is the same for tables, slots and dense leaves, in steps of this library and in adopted
ones. Numpy's rule (`np.can_cast`) knows neither bfloat16 nor narrower dtypes of this kind, and lets
int64 pass into float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """The values of a dtype: multiples of a unit, with a limit on their size and their digits.

    Attributes:
        least: least value.
        most: greatest value.
        digits: most binary digits of a value, from the first digit that is set to the last.
        unit: unit of the values, a power of two.
        special: which of 0, -0, infinity and NaN are among the values.
        is_complex: whether a value has two parts, each of them as described.
    """

    least: Any
    most: Any
    digits: float
    unit: float = 1.0
    special: frozenset[str] = frozenset({"0"})
    is_complex: bool = False


_BOOL = np.dtype(bool)
_INTEGERS = _Values(least=-math.inf, most=math.inf, digits=math.inf)


def holds_all(stored: np.dtype, wanted: Any) -> bool:
    """Whether each value of one dtype is also a value of another, whatever kinds they are.

    All NaN count as one value. Each value must keep its sign, zeros too.

    Args:
        stored: dtype of the values.
        wanted: dtype that is to hold them, or one of Python's types of numbers. Python's `int` has
            no bounds.

    Example:
        >>> int8 = np.dtype("int8")
        >>> [holds_all(int8, np.dtype(name)) for name in ("int16", "uint16", "float16")]
        [True, False, True]
        >>> holds_all(np.dtype("int64"), np.dtype("float64")), holds_all(int8, int)
        (False, True)
    """
    a, b = _values(stored), _values_of(wanted)
    if a is None or b is None:
        return stored == wanted
    return (
        a.least >= b.least
        and a.most <= b.most
        and a.digits <= b.digits
        and a.unit >= b.unit
        and a.special <= b.special
        and a.is_complex <= b.is_complex
    )


def holds(number: bool | int | float, wanted: Any) -> bool:
    """Whether a dtype holds a Python number, which has a value but no dtype.

    Args:
        number: number of at most 64 bits.
        wanted: dtype, or one of Python's types of numbers. Only a bool becomes a bool. No float
            becomes an integer, as the next float might not be a whole number.

    Example:
        >>> holds(7, np.dtype("int32")), holds(2**31, np.dtype("int32"))
        (True, False)
        >>> holds(0.5, np.dtype("float32")), holds(0.1, np.dtype("float32"))
        (True, False)
    """
    own, values = np.asarray(number), _values_of(wanted)
    if holds_all(own.dtype, wanted):
        return True
    if values is None or isinstance(number, bool) or values is _values(_BOOL):
        return False
    if isinstance(number, int):
        within = values.least <= number <= values.most
        return within and abs(number) <= 2**values.digits
    if values.unit >= 1:
        return False
    with np.errstate(all="ignore"):
        back = np.real(own.astype(wanted)).astype(own.dtype)
    return back.tobytes() == own.tobytes() or bool(np.isnan(own) and np.isnan(back))


def converted(array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """Converts an array as `astype` does; a dtype that is not complex gets the real parts."""
    stored = array.dtype
    if stored.kind == "c" != wanted.kind:
        array = np.real(array)
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.can_cast(stored, wanted, "unsafe"):
            # Numpy has no direct way between two dtypes of few bits.
            is_whole = all(
                each and each.unit >= 1 for each in map(_values, (stored, wanted))
            )
            array = array.astype(np.int32 if is_whole else np.float32)
        return array.astype(wanted, copy=False)


def _values_of(wanted: Any) -> _Values | None:
    return _INTEGERS if wanted is int else _values(np.dtype(wanted))


@functools.cache
def _values(dtype: np.dtype) -> _Values | None:
    """The values of a dtype; None if they are no numbers, or of a kind that jax does not know."""
    if dtype == _BOOL:
        return _Values(least=0, most=1, digits=1)
    if dtype.kind not in "iufcV":
        return None
    try:
        info = ml_dtypes.iinfo(dtype)
    except ValueError:
        return _fractions(dtype)
    # The least value of a dtype with a sign is a power of two, so it has one digit.
    return _Values(least=info.min, most=info.max, digits=int(info.max).bit_length())


def _fractions(dtype: np.dtype) -> _Values | None:
    try:
        info = ml_dtypes.finfo(dtype)
    except ValueError:
        return None
    with np.errstate(all="ignore"):
        given = np.array([0.0, -0.0, np.inf, np.nan]).astype(info.dtype)
    has = {
        "0": given[0] == 0,
        "-0": given[1] == 0 and np.signbit(given[1]),
        "infinity": np.isinf(given[2]),
        "NaN": np.isnan(given[3]),
    }
    return _Values(
        least=float(info.min),
        most=float(info.max),
        digits=info.nmant + 1,
        unit=float(info.smallest_subnormal),
        special=frozenset(name for name, is_there in has.items() if is_there),
        is_complex=dtype.kind == "c",
    )
