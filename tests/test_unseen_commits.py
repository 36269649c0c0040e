"""Saves that are committed though storage does not show it, where roots are not looked through.

Storage services are listed only in doubt: what the manager remembers must not become a lie.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import cnr_jax as cnr
from cnr_jax.policy import Decision, SaveRecord
from cnr_jax.testing import inprocess

from .conftest import Keep


class Told:
    """A policy that does what the test wants: a delta on the step before, or a full one."""

    name: ClassVar[str] = "told"
    kind = "full"

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        if self.kind == "full" or not history:
            return Decision(kind="full", parent=None, reason="told so")
        return Decision(kind="delta", parent=history[-1].step, reason="told so")


@pytest.fixture
def opened(
    tiny_run: Any, tmp_path: Path, seldom_listed: None
) -> tuple[Any, Any, Told, Keep]:
    """A run, and a manager that takes its root for one that is dear to list."""
    run, policy, keep = tiny_run(), Told(), Keep(1)
    options = cnr.Options(codec="raw", policy=policy, preservation_policy=keep)
    manager = cnr.CheckpointManager(tmp_path, tables=run.tables, options=options)
    return run, manager, policy, keep


def test_what_an_unseen_commit_made_superfluous_is_no_parent(
    opened: Any, storage: Any
) -> None:
    run, manager, policy, keep = opened
    run.run(manager, [1])
    keep.steps = {2}
    with storage.failing("/2/default/manifest.json", "open_read", "EACCES"):
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
    opened: Any, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, manager, _, keep = opened
    keep.steps = {10, 20, 30, 40}

    def seen(name: str) -> bool:
        return f"step {name} has appeared in the root" in caplog.text

    run.run(manager, [10])
    (manager.directory / "1").mkdir()  # which only a look at the root can show
    with storage.failing("/manifest.json"):
        run.train(20)
        run.save(manager, 20)
        with pytest.raises(cnr.errors.SaveError, match="No space"):
            manager.wait_until_finished()
    assert manager.all_steps() == [10], "nothing was deleted for it"
    assert not seen("1")
    run.run(manager, [30])
    assert seen("1")
    (manager.directory / "2").mkdir()
    run.run(manager, [40])
    assert not seen("2")
    manager.close()


def test_steps_that_come_back_after_a_failed_rollback_are_listed(
    opened: Any, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, manager, _, keep = opened
    keep.steps = {1, 2, 3}
    run.run(manager, [1, 2])
    run.restore(manager, 1)
    run.salt = 1
    run.train(2)
    with storage.failing("/manifest.json"), caplog.at_level(logging.WARNING):
        manager.save(2, args=cnr.args.Save(run.state, run.touched))
        with pytest.raises(cnr.errors.SaveError, match="No space"):
            manager.wait_until_finished()
    assert "1 step back: 2" in caplog.text
    assert manager.all_steps() == [1, 2]
    run.check(manager, 2)
    manager.close()


def test_steps_that_are_not_deleted_after_all_stay_in_the_list(
    opened: Any, storage: Any
) -> None:
    """A commit that could not be made durable: nothing goes in its favour."""
    run, manager, _, keep = opened
    run.run(manager, [1])
    keep.steps = {2}

    def fail(call: inprocess.Call) -> None:
        is_root = call.path == str(manager.directory)
        if call.call == "fsync" and is_root and (manager.directory / "2").exists():
            raise OSError(errno.EIO, "Input/output error")

    with inprocess.watching(manager.directory, before=fail):
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
