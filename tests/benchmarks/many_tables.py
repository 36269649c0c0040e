"""Many tables: seconds of a save's call and of a restore against Orbax; files; a manager's start.

    python tests/benchmarks/many_tables.py [--quick] [--json PATH] [--repeats N]

Tables of 800, 808, 816, ... rows of 16, 32 or 64 float32 in turn, each with one accumulator a
row: 716 MB in 2,000 leaves, each split by rows over all devices. Each delta holds distinct rows
of all tables that are 80 MB in memory. Beside it, Orbax saves the same state whole. A save is
over when all of it is synced. Then, the seconds to make a manager in a fresh process, with what
it compiles: for all tables, for all of them with the programs of an earlier process in jax's
compilation cache, for one table; and for a few tables encoded on their devices, as on a GPU.
What was saved last is restored and compared.

*In turns*: tables of one shape with an accumulator a row each, of which a share of the rows
changes; both save the same states, one after the other in one process, then both restore. A call
of `save` is what training waits for. `--only turns` measures these alone, in 3 minutes.

A full run makes 3 turns in about 30 minutes, a quick one takes 60 s.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import peers
import workload
from harness import (
    Case,
    Figures,
    PeakMemory,
    Results,
    files_and_bytes,
    print_mark,
    print_table,
)
from table_states import (
    BITS,
    CnrMany,
    change,
    check,
    find_tables,
    make_alike,
    make_state,
)

TABLES, QUICK_TABLES = 1000, 40
SAVERS = (("cnr", 8), ("orbax-uncompressed", 8), ("cnr", 1), ("orbax", 8))
SAVES = 3
# Tables, their rows and dim, devices, share of rows that change; and marks: seconds of a call and
# of a restore against Orbax's.
TURNS = 7
IN_TURNS: tuple[tuple[int, int, int, int, float, float | None, float | None], ...] = (
    (200, 5000, 32, 8, 0.05, 0.4, None),
    (200, 5000, 32, 1, 0.05, None, 0.25),
    (1000, 2000, 32, 1, 0.05, 0.4, 0.4),
    (26, 20_000, 32, 8, 0.05, 1.0, None),
    (1, 1_000_000, 64, 8, 0.01, 0.25, None),
)
_SHAPE = ("tables", "rows", "dim", "devices", "share", "call", "restore")


def plan(quick: bool) -> list[Case]:
    """Saves on 8 devices, ours on one too, and ways to make a manager."""
    count = QUICK_TABLES if quick else TABLES
    cases = []
    for name, devices in SAVERS[:2] if quick else SAVERS:
        label = f"{name}, {devices} device{'s' * (devices > 1)}"
        params = {"system": name, "tables": count, "devices": devices}
        # Its compression is not what a thousand tables cost it.
        cases.append(Case(label, params, group="save", once=name == "orbax"))
    for given in IN_TURNS:
        params = dict(zip(_SHAPE, given, strict=True))
        if quick and params["tables"] > QUICK_TABLES:
            continue
        label = (
            "{tables:,} x {rows:,} x {dim}, {devices} devices, {share:.0%}, in turns"
        )
        cases.append(Case(label.format(**params), params, group="turns"))
    host = {"devices": 8, "staging": "host", "cached": False}
    device = {**host, "staging": "device"}
    cases += [
        Case(f"{count} tables", {**host, "tables": count}, "ready"),
        Case(
            f"{count} tables, cached",
            {**host, "tables": count, "cached": True},
            group="ready",
        ),
        Case("1 table", {**host, "tables": 1}, "ready"),
    ]
    if not quick:
        cases += [
            Case("1 table, on the device", {**device, "tables": 1}, "ready", once=True),
            Case(
                "4 tables, on the device",
                {**device, "tables": 4},
                group="ready",
                once=True,
            ),
            Case(
                "4 tables, on the device, cached",
                {**device, "tables": 4, "cached": True},
                group="ready",
                once=True,
            ),
        ]
    return cases


def child(params: dict[str, Any], root: Path) -> Figures:
    """One system's saves, both in turns, or one manager made."""
    harness.devices(params["devices"])
    if "share" in params:
        return measure_in_turns(params, root)
    if "system" in params:
        return measure_saves(params, root)
    return measure_ready(params, root)


def measure_saves(params: dict[str, Any], root: Path) -> Figures:
    """A first save, then `SAVES` more; medians of these."""
    import jax

    import cnr_jax as cnr

    ours = params["system"] == CnrMany.name
    state = make_state(params["tables"])
    touched = cnr.init_touched(state, find_tables(state))
    system = CnrMany(root, state) if ours else peers.make(params["system"], root, state)
    runs: list[Figures] = []
    for step in range(1 + SAVES):
        if step:
            state, touched, changed = change(state, touched, step)
            jax.block_until_ready((state, touched))
        with PeakMemory() as memory:
            start = time.perf_counter()
            system.save(step, state, touched)
            called = time.perf_counter() - start
            system.wait()
        durable = time.perf_counter() - start
        files, size = files_and_bytes(system.step_path(step))
        found: Figures = {"call_secs": called, "durable_secs": durable, "files": files}
        runs.append({**found, "bytes": size, "extra_bytes": memory.extra_bytes})
    start = time.perf_counter()
    restored = system.restore(SAVES, workload.abstract_of(state))
    restore_secs = time.perf_counter() - start
    check(restored, state, BITS if ours else None)
    system.close()
    medians = {
        key: statistics.median(float(run[key]) for run in runs[1:]) for key in runs[0]
    }
    firsts = {f"first_{key}": value for key, value in runs[0].items()}
    return {
        **medians,
        **firsts,
        "changed_bytes": changed,
        "restore_secs": restore_secs,
    }


