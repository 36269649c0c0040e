"""Decisions: which kind of checkpoint to write next, on which parent, in how many bits.

Pure functions of plain numbers, standard library only: no arrays, no files, no
clocks. A policy sees the committed saves of the current branch and returns a
`Decision`; nothing else depends on which policy ran. The invariant to remember: a
decision follows from the history alone, so a simulation of saves decides as a run does.
"""

from __future__ import annotations

from cnr_jax.policy.baseline import Consecutive as Consecutive
from cnr_jax.policy.baseline import Decision as Decision
from cnr_jax.policy.baseline import Full as Full
from cnr_jax.policy.baseline import IncrementLog as IncrementLog
from cnr_jax.policy.baseline import Kind as Kind
from cnr_jax.policy.baseline import OneShot as OneShot
from cnr_jax.policy.baseline import Policy as Policy
from cnr_jax.policy.baseline import SaveRecord as SaveRecord
from cnr_jax.policy.baseline import since_baseline as since_baseline
from cnr_jax.policy.bits import bits_after as bits_after
from cnr_jax.policy.bits import bits_for as bits_for
from cnr_jax.policy.bits import expected_restores as expected_restores
from cnr_jax.policy.bits import small_tables as small_tables
from cnr_jax.policy.intermittent import Cost as Cost
from cnr_jax.policy.intermittent import CycleCosts as CycleCosts
from cnr_jax.policy.intermittent import Intermittent as Intermittent
from cnr_jax.policy.intermittent import Predictor as Predictor
from cnr_jax.policy.intermittent import cycle_costs as cycle_costs
from cnr_jax.policy.intermittent import forecast_next as forecast_next
from cnr_jax.policy.intermittent import full_is_due as full_is_due
from cnr_jax.policy.intermittent import should_take_full as should_take_full
