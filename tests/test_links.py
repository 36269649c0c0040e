"""Whatever is removed from a root: of a link only the link goes, never what it leads to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder outside of any root, which must stay as it is."""
    folder = tmp_path / "victim"
    (folder / "inner").mkdir(parents=True)
    for name in ("precious", "inner/more"):
        (folder / name).write_text(name)
    return folder


def check(victim: Path) -> None:
    found = {path.name for path in victim.rglob("*")}
    assert found == {"precious", "inner", "more"}
    assert (victim / "inner" / "more").read_text() == "inner/more"


def keep(steps: int) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(max_to_keep=steps)


def fulls() -> cnr.Options:
    return cnr.Options(policy=cnr.Full(), codec="raw")


def moved_out(root: Path, step: str, where: Path) -> dict[str, bytes]:
    """Moves a step to another folder and leaves a link; returns its files."""
    (root / step).rename(where)
    (root / step).symlink_to(where)
    return files(where)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("background", [True, False])
def test_retention_removes_of_a_linked_step_the_link(
    tmp_path: Path, tiny_run: Any, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    run, root, elsewhere = tiny_run(), tmp_path / "root", tmp_path / "elsewhere"
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_background_delete=background
    )
    with cnr.CheckpointManager(
        root, tables=run.tables, options=fulls(), orbax_options=options
    ) as manager:
        run.run(manager, range(2))
        before = moved_out(root, "0", elsewhere)
        run.check(manager, 0)
        run.run(manager, range(2, 4))
        assert manager.all_steps() == [2, 3]
    assert files(elsewhere) == before
    assert {p.name for p in root.iterdir() if p.is_dir()} == {"2", "3"}
    assert str(elsewhere) in caplog.text


def test_delete_removes_of_a_linked_step_the_link(
    tmp_path: Path, tiny_run: Any
) -> None:
    run, root, elsewhere = tiny_run(), tmp_path / "root", tmp_path / "elsewhere"
    with cnr.CheckpointManager(root, tables=run.tables, options=fulls()) as manager:
        run.run(manager, range(2))
        before = moved_out(root, "1", elsewhere)
        manager.delete(1)
        assert manager.all_steps() == [0]
    assert files(elsewhere) == before
    assert not (root / "1").is_symlink()


@pytest.mark.parametrize(
    "name",
    ["7.removed-0123456789abcdef", "9.orbax-checkpoint-tmp"],
)
@pytest.mark.parametrize("again", [False, True])
def test_links_that_look_like_leftovers_lose_nothing_behind_them(
    tmp_path: Path, tiny_run: Any, victim: Path, name: str, again: bool
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    steps = iter(range(20))
    if again:  # a manager whose writer is known to be dead clears more
        with cnr.CheckpointManager(root, tables=run.tables, options=fulls()) as manager:
            run.run(manager, [next(steps)])
    root.mkdir(exist_ok=True)
    (root / name).symlink_to(victim)
    with cnr.CheckpointManager(root, tables=run.tables, options=fulls()) as manager:
        if again:
            run.restore(manager, None)
        run.run(manager, [next(steps)])
    check(victim)
    if name != "9.orbax-checkpoint-tmp" or again:
        assert not (root / name).is_symlink()


def test_links_within_what_is_removed_are_not_followed(
    tmp_path: Path, tiny_run: Any, victim: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with cnr.CheckpointManager(
        root, tables=run.tables, options=fulls(), orbax_options=keep(1)
    ) as manager:
        run.run(manager, range(1))
        (root / "0" / "link").symlink_to(victim)
        (root / "0" / "default" / "link").symlink_to(victim)
        (root / "0" / "default" / "file").symlink_to(victim / "precious")
        (root / "0" / "default" / "loop").symlink_to(root / "0")
        run.run(manager, range(1, 3))
    check(victim)
    assert {p.name for p in root.iterdir() if p.is_dir()} == {"2"}


@pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
def test_a_save_under_the_name_of_a_link_writes_nothing_behind_it(
    tmp_path: Path,
    tiny_run: Any,
    victim: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The save fails or takes the link's place, and the run goes on."""
    run, root = tiny_run(), tmp_path / "root"
    caplog.set_level(logging.CRITICAL)
    root.mkdir()
    (root / "0.orbax-checkpoint-tmp").symlink_to(victim)
    with cnr.CheckpointManager(root, tables=run.tables, options=fulls()) as manager:
        run.train(0)
        try:
            run.save(manager, 0)
            manager.wait_until_finished()
        except cnr.errors.SaveError:
            check(victim)
        run.run(manager, range(1, 3))
        run.check(manager, 2)
    check(victim)
