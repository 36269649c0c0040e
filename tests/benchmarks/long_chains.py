"""What a root of many kept steps costs: each save, and opening it.

    python tests/benchmarks/long_chains.py [--quick] [--json PATH] [--dir FOLDER]

One small table, saved again and again by `Consecutive()` with everything kept, so that all that
grows is the chain. CPU seconds are those of the whole process between the call of `save` and
the end of `wait_until_finished`, what Orbax does included; medians, and means in brackets, of the
saves before the 50th and before the 1,000th delta. Then the root of 2,000 steps is opened in
turns by plain Orbax and by us, each manager made in a process that has made one before, so that
nothing is compiled; and `latest_step()` is asked. A full run takes about 3 minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from commandline import make_parser, write_figures
from results import print_mark, print_table

import cnr_jax as cnr

ROWS, DIM, TOUCHED = 1000, 8, 4
WINDOW = 30


class Run:
    """A table of which a few rows change between two saves."""

    def __init__(self) -> None:
        self.state = {"user": jnp.zeros((ROWS, DIM)), "w": jnp.ones(3)}
        self.tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self._step = jax.jit(self._after)

    @staticmethod
    def _after(state: Any, touched: cnr.Touched, step: Any) -> Any:
        ids = jnp.arange(TOUCHED) + step % (ROWS - TOUCHED)
        touched = cnr.record(touched, {"user": ids})
        return {**state, "user": state["user"].at[ids].add(1.0)}, touched

    def manager(self, root: Path) -> cnr.CheckpointManager:
        """A manager that keeps everything."""
        options = cnr.Options(policy=cnr.Consecutive())
        return cnr.CheckpointManager(root, tables=self.tables, options=options)

    def save(self, manager: cnr.CheckpointManager, step: int) -> float:
        """CPU seconds of a save."""
        self.state, self.touched = self._step(self.state, self.touched, step)
        jax.block_until_ready(self.state)
        started = time.process_time()
        manager.save(step, args=cnr.args.Save(self.state, self.touched))
        manager.wait_until_finished()
        return time.process_time() - started


def timed(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """What is made, and its seconds by the clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = make()
    return made, time.perf_counter() - wall, time.process_time() - cpu


def open_in_turns(run: Run, root: Path, turns: int) -> dict[str, list[float]]:
    """Seconds to open a root, and milliseconds of `latest_step`."""
    found: dict[str, list[float]] = {
        name: [] for name in ("orbax", "orbax_cpu", "ours", "ours_cpu", "latest_ms")
    }
    for _ in range(turns):
        plain, wall, cpu = timed(lambda: ocp.CheckpointManager(root))
        plain.close()
        found["orbax"].append(wall)
        found["orbax_cpu"].append(cpu)
        manager, wall, cpu = timed(lambda: run.manager(root))
        found["ours"].append(wall)
        found["ours_cpu"].append(cpu)
        found["latest_ms"].append(1e3 * timed(manager.latest_step)[1])
        manager.close()
    return found


def main() -> None:
    parser = make_parser(__doc__, quick="shorter chains", dir="where to save")
    args = parser.parse_args()
    short, long, steps = (40, 120, 150) if args.quick else (50, 1000, 2000)
    run = Run()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        root = Path(folder) / "root"
        with run.manager(root) as manager:
            spent = [run.save(manager, step) for step in range(steps)]
        newest = json.loads((root / f"{steps - 1}/default/manifest.json").read_text())
        opened = open_in_turns(run, root, 2 if args.quick else 5)
    before = {n: spent[n - WINDOW : n] for n in (short, long)}
    history = newest["history"]
    size = len(json.dumps(history, separators=(",", ":")))
    print_table(
        "CPU of a save, ms",
        ("deltas", "median", "mean"),
        [
            (f"{n}", f"{1e3 * np.median(each):.1f}", f"{1e3 * np.mean(each):.1f}")
            for n, each in before.items()
        ],
    )
    middle = {name: statistics.median(each) for name, each in opened.items()}
    print_table(
        f"Opening {steps:,} steps",
        ("", "s", "CPU s"),
        [
            (name, f"{middle[name]:.2f}", f"{middle[name + '_cpu']:.2f}")
            for name in ("orbax", "ours")
        ],
    )
    print(f"history of the newest manifest: {len(history)} entries, {size:,} bytes")
    print_mark(
        f"CPU of a save at {long} deltas to one at {short}",
        float(np.median(before[long]) / np.median(before[short])),
        1.2,
    )
    more = statistics.median(
        ours - orbax
        for ours, orbax in zip(opened["ours"], opened["orbax"], strict=True)
    )
    print_mark("seconds that opening takes longer than Orbax's", more, 1.0)
    print_mark("milliseconds of latest_step()", middle["latest_ms"], 10.0)
    figures = {
        "saves_cpu_secs": spent,
        "opened": opened,
        "history_entries": len(history),
        "history_bytes": size,
    }
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
