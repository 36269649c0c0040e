"""Saves that fail after steps of an abandoned branch were moved out of their way."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format.names import REMOVED_MARK
from cnr_jax.repository.upkeep.claim import Claim, WritingLock, read_writer

from .conftest import each_of


class Run:
    """A manager that has saved some steps and gone back to the first of them."""

    def __init__(
        self, root: Path, *steps: int, policy: Any = None, **options: Any
    ) -> None:
        self.root = root
        self.state = {"user": jnp.arange(32.0).reshape(8, 4), "w": jnp.ones(3)}
        self.tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.manager: Any = cnr.CheckpointManager(
            root,
            tables=self.tables,
            options=cnr.Options(policy=policy or cnr.Intermittent()),
            orbax_options=ocp.CheckpointManagerOptions(**options),
        )
        for step in steps:
            self.save(step, loss=step)
        self.manager.wait_until_finished()
        self.state, self.touched = self.manager.restore(
            steps[0], args=cnr.args.Restore(self.state)
        )

    def save(self, step: int, loss: float = 0.0) -> None:
        args = cnr.args.Save(self.state, self.touched)
        self.manager.save(step, args=args, metrics={"loss": loss}, force=True)

    def check(self, steps: list[int]) -> None:
        """These steps are there, and listed, and restore; the newest can be deleted."""
        folders = {
            path.name
            for path in self.root.iterdir()
            if path.is_dir() and REMOVED_MARK not in path.name
        }
        assert folders == {str(step) for step in steps}
        assert self.manager.all_steps() == steps
        for step in steps:
            self.manager.restore(step, args=cnr.args.Restore(self.state))
        self.manager.delete(steps[-1])
        self.manager.close()


def test_a_failed_save_is_not_taken_for_the_step_that_comes_back(
    tmp_path: Path, storage: Any
) -> None:
    run = Run(tmp_path, 1, 2)
    with storage.failing("/manifest.json"):
        run.save(2)
        with pytest.raises(cnr.errors.SaveError) as raised:
            run.manager.wait_until_finished()
    assert raised.value.kind == "save_failed"
    assert raised.value.errno == errno.ENOSPC
    run.check([1, 2])


def test_a_failed_save_that_retention_would_have_dropped_brings_back_the_old_step(
    tmp_path: Path, storage: Any
) -> None:
    best = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "max"}
    run = Run(tmp_path, 1, 2, max_to_keep=1, **best)
    with storage.failing("/manifest.json"):
        run.save(2, loss=0.1)
        with pytest.raises(cnr.errors.SaveError, match="step 2 failed"):
            run.manager.wait_until_finished()
    run.check([1, 2])


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "no space")


def test_an_error_before_orbax_begins_gives_steps_and_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "3")  # another program: the steps have to be listed anew
    with monkeypatch.context() as patch:
        patch.setattr(run.manager._steps, "reload", no_space)
        with pytest.raises(cnr.errors.SaveError, match="no space"):
            run.save(2)
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as other:
        assert other.save(4, args=cnr.args.Save(run.state, run.touched))
    shutil.rmtree(tmp_path / "4")
    run.manager.reload()
    run.check([1, 2])


def test_a_save_that_orbax_refuses_leaves_all_steps_usable(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 2, 3)
    items = ocp.args.Composite(default=cnr.args.Save(run.state, run.touched))
    with pytest.raises(ValueError, match="Composite"):
        run.manager.save(2, args=items, force=True)
    run.check([1, 2, 3])


def test_a_read_only_manager_writes_nothing(tmp_path: Path) -> None:
    Run(tmp_path, 1, 2).manager.close()
    for name in ("cnr_jax.writer.json", "cnr_jax.writer.lock"):
        os.remove(tmp_path / name)
    before = sorted(path.name for path in tmp_path.iterdir())
    state = {"user": jnp.zeros((8, 4)), "w": jnp.zeros(3)}
    reader: Any = cnr.CheckpointManager(
        tmp_path,
        tables=cnr.find_tables(state, ["user"]),
        orbax_options=ocp.CheckpointManagerOptions(read_only=True),
    )
    found = reader.restore(1, args=cnr.args.Restore(state))
    args = cnr.args.Save(found.state, found.touched)
    assert not reader.save(2, args=args, force=True)
    reader.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.fixture
def gone_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that went back from step 3 to 1, saved another step 2, and could not note that."""
    run = Run(tmp_path / "root", 1, 2, 3, policy=cnr.Consecutive())
    note = Claim.note_aside

    with monkeypatch.context() as patch:
        patch.setattr(Claim, "note_aside", lambda *given: given[1] and note(*given))
        run.save(2)
        run.manager.wait_until_finished()
    return run


def other_manager(run: Run, root: Path) -> Any:
    """Another manager of the run, which has restored step 2 and claims nothing."""
    manager: Any = cnr.CheckpointManager(root, tables=run.tables)
    assert manager.all_steps() == [1, 2]
    manager.restore(None, args=cnr.args.Restore(run.state))
    return manager


@pytest.fixture
def killed(gone_back: Run, tmp_path: Path) -> Any:
    """Another manager of the run, which was killed at that moment."""
    shutil.copytree(gone_back.root, tmp_path / "killed")
    gone_back.manager.close()
    gone_back.root = tmp_path / "killed"
    return other_manager(gone_back, gone_back.root)


