"""Slots are found whatever the roots are called; what is in doubt is said, and stays dense."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cnr_jax
from cnr_jax import ModSharded, TableSpec, find_tables
from cnr_jax.state.doubts import _TELLING_ROWS

USERS, ITEMS, DIM = 16, 24, 4
ADAM, ADAGRAD = optax.adam(0.1), optax.adagrad(0.1)
MOMENTS, SUMS = ["0/mu", "0/nu"], ["0/sum_of_squares"]


def params(users: int = USERS, items: int = ITEMS, *more: str) -> dict[str, Any]:
    return {
        "user": {"embedding": jnp.ones((users, DIM))},
        "item": {"embedding": jnp.ones((items, DIM))},
        "mlp": [jnp.ones((DIM, DIM)), jnp.ones(DIM)],
        **{name: jnp.ones(3) for name in more},
    }


P, ALIKE = params(), params(16, 16)


def labels(tree: Any) -> Any:
    def label(path: Any, _: Any) -> str:
        return "dense" if "mlp" in str(path) else "table"

    return jax.tree_util.tree_map_with_path(label, tree)


def mask(tree: Any) -> Any:
    return jax.tree.map(lambda name: name == "table", labels(tree))


def without_classes(tree: Any) -> Any:
    """A state as it comes back from a restore that knows no classes: dicts by name and number."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    elif isinstance(tree, tuple | list):
        tree = {str(i): each for i, each in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: without_classes(value) for key, value in tree.items()}
    return tree


OPTIMIZERS: dict[str, tuple[Any, list[str]]] = {
    "adam": (ADAM, MOMENTS),
    "adagrad": (ADAGRAD, SUMS),
    "momentum": (optax.sgd(0.1, 0.9), ["0/trace"]),
    "rmsprop": (optax.rmsprop(0.1), ["0/nu"]),
    "chain": (optax.chain(optax.clip(1.0), ADAM), ["1/0/mu", "1/0/nu"]),
    "multi_transform": (
        optax.multi_transform({"table": ADAGRAD, "dense": ADAM}, labels),
        ["inner_states/table/inner_state/0/sum_of_squares"],
    ),
    "masked": (optax.masked(ADAGRAD, mask), ["inner_state/0/sum_of_squares"]),
    "inject": (
        optax.inject_hyperparams(optax.adam)(0.1),
        ["inner_state/0/mu", "inner_state/0/nu"],
    ),
    "multi_steps": (
        optax.MultiSteps(ADAGRAD, 2),
        ["acc_grads", "inner_opt_state/0/sum_of_squares"],
    ),
    "sgd": (optax.sgd(0.1), []),
}


