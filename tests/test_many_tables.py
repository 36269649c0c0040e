"""What a save does once, however many tables there are, and once for each of them."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

TABLES = 12


class Listed(cnr.Identity):
    """A layout that counts how often it is asked what it is: for a list of all tables."""

    times = 0

    def configuration(self) -> dict[str, int]:
        Listed.times += 1
        return {}


def make_state(count: int, where: Any) -> dict[str, Any]:
    """Tables of 200 rows, with an accumulator each."""
    names = [f"table{i}" for i in range(count)]
    put = functools.partial(jax.device_put, device=where)
    return {
        "params": {name: put(np.ones((200, 4), np.float32)) for name in names},
        "acc": {name: put(np.ones(200, np.float32)) for name in names},
    }


@jax.jit
def add_one(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf.at[rows].add(1.0)


record = jax.jit(cnr.record)


def by_rows(*devices: int) -> NamedSharding:
    own = np.array([jax.devices()[number] for number in devices])
    return NamedSharding(Mesh(own, ("x",), axis_types=(AxisType.Auto,)), P("x"))


@pytest.mark.parametrize("tracking", ["recorded", "fingerprint"])
def test_saves_look_each_array_up_once_and_list_tables_never(
    tracking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(TABLES, by_rows(0, 1))
    names = list(state["params"])
    specs = {n: cnr.TableSpec(path=f"params/{n}", layout=Listed()) for n in names}
    tables = cnr.find_tables(state, specs)
    assert all(len(table.slots) == 1 for table in tables.values())
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive(), tracking=tracking)
    looked: list[jax.Array] = []
    kind = type(touched.clock)
    shard = kind.addressable_data

    def counted(array: jax.Array, number: int) -> Any:
        if number == 1:
            looked.append(array)
        return shard(array, number)

    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        monkeypatch.setattr(kind, "addressable_data", counted)
        assert Listed.times >= TABLES
        Listed.times = 0
        for step in range(4):
            ids = jnp.array([step, 100 + step])
            touched = record(touched, dict.fromkeys(names, ids))
            state = jax.tree.map(lambda leaf, at=ids: add_one(leaf, at), state)
            looked.clear()
            args = cnr.args.Save(state, touched if tracking == "recorded" else None)
            assert manager.save(step, args=args)
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None and report.kind == ("delta" if step else "full")
            times = Counter(map(id, looked))
            leaves = {id(leaf) for leaf in jax.tree.leaves(state)}
            assert leaves <= times.keys() and set(times.values()) == {1}
            # The stamps of each table too, which choose the rows of a delta.
            is_recorded = tracking == "recorded"
            assert len(times) == len(leaves) + bool(step and is_recorded) * TABLES
            # Shards that are held would keep memory from the next train step.
            held = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]
            state = jax.tree.map(jnp.copy, state)
            del args
            looked.clear()
            assert not any(leaf() is not None for leaf in held)
    assert Listed.times == 0


def calls_in(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and others, that work takes on this thread."""
    count = 0

    def see(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # jax has it call something
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize(("devices", "most"), [(1, 80), (4, 230)])
def test_calls_of_a_delta_grow_by_few_for_each_table(
    devices: int, most: int, tmp_path: Path
) -> None:
    """What follows from tables and shardings is not found out again by each save."""
    found: dict[int, int] = {}
    for count in (10, 30):
        state = make_state(count, by_rows(*range(devices)))
        tables = cnr.find_tables(state, list(state["params"]))
        touched = cnr.init_touched(state, tables)
        root = tmp_path / str(count)
        with cnr.CheckpointManager(root, tables=tables) as manager:
            for step in range(4):
                ids = jnp.arange(step, 200, 20)
                touched = record(touched, dict.fromkeys(tables, ids))
                state = jax.tree.map(lambda leaf, at=ids: add_one(leaf, at), state)
                args = cnr.args.Save(state, touched)
                calls = calls_in(lambda n=step, a=args: manager.save(n, args=a))
                manager.wait_until_finished()
            assert manager.last_report is not None
            assert manager.last_report.kind == "delta"
            found[count] = calls
    each = (found[30] - found[10]) / 20
    assert each <= most, f"{each:.0f} calls for each table"


def test_tables_may_move_to_other_devices_between_saves(tmp_path: Path) -> None:
    """What is kept for one way of sharding is not used for another."""
    ways = [by_rows(0, 1), by_rows(1, 0), by_rows(0, 1), by_rows(0, 1, 2, 3)]
    ways.append(NamedSharding(ways[0].mesh, P()))
    state = make_state(3, ways[0])
    tables = cnr.find_tables(state, list(state["params"]))
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    with (
        cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager,
        cnr.CheckpointManager(tmp_path, options=cnr.Options()) as reader,
    ):
        for step, way in enumerate(ways):
            ids = jnp.arange(step, 200, 7)
            state = jax.tree.map(lambda leaf, at=ids: add_one(leaf, at), state)
            touched = cnr.record(touched, dict.fromkeys(tables, ids))
            state = jax.device_put(state, way)
            stamps = jax.device_put(touched.stamps, way)
            clock = jax.device_put(touched.clock, NamedSharding(way.mesh, P()))
            touched = dataclasses.replace(touched, stamps=stamps, clock=clock)
            assert manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            reader.reload()
            restored = reader.restore(step, args=cnr.args.Restore(state))
            for got, want in zip(
                jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True
            ):
                assert np.array_equal(np.asarray(got), np.asarray(want))
