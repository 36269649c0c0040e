"""Leaves restored into other dtypes: no value changes unless that was asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors

from .older_steps import leave_dense_to_orbax

ROWS = 16
LOSSY = """
float32->bfloat16 float32->float16 float16->bfloat16 bfloat16->float16
float32->int32 int32->float32 int32->int8 int32->uint32 uint8->int8 int16->uint16
""".split()
SAFE = """
float32->float32 bfloat16->float32 float16->float32
int8->int32 uint8->int32 uint8->int16 uint16->uint32
""".split()


def values(dtype: Any) -> np.ndarray:
    """Among them what other dtypes cannot hold."""
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(3)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        found = rng.integers(int(info.min), int(info.max), (ROWS, 4), endpoint=True)
        found[0] = info.min, info.max, info.max - 1, 0
    else:
        largest = float(jnp.finfo(dtype).max)
        found = rng.normal(size=(ROWS, 4))
        found[0] = largest, -largest / 3, float(jnp.finfo(dtype).tiny), 1 / 3
    return found.astype(dtype)


def saved(root: Path, dtype: str) -> dict[str, Any]:
    state = {"user": jnp.asarray(values(dtype)), "opt": {"user": jnp.ones(ROWS)}}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(
        root, tables=tables, options=cnr.Options(codec="raw")
    ) as manager:
        manager.save(0, args=cnr.args.Save(state))
    return state


def wanted(state: Any, dtype: str) -> Any:
    changed = jax.ShapeDtypeStruct(state["user"].shape, jnp.dtype(dtype))
    return {**state, "user": changed}


def opened(root: Path, state: Any) -> cnr.CheckpointManager:
    tables = cnr.find_tables(state, ["user"])
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(codec="raw"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "converted" in record.getMessage()
    ]


@pytest.mark.parametrize("case", LOSSY)
def test_what_changes_values_is_refused_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    before, after = case.split("->")
    state = saved(tmp_path, before)
    into = wanted(state, after)
    with np.errstate(all="ignore"):
        expected = values(before).astype(jnp.dtype(after))
    with opened(tmp_path, into) as manager:
        for step in (0, None):
            with pytest.raises(errors.StateMismatchError, match="cast=True") as caught:
                manager.restore(step, args=cnr.args.Restore(into))
            assert f"user: {before} in the checkpoint, {after} in the" in str(
                caught.value
            )
        assert not warnings(caplog)
        asked = manager.restore(0, args=cnr.args.Restore(into, cast=True)).state
        assert len(warnings(caplog)) == 1
        plain = manager.restore(0, args=ocp.args.StandardRestore(into))
        assert len(warnings(caplog)) == 2
    for got in (asked["user"], plain["user"]):
        assert got.dtype == jnp.dtype(after)
        if not (before.startswith("float") and after.startswith("int")):
            same = np.asarray(got).view(np.uint8) == expected.view(np.uint8)
            assert same.all()


@pytest.mark.parametrize("case", SAFE)
def test_wider_dtypes_of_the_same_kind_keep_every_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    before, after = case.split("->")
    into = wanted(saved(tmp_path, before), after)
    with opened(tmp_path, into) as manager:
        got = manager.restore(0, args=cnr.args.Restore(into)).state["user"]
    assert got.dtype == jnp.dtype(after)
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.float64), values(before).astype(np.float64)
    )
    assert not warnings(caplog)


def test_slots_count_as_tables_do(tmp_path: Path) -> None:
    state = saved(tmp_path, "float32")
    slot = jax.ShapeDtypeStruct((ROWS,), jnp.bfloat16)
    into = {**state, "opt": {"user": slot}}
    with opened(tmp_path, into) as manager:
        with pytest.raises(errors.StateMismatchError, match=r"opt/user: float32 .*"):
            manager.restore(0, args=cnr.args.Restore(into))


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits_are_not_cut_to_32_without_a_word(tmp_path: Path, dtype: str) -> None:
    with jax.enable_x64(True):
        saved(tmp_path, dtype)
    with cnr.CheckpointManager(tmp_path) as manager:
        with pytest.raises(errors.StateMismatchError, match="jax_enable_x64"):
            manager.restore(0)
        got = manager.restore(0, args=cnr.args.Restore(cast=True)).state["user"]
        assert got.dtype == jnp.dtype(dtype.replace("64", "32"))
        with jax.enable_x64(True):
            exact = manager.restore(0).state["user"]
            np.testing.assert_array_equal(exact, values(dtype))


# What was saved, what a new program has, and what `cast=True` makes of it.
DENSE: dict[str, tuple[Any, Any, Any]] = {
    "int64 of numpy": (np.array(6_000_000_000), jnp.int32(0), 1705032704),
    "int 6000000000": (6_000_000_000, jnp.int32(0), 1705032704),
    "int 6000000000, on the host": (6_000_000_000, np.int32(0), 1705032704),
    "int32 of counts": (jnp.int32(16_777_217), jnp.float32(0), 16_777_216.0),
    "int32": (jnp.int32(300), np.int8(0), 44),
    "uint32": (jnp.uint32(4_000_000_000), jnp.int32(0), -294_967_296),
    "float32": (jnp.float32(1e6), jnp.float16(0), np.inf),
    "float32 in bfloat16": (jnp.float32(0.1), jnp.bfloat16(0), 0.10009765625),
    "complex64": (jnp.complex64(1 + 2j), jnp.float32(0), 1.0),
    "complex64 in a bool": (jnp.complex64(2j), np.bool_(False), False),
    "int32 in a bool": (jnp.int32(7), jnp.array(False), True),
    "bfloat16 in an int": (jnp.bfloat16(2.5), 0, 2),
    "float64 of numpy": (np.array(0.1), jnp.float32(0), 0.10000000149011612),
    "float 0.1": (0.1, jax.ShapeDtypeStruct((), jnp.float32), 0.10000000149011612),
}


ADOPT = cnr.Options(adopt=True)


def restore_by_manager(root: Path, state: Any, **kwargs: Any) -> Any:
    with cnr.CheckpointManager(root) as manager:
        return manager.restore(1, args=cnr.args.Restore(state, **kwargs)).state


def restore_as_item(root: Path, state: Any, **kwargs: Any) -> Any:
    args = ocp.args.Composite(model=cnr.args.Restore(state, **kwargs))
    with cnr.CheckpointManager(root) as manager:
        return manager.restore(1, args=args)["model"].state


def restore_plainly(root: Path, state: Any, **kwargs: Any) -> Any:
    registry = cnr.handler_registry(None)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        return manager.restore(1, args=cnr.args.Restore(state, **kwargs)).state


def restore_adopted(root: Path, state: Any, **kwargs: Any) -> Any:
    with cnr.CheckpointManager(root, options=ADOPT) as manager:
        return manager.restore(1, args=cnr.args.Restore(state, **kwargs)).state


def dense_state(at: int) -> Any:
    leaves = {name: case[at] for name, case in DENSE.items()}
    return {"user": jnp.ones((4, 2)), "dense": leaves}


@pytest.fixture(scope="module")
def dense_roots(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    top, state = tmp_path_factory.mktemp("dense"), dense_state(0)
    tables, save = cnr.find_tables(state, ["user"]), cnr.args.Save(state)
    with cnr.CheckpointManager(top / "own", tables=tables) as manager:
        manager.save(1, args=save)
    with cnr.CheckpointManager(top / "item", tables=tables) as manager:
        manager.save(1, args=ocp.args.Composite(model=save))
    with ocp.CheckpointManager(top / "adopted") as plain:
        plain.save(1, args=ocp.args.PyTreeSave(state))
    return {
        restore_by_manager: top / "own",
        restore_as_item: top / "item",
        restore_plainly: top / "own",
        restore_adopted: top / "adopted",
    }


@pytest.mark.parametrize(
    "restore", [restore_by_manager, restore_as_item, restore_plainly, restore_adopted]
)
def test_dense_leaves_are_refused_by_name_or_cast_with_one_warning(
    dense_roots: dict[Any, Path],
    caplog: pytest.LogCaptureFixture,
    restore: Callable[..., Any],
) -> None:
    root, into = dense_roots[restore], dense_state(1)
    with pytest.raises(errors.StateMismatchError) as caught:
        restore(root, into)
    told = str(caught.value)
    assert f"({len(DENSE)} differences)" in told
    for line in (
        "dense/int64 of numpy: int64 in the checkpoint, int32 in the state",
        "dense/int 6000000000: int 6000000000 in the checkpoint, int32 in the state",
        "dense/complex64: complex64 in the checkpoint, float32 in the state",
        "dense/bfloat16 in an int: bfloat16 in the checkpoint, int in the state",
        "cnr.args.Restore(..., cast=True)",
    ):
        assert line in told
    assert not warnings(caplog)
    got = restore(root, into, cast=True)["dense"]
    (said,) = warnings(caplog)
    for name, (_, _, expected) in DENSE.items():
        assert np.asarray(got[name]).item() == expected, name
        assert f"dense/{name}: " in said


def test_standard_restore_casts_all_as_orbax_does_with_one_warning(
    dense_roots: dict[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    into = dense_state(1)
    into["user"] = jnp.zeros((4, 2), jnp.bfloat16)
    with cnr.CheckpointManager(dense_roots[restore_by_manager]) as manager:
        got = manager.restore(1, args=ocp.args.StandardRestore(into))
    (said,) = warnings(caplog)
    assert "user: float32 in the checkpoint, bfloat16 in the state" in said
    for name, (_, _, expected) in DENSE.items():
        assert np.asarray(got["dense"][name]).item() == expected, name
        assert f"dense/{name}: " in said


def test_a_number_is_taken_by_each_leaf_that_has_its_value(tmp_path: Path) -> None:
    """As where a state is saved before its first step, which makes arrays of its numbers."""
    state = {"user": jnp.ones((4, 2)), "step": 0, "rate": 0.5, "done": False}
    with cnr.CheckpointManager(
        tmp_path, tables=cnr.find_tables(state, ["user"])
    ) as manager:
        manager.save(1, args=cnr.args.Save(state))
    traced = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state))
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.device_put(jnp.int8(3), where)
    for into in (traced, traced | {"step": placed}, traced | {"step": np.uint16(1)}):
        got = restore_by_manager(tmp_path, into)
        for name in ("step", "rate", "done"):
            assert got[name] == state[name] and got[name].dtype == into[name].dtype
        if into["step"] is placed:
            assert got["step"].sharding == where
    got = restore_by_manager(tmp_path, state)
    assert [type(got[name]) for name in ("step", "rate", "done")] == [int, float, bool]


def with_counter(root: Path) -> Any:
    """Saves a counter of 64 bits, by us or by plain Orbax as the root is called."""
    with jax.enable_x64(True):
        state = {"user": jnp.ones((4, 2), jnp.float32), "seen": jnp.int64(6e9)}
        if root.name == "own":
            tables = cnr.find_tables(state, ["user"])
            with cnr.CheckpointManager(root, tables=tables) as manager:
                manager.save(1, args=cnr.args.Save(state))
        else:
            with ocp.CheckpointManager(root) as plain:
                plain.save(1, args=ocp.args.StandardSave(state))
        return state


@pytest.mark.parametrize("root", ["own", "adopted"])
def test_a_counter_of_64_bits_is_exact_on_the_host_or_refused_where_jax_has_32(
    tmp_path: Path, root: str
) -> None:
    state = with_counter(tmp_path / root)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    narrow = shapes | {"seen": jax.ShapeDtypeStruct((), np.int32)}
    for into in (state, shapes, narrow):
        with pytest.raises(errors.StateMismatchError) as caught:
            restore_adopted(tmp_path / root, into)
        for told in ("seen: int64 in", "int32 in the", "jax_enable_x64", "cast=True"):
            assert told in str(caught.value)
    for into in (None, state | {"seen": np.array(0)}, state | {"seen": 0}):
        found = restore_adopted(tmp_path / root, into)["seen"]
        assert not isinstance(found, jax.Array) and found == 6_000_000_000
    with cnr.CheckpointManager(tmp_path / root, options=ADOPT) as manager:
        standard = manager.restore(1, args=ocp.args.StandardRestore(None))
    assert standard["seen"] == 6_000_000_000


def leave_64_bits_to_orbax(root: Path) -> None:
    with jax.enable_x64(True):
        leave_dense_to_orbax(root / "1" / "default")


@pytest.mark.parametrize("root", ["own", "own by orbax", "adopted"])
def test_64_bits_of_one_thread_alone_are_not_cut_in_another(
    tmp_path: Path, root: str
) -> None:
    """Where an event loop runs, as in a notebook, Orbax restores in another thread."""
    path = tmp_path / root.split()[0]
    state = with_counter(path)
    if root == "own by orbax":
        leave_64_bits_to_orbax(path)
    with jax.enable_x64(True):

        async def in_notebook(into: Any) -> Any:
            return restore_adopted(path, into)["seen"]

        for into in (state, None):
            if root == "own":
                assert asyncio.run(in_notebook(into)) == 6_000_000_000
                continue
            with pytest.raises(errors.StateMismatchError, match="for all threads"):
                asyncio.run(in_notebook(into))
            assert restore_adopted(path, into)["seen"] == 6_000_000_000
