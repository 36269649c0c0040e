"""A near root that has no more room: saves go to the root of the run itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors

from .conftest import each_of
from .test_mirrors import caught_up, far, harm, steps_in, until
from .test_near import fails

__all__ = ["far"]  # a fixture
# Bytes of the file system in memory. A save of the tiny run takes some dozens of KiB.
_ALL = 4 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory, such as /dev/shm is in a container."""
    place = tmp_path / "shm"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_ALL}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, left: int) -> Callable[[], None]:
    """Fills a file system but for some bytes; returns what undoes it."""
    found = os.statvfs(place)
    file = place / "of-others"
    file.write_bytes(b"\0" * (found.f_bavail * found.f_frsize - left))
    return file.unlink


@pytest.mark.parametrize("tracking", ["recorded", "fingerprint"])
def test_a_save_that_does_not_fit_goes_to_the_root(
    tiny_run: Any, small: Path, far: epath.Path, tracking: str
) -> None:
    run, root = tiny_run(), f"{far}-{tracking}"
    options = {"near": small / "run", "tracking": tracking}
    with run.open(root, **options) as manager:
        run.run(manager, [0, 1, 2])
        assert manager.last_report.near_problem == ""
        caught_up(manager)
        empty = fill(small, 100_000)
        run.run(manager, [3, 4])
        report = manager.last_report
        assert report.near_problem.startswith(f"{small}/run has room for ")
        assert report.kind == "delta" and report.mirror_lag_steps is None
        assert str(manager.directory) == root and manager.mirror_report is None
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        run.check(manager, 4)
        run.restore(manager, 3)
        run.salt = 1
        run.run(manager, [4, 5])
        assert manager.last_report.kind == "delta"
    assert steps_in(small / "run") == []
    assert harm(epath.Path(root)) == []
    with run.open(root) as manager:
        assert manager.all_steps() == [0, 1, 2, 3, 4, 5]
        for step in manager.all_steps():
            run.check(manager, step)
    empty()
    undo = fill(small, 100_000)
    with run.open(root, **options) as manager:
        assert str(manager.directory) == root, "there is no room yet"
    undo()
    with run.open(root, **options) as manager:
        assert str(manager.directory) == str(small / "run")
        assert manager.latest_step() == 5 and steps_in(small / "run")


def test_it_fails_as_long_as_the_root_lacks_steps(
    tiny_run: Any, small: Path, far: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    with run.open(str(far), near=small / "run") as manager:
        run.run(manager, [0])
        caught_up(manager)
        with monkeypatch.context() as patch:
            patch.setattr("cnr_jax.repository.mirroring.copier.copy_files", fails)
            run.run(manager, [1])
            until(lambda: manager.mirror_report.problems)
            free = fill(small, 100_000)
            run.train(2)
            with pytest.raises(errors.SaveError, match="1 step is not in") as caught:
                run.save(manager, 2)
            assert caught.value.kind == "no_room" and caught.value.step == 2
            assert steps_in(small / "run") == ["0", "1"]
        free()
        run.run(manager, [3])
        caught_up(manager)
        assert manager.last_report.near_problem == ""
        run.check(manager, 3)
    assert steps_in(far) == ["0", "1", "3"] and harm(far) == []


def test_a_root_that_cannot_be_claimed_is_tried_again(
    tiny_run: Any, small: Path, far: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    with run.open(str(far), near=small / "run") as manager:
        run.run(manager, [0])
        caught_up(manager)
        fill(small, 100_000)
        run.train(1)
        with monkeypatch.context() as patch:
            patch.setattr("cnr_jax.repository.index.ledger.Ledger.load", fails)
            with pytest.raises(errors.CnrError):
                run.save(manager, 1)
        run.run(manager, [2])
        run.check(manager, 2)
        assert manager.last_report.kind == "delta"
    assert steps_in(far) == ["0", "2"] and harm(far) == []


def test_saves_in_flight_are_waited_for(
    tiny_run: Any, small: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(far), near=small / "run", max_in_flight=3) as manager:
        run.run(manager, [0])
        caught_up(manager)
        undo = fill(small, 1_000_000)
        step = 0
        while not manager.last_report.near_problem:
            step += 1
            run.train(step)
            try:
                run.save(manager, step)
            except errors.SaveError as error:
                assert error.kind == "no_room"
                caught_up(manager)
        manager.wait_until_finished()
        undo()
        run.run(manager, [step + 1])
        run.check(manager, None)
    assert harm(far) == []
    with cnr.CheckpointManager(str(far)) as manager:
        assert manager.latest_step() == step + 1


STAGES = {
    "the mirror ends": "cnr_jax.repository.mirroring.mirror.Mirror.close",
    "near is emptied": "cnr_jax.checkpointer.saving.retirement.Retirement.remove",
    "near is left": "cnr_jax.checkpointer.saving.pipeline.SavePipeline.close",
    "the root is bound": "cnr_jax.repository.upkeep.writer.RootWriter.bind",
    "the root is opened": "cnr_jax.checkpointer.listing.Listing.open",
    "steps are read": "cnr_jax.checkpointer.orbax_compat.steps.Steps.reload",
}


@each_of("late", [False, True])
@each_of("stage", [*STAGES])
@each_of("then", ["save", "restore"])
def test_an_interrupt_at_any_stage_loses_nothing(
    tiny_run: Any,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
    stage: str,
    then: str,
) -> None:
    run, case = tiny_run(), f"{then}-{stage}-{late}"
    root, near = tmp_path / f"far-{case}", small / f"run-{case}"
    with run.open(root, near=near) as manager:
        run.run(manager, [0, 1])
        caught_up(manager)
        undo = fill(small, 100_000)
        run.train(2)
        with monkeypatch.context() as patch:
            patch.setattr(STAGES[stage], interrupting(STAGES[stage], late=late))
            with pytest.raises(KeyboardInterrupt):
                run.save(manager, 2)
        if then == "restore":
            run.restore(manager, None)
            run.same(run.state, run.truth[1])
        run.run(manager, [3])
        assert manager.last_report.kind == "delta"
        assert manager.last_report.near_problem
        assert manager.all_steps() == [0, 1, 3]
        run.check(manager, 3)
        run.check(manager, 0)
    undo()
    assert steps_in(root) == ["0", "1", "3"] and harm(epath.Path(root)) == []
    assert steps_in(near) == []


def interrupting(name: str, *, late: bool) -> Callable[..., Any]:
    """A method that is interrupted once, before it does anything or after it has."""
    owner, method = name.rsplit(".", 1)
    module, cls = owner.rsplit(".", 1)
    real, done = getattr(getattr(import_module(module), cls), method), list[bool]()

    def called(*args: Any, **kwargs: Any) -> Any:
        if late:
            found = real(*args, **kwargs)
        if not done:
            done.append(True)
            raise KeyboardInterrupt
        return found if late else real(*args, **kwargs)

    return called
