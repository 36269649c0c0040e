from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.errors import StateMismatchError, TouchedError
from cnr_jax.rows.lookups import Lookup, StampedTable
from cnr_jax.rows.touched import (
    CLOCK_LIMIT,
    Touched,
    clock_of,
    init_touched,
    lineage_hex,
    record,
    reset_touched,
    seeded,
    stamp_sharding,
)
from cnr_jax.state.find import Tables, TableSpec, find_tables
from cnr_jax.state.layouts import Identity, ModSharded

from ..conftest import each_of

step = jax.jit(record, donate_argnums=0)


def state_of(rows: Mapping[str, int], sharding: Any = None) -> dict[str, Any]:
    return {
        name: {"embedding": jax.device_put(np.zeros((n, 4), np.float32), sharding)}
        for name, n in rows.items()
    }


def tables_of(state: Any) -> Tables:
    return find_tables(state, list(state))


def fresh(sharding: Any = None, **rows: int) -> Touched:
    state = state_of(rows, sharding)
    return init_touched(state, tables_of(state))


def stamps_of(touched: Touched, table: str = "user") -> list[int]:
    return np.asarray(touched.stamps[table]).tolist()


def marked(touched: Touched, table: str = "user") -> list[int]:
    return np.flatnonzero(np.asarray(touched.stamps[table])).tolist()


def mesh_of(axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


# --- what the first stamps look like -------------------------------------------------


def test_init_gives_zero_stamps_per_stored_row_and_clock_zero():
    touched = fresh(user=6, item=3)
    assert {name: a.dtype for name, a in touched.stamps.items()} == {
        "user": np.int32,
        "item": np.int32,
    }
    assert stamps_of(touched) == [0] * 6
    assert stamps_of(touched, "item") == [0] * 3
    assert (touched.clock.dtype, touched.clock.shape) == (np.int32, ())
    assert (touched.lineage.dtype, touched.lineage.shape) == (np.uint32, (4,))
    assert clock_of(touched) == 0


def test_touched_prints_its_tables_and_no_rows_also_where_it_is_traced():
    touched, seen = fresh(user=12_000, item=5), []
    jax.jit(lambda given: seen.append(repr(given)) or given)(touched)
    assert repr(touched) == "<Touched item: 5 rows, user: 12,000 rows>" == seen[0]
    assert repr(jax.eval_shape(lambda: touched)) == seen[0]


def test_every_init_draws_another_lineage():
    state = state_of({"user": 4})
    tables = tables_of(state)
    lineages = {lineage_hex(init_touched(state, tables)) for _ in range(5)}
    assert len(lineages) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", lineage) for lineage in lineages)


def test_lineage_hex_spells_out_all_128_bits():
    touched = fresh(user=1)
    words = jnp.array([0, 1, 0xDEADBEEF, 0xFFFFFFFF], jnp.uint32)
    touched = dataclasses.replace(touched, lineage=words)
    assert lineage_hex(touched) == "0000000000000001deadbeefffffffff"


def test_lineage_of_process_0_is_used_by_all(monkeypatch):
    chosen = np.arange(4, dtype=np.uint32)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda words: chosen)
    assert lineage_hex(fresh(user=1)) == "00000000000000010000000200000003"


def test_init_takes_any_optimizer():
    """Whether it moves other rows is for an audit to find, not for names to tell."""
    params = state_of({"user": 4})
    state = {"params": params, "opt_state": optax.adam(0.1).init(params)}
    tables = find_tables(state, ["user"])
    assert len(tables["user"].slots) == 2
    assert stamps_of(init_touched(state, tables)) == [0] * 4


def test_init_refuses_a_state_of_another_shape():
    tables = tables_of(state_of({"user": 4}))
    with pytest.raises(StateMismatchError, match="user"):
        init_touched(state_of({"user": 5}), tables)


@pytest.mark.parametrize("function", [init_touched, reset_touched])
def test_a_lineage_cannot_be_drawn_inside_jit(function):
    state = state_of({"user": 4})
    tables = tables_of(state)
    if function is init_touched:
        call, argument = partial(init_touched, tables=tables), state
    else:
        call, argument = reset_touched, init_touched(state, tables)
    with pytest.raises(TouchedError, match=r"outside of jax\.jit"):
        jax.jit(call)(argument)


