"""Interval at which saves cost as much of training as they may, from saves that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cnr_jax.goodput.measured import (
    MeasuredSave,
    beside_durable,
    capped_mean,
    pace_of_trained,
)
from cnr_jax.goodput.profile import ENOUGH

# The newest saves tell what saves take now.
_SAVES = 30
# An interval stays while the best one is within the first two factors of it. The third leaves room
# below a limit. The last is the largest by which an interval changes at once.
_SHORTER, _LONGER, _ROOM, _GROWTH = 0.8, 1.05, 0.8, 4
_LONGEST = 10_000_000
# Quantile of the seconds of steps that counts as the longest, where time is limited.
_SLOW = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Cost of saves in a loop, in seconds.

    Attributes:
        step_secs: seconds of a train step beside no save.
        slow_secs: seconds that one train step in ten exceeds.
        blocking_secs: seconds for which a save holds training up, on average.
        lost: share of its time that a step loses beside a save.
        beside_secs: seconds that training spends beside a save, on average, if that is over when
            the next one begins. They end with the step in which a save ends and removes old ones.
        durable_secs: for each kind of save its share of all saves, and the seconds from the end of
            its blocking part until it is durable.
    """

    step_secs: float
    slow_secs: float
    blocking_secs: float
    lost: float
    beside_secs: float
    durable_secs: tuple[tuple[float, float], ...]

    @property
    def contention_secs(self) -> float:
        """Seconds that training loses beside a save, if it is over when the next one begins."""
        return self.lost * self.beside_secs

    @property
    def longest_secs(self) -> float:
        """Seconds from the call of a save until it is durable, for the kind that takes longest."""
        return self.blocking_secs + max(secs for _, secs in self.durable_secs)

    def slowdown(self, every: int, in_flight: int) -> float:
        """Share by which training takes longer with a save every so many steps.

        Args:
            every: train steps between two saves.
            in_flight: saves at a time; one more waits.
        """
        train = every * self.step_secs
        beside = min(self.contention_secs, self.lost / (1 - self.lost) * train)
        waits = sum(
            share * max(secs - in_flight * train, 0.0)
            for share, secs in self.durable_secs
        )
        return (self.blocking_secs + beside + waits) / train


def cost_of_saves(saves: Sequence[MeasuredSave]) -> SaveCost | None:
    """Cost of saves; None if it is not known yet.

    What training waits for is a mean of each kind, as it adds up. Saves that timed no train steps
    are left out of it: the first save of a program compiles.
    """
    recent = [save for save in saves[-_SAVES:] if save.durable_secs is not None]
    trained = [each for save in recent for each in save.trained if each.secs > 0]
    if not trained:
        return None
    pace, lost = pace_of_trained(trained)
    if len(trained) < ENOUGH:
        pace, lost = np.array([each.secs / each.steps for each in trained]), 0.0
    blocking, durable = 0.0, list[tuple[float, float]]()
    for kind in sorted({save.kind for save in recent}):
        same = [save for save in recent if save.kind == kind]
        share = len(same) / len(recent)
        later = [save for save in same if save.trained] or same
        blocking += share * capped_mean(save.blocking_secs or 0.0 for save in later)
        secs = float(np.median([save.durable_secs or 0.0 for save in same]))
        durable.append((share, secs))
    return SaveCost(
        step_secs=float(np.median(pace)),
        slow_secs=float(np.quantile([t.secs / t.steps for t in trained], _SLOW)),
        blocking_secs=blocking,
        lost=lost,
        beside_secs=beside_durable(recent) * sum(s * secs for s, secs in durable),
        durable_secs=tuple(durable),
    )


def lost_limit(cost: SaveCost, max_lost_secs: float) -> float:
    """Most seconds between two saves with which no more than `max_lost_secs` are ever lost.

    A save that fails is noticed by the next one, and made again a step later. Until that is
    durable, two intervals count.
    """
    return (max_lost_secs - cost.longest_secs - cost.slow_secs) / 2


def best_interval(
    cost: SaveCost,
    now: int,
    *,
    slowdown: float,
    max_lost_secs: float | None = None,
    in_flight: int = 1,
) -> tuple[int, str] | None:
    """Shortest interval within a slowdown, and why; None: the present one is as good.

    Args:
        cost: what saves cost.
        now: the present interval.
        slowdown: share by which saves may make training longer.
        max_lost_secs: most seconds of training that a failure may take, whatever saves cost then.
        in_flight: saves at a time.
    """
    low, high = 1, _LONGEST
    while low < high:
        middle = (low + high) // 2
        if cost.slowdown(middle, in_flight) <= slowdown:
            high = middle
        else:
            low = middle + 1
    every = min(max(low, now // _GROWTH), _GROWTH * now)
    why = f"within a slowdown of {slowdown:.3g}"
    shortest, longest = _SHORTER * now, _LONGER * now
    if max_lost_secs is not None:
        most = lost_limit(cost, max_lost_secs) / (cost.slow_secs * (1 + slowdown))
        if most < every:
            # With room, so that it need not follow each small change.
            every, why = int(_ROOM * most), f"as max_lost_secs={max_lost_secs:g} asks"
            shortest, longest = (now if now > most else 0.0), now / _ROOM
    every = max(1, every)
    if every == now or shortest <= every <= longest:
        return None
    return every, (
        f"{why}: a save costs {1000 * cost.blocking_secs:.3g} ms in which training waits and"
        f" {1000 * cost.contention_secs:.3g} ms beside it, and is durable in"
        f" {cost.longest_secs:.3g} s; a step takes {1000 * cost.step_secs:.3g} ms"
    )
