"""Compressed saves through the manager: equal to others, counted as they lie, and checked."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.testing import damage

ROWS, DIM = 300, 16
ZSTD = {"compression": "zstd"}


@pytest.fixture
def every_array(tiny_limits: Any) -> None:
    """Compresses arrays of any length, so that tables may be tiny."""
    tiny_limits(compressed_least_bytes=0)


def array_bytes(root: Path, step: int) -> int:
    """Bytes of all arrays of a step, as they lie on storage."""
    files = (root / str(step)).glob("*/rows.p*/**/*")
    return sum(path.stat().st_size for path in files if path.is_file())


def documents(root: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest of a step and that of its process."""
    item = root / str(step) / "default"
    return tuple(
        json.loads((item / name).read_bytes())
        for name in (names.MANIFEST, names.process_manifest(0))
    )


def compressed(root: Path, step: int) -> list[bool]:
    """Of each array of a step whether it is compressed."""
    _, process = documents(root, step)
    return ["compressed" in entry for entry in process["arrays"].values()]


@pytest.mark.usefixtures("every_array")
def test_a_run_may_change_its_mind_and_its_chain_restores_bit_for_bit(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, reports = tiny_run(), []
    for chosen, steps in ((None, [0]), ("zstd", [1, 2]), (None, [3])):
        options = cnr.Options(
            codec="raw",
            policy=cnr.Consecutive(),
            compression=chosen,
            on_save=reports.append,
        )
        with cnr.CheckpointManager(
            tmp_path, tables=run.tables, options=options
        ) as manager:
            if steps[0]:
                run.restore(manager, None)
            run.run(manager, steps)
    assert [report.kind for report in reports] == ["full", *["delta"] * 3]
    for step, report in enumerate(reports):
        manifest, _ = documents(tmp_path, step)
        zstd = step in (1, 2)
        packed = ["blosc", "dense_tiles", "zstd"] if zstd else ["dense_tiles"]
        assert manifest["required_features"] == packed
        assert set(compressed(tmp_path, step)) == {zstd}
        assert report.table_bytes + report.slot_bytes == array_bytes(tmp_path, step)
        assert manifest["history"][-1]["bytes"] == array_bytes(tmp_path, step)
    run.check(manager, 3)
    assert cnr.verify(str(tmp_path)) == ()


def sharded_state(seed: int, axes: tuple[int, int], spec: P) -> dict[str, Any]:
    """A table over all devices, with a slot of its shape; both have few distinct values."""
    mesh = jax.make_mesh(axes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(seed)
    placed = NamedSharding(mesh, spec)
    table = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    slot = rng.integers(0, 3, (ROWS, DIM)).astype(np.float32)
    return {
        "user": jax.device_put(table, placed),
        "opt": {"user": jax.device_put(slot, placed)},
    }


@pytest.mark.usefixtures("every_array", "unsynced")
def test_a_sharded_table_restores_the_same_bits_on_other_meshes(
    tmp_path: Path, tiny_limits: Any
) -> None:
    """In chunks much shorter than an array, which tiles neither begin nor end with."""
    tiny_limits(stored_chunk_bytes=1500)
    state, later = (sharded_state(seed, (2, 4), P("a", "b")) for seed in (1, 2))
    rows = jnp.arange(5, ROWS, 3)
    later = jax.tree.map(lambda a, b: a.at[rows].set(b[rows]), state, later)
    tables = cnr.find_tables(state, ["user"])
    found: dict[str, list[Any]] = {}
    for name, chosen in (("plain", None), ("zstd", "zstd")):
        touched = cnr.init_touched(state, tables)
        options = cnr.Options(compression=chosen)
        with cnr.CheckpointManager(
            tmp_path / name, tables=tables, options=options
        ) as manager:
            manager.save(0, args=cnr.args.Save(state, touched))
            touched = cnr.record(touched, {"user": rows})
            manager.save(1, args=cnr.args.Save(later, touched))
            manager.wait_until_finished()
            assert manager.last_report.kind == "delta"
            targets = [((4, 2), P("a")), ((2, 4), P())][chosen is None :]
            for target in (sharded_state(0, *each) for each in targets):
                restored = manager.restore(1, args=cnr.args.Restore(target)).state
                found.setdefault(name, []).append(jax.tree.map(np.asarray, restored))
    _, process = documents(tmp_path / "zstd", 1)
    chunks = [len(entry["crc32c"]) for entry in process["arrays"].values()]
    assert min(chunks) == 1 < max(chunks)
    assert all(compressed(tmp_path / "zstd", 1))
    assert array_bytes(tmp_path / "zstd", 1) < array_bytes(tmp_path / "plain", 1)
    for each in found["zstd"]:
        jax.tree.map(np.testing.assert_array_equal, each, found["plain"][0])
        np.testing.assert_array_equal(each["opt"]["user"], later["opt"]["user"])


def test_slots_are_counted_as_they_lie(tiny_run: Any, tmp_path: Path) -> None:
    """Zeros that pack to nothing: as they were encoded they are more than all files."""
    state = {
        "user": jnp.asarray(np.random.default_rng(0).normal(size=(2000, 4)), "float32"),
        "opt": {"user": jnp.zeros((2000, 8))},
    }
    tables = cnr.find_tables(state, ["user"])
    reports: dict[str, Any] = {}
    for codec in ("raw", "adaptive"):
        options = cnr.Options(codec=codec, **ZSTD)
        root = tmp_path / codec
        with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
            manager.save(0, args=cnr.args.Save(state))
            manager.wait_until_finished()
            reports[codec] = manager.last_report
            restored = manager.restore(0, args=cnr.args.Restore(state)).state
        jax.tree.map(np.testing.assert_array_equal, restored["opt"], state["opt"])
        report = reports[codec]
        assert report.table_bytes + report.slot_bytes == array_bytes(root, 0)
    # Alone in their array: little more than a frame.
    assert reports["adaptive"].slot_bytes < 100
    # In one array with rows that do not pack: twice as many elements, so two thirds.
    share = reports["raw"].slot_bytes / reports["raw"].table_bytes
    assert 1.9 < share < 2


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A full save and a delta, compressed; and how to restore, with the state saved first."""
    root = tmp_path_factory.mktemp("chain") / "root"
    rng = np.random.default_rng(0)
    state = {"user": jnp.asarray(rng.normal(size=(1000, DIM)).astype(np.float32))}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(**ZSTD)
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))
        rows = jnp.arange(0, 1000, 2)
        touched = cnr.record(touched, {"user": rows})
        later = {"user": state["user"].at[rows].add(50)}
        manager.save(1, args=cnr.args.Save(later, touched))
    return root, cnr.args.Restore(state, tables=tables)


def codes_of(root: Path, step: int) -> Path:
    (found,) = root.glob(f"{step}/default/rows.p*/asymmetric.codes*/c/0")
    return found


def test_damage_is_found_and_the_step_before_is_taken(
    chain: tuple[Path, Any],
) -> None:
    root, args = chain
    file = codes_of(root, 1)
    size = file.stat().st_size
    middle = damage.flip_bit(file, 8 * (size // 2))
    for level, count in (("structure", 0), ("data", 1)):
        assert len(cnr.verify(str(root), level)) == count
    with cnr.CheckpointManager(root) as manager:
        with pytest.raises(cnr.errors.IntegrityError, match=file.parents[1].name):
            manager.restore(1, args=args)
        found = manager.restore(None, args=args).state
        np.testing.assert_allclose(found["user"], args.state["user"], atol=1)
    middle.undo()
    for change in (
        partial(damage.truncate, file, size - 1),
        partial(damage.extend, file),
        partial(damage.remove, file),
    ):
        with change():
            (problem,) = cnr.verify(str(root), "structure")
            assert problem.file.endswith(f"{file.parents[1].name}/c/0")
            assert problem.consequence == ("1",)
            with cnr.CheckpointManager(root) as manager:
                with pytest.raises(cnr.errors.IntegrityError, match="codes"):
                    manager.restore(1, args=args)
    assert cnr.verify(str(root)) == ()


def test_a_reader_that_does_not_know_of_it_refuses_the_step(
    chain: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, args = chain
    monkeypatch.setattr(names, "KNOWN_FEATURES", frozenset())
    with cnr.CheckpointManager(root) as manager:
        with pytest.raises(cnr.errors.CnrError, match="unknown here: zstd"):
            manager.restore(1, args=args)
