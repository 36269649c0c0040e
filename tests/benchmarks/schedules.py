"""Schedules of saves: what a policy makes of a trace, and what would have been best.

Costs are `int64[saves, saves]`: `cost[i, j]` for i < j is the bytes of save j as a delta on save
i, `cost[j, j]` its bytes as a full save. A delta on a later save never has more rows, which the
optimum relies on: then parents need not cross, as the tree of saves can be drawn without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cnr_jax.policy import Policy
from cnr_jax.simulation import Followed, Schedule


def schedule_of(parents: Sequence[int], cost: np.ndarray) -> Schedule:
    """The schedule with the given parents."""
    written = np.array([cost[parent, save] for save, parent in enumerate(parents)])
    return Schedule(tuple(parents), written)


def follow(policy: Policy, cost: np.ndarray) -> Schedule:
    """What a policy makes of a trace: it sees the saves so far, and nothing else.

    What it has merged is in the next save, as in `cnr_jax.simulate`.
    """
    followed = Followed(policy)
    for costs in cost.T:
        followed.save(lambda parent, of=costs: (int(of[parent]), int(of[parent])))
    return followed.schedule()


def least_bytes(cost: np.ndarray, depth: int) -> np.ndarray:
    """int64[saves + 1]: fewest bytes of the first 0, 1, ... saves, knowing all the trace.

    Args:
        cost: see the module.
        depth: most deltas that the restore of any save replays, 1 or more.

    `within[i, m]` is the least that saves i + 1 ... m - 1 cost where all of them rest on i,
    through chains of at most d deltas; save i + 1 is then a delta on i itself, and so are
    the saves that follow what rests on it. With depth d + 1:
    `within'[i, m] = min over children c of within'[i, c] + cost[i, c] + within[c, m]`.
    """
    saves = len(cost)
    within = np.full((saves, saves + 1), _never())
    within[np.arange(saves), np.arange(1, saves + 1)] = 0
    for _ in range(depth):
        deeper = np.full_like(within, _never())
        for i in range(saves):
            deeper[i] = _shortest(cost[i], within, i + 1)
        within = deeper
    return _shortest(np.diagonal(cost), within, 0)


def _shortest(price: np.ndarray, within: np.ndarray, start: int) -> np.ndarray:
    """Least cost of saves start ... m - 1, for each m, with children at `price`."""
    total = np.full(len(price) + 1, _never())
    total[start] = 0
    for child in range(start, len(price)):
        through = total[child] + price[child] + within[child]
        total = np.minimum(total, through)
    return total


def _never() -> np.int64:
    """More than any schedule costs; a few of them still fit int64."""
    return np.int64(1 << 60)


def best_schedule(cost: np.ndarray) -> Schedule:
    """A schedule of fulls and deltas on the latest full with the fewest bytes."""
    saves = len(cost)
    total = np.full(saves + 1, _never())
    total[0] = 0
    latest_full = np.zeros(saves + 1, np.int64)
    for full in range(saves):
        cycle = total[full] + np.cumsum(cost[full, full:])
        better = np.flatnonzero(cycle < total[full + 1 :]) + full + 1
        total[better] = cycle[better - full - 1]
        latest_full[better] = full
    parents = [0] * saves
    end = saves
    while end:
        full = int(latest_full[end])
        parents[full:end] = [full] * (end - full)
        end = full
    return schedule_of(parents, cost)