def found(state: Any, spec: Any = ("user", "item")) -> dict[str, list[str]]:
    """Names of the slots of each table."""
    tables = find_tables(state, spec if isinstance(spec, dict) else list(spec))
    return {name: [slot.name for slot in table.slots] for name, table in tables.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_roots_may_be_called_anything(optimizer: str) -> None:
    tx, slots = OPTIMIZERS[optimizer]
    state = tx.init(P)
    for whole, prefix in (
        ({"p": P, "o": state}, "o/"),
        ((P, state), "1/"),
        ([P, state, 3], "1/"),
        ({**P, "x": state}, "x/"),
        ({"run": {"weights": P, "rest": {"s": state}}}, "run/rest/s/"),
        ({"p": P, "o": state, "ema": P, "target_p": P}, "o/"),
    ):
        head = prefix.split("/")[0]
        where = {"o": "p/", "1": "0/", "x": "", "run": "run/weights/"}[head]
        spec = {name: f"{where}{name}/embedding" for name in ("user", "item")}
        want = [prefix + slot for slot in slots]
        assert found(whole, spec) == {"user": want, "item": want}
        tables = find_tables(jax.eval_shape(lambda whole=whole: whole), spec)
        assert tables == find_tables(whole, spec)


def test_states_of_our_row_optimizers_are_known_by_their_classes() -> None:
    tables = {name: P[name] for name in ("user", "item")}
    for make in (cnr_jax.optim.lazy_adam, cnr_jax.optim.rowwise_adagrad):
        state = make(0.1).init(tables)
        usual = found({"params": tables, "opt_state": state})["user"]
        want = [name.replace("opt_state", "s") for name in usual]
        assert want and found({"p": tables, "s": state}) == {"user": want, "item": want}


@pytest.mark.parametrize(
    "make",
    [
        cnr_jax.optim.rowwise_adagrad,
        cnr_jax.optim.lazy_adam,
        cnr_jax.optim.lazy_sgd,
    ],
)
def test_states_of_single_tables_are_theirs(make: Any) -> None:
    optimizer = make(0.1)
    user, item, alike = (jnp.ones((n, DIM)) for n in (USERS, ITEMS, USERS))
    of = {"user": optimizer.init(user), "item": optimizer.init(item)}
    fields = [f for f in of["user"]._fields if f != "count"]
    by_table = {
        name: [f"slots/{name}/{field}" for field in fields] for name in ("user", "item")
    }
    params = {"user": user, "item": item}
    dense = {"w": jnp.ones((USERS + 1, 3)), "b": jnp.ones(USERS)}
    assert found({"params": params, "slots": of}) == by_table
    assert found({**params, "slots": of}) == by_table
    assert found({"params": {**params, "dense": dense}, "slots": of}) == by_table
    beside_copies = found({"params": params, "ema": params, "slots": of})
    assert beside_copies == {n: ["ema", *slots] for n, slots in by_table.items()}
    twins = {"user": user, "item": alike}
    of_twins = {name: optimizer.init(table) for name, table in twins.items()}
    assert found({**twins, "slots": of_twins}) == by_table
    one = [f"slots/{field}" for field in fields]
    assert found({"user": user, "slots": of["user"]}, ["user"]) == {"user": one}
    # Whose they are of two that are alike cannot be told from where they lie.
    unclear = {**twins, "one": of_twins["user"], "two": of_twins["item"]}
    assert found(unclear) == {"user": [], "item": []}
    tables = find_tables({"user": user, "slots": of["user"]}, ["user"])
    assert tables["user"].rows == USERS and not tables.doubts


def test_a_vector_in_a_state_of_optax_is_not_of_a_matrix() -> None:
    state = optax.adagrad(0.1).init(jnp.ones(USERS))
    whole = {"user": jnp.ones((USERS, DIM)), "slots": state}
    assert found(whole, ["user"]) == {"user": []}


ONE, OTHER = params(USERS, ITEMS, "one"), params(USERS, ITEMS, "other")
USER, ITEM = P["user"], P["item"]
MODEL = nnx.Dict(
    {k: nnx.Embed(n, DIM, rngs=nnx.Rngs(0)) for k, n in (("user", USERS),)}
)


def keras(*slots: str, folder: str = "optimizer_variables") -> dict[str, Any]:
    """The tree of `keras.Model.get_state_tree()`, in which one path ends another."""
    shapes = {"m/emb/user/embeddings": (16, 4), "m/user/embeddings": (24, 4)}
    shapes |= {"m/dense/kernel": (8, 1), "m/dense/bias": (1,)}
    tree: dict[str, Any] = {}
    for path, shape in shapes.items():
        *keys, name = path.split("/")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[name] = jnp.ones(shape)
    flat = {
        f"{path.replace('/', '_')}_{slot}": jnp.ones(shape)
        for path, shape in shapes.items()
        for slot in slots
    }
    flat |= {"iteration": jnp.int32(0), "learning_rate": jnp.float32(0.1)}
    return {"trainable_variables": tree, folder: {"adam_2": flat}}


def keras_by_path() -> dict[str, Any]:
    """Variables of a Keras model and its optimizer by their paths."""
    shapes = {"user/embeddings": (16, 4), "item_1/embeddings": (16, 4), "d/k": (8, 1)}
    flat = {path: jnp.ones(shape) for path, shape in shapes.items()}
    for path, shape in shapes.items():
        flat[f"adagrad/{path.replace('/', '_')}_accumulator"] = jnp.ones(shape)
    return {**flat, "adagrad/iteration": jnp.int32(0)}


def both(slots: list[str]) -> dict[str, list[str]]:
    return {"user": slots, "item": slots}


LAYOUTS: dict[str, tuple[Any, Any, dict[str, list[str]]]] = {
    "a list of states": (
        {"params": P, "states": [ADAM.init(P), ADAGRAD.init(P)]},
        None,
        both(["states/0/0/mu", "states/0/0/nu", "states/1/0/sum_of_squares"]),
    ),
    "a list of states, one a module": (
        {"params": P, "s": [ADAM.init(USER), ADAGRAD.init(ITEM)]},
        None,
        {"user": ["s/0/0/mu", "s/0/0/nu"], "item": ["s/1/0/sum_of_squares"]},
    ),
    "a list of states, one an array": (
        [P, [ADAM.init(USER["embedding"]), ADAGRAD.init(ITEM["embedding"])]],
        None,
        {"user": ["1/0/0/mu", "1/0/0/nu"], "item": ["1/1/0/sum_of_squares"]},
    ),
    "states by name, tables alike": (
        {
            "w": ALIKE,
            "s": {
                "user": ADAM.init(ALIKE["user"]["embedding"]),
                "item": ADAGRAD.init(ALIKE["item"]),
            },
        },
        None,
        {"user": ["s/user/0/mu", "s/user/0/nu"], "item": ["s/item/0/sum_of_squares"]},
    ),
    "two models, told by their leaves": (
        {"a": ONE, "b": OTHER, "x": ADAM.init(ONE), "y": ADAGRAD.init(OTHER)},
        {"a": "a/user", "b": "b/user"},
        {"a": ["x/0/mu", "x/0/nu"], "b": ["y/0/sum_of_squares"]},
    ),
    "two models, told by their places": (
        {"a": {"p": P, "s": ADAM.init(P)}, "b": {"p": P, "s": ADAGRAD.init(P)}},
        {"a": "a/p/user", "b": "b/p/user"},
        {"a": ["a/s/0/mu", "a/s/0/nu"], "b": ["b/s/0/sum_of_squares"]},
    ),
    "two towers, told by their shapes": (
        {"u": USER, "i": ITEM, "su": ADAGRAD.init(USER), "si": ADAGRAD.init(ITEM)},
        {"u": "u/embedding", "i": "i/embedding"},
        {"u": ["su/0/sum_of_squares"], "i": ["si/0/sum_of_squares"]},
    ),
    "states that lost their classes": (
        {"p": P, "o": without_classes((ADAM.init(P), ADAGRAD.init(P)))},
        None,
        both(["o/0/0/mu", "o/0/0/nu", "o/1/0/sum_of_squares"]),
    ),
    "nnx under other names": (
        {
            "m": nnx.state(MODEL),
            "s": nnx.state(nnx.Optimizer(MODEL, ADAM, wrt=nnx.Param)),
        },
        {"user": "user"},
        {"user": ["s/opt_state/0/mu", "s/opt_state/0/nu"]},
    ),
    "keras": (
        keras("momentum", "velocity", "velocity_hat"),
        {"u": "emb/user/embeddings", "i": "trainable_variables/m/user/embeddings"},
        {
            "u": [
                f"optimizer_variables/adam_2/m_emb_user_embeddings_{slot}"
                for slot in ("momentum", "velocity", "velocity_hat")
            ],
            "i": [
                f"optimizer_variables/adam_2/m_user_embeddings_{slot}"
                for slot in ("momentum", "velocity", "velocity_hat")
            ],
        },
    ),
    "keras, two models": (
        {"a": keras("accumulator"), "b": keras("momentum", folder="o")},
        {
            "a": "a/trainable_variables/m/user/embeddings",
            "b": "b/.../m/user/embeddings",
        },
        {
            "a": ["a/optimizer_variables/adam_2/m_user_embeddings_accumulator"],
            "b": ["b/o/adam_2/m_user_embeddings_momentum"],
        },
    ),
    "keras, variables by their paths": (
        keras_by_path(),
        {"u": "user/embeddings", "i": "item_1/embeddings"},
        {
            "u": ["adagrad/user_embeddings_accumulator"],
            "i": ["adagrad/item_1_embeddings_accumulator"],
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_are_found_by_trees_and_shapes(layout: str) -> None:
    state, spec, want = LAYOUTS[layout]
    spec = spec or ["user", "item"]
    if isinstance(spec, dict):
        spec = {k: v.replace("...", "trainable_variables") for k, v in spec.items()}
    assert found(state, spec) == want
    tables = find_tables(state, spec)
    assert tables.doubts == ()
    for table in tables.values():
        assert all(slot.shape == table.leaf.shape for slot in table.slots)
    # Said by hand it is the same.
    listed = {
        name: TableSpec(
            "/".join(table.path), slots=["/".join(slot.path) for slot in table.slots]
        )
        for name, table in tables.items()
    }
    assert find_tables(state, listed) == tables


MANY = jnp.ones((_TELLING_ROWS, 64))
# State, tables, and the leaves in doubt of each.
DOUBTFUL: dict[str, tuple[Any, Any, dict[str, list[str]]]] = {
    "moments by hand": (
        {"p": P, "m": P, "v": P},
        {"user": "p/user/embedding"},
        {"user": ["m/user/embedding", "v/user/embedding"]},
    ),
    "an accumulator a row": (
        {"emb": MANY, "acc": jnp.ones(len(MANY))},
        ["emb"],
        {"emb": ["acc"]},
    ),
    "one momentum of no class": (
        {"p": P, "o": without_classes(optax.sgd(0.1, 0.9).init(P))},
        {"user": "p/user/embedding"},
        {"user": ["o/0/trace/user/embedding"]},
    ),
    "keras without names": (
        {
            "trainable": [jnp.ones((16, 4)), jnp.ones((24, 4)), jnp.ones((8, 1))],
            "optimizer": [
                *(jnp.int32(0), jnp.float32(0.1)),
                *(jnp.ones((16, 4)), jnp.ones((24, 4)), jnp.ones((8, 1))),
            ],
        },
        {"u": "trainable/0", "i": "trainable/1"},
        {"u": ["optimizer/2"], "i": ["optimizer/3"]},
    ),
    "a list of states, tables alike": (
        {"w": ALIKE, "s": [ADAM.init(ALIKE[k]["embedding"]) for k in ("item", "user")]},
        None,
        {"user": ["s/1/0/mu", "s/1/0/nu"], "item": ["s/0/0/mu", "s/0/0/nu"]},
    ),
    "two models alike": (
        {"a": P, "b": P, "s": [ADAGRAD.init(P), ADAGRAD.init(P)]},
        {"b": "b/user/embedding", "a": "a/user/embedding"},
        {
            "a": ["s/0/0/sum_of_squares/user/embedding"],
            "b": ["s/1/0/sum_of_squares/user/embedding"],
        },
    ),
    "a copy": (
        {"p": P, "o": ADAM.init(P), "ema": P},
        {"user": "p/user/embedding"},
        {"user": ["ema/user/embedding"]},
    ),
    "a copy of variables": (
        {"params": P, "opt_state": ADAM.init(P), "ema": {"params": P}},
        {"user": "params/user/embedding"},
        {"user": ["ema/params/user/embedding"]},
    ),
    "heads of one shape": (
        {
            "enc": {
                "mu": {"kernel": jnp.ones((9, 4))},
                "var": {"kernel": jnp.ones((9, 4))},
            }
        },
        {"t": "enc/var/kernel"},
        {"t": ["enc/mu/kernel"]},
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_what_is_in_doubt_is_dense_and_the_spec_to_write_is_said(case: str) -> None:
    state, spec, doubtful = DOUBTFUL[case]
    spec = spec or ["user", "item"]
    tables = find_tables(state, spec)
    assert len(tables.doubts) == len(doubtful)
    printed, written = str(tables), {}
    for text in tables.doubts:
        # As one would copy it.
        _, _, rest = text.partition("find_tables(state, ")
        (name, listed), *_ = eval(rest.partition("); if not")[0]).items()
        assert all(
            "/".join(path) in text
            for path in tables.dense
            if "/".join(path) in doubtful[name]
        )
        assert f"a slot of table {name!r}? TableSpec({listed.path!r}" in printed
        written[name] = listed
    paths = spec if isinstance(spec, dict) else {name: name for name in spec}
    as_written = find_tables(state, {**paths, **written})
    for name, table in tables.items():
        before = ["/".join(slot.path) for slot in table.slots]
        assert not set(before) & set(doubtful[name])
        after = ["/".join(slot.path) for slot in as_written[name].slots]
        assert after == before + doubtful[name]
    assert as_written.doubts == ()
    # Or that they are none.
    none = {
        name: TableSpec(
            spec_.path, slots=["/".join(s.path) for s in tables[name].slots]
        )
        for name, spec_ in written.items()
    }
    assert find_tables(state, none).doubts == ()


def test_a_written_spec_keeps_rows_and_layout() -> None:
    layout = ModSharded(shards=2, rows_per_shard=8)
    spec = {"user": TableSpec("p/user/embedding", rows=13, layout=layout)}
    (text,) = find_tables({"p": P, "m": P}, spec).doubts
    found = eval(text.partition("find_tables(state, ")[2].partition("); if not")[0])
    assert (found["user"].rows, found["user"].layout) == (13, layout)


@pytest.mark.parametrize(
    "more",
    [
        {"scale": jnp.ones((USERS, 1)), "wide": {"user": {"bias": jnp.ones(USERS)}}},
        {"keys": jax.random.split(jax.random.key(0), USERS)},
        {"host": np.ones((USERS, DIM))},
    ],
)
def test_parameters_and_what_cannot_be_a_slot_are_in_no_doubt(more: Any) -> None:
    tree = {**P, **more}
    arrays = {k: v for k, v in tree.items() if k not in ("keys", "host")}
    for state in (
        {"params": tree, "opt_state": ADAM.init(arrays)},
        {"p": arrays, "o": ADAM.init(arrays), **more},
    ):
        assert (
            find_tables(state, {"user": f"{next(iter(state))}/user/embedding"}).doubts
            == ()
        )


def test_less_than_a_hundredth_of_a_table_is_asked_in_print_only() -> None:
    state = {"emb": {"user": jnp.ones((512, 200))}, "acc": {"user": jnp.ones(512)}}
    tables = find_tables(state, {"user": "emb/user"})
    assert tables.doubts == () and "acc/user  a slot of table 'user'?" in str(tables)
