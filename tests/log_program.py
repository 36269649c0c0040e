"""Programs of a run by a log of increments, which are killed at random; started by tests.

`train` goes on from the newest step and saves, has chains merged, by a program elsewhere if its
salt is even, and keeps three steps. `read` restores the newest step again and again, and compares
it. `prune` deletes what is superfluous, as often as no manager may be saving.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bucket_program
import jax.numpy as jnp
import orbax.checkpoint as ocp

import cnr_jax as cnr


def train(root: str, salt: str, saves: str = "4000") -> None:
    state = bucket_program.first_state()
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    policy = cnr.IncrementLog(merge_at=2, elsewhere=int(salt) % 2 == 0)
    with cnr.CheckpointManager(
        root,
        tables=tables,
        options=cnr.Options(codec="raw", policy=policy),
        orbax_options=ocp.CheckpointManagerOptions(max_to_keep=3),
    ) as manager:
        if manager.latest_step() is not None:
            state, touched = manager.restore(None, args=cnr.args.Restore(state))
            bucket_program.check(state, int(state["step"]))
        print("ready", flush=True)
        for left in reversed(range(int(saves))):
            step = int(state["step"]) + 1
            rows = bucket_program.rows_at(step)
            state = {
                "user": state["user"].at[rows].set(1000 * int(salt) + step),
                "salts": state["salts"].at[step].set(int(salt)),
                "step": jnp.array(step),
            }
            touched = cnr.record(touched, {"user": jnp.asarray(rows)})
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None
            print(f"saved {step} {report.kind}", flush=True)
            # A merge that goes on at last ends before the last save.
            while left == 1 and manager._handler.lifecycle.merging.is_busy:
                time.sleep(0.02)
            time.sleep(0.2)


def read(root: str) -> None:
    state = bucket_program.first_state()
    options = ocp.CheckpointManagerOptions(read_only=True)
    print("ready", flush=True)
    while True:
        try:
            with cnr.CheckpointManager(
                root, tables=cnr.find_tables(state, ["user"]), orbax_options=options
            ) as manager:
                found = manager.restore(None, args=cnr.args.Restore(state)).state
        except cnr.errors.NoStepError as error:
            # Retention has removed the step while it was read, or the first is not there yet.
            print(f"none {error.kind}", flush=True)
            continue
        step = int(found["step"])
        bucket_program.check(found, step)
        print(f"read {step}", flush=True)


def prune(root: str) -> None:
    print("ready", flush=True)
    while True:
        try:
            plan = cnr.prune(root, keep=3, delete=True)
            print(f"pruned {len(plan.going)}", flush=True)
        except (cnr.errors.WriterError, cnr.errors.NoStepError) as error:
            print(f"refused {error.kind}", flush=True)
        time.sleep(0.3)


if __name__ == "__main__":
    {"train": train, "read": read, "prune": prune}[sys.argv[1]](*sys.argv[2:])