# --- placement -----------------------------------------------------------------------

SPECS = [
    (P("data"), P("data")),
    (P("model", "data"), P("model")),
    (P(("data", "model")), P(("data", "model"))),
    (P(None, "model"), P(None)),
    (P(), P()),
]


@each_of("axis_type", [AxisType.Auto, AxisType.Explicit])
@each_of(("spec", "expected"), SPECS)
def test_stamps_keep_the_sharding_of_the_rows_through_jit(spec, expected, axis_type):
    mesh = mesh_of(axis_type)
    wanted = NamedSharding(mesh, expected)
    touched = fresh(NamedSharding(mesh, spec), user=16)
    assert touched.stamps["user"].sharding == wanted
    assert touched.clock.sharding == NamedSharding(mesh, P())
    assert touched.lineage.sharding == NamedSharding(mesh, P())
    lineage = lineage_hex(touched)

    by_data = NamedSharding(mesh, P("data"))
    ids = jax.device_put(np.arange(8, dtype=np.int32).reshape(8, 1) * 2, by_data)
    where = jax.device_put(np.arange(8) != 3, NamedSharding(mesh, P("model")))
    given = {"user": [Lookup(ids, where=where[:, None]), np.array([-1])]}
    for _ in range(2):
        touched = step(touched, given)
        assert touched.stamps["user"].sharding.is_equivalent_to(wanted, 1)
        assert touched.clock.sharding.is_fully_replicated
    assert marked(touched) == [0, 2, 4, 8, 10, 12, 14, 15]
    assert clock_of(touched) == 2
    assert lineage_hex(touched) == lineage


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_scan_keeps_the_sharding_and_counts_every_call(axis_type):
    mesh = mesh_of(axis_type)
    touched = fresh(NamedSharding(mesh, P("model")), user=8)
    wanted = touched.stamps["user"].sharding
    batches = jnp.array([[0, 1], [1, 2], [7, 2]])

    @partial(jax.jit, donate_argnums=0)
    def train(touched, batches):
        def body(touched, ids):
            return record(touched, {"user": ids}), None

        return jax.lax.scan(body, touched, batches)[0]

    with jax.set_mesh(mesh) if axis_type == AxisType.Explicit else _nothing():
        touched = train(touched, batches)
    assert stamps_of(touched) == [1, 2, 3, 0, 0, 0, 0, 3]
    assert clock_of(touched) == 3
    assert touched.stamps["user"].sharding.is_equivalent_to(wanted, 1)


def _nothing() -> Any:
    return contextlib.nullcontext()


def test_no_collective_moves_the_stamps():
    mesh = mesh_of()
    rows = 1 << 14
    for spec in (P("model"), P(("data", "model")), P()):
        touched = fresh(NamedSharding(mesh, spec), user=rows)
        ids = jax.device_put(np.arange(16), NamedSharding(mesh, P("data")))
        compiled = step.lower(touched, {"user": ids}).compile()
        assert "all-reduce" not in (compiled.as_text() or "all-reduce")
        shard_bytes = touched.stamps["user"].addressable_data(0).nbytes
        memory: Any = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < shard_bytes / 2
        assert memory.alias_size_in_bytes >= shard_bytes


def test_donated_stamps_are_written_in_place():
    touched = step(fresh(user=1000), {"user": jnp.array([1])})
    before = touched.stamps["user"]
    address = before.unsafe_buffer_pointer()
    touched = step(touched, {"user": jnp.array([2])})
    assert before.is_deleted()
    assert touched.stamps["user"].unsafe_buffer_pointer() == address
    assert marked(touched) == [1, 2]


def test_stamps_lie_on_the_device_of_the_table():
    device = jax.devices()[3]
    touched = fresh(device, user=4)
    for array in jax.tree.leaves(touched):
        assert array.sharding == SingleDeviceSharding(device)
        assert array.committed
    assert step(touched, {"user": np.array([1])}).stamps["user"].devices() == {device}


