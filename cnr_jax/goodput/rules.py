"""Rules of other systems on when to save, as they were published."""

from __future__ import annotations

import math

import numpy as np

from cnr_jax.goodput.model import pace_of
from cnr_jax.goodput.plans import Plan, plain_plan
from cnr_jax.goodput.profile import Profile

# CheckFreq: share of training that saves may take, and steps that it adds to its interval while
# they take more.
_SHARE, _STEPS = 0.05, 2


def checkfreq_plan(profile: Profile, nodes: int = 1) -> Plan:
    """Plan of CheckFreq: full saves as often as one is written, and rarer until they cost 5 %.

    Source: CheckFreq (FAST'21), as its published code has it: the interval is that in which a save
    is persisted, and two steps longer while the measured overhead is above its limit.
    """
    step = profile.step.fixed
    every = max(1, math.ceil(_plain_secs(profile) / step))
    # A save that is written within its interval costs the same in a longer one.
    pace = pace_of(plain_plan(profile, every), profile, nodes)
    over = (pace.interval_secs - pace.train_secs) / (_SHARE * step) - every
    every += _STEPS * max(0, math.ceil(over / _STEPS))
    return plain_plan(profile, every, name="CheckFreq")


def pccheck_plan(profile: Profile, budget: float = 0.03, most: int = 4) -> Plan:
    """Plan of PCcheck: full saves, as many in flight as give the shortest time for each save.

    Args:
        profile: profile of the run.
        budget: share of training that saves may take.
        most: most saves in flight; the paper found no gain beyond 4.

    Source: PCcheck (ASPLOS'25): N with the least T_w(N) / N, interval T_w(N) / (N q t), q the
    slowdown that is allowed. Differs from it in: T_w(N) is the profile's, where the paper has a
    constant.
    """
    alone = _plain_secs(profile)
    counts = range(1, most + 1)
    best = min(counts, key=lambda n: alone * profile.slower(n) / n)
    secs = alone * profile.slower(best) / best
    every = max(1, math.ceil(secs / ((1 + budget) * profile.step.fixed)))
    return plain_plan(profile, every, best, "PCcheck")


def _plain_secs(profile: Profile) -> float:
    """Seconds in which a plain full save is written, if it is alone."""
    size = np.array([profile.plain_bytes])
    return float(profile.durable_secs(size, plain=True)[0])
