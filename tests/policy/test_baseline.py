"""Decisions of the four policies on small histories."""

from __future__ import annotations

import dataclasses

import pytest

from cnr_jax.errors import OptionError
from cnr_jax.policy import (
    Consecutive,
    Decision,
    Full,
    Intermittent,
    Kind,
    OneShot,
    Policy,
    SaveRecord,
    since_baseline,
)

from ..conftest import each_of

POLICIES: tuple[Policy, ...] = (Full(), OneShot(), Consecutive(), Intermittent())


def save(step: int, kind: Kind, size: int = 100) -> SaveRecord:
    return SaveRecord(step=step, kind=kind, bytes=size, rows=size, secs=1.0)


def cycle(
    *sizes: int, full_bytes: int = 1000, first_step: int = 10
) -> list[SaveRecord]:
    """A full save at `first_step`, then deltas of the given bytes, ten steps apart."""
    deltas = [save(first_step + 10 * (i + 1), "delta", s) for i, s in enumerate(sizes)]
    return [save(first_step, "full", full_bytes), *deltas]


@each_of("policy", POLICIES)
def test_first_save_is_full(policy: Policy) -> None:
    decision = policy.decide([])
    assert (decision.kind, decision.parent) == ("full", None)


@each_of("policy", POLICIES[1:])
def test_first_save_says_that_there_is_no_baseline(policy: Policy) -> None:
    assert policy.decide([]).reason == "no baseline yet"


@each_of("policy", POLICIES)
def test_history_without_a_full_save_leads_to_a_full_save(policy: Policy) -> None:
    assert policy.decide([save(20, "delta"), save(30, "delta")]).kind == "full"


@each_of("policy", POLICIES)
def test_policies_leave_the_codec_as_configured(policy: Policy) -> None:
    assert policy.decide(cycle(100)).codec is None


@each_of("policy", POLICIES)
def test_saves_before_the_latest_full_change_nothing(policy: Policy) -> None:
    older = cycle(900, 950, 990, first_step=1000)
    latest = cycle(100, 110, first_step=2000)
    assert policy.decide([*older, *latest]) == policy.decide(latest)


def test_names_are_distinct() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)


def test_full_never_writes_a_delta() -> None:
    assert Full().decide(cycle(1, 1)).kind == "full"


def test_one_shot_names_the_baseline_as_parent_however_large_deltas_grow() -> None:
    assert OneShot().decide(cycle(500, 900, 2000)).parent == 10


def test_consecutive_names_the_last_save_as_parent() -> None:
    assert Consecutive().decide(cycle()).parent == 10
    assert Consecutive().decide(cycle(500, 900, 2000)).parent == 40


def test_consecutive_writes_a_full_save_once_the_chain_is_full() -> None:
    policy = Consecutive(max_chain=2)
    assert policy.decide(cycle(1)).kind == "delta"
    decision = policy.decide(cycle(1, 1))
    assert decision.kind == "full"
    assert "2 deltas" in decision.reason


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_below_one_are_refused(limit: int) -> None:
    with pytest.raises(OptionError, match="max_chain cannot be"):
        Consecutive(max_chain=limit)


def test_decision_needs_a_parent_for_a_delta_and_none_for_a_full() -> None:
    with pytest.raises(OptionError, match="expected the step of a parent"):
        Decision(kind="delta", parent=None, reason="")
    with pytest.raises(OptionError, match="got parent 3"):
        Decision(kind="full", parent=3, reason="")


def test_step_zero_is_a_parent() -> None:
    assert OneShot().decide([save(0, "full")]).parent == 0


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(OptionError, match="synthetic"):
        save(1, "synthetic")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="synthetic"):
        Decision(kind="synthetic", parent=1, reason="")  # pyright: ignore[reportArgumentType]


def test_since_baseline_keeps_order_and_starts_at_the_full_save() -> None:
    history = [*cycle(1, first_step=100), *cycle(1, 2, first_step=200)]
    assert [record.step for record in since_baseline(history)] == [200, 210, 220]
    assert since_baseline([]) == ()


def test_records_and_decisions_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        save(1, "full").step = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Full().decide([]).reason = ""  # pyright: ignore[reportAttributeAccessIssue]
