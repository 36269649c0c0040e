"""Measuring the storage of a run on demand, beside it, on a disk and in a bucket."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import measuring
from cnr_jax.checkpointer.saving import meter
from cnr_jax.cli.app import app
from cnr_jax.errors import NoStepError, OptionError
from cnr_jax.goodput.measured import MeasuredSave
from cnr_jax.repository.store import names_in
from cnr_jax.repository.store.local import LocalStore

ROWS = 2_000


@pytest.fixture(autouse=True)
def noted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs note what they measure with each save, not once a minute."""
    monkeypatch.setattr(meter, "_NOTED_SECS", 0.0)


class Run:
    """A run that saves every other step."""

    def __init__(self, root: Any, steps: int = 24) -> None:
        rng = np.random.default_rng(0)
        self.state = {"user": jnp.asarray(rng.normal(size=(ROWS, 16)), jnp.float32)}
        tables = cnr.find_tables(self.state, ["user"])
        self.touched, self.step = cnr.init_touched(self.state, tables), 0
        self.manager = cnr.CheckpointManager(
            root,
            tables=tables,
            options=cnr.Options(codec="raw"),
            orbax_options=ocp.CheckpointManagerOptions(save_interval_steps=2),
        )
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = jnp.arange(50) * 31 * (self.step + 1) % ROWS
            self.touched = cnr.record(self.touched, {"user": ids})
            self.state = {"user": self.state["user"].at[ids].add(0.1)}
            args = cnr.args.Save(self.state, self.touched)
            if self.manager.save(self.step, args=args):
                self.saved = self.state
            self.step += 1
        self.manager.wait_until_finished()

    def check(self) -> None:
        args = cnr.args.Restore(self.state)
        restored = self.manager.restore(None, args=args).state
        np.testing.assert_array_equal(restored["user"], self.saved["user"])


def saved(run: Run) -> list[int]:
    return [*run.manager.all_steps()]


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_saves_in_flight_are_measured_beside_a_run(
    tmp_path: Path, request: pytest.FixtureRequest, place: str
) -> None:
    root = epath.Path(tmp_path) / "run"
    if place == "bucket":
        root = request.getfixturevalue("bucket") / "run"
    run = Run(root)
    steps, before = saved(run), sorted(names_in(root))
    known = run.manager.profile()
    assert known is not None and known.in_flight == (1.0,)
    if place == "bucket":  # one that answers late, so that saves take longer than calls
        request.getfixturevalue("proxy").delay_secs = 0.02
    found = cnr.measure_store(root, secs=0.1, most_in_flight=3)
    assert found is not None and found.in_flight[0] == 1.0
    if place == "bucket":
        assert len(found.in_flight) == 3
    assert [*found.in_flight] == sorted(found.in_flight)
    assert found.full_bytes == known.full_bytes
    # All the run has is as it was, and it goes on.
    assert saved(run) == steps and sorted(names_in(root)) == before
    run.train(3)
    run.check()
    run.manager.close()
    assert cnr.verify(root) == ()


def test_what_is_measured_is_removed_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    before = sorted(names_in(epath.Path(tmp_path) / "run"))
    save, seen = cnr.CheckpointManager.save, list[str]()

    def fails(manager: Any, step: int, **given: Any) -> bool:
        if step == 7:
            seen.extend(names_in(epath.Path(tmp_path) / "run"))
            run.train(2)  # meanwhile
            raise KeyboardInterrupt
        return save(manager, step, **given)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(cnr.CheckpointManager, "save", fails)
        with pytest.raises(KeyboardInterrupt):
            cnr.measure_store(tmp_path / "run", secs=0.1)
    assert [name for name in seen if name.startswith("cnr_jax.measuring-")]
    left = names_in(epath.Path(tmp_path) / "run")
    assert not [name for name in left if "measuring" in name] and {*before} <= {*left}
    run.check()
    run.manager.close()