def test_uncommitted_tables_get_uncommitted_stamps():
    touched = fresh(user=4)
    assert not any(array.committed for array in jax.tree.leaves(touched))
    assert not any(a.committed for a in jax.tree.leaves(reset_touched(touched)))
    # So a batch may still decide where the step runs.
    sharded = jax.device_put(np.arange(8) % 3, NamedSharding(mesh_of(), P("data")))
    assert marked(step(touched, {"user": sharded})) == [0, 1, 2]


def test_tables_kept_on_the_host_get_stamps_on_the_device():
    on_host = NamedSharding(mesh_of(), P("data"), memory_kind="pinned_host")
    stamps = stamp_sharding(on_host, (8, 2))
    assert (
        stamps.memory_kind == NamedSharding(mesh_of(), P()).memory_kind != "pinned_host"
    )


@each_of(
    ("shape", "spec", "expected"),
    [
        ((16,), P("data"), P("data")),
        ((16,), P(), P()),
        ((8, 4, 6), P("model", "data"), P("model")),
        ((8, 4, 6), P(None, "data", "model"), P(None)),
        ((8, 4, 6, 2), P(("data", "model")), P(("data", "model"))),
    ],
)
def test_tables_of_any_shape_are_stamped_by_row(shape, spec, expected):
    mesh = mesh_of()
    sharding = NamedSharding(mesh, spec)
    assert stamp_sharding(sharding, shape) == NamedSharding(mesh, expected)
    state = {"t": jax.device_put(jnp.zeros(shape), sharding)}
    touched = init_touched(state, tables_of(state))
    assert touched.stamps["t"].sharding == NamedSharding(mesh, expected)
    for _ in range(2):
        touched = step(touched, {"t": jnp.array([[1, -1], [5, 99]])})
    assert marked(touched, "t") == [1, 5, shape[0] - 1]


def test_stamp_sharding_names_the_rows_it_cannot_split():
    sharding = NamedSharding(mesh_of(), P(("data", "model")))
    with pytest.raises(TouchedError, match=r"(?s)12 rows.*pad the table"):
        stamp_sharding(sharding, (12, 4))


# --- which rows are marked -----------------------------------------------------------


def expected_row(index: int, rows: int) -> int:
    wrapped = index + rows if index < 0 else index
    return min(max(wrapped, 0), rows - 1)


@dataclass(frozen=True)
class Feature:
    ids: np.ndarray
    where: np.ndarray | None
    row_splits: np.ndarray | None

    def lookup(self) -> Any:
        if self.where is None and self.row_splits is None:
            return self.ids
        return Lookup(self.ids, where=self.where, row_splits=self.row_splits)

    def counted(self) -> list[int]:
        keep = np.ones(self.ids.shape, bool)
        if self.where is not None:
            keep &= np.broadcast_to(self.where, self.ids.shape)
        if self.row_splits is not None:
            keep &= np.arange(self.ids.size) < self.row_splits[-1]
        return self.ids[keep].tolist()


@st.composite
def features(draw: st.DrawFn) -> Feature:
    # Few shapes, as each is compiled; the values are what varies.
    shape = draw(st.sampled_from([(), (0,), (3,), (5,), (2, 3)]))
    dtype = draw(st.sampled_from(["int8", "uint8", "int32", "uint32"]))
    info = np.iinfo(dtype)
    values = st.one_of(
        st.integers(max(info.min, -45), min(info.max, 45)),
        st.sampled_from([int(info.min), int(info.max)]),
    )
    count = int(np.prod(shape))
    listed = draw(st.lists(values, min_size=count, max_size=count))
    ids = np.array(listed, dtype).reshape(shape)
    where = row_splits = None
    if draw(st.booleans()):
        mask = draw(st.sampled_from([shape, shape[-1:], ()]))
        size = int(np.prod(mask))
        bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        where = np.array(bits, bool).reshape(mask)
    if len(shape) == 1 and draw(st.booleans()):
        splits = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
        row_splits = np.array(sorted(splits), draw(st.sampled_from(["int32", "uint8"])))
    return Feature(ids, where, row_splits)


