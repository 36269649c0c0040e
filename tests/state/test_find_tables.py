"""Which leaves are tables, slots or dense, on states of real models and optimizers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import StateMismatchError, TableError
from cnr_jax.state.find import _uncovered_rows, find_tables
from cnr_jax.state.layouts import Identity, ModSharded
from cnr_jax.state.table import Leaf, TableSpec, flatten_paths, merge, split

from ..conftest import each_of
from .conftest import Twins

USERS, ITEMS, DIM = 16, 24, 4


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.user = nnx.Embed(USERS, DIM, rngs=rngs)
        self.item = nnx.Embed(ITEMS, DIM, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class LinenModel(nn.Module):
    box: str = "none"

    @nn.compact
    def __call__(self, ids):
        init = nn.initializers.normal()
        if self.box == "partitioned":
            init = nn.with_partitioning(init, ("rows", None))
        if self.box == "logical":
            init = nn.with_logical_partitioning(init, ("rows", None))
        user = nn.Embed(USERS, DIM, embedding_init=init, name="user")(ids)
        item = nn.Embed(ITEMS, DIM, embedding_init=init, name="item")(ids)
        return nn.Dense(1)(user + item)


def nnx_pair(tx: optax.GradientTransformation) -> tuple[nnx.Module, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def linen_state(tx: optax.GradientTransformation, box: str = "none") -> TrainState:
    model = LinenModel(box=box)
    params = model.init(jax.random.key(0), jnp.zeros(2, jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def params() -> dict:
    return {
        "user": {"embedding": jnp.ones((USERS, DIM))},
        "item": {"embedding": jnp.ones((ITEMS, DIM))},
        "mlp": [jnp.ones((DIM, DIM)), jnp.ones(DIM)],
    }


def is_table(path, _) -> str:
    return "dense" if "mlp" in str(path) else "table"


def labels(tree):
    return jax.tree_util.tree_map_with_path(is_table, tree)


def table_mask(tree):
    return jax.tree.map(lambda label: label == "table", labels(tree))


ADAGRAD = optax.adagrad(0.1)
OPTIMIZERS = {
    "adagrad": (ADAGRAD, ["0/sum_of_squares"]),
    "chain": (
        optax.chain(optax.clip_by_global_norm(1.0), ADAGRAD),
        ["1/0/sum_of_squares"],
    ),
    "multi_transform": (
        optax.multi_transform({"table": ADAGRAD, "dense": optax.adam(0.1)}, labels),
        ["inner_states/table/inner_state/0/sum_of_squares"],
    ),
    "partition": (
        optax.partition({"table": ADAGRAD, "dense": optax.adam(0.1)}, labels),
        ["inner_states/table/inner_state/0/sum_of_squares"],
    ),
    "masked": (
        optax.masked(ADAGRAD, table_mask),
        ["inner_state/0/sum_of_squares"],
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adagrad)(0.1),
        ["inner_state/0/sum_of_squares"],
    ),
    "multi_steps": (
        optax.MultiSteps(ADAGRAD, 2),
        ["acc_grads", "inner_opt_state/0/sum_of_squares"],
    ),
    "apply_if_finite": (
        optax.apply_if_finite(optax.adam(0.1), 3),
        ["inner_state/0/mu", "inner_state/0/nu"],
    ),
    "sgd": (optax.sgd(0.1), []),
}
CONTAINERS = {
    "linen": lambda tx: (linen_state(tx), "opt_state/"),
    "linen_partitioned": lambda tx: (linen_state(tx, "partitioned"), "opt_state/"),
    "linen_logical": lambda tx: (linen_state(tx, "logical"), "opt_state/"),
    "dict": lambda tx: ({"params": params(), "opt": tx.init(params())}, "opt/"),
    "nested": lambda tx: ({"run": {"m": linen_state(tx)}}, "run/m/opt_state/"),
    "bare_dict": lambda tx: ({**params(), "opt": tx.init(params())}, "opt/"),
    "nnx_tuple": lambda tx: (nnx.state(nnx_pair(tx)), "1/opt_state/"),
    "nnx_split": lambda tx: (nnx.split(nnx_pair(tx))[1], "1/opt_state/"),
    "nnx_modules": lambda tx: (nnx_pair(tx), "1/opt_state/"),
    "nnx_pure": lambda tx: (
        nnx.to_pure_dict(nnx.state(nnx_pair(tx))),
        "1/opt_state/",
    ),
    "nnx_dict": lambda tx: (
        dict(zip(["model", "opt"], map(nnx.state, nnx_pair(tx)), strict=True)),
        "opt/opt_state/",
    ),
}
PAIRS = [(c, "multi_transform") for c in CONTAINERS if not c.startswith("nnx")]
PAIRS += [(c, "chain") for c in CONTAINERS]
PAIRS += [(c, o) for c in ("dict", "linen", "nnx_tuple") for o in OPTIMIZERS]
PAIRS = sorted({pair for pair in PAIRS if pair != ("nnx_tuple", "masked")})


def same_leaf(a, b) -> bool:
    return a is b or bool(np.array_equal(a, b))


def assert_round_trip(state, tables) -> None:
    merged = merge(state, tables, *split(state, tables))
    assert jax.tree.structure(merged) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(state), strict=True):
        assert a is b


@each_of(("container", "optimizer"), PAIRS)
def test_real_states_are_found_and_put_together_again(container, optimizer):
    tx, slots = OPTIMIZERS[optimizer]
    state, prefix = CONTAINERS[container](tx)
    tables = find_tables(state, ["user", "item"])
    for name, rows in (("user", USERS), ("item", ITEMS)):
        table = tables[name]
        assert table.leaf.shape == (rows, DIM)
        assert name in table.path and "opt" not in table.path
        assert sorted(s.name for s in table.slots) == [prefix + s for s in slots]
        assert all(name in s.path and s.shape == (rows, DIM) for s in table.slots)
    found = {leaf.path for table in tables.values() for leaf in table.leaves}
    every = {path for path, _ in flatten_paths(state)}
    assert found | set(tables.dense) == every and not found & set(tables.dense)
    assert_round_trip(state, tables)


@pytest.mark.parametrize("container", ["linen_partitioned", "dict", "nnx_tuple"])
def test_abstract_state_gives_the_same_tables(container):
    state, _ = CONTAINERS[container](ADAGRAD)
    abstract = jax.eval_shape(lambda: state)
    tables = find_tables(abstract, ["user", "item"])
    assert tables == find_tables(state, ["user", "item"])
    assert_round_trip(abstract, tables)
    rows, dense = split(state, tables)
    merged = merge(abstract, tables, rows, dense)
    assert jax.tree.leaves(merged)[-1] is jax.tree.leaves(state)[-1]


def test_leaves_carry_shardings_of_concrete_and_abstract_states():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("rows", "columns"))
    sharding = NamedSharding(mesh, P("rows", "columns"))
    table = jax.device_put(jnp.zeros((USERS, DIM)), sharding)
    slot = jax.device_put(jnp.zeros(USERS), NamedSharding(mesh, P("rows")))
    state = {"params": {"user": table}, "opt": {"acc": {"user": slot}}}
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    for each in (state, abstract):
        found = find_tables(each, ["user"])["user"]
        assert found.leaf.sharding == sharding
        assert found.slots[0].sharding == slot.sharding
        assert found.slots[0].shape == (USERS,)


def test_sharded_nnx_model_round_trips_on_eight_devices():
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    state = nnx.state(nnx_pair(ADAGRAD))
    sharding = NamedSharding(mesh, P("rows"))
    state = jax.tree.map(
        lambda x: jax.device_put(x, sharding) if x.shape[:1] == (USERS,) else x, state
    )
    tables = find_tables(state, ["user", "item"])
    assert [leaf.sharding for leaf in tables["user"].leaves] == [sharding] * 2
    assert_round_trip(state, tables)


def test_keys_none_strings_and_scalars_are_dense_and_survive():
    state = {
        "params": {"user": jnp.zeros((USERS, DIM))},
        "key": jax.random.key(0),
        "keys": {"user": jax.random.split(jax.random.key(0), USERS)},
        "nothing": None,
        "note": "text",
        "step": 3,
        "rate": np.float32(0.5),
        "host": np.arange(3),
        "empty": (),
    }
    tables = find_tables(state, ["user"])
    assert tables["user"].slots == ()
    rows, dense = split(state, tables)
    assert set(dense) == {"key", "keys", "note", "step", "rate", "host"}
    assert list(rows) == ["user"] and list(rows["user"]) == ["table"]
    merged = merge(state, tables, rows, dense)
    assert merged["nothing"] is None and merged["empty"] == ()
    assert_round_trip(state, tables)


def test_slots_of_any_trailing_shape_and_averages_of_the_parameters_count():
    state = {
        "params": params(),
        "ema_params": params(),
        "opt": {
            "flat": {"user": {"embedding": jnp.zeros(USERS)}},
            "column": {"user": {"embedding": jnp.zeros((USERS, 1))}},
            "wide": {"user": {"embedding": jnp.zeros((USERS, DIM, 2), jnp.int8)}},
            "other_rows": {"user": {"embedding": jnp.zeros((1, DIM))}},
        },
    }
    table = find_tables(state, ["user"])["user"]
    names = {slot.name: slot.shape for slot in table.slots}
    assert names == {
        "ema_params": (USERS, DIM),
        "opt/flat": (USERS,),
        "opt/column": (USERS, 1),
        "opt/wide": (USERS, DIM, 2),
    }


def test_slot_names_stay_unique_where_prefixes_clash():
    rows = jnp.zeros((USERS, DIM))
    state = {
        "params": {"user": rows},
        "table": {"user": rows},
        "opt": {"user": rows, "params": {"user": rows}},
    }
    names = [slot.name for slot in find_tables(state, ["user"])["user"].slots]
    assert sorted(names) == ["opt/params/user", "opt/user", "table/user"]


@pytest.mark.parametrize("rooted", [True, False])
def test_slot_of_a_longer_path_belongs_to_the_longer_path(rooted):
    tree = {
        "user": {"w": jnp.zeros((USERS, DIM))},
        "wide": {"user": {"w": jnp.ones((USERS, 1))}, "bias": jnp.ones(3)},
    }
    opt = {"opt": ADAGRAD.init(tree)}
    state = {"params": tree, **opt} if rooted else {**tree, **opt}
    tables = find_tables(state, {"user": "user/w", "wide": "wide/user"})
    for name in ("user", "wide"):
        (slot,) = tables[name].slots
        assert slot.name == "opt/0/sum_of_squares"
        assert ("wide" in slot.path) == (name == "wide")
    # The same where the other one is not declared: its slot must not be taken.
    assert len(find_tables(state, {"user": "user/w"})["user"].slots) == 1


def test_module_of_the_same_name_is_not_a_slot():
    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.user = nnx.Embed(USERS, 1, rngs=rngs)

    class WideAndDeep(nnx.Module):
        def __init__(self, rngs):
            self.user = nnx.Embed(USERS, DIM, rngs=rngs)
            self.wide = Wide(rngs)

    model = WideAndDeep(nnx.Rngs(0))
    tables = find_tables(nnx.state(model), {"user": "user/embedding"})
    assert tables["user"].slots == ()
    state = nnx.state((model, nnx.Optimizer(model, ADAGRAD, wrt=nnx.Param)))
    tables = find_tables(state, {"user": "0/user/embedding", "wide": "wide/user"})
    assert tables["user"].dim == DIM and tables["wide"].dim == 1
    for table in tables.values():
        (slot,) = table.slots
        assert slot.name == "1/opt_state/0/sum_of_squares"
        assert slot.shape == table.leaf.shape
    with pytest.raises(TableError, match="matches 2 leaves"):
        find_tables(state, ["user"])


def test_leaf_named_as_a_table_is_no_slot_of_another():
    rows = jnp.zeros((USERS, DIM))
    state = {"user": rows, "copy": {"user": rows}}
    assert [slot.name for slot in find_tables(state, ["user"])["user"].slots] == [
        "copy"
    ]
    tables = find_tables(state, {"user": "user", "copy": "copy/user"})
    assert tables["user"].slots == tables["copy"].slots == ()


def test_branches_of_equal_standing_are_ambiguous():
    rows = {"user": jnp.zeros((USERS, DIM))}
    for state in ({"opt_a": rows, "opt_b": rows}, {"model": rows, "ema": rows}):
        with pytest.raises(TableError, match="matches 2 leaves"):
            find_tables(state, ["user"])


def test_table_without_slots_takes_none_from_a_neighbour():
    inner = {"embedding": jnp.zeros((USERS, DIM))}
    for state in (
        {"params": {"user": inner, "tower": {"item": inner}}},
        {"user": inner, "tower": {"item": inner}, "opt": ADAGRAD.init({"item": inner})},
        {"a": {"user": inner}, "b": {"user": inner}},
        {
            "a": {"user": inner},
            "b": {"user": inner},
            "a_opt": ADAGRAD.init({"user": inner}),
            "b_opt": ADAGRAD.init({"user": inner}),
        },
    ):
        path = "a/user" if "a" in state else "user"
        assert find_tables(state, {"user": path})["user"].slots == ()


def test_two_train_states_keep_their_own_slots():
    state = {"a": linen_state(ADAGRAD), "b": linen_state(ADAGRAD)}
    tables = find_tables(state, {"ua": "a/user/embedding", "ub": "b/user/embedding"})
    assert [s.name for s in tables["ua"].slots] == ["a/opt_state/0/sum_of_squares"]
    assert [s.name for s in tables["ub"].slots] == ["b/opt_state/0/sum_of_squares"]
    assert_round_trip(state, tables)


def test_state_inside_a_state_keeps_its_slots():
    critic = linen_state(ADAGRAD)
    state = {"params": params(), "critic": critic, "sgd": linen_state(optax.sgd(0.1))}
    paths = {"u": "params/user/embedding", "s": "sgd/user/embedding"}
    tables = find_tables(state, paths)
    assert tables["u"].slots == tables["s"].slots == ()
    table = find_tables(state, {"c": "critic/user/embedding"})["c"]
    assert [slot.name for slot in table.slots] == ["critic/opt_state/0/sum_of_squares"]


@pytest.mark.parametrize("whole", [False, True])
def test_optimizer_beside_linen_variables_is_found(whole):
    variables = {"params": params(), "batch_stats": {"mean": jnp.zeros(3)}}
    target = {"params": params()} if whole else params()
    expected = ["opt_state/0/sum_of_squares"]
    for root in ({"variables": variables}, {"params": variables["params"]}):
        state = {**root, "opt_state": ADAGRAD.init(target)}
        table = find_tables(state, ["user"])["user"]
        assert [slot.name for slot in table.slots] == expected
    twice = TrainState.create(
        apply_fn=None,  # type: ignore[arg-type]
        params={"params": params()},
        tx=ADAGRAD,
    )
    table = find_tables(twice, ["user"])["user"]
    assert [slot.name for slot in table.slots] == expected
    two = {"a": variables, "b": variables, "a_opt": ADAGRAD.init(params())}
    assert find_tables(two, {"user": "a/user/embedding"})["user"].slots == ()


def test_keys_with_slashes_are_split_for_matching_only():
    tree = {"tower/~/user_embed": {"embeddings": jnp.zeros((USERS, DIM))}}
    state = {"params": tree, "opt": ADAGRAD.init(tree)}
    table = find_tables(state, {"user": "tower/~/user_embed"})["user"]
    assert table.path == ("params", "tower/~/user_embed", "embeddings")
    assert [slot.name for slot in table.slots] == ["opt/0/sum_of_squares"]


@each_of(
    "path",
    [
        "params/user/embedding",
        "user/embedding",
        "params/user/embedding/value",
        "user",
        "embedding/value",
    ],
)
def test_path_may_be_given_in_any_form(path):
    tree = {"user": {"embedding": jnp.zeros((USERS, DIM)), "bias": jnp.zeros(DIM)}}
    boxed = {
        "user": {"embedding": nn.Partitioned(jnp.zeros((USERS, DIM)), ("r", None))}
    }
    for state in ({"params": tree}, {"params": boxed}):
        table = find_tables(state, {"t": path})["t"]
        assert table.path[:3] == ("params", "user", "embedding")


def test_spec_fields_reach_the_table():
    state = {"params": params(), "opt": ADAGRAD.init(params())}
    layout = ModSharded(shards=4, rows_per_shard=USERS // 4)
    spec = TableSpec("user/embedding", rows=13, layout=layout)
    tables = find_tables(state, {"u": spec, "item": TableSpec()})
    table = tables["u"]
    assert (table.rows, table.padded_rows, table.dim) == (13, USERS, DIM)
    assert table.layout == layout
    assert table.dtype == np.float32 and table.leaves[0] is table.leaf
    assert tables["item"].rows == ITEMS and tables["item"].layout == Identity()


@pytest.mark.parametrize(
    "path",
    [
        "opt/0/sum_of_squares/user/embedding",
        "sum_of_squares/user/embedding",
        "opt/0/sum_of_squares",
    ],
)
def test_listed_slots_are_taken_and_no_others(path):
    state = {"params": params(), "opt": ADAGRAD.init(params()), "ema": params()}
    spec = TableSpec("user/embedding", slots=[path])
    (slot,) = find_tables(state, {"user": spec})["user"].slots
    assert slot.name == "opt/0/sum_of_squares"
    none = find_tables(state, {"user": TableSpec("params/user/embedding", slots=[])})
    assert none["user"].slots == ()
    assert ("ema", "user", "embedding") in none.dense


def test_listed_slot_may_have_any_path():
    state = {"params": params(), "counts": jnp.zeros(USERS, jnp.int32)}
    spec = TableSpec("user/embedding", slots=["counts"])
    (slot,) = find_tables(state, {"user": spec})["user"].slots
    assert (slot.name, slot.dtype) == ("counts", np.int32)


def test_square_table_needs_listed_slots():
    square = {"user": jnp.zeros((8, 8))}
    state = {"params": square, "opt": {"v_row": {"user": jnp.zeros(8)}}}
    with pytest.raises(TableError, match=r"as many columns as rows.*\n.*slots="):
        find_tables(state, ["user"])
    spec = TableSpec(slots=["opt/v_row/user"])
    assert find_tables(state, {"user": spec})["user"].slots[0].shape == (8,)
    full = {"params": square, "opt": {"nu": square}}
    assert len(find_tables(full, ["user"])["user"].slots) == 1


@each_of(
    ("table", "slot", "is_slot"),
    [
        ((4, 3, 2), (4,), True),
        ((4, 3, 2), (4, 3), True),
        ((4, 3, 2), (4, 2), True),
        ((4, 4, 2), (4,), None),
        ((4, 2, 4), (4,), None),
        ((4, 4, 2), (4, 2), None),
        ((4, 3, 4), (4, 3), True),  # a column's slot would be [3, 4]
        ((4, 4, 2), (4, 4, 2), True),
        ((4, 4, 2), (4, 1, 2), True),
        ((4, 3, 2), (3, 2), False),
        ((4,), (4,), True),
        ((4,), (4, 4), True),
        ((4,), (1,), False),
        ((4,), (), False),
    ],
)
def test_slots_of_tables_of_any_shape(table, slot, is_slot):
    state = {
        "params": {"user": jnp.zeros(table)},
        "opt": {"v": {"user": jnp.zeros(slot)}},
    }
    if is_slot is None:
        with pytest.raises(TableError, match="as many columns as rows"):
            find_tables(state, ["user"])
        state["opt"] = {"listed": state["opt"]}
        spec = {"user": TableSpec(slots=["opt/listed/v/user"])}
        assert find_tables(state, spec)["user"].slots[0].shape == slot
    else:
        found = find_tables(state, ["user"])["user"]
        assert [s.shape for s in found.slots] == [slot] * is_slot
        assert (("opt", "v", "user") in find_tables(state, ["user"]).dense) != is_slot


class Experts(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Param(jnp.ones((8, DIM, 6)))
        self.bias = nnx.Param(jnp.ones((8, 6)))
        self.scale = nnx.Param(jnp.ones(8))


def layers() -> dict:
    return {
        "dense": {"kernel": jnp.ones((USERS, DIM)), "bias": jnp.ones(USERS)},
        "norm": {"scale": jnp.ones(USERS), "count": jnp.zeros((), jnp.int32)},
        "experts": {"kernel": jnp.ones((8, DIM, 6)), "scale": jnp.ones(8)},
        "both": {"kernel": jnp.ones((8, DIM, 6)), "bias": jnp.ones((8, 6))},
    }


@each_of("nested", [False, True])
@each_of(
    ("name", "leaf"),
    [
        ("dense", "dense/kernel"),
        ("norm", "norm/scale"),
        ("experts", "experts/kernel"),
        ("dense/kernel", "dense/kernel"),
        ("dense/bias", "dense/bias"),
        ("norm/scale", "norm/scale"),
        ("experts/scale", "experts/scale"),
        ("both/bias", "both/bias"),
        ("both/kernel", "both/kernel"),
    ],
)
def test_module_means_its_matrix_and_a_path_its_leaf(name, leaf, nested):
    state = {"params": layers(), "opt": optax.adam(0.1).init(layers())}
    prefix = ("params",)
    if nested:  # the path is then the end of several
        state, prefix = {"run": {"model": state}}, ("run", "model", "params")
    table = find_tables(state, {"t": name})["t"]
    assert table.path == (*prefix, *leaf.split("/"))
    assert [slot.shape for slot in table.slots] == [table.leaf.shape] * 2
    full = find_tables(state, {"t": "/".join(table.path)})["t"]
    assert full == table


def test_module_of_several_matrices_is_ambiguous():
    state = {"params": layers(), "opt": optax.adam(0.1).init(layers())}
    message = r"matches 2 leaves\n  params/both/bias\n  params/both/kernel\n.*full path"
    with pytest.raises(TableError, match=message):
        find_tables(state, ["both"])


def test_path_of_a_vector_is_not_that_of_its_wider_slot():
    rows, wide = (
        {"user": {"w": jnp.zeros(USERS)}},
        {"user": {"w": jnp.zeros((USERS, 2))}},
    )
    state = {"run": {"params": rows, "opt": {"moments": wide}}}
    for path in ("user", "user/w", "run/params/user/w"):
        table = find_tables(state, {"t": path})["t"]
        assert table.path == ("run", "params", "user", "w")
        assert [slot.shape for slot in table.slots] == [(USERS, 2)]


def test_parameters_of_nnx_modules_are_tables_of_any_shape():
    model = Experts()
    state = nnx.state((model, nnx.Optimizer(model, ADAGRAD, wrt=nnx.Param)))
    tables = find_tables(state, {"e": "0/up", "b": "0/bias", "s": "scale"})
    shapes = {name: table.leaf.shape for name, table in tables.items()}
    assert shapes == {"e": (8, DIM, 6), "b": (8, 6), "s": (8,)}
    assert [t.dim for t in tables.values()] == [DIM * 6, 6, 1]
    for table in tables.values():
        (slot,) = table.slots
        assert slot.name == "1/opt_state/0/sum_of_squares"
        assert slot.shape == table.leaf.shape
    assert_round_trip(state, tables)


def test_factored_slots_of_columns_are_dense():
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    state = {"params": params(), "opt": tx.init(params())}
    tables = find_tables(state, ["user"])
    table = tables["user"]
    assert [slot.shape for slot in table.slots] == [(USERS,)]
    (slot,) = table.slots
    assert sum("user" in path and "opt" in path for path in tables.dense) == 2
    assert slot.name in ("opt/0/v_row", "opt/0/v_col")


def zeros(*shape, dtype=jnp.float32):
    return {"user": jnp.zeros(shape, dtype)}


ERRORS = {
    "no match, with close names": (
        {"params": zeros(4, 2)},
        ["usre"],
        r"no leaf.*'usre'\n.*\n.*did you mean user",
    ),
    "two matches": (
        {"a": zeros(4, 2), "b": zeros(4, 2)},
        ["user"],
        r"2 leaves\n  a/user\n  b/user",
    ),
    "a scalar": ({"params": zeros()}, ["user"], r"float32\[\], expected \[rows, ...\]"),
    "no rows": (
        {"params": zeros(0, 2)},
        ["user"],
        r"float32\[0, 2\]",
    ),
    "no rows of a vector": ({"params": zeros(0)}, ["user"], r"float32\[0\]"),
    "no elements": ({"params": zeros(4, 2, 0)}, ["user"], r"float32\[4, 2, 0\]"),
    "complex": (
        {"params": zeros(4, 2, dtype=jnp.complex64)},
        ["user"],
        r"complex64\[4, 2\]",
    ),
    "numpy table": ({"user": np.zeros((4, 2))}, ["user"], r"ndarray.*\n.*device_put"),
    "numpy slot": (
        {"params": zeros(4, 2), "opt": {"user": np.zeros((4, 2))}},
        ["user"],
        r"opt/user is not a JAX array\n.*\n.*device_put",
    ),
    "a string": ({"params": {"user": "x"}}, ["user"], r"got str, expected jax.Array"),
    "a slot of no columns": (
        {"params": zeros(4, 2), "opt": {"user": jnp.zeros((4, 0))}},
        ["user"],
        r"opt/user are empty\n.*float32\[4, 0\], expected one element",
    ),
    "random keys": (
        {"user": jax.ShapeDtypeStruct((4, 2), jax.random.key(0).dtype)},
        ["user"],
        "key<fry>",
    ),
    "two names for one leaf": (
        {"params": zeros(4, 2)},
        {"a": "user", "b": "params/user"},
        "params/user is named twice\n.*'a' and 'b'",
    ),
    "listed slot of two tables": (
        {"params": {**zeros(4, 2), "item": jnp.zeros((4, 2))}, "s": jnp.zeros(4)},
        {"user": TableSpec(slots=["s"]), "item": TableSpec(slots=["s"])},
        "leaf s is named twice",
    ),
    "slot listed twice": (
        {"params": zeros(4, 2), "s": jnp.zeros(4)},
        {"user": TableSpec(slots=["s", "s"])},
        "leaf s is named twice",
    ),
    "the table as its slot": (
        {"params": zeros(4, 2)},
        {"user": TableSpec(slots=["params/user"])},
        "params/user is named twice",
    ),
    "rows beyond the array": (
        {"params": zeros(4, 2)},
        {"user": TableSpec(rows=5)},
        r"rows=5, .* 1 to 4",
    ),
    "no logical rows": ({"params": zeros(4, 2)}, {"user": TableSpec(rows=0)}, "rows=0"),
    "layout of another size": (
        {"params": zeros(4, 2)},
        {"user": TableSpec(layout=ModSharded(shards=2, rows_per_shard=3))},
        "2 shards of 3 rows = 6, expected 4",
    ),
    "unknown slot": (
        {"params": zeros(4, 2), "opt": {"nu": zeros(4, 2)}},
        {"user": TableSpec("params/user", slots=["opt/mu/user"])},
        "'opt/mu/user' matches 0 leaves.*\n.*opt/nu/user",
    ),
    "slot of other rows": (
        {"params": zeros(4, 2), "s": jnp.zeros(3)},
        {"user": TableSpec(slots=["s"])},
        r"slot s .*\n.*\[3\], expected \[4, ...\]",
    ),
    "slots as one string": (
        {"params": zeros(4, 2)},
        {"user": TableSpec(slots="opt")},
        r"pass \['opt'\]",
    ),
    "names as one string": ({"params": zeros(4, 2)}, "user", r"pass \['user'\]"),
    "name twice": ({"params": zeros(4, 2)}, ["user", "user"], "named twice"),
    "empty name": ({"params": zeros(4, 2)}, [""], "non-empty"),
    "spec of a wrong type": ({"params": zeros(4, 2)}, {"user": 3}, "specified by 3"),
}


@each_of("case", ERRORS)
def test_find_tables_refuses(case):
    state, spec, message = ERRORS[case]
    with pytest.raises(TableError, match=message):
        find_tables(state, spec)


@each_of(
    "dtype",
    """
    bool int2 int4 float4_e2m1fn float8_e5m2 float8_e4m3fn
    float16 bfloat16 float32 float64
    int8 int16 int32 int64 uint8 uint16 uint32 uint64
    """.split(),
)
def test_tables_of_floats_and_integers_are_accepted(dtype):
    with jax.enable_x64(True):
        assert find_tables(zeros(4, 2, dtype=dtype), ["user"])["user"].dtype == dtype


def test_printed_table_shows_every_match():
    state = {"params": params(), "opt": ADAGRAD.init(params())}
    spec = {"user": TableSpec("params/user/embedding", rows=10)}
    text = str(find_tables(state, spec))
    assert "1 table, 1 slot: " in text
    assert "table 'user': 10 rows and 6 of padding\n" in text
    assert "  table  params/user/embedding  float32[16, 4] 0.00 MiB" in text
    assert "  slot   opt/0/sum_of_squares/user/embedding  float32[16, 4]" in text
    assert "dense    params/item/embedding  float32[24, 4]" in text
    many = {"params": zeros(4, 2), "rest": [0] * 40}
    assert str(find_tables(many, ["user"])).endswith("dense    28 more")


def test_print_asks_of_a_dense_leaf_that_looks_like_a_slot_whether_it_is_one():
    table, acc = jnp.zeros((6, 4)), jnp.zeros(6)
    state = {"emb": {"user": table}, "acc": {"user": acc, "else": acc}}
    asked = (
        "acc/user  a slot of table 'user'? TableSpec('emb/user', slots=['acc/user'])"
    )
    lines = str(find_tables(state, ["user"])).splitlines()
    assert [line for line in lines if "a slot of" in line] == [f"dense    {asked}"]
    spec = {"user": TableSpec(slots=["acc/user"])}
    assert "a slot of" not in str(find_tables(state, spec))


def test_tables_is_a_mapping_in_the_order_of_the_spec():
    tables = find_tables({"params": params()}, ["user", "item"])
    assert list(tables) == ["user", "item"] and len(tables) == 2
    assert "user" in tables and "mlp" not in tables
    assert tables != find_tables({"params": params()}, ["user"])
    assert repr(tables) == "<Tables user, item; 2 dense leaves>"


def test_split_names_a_leaf_that_is_missing_or_differs():
    state = {"params": params(), "opt": ADAGRAD.init(params())}
    tables = find_tables(state, ["user"])
    with pytest.raises(StateMismatchError, match=r"no leaf opt/0/sum_of_squares/user"):
        split({"params": params()}, tables)
    other = {"params": params(), "opt": state["opt"]}
    for value, got in (
        (jnp.zeros((USERS, 8)), r"float32\[16, 8\], expected float32\[16, 4\]"),
        (jnp.zeros((USERS, DIM), jnp.bfloat16), r"bfloat16\[16, 4\], expected float32"),
        (np.zeros((USERS, DIM), np.float32), r"ndarray float32\[16, 4\], expected"),
        ("text", "got str, expected"),
    ):
        other["params"]["user"]["embedding"] = value
        with pytest.raises(StateMismatchError, match=got):
            split(other, tables)


def test_merge_names_leaves_that_are_missing_or_have_no_place():
    state = {"params": params(), "step": 1}
    tables = find_tables(state, ["user"])
    rows, dense = split(state, tables)
    with pytest.raises(StateMismatchError, match=r"missing: params/user/embedding\n"):
        merge(state, tables, {}, dense)
    with pytest.raises(StateMismatchError, match="missing: step"):
        merge(state, tables, rows, {"params": dense["params"]})
    with pytest.raises(StateMismatchError, match="without a place: more/x"):
        merge(state, tables, rows, {**dense, "more": {"x": 1}})
    with pytest.raises(StateMismatchError, match="without a place: other/table"):
        merge(state, tables, rows | {"other": {"table": 0}}, dense)


def test_merge_takes_values_of_any_kind():
    state = {"params": zeros(4, 2), "config": "text", "step": 1}
    tables = find_tables(state, ["user"])
    rows = {"user": {"table": "a placeholder"}}
    merged = merge(state, tables, rows, {"config": {"opaque": 1}, "step": None})
    assert merged["params"]["user"] == "a placeholder"
    assert merged["config"] == {"opaque": 1} and merged["step"] is None


def test_flatten_paths_refuses_leaves_it_cannot_tell_apart():
    with pytest.raises(TableError, match="'twins/x'"):
        flatten_paths({"twins": Twins()})


class FakeDevice:
    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


class FakeSharding:
    """Gives process `i` the rows `spans[i]` (several: one device each)."""

    def __init__(self, *spans: tuple[int, int], columns=slice(None)) -> None:
        self.spans, self.columns = spans, columns

    def devices_indices_map(self, shape):
        tail = (self.columns,) * (len(shape) - 1)
        return {
            FakeDevice(i): (slice(*span), *tail) for i, span in enumerate(self.spans)
        }


def leaf(sharding, *shape) -> Leaf:
    return Leaf(
        name="x",
        path=("x",),
        shape=shape,
        dtype=np.dtype("float32"),
        sharding=sharding,  # type: ignore[arg-type]
    )


def test_slot_without_a_process_that_has_both_is_found():
    halves = leaf(FakeSharding((0, 8), (8, 16)), 16, 4)
    for slot, uncovered in (
        (FakeSharding((0, 8), (8, 16)), None),
        (FakeSharding((0, 16), (0, 16)), None),
        (FakeSharding((8, 16), (0, 8)), range(0, 8)),
        (FakeSharding((0, 16)), range(8, 16)),
        (FakeSharding((0, 4), (4, 16)), range(4, 8)),
        (None, None),
    ):
        assert _uncovered_rows(halves, leaf(slot, 16)) == uncovered


names = st.sampled_from(["user", "params", "value", "0", "opt", "a/b", "", "ünï"])
values = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(()), st.floats()
)
trees = st.recursive(
    values,
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(rest=trees, extra=trees)
def test_any_tree_is_split_and_merged_without_loss(rest, extra):
    state = {"params": {"tbl": jnp.zeros((2, 1))}, "rest": rest, "more": [extra]}
    tables = find_tables(state, {"t": TableSpec("params/tbl", slots=())})
    rows, dense = split(state, tables)
    merged = merge(state, tables, rows, dense)
    assert jax.tree.structure(merged) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(state), strict=True):
        assert a is b
    assert len(jax.tree.leaves(dense)) + 1 == len(jax.tree.leaves(state))


def test_print_asks_of_a_large_dense_leaf_that_looks_like_a_table_whether_it_is_one():
    params = {
        "user": jnp.zeros((20_000, 16)),
        "item": {"embedding": jnp.zeros((30_000, 64))},
        "wide_embedding": jnp.zeros((16_384, 4096), jnp.bfloat16),
        "kernel": jnp.zeros((16_384, 4096), jnp.bfloat16),
        "few": jnp.zeros((9_999, 64)),
        "counts": jnp.zeros((60_000, 8), jnp.int32),
    }
    params = jax.eval_shape(lambda: params)
    state = {"params": params, "opt_state": {"mu": params, "nu": params}}
    lines = str(find_tables(state, ["user"])).splitlines()
    assert [line for line in lines if "a table?" in line] == [
        "dense    params/item/embedding  a table? Each save holds all of its 7.32 MiB",
        "dense    params/wide_embedding  a table? Each save holds all of its 128.00 MiB",
    ]
    every = ["user", "item", "wide_embedding"]
    assert "a table?" not in str(find_tables(state, every))
