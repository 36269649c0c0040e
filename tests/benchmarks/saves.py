"""What `side_by_side` measures in a process of its own: single saves, and runs of saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
import peers
import workload
from checks import check_restored, first_check
from harness import Figures

DIM = 64
POLICIES = ("Full", "OneShot", "Consecutive", "IncrementLog", "Intermittent")
BITS = {"cnr-2bit": 2, "cnr-4bit": 4, "cnr-4bit-zstd": 4, "cnr-8bit": 8}


def full_save(params: dict[str, Any], root: Path) -> Figures:
    """One full save of a system."""
    name = params["system"]
    system_type = peers.system_of(name)
    warm_up(name, root)
    state = workload.table_state(params["rows"], DIM)
    abstract = workload.abstract_of(state)
    touched = touched_for(name, state)
    state = system_type.prepare(state)
    system = peers.make(name, root / "run", state)
    figures = timed_save(system, 0, state, touched)
    if first_check(root, params):
        check_restored(system.restore(0, abstract), state, BITS.get(name))
    system.close()
    return figures


def delta_saves(params: dict[str, Any], root: Path) -> Figures:
    """A full save and deltas against each other, of ever more rows."""
    import jax

    import cnr_jax as cnr

    name, rows = params["system"], params["rows"]
    warm_up(name, root)
    state = workload.table_state(rows, DIM, wide_slots=params.get("wide", False))
    touched = touched_for(name, state)
    abstract = workload.abstract_of(state)
    system: Any = peers.make(
        name,
        root / "run",
        state,
        policy=cnr.Consecutive(),
        **params.get("options", {}),
    )
    figures: Figures = {"state.bytes": state_bytes(state)}
    system.save(0, state, touched)
    system.wait()
    for step, share in enumerate(params["shares"], 1):
        ids = workload.touched_rows(rows, share, seed=step)
        state, touched = workload.touch(state, touched, ids)
        # Neither its time nor its memory is the save's.
        jax.block_until_ready((state, touched))
        saved = timed_save(system, step, state, touched)
        report = system.manager.last_report
        assert report.kind == "delta" and report.rows == len(ids), report
        saved["table_bytes"] = report.table_bytes
        saved["slot_bytes"] = report.slot_bytes
        figures.update({f"{share:g}.{key}": value for key, value in saved.items()})
    last = len(params["shares"])
    if first_check(root, params):
        check_restored(system.restore(last, abstract), state, BITS.get(name))
    system.close()
    return figures


def run_of_saves(params: dict[str, Any], root: Path) -> Figures:
    """12 saves under a policy, of which the latest one is kept with what it rests on.

    Merges end between two saves. What they write counts apart, and to the capacity.
    """
    import orbax.checkpoint as ocp

    import cnr_jax as cnr

    latest = ocp.checkpoint_managers.LatestN(1)
    policy = params["policy"]
    name = "cnr-4bit" if policy in POLICIES else policy
    (root / "run").mkdir()
    options: dict[str, Any] = {"preservation_policy": latest}
    if policy in POLICIES:
        options["policy"] = getattr(cnr, policy)()
    state = workload.table_state(params["rows"], DIM)
    abstract = workload.abstract_of(state)
    touched = touched_for(name, state)
    system: Any = peers.make(name, root / "run", state, **options)
    lookups = workload.Popularity(params["rows"])
    written: list[int] = []
    steady: list[int] = []
    held: list[int] = []
    transient, fulls, merged = 0, 0, 0
    for step in range(12):
        if step:
            state, touched = workload.touch(state, touched, lookups.interval())
        system.save(step, state, touched)
        system.wait()
        size = harness.files_and_bytes(system.step_path(step))[1]
        report = system.manager.last_report if policy in POLICIES else None
        brought = report.merged_bytes if report else 0
        written.append(size - brought)
        merged += brought
        # What goes is deleted only after the new step is committed. A baseline is there before.
        transient = max(transient, written[-1] + (held[-1] if held else 0))
        if report is not None:
            fulls += report.kind == "full"
            steady.append(_bytes_of_steps(system.root))
            _wait_for_merge(system.manager)
        else:
            steady.append(harness.files_and_bytes(system.root)[1])
        held.append(harness.files_and_bytes(system.root)[1])
        transient = max(transient, held[-1])
    check_restored(system.restore(11, abstract), state, BITS.get(name))
    system.close()
    return {
        "written_bytes": sum(written),
        "merged_bytes": merged,
        "steady_bytes": max(steady),
        "transient_bytes": transient,
        "fulls": fulls if policy in POLICIES else 12,
        **{f"written.{i:02}": size for i, size in enumerate(written)},
        **{f"steady.{i:02}": size for i, size in enumerate(steady)},
    }


def _wait_for_merge(manager: Any) -> None:
    """Waits until no chain is being merged, as if training took long between two saves."""
    while manager._handler.lifecycle.merging.is_busy:
        time.sleep(0.05)


def _bytes_of_steps(root: Path) -> int:
    """Bytes of the committed steps of a root."""
    steps = (each for each in root.iterdir() if each.name.isdigit())
    return sum(harness.files_and_bytes(each)[1] for each in steps)


def warm_up(name: str, root: Path) -> None:
    """Saves a tiny state in `warm`, so that imports and first calls are behind a system."""
    state = workload.table_state(1000, DIM)
    touched = touched_for(name, state)
    state = peers.system_of(name).prepare(state)
    for folder in ("warm", "run"):
        (root / folder).mkdir()
    system = peers.make(name, root / "warm", state)
    system.save(0, state, touched)
    system.wait()
    system.close()


def touched_for(name: str, state: dict[str, Any]) -> Any:
    """Touched rows for systems that know them, else None."""
    if not name.startswith("cnr"):
        return None
    import cnr_jax as cnr

    return cnr.init_touched(state, workload.tables_of(state))


def timed_save(system: Any, step: int, state: Any, touched: Any) -> Figures:
    """Seconds until the call returns and until all is synced, memory, bytes and files."""
    with harness.PeakMemory() as memory:
        start = time.perf_counter()
        system.save(step, state, touched)
        returned = time.perf_counter()
        system.wait()
        durable = time.perf_counter()
    path = system.step_path(step)
    files, size = (1, path.stat().st_size)
    if path.is_dir():
        files, size = harness.files_and_bytes(path)
    return {
        "call_secs": returned - start,
        "secs": durable - start,
        "extra_bytes": memory.extra_bytes,
        "bytes": size,
        "files": files,
    }


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of all arrays."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))
