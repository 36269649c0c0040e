"""Which optimizers are refused for recorded rows, checked against what they do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from cnr_jax.errors import OptimizerError
from cnr_jax.optimizers import check_row_sparse
from cnr_jax.tables import TableSpec, find_tables

ROWS, DIM = 6, 3
SPARSE = {
    "sgd": optax.sgd(0.1),
    "sign_sgd": optax.sign_sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)),
    "scheduled": optax.adagrad(optax.linear_schedule(0.1, 0.0, 10)),
    "injected": optax.inject_hyperparams(optax.adagrad)(0.1),
    "if_finite": optax.apply_if_finite(optax.adagrad(0.1), 3),
}
MOVING = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": optax.rmsprop(0.1),
    "rmsprop_centered": optax.rmsprop(0.1, centered=True),
    "adadelta": optax.adadelta(0.1),
    "adafactor": optax.adafactor(0.1),
    "adafactor_factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adan": optax.adan(0.1),
    "adabelief": optax.adabelief(0.1),
    "lion": optax.lion(0.1),
    "novograd": optax.novograd(0.1),
    "optimistic": optax.optimistic_adam_v2(0.1),
    "rprop": optax.rprop(0.1),
    "sm3": optax.sm3(0.1),
    "yogi": optax.yogi(0.1),
    "lamb": optax.lamb(0.1),
    "ema": optax.chain(optax.adagrad(0.1), optax.ema(0.9)),
    "accumulating": optax.MultiSteps(optax.adagrad(0.1), 2).gradient_transformation(),
    "ademamix": optax.contrib.ademamix(0.1),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "muon": optax.contrib.muon(0.1),
    "madgrad": optax.contrib.madgrad(0.1),
    "injected_adam": optax.inject_hyperparams(optax.adam)(0.1),
}


def params() -> dict:
    rows = jnp.arange(1.0, 1.0 + ROWS * DIM).reshape(ROWS, DIM) / 7
    return {"user": {"embedding": rows}, "bias": jnp.ones(DIM)}


def state_of(tx, tree=None) -> dict:
    tree = params() if tree is None else tree
    return {"params": tree, "opt_state": tx.init(tree)}


def without_classes(tree):
    """Turns NamedTuples into dicts and sequences into lists, as `nnx.State` does."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {k: without_classes(v) for k, v in tree._asdict().items()}
    if isinstance(tree, tuple | list):
        return [without_classes(child) for child in tree]
    if isinstance(tree, dict):
        return {key: without_classes(child) for key, child in tree.items()}
    return tree


def check(state, *, row_sparse: bool = False) -> None:
    spec = TableSpec("user/embedding", row_sparse=row_sparse)
    check_row_sparse(state, find_tables(state, {"user": spec}))


