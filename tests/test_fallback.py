"""A damaged step is never restored, never hides the ones before it, and is never built upon."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
import cnr_jax.handler
from cnr_jax import errors
from cnr_jax.cli.app import app

from .conftest import flip
from .older_steps import leave_dense_to_orbax

STEPS = range(4)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def files(item: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in item.glob(pattern) if path.is_file())
    assert found, f"no {pattern} in {item}"
    return found


def chunk(item: Path) -> Path:
    """The chunk of rows."""
    return files(item, "rows.p*/raw.rows.float32/c/0")[0]


def dense(item: Path) -> Path:
    """The chunk of dense leaves, or the largest file of them where Orbax has written them."""
    found = list(item.glob("dense/p*/c/0")) or files(item, "dense/**/*")
    return max(found, key=lambda path: path.stat().st_size)


def before(item: Path) -> Path:
    """The same item one step before."""
    return item.parents[1] / str(int(item.parent.name) - 1) / item.name


def exchange_chunk(item: Path) -> None:
    """A whole chunk with a good checksum of its own, but of another step."""
    data = chunk(before(item)).read_bytes()
    assert data != chunk(item).read_bytes()
    chunk(item).write_bytes(data)


def stray_dense(item: Path) -> None:
    """One that Orbax would look into, were it named in a node of its database."""
    leave_dense_to_orbax(item)
    shutil.copy(dense(before(item)), item / "dense" / "d" / ("00ff" * 8))


def pipe(item: Path) -> None:
    """What would be waited for, without end, if it were opened."""
    chunk(item).unlink()
    os.mkfifo(chunk_path(item))


def chunk_path(item: Path) -> Path:
    return item / "rows.p00000" / "raw.rows.float32" / "c" / "0"


def replaced_by_folder(item: Path) -> None:
    manifest = item / "manifest.json"
    manifest.unlink()
    manifest.mkdir()


def copied_step(item: Path) -> None:
    """The whole step before, under the name of this one."""
    shutil.rmtree(item)
    shutil.copytree(before(item), item)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "chunk flipped": (lambda item: flip(chunk(item)), "data_damaged"),
    "chunk cut short": (lambda item: truncate(chunk(item)), "file_damaged"),
    "chunk gone": (lambda item: chunk(item).unlink(), "file_missing"),
    "chunk emptied": (lambda item: chunk(item).write_bytes(b""), "file_damaged"),
    "chunk of another step": (exchange_chunk, "file_damaged"),
    "chunk a pipe": (pipe, "file_damaged"),
    "row ids flipped": (
        lambda item: flip(files(item, "rows.p*/row_ids/c/0")[0], 0),
        "data_damaged",
    ),
    "manifest flipped": (lambda item: flip(item / "manifest.json"), "manifest"),
    "manifest cut short": (lambda item: truncate(item / "manifest.json"), "manifest"),
    "manifest gone": (
        lambda item: (item / "manifest.json").unlink(),
        "manifest_missing",
    ),
    "manifest a folder": (replaced_by_folder, "file_damaged"),
    "manifest of another step": (
        lambda item: shutil.copy(before(item) / "manifest.json", item),
        "foreign_step",
    ),
    "step of another number": (copied_step, "foreign_step"),
    "process manifest flipped": (
        lambda item: flip(item / "manifest.p00000.json"),
        "file_damaged",
    ),
    "process manifest of another step": (
        lambda item: shutil.copy(before(item) / "manifest.p00000.json", item),
        "file_damaged",
    ),
    "dense flipped": (lambda item: flip(dense(item), 0), "data_damaged"),
    "dense gone": (lambda item: dense(item).unlink(), "file_missing"),
    "item gone": (shutil.rmtree, "not_ours"),
}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is saved once for all tests."""
    return SimpleNamespace(root=tmp_path_factory.mktemp("saved") / "root", run=None)


@pytest.fixture
def saved(tiny_run: Any, once: Any, tmp_path: Path) -> Any:
    """A run of which steps 0 to 3 are saved, 1 to 3 as deltas, and its root."""
    if once.run is None:
        once.run = tiny_run()
        with opened(once.root, once.run) as manager:
            once.run.run(manager, STEPS)
    shutil.copytree(once.root, tmp_path / "root")
    run = dataclasses.replace(once.run, truth=dict(once.run.truth))
    return run, tmp_path / "root"


