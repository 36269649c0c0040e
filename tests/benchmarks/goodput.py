"""Goodput of a job under failures: plain full saves, published rules, and ours.

    python tests/benchmarks/goodput.py [--traces FOLDER] [--profile PATH] [--quick] [--json PATH]
        [--plot PATH]

Plays a job over each trace of failures in a folder (CSV and JSON, as `cnr-jax simulate` reads
them), and over draws of stated distributions, which anybody can repeat. The systems are plain full
saves of Orbax at their best interval, the rules of CheckFreq and PCcheck, this library with a
fixed interval, and as `cnr_jax.advise` has it. Then the same with 10 to 1,000 nodes.

Nothing is saved and no time is measured: what steps, saves and restores take is a profile. Without
`--profile` it is that of docs/benchmarks.md, for a table of 1 GB on two cores. Beside each figure
stands that of the model by which the advice is found; one that is more than 5 % off is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commandline import make_parser, write_figures

import cnr_jax as cnr
from cnr_jax.goodput import (
    Failures,
    JobRun,
    Plan,
    Profile,
    Seconds,
    advised_plan,
    best_plan,
    checkfreq_plan,
    expected_goodput,
    pccheck_plan,
    plain_plan,
    plan_of,
    read_failures,
    simulate_job,
)

# As docs/benchmarks.md has them: a delta of 1 % is held up for by 0.07 s and durable after 0.12,
# one of 26 % 0.24 and 0.78, a full one 0.76; a plain full save is durable after 6.0 s, and a
# restore takes a second. 26 % of the rows change in half an hour of steps of 0.1 s, and look-ups
# grow as those of flights. A restart takes two minutes: said, not measured.
ONE_GB = Profile(
    step=Seconds(fixed=0.1),
    blocking=Seconds(fixed=0.06, per_byte=4.5e-9),
    write=Seconds(fixed=0.03, per_byte=1.3e-8),
    plain_write=Seconds(fixed=0.0, per_byte=5.3e-9),
    restore=Seconds(fixed=0.1, per_byte=5e-9),
    restart_secs=120.0,
    full_bytes=154e6,
    plain_bytes=1e9,
    dense_bytes=1e4,
    changed_bytes=42e3,
    exponent=0.7,
)
# Seconds for which each further process made a save wait, all on the same two cores.
NODE_SECS = 0.004
FIXED_EVERY = 600
SYSTEMS = ("orbax, best", "CheckFreq", "PCcheck", "ours, fixed", "ours, advised")
# Of a share that the model may be off by.
MODEL_OFF = 0.05


def drawn(hours: float) -> dict[str, Failures]:
    """Traces of stated parameters, by name."""
    given: dict[str, dict[str, Any]] = {
        "exponential, 4 h": {"node_mtbf_hours": 4},
        "Weibull, shape 0.7, 4 h": {"node_mtbf_hours": 4, "shape": 0.7},
        "Weibull, shape 0.8, 1 h": {"node_mtbf_hours": 1, "shape": 0.8},
        "128 nodes, Weibull, shape 0.7, 1,000 h each": {
            "node_mtbf_hours": 1000,
            "nodes": 128,
            "shape": 0.7,
            "down_secs": 600,
        },
    }
    return {name: Failures.drawn(hours=hours, **each) for name, each in given.items()}


def plans(profile: Profile, trace: Failures) -> Iterator[Plan]:
    """Plans of all systems for a trace, in their order."""

    def plain(every: int) -> Plan:
        return plain_plan(profile, every)

    yield best_plan(profile, trace, plain)
    yield checkfreq_plan(profile, trace.nodes)
    yield pccheck_plan(profile)
    yield plan_of(profile, FIXED_EVERY, cnr.Intermittent())
    yield advised_plan(profile, trace)


def play(profile: Profile, name: str, trace: Failures) -> dict[str, Any]:
    """Plays all systems over a trace."""
    systems: dict[str, dict[str, Any]] = {}
    for system, plan in zip(SYSTEMS, plans(profile, trace), strict=True):
        run: JobRun = simulate_job(profile, trace, plan)
        model = expected_goodput(plan, profile, trace)
        systems[system] = {**run.asdict(), "model": model}
    return {
        "trace": name,
        "nodes": trace.nodes,
        "failures": trace.count,
        "mtbf_hours": trace.mtbf_secs / 3600,
        "up_share": trace.up_secs / trace.secs,
        "systems": systems,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Goodput of all systems, a line for each trace, and where the model is off."""
    lines = [
        f"| trace | failures | hours between | {' | '.join(f'{s}, %' for s in SYSTEMS)} |",
        f"|{'---|' * (3 + len(SYSTEMS))}",
    ]
    off: list[str] = []
    for each in found:
        cells = [each["trace"], f"{each['failures']:,}", f"{each['mtbf_hours']:.2f}"]
        for system in SYSTEMS:
            run = each["systems"][system]
            cells.append(f"{100 * run['goodput']:.1f}")
            error = run["model"] / run["goodput"] - 1
            if abs(error) > MODEL_OFF:
                off.append(f"{each['trace']}, {system}: {100 * error:+.1f} %")
        lines.append(f"| {' | '.join(cells)} |")
    worst = max(
        abs(run["model"] / run["goodput"] - 1)
        for each in found
        for run in each["systems"].values()
    )
    told = f"the model is off by {100 * worst:.1f} % of goodput at most"
    return "\n".join([*lines, "", told, *off])


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draws goodput by trace and system."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # The same file for the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "goodput"
    figure, axis = plt.subplots(figsize=(9, 0.4 * len(found) + 1.2))
    places = range(len(found), 0, -1)
    for system, marker in zip(SYSTEMS, "sD^ox", strict=True):
        shares = [100 * each["systems"][system]["goodput"] for each in found]
        axis.plot(shares, places, marker, label=system)
    axis.set_yticks(places, [each["trace"] for each in found], fontsize=8)
    axis.set_xlabel("goodput, %")
    axis.grid(axis="x", alpha=0.4)
    figure.legend(loc="outside upper center", ncols=len(SYSTEMS), fontsize=8)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser: argparse.ArgumentParser = make_parser(
        __doc__,
        quick="few hours of each distribution",
        traces="a folder of traces of failures",
        profile="a profile (JSON) in the place of that of docs/benchmarks.md",
        plot="draw the first tables here, as SVG or PNG",
    )
    given = parser.parse_args()
    profile = ONE_GB if given.profile is None else Profile.read(given.profile)
    files = [] if given.traces is None else sorted(given.traces.iterdir())
    traces = {f.stem: read_failures(f) for f in files if f.suffix in (".csv", ".json")}
    hours = 30.0 if given.quick else 500.0
    found = [play(profile, name, trace) for name, trace in traces.items()]
    if found:
        print("traces\n\n" + table(found) + "\n")
    shown = [play(profile, name, trace) for name, trace in drawn(hours).items()]
    print("distributions\n\n" + table(shown) + "\n")
    by_nodes: list[dict[str, Any]] = []
    for waits in (0.0, NODE_SECS):
        known = Profile.fromdict({**profile.asdict(), "node_secs": waits})
        for nodes in (10, 100, 1000):
            # About as many failures of each.
            trace = Failures.drawn(
                node_mtbf_hours=4000, nodes=nodes, shape=0.7, hours=100 * hours / nodes
            )
            name = f"{nodes:,} nodes, {waits:g} s of waits for each"
            by_nodes.append(play(known, name, trace))
    print("nodes\n\n" + table(by_nodes))
    if given.plot is not None:
        draw([*found, *shown], given.plot)
    figures = {"profile": profile.asdict(), "traces": found, "distributions": shown}
    write_figures(given.json, {**figures, "nodes": by_nodes})


if __name__ == "__main__":
    main()
