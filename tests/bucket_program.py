"""A program that saves step after step to a root, and is killed or raced; started by tests.

It goes on from the newest step. Each table tells which program changed it, and up to which step, so
that a state that was mixed of two is seen.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

import cnr_jax as cnr

ROWS = 64


def values_at(salts: list[int]) -> np.ndarray:
    """The table after steps that were made by these programs."""
    table = np.zeros((ROWS, 4), np.float32)
    for step, salt in enumerate(salts):
        table[rows_at(step)] = 1000 * salt + step
    return table


def rows_at(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, ROWS, 6)


def check(state: dict[str, np.ndarray], step: int) -> list[int]:
    """Makes sure that a state was saved at a step; returns which programs made the steps."""
    salts = [int(salt) for salt in np.asarray(state["salts"])[: step + 1]]
    np.testing.assert_array_equal(np.asarray(state["user"]), values_at(salts))
    assert int(np.asarray(state["step"])) == step
    return salts


def first_state() -> dict[str, jnp.ndarray]:
    return {
        "user": jnp.zeros((ROWS, 4)),
        "salts": jnp.full(4096, -1),
        "step": jnp.array(-1),
    }


def main(root: str, salt: int, saves: int, insists: bool) -> None:
    state = first_state()
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    with cnr.CheckpointManager(
        root,
        tables=tables,
        options=cnr.Options(codec="raw", policy=cnr.Consecutive(max_chain=4)),
        orbax_options=ocp.CheckpointManagerOptions(max_to_keep=3),
    ) as manager:
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(saves):
            if manager.latest_step() is not None and (insists or _ == 0):
                state, touched = manager.restore(None, args=cnr.args.Restore(state))
                check(state, int(state["step"]))
            step = int(state["step"]) + 1
            rows = rows_at(step)
            state = {
                "user": state["user"].at[rows].set(1000 * salt + step),
                "salts": state["salts"].at[step].set(salt),
                "step": jnp.array(step),
            }
            touched = cnr.record(touched, {"user": jnp.asarray(rows)})
            try:
                manager.save(step, args=cnr.args.Save(state, touched))
                manager.wait_until_finished()
                print(f"saved {step}", flush=True)
            except (
                cnr.errors.SaveError,
                cnr.errors.WriterError,
                cnr.errors.DependentsExistError,
                cnr.errors.UsedRootError,
                StepAlreadyExistsError,  # the other has saved it just now
            ) as error:
                print(f"failed {step} {type(error).__name__}", flush=True)
                if not insists:
                    raise
                manager.reload()
                if manager.latest_step() is None:
                    state, touched = first_state(), cnr.init_touched(state, tables)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "insists")
