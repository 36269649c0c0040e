"""One pass over flights, step by step: what `accuracy.py` trains, saves and judges.

The rows of features that have few are saved as a table of their own, `small`, the others as
`large`: each has its bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flights_dlrm
import jax
import jax.numpy as jnp
import numpy as np
from flights_dlrm import BATCH, TABLE
from paired import auc, log_loss
from trained_tables import Flights

import cnr_jax as cnr

TABLES = ("small", "large")
Figures = dict[str, float]


@dataclasses.dataclass
class Trainee:
    """A run under way.

    Attributes:
        state: the train state.
        touched: its touched rows.
        logits: of each batch so far, before it was learnt from.
    """

    state: Any
    touched: Any
    logits: list[np.ndarray]

    def copy(self) -> Trainee:
        """Another one that goes on from here; steps donate what they are given."""
        state, touched = jax.tree.map(jnp.copy, (self.state, self.touched))
        return Trainee(state, touched, list(self.logits))


@dataclasses.dataclass(frozen=True)
class Course:
    """What is trained on and judged by.

    Attributes:
        train: flights in order of time; one pass over its whole batches.
        held_out: those that follow.
        dim: columns of the table.
        small_features: the first so many features have few rows.
        small_rows: rows of these, the first of the table.
    """

    train: Flights
    held_out: Flights
    dim: int
    small_features: int
    small_rows: int

    @property
    def steps(self) -> int:
        """Batches of a pass."""
        return len(self.train.label) // BATCH

    def begin(self, seed: int) -> Trainee:
        """A run before its first step."""
        features, columns = self.train.ids.shape[1], self.train.dense.shape[1]
        state = flights_dlrm.init(self.train.rows, features, columns, self.dim, seed)
        saved = self.saved(state)
        return Trainee(state, cnr.init_touched(saved, self.tables(saved)), [])

    def saved(self, state: Any) -> Any:
        """A state as it is saved: with two tables instead of one."""
        return _split(state, self.small_rows)

    def tables(self, saved: Any) -> cnr.Tables:
        """Both tables, with their slots."""
        return cnr.find_tables(saved, {name: f"params/{name}" for name in TABLES})

    def stops(self, restores: int) -> list[int]:
        """Steps after which a run is restored: spread evenly, none at the ends.

        Raises:
            ValueError: if there are not as many steps.
        """
        if restores >= self.steps:
            raise ValueError(f"{restores} restores in {self.steps} steps")
        return [round(self.steps * i / (restores + 1)) for i in range(1, restores + 1)]

    def advance(self, run: Trainee, start: int, stop: int) -> None:
        """Trains from step `start` up to, not including, `stop`."""
        found = []
        few = self.small_features, self.small_rows
        for step in range(start, stop):
            run.state, run.touched, logits = _step(
                few, run.state, run.touched, *self.train.batch(step)
            )
            found.append(logits)
        run.logits += map(np.asarray, found)

    def figures(self, run: Trainee) -> dict[str, Figures]:
        """Metrics of a run that has ended: on held-out flights, and over its lifetime.

        Lifetime metrics, Check-N-Run's, are of the logits that each batch had before it was
        learnt from.
        """
        held = self.held_out
        parts = range(0, len(held.label), BATCH)
        logits = [
            np.asarray(
                _logits(run.state, held.ids[i : i + BATCH], held.dense[i : i + BATCH])
            )
            for i in parts
        ]
        seen = self.train.label[: self.steps * BATCH]
        return {
            "held_out": metrics(np.concatenate(logits), held.label),
            "lifetime": metrics(np.concatenate(run.logits), seen),
        }


def metrics(logits: np.ndarray, labels: np.ndarray) -> Figures:
    """AUC and log loss."""
    return {"auc": auc(logits, labels), "log_loss": log_loss(logits, labels)}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    few: tuple[int, int],
    state: Any,
    touched: Any,
    ids: jax.Array,
    columns: jax.Array,
    label: jax.Array,
) -> Any:
    features, rows = few
    looked_up = {"small": ids[:, :features], "large": ids[:, features:] - rows}
    touched = cnr.record(touched, looked_up)
    state, logits = flights_dlrm.train_step(state, ids, columns, label)
    return state, touched, logits


@functools.partial(jax.jit, static_argnums=1)
def _split(state: Any, rows: int) -> Any:
    """Two tables, of the first rows and of the others, and so with their slots."""
    optimizer = state["sparse_optimizer"]
    count, squares = optimizer.count[TABLE], optimizer.sum_of_squares[TABLE]
    params = {**state["params"]}
    table = params.pop(TABLE)
    return {
        **state,
        "params": {**params, "small": table[:rows], "large": table[rows:]},
        "sparse_optimizer": optimizer._replace(
            count={name: count for name in TABLES},
            sum_of_squares={"small": squares[:rows], "large": squares[rows:]},
        ),
    }


@jax.jit
def joined(saved: Any) -> Any:
    """The state that `_split` split."""

    def whole(tree: Any) -> Any:
        return {TABLE: jnp.concatenate([tree["small"], tree["large"]])}

    optimizer, params = saved["sparse_optimizer"], saved["params"]
    return {
        **saved,
        "params": {**whole(params), "dense": params["dense"]},
        "sparse_optimizer": optimizer._replace(
            count={TABLE: optimizer.count["large"]},
            sum_of_squares=whole(optimizer.sum_of_squares),
        ),
    }


_logits = jax.jit(flights_dlrm.logits)
