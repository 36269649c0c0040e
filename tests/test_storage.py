"""Steps are durable before others go, and neither crashes nor other writers harm a root."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax.checkpointer.orbax_compat.dense_part import open_dense
from cnr_jax.format import names
from cnr_jax.repository.step_reader import open_chain
from cnr_jax.testing import inprocess

from .conftest import Keep

ITEM = "default"


def open_manager(
    root: Path, run: Any, policy: Any = None, **orbax: Any
) -> cnr.CheckpointManager:
    return cnr.CheckpointManager(
        root,
        tables=run.tables,
        options=cnr.Options(codec="raw", policy=policy or cnr.Consecutive()),
        orbax_options=ocp.CheckpointManagerOptions(**orbax),
    )


def steps_in(root: Path) -> set[int]:
    return {int(path.name) for path in root.iterdir() if path.name.isdigit()}


def final(name: str) -> str:
    """A name or path of what is being saved as it is once that is committed."""
    return re.sub(rf"{re.escape(names.TEMPORARY_SUFFIX)}-[0-9]+", "", name)


def marked(root: Path, mark: str) -> list[str]:
    return sorted(path.name for path in root.iterdir() if mark in path.name)


def resolve_all(root: Path) -> None:
    """Every step that is there has its chain, to the last byte of every manifest and file."""
    for step in steps_in(root):
        open_dense(open_chain(epath.Path(root), str(step), ITEM)[-1]).check()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tiny_run: Any) -> Iterator[list[Any]]:
    """What is synced, renamed and deleted from Python, by final names, in order."""
    found: list[Any] = []

    def note(what: str, real: Any) -> Any:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(path, *args, **kwargs)
            targets = [os.fspath(arg) for arg in args]
            found.append((what, os.fspath(path), *targets))
            return result

        return wrapped

    def note_sync(descriptor: int) -> None:
        found.append(("sync", final(os.readlink(f"/proc/self/fd/{descriptor}"))))

    monkeypatch.setattr(os, "fsync", note_sync)
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    yield found


HOW_COMMITTED: dict[str, dict[str, Any]] = {
    "renamed": {},
    "synchronous": {"enable_async_checkpointing": False},
}


@pytest.mark.parametrize("how", HOW_COMMITTED)
def test_a_step_and_the_root_are_durable_before_another_step_goes(
    tiny_run: Any,
    calls: list[Any],
    tmp_path: Path,
    how: str,
) -> None:
    run, root = tiny_run(), tmp_path / "made" / "by us"

    def items(step: int) -> Any:
        run.train(step)
        return ocp.args.Composite(
            state=cnr.args.Save(run.state, run.touched),
            extra=ocp.args.StandardSave({"average": np.arange(3.0)}),
            meta=ocp.args.JsonSave({"epoch": step}),
        )

    options = {"max_to_keep": 1, **HOW_COMMITTED[how]}
    with open_manager(root, run, cnr.Full(), **options) as manager:
        made = {("sync", str(tmp_path)), ("sync", str(root.parent))}
        assert made <= {*calls}
        manager.save(1, args=items(1))
        manager.wait_until_finished()
        calls.clear()
        manager.save(2, args=items(2))
        manager.wait_until_finished()
    assert steps_in(root) == {2}

    step = root / "2"
    gone = ("rename", f"{root}/1")
    removal = next(i for i, call in enumerate(calls) if call[:2] == gone)
    # TensorStore syncs what it writes and the directories of that itself.
    written = {step / "state" / name for name in ("rows.p00000", "dense/p00000")}
    ours = {p for p in {*step.rglob("*"), step} if not written & {*p.parents}}
    syncs = {
        str(p): [i for i, c in enumerate(calls) if c == ("sync", str(p))] for p in ours
    }
    assert [path for path, when in syncs.items() if not when] == []
    assert all(when[0] < removal for when in syncs.values())
    roots = [i for i, c in enumerate(calls) if c == ("sync", str(root))]
    assert any(max(syncs[str(step)]) < i < removal for i in roots)
    deleted = [i for i, c in enumerate(calls) if c[0] == "unlink" and "/1" in c[1]]
    assert len(deleted) > 10
    assert any(removal < i < min(deleted) for i in roots)
    check_synced_before_rename(step, syncs, calls)


def check_synced_before_rename(step: Path, syncs: Any, calls: list[Any]) -> None:
    """All of it is durable before the step is seen."""
    (commit,) = (
        i
        for i, call in enumerate(calls)
        if call[0] == "rename" and call[2] == str(step)
    )
    assert calls[commit][1] != str(step) == final(calls[commit][1])
    assert all(max(when) < commit for when in syncs.values())


def test_a_callback_of_the_users_is_still_called(tiny_run: Any, tmp_path: Path) -> None:
    run, seen = tiny_run(), []
    theirs = ocp.AsyncOptions(post_finalization_callback=lambda: seen.append(1))
    with open_manager(tmp_path, run, async_options=theirs) as manager:
        run.run(manager, [1])
    assert seen == [1]


def test_every_moment_of_a_removal_leaves_whole_steps_only(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root is looked at before and after each rename and each deletion of a file."""
    run, root, moments = tiny_run(), tmp_path / "root", list[set[int]]()
    manager = open_manager(
        root,
        run,
        cnr.Consecutive(max_chain=2),
        max_to_keep=1,
        num_deletion_threads=1,
    )
    run.run(manager, [1, 2, 3])
    removed = {1: "full", 2: "delta", 3: "delta"}
    assert {s: run.manifest(manager, s).kind for s in steps_in(root)} == removed

    def watch(name: str) -> None:
        real = getattr(os, name)

        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not os.fspath(path).startswith(f"{root}/4"):
                look()
                result = real(path, *args, **kwargs)
                look()
                return result
            return real(path, *args, **kwargs)

        watched.setattr(os, name, wrapped)

    def look() -> None:
        resolve_all(root)
        moments.append(steps_in(root))

    # Only here: the test's own folder is removed with the same functions.
    with monkeypatch.context() as watched:
        for name in ("rename", "unlink", "rmdir"):
            watch(name)
        run.train(4)
        run.save(manager, 4)
        manager.wait_until_finished()
    order = [moments[0]]
    order += [b for a, b in itertools.pairwise(moments) if a != b]
    assert order == [{1, 2, 3, 4}, {1, 2, 4}, {1, 4}, {4}]
    assert len(moments) > 60
    manager.close()


