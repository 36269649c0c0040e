"""SIGKILL at every call by which a process changes files, before it and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench import Bench
from judging import Judge, TwinError
from outcomes import Outcome, Tally, Verdict
from scenarios import SCENARIOS, Scenario, System
from stages import Strike

from cnr_jax.testing.faults import Call, Fault

NAME = "kill"
ABOUT = "SIGKILL before and after every call that changes files"
ALLOWED = frozenset({Outcome.EQUAL})


def run(bench: Bench) -> Iterator[Tally]:
    for system in bench.systems:
        for scenario in SCENARIOS:
            if system.name not in scenario.systems:
                continue
            if bench.wants(NAME, scenario.name, system):
                yield _kill_everywhere(bench, system, scenario)


def points(calls: Sequence[Call], scenario: Scenario) -> list[Fault]:
    """A kill before and one after each call."""
    return [
        Fault("any", call.number, action)
        for call in calls
        if not scenario.outside or is_outside(call)
        for action in ("kill", "kill_after")
    ]


def is_outside(call: Call) -> bool:
    """Whether a call does not just write into the folder of a save in flight."""
    removes = call.call in ("unlink", "rmdir", "rename")
    return removes or ".orbax-checkpoint-tmp" not in call.path


def _kill_everywhere(bench: Bench, system: System, scenario: Scenario) -> Tally:
    tally = Tally(NAME, scenario.name, system.name, ALLOWED)
    try:
        stage = bench.stage(system, scenario)
    except TwinError as error:
        tally.add(Verdict(Outcome.UNCLEAR, str(error)), "before any fault")
        return tally
    tally.notes["calls"] = len(stage.calls)
    faults = bench.sample(points(stage.calls, scenario), 4)
    for _, strike in bench.side_by_side(stage.strike, faults):
        tally.add(verdict(stage.judge, strike), str(strike))
        strike.remove()
    return tally


def verdict(judge: Judge, strike: Strike) -> Verdict:
    """What a root is worth after a kill."""
    unmet = strike.unmet()
    if unmet is not None:
        return unmet
    durable = any(str(note).startswith("durable") for note in strike.ended.notes)
    return judge(strike.root, durable=durable)
