"""Removed directories are no steps from one moment to the next, whatever fails afterwards."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cnr_jax.format import names
from cnr_jax.repository.index.retention import children_first
from cnr_jax.repository.layout import step_directories
from cnr_jax.repository.upkeep.removal import Remover


def make_step(root: Path, name: str) -> Path:
    """A directory with files at several depths, and a link out of it."""
    (root / name / "a" / "b").mkdir(parents=True)
    for path in ("top", "a/middle", "a/b/deep"):
        (root / name / path).write_text(path)
    (root / name / "a" / "link").symlink_to(root)
    return root / name


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def refuse(error: OSError, *words: str) -> Any:
    """What a system call does that fails for paths that contain a word."""

    def call(real: Any) -> Any:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            if any(word in os.fspath(path) for word in words):
                raise error
            return real(path, *args, **kwargs)

        return wrapped

    return call


@pytest.mark.parametrize("background", [False, True])
def test_a_removed_directory_and_all_in_it_are_gone(
    tmp_path: Path, background: bool
) -> None:
    make_step(tmp_path, "1")
    make_step(tmp_path, "2")
    remover = Remover(tmp_path)
    remover.remove("1", background=background)
    assert "1" not in left(tmp_path)
    remover.close()
    assert left(tmp_path) == {"2"}
    assert (tmp_path / "2" / "a" / "b" / "deep").read_text() == "a/b/deep"


def test_before_a_file_is_deleted_the_directory_is_renamed_and_the_root_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step(tmp_path, "7")
    seen: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def note_unlink(path: Any, **kwargs: Any) -> None:
        seen.append("unlink")
        assert step_directories(tmp_path) == []
        unlink(path, **kwargs)

    def note_fsync(descriptor: int) -> None:
        seen.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    monkeypatch.setattr(os, "unlink", note_unlink)
    monkeypatch.setattr(os, "fsync", note_fsync)
    remover = Remover(tmp_path)
    remover.threads = 1
    remover.remove("7", background=False)
    assert seen == [f"sync {tmp_path}", *["unlink"] * 4]


def test_a_directory_that_cannot_be_renamed_is_there_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(tmp_path, "1")
    broken = refuse(OSError(5, "no luck"), "/1")
    monkeypatch.setattr(os, "rename", broken(os.rename))
    with pytest.raises(OSError, match="no luck"):
        Remover(tmp_path).remove("1")
    assert left(tmp_path) == {"1"}
    assert (step / "a" / "b" / "deep").exists()


@pytest.mark.parametrize("keep_in", [None, "trash"])
def test_a_directory_whose_new_name_cannot_be_synced_is_there_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_in: str | None
) -> None:
    make_step(tmp_path, "1")
    remover = Remover(tmp_path)
    if keep_in:
        (tmp_path / keep_in).mkdir()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "no")))
    with pytest.raises(OSError, match="no"):
        remover.keep("1", keep_in) if keep_in else remover.remove("1")
    assert step_directories(tmp_path) == ["1"]
    assert (tmp_path / "1" / "a" / "b" / "deep").exists()


def test_a_directory_that_can_be_neither_synced_nor_moved_back_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut may bring it back, so it must be whole until its name is durable."""
    make_step(tmp_path, "1")
    remover, error = Remover(tmp_path), OSError(5, "no luck")
    fails = mock.Mock(side_effect=error)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        patched.setattr(os, "rename", refuse(error, "removed-")(os.rename))
        remover.remove("1")
    assert step_directories(tmp_path) == [] and "power cut" in caplog.text
    (name,) = left(tmp_path)
    assert (tmp_path / name / "a" / "b" / "deep").exists()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        remover.purge_left([name])
        remover.close()
    assert (tmp_path / name / "a" / "b" / "deep").exists()
    remover.purge_left([name])
    remover.close()
    assert left(tmp_path) == set()


@pytest.mark.parametrize("lost", ["the first", "the second"])
def test_what_a_rename_has_done_is_looked_at_if_its_answer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    make_step(tmp_path, "1")
    remover, error, real = Remover(tmp_path), OSError(5, "no luck"), os.rename
    renamed: list[str] = []

    def rename(source: Any, target: Any, *args: Any) -> None:
        real(source, target, *args)
        renamed.append(os.fspath(source))
        if len(renamed) == ["the first", "the second"].index(lost) + 1:
            raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        if lost == "the first":
            remover.remove("1", background=False)
            assert left(tmp_path) == set()
            return
        patched.setattr(os, "fsync", mock.Mock(side_effect=error))
        with pytest.raises(OSError, match="no luck"):
            remover.remove("1")
    assert step_directories(tmp_path) == ["1"]
    remover.remove("1", background=False)
    assert left(tmp_path) == set()


