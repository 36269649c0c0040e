"""Calls of Python code are met, counted and made to fail, and are Python's own afterwards."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import threading
from pathlib import Path

import pytest
from etils import epath

from cnr_jax import errors
from cnr_jax.repository.store import store_of
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault, FaultNotHitError

pytestmark = pytest.mark.tools


def work(root: Path) -> None:
    (root / "d").mkdir()
    with (root / "d/a").open("w") as file:
        file.write("1")
        os.fsync(file)
    with open(root / "d/a") as file:
        file.read()
    folder = os.open(root, os.O_RDONLY)
    os.fsync(folder)
    os.rename("d", "e", src_dir_fd=folder, dst_dir_fd=folder)
    os.close(folder)
    os.link(root / "e/a", root / "b")
    os.replace(root / "b", root / "c")
    (root / "c").unlink()
    (root.parent / "outside").write_text("2")
    shutil.rmtree(root / "e")


EXPECTED = [
    ("mkdir", "d", ""),
    ("open", "d/a", ""),
    ("fsync", "d/a", ""),
    ("fsync", ".", ""),
    ("rename", "d", "e"),
    ("link", "e/a", "b"),
    ("rename", "b", "c"),
    ("unlink", "c", ""),
    ("unlink", "e/a", ""),
    ("rmdir", "e", ""),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_calls_are_seen_with_their_paths_and_only_meanwhile(root: Path) -> None:
    own = os.fsync, os.rename, io.open, builtins.open
    with inprocess.watching(root) as calls:
        work(root)
    assert (os.fsync, os.rename, io.open, builtins.open) == own
    seen = [
        (c.call, os.path.relpath(c.path, root), c.to and os.path.relpath(c.to, root))
        for c in calls
    ]
    assert seen == EXPECTED
    assert [call.number for call in calls] == list(range(1, len(EXPECTED) + 1))


@pytest.mark.parametrize("nth", range(1, len(EXPECTED) + 1))
def test_any_call_can_fail_and_is_then_not_made(nth: int, root: Path) -> None:
    with inprocess.failing(root, Fault(nth=nth, action="ENOSPC")) as hits:
        with pytest.raises(OSError, match="No space left"):
            work(root)
    assert [(hit.number, hit.call, hit.hit) for hit in hits] == [
        (nth, EXPECTED[nth - 1][0], True)
    ]


def test_a_fault_strikes_as_often_as_it_says(root: Path) -> None:
    def attempts(fault: Fault) -> list[bool]:
        done = []
        with inprocess.failing(root, fault):
            for i in range(5):
                try:
                    (root / f"{fault.times}{i}x").mkdir()
                    done.append(True)
                except OSError:
                    done.append(False)
        return done

    assert attempts(Fault("mkdir", 2, "EIO")) == [True, False, True, True, True]
    assert attempts(Fault("mkdir", 2, "EIO", 2)) == [True, False, False, True, True]
    assert attempts(Fault("mkdir", 2, "EIO", 0)) == [True] + [False] * 4


def test_a_fault_that_is_not_hit_or_cannot_be_fails(root: Path) -> None:
    with pytest.raises(FaultNotHitError, match="was not hit"):
        with inprocess.failing(root, Fault("rename", 3, "EIO", match="/c")):
            work(root)
    with pytest.raises(errors.OptionError, match="'kill' cannot strike"):
        with inprocess.failing(root, Fault(action="kill")):
            pass


@pytest.mark.parametrize("after", [False, True])
def test_a_copy_shows_the_folder_before_or_after_the_call(
    after: bool, root: Path
) -> None:
    copy = root.parent / "copy"
    with inprocess.copying(root, copy, nth=5, after=after):
        work(root)
    assert sorted(p.name for p in copy.rglob("*")) == (
        ["a", "e"] if after else ["a", "d"]
    )
    with inprocess.copying(root, root.parent / "none", nth=99):
        work(root)
    assert not (root.parent / "none").exists()


def look(root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "a").write_text("1")
    assert (root / "d").exists() and epath.Path(root / "d").is_dir()
    assert os.path.isdir(root / "d") and not os.path.islink(root / "d")
    assert list((root / "d").iterdir()) == [root / "d" / "a"]
    with os.scandir(root / "d") as found:
        assert [entry.name for entry in found] == ["a"]
    assert (root / "d" / "a").read_text() == "1"
    os.close(os.open(root / "d", os.O_RDONLY))
    assert root.parent.exists()


LOOKED = [
    *[("stat", "d")] * 4,
    *[("scandir", "d")] * 2,
    ("open_read", "d/a"),
    ("open_read", "d"),
]


def test_a_copy_is_of_one_moment_whatever_other_threads_do(root: Path) -> None:
    for name in range(1000):
        (root / f"ballast-{name}").mkdir()
    (root / "version-0").mkdir()
    ended = threading.Event()

    def go_on() -> None:
        number = 0
        while not ended.is_set():
            (root / f"version-{number + 1}").mkdir()
            (root / f"version-{number}").rmdir()
            number += 1

    for nth in range(1, 11):
        copy = root.with_name(f"copy-{nth}")
        with inprocess.copying(root, copy, nth=nth):
            thread = threading.Thread(target=go_on)
            thread.start()
            while not copy.exists():
                (root / "mine").mkdir()
                (root / "mine").rmdir()
            ended.set()
            thread.join()
        ended.clear()
        for version in root.glob("version-*"):
            version.rename(root / "version-0")
        assert len(list(copy.glob("version-*"))) in (1, 2), nth
        assert len(list(copy.glob("ballast-*"))) == 1000


def test_calls_that_look_count_where_they_are_asked_for(root: Path) -> None:
    own = os.stat, os.lstat, os.scandir, os.listdir, os.open
    with inprocess.watching(root, looks=True) as calls:
        look(root)
    assert (os.stat, os.lstat, os.scandir, os.listdir, os.open) == own
    seen = [(c.call, os.path.relpath(c.path, root)) for c in calls]
    assert seen == [("mkdir", "d"), ("open", "d/a"), *LOOKED]
    shutil.rmtree(root / "d")
    with inprocess.watching(root) as calls:
        look(root)
    assert [call.call for call in calls] == ["mkdir", "open"]


@pytest.mark.parametrize("kind", ["stat", "scandir", "open_read"])
def test_any_look_can_fail_whoever_looks(kind: str, root: Path) -> None:
    for nth in range(1, [call for call, _ in LOOKED].count(kind) + 1):
        with inprocess.failing(root, Fault(kind, nth, "ESTALE")) as hits:
            # What `os.path` and `epath` make of it is what they always make of it.
            with contextlib.suppress(OSError, AssertionError):
                look(root)
        assert [hit.call for hit in hits] == [kind]
        shutil.rmtree(root / "d")
    with inprocess.failing(root, Fault(kind, match="/d", action="ESTALE")):
        with pytest.raises(OSError, match=r"[Ss]tale"):
            look(root)


def test_requests_to_a_bucket_are_met_as_calls_are(bucket: epath.Path) -> None:
    store, root = store_of(bucket), bucket / "root"
    store.write(bucket / "root2", b"beside", replaces=True)
    with inprocess.watching(root, looks=True) as calls:
        store.write(root / "d/a", b"1", replaces=True)
        assert store.read(root / "d/a") == b"1"
        store.names_in(root)
        store.move(root / "d", root / "e")
        store.remove_tree(root / "e")
        store.write(bucket / "root2", b"beside", replaces=True)
    made = [(call.call, call.path, call.to) for call in calls]
    assert [each for each in made if each[0] not in ("scandir", "stat")] == [
        ("open", f"{root}/d/a", ""),
        ("open_read", f"{root}/d/a", ""),
        ("rename", f"{root}/d/a", f"{root}/e/a"),
        ("unlink", f"{root}/d/a", ""),
        ("unlink", f"{root}/e/a", ""),
    ]
    with inprocess.failing(root, Fault("open", nth=2, action="ENOSPC")) as hits:
        store.write(root / "a", b"1", replaces=True)
        with pytest.raises(OSError, match="No space left"):
            store.write(root / "b", b"1", replaces=True)
    assert [hit.path for hit in hits] == [f"{root}/b"]
    assert store.names_in(root) == ["a"]


def test_a_dead_process_puts_nothing_more(bucket: epath.Path) -> None:
    store = store_of(bucket)
    for after in (False, True):
        root = bucket / f"root {after}"
        with inprocess.dying(root, nth=2, after=after) as failed:
            for name in "abc":
                with contextlib.suppress(OSError):
                    store.write(root / name, b"1", replaces=True)
            # Each of them is an object of its own to a service.
            (error,) = store.remove_tree(root)
            assert "the process is dead" in str(error)
        there = ["a", "b"] if after else ["a"]
        assert store.names_in(root) == there
        assert [call.path for call in failed] == [
            f"{root}/b",
            f"{root}/c",
            f"{root}/a",
        ]
