"""Goodput of real runs that are killed, scaled down: against the advice, and the simulator.

    python tests/benchmarks/scaled_runs.py [--quick] [--json PATH] [--dir PATH] [--repeats N]
        [--only TEXT ...] [--traces FOLDER]

A small model is trained by the real library (`scaled_program.py`) and killed by SIGKILL at the
times of one fixed trace of failures, in which minutes are seconds; each time it goes on from its
newest checkpoint. *Goodput* is the train steps that are there at the end, times the seconds of a
step, over the time of the run.

* **grid**: every interval with every number of saves in flight, under two rates of failure.
* **advice**: one run without failures is measured, as any run is; `cnr.advise` takes its profile.
  What it advises is run like the grid, and held against the best of that.
* **luck**: one trace has a few failures, and a plan whose saves come just before them does well. So
  the advice is held against the grid once more, in simulations of many traces of each rate.
* **simulator**: `simulate_job` plays each plan of the grid, and three plans more under two other
  traces, with the same profile. What it says is held against the runs.

What does not scale is a restart: a program takes as long to start as ever, while what it trains in
between is scaled. Here it is forked from a server that has imported all, and finds its programs
compiled. What that takes, the call of the first save included, and what a restore takes is measured
and part of the profile. With other work on the machine it takes longer: the simulator is given what
it took in the runs it is held against.

`--json` keeps each run as it ends, and goes on from the runs that it finds. A run takes 30 s; one
repeat of all takes 17 minutes, five take 85. `--traces` plays real traces too, scaled to the
same time between failures.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import scaled_program
from commandline import make_parser, write_figures
from scaled_program import FIRST_SAVE_SECS, STEP, Programs

import cnr_jax as cnr
from cnr_jax.goodput import (
    Failures,
    Plan,
    Profile,
    plan_of,
    read_failures,
    recorded_profile,
    simulate_job,
)

RUN_SECS, REPEATS = 30.0, 5
INTERVALS, IN_FLIGHT, POLICY = (4, 12, 36, 108), (1, 2, 3), "intermittent"
MTBF_SECS = (5.0, 15.0)
# Of the run that is measured: saves that are alone, and two and three at a time.
MEASURED = ((100, 12), (16, 14), (8, 14), (100, 3))
RESTARTS = 5
# Of goodput: what the advice may be below the best, and the simulator off.
BELOW, OFF = 0.03, 0.05
# An advice that may cost what it likes, as a plan of the grid may.
BUDGET = 0.99
# Simulated traces of each rate.
TRACES = 100
OTHERS = ((12, 1), (12, 3), (36, 2))


def scaled(trace: Failures, mtbf_secs: float, secs: float) -> Failures:
    """A trace in which the times are shorter, so that failures come as often as is wanted."""
    factor = mtbf_secs / trace.mtbf_secs
    up = [(a * factor, min(b * factor, secs)) for a, b in trace.up if a * factor < secs]
    return Failures(trace.name, tuple(up), secs, trace.nodes)


def traces(secs: float, folder: Path | None) -> dict[str, Failures]:
    """Traces by name: those of the grid, one a rate; and others, of the first rate."""
    drawn: dict[str, dict[str, Any]] = {
        f"exponential, {mtbf:g} s": {"node_mtbf_hours": mtbf} for mtbf in MTBF_SECS
    }
    first = MTBF_SECS[0]
    drawn[f"Weibull 0.7, {first:g} s"] = {"node_mtbf_hours": first, "shape": 0.7}
    drawn[f"16 nodes, Weibull 0.8, {first:g} s"] = {
        **{"node_mtbf_hours": 16 * first, "nodes": 16},
        "shape": 0.8,
    }
    found: dict[str, Failures] = {}
    for name, given in drawn.items():
        # Hours are seconds here; a seed under which as many come as should.
        found[name] = min(
            (Failures.drawn(hours=secs, seed=n, **given) for n in range(20)),
            key=lambda t: abs(t.mtbf_secs - 3600 * _mtbf_of(given)),
        )
        found[name] = scaled(found[name], found[name].mtbf_secs / 3600, secs)
    for path in sorted(folder.iterdir()) if folder is not None else ():
        if path.suffix in (".csv", ".json"):
            found[path.stem] = scaled(read_failures(path), first, secs)
    return found


def _mtbf_of(given: dict[str, Any]) -> float:
    return given["node_mtbf_hours"] / given.get("nodes", 1)


class Runs:
    """Real runs, each made once.

    Args:
        programs: that are started.
        found: figures of runs that are made, by name; more are added.
        path: where these are kept; None: nowhere.
    """

    def __init__(
        self, programs: Programs, found: dict[str, Any], path: Path | None
    ) -> None:
        self._programs, self.found, self._path = programs, found, path

    def keep(self, name: str, figures: dict[str, Any]) -> dict[str, Any]:
        """Notes what a run gave."""
        self.found[name] = {**figures, "load": os.getloadavg()[0]}
        write_figures(self._path, self.found)
        return self.found[name]

    def profile(self, measured: Iterable[tuple[int, int]]) -> Profile:
        """Profile of a run without failures, and of restarts of it."""
        given = {"policy": POLICY, "in_flight": max(IN_FLIGHT)}
        compiling = self._root("compiling")
        for _ in range(2):  # and one that restores
            self._programs.start(compiling, {**given, "saves": [(16, 4)]}).wait()
        if "profile" not in self.found:
            root = self._root("profile")
            self._programs.start(root, {**given, "saves": measured}).wait()
            starts: list[float] = []
            for _ in range(RESTARTS):
                again = self._programs.start(root, {**given, "saves": [(10, 1)]})
                again.wait()
                starts.append(again.restart_secs)
            found = recorded_profile(root, restart_secs=statistics.median(starts))
            assert found is not None and found.is_known
            self.keep("profile", {"profile": found.asdict(), "restarts": starts})
        return Profile.fromdict(self.found["profile"]["profile"])

    def real(
        self, name: str, trace: Failures, every: int, in_flight: int, policy: str
    ) -> float:
        """Steps that a run under a trace of failures keeps."""
        if name not in self.found:
            root = self._root(name)
            given = {"policy": policy, "in_flight": in_flight, "saves": [(every, 0)]}
            begun, restarts, kept = time.monotonic(), list[float](), 0.0
            for begin, end in trace.up:
                time.sleep(max(0.0, begun + begin - time.monotonic()))
                program = self._programs.start(root, given)
                time.sleep(max(0.0, begun + end - time.monotonic()))
                over, shared = program.is_over, program.shared
                program.kill()
                if over:
                    raise RuntimeError(f"{name}: a program ended by itself")
                if shared[FIRST_SAVE_SECS]:
                    restarts.append(program.restart_secs)
                kept = float(_newest(root))
                if end == trace.secs:  # it is not killed, but at its end
                    kept = max(kept, float(shared[STEP]))
            figures = {"kept": kept, "failures": trace.count, "restarts": restarts}
            self.keep(name, figures)
        return self.found[name]["kept"]

    def _root(self, name: str) -> Path:
        folder = self._programs.folder / name.replace(" ", "-")
        folder.mkdir(parents=True)
        return folder / "root"


def _newest(root: Path) -> int:
    """The newest step that is committed; 0 if there is none."""
    names = [path.name for path in root.iterdir()] if root.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def main() -> None:
    parser = make_parser(
        __doc__,
        quick="two plans and the advice, runs of 10 s",
        json="keeps each run here, and goes on from those that are there",
        dir="where to write (default: temporary)",
        traces="a folder of traces of failures, to be played too",
    )
    parser.add_argument("--repeats", type=int, help="runs of each plan of the grid")
    parser.add_argument("--only", nargs="+", default=[""], help="runs with such a name")
    args = parser.parse_args()
    secs = 10.0 if args.quick else RUN_SECS
    repeats = args.repeats or (1 if args.quick else REPEATS)
    found: dict[str, Any] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        runs = Runs(Programs(Path(folder).resolve() / "runs"), found, args.json)
        profile = runs.profile(((60, 6), (16, 6), (8, 6)) if args.quick else MEASURED)
        plays = plans(profile, traces(secs, args.traces), args.quick)
        for repeat in range(repeats):
            for name, given in plays.items():
                if any(text in name for text in args.only):
                    runs.real(f"{name}, run {repeat}", **given)
    print(present(runs.found, profile, plays, secs))
    if not args.quick:
        print(*luck(profile, secs), sep="\n")


def plans(
    profile: Profile, known: dict[str, Failures], quick: bool
) -> dict[str, dict[str, Any]]:
    """What is run, by name: the grid and the advice for each rate, and the others."""
    found: dict[str, dict[str, Any]] = {}

    def add(
        kind: str, name: str, every: int, in_flight: int, policy: str = POLICY
    ) -> None:
        given = {"trace": known[name], "every": every, "in_flight": in_flight}
        label = f"{kind}: {name}, every {every}, {in_flight} in flight"
        found[label] = {**given, "policy": policy}

    rates = [f"exponential, {mtbf:g} s" for mtbf in MTBF_SECS]
    for name in rates[:1] if quick else rates:
        best = advised(profile, known[name]).best
        add("advice", name, best.every, best.in_flight, best.policy.name)
        for every in INTERVALS[1:2] if quick else INTERVALS:
            for in_flight in IN_FLIGHT[::2] if quick else IN_FLIGHT:
                add("grid", name, every, in_flight)
    for name in [each for each in known if each not in rates] if not quick else ():
        for every, in_flight in OTHERS:
            add("other", name, every, in_flight)
    return found


def advised(profile: Profile, trace: Failures) -> cnr.Advice:
    """The advice for a trace."""
    found = cnr.advise(profile, trace, job_hours=trace.secs / 3600, budget=BUDGET)
    assert found is not None
    return found


def luck(profile: Profile, secs: float, count: int = TRACES) -> Iterator[str]:
    """Yields what advice and grid come to over many simulated traces, for each rate."""
    policy = scaled_program.policy_of(POLICY)
    grid = [plan_of(profile, n, policy, at) for n in INTERVALS for at in IN_FLIGHT]
    for name, trace in list(traces(secs, None).items())[: len(MTBF_SECS)]:
        best = advised(profile, trace).best
        own = plan_of(profile, best.every, best.policy, best.in_flight)
        mtbf_secs = float(name.split()[1])
        many = list[Failures]()
        for number in range(count):  # hours are seconds here, too
            drawn = Failures.drawn(
                hours=secs, node_mtbf_hours=mtbf_secs, seed=100 + number
            )
            up = tuple((begin / 3600, end / 3600) for begin, end in drawn.up)
            many.append(Failures(name, up, secs, 1))

        def mean(plan: Plan, many: list[Failures] = many) -> float:
            return statistics.fmean(
                simulate_job(profile, each, plan).goodput for each in many
            )

        most = max(grid, key=mean)
        yield (
            f"       luck, {name}: over {count} simulated traces the advice has"
            f" {100 * mean(own):.1f} % of goodput, and the best of the grid"
            f" {100 * mean(most):.1f}, every {most.every} with {most.in_flight} in flight"
        )


def present(
    found: dict[str, Any],
    profile: Profile,
    plays: dict[str, dict[str, Any]],
    secs: float,
) -> str:
    """A table of all plans, and the marks."""
    rows: list[dict[str, Any]] = []
    for name, given in plays.items():
        made = [v for k, v in found.items() if k.startswith(f"{name}, run ")]
        if made:
            shares = sorted(profile.step.fixed * each["kept"] / secs for each in made)
            rows.append({"name": name, **given, "shares": shares})
            policy = scaled_program.policy_of(given["policy"])
            plan = plan_of(profile, given["every"], policy, given["in_flight"])
            starts = [x for run in made for x in run["restarts"]]
            starts = [statistics.median(starts)] if starts else [profile.restart_secs]
            known = dataclasses.replace(profile, restart_secs=starts[0])
            rows[-1]["simulated"] = simulate_job(known, given["trace"], plan).goodput
    lines = [
        f"a step takes {1000 * profile.step.fixed:.1f} ms, a save holds training up for"
        f" {1000 * profile.blocking.of(profile.delta_bytes(12)):.0f} ms and is written in"
        f" {profile.write.of(profile.delta_bytes(12)):.2f} s, with 2 and 3 in flight in"
        f" {', '.join(f'{x:.2f}' for x in profile.in_flight[1:])} times that",
        f"a restart takes {profile.restart_secs:.2f} s, of which nothing is scaled, and a restore"
        f" {profile.reading.of(profile.full_bytes):.2f} s",
        "",
        "| trace | every | in flight | goodput, % | least, % | most, % | simulated, % |",
        f"|---{'|---' * 6}|",
    ]
    for row in rows:
        shares = row["shares"]
        figures = (statistics.median(shares), shares[0], shares[-1], row["simulated"])
        cells = [row["name"].partition(",  every")[0].partition(", every")[0]]
        cells += [str(row["every"]), str(row["in_flight"])]
        cells += [f"{100 * share:.1f}" for share in figures]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_marks(rows)])


def _marks(rows: list[dict[str, Any]]) -> list[str]:
    """What the advice is below the best of the grid, and what the simulator is off."""
    lines: list[str] = []
    traces = dict.fromkeys(row["trace"].name for row in rows)
    for trace in traces:
        of_trace = [row for row in rows if row["trace"].name == trace]
        name = of_trace[0]["name"].partition(": ")[2].partition(", every")[0]
        best = max(of_trace, key=lambda row: statistics.median(row["shares"]))
        middle = statistics.median(best["shares"])
        for row in of_trace:
            if row["name"].startswith("advice"):
                got = statistics.median(row["shares"])
                within = got >= min(middle - BELOW, best["shares"][0])
                lines.append(
                    f"{_kept(within)} advice, {name}: {100 * (middle - got):.1f} % of goodput"
                    f" below the best, which is that of every {best['every']} with"
                    f" {best['in_flight']} in flight"
                )
        off = [
            (abs(row["simulated"] - statistics.median(row["shares"])), row)
            for row in of_trace
        ]
        most, row = max(off, key=lambda each: each[0])
        lines.append(
            f"{_kept(most <= OFF)} simulator, {name}: {100 * most:.1f} % of goodput off at most,"
            f" every {row['every']} with {row['in_flight']} in flight;"
            f" {100 * statistics.median(each for each, _ in off):.1f} % in the middle"
        )
    return lines


def _kept(is_kept: bool) -> str:
    return "kept  " if is_kept else "MISSED"


if __name__ == "__main__":
    main()
