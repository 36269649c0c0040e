"""Which rows are looked up: single draws, batches, and one interval after the other."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

BATCH_ROWS = 8192
# Shares of rows touched since the baseline, after each of 12 intervals.
SINCE_BASELINE = (
    *(0.26, 0.32, 0.365, 0.40, 0.43, 0.455),
    *(0.475, 0.49, 0.505, 0.515, 0.525, 0.533),
)


def touched_rows(
    rows: int, share: float, kind: str = "uniform", seed: int = 0
) -> np.ndarray:
    """Exactly `round(rows * share)` distinct rows, int32, sorted.

    Args:
        rows: to draw from.
        share: between 0 and 1.
        kind: `"uniform"`, or `"zipf"`: the first distinct rows of a stream of look-ups in
            which the r-th most popular row has a weight of 1 / r; popular rows are
            scattered over the table.
        seed: of the draw, and of which rows are popular.
    """
    count = round(rows * share)
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        drawn = rng.choice(rows, count, replace=False, shuffle=False)
    else:
        # When each row is first looked up, if look-ups are Poisson streams.
        arrival = rng.exponential(size=rows).astype(np.float32)
        arrival *= rng.permutation(rows) + 1
        drawn = np.argpartition(arrival, max(0, count - 1))[:count]
    return np.sort(drawn).astype(np.int32)


class Popularity:
    """Rows touched in one interval after the other, as in a stream of look-ups.

    Every row is looked up at a rate of its own, the same in all intervals; the rates are
    fitted such that the share of rows touched in k successive intervals is the k-th of
    `SINCE_BASELINE`, whichever interval is the first. So a new baseline starts the curve
    anew, as for Check-N-Run's models.

    Args:
        rows: of the table.
        seed: of the rates' places in the table, and of all draws.
    """

    def __init__(self, rows: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        rates, weights = fitted_rates()
        ends = np.round(np.cumsum(weights) * rows).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        once = np.repeat(-np.expm1(-rates), counts)
        self._probability = self._rng.permutation(once).astype(np.float32)

    def interval(self) -> np.ndarray:
        """Rows of the next interval, int32, sorted."""
        drawn = self._rng.random(len(self._probability), np.float32)
        return np.flatnonzero(drawn < self._probability).astype(np.int32)


@lru_cache(maxsize=1)
def fitted_rates() -> tuple[np.ndarray, np.ndarray]:
    """Look-ups per interval, and the share of rows that has each of these rates."""
    from scipy.optimize import nnls

    rates = np.concatenate([[0.0], np.logspace(-3, 1, 81)])
    intervals = np.arange(1, len(SINCE_BASELINE) + 1)
    reached = -np.expm1(-np.outer(intervals, rates))
    # That the shares of all rates sum to 1 weighs as much as a thousand intervals.
    wanted = np.append(SINCE_BASELINE, 1e3)
    weights, _ = nnls(np.vstack([reached, np.full(len(rates), 1e3)]), wanted)
    used = weights > 0
    return rates[used], weights[used] / weights.sum()


def batch_ids(rows: int, number: int) -> np.ndarray:
    """The ids that batch `number` looks up: int32, Zipf-like, with repetitions."""
    rng = np.random.default_rng((7, number))
    rank = np.exp(rng.random(BATCH_ROWS) * np.log(rows)).astype(np.int64) - 1
    # An odd factor scatters popular rows over the table.
    return (rank * 2654435761 % rows).astype(np.int32)