def test_a_manager_does_not_mind_what_a_killed_measurement_has_left(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    with Run(root).manager as manager:
        steps = manager.all_steps()
    left = root / "cnr_jax.measuring-0000000000000000.root"
    Run(left / "1").manager.close()
    assert cnr.describe(root).latest_step == steps[-1]
    assert cnr.verify(root) == ()
    with cnr.CheckpointManager(root) as manager:
        assert manager.all_steps() == steps
    assert left.exists()


def test_the_command_measures_where_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SECS", 0.1)
    Run(tmp_path / "run").manager.close()
    words = ["advise", str(tmp_path / "run"), "--failures", "exponential:1"]
    words += ["--job-hours", "10", "--json"]
    told = [
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout)["profile"]
        for more in ([], ["--measure"])
    ]
    alone, measured = (each.pop("in_flight") for each in told)
    assert alone == [1.0] and measured[0] == 1.0
    assert told[0] == told[1]
    told[1]["in_flight"] = measured
    (tmp_path / "profile.json").write_text(json.dumps(told[1]))
    words[1] = str(tmp_path / "profile.json")
    assert CliRunner().invoke(app, words).exit_code == 0
    refused = CliRunner().invoke(app, [*words, "--measure"])
    assert refused.exit_code != 0 and "has no storage to be measured" in refused.stderr


def test_a_run_that_has_hardly_saved_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path / "run", 5).manager.close()
    assert cnr.measure_store(tmp_path / "run", secs=0.1) is None
    assert not [n for n in names_in(epath.Path(tmp_path) / "run") if "measuring" in n]
    with pytest.raises(NoStepError):
        cnr.measure_store(tmp_path / "none")
    for given in ({"secs": 0}, {"most_in_flight": 0}, {"most_in_flight": 1.5}):
        with pytest.raises(OptionError, match=next(iter(given))):
            cnr.measure_store(tmp_path / "run", **given)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(OptionError, match="by one process, got 2"):
        cnr.measure_store(tmp_path / "run")


def test_factors_are_those_that_were_measured_and_then_the_run_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path / "run").manager.close()
    known = (1.0, 1.1, 1.2, 1.3, 1.4)
    made, turns = measuring.profile_at, list[tuple[int, int]]()

    def profiled(*given: Any, **more: Any) -> Any:
        return dataclasses.replace(made(*given, **more), in_flight=known)

    def saves(root: Any, nbytes: int, count: int, secs: float) -> list[MeasuredSave]:
        turns.append((count, nbytes))
        # Storage in which a fourth is never in flight, and three take twice as long.
        took = {1: 0.1, 2: 0.15, 3: 0.2, 4: 0.2}[count]
        save = MeasuredSave(
            step=0,
            parent=None,
            kind="full",
            nbytes=nbytes,
            fixed_bytes=0,
            durable_secs=took,
            in_flight=min(count, 3),
        )
        return [save] * 3

    monkeypatch.setattr(measuring, "profile_at", profiled)
    monkeypatch.setattr(measuring, "_saves", saves)
    found = cnr.measure_store(tmp_path / "run")
    assert found is not None
    assert found.in_flight == pytest.approx((1.0, 1.5, 2.0, 1.3, 1.4))
    assert [count for count, _ in turns] == [1, 2, 3, 4] * 2
    sizes = {
        step.total_bytes
        for step in cnr.describe(tmp_path / "run").steps
        if step.kind == "delta"
    }
    assert {nbytes for _, nbytes in turns} <= {*range(min(sizes), max(sizes) + 1)}


def test_what_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path / "run").manager.close()
    monkeypatch.setattr(measuring, "_saves", lambda *given: [])
    with monkeypatch.context() as kept:
        error = PermissionError(13, "Permission denied")
        kept.setattr(LocalStore, "remove_tree", lambda *given, **more: [error])
        cnr.measure_store(tmp_path / "run")
    assert "measuring-" in caplog.text and "could not be removed" in caplog.text
