"""Interval at which saves cost as much of training as they may, from saves that were measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cnr_jax.goodput.measured import (
    MeasuredSave,
    Trained,
    capped,
    capped_mean,
    lost_beside,
    pace_of_trained,
)
from cnr_jax.goodput.profile import ENOUGH

# The newest saves tell what saves take now.
_SAVES = 30
# An interval stays while the best one is within the first two factors of it. The third leaves room
# below a limit. The last is the largest by which an interval changes at once.
_SHORTER, _LONGER, _ROOM, _GROWTH = 0.8, 1.05, 0.8, 4
_LONGEST = 10_000_000
# Train steps that spend more of their time beside a save do not tell what they take without one.
_ALWAYS = 0.75
# Quantile that counts as the longest time of a step or of a save, where time is limited.
_SLOW = 0.9


class KindCost(NamedTuple):
    """What saves of one kind cost.

    Attributes:
        share: their share of all saves.
        blocking_secs: seconds for which one holds training up.
        flight_secs: seconds from then until it is over, of each of them: it is durable, and has
            removed old steps.
    """

    share: float
    blocking_secs: float
    flight_secs: tuple[float, ...]

    @property
    def mean_flight_secs(self) -> float:
        """Mean of `flight_secs`."""
        return float(np.mean(self.flight_secs))

    def waiting_secs(self, secs: float) -> float:
        """Seconds for which training waits, on average, for one that may be in flight so long."""
        return float(np.maximum(np.array(self.flight_secs) - secs, 0.0).mean())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Cost of saves in a loop, in seconds.

    Attributes:
        step_secs: seconds of a train step beside no save.
        slow_secs: seconds of a train step, in the slowest tenth of the measurements.
        lost: share of its time that a train step loses beside a save; None: all steps are beside
            one, and there is nothing to compare them with.
        kinds: what saves of each kind cost.
        longest_secs: seconds from the call of a save until it is durable, of the kind that takes
            longest, and in the slowest tenth of that kind.
    """

    step_secs: float
    slow_secs: float
    lost: float | None
    kinds: tuple[KindCost, ...]
    longest_secs: float

    @property
    def blocking_secs(self) -> float:
        """Seconds for which a save holds training up, on average."""
        return sum(kind.share * kind.blocking_secs for kind in self.kinds)

    @property
    def contention_secs(self) -> float:
        """Seconds that training loses beside a save, if it is over when the next one begins."""
        return (self.lost or 0.0) * sum(
            kind.share * kind.mean_flight_secs for kind in self.kinds
        )

    def slowdown(self, every: int, in_flight: int) -> float:
        """Share by which training takes longer with a save every so many steps.

        Args:
            every: train steps between two saves.
            in_flight: saves at a time; one more waits.
        """
        train = every * self.step_secs
        lost = self.lost or 0.0
        beside = min(self.contention_secs, lost / (1 - lost) * train)
        # A slow save among quick ones makes one save wait. Of slow ones in a row, one in so many
        # as may be in flight waits.
        waits = sum(
            min(kind.share, 1 / in_flight)
            * kind.waiting_secs(in_flight * (train + beside))
            for kind in self.kinds
        )
        return (self.blocking_secs + beside + waits) / train


def cost_of_saves(saves: Sequence[MeasuredSave]) -> SaveCost | None:
    """Cost of saves; None if it is not known yet.

    What saves of a kind cost is a mean, as it adds up. Saves that timed no train steps do not
    count in what training waits for, if they are few: the first save of a program compiles.
    """
    recent = [save for save in saves[-_SAVES:] if save.durable_secs is not None]
    trained = [each for save in recent for each in save.trained if each.secs > 0]
    if not trained:
        return None
    lost = _lost(trained, saves)
    step_secs = float(np.median(pace_of_trained(trained, lost or 0.0)))
    flights = {
        save: _flight_secs(save, following, step_secs)
        for save, following in itertools.zip_longest(recent, recent[1:])
    }
    costs, longest = list[KindCost](), 0.0
    for kind in sorted({save.kind for save in recent}):
        same = [save for save in recent if save.kind == kind]
        later = [save for save in same if save.trained]
        later = later if 2 * len(later) >= len(same) else same
        costs.append(
            KindCost(
                len(same) / len(recent),
                capped_mean(save.blocking_secs or 0.0 for save in later),
                tuple(capped(flights[save] for save in same).tolist()),
            )
        )
        until = [(s.blocking_secs or 0.0) + (s.durable_secs or 0.0) for s in later]
        longest = max(longest, float(np.quantile(until, _SLOW)))
    return SaveCost(
        step_secs=step_secs,
        slow_secs=float(np.quantile([t.secs / t.steps for t in trained], _SLOW)),
        lost=lost,
        kinds=tuple(costs),
        longest_secs=longest,
    )


def _lost(trained: Sequence[Trained], saves: Sequence[MeasuredSave]) -> float | None:
    """Share of its time that a train step loses beside a save, from steps of the newest saves.

    If those do not tell, older ones may. Where too little is known, a step loses nothing.
    """
    if len(trained) < ENOUGH:
        return 0.0
    older = [each for save in saves for each in save.trained if each.secs > 0]
    for known in (trained, older):
        if (lost := lost_beside(known)) is not None:
            return lost
    if all(each.beside_secs > _ALWAYS * each.secs for each in trained):
        return None
    return 0.0


def _flight_secs(
    save: MeasuredSave, following: MeasuredSave | None, step_secs: float
) -> float:
    """Seconds from the end of a save's blocking part until it was over, or else until durable.

    They end with the train step in which the save was over, as what that step lost is counted
    whole. The next save tells; but a step does not count that took long for another reason, such
    as an evaluation after each save. If the next save waited for this one, no step was beside its
    end.
    """
    over = max(save.durable_secs or 0.0, save.over_secs or 0.0)
    if following is None or save.over_secs is None:
        return over
    if sum(each.steps for each in following.trained) != following.step - save.step:
        return over  # one between them failed, and was not measured
    beside = sum(each.beside_secs for each in following.trained)
    return max(over, min(beside, save.over_secs + step_secs))


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
    if cost.lost is None:
        # Half of these steps are beside no save.
        apart = (
            int(2 * max(k.mean_flight_secs for k in cost.kinds) / cost.step_secs) + 1
        )
        every = min(max(every, apart), _GROWTH * now)
        why = "to time train steps beside no save"
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
