"""Saves and restores within `jax.set_mesh`, as programs with sharded Flax modules run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr


@pytest.mark.parametrize(
    ("tracking", "small", "staging"),
    [
        ("audited", True, "host"),
        ("audited", False, "device"),
        ("fingerprint", False, "host"),
        ("fingerprint", True, "device"),
    ],
)
def test_a_run_within_a_mesh_saves_and_restores(
    tracking: Any,
    small: bool,
    staging: Any,
    tmp_path: Path,
    tiny_limits: Any,
) -> None:
    if not small:
        tiny_limits(restored_small_bytes=0)
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    rows = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    rows[3] = 1.5
    options = cnr.Options(
        codec="asymmetric",
        bits=8,
        staging=staging,
        tracking=tracking,
        policy=cnr.OneShot(),
    )
    with jax.set_mesh(mesh):
        state = {"user": jax.device_put(rows, NamedSharding(mesh, P("rows")))}
        tables = cnr.find_tables(state, ["user"])
        touched = cnr.init_touched(state, tables)
        with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
            for step in range(2):
                given = None if tracking == "fingerprint" else touched
                manager.save(step, args=cnr.args.Save(state, given))
                touched = cnr.record(touched, {"user": np.array([5])})
                state = {"user": state["user"].at[5].add(1.0)}
        with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
            found, _ = manager.restore(None, args=cnr.args.Restore(state))
    rows[5] += 1.0
    assert found["user"].sharding == NamedSharding(mesh, P("rows"))
    np.testing.assert_allclose(np.asarray(found["user"]), rows, atol=0.02)
