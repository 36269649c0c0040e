"""Row-wise Adagrad, lazy Adam and lazy SGD, against plain numpy and against dense optax."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.errors import OptionError
from cnr_jax.optim import (
    LazyAdamState,
    RowwiseAdagradState,
    lazy_adam,
    lazy_sgd,
    rowwise_adagrad,
)
from cnr_jax.state.optimizer_states import moving_parts

from ..conftest import each_of

OPTIMIZERS = {"adagrad": rowwise_adagrad(0.1), "adam": lazy_adam(0.1)}
both = pytest.mark.parametrize("name", OPTIMIZERS)
V, DIM, N = 7, 3, 12


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain_step(
    name: str, leaves: list[np.ndarray], ids: Any, grads: Any, where: Any, t: int
) -> list[np.ndarray]:
    """One step in float64, a loop over rows. `leaves`: the table, then its slots."""
    table, *slots = (leaf.copy() for leaf in leaves)
    rows = len(table)
    sums: dict[int, np.ndarray] = {}
    for i, grad, keep in zip(ids, grads, where, strict=True):
        row = min(max(i + rows if i < 0 else i, 0), rows - 1)
        if keep:
            sums[row] = sums.get(row, 0) + np.asarray(grad, np.float64)
    for row, g in sums.items():
        if name == "adagrad":
            slots[0][row] += np.mean(g**2)
            table[row] -= 0.1 * g / np.sqrt(slots[0][row] + 1e-7)
        else:
            mu, nu = slots
            mu[row] = 0.9 * mu[row] + 0.1 * g
            nu[row] = 0.999 * nu[row] + 0.001 * g**2
            root = np.sqrt(nu[row] / (1 - 0.999**t))
            table[row] -= 0.1 * (mu[row] / (1 - 0.9**t)) / (root + 1e-8)
    return [table, *slots]


def slots_of(state: Any) -> list[Any]:
    assert state._fields[0] == "count"
    return list(state[1:])


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


# Jitted: op by op, each new shape costs dozens of small compilations. And how fast they run is of
# no matter.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 0}
UPDATES = {
    name: jax.jit(o.update, compiler_options=QUICKLY_COMPILED)
    for name, o in OPTIMIZERS.items()
}
batches = st.lists(
    st.lists(
        st.tuples(st.integers(-3 * V, 3 * V), st.booleans()), min_size=N, max_size=N
    ),
    min_size=1,
    max_size=4,
)


@both
@settings(max_examples=60, deadline=None)
@given(steps=batches, seed=st.integers(0, 99))
def test_steps_equal_plain_reference_and_spare_rows_not_looked_up(
    name: str, steps: list[list[tuple[int, bool]]], seed: int
) -> None:
    table = normal(seed, V, DIM).at[:, 0].set(-0.0)
    state = OPTIMIZERS[name].init(table)
    want = [np.asarray(leaf, np.float64) for leaf in (table, *slots_of(state))]
    touched = _touched_for(table)
    for t, step in enumerate(steps, 1):
        ids, where = (np.array(column) for column in zip(*step, strict=True))
        # Sums of such gradients are exact: Adam's step has the sign of what is left,
        # however little, when a row's gradients cancel.
        grads = np.round(np.array(normal(seed + t, N, DIM)) * 8) / 8
        grads[~where] = np.nan  # padding holds anything
        before = [table, *slots_of(state)]
        table, state = UPDATES[name](grads, ids, table, state, where=where)
        want = plain_step(name, want, ids, grads, where, t)
        after = [table, *slots_of(state)]
        for got, expected in zip(after, want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
        touched = _record(touched, ids, where)
        spared = np.asarray(touched.stamps["user"]) != t
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(bits(old)[spared], bits(new)[spared])
        assert int(state.count) == t


def _touched_for(table: jax.Array) -> cnr.Touched:
    state = {"user": table}
    return cnr.init_touched(state, cnr.find_tables(state, ["user"]))


@jax.jit
def _record(touched: cnr.Touched, ids: Any, where: Any) -> cnr.Touched:
    return cnr.record(touched, {"user": cnr.Lookup(ids, where=where)})


@each_of(
    ("ids", "rows"),
    [
        (np.array([0, 299, 255], np.uint16), [0, 299, 255]),
        (np.array([0, 255], np.uint8), [0, 255]),
        (np.array([-1, 127, -128], np.int8), [299, 127, 172]),
        (np.array([2**31 - 1, 3], np.uint32), [299, 3]),
        (np.array([-301, -300, 300], np.int32), [0, 0, 299]),
    ],
)
def test_ids_of_any_width_move_the_rows_that_jax_looks_up(ids: Any, rows: Any) -> None:
    table = jnp.zeros((300, 2))
    if ids.dtype != np.int8:  # jax 0.10.2 cannot wrap these itself
        np.testing.assert_array_equal(jnp.arange(300)[ids], rows)
    optimizer = OPTIMIZERS["adagrad"]
    new, _ = UPDATES["adagrad"](
        jnp.ones((len(ids), 2)), ids, table, optimizer.init(table)
    )
    np.testing.assert_array_equal(np.flatnonzero(new[:, 0]), np.unique(rows))


def test_gradients_are_of_the_rows_that_a_loss_looks_up() -> None:
    table, weights = normal(0, V, DIM), normal(1, 2, 3, DIM)
    ids = jnp.array([[1, 1, -1], [4, 1, 0]])

    @functools.partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    def both_ways(table: Any) -> Any:
        row_grads = jax.grad(lambda rows: jnp.sum(weights * rows**2))(table[ids])
        dense = jax.grad(lambda table: jnp.sum(weights * table[ids] ** 2))(table)
        ours, theirs = OPTIMIZERS["adam"], optax.adam(0.1)
        by_rows, _ = ours.update(row_grads, ids, table, ours.init(table))
        updates, _ = theirs.update(dense, theirs.init(table))
        return by_rows, table + updates

    np.testing.assert_allclose(*both_ways(table), rtol=1e-5, atol=1e-6)


def rate(count: Any) -> Any:
    return 0.5 / (1.0 + count)


@each_of(
    ("ours", "theirs", "dim"),
    [
        (rowwise_adagrad(0.1), optax.adagrad(0.1), 1),
        (rowwise_adagrad(rate), optax.adagrad(rate), 1),
        (rowwise_adagrad(0.1, 0.0, 1e-3), optax.adagrad(0.1, 0.0, 1e-3), 1),
        (rowwise_adagrad(0.1), optax.adagrad(0.1), DIM),
        (lazy_adam(0.1), optax.adam(0.1), DIM),
        (lazy_adam(rate, 0.8, 0.9, 1e-3), optax.adam(rate, 0.8, 0.9, 1e-3), DIM),
        (lazy_sgd(0.1), optax.sgd(0.1, 0.9), DIM),
        (lazy_sgd(rate, 0.5, True), optax.sgd(rate, 0.5, nesterov=True), DIM),
    ],
)
def test_looking_up_every_row_once_is_dense_optax(
    ours: Any, theirs: Any, dim: int
) -> None:
    table = expected = normal(0, V, dim)
    state, dense_state = ours.init(table), theirs.init(table)
    update = jax.jit(ours.update, compiler_options=QUICKLY_COMPILED)

    @functools.partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    def dense_update(grads: Any, state: Any, table: Any) -> Any:
        updates, state = theirs.update(grads, state, table)
        return optax.apply_updates(table, updates), state

    for step in range(5):
        grads = normal(step + 1, V, dim)
        if isinstance(state, RowwiseAdagradState):
            # With elements of one size, their mean square is the square of each.
            grads = jnp.sign(grads) * jnp.abs(grads[:, :1])
        ids = jnp.asarray(np.random.default_rng(step).permutation(V))
        table, state = update(grads[ids], ids, table, state)
        expected, dense_state = dense_update(grads, dense_state, expected)
        np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)


@both
def test_sixteen_bit_table_is_rounded_once_and_has_float32_slots(name: str) -> None:
    optimizer, ids = OPTIMIZERS[name], jnp.array([5, 2, 2])
    grads = normal(1, 3, DIM).astype(jnp.bfloat16)
    table = normal(0, V, DIM).astype(jnp.bfloat16)
    wide = table.astype(jnp.float32)
    new, state = UPDATES[name](grads, ids, table, optimizer.init(table))
    exact, wide_state = UPDATES[name](
        grads.astype(jnp.float32), ids, wide, optimizer.init(wide)
    )
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new, exact.astype(jnp.bfloat16))
    for slot, wide_slot in zip(slots_of(state), slots_of(wide_state), strict=True):
        assert slot.dtype == jnp.float32
        np.testing.assert_array_equal(slot, wide_slot)


@both
def test_tables_of_a_tree_are_trained_apart_and_none_skips_one(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    tables = {"user": normal(0, V, DIM), "item": {"embedding": normal(1, 4, 2)}}
    ids = {"user": jnp.array([[3, 1], [1, 0]]), "item": None}
    grads = {"user": normal(2, 2, 2, DIM), "item": None}
    where = {"user": jnp.array([True, False]), "item": None}
    ids["item"] = grads["item"] = where["item"] = {"embedding": None}
    state = optimizer.init(tables)
    new, new_state = UPDATES[name](grads, ids, tables, state, where=where)
    alone, alone_state = UPDATES[name](
        grads["user"][:, 0],
        jnp.array([3, 1]),
        tables["user"],
        optimizer.init(tables["user"]),
    )
    np.testing.assert_allclose(new["user"], alone, rtol=1e-6)
    for slot, alone_slot in zip(
        slots_of(new_state), slots_of(alone_state), strict=True
    ):
        np.testing.assert_allclose(slot["user"], alone_slot, rtol=1e-6)
    np.testing.assert_array_equal(new["item"]["embedding"], tables["item"]["embedding"])
    counts = (new_state.count["user"], new_state.count["item"]["embedding"])
    assert [int(count) for count in counts] == [1, 0]


@both
def test_batch_without_ids_only_advances_the_count(name: str) -> None:
    optimizer, table = OPTIMIZERS[name], normal(0, V, DIM)
    state = optimizer.init(table)
    new, new_state = UPDATES[name](
        jnp.zeros((0, DIM)), jnp.zeros(0, jnp.int32), table, state
    )
    for old, now in zip((table, *state), (new, *new_state), strict=True):
        assert now.shape == () or np.array_equal(old, now)
    assert int(new_state.count) == 1
    assert optimizer.update({}, {}, {}, optimizer.init({}))[0] == {}


def test_count_at_its_limit_stays_there() -> None:
    optimizer, table = OPTIMIZERS["adam"], normal(0, V, DIM)
    state = optimizer.init(table)._replace(count=jnp.int32(2**31 - 1))
    new, state = UPDATES["adam"](normal(1, 1, DIM), jnp.array([2]), table, state)
    assert int(state.count) == 2**31 - 1
    assert np.isfinite(new).all()


# Its place in a train state.


def containers(name: str) -> dict[str, Any]:
    params = {"user": {"embedding": normal(0, V, DIM)}, "item": normal(1, V, DIM)}
    slots = OPTIMIZERS[name].init(params)
    model = nnx.State({"params": params, "opt_state": slots._asdict()})
    return {
        "classes": {"params": params, "opt_state": slots},
        "no classes": {"params": params, "opt_state": slots._asdict()},
        "chained": {"params": params, "opt_state": {"rows": slots, "dense": ()}},
        "nnx": model,
    }


@both
@pytest.mark.parametrize("container", ["classes", "no classes", "chained", "nnx"])
def test_slots_are_found_and_not_taken_for_those_of_dense_optimizers(
    name: str, container: str
) -> None:
    state = containers(name)[container]
    tables = cnr.find_tables(state, ["user", "item"])
    fields = {"adagrad": RowwiseAdagradState, "adam": LazyAdamState}[name]._fields[1:]
    for table in tables.values():
        assert [slot.name.split("/")[-1] for slot in table.slots] == sorted(fields)
        assert not moving_parts(state, table)
    counts = [path for path in tables.dense if "count" in path]
    assert len(counts) == len(tables.dense) == 2
    cnr.init_touched(state, tables)


@both
def test_nnx_model_is_trained_through_its_pure_dict(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    model = nnx.Dict({"user": nnx.Embed(V, DIM, rngs=nnx.Rngs(0))})
    params = nnx.state(model)
    tables = nnx.to_pure_dict(params)
    state = {"params": params, "optimizer": optimizer.init(tables)}
    found = cnr.find_tables(state, ["user"])["user"]
    assert len(found.slots) == len(optimizer.init(tables)) - 1
    ids = {"user": {"embedding": jnp.array([4])}}
    grads = {"user": {"embedding": jnp.ones((1, DIM))}}
    new, _ = UPDATES[name](grads, ids, tables, state["optimizer"])
    before = np.asarray(tables["user"]["embedding"])
    nnx.replace_by_pure_dict(params, new)
    nnx.update(model, params)
    changed = np.any(np.asarray(model["user"].embedding[...]) != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [4]


# Jitted steps on a mesh.


def mesh_of(kind: AxisType, *shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("rows", "columns")[: len(shape)], (kind,) * len(shape))


@functools.cache
def trained(
    name: str, place: Any, batch_spec: Any, steps: int = 2, rows: int = 64
) -> Any:
    """Trains a table of 4 columns at `place`, by a jitted step that donates it."""
    optimizer, table = OPTIMIZERS[name], normal(0, rows, 4)
    batch_place = None
    if place is not None:
        table = jax.device_put(table, place)
        batch_place = NamedSharding(place.mesh, batch_spec)
    state = optimizer.init(table)
    step = jax.jit(lambda *args: optimizer.update(*args), donate_argnums=(2, 3))
    for seed in range(steps):
        ids = np.random.default_rng(seed).integers(-70, 70, 16).astype(np.int32)
        grads, ids = jax.device_put((normal(seed + 1, 16, 4), ids), batch_place)
        old = (table, *state)
        table, state = step(grads, ids, table, state)
        assert all(leaf.is_deleted() for leaf in old)
    if place is None or place.spec == table.sharding.spec:
        # Placed by `init` as by a step: the second step needs no new program.
        assert step._cache_size() == 1
    return table, state, step.lower(grads, ids, table, state).compile()


PLACES = [
    (AxisType.Auto, (8,), P("rows"), P("rows")),
    (AxisType.Auto, (8,), P("rows", None), P()),
    (AxisType.Auto, (4, 2), P("rows", "columns"), P("rows")),
    (AxisType.Explicit, (8,), P("rows", None), P("rows")),
    (AxisType.Explicit, (4, 2), P("rows", "columns"), P(("rows", "columns"))),
]


# Each place with one of the two optimizers by default, which add to rows alike.
@pytest.mark.parametrize(
    ("name", "kind", "shape", "spec", "batch_spec"),
    [
        pytest.param(name, *place, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, place in enumerate(PLACES)
        for j, name in enumerate(OPTIMIZERS)
    ],
)
def test_sharded_step_keeps_shardings_and_moves_no_table(
    name: str, kind: AxisType, shape: tuple[int, ...], spec: P, batch_spec: P
) -> None:
    place = NamedSharding(mesh_of(kind, *shape), spec)
    table, state, compiled = trained(name, place, batch_spec)
    alone, alone_state, _ = trained(name, None, None)
    assert table.sharding.is_equivalent_to(place, 2)
    for slot, expected in zip(slots_of(state), slots_of(alone_state), strict=True):
        by_rows = NamedSharding(place.mesh, P(*spec[: slot.ndim]))
        assert slot.sharding.is_equivalent_to(by_rows, slot.ndim)
        np.testing.assert_allclose(slot, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table, alone, rtol=1e-5, atol=1e-6)
    sizes = collective_sizes(compiled.as_text())
    assert sizes
    assert max(sizes) <= 16 * 4  # the batch; a table has 64 * 4


def collective_sizes(hlo: str) -> list[int]:
    """Elements in each result of a collective operation."""
    pattern = r"= (.*?) (?:all-|reduce-scatter|collective-)[\w-]*\("
    shapes = [
        s for line in re.findall(pattern, hlo) for s in re.findall(r"\[(.*?)\]", line)
    ]
    return [int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes]


@both
def test_donated_step_writes_in_place(name: str) -> None:
    table, state, compiled = trained(name, None, None, steps=1)
    donated = sum(leaf.nbytes for leaf in (table, *state))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == donated
    # Nothing is copied: all that is held beside is of the size of the batch.
    small = memory.temp_size_in_bytes
    table, state, compiled = trained(name, None, None, steps=1, rows=1 << 14)
    assert compiled.memory_analysis().temp_size_in_bytes == small < table.nbytes / 20


@both
def test_scan_over_batches_equals_separate_steps(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    place = NamedSharding(mesh_of(AxisType.Auto, 8), P("rows"))
    table = jax.device_put(normal(0, 64, 4), place)
    state = optimizer.init(table)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (3, 16)))
    grads = normal(1, 3, 16, 4)

    @jax.jit
    def scanned(table: Any, state: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            return optimizer.update(*batch, *carry), None

        return jax.lax.scan(body, (table, state), (grads, ids))[0]

    got, got_state = scanned(table, state)
    update = UPDATES[name]
    for step in range(3):
        table, state = update(grads[step], ids[step], table, state)
    assert got.sharding.is_equivalent_to(place, 2)
    sizes = collective_sizes(scanned.lower(table, state).compile().as_text())
    assert max(sizes) <= 16 * 4
    assert int(got_state.count) == 3
    for a, b in zip((got, *got_state), (table, *state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@both
def test_init_in_jit_and_of_explicit_mesh_places_slots_like_the_table(
    name: str,
) -> None:
    place = NamedSharding(mesh_of(AxisType.Explicit, 8), P("rows", None))
    table = jax.device_put(normal(0, 64, 4), place)
    with jax.set_mesh(place.mesh):
        state = jax.jit(OPTIMIZERS[name].init)(table)
    assert state.count.sharding.is_fully_replicated
    for slot in slots_of(state):
        assert slot.sharding.spec[0] == "rows"


@both
def test_repeated_runs_have_the_same_bits(name: str) -> None:
    place = NamedSharding(mesh_of(AxisType.Auto, 8), P("rows"))
    table = jax.device_put(normal(0, 64, 4), place)
    state, update = OPTIMIZERS[name].init(table), UPDATES[name]
    ids = np.random.default_rng(0).integers(0, 5, 4096)
    batch = jax.device_put((normal(1, 4096, 4), ids), place)
    first = jax.tree.map(bits, update(*batch, table, state))
    for _ in range(5):
        again = jax.tree.map(bits, update(*batch, table, state))
        jax.tree.map(np.testing.assert_array_equal, first, again)


# What is refused.

TABLE = jnp.zeros((V, DIM))
IDS, GRADS = jnp.zeros(4, jnp.int32), jnp.zeros((4, DIM))
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "float ids": ({"ids": GRADS[:, 0]}, "ids are float32"),
    "no gradients": ({"row_grads": None}, "row_grads cannot be made an array"),
    "dense gradients": ({"row_grads": TABLE}, r"expected floats\[4, 3\]"),
    "integer gradients": ({"row_grads": GRADS.astype(int)}, r"got int32\[4, 3\]"),
    "integer mask": ({"where": IDS}, r"where does not fit .*\n  got int32\[4\]"),
    "long mask": ({"where": jnp.ones(5, bool)}, r"got bool\[5\]"),
    "ids by name": ({"ids": {"user": IDS}}, "expected integers|cannot be made"),
    "tables by name": ({"tables": {"user": TABLE}}, "row_grads has another structure"),
    "state first": (
        {"tables": OPTIMIZERS["adam"].init(TABLE), "state": TABLE},
        "the state is not of this optimizer\n  got ArrayImpl",
    ),
    "another's state": (
        {"state": OPTIMIZERS["adagrad"].init(TABLE)},
        "got RowwiseAdagradState, expected LazyAdamState",
    ),
    "other slots": (
        {"state": OPTIMIZERS["adam"].init(jnp.zeros((V - 1, DIM)))},
        r"state.lazy_mu is that of another table\n  got \[6, 3\] for a table\[7, 3\]",
    ),
}


@each_of("case", MISFITS)
def test_arguments_that_do_not_fit_raise(case: str) -> None:
    optimizer = OPTIMIZERS["adam"]
    changes, message = MISFITS[case]
    given = {"row_grads": GRADS, "ids": IDS, "tables": TABLE}
    arguments = {**given, "state": optimizer.init(TABLE), **changes}
    with pytest.raises(OptionError, match=message):
        optimizer.update(**arguments)


@pytest.mark.parametrize("leaf", [jnp.zeros(3), jnp.zeros((3, 2), jnp.int32), 1.0])
@both
def test_init_refuses_what_is_no_table(name: str, leaf: Any) -> None:
    with pytest.raises(OptionError, match="what is not a table"):
        OPTIMIZERS[name].init({"user": leaf})


@each_of(
    ("make", "arguments"),
    [
        (rowwise_adagrad, {"initial_accumulator_value": -1.0}),
        (rowwise_adagrad, {"eps": 0.0}),
        (lazy_adam, {"b1": 1.0}),
        (lazy_adam, {"b2": -0.1}),
        (lazy_adam, {"eps": 0.0}),
        (lazy_sgd, {"momentum": 1.0}),
    ],
)
def test_hyperparameters_out_of_range_raise(make: Any, arguments: Any) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(arguments))} is out of"):
        make(0.1, **arguments)
