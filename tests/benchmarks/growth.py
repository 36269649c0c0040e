"""Restores into a state with more rows, against plain ones: seconds, and memory.

    python tests/benchmarks/growth.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32 with one float32 accumulator a row is saved on 8 devices, a full save
and a delta of 26 %, at 4 bits and exact. It is restored as it is; into 5 M rows, of which the last
million keep the values of the state; and with its rows in another order. Every process restores
once: imports and the manager come first, compiling what a restore needs is part of it. Files were
just read. Memory is what was resident at the peak beyond the state that is given and the one that
is returned. A full run makes 3 turns in about 10 minutes, a quick one takes 60 s.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import peers
import saved_runs
import workload
from checks import check_restored, check_same, first_check
from harness import Case, Figures, Results, middle, print_mark, print_table

DEVICES = 8
BITS = {"cnr-4bit": 4, "cnr-raw": None}
WAYS = ("plain", "grown", "other ids")
_MIB = 1 << 20
_OTHERS = 1  # seed of the state that is restored into


def plan(quick: bool) -> list[Case]:
    """Each way, at 4 bits and exact."""
    rows = 200_000 if quick else 4_000_000
    cases: list[Case] = []
    for name in ("cnr-4bit",) if quick else BITS:
        run = {"system": name, "rows": rows, "devices": DEVICES, "deltas": 1}
        for way in WAYS:
            params = {"run": {**run, "parts": False}, "way": way}
            cases.append(Case(f"{name}: {way}", params, name, peers.needs(name)))
    return cases


def child(params: dict[str, Any], root: Path) -> Figures:
    """Restores a run that was saved."""
    import jax

    import cnr_jax as cnr

    path = saved_runs.saved_run(params["run"], root)
    harness.devices(DEVICES)
    old, way = params["run"]["rows"], params["way"]
    rows = old * 5 // 4 if way == "grown" else old
    state = workload.table_state(rows, saved_runs.DIM, DEVICES, seed=_OTHERS)
    args = cnr.args.Restore(state)
    ids = np.arange(old)
    if way == "grown":
        args = cnr.args.Restore(state, partial=True)
        ids = np.append(ids, np.full(rows - old, -1))
    elif way == "other ids":
        ids = np.random.default_rng(0).permutation(old)
        args = cnr.args.Restore(state, ids={"table": ids})
    with cnr.CheckpointManager(path, tables=workload.tables_of(state)) as manager:
        for file in path.rglob("*"):
            if file.is_file():
                file.read_bytes()
        with harness.PeakMemory() as memory:
            start, cpu = time.perf_counter(), time.process_time()
            got = jax.block_until_ready(manager.restore(1, args=args).state)
            secs, cpu = time.perf_counter() - start, time.process_time() - cpu
    returned = sum(leaf.nbytes for leaf in jax.tree.leaves(got))
    extra = max(0, memory.extra_bytes - returned)
    if first_check(root, params):
        _check(params["run"], ids, state, got)
    return {"secs": secs, "cpu_secs": cpu, "extra_bytes": extra}


def _check(run: dict[str, Any], ids: np.ndarray, state: Any, got: Any) -> None:
    """Rows that were taken are what was saved, the others what was given."""
    want = saved_runs.truth(run)
    taken = ids >= 0
    for leaf in ("table", "slot"):
        rows = np.asarray(got[leaf])
        check_same(leaf, rows[~taken], np.asarray(state[leaf])[~taken])
        got[leaf], want[leaf] = rows[taken], np.asarray(want[leaf])[ids[taken]]
    check_restored(got, want, BITS[run["system"]])


def present(results: Results) -> None:
    """Tables and marks."""
    header = "restore", "s", "CPU s", "MiB beyond both states"
    for name in BITS:
        lines = [
            [
                case.label.partition(": ")[2],
                case.text("secs"),
                case.text("cpu_secs"),
                case.text("extra_bytes", "{:.0f}", 1 / _MIB),
            ]
            for case in results.group(name)
        ]
        if lines:
            print_table(f"{name}: medians (ranges)", header, lines)
    for name in BITS:
        plain, grown = f"{name}: plain", f"{name}: grown"
        if plain in results and grown in results:
            ratio = middle(results.ratios(grown, plain, "secs"))
            print_mark(f"{name}: time, grown to plain", ratio, 1.2)
            beyond = results[grown].median("extra_bytes") / _MIB
            print_mark(f"{name}: MiB beyond both states, grown", beyond, 512)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
