"""Restores: warm and cold, fulls and chains, other meshes, some of the tables; peers.

    python tests/benchmarks/restore.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32 with one float32 accumulator a row (1.04 GB). A run is saved once; then
every process restores it once: imports and the manager come first, compiling what a restore
needs is part of it. Warm: all files were just read. Cold: the kernel was told to forget them.
The time ends when all arrays are ready; a first donated step follows and is timed by itself,
since on CPU it copies an array that shares memory with numpy's. Deltas are of 26 % of the rows,
each against the save before. A full run takes about 45 minutes, a quick one 60 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import peers
import saved_runs
import workload
from checks import check_restored
from harness import Case, Figures, Results, middle, print_mark, print_table

SYSTEMS = (
    *("cnr-4bit", "cnr-raw", "orbax-uncompressed", "orbax"),
    *("dcp-async", "torchsnapshot-async", "safetensors", "numpy"),
)
BITS = {"cnr-2bit": 2, "cnr-4bit": 4, "cnr-8bit": 8}
CHAINS = (0, 1, 4, 11)
PLAIN = "orbax-uncompressed"


def plan(quick: bool) -> list[Case]:
    """Peers warm and cold on one device and on 8, then what ours depends on."""
    rows = 200_000 if quick else 4_000_000
    make = partial(_case, rows)
    cases: list[Case] = []
    for devices in (1, 8):
        for cold in (False, True):
            for name in SYSTEMS:
                if _measured(name, devices, cold, quick):
                    cases.append(make("peers", name, devices=devices, cold=cold))
    for name in ("cnr-4bit",) if quick else ("cnr-4bit", "cnr-raw"):
        cases += [make("chains", name, deltas=n) for n in CHAINS]
    for name in ("cnr-4bit", PLAIN):
        cases += [make("meshes", name, devices=8, onto=onto) for onto in (2, 1)]
        cases.append(make("tables", name, parts=True))
    variants = {"unverified": {"verify_reads": False}, "audited": {"audit_saves": 10}}
    cases += [
        make("variants", "cnr-4bit", options=v, note=k) for k, v in variants.items()
    ]
    return cases


def _measured(name: str, devices: int, cold: bool, quick: bool) -> bool:
    if quick and (name not in ("cnr-4bit", PLAIN) or (cold and devices > 1)):
        return False
    return devices == 1 or name in ("cnr-4bit", PLAIN, "orbax")


def _case(
    rows: int,
    group: str,
    name: str,
    *,
    devices: int = 1,
    onto: int | None = None,
    cold: bool = False,
    deltas: int | None = None,
    parts: bool = False,
    options: dict[str, Any] | None = None,
    note: str = "",
) -> Case:
    """A case; those of this library are a full save and one delta, unless told otherwise."""
    if deltas is None:
        deltas = int(name.startswith("cnr") and not parts)
    run = {
        "system": name,
        "rows": rows,
        "devices": devices,
        "deltas": deltas,
        "parts": parts,
    }
    onto = onto or devices
    params = {"run": run, "onto": onto, "cold": cold, "options": options or {}}
    mesh = f"{devices} devices" if onto == devices else f"{devices} to {onto} devices"
    what = "1 of 4 tables" if parts else f"{deltas} deltas" if deltas != 1 else ""
    words = (name, mesh, what, "cold" if cold else "warm", note)
    label = f"{group}: {', '.join(word for word in words if word)}"
    return Case(label, params, group, peers.needs(name))


def child(params: dict[str, Any], root: Path) -> Figures:
    """Restores a run that was saved."""
    run = params["run"]
    path = saved_runs.saved_run(run, root)
    harness.devices(params["onto"])
    restore, step = _restorer(params, path)
    if params["cold"]:
        harness.drop_cache(path)
    else:
        _read_all(path)
    with harness.PeakMemory() as memory:
        cpu, start = time.process_time(), time.perf_counter()
        state = restore()
        secs, cpu = time.perf_counter() - start, time.process_time() - cpu
    start = time.perf_counter()
    state = step(state)
    first = time.perf_counter() - start
    checked = path.with_name(f"{path.name}-checked-{params['onto']}-{params['cold']}")
    if not checked.exists() or params["options"]:
        _check(run, state)
        checked.touch()
    return {
        "secs": secs,
        "cpu_secs": cpu,
        "step_secs": first,
        "extra_bytes": memory.extra_bytes,
    }


def _restorer(
    params: dict[str, Any], path: Path
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What restores and waits, and a donated step, compiled already."""
    run, onto = params["run"], params["onto"]
    name = run["system"]
    small = workload.table_state(8 * saved_runs.PARTS, saved_runs.DIM, onto)
    state = workload.abstract_of(small)
    rows = run["rows"] // (saved_runs.PARTS if run["parts"] else 1)
    for leaf in ("table", "slot"):
        shape = (rows, *state[leaf].shape[1:])
        state[leaf] = state[leaf].update(shape=shape)
    if run["parts"]:
        part = {"table": state["table"], "slot": state["slot"]}
        return _part_restorer(name, path, {"part1": part, "dense": state["dense"]})
    if peers.system_of(name).torch:
        system = peers.make(name, path, peers.system_of(name).prepare(small))
        return lambda: system.restore(0, {}), lambda state: state
    system = peers.make(name, path, state, **params["options"])
    return partial(_ready, system.restore, run["deltas"], state), _step(state)


