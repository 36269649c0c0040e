"""What is not a table: stored as tiles, each element once, and restored however it is wanted."""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.saving import check, dense
from cnr_jax.format import names
from cnr_jax.format.dense import DenseTile
from cnr_jax.format.manifest import Manifest, dump
from cnr_jax.format.tiles import ProcessManifest, dump_process, load_process
from cnr_jax.repository import dense_writer
from cnr_jax.repository.rows_writer import RowsWriter
from cnr_jax.repository.staging import DenseBytes, Stage
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import arrays, digest_of
from cnr_jax.rows.gather.host import Buffers

from .conftest import each_of, flip, mesh_within

MESH = mesh_within((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
# Of 2 MiB, so that it is put together part by part, and of few elements.
SHAPES = {"large": (512, 1024), "small": (8, 6, 2)}
SPECS = (P("a", "b"), P(None, "a"), P(("a", "b")), P("b"), P())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arrays have many chunks, and tiles begin and end within them."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 100_003)
    monkeypatch.setattr(arrays, "LEAST_CHUNK_BYTES", 50_000)
    monkeypatch.setattr(arrays, "SMALL_READ_BYTES", 10_000)
    yield


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def placed(array: np.ndarray, spec: P, memory: str | None = None) -> jax.Array:
    return jax.device_put(array, NamedSharding(MESH, spec, memory_kind=memory))


def with_table(leaves: dict[str, Any]) -> dict[str, Any]:
    return {"table": jnp.zeros((8, 2)), **leaves}


def opened(root: Path, state: Any = None, **options: Any) -> cnr.CheckpointManager:
    tables = None if state is None else cnr.find_tables(state, ["table"])
    given = {"tracking": "fingerprint", "codec": "raw", **options}
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(**given))


def save(root: Path, leaves: dict[str, Any], **options: Any) -> dict[str, Any]:
    state = with_table(leaves)
    with opened(root, state, **options) as manager:
        manager.save(1, args=cnr.args.Save(state))
    return state


def restore(root: Path, state: Any = None, **kwargs: Any) -> Any:
    with opened(root) as manager:
        args = cnr.args.Restore(state, **kwargs) if state is not None else None
        return manager.restore(1, args=args).state


def item_of(root: Path) -> Path:
    return root / "1" / "default"


def process_of(root: Path) -> ProcessManifest:
    path = item_of(root) / names.process_manifest(0)
    return load_process(path.read_bytes(), str(path))


def reseal(root: Path, process: ProcessManifest) -> None:
    """Puts another process manifest in the place of one, with the right digests."""
    item, path = item_of(root), names.process_manifest(0)
    data = dump_process(process)
    (item / path).write_bytes(data)
    manifest = dataclasses.replace(
        read_manifest(item), processes=(digest_of(path, data),)
    )
    (item / names.MANIFEST).write_bytes(dump(manifest))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("saved", SPECS)
def test_leaves_come_back_in_any_sharding(tmp_path: Path, saved: P) -> None:
    leaves = {name: values(shape) for name, shape in SHAPES.items()}
    specs = {"large": saved, "small": P(*saved[:1])}
    save(tmp_path, {n: placed(x, specs[n]) for n, x in leaves.items()})
    process = process_of(tmp_path)
    assert process.dense is not None
    assert process.dense.array.length == sum(x.nbytes for x in leaves.values())
    assert len(process.dense.array.crc32c) > 10
    where: list[Any] = [NamedSharding(MESH, spec) for spec in SPECS]
    where += [jax.sharding.SingleDeviceSharding(jax.devices()[3])]
    where += [NamedSharding(MESH, P("b"), memory_kind="pinned_host")]
    for sharding in where:
        asked = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for name, x in leaves.items()
            if name == "large" or len(getattr(sharding, "spec", ())) < 2
        }
        got = restore(tmp_path, asked, partial=True)
        for name in asked:
            assert got[name].sharding == sharding
            assert np.asarray(got[name]).tobytes() == leaves[name].tobytes()
    got = restore(
        tmp_path, {n: np.empty_like(x) for n, x in leaves.items()}, partial=True
    )
    for name, leaf in leaves.items():
        assert isinstance(got[name], np.ndarray)
        assert got[name].tobytes() == leaf.tobytes()


