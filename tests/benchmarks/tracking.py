"""What recording looked-up rows costs in a train step, and how much memory it takes.

    python tests/benchmarks/tracking.py [--quick] [--json PATH] [--repeats N]

A DLRM of 26 tables (`dlrm.py`), batches of 8,192 examples, so 212,992 ids a step. One percent
of a step is less than the noise of a step, so steps with and without `record` are paired: in
one process, on the same state, one after the other, in the order A B B A. The estimate is the
mean of the logarithms of the ratios of pairs, without the tenth at either end, and an interval
that holds it in 95 of 100 cases; seconds of the wall clock, and of all cores' work, which other
load disturbs less. Other processes run steps of one kind only. `record` alone, jitted and
donated, is timed beside. A full run makes 3 turns in about 15
minutes, a quick one takes 60 s.
"""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Case, Figures, Results, middle, print_mark, print_table

BATCHES = 8
TRIM = 0.1
# Half of an interval that tells one percent from none.
RESOLVED = 0.004
PAIRED, WITH, WITHOUT, ALONE = "paired", "with record", "without", "record alone"


def plan(quick: bool) -> list[Case]:
    """Paired steps, steps of one kind, and `record` alone."""
    size = {"largest": 1_000_000, "batch": 8192}
    if quick:
        size = {"largest": 30_000, "batch": 1024}
    pairs = 20 if quick else 120
    cases = [
        Case(PAIRED, {**size, "kind": PAIRED, "count": pairs}),
        Case(ALONE, {**size, "kind": ALONE, "count": 200}),
    ]
    # Each has to compile the network anew.
    kinds = () if quick else (WITH, WITHOUT)
    return cases + [Case(k, {**size, "kind": k, "count": 20}) for k in kinds]


def child(params: dict[str, Any], root: Path) -> Figures:
    """One kind of steps."""
    harness.devices(1)
    trainer = Trainer(params["largest"], params["batch"])
    kind, count = params["kind"], params["count"]
    if kind == PAIRED:
        return trainer.memory() | measure_pairs(trainer, count)
    if kind == ALONE:
        return measure_alone(trainer, count)
    trainer.compile(kind == WITH)
    seconds = [trainer.step(kind == WITH)[0] for _ in range(count)]
    return {"step_secs": statistics.median(seconds), "least_secs": min(seconds)}


