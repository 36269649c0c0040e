"""Tables that are no embeddings: vectors, weights of experts, frozen kernels, integers."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.errors import AuditError, TableError
from cnr_jax.repository.step import read_manifest

SHAPES = {"bias": (16,), "experts": (8, 4, 16), "kernel": (24, 16)}
NAMES = {
    "bias": "params/head/bias",
    "experts": "params/experts",
    "kernel": "params/head/kernel",
}
# Devices along each axis.
MESH = (2, 2)
# How the parameters lie on the mesh. Slots lie as their tables do, as far as they have the
# axes.
LAYOUTS = {
    "rows": dict.fromkeys(SHAPES, P(("x", "y"))),
    "columns": {
        "bias": P(),
        "experts": P(None, None, ("x", "y")),
        "kernel": P(None, ("x", "y")),
    },
    "both": {
        "bias": P("y"),
        "experts": P("y", "x"),
        "kernel": P("x", "y"),
    },
}
BITS = 4

pytestmark = pytest.mark.usefixtures("unsynced")


@lru_cache
def _mesh(shape: tuple[int, int]) -> jax.sharding.Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("x", "y"), (AxisType.Auto,) * 2, devices=devices)


def placed(*spec: Any) -> NamedSharding:
    return NamedSharding(_mesh(MESH), P(*spec))


def shardings(layout: str) -> dict[str, Any]:
    specs = LAYOUTS[layout]
    of = {name: placed(*spec) for name, spec in specs.items()}
    by_row = placed(*specs["experts"][:1])
    return {
        "params": {
            "experts": of["experts"],
            "head": {"bias": of["bias"], "kernel": of["kernel"]},
        },
        "opt": {
            "sum": {"experts": by_row, "head": {"bias": of["bias"]}},
            "average": {"experts": of["experts"]},
        },
    }


def state_of(layout: str) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    values = {k: rng.normal(size=shape) for k, shape in SHAPES.items()}
    state = {
        "params": {
            "experts": values["experts"],
            "head": {"bias": values["bias"], "kernel": values["kernel"]},
        },
        "opt": {
            "sum": {"experts": np.zeros(8), "head": {"bias": np.zeros(16)}},
            "average": {"experts": np.zeros(SHAPES["experts"])},
        },
    }
    state = jax.tree.map(lambda x: x.astype(np.float32), state)
    return jax.device_put(state, shardings(layout)) | {"step": 0}


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    state: Any, touched: cnr.Touched, ids: dict[str, jax.Array], change: jax.Array
) -> tuple[Any, cnr.Touched]:
    """Changes the rows `ids` of two tables and their slots; the kernel is frozen."""

    def moved(table: jax.Array, name: str) -> jax.Array:
        rows = ids[name]
        return table.at[rows].add(change * jnp.cos(table[rows] + change))

    params, opt = state["params"], state["opt"]
    params = params | {
        "experts": moved(params["experts"], "experts"),
        "head": params["head"] | {"bias": moved(params["head"]["bias"], "bias")},
    }
    opt = {
        "sum": {
            "experts": moved(opt["sum"]["experts"], "experts"),
            "head": {"bias": moved(opt["sum"]["head"]["bias"], "bias")},
        },
        "average": {"experts": moved(opt["average"]["experts"], "experts")},
    }
    new = state | {"params": params, "opt": opt, "step": state["step"] + 1}
    return new, cnr.record(touched, ids)


# Rows that each step changes; step 3 comes after a restore.
IDS = {
    1: {"bias": [1, 15, 1], "experts": [6, 0]},
    2: {"bias": [2], "experts": [-1, 6]},
    3: {"bias": [15, 0], "experts": [3]},
}
TOUCHED = {1: 2 + 2, 2: 1 + 2, 3: 2 + 1}


def train(state: Any, touched: cnr.Touched, step: int) -> tuple[Any, cnr.Touched]:
    ids = {name: jnp.array(rows) for name, rows in IDS[step].items()}
    return train_step(state, touched, ids, jnp.float32(step / 4))


def values_of(state: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf)
        for path, leaf in leaves
    }


def assert_restored(
    got: Any, truth: dict[str, np.ndarray], quantized: tuple[str, ...]
) -> None:
    """Exact, but for what was quantized: these rows are within the codec's bound."""
    values = values_of(got)
    assert values.keys() == truth.keys()
    for path, want in truth.items():
        if path not in quantized:
            np.testing.assert_array_equal(values[path], want, err_msg=path)
            continue
        rows = want.reshape(len(want), -1)
        wrong = values[path].reshape(rows.shape) - rows
        step = (rows.max(1) - rows.min(1)) / (2**BITS - 1)
        bound = 0.52 * step * np.sqrt(rows.shape[1])
        assert (np.linalg.norm(wrong, axis=1) <= bound).all(), path
        assert np.any(wrong), path


