"""One process of a run of two in a root that plain Orbax wrote."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from worker import Run, refused

import cnr_jax as cnr

# The others are not global, which plain Orbax does not save.
GLOBAL = ("params", "sharded", "replicated", "w", "step", "rate")


def part(run: Run) -> dict[str, Any]:
    """The part of a state that plain Orbax can save."""
    return {key: run.state[key] for key in GLOBAL}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    lines: list[str] = []

    old, truth = Run(), list[dict[str, np.ndarray]]()
    with ocp.CheckpointManager(args.root) as plain:
        for step in range(3):
            old.train(step)
            plain.save(step, args=ocp.args.StandardSave(part(old)))
            truth.append(old.values())
    if args.process == 0:
        for path in Path(args.root, "2").rglob("d/*"):
            path.write_bytes(b"")
    multihost_utils.sync_global_devices("damaged")

    run = Run()
    tables = cnr.find_tables(part(run), list(run.tables))
    options = cnr.Options(
        codec="raw",
        policy=cnr.Consecutive(),
        timeout_secs=120,
        adopt=True,
        preservation_policy=ocp.checkpoint_managers.LatestN(2),
    )

    def restore(manager: cnr.CheckpointManager) -> None:
        got, run.touched = manager.restore(None, args=cnr.args.Restore(part(run)))
        run.state = {**run.state, **got}

    def check(want: dict[str, np.ndarray]) -> None:
        for path, value in run.values().items():
            if path.split("'")[1] in GLOBAL:
                np.testing.assert_array_equal(value, want[path], err_msg=path)

    with cnr.CheckpointManager(args.root, tables=tables, options=options) as manager:
        early = cnr.args.Save(part(run), run.touched)
        lines.append(refused(lambda: manager.save(5, args=early)))
        # A state that process 1 alone gets wrong: both refuse, and go on together.
        bad = part(run)
        if args.process == 1:
            del bad["step"]
        asked = cnr.args.Restore(bad)
        lines.append(refused(lambda: manager.restore(1, args=asked)))
        restore(manager)
        check(truth[1])
        lines.append(f"restored {manager.latest_step()}, of {manager.all_steps()}")
        for step in (2, 3):
            run.train(step)
            assert manager.save(step, args=cnr.args.Save(part(run), run.touched))
            manager.wait_until_finished()
            lines.append(f"saved {manager.all_steps()}")
    saved = run.values()
    run.state = Run().state
    with cnr.CheckpointManager(args.root, tables=tables) as manager:
        restore(manager)
        check(saved)

    copy = f"{args.root}.old"
    with ocp.CheckpointManager(copy) as plain:
        plain.save(1, args=ocp.args.StandardSave(part(old)))
    names = [f"params/{name}" for name in tables]
    report = cnr.import_orbax(copy, f"{args.root}.new", names)
    lines.append(f"imported {report.step} {report.kind}")
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
