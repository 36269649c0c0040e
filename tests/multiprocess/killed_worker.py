"""A process that trains and saves with several saves in flight until it is killed.

What a step changes depends on the step alone, so what it holds is known. Says in a line which
steps are durable.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import cnr_jax as cnr
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Call

ROWS, DIM = 64, 4
POLICIES = [cnr.Consecutive(max_chain=6), cnr.OneShot(), cnr.Intermittent()]


def change(values: np.ndarray, step: int) -> np.ndarray:
    """The rows of a step: sums of quarters, which are exact."""
    ids = np.random.default_rng(step).choice(ROWS, 5, replace=False)
    values[ids] += (step % 7 + 1) / 4
    return ids.astype(np.int32)


def main(root: str, most: int, seed: int) -> None:
    """Goes on from what is there, for ever."""
    faulthandler.dump_traceback_later(100, exit=True)
    chance = random.Random(seed)
    values = np.zeros((ROWS, DIM), np.float32)
    state = {"user": jnp.asarray(values), "step": jnp.int32(-1)}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        codec="raw",
        policy=POLICIES[seed % len(POLICIES)],
        max_in_flight=most,
        preservation_policy=ocp.checkpoint_managers.LatestN(3) if seed % 2 else None,
        on_save=lambda report: print(f"durable {report.step}", flush=True),
    )

    def late(call: Call) -> None:
        if call.call in ("open", "rename") and ".json" in call.path + call.to:
            time.sleep(chance.random() * 0.02)

    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        if manager.latest_step() is not None:
            state, touched = manager.restore(None, args=cnr.args.Restore(state))
        step = int(state["step"])
        print(f"from {step}", flush=True)
        values = np.array(state["user"])
        with inprocess.watching(root, before=late):
            while True:
                step += 1
                ids = jnp.asarray(change(values, step))
                touched = cnr.record(touched, {"user": ids})
                state = {"user": jnp.asarray(values.copy()), "step": jnp.int32(step)}
                assert manager.save(step, args=cnr.args.Save(state, touched))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(1)  # it does not come to this
