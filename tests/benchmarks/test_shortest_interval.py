"""The benchmark of the shortest interval: what it makes of seconds, and a small run of loops."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.tools


def test_a_save_takes_what_its_window_takes_longer(benchmarks: Any) -> None:
    script = benchmarks("shortest_interval")
    made = {
        "calls": [0.02, 0.03, 0.01],
        "beside": [0.012] * 10,
        "others": [0.01] * 6 + [0.02] * 4,
    }
    found = script.cost_of_save(made, 0.01, saves=2)
    assert found["blocking_secs"] == pytest.approx(0.03)
    assert found["contention_secs"] == pytest.approx(0.01)
    assert found["rest_secs"] == pytest.approx(0.02)
    assert found["cost_secs"] == pytest.approx(0.04)
    assert script.interval_of(found, 0.01) == 134
    # The same from the steps between the saves of one run.
    assert script.slowdown_of(made) == pytest.approx(0.04 / 0.28)
    assert math.isnan(script.slowdown_of({**made, "others": []}))
    # Steps that are faster beside saves are noise.
    noise = script.cost_of_save({**made, "beside": [0.001] * 10}, 0.01, saves=2)
    assert noise["cost_secs"] < 0 and script.interval_of(noise, 0.011) == 91


@pytest.mark.parametrize("system", ["cnr", "cnr-consecutive", "orbax-uncompressed"])
def test_windows_hold_as_many_saves_and_steps_as_they_say(
    benchmarks: Any, system: str, tmp_path: Path
) -> None:
    script = benchmarks("shortest_interval")
    data = script.flights(1000)
    loop = script.Loop(system, data, tmp_path)
    loop.alone()
    made = loop.saves(every=13, count=3)
    assert len(made["beside"]) + len(made["others"]) == 39
    assert len(made["calls"]) == 4
    # Steps that kept ones rest on are kept too.
    kept = loop.manager.all_steps()
    assert kept[-1] == loop.step - 13 and 1 < len(kept) < 4
    step = statistics.median(loop.steps(5))
    found = script.turns(loop, 5, 5 * step, count=2, step_secs=step)
    assert found["blocking_secs"] > 0 and found["step_secs"] > 0
    loop.manager.close()


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_a_table_says_how_many_times_shorter_ours_is(
    benchmarks: Any, capsys: pytest.CaptureFixture[str], noise: float
) -> None:
    script, results = benchmarks("shortest_interval"), benchmarks("results")
    found = []
    for system, every in zip(script.SYSTEMS, (20, 10, 400, 110), strict=True):
        label = f"{system}, {script.CORES[0]}"
        case = results.Measured(label=label, group=script.CORES[0], params={})
        seconds = {"cost_secs": 0.05, "noise_secs": noise}
        if system == "cnr":
            seconds |= {
                "auto_every": 30,
                "auto_slowdown": 0.031,
                "idle_call_secs": 1e-5,
            }
            seconds |= {"second_call_secs": 5e-6, "empty_call_secs": 1e-6}
        case.runs.update({n: {"every": every + n, **seconds} for n in range(3)})
        found.append(case)
    script.present(results.Results(found))
    said = capsys.readouterr().out
    for ours, times in (
        ("cnr", "5.3 (5.1-5.5)"),
        ("cnr-consecutive", "10.1 (9.3-11.0)"),
    ):
        text = f"{ours}, a core free: times shorter than orbax-uncompressed, a core free, {times}"
        assert text in said
    assert ("not measured" if noise > 0.025 else "kept") in said
    assert "MISSED" not in said
    assert "came to every 30 (30-30) steps with a slowdown of 3.1 (3.1-3.1) %" in said
    assert "takes 10.0 (10.0-10.0) us" in said
