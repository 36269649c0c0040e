"""One process of a run of two that is killed again and again; trains, saves, says how far it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "multiprocess"), str(TESTS.parent)]

# The run that the tests of several processes train.
import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from systems import most_in_flight  # noqa: E402
from worker import Run  # noqa: E402

import cnr_jax as cnr  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop", type=int, required=True)
    args = parser.parse_args()
    if args.processes > 1:
        address = f"127.0.0.1:{args.port}"
        jax.distributed.initialize(address, args.processes, args.process)
    run = Run()
    if args.root is None:
        for step in range(args.stop):
            run.train(step)
    else:
        train_and_save(run, args.root, args.stop)
    values = run.values()
    if args.process == 0:
        np.savez(args.out, **values)


def train_and_save(run: Run, root: Path, stop: int) -> None:
    """Goes on from the newest step, and saves after every step."""
    options = cnr.Options(
        codec="raw",
        policy=cnr.Intermittent(),
        max_in_flight=most_in_flight(),
        preservation_policy=ocp.checkpoint_managers.LatestN(2),
    )
    with cnr.CheckpointManager(root, tables=run.tables, options=options) as manager:
        first, newest = 0, manager.latest_step()
        if newest is not None:
            args = cnr.args.Restore(run.state)
            run.state, run.touched = manager.restore(None, args=args)
            first = int(run.state["step"]) + 1
        print("goes on at", first, flush=True)
        for step in range(first, stop):
            run.train(step)
            manager.save(step, args=cnr.args.Save(run.state, run.touched))


if __name__ == "__main__":
    main()
