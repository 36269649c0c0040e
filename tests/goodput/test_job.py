"""Simulated jobs: timelines by hand, saves in flight, and the model of goodput against them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax.errors import OptionError
from cnr_jax.goodput import (
    Failures,
    Plan,
    Profile,
    Seconds,
    checkfreq_plan,
    expected_goodput,
    pccheck_plan,
    plain_plan,
    plan_of,
    simulate_job,
)

from .profiles import LARGE

# Round numbers: a step takes a second, a save of whatever size holds up for one and is written
# in three, a restart takes five and a restore two.
ROUND = Profile(
    step=Seconds(fixed=1),
    blocking=Seconds(fixed=1),
    write=Seconds(fixed=3),
    restore=Seconds(fixed=2),
    restart_secs=5,
    full_bytes=100,
    plain_bytes=1000,
    changed_bytes=1,
)
TWO = Failures("two", ((0.0, 50.0), (60.0, 100.0)), 100.0)
ONE = Failures("one", ((0.0, 1000.0),), 1000.0)


def fulls(every: int, in_flight: int = 1) -> Plan:
    return plan_of(ROUND, every, cnr.Full(), in_flight)


def seconds(run: Any) -> tuple[float, ...]:
    spent = (run.useful_secs, run.lost_secs, run.blocking_secs)
    return (*spent, run.contention_secs, run.restart_secs, run.down_secs)


def test_a_timeline_is_that_worked_out_by_hand() -> None:
    # Restart to 5; saves called at 15, 26, 37 and 48, durable at 19, 30 and 41; 41 steps at 50.
    # Restart and restore to 67; saves at 77, 88 and 99, the last in its blocking part at 100.
    run = simulate_job(ROUND, TWO, fulls(10))
    assert seconds(run) == pytest.approx((60, 11, 7, 0, 12, 10))
    assert (run.failed, run.saves, run.written_bytes) == (1, 5, 700)
    assert run.goodput == pytest.approx(60 / 90)
    assert run.asdict()["goodput"] == run.goodput


def test_a_notice_makes_a_last_save_in_time() -> None:
    # Told at 44, it saves 36 steps until 48; at 38 the one before was not yet durable.
    run = simulate_job(ROUND, TWO, fulls(10), notice_secs=6)
    assert run.lost_secs == 0
    # 36 steps, then from 67: 4 to the next multiple of ten, two intervals, and 6 from 94 on.
    assert run.useful_secs == pytest.approx(36 + 4 + 10 + 10 + 6)
    assert sum(seconds(run)) == pytest.approx(100)
    # Two seconds are too few for the save, and stop training all the same.
    late = simulate_job(ROUND, TWO, fulls(10), notice_secs=2)
    assert late.lost_secs == pytest.approx(10)


def test_steps_beside_a_save_are_slower() -> None:
    slow = dataclasses.replace(ROUND, contention=0.5, restart_secs=0)
    whole = Failures("whole", ((0.0, 45.0),), 45.0)
    # Of the ten steps of an interval two are made in the three seconds of a save.
    run = simulate_job(slow, whole, fulls(10))
    assert seconds(run) == pytest.approx((39, 0, 3, 3, 0, 0))


def test_saves_in_flight_pay_where_latency_is_the_limit() -> None:
    # A save takes three intervals.
    slow = dataclasses.replace(ROUND, write=Seconds(fixed=30), in_flight=(1.0, 1.0, 1))
    ones = simulate_job(slow, ONE, fulls(10))
    threes = simulate_job(slow, ONE, fulls(10, 3))
    assert threes.saves >= 2.5 * ones.saves
    assert threes.blocking_secs < 1.1 * threes.saves < ones.blocking_secs
    # Where bandwidth is the limit each of three takes three times as long.
    shared = dataclasses.replace(slow, in_flight=(1.0, 2.0, 3.0))
    assert simulate_job(shared, ONE, fulls(10, 3)).saves <= ones.saves + 2


def test_saves_become_durable_in_order() -> None:
    # Those after the first are written soon, but rest on it, and it is not written by 50. At 48
    # three are in flight, and the fourth waits.
    sizes = cnr.Schedule((0, 0), np.array([100, 1]))
    slow = dataclasses.replace(ROUND, write=Seconds(fixed=0.5, per_byte=1.0))
    run = simulate_job(slow, TWO, Plan("two", 10, sizes, in_flight=3))
    assert (run.saves, run.useful_secs, run.lost_secs) == (0, 32, 40)


def test_nodes_wait_for_each_other_in_each_save() -> None:
    slow = dataclasses.replace(ROUND, node_secs=0.01)
    many = dataclasses.replace(ONE, nodes=1000)
    assert simulate_job(slow, ONE, fulls(5)).saves == 165
    assert (
        simulate_job(slow, many, fulls(5)).saves
        == (1000 - 10 - 13.99) // (5 + 9.99 + 1) + 1
    )


def test_deltas_of_a_run_restore_from_their_chain() -> None:
    # A delta of ten steps after the full one: a restore reads both.
    read = dataclasses.replace(ROUND, restore=Seconds(fixed=0, per_byte=0.01))
    run = simulate_job(read, TWO, plan_of(read, 10, cnr.OneShot()))
    assert run.restart_secs == pytest.approx(10 + 1.2)
    assert run.written_bytes == 100 + 10 + 20 + 30 + 30 + 40 + 50
    assert run.stored_bytes == 100 + 100 + 100


def test_a_wrong_plan_or_notice_is_refused() -> None:
    with pytest.raises(OptionError, match="a plan saves every 0 steps"):
        fulls(0)
    with pytest.raises(OptionError, match="a plan saves every 5 steps with 0 in flig"):
        fulls(5, 0)
    with pytest.raises(OptionError, match="notice_secs is -1"):
        simulate_job(ROUND, ONE, fulls(5), notice_secs=-1)


# ---- rules of others --------------------------------------------------------------------------


def test_checkfreq_saves_as_often_as_a_save_is_written_but_for_five_per_cent() -> None:
    # Written in 3 s, and one second of blocking: 5 % of twenty steps and more.
    assert checkfreq_plan(ROUND).every == 21
    cheap = dataclasses.replace(ROUND, blocking=Seconds(fixed=0.1))
    assert checkfreq_plan(cheap).every == 3
    busy = dataclasses.replace(LARGE, in_flight=(1.0, 2.0))
    plan = checkfreq_plan(busy)
    run = simulate_job(busy, dataclasses.replace(ONE, up=((0, 1e5),), secs=1e5), plan)
    spent = run.blocking_secs + run.contention_secs
    assert spent / run.useful_secs == pytest.approx(0.05, rel=0.02)


def test_pccheck_takes_as_many_in_flight_as_make_a_save_cheapest() -> None:
    # T_w(N) of 30, 33 and 60 s: two in flight, 16.5 s a save.
    slow = dataclasses.replace(ROUND, write=Seconds(fixed=30), in_flight=(1.0, 1.1, 2))
    plan = pccheck_plan(slow, budget=0.1)
    assert (plan.in_flight, plan.every) == (2, 15)
    assert pccheck_plan(LARGE).in_flight == 1
    assert plan.schedule.written.tolist() == [1000, 1000]


# ---- the model ----------------------------------------------------------------------------------

TRACES = {
    "exponential": Failures.drawn(node_mtbf_hours=4, hours=150, seed=1),
    "Weibull": Failures.drawn(node_mtbf_hours=1.5, hours=100, shape=0.7, seed=2),
    "many nodes": Failures.drawn(
        node_mtbf_hours=300, nodes=100, hours=150, shape=0.8, down_secs=900, seed=3
    ),
}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("notice_secs", [0.0, 120.0])
def test_the_model_says_what_simulation_finds(trace: str, notice_secs: float) -> None:
    latency = dataclasses.replace(LARGE, in_flight=(1.0, 1.1, 1.3), node_secs=0.01)
    for profile in (LARGE, latency):
        plans = [
            plan_of(profile, 100, cnr.Intermittent()),
            plan_of(profile, 200, cnr.Consecutive(20), in_flight=2),
            plan_of(profile, 2000, cnr.OneShot()),
            plan_of(profile, 500, cnr.Full(), in_flight=3),
            plain_plan(profile, 1000),
            checkfreq_plan(profile),
            pccheck_plan(profile),
        ]
        for plan in plans:
            given: Any = {"notice_secs": notice_secs}
            run = simulate_job(profile, TRACES[trace], plan, **given)
            said = expected_goodput(plan, profile, TRACES[trace], **given)
            assert said == pytest.approx(run.goodput, rel=0.05), plan.name
            # Each second is somewhere.
            assert run.up_secs == pytest.approx(TRACES[trace].up_secs)


def test_goodput_falls_with_rarer_saves_once_failures_cost_more() -> None:
    trace = TRACES["Weibull"]
    found = [
        simulate_job(LARGE, trace, plan_of(LARGE, every, cnr.Intermittent())).goodput
        for every in (10, 100, 10_000)
    ]
    assert found[1] > max(found[0], found[2])


# ---- profiles -----------------------------------------------------------------------------------


def test_profiles_come_back_from_their_json() -> None:
    assert Profile.fromdict(LARGE.asdict()) == LARGE
    least = {
        name: LARGE.asdict()[name]
        for name in ("step", "blocking", "write", "restore", "full_bytes")
    }
    found = Profile.fromdict({**least, "plain_bytes": 7, "changed_bytes": 1})
    assert (found.in_flight, found.contention, found.plain_bytes) == ((1.0,), 0.0, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": {"fixed": -1}}, "seconds are finite numbers of 0 or more"),
        ({"step": {"fixed": 0}}, "a train step of a profile takes no time"),
        ({"step": {"fixd": 1}}, "this is no profile: .*fixd"),
        ({"step": 3}, "this is no profile"),
        ({"full_bytes": float("nan")}, "full_bytes of a profile cannot be nan"),
        ({"full_bytes": True}, "full_bytes of a profile cannot be True"),
        ({"in_flight": [1, 0.5]}, "in_flight of a profile cannot be"),
        ({"in_flight": []}, "in_flight of a profile cannot be"),
        ({"stride": 3}, "this is no profile: .*stride"),
    ],
)
def test_wrong_profiles_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Profile.fromdict({**LARGE.asdict(), **change})


def test_what_is_no_sequence_is_named_too() -> None:
    with pytest.raises(OptionError, match=r"in_flight of a profile cannot be 1\.1"):
        dataclasses.replace(LARGE, in_flight=1.1)  # type: ignore[arg-type]


def test_deltas_grow_to_the_full_save_and_writes_slow_each_other_down() -> None:
    assert LARGE.delta_bytes(1) == 5e7 + 1e7
    assert LARGE.delta_bytes(100) == pytest.approx(5e7 + 1e7 * 100**0.7)
    assert LARGE.delta_bytes(1e9) == 6e9
    some = dataclasses.replace(LARGE, in_flight=(1.0, 1.2))
    assert [some.slower(n) for n in (1, 2, 4)] == [1.0, 1.2, 2.4]