def measure_in_turns(params: dict[str, Any], root: Path) -> Figures:
    """Seconds of calls of `save`, and of restores, of both systems: medians."""
    import jax

    import cnr_jax as cnr

    state = make_alike(params["tables"], params["rows"], params["dim"])
    touched = cnr.init_touched(state, find_tables(state))
    # A restore reads two steps.
    systems = (
        CnrMany(root / "cnr", state, cnr.OneShot()),
        peers.make("orbax", root / "orbax", state),
    )
    calls: tuple[list[float], list[float]] = ([], [])
    restores: tuple[list[float], list[float]] = ([], [])
    for step in range(2 + TURNS):
        if step:
            state, touched, _ = change(state, touched, step, params["share"])
            jax.block_until_ready((state, touched))
        for found, system in zip(calls, systems, strict=True):
            gc.collect()
            start = time.perf_counter()
            system.save(step, state, touched)
            found.append(time.perf_counter() - start)
            system.wait()
    abstract = workload.abstract_of(state)
    for _ in range(1 + TURNS // 2):
        for found, system in zip(restores, systems, strict=True):
            gc.collect()
            start = time.perf_counter()
            jax.block_until_ready(system.restore(step, abstract))
            found.append(time.perf_counter() - start)
    for system in systems:
        system.close()
    # The first delta is the first that uses what it needs.
    call, of_orbax = (statistics.median(found[2:]) for found in calls)
    restore, orbax_restore = (statistics.median(found[1:]) for found in restores)
    return {
        "call_secs": call,
        "orbax_call_secs": of_orbax,
        "call_ratio": call / of_orbax,
        "restore_secs": restore,
        "orbax_restore_secs": orbax_restore,
        "restore_ratio": restore / orbax_restore,
    }


def measure_ready(params: dict[str, Any], root: Path) -> Figures:
    """Seconds to make a manager; with a filled cache, filled by a process before."""
    cache = Path(params.get("cache", root / "cache"))
    if params["cached"]:
        before = {**params, "cached": False, "cache": str(cache)}
        given = json.dumps({"params": before, "root": str(root)})
        command = [sys.executable, __file__, "--child", given]
        subprocess.run(command, check=True, capture_output=True)
    import jax

    import cnr_jax as cnr

    if params["cached"] or "cache" in params:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    programs: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    state = make_state(params["tables"])
    tables = find_tables(state)
    made_before = len(programs)
    start = time.perf_counter()
    options = cnr.Options(staging=params["staging"])
    with cnr.CheckpointManager(root / "run", tables=tables, options=options):
        secs = time.perf_counter() - start
    made = programs[made_before:]
    return {"ready_secs": secs, "programs": len(made), "compile_secs": sum(made)}


def present(results: Results) -> None:
    """Tables and marks."""
    header = ("save", "s of the call", "s until synced", "files", "MB", "extra MB")
    keys = (("call_secs", 1.0), ("durable_secs", 1.0), ("files", 1.0))
    sizes = (("bytes", 1e-6), ("extra_bytes", 1e-6))
    lines = []
    for case in results.group("save"):
        for first, what in (("first_", "first save"), ("", "later saves")):
            cells = [case.text(first + key, "{:.3f}", s) for key, s in keys[:2]]
            cells.append(case.text(first + "files", "{:.0f}"))
            cells += [case.text(first + key, "{:.1f}", s) for key, s in sizes]
            lines.append([f"{case.label}, {what}", *cells])
    print_table("Saves of all tables: medians (ranges)", header, lines)
    for case in results.group("save"):
        print(f"  {case.label}: restored in {case.text('restore_secs')} s")
        if case.params["system"] == CnrMany.name:
            seconds, files = case.median("durable_secs"), case.median("files")
            print_mark(f"{case.label}: s until synced", seconds, 1.0)
            print_mark(f"{case.label}: files", files, 40)
            for peer in ("orbax", "orbax-uncompressed"):
                other = case.label.replace(CnrMany.name, peer)
                if ratios := results.ratios(case.label, other, "durable_secs"):
                    print(f"  {case.label} against {peer}: {harness.spread(ratios)}")
    header = ("in turns", "s of the call", "Orbax's", "s of a restore", "Orbax's")
    keys = ("call_secs", "orbax_call_secs", "restore_secs", "orbax_restore_secs")
    lines = [
        [case.label, *(case.text(key, "{:.3f}") for key in keys)]
        for case in results.group("turns")
    ]
    print_table("Saves and restores in turns: medians (ranges)", header, lines)
    for case in results.group("turns"):
        for key in ("call", "restore"):
            ratio, most = case.median(f"{key}_ratio"), case.params[key]
            if most is not None:
                print_mark(f"{case.label}: {key} against Orbax", ratio, most)
    header = ("manager of", "s until ready", "programs", "s in XLA")
    lines = [
        [
            case.label,
            case.text("ready_secs"),
            case.text("programs", "{:.0f}"),
            case.text("compile_secs"),
        ]
        for case in results.group("ready")
    ]
    print_table("Making a manager, 8 devices: medians (ranges)", header, lines)
    for case in results.group("ready"):
        most = (
            2.0 if case.params["tables"] == 1 else 5.0 if "cached" in case.label else 30
        )
        print_mark(f"{case.label}: s until ready", case.median("ready_secs"), most)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
