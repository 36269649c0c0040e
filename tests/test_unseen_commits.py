"""Saves that are committed though storage does not show it, where roots are not looked through.

Storage services are listed only in doubt: what the manager remembers must not become a lie.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import cnr_jax as cnr
from cnr_jax.policy import Decision, SaveRecord
from cnr_jax.repository.lineage import ledger
from cnr_jax.repository.upkeep import writer
from cnr_jax.repository.upkeep.removal import Remover


class Told:
    """A policy that does what the test wants: a delta on the step before, or a full one."""

    name: ClassVar[str] = "told"
    kind = "full"

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        if self.kind == "full" or not history:
            return Decision(kind="full", parent=None, reason="told so")
        return Decision(kind="delta", parent=history[-1].step, reason="told so")


class Keep:
    """A preservation policy that keeps the steps it is told."""

    def __init__(self, *steps: int) -> None:
        self.steps = set(steps)

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        return [info.step in self.steps for info in checkpoints]


@pytest.fixture
def opened(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any, Told, Keep]:
    """A run, and a manager that takes its root for one that is dear to list."""
    monkeypatch.setattr(writer, "is_local", lambda path: False)
    run, policy, keep = tiny_run(), Told(), Keep(1)
    options = cnr.Options(codec="raw", policy=policy, preservation_policy=keep)
    manager = cnr.CheckpointManager(tmp_path, tables=run.tables, options=options)
    return run, manager, policy, keep


def hidden(step: int) -> Callable[..., Any]:
    """Storage that does not give out the manifest of a step."""
    read = ledger.read_committed

    def failing(root: Any, directory: str, item: str) -> Any:
        if directory == str(step):
            raise OSError(errno.EIO, "Input/output error", str(root / directory))
        return read(root, directory, item)

    return failing


def test_what_an_unseen_commit_made_superfluous_is_no_parent(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, manager, policy, keep = opened
    run.run(manager, [1])
    keep.steps = {2}
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "read_committed", hidden(2))
        run.train(2)
        run.save(manager, 2)
        with pytest.raises(cnr.errors.SaveError):
            manager.wait_until_finished()
    assert not (manager.directory / "1").exists()
    assert manager.all_steps() == []
    policy.kind, keep.steps = "delta", {2, 3}
    run.run(manager, [3])
    assert manager.all_steps() == [2, 3], "the root was looked through"
    run.check(manager, 3)
    run.check(manager, 2)
    manager.close()


def test_a_save_that_retention_drops_takes_others_out_of_the_list_too(
    opened: Any,
) -> None:
    run, manager, policy, keep = opened
    keep.steps = {1, 2}
    run.run(manager, [1])
    policy.kind = "delta"
    run.run(manager, [2])
    policy.kind, keep.steps = "full", {1}
    run.run(manager, [3])
    assert manager.all_steps() == [1]
    policy.kind, keep.steps = "delta", {1, 4}
    run.run(manager, [4])
    run.check(manager, 4)
    manager.close()


def test_after_a_failed_save_the_root_is_looked_through_once(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, manager, *_ = opened
    looks: list[Any] = []
    refresh = ledger.Ledger.refresh

    def noted(self: Any, *args: Any) -> bool:
        looks.append(args)
        return refresh(self, *args)

    def fail(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(ledger.Ledger, "refresh", noted)
    run.run(manager, [1])
    looks.clear()  # before a first save it is seen whether another run is there
    with monkeypatch.context() as patch:
        patch.setattr("cnr_jax.handler.write_manifest", fail)
        run.train(2)
        run.save(manager, 2)
        with pytest.raises(cnr.errors.SaveError, match="no space"):
            manager.wait_until_finished()
    assert manager.all_steps() == [1], "nothing was deleted for it"
    assert looks == []
    run.run(manager, [3])
    assert len(looks) == 1
    run.run(manager, [4])
    assert len(looks) == 1
    manager.close()


def test_steps_that_come_back_after_a_failed_rollback_are_listed(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, manager, _, keep = opened
    keep.steps = {1, 2, 3}
    run.run(manager, [1, 2])
    run.restore(manager, 1)
    run.salt = 1
    run.train(2)

    def fail(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("cnr_jax.handler.write_manifest", fail)
        manager.save(2, args=cnr.args.Save(run.state, run.touched))
        with pytest.raises(cnr.errors.SaveError, match="no space"):
            manager.wait_until_finished()
    assert "steps 2 are back" in caplog.text
    assert manager.all_steps() == [1, 2]
    run.check(manager, 2)
    manager.close()


def test_steps_that_are_not_deleted_after_all_stay_in_the_list(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that could not be made durable: nothing goes in its favour."""
    run, manager, _, keep = opened
    run.run(manager, [1])
    keep.steps = {2}

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("cnr_jax.checkpointer.saving.ending.sync_committed", fail)
        patch.setattr(Remover, "remove", fail)
        run.train(2)
        run.save(manager, 2)
        with pytest.raises(cnr.errors.SaveError, match="Input/output error"):
            manager.wait_until_finished()
    assert manager.all_steps() == [1, 2]
    run.check(manager, 1)
    keep.steps = {3}
    run.run(manager, [3])
    assert manager.all_steps() == [3]
    assert not (manager.directory / "1").exists()
    manager.close()
