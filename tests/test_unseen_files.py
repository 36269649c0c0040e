"""What cannot be seen is not taken for absent: a root is not empty then, nor a save complete."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import dump
from cnr_jax.repository.step import read_manifest
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from .older_steps import leave_dense_to_orbax

# What storage says of a disk, and of a right that may come back; others are told alike.
FEW_ERRORS = (
    "EIO",
    "EACCES",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ESTALE", "EMFILE")),
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def opened(root: Any, run: Any, **options: Any) -> cnr.CheckpointManager:
    return cnr.CheckpointManager(
        root, tables=run.tables, options=cnr.Options(codec="raw", **options)
    )


def all_restore(root: Any, run: Any) -> None:
    """Every step on disk is listed and comes back as it was saved, and nothing is wrong."""
    with opened(root, run) as manager:
        there = sorted(int(p.name) for p in Path(root).iterdir() if p.name.isdigit())
        assert manager.all_steps() == there
        for step in there:
            run.check(manager, step)
    assert not [found for found in cnr.verify(root) if found.consequence]


# ---- roots whose paths are patterns -------------------------------------------------------


@pytest.mark.parametrize("name", ["lr=[0.1,0.2]/ckpt", "a*b", "a?b", "[!a]"])
def test_root_whose_path_is_a_pattern_works(
    tmp_path: Path, tiny_run: Any, name: str
) -> None:
    run = tiny_run()
    root = tmp_path / name
    with opened(root, run) as manager:
        run.run(manager, range(3))
        assert manager.verify() == ()
    all_restore(root, run)
    with opened(tmp_path / "other", run) as manager:
        got = manager.restore(2, directory=root, args=cnr.args.Restore(run.state))
        run.same(got.state, run.truth[2])


def test_root_whose_path_is_a_pattern_works_under_a_manager_of_orbax(
    tmp_path: Path, tiny_run: Any
) -> None:
    run = tiny_run()
    root = tmp_path / "lr=[0.1]"
    registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw"))
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        run.run(manager, range(2))
    all_restore(root, run)


# ---- saves ---------------------------------------------------------------------------------


def test_step_whose_dense_part_was_not_finished_is_found_and_passed_over(
    tmp_path: Path, tiny_run: Any
) -> None:
    """As versions before wrote it when Orbax did not see what it was to merge."""
    run = tiny_run()
    with opened(tmp_path, run) as manager:
        run.run(manager, range(3))
    item = tmp_path / "2" / "default"
    leave_dense_to_orbax(item)
    manifest = read_manifest(item)
    left = tuple(f for f in manifest.dense_files if f.path not in names.DENSE_INDEX)
    assert len(left) == len(manifest.dense_files) - 2
    for path in names.DENSE_INDEX:
        (item / path).unlink()
    unfinished = dataclasses.replace(manifest, dense_files=left)
    (item / names.MANIFEST).write_bytes(dump(unfinished))
    (found,) = [p for p in cnr.verify(tmp_path, "structure") if p.consequence]
    assert (found.kind, found.consequence) == ("dense_unfinished", ("2",))
    with opened(tmp_path, run) as manager:
        with pytest.raises(errors.IntegrityError, match=r"dense/_METADATA"):
            manager.restore(2, args=cnr.args.Restore(run.state))
        got = manager.restore(None, args=cnr.args.Restore(run.state))
        run.same(got.state, run.truth[1])


def test_error_of_a_root_that_a_save_cannot_see_says_so(
    tmp_path: Path, tiny_run: Any
) -> None:
    """Not that it exists already."""
    run = tiny_run()
    with opened(tmp_path, run) as manager:
        run.run(manager, [0])
        with inprocess.watching(tmp_path, looks=True) as calls:
            run.run(manager, [1])
        root = os.path.realpath(tmp_path)
        stats = [c.path for c in calls if c.call == "stat"]
        for nth in [i for i, path in enumerate(stats, 1) if path == root]:
            run.train(nth + 1)
            with inprocess.failing(tmp_path, Fault("stat", nth, "ESTALE")):
                try:
                    run.save(manager, nth + 1)
                    manager.wait_until_finished()
                except errors.SaveError as raised:
                    assert raised.errno == errno.ESTALE
    all_restore(tmp_path, run)


# ---- restores ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyError, OSError])
def test_whatever_orbax_raises_of_a_dense_part_is_damage_of_it(
    tmp_path: Path, tiny_run: Any, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    run = tiny_run()
    with opened(tmp_path, run) as manager:
        run.run(manager, range(2))
    leave_dense_to_orbax(tmp_path / "1" / "default")
    with opened(tmp_path, run) as manager:
        own = ocp.PyTreeCheckpointHandler.restore

        def restore(self: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
            if "/1/" in os.fspath(directory):
                raise error("cannot make sense of it")
            return own(self, directory, *args, **kwargs)

        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
        with pytest.raises(errors.IntegrityError, match="1/default/dense cannot"):
            manager.restore(1, args=cnr.args.Restore(run.state))
        got = manager.restore(None, args=cnr.args.Restore(run.state))
        run.same(got.state, run.truth[0])


def test_dense_leaf_that_cannot_be_had_as_asked_is_no_damage(
    tmp_path: Path, tiny_run: Any
) -> None:
    run = tiny_run()
    with opened(tmp_path, run) as manager:
        run.run(manager, range(2))
        mesh = jax.make_mesh((8,), ("x",))
        where = NamedSharding(mesh, P("x"))
        w = jax.ShapeDtypeStruct((3,), np.float32, sharding=where)
        for step in (1, None):
            with pytest.raises(errors.StateMismatchError, match="cut evenly"):
                manager.restore(step, args=cnr.args.Restore({**run.state, "w": w}))
        assert manager.all_steps() == [0, 1]


# ---- opening -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", FEW_ERRORS)
def test_root_that_cannot_be_seen_is_not_an_empty_one(
    tmp_path: Path, tiny_run: Any, error: str
) -> None:
    """Each look at the root itself fails once: an error, or all steps are there."""
    run = tiny_run()
    with opened(tmp_path, run) as manager:
        run.run(manager, range(3))

    def newest() -> int | None:
        with opened(tmp_path, run) as manager:
            return manager.latest_step()

    with inprocess.watching(tmp_path, looks=True) as calls:
        assert newest() == 2
    root = os.path.realpath(tmp_path)
    looks = [c for c in calls if c.call in ("stat", "scandir")]
    refused = 0
    for kind in ("stat", "scandir"):
        fitting = [c for c in looks if c.call == kind]
        for nth in [i for i, c in enumerate(fitting, 1) if c.path == root]:
            with inprocess.failing(tmp_path, Fault(kind, nth, error)):
                try:
                    assert newest() == 2
                except OSError as raised:
                    refused += 1
                    assert raised.filename is None or raised.filename == root
    assert refused
    all_restore(tmp_path, run)


def test_step_that_was_not_given_out_at_first_is_asked_for_again(
    tmp_path: Path, tiny_run: Any
) -> None:
    run = tiny_run()
    with opened(tmp_path, run) as manager:
        run.run(manager, [5])
    fault = Fault("open_read", action="EACCES", match="manifest.json")
    with inprocess.failing(tmp_path, fault):
        with opened(tmp_path, run) as manager:
            assert manager.latest_step() == 5
    for_ever = Fault("open_read", action="EACCES", match="manifest.json", times=0)
    with inprocess.failing(tmp_path, for_ever):
        with opened(tmp_path, run) as manager:
            with pytest.raises(PermissionError):
                manager.latest_step()


@pytest.mark.parametrize(
    "file", ["manifest.p00000.json", "rows.p00000/raw.rows.float32/c/0"]
)
def test_one_failure_to_read_what_all_steps_rest_on_makes_no_root_look_empty(
    tmp_path: Path, tiny_run: Any, file: str
) -> None:
    run = tiny_run()
    with opened(tmp_path, run, policy=cnr.Consecutive()) as manager:
        run.run(manager, range(3))
    fault = Fault("open_read", action="EIO", match=f"/0/default/{file}")
    with opened(tmp_path, run) as manager:
        with inprocess.failing(tmp_path, fault):
            with pytest.raises(errors.IntegrityError, match="cannot be restored"):
                manager.restore(2, args=cnr.args.Restore(run.state))
        assert (manager.latest_step(), manager.all_steps()) == (2, [0, 1, 2])
        with inprocess.failing(tmp_path, fault):
            got = manager.restore(None, args=cnr.args.Restore(run.state))
        run.same(got.state, run.truth[2])
    for_ever = dataclasses.replace(fault, times=0)
    with opened(tmp_path, run) as manager:
        with inprocess.failing(tmp_path, for_ever):
            with pytest.raises(errors.NoStepError, match="0, which is damaged"):
                manager.restore(None, args=cnr.args.Restore(run.state))


# ---- clearing up ---------------------------------------------------------------------------


def test_folder_that_orbax_is_making_for_a_save_is_no_leftover(
    tmp_path: Path, tiny_run: Any, storage: Any
) -> None:
    """A plain manager of Orbax makes it before the save is planned."""
    run, own = tiny_run(), tmp_path / "0.orbax-checkpoint-tmp"
    with opened(tmp_path, run) as manager:  # another manager was here
        run.run(manager, [0])
        manager.delete(0)
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()

    def until_made(call: Any) -> None:
        """The root is claimed right before it is tidied up."""
        deadline = time.monotonic() + 60
        while not (own / "default.orbax-checkpoint-tmp").exists():
            assert time.monotonic() < deadline, "it was never made"
            time.sleep(0.01)

    registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw"))
    with storage.calling(until_made, "cnr_jax.writer.json") as calls:
        with ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager:
            run.run(manager, [0])
    renames = [Path(call.path).name for call in calls if call.call == "rename"]
    assert renames.count(own.name) == 1, "when it was committed"
    assert renames.index("7.orbax-checkpoint-tmp") < renames.index(own.name)
    assert not (tmp_path / "7.orbax-checkpoint-tmp").exists()
    all_restore(tmp_path, run)
