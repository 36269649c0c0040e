"""What a program meets that puts this library's manager in the place of Orbax's.

What else holds of Orbax's manager its own tests see: `tests/campaign/orbax_tests/run.py`.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

import cnr_jax as cnr
from cnr_jax import errors

STATE = {"user": jnp.arange(32.0).reshape(8, 4), "w": jnp.ones(3)}
TABLES = cnr.find_tables(STATE, ["user"])
SAVE = cnr.args.Save(STATE)


def manager_of(root: Path, metadata: Any = None, **orbax: Any) -> cnr.CheckpointManager:
    return cnr.CheckpointManager(
        root,
        tables=TABLES,
        options=cnr.Options(codec="raw"),
        orbax_options=ocp.CheckpointManagerOptions(**orbax),
        metadata=metadata,
    )


@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_that_exists_is_refused_by_an_error_of_orbax_too(
    tmp_path: Path, is_async: bool
) -> None:
    with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
        assert manager.save(3, args=SAVE)
        for kind in (StepAlreadyExistsError, errors.DependentsExistError):
            with pytest.raises(kind, match="step 3 was saved already") as caught:
                manager.save(3, args=SAVE, force=True)
            error = caught.value
            assert isinstance(error, errors.DependentsExistError)
            for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
                assert isinstance(same, StepAlreadyExistsError)
                assert str(same) == str(error)
                assert same.kind == "step_exists"
        assert not manager.save(3, args=SAVE)  # not due: no error, as by Orbax
        manager.save(4, args=SAVE)
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]


def test_a_folder_in_the_way_is_refused_by_an_error_of_orbax_too(
    tmp_path: Path,
) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, args=SAVE)
        manager.wait_until_finished()
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "mine").touch()
        with pytest.raises(StepAlreadyExistsError, match="step 2 cannot be saved"):
            manager.save(2, args=SAVE)
        assert (tmp_path / "2" / "mine").exists()


def test_max_to_keep_of_zero_keeps_no_step(tmp_path: Path) -> None:
    for kept, more in (([], {}), ([0, 2, 4], {"keep_period": 2})):
        root = tmp_path / str(len(kept))
        with manager_of(root, max_to_keep=0, **more) as manager:
            for step in range(5):
                manager.save(step, args=SAVE)
                manager.wait_until_finished()
            assert manager.all_steps() == kept
        folders = [path.name for path in root.iterdir() if path.is_dir()]
        assert sorted(folders) == [str(step) for step in kept]


def test_a_manager_that_only_reads_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(0, args=SAVE)
    with manager_of(tmp_path, read_only=True) as reader:
        reader.delete(0)
        assert "step 0 is not deleted: this manager is read-only" in caplog.text
        assert reader.all_steps() == [0]
        assert reader.restore(0, args=cnr.args.Restore(STATE)).state["w"].shape == (3,)
    assert not cnr.verify(tmp_path)


def test_metadata_of_a_root_are_kept_as_by_orbax(tmp_path: Path) -> None:
    first = {"version": 1.1, "tags": ["a", "b"]}
    with manager_of(tmp_path, first) as manager:
        assert manager.metadata().custom_metadata == first
        manager.save(0, args=SAVE, custom_metadata={"rate": 0.1})
    with manager_of(tmp_path, {"version": 2}) as manager:
        assert manager.metadata().custom_metadata == first, "the first ones stay"
        assert manager.metadata(0).custom_metadata == {"rate": 0.1}
        manager.restore(None, args=cnr.args.Restore(STATE))
        manager.save(1, args=SAVE)
    with manager_of(tmp_path, read_only=True) as reader:
        assert reader.metadata().custom_metadata == first
        assert reader.all_steps() == [0, 1]
    with ocp.CheckpointManager(tmp_path) as plain:
        assert plain.metadata().custom_metadata == first
    assert not cnr.verify(tmp_path)
    cnr.prune(tmp_path, keep=1)
    assert [step.step for step in cnr.describe(tmp_path).steps][-1:] == [1]
    assert "metadata" in os.listdir(tmp_path)


def test_a_long_wait_for_the_save_before_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said, ends = r"Waiting for previous save to complete took \d", threading.Event()
    slow = ocp.AsyncOptions(post_finalization_callback=lambda: ends.wait(60))
    caplog.set_level(logging.WARNING)
    with manager_of(tmp_path, async_options=slow) as manager:
        manager.save(0, args=SAVE)
        assert not re.findall(said, caplog.text)
        threading.Timer(1.5, ends.set).start()
        manager.save(1, args=SAVE)
        assert len(re.findall(said, caplog.text)) == 1
        manager.wait_until_finished()
        manager.save(2, args=SAVE)
        assert len(re.findall(said, caplog.text)) == 1


def test_a_manager_that_is_made_lightly_reads_metrics_when_it_reloads(
    tmp_path: Path,
) -> None:
    best: Any = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    with manager_of(tmp_path, **best) as manager:
        for step, loss in enumerate([1.0, 0.5, 2.0]):
            manager.save(step, args=SAVE, metrics={"loss": loss})
    with manager_of(tmp_path, lightweight_initialize=True, **best) as manager:
        assert (manager.all_steps(), manager.best_step()) == ([0, 1, 2], None)
        manager.reload()
        assert manager.best_step() == 1


def test_a_manager_that_is_made_lightly_keeps_by_time_and_deletes(
    tmp_path: Path,
) -> None:
    keeps: Any = {"max_to_keep": 2, "keep_time_interval": datetime.timedelta(hours=1)}
    with manager_of(tmp_path, **keeps) as manager:
        for step in range(3):
            manager.save(step, args=SAVE)
    with manager_of(tmp_path, lightweight_initialize=True, **keeps) as manager:
        manager.restore(None, args=cnr.args.Restore(STATE))
        for step in range(3, 6):
            manager.save(step, args=SAVE)
            manager.wait_until_finished()
        assert {4, 5} <= set(manager.all_steps()) < set(range(6))


@pytest.mark.parametrize(
    "item", ["..", "../0", "/elsewhere", "a/../../0", "_CHECKPOINT_METADATA"]
)
def test_an_item_is_saved_into_its_own_step_or_refused(
    item: str, tiny_run: Any, tmp_path: Path
) -> None:
    """A path joined with such a name would be that of another step, or of no root at all."""
    run = tiny_run()
    root = tmp_path / "root"
    with cnr.CheckpointManager(root, tables=run.tables, item="state") as manager:
        for step, named in ((0, {}), (1, {item: ocp.args.JsonSave({"a": 1})})):
            run.train(step)
            state = cnr.args.Save(run.state, run.touched)
            args = ocp.args.Composite(state=state, **named)
            wrong = pytest.raises(errors.OptionError, match="the name")
            with wrong if named else contextlib.nullcontext():
                manager.save(step, args=args)
            manager.wait_until_finished()
        assert manager.all_steps() == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert cnr.verify(root) == ()


def test_metrics_that_json_does_not_take_are_refused_by_name(tmp_path: Path) -> None:
    best: Any = {"best_fn": lambda metrics: metrics["auc"]}
    metrics = {"loss": 1.0, "auc": jnp.float32(0.4)}
    with manager_of(tmp_path, **best) as manager:
        with pytest.raises(
            errors.OptionError, match=r"metrics\['auc'\].*\n.*\n.*float"
        ):
            manager.save(0, args=SAVE, metrics=metrics)
        assert manager.save(0, args=SAVE, metrics={"loss": 1.0, "auc": 0.4})
        manager.wait_until_finished()
        assert manager.best_step() == 0
    # Where nothing is written of them, they may be anything.
    with manager_of(tmp_path, prevent_write_metrics=True, **best) as manager:
        manager.restore(None, args=cnr.args.Restore(STATE))
        assert manager.save(1, args=SAVE, metrics=metrics)


def test_a_state_with_a_name_too_many_or_without_one_is_told_how_to_be_given(
    tmp_path: Path,
) -> None:
    named = ocp.args.Composite(state=SAVE)
    with manager_of(tmp_path / "named") as manager:
        manager.save(0, args=named)
        with pytest.raises(errors.OptionError, match=r"hint: args=.*Composite\(state="):
            manager.save(1, args=SAVE)
        with pytest.raises(errors.OptionError, match=r"hint: args=.*Composite\("):
            manager.restore(0, args=cnr.args.Restore(STATE))
    with manager_of(tmp_path / "plain") as manager:
        manager.save(0, args=SAVE)
        with pytest.raises(
            errors.OptionError, match=r"hint: args=cnr.args.Save\(state"
        ):
            manager.save(1, args=named)
