"""Saves beside an input pipeline that wants all cores, and beside a reader of the disk.

    python tests/benchmarks/contention.py [--quick] [--json PATH] [--repeats N]

A table of 2 M x 64 with one accumulator a row, 10 % of the rows touched before each save, 4 bits,
against Orbax without compression. Beside the train steps there is

* *nothing*;
* *pipeline*: grain, with as many worker processes as there are cores. Each step takes its ids from
  it, and a batch costs so much work that the workers have no rest: steps wait for input;
* *reader*: a process that reads a file of 1 GB again and again, out of the page cache
  each time, so from the disk.

Each save is followed by steps until it is complete, at least ten. A step's time is that from
asking for its batch until its arrays are there. What was saved is restored and compared. A full
run makes 3 turns in about 10 minutes, a quick one takes 60 s.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import harness
import numpy as np
import peers
import workload
from checks import check_restored
from harness import Case, Figures, Results, print_table

DIM, BITS, SHARE = 64, 4, 0.1
SYSTEMS = {"cnr-4bit": BITS, "orbax-uncompressed": None}
BESIDE = ("nothing", "pipeline", "reader")
BATCH_ROWS = workload.BATCH_ROWS
# Numbers that a worker sorts for each batch: about 0.2 s of one core.
SORTED = 2_000_000


def plan(quick: bool) -> list[Case]:
    """Every system beside every other load; each once if quick."""
    rows = 200_000 if quick else 2_000_000
    params = {"rows": rows, "saves": 1 if quick else 2}
    params["file_bytes"] = 200_000_000 if quick else 1_000_000_000
    params["steps"] = 8 if quick else 20
    names = tuple(SYSTEMS)
    pairs = [(beside, name) for beside in BESIDE for name in names]
    if quick:
        pairs = list(zip(BESIDE[1:], names, strict=True))
    return [
        Case(
            f"{name}, {beside}",
            {**params, "system": name, "beside": beside},
            group=beside,
            needs=(*peers.needs(name), "grain"),
        )
        for beside, name in pairs
    ]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Steps and saves of one system beside one load."""
    harness.devices(1)
    beside = params["beside"]
    reading: AbstractContextManager[Any] = nullcontext()
    if beside == "reader":
        reading = disk_reader(root / "large", params["file_bytes"])
    with reading as bytes_read, batches(params["rows"], beside == "pipeline") as ids:
        trainer = Trainer(params["system"], params["rows"], ids)
        start, before = time.perf_counter(), bytes_read.value if bytes_read else 0
        found = measure(trainer, root / "run", params)
        if bytes_read:
            secs = time.perf_counter() - start
            found["read_bytes_per_sec"] = (bytes_read.value - before) / secs
    return found


