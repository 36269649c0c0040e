"""Copies of items and items under other names in some steps; steps whose names are no UTF-8."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_jax as cnr
from cnr_jax import errors

ODD = os.fsdecode(b"\xf33")
# Before and after `default` in the order of names.
COPIES = (".default.bak", "Copy of default", "alte", "default copy", "old")


@pytest.fixture
def saved(tiny_run: Any, opened: Any, tmp_path: Path) -> Any:
    """A run of steps 8 to 11, of which 8 is full."""
    run = tiny_run()
    with opened(run) as manager:
        run.run(manager, [8, 9, 10, 11])
    return run


def whole(run: Any, opened: Any, root: Path) -> None:
    """Checks that the newest step restores, and saves another one."""
    assert cnr.describe(root).latest_step == max(run.truth)
    assert [step for step in cnr.describe(root).steps if step.problem] == []
    assert all(fate.stays for fate in cnr.prune(root, keep=9).fates)
    newest = cnr.read_rows(root, "user", list(range(64)))
    given = cnr.read_rows(root, "user", list(range(64)), step=max(run.truth))
    np.testing.assert_array_equal(newest, given)
    with opened(run) as manager:
        assert manager.latest_step() == max(run.truth)
        run.restore(manager, None)
        run.same(run.state, run.truth[max(run.truth)])
        run.run(manager, [max(run.truth) + 1])


def test_a_copy_of_an_item_is_none(saved: Any, opened: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in COPIES:
        newest = str(max(saved.truth))
        shutil.copytree(root / newest / "default", root / newest / name)
        found = cnr.verify(root)
        assert {p.consequence for p in found} == {()}
        assert (newest, name, "file_unknown") in {
            (p.directory, p.file, p.kind) for p in found
        }
        whole(saved, opened, root)
    # One that was not copied to its end, and one of which Orbax has noted nothing.
    (root / "9" / "half").mkdir()
    shutil.copytree(root / "9/default/rows.p00000", root / "9/half/rows.p00000")
    (root / "11" / "_CHECKPOINT_METADATA").unlink()
    assert {p.consequence for p in cnr.verify(root)} == {()}
    whole(saved, opened, root)


def test_damage_of_a_copied_step_harms_the_copy_alone(
    saved: Any, opened: Any, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(root / "10", root / "backup_10")
    (root / "backup_10/default/manifest.p00000.json").unlink()
    found = cnr.describe(root)
    assert found.latest_step == 11
    assert [s.directory for s in found.steps if s.problem] == ["backup_10"]
    with cnr.CheckpointManager(root, tables=saved.tables) as manager:
        (problem,) = manager.verify()
        assert problem.consequence == ("backup_10",)
        assert manager.latest_step() == 11
        saved.restore(manager, None)
    with opened(saved) as manager:
        saved.restore(manager, None)
        saved.run(manager, [12])
    assert cnr.describe(root).steps[-1].kind == "delta"


@pytest.mark.parametrize("copies", [[8, 9], [8, 9, 10], [8, 9, 10, 11]])
@pytest.mark.parametrize("policy", [cnr.OneShot(), cnr.Full()])
def test_copies_are_never_pruned_however_many_they_are(
    tiny_run: Any, opened: Any, tmp_path: Path, policy: Any, copies: list[int]
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run, policy=policy) as manager:
        run.run(manager, [8, 9, 10, 11])
    for step in copies:
        shutil.copytree(root / str(step), root / f"backup_{step}")
    shutil.rmtree(root / "9")  # as retention does, which knows no copies
    before = {path.name for path in root.iterdir()}
    told = cnr.prune(root, keep=1, delete=True, writer_is_dead=True)
    going = {fate.name for fate in told.going}
    assert before - going <= {path.name for path in root.iterdir()}
    if not isinstance(policy, cnr.Full):
        assert going == {"10"}
        return
    # No manifest names another step: where copies are as many, nothing tells which they are.
    assert going == ({"8", "10"} if len(copies) < 3 else set())
    told_why = {fate.reason for fate in told.fates if fate.step != 11}
    assert len(copies) < 3 or all("which are copies" in reason for reason in told_why)


@pytest.mark.parametrize("step", [11, 10, 8])
@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.Full()])
def test_a_step_that_was_renamed_is_none_to_those_who_look_either(
    tiny_run: Any, opened: Any, tmp_path: Path, policy: Any, step: int
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run, policy=policy) as manager:
        run.run(manager, [8, 9, 10, 11])
    (root / str(step)).rename(root / f"backup_{step}")
    found = cnr.describe(root)
    shown = {s.directory: s.problem for s in found.steps}
    assert "not called as the other steps" in shown[f"backup_{step}"]
    with cnr.CheckpointManager(root, tables=run.tables) as manager:
        assert manager.latest_step() == found.latest_step
        assert manager.all_steps() == [s.step for s in found.steps if not s.problem]
    if found.latest_step is None:
        with pytest.raises(errors.NoStepError, match="not called as"):
            cnr.read_rows(root, "user", [0])
    else:
        newest = cnr.read_rows(root, "user", [0])
        given = cnr.read_rows(root, "user", [0], step=found.latest_step)
        np.testing.assert_array_equal(newest, given)


def test_an_item_that_is_renamed_in_one_step_hides_no_others(
    saved: Any, opened: Any, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "11" / "default").rename(root / "11" / "alte")
    assert cnr.describe(root).latest_step == 10
    assert cnr.read_rows(root, "user", [0]).shape[0] == 1
    (root / "11" / "alte").rename(root / "11" / "default")
    (root / "9" / "default").rename(root / "9" / "alte")
    assert cnr.describe(root).latest_step == 8
    with opened(saved) as manager:
        assert manager.latest_step() == 8
        saved.check(manager, 8)
    (root / "9" / "alte").rename(root / "9" / "default")
    whole(saved, opened, root)


def test_a_folder_whose_name_is_no_utf8_is_no_step(
    saved: Any, opened: Any, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(root / "8", root / ODD)
    shutil.copytree(root / "9" / "default", root / "9" / ODD)
    found = cnr.verify(root)
    assert [(p.directory, p.file, p.consequence) for p in found] == [("9", ODD, ())]
    whole(saved, opened, root)
    with pytest.raises(errors.OptionError, match="item"):
        cnr.read_rows(root, "user", [0], step=9, item=ODD)
    for at in (root / ODD, root.rename(tmp_path / ODD)):
        calls: list[Callable[[], object]] = [
            lambda at=at: cnr.verify(at),
            lambda at=at: cnr.describe(at),
            lambda at=at: cnr.prune(at, keep=1),
            lambda at=at: cnr.read_rows(at, "user", [0]),
            lambda at=at: cnr.export(at, None, tmp_path / "to"),
            lambda at=at: saved.open(at, {}),
        ]
        for call in calls:
            with pytest.raises(errors.OptionError, match="UTF-8"):
                call()
