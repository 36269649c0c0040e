"""Default policy: deltas on the latest full save, and a new full save when it pays.

The predictor says when that is. A *cycle* is one full checkpoint and the deltas on it. The
invariant to remember: integers are compared exactly, so no decision depends on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, get_args

from cnr_jax.errors import OptionError
from cnr_jax.policy.baseline import (
    NO_BASELINE,
    Decision,
    SaveRecord,
    delta_on,
    full_because,
    since_baseline,
    take_limit,
)
from cnr_jax.texts import count_of

Cost = Literal["bytes", "secs"]
"""What the saves of a cycle should have least of."""

Predictor = Literal["forecast", "history"]
"""Which delta is held against the average save: the next one, or the last one."""

# Next growth of a delta, as a share of its mean growth over the later half of the cycle. If
# popularity is Zipf-like, distinct rows grow as a power of the number of look-ups (Heaps' law).
# Exponents of 0.5 to 0.75 give 0.80 to 0.93 for cycles of more than two deltas.
_SLOWING = Fraction(7, 8)


@dataclass(frozen=True, slots=True)
class Intermittent:
    """Policy of deltas on a baseline, and of a new baseline when that pays; the default.

    A restore reads two checkpoints, as with `OneShot`, but deltas do not grow for ever: once the
    next delta is expected to cost as much as the average save since the baseline, the next save is
    full.

    Attributes:
        max_deltas: most deltas on one baseline, 1 or more. The save after that many is full,
            whatever the predictor says. None: no limit.
        cost: costs that are compared. `"bytes"`: bytes written for tables and slots. `"secs"`:
            seconds from the start of a save until it was written, as measured in this run; right if
            saves are bound by time and not by storage. A delta that took longer than the full save
            is then the last of its cycle.
        predictor: `"forecast"`: the cost of the next delta, forecast from the growth of those
            before (`full_is_due`). `"history"`: the cost of the last delta, which is the paper's
            rule and takes the full save one save later (`should_take_full`).

    Raises:
        OptionError: if `max_deltas` is less than 1, or `cost` or `predictor` is not known.

    Example:
        >>> saves = [
        ...     SaveRecord(step=7, kind="full", bytes=100, rows=10, secs=0.1),
        ...     SaveRecord(step=8, kind="delta", bytes=40, rows=4, secs=0.1),
        ... ]
        >>> Intermittent().decide(saves).parent
        7
        >>> saves.append(SaveRecord(step=9, kind="delta", bytes=60, rows=6, secs=0.1))
        >>> Intermittent().decide(saves).reason
        'a new baseline pays: the next delta would take about 78 bytes, the average save 67'
        >>> Intermittent(predictor="history").decide(saves).kind
        'delta'

    Source: Check-N-Run (NSDI'22), intermittent differential checkpoints (its default).

    Differs from Check-N-Run in: 1. the next delta is forecast, where the paper takes the
    last one for it. 2. Bytes or seconds, where the paper has shares of rows.
    """

    name: ClassVar[str] = "intermittent"
    max_deltas: int | None = None
    cost: Cost = "bytes"
    predictor: Predictor = "forecast"

    def __post_init__(self) -> None:
        take_limit(self, "max_deltas")
        _check_choice("cost", self.cost, get_args(Cost))
        _check_choice("predictor", self.predictor, get_args(Predictor))

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a delta on the latest full save, or a full one when it pays."""
        cycle = since_baseline(history)
        if not cycle:
            return full_because(NO_BASELINE)
        baseline, deltas = cycle[0], cycle[1:]
        if self.max_deltas is not None and len(deltas) >= self.max_deltas:
            held = count_of(len(deltas), "delta")
            return full_because(
                f"the baseline has {held}, max_deltas is {self.max_deltas}"
            )
        # Bytes or microseconds: integers, so that comparisons are exact.
        in_bytes = self.cost == "bytes"
        full_size, *sizes = (
            save.bytes if in_bytes else round(save.secs * 1e6) for save in cycle
        )
        rule = full_is_due if self.predictor == "forecast" else should_take_full
        if rule(sizes, full_size=full_size):
            return full_because(self._why(sizes, full_size))
        return delta_on(baseline, "rows since the baseline")

    def _why(self, sizes: Sequence[int], full_size: int) -> str:
        average = (full_size + sum(sizes)) / (len(sizes) + 1)
        if self.predictor == "forecast":
            delta, held = "the next delta would take about", float(forecast_next(sizes))
        else:
            delta, held = "the last delta took", sizes[-1]
        if self.cost == "bytes":
            return (
                f"a new baseline pays: {delta} {held:,.0f} bytes,"
                f" the average save {average:,.0f}"
            )
        return (
            f"a new baseline pays: {delta} {held / 1e6:.3f} s,"
            f" the average save {average / 1e6:.3f}"
        )


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise OptionError(
            f"{name} of Intermittent cannot be {value!r}\n"
            f"  expected one of {', '.join(map(repr, known))}"
        )


class CycleCosts(NamedTuple):
    """Costs of the next i + 1 saves, for each of the two choices after i deltas.

    Both are in the unit of the sizes they were computed from (bytes, or fulls).
    """

    full_now: float  # F_c: the last cycle once more, one full and i deltas
    keep_going: float  # I_c: i + 1 deltas, each at least as large as the last


def cycle_costs(sizes: Sequence[float], *, full_size: float = 1) -> CycleCosts:
    """Returns what the next i + 1 saves cost with a new full checkpoint now, and without.

    If history repeats itself, a full one now is followed by the deltas of the last
    cycle: `F_c = full_size + S_1 + ... + S_i`. Without it deltas on the same baseline
    only grow, so the saves cost at least `I_c = (i + 1) * S_i`.

    Args:
        sizes: sizes S_1 ... S_i of the deltas since the latest full one, oldest first.
            As fractions of the full one, or in bytes together with `full_size`.
        full_size: size of the full checkpoint, in the unit of `sizes`.

    Returns:
        `F_c` and `I_c`. Without a delta there is nothing to go by: `I_c` is 0.

    Raises:
        OptionError: if a size is negative or not finite.

    Example:
        >>> cycle_costs([250, 500, 750], full_size=1000)
        CycleCosts(full_now=2500, keep_going=3000)

    Source: Check-N-Run (NSDI'22), intermittent differential checkpoints.
    """
    _check_sizes(full_size, *sizes)
    if not sizes:
        return CycleCosts(full_now=full_size, keep_going=0)
    return CycleCosts(
        full_now=sum(sizes, full_size), keep_going=(len(sizes) + 1) * sizes[-1]
    )


def should_take_full(sizes: Sequence[float], *, full_size: float = 1) -> bool:
    """Returns whether the next checkpoint should be full: `F_c <= I_c`.

    The paper's rule. Divided by i + 1: a new baseline is due as soon as the latest delta
    costs as much as the average save of its cycle. Deltas that stay flat below the full
    size never make it due. Bytes that every save writes alike (dense parameters) add the same
    to both sides, so sizes may contain them or not.

    Differs from Check-N-Run in: 1. sizes may be bytes (payload, row ids and metadata at
    the width in force) where the paper has fractions of rows; the rule is the same.

    Args:
        sizes: as in `cycle_costs`.
        full_size: size of the full checkpoint, in the unit of `sizes`.

    Returns:
        True if a full checkpoint is due; False without any delta.

    Raises:
        OptionError: if a size is negative or not finite.

    Example:
        >>> should_take_full([0.26, 0.32]), should_take_full([0.25, 0.5, 0.75])
        (False, True)

    Source: Check-N-Run (NSDI'22), intermittent differential checkpoints.
    """
    costs = cycle_costs(sizes, full_size=full_size)
    return bool(sizes) and costs.full_now <= costs.keep_going


def forecast_next(sizes: Sequence[float]) -> Fraction:
    """Returns the size to expect of the next delta: the last one, and its growth.

    Growth per save is taken over the later half of the cycle. Over the whole cycle it
    would be that of the first deltas, which grow fastest because most rows they meet are
    new. Over the last save alone it would be that of one busy or quiet hour. Growth also
    slows down from there to the next save: `_SLOWING`. Deltas on one baseline shrink only
    by details of their form, so growth is never negative.

    Args:
        sizes: sizes S_1 ... S_i of the deltas since the latest full one, oldest first.

    Returns:
        S_i + 7/8 (S_i - S_m) / (i - m) with m = i / 2, rounded up, exactly. From a
        single delta no growth can be told: S_1. Without any: 0.

    Raises:
        OptionError: if a size is negative or not finite.

    Example:
        >>> forecast_next([100, 160, 200, 240]), forecast_next([100])
        (Fraction(275, 1), Fraction(100, 1))
    """
    _check_sizes(*sizes)
    if len(sizes) < 2:
        return Fraction(sizes[-1]) if sizes else Fraction(0)
    half = (len(sizes) + 1) // 2
    last, growth = Fraction(sizes[-1]), Fraction(sizes[-1]) - Fraction(sizes[half - 1])
    return last + max(Fraction(0), _SLOWING * growth / (len(sizes) - half))


def full_is_due(sizes: Sequence[float], *, full_size: float = 1) -> bool:
    """Returns whether the next delta is expected to cost the average save, or more.

    The renewal-reward argument: among plans that repeat one cycle, the average cost of a
    save falls with each delta that costs less than the average so far, and rises with
    each that costs more. So the cycle should end just before the first that costs more,
    while `should_take_full` ends it just after. The same properties hold: flat deltas
    never make a full due, and bytes that every save writes alike do not matter.

    Args:
        sizes: as in `cycle_costs`.
        full_size: size of the full checkpoint, in the unit of `sizes`.

    Returns:
        Whether `full_size + S_1 + ... + S_i <= (i + 1) * forecast_next(sizes)`, computed
        exactly; False without any delta.

    Raises:
        OptionError: if a size is negative or not finite.

    Example:
        >>> full_is_due([250, 500], full_size=1000)  # 719 expected, 583 on average
        True
    """
    _check_sizes(full_size)
    cycle = sum(map(Fraction, sizes), Fraction(full_size))
    return bool(sizes) and cycle <= (len(sizes) + 1) * forecast_next(sizes)


def _check_sizes(*sizes: float) -> None:
    for size in sizes:
        if not 0 <= size < math.inf:  # False for nan too
            raise OptionError(
                "a checkpoint's size cannot be used by the predictor\n"
                f"  expected a finite number of 0 or more, got {size!r}"
            )