def _part_restorer(
    name: str, path: Path, state: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Restores one of four tables."""
    import orbax.checkpoint as ocp

    import cnr_jax as cnr

    if name.startswith("cnr"):
        tables = saved_runs.tables_of(state)
        manager = cnr.CheckpointManager(path)
        args = cnr.args.Restore(state, tables=tables, partial=True)
        restored = partial(_ready, lambda: manager.restore(0, args=args).state)
        return restored, _step(state)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    given = ocp.checkpoint_utils.construct_restore_args(state)
    args = ocp.args.PyTreeRestore(state, restore_args=given, partial_restore=True)
    where = path / "0" / "default"
    return partial(_ready, checkpointer.restore, where, args=args), _step(state)


def _ready(restore: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import jax

    return jax.block_until_ready(restore(*args, **kwargs))


def _step(state: Any) -> Callable[[Any], Any]:
    """Changes an element of every array and back, in place where it can."""
    import jax

    def change(state: Any) -> Any:
        return jax.tree.map(lambda x: x.at[(0,) * x.ndim].multiply(1), state)

    compiled = jax.jit(change, donate_argnums=0).lower(state).compile()
    return partial(_ready, compiled)


def _check(run: dict[str, Any], got: Any) -> None:
    """Compares with what was saved; the dense part of torch's states is theirs."""
    want = saved_runs.truth(run)
    if peers.system_of(run["system"]).torch:
        want = peers.system_of(run["system"]).prepare(want)
    if run["parts"]:
        got, want = got["part1"], want["part1"]
    bits = 4 if run["parts"] and run["system"] == "cnr-4bit" else None
    check_restored(got, want, BITS.get(run["system"], bits))


def _read_all(path: Path) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            with Path(folder, name).open("rb") as file:
                while file.read(1 << 20):
                    pass


def present(results: Results) -> None:
    """Tables and marks."""
    header = "restore", "s", "CPU s", "extra MiB", "s of a first donated step"
    titles = {
        "peers": "A full save and, of this library, a delta of 26 %",
        "chains": "Chains: a full save and deltas of 26 % each, warm",
        "meshes": "Onto fewer devices, warm",
        "tables": "One of four tables, warm",
        "variants": "Without comparing with the manifest; with hashing for audits",
    }
    for group, title in titles.items():
        lines = [_line(case) for case in results.group(group)]
        print_table(f"{title}: medians (ranges)", header, lines)
    print("\nTime against Orbax without compression, run by run")
    for devices in (1, 8):
        for heat in ("warm", "cold"):
            ours = f"peers: cnr-4bit, {devices} devices, {heat}"
            plain = f"peers: {PLAIN}, {devices} devices, 0 deltas, {heat}"
            _mark(results, f"{devices} devices, {heat}", ours, plain)
    for case in results.group("meshes"):
        if case.params["run"]["system"] == "cnr-4bit":
            onto = case.params["onto"]
            plain = f"meshes: {PLAIN}, 8 to {onto} devices, 0 deltas, warm"
            _mark(results, f"8 to {onto} devices", case.label, plain)
    ours, plain = (
        f"tables: {name}, 1 devices, 1 of 4 tables, warm"
        for name in ("cnr-4bit", PLAIN)
    )
    _mark(results, "1 of 4 tables", ours, plain)


def _line(case: harness.Measured) -> list[str]:
    return [
        case.label.partition(": ")[2],
        case.text("secs"),
        case.text("cpu_secs"),
        case.text("extra_bytes", "{:.0f}", 1 / (1 << 20)),
        case.text("step_secs", "{:.3f}"),
    ]


def _mark(results: Results, what: str, ours: str, plain: str) -> None:
    ratio = middle(results.ratios(ours, plain, "secs"))
    print_mark(f"{what}, time of a full save and a delta", ratio, 0.3)
    if ours in results and plain in results:
        memory = middle(results.ratios(ours, plain, "extra_bytes"))
        print_mark(f"{what}, peak memory", memory, 1.0)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present)
