"""One pass over flights, step by step: what `accuracy.py` trains, saves and judges.

One table holds the rows of all features; saved is a table for each, as models mostly have them:
which of them are small is for `cnr_jax` to see.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import flights_dlrm
import jax
import jax.numpy as jnp
import numpy as np
from flights_dlrm import BATCH, TABLE
from paired import auc, log_loss
from trained_tables import Flights

import cnr_jax as cnr

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
        bounds: rows of a feature begin at one of these and end at the next; ascending.
        sparse: the optimizer of the table, by its name in `flights_dlrm.SPARSES`.
    """

    train: Flights
    held_out: Flights
    dim: int
    bounds: tuple[int, ...]
    sparse: str = "rowwise_adagrad"

    @property
    def names(self) -> list[str]:
        """Of the tables that are saved, in the order of features."""
        return [name for name, _, _ in _parts(self.bounds)]

    @property
    def steps(self) -> int:
        """Batches of a pass."""
        return len(self.train.label) // BATCH

    def begin(self, seed: int) -> Trainee:
        """A run before its first step."""
        features, columns = self.train.ids.shape[1], self.train.dense.shape[1]
        state = flights_dlrm.init(
            self.train.rows, features, columns, self.dim, seed, self.sparse
        )
        saved = self.saved(state)
        return Trainee(state, cnr.init_touched(saved, self.tables(saved)), [])

    def saved(self, state: Any) -> Any:
        """A state as it is saved: with a table for each feature."""
        return _split(state, self.bounds)

    def tables(self, saved: Any) -> cnr.Tables:
        """All tables, with their slots."""
        return cnr.find_tables(saved, {name: f"params/{name}" for name in self.names})

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
        for step in range(start, stop):
            run.state, run.touched, logits = _step(
                self.bounds,
                self.sparse,
                run.state,
                run.touched,
                *self.train.batch(step),
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


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(
    bounds: tuple[int, ...],
    sparse: str,
    state: Any,
    touched: Any,
    ids: jax.Array,
    columns: jax.Array,
    label: jax.Array,
) -> Any:
    looked_up = {
        name: ids[:, feature] - start
        for feature, (name, start, _) in enumerate(_parts(bounds))
    }
    touched = cnr.record(touched, looked_up)
    state, logits = flights_dlrm.train_step(state, ids, columns, label, sparse)
    return state, touched, logits


@functools.partial(jax.jit, static_argnums=1)
def _split(state: Any, bounds: tuple[int, ...]) -> Any:
    """A table for each feature, and so with their slots."""

    def split(rows: jax.Array) -> dict[str, jax.Array]:
        return {name: rows[start:stop] for name, start, stop in _parts(bounds)}

    optimizer = state["sparse_optimizer"]
    count = optimizer.count[TABLE]
    params = {**state["params"]}
    table = params.pop(TABLE)
    return {
        **state,
        "params": {**params, **split(table)},
        "sparse_optimizer": optimizer._replace(
            count={name: count for name, _, _ in _parts(bounds)},
            **{
                slot: split(getattr(optimizer, slot)[TABLE])
                for slot in _slots(optimizer)
            },
        ),
    }


@jax.jit
def joined(saved: Any) -> Any:
    """The state that `_split` split."""
    optimizer, params = saved["sparse_optimizer"], saved["params"]
    names = sorted(optimizer.count)

    def whole(tree: Any) -> Any:
        return {TABLE: jnp.concatenate([tree[name] for name in names])}

    return {
        **saved,
        "params": {**whole(params), "dense": params["dense"]},
        "sparse_optimizer": optimizer._replace(
            count={TABLE: optimizer.count[names[0]]},
            **{slot: whole(getattr(optimizer, slot)) for slot in _slots(optimizer)},
        ),
    }


def _slots(optimizer: Any) -> list[str]:
    """What an optimizer keeps of each row."""
    return [name for name in optimizer._fields if name != "count"]


def _parts(bounds: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Name, first row and end of each feature; names sort as features do, up to a hundred."""
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        yield f"feature{number:02}", start, stop


_logits = jax.jit(flights_dlrm.logits)
