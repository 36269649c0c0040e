"""Single rows of a saved table: bytes read and time, against a restore of the table.

    python tests/benchmarks/read_rows.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32 with one float32 accumulator a row (1.04 GB), saved full at 4 bits and
exactly, and with four deltas of 26 % after it. Each process reads 100 rows of its last step, next
to each other or scattered over the table, or restores the table without its slot; all files were
just read, imports come first, and opening the root is part of it, as is compiling what rows are
decoded by. Jax has compiled another program before: it imports for that only then. Then the
process does the same once more: a program that serves rows compiles once. Bytes are those that it
asked the kernel for meanwhile. A full run makes 3 turns in about 10 minutes, a quick one takes
60 s.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import saved_runs
from harness import Case, Figures, Results, middle, print_mark, print_table
from restore import read_all

ROWS = 100
WHATS = ("restore", "adjacent", "scattered")
RUNS = {"full, 4 bits": ("cnr-4bit", 0), "full, exact": ("cnr-raw", 0)}
CHAIN = {"4 deltas, 4 bits": ("cnr-4bit", 4)}
LIMIT = 0.1


def plan(quick: bool) -> list[Case]:
    """A restore of the table, neighbours and scattered rows, of each run."""
    rows = 200_000 if quick else 4_000_000
    runs = RUNS if quick else RUNS | CHAIN
    return [
        Case(
            f"{name}: {what}",
            {
                "run": {
                    "system": system,
                    "rows": rows,
                    "devices": 1,
                    "deltas": deltas,
                    "parts": False,
                },
                "what": what,
            },
            name,
        )
        for name, (system, deltas) in runs.items()
        for what in WHATS
    ]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Reads rows, or restores the table, of a run that was saved."""
    path = saved_runs.saved_run(params["run"], root)
    harness.devices(1)
    read = _reader(params["what"], path, params["run"])
    _compile_anything()
    read_all(path)
    before, start = _bytes_asked_for(), time.perf_counter()
    read()
    first = time.perf_counter() - start
    asked = _bytes_asked_for() - before
    start = time.perf_counter()
    read()
    return {
        "first_secs": first,
        "secs": time.perf_counter() - start,
        "read_bytes": asked,
    }


def _reader(what: str, path: Path, run: dict[str, Any]) -> Any:
    import jax
    import numpy as np

    import cnr_jax as cnr

    rows, step = run["rows"], run["deltas"]
    if what != "restore":
        at = rows // 5 * 2 + np.arange(ROWS)
        if what == "scattered":
            at = np.random.default_rng(0).choice(rows, ROWS, replace=False)
        return partial(cnr.read_rows, path, "table", at, step)
    shape = (rows, saved_runs.DIM)

    def restore() -> None:
        with cnr.CheckpointManager(path) as manager:
            wanted = {"table": jax.ShapeDtypeStruct(shape, np.float32)}
            args = cnr.args.Restore(wanted, partial=True)
            jax.block_until_ready(manager.restore(step, args=args).state)

    return restore


def _compile_anything() -> None:
    import jax
    import jax.numpy as jnp

    jax.jit(jnp.sin)(1.0).block_until_ready()


def _bytes_asked_for() -> int:
    """Bytes that this process has read so far, by whichever call, from disk or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def present(results: Results) -> None:
    """Tables and marks."""
    header = "read", "MiB", "first s", "again s"
    for group in RUNS | CHAIN:
        lines = [
            [
                case.label.partition(": ")[2],
                case.text("read_bytes", "{:.1f}", 1 / (1 << 20)),
                case.text("first_secs", "{:.3f}"),
                case.text("secs", "{:.3f}"),
            ]
            for case in results.group(group)
        ]
        if lines:
            print_table(f"{group}: medians (ranges)", header, lines)
    print(f"\n{ROWS} rows next to each other, against a restore of the table")
    for group in RUNS | CHAIN:
        ours, theirs = (f"{group}: {what}" for what in ("adjacent", "restore"))
        if ours not in results or theirs not in results:
            continue
        for key, what in (("read_bytes", "bytes"), ("first_secs", "first time")):
            ratio = middle(results.ratios(ours, theirs, key))
            print_mark(f"{group}: {what}", ratio, LIMIT)
        again = middle(results.ratios(ours, theirs, "secs"))
        print(f"  {group}: time of another call: {again:.3g}")


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