def test_keys_come_back_in_any_sharding(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), 16).reshape(8, 2)
    save(tmp_path, {"keys": jax.device_put(keys, NamedSharding(MESH, P("a")))})
    data = np.asarray(jax.random.key_data(keys))
    for sharding in (
        NamedSharding(MESH, P("b", "a"))
        if keys.shape[1] > 2
        else NamedSharding(MESH, P("b")),
        NamedSharding(MESH, P()),
        jax.sharding.SingleDeviceSharding(jax.devices()[1]),
    ):
        like = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding)
        got = restore(tmp_path, {"keys": like}, partial=True)["keys"]
        assert got.dtype == keys.dtype and got.sharding.is_equivalent_to(sharding, 2)
        assert np.array_equal(jax.random.key_data(got), data)


# As a restore gives them that nobody has told how they are wanted.
KINDS: dict[str, Any] = {
    "numpy": np.arange(5, dtype=np.float64),
    "number of numpy": np.float16(0.5),
    "other byte order": np.arange(3, dtype=">i4"),
    "not in C order": np.asfortranarray(values((3, 4))),
    "a view": values((6, 6))[::2, 1:3],
    "int": -7,
    "large int": 2**64 - 1,
    "small int": -(2**63),
    "float": -0.0,
    "bool": True,
    "bfloat16": jnp.arange(4, dtype=jnp.bfloat16),
    "four bits": jnp.arange(-4, 4, dtype=jnp.int4),
    "no dimension": jnp.float32(3),
    "text": "ö",
}


def test_leaves_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    state = save(tmp_path, KINDS)
    for found in (restore(tmp_path), restore(tmp_path, state)):
        for name, value in KINDS.items():
            got = found[name]
            if isinstance(value, np.ndarray | np.generic):
                assert (
                    isinstance(got, np.ndarray) and got.dtype.name == value.dtype.name
                )
                assert np.array_equal(got, value)
            else:
                assert type(got) is type(value), name
                if isinstance(value, jax.Array):
                    assert got.dtype == value.dtype
                assert np.asarray(got).tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.parametrize("limit_bytes", [1 << 30, 300_000])
def test_what_changes_right_after_the_call_is_saved_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    """Arrays are donated, those of numpy changed in place, while nothing is written yet.

    Of more than may wait only the last is not.
    """
    may_write, own = threading.Event(), RowsWriter.write
    if limit_bytes < 1 << 20:
        may_write.set()

    def write(self: RowsWriter, *args: Any) -> Any:
        assert may_write.wait(60)
        return own(self, *args)

    monkeypatch.setattr(RowsWriter, "write", write)
    start = {
        "sharded": placed(values((512, 256)), P("a")),
        "replicated": placed(values((64, 256)), P()),
        "half": placed(values((64, 256)), P("a")).astype(jnp.bfloat16),
        "host": placed(values((64, 256)), P("b"), "pinned_host"),
        "numpy": values((512, 128)),
    }
    saved = {name: np.array(leaf) for name, leaf in start.items()}
    state = with_table(start)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with opened(tmp_path, state, max_staging_bytes=limit_bytes) as manager:
        manager.save(1, args=cnr.args.Save(state))
        start["numpy"][...] += 1
        for name, leaf in start.items():
            if name not in ("numpy", "host"):
                state[name] = jax.block_until_ready(step(leaf))
        may_write.set()
        manager.wait_until_finished()
    got = restore(tmp_path)
    for name, leaf in saved.items():
        assert np.asarray(got[name]).tobytes() == leaf.tobytes(), name


