"""A manager that decides itself how often it saves."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.checkpointer.saving.interval import Interval
from cnr_jax.errors import OptionError, SaveError
from cnr_jax.goodput.measured import MeasuredSave, Trained
from cnr_jax.goodput.measurements import Measurements
from cnr_jax.goodput.pacing import KindCost, SaveCost, best_interval, cost_of_saves

COST = SaveCost(
    step_secs=0.01,
    slow_secs=0.012,
    lost=0.0,
    kinds=(KindCost(share=1.0, blocking_secs=0.02, flight_secs=(0.1,)),),
    longest_secs=0.12,
)


def interval(cost: SaveCost = COST, now: int = 1000, **given: Any) -> int | None:
    """The next interval after `now`; None: it stays."""
    found = best_interval(cost, now, **{"slowdown": 0.03, **given})
    return found and found[0]


def settled(cost: SaveCost = COST, now: int = 1000, **given: Any) -> int:
    """The interval that it comes to."""
    while (found := interval(cost, now, **given)) is not None:
        now = found
    return now


def cost(**fields: Any) -> SaveCost:
    return dataclasses.replace(COST, **fields)


def test_the_interval_is_the_shortest_within_the_budget() -> None:
    assert settled() == 67  # 20 ms of 670, and of 660 they would be more than 3 %
    assert settled(slowdown=0.3) == 10  # until a save is durable
    assert settled(slowdown=0.3, in_flight=2) == 7
    assert settled(cost(lost=0.105)) == 102  # 10.5 ms more
    # Beside saves all the time: a tenth of the time of steps is more than the budget allows.
    slow = cost(lost=0.1, kinds=(KindCost(1.0, 0.02, (5.0,)),))
    assert (
        settled(slow, slowdown=0.2, in_flight=50) == 23
    )  # 20 ms of 23 steps, and 1 / 9
    assert settled(slow, slowdown=0.05, in_flight=50, now=2000) == 1040
    # Training waits for a full save now and then.
    fulls = cost(kinds=(KindCost(0.9, 0.02, (0.1,)), KindCost(0.1, 0.02, (3.0,))))
    assert settled(fulls, now=2000) == 247
    assert fulls.slowdown(247, 1) <= 0.03 < fulls.slowdown(246, 1)


def test_the_interval_is_left_alone_while_it_will_do() -> None:
    assert interval(now=67) is None
    assert interval(now=64) is None and interval(now=63) == 67
    assert interval(now=83) is None and interval(now=84) == 67
    # One measurement that is far off does not last.
    assert (
        interval(now=2) == 8 and interval(now=1000) == 250 and interval(now=250) == 67
    )


def test_no_more_is_lost_than_is_allowed_though_a_save_fails() -> None:
    most = 1.0
    found = settled(max_lost_secs=most)
    assert found < 67
    # Of two intervals, and one step, the second save is durable.
    slow = 0.012 * 1.03
    assert 2 * found * slow + 0.012 + 0.12 <= most
    assert interval(max_lost_secs=most, now=found) is None
    assert interval(max_lost_secs=most, now=found + 9) == found
    assert interval(max_lost_secs=0.1) == 1  # as well as can be
    assert settled(max_lost_secs=1e6) == 67
    told = best_interval(COST, 1000, slowdown=0.03, max_lost_secs=most)
    assert told is not None and told[1].startswith("as max_lost_secs=1 asks: ")


def saves(count: int, **fields: Any) -> list[MeasuredSave]:
    save = MeasuredSave(
        step=0,
        parent=0,
        kind="delta",
        nbytes=1000,
        fixed_bytes=10,
        blocking_secs=0.02,
        durable_secs=0.1,
        trained=(Trained(10, 0.1, 0.05),),
    )
    found = [dataclasses.replace(save, step=10 * n, **fields) for n in range(count)]
    return [dataclasses.replace(found[0], kind="full", blocking_secs=9.0), *found[1:]]


def flights(found: list[MeasuredSave]) -> dict[str, Any]:
    """Seconds that saves are in flight, by kind."""
    known = cost_of_saves(found)
    assert known is not None
    kinds = sorted({save.kind for save in found})
    return {
        kind: pytest.approx(each.mean_flight_secs)
        for kind, each in zip(kinds, known.kinds, strict=True)
    }


def test_costs_are_means_of_each_kind() -> None:
    assert cost_of_saves([]) is None
    assert cost_of_saves(saves(9, trained=())) is None
    found = cost_of_saves(saves(10))
    assert found is not None
    assert found.blocking_secs == pytest.approx(0.1 * 9.0 + 0.9 * 0.02)
    assert found.step_secs == found.slow_secs == pytest.approx(0.01)
    newer = cost_of_saves(saves(40))  # what came first is forgotten
    assert newer is not None and newer.blocking_secs == pytest.approx(0.02)
    # One wait of a minute counts as ten usual ones. The first save of a program does not.
    slow = saves(11)[1:]
    slow[3] = dataclasses.replace(slow[3], blocking_secs=60.0)
    slow[0] = dataclasses.replace(slow[0], blocking_secs=5.0, trained=())
    slow[0] = dataclasses.replace(slow[0], durable_secs=0.9)
    mean = cost_of_saves(slow)
    assert mean is not None
    assert [*mean.kinds[0].flight_secs] == pytest.approx([0.1] * 9)
    assert mean.blocking_secs == pytest.approx((0.2 + 8 * 0.02) / 9)
    untold = [dataclasses.replace(save, trained=()) for save in saves(11)[1:]]
    slow = [dataclasses.replace(slow[3], step=0), *untold]
    most = cost_of_saves(slow)  # most saves timed no steps: all count
    assert most is not None
    assert most.blocking_secs == pytest.approx((0.2 + 10 * 0.02) / 11)
    few = cost_of_saves(saves(2))
    assert few is not None and few.lost is None


def test_steps_beside_a_save_count_until_it_is_over() -> None:
    alone, beside = Trained(90, 90 * 0.03, 0.0), Trained(5, 5 * 0.05, 5 * 0.05)
    cut = [  # durable in 0.1 s, and over in 0.23
        dataclasses.replace(save, step=95 * number, kind="delta", over_secs=0.23)
        for number, save in enumerate(saves(40, trained=(beside, alone)))
    ]
    found = cost_of_saves(cut)
    assert found is not None and found.step_secs == pytest.approx(0.03)
    # To the end of a step; of the last of all no step is known.
    assert found.contention_secs == pytest.approx(0.4 * (29 * 0.25 + 0.23) / 30)
    cut[-1] = dataclasses.replace(cut[-1], over_secs=None)
    assert flights(cut)["delta"] == (29 * 0.25 + 0.1) / 30
    # Full ones take longer, whatever follows them.
    full = (Trained(20, 20 * 0.05, 20 * 0.05), Trained(75, 75 * 0.03, 0.0))
    slow = {"kind": "full", "durable_secs": 0.4, "over_secs": 0.99}
    for number in range(20, 40, 4):
        cut[number] = dataclasses.replace(cut[number], **slow)
        cut[number + 1] = dataclasses.replace(cut[number + 1], trained=full)
    assert flights(cut) == {"delta": (24 * 0.25 + 0.1) / 25, "full": 1.0}
    # Of one whose end nobody knows it is known when it was durable.
    cut[20] = dataclasses.replace(cut[20], over_secs=None)
    assert flights(cut)["full"] == pytest.approx((4 * 1.0 + 0.4) / 5)
    # The next save waits for this one, though it is durable: removals take their time.
    waits = saves(40, trained=(Trained(10, 0.3, 0.3),), over_secs=2.0)
    found = cost_of_saves([dataclasses.replace(save, kind="delta") for save in waits])
    assert found is not None and found.slowdown(10, 1) > 5
    # Evaluations after saves are not of the saves.
    slow = (Trained(5, 5 * 0.05 + 20.0, 5 * 0.05 + 20.0), alone)
    cut = [
        dataclasses.replace(save, trained=slow, kind="delta", step=95 * number)
        for number, save in enumerate(saves(40, over_secs=0.23))
    ]
    known = cost_of_saves(cut)
    assert known is not None
    assert known.kinds[0].mean_flight_secs < 0.23 + known.step_secs


def test_of_slow_saves_in_a_row_one_in_as_many_as_fly_waits() -> None:
    slow = cost(kinds=(KindCost(1.0, 0.02, (5.0,)),))
    assert slow.slowdown(100, 1) == pytest.approx(0.02 + 5.0 - 1.0)
    assert slow.slowdown(100, 2) == pytest.approx(0.02 + (5.0 - 2.0) / 2)
    # Steps beside it take twice as long, and the wait is shorter by that.
    busy = cost(lost=0.5, kinds=(KindCost(1.0, 0.02, (5.0,)),))
    assert busy.slowdown(100, 1) == pytest.approx(0.02 + 1.0 + (5.0 - 2.0))


def test_the_longest_save_is_one_of_the_slowest_tenth_with_its_call() -> None:
    found = [
        dataclasses.replace(save, kind="delta", durable_secs=0.1 * (1 + number % 10))
        for number, save in enumerate(saves(41)[1:])
    ]
    known = cost_of_saves(found)
    assert known is not None and 0.92 <= known.longest_secs <= 1.02


def test_only_the_very_next_save_tells_in_which_step_one_was_over() -> None:
    parts = (Trained(20, 1.0, 1.0), Trained(75, 75 * 0.03, 0.0))
    found = [
        dataclasses.replace(save, step=95 * n, kind="delta", trained=parts)
        for n, save in enumerate(saves(20, over_secs=0.99))
    ]
    whole = [1.0] * 19 + [0.99]
    assert flights(found) == {"delta": sum(whole) / 20}
    del found[10]
    assert flights(found) == {"delta": (17 * 1.0 + 2 * 0.99) / 19}


def test_steps_that_take_no_time_are_no_reason_for_endless_intervals() -> None:
    assert cost(step_secs=1e-300, lost=None).apart_steps == 10_000_001
    assert interval(cost(step_secs=1e-300, lost=None), 1000) == 4000


def test_saves_that_vary_make_training_wait_though_most_do_not() -> None:
    vary = cost(kinds=(KindCost(1.0, 0.02, (0.5, 0.5, 0.5, 2.5)),))
    assert vary.slowdown(100, 1) == pytest.approx(0.02 + (2.5 - 1.0) / 4)
    found = saves(40, durable_secs=0.5, trained=(Trained(10, 0.1, 0.1),))
    found[30] = dataclasses.replace(found[30], durable_secs=60.0)
    known = cost_of_saves([dataclasses.replace(save, kind="delta") for save in found])
    assert known is not None
    assert max(known.kinds[0].flight_secs) == 5.0  # a machine that stood still


def test_saves_are_set_apart_where_no_step_is_timed_without_one() -> None:
    always = Trained(10, 0.3, 0.3)
    beside = saves(40, trained=(always,), durable_secs=1.1, over_secs=1.5)
    known = cost_of_saves(beside)
    assert known is not None and known.lost is None
    budget: dict[str, Any] = {"slowdown": 0.3, "in_flight": 6}
    assert known.slowdown(10, 6) < 0.1
    told = best_interval(known, 10, **budget)
    assert told is not None and told[0] == 40
    assert told[1].startswith("to time train steps beside no save: ")
    # 1.5 s are 50 steps; half of twice as many are alone.
    assert interval(known, 40, **budget) == 101
    assert interval(known, 101, **budget) is None
    # What the budget asks for is its reason, though it is longer than that.
    dear = dataclasses.replace(known, kinds=(KindCost(1.0, 5.0, (1.5,)),))
    told = best_interval(dear, 200, **budget)
    assert told is not None and told[0] == math.ceil(5.0 / (0.03 * 0.3))
    assert told[1].startswith(
        "within a slowdown of 0.3: a save costs 5e+03 ms in which"
    )
    assert "waits and an unknown time beside it" in told[1]
    # What may be lost counts more.
    assert interval(known, 10, max_lost_secs=2.0, **budget) is None

    # One gap tells that steps take a third of the time, ...
    gap = (Trained(50, 50 * 0.03, 50 * 0.03), Trained(51, 51 * 0.01, 0.0))
    last = dataclasses.replace(beside[-1], step=501, trained=gap)
    found = cost_of_saves([*beside[:-1], last])
    assert found is not None and found.lost == pytest.approx(2 / 3)
    assert found.step_secs == pytest.approx(0.01)
    assert found.slowdown(100, 6) == pytest.approx(0.02 + 1.0, rel=0.02)
    # ... and is remembered for longer than what saves take.
    more = [dataclasses.replace(save, step=save.step + 600) for save in beside]
    later = cost_of_saves([*beside[:-1], last, *more])
    assert later is not None and later.lost == pytest.approx(2 / 3)
    # Steps that are alone for half of their time, always the same half, tell nothing either, but
    # they need not be told: the interval may become shorter.
    half = cost_of_saves(saves(40, trained=(Trained(10, 0.3, 0.15),)))
    assert half is not None and half.lost == 0


def test_a_save_is_due_so_many_steps_after_the_one_before() -> None:
    counted = Interval(cnr.Options(interval="auto"))
    assert counted.is_due(7) and not counted.goes_on(7)
    counted.start_at(7)
    assert [counted.is_due(step) for step in (8, 16, 17, 99)] == [0, 0, 1, 1]
    counted.learn(Measurements(saves=tuple(saves(40))))
    assert counted.steps == 10  # not before a message says so, to all
    settled = counted.decided()
    assert settled[0] == 40
    assert counted.decided() == (10, "")
    counted.settle(17, *settled)
    counted.start_at(17)
    assert not counted.is_due(56) and counted.is_due(57)
    counted.settle(57, *counted.decided())
    assert (counted.steps, counted.changed) == (40, "")
    counted.start_at(None)
    assert counted.is_due(58)


def test_a_clock_says_that_a_save_is_due_if_steps_take_longer_than_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, module = 100.0, "cnr_jax.checkpointer.saving.interval"
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: now))
    options = cnr.Options(interval="auto", max_lost_secs=0.4)
    counted = Interval(options)
    counted.start_at(0)
    assert not counted.is_due(1)
    now += 0.21
    assert counted.is_due(1)
    counted.start_at(1)
    assert not counted.is_due(2)


# ---- real runs ----------------------------------------------------------------------------------


def trained(run: Any, manager: Any, steps: Any, secs: float = 0.0) -> list[int]:
    """Trains and calls `save` at each step; returns those that were saved."""
    saved = []
    for step in steps:
        run.train(step)
        jax.block_until_ready(run.state)
        time.sleep(secs)
        if run.save(manager, step):
            saved.append(step)
    return saved


def test_a_run_saves_as_often_as_it_says(
    tiny_run: Any, opened: Any, caplog: Any
) -> None:
    run, reports = tiny_run(), list[Any]()
    caplog.set_level("INFO", logger="cnr_jax")
    manager = opened(run, interval="auto", slowdown=0.2, on_save=reports.append)
    saved = trained(run, manager, range(300), 0.002)
    manager.wait_until_finished()
    assert saved[:2] == [0, 10] and len(saved) > 3
    assert [report.step for report in reports] == saved
    for one, two in itertools.pairwise(reports):
        assert two.step - one.step == one.interval_steps
    changes = [report for report in reports if report.interval_changed]
    assert changes
    said = [m for m in caplog.messages if "from here on a save is due" in m]
    assert len(said) == len(changes)
    for report, line in zip(changes, said, strict=True):
        assert line.startswith(f"step {report.step}: ")
        assert f"every {report.interval_steps} steps" in line
        assert report.interval_changed in line
    assert reports[0].interval_steps == 10 and not reports[0].interval_changed
    assert cnr.verify(manager.directory) == ()


def test_a_step_between_saves_looks_at_nothing(tiny_run: Any, opened: Any) -> None:
    run = tiny_run()
    manager = opened(run, interval="auto")
    assert trained(run, manager, [0]) == [0]
    manager.wait_until_finished()
    gone = jax.tree.map(lambda x: x + 0, (run.state, run.touched))
    for leaf in jax.tree.leaves(gone):
        if isinstance(leaf, jax.Array):
            leaf.delete()
    args = cnr.args.Save(*gone)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with manager._calls.lock:
            held.set()
            over.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    for step in range(1, 10):
        assert not manager.save(step, args=args)
    assert holder.is_alive(), "no call has waited for the lock"
    over.set()
    holder.join()
    with pytest.raises(cnr.errors.CnrError):
        manager.save(10, args=args)
    # Nothing was saved: the next step is due.
    assert trained(run, manager, [11, 12]) == [11]
    assert manager.save(13, args=cnr.args.Save(run.state, run.touched), force=True)
    manager.wait_until_finished()
    due = 13 + manager.last_report.interval_steps
    assert manager.should_save(due)
    assert due == 14 or not manager.should_save(due - 1)
    manager.close()
    for step in (due - 1, due):
        with pytest.raises(cnr.errors.CallError, match="this manager is closed"):
            manager.save(step, args=args)


def test_a_step_between_saves_is_passed_over_wherever_it_is_asked_for(
    tiny_run: Any, opened: Any
) -> None:
    run, said = tiny_run(), list[Any]()

    def asks(report: Any) -> None:
        args = cnr.args.Save(run.state, run.touched)
        said.append(manager.save(report.step + 1, args=args))
        try:
            manager.save(report.step + 10, args=args)
        except cnr.errors.CallError as error:
            said.append(error.kind)

    manager = opened(run, interval="auto", on_save=asks)
    assert trained(run, manager, [0]) == [0]
    manager.wait_until_finished()
    manager.close()
    assert said == [False, "inside_on_save"]


def test_a_save_that_failed_is_made_again_at_the_next_step(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run, interval="auto")
    trained(run, manager, [0])
    manager.wait_until_finished()
    with storage.failing():
        assert trained(run, manager, range(1, 12)) == [10]
        while manager.is_saving_in_progress():
            time.sleep(0.01)
    assert trained(run, manager, range(12, 20)) == []
    with pytest.raises(SaveError):
        trained(run, manager, [20])
    assert trained(run, manager, [21, 22]) == [21]
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 21]


def test_a_restored_run_counts_from_the_step_that_was_restored(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    first = opened(run, interval="auto")
    assert trained(run, first, range(25))[:2] == [0, 10]
    first.close()
    newest = first.all_steps()[-1]
    manager = opened(run, interval="auto")
    run.restore(manager, newest)
    assert trained(run, manager, range(newest + 1, newest + 12)) == [newest + 10]
    manager.wait_until_finished()
    # A rollback counts from where it goes on.
    run.restore(manager, 0)
    run.salt = 1
    assert trained(run, manager, range(1, 12))[0] == 10
    manager.wait_until_finished()


def test_the_last_save_before_the_end_is_due_whatever_the_interval(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run, interval="auto", save_on_sigterm=True)
    assert trained(run, manager, [0, 1]) == [0]
    signal.raise_signal(signal.SIGTERM)
    assert trained(run, manager, [2]) == [2]
    assert manager.reached_preemption(2) and manager.all_steps() == [0, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"interval": 10}, "interval is 10, expected 'auto' or None"),
        ({"interval": "auto", "slowdown": 0}, "slowdown is 0, expected a number above"),
        ({"interval": "auto", "max_lost_secs": "1"}, "max_lost_secs is '1', expected"),
        ({"interval": "auto", "max_lost_secs": float("nan")}, "max_lost_secs is nan"),
        ({"slowdown": 0.1}, "slowdown is 0.1, but no interval that goes by it"),
        ({"max_lost_secs": 60}, "max_lost_secs is 60, but no interval that goes by it"),
    ],
)
def test_options_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        cnr.Options(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"save_interval_steps": 5},
        {"save_on_steps": [5]},
        {"should_save_fn": lambda step, last: True},
        {"save_decision_policy": ocp.checkpoint_managers.FixedIntervalPolicy(3)},
    ],
)
def test_when_a_save_is_due_is_said_once(
    tiny_run: Any, opened: Any, tmp_path: Path, given: dict[str, Any]
) -> None:
    run = tiny_run()
    with pytest.raises(OptionError, match=f"said twice.*\n.*{next(iter(given))}"):
        opened(run, interval="auto", **given)
    assert not (tmp_path / "root").exists()


def test_a_plain_manager_of_orbax_decides_on_no_save(tiny_run: Any) -> None:
    with pytest.raises(OptionError, match="a plain manager of Orbax decides on no"):
        cnr.handler_registry(tiny_run().tables, cnr.Options(interval="auto"))
