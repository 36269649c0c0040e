"""However a leaf is put together, its bits are those of a plain replay, on every mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.format.manifest import TableEntry
from cnr_jax.repository.replay import leaves, regions
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.rows.codecs import Asymmetric, Raw, codec_from
from cnr_jax.state.layouts import layout_from

from ..conftest import mesh_within

SHAPES = {"user": (64, 6), "item": (48, 8), "cube": (32, 4, 2)}
MOST_ROWS = 64
DTYPES = {"user": np.float32, "item": jnp.bfloat16, "cube": np.float16}
MESH = mesh_within((2, 2), ("r", "c"), (AxisType.Auto,) * 2)
SPECS = {
    "rows": P(("r", "c")),
    "columns": P(None, "c"),
    "both": P("r", "c"),
    "whole": P(),
}
# Sharding and codec of each step: fewer and more bits, exact rows, other tiles. How well a codec
# has searched does not tell in a replay, and programs without a search are compiled soonest.
STEPS = (
    ("rows", Asymmetric(bits=2, refits=0)),
    ("rows", Asymmetric(bits=3, refits=0)),
    ("both", Asymmetric(bits=4, refits=0)),
    ("columns", Raw()),
    ("rows", Asymmetric(bits=8, refits=0)),
    ("rows", Asymmetric(bits=2, refits=0)),
)


def sharding(spec: str, ndim: int) -> NamedSharding:
    return NamedSharding(MESH, P(*SPECS[spec][:ndim]))


def placed(state: Any, spec: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, sharding(spec, x.ndim)), state)


def first_state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tables = {
        name: jnp.asarray(rng.normal(size=shape), DTYPES[name])
        for name, shape in SHAPES.items()
    }
    slots = {
        name: jnp.asarray(rng.random(SHAPES[name][0]), np.float32) for name in SHAPES
    }
    return {"tables": tables, "slots": slots}


def changed(state: Any, step: int) -> tuple[Any, dict[str, np.ndarray]]:
    """New values in a third of the rows; some of them no quantizer can hold."""
    rng = np.random.default_rng(step)
    ids: dict[str, np.ndarray] = {}
    new: dict[str, dict[str, Any]] = {"tables": {}, "slots": {}}
    for name, shape in SHAPES.items():
        rows = np.sort(rng.choice(shape[0], shape[0] // 3, replace=False))
        values = rng.normal(size=(len(rows), *shape[1:]))
        values[::4] = np.nan
        values[1::4] = step
        table = np.array(state["tables"][name])
        table[rows] = values.astype(table.dtype)
        slot = np.array(state["slots"][name])
        slot[rows] += 1
        new["tables"][name], new["slots"][name] = jnp.asarray(table), jnp.asarray(slot)
        ids[name] = rows.astype(np.int32)
    return new, ids


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose codec and sharding change from step to step: one full, then deltas."""
    root = tmp_path_factory.mktemp("ways")
    state, touched = placed(first_state(), "rows"), None
    for step, (spec, codec) in enumerate(STEPS):
        state = placed(state, spec)
        tables = cnr.find_tables(state, list(SHAPES))
        options = cnr.Options(codec=codec, policy=cnr.Consecutive())
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            if touched is None:
                touched = cnr.init_touched(state, tables)
            else:
                state, touched = manager.restore(None, args=cnr.args.Restore(state))
                state, ids = changed(state, step)
                state = placed(state, spec)
                touched = jax.jit(cnr.record)(touched, ids)
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            assert manager.last_report is not None
            assert manager.last_report.kind == ("delta" if step else "full")
    return root


_replays: dict[tuple[str, ...], np.ndarray] = {}


def replayed(chain: tuple[StepReader, ...], table: str, leaf: str) -> np.ndarray:
    """The leaf, by the letter of SPEC.md, section 9.2; once, as no test changes the run."""
    key = (table, leaf, *(str(reader.directory) for reader in chain))
    if key not in _replays:
        _replays[key] = _replayed(chain, table, leaf)
        _replays[key].flags.writeable = False
    return _replays[key]


def _replayed(chain: tuple[StepReader, ...], table: str, leaf: str) -> np.ndarray:
    entry = chain[0].tables[table]
    found = next(x for x in entry.leaves if x.name == leaf)
    out = np.zeros(found.shape, jnp.dtype(found.dtype))
    for reader in chain:
        for process in reader.processes:
            for tile in (
                t for t in process.tiles if (t.table, t.leaf) == (table, leaf)
            ):
                for segment in tile.segments:
                    put(reader, process.process, tile, segment, out)
    return out


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(codec: Any, parts: Any, dim: int, dtype: np.dtype) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)


