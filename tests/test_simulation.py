"""What policies make of a trace, against real saves of the same look-ups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app

ROWS, DIM, EVERY = {"user": 4_000, "item": 900}, 16, 5


@pytest.fixture(scope="module")
def trace() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found = {name: rng.zipf(1.3, (60, 80)) % rows for name, rows in ROWS.items()}
    found["item"][::3, 40:] = -1  # padding
    return found


@pytest.mark.parametrize("policy", [cnr.Intermittent(), cnr.Consecutive()])
def test_it_is_what_real_saves_take(
    tmp_path: Path, unsynced: None, trace: dict[str, np.ndarray], policy: Any
) -> None:
    model = cnr.ByteModel(dim=DIM, bits=4)
    found = cnr.simulate(trace, EVERY, rows=ROWS, model=model, policies=[policy])
    schedule = found.schedules[policy.name]

    rng = np.random.default_rng(0)
    values = {k: rng.normal(size=(n, DIM)).astype("f4") for k, n in ROWS.items()}
    state = {
        "params": {k: jnp.asarray(v) for k, v in values.items()},
        "acc": {k: jnp.zeros(n) for k, n in ROWS.items()},
    }
    tables = cnr.find_tables(state, list(ROWS))
    touched = cnr.init_touched(state, tables)
    reports: list[cnr.SaveReport] = []
    options = cnr.Options(policy=policy, bits=4, on_save=reports.append)
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        for save in range(12):
            for step in range(save * EVERY, (save + 1) * EVERY):
                ids = {name: jnp.asarray(each[step]) for name, each in trace.items()}
                valid = {name: each >= 0 for name, each in ids.items()}
                lookups = {
                    name: cnr.Lookup(jnp.maximum(ids[name], 0), valid[name])
                    for name in ids
                }
                touched = cnr.record(touched, lookups)
                for name, each in ids.items():
                    values[name] = values[name].copy()
                    values[name][np.unique(each[np.asarray(valid[name])])] += 0.5
            state["params"] = {k: jnp.asarray(v) for k, v in values.items()}
            manager.save(save, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
    parents = [r.step if r.parent is None else r.parent for r in reports]
    assert tuple(parents) == schedule.parents
    written = np.array([report.total_bytes for report in reports])
    np.testing.assert_allclose(schedule.written, written, rtol=0.1)
    # The bytes that are needed to restore each save: those of its chain.
    assert schedule.steady[0] == schedule.written[0]
    if policy.name == "consecutive":
        assert schedule.steady.tolist() == schedule.so_far.tolist()


def test_the_command_prints_the_same(
    tmp_path: Path, trace: dict[str, np.ndarray]
) -> None:
    np.savez(tmp_path / "trace.npz", **trace)  # type: ignore[arg-type]
    words = ["simulate", "--accesses", str(tmp_path / "trace.npz"), "--every", "5"]
    words += ["--rows", "user=4000", "--rows", "item=900", "--dim", "16"]
    found = cnr.simulate(trace, 5, rows=ROWS, model=cnr.ByteModel(dim=16))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:-1] == str(found).splitlines()
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert document["policies"] == found.asdict()["policies"]
    assert set(found.schedules) == {
        *("intermittent", "one_shot", "consecutive", "increment_log", "full"),
    }


class Watched:
    """Full every fourth time, else on the save before, or on the first of them where `star`."""

    name = "watched"

    def __init__(self, star: bool) -> None:
        self.star, self.seen = star, list[cnr.SaveRecord]()

    def decide(self, history: Any) -> cnr.Decision:
        self.seen = list(history) or self.seen
        if not history or len(history) == 4:
            return cnr.Decision(kind="full", parent=None, reason="it is time")
        parent = history[0 if self.star else -1].step
        return cnr.Decision(kind="delta", parent=parent, reason="rows")


@pytest.mark.parametrize("star", [False, True])
def test_policies_see_what_restores_would_read(
    trace: dict[str, np.ndarray], star: bool
) -> None:
    policy = Watched(star)
    cnr.simulate(
        trace, EVERY, rows=ROWS, model=cnr.ByteModel(dim=DIM), policies=[policy]
    )
    sizes = [save.bytes for save in policy.seen]
    assert [save.kind for save in policy.seen] == ["full", "delta", "delta"]
    assert [save.depth for save in policy.seen] == ([1, 2, 2] if star else [1, 2, 3])
    last = sizes[0] + sizes[2] if star else sum(sizes)
    expected = [sizes[0], sizes[0] + sizes[1], last]
    assert [save.restore_bytes for save in policy.seen] == expected


@pytest.mark.parametrize(
    ("accesses", "every", "rows", "message"),
    [
        ({"user": np.zeros((4, 2))}, 1, None, "no array of row ids"),
        ({"user": np.arange(4)}, 1, {"user": 3}, "got 3, expected less than 3"),
        ({"user": np.arange(4)}, 5, None, "got every=5 train .* expected 1 to 4"),
        ({"user": np.arange(4), "item": np.arange(3)}, 1, None, "same number"),
        ({"user": np.arange(4)}, 1, {"usr": 9}, "that the trace lacks: usr"),
        ({}, 1, None, "no table"),
        ({"user": np.full((4, 2), -1)}, 1, None, "looks up no row"),
        ({"user": [[1], [2, 3]]}, 1, None, "of no one shape"),
        (np.arange(4), 1, None, "traces are given by table, got ndarray"),
        ({"user": np.arange(4)}, 1, [9], "rows are given by table, got list"),
        ({"user": np.arange(4)}, 1, {"user": 9.5}, "are a number, got 9.5"),
        ({"user": np.arange(4)}, 2.5, None, "between two saves, got 2.5"),
        ({"user": np.arange(4)}, True, None, "between two saves, got True"),
    ],
)
def test_what_is_no_trace_is_refused(
    accesses: Any, every: int, rows: Any, message: str
) -> None:
    with pytest.raises(cnr.errors.OptionError, match=message):
        cnr.simulate(accesses, every, rows=rows)


@pytest.mark.parametrize(
    "policies", ["full", ["full"], [cnr.Full], cnr.Full(), [], np.arange(2)], ids=repr
)
def test_what_is_no_list_of_policies_is_refused(policies: Any) -> None:
    with pytest.raises(cnr.errors.OptionError, match="policies are a list of policies"):
        cnr.simulate({"user": np.arange(4)}, 1, policies=policies)


def test_steps_that_look_up_fewer_rows_are_padded() -> None:
    found = cnr.simulate({"user": np.array([[0, 7], [3, -1], [-1, -1]])}, 1)
    assert (found.rows, round(found.touched_share * 3 * 8)) == (8, 3)
