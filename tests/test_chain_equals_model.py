"""Restored chains equal a plain model: for each step, a dict of numpy arrays by leaf.

The model knows no shards, chunks, files or clocks. It holds logical rows, the set of rows
changed since each checkpoint, and what each checkpoint must give back: with an exact codec the
rows as they were, with a quantizing one `decode(encode(rows))` of every row that some delta of
the chain holds, and of no other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.layouts import RowLayout
from cnr_jax.rows.codecs import Codec, Raw

POLICIES = {
    "full": cnr.Full(),
    "one_shot": cnr.OneShot(),
    "consecutive": cnr.Consecutive(),
    "intermittent": cnr.Intermittent(),
}

# ---- worlds: how many devices, and what lies where on them --------------------------------

MESH_SHAPES = {8: (4, 2), 4: (2, 2), 2: (2, 1), 1: (1, 1)}
SPECS = {
    "rows": P(("r", "c")),
    "some_rows": P("r"),
    "columns": P(None, "c"),
    "all_columns": P(None, ("r", "c")),
    "both": P("r", "c"),
    "replicated": P(),
    "zero": P(("c", "r")),  # rows too, but other rows on each device
    "device": None,  # all of it on the last device
}
VECTOR_SPECS = ["rows", "some_rows", "replicated", "zero", "device"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A table: logical rows, dim and dtype, and its slots: trailing shape and dtype."""

    rows: int
    dim: int
    dtype: Any
    slots: Mapping[str, tuple[tuple[int, ...], Any]]


SHAPES = {
    "user": Shape(
        41, 16, np.float32, {"acc": ((), np.float32), "mean": ((16,), np.float32)}
    ),
    "item": Shape(32, 8, ml_dtypes.bfloat16, {"acc": ((), np.float32)}),
    "tag": Shape(21, 24, np.float16, {}),
}
PADDED_ROWS = {"user": 48, "item": 32, "tag": 24}
TAG_LAYOUTS = [
    cnr.Identity(),
    cnr.ModSharded(shards=8, rows_per_shard=3),
    cnr.ModSharded(shards=4, rows_per_shard=6),
    cnr.ModSharded(shards=2, rows_per_shard=16),  # more padding than the others
]
LEAVES = [
    (name, leaf) for name, shape in SHAPES.items() for leaf in ("table", *shape.slots)
]


@dataclasses.dataclass(frozen=True)
class World:
    """A mesh, the name of a spec for each leaf, and the layout of table `tag`."""

    devices: int
    specs: tuple[str, ...]  # in the order of LEAVES
    tag_layout: RowLayout = dataclasses.field(default_factory=cnr.Identity)

    @functools.cached_property
    def mesh(self) -> Mesh:
        devices = np.array(jax.devices()[: self.devices])
        return Mesh(devices.reshape(MESH_SHAPES[self.devices]), ("r", "c"))

    def sharding(self, table: str, leaf: str) -> Sharding:
        spec = SPECS[self.specs[LEAVES.index((table, leaf))]]
        if spec is None:
            return SingleDeviceSharding(jax.devices()[self.devices - 1])
        return NamedSharding(self.mesh, spec)

    def layout(self, table: str) -> RowLayout:
        return self.tag_layout if table == "tag" else cnr.Identity()

    def stored_rows(self, table: str) -> int:
        layout = self.layout(table)
        if isinstance(layout, cnr.ModSharded):
            return layout.shards * layout.rows_per_shard
        return PADDED_ROWS[table]

    def places(self, table: str) -> np.ndarray:
        """The stored row of every logical row."""
        return self.layout(table).to_physical(np.arange(SHAPES[table].rows))

    def put(self, values: Mapping[Any, np.ndarray], w: float, step: int) -> Any:
        """The state of these logical rows in this world."""
        arrays = {}
        for (table, leaf), rows in values.items():
            shape = (self.stored_rows(table), *rows.shape[1:])
            stored = np.zeros(shape, rows.dtype)
            stored[self.places(table)] = rows
            arrays[table, leaf] = jax.device_put(stored, self.sharding(table, leaf))
        everywhere = NamedSharding(self.mesh, P(("r", "c")))
        return _state(
            arrays, jax.device_put(np.full(16, w, np.float32), everywhere), step
        )

    @functools.cached_property
    def zeros(self) -> Any:
        """A state to find tables in and to restore into."""
        return self.put(_empty_rows(), 0.0, 0)

    @functools.cached_property
    def tables(self) -> cnr.Tables:
        specs = {
            name: cnr.TableSpec(rows=shape.rows, layout=self.layout(name))
            for name, shape in SHAPES.items()
        }
        tables = cnr.find_tables(self.zeros, specs)
        found = [(name, slot.name) for name in tables for slot in tables[name].slots]
        assert found == [
            ("user", "opt_state/acc"),
            ("user", "opt_state/mean"),
            ("item", "opt_state/acc"),
        ]
        return tables

    def column_ranges(self, table: str, leaf: str) -> set[tuple[int, int]]:
        """Columns of each tile of a matrix: rows are encoded by tile."""
        shape = (self.stored_rows(table), *_trailing(table, leaf))
        indices = self.sharding(table, leaf).devices_indices_map(shape).values()
        return {index[1].indices(shape[1])[:2] for index in indices}


