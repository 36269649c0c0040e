"""The lines that matter: record look-ups, save every few steps, restore.

    python examples/quickstart.py

One table of 100,000 rows, trained by SGD on the rows that a batch looks up. The first
save is a full one; the next ones hold only the rows that changed, in 4 bits.
"""

from __future__ import annotations

import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import cnr_jax as cnr

ROWS, DIM, BITS, RATE = 100_000, 32, 4, 0.5
TARGET = jnp.sin(jnp.arange(DIM, dtype=jnp.float32))


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(state: dict, touched: cnr.Touched, ids: jax.Array) -> tuple:
    touched = cnr.record(touched, {"item": ids})
    gradients = state["item"][ids] - TARGET
    item = state["item"].at[ids].add(-RATE * gradients / len(ids))
    return {"item": item, "step": state["step"] + 1}, touched


def main() -> None:
    rng = np.random.default_rng(0)
    item = jax.random.normal(jax.random.key(0), (ROWS, DIM))
    state = {"item": item, "step": jnp.int32(0)}
    abstract = jax.eval_shape(lambda: state)

    tables = cnr.find_tables(state, ["item"])
    touched = cnr.init_touched(state, tables)
    print(tables)

    with tempfile.TemporaryDirectory() as root:
        options = cnr.Options(bits=BITS, on_save=print)
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            for step in range(1, 31):
                ids = np.minimum(rng.zipf(1.3, 1024), ROWS) - 1
                state, touched = train_step(state, touched, jnp.asarray(ids))
                if step % 10 == 0:
                    manager.save(step, args=cnr.args.Save(state, touched))

        # Later, in another process: `abstract` says which shapes (and shardings).
        with cnr.CheckpointManager(root, tables=tables) as manager:
            restored = manager.restore(None, args=cnr.args.Restore(abstract))

    assert int(restored.state["step"]) == 30
    # A row is never further off than if it were rounded between its two extremes.
    rows = np.asarray(state["item"])
    error = np.linalg.norm(np.asarray(restored.state["item"]) - rows, axis=1)
    half_a_step = np.ptp(rows, axis=1) / (2**BITS - 1) / 2
    assert np.all(error <= 1.01 * half_a_step * DIM**0.5), "too far off"
    print(f"restored; mean error of a row {error.mean():.4f}")


if __name__ == "__main__":
    main()
