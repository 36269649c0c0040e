"""The shortest interval at which saves slow training down by 3 %, ours against Orbax.

    python tests/benchmarks/shortest_interval.py [--quick] [--json PATH] [--repeats N] [--only ...]

A DLRM is trained on flights-3m, one table of 1.7 M x 32 with an accumulator a row, in the order of
time. A step keeps one core busy, of two (*a core free*; how many it takes is measured beside it);
or a process that computes all the time takes the other (*no core free*). The latest two steps are
kept. Ours saves by default, and with the policy that `cnr.advise` finds best for short intervals,
`Consecutive`. Orbax saves in the background, deletes in the background, and comes twice, with
compression and without: the better of both is what ours is held against.

Other work on the machine changes the time of a step by far more than 3 %. So what is measured is
the time that *one save* takes of training, in turns: a window of steps without saves, one with
saves at a fixed interval, one without again. Of the window with saves, beyond as many steps as
fast as those around it:

* *blocking*: calls of `save`;
* *contention*: what steps take longer while a save is in flight, and ten steps more, in which
  older ones may be deleted;
* *rest*: all other steps. Nothing of a save goes on beside them, so it is noise.

*Noise* is what contention would be off by if the windows without saves are as unlike each other
as they were. The interval at 3 % is blocking and contention over 3 % of a step. First it follows
from saves that do not wait for each other; then saves are made at that interval, and it follows
from what they take, as a delta over more steps has more rows; and so on, until it stays. What
recording takes of a step in ours is measured against a step that records nothing, and stands
beside.

Last, ours decides itself (`Options(interval="auto")`), for a minute and a half. What its saves take
of training in the last minute, against the steps between them, is the slowdown that it keeps to.
Its calls at steps that do not save are timed. The first Python after a step of 30 ms finds its code
in no cache: so an empty function is timed at the same place too, and the same call a second time at
once. The flights are found as by `trained_tables.py`; a quick run draws its own. A full run makes 5
turns in about an hour.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Case, Figures, Results, print_mark, print_table, spread

SLOWDOWN, TIMES = 0.03, 5.0
# Saves are made at the interval that follows from those before, until it is within this factor.
ROUNDS, NEAR = 4, 1.25
SYSTEMS = ("cnr", "cnr-consecutive", "orbax", "orbax-uncompressed")
CORES = ("a core free", "no core free")
DIM, KEPT, FEW = 32, 2, 20
# As `cnr.advise` prints it.
CHAIN = 20
AFTER = 10
PARTS = ("blocking", "contention", "rest")


def plan(quick: bool) -> list[Case]:
    """Every system with a core free and with none."""
    given: dict[str, Any] = {"window_secs": 3.0, "turns": 3, "auto_secs": 90.0}
    if quick:
        given = {"rows": 50_000, "window_secs": 0.5, "turns": 2, "auto_secs": 3.0}
    return [
        Case(
            f"{system}, {cores}",
            {**given, "system": system, "cores": cores},
            group=cores,
            needs=() if quick else ("pyarrow",),
        )
        for cores in (CORES[:1] if quick else CORES)
        for system in (SYSTEMS[:3:2] if quick else SYSTEMS)
    ]


def child(params: dict[str, Any], root: Path) -> Figures:
    """What one save of a system takes, the interval that follows, and what holds there."""
    harness.devices(1)
    data = flights(params.get("rows"))
    beside = contextlib.nullcontext() if params["cores"] == CORES[0] else busy_core()
    with beside:
        return measured(params, data, root)


def measured(params: dict[str, Any], data: Any, root: Path) -> Figures:
    """Figures of one system."""
    loop = Loop(params["system"], data, root)
    window = params["window_secs"]
    durable = statistics.median(loop.alone() for _ in range(4))
    loop.steps(20)
    step, cores = used(loop, window)
    wanted, found = max(10, math.ceil(1.2 * durable / step)), {}
    every = wanted
    for _ in range(ROUNDS):
        every = wanted
        found = turns(loop, every, window, params["turns"], step)
        wanted = interval_of(found, found["step_secs"])
        if every / NEAR <= wanted <= NEAR * every:
            break
    loop.manager.close()
    figures: Figures = {
        **found,
        "tried_every": every,
        "slowdown": found["cost_secs"] / (every * found["step_secs"]),
        "every": wanted,
        "durable_secs": durable,
        "cores": cores,
    }
    if params["system"] == "cnr":
        count = max(5, round(window / step))
        figures["record_share"] = recording(data, root, count, params["turns"])
        figures |= decided(data, root / "auto", params["auto_secs"])
    return figures


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keeps a core busy with another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def interval_of(found: dict[str, float], step_secs: float) -> int:
    """Steps between saves at which one takes 3 % of them.

    Where noise makes of contention less than nothing, it counts as nothing.
    """
    cost = max(found["cost_secs"], found["blocking_secs"])
    return max(1, math.ceil(cost / (SLOWDOWN * step_secs)))


def recording(data: Any, root: Path, steps: int, turns: int) -> float:
    """Share by which a step is longer that records the rows it looks up."""
    plain, records = Loop("none", data, root), Loop("cnr", data, root / "records")
    for loop in (plain, records):
        loop.steps(3)  # compiles
    longer = [
        statistics.fmean(records.steps(steps)) / statistics.fmean(plain.steps(steps))
        for _ in range(turns)
    ]
    records.manager.close()
    return statistics.median(longer) - 1


@functools.cache
def flights(rows: int | None) -> Any:
    """Flights-3m; or flights that are drawn, with a table of so many rows."""
    import traces
    import trained_tables

    if rows is None:
        return trained_tables.load("flights-3m", traces.data_folder(None))
    rng, count = np.random.default_rng(0), 40 * trained_tables.BATCH
    ids = (rng.zipf(1.2, (count, 10)) * 2654435761 % rows).astype(np.int32)
    dense = rng.normal(size=(count, 5)).astype(np.float32)
    label = (rng.random(count) < 0.2).astype(np.float32)
    return trained_tables.Flights(ids, rows, dense, label)


class Loop:
    """A train loop.

    Attributes:
        manager: that saves; None: nothing is saved, and nothing recorded.
        args: what is given to `save`.
    """

    def __init__(self, system: str, data: Any, root: Path, **options: Any) -> None:
        import flights_dlrm
        import jax
        import orbax.checkpoint as ocp

        import cnr_jax as cnr

        self.step, self.manager, self.touched = 0, None, None
        self._data = data
        self._batches = len(data.label) // flights_dlrm.BATCH
        features, columns = data.ids.shape[1], data.dense.shape[1]
        self.state = flights_dlrm.init(data.rows, features, columns, DIM)
        table = flights_dlrm.TABLE

        def train(state: Any, touched: Any, *batch: Any) -> tuple[Any, Any]:
            if touched is not None:
                touched = cnr.record(touched, {table: batch[0]})
            return flights_dlrm.train_step(state, *batch)[0], touched

        self._train = jax.jit(train, donate_argnums=(0, 1))
        self.args: Any = lambda: ocp.args.PyTreeSave(self.state)
        if system.startswith("cnr"):
            if system == "cnr-consecutive":
                options["policy"] = cnr.Consecutive(max_chain=CHAIN)
            tables = cnr.find_tables(self.state, [table])
            self.touched = cnr.init_touched(self.state, tables)
            self.args = lambda: cnr.args.Save(self.state, self.touched)
            kept = ocp.checkpoint_managers.LatestN(KEPT)
            self.manager = cnr.CheckpointManager(
                root / system,
                tables=tables,
                options=cnr.Options(preservation_policy=kept, **options),
            )
        elif system != "none":
            packed = ocp.PyTreeCheckpointHandler(use_compression=system == "orbax")
            self.manager = ocp.CheckpointManager(
                root / system,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=KEPT, enable_background_delete=True
                ),
                item_handlers=packed,
            )

    def train(self) -> float:
        """Seconds of a step."""
        import jax

        begun = time.perf_counter()
        batch = self._data.batch(self.step % self._batches)
        self.state, self.touched = self._train(self.state, self.touched, *batch)
        jax.block_until_ready((self.state, self.touched))
        self.step += 1
        return time.perf_counter() - begun

    def steps(self, count: int) -> list[float]:
        """Seconds of each of some steps without saves."""
        return [self.train() for _ in range(count)]

    def save(self) -> bool:
        """Begins a save, if one is due."""
        return self.manager.save(self.step, args=self.args())

    def alone(self) -> float:
        """Seconds until a save is durable, after one step, while nothing is trained."""
        self.train()
        begun = time.perf_counter()
        self.save()
        self.manager.wait_until_finished()
        return time.perf_counter() - begun

    def saves(self, every: int, count: int) -> dict[str, list[float]]:
        """Seconds of calls of `save`, and of the steps beside saves and of others."""
        calls, beside, others = list[float](), list[float](), list[float]()
        for _ in range(count):
            begun = time.perf_counter()
            self.save()
            calls.append(time.perf_counter() - begun)
            left = AFTER
            for _ in range(every):
                left = AFTER if self.manager.is_saving_in_progress() else left - 1
                (beside if left >= 0 else others).append(self.train())
        begun = time.perf_counter()
        self.manager.wait_until_finished()
        calls.append(time.perf_counter() - begun)  # as the next one would
        return {"calls": calls, "beside": beside, "others": others}


def used(loop: Loop, secs: float) -> tuple[float, float]:
    """Seconds of a step without saves, and how many cores it takes."""
    times, cpu, begun = list[float](), time.process_time(), time.perf_counter()
    while time.perf_counter() < begun + secs:
        times.append(loop.train())
    cpu = time.process_time() - cpu
    return statistics.fmean(times), cpu / (time.perf_counter() - begun)


def turns(
    loop: Loop, every: int, window_secs: float, count: int, step_secs: float
) -> dict[str, float]:
    """What one save takes of training at an interval: medians over turns of windows.

    Long intervals make few turns, but at least one.
    """
    secs = every * step_secs
    saves = max(1, round(window_secs / secs))
    count = max(1, min(count, round(count * 2 * window_secs / (saves * secs))))
    quiet_steps = min(saves * every, max(5, round(window_secs / step_secs)))
    quiet = [statistics.fmean(loop.steps(quiet_steps))]
    costs: list[dict[str, float]] = []
    for _ in range(count):
        made = loop.saves(every, saves)
        quiet.append(statistics.fmean(loop.steps(quiet_steps)))
        found = cost_of_save(made, (quiet[-2] + quiet[-1]) / 2, saves)
        off = abs(quiet[-1] - quiet[-2]) / 2 * len(made["beside"]) / saves
        costs.append({**found, "noise_secs": off})
    return {k: statistics.median(each[k] for each in costs) for k in costs[0]}


def cost_of_save(
    made: dict[str, list[float]], step_secs: float, saves: int
) -> dict[str, float]:
    """Seconds that each of some saves took of training, and of what.

    Args:
        made: what `Loop.saves` returns.
        step_secs: seconds of a step without saves, at the same time.
        saves: their number.
    """

    def longer(secs: list[float]) -> float:
        return (sum(secs) - step_secs * len(secs)) / saves

    parts = (
        sum(made["calls"]) / saves,
        longer(made["beside"]),
        longer(made["others"]),
    )
    found = {f"{k}_secs": v for k, v in zip(PARTS, parts, strict=True)}
    return {**found, "cost_secs": sum(parts[:2]), "step_secs": step_secs}


def slowdown_of(made: dict[str, list[float]]) -> float:
    """Share by which training took longer than its steps beside no save; NaN if there were none.

    Args:
        made: what `Loop.saves` returns, of all saves together.
    """
    if not made["others"]:
        return math.nan
    step = statistics.fmean(made["others"])
    steps = len(made["beside"]) + len(made["others"])
    return cost_of_save(made, step, 1)["cost_secs"] / (steps * step)


def decided(data: Any, root: Path, secs: float) -> Figures:
    """What a run of ours comes to that decides itself, and its calls that do not save."""
    loop = Loop("cnr", data, root, interval="auto", slowdown=SLOWDOWN)
    idle, again, empty = list[float](), list[float](), list[float]()
    made: dict[str, list[float]] = {"calls": [], "beside": [], "others": []}

    def nothing(step: int, args: Any) -> bool:
        return False

    def timed(call: Any) -> tuple[bool, float]:
        begun = time.perf_counter()
        has_saved = call(loop.step, args=loop.args())
        return has_saved, time.perf_counter() - begun

    begun, left = time.perf_counter(), 0
    while (now := time.perf_counter()) < begun + secs or len(idle) < FEW:
        left = AFTER if loop.manager.is_saving_in_progress() else left - 1
        trained = loop.train()
        plain = len(empty) < len(idle)
        if plain:
            empty.append(timed(nothing)[1])
        has_saved, took = timed(loop.manager.save)
        if now > begun + secs / 3:  # before, it learns
            made["beside" if left >= 0 else "others"].append(trained)
            made["calls"] += [took] * has_saved
        if not (plain or has_saved):
            idle.append(took)
            again.append(timed(loop.manager.save)[1])
    loop.manager.wait_until_finished()
    report = loop.manager.last_report
    assert report is not None
    loop.manager.close()
    return {
        "auto_every": report.interval_steps or 0,
        "auto_slowdown": slowdown_of(made),
        "idle_call_secs": statistics.median(idle),
        "second_call_secs": statistics.median(again),
        "empty_call_secs": statistics.median(empty),
    }


def present(results: Results) -> None:
    """What a save takes, the intervals that follow, and the marks."""
    head = ("ms", "a step", "cores", "call", "beside it", "rest", "a save", "noise")
    keys = (*(f"{part}_secs" for part in PARTS), "cost_secs", "noise_secs")
    lines = [
        [
            case.label,
            case.text("step_secs", "{:.1f}", 1e3),
            case.text("cores", "{:.1f}"),
            *(case.text(key, "{:.0f}", 1e3) for key in keys),
        ]
        for case in results
    ]
    print_table("What one save takes of training: medians (ranges)", head, lines)
    head = ("", "every so many steps", "tried at", "slowdown there, %", "recording, %")
    lines = [
        [
            case.label,
            case.text("every", "{:.0f}"),
            case.text("tried_every", "{:.0f}"),
            case.text("slowdown", "{:.1f}", 100),
            case.text("record_share", "{:.1f}", 100),
        ]
        for case in results
    ]
    print_table("The shortest interval at 3 %: medians (ranges)", head, lines)
    for cores in dict.fromkeys(case.group for case in results):
        _present_ratios(results, cores)


def _present_ratios(results: Results, cores: str) -> None:
    """How many times shorter ours is than the better Orbax, and what ours decides itself."""
    here = [f"{system}, {cores}" for system in SYSTEMS]
    here = [label for label in here if label in results and results[label].runs]
    ours = [label for label in here if label.startswith("cnr")]
    others = [label for label in here if label not in ours]
    best = min(others, key=lambda label: results[label].median("every"), default=None)
    for label in ours if best is not None else ():
        ratios = results.ratios(best, label, "every")
        text = f"{label}: times shorter than {best}, {spread(ratios, '{:.1f}')}"
        # Noise of half of what a save takes decides, not the save.
        both = (results[label], results[best])
        noisy = any(2 * c.median("noise_secs") > c.median("cost_secs") for c in both)
        found = math.nan if noisy else statistics.median(ratios)
        print_mark(text, found, TIMES, least=True)
    for label in ours:
        case = results[label]
        if not all("auto_every" in run for run in case.runs.values()):
            continue
        calls = ("idle_call_secs", "second_call_secs", "empty_call_secs")
        idle, second, empty = (case.text(key, "{:.1f}", 1e6) for key in calls)
        print(
            f"  {cores}: interval='auto' came to every {case.text('auto_every', '{:.0f}')} steps"
            f" with a slowdown of {case.text('auto_slowdown', '{:.1f}', 100)} %; a call"
            f" that does not save takes {idle} us, {second} at once again; an empty function takes"
            f" {empty} at its place"
        )


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present)
