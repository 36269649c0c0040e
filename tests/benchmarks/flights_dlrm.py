"""A small DLRM over flights: one table that holds all features, and an optimizer of its rows.

What `trained_tables.py` and `accuracy.py` train. The state is a tree in which
`cnr_jax.find_tables` finds the table and its slot.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cnr_jax as cnr

TABLE = "table"
HIDDEN = 64
BATCH = 4096
# Of the normal distribution that rows start from.
INITIAL_STD = 0.05
# Gradients of a mean over a batch are small: they would be lost in the default of 0.1.
SPARSE = cnr.optim.rowwise_adagrad(0.05, initial_accumulator_value=0, eps=1e-16)
# The second keeps two slots of the table's shape: a momentum and an accumulator.
SPARSES = {"rowwise_adagrad": SPARSE, "lazy_adam": cnr.optim.lazy_adam(0.02)}
DENSE = optax.adagrad(0.02)

State = dict[str, Any]


def init(
    rows: int,
    features: int,
    columns: int,
    dim: int,
    seed: int = 0,
    sparse: str = "rowwise_adagrad",
) -> State:
    """A state to train.

    Args:
        rows: of the table.
        features: rows that a flight looks up.
        columns: of its dense input.
        dim: columns of the table.
        seed: of all that is drawn.
        sparse: the optimizer of the table, by its name in `SPARSES`.
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    vectors = features + 1
    pairs = vectors * (vectors - 1) // 2
    widths = [(columns, HIDDEN), (HIDDEN, dim), (pairs + dim, HIDDEN), (HIDDEN, 1)]
    table = INITIAL_STD * jax.random.normal(keys[0], (rows, dim))
    dense = [
        (jax.random.normal(key, width) / np.sqrt(width[0]), jnp.zeros(width[1]))
        for key, width in zip(keys[1:], widths, strict=True)
    ]
    return {
        "params": {TABLE: table, "dense": dense},
        "sparse_optimizer": SPARSES[sparse].init({TABLE: table}),
        "dense_optimizer": DENSE.init(dense),
    }


def logits(state: State, ids: jax.Array, columns: jax.Array) -> jax.Array:
    """Logits float32[flights], for evaluation."""
    params = state["params"]
    return logits_of(params["dense"], params[TABLE][ids], columns)


def logits_of(dense: Any, vectors: jax.Array, columns: jax.Array) -> jax.Array:
    """Logits float32[flights] of the rows that flights look up, [flights, features, dim]."""

    def layer(number: int, x: jax.Array) -> jax.Array:
        weights, bias = dense[number]
        return x @ weights + bias

    x = jax.nn.relu(layer(1, jax.nn.relu(layer(0, columns))))
    stacked = jnp.concatenate([x[:, None], vectors], axis=1)
    products = jnp.einsum("bnd,bmd->bnm", stacked, stacked)
    first, second = np.triu_indices(stacked.shape[1], k=1)
    x = jnp.concatenate([x, products[:, first, second]], axis=1)
    return layer(3, jax.nn.relu(layer(2, x)))[:, 0]


def train_step(
    state: State,
    ids: jax.Array,
    columns: jax.Array,
    label: jax.Array,
    sparse: str = "rowwise_adagrad",
) -> tuple[State, jax.Array]:
    """The next state, and the logits float32[flights] before the update. Jit-able.

    Args:
        state: from `init`.
        ids: int32[flights, features], rows of the table.
        columns: float32[flights, columns].
        label: float32[flights].
        sparse: as `init` was given it.
    """
    params = state["params"]

    def loss(dense: Any, vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = logits_of(dense, vectors, columns)
        return optax.sigmoid_binary_cross_entropy(found, label).mean(), found

    vectors = params[TABLE][ids]
    grads, found = jax.grad(loss, argnums=(0, 1), has_aux=True)(
        params["dense"], vectors
    )
    updates, dense_optimizer = DENSE.update(
        grads[0], state["dense_optimizer"], params["dense"]
    )
    table, sparse_optimizer = SPARSES[sparse].update(
        {TABLE: grads[1].reshape(-1, vectors.shape[-1])},
        {TABLE: ids.ravel()},
        {TABLE: params[TABLE]},
        state["sparse_optimizer"],
    )
    dense = optax.apply_updates(params["dense"], updates)
    return {
        "params": {**table, "dense": dense},
        "sparse_optimizer": sparse_optimizer,
        "dense_optimizer": dense_optimizer,
    }, found
