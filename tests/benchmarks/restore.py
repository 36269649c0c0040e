"""Restores: warm and cold, chains, another mesh, some of the tables; against Orbax.

    python tests/benchmarks/restore.py [--quick] [--json PATH] [--repeats N]

A table of 4 M x 64 float32 with one float32 accumulator a row (1.04 GB). A run is saved once; then
every process restores one step of it: imports and the manager come first, compiling what a
restore needs is part of it. Warm: all files were just read. Cold: the kernel was told to forget
them. The time ends when all arrays are ready. The first donated step after it is timed by itself
and added: on CPU it copies every array that shares memory with numpy's, which later ones do not.
Deltas are of 26 % of the rows, each against the save before. A full run makes 3 turns in about
10 minutes, a quick one takes 60 s.
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
from checks import check_restored, first_check
from harness import Case, Figures, Results, middle, print_mark, print_table, spread

BITS = {"cnr-4bit": 4, "cnr-4bit-zstd": 4}
OURS, PLAIN = "cnr-4bit", "orbax-uncompressed"
CHAINS = (0, 4, 11)
DEVICES, FEWER = 8, 2
TITLES = {
    "peers": "A full save and, of this library, a delta of 26 %",
    "chains": "A full save and deltas of 26 % each, warm",
    "meshes": f"Saved on {DEVICES} devices, restored onto {FEWER}, warm",
    "tables": f"One of {saved_runs.PARTS} tables, warm",
}


def plan(quick: bool) -> list[Case]:
    """Ours and Orbax on one device, then what ours depends on."""
    make = partial(_case, 200_000 if quick else 4_000_000)
    chains = CHAINS[1:2] if quick else CHAINS
    # One run has all chains: its first steps are the shorter ones.
    ours = partial(make, name=OURS, saved=max(chains))
    cases = [ours("peers"), make("peers", PLAIN)]
    if not quick:
        cases += [ours("peers", cold=True), make("peers", PLAIN, cold=True)]
        cases.append(make("peers", "cnr-raw"))
        cases.append(make("peers", "orbax", once=True))
        cases.append(make("peers", "cnr-4bit-zstd", once=True))
    cases += [ours("chains", deltas=count) for count in chains]
    for name in (OURS,) if quick else (OURS, PLAIN):
        cases.append(make("meshes", name, devices=DEVICES, onto=FEWER))
        cases.append(make("tables", name, parts=True))
    return cases


def _case(
    rows: int,
    group: str,
    name: str,
    *,
    devices: int = 1,
    onto: int = 1,
    cold: bool = False,
    deltas: int | None = None,
    saved: int | None = None,
    parts: bool = False,
    once: bool = False,
) -> Case:
    """A case; those of this library are a full save and one delta, unless told otherwise.

    Args:
        rows: of the table.
        group: of the case.
        name: of the system.
        devices: that it was saved on.
        onto: devices that it is restored onto.
        cold: whether files are read from the disk.
        deltas: that the step rests on, its own included.
        saved: deltas of the run, if there are later ones.
        parts: whether it is one of several tables.
        once: see `Case`.
    """
    if deltas is None:
        deltas = int(name.startswith("cnr") and not parts)
    saved = deltas if saved is None else saved
    run = {"system": name, "rows": rows, "devices": devices, "deltas": saved}
    params = {"run": {**run, "parts": parts}, "step": deltas, "onto": onto}
    what = f", {deltas} deltas" if group == "chains" else ""
    label = f"{group}: {name}{what}, {'cold' if cold else 'warm'}"
    return Case(label, {**params, "cold": cold}, group, peers.needs(name), once)


def child(params: dict[str, Any], root: Path) -> Figures:
    """Restores a run that was saved."""
    path = saved_runs.saved_run(params["run"], root)
    harness.devices(params["onto"])
    restore, step = _restorer(params, path)
    if params["cold"]:
        harness.drop_cache(path)
    else:
        read_all(path)
    with harness.PeakMemory() as memory:
        cpu = time.process_time()
        state, secs = _timed(restore)
        cpu = time.process_time() - cpu
    with harness.PeakMemory() as copied:
        state, first = _timed(step, state)
    state, second = _timed(step, state)
    if first_check(root, {**params, "cold": None}):
        _check(params, state)
    return {
        "secs": secs,
        "cpu_secs": cpu,
        "first_step_secs": first,
        "second_step_secs": second,
        "stepped_secs": secs + first,
        "extra_bytes": memory.extra_bytes,
        "first_step_extra_bytes": copied.extra_bytes,
    }


def _timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    import jax

    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - start


def _restorer(
    params: dict[str, Any], path: Path
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """What restores, and a donated step, compiled already."""
    run, onto = params["run"], params["onto"]
    small = workload.table_state(8 * saved_runs.PARTS, saved_runs.DIM, onto)
    state = workload.abstract_of(small)
    rows = run["rows"] // (saved_runs.PARTS if run["parts"] else 1)
    for leaf in ("table", "slot"):
        shape = (rows, *state[leaf].shape[1:])
        state[leaf] = state[leaf].update(shape=shape)
    if run["parts"]:
        part = {"table": state["table"], "slot": state["slot"]}
        state = {"part1": part, "dense": state["dense"]}
        return _part_restorer(run["system"], path, state), _step(state)
    system = peers.make(run["system"], path, state)
    return partial(system.restore, params["step"], state), _step(state)


def _part_restorer(name: str, path: Path, state: dict[str, Any]) -> Callable[[], Any]:
    """Restores one of several tables."""
    import orbax.checkpoint as ocp

    import cnr_jax as cnr

    if name.startswith("cnr"):
        tables = saved_runs.tables_of(state)
        manager = cnr.CheckpointManager(path)
        args = cnr.args.Restore(state, tables=tables, partial=True)
        return lambda: manager.restore(0, args=args).state
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    given = ocp.checkpoint_utils.construct_restore_args(state)
    args = ocp.args.PyTreeRestore(state, restore_args=given, partial_restore=True)
    return partial(checkpointer.restore, path / "0" / "default", args=args)


def _step(state: Any) -> Callable[[Any], Any]:
    """A train step that changes an element of every array to itself, in place if it can."""
    import jax

    def change(state: Any) -> Any:
        return jax.tree.map(lambda x: x.at[(0,) * x.ndim].multiply(1), state)

    return jax.jit(change, donate_argnums=0).lower(state).compile()


def _check(params: dict[str, Any], got: Any) -> None:
    """Compares with what was saved."""
    run = params["run"]
    want = saved_runs.truth({**run, "deltas": params["step"]})
    if run["parts"]:
        got, want = got["part1"], want["part1"]
    check_restored(got, want, BITS.get(run["system"]))


def read_all(path: Path) -> None:
    """Reads all files, so that they are in memory."""
    for folder, _, names in os.walk(path):
        for name in names:
            with Path(folder, name).open("rb") as file:
                while file.read(1 << 20):
                    pass


def present(results: Results) -> None:
    """Tables and marks."""
    header = "restore", "s", "CPU s", "extra MiB", "first step s", "MiB", "later step s"
    for group, title in TITLES.items():
        lines = [_line(case) for case in results.group(group)]
        print_table(f"{title}: medians (ranges)", header, lines)
    print("\nAgainst Orbax without compression, run by run")
    for group in ("peers", "meshes", "tables"):
        for heat in ("warm", "cold"):
            ours, plain = (f"{group}: {name}, {heat}" for name in (OURS, PLAIN))
            if ours in results and plain in results:
                _marks(results, f"{group}, {heat}", ours, plain)


def _line(case: harness.Measured) -> list[str]:
    return [
        case.label.partition(": ")[2],
        case.text("secs"),
        case.text("cpu_secs"),
        case.text("extra_bytes", "{:.0f}", 1 / (1 << 20)),
        case.text("first_step_secs", "{:.3f}"),
        case.text("first_step_extra_bytes", "{:.0f}", 1 / (1 << 20)),
        case.text("second_step_secs", "{:.3f}"),
    ]


def _marks(results: Results, what: str, ours: str, plain: str) -> None:
    ratio = middle(results.ratios(ours, plain, "secs"))
    print_mark(f"{what}: time of a restore", ratio, 0.3)
    stepped = spread(results.ratios(ours, plain, "stepped_secs"))
    print(f"  {what}: time of a restore and the first step: {stepped}")
    memory = middle(results.ratios(ours, plain, "extra_bytes"))
    print_mark(f"{what}: peak memory", memory, 1.0)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