@settings(max_examples=5, deadline=None)
@given(
    calls=st.lists(
        st.dictionaries(
            st.sampled_from(["user", "item", "mod"]), st.lists(features(), max_size=3)
        ),
        max_size=3,
    )
)
def test_record_does_what_a_loop_over_python_ints_does(calls):
    mod = ModSharded(shards=3, rows_per_shard=5)
    specs = {
        "user": TableSpec("user"),
        "item": TableSpec("item", rows=30),  # ids index the 37 stored rows all the same
        "mod": TableSpec("mod", rows=13, layout=mod),
    }
    state = state_of({"user": 1, "item": 37, "mod": 15})
    touched = init_touched(state, find_tables(state, specs))
    lookup_rows = {"user": 1, "item": 37, "mod": 13}
    expected = {"user": [0], "item": [0] * 37, "mod": [0] * 15}
    for clock, call in enumerate(calls, start=1):
        touched = record(
            touched, {t: [f.lookup() for f in found] for t, found in call.items()}
        )
        for table, found in call.items():
            layout = mod if table == "mod" else Identity()
            for index in (i for feature in found for i in feature.counted()):
                row = expected_row(index, lookup_rows[table])
                expected[table][layout.to_physical(row)] = clock
    assert {t: stamps_of(touched, t) for t in expected} == expected
    assert clock_of(touched) == len(calls)


@pytest.mark.parametrize("jit", [False, True])
def test_record_marks_the_rows_that_indexing_reads(jit):
    ids = np.array([0, 3, -1, -7, -8, 7, 99, 2**31 - 1, -(2**31)])
    function = step if jit else record
    for index in ids:
        touched = function(fresh(user=7), {"user": np.array([index])})
        assert marked(touched) == [int(jnp.arange(7)[index])]


@each_of(
    ("dtype", "rows", "ids", "expected"),
    [
        ("uint8", 1000, [0, 200, 255], [0, 200, 255]),
        ("int8", 1000, [-1, -128, 127], [127, 872, 999]),
        ("int8", 127, [-1, -127, -128, 127], [0, 126]),
        ("int8", 128, [-1, -128, 127], [0, 127]),
        ("uint16", 40000, [39999, 65535, 33000], [33000, 39999]),
        ("int16", 40000, [-1, -32768], [7232, 39999]),
        ("uint32", 10, [2**32 - 1, 2**31, 4], [4, 9]),
        ("int4", 100, [-1, -8, 7], [7, 92, 99]),
        ("int4", 5, [-1, -8, 7], [0, 4]),
    ],
)
def test_ids_of_any_width_mark_the_right_rows(dtype, rows, ids, expected):
    touched = record(fresh(user=rows), {"user": np.array(ids).astype(dtype)})
    assert marked(touched) == expected


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_64_bit_ids_are_clamped_before_they_are_narrowed(dtype):
    with jax.enable_x64(True):
        ids = np.array([2**32 + 3, 2**31, 2], dtype)
        touched = record(fresh(user=10), {"user": ids})
        assert touched.stamps["user"].dtype == touched.clock.dtype == np.int32
        assert marked(touched) == [2, 9]
        if dtype == "int64":
            ids = np.array([-(2**40), -(2**32) - 1, -2])
            assert marked(record(fresh(user=10), {"user": ids})) == [0, 8]
        splits = np.array([0, 2**32 + 1], dtype)
        lookup = Lookup(np.array([4, 5]), row_splits=splits)
        assert marked(record(fresh(user=10), {"user": lookup})) == [4, 5]


@dataclass(frozen=True)
class Folded(Identity):
    """Many logical rows on few stored ones, to reach large ids in little memory."""

    def to_physical(self, logical: Any) -> Any:
        return logical >> 28


def test_ids_near_the_end_of_int32_neither_wrap_nor_overflow():
    last = 2**31 - 2
    folded = StampedTable(
        name="user", padded_rows=8, lookup_rows=last + 1, layout=Folded()
    )
    touched = dataclasses.replace(fresh(user=8), tables=(folded,))
    for ids, row in [
        (np.array([last], np.int32), 7),
        (np.array([-1], np.int32), 7),
        (np.array([2**31 - 1], np.int32), 7),
        (np.array([-(2**31)], np.int32), 0),
        (np.array([-last - 1], np.int32), 0),
        (np.array([2**32 - 1], np.uint32), 7),
        (np.array([2**30], np.uint32), 4),
        (np.array([-1], np.int8), 7),
    ]:
        assert marked(record(touched, {"user": ids})) == [row]