def check_stays_away(run: Run) -> None:
    """Step 2 is gone, and another manager does not bring back what had made way for it."""
    with cnr.CheckpointManager(run.root, tables=run.tables) as manager:
        assert manager.all_steps() == [1]
        found = manager.restore(None, args=cnr.args.Restore(run.state))
        assert manager.save(2, args=cnr.args.Save(found.state, found.touched))


def test_what_made_way_for_a_step_of_a_killed_program_stays_away_when_that_is_deleted(
    gone_back: Run, killed: Any
) -> None:
    before = read_writer(gone_back.root)
    assert before is not None and before.aside is not None
    killed.delete(2)
    assert read_writer(gone_back.root) == before, "who has the claim may be alive"
    killed.close()
    check_stays_away(gone_back)


def test_what_made_way_stays_away_from_the_program_that_had_moved_it(
    gone_back: Run,
) -> None:
    with other_manager(gone_back, gone_back.root) as other:
        other.delete(2)
    gone_back.manager.wait_until_finished()
    gone_back.manager.reload()
    assert gone_back.manager.all_steps() == [1]
    gone_back.save(5)
    gone_back.manager.wait_until_finished()
    assert gone_back.manager.all_steps() == [1, 5]
    gone_back.manager.close()


def test_a_name_that_is_taken_is_not_given_again(gone_back: Run, killed: Any) -> None:
    (left,) = gone_back.root.glob("2.abandoned-g1-*")
    taken = left.with_name(left.name.replace("-g1-", "-g2-"))
    taken.mkdir()
    killed.delete(2)
    assert not left.exists() and not [*taken.iterdir()]
    assert [*gone_back.root.glob("2.abandoned-g3-*/default/manifest.json")]
    killed.close()
    check_stays_away(gone_back)


def test_a_manifest_that_cannot_be_read_brings_nothing_back(
    gone_back: Run, killed: Any, storage: Any
) -> None:
    killed.close()
    with storage.failing("/2/default/manifest.json", "open_read", "EIO"):
        cnr.CheckpointManager(gone_back.root, tables=gone_back.tables).close()
    folders = [path.name for path in gone_back.root.iterdir() if path.is_dir()]
    assert sorted(name.partition("-")[0] for name in folders) == [
        "1",
        "2",
        "2.abandoned",
        "3.abandoned",
    ]


@each_of("damage", [True, False])
def test_an_earlier_run_stays_away_if_the_manifest_of_the_new_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Any, damage: bool
) -> None:
    tmp_path = tmp_path / str(damage)
    old, note = Run(tmp_path / "root", 10, 20), Claim.note_aside
    old.manager.close()
    options = cnr.Options(new_run=True)
    with monkeypatch.context() as patch:
        patch.setattr(Claim, "note_aside", lambda *given: given[1] and note(*given))
        new: Any = cnr.CheckpointManager(old.root, tables=old.tables, options=options)
        new.save(
            15, args=cnr.args.Save(old.state, cnr.init_touched(old.state, old.tables))
        )
        new.wait_until_finished()
        killed = tmp_path / "killed"
        shutil.copytree(old.root, killed)
        new.close()
    manifest = killed / "15/default/manifest.json"
    failing: Any = storage.failing("/15/default/manifest.json", "open_read", "EIO")
    if damage:
        manifest.write_bytes(manifest.read_bytes()[:-20])
        failing = contextlib.nullcontext()
    with failing:
        cnr.CheckpointManager(killed, tables=old.tables).close()
    steps = [path.name for path in killed.iterdir() if path.is_dir()]
    assert sorted(name[:8] for name in steps) == ["15", "earlier-"]


@pytest.mark.parametrize(
    ("match", "call", "stays"),
    [
        ("/2.abandoned-g2-", "rename", True),
        ("/2/default/manifest.json", "open_read", False),
        ("/cnr_jax.writer.json", "open_read", True),
    ],
)
def test_what_made_way_stays_away_whatever_fails(
    gone_back: Run, killed: Any, storage: Any, match: str, call: str, stays: bool
) -> None:
    refused = pytest.raises(OSError) if stays else contextlib.nullcontext()
    with storage.failing(match, call, "EIO"), refused:
        killed.delete(2)
    assert killed.all_steps() == [1, 2][: 1 + stays]
    if stays:
        killed.delete(2)
    killed.close()
    check_stays_away(gone_back)


def test_who_may_not_read_the_claim_may_delete(
    gone_back: Run, killed: Any, storage: Any
) -> None:
    with storage.failing("/cnr_jax.writer.json", "open_read", "EACCES"):
        killed.delete(2)
    assert killed.all_steps() == [1]
    killed.close()
    with cnr.CheckpointManager(gone_back.root, tables=gone_back.tables) as manager:
        assert manager.all_steps() == [1, 2, 3], "nobody could know what made way"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system knows no fork")
def test_a_forked_worker_does_not_hold_the_lock_of_a_killed_trainer(
    tmp_path: Path,
) -> None:
    program = """
        import os, signal, sys, time
        from pathlib import Path
        from cnr_jax.repository.upkeep.claim import WritingLock
        lock = WritingLock(Path(sys.argv[1]))
        assert lock.acquire(0)
        child = os.fork()
        if child == 0:
            os.close(1)  # the test waits for the end of what the trainer prints
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    worker = int(done.stdout)
    try:
        os.kill(worker, 0)  # it lives
        assert WritingLock(tmp_path).acquire(10)
    finally:
        os.kill(worker, 9)
