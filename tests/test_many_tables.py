"""What a save does once, however many tables there are, and once for each of them."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cnr_jax as cnr

TABLES = 12


class Listed(cnr.Identity):
    """A layout that counts how often it is asked what it is: for a list of all tables."""

    times = 0

    def configuration(self) -> dict[str, int]:
        Listed.times += 1
        return {}


@pytest.mark.parametrize("tracking", ["recorded", "fingerprint"])
def test_saves_look_each_array_up_once_and_list_tables_never(
    tracking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"table{i}" for i in range(TABLES)]
    state: dict[str, Any] = {
        "params": {name: jnp.ones((200, 4)) for name in names},
        "acc": {name: jnp.ones((200,)) for name in names},
    }
    specs = {n: cnr.TableSpec(path=f"params/{n}", layout=Listed()) for n in names}
    tables = cnr.find_tables(state, specs)
    assert all(len(table.slots) == 1 for table in tables.values())
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive(), tracking=tracking)
    looked: list[jax.Array] = []
    kind = type(touched.clock)
    shards = kind.addressable_shards

    def counted(array: jax.Array) -> Any:
        looked.append(array)
        return shards.__get__(array)

    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        monkeypatch.setattr(kind, "addressable_shards", property(counted))
        assert Listed.times >= TABLES
        Listed.times = 0
        for step in range(4):
            ids = jnp.array([step, 100 + step])
            touched = cnr.record(touched, dict.fromkeys(names, ids))
            state = jax.tree.map(lambda leaf, at=ids: leaf.at[at].add(1.0), state)
            looked.clear()
            args = cnr.args.Save(state, touched if tracking == "recorded" else None)
            assert manager.save(step, args=args)
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None and report.kind == ("delta" if step else "full")
            times = Counter(id(array) for array in looked)
            leaves = {id(leaf) for leaf in jax.tree.leaves(state)}
            assert leaves <= times.keys()
            if tracking == "recorded":
                # The stamps of each table too, which choose the rows of a delta.
                assert len(times) == len(leaves) + bool(step) * TABLES
                assert set(times.values()) == {1}
            # Shards that are held would keep memory from the next train step.
            held = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]
            state = jax.tree.map(jnp.copy, state)
            del args
            looked.clear()
            assert not any(leaf() is not None for leaf in held)
    assert Listed.times == 0
