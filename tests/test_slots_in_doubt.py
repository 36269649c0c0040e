"""Slots are saved with their rows, whatever the roots are called; saves say what is in doubt."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cnr_jax as cnr
from cnr_jax import TableSpec

ROWS, DIM = 400, 16
TX = optax.adagrad(0.1)
RAW = {"codec": "raw", "policy": cnr.OneShot()}


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "user": {"embedding": jax.random.normal(keys[0], (ROWS, DIM))},
        "mlp": jax.random.normal(keys[1], (DIM, 2)),
    }


def train(trained: Any, state: Any, ids: Any) -> tuple[Any, Any]:
    """One step of the rows of `ids`."""

    def loss(weights: Any) -> Any:
        return (weights["user"]["embedding"][ids] @ weights["mlp"]).sum()

    updates, state = TX.update(jax.grad(loss)(trained), state)
    return optax.apply_updates(trained, updates), state


def test_a_delta_holds_the_slots_of_its_rows_whatever_the_roots_are_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = params()
    state = {"p": trained, "o": TX.init(trained)}
    tables, reports = cnr.find_tables(state, ["user"]), []
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(**RAW, on_save=reports.append)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for step in range(3):
            ids = jnp.arange(step * 8, step * 8 + 8)
            state = dict(zip("po", train(state["p"], state["o"], ids), strict=True))
            touched = cnr.record(touched, {"user": ids})
            manager.save(step, args=cnr.args.Save(state, touched))
    assert [report.kind for report in reports] == ["full", "delta", "delta"]
    assert [report.rows for report in reports] == [ROWS, 8, 16]
    assert (
        all(0 < r.slot_bytes < ROWS * DIM for r in reports[1:]) and not reports[0].hint
    )
    assert "may be slots" not in caplog.text
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        got = manager.restore(None, args=cnr.args.Restore(state)).state
    jax.tree.map(np.testing.assert_array_equal, got, state)


def test_slots_in_doubt_are_a_warning_once_and_a_hint_of_each_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {
        "p": params(),
        "sums": jax.tree.map(jnp.zeros_like, params()),
    }
    tables, reports = cnr.find_tables(state, {"user": "p/user"}), []
    options = cnr.Options(**RAW, on_save=reports.append)
    with caplog.at_level(logging.WARNING):
        with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
            for step in range(3):
                manager.save(step, args=cnr.args.Save(state))
    warned = [
        each for each in caplog.messages if "may be slots of table 'user'" in each
    ]
    (text,) = tables.doubts
    assert warned == [text]
    assert [report.hint for report in reports] == [text] * 3
    assert reports[1].asdict()["doubts"] == [text]
    written = text.partition("find_tables(state, ")[2].partition("); if not")[0]
    found = cnr.find_tables(state, eval(written))
    assert [slot.path for slot in found["user"].slots] == [
        ("sums", "user", "embedding")
    ]
    # What was saved before goes on as slots.
    args = cnr.args.Restore(state)
    options = cnr.Options(**RAW, on_save=reports.append)
    with cnr.CheckpointManager(tmp_path, tables=found, options=options) as manager:
        got = manager.restore(None, args=args).state
        jax.tree.map(np.testing.assert_array_equal, got, state)
        manager.save(3, args=cnr.args.Save(got))
        manager.save(4, args=cnr.args.Save(got))
    assert [report.kind for report in reports[3:]] == ["full", "delta"]
    assert reports[4].hint == "" and reports[4].rows == 0


def test_a_run_saved_with_its_slots_dense_goes_on_with_slots(tmp_path: Path) -> None:
    trained = params()
    state = {"p": trained, "o": TX.init(trained)}
    before = cnr.find_tables(state, {"user": TableSpec("p/user/embedding", slots=[])})
    with cnr.CheckpointManager(tmp_path, tables=before) as manager:
        manager.save(0, args=cnr.args.Save(state))
    tables = cnr.find_tables(state, ["user"])
    assert len(tables["user"].slots) == 1
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        got = manager.restore(None, args=cnr.args.Restore(state)).state
        jax.tree.map(np.testing.assert_array_equal, got["o"], state["o"])
        manager.save(1, args=cnr.args.Save(got))
        manager.wait_until_finished()
        assert manager.last_report is not None and manager.last_report.kind == "full"