def put(reader: StepReader, process: int, tile: Any, segment: Any, out: Any) -> None:
    start, stop = tile.box[0]
    found = reader.positions(process, segment.row_ids, stop - start)
    positions = np.arange(stop - start) if found is None else found
    named = reader.processes[process].codecs[segment.codec]
    codec = codec_from(named.name, named.configuration)
    parts = {}
    for name, part in codec.parts(tile.width, out.dtype).items():
        ref = segment.parts[name]
        last = ref.offset + len(positions) * part.width
        values = reader.array(process, ref.array).read(ref.offset, last)
        values = values.reshape(-1, part.width)
        # Always as many rows: another number of them would be compiled anew.
        padding = ((0, MOST_ROWS - len(values)), (0, 0))
        parts[name] = jnp.asarray(np.pad(values, padding))
    rows = np.asarray(decode(codec, parts, tile.width, out.dtype))
    rows = rows[: len(positions)]
    columns = tuple(slice(a, b) for a, b in tile.box[1:])
    shape = tuple(b - a for a, b in tile.box[1:])
    out[(positions + start, *columns)] = rows.reshape(-1, *shape)


def restored(
    chain: Sequence[StepReader],
    table: str,
    leaf: str,
    target: leaves.Target,
    abstract: leaves.Abstract,
) -> jax.Array:
    (array,) = leaves.restore_leaves(chain, [(table, leaf, target, abstract)])
    return array


def target_of(entry: TableEntry, padded_rows: int | None = None) -> leaves.Target:
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    padded_rows = padded_rows or entry.padded_rows
    return leaves.Target(rows=entry.rows, layout=layout, padded_rows=padded_rows)


# Limits under which each way is taken. Slabs do not divide the parts.
WAYS: dict[str, dict[str, int]] = {
    "on_host": {"restored_small_bytes": 1 << 30},
    "by_program": {"restored_small_bytes": 0},
    "device_by_device": {"restored_small_bytes": 0, "restored_host_bytes": 1},
    "slab_by_slab": {"restored_small_bytes": 0, "restored_slab_bytes": 150},
    "block_by_block": {"fetched_block_bytes": 30, "fetched_ahead_bytes": 70},
}


@pytest.fixture
def take(tiny_limits: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets restores go one of the ways."""

    def go(way: str) -> None:
        tiny_limits(**WAYS[way])
        if way == "slab_by_slab":
            with_memory_of_their_own(monkeypatch)

    return go


def with_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are taken for accelerators, which no call of these tests can make them."""
    monkeypatch.setattr(leaves, "_is_host", lambda device: False)


@pytest.mark.parametrize(
    ("way", "spec"),
    [
        *(("on_host", spec) for spec in (*SPECS, "one")),
        *(("by_program", spec) for spec in ("rows", "both", "whole", "one")),
        pytest.param("by_program", "columns", marks=pytest.mark.slow),
        *(("slab_by_slab", spec) for spec in ("both", "one")),
        ("device_by_device", "rows"),
        ("block_by_block", "both"),
    ],
)
def test_every_way_gives_the_bits_of_a_plain_replay(
    root: Path, way: str, spec: str, take: Callable[[str], None]
) -> None:
    take(way)
    chain = open_chain(epath.Path(root), str(len(STEPS) - 1), "default")
    assert len(chain) == len(STEPS)
    one = SingleDeviceSharding(jax.devices()[3])
    for entry in chain[0].manifest.tables:
        target = target_of(entry)
        for leaf in entry.leaves:
            where = one if spec == "one" else sharding(spec, len(leaf.shape))
            dtype = jnp.dtype(leaf.dtype)
            abstract = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=where)
            got = restored(chain, entry.name, leaf.name, target, abstract)
            expected = replayed(chain, entry.name, leaf.name)
            assert got.sharding == where and got.dtype == dtype
            assert np.asarray(got).tobytes() == expected.tobytes(), leaf


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_nothing_holds_are_positive_zeros(
    root: Path, way: str, take: Callable[[str], None]
) -> None:
    """More stored rows are wanted than were saved: some devices hold padding alone."""
    take(way)
    chain = open_chain(epath.Path(root), "2", "default")
    entry = chain[0].tables["user"]
    padded = 2 * entry.rows
    target = target_of(entry, padded)
    expected = np.zeros((padded, SHAPES["user"][1]), np.float32)
    expected[: entry.rows] = replayed(chain, "user", "table")
    abstract = jax.ShapeDtypeStruct(
        expected.shape, expected.dtype, sharding=sharding("both", 2)
    )
    got = restored(chain, "user", "table", target, abstract)
    assert np.asarray(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("way", "spec"),
    [
        *((way, "both") for way in WAYS),
        *((way, "one") for way in ("on_host", "slab_by_slab")),
        *(
            pytest.param(way, "one", marks=pytest.mark.slow)
            for way in ("by_program", "device_by_device", "block_by_block")
        ),
    ],
)
def test_rows_that_take_none_have_the_values_of_the_array_that_is_given(
    root: Path, way: str, spec: str, take: Callable[[str], None]
) -> None:
    """Some devices hold old rows, some new ones, some both; rows of the chain go anywhere."""
    take(way)
    chain = open_chain(epath.Path(root), str(len(STEPS) - 1), "default")
    rng = np.random.default_rng(0)
    entry = chain[0].tables["user"]
    stored = replayed(chain, "user", "table")
    count = 2 * entry.rows - 8
    where = (
        SingleDeviceSharding(jax.devices()[3]) if spec == "one" else sharding(spec, 2)
    )
    grown = np.where(np.arange(count) < entry.rows, np.arange(count), -1)
    for taken in (None, rng.integers(-1, entry.rows, count)):
        target = dataclasses.replace(target_of(entry, count), rows=count, taken=taken)
        values = rng.normal(size=(count, SHAPES["user"][1])).astype(np.float32)
        own = jax.device_put(values, where)
        got = restored(chain, "user", "table", target, own)
        ids = grown if taken is None else taken
        expected = np.where(ids[:, None] < 0, values, stored[ids])
        assert got.sharding == where
        assert np.asarray(got).tobytes() == expected.tobytes()
        assert np.asarray(own).tobytes() == values.tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_another_dtype_is_converted_as_numpy_does(
    root: Path, way: str, take: Callable[[str], None]
) -> None:
    take(way)
    chain = open_chain(epath.Path(root), "2", "default")
    entry = chain[0].tables["user"]
    target = target_of(entry)
    expected = replayed(chain, "user", "table").astype(jnp.bfloat16)
    abstract = jax.ShapeDtypeStruct(
        expected.shape, expected.dtype, sharding=sharding("rows", 2)
    )
    got = restored(chain, "user", "table", target, abstract)
    assert np.array_equal(np.asarray(got), expected, equal_nan=True)