class Trainer:
    """One state that steps with and without `record` go on with in turn."""

    def __init__(self, largest: int, batch: int) -> None:
        import dlrm

        import cnr_jax as cnr

        self._run = {recorded: dlrm.make_step(recorded) for recorded in (True, False)}
        self.state = dlrm.make_state(largest)
        self.touched = cnr.init_touched(self.state, dlrm.find_tables(self.state))
        self.batches = [dlrm.make_batch(largest, batch, i) for i in range(BATCHES)]
        self._next = 0

    def compile(self, recorded: bool) -> None:
        for _ in range(3):
            self.step(recorded)

    def step(self, recorded: bool) -> tuple[float, float]:
        """Seconds of one step by the clock, and of the work of all cores."""
        import jax

        batch = self.batches[self._next // 2 % BATCHES]  # both of a pair take the same
        self._next += 1
        work, start = time.process_time(), time.perf_counter()
        self.state, self.touched, loss = self._run[recorded](
            self.state, self.touched, batch
        )
        jax.block_until_ready((self.state, self.touched, loss))
        return time.perf_counter() - start, time.process_time() - work

    def memory(self) -> Figures:
        """Bytes of stamps, of tables with slots, and of the whole state."""
        import jax

        def size(tree: Any) -> int:
            return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

        tables = size(self.state["params"]) + size(self.state["opt_state"])
        return {
            "stamp_bytes": size(self.touched.stamps),
            "table_bytes": tables,
            "state_bytes": size(self.state),
        }


def measure_pairs(trainer: Trainer, count: int) -> Figures:
    """What `record` adds to a step, from `count` pairs of steps."""
    trainer.compile(True)
    trainer.compile(False)
    before = int(trainer.touched.clock)
    pairs = []
    for number in range(count):
        order = (True, False) if number % 2 else (False, True)
        times = {recorded: trainer.step(recorded) for recorded in order}
        pairs.append((*times[True], *times[False]))
    assert int(trainer.touched.clock) == before + count, "half of the steps record"
    with_wall, with_work, wall, work = np.array(pairs).T
    found: Figures = {
        "with_secs": float(np.median(with_wall)),
        "without_secs": float(np.median(wall)),
    }
    for name, ratios in (("wall", with_wall / wall), ("work", with_work / work)):
        share, error = added_share(ratios)
        found |= {f"{name}_added": share, f"{name}_error": error}
    return found


def added_share(ratios: np.ndarray) -> tuple[float, float]:
    """What the one kind takes longer than the other, and its standard error.

    Args:
        ratios: of the seconds of each pair.

    Returns:
        The trimmed mean of the logarithms; Yuen's error of it, from the winsorized variance.
    """
    logs = np.sort(np.log(ratios))
    cut = int(TRIM * len(logs))
    kept = logs[cut : len(logs) - cut]
    winsorized = np.clip(logs, kept[0], kept[-1])
    error = winsorized.std(ddof=1) / ((1 - 2 * TRIM) * math.sqrt(len(logs)))
    return float(kept.mean()), float(error)


def measure_alone(trainer: Trainer, count: int) -> Figures:
    """Seconds of a call of `record` that is jitted and donated."""
    import jax

    import cnr_jax as cnr

    record = partial(jax.jit, donate_argnums=0)(cnr.record)
    touched, seconds = trainer.touched, []
    for number in range(3 + count):
        ids = trainer.batches[number % BATCHES]["ids"]
        start = time.perf_counter()
        touched = jax.block_until_ready(record(touched, ids))
        seconds.append(time.perf_counter() - start)
    kept = seconds[3:]
    ids = sum(x.size for x in trainer.batches[0]["ids"].values())
    return {
        "record_secs": statistics.median(kept),
        "least_secs": min(kept),
        "ids": ids,
    }


def present(results: Results) -> None:
    """The estimates of all runs together, and marks."""
    if PAIRED in results and results[PAIRED].runs:
        present_pairs(results)
    lines = [
        [case.label, case.text(key, "{:.2f}", 1e3), case.text("least_secs", scale=1e3)]
        for case, key in (
            (results[label], "record_secs" if label == ALONE else "step_secs")
            for label in (WITH, WITHOUT, ALONE)
            if label in results
        )
    ]
    print_table("A process for each: ms, medians (ranges)", ("", "ms", "least"), lines)
    ratios = results.ratios(WITH, WITHOUT, "step_secs")
    print(f"  with record against without: {harness.spread(ratios, '{:.4f}')}")


def present_pairs(results: Results) -> None:
    """The added share of a step with its interval, and memory."""
    case = results[PAIRED]
    lines = []
    for name, what in (("wall", "wall clock"), ("work", "work of all cores")):
        values, errors = case.values(f"{name}_added"), case.values(f"{name}_error")
        mean = statistics.mean(values)
        half = 1.96 * math.sqrt(sum(e * e for e in errors)) / len(errors)
        low, high = (100 * math.expm1(mean + sign * half) for sign in (-1, 1))
        lines.append(
            [what, f"{100 * math.expm1(mean):+.2f} %", f"{low:+.2f}, {high:+.2f}"]
        )
        if half > RESOLVED:
            print(f"  not resolved by the {what}: 1 % is within the noise of few pairs")
        else:
            print_mark(f"share of a step, %, by the {what}", 100 * mean, 1.0)
    pairs = case.params["count"] * len(case.runs)
    step = case.text("without_secs", "{:.1f}", 1e3)
    print_table(
        f"record adds to a step of {step} ms; {pairs} pairs of steps",
        ("seconds of", "estimate", "95 % interval"),
        lines,
    )
    stamps = middle(case.values("stamp_bytes"))
    for name in ("table", "state"):
        share = stamps / middle(case.values(f"{name}_bytes"))
        print(f"  stamps: {stamps / 1e6:.1f} MB, {share:.2%} of the {name}s' bytes")


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
