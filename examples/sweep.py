"""Three runs that begin at one checkpoint, each with a learning rate of its own.

    python examples/sweep.py

Each has a root of its own: a root belongs to one run. `restore(directory=...)` reads the
checkpoint of another root, and the first save in the new one is full.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import cnr_jax as cnr

ROWS, DIM = 10_000, 16
TARGET = jnp.sin(jnp.arange(DIM, dtype=jnp.float32))


@jax.jit
def train_step(state: dict, touched: cnr.Touched, ids: jax.Array, rate: float) -> tuple:
    touched = cnr.record(touched, {"item": ids})
    gradients = state["item"][ids] - TARGET
    loss = jnp.mean(gradients**2)
    return {"item": state["item"].at[ids].add(-rate * gradients)}, touched, loss


def train(
    manager: cnr.CheckpointManager,
    state: dict,
    touched: cnr.Touched,
    steps: range,
    rate: float,
) -> float:
    loss = jnp.inf
    for step in steps:
        ids = jax.random.randint(jax.random.key(step), (256,), 0, ROWS)
        state, touched, loss = train_step(state, touched, ids, rate)
        if step % 50 == 0:
            manager.save(step, args=cnr.args.Save(state, touched))
    manager.wait_until_finished()
    return float(loss)


def main() -> None:
    state = {"item": jax.random.normal(jax.random.key(0), (ROWS, DIM))}
    tables = cnr.find_tables(state, ["item"])
    options = cnr.Options(bits=8)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        with cnr.CheckpointManager(base, tables=tables, options=options) as manager:
            touched = cnr.init_touched(state, tables)
            train(manager, state, touched, range(1, 101), rate=0.1)

        losses = {}
        for rate in (0.01, 0.1, 0.5):
            root = Path(folder) / f"rate_{rate}"
            with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
                args = cnr.args.Restore(state)
                start, touched = manager.restore(100, directory=base, args=args)
                losses[rate] = train(manager, start, touched, range(101, 201), rate)
                print(
                    f"rate {rate}: loss {losses[rate]:.3f}, steps {manager.all_steps()}"
                )
    assert losses[0.5] < losses[0.1] < losses[0.01]


if __name__ == "__main__":
    main()
