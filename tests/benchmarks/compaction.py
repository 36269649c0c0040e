"""Merging a chain without a train state: seconds, and memory, which is not to grow with the table.

    python tests/benchmarks/compaction.py [--quick] [--json PATH] [--repeats N]

A table of 8 M x 64 float32 (2 GB) with one float32 accumulator a row is saved, a full save and
four deltas of 26 % of its rows, each of which rests on the one before; once as codes of 4 bits,
once on a lattice, of whose deltas integers are added. Each process merges one chain, on the same
disk; imports come first, and some rows are compared with what `read_rows` gave before. A tenth of
it is merged too, to compare memory: what was resident at the peak, and how much of that is beyond
the start.
GB are those of the rows of the merged step as float32, seconds those of all cores together. Rows
that move are moved by a tenth of what they spread. A full run takes about 10 minutes and 8 GB of
disk, a quick one 60 s.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from checks import check_same
from harness import Case, Figures, Results, print_mark, print_table

DIM, DELTAS = 64, 4
_MIB, _GB = 1 << 20, 1e9
# In the name of a case, and what is saved so.
CODECS = {"adaptive": {"codec": "adaptive"}, "lattice": {"codec": "lattice"}}


def plan(quick: bool) -> list[Case]:
    """Two sizes of each codec."""
    most = 400_000 if quick else 8_000_000
    return [
        Case(f"{codec} {size}", {"codec": codec, "rows": rows}, codec)
        for codec in CODECS
        for size, rows in (("tenth", most // 10), ("whole", most))
    ]


def child(params: dict[str, Any], root: Path) -> Figures:
    """Saves a chain in a process of its own, then merges it here."""
    harness.devices(1)
    path = root / "run"
    command = [sys.executable, __file__, "--save", json.dumps(params), str(path)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    import cnr_jax as cnr
    from cnr_jax.repository.store import arrays  # noqa: F401

    rng = np.random.default_rng(1)
    ids = np.sort(rng.choice(params["rows"], 1000, replace=False))
    want = cnr.read_rows(path, "table", ids)
    planned = cnr.plan_compaction(path)
    with harness.PeakMemory() as memory:
        start, cpu = time.perf_counter(), time.process_time()
        done = planned.execute(writer_is_dead=True)
        secs, cpu = time.perf_counter() - start, time.process_time() - cpu
    check_same("table", cnr.read_rows(path, "table", ids), want)
    shutil.rmtree(path)
    return {
        "secs": secs,
        "gb_per_cpu_sec": params["rows"] * (DIM + 1) * 4 / _GB / cpu,
        "extra_bytes": memory.extra_bytes,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "before_bytes": done.restore_bytes,
        "after_bytes": done.merged_bytes,
    }


def save(params: dict[str, Any], path: Path) -> None:
    """Saves a chain."""
    harness.devices(1)
    import jax

    import cnr_jax as cnr

    rows, rng = params["rows"], np.random.default_rng(0)
    table = rng.normal(size=(rows, DIM)).astype(np.float32)
    slot = np.ones(rows, np.float32)

    def state() -> dict[str, Any]:
        return {"table": jax.device_put(table), "slot": jax.device_put(slot)}

    tables = cnr.find_tables(state(), {"table": cnr.TableSpec("table", slots=["slot"])})
    touched = cnr.init_touched(state(), tables)
    options = cnr.Options(policy=cnr.Consecutive(), **CODECS[params["codec"]])
    with cnr.CheckpointManager(path, tables=tables, options=options) as manager:
        for step in range(DELTAS + 1):
            manager.save(step, args=cnr.args.Save(state(), touched))
            manager.wait_until_finished()
            ids = np.sort(rng.choice(rows, int(rows * 0.26), replace=False))
            table[ids] += 0.1 * rng.standard_normal((len(ids), DIM), np.float32)
            slot[ids] += 1
            touched = cnr.record(touched, {"table": jax.device_put(ids)})


def present(results: Results) -> None:
    """A table and marks."""
    lines = [
        [
            case.label,
            case.text("before_bytes", "{:.0f}", 1 / _MIB),
            case.text("after_bytes", "{:.0f}", 1 / _MIB),
            case.text("secs"),
            case.text("gb_per_cpu_sec", "{:.2f}"),
            case.text("extra_bytes", "{:.0f}", 1 / _MIB),
            case.text("peak_bytes", "{:.0f}", 1 / _MIB),
        ]
        for case in results
    ]
    head = ("chain", "MiB before", "after", "s", "GB/s a core", "MiB more", "MiB peak")
    print_table("merged chains", head, lines)
    for case in results:
        if case.label.endswith("whole"):
            print_mark(
                f"{case.label}: GB/s", case.median("gb_per_cpu_sec"), 0.3, least=True
            )
            more = case.median("extra_bytes") / _MIB
            print_mark(f"{case.label}: MiB more", more, 512)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save(json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        harness.main(__doc__, plan, child, present, repeats=(1, 1))