class Flaky:
    """Makes `os.rename` fail for some directories of a root, as a broken disk would."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: set[str] = set()
        self.hits = 0
        rename = os.rename

        def call(source: Any, target: Any, **kwargs: Any) -> None:
            path = Path(os.fspath(source))
            if path.parent == root and final(path.name) in self.broken:
                self.hits += 1
                raise OSError(5, "Input/output error", str(path))
            rename(source, target, **kwargs)

        monkeypatch.setattr(os, "rename", call)


def test_a_step_that_cannot_be_removed_stays_with_its_parents_and_goes_later(
    tiny_run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, flaky, keep = tiny_run(), Flaky(tmp_path, monkeypatch), Keep(1, 2)
    policy = cnr.Consecutive(max_chain=1)
    with open_manager(tmp_path, run, policy, preservation_policy=keep) as manager:
        run.run(manager, [1, 2])
        flaky.broken, keep.steps = {"2"}, {3}
        with caplog.at_level(logging.ERROR, logger="cnr_jax"):
            run.run(manager, [3])
        assert flaky.hits == 1 and "step 2 is not removed" in caplog.text
        assert run.manifest(manager, 3).kind == "full"
        assert steps_in(tmp_path) == {1, 2, 3} == set(manager.all_steps())
        resolve_all(tmp_path)
        # It counts again: what it rests on is kept for its sake.
        keep.steps = {2, 3, 4}
        run.run(manager, [4])
        assert steps_in(tmp_path) == {1, 2, 3, 4}
        run.check(manager, 2)
        flaky.broken, keep.steps = set(), {5}
        run.run(manager, [5])
        assert steps_in(tmp_path) == {5}
        run.check(manager, 5)


def test_nothing_rests_on_a_step_that_could_not_be_synced_nor_goes_for_it(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hits = tiny_run(), []

    def fail(descriptor: int) -> None:
        where = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if where == tmp_path and (where / "3").exists():
            hits.append(descriptor)
            monkeypatch.undo()
            raise OSError(5, "Input/output error")

    with open_manager(tmp_path, run, cnr.Consecutive(max_chain=1), max_to_keep=1) as m:
        run.run(m, [1, 2])
        monkeypatch.setattr(os, "fsync", fail)
        run.train(3)
        run.save(m, 3)
        with pytest.raises(OSError, match="Input/output error"):
            m.wait_until_finished()
        assert len(hits) == 1 and steps_in(tmp_path) == {1, 2, 3}
        run.run(m, [4])
        manifest = run.manifest(m, 4)
        assert manifest.kind == "full" and "may not be durable" in manifest.reason
        run.run(m, [5])
        assert run.manifest(m, 5).kind == "delta"
        assert steps_in(tmp_path) == {4, 5}


def test_a_delete_that_fails_is_raised_and_changes_nothing(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flaky = tiny_run(), Flaky(tmp_path, monkeypatch)
    with open_manager(tmp_path, run) as manager:
        run.run(manager, [1, 2])
        flaky.broken = {"2"}
        with pytest.raises(OSError, match="Input/output error"):
            manager.delete(2)
        assert steps_in(tmp_path) == {1, 2} == set(manager.all_steps())
        with pytest.raises(cnr.errors.DependentsExistError, match=r"step 1: 2 depend"):
            manager.delete(1)
        flaky.broken = set()
        manager.delete(2)
        manager.delete(1)
        assert steps_in(tmp_path) == set()


@pytest.mark.parametrize(
    "options",
    [{"todelete_subdir": "trash"}, {"enable_background_delete": True}],
    ids=lambda options: next(iter(options)),
)
def test_other_ways_to_delete_are_honoured(
    tiny_run: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = tiny_run()
    with open_manager(tmp_path, run, cnr.Full(), max_to_keep=1, **options) as manager:
        run.run(manager, [1, 2, 3])
        assert steps_in(tmp_path) == {3}
    assert marked(tmp_path, names.REMOVED_MARK) == []
    trash = tmp_path / "trash"
    kept = sorted(path.name for path in trash.iterdir()) if trash.exists() else []
    assert kept == (["1", "2"] if "todelete_subdir" in options else [])
    for step in kept:
        open_chain(epath.Path(trash), step, ITEM)


def test_a_way_to_delete_that_cannot_work_is_refused(
    tiny_run: Any, tmp_path: Path
) -> None:
    with pytest.raises(cnr.errors.OptionError, match="todelete_full_path is not taken"):
        open_manager(tmp_path, tiny_run(), todelete_full_path="trash/")


def leave_leftovers(root: Path, run: Any) -> set[str]:
    """What killed saves and removals leave in a root that was saved to; orphans beside."""
    with open_manager(root, run) as manager:
        run.run(manager, [1, 2, 3])
    with open_manager(root, run, cnr.Full()) as manager:
        run.restore(manager, None)
        run.touched = cnr.init_touched(run.state, run.tables)
        run.run(manager, [5])
    found = {
        f"7{names.TEMPORARY_SUFFIX}",
        names.removed("4", "00ff" * 4),
        names.abandoned("6", 1, "a" * 32),
    }
    for name in found:
        shutil.copytree(root / "5", root / name)
    (root / names.replacing(names.WRITER, "00ff" * 2)).write_text("{")
    shutil.rmtree(root / "2")
    return found


def test_leftovers_are_reported_and_cleared_by_a_save_but_never_by_a_reader(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    found = leave_leftovers(tmp_path, run)
    before = {path.name for path in tmp_path.iterdir()}
    claim = (tmp_path / names.WRITER).read_bytes()
    with caplog.at_level(logging.WARNING, logger="cnr_jax"):
        tidy = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
        with cnr.CheckpointManager(tmp_path, orbax_options=tidy) as reader:
            reader.restore(None)
        text = caplog.text
    for kind in (*found, "deltas without their parent"):
        assert kind in text
    assert {path.name for path in tmp_path.iterdir()} == before
    with open_manager(tmp_path, run, cnr.Full(), max_to_keep=1) as manager:
        run.restore(manager, None)
        assert {path.name for path in tmp_path.iterdir()} == before
        assert (tmp_path / names.WRITER).read_bytes() == claim
        run.run(manager, [8])
        assert (tmp_path / names.WRITER).read_bytes() != claim
        manager.close()
    # The orphan stays, in case its parent is brought back; what was set aside goes with a step.
    assert steps_in(tmp_path) == {3, 8}
    assert marked(tmp_path, ".") == [names.WRITER, names.WRITER_LOCK]
    run.check(manager, 8)


def test_what_a_failed_save_has_written_is_deleted(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    with open_manager(tmp_path, run) as manager:
        run.run(manager, [1])
        with storage.failing():
            run.train(2)
            run.save(manager, 2)
            with pytest.raises(OSError, match="No space"):
                manager.wait_until_finished()
        assert all(names.REMOVED_MARK in name for name in marked(tmp_path, "2"))
    assert marked(tmp_path, "2") == []


def test_what_a_failed_save_has_written_is_deleted_behind_training(
    tiny_run: Any, tmp_path: Path, storage: Any, tiny_limits: Any
) -> None:
    """It is out of the way at once, and deleted however long that takes."""
    run, may_delete, by = tiny_run(), threading.Event(), list[str]()

    def held(call: Any) -> None:
        by.append(threading.current_thread().name)
        assert may_delete.wait(60)

    tiny_limits(room_secs=0.1)
    with (
        storage.calling(held, names.REMOVED_MARK, "unlink"),
        open_manager(tmp_path, run) as manager,
    ):
        run.run(manager, [1])
        with storage.failing("/manifest.json"):
            run.train(2)
            run.save(manager, 2)
            with pytest.raises(OSError, match="No space"):
                manager.wait_until_finished()
        (name,) = marked(tmp_path, "2")
        assert names.REMOVED_MARK in name
        run.run(manager, [2, 3])
        assert marked(tmp_path, names.REMOVED_MARK) == [name], "still there"
        may_delete.set()
    assert by and threading.main_thread().name not in by
    assert marked(tmp_path, names.REMOVED_MARK) == []
    run.check(manager, 3)


def test_what_a_failed_save_has_written_and_cannot_be_moved_goes_before_the_next(
    tiny_run: Any, tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flaky = tiny_run(), Flaky(tmp_path, monkeypatch)
    with open_manager(tmp_path, run) as manager:
        run.run(manager, [1])
        with storage.failing("/manifest.json"):
            flaky.broken = {"2"}
            run.train(2)
            run.save(manager, 2)
            with pytest.raises(OSError, match="No space"):
                manager.wait_until_finished()
        (left,) = marked(tmp_path, names.TEMPORARY_SUFFIX)
        assert flaky.hits == 1 and final(left) == "2"
        flaky.broken = set()
        run.run(manager, [3])
        assert left not in marked(tmp_path, "2")
    assert marked(tmp_path, "2") == []


@pytest.fixture
def gate(storage: Any) -> Iterator[Any]:
    """Where saves wait that are about to say what they have written, once it is shut."""
    with storage.held() as found:
        found.open()
        yield found


def roll_back_and_save(run: Any, manager: Any) -> None:
    """Goes on from step 1 another way, and starts to save step 2 again."""
    run.restore(manager, 1)
    run.salt = 1
    run.train(2)
    manager.save(2, args=cnr.args.Save(run.state, run.touched))


def test_a_branch_is_back_when_the_save_that_abandons_it_fails(
    tiny_run: Any, tmp_path: Path, gate: Any
) -> None:
    run = tiny_run()
    manager = open_manager(tmp_path, run)
    run.run(manager, [1, 2, 3])
    gate.shut()
    roll_back_and_save(run, manager)
    assert gate.reached.wait(60)
    assert len(marked(tmp_path, names.ABANDONED_MARK)) == 2
    gate.open(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        manager.wait_until_finished()
    assert steps_in(tmp_path) == {1, 2, 3} == set(manager.all_steps())
    assert manager.latest_step() == 3
    run.check(manager, 3)
    # It is abandoned all the same once a save of the new branch is committed.
    run.run(manager, [2])
    assert steps_in(tmp_path) == {1, 2} and manager.latest_step() == 2
    assert len(marked(tmp_path, names.ABANDONED_MARK)) == 2
    manager.close()
    with open_manager(tmp_path, run) as manager:
        assert manager.latest_step() == 2
        run.check(manager, 2)


def test_a_branch_is_back_at_once_if_not_all_of_it_can_be_moved(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flaky = tiny_run(), Flaky(tmp_path, monkeypatch)
    with open_manager(tmp_path, run) as manager:
        run.run(manager, [1, 2, 3])
        flaky.broken = {"2"}
        with pytest.raises(OSError, match="Input/output error"):
            roll_back_and_save(run, manager)
        assert flaky.hits == 1
        assert steps_in(tmp_path) == {1, 2, 3} == set(manager.all_steps())
        assert manager.latest_step() == 3
        flaky.broken = set()
        run.run(manager, [2])
        assert manager.latest_step() == 2
        run.check(manager, 2)


def test_a_branch_is_back_after_a_kill_of_the_save_that_abandons_it(
    tiny_run: Any, tmp_path: Path, gate: Any
) -> None:
    run, root, after = tiny_run(), tmp_path / "root", tmp_path / "after the kill"
    manager = open_manager(root, run)
    run.run(manager, [1, 2, 3])
    truth = dict(run.truth)
    gate.shut()
    roll_back_and_save(run, manager)
    assert gate.reached.wait(60)
    # By another program: what this one writes waits at the gate.
    subprocess.run(["cp", "-r", root, after], check=True)
    gate.open()
    manager.close()
    assert steps_in(after) == {1}
    with cnr.CheckpointManager(after) as reader:
        assert reader.latest_step() == 1
    with open_manager(after, run) as manager:
        assert manager.latest_step() == 3
        run.restore(manager, None)
        run.same(run.state, truth[3])
        run.salt = 0
        run.run(manager, [4])
        run.check(manager, 4)
    assert marked(after, names.TEMPORARY_SUFFIX) == []


def test_the_older_of_two_managers_saves_and_deletes_no_more(
    tiny_run: Any, tmp_path: Path
) -> None:
    mine, theirs = tiny_run(), tiny_run(salt=1)
    older = open_manager(tmp_path, mine, cnr.Full(), max_to_keep=1)
    mine.run(older, [1])
    newer = open_manager(tmp_path, theirs, cnr.Full(), max_to_keep=2)
    theirs.restore(newer, 1)
    theirs.run(newer, [2])
    mine.train(2)
    for call in (
        lambda: mine.save(older, 2),
        lambda: older.save(3, args=cnr.args.Save(mine.state, mine.touched)),
        lambda: older.delete(1),
    ):
        with pytest.raises(cnr.errors.WriterError, match="taken over"):
            call()
    assert steps_in(tmp_path) == {1, 2} and marked(tmp_path, "-tmp") == []
    theirs.check(newer, 2)
    theirs.run(newer, [3])
    assert steps_in(tmp_path) == {2, 3}
    # It may take over again, and then knows what the other has saved.
    older.reload()
    assert older.latest_step() == 3
    mine.run(older, [4])
    assert steps_in(tmp_path) == {4}
    theirs.train(5)
    with pytest.raises(cnr.errors.WriterError):
        theirs.save(newer, 5)
    mine.check(older, 4)
    older.close()
    newer.close()


def test_a_save_in_flight_is_not_committed_once_another_manager_took_over(
    tiny_run: Any, tmp_path: Path, gate: Any
) -> None:
    """Both save the same step: the files of one must not get into the other's."""
    mine, theirs = tiny_run(), tiny_run(salt=1)
    older = open_manager(tmp_path, mine, cnr.Full())
    mine.run(older, [1])
    newer = open_manager(tmp_path, theirs, cnr.Full())
    gate.shut()
    mine.train(2)
    older.save(2, args=cnr.args.Save(mine.state, mine.touched))
    assert gate.reached.wait(60)
    theirs.restore(newer, 1)
    claims = (tmp_path / names.WRITER).read_bytes()
    saving = threading.Thread(target=lambda: theirs.run(newer, [2]))
    saving.start()
    while (tmp_path / names.WRITER).read_bytes() == claims:
        assert saving.is_alive()
    gate.open()
    saving.join()
    with pytest.raises(cnr.errors.WriterError, match="taken over"):
        older.wait_until_finished()
    assert steps_in(tmp_path) == {1, 2}
    theirs.check(newer, 2)
    older.close()
    newer.close()