def test_tables_past_int32_need_x64():
    def abstract(rows: int) -> Touched:
        table = StampedTable(
            name="user", padded_rows=rows, lookup_rows=rows, layout=Identity()
        )
        leaves: Any = {
            "stamps": {"user": jax.ShapeDtypeStruct((rows,), jnp.int32)},
            "clock": jax.ShapeDtypeStruct((), jnp.int32),
            "lineage": jax.ShapeDtypeStruct((4,), jnp.uint32),
        }
        return Touched(**leaves, tables=(table,))

    mark = partial(record, ids={"user": np.array([-1], np.int32)})
    jax.eval_shape(mark, abstract(2**31 - 1))
    with pytest.raises(TouchedError, match=r"(?s)2,147,483,648 rows.*jax_enable_x64"):
        jax.eval_shape(mark, abstract(2**31))
    with jax.enable_x64(True):
        jax.eval_shape(mark, abstract(2**31 + 8))


def test_python_ints_and_nested_features_are_ids_too():
    given = [3, [1, 1], Lookup([7, 5], where=[True, False]), [], [[jnp.int32(8)]]]
    assert marked(record(fresh(user=10), {"user": given})) == [1, 3, 7, 8]
    assert marked(record(fresh(user=10), {"user": [4, 2]})) == [2, 4]


def test_several_calls_in_a_step_each_advance_the_clock():
    @jax.jit
    def train(touched):
        touched = record(touched, {"user": jnp.array([0, 1])})
        touched = record(touched, {"item": jnp.array([2])})
        return record(touched, {"user": jnp.array([1])})

    touched = train(fresh(user=3, item=3))
    assert stamps_of(touched) == [1, 3, 0]
    assert stamps_of(touched, "item") == [0, 0, 2]
    assert clock_of(touched) == 3


def test_lookups_pass_through_jit_as_arguments():
    lookup = Lookup(jnp.arange(4), row_splits=jnp.array([0, 1, 3]))
    assert marked(step(fresh(user=9), {"user": lookup})) == [0, 1, 2]


def test_no_ids_advance_the_clock_and_mark_nothing():
    for ids in ({}, {"user": []}, {"user": np.zeros((0, 3), np.int32)}):
        touched = step(fresh(user=4), ids)
        assert (marked(touched), clock_of(touched)) == ([], 1)


# --- the clock's end, and starting over ----------------------------------------------


def test_clock_stops_at_its_limit_and_rows_are_still_stamped():
    state = state_of({"user": 3})
    touched = seeded(
        tables_of(state), {"user": None}, {"user": np.zeros(3, int)}, CLOCK_LIMIT - 1
    )
    for row in range(3):
        touched = step(touched, {"user": jnp.array([row])})
        assert clock_of(touched) == CLOCK_LIMIT
    assert stamps_of(touched) == [CLOCK_LIMIT] * 3


def test_reset_starts_over_in_another_lineage_and_place_is_kept():
    mesh = mesh_of()
    before = step(
        fresh(NamedSharding(mesh, P("data")), user=8), {"user": np.array([1])}
    )
    after = reset_touched(before)
    assert (stamps_of(after), clock_of(after)) == ([0] * 8, 0)
    assert lineage_hex(after) != lineage_hex(before)
    assert after.tables == before.tables
    jax.tree.map(
        lambda a, b: (
            pytest.fail("moved")
            if not a.sharding.is_equivalent_to(b.sharding, a.ndim)
            else None
        ),
        after,
        before,
    )
    assert marked(step(after, {"user": np.array([2])})) == [2]


