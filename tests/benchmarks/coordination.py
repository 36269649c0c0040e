"""What it costs that several processes save together: every barrier and exchange of a save.

    python tests/benchmarks/coordination.py [--quick] [--json PATH] [--repeats N]

A table of 512 K x 16 on 4 devices that belong to 1, 2 or 4 processes of this machine; 1 % of
the rows touched. Whatever waits for other processes within the call of `save` is timed on
process 0, by name: Orbax's barriers and broadcasts, and the exchanges by which this library's
processes agree on a save. Orbax alone, which has the same barriers, is beside it. Train steps
are over before a call; waiting for a process that is late counts as coordination. A full run
takes about 6 minutes, a quick one 50 s.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import peers
import processes
import workload
from harness import Case, Figures, Results, print_table

DEVICES, DIM, PRODUCTS = 4, 16, 5
SYSTEMS = ("cnr-4bit", "orbax-uncompressed")


def plan(quick: bool) -> list[Case]:
    """Every system in 1, 2 and 4 processes."""
    return [
        Case(
            f"{name}, {count} process{'es' * (count > 1)}",
            {"system": name, "processes": count, "saves": 4 if quick else 10},
            group=name,
        )
        for count in ((1, 2) if quick else (1, 2, 4))
        for name in SYSTEMS
    ]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Saves of one system, as process 0 sees them."""
    count = params["processes"]
    if count > 1 and "process" not in params:
        return processes.run_together(__file__, params, root, count)[0]
    processes.join(params, DEVICES // count)
    with Waiting() as waiting:
        return measure(params, root, waiting)


class Waiting:
    """Times what waits for other processes, in the main thread; by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._undo: list[tuple[Any, str, Any]] = []
        self._inside = False

    def __enter__(self) -> Waiting:
        from orbax.checkpoint._src.multihost import multihost

        from cnr_jax.checkpointer.multihost import Channel

        self._time(multihost, "sync_global_processes", lambda args: str(args[0]))
        self._time(multihost, "broadcast_one_to_all", lambda _: "Orbax's broadcast")
        self._time(Channel, "told", lambda _: "agreement: told")
        self._time(Channel, "hear", lambda _: "agreement: hear")
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self._undo:
            setattr(owner, name, function)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and calls by name since the last time."""
        found = self.seconds, self.counts
        self.seconds, self.counts = {}, {}
        return found

    def _time(self, owner: Any, name: str, label: Callable[[Any], str]) -> None:
        function = getattr(owner, name)
        self._undo.append((owner, name, function))

        def timed(*args: Any, **options: Any) -> Any:
            in_main = threading.current_thread() is threading.main_thread()
            if self._inside or not in_main:
                return function(*args, **options)
            self._inside, start = True, time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._inside = False
                key = _plain(label(args))
                took = time.perf_counter() - start
                self.seconds[key] = self.seconds.get(key, 0.0) + took
                self.counts[key] = self.counts.get(key, 0) + 1

        setattr(owner, name, timed)


def _plain(name: str) -> str:
    """A barrier's name without paths and numbers of steps."""
    name = re.sub(r"/[^\s:]*", "", name)
    return re.sub(r"[._:]?\d+", "", name).strip(":._ ")


def measure(params: dict[str, Any], root: Path, waiting: Waiting) -> Figures:
    """Medians over the saves after the first two, in milliseconds by barrier."""
    import jax

    import cnr_jax as cnr

    ours, rows = params["system"].startswith("cnr"), 1 << 19
    state = workload.table_state(rows, DIM, DEVICES)
    tables = workload.tables_of(state)
    touched = cnr.init_touched(state, tables) if ours else None
    ids = workload.touched_rows(rows, 0.01)
    step = workload.make_step(ours, products=PRODUCTS, sines=0)
    system = peers.make(params["system"], root, state)
    calls: list[float] = []
    steps: list[float] = []
    found: list[tuple[dict[str, float], dict[str, int]]] = []
    for number in range(2 + params["saves"]):
        for _ in range(3):
            start = time.perf_counter()
            state, touched = step(state, touched, ids)
            jax.block_until_ready((state, touched))
            steps.append(time.perf_counter() - start)
        waiting.take()
        start = time.perf_counter()
        system.save(number, state, touched)
        calls.append(time.perf_counter() - start)
        found.append(waiting.take())
        system.wait()
    system.close()
    return summary(calls[2:], steps[6:], found[2:])


def summary(calls: list[float], steps: list[float], found: list[Any]) -> Figures:
    """Medians: the call, a step, all coordination, and each kind of it."""
    names = {name for seconds, _ in found for name in seconds}
    totals = [sum(seconds.values()) for seconds, _ in found]
    figures: Figures = {
        "call_secs": statistics.median(calls),
        "step_secs": statistics.median(steps),
        "coordination_secs": statistics.median(totals),
        "exchanges": statistics.median(sum(c.values()) for _, c in found),
    }
    for name in names:
        seconds = [taken.get(name, 0.0) for taken, _ in found]
        figures[f"at {name}"] = statistics.median(seconds)
        figures[f"n {name}"] = statistics.median(c.get(name, 0) for _, c in found)
    return figures


def present(results: Results) -> None:
    """The whole of it against the call and a step; then by name."""
    header = (
        *("", "ms of the call", "of it coordination", "exchanges", "ms of a step"),
        "coordination, share of a step",
    )
    lines = [
        [
            case.label,
            case.text("call_secs", "{:.1f}", 1e3),
            case.text("coordination_secs", "{:.1f}", 1e3),
            case.text("exchanges", "{:.0f}"),
            case.text("step_secs", "{:.1f}", 1e3),
            harness.spread(
                results.ratios(
                    case.label, case.label, "coordination_secs", "step_secs"
                ),
                "{:.3f}",
            ),
        ]
        for case in results
    ]
    print_table("A save of several processes: medians (ranges)", header, lines)
    names = sorted(
        {k[3:] for c in results for r in c.runs.values() for k in r if k[:3] == "at "}
    )
    lines = [[name, *(_cell(case, name) for case in results)] for name in names if name]
    header = ("ms (calls)", *(case.label for case in results))
    print_table("By name: medians", header, lines)


def _cell(case: Any, name: str) -> str:
    values = case.values(f"at {name}")
    if not values:
        return "-"
    count = case.median(f"n {name}")
    return f"{1e3 * harness.middle(values):.2f} ({count:.0f})"


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present)
