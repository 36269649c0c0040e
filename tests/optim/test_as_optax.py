"""Row optimizers as transformations of optax: the bits of the row forms, in optax's places."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.errors import OptionError, TouchedError
from cnr_jax.optim import (
    RowSteps,
    as_optax,
    lazy_adam,
    lazy_sgd,
    moved_rows,
    rowwise_adagrad,
)

from ..conftest import each_of

V, DIM, N = 40, 3, 12
OPTIMIZERS = {
    "adagrad": rowwise_adagrad(lambda count: 0.3 / (1.0 + count)),
    "adam": lazy_adam(0.3),
    "sgd": lazy_sgd(0.3, nesterov=True),
}
# How fast they run is of no matter; and what is compared is compiled alike.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_the_row_form(name: str) -> None:
    optimizer, tx = OPTIMIZERS[name], as_optax(OPTIMIZERS[name])
    # -0.0 + 0.0 is 0.0: it would show that a row was added to.
    tables = {"user": normal(0, V, DIM).at[:, 0].set(-0.0)}
    tables["item"] = normal(1, V, DIM).astype(jnp.bfloat16)
    weights = normal(2, N, DIM)

    def loss(rows: Any, where: Any) -> Any:
        kept = [jnp.where(where[name][:, None], rows[name], 0) for name in rows]
        return sum(jnp.sum(weights * row.astype(jnp.float32) ** 2) for row in kept)

    @jit
    def by_rows(tables: Any, state: Any, ids: Any, where: Any) -> Any:
        looked_up = {name: tables[name][ids[name]] for name in tables}
        grads = jax.grad(lambda rows: loss(rows, where))(looked_up)
        return optimizer.update(grads, ids, tables, state, where=where)

    @jit
    def by_optax(tables: Any, state: Any, ids: Any, where: Any) -> Any:
        def dense_loss(tables: Any) -> jax.Array:
            return loss({name: tables[name][ids[name]] for name in tables}, where)

        lookups = {name: cnr.Lookup(ids[name], where=where[name]) for name in tables}
        updates, state = tx.update(
            jax.grad(dense_loss)(tables),
            state,
            tables,
            ids={"user": [lookups["user"]], "item": lookups["item"], "other": ids},
        )
        return optax.apply_updates(tables, updates), state

    rows = optaxed = (tables, optimizer.init(tables))
    for step in range(3):
        rng = np.random.default_rng(step)
        # Repeated ones, some of which wrap; but the gradients of a row of 16 bits are summed in
        # 16 bits by `jax.grad`, and in 32 by the row form.
        ids = {"user": rng.integers(-6, 6, N), "item": rng.permutation(V)[:N]}
        where = {name: rng.random(N) < 0.7 for name in ids}
        rows = by_rows(*rows, ids, where)
        before, optaxed = optaxed, by_optax(*optaxed, ids, where)
        assert bits(optaxed) == bits(rows)
        for name in tables:
            old, new = (
                [state[0][name], *(slot[name] for slot in state[1][1:])]
                for state in (before, optaxed)
            )
            for leaf, moved in zip(old, new, strict=True):
                changed = [
                    a != b
                    for a, b in zip(*map(bits_of_rows, (leaf, moved)), strict=True)
                ]
                named = np.unique(ids[name][where[name]] % V)
                np.testing.assert_array_equal(np.flatnonzero(changed), named)


def bits_of_rows(leaf: jax.Array) -> list[bytes]:
    return [row.tobytes() for row in np.asarray(leaf)]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.user = nnx.Embed(V, DIM, rngs=rngs)
        self.item = nnx.Embed(V, DIM, rngs=rngs)
        self.out = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        rows = self.user(batch["user"]) * self.item(batch["items"]).sum(axis=1)
        return self.out(rows)[:, 0]


def group(params: Any) -> Any:
    def of(path: Any, _: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")[0]
        return {"user": "adagrad", "item": "adam"}.get(name, "dense")

    return jax.tree_util.tree_map_with_path(of, params)


def test_nnx_model_is_trained_recorded_saved_and_restored(tmp_path: Path) -> None:
    groups: dict[Any, Any] = {name: as_optax(o) for name, o in OPTIMIZERS.items()}
    groups["dense"] = optax.adamw(0.1)
    tx = optax.multi_transform(groups, group)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def state() -> Any:
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    @nnx.jit
    def train_step(model: Any, optimizer: Any, touched: Any, batch: Any) -> Any:
        grads = nnx.grad(lambda model: jnp.mean((model(batch) - 1) ** 2))(model)
        ids = {"user": batch["user"], "item": batch["items"]}
        updates = optimizer.update(model, grads, ids=ids)
        return cnr.record(touched, moved_rows(updates))

    tables = cnr.find_tables(state(), ["user", "item"])
    slots = {
        name: [slot.name.split("/")[-1] for slot in table.slots]
        for name, table in tables.items()
    }
    assert slots == {"user": ["sum_of_squares"], "item": ["lazy_mu", "lazy_nu"]}
    touched = cnr.init_touched(state(), tables)
    reports = []
    options = cnr.Options(codec="raw", tracking="audited", on_save=reports.append)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(1, 5):
            batch = {
                "user": jnp.array([step, step, 0]),
                "items": jnp.array([[step, 2], [5, 5], [-1, V + 3]]),
            }
            touched = train_step(model, optimizer, touched, batch)
            manager.save(step, args=cnr.args.Save(state(), touched))
        manager.wait_until_finished()
        assert [r.kind for r in reports] == ["full"] + ["delta"] * 3
        restored = manager.restore(None, args=cnr.args.Restore(state()))
    assert bits(restored.state) == bits(state())
    rows = np.flatnonzero(touched.stamps["item"])
    assert rows.tolist() == [1, 2, 3, 4, 5, V - 1]


def test_step_holds_one_dense_gradient_and_writes_tables_in_place() -> None:
    tx, rows = as_optax(OPTIMIZERS["adam"]), 1 << 14
    tables = {"user": normal(0, rows, 4)}

    def step(tables: Any, state: Any, ids: Any) -> Any:
        grads = jax.grad(lambda tables: jnp.sum(tables["user"][ids] ** 2))(tables)
        updates, state = tx.update(grads, state, tables, ids={"user": ids})
        return optax.apply_updates(tables, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    ids = jnp.arange(16)
    memory: Any = (
        donating.lower(tables, tx.init(tables), ids).compile().memory_analysis()
    )
    nbytes = tables["user"].nbytes
    assert memory.alias_size_in_bytes >= 3 * nbytes
    assert memory.temp_size_in_bytes < 1.1 * nbytes


@each_of("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_tables_and_slots_stay_where_they_are(kind: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(kind,))
    place = NamedSharding(mesh, P("rows", None))
    optimizer, tables = OPTIMIZERS["adagrad"], {"user": normal(0, V, DIM)}
    placed = jax.device_put(tables, place)
    ids, grads = jnp.array([7, 3, 3, -1]), {"user": jnp.ones((V, DIM))}

    @jit
    def step(tables: Any, state: Any, grads: Any) -> Any:
        tx = as_optax(optimizer, {"u": "user"})
        updates, state = tx.update(grads, state, tables, ids={"u": ids})
        return optax.apply_updates(tables, updates), state

    alone = step(tables, optimizer.init(tables), grads)
    new = step(placed, optimizer.init(placed), jax.device_put(grads, place))
    assert bits(new) == bits(alone)
    assert new[0]["user"].sharding.is_equivalent_to(place, 2)
    by_rows = NamedSharding(mesh, P("rows"))
    assert new[1].sum_of_squares["user"].sharding.is_equivalent_to(by_rows, 1)


def test_table_without_ids_and_its_count_are_left_alone() -> None:
    tx, tables = as_optax(lazy_sgd(0.1)), {"user": normal(0, V, DIM)}
    state = tx.init(tables)
    for nothing in (None, []):
        updates, new = tx.update(tables, state, tables, ids={"user": nothing})
        assert bits(optax.apply_updates(tables, updates)) == bits(tables)
        assert bits(new) == bits(state)
    assert tx.update({}, tx.init({}), {}, ids={})[0] == {}


@each_of("updates", [None, {"dense": normal(0, V, DIM)}])
def test_rows_of_updates_that_have_none_are_not_recorded_as_nothing(
    updates: Any,
) -> None:
    with pytest.raises(OptionError, match="change rows of no table"):
        moved_rows(updates)


TABLES = {"user": {"embedding": normal(0, V, DIM)}, "item": normal(1, V, DIM)}
IDS = {"user": jnp.array([1]), "item": jnp.array([2])}
TX = as_optax(OPTIMIZERS["adam"])
MISFITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no ids": (
        {"ids": None},
        OptionError,
        "params, and ids by table\n  got ids of None",
    ),
    "bare ids": ({"ids": IDS["user"]}, OptionError, "got ids of ArrayImpl"),
    "no params": ({"params": None}, OptionError, "got no params"),
    "ids of one": ({"ids": {"user": IDS["user"]}}, OptionError, "no ids of table item"),
    "named twice": (
        {"ids": {**IDS, "embedding": IDS["user"]}},
        OptionError,
        "several are of one\n  got user/embedding",
    ),
    "row gradients": (
        {"updates": {**TABLES, "item": jnp.ones((1, DIM))}},
        OptionError,
        r"table 'item' are not those of the whole table\n  got float32\[1, 3\]",
    ),
    "other gradients": ({"updates": TABLES["user"]}, OptionError, "grads has another"),
    "another's state": (
        {"state": rowwise_adagrad(0.1).init(TABLES)},
        OptionError,
        "got RowwiseAdagradState, expected LazyAdamState",
    ),
    "float ids": (
        {"ids": {**IDS, "item": jnp.ones(2)}},
        TouchedError,
        "ids of table 'item' are float32",
    ),
}


@each_of("case", MISFITS)
def test_arguments_that_do_not_fit_raise(case: str) -> None:
    changes, error, message = MISFITS[case]
    given = {"updates": TABLES, "state": TX.init(TABLES), "params": TABLES, "ids": IDS}
    with pytest.raises(error, match=message):
        TX.update(**(given | changes))


def test_what_would_change_the_steps_of_rows_afterwards_raises() -> None:
    updates: Any = TX.update(TABLES, TX.init(TABLES), TABLES, ids=IDS)[0]
    steps = updates["item"]
    assert isinstance(steps, RowSteps)
    with pytest.raises(TypeError, match="RowSteps"):
        optax.chain(TX, optax.scale(0.5)).update(
            TABLES, (TX.init(TABLES), optax.EmptyState()), TABLES, ids=IDS
        )
    with pytest.raises(TypeError, match="RowSteps"):
        jax.jit(lambda: TX.update(TABLES, TX.init(TABLES), TABLES, ids=IDS)[0])()
    with pytest.raises(OptionError, match="table 'item' were added to another array"):
        _ = jnp.ones((V, DIM + 1)) + steps
    delayed = optax.chain(TX, optax.apply_every(2))
    # Rows of the step before would change in a step that does not look them up.
    with pytest.raises(
        OptionError, match=r"another array than the table(.|\n)*last of"
    ):
        delayed.update(TABLES, delayed.init(TABLES), TABLES, ids=IDS)
    # A table of numpy is no reason to add element by element.
    assert bits(np.asarray(TABLES["item"]) + steps) == bits(TABLES["item"] + steps)


def test_without_optax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(OptionError, match="pip install optax"):
        as_optax(OPTIMIZERS["adam"])
