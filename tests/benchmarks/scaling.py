"""How the time of a delta grows with the table, with devices and with processes.

    python tests/benchmarks/scaling.py [--quick] [--json PATH] [--repeats N]

A table of dim 16 with one accumulator a row, 4 bits, deltas against a full save.

* *rows*: 40,000 rows touched, of tables of 1 M to 64 M rows; recorded, and found by
  fingerprints, which read all rows.
* *share*: one percent of the rows touched, of growing tables.
* *devices*: 40,000 of 4 M rows on 1, 2 and 8 devices, which share this machine's cores.
* *processes*: the same on 4 devices that belong to 1, 2 or 4 processes.

Seconds are those of the call, and until all files are synced, as process 0 sees it. What was
saved last is restored and compared, for tables of up to 16 M rows. A full run makes 3 turns, the
largest table takes part in the first alone, in about 10 minutes and 12 GB of memory; a quick one
takes 60 s.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import processes
import workload
from harness import (
    Case,
    Figures,
    PeakMemory,
    Results,
    files_and_bytes,
    middle,
    print_mark,
    print_table,
    sync_tree,
)

DIM, BITS = 16, 4
TOUCHED_ROWS = 40_000
SAVES = 5
CHECKED_ROWS = 1 << 24
GROUPS = {
    "rows": "40,000 rows touched, growing table",
    "fingerprints": "the same, found by fingerprints",
    "share": "1 % touched, growing table",
    "devices": "40,000 rows touched, more devices",
    "processes": "the same, 4 devices in more processes",
}


def plan(quick: bool) -> list[Case]:
    """Sizes, devices and processes."""
    million = 1 << 20
    sizes = (
        (million // 4, million) if quick else tuple(million * 4**i for i in range(4))
    )
    middling = million // 4 if quick else 4 * million
    spans = (4,) if quick else (1, 2, 8)
    ends = sizes[1:] if quick else sizes[:3:2]
    cases = [_case("rows", f"{n >> 10} k rows", rows=n) for n in sizes]
    cases += [
        _case("fingerprints", f"{n >> 10} k rows", rows=n, tracking="fingerprint")
        for n in ends
    ]
    cases += [
        _case("share", f"{n >> 10} k rows", rows=n, touched=n // 100) for n in ends
    ]
    cases += [
        _case("devices", f"{n} device(s)", rows=middling, devices=n) for n in spans
    ]
    counts = (2,) if quick else (1, 2, 4)
    cases += [
        _case("processes", f"{n} process(es)", rows=middling, devices=4, processes=n)
        for n in counts
    ]
    return cases


def _case(group: str, label: str, **params: Any) -> Case:
    given = {"touched": TOUCHED_ROWS, "tracking": "recorded", "devices": 1}
    given |= {"processes": 1, **params}
    return Case(f"{group}, {label}", given, group, once=given["rows"] > CHECKED_ROWS)


def child(params: dict[str, Any], root: Path) -> Figures:
    """Deltas of one table; of process 0 where there are several."""
    count = params["processes"]
    if count > 1 and "process" not in params:
        return processes.run_together(__file__, params, root, count)[0]
    processes.join(params, params["devices"] // count)
    return measure(params, root)


def make_state(rows: int, devices: int) -> workload.State:
    """A state like `workload.table_state`'s, made without temporary arrays of its size."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    by_rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    @partial(jax.jit, out_shardings={"table": by_rows, "slot": by_rows, "dense": whole})
    def make() -> workload.State:
        row = jax.lax.broadcasted_iota(jnp.float32, (rows, DIM), 0)
        column = jax.lax.broadcasted_iota(jnp.float32, (rows, DIM), 1)
        values = 0.01 * jnp.sin(row * 0.37 + column * (1.7 + row * 1e-4))
        slot = 1 + jnp.arange(rows, dtype=jnp.float32) * 1e-6
        dense = {"kernel": jnp.ones((64, 64)), "step": jnp.int32(0)}
        return {"table": values, "slot": slot, "dense": dense}

    return jax.block_until_ready(make())