def test_no_more_waits_in_memory_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 300_000
    leaves = {
        "larger than that": placed(values((1024, 256)), P()),
        "numpy": values((512, 256)),
        **{f"small {i}": placed(values((64, 64)), P("a")) for i in range(40)},
    }
    seen: list[int] = []
    own = Stage.put

    def put(self: Any, item: Any) -> bool:
        done = own(self, item)
        if isinstance(item, DenseBytes):
            seen.append(self._held)
            # A view would keep all of the array.
            whole = item.data if item.data.base is None else item.data.base
            assert getattr(whole, "nbytes", 0) <= max(
                limit, dense.tiling.CHUNK_BYTES + 64
            )
        return done

    monkeypatch.setattr(Stage, "put", put)
    monkeypatch.setattr(dense.tiling, "CHUNK_BYTES", 100_000)
    save(tmp_path, leaves, max_staging_bytes=limit)
    assert len(seen) > 20 and max(seen) <= limit
    got = restore(tmp_path)
    for name, leaf in leaves.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(leaf).tobytes()


def test_what_is_larger_than_a_chunk_is_let_go_of_when_the_next_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is being written would wait in memory beside what may wait there."""
    monkeypatch.setattr(dense_writer, "CHUNK_BYTES", 1 << 20)
    data = np.ones(8 << 20, np.uint8)
    tile = DenseTile(leaf=0, box=((0, data.size),), offset=0, bytes=data.size)
    writer = dense_writer.DenseWriter(
        epath.Path(tmp_path), 0, [tile], compression=None, syncs=True
    )
    kept = weakref.ref(data)
    writer.append(data)
    del data
    stored = {path.name for path in tmp_path.rglob("c/*")}
    # A thread of TensorStore lets go of it, right after it has said that all is stored.
    deadline = time.monotonic() + 10
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert kept() is None
    part = writer.finish()
    assert part is not None
    assert stored == {str(i) for i in range(len(part.array.crc32c))}


@pytest.mark.parametrize("limit_bytes", [1 << 30, 300_000, 1])
def test_leaves_of_a_device_are_copied_to_the_host_and_not_kept_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    """As on an accelerator, of whose memory numpy sees nothing without a copy."""
    leaves = {
        "large": placed(values((1000, 256)), P()),
        "sharded": placed(values((512, 256)), P("a", "b")),
        "half": placed(values((64, 512)), P("a")).astype(jnp.bfloat16),
        "small": placed(values((8, 2)), P("b")),
        "number": jnp.float32(7),
    }
    monkeypatch.setattr(dense.tiling, "is_on_host", lambda shard: False)
    save(tmp_path, leaves, max_staging_bytes=limit_bytes, staging="host")
    got = restore(tmp_path)
    for name, leaf in leaves.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(leaf).tobytes()


def test_tiny_leaves_are_handed_over_together_and_in_order(tmp_path: Path) -> None:
    """One by one each would cost the training thread more than its bytes."""
    sizes = [7, 1024, 3, 5000, *[9] * 60, 1_000_000, 2, 1025]
    arrays = [values((size,)) + i for i, size in enumerate(sizes)]
    leaves = check.dense_leaves([((f"leaf {i}",), a) for i, a in enumerate(arrays)])
    pieces = dense.pieces_of(list(zip(leaves, arrays, strict=True)))
    for limit in (1 << 30, 5000, 10):
        found = [each.data for each in dense.bytes_of(pieces, limit, Buffers(0))]
        assert np.concatenate(found).tobytes() == b"".join(a.tobytes() for a in arrays)
        if limit == 1 << 30:
            assert len(found) < 10


def test_small_leaves_share_one_file(tmp_path: Path) -> None:
    save(tmp_path, {f"leaf {i}": jnp.full(3, i) for i in range(50)} | {"step": 1})
    files = [p for p in (item_of(tmp_path) / "dense").rglob("*") if p.is_file()]
    assert sorted(p.name for p in files) == ["0", "zarr.json"]


def test_dense_leaves_are_compressed_like_rows(tmp_path: Path) -> None:
    zeros = {"zeros": jnp.zeros((512, 512)), "step": 3}
    save(tmp_path, zeros, compression="zstd")
    assert read_manifest(item_of(tmp_path)).required_features == ("dense_tiles", "zstd")
    totals = read_manifest(item_of(tmp_path)).totals
    assert totals.dense_bytes < 10_000
    assert not np.asarray(restore(tmp_path)["zeros"]).any()


def test_a_step_without_arrays_needs_no_feature(tmp_path: Path) -> None:
    save(tmp_path, {"name": "only a text"})
    assert read_manifest(item_of(tmp_path)).required_features == ()
    assert not (item_of(tmp_path) / "dense").exists()
    assert restore(tmp_path)["name"] == "only a text"


def test_a_reader_without_the_feature_refuses_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"w": jnp.ones(3)})
    known = names.KNOWN_FEATURES - {names.DENSE_TILES}
    monkeypatch.setattr(names, "KNOWN_FEATURES", known)
    with pytest.raises(
        errors.UnsupportedVersionError, match="unknown here: dense_tiles"
    ):
        read_manifest(item_of(tmp_path))


@pytest.mark.usefixtures("small_chunks")
def test_damage_is_told_by_leaf(tmp_path: Path) -> None:
    leaves = {"first": jnp.ones(40_000), "second": jnp.ones(40_000)}
    state = save(tmp_path, leaves)
    folder = item_of(tmp_path) / "dense" / "p00000" / "c"
    last = max(folder.iterdir(), key=lambda path: int(path.name))
    flip(last)
    with pytest.raises(errors.IntegrityError, match="dense leaf second cannot be read"):
        restore(tmp_path, state)
    # Nothing else is read for a leaf that is whole.
    whole = {"first": np.empty(40_000, np.float32)}
    assert restore(tmp_path, whole, partial=True)["first"].all()
    (problem,) = cnr.verify(tmp_path)
    assert problem.consequence == ("1",) and "it holds second" in problem.message


def drop_a_tile(process: ProcessManifest) -> ProcessManifest:
    part = process.dense
    assert part is not None
    return dataclasses.replace(
        process, dense=dataclasses.replace(part, tiles=part.tiles[:-1])
    )


def changed_tile(**changes: Any) -> Any:
    def change(process: ProcessManifest) -> ProcessManifest:
        part = process.dense
        assert part is not None
        first = dataclasses.replace(part.tiles[0], **changes)
        tiles = (first, *part.tiles[1:])
        return dataclasses.replace(
            process, dense=dataclasses.replace(part, tiles=tiles)
        )

    return change


WRONG: dict[str, tuple[Any, str]] = {
    "a tile is missing": (drop_a_tile, "w: tiles hold 0 elements"),
    "a part twice": (changed_tile(box=((0, 3),), bytes=24), "n: tile"),
    "past the end": (changed_tile(offset=1 << 40), "outside the array"),
    "another number": (changed_tile(bytes=8), "are no int"),
    "no such leaf": (changed_tile(leaf=7), "7: not a dense leaf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tiles_that_are_not_those_of_the_leaves_are_refused(
    tmp_path: Path, name: str
) -> None:
    change, told = WRONG[name]
    state = save(tmp_path, {"n": 5, "w": jnp.arange(6.0)})
    reseal(tmp_path, change(process_of(tmp_path)))
    with pytest.raises(errors.FormatError) as caught:
        restore(tmp_path, state)
    assert told in str(caught.value)
    assert [p for p in cnr.verify(tmp_path) if p.consequence == ("1",)]


def test_tiles_of_a_parent_harm_the_parent_alone(tmp_path: Path) -> None:
    state = with_table({"n": 5, "w": jnp.arange(6.0)})
    with opened(tmp_path, state, policy=cnr.Consecutive()) as manager:
        for step in (1, 2):
            state["table"] = state["table"].at[step].add(1)
            manager.save(step, args=cnr.args.Save(state))
        manager.wait_until_finished()
        report = manager.last_report
        assert report is not None and report.parent == 1
    reseal(tmp_path, drop_a_tile(process_of(tmp_path)))
    assert {p.consequence for p in cnr.verify(tmp_path)} == {("1",)}
    described = {each.step: each.problem for each in cnr.describe(tmp_path).steps}
    assert described[1] and not described[2]
    with opened(tmp_path) as manager:
        assert manager.restore(None).state["n"] == 5
        with pytest.raises(errors.FormatError, match="w: tiles hold 0 elements"):
            manager.restore(1)


class Phase(enum.IntEnum):
    WARM = 3


class Rate(float):
    """A number with a name."""


def test_of_a_subclass_the_number_is_saved(tmp_path: Path) -> None:
    state = save(tmp_path, {"phase": Phase.WARM, "rate": Rate(0.5)})
    for found in (restore(tmp_path), restore(tmp_path, state)):
        assert (found["phase"], found["rate"]) == (3, 0.5)


def test_empty_arrays_of_keys_are_refused_like_others(tmp_path: Path) -> None:
    for empty in (jax.random.split(jax.random.key(0), 0), np.zeros((2, 0))):
        with pytest.raises(errors.StateMismatchError, match="expected an array with"):
            save(tmp_path, {"leaf": empty})


LEAVES: dict[str, dict[str, Any]] = {
    "no elements": {"shape": (0,)},
    "no keys": {"path": ()},
    "swapped bytes": {"dtype": ">f4"},
    "another name": {"dtype": "f4"},
    "no numbers": {"dtype": "V4"},
    "objects": {"dtype": "object"},
    "other elements": {"dtype": "int16"},
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_cannot_be_harms_its_step_alone(tmp_path: Path, name: str) -> None:
    state = with_table({"w": jnp.arange(6.0)})
    with opened(tmp_path, state) as manager:
        for step in (1, 2):
            manager.save(step, args=cnr.args.Save(state), force=True)
    path = tmp_path / "2" / "default"
    manifest = read_manifest(path)
    (leaf,) = manifest.dense_leaves
    wrong = dataclasses.replace(leaf, **LEAVES[name])
    changed: Manifest = dataclasses.replace(manifest, dense_leaves=(wrong,))
    (path / names.MANIFEST).write_bytes(dump(changed))
    problems = {each.step: each.problem for each in cnr.describe(tmp_path).steps}
    assert problems[2] and not problems[1]
    assert {p.consequence for p in cnr.verify(tmp_path)} == {("2",)}
    with opened(tmp_path) as manager:
        with pytest.raises(errors.FormatError):
            manager.restore(2)
        assert manager.restore(None).report.step == 1


def test_elements_of_another_size_are_refused(tmp_path: Path) -> None:
    state = save(tmp_path, {"w": jnp.arange(6.0)})
    manifest = read_manifest(item_of(tmp_path))
    (leaf,) = manifest.dense_leaves
    wide = dataclasses.replace(leaf, dtype="int16")
    changed: Manifest = dataclasses.replace(manifest, dense_leaves=(wide,))
    (item_of(tmp_path) / names.MANIFEST).write_bytes(dump(changed))
    with pytest.raises(errors.FormatError, match="elements of 4 bytes"):
        restore(tmp_path, state)


@each_of("impl", ["rbg", "no such keys"])
def test_words_that_are_no_keys_are_damage_of_the_dense_part_alone(
    tmp_path_factory: pytest.TempPathFactory, impl: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    save(root, {"key": jax.random.key(1)})
    manifest = read_manifest(item_of(root))
    (leaf,) = manifest.dense_leaves
    changed = dataclasses.replace(
        manifest, dense_leaves=(dataclasses.replace(leaf, dtype=impl),)
    )
    (item_of(root) / names.MANIFEST).write_bytes(dump(changed))
    with pytest.raises(errors.FormatError, match="key holds no keys of") as caught:
        restore(root)
    assert caught.value.path == str(item_of(root) / "dense")


@each_of("leaf", [{"numpy": 1}, {"numpy": "yes"}])
def test_a_field_that_says_neither_true_nor_false_is_a_problem(
    tmp_path_factory: pytest.TempPathFactory, leaf: dict[str, Any]
) -> None:
    root = tmp_path_factory.mktemp("root")
    save(root, {"w": np.ones(3)})
    from .test_frozen_data import sealed

    path = item_of(root) / names.MANIFEST
    document = json.loads(path.read_bytes())
    document["dense_leaves"][0] |= leaf
    path.write_bytes(sealed(document))
    with pytest.raises(errors.ManifestError) as caught:
        read_manifest(item_of(root))
    assert "dense_leaves[0].numpy: expected true or false" in str(caught.value)