def test_seeded_takes_stamps_clock_and_shardings_and_draws_a_lineage():
    mesh = mesh_of()
    state = state_of({"user": 8, "item": 4}, NamedSharding(mesh, P("data", "model")))
    tables = tables_of(state)
    shardings = {name: NamedSharding(mesh, P("data")) for name in tables}
    users = np.arange(8)
    items = jnp.arange(4)
    touched = seeded(tables, shardings, {"user": users, "item": items}, 7)
    users[:] = 99  # what was passed may be reused
    assert stamps_of(touched) == list(range(8))
    assert stamps_of(touched, "item") == list(range(4))
    assert clock_of(touched) == 7
    assert touched.stamps["item"].sharding == shardings["item"]
    assert touched.stamps["user"].dtype == np.int32
    other = init_touched(state, tables)
    assert lineage_hex(touched) != lineage_hex(other)
    # Same static part and shardings: the step is not compiled anew after a restore.
    assert jax.tree.structure(touched) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: _same_placement(a, b), touched, other)
    assert marked(step(touched, {"user": np.array([0])})) == list(range(8))


@pytest.mark.parametrize("committed", [False, True])
def test_seeded_does_not_share_memory_with_numpy_stamps(committed):
    rows = 1 << 16  # large enough for numpy to align it as jax would need it
    sharding = SingleDeviceSharding(jax.devices()[0]) if committed else None
    stamps = np.zeros(rows, np.int32)
    tables = tables_of(state_of({"user": rows}))
    touched = seeded(tables, {"user": sharding}, {"user": stamps}, 1)
    jax.block_until_ready(touched)
    stamps[:] = 1
    assert marked(touched) == []


def _same_placement(a: jax.Array, b: jax.Array) -> None:
    assert a.sharding == b.sharding
    assert a.aval == b.aval


@each_of(
    ("shardings", "stamps", "clock", "message"),
    [
        ({"user": None}, {"user": np.zeros(3, int)}, -1, "clock -1"),
        (
            {"user": None},
            {"user": np.zeros(3, int)},
            CLOCK_LIMIT + 1,
            "clock 1073741825",
        ),
        ({}, {"user": np.zeros(3, int)}, 0, r"shardings.*\n.*\['user'\]"),
        ({"user": None}, {}, 0, r"stamps.*\n.*\['user'\]"),
        ({"user": None}, {"user": np.zeros(4, int)}, 0, r"int64\[4\].*integers\[3\]"),
        ({"user": None}, {"user": np.zeros(3)}, 0, r"float64\[3\]"),
    ],
)
def test_seeded_names_what_does_not_fit(shardings, stamps, clock, message):
    with pytest.raises(TouchedError, match=message):
        seeded(tables_of(state_of({"user": 3})), shardings, stamps, clock)


# --- a pytree ------------------------------------------------------------------------


def test_touched_is_a_pytree_that_keeps_its_static_part():
    touched = fresh(user=4, item=2)
    leaves, treedef = jax.tree.flatten(touched)
    assert len(leaves) == 4
    again = jax.tree.unflatten(treedef, leaves)
    assert again.tables == touched.tables
    assert marked(record(again, {"user": np.array([3])})) == [3]
    assert jax.tree.structure(jax.tree.map(lambda x: x + 1, touched)) == treedef
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(touched)
    ]
    assert paths == [".stamps['item']", ".stamps['user']", ".clock", ".lineage"]


def test_record_keeps_structure_shapes_and_dtypes():
    touched = fresh(user=4, item=2)
    abstract = jax.eval_shape(lambda t: t, touched)
    # Under the strictest settings a user may have.
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        lookup = Lookup(np.zeros((3, 2), np.uint8), where=np.ones(2, bool))
        ragged = Lookup(np.zeros(3, np.int16), row_splits=np.zeros(1, np.uint32))
        out = step(touched, {"user": [lookup, ragged]})
    assert jax.tree.structure(out) == jax.tree.structure(abstract)
    for got, expected in zip(
        jax.tree.leaves(out), jax.tree.leaves(abstract), strict=True
    ):
        assert (got.shape, got.dtype, got.weak_type) == (
            expected.shape,
            expected.dtype,
            False,
        )


# --- what is refused, while tracing --------------------------------------------------


