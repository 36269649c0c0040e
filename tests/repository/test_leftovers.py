"""Folders of failed saves, into which threads of Orbax may still write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from etils import epath

from cnr_jax.format.names import TEMPORARY_SUFFIX
from cnr_jax.repository.upkeep.removal import Remover
from cnr_jax.repository.upkeep.unfinished import Unfinished

NAME = f"2{TEMPORARY_SUFFIX}"


@pytest.fixture(params=["renamed", "deleted"])
def unfinished(request: pytest.FixtureRequest, tmp_path: Path) -> Unfinished:
    if request.param == "deleted":
        return Unfinished(epath.Path(tmp_path), None)
    return Unfinished(tmp_path, Remover(tmp_path))


def clear(unfinished: Unfinished) -> None:
    """Takes out of the way what is there, and waits until it is deleted."""
    unfinished.clear()
    unfinished.wait_for_room()


def write(root: Path) -> None:
    (root / NAME / "default").mkdir(parents=True)
    (root / NAME / "default" / "array").write_bytes(b"some")


def test_a_folder_that_comes_back_is_removed_before_the_next_save(
    unfinished: Unfinished, tmp_path: Path
) -> None:
    write(tmp_path)
    unfinished.add(NAME)
    clear(unfinished)  # when the save has failed
    assert not list(tmp_path.iterdir())
    write(tmp_path)  # by a thread that had not ended
    clear(unfinished)  # when the next save begins
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_later_save_is_left_alone(
    unfinished: Unfinished, tmp_path: Path
) -> None:
    unfinished.add(NAME)
    clear(unfinished)
    clear(unfinished)
    write(tmp_path)
    clear(unfinished)
    assert (tmp_path / NAME / "default" / "array").exists()


def test_what_cannot_be_removed_is_looked_for_twice_after_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = Unfinished(tmp_path, Remover(tmp_path))
    write(tmp_path)
    unfinished.add(NAME)
    with monkeypatch.context() as context:
        context.setattr(os, "rename", _refuse)
        clear(unfinished)
    assert (tmp_path / NAME).exists()
    clear(unfinished)
    assert not list(tmp_path.iterdir())
    write(tmp_path)
    clear(unfinished)
    assert not list(tmp_path.iterdir())


def _refuse(*_: object) -> None:
    raise PermissionError("not now")
