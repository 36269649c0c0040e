"""Restored chains equal a plain model: for each step, a dict of numpy arrays by leaf.

The model knows no shards, chunks, files or clocks. It holds logical rows, the set of rows
changed since each checkpoint, and what each checkpoint must give back: with an exact codec the
rows as they were, with a quantizing one `decode(encode(rows))` of every row that some delta of
the chain holds, and of no other.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.format.manifest import Manifest, SampledMotion
from cnr_jax.policy.bits import dithered_bits
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.codecs import Codec, Dithering, Raw
from cnr_jax.rows.codecs.dither import Dither, dither_seed, row_keys
from cnr_jax.rows.tiling import host_device
from cnr_jax.state.layouts import RowLayout

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
    params = {
        table: array for (table, leaf), array in arrays.items() if leaf == "table"
    }
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
def _round_trip(
    codec: Codec, rows: jax.Array, *keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    encoded = codec.encode(rows, *keys)
    decoded = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
    return decoded, encoded.escaped


def decoded_rows(
    codec: Codec, rows: np.ndarray, keys: np.ndarray | None = None
) -> np.ndarray:
    """`decode(encode(rows))`, dithered if there are keys; of escaped rows these themselves."""
    if isinstance(codec, Raw) or not len(rows):
        return rows
    found = []
    for start in range(0, len(rows), 512):
        part = rows[start : start + 512]
        block = np.zeros((512, rows.shape[1]), rows.dtype)
        block[: len(part)] = part
        given = () if keys is None else (np.resize(keys[start : start + 512], 512),)
        decoded, escaped = jax.device_get(_round_trip(codec, block, *given))
        found.append(np.where(escaped[: len(part), None], part, decoded[: len(part)]))
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

    def saved(
        self, step: int, parent: int | None, world: World, dither: Dither
    ) -> None:
        """Notes a save, and which of its codes are dithered."""
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
            self._store(values, table, leaf, index, world, dither)
        self.steps[step] = Saved(parent, rows, values, self.w, world.tag_layout)
        self.since[step] = {table: set() for table in SHAPES}
        self.tip = step

    def _store(
        self,
        values: Any,
        table: str,
        leaf: str,
        rows: np.ndarray,
        world: World,
        dither: Dither,
    ) -> None:
        live, stored = self.live[table, leaf], values[table, leaf]
        if live.ndim == 1:
            stored[rows] = live[rows]
            return
        for start, stop in world.column_ranges(table, leaf):
            name = leaf if leaf == "table" else f"opt_state/{leaf}"
            codec = self.options.codec_for(table, name, stop - start, live.dtype)
            part = live[rows, start:stop]
            keys = None
            dithers = leaf == "table" and isinstance(codec, Dithering)
            if dithers and codec.bits <= dither.most_bits:
                keys = row_keys(dither_seed(dither.lineage, table, start), rows)
            stored[rows, start:stop] = decoded_rows(codec, part, keys)

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
    devices = {frozenset(a.sharding.device_set) for a in touched.stamps.values()}
    if len(devices) > 1:
        return stamped(touched, {t: world.places(t)[list(i)] for t, i in ids.items()})
    padded = {}
    for table, given in ids.items():
        where = np.arange(8) < len(given)
        filled = np.resize(np.asarray(given or [0], np.int32), 8)
        padded[table] = cnr.Lookup(filled, where=where)
    return _record(touched, padded)


class Run:
    """A model and a real run beside it, in a folder of its own."""

    def __init__(
        self, root: str, options: cnr.Options, world: World, seed: int
    ) -> None:
        self.root, self.options, self.world = root, options, world
        self.by_fingerprints = options.tracking == "fingerprint"
        self.model = Model(options, seed)
        self.next_step = 0
        # The saves that led to the state; and to the newest one, which `all_steps` lists.
        self.line: list[int] = []
        self.lines: dict[int, list[int]] = {}
        self.listed: list[int] = []
        # Of rows until the last restore.
        self.motion_before: SampledMotion | None = None
        self.manager = self._open()
        self.touched = cnr.init_touched(self.state(), world.tables)

    def _open(self) -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            self.root, tables=self.world.tables, options=self.options
        )

    def state(self) -> Any:
        return self.world.put(self.model.live, self.model.w, self.next_step)

    def train(self, ids: Mapping[str, Sequence[int]], *, in_jit: bool = False) -> None:
        self.model.train(ids)
        if in_jit:
            self.touched = recorded(self.touched, ids, self.world)
        else:
            places = {t: self.world.places(t)[list(i)] for t, i in ids.items()}
            self.touched = stamped(self.touched, places)

    def save(self) -> None:
        step, self.next_step = self.next_step, self.next_step + 1
        legal = self.model.legal_parents(self.options.policy)
        state = self.world.put(self.model.live, self.model.w, step)
        touched = None if self.by_fingerprints else self.touched
        assert self.manager.save(step, args=cnr.args.Save(state, touched))
        self.manager.wait_until_finished()
        report = self.manager.last_report
        assert report is not None and report.step == step
        assert report.parent in legal, report.reason
        manifest = self.manifest(step)
        before = self.motion_before and self.motion_before.even_bits
        dither = Dither(manifest.lineage, dithered_bits(manifest.restores, before))
        assert manifest.restores == report.restores
        self.model.saved(step, report.parent, self.world, dither)
        self.line = self.listed = self.lines[step] = [*self.line, step]
        if report.parent is None:
            rows = sum(self.world.stored_rows(table) for table in SHAPES)
        else:
            rows = sum(len(rows) for rows in self.model.steps[step].rows.values())
        if self.by_fingerprints and report.parent is not None:
            assert report.rows <= rows  # some rows are trained to what they were
        else:
            assert report.rows == rows

    def restore(self, step: int, world: World, *, reopen: bool) -> None:
        """Goes on from a step in another world, as a new process would or in this one."""
        if reopen or world.tag_layout != self.world.tag_layout:
            self.manager.close()
            self.world = world
            self.manager = self._open()
        self.world = world
        restored = self.manager.restore(step, args=cnr.args.Restore(world.zeros))
        assert_equals_model(restored.state, self.model, step, world)
        chain = [self.manifest(at) for at in self.model.chain(step)]
        moved = [m.motion for m in chain if m.motion and m.lineage == chain[0].lineage]
        self.motion_before = moved[0] if moved else None
        self.model.restored(step, world)
        self.line, self.touched = self.lines[step], restored.touched

    def manifest(self, step: int) -> Manifest:
        return read_manifest(Path(self.root, str(step), "default"))

    def check_all(self, choose: Callable[[], World]) -> None:
        """Restores every step somewhere."""
        assert self.manager.all_steps() == self.listed
        for step in self.model.steps:
            world = choose()
            args = cnr.args.Restore(world.zeros, tables=world.tables)
            state, _ = self.manager.restore(step, args=args)
            assert_equals_model(state, self.model, step, world)


def play(
    data: st.DataObject, options: cnr.Options, choices: st.SearchStrategy[World]
) -> None:
    """Trains, saves, restores elsewhere and goes on, as hypothesis likes."""
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed of values")
    world = data.draw(choices, label="world")
    with tempfile.TemporaryDirectory() as root:
        run = Run(root, options, world, seed)
        for turn in data.draw(TURNS, label="turns"):
            if turn == "restore" and run.model.steps:
                step = data.draw(_newest_first(run), label="step")
                to = data.draw(choices, label="new world")
                if data.draw(st.sampled_from([True, True, False]), label="same layout"):
                    # Only then may a delta follow.
                    to = dataclasses.replace(
                        to, tag_layout=run.model.steps[step].layout
                    )
                run.restore(step, to, reopen=data.draw(st.booleans(), label="reopen"))
                continue
            if "train" in turn:
                run.train(data.draw(IDS, label="ids"))
            if "save" in turn:
                run.save()
        run.save()
        run.check_all(lambda: data.draw(choices, label="world to check in"))
        run.manager.close()


def _newest_first(run: Run) -> st.SearchStrategy[int]:
    """Mostly the newest step, which is the likeliest to be a delta."""
    steps = sorted(run.model.steps, reverse=True)
    return st.one_of(st.just(steps[0]), st.sampled_from(steps))


TURNS = st.lists(
    st.sampled_from(
        ["train", "save", "train, save", "train, save", "restore", "restore"]
    ),
    min_size=3,
    max_size=7,
)
IDS = st.fixed_dictionaries(
    {
        name: st.one_of(
            st.lists(st.integers(0, shape.rows - 1), max_size=6),
            st.just(list(range(shape.rows))),
        )
        for name, shape in SHAPES.items()
    }
)


def _settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        # Shrinking saves and restores hundreds of times, longer than a test may take.
        phases=[
            hypothesis.Phase.explicit,
            hypothesis.Phase.reuse,
            hypothesis.Phase.generate,
        ],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


STAGING_BYTES = st.sampled_from([1, 1000, 2 << 30])


def slowly(*case: str) -> Any:
    """A policy, and what goes with it, that is tried on demand only."""
    return pytest.param(*case, marks=pytest.mark.slow)


# Whatever the policy, the first save is full.
@pytest.mark.parametrize(
    "policy",
    [slowly("full"), slowly("one_shot"), slowly("consecutive"), "intermittent"],
)
@_settings(3)
@hypothesis.given(data=st.data(), staging_bytes=STAGING_BYTES)
def test_exact_chains_equal_model_for_any_placement(
    policy: str, data: st.DataObject, staging_bytes: int
) -> None:
    options = cnr.Options(
        policy=POLICIES[policy],
        codec="raw",
        staging="host",
        max_staging_bytes=staging_bytes,
    )
    play(data, options, worlds())


def quantized(policy: str, *, codec: str = "adaptive", **others: Any) -> cnr.Options:
    return cnr.Options(
        policy=POLICIES[policy],
        codec=codec,
        bits=4,
        slot_codec="asymmetric",
        tables={"item": cnr.TableOptions(codec="asymmetric", bits=8)},
        **others,
    )


# Every width of a tile is a compilation of the codec: whole rows and halves, no eighths. The
# one that searches takes longest; on a device it is tried below.
QUANTIZED_SPECS = ["rows", "columns", "both", "replicated", "zero", "device"]


# Rows are decoded alike whatever a policy lets them rest on.
@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        ("consecutive", "asymmetric"),
        ("intermittent", "asymmetric"),
        slowly("full", "adaptive"),
        slowly("one_shot", "adaptive"),
        slowly("consecutive", "adaptive"),
        slowly("intermittent", "adaptive"),
    ],
)
@_settings(3)
@hypothesis.given(data=st.data(), staging_bytes=STAGING_BYTES)
def test_quantized_chains_hold_decoded_rows_and_leave_others_alone(
    policy: str, codec: str, data: st.DataObject, staging_bytes: int
) -> None:
    options = quantized(
        policy, codec=codec, staging="host", max_staging_bytes=staging_bytes
    )
    play(data, options, worlds(QUANTIZED_SPECS))


# Encoding on the device is compiled for every device and shape of a shard: few worlds.
DEVICE_WORLDS = [
    World(2, ("rows", "zero", "replicated", "replicated", "rows", "device")),
    World(1, ("rows", "rows", "rows", "rows", "rows", "rows")),
]


# By default the quantized ones below stand for these, on one device, and exact rows of any shape
# on two (test_any_rows.py).
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["one_shot", "consecutive"])
@_settings(3)
@hypothesis.given(data=st.data(), staging_bytes=STAGING_BYTES)
def test_exact_chains_encoded_on_the_device_equal_model(
    policy: str, data: st.DataObject, staging_bytes: int
) -> None:
    options = cnr.Options(
        policy=POLICIES[policy],
        codec="raw",
        staging="device",
        max_staging_bytes=staging_bytes,
    )
    play(data, options, st.sampled_from(DEVICE_WORLDS))


@pytest.mark.slow
@_settings(2)
@hypothesis.given(data=st.data(), staging_bytes=STAGING_BYTES)
def test_quantized_chains_encoded_on_the_device_equal_model(
    data: st.DataObject, staging_bytes: int
) -> None:
    options = quantized(
        "consecutive", staging="device", max_staging_bytes=staging_bytes
    )
    play(data, options, st.just(DEVICE_WORLDS[1]))


@pytest.mark.parametrize("policy", ["one_shot", slowly("consecutive")])
@_settings(4)
@hypothesis.given(data=st.data())
def test_fingerprint_chains_equal_model_for_any_placement(
    policy: str, data: st.DataObject
) -> None:
    options = cnr.Options(
        policy=POLICIES[policy], codec="raw", staging="host", tracking="fingerprint"
    )
    play(data, options, worlds())


# Once stamps are made the ways of recorded rows are taken, which the tests above go.
@pytest.mark.slow
@_settings(6)
@hypothesis.given(data=st.data())
def test_quantized_fingerprint_chains_hold_decoded_rows(data: st.DataObject) -> None:
    options = quantized("consecutive", staging="host", tracking="fingerprint")
    play(data, options, worlds(QUANTIZED_SPECS))


@pytest.mark.slow
@_settings(6)
@hypothesis.given(data=st.data())
def test_fingerprint_chains_hashed_on_the_device_equal_model(
    data: st.DataObject,
) -> None:
    options = cnr.Options(
        policy=POLICIES["consecutive"],
        codec="raw",
        staging="device",
        tracking="fingerprint",
    )
    play(data, options, st.sampled_from(DEVICE_WORLDS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("test", "policy"),
    [
        *((test_exact_chains_equal_model_for_any_placement, p) for p in POLICIES),
        *(
            (test_quantized_chains_hold_decoded_rows_and_leave_others_alone, p)
            for p in POLICIES
        ),
        *(
            (test, policy)
            for test in (
                test_exact_chains_encoded_on_the_device_equal_model,
                test_fingerprint_chains_equal_model_for_any_placement,
            )
            for policy in ("one_shot", "consecutive")
        ),
        (test_quantized_chains_encoded_on_the_device_equal_model, None),
        (test_quantized_fingerprint_chains_hold_decoded_rows, None),
        (test_fingerprint_chains_hashed_on_the_device_equal_model, None),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_many_chains_equal_model(test: Any, policy: str | None) -> None:
    """Each of the tests above, on far more runs."""
    inner = test.hypothesis.inner_test
    names = inspect.signature(inner).parameters
    drawn = {"data": st.data(), "staging_bytes": STAGING_BYTES}
    many = hypothesis.given(**{k: v for k, v in drawn.items() if k in names})(inner)
    given = {"policy": policy, "codec": "adaptive"} if policy else {}
    _settings(100)(many)(**{k: v for k, v in given.items() if k in names})


def _same_everywhere(devices: int, spec: str, tag_layout: RowLayout) -> World:
    vector = {"columns": "replicated", "both": "some_rows"}.get(spec, spec)
    specs = tuple(spec if _trailing(*leaf) else vector for leaf in LEAVES)
    return World(devices, specs, tag_layout)


@pytest.mark.parametrize(
    ("policy", "tracking", "worlds"),
    [
        pytest.param("consecutive", "recorded", 20, marks=pytest.mark.slow),
        ("consecutive", "recorded", 5),
        ("one_shot", "recorded", 5),
        ("intermittent", "recorded", 5),
        ("one_shot", "fingerprint", 5),
    ],
)
def test_a_run_goes_on_through_every_sharding_and_device_count(
    policy: str, tracking: Any, worlds: int
) -> None:
    rng = np.random.default_rng(5)
    specs = ["rows", "columns", "both", "replicated", "device"]
    # Neighbours differ in both, and each pair comes once.
    walk = [
        _same_everywhere(devices, spec, cnr.Identity())
        for i in range(5)
        for devices, spec in zip(
            [8, 2, 4, 1],
            itertools.islice(itertools.cycle(specs), i, i + 4),
            strict=True,
        )
    ]
    assert len(set(walk)) == 20
    # All device counts, and four of the five shardings, are among the first five too.
    walk = walk[:worlds]
    with tempfile.TemporaryDirectory() as root:
        options = cnr.Options(policy=POLICIES[policy], codec="raw", tracking=tracking)
        run = Run(root, options, walk[0], seed=1)
        run.save()
        for world in walk:
            run.restore(run.next_step - 1, world, reopen=False)
            for _ in range(2):
                ids = {
                    name: rng.integers(0, shape.rows, 3).tolist()
                    for name, shape in SHAPES.items()
                }
                run.train(ids, in_jit=True)
            run.save()
        run.check_all(itertools.cycle(walk[-5:]).__next__)
        run.manager.close()


@pytest.mark.parametrize("codec", ["raw", "adaptive"])
@pytest.mark.parametrize("staging", ["host", "device"])
def test_tables_of_many_chunks_stream_through_a_tiny_staging_budget(
    codec: str, staging: Any
) -> None:
    rows, dim, device = 90_000, 16, jax.devices()[0]
    rng = np.random.default_rng(3)
    options = cnr.Options(
        codec=codec,
        policy=cnr.Consecutive(),
        staging=staging,
        max_staging_bytes=1,
    )
    live = rng.normal(size=(rows, dim)).astype(np.float32)
    state = {"user": jax.device_put(live.copy(), device)}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    coder = options.codec_for("user", "table", dim, np.float32)
    # A CPU and a GPU may choose codes that differ where two are as near.
    encoder = host_device() if staging == "host" else device
    with (
        tempfile.TemporaryDirectory() as root,
        cnr.CheckpointManager(root, tables=tables, options=options) as manager,
        jax.default_device(encoder),
    ):
        expected = decoded_rows(coder, live.copy())
        steps = [expected]
        manager.save(0, args=cnr.args.Save(state, touched))
        for step, count in enumerate([0, 1, 513, 70_000], start=1):
            changed = np.sort(rng.choice(rows, count, replace=False))
            live[changed] = rng.normal(size=(count, dim)).astype(np.float32)
            touched = stamped(touched, {"user": changed})
            state = {"user": jax.device_put(live.copy(), device)}
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            assert manager.last_report is not None
            assert manager.last_report.rows == count
            expected = expected.copy()
            expected[changed] = decoded_rows(coder, live[changed])
            steps.append(expected)
        for step, expected in enumerate(steps):
            restored, _ = manager.restore(step, args=cnr.args.Restore(state))
            np.testing.assert_array_equal(np.asarray(restored["user"]), expected)
