"""Model of goodput: what a plan of saves leaves of a job's time, in closed form."""

from __future__ import annotations

import dataclasses

import numpy as np

from cnr_jax.goodput.failures import Failures
from cnr_jax.goodput.plans import Plan
from cnr_jax.goodput.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Pace of a plan: what the saves of its cycle take on average.

    Attributes:
        train_secs: seconds of the train steps between two saves, beside no save.
        interval_secs: seconds from save to save.
        write_secs: seconds from the call of a save until it is durable, without its blocking part.
        blocking_secs: seconds that a save holds training up, waits for saves before included.
        restore_secs: seconds of a restore, beside the restart.
        busy: shortest interval at which saves can follow each other, as a share of the interval; at
            1 each save waits for one before.
    """

    train_secs: float
    interval_secs: float
    write_secs: float
    blocking_secs: float
    restore_secs: float
    busy: float

    @property
    def slowdown(self) -> float:
        """Share by which training takes longer than without saves, if nothing fails."""
        return self.interval_secs / self.train_secs - 1

    @property
    def lost_secs(self) -> float:
        """Seconds from the call of the last durable save to a failure, on average."""
        return self.write_secs + self.interval_secs / 2


def pace_of(plan: Plan, profile: Profile, nodes: int = 1) -> Pace:
    """Pace of a plan without failures.

    The interval is the time of training and blocking. If the saves in flight cannot keep up with
    that, it is the time in which one of them becomes durable.
    """
    sizes = plan.schedule.written[plan.cycle].astype(float)
    reads = plan.schedule.steady[plan.cycle].astype(float)
    blocking = profile.blocking_secs(sizes, nodes)
    alone = profile.durable_secs(sizes, plan.plain)
    train = plan.every * profile.step.fixed
    for in_flight in range(1, plan.in_flight + 1):
        write = alone * profile.slower(in_flight)
        # Steps beside a save are slower: those in the time of a write, or all of the interval.
        beside = np.minimum(write, train * (1 + profile.contention))
        lost = beside * profile.contention / (1 + profile.contention)
        free = blocking + train + lost
        bound = (blocking + write) / in_flight
        if np.mean(bound) <= np.mean(free):
            break
    interval = np.maximum(free, bound)
    closest = min(
        float(np.mean(blocking + alone * profile.slower(in_flight))) / in_flight
        for in_flight in range(1, plan.in_flight + 1)
    )
    return Pace(
        train,
        float(interval.mean()),
        float(write.mean()),
        float((interval - train - lost).mean()),
        float(profile.reading.of(reads).mean()),
        closest / float(interval.mean()),
    )


def expected_goodput(
    plan: Plan,
    profile: Profile,
    failures: Failures,
    *,
    notice_secs: float = 0.0,
) -> float:
    """Expected share of a job's time in which it trains steps that stay, by the model.

    Each stretch of time between two failures begins with a restart and a restore. At its end the
    job loses what it has trained since the call of the last durable save: half an interval on
    average, and what it trains while a save is written. With a notice it loses only the seconds of
    the notice, if a save is durable by then.

    Args:
        plan: plan of saves.
        profile: profile of the run.
        failures: stretches of time in which the job has its nodes.
        notice_secs: seconds before a failure at which the job is told of it.
    """
    up, fails = stretches_of(failures)
    pace = pace_of(plan, profile, failures.nodes)
    return goodput_of(pace, profile, up, fails, notice_secs)


def stretches_of(failures: Failures) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each stretch of time with all nodes, and whether it ends by a failure."""
    up = np.array([end - begin for begin, end in failures.up])
    return up, np.array([end < failures.secs for _, end in failures.up])


def goodput_of(
    pace: Pace, profile: Profile, up: np.ndarray, fails: np.ndarray, notice_secs: float
) -> float:
    """Goodput of a pace in stretches of time, as `expected_goodput` says."""
    active = up - profile.restart_secs - pace.restore_secs
    # Before its first failure a job has nothing to restore.
    active[0] += pace.restore_secs
    told = pace.blocking_secs + pace.write_secs <= notice_secs
    behind = notice_secs if told else pace.lost_secs
    kept = np.maximum(active - np.where(fails, behind, 0.0), 0.0)
    return float(kept.sum() / pace.interval_secs * pace.train_secs / up.sum())