def moves_untouched_rows(tx) -> bool:
    """Looks up rows 0 and 1, then twice row 0 only: do other rows or slots change?"""
    state = state_of(tx)
    tree, opt_state = state["params"], state["opt_state"]
    before = None
    for rows in ([0, 1], [0], [0]):
        gradient = jnp.zeros((ROWS, DIM)).at[jnp.array(rows)].set(0.5)
        gradients = {"user": {"embedding": gradient}, "bias": jnp.ones(DIM)}
        updates, opt_state = tx.update(gradients, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
        leaves = jax.tree.leaves((tree, opt_state))
        now = [np.asarray(x[1:]) for x in leaves if np.shape(x)[:1] == (ROWS,)]
        before = before or now
    return any(not np.array_equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("name", SPARSE)
def test_optimizer_that_leaves_other_rows_alone_passes(name):
    state = state_of(SPARSE[name])
    check(state)
    check(without_classes(state))
    assert not moves_untouched_rows(SPARSE[name])


@pytest.mark.parametrize("name", MOVING)
def test_optimizer_that_moves_other_rows_is_refused(name):
    state = state_of(MOVING[name])
    for each in (state, without_classes(state)):
        with pytest.raises(OptimizerError, match=r"'user'.*\n.*opt_state.*user"):
            check(each)
        check(each, row_sparse=True)


@pytest.mark.parametrize(
    "name", ["adam", "adafactor", "accumulating", "schedule_free", "madgrad", "sm3"]
)
def test_refused_optimizer_does_move_other_rows(name):
    assert moves_untouched_rows(MOVING[name])


@pytest.mark.parametrize(
    "tx",
    [
        optax.fromage(0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    ],
)
def test_moving_optimizer_without_a_state_is_not_seen_as_documented(tx):
    assert moves_untouched_rows(tx)
    check(state_of(tx))


def test_error_names_the_leaf_and_says_what_to_do():
    with pytest.raises(OptimizerError) as error:
        check(state_of(optax.adam(0.1)))
    text = str(error.value)
    assert "got opt_state/0/mu/user/embedding (of ScaleByAdamState)" in text
    assert "multi_transform" in text and "row_sparse=True" in text
    assert error.value.kind == "optimizer"


@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(0.1)])
def test_nnx_and_linen_states_are_told_apart_alike(tx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.user = nnx.Embed(ROWS, DIM, rngs=rngs)

    model = Model(nnx.Rngs(0))
    pair = (model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    linen = TrainState.create(apply_fn=None, params=params(), tx=tx)  # type: ignore[arg-type]
    for state in (nnx.state(pair), pair, linen, jax.eval_shape(lambda: linen)):
        if "mu" in str(jax.tree_util.tree_leaves_with_path(state)):
            with pytest.raises(OptimizerError, match="mu"):
                check(state)
        else:
            check(state)


def test_adam_for_the_dense_part_only_passes():
    def label(tree):
        return {"user": {"embedding": "table"}, "bias": "dense"}

    decayed = optax.inject_hyperparams(optax.adamw)(0.1)
    for dense in (optax.adam(0.1), decayed):
        tx = optax.multi_transform({"table": optax.adagrad(0.1), "dense": dense}, label)
        state = state_of(tx)
        check(state)
        check(without_classes(state))


def test_visible_weight_decay_is_refused_unless_zero():
    def decayed(weight_decay, **options):
        inject = optax.inject_hyperparams(optax.add_decayed_weights, **options)
        return state_of(optax.chain(inject(weight_decay), optax.adagrad(0.1)))

    for state in (decayed(0.01), decayed(optax.linear_schedule(0.0, 0.1, 10))):
        for each in (state, without_classes(state), jax.eval_shape(lambda: state)):  # noqa: B023
            with pytest.raises(OptimizerError, match="weight decay"):
                check(each)
        check(state, row_sparse=True)
    check(decayed(0.0))


def test_visible_noise_is_refused():
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    with pytest.raises(OptimizerError, match="noise"):
        check(state_of(tx))


def test_moving_slots_are_seen_even_when_not_declared_as_slots():
    state = state_of(optax.adam(0.1))
    spec = {"user": TableSpec("params/user/embedding", slots=())}
    with pytest.raises(OptimizerError, match="ScaleByAdamState"):
        check_row_sparse(state, find_tables(state, spec))


@pytest.mark.parametrize("name", ["ema_params", "target", "params_ema", "teacher"])
def test_copy_that_follows_the_parameters_is_refused(name):
    state = state_of(optax.adagrad(0.1)) | {name: params()}
    with pytest.raises(OptimizerError, match=name):
        check(state)


def test_names_of_ones_own_pass():
    from typing import NamedTuple

    class LazyAdamState(NamedTuple):
        mu: dict
        nu: dict

    own = {
        "row_moments": params(),
        "v": params(),
        "lazy": LazyAdamState(*[params()] * 2),
    }
    check({"params": params(), "opt_state": own})


def test_only_the_tables_concerned_are_refused():
    tree = params() | {"item": {"embedding": jnp.zeros((ROWS, DIM))}}

    def label(tree):
        kinds = {"user": "adagrad", "item": "adam", "bias": "adam"}
        return {k: jax.tree.map(lambda _, k=k: kinds[k], v) for k, v in tree.items()}

    tx = optax.multi_transform(
        {"adagrad": optax.adagrad(0.1), "adam": optax.adam(0.1)}, label
    )
    state = state_of(tx, tree)
    check_row_sparse(state, find_tables(state, ["user"]))
    with pytest.raises(OptimizerError, match="'item'"):
        check_row_sparse(state, find_tables(state, ["user", "item"]))
    spec = {"user": "user/embedding", "item": TableSpec(row_sparse=True)}
    check_row_sparse(state, find_tables(state, spec))