def opened(root: Path, run: Any = None, **options: Any) -> cnr.CheckpointManager:
    """A manager; one that only restores where there is no run."""
    options = {"codec": "raw", "policy": cnr.Consecutive(), **options}
    orbax = options.pop("orbax", {})
    return cnr.CheckpointManager(
        root,
        tables=run.tables if run else None,
        options=cnr.Options(**options),
        orbax_options=ocp.CheckpointManagerOptions(**orbax),
    )


def in_(root: Path) -> Any:
    """Stands for a manager where only its directory is wanted."""
    return SimpleNamespace(directory=root)


def restore(manager: Any, run: Any, step: int | None = None) -> Any:
    args = cnr.args.Restore(run.state, tables=run.tables)
    return manager.restore(step, args=args)


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and text in record.getMessage()
    ]


# Kinds of damage are told apart, and named, by those that read: see test_verify and test_store.
# Here it is what the manager does about them: damage that is met late, early, or in listing.
HERE = (
    "chunk flipped",
    "chunk gone",
    "manifest flipped",
    "manifest a folder",
    "step of another number",
    "process manifest flipped",
    "dense flipped",
    "item gone",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in HERE))
        for name in DAMAGE
    ],
)
def test_damaged_step_is_passed_over_and_said_to_be(
    saved: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = saved
    damage, kind = DAMAGE[name]
    damage(root / "3" / "default")
    with opened(root) as manager:
        run.same(restore(manager, run).state, run.truth[2])
        (warning,) = warnings_of(caplog, "passed over")
        assert "step 3 " in warning and "step 2 restored" in warning
        assert (manager.latest_step(), manager.all_steps()) == (2, [0, 1, 2])
        with pytest.raises(errors.DAMAGE) as caught:
            restore(manager, run, 3)
        assert caught.value.kind == kind
        assert caught.value.path.startswith(f"{root}/3")
        assert "checkpoint 3 cannot be restored: " in str(caught.value)
        assert "\n  hint: restore step 2, " in str(caught.value)
        assert str(caught.value).endswith("; also 1, 0")
        for step in range(3):
            run.same(restore(manager, run, step).state, run.truth[step])


def test_damage_below_passes_over_all_that_rests_on_it(
    saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = saved
    flip(chunk(root / "1" / "default"))
    with opened(root) as manager:
        with pytest.raises(errors.IntegrityError) as caught:
            restore(manager, run, 2)
        chain = "\n  chain: 0 (full) <- 1 (delta) <- 2 (delta)\n"
        assert chain in str(caught.value) and f"{root}/1/" in str(caught.value)
        assert manager.all_steps() == [0]
        run.same(restore(manager, run).state, run.truth[0])
        found = warnings_of(caplog, "passed over")
        assert [text.split()[1] for text in found] == ["3", "2", "1"]
        assert all("it rests on 1, which is damaged: " in text for text in found[:2])


def test_dense_damage_hurts_no_step_but_its_own(saved: Any) -> None:
    run, root = saved
    flip(dense(root / "2" / "default"), 0)
    with opened(root) as manager:
        run.same(restore(manager, run).state, run.truth[3])
        with pytest.raises(errors.IntegrityError):
            restore(manager, run, 2)
        assert manager.all_steps() == [0, 1, 3]


def test_nothing_left_is_an_error_that_names_every_step(saved: Any) -> None:
    run, root = saved
    flip(chunk(root / "0" / "default"))
    (root / "3" / "default" / "manifest.json").unlink()
    with opened(root) as manager:
        with pytest.raises(errors.NoStepError) as caught:
            restore(manager, run)
        lines = str(caught.value).splitlines()
        assert [line.split(":")[0].strip() for line in lines[1:]] == list("2103")
        assert isinstance(caught.value, FileNotFoundError)
        assert manager.latest_step() is None and manager.all_steps() == []


def test_all_that_look_for_a_step_say_the_same_where_none_restores(saved: Any) -> None:
    run, root = saved
    # All others rest on it.
    (root / "0" / "default" / "manifest.json").unlink()
    texts = list[str]()
    with opened(root) as manager:
        calls = (
            lambda: restore(manager, run),
            lambda: cnr.read_rows(root, "user", [0]),
            lambda: cnr.prune(root, keep=1),
        )
        for call in calls:
            with pytest.raises(errors.NoStepError) as caught:
                call()
            assert caught.value.path == str(root)
            texts.append(str(caught.value))
    words = ["export", str(root), "--to", str(root.parent / "plain")]
    texts.append(CliRunner().invoke(app, words).stderr.removeprefix("cnr-jax: "))
    for text in texts:
        first, *lines = text.splitlines()
        assert first.startswith(f"no step in {root} can be restored")
        named = [line.split(":")[0].strip() for line in lines[:4]]
        assert named == list("3210"), text
        assert lines[2] == "  1: its parent 0 cannot be read"


def test_a_root_that_holds_no_step_says_so(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run()
    with run.open(tmp_path) as manager, pytest.raises(errors.NoStepError) as caught:
        run.restore(manager, None)
    first, hint = str(caught.value).splitlines()
    assert first == f"no step in {tmp_path} can be restored"
    assert hint == "  hint: it holds no steps: is it the root that was saved to?"


@pytest.mark.parametrize("name", ["chunk flipped", "manifest flipped"])
@pytest.mark.parametrize("steps", [[3, 4], [4, 5]], ids=["colliding", "after"])
def test_saving_goes_on_from_the_step_that_was_taken(
    saved: Any, name: str, steps: list[int]
) -> None:
    run, root = saved
    uuid = run.manifest(in_(root), 3).uuid
    DAMAGE[name][0](root / "3" / "default")
    run.salt = 1
    with opened(root, run) as manager:
        run.restore(manager, None)
        run.run(manager, steps)
        first = run.manifest(manager, steps[0])
        assert (first.parent.directory, first.kind) == ("2", "delta")
        # Above the damaged branch, also where its generation can be read no more.
        assert first.generation >= 2
        assert run.manifest(manager, steps[1]).generation == first.generation
        assert manager.latest_step() == steps[1]
        aside = [path.name for path in root.iterdir() if "abandoned" in path.name]
        assert [name.split(".")[0] for name in aside] == ["3"] * (3 in steps)
        assert uuid not in {
            each.parent.uuid
            for each in map(lambda step: run.manifest(manager, step), steps)
        }
    for step in (0, 1, 2, *steps):
        run.check(in_(root), step)


def test_branch_stays_the_newest_when_the_damage_is_repaired(saved: Any) -> None:
    run, root = saved
    manifest = root / "3" / "default" / "manifest.json"
    good = manifest.read_bytes()
    manifest.unlink()
    run.salt = 1
    with opened(root, run) as manager:
        run.restore(manager, 1)
        run.run(manager, [2])
    manifest.write_bytes(good)
    with opened(root, run) as manager:
        assert manager.latest_step() == 2
        run.check(manager, None)


def test_newer_steps_that_are_passed_over_may_have_smaller_numbers(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    with opened(tmp_path, run, policy=cnr.Full()) as manager:
        run.run(manager, [1, 2, 3])
        run.restore(manager, 1)
        run.salt = 1
        run.run(manager, [2])
        assert manager.latest_step() == 2
    flip(chunk(tmp_path / "2" / "default"))
    with opened(tmp_path) as manager, caplog.at_level(logging.WARNING):
        run.same(restore(manager, run).state, run.truth[3])
    (line,) = warnings_of(caplog, "passed over")
    assert line.startswith("step 2 is passed over, and step 3 restored: ")


def test_damage_that_names_no_file_is_noted_with_its_step(
    saved: Any, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = saved

    def damaged(call: Any) -> None:
        if "/2/" in call.path or "/3/" in call.path:
            raise errors.IntegrityError("it is damaged", kind="data_damaged")

    with opened(root) as manager:
        with storage.calling(damaged, "/rows.p00000/", "open_read"):
            run.same(restore(manager, run).state, run.truth[1])
        found = warnings_of(caplog, "passed over")
        assert [text.split()[1] for text in found] == ["3", "2"]
        assert all("it is damaged" in text for text in found)
        assert manager.all_steps() == [0, 1]


def test_damage_found_while_training_goes_on_makes_no_parent(saved: Any) -> None:
    """Found by an evaluation through the manager that saves, or by `verify`."""
    run, root = saved
    with opened(root, run) as manager:
        run.restore(manager, None)
        run.run(manager, [4])
        flip(chunk(root / "4" / "default"))
        found = [problem for problem in manager.verify() if problem.consequence]
        assert [problem.consequence for problem in found] == [("4",)]
        assert manager.all_steps() == [0, 1, 2, 3]
        run.run(manager, [5])
        assert run.manifest(manager, 5).kind == "full"
        run.check(manager, 5)
        assert manager.latest_step() == 5


def test_damaged_step_can_be_deleted_and_never_is_saved_over(saved: Any) -> None:
    run, root = saved
    flip(root / "3" / "default" / "manifest.json")
    with opened(root, run) as manager:
        run.restore(manager, None)
        with pytest.raises(ValueError, match="already exists"):
            manager.save(3, args=ocp.args.JsonSave({}))
        assert (root / "3" / "default").exists()
        manager.delete(3)
        assert not (root / "3").exists()
        run.run(manager, [3])
        run.check(manager, 3)


# ---- what is no damage --------------------------------------------------------------------


# What is raised, and the files at which it comes.
NO_DAMAGE: dict[str, tuple[type[BaseException], str | None]] = {
    "no memory": (MemoryError, "/c/0"),
    "not allowed": (PermissionError, "/c/0"),
    "interrupted": (KeyboardInterrupt, "/dense/"),
    "another state": (errors.StateMismatchError, None),
}


@pytest.mark.parametrize("name", NO_DAMAGE)
def test_other_trouble_is_raised_and_changes_nothing(
    saved: Any, name: str, storage: Any
) -> None:
    run, root = saved
    expected, place = NO_DAMAGE[name]

    def trouble(call: Any) -> None:
        raise expected(13, "on purpose", call.path)

    with opened(root, run) as manager:
        run.restore(manager, None)
        run.run(manager, [4])
        state = run.state
        with contextlib.ExitStack() as stack:
            if place is None:
                state = {**run.state, "w": jnp.zeros(7)}
            else:
                stack.enter_context(storage.calling(trouble, place, "open_read"))
            for step in (None, 4):
                with pytest.raises(expected):
                    manager.restore(step, args=cnr.args.Restore(state))
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        run.run(manager, [5])
        # The old touched rows are as good as before: nothing was put back.
        assert run.manifest(manager, 5).kind == "delta"
        run.check(manager, 5)


def test_step_that_storage_does_not_give_out_is_not_passed_over(
    saved: Any, storage: Any
) -> None:
    """It may be whole, and the newest."""
    run, root = saved
    with contextlib.ExitStack() as stack:
        with storage.failing("/3/default/manifest.json", "open_read", "EACCES"):
            manager = stack.enter_context(opened(root))
            assert manager.latest_step() == 2
            with pytest.raises(PermissionError):
                restore(manager, run)
        run.same(restore(manager, run).state, run.truth[3])
        assert manager.latest_step() == 3


# With its chunk damaged nothing may rest on the step any more.
@pytest.mark.parametrize(
    ("name", "recorded"),
    [("chunk flipped", False), ("dense flipped", False), ("dense flipped", True)],
)
def test_refused_restore_leaves_saving_as_it_was(
    saved: Any, name: str, recorded: bool
) -> None:
    """With hashes too: those of the rows that training has are still known."""
    run, root = saved
    with opened(root, run) as manager:
        run.restore(manager, None)
        run.run(manager, [4])
        DAMAGE[name][0](root / "3" / "default")
        with pytest.raises(errors.IntegrityError):
            manager.restore(3, args=cnr.args.Restore(run.state))
        if recorded:
            run.run(manager, [5])
            assert run.manifest(manager, 5).parent.directory == "4"
            return
        row = int(np.argmin(np.asarray(run.touched.stamps["user"])))
        user = run.state["params"]["user"]["embedding"].at[row].add(1.0)
        params = {**run.state["params"], "user": {"embedding": user}}
        run.state = {**run.state, "params": params}
        with pytest.raises(errors.AuditError, match=f"first rows: {row}"):
            run.save(manager, 5)


def test_items_are_restored_together_or_not_at_all(
    tiny_run: Any, tmp_path: Path
) -> None:
    """The state comes back, then another item does not: as if nothing had been tried."""
    run, root = tiny_run(), tmp_path / "root"

    def save(manager: Any, step: int) -> None:
        run.train(step)
        other = ocp.args.JsonSave({"at": step})
        args = ocp.args.Composite(state=cnr.args.Save(run.state, run.touched), z=other)
        assert manager.save(step, args=args)
        manager.wait_until_finished()

    with opened(root, run) as manager:
        save(manager, 0)
        save(manager, 1)
        (root / "1" / "z" / "metadata").write_text("{")
        args = ocp.args.Composite(
            state=cnr.args.Restore(run.state), z=ocp.args.JsonRestore()
        )
        with pytest.raises(json.JSONDecodeError):
            manager.restore(None, args=args)
        save(manager, 2)
        assert run.manifest(manager, 2, "state").kind == "delta"
        got = manager.restore(None, args=args)
        assert got.z == {"at": 2}


def test_dense_files_that_change_while_they_are_read_are_noticed(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = saved
    leave_dense_to_orbax(root / "3" / "default")
    read = ocp.PyTreeCheckpointHandler.restore

    def changed(self: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
        if directory.parent.parent.name == "3":
            path = dense(root / "3" / "default")
            os.utime(path)  # as a write of the same length would
        return read(self, directory, *args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", changed)
    with opened(root) as manager:
        run.same(restore(manager, run).state, run.truth[2])
        with pytest.raises(errors.IntegrityError, match="changed while") as caught:
            restore(manager, run, 3)
        assert caught.value.kind == "file_changed"


# ---- listing ------------------------------------------------------------------------------


def test_step_that_is_being_written_is_not_listed(saved: Any, storage: Any) -> None:
    run, root = saved
    with opened(root, run) as manager:
        run.restore(manager, None)
        with storage.held("/manifest.json"):
            run.train(4)
            assert run.save(manager, 4)
            assert (manager.latest_step(), manager.all_steps()) == (3, [0, 1, 2, 3])
            assert manager.best_step() == 3
        manager.wait_until_finished()
        assert (manager.latest_step(), manager.all_steps()) == (4, [0, 1, 2, 3, 4])


def test_metrics_of_damaged_and_unfinished_steps_do_not_count(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    orbax = {"best_fn": lambda metrics: metrics["auc"]}
    with opened(root, run, orbax=orbax) as manager:
        for step, auc in enumerate([0.5, 0.7, 0.9]):
            run.run(manager, [step], metrics={"auc": auc})
        assert manager.best_step() == 2
        flip(chunk(root / "2" / "default"))
        manager.verify()
        assert (manager.best_step(), manager.latest_step()) == (1, 1)
        assert manager.metrics(1) == {"auc": 0.7}


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"item_handlers": 7, "init_timestamp_nsecs": "x"}', b"[]"]
)
def test_damage_to_what_orbax_writes_beside_makes_no_step_unrestorable(
    tiny_run: Any, tmp_path: Path, data: bytes
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    orbax = {"best_fn": lambda metrics: metrics["auc"]}
    with opened(root, run, orbax=orbax) as manager:
        for step in range(2):
            run.run(manager, [step], metrics={"auc": step})
    (root / "1" / "_CHECKPOINT_METADATA").write_bytes(data)
    (root / "1" / "metrics" / "metrics").write_bytes(data)
    (root / "1" / "commit_success.txt").unlink()
    with opened(root, run, orbax=orbax) as manager:
        assert manager.all_steps() == [0, 1]
        run.restore(manager, None)
        run.same(run.state, run.truth[1])
        run.run(manager, [2], metrics={"auc": 2})
    run.check(in_(root), 2)


def test_other_folders_are_no_steps(saved: Any) -> None:
    """Were they steps that cannot be read, nothing older could be deleted."""
    run, root = saved
    for name in ("lost+found9", "notes2", "0007", "9.txt0"):
        (root / name).mkdir()
    with opened(root, run, orbax={"max_to_keep": 1}) as manager:
        run.restore(manager, None)
        run.salt = 1
        run.touched = cnr.init_touched(run.state, run.tables)
        run.run(manager, [4, 5])
        assert run.manifest(manager, 4).kind == "full"
        assert manager.all_steps() == [4, 5]


def test_root_of_plain_orbax_gets_a_hint_and_stays_as_it_is(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with ocp.CheckpointManager(root) as plain:
        for step in range(2):
            plain.save(step, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))
    with opened(root, run) as manager:
        assert warnings_of(caplog, "none that cnr_jax has saved: 0, 1")
        assert manager.latest_step() is None and manager.all_steps() == []
        with pytest.raises(errors.NoStepError):
            restore(manager, run)
        with pytest.raises(errors.IntegrityError, match="plain Orbax") as caught:
            restore(manager, run, 1)
        assert caught.value.kind == "not_ours"
        run.train(1)
        with pytest.raises(errors.UsedRootError, match="another root"):
            run.save(manager, 1)
    with ocp.CheckpointManager(root) as plain:
        got = plain.restore(1, args=ocp.args.StandardRestore())
        np.testing.assert_array_equal(got["w"], np.arange(3.0))


def test_restore_from_another_root_passes_over_damage_too(
    saved: Any, tmp_path: Path
) -> None:
    run, root = saved
    flip(chunk(root / "3" / "default"))
    with opened(tmp_path / "other", run) as manager:
        args = cnr.args.Restore(run.state)
        got = manager.restore(None, directory=root, args=args)
        run.same(got.state, run.truth[2])
        with pytest.raises(errors.IntegrityError, match="restore step 2, "):
            manager.restore(3, directory=root, args=args)


def test_plain_orbax_manager_refuses_damage_too(saved: Any) -> None:
    run, root = saved
    stray_dense(root / "3" / "default")
    registry = cnr.handler_registry(run.tables)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        with pytest.raises(errors.IntegrityError, match="Orbax could take it"):
            manager.restore(3, args=cnr.args.Restore(run.state))
        run.same(
            manager.restore(2, args=cnr.args.Restore(run.state)).state, run.truth[2]
        )


@pytest.mark.parametrize("gone", [[3], [1, 2, 3]], ids=["newest", "all"])
@pytest.mark.parametrize("saved", [True, False])
def test_steps_that_others_have_removed_are_passed_over(
    tiny_run: Any, tmp_path: Path, gone: list[int], saved: bool
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    manager = opened(root, run, policy=cnr.Full())
    run.run(manager, [1, 2, 3])
    if not saved:
        manager.close()
        manager = opened(root, run, policy=cnr.Full())
    for step in gone:
        shutil.rmtree(root / str(step))
    with pytest.raises(
        errors.NoStepError, match=r"step 3 is not in .* any more"
    ) as caught:
        restore(manager, run, 3)
    assert caught.value.kind == "step_deleted"
    if len(gone) == 1:
        assert restore(manager, run).state["step"] == 2
        assert manager.all_steps() == [1, 2] and manager.latest_step() == 2
    else:
        with pytest.raises(errors.NoStepError):
            restore(manager, run)
        assert manager.all_steps() == [] and manager.latest_step() is None
    manager.close()


@pytest.mark.parametrize(
    "place",
    ["3/default/manifest.json", "9", "3/_CHECKPOINT_METADATA", "cnr_jax.writer.json"],
)
def test_a_link_that_leads_to_itself_is_one_that_leads_nowhere(
    tiny_run: Any, tmp_path: Path, place: str
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(root, run, policy=cnr.Full()) as manager:
        run.run(manager, [1, 2, 3])
    link = root / place
    link.unlink(missing_ok=True)
    link.symlink_to(link.name)
    with opened(root, run, policy=cnr.Full()) as manager:
        step = int(restore(manager, run).state["step"])
        assert step == (2 if place.endswith("manifest.json") else 3)
        cnr.verify(root)
        if place == "cnr_jax.writer.json":
            link.unlink()
        run.restore(manager, step)
        run.run(manager, [10])
        run.check(manager, 10)
