"""Tables that lie on different devices, of which no one program can take all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr


def on(*devices: int) -> Any:
    found = [jax.devices()[device] for device in devices]
    if len(found) == 1:
        return SingleDeviceSharding(found[0])
    return NamedSharding(Mesh(np.array(found), ("rows",)), P("rows"))


PLACES = {
    "two devices": (on(0), on(3)),
    "the other way": (on(3), on(0)),
    "two meshes": (on(0, 1), on(2, 3, 4, 5)),
    "a mesh and a device": (on(1, 2), on(7)),
    "one uncommitted": (on(5), None),
}


@pytest.mark.parametrize("places", PLACES)
def test_runs_save_and_go_on_with_tables_on_different_devices(
    tmp_path: Path, places: str
) -> None:
    rng = np.random.default_rng(1)
    state = {
        name: jax.device_put(rng.normal(size=(16, 4)).astype(np.float32), place)
        for name, place in zip(("user", "item"), PLACES[places], strict=True)
    }
    where = {name: value.sharding for name, value in state.items()}
    tables = cnr.find_tables(state, ["user", "item"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    truth: dict[int, dict[str, np.ndarray]] = {}

    def train(manager: Any, step: int) -> None:
        nonlocal state, touched
        # Ids may come from either table's devices, or from none.
        ids = {
            "user": jnp.array([step, 5]),
            "item": jax.device_put(np.array([step + 2]), jax.devices()[4]),
        }
        touched = cnr.record(touched, ids)
        for name, rows in ids.items():
            at = np.asarray(rows)
            state = {**state, name: state[name].at[at].add(1.0 + step)}
        assert manager.save(step, args=cnr.args.Save(state, touched))
        truth[step] = {name: np.array(value) for name, value in state.items()}
        for name, stamps in touched.stamps.items():
            assert stamps.sharding.device_set == where[name].device_set

    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(3):
            train(manager, step)
        manager.wait_until_finished()
        assert manager.last_report.kind == "delta"
        assert manager.last_report.rows == 3
        state, touched = manager.restore(1, args=cnr.args.Restore(state))
        train(manager, 3)
        manager.wait_until_finished()
        assert manager.last_report.kind == "delta"
        for step in (0, 1, 3):
            got = manager.restore(step, args=cnr.args.Restore(state)).state
            for name, want in truth[step].items():
                np.testing.assert_array_equal(got[name], want)
                assert got[name].sharding.device_set == where[name].device_set