def _trailing(table: str, leaf: str) -> tuple[int, ...]:
    shape = SHAPES[table]
    return (shape.dim,) if leaf == "table" else shape.slots[leaf][0]


def _empty_rows() -> dict[Any, np.ndarray]:
    rows = {}
    for table, leaf in LEAVES:
        shape = SHAPES[table]
        dtype = shape.dtype if leaf == "table" else shape.slots[leaf][1]
        rows[table, leaf] = np.zeros((shape.rows, *_trailing(table, leaf)), dtype)
    return rows


def _state(arrays: Mapping[Any, Any], w: Any, step: Any) -> Any:
    opt_state: dict[str, Any] = {}
    for (table, leaf), array in arrays.items():
        if leaf != "table":
            opt_state.setdefault(leaf, {})[table] = array
    params = {table: array for (table, leaf), array in arrays.items() if leaf == "table"}
    return {"params": params, "opt_state": opt_state, "w": w, "step": step}


def _leaf_of(state: Any, table: str, leaf: str) -> jax.Array:
    tree = state["params"] if leaf == "table" else state["opt_state"][leaf]
    return tree[table]


def worlds(specs: Sequence[str] = tuple(SPECS)) -> st.SearchStrategy[World]:
    """Any number of devices, every leaf placed for itself."""
    vectors = [spec for spec in VECTOR_SPECS if spec in specs]
    by_leaf = [
        st.sampled_from(list(specs) if _trailing(*leaf) else vectors) for leaf in LEAVES
    ]
    return st.builds(
        World,
        st.sampled_from([8, 4, 2, 1]),
        st.tuples(*by_leaf),
        st.sampled_from(TAG_LAYOUTS),
    )


# ---- the model ----------------------------------------------------------------------------


@dataclasses.dataclass
class Saved:
    """What a checkpoint must give back. `rows` are those it holds of each table."""

    parent: int | None
    rows: Mapping[str, frozenset[int]]
    values: dict[Any, np.ndarray]
    w: float
    layout: RowLayout


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: Codec, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    encoded = codec.encode(rows)
    decoded = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
    return decoded, encoded.escaped


def decoded_rows(codec: Codec, rows: np.ndarray) -> np.ndarray:
    """`decode(encode(rows))`, where the codec gives a row up the row itself."""
    if isinstance(codec, Raw) or not len(rows):
        return rows
    found = []
    for start in range(0, len(rows), 512):
        part = rows[start : start + 512]
        block = np.zeros((512, rows.shape[1]), rows.dtype)
        block[: len(part)] = part
        decoded, escaped = jax.device_get(_round_trip(codec, block))
        found.append(
            np.where(escaped[: len(part), None], part, decoded[: len(part)])
        )
    return np.concatenate(found)


