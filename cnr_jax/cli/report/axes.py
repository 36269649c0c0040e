"""Axes of a panel: heights of values, and the values that are named."""

from __future__ import annotations

import dataclasses
import math

from cnr_jax.cli.report.panels import Panel

# Patterns of dashes by number, so that lines are told apart without colours: lengths of dashes and
# of the gaps between them.
DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3), (14, 4), (4, 2, 1, 2), (1, 5))
# At most this many steps are named below an axis.
_STEPS_NAMED = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Axis of values.

    Attributes:
        low: the value at the base.
        high: the value at the top.
        logarithmic: whether equal distances are equal factors.
        ticks: values with a name and a line of their own.
    """

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def height_of(self, value: float) -> float:
        """Height of a value: 0 at the base, 1 at the top."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)


def axis_of(panel: Panel) -> Axis:
    """Chooses an axis that holds all values of a panel."""
    stacked = [each for each in panel.series if each.shape == "bars"]
    columns = zip(*(each.values for each in stacked), strict=True)
    tops = [sum(value or 0 for value in column) for column in columns]
    values = [v for each in panel.series for v in each.values if v is not None]
    high, low = max([*values, *tops]), min(values)
    if panel.logarithmic:
        return _logarithmic(low, high)
    step = _step_of(high, whole=panel.unit == "count")
    count = max(1, math.ceil(high / step - 1e-9))
    ticks = tuple(step * i for i in range(count + 1))
    return Axis(low=0.0, high=ticks[-1], logarithmic=False, ticks=ticks)


def _step_of(high: float, whole: bool) -> float:
    """Chooses a round number that divides an axis into at most five."""
    if high <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(high / 5))
    factor = next(f for f in (1, 2, 5, 10) if high / (power * f) <= 5 + 1e-9)
    return max(1.0, power * factor) if whole else power * factor


def _logarithmic(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Axis(low=10.0**first, high=10.0**last, logarithmic=True, ticks=ticks)


def named_places(count: int) -> list[int]:
    """Chooses the places of an axis at which steps are named: evenly spread, from the first.

    Example:
        >>> named_places(4), named_places(25)
        ([0, 1, 2, 3], [0, 3, 6, 9, 12, 15, 18, 21, 24])
    """
    return list(range(0, count, math.ceil(count / _STEPS_NAMED) or 1))
