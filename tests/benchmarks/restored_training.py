"""Training that is restored on its way, by `cnr_jax.CheckpointManager`.

At a restore the state is saved, the manager is closed, and a new one restores: training goes on
with what came back. All that is stored exactly is compared, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import flights_dlrm
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
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
    """

    train: Flights
    held_out: Flights
    dim: int

    @property
    def steps(self) -> int:
        """Batches of a pass."""
        return len(self.train.label) // BATCH

    def begin(self, seed: int) -> Trainee:
        """A run before its first step."""
        features, columns = self.train.ids.shape[1], self.train.dense.shape[1]
        state = flights_dlrm.init(self.train.rows, features, columns, self.dim, seed)
        return Trainee(state, cnr.init_touched(state, self.tables(state)), [])

    def tables(self, state: Any) -> cnr.Tables:
        """The table of a state, with its slot."""
        return cnr.find_tables(state, {TABLE: f"params/{TABLE}"})

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
                run.state, run.touched, *self.train.batch(step)
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


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _step(
    state: Any, touched: Any, ids: jax.Array, columns: jax.Array, label: jax.Array
) -> Any:
    touched = cnr.record(touched, {TABLE: ids})
    state, logits = flights_dlrm.train_step(state, ids, columns, label)
    return state, touched, logits


_logits = jax.jit(flights_dlrm.logits)


def train_undisturbed(
    course: Course, seed: int, keep: Iterable[int]
) -> tuple[dict[str, Figures], dict[int, Trainee]]:
    """A run without restores.

    Returns:
        Its figures, and what it was at the steps of `keep`.
    """
    run, kept, step = course.begin(seed), {}, 0
    for stop in sorted({*keep, course.steps}):
        course.advance(run, step, stop)
        if stop < course.steps:
            kept[stop] = run.copy()
        step = stop
    return course.figures(run), kept


def train_restored(
    course: Course, begun: Trainee, stops: Sequence[int], bits: int | None, root: Path
) -> tuple[dict[str, Figures], list[cnr.SaveReport]]:
    """A run with restores.

    Args:
        course: what it is trained on.
        begun: an undisturbed run at the first of the stops; not changed.
        stops: steps after which it is restored.
        bits: of the default codec; None: the table is stored exactly.
        root: an empty folder.

    Returns:
        Its figures, and the report of each save.
    """
    run = begun.copy()
    reports: list[cnr.SaveReport] = []
    options = cnr.Options(
        codec="raw" if bits is None else "adaptive",
        bits=bits or 4,
        audit_saves=0,
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
        on_save=reports.append,
    )
    tables = course.tables(run.state)
    abstract = jax.eval_shape(lambda state: state, run.state)

    def opened() -> cnr.CheckpointManager:
        return cnr.CheckpointManager(root, tables=tables, options=options)

    manager = opened()
    for stop, following in zip(stops, [*stops[1:], course.steps], strict=True):
        manager.save(stop, args=cnr.args.Save(run.state, run.touched))
        manager.close()
        manager = opened()
        restored = manager.restore(None, args=cnr.args.Restore(abstract))
        _check(restored.state, run.state, exact=bits is None)
        run.state, run.touched = restored
        course.advance(run, stop, following)
    manager.close()
    return course.figures(run), reports


def _check(got: Any, want: Any, *, exact: bool) -> None:
    """Checks that all but the table came back bit for bit, and the table if `exact`.

    Raises:
        RuntimeError: if not, or if the table was not rounded although it should be.
    """
    equal = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array_equal(a, b)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
        )
    }
    table = equal.pop(f"params/{TABLE}")
    wrong = [path for path, same in equal.items() if not same]
    if wrong or table != exact:
        raise RuntimeError(
            f"restored otherwise than saved: {', '.join(wrong) or 'nothing'}"
            f"\n  the table is {'equal' if table else 'not equal'}, expected"
            f" {'equal' if exact else 'rounded'}"
        )
