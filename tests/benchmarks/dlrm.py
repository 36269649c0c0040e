"""A DLRM of 26 tables on synthetic look-ups, trained by row-wise Adagrad.

Bottom MLP 13-512-256-32, 26 vectors projected to 32, dot products of all pairs, top MLP
512-256-1: the network that DLRM's authors train on the Criteo data, with tables of mixed
dims. Only rows that a batch looks up are read, differentiated and changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cnr_jax as cnr

FEATURES, DENSE_FEATURES = 26, 13
DIMS = (16, 32, 64)
WIDTH = 32
BOTTOM, TOP = (512, 256, WIDTH), (512, 256, 1)
OPTIMIZER = cnr.optim.rowwise_adagrad(0.01)
RATE = 0.01

State = dict[str, Any]
Batch = dict[str, Any]


def rows_of(largest: int) -> dict[str, int]:
    """Rows of each table, from 100 to `largest`, evenly on a logarithmic scale."""
    sizes = np.geomspace(100, largest, FEATURES).astype(int)
    return {f"c{i:02d}": int(size) for i, size in enumerate(sizes)}


def make_state(largest: int, seed: int = 0) -> State:
    """Tables float32[rows, 16, 32 or 64], their slots, and the dense layers."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        scale = shape[0] ** -0.5 if len(shape) == 2 else 0.01
        return jnp.asarray(rng.normal(0, scale, shape).astype(np.float32))

    def layers(first: int, widths: tuple[int, ...]) -> list[Any]:
        sizes = zip((first, *widths), widths, strict=False)
        return [(normal(a, b), jnp.zeros(b)) for a, b in sizes]

    tables = {
        name: 0.05 * normal(rows, DIMS[i % len(DIMS)]) * rows**0.5
        for i, (name, rows) in enumerate(rows_of(largest).items())
    }
    pairs = (FEATURES + 1) * FEATURES // 2
    dense = {
        "bottom": layers(DENSE_FEATURES, BOTTOM),
        "project": [normal(table.shape[1], WIDTH) for table in tables.values()],
        "top": layers(pairs + WIDTH, TOP),
    }
    return {"params": tables, "opt_state": OPTIMIZER.init(tables), "dense": dense}


def make_batch(largest: int, rows: int, number: int) -> Batch:
    """Batch `number` of `rows` examples; the r-th most popular id has a weight of 1 / r."""
    rng = np.random.default_rng((11, number))
    ids = {}
    for name, count in rows_of(largest).items():
        rank = np.exp(rng.random(rows) * np.log(count)).astype(np.int64) - 1
        # An odd factor scatters popular rows over the table.
        ids[name] = jnp.asarray((rank * 2654435761 % count).astype(np.int32))
    dense = rng.normal(size=(rows, DENSE_FEATURES)).astype(np.float32)
    label = rng.random(rows) < 0.25
    return {"ids": ids, "dense": jnp.asarray(dense), "label": jnp.asarray(label)}


def find_tables(state: State) -> Any:
    """All 26 tables, each with its slot."""
    return cnr.find_tables(state, list(state["params"]))


def make_step(recorded: bool) -> Callable[..., Any]:
    """A donated train step: `(state, touched, batch) -> (state, touched, loss)`.

    Args:
        recorded: whether looked-up rows are recorded; otherwise `touched` goes through as
            it is, and the program holds nothing of it.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(state: State, touched: Any, batch: Batch) -> tuple[State, Any, jax.Array]:
        if recorded:
            touched = cnr.record(touched, batch["ids"])
        vectors = {k: state["params"][k][ids] for k, ids in batch["ids"].items()}
        loss, (dense_grads, row_grads) = jax.value_and_grad(_loss, argnums=(0, 1))(
            state["dense"], vectors, batch
        )
        tables, slots = OPTIMIZER.update(
            row_grads, batch["ids"], state["params"], state["opt_state"]
        )
        dense = jax.tree.map(lambda x, g: x - RATE * g, state["dense"], dense_grads)
        state = {"params": tables, "opt_state": slots, "dense": dense}
        return state, touched, loss

    return run


def _loss(dense: Any, vectors: dict[str, jax.Array], batch: Batch) -> jax.Array:
    x = _mlp(dense["bottom"], batch["dense"])
    projected = [
        rows @ matrix
        for rows, matrix in zip(vectors.values(), dense["project"], strict=True)
    ]
    stacked = jnp.stack([x, *projected], axis=1)
    products = jnp.einsum("bnd,bmd->bnm", stacked, stacked)
    first, second = np.triu_indices(FEATURES + 1, k=1)
    flat = jnp.concatenate([x, products[:, first, second]], axis=1)
    logits = _mlp(dense["top"], flat, last=lambda y: y)[:, 0]
    label = batch["label"].astype(jnp.float32)
    return jnp.mean(jax.nn.softplus(logits) - label * logits)


def _mlp(layers: Any, x: jax.Array, last: Callable[..., Any] = jax.nn.relu) -> Any:
    for matrix, bias in layers[:-1]:
        x = jax.nn.relu(x @ matrix + bias)
    matrix, bias = layers[-1]
    return last(x @ matrix + bias)
