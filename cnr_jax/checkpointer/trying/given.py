"""Checks of the arguments of `try_bits`, and of what the caller's `evaluate` returns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.integers import integer
from cnr_jax.policy.bits import CODE_BITS

Width = int | Literal["raw"]
Better = Literal["higher", "lower"]
Metrics = Mapping[str, float]
WIDTHS: tuple[Width, ...] = (*CODE_BITS, "raw")
# The paper's mark: what restores may cost, as a share of the metric.
_ACCEPTED = 1e-4
# What a metric is called that was returned as a number alone.
_ONLY = "metric"


def named(width: Width) -> str:
    """Name of a width, in a sentence.

    Example:
        >>> named(4), named("raw")
        ('4 bits', 'raw')
    """
    return "raw" if width == "raw" else f"{width} bits"


def checked_widths(bits: object) -> tuple[Width, ...]:
    """Checks the widths to try; returns each once, the narrowest first.

    Raises:
        OptionError: if one is not a width, or there is none.
    """
    given: list[Any] = []
    if not isinstance(bits, str):
        try:
            given = list(cast("Sequence[Any]", bits))
        except TypeError:
            given = []
    found = [each if isinstance(each, str) else integer(each) for each in given]
    if not found or not all(each in WIDTHS for each in found):
        raise OptionError(
            f"bits is {bits!r}, expected some of {', '.join(map(repr, WIDTHS))}\n"
            "  hint: bits=(4, 8, 'raw')"
        )
    return tuple(each for each in WIDTHS if each in found)


def checked_count(name: str, given: object) -> int:
    """Checks an integer of 1 or more.

    Raises:
        OptionError: if it is none.
    """
    found = integer(given)
    if found is None or found < 1:
        raise OptionError(f"{name} is {given!r}, expected an integer of 1 or more")
    return found


def check_function(name: str, given: object, arguments: str) -> None:
    """Checks that something can be called.

    Raises:
        OptionError: if it cannot.
    """
    if not callable(given):
        raise OptionError(
            f"{name} is {given!r}, expected a function\n"
            f"  hint: {name}=lambda {arguments}: ..."
        )


def check_better(better: object) -> None:
    """Checks that a better direction is given, or one for each metric.

    Raises:
        OptionError: if one is missing or is no direction.
    """
    if not all(
        isinstance(way, str) and way in ("higher", "lower") for way in _each(better)
    ):
        raise OptionError(
            f"better is {better!r}, expected 'higher' or 'lower', or one of these for each metric"
            " by name\n  hint: better={'auc': 'higher', 'log_loss': 'lower'}"
        )


def check_within(within: object) -> None:
    """Checks that the largest accepted losses, if given, are numbers.

    Raises:
        OptionError: if one is none, or negative.
    """
    for each in [] if within is None else _each(within):
        is_number = isinstance(each, numbers.Real) and not isinstance(each, bool)
        if not is_number or not 0 <= float(cast("Any", each)) < math.inf:
            raise OptionError(
                f"within is {within!r}, expected a finite number of 0 or more, or one for each"
                " metric by name"
            )


def _each(given: object) -> list[object]:
    return list(given.values()) if isinstance(given, Mapping) else [given]


def accepted(within: Any, exact: Metrics) -> dict[str, float]:
    """Largest loss that is accepted of each metric.

    Args:
        within: argument of `try_bits`.
        exact: metrics of the state as it is.

    Raises:
        OptionError: as `by_metric`.
    """
    if within is None:
        return {name: _ACCEPTED * abs(value) for name, value in exact.items()}
    return {n: float(w) for n, w in by_metric("within", within, exact).items()}


def by_metric(what: str, given: Any, metrics: Metrics) -> dict[str, Any]:
    """Values given for each metric; a value alone is that of the only one.

    Raises:
        OptionError: if a metric has none, or there is no such metric.
    """
    if not isinstance(given, Mapping):
        if len(metrics) > 1:
            names = ", ".join(f"{name!r}: {given!r}" for name in metrics)
            raise OptionError(
                f"{what} is {given!r}, and evaluate returns several metrics\n"
                f"  expected one for each by name\n  hint: such as {what}={{{names}}}"
            )
        return dict.fromkeys(metrics, given)
    if set(given) != set(metrics):
        raise OptionError(
            f"{what} is given for other metrics than evaluate returns\n"
            f"  got {sorted(map(str, given))}, expected {sorted(metrics)}"
        )
    return {name: given[name] for name in metrics}


def checked_metrics(found: Any, what: str) -> dict[str, float]:
    """Checks the result of `evaluate`; returns it by name (`"metric"` for a number alone).

    Raises:
        OptionError: if there is anything but numbers.
    """
    given = found if isinstance(found, Mapping) else {_ONLY: found}
    if not given or not all(isinstance(name, str) for name in given):
        raise OptionError(
            f"evaluate returned no metrics by name for {what}\n"
            f"  got {list(given)}, expected names, such as {{'auc': 0.7}}, or one number"
        )
    return {name: _number(value, name, what) for name, value in given.items()}


def _number(value: Any, name: str, what: str) -> float:
    """Converts a number of Python, numpy or jax to a float.

    Raises:
        OptionError: if it is none.
    """
    # Arrays have a dtype and a shape too; their values are not needed for that.
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    is_flag = isinstance(value, bool) or dtype == np.dtype(bool)
    if not is_flag and not isinstance(value, str | bytes) and not shape:
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    got = type(value).__name__ + (f" {dtype}{list(shape)}" if dtype else "")
    raise OptionError(
        f"evaluate returned no number for {name!r} of {what}\n"
        f"  got {got}, expected a number, or several by name"
    )