def test_a_plain_manager_with_our_handler_notices_another_writer_too(
    tiny_run: Any, tmp_path: Path
) -> None:
    mine, theirs = tiny_run(), tiny_run(salt=1)
    options = cnr.Options(codec="raw")
    registry = cnr.handler_registry(mine.tables, options)
    with ocp.CheckpointManager(tmp_path, handler_registry=registry) as plain:
        mine.run(plain, [1])
        with open_manager(tmp_path, theirs) as newer:
            theirs.restore(newer, 1)
            theirs.run(newer, [2])
        with pytest.raises(cnr.errors.WriterError, match="taken over"):
            mine.run(plain, [3])
        assert steps_in(tmp_path) == {1, 2}


def test_steps_of_plain_orbax_in_the_root_are_noticed_and_never_overwritten(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with open_manager(tmp_path, run, max_to_keep=1) as manager:
        run.run(manager, [1, 2])
        with ocp.CheckpointManager(tmp_path) as plain:
            plain.save(4, args=ocp.args.StandardSave({"x": jnp.arange(3)}))
        run.run(manager, [3])
        assert manager.all_steps() == [1, 2, 3]  # those that can be restored here
        assert steps_in(tmp_path) == {1, 2, 3, 4}
        run.train(4)
        with pytest.raises(cnr.errors.DependentsExistError, match="step 4 cannot") as e:
            run.save(manager, 4)
        assert e.value.kind == "step_exists"
        with pytest.raises(cnr.errors.DependentsExistError, match="4 depend on it, or"):
            manager.delete(3)
        run.run(manager, [5])
        run.check(manager, 5)
        assert steps_in(tmp_path) == {1, 2, 3, 4, 5}
    with ocp.CheckpointManager(tmp_path) as plain:
        restored = plain.restore(4, args=ocp.args.StandardRestore())
        np.testing.assert_array_equal(restored["x"], np.arange(3))


def test_steps_that_others_took_away_are_no_parents(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with open_manager(tmp_path, run) as manager:
        run.run(manager, [1, 2])
        shutil.rmtree(tmp_path / "2")
        run.run(manager, [3])
        assert run.manifest(manager, 3).kind == "full"
        assert set(manager.all_steps()) == {1, 3}
        run.check(manager, 3)


@pytest.mark.parametrize("new_run", [False, True])
def test_a_plain_manager_knows_its_first_save_again_after_an_outage_of_reads(
    tmp_path: Path, new_run: bool
) -> None:
    state = {"user": jnp.arange(400.0).reshape(100, 4), "step": jnp.int32(0)}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw", new_run=new_run)
    registry = cnr.handler_registry(tables, options)
    touched, is_out = cnr.init_touched(state, tables), False

    def deny(call: inprocess.Call) -> None:
        if is_out and "/1/" in str(call):
            raise OSError(errno.EIO, "out of order")

    with (
        inprocess.watching(tmp_path, before=deny, looks=True),
        ocp.CheckpointManager(tmp_path, handler_registry=registry) as manager,
    ):
        for step in (1, 2, 3, 4):
            is_out = step == 2
            args = cnr.args.Save({**state, "step": jnp.int32(step)}, touched)
            if is_out:
                with pytest.raises(cnr.errors.SaveError, match="save of step 1"):
                    manager.save(step, args=args)
            else:
                manager.save(step, args=args)
                manager.wait_until_finished()
    assert steps_in(tmp_path) == {1, 3, 4} and not list(tmp_path.glob("earlier-*"))
    with cnr.CheckpointManager(tmp_path, tables=tables) as reader:
        assert reader.all_steps() == [1, 3, 4]