@each_of(
    ("ids", "message"),
    [
        ({"users": np.array([1])}, r"'users' is not tracked\n.*tracked: \['user'\]"),
        ({"user": np.array([1.0])}, "'user' are float.*expected integers"),
        ({"user": np.array([True])}, r"(?s)are bool.*Lookup\(ids, where=mask\)"),
        ({"user": [np.array([1]), np.array([0.5])]}, r"'user'\[1\] are float"),
        ({"user": None}, "'user' cannot be made an array"),
        ({"user": "3"}, "'user' cannot be made an array"),
        ({"user": [1, 2**70]}, "'user' cannot be made an array"),
        (
            {"user": Lookup(np.zeros((2, 3), int), where=np.ones(2, bool))},
            r"(?s)mask of.*'user'.*\[2\].*\[2, 3\]",
        ),
        (
            {"user": Lookup(np.zeros(3, int), where=np.ones((2, 3), bool))},
            r"got \[2, 3\], expected it to broadcast to \[3\]",
        ),
        ({"user": Lookup(np.zeros(3, int), where=np.ones(3))}, "(?s)float.*where != 0"),
        (
            {"user": Lookup(np.zeros((2, 3), int), row_splits=np.array([0, 1]))},
            r"row_splits\[2\] with ids\[2, 3\]",
        ),
        (
            {"user": Lookup(np.zeros(3, int), row_splits=np.zeros(0, int))},
            r"row_splits\[0\]",
        ),
        (
            {"user": Lookup(np.zeros(3, int), row_splits=np.zeros(2))},
            "row_splits of ids of table 'user' are float",
        ),
    ],
)
def test_unusable_ids_are_named(ids, message):
    with pytest.raises(TouchedError, match=message):
        record(fresh(user=4), ids)


def test_unusable_ids_are_named_in_jit_too():
    mark = jax.jit(record)
    for ids, message in (
        ({"users": np.array([1])}, "'users' is not tracked"),
        ({"user": np.array([1.0])}, "'user' are float"),
        ({"user": Lookup(np.zeros(3, int), where=np.ones(2, bool))}, "mask of"),
    ):
        with pytest.raises(TouchedError, match=message):
            mark(fresh(user=4), ids)


def test_record_inside_shard_map_is_refused_for_sharded_stamps():
    mesh = mesh_of()
    touched = fresh(NamedSharding(mesh, P("data")), user=8)
    specs = jax.tree.map(lambda a: P("data") if a.shape == (8,) else P(), touched)
    mark = jax.shard_map(
        lambda t: record(t, {"user": jnp.array([5])}),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
    )
    with pytest.raises(TouchedError, match=r"(?s)got \[2\], expected \[8\].*shard_map"):
        mark(touched)


@pytest.mark.parametrize("jit", [True, False])
def test_check_counts_and_names_ids_that_stray(
    jit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checked = partial(record, check=True)
    checked = jax.jit(checked) if jit else checked
    ids = {
        "user": [
            Lookup(
                jnp.array([[9, -1], [10, 10], [-11, 77]]), where=jnp.array([1, 1]) > 0
            ),
            jnp.array([3, 255], jnp.uint8),
        ],
        "item": Lookup(jnp.array([0, 400]), where=jnp.array([True, False])),
    }
    touched = fresh(user=10, item=300)
    marked_rows = checked(touched, ids)
    jax.effects_barrier()
    assert sorted(each.getMessage() for each in caplog.records) == [
        "ids of table 'user'[0]: 6 ids of 10 rows, 1 negative, which count from the end (-1);"
        " 4 out of range (-11, 10 2 times, 77)",
        "ids of table 'user'[1]: 2 ids of 10 rows, 1 out of range (255)",
    ]
    plain = record(touched, ids)
    assert stamps_of(marked_rows) == stamps_of(plain)


def test_without_check_the_step_is_the_one_without_it() -> None:
    touched, ids = fresh(user=10), {"user": jnp.array([3, 99])}
    plain, off, on = (
        str(jax.make_jaxpr(function)(touched, ids))
        for function in (
            record,
            partial(record, check=False),
            partial(record, check=True),
        )
    )
    assert plain == off and "callback" not in plain and "callback" in on
