"""What is named as moving other rows, checked against what optimizers do."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from cnr_jax.state.find import TableSpec, find_tables
from cnr_jax.state.optimizer_states import moving_parts

from ..conftest import each_of
from .conftest import Twins

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
# What is said of some of them, word for word; without classes, `NAMED` is said instead.
PARTS = {
    "adam": (
        "opt_state/0/mu of ScaleByAdamState",
        "opt_state/0/nu of ScaleByAdamState",
    ),
    "momentum": ("opt_state/0/trace of TraceState",),
    "adadelta": (
        "opt_state/1/e_g of ScaleByAdaDeltaState",
        "opt_state/1/e_x of ScaleByAdaDeltaState",
    ),
    "ema": ("opt_state/1/ema of EmaState",),
    "accumulating": ("opt_state/acc_grads of MultiStepsState",),
    "schedule_free": ("opt_state/z of ScheduleFreeState",),
}
NAMED = "(a name of Adam, momentum or their like)"


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


def parts_of(state, path: str = "user/embedding") -> tuple[str, ...]:
    return moving_parts(state, find_tables(state, {"t": path})["t"])


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


@each_of("name", SPARSE)
def test_nothing_is_said_of_an_optimizer_that_leaves_other_rows_alone(name):
    state = state_of(SPARSE[name])
    assert parts_of(state) == parts_of(without_classes(state)) == ()
    assert not moves_untouched_rows(SPARSE[name])


@each_of("name", MOVING)
def test_slots_of_an_optimizer_that_moves_other_rows_are_named(name):
    state = state_of(MOVING[name])
    parts = parts_of(state)
    assert 1 <= len(parts) <= 4 and len(set(parts)) == len(parts)
    assert all(part.startswith("opt_state") and " of " in part for part in parts)
    bare = parts_of(without_classes(state))
    assert bare and all(part.startswith("opt_state") for part in bare)
    assert {part.split()[0] for part in bare} <= {part.split()[0] for part in parts}


@each_of("name", PARTS)
def test_texts_name_the_slot_and_the_state_that_holds_it(name):
    state = state_of(MOVING[name])
    assert parts_of(state) == PARTS[name]
    copy = "(a copy that follows the parameters)"
    assert parts_of(without_classes(state)) == tuple(
        f"{part.split()[0]} {copy if name == 'ema' else NAMED}" for part in PARTS[name]
    )


@each_of(
    "name", ["adam", "adafactor", "accumulating", "schedule_free", "madgrad", "sm3"]
)
def test_optimizer_whose_slots_are_named_does_move_other_rows(name):
    assert moves_untouched_rows(MOVING[name])


@pytest.mark.parametrize(
    "tx",
    [
        optax.fromage(0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    ],
)
def test_moving_optimizer_without_a_state_is_not_known_as_documented(tx):
    assert moves_untouched_rows(tx)
    assert parts_of(state_of(tx)) == ()


@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(0.1)])
def test_nnx_and_linen_states_are_told_apart_alike(tx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.user = nnx.Embed(ROWS, DIM, rngs=rngs)

    model = Model(nnx.Rngs(0))
    pair = (model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    linen = TrainState.create(apply_fn=None, params=params(), tx=tx)  # type: ignore[arg-type]
    moving = "mu" in str(jax.tree_util.tree_leaves_with_path(linen))
    for state, where in (
        (nnx.state(pair), "1/opt_state/0"),
        (pair, "1/opt_state/0"),
        (linen, "opt_state/0"),
        (jax.eval_shape(lambda: linen), "opt_state/0"),
    ):
        holders = [part.split()[0] for part in parts_of(state)]
        assert holders == [f"{where}/mu", f"{where}/nu"] * moving


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2, 5)])
def test_tables_of_any_shape_are_looked_at(shape):
    tree = params() | {"other": jnp.ones(shape)}
    assert parts_of(state_of(optax.adam(0.1), tree), "params/other") == PARTS["adam"]
    assert parts_of(state_of(optax.adagrad(0.1), tree), "params/other") == ()


def test_adam_for_the_dense_part_only_is_not_blamed():
    def label(tree):
        return {"user": {"embedding": "table"}, "bias": "dense"}

    decayed = optax.inject_hyperparams(optax.adamw)(0.1)
    for dense in (optax.adam(0.1), decayed):
        tx = optax.multi_transform({"table": optax.adagrad(0.1), "dense": dense}, label)
        state = state_of(tx)
        assert parts_of(state) == parts_of(without_classes(state)) == ()


def test_weight_decay_that_shows_is_named_unless_zero():
    def decayed(weight_decay, **options):
        inject = optax.inject_hyperparams(optax.add_decayed_weights, **options)
        return state_of(optax.chain(inject(weight_decay), optax.adagrad(0.1)))

    scheduled = decayed(optax.linear_schedule(0.0, 0.1, 10))
    for state, where in (
        (decayed(0.01), "hyperparams/weight_decay"),
        (scheduled, "hyperparams_states/weight_decay/count"),
    ):
        expected = f"opt_state/0/{where} (weight decay)"
        for each in (state, without_classes(state), jax.eval_shape(lambda: state)):  # noqa: B023
            assert expected in parts_of(each)
    assert parts_of(decayed(0.0)) == ()


def test_weight_decay_that_cannot_be_read_is_named():
    inject = optax.inject_hyperparams(optax.add_decayed_weights)
    state = state_of(optax.chain(inject(0.0), optax.adagrad(0.1)))
    expected = ("opt_state/0/hyperparams/weight_decay (weight decay)",)
    tables = find_tables(state, ["user"])
    traced = []
    jax.eval_shape(lambda s: traced.append(moving_parts(s, tables["user"])), state)
    assert traced == [expected]
    for odd in (object(), "text", np.array(["x"], object), jax.random.key(0)):
        state["opt_state"][0].hyperparams["weight_decay"] = odd
        assert moving_parts(state, tables["user"]) == expected
    donated = jnp.zeros(())
    donated.delete()
    state["opt_state"][0].hyperparams["weight_decay"] = donated
    assert moving_parts(state, tables["user"]) == expected


class PartlyHere:
    """A zero of which this process sees one replica, as in a run of several processes."""

    is_fully_addressable = False

    def __init__(self, shards: list) -> None:
        self.shards = shards

    def addressable_data(self, index: int) -> jax.Array:
        return self.shards[index]

    def __array__(self, *args, **kwargs):
        raise RuntimeError("spans non-addressable devices")


def test_weight_decay_spread_over_processes_is_read_where_it_can_be(monkeypatch):
    inject = optax.inject_hyperparams(optax.add_decayed_weights)
    state = state_of(optax.chain(inject(0.1), optax.adagrad(0.1)))
    table = find_tables(state, ["user"])["user"]
    monkeypatch.setattr(jax, "Array", jax.Array | PartlyHere)
    hyperparams = state["opt_state"][0].hyperparams
    for shards, named in (([jnp.zeros(())], 0), ([jnp.ones(())], 1), ([], 1)):
        hyperparams["weight_decay"] = PartlyHere(shards)
        assert len(moving_parts(state, table)) == named


def test_noise_that_shows_is_named():
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    assert parts_of(state_of(tx)) == ("opt_state/0 of AddNoiseState (noise)",)


def test_slots_come_first_and_no_more_than_four_parts_are_named():
    decayed = state_of(optax.inject_hyperparams(optax.adamw)(0.1))
    assert [part.split()[0] for part in parts_of(decayed)] == [
        "opt_state/inner_state/0/mu",
        "opt_state/inner_state/0/nu",
        "opt_state/hyperparams/weight_decay",
    ]
    many = state_of(optax.chain(*[optax.adam(0.1)] * 3))
    parts = parts_of(many)
    assert len(parts) == 4 and parts == parts_of(many)


def test_moving_leaves_are_named_even_when_not_declared_as_slots():
    state = state_of(optax.adam(0.1))
    spec = {"user": TableSpec("params/user/embedding", slots=())}
    assert moving_parts(state, find_tables(state, spec)["user"]) == PARTS["adam"]


@each_of("name", ["ema_params", "target", "params_ema", "teacher"])
def test_copy_that_follows_the_parameters_is_named(name):
    state = state_of(optax.adagrad(0.1)) | {name: params()}
    assert parts_of(state) == (f"{name} (a copy that follows the parameters)",)


def test_names_of_ones_own_are_not_known():
    class LazyAdamState(NamedTuple):
        mu: dict
        nu: dict

    own = {
        "row_moments": params(),
        "v": params(),
        "lazy": LazyAdamState(*[params()] * 2),
    }
    assert parts_of({"params": params(), "opt_state": own}) == ()


def test_only_what_concerns_the_table_is_named():
    tree = params() | {"item": {"embedding": jnp.zeros((ROWS, DIM))}}

    def label(tree):
        kinds = {"user": "adagrad", "item": "adam", "bias": "adam"}
        return {k: jax.tree.map(lambda _, k=k: kinds[k], v) for k, v in tree.items()}

    tx = optax.multi_transform(
        {"adagrad": optax.adagrad(0.1), "adam": optax.adam(0.1)}, label
    )
    state = state_of(tx, tree)
    assert parts_of(state, "user") == ()
    inner = "opt_state/inner_states/adam/inner_state/0"
    assert parts_of(state, "item") == (
        f"{inner}/mu of ScaleByAdamState",
        f"{inner}/nu of ScaleByAdamState",
    )


def adam_of(leaf: Any) -> Any:
    return jax.tree.map(leaf, state_of(optax.adam(0.1)))


def donated(leaf: jax.Array) -> jax.Array:
    copy = leaf + 0
    copy.delete()
    return copy


ODD_STATES = {
    "none": (lambda: None, ()),
    "number": (lambda: 3, ()),
    "text": (lambda: "text", ()),
    "empty": (dict, ()),
    "bare array": (lambda: jnp.zeros(3), ()),
    "twins": (lambda: {"params": Twins()}, ()),
    "equal paths": (lambda: {"params": params(), "a": {"1": 0, 1: 0}}, ()),
    "no array": (lambda: {"params": {"user": {"embedding": object()}}}, ()),
    "deeper": (lambda: {"params": {"user": {"embedding": {"x": 1}}}}, ()),
    "no leaves": (lambda: adam_of(lambda _: None), ()),
    "texts": (lambda: adam_of(lambda _: "leaf"), PARTS["adam"]),
    "objects": (lambda: adam_of(lambda x: np.asarray(x, object)), PARTS["adam"]),
    "donated": (lambda: adam_of(donated), PARTS["adam"]),
    "hyperparams": (
        lambda: {"opt": {"hyperparams": 1, "hyperparams_states": {"weight_decay": 2}}},
        ("opt/hyperparams_states/weight_decay (weight decay)",),
    ),
}


@each_of("name", ODD_STATES)
def test_odd_states_are_looked_at_as_far_as_they_go(name):
    make, expected = ODD_STATES[name]
    table = find_tables(state_of(optax.adam(0.1)), ["user"])["user"]
    assert moving_parts(make(), table) == expected