def measure(params: dict[str, Any], root: Path) -> Figures:
    """Medians over `SAVES` deltas, each of the same rows, against one full save."""
    import jax

    import cnr_jax as cnr

    state = make_state(params["rows"], params["devices"])
    tables, touched = workload.tables_of(state), None
    if params["tracking"] == "recorded":
        touched = cnr.init_touched(state, tables)
    ids = workload.touched_rows(params["rows"], params["touched"] / params["rows"])
    options = cnr.Options(policy=cnr.OneShot(), bits=BITS)
    runs: list[Figures] = []
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(1 + SAVES):
            if step:
                state, touched = workload.touch(state, touched, ids)
                jax.block_until_ready((state, touched))
            runs.append(timed_save(manager, root, step, state, touched))
            assert manager.last_report.rows == (len(ids) if step else params["rows"])
        if params["rows"] <= CHECKED_ROWS:
            abstract = cnr.args.Restore(workload.abstract_of(state))
            check(manager.restore(SAVES, args=abstract).state, state)
    found = {k: statistics.median(float(r[k]) for r in runs[1:]) for k in runs[0]}
    return {**found, "full_durable_secs": runs[0]["durable_secs"]}


def timed_save(
    manager: Any, root: Path, step: int, state: Any, touched: Any
) -> Figures:
    """Seconds and bytes of one save."""
    import cnr_jax as cnr

    with PeakMemory() as memory:
        start = time.perf_counter()
        manager.save(step, args=cnr.args.Save(state, touched))
        called = time.perf_counter() - start
        manager.wait_until_finished()
        sync_tree(root / str(step))
    durable = time.perf_counter() - start
    files, size = files_and_bytes(root / str(step))
    found: Figures = {"call_secs": called, "durable_secs": durable, "files": files}
    return {**found, "bytes": size, "extra_bytes": memory.extra_bytes}


def check(got: Any, want: Any) -> None:
    """Compares where the arrays are: rows within 1.5 steps of the codec, slots exactly."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def compare(got: Any, want: Any) -> tuple[jax.Array, jax.Array]:
        table = want["table"]
        step = (table.max(axis=1) - table.min(axis=1)) / (2**BITS - 1)
        off = jnp.abs(got["table"] - table).max(axis=1)
        # A row without a range has no steps: it must be exact.
        steps = jnp.where(off == 0, 0, off / step)
        return steps.max(), jnp.all(got["slot"] == want["slot"])

    off, same = compare(got, want)
    assert 0 < float(off) <= 1.5, f"rows are off by {float(off):.2f} steps"
    assert bool(same), "slots differ"


def present(results: Results) -> None:
    """A table for each question, and the mark."""
    header = (
        *("", "s of the call", "s until synced", "MB", "files", "extra MB"),
        "full save: s",
    )
    for group, title in GROUPS.items():
        cases = results.group(group)
        lines = [
            [
                case.label.partition(", ")[2],
                case.text("call_secs", "{:.3f}"),
                case.text("durable_secs", "{:.3f}"),
                case.text("bytes", "{:.2f}", 1e-6),
                case.text("files", "{:.0f}"),
                case.text("extra_bytes", "{:.0f}", 1e-6),
                case.text("full_durable_secs"),
            ]
            for case in cases
        ]
        print_table(f"{title}: medians (ranges)", header, lines)
        if len(cases) > 1:
            ends = cases[-1].label, cases[0].label
            for key in ("call_secs", "durable_secs"):
                grown = results.ratios(*ends, key)
                print(f"  {key}, last against first: {harness.spread(grown)}")
                if group == "rows" and key == "durable_secs":
                    times = cases[-1].params["rows"] // cases[0].params["rows"]
                    print_mark(f"grows, at {times} x the rows", middle(grown), 3.0)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