@dataclasses.dataclass
class Saved:
    """A root with a full checkpoint and two deltas, and what they must restore to."""

    root: Path
    codec: str
    staging: Any = "auto"
    tracking: Any = "recorded"
    truth: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def manager(self, tables: cnr.Tables) -> cnr.CheckpointManager:
        options = cnr.Options(
            codec=self.codec,
            bits=None if self.codec == "raw" else BITS,
            staging=self.staging,
            tracking=self.tracking,
            policy=cnr.Consecutive(),
        )
        return cnr.CheckpointManager(self.root, tables=tables, options=options)

    def save(self, manager: Any, step: int, state: Any, touched: Any = None) -> None:
        manager.save(step, args=cnr.args.Save(state, touched))
        self.truth[step] = values_of(state)

    def manifest(self, step: int) -> Any:
        return read_manifest(self.root / str(step) / "default")

    def check(self, step: int, layout: str, *quantized: str) -> None:
        """Restores a step in a fresh manager, for some placement."""
        abstract = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                if isinstance(x, jax.Array)
                else x
            ),
            state_of(layout),
        )
        with self.manager(cnr.find_tables(abstract, NAMES)) as manager:
            got = manager.restore(step, args=cnr.args.Restore(abstract)).state
        for leaf, like in zip(
            jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True
        ):
            if isinstance(like, jax.ShapeDtypeStruct):
                assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        lossy = tuple(NAMES[name] for name in quantized if self.codec != "raw")
        assert_restored(got, self.truth[step], lossy)


def slowly(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "other", "codec", "staging", "mesh"),
    [
        slowly("rows", "columns", "raw", "auto", MESH),
        slowly("columns", "rows", "raw", "auto", MESH),
        slowly("rows", "both", "adaptive", "auto", MESH),
        slowly("columns", "both", "asymmetric", "auto", MESH),
        slowly("both", "rows", "asymmetric", "auto", MESH),
        slowly("both", "rows", "adaptive", "auto", MESH),
        slowly("rows", "columns", "raw", "auto", (4, 2)),
        slowly("columns", "both", "adaptive", "auto", (4, 2)),
        # Here each device has programs of its own.
        slowly("both", "columns", "raw", "device", (2, 1)),
    ],
)
def test_recorded_rows_of_any_shape_come_back_on_any_mesh(
    layout, other, codec, staging, mesh, tmp_path, monkeypatch
):
    monkeypatch.setattr(f"{__name__}.MESH", mesh)
    state = state_of(layout)
    tables = cnr.find_tables(state, NAMES)
    assert [len(table.slots) for table in tables.values()] == [1, 2, 0]
    saved = Saved(tmp_path, codec, staging)
    with saved.manager(tables) as manager:
        touched = cnr.init_touched(state, tables)
        saved.save(manager, 0, state, touched)
        for step in (1, 2):
            state, touched = train(state, touched, step)
            saved.save(manager, step, state, touched)
    for step in range(3):
        manifest = saved.manifest(step)
        assert manifest.kind == ("delta" if step else "full")
        if step:
            assert manifest.totals.rows == TOUCHED[step]
        saved.check(step, layout, "experts", "kernel")
    saved.check(2, other, "experts", "kernel")
    like = state_of(other)
    tables = cnr.find_tables(like, NAMES)
    with saved.manager(tables) as manager:
        state, touched = manager.restore(2, args=cnr.args.Restore(like))
        for name, spec in LAYOUTS[other].items():
            rows = placed(*spec[:1])
            assert touched.stamps[name].sharding.is_equivalent_to(rows, 1)
        state, touched = train(state, touched, 3)
        saved.save(manager, 3, state, touched)
    assert saved.manifest(3).kind == "delta"
    assert saved.manifest(3).totals.rows == TOUCHED[3]
    # The frozen kernel is still the one that was restored, to the bit.
    saved.check(3, other, "experts")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_shape_that_are_not_recorded_are_found(layout, tmp_path):
    state = state_of(layout)
    tables = cnr.find_tables(state, NAMES)
    saved = Saved(tmp_path, "raw")
    with saved.manager(tables) as manager:
        touched = cnr.init_touched(state, tables)
        saved.save(manager, 0, state, touched)
        state, touched = train(state, touched, 1)
        for path, index, name in (
            (("params", "experts"), (5, 3, 15), "experts"),
            (("params", "head", "bias"), (9,), "bias"),
            (("params", "head", "kernel"), (23, 0), "kernel"),
            (("opt", "sum", "experts"), (7,), "experts"),
        ):
            wrong = jax.tree.map(lambda x: x, state)
            node = wrong
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = node[path[-1]].at[index].add(1)
            named = rf"(?s)table '{name}'.*\b{index[0]}\b"
            with pytest.raises(AuditError, match=named):
                saved.save(manager, 1, wrong, touched)
        saved.save(manager, 1, state, touched)
    saved.check(1, layout)


@pytest.mark.parametrize("layout", [slowly("rows"), "columns", "both"])
def test_changed_rows_of_any_shape_are_found_by_fingerprints(layout, tmp_path):
    state = state_of(layout)
    tables = cnr.find_tables(state, NAMES)
    saved = Saved(tmp_path, "raw", tracking="fingerprint")
    with saved.manager(tables) as manager:
        unused = cnr.init_touched(state, tables)
        saved.save(manager, 0, state)
        for step in (1, 2):
            state, unused = train(state, unused, step)
            saved.save(manager, step, state)
    for step in (1, 2):
        assert saved.manifest(step).totals.rows == TOUCHED[step]
        saved.check(step, layout)


