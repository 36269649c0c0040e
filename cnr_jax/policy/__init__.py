"""Decisions: which kind of checkpoint to write next, on which parent, in how many bits.

Pure functions of plain numbers, standard library only: no arrays, no files, no
clocks. A policy sees the committed saves of the current branch and returns a
`Decision`; nothing else knows which policy ran. The invariant to remember: the numbers
in a history are the same on every process, so every process reaches the same decision
without talking.
"""

from __future__ import annotations

from cnr_jax.policy.baseline import (
    Consecutive,
    Decision,
    Full,
    Kind,
    OneShot,
    Policy,
    SaveRecord,
    since_baseline,
)
from cnr_jax.policy.bits import (
    bits_after,
    bits_for,
    expected_restores,
    small_tables,
)
from cnr_jax.policy.intermittent import Cost, Intermittent, Predictor
from cnr_jax.policy.predictor import (
    CycleCosts,
    cycle_costs,
    forecast_next,
    full_is_due,
    should_take_full,
)

__all__ = [
    "Consecutive",
    "Cost",
    "CycleCosts",
    "Decision",
    "Full",
    "Intermittent",
    "Kind",
    "OneShot",
    "Policy",
    "Predictor",
    "SaveRecord",
    "bits_after",
    "bits_for",
    "cycle_costs",
    "expected_restores",
    "forecast_next",
    "full_is_due",
    "should_take_full",
    "since_baseline",
    "small_tables",
]
