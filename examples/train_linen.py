"""Trains a Linen model with `optax.adagrad`, restores it into a fresh state, goes on.

    python examples/train_linen.py

Two tables, user and item, in a `TrainState`; the items that users see follow Zipf's law.
The model and its optimizer are as they would be without this library: `nn.Embed`, one
optax optimizer for all parameters, `apply_gradients`; `record` is one line of the train
step. optax computes whole gradients and updates every row. But with Adagrad the update
of a row without a gradient is zero, and so are the changes of its accumulators: rows
that no batch looks up keep their bits. That is what recording look-ups requires of an
optimizer. SGD and Adagrad have it. Adam and momentum do not: with them save without
`touched`, as in drop_in.py, or train the tables with `cnr.optim.lazy_adam`.

Each step costs a pass over all rows, which two small tables can afford. Where it is too
much, take gradients of the looked-up rows and an optimizer of `cnr.optim`.

The tables are stored exactly (`codec="raw"`), so that the checks at the end are checks
of bits: of the restored state, and of the training that continues from it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import cnr_jax as cnr

USERS, ITEMS, DIM, BATCH = 20_000, 50_000, 16, 1024
STEPS, SAVE_EVERY = 60, 10
OPTIMIZER = optax.chain(optax.clip_by_global_norm(10.0), optax.adagrad(0.1))


class Recommender(nn.Module):
    """Dot product of two embeddings, plus a small MLP of both."""

    @nn.compact
    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        """Logits float32[batch] of ids int32[batch]."""
        u = nn.Embed(USERS, DIM, name="user")(user)
        i = nn.Embed(ITEMS, DIM, name="item")(item)
        x = nn.relu(nn.Dense(32)(jnp.concatenate([u, i], axis=1)))
        return jnp.sum(u * i, axis=1) + nn.Dense(1)(x)[:, 0]


MODEL = Recommender()


# Made inside jit, every leaf is a jax.Array; outside, `step` would be a Python int.
@jax.jit
def init_state(seed: int) -> TrainState:
    ids = jnp.zeros(1, jnp.int32)
    params = MODEL.init(jax.random.key(seed), ids, ids)["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(state: TrainState, touched: cnr.Touched, batch: dict) -> tuple:
    touched = cnr.record(touched, {"user": batch["user"], "item": batch["item"]})

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["user"], batch["item"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), touched, loss


def batches(first: int, last: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches `first` to `last`; a batch depends on its number only."""
    for number in range(first, last + 1):
        rng = np.random.default_rng(number)
        user = rng.integers(0, USERS, BATCH, np.int32)
        item = np.minimum(rng.zipf(1.2, BATCH), ITEMS).astype(np.int32) - 1
        label = ((user + item) % 4 == 0).astype(np.float32)
        yield {"user": user, "item": item, "label": label}


def assert_same_bits(left: Any, right: Any) -> None:
    """Asserts that two states have the same leaves, bit for bit."""
    leaves = jax.tree_util.tree_leaves_with_path(left)
    others = jax.tree.leaves(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, leaf), other in zip(leaves, others, strict=True):
        same = np.asarray(leaf).tobytes() == np.asarray(other).tobytes()
        assert same, f"{jax.tree_util.keystr(path)} differs"


def main() -> None:
    state = init_state(0)
    tables = cnr.find_tables(state, ["user", "item"])
    touched = cnr.init_touched(state, tables)
    print(tables)

    with tempfile.TemporaryDirectory() as root:
        options = cnr.Options(codec="raw")
        losses = []
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            for step, batch in enumerate(batches(1, STEPS), start=1):
                state, touched, loss = train_step(state, touched, batch)
                losses.append(float(loss))
                if step % SAVE_EVERY == 0:
                    manager.save(step, args=cnr.args.Save(state, touched))
                    manager.wait_until_finished()  # only to print the report
                    save = manager.last_report
                    print(
                        f"step {save.step:3d}  {save.kind:5s} {save.rows:7,d} rows"
                        f"  {save.total_bytes / 1e6:6.2f} MB, {save.reason}"
                    )

        # Another process would know no more than this: the shapes.
        abstract = jax.eval_shape(init_state, 0)
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            newest = manager.restore(None, args=cnr.args.Restore(abstract))
            middle = manager.restore(STEPS // 2, args=cnr.args.Restore(abstract))

    assert_same_bits(newest.state, state)
    resumed, resumed_touched = middle
    for batch in batches(STEPS // 2 + 1, STEPS):
        resumed, resumed_touched, loss = train_step(resumed, resumed_touched, batch)
    assert_same_bits(resumed, state)
    assert float(loss) == losses[-1] < losses[0]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; restored and resumed bit for bit")


if __name__ == "__main__":
    main()
