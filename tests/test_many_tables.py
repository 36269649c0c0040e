"""What a save does once, however many tables there are, and once for each of them."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cnr_jax as cnr
from cnr_jax import handler
from cnr_jax.rows.tiling import LocalShards

TABLES = 12


@pytest.mark.parametrize("tracking", ["recorded", "fingerprint"])
def test_saves_look_each_array_up_once_and_list_tables_never(
    tracking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"table{i}" for i in range(TABLES)]
    state: dict[str, Any] = {
        "params": {name: jnp.ones((200, 4)) for name in names},
        "acc": {name: jnp.ones((200,)) for name in names},
    }
    tables = cnr.find_tables(state, {name: f"params/{name}" for name in names})
    assert all(len(table.slots) == 1 for table in tables.values())
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive(), tracking=tracking)
    looked: Counter[int] = Counter()
    listed: list[Any] = []
    alive: list[jax.Array] = []  # so that an id is of one array alone
    make, entries = LocalShards.__init__, handler.table_entries

    def counted(self: LocalShards, array: jax.Array) -> None:
        alive.append(array)
        looked[id(array)] += 1
        make(self, array)

    def told(tables: Any) -> Any:
        listed.append(tables)
        return entries(tables)

    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        monkeypatch.setattr(LocalShards, "__init__", counted)
        monkeypatch.setattr(handler, "table_entries", told)
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
            leaves = {id(leaf) for leaf in jax.tree.leaves(state)}
            assert leaves <= looked.keys()
            if tracking == "recorded":
                # The stamps of each table too, which choose the rows of a delta.
                assert len(looked) == len(leaves) + bool(step) * TABLES
                assert set(looked.values()) == {1}
            # Shards that are held would keep memory from the next train step.
            assert not any(isinstance(each, LocalShards) for each in gc.get_objects())
    assert not listed
