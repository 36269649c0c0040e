"""A training run of one process that is sent signals, or told when to save; started by tests.

It prints a line for each thing it does, and writes its last saved table beside the root.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import cnr_jax as cnr

ROWS = 256


@jax.jit
def train_step(
    state: dict[str, jax.Array], touched: cnr.Touched, ids: jax.Array
) -> tuple[dict[str, jax.Array], cnr.Touched]:
    """Changes a few rows."""
    touched = cnr.record(touched, {"user": ids})
    user = state["user"].at[ids].add(jnp.cos(state["user"][ids]))
    return {"user": user, "w": state["w"] + 1}, touched


class Run:
    """A table of two devices' rows and its manager."""

    def __init__(self, args: argparse.Namespace) -> None:
        rng = np.random.default_rng(0)
        values = rng.normal(size=(ROWS, 8)).astype(np.float32)
        self.state = {"user": jnp.asarray(values), "w": jnp.zeros(4)}
        self.tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.root, self.step, self.forks = args.root, -1, args.forks
        self.manager = cnr.CheckpointManager(
            args.root,
            tables=self.tables,
            options=cnr.Options(
                codec="raw", policy=cnr.Full(), save_on_sigterm=not args.asks
            ),
            orbax_options=ocp.CheckpointManagerOptions(
                save_interval_steps=1 if args.asks else 1000
            ),
        )

    def train(self) -> None:
        """One step."""
        self.step += 1
        ids = np.random.default_rng(self.step).integers(0, ROWS, 9).astype(np.int32)
        self.state, self.touched = train_step(self.state, self.touched, ids)

    def save(self) -> bool:
        """Saves if it is due."""
        args = cnr.args.Save(self.state, self.touched)
        return self.manager.save(self.step, args=args)

    def keep(self) -> None:
        """Writes what was saved last."""
        np.savez(f"{self.root}.npz", user=np.asarray(self.state["user"]))


def forks(count: int) -> None:
    """Starts processes that do nothing, as those that load data do most of the time."""
    context = multiprocessing.get_context("fork")
    for _ in range(count):
        context.Process(target=time.sleep, args=(600,)).start()


def trains_until_preempted(run: Run) -> None:
    """Trains until SIGTERM has led to a last save, and then hangs."""
    while True:
        run.train()
        saved = run.save()
        print(f"step {run.step}", flush=True)
        if run.manager.reached_preemption(run.step):
            assert saved
            run.keep()
            print(f"last {run.step}", flush=True)
            if run.forks:
                return  # and at its end the program waits for them
            time.sleep(600)
        time.sleep(0.05)


def saves_when_told(run: Run) -> None:
    """Saves a new step for each line it reads."""
    run.train()
    run.save()
    run.manager.wait_until_finished()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            return
        run.train()
        try:
            run.save()
            run.manager.wait_until_finished()
        except cnr.errors.SaveError as error:
            print(f"error errno={error.errno} {str(error).splitlines()[1]}", flush=True)
        else:
            run.keep()
            print(f"saved {run.step}", flush=True)


def main() -> None:
    """Runs what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--asks", action="store_true")
    parser.add_argument("--forks", type=int, default=0)
    args = parser.parse_args()
    run = Run(args)
    with run.manager:
        forks(args.forks)
        if args.asks:
            saves_when_told(run)
        else:
            trains_until_preempted(run)


if __name__ == "__main__":
    main()