@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "float64", "int8", "uint64"),
        *map(slowly, "bfloat16 int16 int32 int64 uint8 uint16 uint32".split()),
    ],
)
def test_numbers_of_any_kind_are_kept(dtype, tmp_path):
    """What the codec cannot quantize is stored bit for bit, over all of its range."""
    with jax.enable_x64(True):
        info = jnp.finfo(dtype) if "float" in dtype else jnp.iinfo(dtype)
        numbers = np.arange(48).astype(dtype).reshape(8, 3, 2)
        numbers[0, 0], numbers[7, 2] = info.max, info.min
        counts = jax.device_put(numbers, placed(("x", "y")))
        state = {"params": {"counts": counts}}
        tables = cnr.find_tables(state, ["counts"])
        touched = cnr.init_touched(state, tables)
        saved = Saved(tmp_path, "raw" if "float" in dtype else "adaptive")
        with saved.manager(tables) as manager:
            saved.save(manager, 0, state, touched)
            state = {"params": {"counts": counts.at[3].set(info.max)}}
            touched = cnr.record(touched, {"counts": jnp.array([3])})
            saved.save(manager, 1, state, touched)
        assert saved.manifest(1).totals.rows == 1
        for step in range(2):
            with saved.manager(tables) as manager:
                got = manager.restore(step, args=cnr.args.Restore(state)).state
            restored = np.asarray(got["params"]["counts"])
            assert restored.dtype == dtype
            truth = saved.truth[step]["params/counts"]
            assert restored.tobytes() == truth.tobytes()


# ---- of any dtype ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "staging", "tracking"),
    [
        ("bool", "device", "recorded"),
        ("int4", "host", "audited"),
        ("float8_e4m3fn", "device", "fingerprint"),
        slowly("bool", "host", "fingerprint"),
        slowly("int4", "device", "fingerprint"),
        slowly("float8_e4m3fn", "host", "recorded"),
        *[
            slowly(dtype, staging, "audited")
            for dtype in """
                int2 float4_e2m1fn float8_e3m4 float8_e4m3fnuz float8_e4m3b11fnuz
                float8_e5m2 float8_e5m2fnuz
            """.split()
            for staging in ("host", "device")
        ],
    ],
)
def test_rows_of_few_bits_come_back_bit_for_bit(
    tmp_path: Path, tiny_limits: Any, dtype: str, staging: Any, tracking: Any
) -> None:
    """With the default codec, which rounds no dtype but floats of 16 bits or more."""
    if staging == "device":
        tiny_limits(restored_small_bytes=0)  # decoded there too
    rng = np.random.default_rng(5)
    bits = 1 if dtype == "bool" else int("".join(filter(str.isdigit, dtype))[0])
    codes = rng.integers(0, 2**bits, (24, 5)).astype(np.uint8)
    if dtype.startswith("int"):
        codes = codes - (codes >= 2 ** (bits - 1)) * np.uint8(2**bits)
    table = codes.view(np.int8).astype(dtype) if bits < 8 else codes.view(dtype)
    if dtype.startswith("float4"):
        table = (codes.astype(np.float32) - 3).astype(dtype)

    def put(values: np.ndarray, *spec: Any) -> Any:
        return {"user": jax.device_put(values, placed(*spec)), "step": 0}

    state = put(table, "x")
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        staging=staging, tracking=tracking, policy=cnr.Consecutive(), bits=4
    )
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(3):
            rows = [step, 23 - 2 * step]
            table[rows] = table[rows[::-1]][:, ::-1]
            touched = cnr.record(touched, {"user": jnp.array(rows)})
            given = None if tracking == "fingerprint" else touched
            manager.save(step, args=cnr.args.Save(put(table, "x"), given))
            manager.wait_until_finished()
            assert manager.last_report.kind == ("delta" if step else "full")
            assert manager.last_report.worst_row_error in (None, 0.0)
        for spec in ([], ["y"], [None, None], ["x"]):
            asked = put(np.zeros_like(table), *spec)
            got = manager.restore(None, args=cnr.args.Restore(asked)).state["user"]
            assert got.dtype == table.dtype and got.sharding == asked["user"].sharding
            assert np.asarray(got).tobytes() == table.tobytes()
    assert cnr.verify(tmp_path) == ()
    some = cnr.read_rows(tmp_path, "user", [23, 0, 5])
    assert some.tobytes() == table[[23, 0, 5]].tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "uint4"])
def test_rows_of_other_dtypes_are_refused_by_name(dtype: str) -> None:
    state = {"user": jnp.zeros((4, 2), dtype)}
    with pytest.raises(TableError, match=rf"(?s)a table of {dtype}.*expected.*hint: "):
        cnr.find_tables(state, ["user"])
