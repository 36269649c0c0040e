"""The default policy: deltas on the latest full save, and a new one when it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from cnr_jax.errors import OptionError
from cnr_jax.policy.baseline import (
    NO_BASELINE,
    Decision,
    SaveRecord,
    check_limit,
    count_of,
    delta_on,
    full_because,
    since_baseline,
)
from cnr_jax.policy.predictor import forecast_next, full_is_due, should_take_full

Cost = Literal["bytes", "secs"]
"""What the saves of a cycle should have least of."""

Predictor = Literal["forecast", "history"]
"""Which delta is held against the average save: the next one, or the last one."""


@dataclass(frozen=True, slots=True)
class Intermittent:
    """Writes rows changed since the baseline, and a new baseline when it pays.

    A restore reads two checkpoints, as with `OneShot`, but deltas do not grow for ever:
    once the next delta is expected to cost as much as the average save since the
    baseline, the next save is full.

    Attributes:
        max_deltas: most deltas on one baseline, 1 or more; the save after that many is
            full, whatever the predictor says. None: no limit.
        cost: what is compared. `"bytes"`: bytes written for tables and slots. `"secs"`:
            seconds from the start of a save until it was written, as they were measured
            in this run; right where saves are bound by time and not by storage. A delta
            that took longer than the full save is then the last of its cycle.
        predictor: `"forecast"`: the next delta, forecast from the growth of those before
            (`predictor.full_is_due`). `"history"`: the last delta, which is the paper's
            rule and takes the full a save later (`predictor.should_take_full`).

    Raises:
        OptionError: if `max_deltas` is less than 1, `cost` or `predictor` not known.

    Example:
        >>> saves = [
        ...     SaveRecord(step=7, kind="full", bytes=100, rows=10, secs=0.1),
        ...     SaveRecord(step=8, kind="delta", bytes=40, rows=4, secs=0.1),
        ... ]
        >>> Intermittent().decide(saves).parent
        7
        >>> saves.append(SaveRecord(step=9, kind="delta", bytes=60, rows=6, secs=0.1))
        >>> Intermittent().decide(saves).reason
        'a new baseline pays: the next delta would take about 78 bytes, the average save 66.7'
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
        check_limit("max_deltas", self.max_deltas)
        _check_choice("cost", self.cost, get_args(Cost))
        _check_choice("predictor", self.predictor, get_args(Predictor))

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a delta against the latest full save, or a full one when it pays."""
        cycle = since_baseline(history)
        if not cycle:
            return full_because(NO_BASELINE)
        baseline, deltas = cycle[0], cycle[1:]
        if self.max_deltas is not None and len(deltas) >= self.max_deltas:
            held = count_of(len(deltas))
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
                f" the average save {average:,.1f}"
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
