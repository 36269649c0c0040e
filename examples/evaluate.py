"""A run that saves, and another process that evaluates one of its tables meanwhile.

    python examples/evaluate.py

The evaluator gives no tables and makes no state: it asks the checkpoint for shapes, and restores
what it wants. It changes nothing in the root, so it may come and go as it likes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

import cnr_jax as cnr

ROWS, LAST = 10_000, 60


@jax.jit
def train_step(state: dict, touched: cnr.Touched, ids: jax.Array) -> tuple:
    touched = cnr.record(touched, {"item": ids})
    item = state["item"].at[ids].add(1.0)
    return {"item": item, "w": state["w"] + 1.0}, touched


def train(root: str) -> None:
    """Saves every ten steps, and keeps the newest two."""
    state = {"item": jnp.zeros((ROWS, 16)), "w": jnp.zeros(3)}
    tables = cnr.find_tables(state, ["item"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", on_save=print)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(1, LAST + 1):
            ids = jax.random.randint(jax.random.key(step), (64,), 0, ROWS)
            state, touched = train_step(state, touched, ids)
            if step % 10 == 0:
                manager.save(step, args=cnr.args.Save(state, touched))
                time.sleep(0.5)


def evaluate(root: str, trainer: subprocess.Popen) -> None:
    """Looks at the newest step, whenever there is a new one, until the last has come."""
    seen = None
    with cnr.CheckpointManager(root) as evaluator:
        while seen != LAST and not trainer.poll():
            evaluator.reload()
            newest = evaluator.latest_step()
            if newest is None or newest == seen:
                time.sleep(0.1)
                continue
            try:
                there = evaluator.item_metadata(newest)["item"]
                wanted = {"item": jax.ShapeDtypeStruct(there.shape, there.dtype)}
                args = cnr.args.Restore(wanted, partial=True)
                item = evaluator.restore(newest, args=args).state["item"]
            except cnr.errors.NoStepError:
                continue  # The run has deleted it meanwhile.
            seen = newest
            print(
                f"evaluated step {seen}: {float(item.sum()) / 16:.0f} lookups",
                flush=True,
            )


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        trainer = subprocess.Popen([sys.executable, __file__, root])
        try:
            evaluate(root, trainer)
        finally:
            trainer.wait()
    assert trainer.returncode == 0


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
