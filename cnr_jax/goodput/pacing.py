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
    trained_of,
)
from cnr_jax.goodput.profile import ENOUGH

# The newest saves tell what saves take now.
_SAVES = 30
# An interval stays while the best one is within the first two factors of it. The third leaves room
# below a limit. The last is the largest by which an interval changes at once.
_SHORTER, _LONGER, _ROOM, _GROWTH = 0.8, 1.05, 0.8, 4
_LONGEST = 10_000_000
# A train step that spends a larger share of its time than this beside a save does not tell what it
# takes without one.
_ALWAYS = 0.75
# Quantile that counts as the longest time of a step or of a save, where time is limited.
_SLOW = 0.9


class KindCost(NamedTuple):
    """What saves of one kind cost.

    Attributes:
        share: their share of all saves.
        blocking_secs: seconds for which one holds training up.
        flight_secs: of each of them, seconds from the end of its blocking part until it is over:
            durable, and old steps removed.
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
        lost: share of its time that a train step loses beside a save; None: nearly all steps were
            beside one, so nothing tells.
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

    @property
    def apart_steps(self) -> int:
        """Steps of an interval of which about half are beside no save."""
        longest = max(kind.mean_flight_secs for kind in self.kinds)
        return int(min(2 * longest / self.step_secs, _LONGEST)) + 1

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

    The blocking part of a kind is a mean, as it adds up. Seconds in flight are kept for each save,
    as only the long ones make training wait. Saves that timed no train steps do not count, if they
    are few: the first save of a program compiles.
    """
    recent = [save for save in saves[-_SAVES:] if save.durable_secs is not None]
    trained = trained_of(recent)
    if not trained:
        return None
    lost = _lost_beside(trained, saves)
    step_secs = float(np.median(pace_of_trained(trained, lost or 0.0)))
    flights = [
        (save, _flight_secs(save, following, step_secs))
        for save, following in itertools.zip_longest(recent, recent[1:])
    ]
    costs, longest = list[KindCost](), 0.0
    for kind in sorted({save.kind for save in recent}):
        same = [(save, secs) for save, secs in flights if save.kind == kind]
        later = [(save, secs) for save, secs in same if save.trained]
        later = later if 2 * len(later) >= len(same) else same
        costs.append(
            KindCost(
                len(same) / len(recent),
                capped_mean(save.blocking_secs or 0.0 for save, _ in later),
                tuple(capped(secs for _, secs in later).tolist()),
            )
        )
        until = [(s.blocking_secs or 0.0) + (s.durable_secs or 0.0) for s, _ in later]
        longest = max(longest, float(np.quantile(until, _SLOW)))
    return SaveCost(
        step_secs=step_secs,
        slow_secs=float(np.quantile([t.secs / t.steps for t in trained], _SLOW)),
        lost=lost,
        kinds=tuple(costs),
        longest_secs=longest,
    )


def _lost_beside(
    trained: Sequence[Trained], saves: Sequence[MeasuredSave]
) -> float | None:
    """Share of its time that a train step loses beside a save; None: nothing tells.

    Steps of the newest saves tell first, then those of all. Few tell nothing. Where all are beside
    a save for the same part of their time, a shorter interval will tell, and it is 0; but it is
    None where that part is nearly all.
    """
    if len(trained) < ENOUGH:
        return None
    for known in (trained, trained_of(saves)):
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
    why = f"within a slowdown of {slowdown:.3g}"
    if cost.lost is None and cost.apart_steps > low:
        low, why = cost.apart_steps, "to time train steps beside no save"
    every = min(max(low, now // _GROWTH), _GROWTH * now)
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
    beside = f"{1000 * cost.contention_secs:.3g} ms"
    if cost.lost is None:
        beside = "an unknown time"
    return every, (
        f"{why}: a save costs {1000 * cost.blocking_secs:.3g} ms in which training waits and"
        f" {beside} beside it, and is durable in"
        f" {cost.longest_secs:.3g} s; a step takes {1000 * cost.step_secs:.3g} ms"
    )
