"""A real run, its faults and crashes included, is what the model says."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from typing import Any, ClassVar

import hypothesis
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.saving.merging import Merging
from cnr_jax.repository import manifest_writer
from cnr_jax.repository.compaction import baseline
from cnr_jax.testing import model, strategies
from cnr_jax.testing.machine import RunMachine, run_state_machine_as_test
from cnr_jax.testing.setup import Setup

POLICIES = ocp.checkpoint_managers
# Orbax's own policies beside what they keep in plain words.
RETENTIONS = st.sampled_from(
    [
        (None, model.everything),
        (POLICIES.LatestN(1), model.latest(1)),
        (POLICIES.LatestN(2), model.latest(2)),
        (POLICIES.EveryNSteps(3), model.multiples(3)),
        (POLICIES.CustomSteps([2, 3, 7]), model.chosen({2, 3, 7})),
        (
            POLICIES.AnyPreservationPolicy(
                [POLICIES.LatestN(1), POLICIES.EveryNSteps(4)]
            ),
            model.any_of(model.latest(1), model.multiples(4)),
        ),
    ]
)
# Few shapes and one device: what is looked for here lies in the order of events.
SHAPES = st.sampled_from(
    [
        {"t0": strategies.Shape(24, 4, np.float32, ("row",))},
        {
            "t0": strategies.Shape(24, 4, np.float32, ("row",)),
            "t1": strategies.Shape(8, 4, np.float32, ()),
        },
    ]
)
# Where there is a file system in memory, syncing costs nothing.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Machine(RunMachine):
    setups = strategies.setups(RETENTIONS, jax.devices()[:1], SHAPES)
    folder = MEMORY
    counts: ClassVar[Counter[str]] = Counter()


def by_a_log(setup: Setup) -> Setup:
    """The same run, whose chains are merged."""
    policy = cnr.IncrementLog(merge_at=2, max_chain=3)
    options = dataclasses.replace(setup.options, policy=policy)
    return dataclasses.replace(setup, options=options)


class LogMachine(RunMachine):
    setups = Machine.setups.map(by_a_log)
    folder = MEMORY
    counts: ClassVar[Counter[str]] = Counter()


class AnyPlacement(RunMachine):
    setups = strategies.setups(RETENTIONS)
    folder = MEMORY
    counts: ClassVar[Counter[str]] = Counter()


def settings(examples: int, steps: int, **others: object) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **others,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Thousands of failures are meant to happen: no log of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# A failing save leaves coroutines of Orbax unawaited, on event loops that are closed.
ignoring_what_orbax_leaves = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


@ignoring_what_orbax_leaves
def test_a_run_with_faults_and_crashes_equals_its_model() -> None:
    Machine.counts.clear()
    # Shrinking replays hundreds of saves, longer than a test may take.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    run_state_machine_as_test(
        Machine, settings=settings(10, 16, derandomize=True, phases=phases)
    )
    expected = {"full", "delta", "restored", "crash", "failed save", "damage detected"}
    expected |= {"used root refused", "foreign folder"}
    assert expected <= set(Machine.counts), Machine.counts


@pytest.fixture
def merged_at_once(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Chains are merged in this process, right after the commit; counts merges, and baselines."""
    counts: Counter[str] = Counter()
    bring = manifest_writer._bring

    def merge(self: Merging, root: Any, plan: Any, item: str, process: int) -> None:
        folder = baseline.folder_for(plan.directory)
        request = baseline.Request(plan.directory, item, folder, process)
        try:
            made = baseline.write_baseline(root, request)
        except (errors.CnrError, OSError):
            counts["failed merge"] += 1
            baseline.remove_baseline(root, folder)
        else:
            counts["merge"] += 1
            self._offer(made)

    def brought(*given: Any) -> Any:
        counts["baseline"] += 1
        return bring(*given)

    monkeypatch.setattr(Merging, "merge", merge)
    monkeypatch.setattr(manifest_writer, "_bring", brought)
    return counts


@ignoring_what_orbax_leaves
@pytest.mark.parametrize(
    ("examples", "steps"), [(6, 16), pytest.param(300, 40, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(3600)
def test_runs_whose_chains_are_merged_equal_their_model(
    merged_at_once: Counter[str], examples: int, steps: int
) -> None:
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    given = settings(examples, steps, derandomize=examples < 10, phases=phases)
    run_state_machine_as_test(LogMachine, settings=given)
    assert merged_at_once["merge"] and merged_at_once["baseline"]
    print(dict(merged_at_once), dict(LogMachine.counts))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@ignoring_what_orbax_leaves
@pytest.mark.parametrize("machine", [Machine, AnyPlacement])
def test_long_runs_equal_their_model(machine: type[RunMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(300, 40))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@ignoring_what_orbax_leaves
def test_a_thousand_short_runs_in_used_roots_equal_their_model() -> None:
    Machine.counts.clear()
    phases = [hypothesis.Phase.generate]
    run_state_machine_as_test(Machine, settings=settings(1000, 12, phases=phases))
    assert {"used root refused", "foreign folder"} <= set(Machine.counts)
    print(dict(Machine.counts))