def test_what_no_reader_lists_is_discarded_also_where_nothing_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "no")))
    make_step(tmp_path, "1.orbax-checkpoint-tmp")
    remover = Remover(tmp_path)
    remover.discard("1.orbax-checkpoint-tmp")
    assert not (tmp_path / "1.orbax-checkpoint-tmp").exists()
    remover.close()
    assert left(tmp_path) == set()


def test_files_that_cannot_be_deleted_are_reported_and_are_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(tmp_path, "1")
    with monkeypatch.context() as patch:
        broken = refuse(OSError(5, "no luck"), "deep")
        patch.setattr(os, "unlink", broken(os.unlink))
        with caplog.at_level(logging.ERROR, logger="cnr_jax"):
            Remover(tmp_path).remove("1", background=False)
    assert "no luck" in caplog.text and "4 of its files and folders" in caplog.text
    (name,) = left(tmp_path)
    assert names.REMOVED_MARK in name and step_directories(tmp_path) == []
    remover = Remover(tmp_path)
    remover.purge_later(name)
    remover.close()
    assert left(tmp_path) == set()


def test_what_cannot_be_deleted_in_the_background_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a folder that somebody was still writing into."""
    for name in ("1", "2", "3"):
        make_step(tmp_path, name)
    remover = Remover(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse(OSError(5, "no luck"), "1.")(os.unlink))
        remover.remove("1")
        assert remover.wait(60)
        remover.remove("2")
        assert remover.wait(60)
        assert {name[0] for name in left(tmp_path)} == {"1", "3"}
    assert remover.wait(60)
    assert left(tmp_path) == {"3"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse(OSError(5, "no luck"), "3.")(os.unlink))
        make_step(tmp_path, "4")
        remover.remove("3")
        assert remover.wait(60)
    remover.close()
    assert left(tmp_path) == {"4"}


def test_deletion_in_the_background_goes_on_after_any_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("1", "2"):
        make_step(tmp_path, name)
    remover = Remover(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "walk", _fail)
        remover.remove("1")
        assert remover.wait(60), "nobody waits for a thread that has died"
        assert {name[0] for name in left(tmp_path)} == {"1", "2"}
    assert "on purpose" in caplog.text
    remover.remove("2")
    assert remover.wait(60)
    assert left(tmp_path) == set()
    remover.close()


def test_deletion_needs_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that has none left: what one thread can delete is deleted, the rest later."""
    for name in ("1", "2", "3"):
        make_step(tmp_path, name)
    remover = Remover(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _fail)
        remover.remove("1", background=False)
        remover.remove("2")
        assert remover.wait(60)
        assert {name[0] for name in left(tmp_path)} == {"2", "3"}
    remover.remove("3")
    assert remover.wait(60)
    assert left(tmp_path) == set()
    remover.close()


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("on purpose")


def test_waiting_for_deletion_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, unlink = threading.Event(), os.unlink

    def held(path: Any, **kwargs: Any) -> None:
        assert go_on.wait(60)
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", held)
    make_step(tmp_path, "1")
    remover = Remover(tmp_path)
    assert remover.wait(60)
    remover.remove("1")
    assert not remover.wait(0.01)
    go_on.set()
    assert remover.wait(60)
    assert left(tmp_path) == set()
    remover.close()


def test_removed_steps_are_kept_in_a_folder_if_so_wished(tmp_path: Path) -> None:
    remover = Remover(tmp_path)
    for text in ("first", "second"):
        make_step(tmp_path, "1").joinpath("top").write_text(text)
        remover.keep("1", "trash")
    assert left(tmp_path) == {"trash"} and step_directories(tmp_path) == []
    kept = {path.name: path for path in (tmp_path / "trash").iterdir()}
    assert kept.pop("1").joinpath("top").read_text() == "first"
    ((name, path),) = kept.items()
    assert names.REMOVED_MARK in name and (path / "top").read_text() == "second"


def test_no_directory_goes_before_one_that_depends_on_it(
    root: Any, tmp_path: Path
) -> None:
    zero = root.add(0)
    one = root.add(1, zero)
    root.add(2, one)
    root.add(3, zero)
    root.add(4)
    root.ledger.read(tmp_path, "5", "state")
    order = children_first(root.ledger, ["0", "1", "2", "3", "4", "5"])
    assert order[0] == "5" and order[1] == "2"
    assert order.index("1") < order.index("0") and order.index("3") < order.index("0")
