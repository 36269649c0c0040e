"""A program that saves to a root with a mirror, slowly copied to, and is killed; see tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bucket_program
import jax.numpy as jnp

import cnr_jax as cnr


def main(root: str, options: str, salt: int = 1, saves: int = 0) -> None:
    """Goes on from the newest step, and saves until it is ended; or so often, if told so."""
    state = bucket_program.first_state()
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    settings = cnr.Options(
        codec="raw",
        policy=cnr.Consecutive(max_chain=4),
        **eval(options),  # of the test that starts this
    )
    with cnr.CheckpointManager(root, tables=tables, options=settings) as manager:
        if manager.latest_step() is not None:
            state, touched = manager.restore(None, args=cnr.args.Restore(state))
            salts = bucket_program.check(state, int(state["step"]))
            print("restored", int(state["step"]), "by", *salts, flush=True)
            if "://" not in str(manager.directory):
                print("holds", *os.listdir(manager.directory), flush=True)
                print("lists", *manager.all_steps(), flush=True)
        print("ready", flush=True)
        left = saves
        while not saves or left:
            step, left = int(state["step"]) + 1, left - 1
            rows = bucket_program.rows_at(step)
            state = {
                "user": state["user"].at[rows].set(1000 * salt + step),
                "salts": state["salts"].at[step].set(salt),
                "step": jnp.array(step),
            }
            touched = cnr.record(touched, {"user": jnp.asarray(rows)})
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None
            print(f"saved {step} behind {report.mirror_lag_steps}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
