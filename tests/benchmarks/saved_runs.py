"""Saved runs that `restore.py` restores: each saved once, by a process of its own.

A run lies in a folder beside those of the single measurements and is kept until the benchmark
ends. What was saved can be made again (`truth`), so that what comes back can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import peers
import workload

DIM = 64
SHARE = 0.26
PARTS = 4


def saved_run(params: dict[str, Any], root: Path) -> Path:
    """Where a run lies; saves it first if nobody has.

    Args:
        params: `system`, `rows`, `devices`, `deltas` (saves after the full one, each of
            26 % of the rows), `parts` (whether it is of four tables) and `options`.
        root: the folder of the measurement; runs lie beside it.
    """
    key = json.dumps(params, sort_keys=True)
    path = root.parent / f"saved-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not path.exists():
        made = root / "run"
        made.mkdir()
        command = [sys.executable, __file__, key, str(made)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        made.rename(path)
    return path


def first_state(params: dict[str, Any]) -> dict[str, Any]:
    """The state of the full save."""
    rows, devices = params["rows"], params["devices"]
    if not params["parts"]:
        return workload.table_state(rows, DIM, devices)
    state: dict[str, Any] = {}
    for part in range(PARTS):
        made = workload.table_state(rows // PARTS, DIM, devices, seed=part)
        state[f"part{part}"] = {"table": made["table"], "slot": made["slot"]}
    return {**state, "dense": made["dense"]}


def tables_of(state: dict[str, Any]) -> Any:
    """The tables of a state, or of a part of one, each with its slot."""
    import cnr_jax as cnr

    if "table" in state:
        return workload.tables_of(state)
    return cnr.find_tables(
        state,
        {
            name: cnr.TableSpec(f"{name}/table", slots=[f"{name}/slot"])
            for name in state
            if name != "dense"
        },
    )


def truth(params: dict[str, Any]) -> dict[str, Any]:
    """The state of the last save, on one device: values do not depend on the mesh."""
    state = first_state({**params, "devices": 1})
    for step in range(1, params["deltas"] + 1):
        state, _ = workload.touch(state, None, _ids(params, step))
    return state


def _ids(params: dict[str, Any], step: int) -> Any:
    return workload.touched_rows(params["rows"], SHARE, seed=step)


def save(params: dict[str, Any], root: Path) -> None:
    """Saves a run under `root`."""
    state = first_state(params)
    if params["parts"]:
        _save_parts(params["system"], state, root)
        return
    ours = params["system"].startswith("cnr")
    options: dict[str, Any] = {}
    touched = None
    if ours:
        import cnr_jax as cnr

        touched = cnr.init_touched(state, tables_of(state))
        options = {"policy": cnr.Consecutive()}
    prepared = peers.system_of(params["system"]).prepare(state)
    system: Any = peers.make(params["system"], root, prepared, **options)
    system.save(0, prepared, touched)
    system.wait()
    for step in range(1, params["deltas"] + 1):
        state, touched = workload.touch(state, touched, _ids(params, step))
        system.save(step, state, touched)
        system.wait()
        assert system.manager.last_report.kind == "delta"
    system.close()


def _save_parts(name: str, state: dict[str, Any], root: Path) -> None:
    """One full save of four tables."""
    import orbax.checkpoint as ocp

    import cnr_jax as cnr

    if name.startswith("cnr"):
        with cnr.CheckpointManager(root, tables=tables_of(state)) as manager:
            manager.save(0, args=cnr.args.Save(state))
        return
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(root / "0" / "default", args=ocp.args.PyTreeSave(state))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    harness.devices(given["devices"])
    save(given, Path(sys.argv[2]))
    os.sync()
