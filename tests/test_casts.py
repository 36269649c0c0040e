"""Tables restored into other dtypes: no value changes unless that was asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax import errors

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