def test_a_restored_array_can_be_donated_and_holds_its_own_memory(
    root: Path, take: Callable[[str], None]
) -> None:
    """On CPU an array may share memory with numpy's: a donated step must not write there."""
    chain = open_chain(epath.Path(root), "0", "default")
    entry = chain[0].tables["user"]
    target = target_of(entry)
    abstract = jax.ShapeDtypeStruct(
        SHAPES["user"], np.float32, sharding=sharding("whole", 2)
    )
    expected = replayed(chain, "user", "table")
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for way in ("on_host", "by_program"):
        take(way)
        got = restored(chain, "user", "table", target, abstract)
        shards = [np.array(shard.data) for shard in got.addressable_shards]
        assert all(shard.tobytes() == expected.tobytes() for shard in shards)
        after = add(got)
        for shard in after.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected + 1)


def test_a_row_is_read_from_the_newest_checkpoint_that_holds_it(root: Path) -> None:
    """Rows of another kind than most that were saved anew later are no patches."""
    chain = open_chain(epath.Path(root), str(len(STEPS) - 1), "default")
    entry = chain[0].tables["user"]
    target = target_of(entry)
    box = ((0, entry.rows), (0, 3))
    leaf = regions.WantedLeaf(
        chain, "user", "table", target, np.dtype(np.float32), np.dtype(np.float32)
    )
    merged = leaf.merged(box)
    rows = np.concatenate([patch.rows for patch in merged.patches])
    assert len(set(rows.tolist())) == len(rows) < entry.rows
    kinds = {dataclasses.astuple(patch.encoding) for patch in merged.patches}
    assert len(kinds) == len(merged.patches) > 2


def test_a_slab_of_padding_only_is_decoded_beside_slabs_of_rows(
    tmp_path: Path, tiny_limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a table is padded more than it was, and large, on devices with memory."""
    tiny_limits(restored_small_bytes=0, restored_slab_bytes=640)
    with_memory_of_their_own(monkeypatch)
    rows = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    state = {"a": jax.device_put(rows, jax.devices()[0])}
    tables = cnr.find_tables(state, ["a"])
    touched = cnr.init_touched(state, tables)
    with cnr.CheckpointManager(
        tmp_path, tables=tables, options=cnr.Options(codec=Asymmetric(bits=8, refits=0))
    ) as manager:
        manager.save(1, args=cnr.args.Save(state, touched))
    mesh = jax.make_mesh(
        (2,),
        ("rows",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:2],
    )
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    wanted = {"a": jax.device_put(np.zeros((128, 64), np.float32), spread)}
    tables = cnr.find_tables(wanted, {"a": cnr.TableSpec(rows=96)})
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        args = cnr.args.Restore(wanted, tables=tables)
        found, _ = manager.restore(1, args=args)
    np.testing.assert_allclose(np.asarray(found["a"])[:96], rows, atol=0.02)
    assert not np.asarray(found["a"])[96:].any()
