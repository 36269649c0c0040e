"""The default policy on small histories: forecasts, the paper's rule, bytes and seconds."""

from __future__ import annotations

import pytest

from cnr_jax.errors import OptionError
from cnr_jax.policy import Decision, Intermittent, Kind, SaveRecord

PAPER = Intermittent(predictor="history")
BY_SECS = Intermittent(cost="secs")


def save(step: int, kind: Kind, size: int, secs: float = 1.0) -> SaveRecord:
    return SaveRecord(step=step, kind=kind, bytes=size, rows=size, secs=secs)


def cycle(*sizes: int, full_bytes: int = 1000) -> list[SaveRecord]:
    """A full save at step 10, then deltas of the given bytes, ten steps apart."""
    deltas = [save(10 * (i + 2), "delta", s) for i, s in enumerate(sizes)]
    return [save(10, "full", full_bytes), *deltas]


def timed(*secs: float, full_secs: float) -> list[SaveRecord]:
    """The same, of equal small deltas that took the given seconds."""
    deltas = [save(10 * (i + 2), "delta", 1, s) for i, s in enumerate(secs)]
    return [save(10, "full", 1000, full_secs), *deltas]


def kind_after(policy: Intermittent, history: list[SaveRecord]) -> Kind:
    decision: Decision = policy.decide(history)
    assert decision.parent == (None if decision.kind == "full" else 10)
    return decision.kind


def test_deltas_rest_on_the_baseline_until_a_full_pays() -> None:
    assert kind_after(PAPER, cycle(250, 500)) == "delta"
    assert kind_after(PAPER, cycle(250, 500, 750)) == "full"


def test_forecast_takes_the_full_one_save_before_the_paper() -> None:
    # Average 583 so far; the last delta is below it, the next one (719) above.
    assert kind_after(Intermittent(), cycle(250)) == "delta"
    assert kind_after(Intermittent(), cycle(250, 500)) == "full"


@pytest.mark.parametrize("policy", [PAPER, Intermittent()], ids=lambda p: p.predictor)
def test_flat_deltas_go_on_for_ever(policy: Intermittent) -> None:
    assert kind_after(policy, cycle(*[990] * 200)) == "delta"


def test_deltas_that_shrink_are_not_forecast_to_shrink_on() -> None:
    # Average 700. Falling on, the next delta would be 650; it is taken for 700.
    assert kind_after(Intermittent(), cycle(750, 700, 700, full_bytes=650)) == "full"
    assert kind_after(Intermittent(), cycle(750, 700, full_bytes=651)) == "delta"


def test_reason_gives_both_sides_of_the_comparison() -> None:
    reason = PAPER.decide(cycle(250, 500, 750)).reason
    assert "last delta took 750 bytes" in reason
    assert reason.endswith("the average save 625")
    reason = Intermittent().decide(cycle(250, 500)).reason
    assert "next delta would take about 719 bytes" in reason
    assert reason.endswith("the average save 583")


def test_max_deltas_holds_where_the_predictor_would_go_on() -> None:
    assert kind_after(Intermittent(max_deltas=3), cycle(1, 1)) == "delta"
    assert kind_after(Intermittent(max_deltas=2), cycle(1, 1)) == "full"


@pytest.mark.parametrize("policy", [PAPER, Intermittent()], ids=lambda p: p.predictor)
def test_bytes_are_compared_exactly_past_float_precision(policy: Intermittent) -> None:
    # Both sides equal, then one byte apart, where a double holds no odd numbers.
    big = 2**53 + 1
    assert kind_after(policy, cycle(big, full_bytes=big)) == "full"
    assert kind_after(policy, cycle(big, full_bytes=big + 1)) == "delta"


def test_a_baseline_of_no_bytes_is_taken() -> None:
    assert kind_after(Intermittent(), cycle(full_bytes=0)) == "delta"
    assert kind_after(Intermittent(), cycle(0, full_bytes=0)) == "full"


def test_by_seconds_a_delta_slower_than_the_full_is_the_last() -> None:
    # By bytes nothing speaks for a full: a delta is a thousandth of it.
    assert kind_after(Intermittent(), timed(2.5, full_secs=2.0)) == "delta"
    assert kind_after(BY_SECS, timed(2.5, full_secs=2.0)) == "full"
    assert kind_after(BY_SECS, timed(1.9, full_secs=2.0)) == "delta"


def test_by_seconds_bytes_do_not_count() -> None:
    large = [save(10, "full", 10, 2.0), save(20, "delta", 10, 0.5)]
    assert kind_after(Intermittent(), large) == "full"
    assert kind_after(BY_SECS, large) == "delta"


def test_by_seconds_growth_is_forecast_too() -> None:
    assert kind_after(BY_SECS, timed(0.25, 0.5, full_secs=1.0)) == "full"
    reason = BY_SECS.decide(timed(0.25, 0.5, full_secs=1.0)).reason
    assert "0.719 s" in reason
    assert "0.583" in reason


def test_by_seconds_a_microsecond_decides() -> None:
    assert kind_after(BY_SECS, timed(0.000001, full_secs=0.000001)) == "full"
    assert kind_after(BY_SECS, timed(0.000001, full_secs=0.000002)) == "delta"


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_below_one_are_refused(limit: int) -> None:
    with pytest.raises(OptionError, match="max_deltas cannot be"):
        Intermittent(max_deltas=limit)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(OptionError, match="cost of Intermittent cannot be 'rows'"):
        Intermittent(cost="rows")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="expected one of 'forecast', 'history'"):
        Intermittent(predictor="oracle")  # pyright: ignore[reportArgumentType]
