"""Metrics of a classifier, and what pairs of runs say of a change."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve, by ranks; equal logits count half.

    Args:
        logits: any order-preserving scores, [n].
        labels: above 0 where positive, [n]; both kinds must be there.
    """
    _, rank, count = np.unique(logits, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    positive = labels > 0
    positives, negatives = int(positive.sum()), int((~positive).sum())
    above = mean_rank[rank][positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def log_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross entropy in nats, summed in float64.

    Args:
        logits: of the positive label, [n].
        labels: 0 or 1, [n].
    """
    wide = logits.astype(np.float64)
    return float((np.logaddexp(0, wide) - wide * labels).mean())


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval by Student's t; unbounded of one value.

    Attributes:
        mean: of the values.
        margin: half the width of the interval.
        count: values.
    """

    mean: float
    margin: float
    count: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.margin

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.margin


def interval(values: Sequence[float]) -> Interval:
    """The interval of `CONFIDENCE` for the mean of independent values; needs one at least."""
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Interval(mean, math.inf, 1)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(count), count)


def degradation_percent(metric: str, reference: float, got: float) -> float:
    """How much worse `got` is than `reference`, in percent of it; negative where better."""
    change = (got - reference) / reference * 100
    return -change if metric == "auc" else change