class Model:
    """The run as it should be."""

    def __init__(self, options: cnr.Options, seed: int) -> None:
        self.options = options
        self.rng = np.random.default_rng(seed)
        self.live = _empty_rows()
        self.w = 0.0
        self.steps: dict[int, Saved] = {}
        self.tip: int | None = None
        # For every checkpoint that may be a parent: rows changed since.
        self.since: dict[int, dict[str, set[int]]] = {}
        self.train({name: range(shape.rows) for name, shape in SHAPES.items()})

    def train(self, ids: Mapping[str, Sequence[int]]) -> None:
        self.w += 1.0
        for table, leaf in LEAVES:
            rows = np.unique(np.asarray(ids[table], np.int64))
            values = self.live[table, leaf]
            shape = (len(rows), *values.shape[1:])
            values[rows] = self.rng.normal(size=shape).astype(values.dtype)
            if values.ndim == 2:
                _make_special(values, rows)
        for changed in self.since.values():
            for table in SHAPES:
                changed[table].update(ids[table])

    def saved(self, step: int, parent: int | None, world: World) -> None:
        values = self.steps[parent].values if parent is not None else _empty_rows()
        values = {key: array.copy() for key, array in values.items()}
        rows = {
            table: frozenset(
                range(shape.rows) if parent is None else self.since[parent][table]
            )
            for table, shape in SHAPES.items()
        }
        for table, leaf in LEAVES:
            index = np.array(sorted(rows[table]), np.int64)
            self._store(values, table, leaf, index, world)
        self.steps[step] = Saved(parent, rows, values, self.w, world.tag_layout)
        self.since[step] = {table: set() for table in SHAPES}
        self.tip = step

    def _store(
        self, values: Any, table: str, leaf: str, rows: np.ndarray, world: World
    ) -> None:
        live, stored = self.live[table, leaf], values[table, leaf]
        if live.ndim == 1:
            stored[rows] = live[rows]
            return
        for start, stop in world.column_ranges(table, leaf):
            name = leaf if leaf == "table" else f"opt_state/{leaf}"
            codec = self.options.codec_for(table, name, stop - start, live.dtype)
            part = live[rows, start:stop]
            stored[rows, start:stop] = decoded_rows(codec, part)

    def restored(self, step: int, world: World) -> None:
        self.live = {k: array.copy() for k, array in self.steps[step].values.items()}
        self.w, self.tip = self.steps[step].w, step
        self.since = {}
        if world.tag_layout != self.steps[step].layout:
            return  # other stored rows: nothing to rest a delta on
        changed: dict[str, set[int]] = {table: set() for table in SHAPES}
        for at in self.chain(step):
            self.since[at] = {table: set(rows) for table, rows in changed.items()}
            for table in SHAPES:
                changed[table] |= self.steps[at].rows[table]

    def chain(self, step: int) -> Iterator[int]:
        """A step and those it rests on."""
        at: int | None = step
        while at is not None:
            yield at
            at = self.steps[at].parent

    def legal_parents(self, policy: Any) -> set[int | None]:
        """What the policy may choose next; None is a full checkpoint."""
        if self.tip is None or self.tip not in self.since:
            return {None}
        *_, baseline = self.chain(self.tip)
        return {
            "full": {None},
            "one_shot": {baseline},
            "consecutive": {self.tip},
            "intermittent": {None, baseline},
        }[policy.name]


def _make_special(values: np.ndarray, rows: np.ndarray) -> None:
    """Gives some rows values that codecs treat apart; which, depends on the row only."""
    for row in rows.tolist():
        if row % 11 == 3:
            values[row, 1] = [np.inf, -np.inf, np.nan][row % 3]
        elif row % 11 == 5:
            values[row] = values[row, 0]  # constant
        elif row % 11 == 7:
            values[row] = 0


# ---- running one against the other --------------------------------------------------------


def assert_equals_model(state: Any, model: Model, step: int, world: World) -> None:
    expected = model.steps[step]
    for table, leaf in LEAVES:
        array = _leaf_of(state, table, leaf)
        assert array.sharding == world.sharding(table, leaf)
        got, places = np.asarray(array), world.places(table)
        want = expected.values[table, leaf]
        assert got.dtype == want.dtype and len(got) == world.stored_rows(table)
        different = np.flatnonzero(_bits(got[places]) != _bits(want))
        rows = np.unique(different // max(1, want[0].size))
        assert not len(rows), f"step {step}, {table}.{leaf}: rows {rows[:9]} differ"
        assert not np.delete(got, places, axis=0).any(), "padding is not zero"
    np.testing.assert_array_equal(np.asarray(state["w"]), expected.w)
    assert state["step"] == step


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(-1)


def stamped(touched: cnr.Touched, rows: Mapping[str, np.ndarray]) -> cnr.Touched:
    """What `record` returns, without a compilation for every sharding there is."""
    clock = np.int32(np.asarray(touched.clock) + 1)
    stamps = {}
    for table, array in touched.stamps.items():
        host = np.array(array)
        host[rows[table]] = clock
        stamps[table] = jax.device_put(host, array.sharding)
    return dataclasses.replace(
        touched, stamps=stamps, clock=jax.device_put(clock, touched.clock.sharding)
    )


@functools.partial(jax.jit, donate_argnums=0)
def _record(touched: cnr.Touched, ids: Mapping[str, Any]) -> cnr.Touched:
    return cnr.record(touched, ids)


def recorded(
    touched: cnr.Touched, ids: Mapping[str, Sequence[int]], world: World
) -> cnr.Touched:
    """Runs `record` in jit, where all stamps lie on the same devices, as jit needs it."""
    devices = {array.sharding.device_set for array in map(_frozen, touched.stamps.values())}
    if len(devices) > 1:
        return stamped(touched, {t: world.places(t)[list(i)] for t, i in ids.items()})
    padded = {}
    for table, given in ids.items():
        where = np.arange(8) < len(given)
        filled = np.resize(np.asarray(given or [0], np.int32), 8)
        padded[table] = cnr.Lookup(filled, where=where)
    return _record(touched, padded)


def _frozen(array: jax.Array) -> Any:
    return dataclasses.make_dataclass("_", ["sharding"])(
        dataclasses.make_dataclass("_", ["device_set"])(
            frozenset(array.sharding.device_set)
        )
    )
