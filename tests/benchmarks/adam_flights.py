"""Training of the small DLRM of `flights_dlrm.py` by a dense optimizer of optax.

Ten tables, one for each feature, of which all rows move: under Adam also those without a gradient.
What `moments.py` and `moments_harm.py` save and restore.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flights_dlrm
import jax
import numpy as np
import optax
import trained_tables

BATCH = 2048
OPTIMIZERS = {"adam": optax.adam, "adamw": optax.adamw}
State = dict[str, Any]


class Training:
    """One pass over the first flights of flights-3m, in order of time.

    Args:
        data: the folder of the data.
        flights: that are trained on.
        held: flights after these, for evaluation.
        dim: columns of the tables.
        optimizer: its name in `OPTIMIZERS`, and its rate.
        seed: of the first values.

    Attributes:
        steps: number of batches.
    """

    def __init__(
        self,
        data: Path,
        flights: int,
        held: int,
        dim: int,
        optimizer: tuple[str, float],
        seed: int = 0,
    ) -> None:
        found = trained_tables.load_flights_3m(data)
        each = slice(flights + held)
        self._dense, self._label = found.dense[each], found.label[each]
        # Rows that these flights look up: others would stay as they began.
        ids, counts = list[np.ndarray](), list[int]()
        for feature in found.ids[each].T:
            rows, at = np.unique(feature, return_inverse=True)
            ids.append(at.astype(np.int32))
            counts.append(len(rows))
        self._ids, self._counts = np.stack(ids, axis=1), counts
        self._flights, self._held = flights, held
        self._dim, self._seed = dim, seed
        name, rate = optimizer
        self._optimizer = OPTIMIZERS[name](rate)
        self.steps = flights // BATCH
        self._step = jax.jit(
            functools.partial(_step, self._optimizer), donate_argnums=0
        )

    def begin(self) -> State:
        """The state before the first batch."""
        features, columns = len(self._counts), self._dense.shape[1]
        total = sum(self._counts)
        drawn = flights_dlrm.init(total, features, columns, self._dim, self._seed)
        table = drawn["params"][flights_dlrm.TABLE]
        starts = np.cumsum([0, *self._counts])
        tables = {
            f"feature{i}": table[a:b]
            for i, (a, b) in enumerate(itertools.pairwise(starts))
        }
        params = {"tables": tables, "dense": drawn["params"]["dense"]}
        return {"params": params, "opt_state": self._optimizer.init(params)}

    def trained(self, state: State, first: int, last: int) -> tuple[State, np.ndarray]:
        """The state after some batches, and the logits of their flights before the updates."""
        found: list[jax.Array] = []
        for number in range(first, last):
            part = slice(number * BATCH, (number + 1) * BATCH)
            batch = self._ids[part], self._dense[part], self._label[part]
            state, some = self._step(state, *batch)
            found.append(some)
        return state, np.concatenate([np.asarray(x) for x in found])

    def held_out(self, state: State) -> np.ndarray:
        """Logits of the flights that are kept for evaluation."""
        found: list[np.ndarray] = []
        for start in range(self._flights, self._flights + self._held, BATCH):
            part = slice(start, min(start + BATCH, self._flights + self._held))
            found.append(
                np.asarray(
                    _forward(state["params"], self._ids[part], self._dense[part])
                )
            )
        return np.concatenate(found)

    def labels(self, *, held: bool) -> np.ndarray:
        """Labels of held-out flights, or of those that are trained on."""
        if held:
            return self._label[self._flights :]
        return self._label[: self.steps * BATCH]


def moments_of(state: State) -> optax.ScaleByAdamState:
    """The part of the optimizer's state that has mu and nu."""
    return state["opt_state"][0]


def tables_of(state: State) -> Iterator[tuple[str, Any]]:
    """Names of tables, and their rows."""
    yield from state["params"]["tables"].items()


def _vectors(params: Any, ids: jax.Array) -> jax.Array:
    tables = params["tables"]
    found = [tables[f"feature{i}"][ids[:, i]] for i in range(len(tables))]
    return jax.numpy.stack(found, axis=1)


def _logits(params: Any, ids: jax.Array, columns: jax.Array) -> jax.Array:
    return flights_dlrm.logits_of(params["dense"], _vectors(params, ids), columns)


_forward = jax.jit(_logits)


def _step(
    optimizer: optax.GradientTransformation,
    state: State,
    ids: jax.Array,
    columns: jax.Array,
    label: jax.Array,
) -> tuple[State, jax.Array]:
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        found = _logits(params, ids, columns)
        return optax.sigmoid_binary_cross_entropy(found, label).mean(), found

    grads, found = jax.grad(loss, has_aux=True)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, found