class Work:
    """A batch of ids after the work of decoding it; runs in grain's workers."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __call__(self, number: int) -> np.ndarray:
        rng = np.random.default_rng(number)
        np.sort(rng.random(SORTED))
        return workload.batch_ids(self._rows, number % 1000)


@contextmanager
def batches(rows: int, busy: bool) -> Iterator[Iterator[np.ndarray]]:
    """Batches of ids: from a pipeline that keeps all cores busy, or ready made.

    Args:
        rows: of the table.
        busy: whether to use the pipeline.
    """
    if not busy:
        made = [workload.batch_ids(rows, number) for number in range(8)]
        yield (made[number % 8] for number in range(1 << 30))
        return
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # grain's workers ask for flags; there is no command line
    workers = len(os.sched_getaffinity(0))
    options = grain.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=1
    )
    source = grain.MapDataset.range(1 << 30).map(Work(rows)).to_iter_dataset()
    reader = iter(source.mp_prefetch(options))
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def disk_reader(path: Path, size: int) -> Iterator[Any]:
    """Reads a file from the disk in another process; yields how many bytes it has read."""
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
    harness.drop_cache(path.parent)
    context = multiprocessing.get_context("spawn")
    count = context.Value("q", 0)
    process = context.Process(target=read_for_ever, args=(path, count), daemon=True)
    process.start()
    try:
        while not count.value:
            time.sleep(0.01)
        yield count
    finally:
        process.kill()
        process.join()


def read_for_ever(path: Path, count: Any) -> None:
    """Reads a file over and over, and drops it from the page cache each time."""
    descriptor = os.open(path, os.O_RDONLY)
    while True:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        while data := os.read(descriptor, 4 << 20):
            count.value += len(data)


class Trainer:
    """A state, its donated train step, and where its batches come from."""

    def __init__(self, system: str, rows: int, ids: Iterator[np.ndarray]) -> None:
        import cnr_jax as cnr

        self.state = workload.table_state(rows, DIM)
        self.abstract = workload.abstract_of(self.state)
        self.touched, recorded = None, system.startswith("cnr")
        if recorded:
            self.touched = cnr.init_touched(self.state, workload.tables_of(self.state))
        # Batches look up rows of these alone, so that every delta has exactly them; and each
        # row once, lest rows that are looked up all the time vanish.
        self.rows = workload.touched_rows(rows, SHARE)
        self._ids = ids
        self._run = workload.make_step(recorded, products=20, sines=0)
        self.step()

    def touch(self) -> None:
        """Changes and records all rows of the share."""
        import jax

        self.state, self.touched = workload.touch(self.state, self.touched, self.rows)
        jax.block_until_ready(self.state)

    def step(self) -> float:
        """Seconds of a step and of the wait for its batch."""
        import jax

        start = time.perf_counter()
        first = int(next(self._ids)[0])
        ids = np.take(self.rows, first + np.arange(BATCH_ROWS), mode="wrap")
        self.state, self.touched = self._run(self.state, self.touched, ids)
        jax.block_until_ready((self.state, self.touched))
        return time.perf_counter() - start

    def host_copy(self) -> Any:
        """The state on the host, not as a view: that would keep steps from donating."""
        import jax

        return jax.tree.map(np.array, self.state)


def measure(trainer: Trainer, root: Path, params: dict[str, Any]) -> Figures:
    """Medians over saves: of the call, of completion, and of the steps meanwhile."""
    root.mkdir()
    name = params["system"]
    system = peers.make(name, root, trainer.state)
    system.save(0, trainer.state, trainer.touched)
    system.wait()
    runs: list[Figures] = []
    expected: Any = None
    for number in range(1, 1 + params["saves"]):
        trainer.touch()
        quiet = statistics.median(trainer.step() for _ in range(params["steps"]))
        if number == params["saves"]:
            expected = trainer.host_copy()
        found = save_beside_steps(system, trainer, number)
        steps = found["steps_until_complete"]
        slowdown = found["call_secs"] + found.pop("steps_secs") - steps * quiet
        runs.append({**found, "quiet_step_secs": quiet, "slowdown_secs": slowdown})
    restored = system.restore(params["saves"], trainer.abstract)
    check_restored(restored, expected, SYSTEMS[name])
    system.close()
    return {key: statistics.median(float(r[key]) for r in runs) for key in runs[0]}


def save_beside_steps(system: Any, trainer: Trainer, number: int) -> dict[str, Any]:
    """Saves, and trains on until the save is complete and at least ten steps are made."""
    start = time.perf_counter()
    system.save(number, trainer.state, trainer.touched)
    called, complete, steps = time.perf_counter() - start, None, []
    while complete is None or len(steps) < 10:
        steps.append(trainer.step())
        if complete is None and system.done():
            complete = time.perf_counter() - start
    system.wait()
    return {
        "call_secs": called,
        "complete_secs": complete,
        "busy_step_secs": statistics.median(steps),
        "slowest_step_secs": max(steps),
        "steps_until_complete": len(steps),
        "steps_secs": sum(steps),
    }


def present(results: Results) -> None:
    """One table, and ratios beside each load."""
    header = (
        *("save, beside", "ms of a step without a save", "with one", "slowest"),
        *("s of the call", "s until complete", "slowdown s until then", "read MB/s"),
    )
    lines = [
        [
            case.label,
            case.text("quiet_step_secs", "{:.1f}", 1e3),
            case.text("busy_step_secs", "{:.1f}", 1e3),
            case.text("slowest_step_secs", "{:.0f}", 1e3),
            case.text("call_secs", "{:.3f}"),
            case.text("complete_secs"),
            case.text("slowdown_secs"),
            case.text("read_bytes_per_sec", "{:.0f}", 1e-6),
        ]
        for case in results
    ]
    print_table("Steps and saves beside other work: medians (ranges)", header, lines)
    ours, orbax = SYSTEMS
    for beside in BESIDE:
        pair = (f"{ours}, {beside}", f"{orbax}, {beside}")
        ratios = results.ratios(*pair, "complete_secs")
        if ratios:
            told = harness.spread(ratios)
            print(f"  {beside}: s until complete against {orbax}: {told}")


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
