"""Tables and slots in memory of the host, where programs keep what devices have no room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import cnr_jax as cnr
from cnr_jax.repository.replay import leaves

from .conftest import each_of

pytestmark = pytest.mark.usefixtures("unsynced")

ROWS, DIM = 400, 16


def make_state(**memory: str) -> dict[str, Any]:
    """A table with a slot and a dense leaf, each in the kind of memory that is given."""
    rng = np.random.default_rng(0)

    def put(name: str, values: np.ndarray) -> jax.Array:
        kind = memory.get(name, "device")
        place = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        return jax.device_put(values.astype(np.float32), place)

    return {
        "user": put("user", rng.normal(size=(ROWS, DIM))),
        "acc": {"user": put("acc", rng.uniform(size=(ROWS, DIM)))},
        "w": put("w", rng.normal(size=(64, 64))),
    }


def changed(state: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    """Other values in some rows, where the arrays are."""

    def move(leaf: jax.Array) -> jax.Array:
        values = np.array(leaf)
        values[ids] += 1
        return jax.device_put(values, leaf.sharding)

    return {
        **state,
        "user": move(state["user"]),
        "acc": {"user": move(state["acc"]["user"])},
    }


_PLACES = [
    {"acc": "pinned_host"},
    {"user": "pinned_host", "acc": "pinned_host", "w": "pinned_host"},
]


@each_of("memory", _PLACES)
@pytest.mark.parametrize("tracking", ["recorded", "fingerprint", "audited"])
def test_they_are_saved_and_come_back_where_they_were(
    tmp_path: Path,
    tracking: Any,
    memory: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "-".join(memory)
    state = make_state(**memory)
    tables = cnr.find_tables(state, ["user"])
    touched = None
    if tracking != "fingerprint":
        touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        codec="raw",
        policy=cnr.Consecutive(),
        staging="device",
        tracking=tracking,
        max_staging_bytes=4096,
    )
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(3):
            ids = np.arange(step, ROWS, 50, dtype=np.int32)
            if touched is not None:
                touched = cnr.record(touched, {"user": ids})
            state = changed(state, ids)
            manager.save(step, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        assert manager.last_report.kind == "delta"
        assert manager.last_report.rows == len(ids)
    # Small leaves are put together on the host anyway.
    for small in (leaves.SMALL_BYTES, 0):
        monkeypatch.setattr(leaves, "SMALL_BYTES", small)
        with cnr.CheckpointManager(root, tables=tables) as reader:
            got = reader.restore(2, args=cnr.args.Restore(state)).state
        for found, want in zip(
            jax.tree.leaves(got), jax.tree.leaves(state), strict=True
        ):
            assert found.sharding == want.sharding
            np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


@each_of("codec", ["adaptive", "lattice"])
def test_large_tables_of_few_bits_are_decoded_into_it(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no program of the device, which would have to hold them."""
    if codec == "lattice":
        pytest.importorskip("zstandard")
    monkeypatch.setattr(leaves, "SMALL_BYTES", 0)
    monkeypatch.setattr(leaves, "_is_host", lambda device: False)
    state = make_state(user="pinned_host")
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec=codec, bits=4, tracking="fingerprint")
    with cnr.CheckpointManager(tmp_path / codec, tables=tables, options=options) as m:
        m.save(0, args=cnr.args.Save(state))
        m.wait_until_finished()
        there = m.restore(0, args=cnr.args.Restore(state)).state["user"]
        here = m.restore(0, args=cnr.args.Restore(make_state())).state["user"]
    assert there.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(there), np.asarray(here))
