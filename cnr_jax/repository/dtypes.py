"""Which dtypes hold all values of which: what is restored into what without being asked for.

One rule for tables, slots and dense leaves, of steps of our own and of adopted ones. That of numpy
(`np.can_cast`) does not know bfloat16 and what is narrower, and lets int64 pass into float64.
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
    """The values of a dtype: multiples of a unit within bounds, of so many digits at most.

    Attributes:
        least: the least of them.
        most: the greatest of them.
        digits: binary digits from the first that is set to the last.
        unit: a power of two.
        special: which of 0, -0, infinity and NaN are among them.
        is_complex: they are of two parts, each of which is as said.
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
    """Whether each value of a dtype is one of another, of whatever kind.

    All NaN count as one value, and what has a sign keeps it, zeros too.

    Args:
        stored: the dtype of values.
        wanted: another, or one of Python's types of numbers. Its `int` has no bounds.

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
    """Whether a number of Python, which has no dtype but its value, is one of those of a dtype.

    Args:
        number: of at most 64 bits.
        wanted: a dtype, or one of Python's types of numbers. No other number becomes a bool, and
            of floats none becomes an integer, as the next one might not.

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
    """An array in another dtype, as `astype` makes it; of what is complex the real part."""
    stored = array.dtype
    if stored.kind == "c" != wanted.kind:
        array = np.real(array)
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.can_cast(stored, wanted, "unsafe"):
            # Numpy cannot do it at once where both are of few bits.
            is_whole = all(
                each and each.unit >= 1 for each in map(_values, (stored, wanted))
            )
            array = array.astype(np.int32 if is_whole else np.float32)
        return array.astype(wanted, copy=False)


def _values_of(wanted: Any) -> _Values | None:
    return _INTEGERS if wanted is int else _values(np.dtype(wanted))


@functools.cache
def _values(dtype: np.dtype) -> _Values | None:
    """The values of a dtype; None: they are no numbers, or of a kind that jax does not know."""
    if dtype == _BOOL:
        return _Values(least=0, most=1, digits=1)
    if dtype.kind not in "iufcV":
        return None
    try:
        info = ml_dtypes.iinfo(dtype)
    except ValueError:
        return _fractions(dtype)
    # The least of those with a sign, a power of two, has one digit.
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
