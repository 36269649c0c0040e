"""Advice on when to save, against simulations of other plans, and the lines that follow it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.errors import OptionError
from cnr_jax.goodput import (
    Advice,
    Failures,
    Profile,
    Seconds,
    advised_plan,
    best_plan,
    expected_goodput,
    plain_plan,
    plan_of,
    simulate_job,
)
from cnr_jax.goodput.model import pace_of

from .profiles import LARGE

# With longer steps.
SLOW = dataclasses.replace(LARGE, step=Seconds(fixed=0.5))
MEASURED = {
    name: Seconds(fixed=fixed, low=0.7, high=1.5, samples=samples)
    for name, fixed, samples in (("step", 0.5, 30), ("blocking", 1.0, 40))
}
TRACE = Failures.drawn(node_mtbf_hours=3, hours=400, seed=4)
TRACES = [
    TRACE,
    Failures.drawn(node_mtbf_hours=1, hours=60, shape=0.7, seed=5),
    Failures.drawn(
        node_mtbf_hours=500, nodes=100, hours=150, shape=0.8, down_secs=600, seed=6
    ),
]


def advised(profile: Profile = SLOW, trace: Failures = TRACE, **given: Any) -> Advice:
    found = cnr.advise(profile, trace, **{"job_hours": 200, **given})
    assert found is not None
    return found


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_no_plan_that_is_simulated_does_much_better(trace: Failures) -> None:
    budget = 0.03

    def simulated(plan: Any) -> float:
        return simulate_job(SLOW, trace, plan).goodput

    others = [
        simulated(plan_of(SLOW, every, policy))
        for every in (20, 60, 180, 540, 1620)
        for policy in (cnr.Intermittent(), cnr.Consecutive(20), cnr.Full())
    ]
    assert simulated(advised_plan(SLOW, trace, budget)) >= 0.995 * max(others)
    # And of plain full saves those with the best interval.
    plain = best_plan(SLOW, trace, lambda every: plain_plan(SLOW, every), budget=1)
    grid = [simulated(plain_plan(SLOW, every)) for every in (100, 300, 900, 2700)]
    assert simulated(plain) >= 0.995 * max(grid)


def test_figures_are_those_of_the_plan() -> None:
    found = advised()
    best = found.best
    policy = best.policy
    run = simulate_job(SLOW, TRACE, plan_of(SLOW, best.every, policy))
    assert best.goodput.value == pytest.approx(run.goodput, rel=0.01)
    assert best.interval_secs.value == pytest.approx(
        best.every * 0.5 * (1 + best.slowdown.value)
    )
    lost = run.lost_secs / run.failed
    assert best.lost_secs.value == pytest.approx(lost, rel=0.2)
    assert best.restart_secs.value == pytest.approx(
        run.restart_secs / run.failed, rel=0.05
    )
    assert found.expected_restores == pytest.approx(200 * 3600 / TRACE.mtbf_secs)
    assert found.bits == 8
    assert advised(job_hours=6).bits == 3
    assert found.best.goodput.value >= found.second.goodput.value
    assert type(found.second.policy) is not type(policy)


def test_saves_do_not_follow_each_other_as_closely_as_they_can() -> None:
    late = dataclasses.replace(
        SLOW, write=Seconds(fixed=300), in_flight=(1.0, 1.1), contention=0.001
    )
    often = Failures.drawn(node_mtbf_hours=0.5, hours=60, seed=4)
    found = advised(late, often, budget=0.5)
    assert found.best.in_flight == 2

    def busy(every: int) -> float:
        plan = plan_of(late, every, found.best.policy, 2)
        return pace_of(plan, late).busy

    # Written in 330 s, two at a time, saves can come every 165 s.
    assert 0.75 < busy(found.best.every) <= 0.8
    assert found.best.interval_secs.value == pytest.approx(330 / 2 / 0.8, rel=0.05)
    assert busy(10) == pytest.approx(1.0)
    closest = plan_of(late, round(found.best.every * 0.8), found.best.policy, 2)
    most = expected_goodput(closest, late, often)
    assert 0.97 * most < found.best.goodput.value < most
    # A second save in flight is worth nothing where each then takes three times as long.
    alone = dataclasses.replace(late, in_flight=(1.0, 3.0))
    for in_flight in (1, 2):
        plan = plan_of(alone, 800, found.best.policy, in_flight)
        assert pace_of(plan, alone).busy == pytest.approx(0.75, rel=0.01)
    assert advised(alone, often, budget=0.5).best.in_flight == 1


def test_references_are_the_published_formulas() -> None:
    # Saves that cost 2 s and are written at once.
    simple = dataclasses.replace(
        SLOW,
        blocking=Seconds(fixed=2),
        write=Seconds(fixed=0),
        contention=0,
    )
    found = advised(simple)
    mtbf = TRACE.mtbf_secs
    young = math.sqrt(2 * 2 * mtbf)
    share = math.sqrt(2 / (2 * mtbf))
    daly = young * (1 + share / 3 + share**2 / 9) - 2
    assert (found.young, found.daly) == (round(young / 0.5), round(daly / 0.5))
    # With nothing in the background theirs is the best interval.
    assert found.best.every == pytest.approx(found.daly, rel=0.1)


def test_the_budget_is_kept_or_it_is_said_that_none_keeps_it() -> None:
    often = Failures.drawn(node_mtbf_hours=0.1, hours=20, seed=1)
    assert advised(trace=often, budget=0.1).best.slowdown.value > 0.005
    tight = advised(trace=often, budget=0.005)
    assert tight.best.slowdown.value <= 0.005
    assert "no plan costs less" not in str(tight)
    none = advised(trace=often, budget=1e-9)
    assert "no plan costs less than the budget of 0.0 %" in str(none)


def test_ranges_widen_with_what_is_not_known() -> None:
    narrow = advised().best
    assert narrow.slowdown.low == pytest.approx(narrow.slowdown.high)
    assert narrow.goodput.low < narrow.goodput.value < narrow.goodput.high
    wide = advised(dataclasses.replace(SLOW, **MEASURED))
    low, high = wide.best.slowdown.low, wide.best.slowdown.high
    assert low < 0.8 * wide.best.slowdown.value < 1.2 * wide.best.slowdown.value < high
    # It rests on as many saves as the least known of its figures.
    assert wide.saves == 30
    assert advised().saves is None
    # Longer jobs see more failures: their goodput is surer.
    short, long = (
        advised(job_hours=20).best.goodput,
        advised(job_hours=2000).best.goodput,
    )
    assert short.high - short.low > 2 * (long.high - long.low)


def test_a_second_best_within_the_range_is_called_that() -> None:
    near = advised(dataclasses.replace(SLOW, **MEASURED), job_hours=5)
    assert near.is_close
    assert ", which is within the range of the best" in str(near)
    far = dataclasses.replace(advised(), second=near.second)
    worse = dataclasses.replace(
        near.second, goodput=dataclasses.replace(near.second.goodput, value=0.1)
    )
    assert not dataclasses.replace(far, second=worse).is_close


def test_what_would_change_it_is_told() -> None:
    found = advised()
    changes = dict(found.changes)
    assert changes["failures came twice as often"] < found.best.every
    assert changes["saves held training up for twice as long"] > found.best.every
    assert "if failures came twice as often" in str(found)


def test_a_notice_makes_saves_rarer() -> None:
    told = advised(notice_secs=20)
    assert told.best.every > 3 * advised().best.every
    assert told.best.goodput.value > advised().best.goodput.value


def test_a_second_full_checkpoint_is_kept_where_damage_would_cost_more() -> None:
    assert advised().min_fulls == 1
    assert advised(damage=1e-3).min_fulls == 2
    assert "no restore finds a checkpoint damaged" in str(advised())
    assert "no restore finds" not in str(advised(damage=1e-3))


def test_the_lines_to_paste_are_options_that_there_are() -> None:
    found = advised(damage=1e-3)
    scope: dict[str, Any] = {"cnr": cnr, "ocp": ocp}
    exec(found.program, scope)
    options = scope["options"]
    assert options.policy == found.best.policy
    assert options.min_fulls == 2
    assert "bits" not in found.program, "the run goes on with its own"
    assert scope["orbax_options"].save_interval_steps == found.best.every
    assert str(found).endswith(found.program)
    assert found.best.in_flight == 1


def test_saves_in_flight_are_advised_where_they_are_known_to_pay() -> None:
    # Storage that answers late: a save takes a minute, alone or beside others.
    late = dataclasses.replace(
        SLOW, write=Seconds(fixed=60), in_flight=(1.0, 1.0, 1.0), contention=0
    )
    often = Failures.drawn(node_mtbf_hours=0.2, hours=40, seed=1)
    found = advised(late, often, budget=0.05)
    assert found.best.in_flight > 1
    assert f"{found.best.in_flight} in flight" in str(found).splitlines()[0]
    scope: dict[str, Any] = {"cnr": cnr, "ocp": ocp}
    exec(found.program, scope)
    assert scope["options"].max_in_flight == found.best.in_flight
    one = advised(dataclasses.replace(late, in_flight=(1.0,)), often, budget=0.05)
    assert one.best.in_flight == 1
    assert "several saves in flight are worth nothing" in str(one)
    runs = [
        simulate_job(
            late, often, plan_of(late, each.every, each.policy, each.in_flight)
        )
        for each in (found.best, one.best)
    ]
    assert runs[0].goodput > runs[1].goodput + 0.01
    assert found.best.goodput.value == pytest.approx(runs[0].goodput, rel=0.02)
    # Where they share bandwidth one is enough.
    shared = dataclasses.replace(late, in_flight=(1.0, 2.0, 3.0))
    assert advised(shared, often, budget=0.05).best.in_flight == 1


def test_too_few_saves_advise_nothing() -> None:
    for name in ("step", "blocking", "write"):
        few = dataclasses.replace(getattr(SLOW, name), samples=4)
        profile = dataclasses.replace(SLOW, **{name: few})
        assert cnr.advise(profile, TRACE, job_hours=10) is None
    few = dataclasses.replace(SLOW.restore, samples=4)
    found = advised(dataclasses.replace(SLOW, restore=few))
    assert "taken for granted: restores read as fast as saves are written" in str(found)
    assert found.best.restart_secs.value != advised().best.restart_secs.value


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="job_hours is 0"):
        advised(job_hours=0)
    with pytest.raises(OptionError, match="budget is -1"):
        advised(budget=-1)
    whole = Failures("calm", ((0.0, 100.0),), 100.0)
    with pytest.raises(OptionError, match="'calm' has no failure"):
        advised(trace=whole)


def test_the_command_says_the_same(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(SLOW.asdict()))
    words = ["advise", str(profile), "--failures", "exponential:300", "--nodes", "100"]
    words += ["--job-hours", "90", "--slowdown", "0.02", "--restart-secs", "60"]
    drawn = Failures.drawn(node_mtbf_hours=300, nodes=100, hours=400 * 3.0)
    known = dataclasses.replace(SLOW, restart_secs=60)
    found = cnr.advise(known, drawn, job_hours=90, budget=0.02)
    assert found is not None
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.output.strip()) == (0, str(found))
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert document["advice"] == json.loads(json.dumps(found.asdict()))
    assert Profile.fromdict(document["profile"]) == known
    few = dataclasses.replace(
        SLOW, blocking=dataclasses.replace(SLOW.blocking, samples=2)
    )
    profile.write_text(json.dumps(few.asdict()))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert result.output.startswith(
        "not known yet: how long saves hold training up, told by 2 saves of 5\n"
    )
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert document["advice"] is None


def test_percents_are_no_shares() -> None:
    with pytest.raises(OptionError, match=r"below 1(?s:.*)0\.03 is 3 %"):
        advised(budget=3)
    with pytest.raises(OptionError, match=r"below 1(?s:.*)0\.03 is 3 %"):
        cnr.Options(interval="auto", slowdown=3)


def test_failures_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    trace = Failures.drawn(node_mtbf_hours=4000, nodes=1000, hours=1600, shape=0.7)
    said = advised(trace="weibull:4000,0.7", nodes=1000)  # type: ignore[arg-type]
    assert said == advised(trace=trace)
    path = tmp_path / "mine.csv"
    path.write_text("secs,nodes\n0,4\n7200,3\n7800,4\n20000,0\n26000,4\n90000,4\n")
    assert advised(trace=str(path)).mtbf_secs == pytest.approx(41700)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"profile": 5}, "a profile is what manager.profile\\(\\) returns, got int"),
        ({"failures": 5}, "or a text such as 'exponential:4000', got 5"),
        (
            {"failures": "nope"},
            r"there is no trace of failures nope\n.*exponential:HOURS",
        ),
        ({"failures": "exponential:1e-9"}, "and a train step takes 0.5 s: no interval"),
        ({"failures": "exponential:1e-320"}, "no interval is best"),
        ({"failures": "weibull:4,0.001"}, "shape is 0.001, expected 0.1 or more"),
        ({"failures": "exponential:4", "nodes": 10**9}, "failures would be drawn"),
        (
            {"failures": "exponential:4", "nodes": "8"},
            "nodes is '8', expected a number",
        ),
        (
            {"failures": "exponential:4", "nodes": 1.5},
            "nodes is 1.5, expected an integ",
        ),
        ({"nodes": 4}, "nodes is 4, but the failures are those of 1 nodes already"),
        ({"job_hours": "5"}, "job_hours is '5', expected a number above 0"),
        ({"job_hours": None}, "job_hours is None, expected a number above 0"),
        ({"budget": True}, "budget is True, expected a number above 0"),
        (
            {"notice_secs": -1},
            "notice_secs is -1, expected a finite number of 0 or more",
        ),
        ({"damage": 2}, "the chance of damage is 2, expected a share of 1 at most"),
        ({"seed": -1}, "seed is -1, expected an integer of 0 or more"),
        ({"seed": "a"}, "seed is 'a', expected an integer of 0 or more"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(
    given: dict[str, Any], said: str
) -> None:
    words = {"profile": SLOW, "failures": TRACE, "job_hours": 5, **given}
    with pytest.raises(OptionError, match=said):
        cnr.advise(**words)


def test_numbers_of_numpy_are_numbers_and_no_profile_is_no_advice() -> None:
    given = {"job_hours": np.int64(200), "budget": np.float32(0.03125)}
    found = advised(**given)
    assert found == advised(budget=0.03125) and json.dumps(found.asdict())
    assert cnr.advise(None, TRACE, job_hours=200) is None


def test_a_long_job_that_fails_often_is_advised_in_little_memory() -> None:
    found = advised(trace=Failures.drawn(node_mtbf_hours=1, hours=300), job_hours=1e9)
    assert found.expected_restores == pytest.approx(1e9, rel=0.2)
    assert found.best.goodput.low <= found.best.goodput.value
