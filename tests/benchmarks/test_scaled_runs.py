"""The benchmark of scaled runs: traces in short, programs that go on, what is made of the runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from cnr_jax.goodput import Failures, Profile, Seconds
from cnr_jax.testing import faults

pytestmark = pytest.mark.tools


def test_traces_are_scaled_and_cut(benchmarks: Any) -> None:
    script = benchmarks("scaled_runs")
    trace = Failures("mine", ((0.0, 3600.0), (3700.0, 7300.0), (7300.0, 9000.0)), 9000)
    short = script.scaled(trace, 4.45, 8.0)
    assert trace.mtbf_secs == 4450
    assert sum(short.up, ()) == pytest.approx((0.0, 3.6, 3.7, 7.3, 7.3, 8.0))
    assert (short.secs, short.count) == (8.0, 2)
    known = script.traces(30.0, None)
    assert [*known][:2] == [f"exponential, {mtbf:g} s" for mtbf in script.MTBF_SECS]
    for name, each in known.items():
        mtbf = script.MTBF_SECS[name.startswith("exponential, 15")]
        assert each.secs == 30 and each.mtbf_secs == pytest.approx(mtbf, rel=0.25)
    assert known == script.traces(30.0, None)


@pytest.mark.skipif(not faults.available(), reason=str(faults.why_unavailable()))
def test_a_killed_program_goes_on_from_its_newest_step(
    benchmarks: Any, tmp_path: Path
) -> None:
    programs = benchmarks("scaled_program").Programs(tmp_path / "runs")
    programs.folder.mkdir()
    root = programs.folder / "root"
    given = {"policy": "intermittent", "in_flight": 2}
    first = programs.start(root, {**given, "saves": [(5, 3)]})
    first.wait()
    assert first.shared[0] == 15 and first.restart_secs > 0
    second = programs.start(root, {**given, "saves": [(1000, 0)]})
    while second.shared[0] < 18:
        assert not second.is_over
    second.kill()
    third = programs.start(root, {**given, "saves": [(4, 1)]})
    third.wait()
    assert third.shared[0] == 20, "it went on from 15, past 16, where its first step is"
    assert sorted(int(p.name) for p in root.iterdir() if p.name.isdigit())[-2:] == [
        15,
        20,
    ]
    with pytest.raises(RuntimeError, match="ended with"):
        programs.start(root, {**given, "in_flight": 0, "saves": [(5, 3)]}).wait()


def test_marks_hold_the_advice_against_the_best_and_the_simulator_against_the_runs(
    benchmarks: Any,
) -> None:
    script = benchmarks("scaled_runs")
    profile = Profile(
        step=Seconds(fixed=0.02),
        blocking=Seconds(fixed=0.01),
        write=Seconds(fixed=0.3),
        restore=Seconds(fixed=0.1),
        full_bytes=1e6,
        plain_bytes=1e6,
        changed_bytes=1e3,
        restart_secs=0.5,
        in_flight=(1.0, 1.1, 1.2),
    )
    plays = script.plans(profile, script.traces(30.0, None), quick=False)
    grid = [name for name in plays if name.startswith("grid")]
    assert len(grid) == 2 * len(script.INTERVALS) * len(script.IN_FLIGHT)
    found: dict[str, Any] = {}
    for name, given in plays.items():
        policy = script.scaled_program.policy_of(given["policy"])
        plan = script.plan_of(profile, given["every"], policy, given["in_flight"])
        share = script.simulate_job(profile, given["trace"], plan).goodput
        for run in range(2):
            kept = share * 30 / 0.02
            found[f"{name}, run {run}"] = {"kept": kept, "restarts": [0.5]}
    said = script.present(found, profile, plays, 30.0)
    assert "MISSED" not in said
    assert said.count("kept   advice") == 2 and said.count("kept   simulator") == 4
    worse = {**found}
    for name in found:
        if name.startswith("advice"):
            worse[name] = {**found[name], "kept": 0.5 * found[name]["kept"]}
    told = script.present(worse, profile, plays, 30.0)
    assert told.count("MISSED advice") == 2 and told.count("MISSED simulator") == 2
    # Restarts of the runs themselves, not of the profile, are what the simulator is given.
    slow = dataclasses.replace(profile, restart_secs=5.0)
    assert script.present(found, slow, plays, 30.0).count("kept   simulator") == 4
    # Of many traces, the luck of one is no part.
    lines = [*script.luck(profile, 30.0, count=40)]
    assert len(lines) == len(script.MTBF_SECS)
    for line in lines:
        ours, best = map(float, re.findall(r"\d+\.\d", line))
        assert best - 1 < ours < 100
