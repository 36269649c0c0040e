"""Goodput of a job: failures, profiles of runs, plans of saving, and simulation of all three.

A `Profile` says what steps, saves and restores take, `Failures` when nodes are there, and a `Plan`
how a job saves. `simulate_job` simulates a job of these three. `expected_goodput` is a model of it,
with which `cnr_jax.advise` finds the best plan. Nothing here needs jax.
"""

from cnr_jax.goodput.advice import Advice as Advice
from cnr_jax.goodput.advice import Choice as Choice
from cnr_jax.goodput.advice import Figure as Figure
from cnr_jax.goodput.advice import advised_plan as advised_plan
from cnr_jax.goodput.advice import best_plan as best_plan
from cnr_jax.goodput.failures import Failures as Failures
from cnr_jax.goodput.failures import failures_from as failures_from
from cnr_jax.goodput.failures import read_failures as read_failures
from cnr_jax.goodput.job import JobRun as JobRun
from cnr_jax.goodput.job import run_lines as run_lines
from cnr_jax.goodput.job import simulate_job as simulate_job
from cnr_jax.goodput.model import expected_goodput as expected_goodput
from cnr_jax.goodput.plans import Plan as Plan
from cnr_jax.goodput.plans import plain_plan as plain_plan
from cnr_jax.goodput.plans import plan_of as plan_of
from cnr_jax.goodput.profile import Profile as Profile
from cnr_jax.goodput.profile import Seconds as Seconds
from cnr_jax.goodput.records import recorded_profile as recorded_profile
from cnr_jax.goodput.rules import checkfreq_plan as checkfreq_plan
from cnr_jax.goodput.rules import pccheck_plan as pccheck_plan
