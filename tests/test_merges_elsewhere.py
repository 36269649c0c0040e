"""Merges of `IncrementLog` by another program, which takes requests of a run from its root."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.compaction import baseline as baselines
from cnr_jax.repository.compaction import requests
from cnr_jax.repository.compaction.baseline import Request, write_baseline
from cnr_jax.repository.index.save_plan import MergedBaseline
from cnr_jax.repository.store import exists, store_of

from .conftest import each_of, left_in, merged, requested, until
from .test_compaction import kinds
from .test_increment_log import log_of

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture(params=["disk", "bucket"])
def log_root(request: pytest.FixtureRequest, tmp_path: Path) -> epath.Path:
    if request.param == "disk":
        return epath.Path(tmp_path)
    return request.getfixturevalue("bucket") / "run"


@contextlib.contextmanager
def follower(root: Any, told: list[tuple[str, str]]) -> Iterator[None]:
    """Merges what runs ask for in a root, as `cnr-jax compact --follow` does."""
    done = threading.Event()
    thread = threading.Thread(
        target=requests.serve,
        args=(
            epath.Path(root),
            lambda request, why: told.append((request.directory, why)),
        ),
        kwargs={"goes_on": lambda: not done.is_set()},
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_LOOK_SECS", 0.02)
    monkeypatch.setattr(requests, "_SIGN_SECS", 0.05)


def test_another_program_merges_what_a_run_asks_for(
    tiny_run: Any, tmp_path: Path, often: None
) -> None:
    run, told = tiny_run(), list[tuple[str, str]]()
    policy = cnr.IncrementLog(merge_at=3, elsewhere=True)
    # Two of them do not get in each other's way.
    with follower(tmp_path, told), follower(tmp_path, told):
        reports = log_of(run, tmp_path, 10, policy=policy)
    assert [each.step for each in reports if each.kind == "full"] == [0, 3, 6, 9]
    # Each tells in a thread of its own.
    assert sorted(told) == [("2", ""), ("5", ""), ("8", "")]
    assert left_in(tmp_path) == [] and cnr.verify(tmp_path) == ()
    with run.open(tmp_path) as manager:
        for step in range(10):
            run.check(manager, step)


def test_a_run_that_nobody_merges_for_saves_on(
    tiny_run: Any, tmp_path: Path, often: None
) -> None:
    run = tiny_run()
    policy = cnr.IncrementLog(merge_at=2, max_chain=3, elsewhere=True)
    with run.open(tmp_path, policy=policy) as manager:
        run.run(manager, range(7))
        manager.wait_until_finished()
        assert requested(tmp_path)  # by a thread, beside the run
        assert len(left_in(tmp_path)) == 1  # one request, however many saves ask
    assert left_in(tmp_path) == []
    assert [*kinds(tmp_path).values()].count("full") == 2
    with run.open(tmp_path) as manager:
        run.check(manager, 6)


def test_a_request_is_given_up_once_whoever_took_it_is_silent(
    tiny_run: Any,
    tmp_path: Path,
    often: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, told = tiny_run(), list[tuple[str, str]]()
    policy = cnr.IncrementLog(merge_at=2, elsewhere=True)
    with run.open(tmp_path, policy=policy) as manager:
        run.run(manager, [0, 1])
        manager.wait_until_finished()
        (tmp_path / requested(tmp_path) / "signs.txt").write_bytes(b"0")
        with monkeypatch.context() as patch:
            patch.setattr(requests, "_SILENT_SECS", 0.2)
            assert merged(manager) is None
        assert "the program that merges it has ended" in caplog.text
        assert left_in(tmp_path) == []
        with follower(tmp_path, told):
            run.run(manager, [2])
            baseline = merged(manager)
        assert baseline is not None and baseline.directory == "2"
        run.run(manager, [3])
        manager.wait_until_finished()
        assert manager.last_report.kind == "full"
        run.check(manager, 3)


def test_a_request_that_nobody_takes_is_given_up(
    tiny_run: Any,
    tmp_path: Path,
    often: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(requests, "_SILENT_SECS", 0.2)
    run = tiny_run()
    policy = cnr.IncrementLog(merge_at=2, elsewhere=True)
    with run.open(tmp_path, policy=policy) as manager:
        run.run(manager, [0, 1])
        assert merged(manager) is None
        assert "no program elsewhere merges it" in caplog.text
        assert left_in(tmp_path) == []


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events: a merge has begun; it may end."""
    begun, may_end = threading.Event(), threading.Event()

    def made(root: Any, request: Request) -> MergedBaseline:
        begun.set()
        assert may_end.wait(60)
        return write_baseline(root, request)

    monkeypatch.setattr(baselines, "write_baseline", made)
    return begun, may_end


def test_a_long_merge_gives_signs_of_life(
    tiny_run: Any,
    tmp_path: Path,
    often: None,
    slow: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "_SILENT_SECS", 3.0)
    (begun, may_end), told = slow, list[tuple[str, str]]()
    run, policy = tiny_run(), cnr.IncrementLog(merge_at=2, elsewhere=True)
    with run.open(tmp_path, policy=policy) as manager, follower(tmp_path, told):
        run.run(manager, [0, 1])
        manager.wait_until_finished()
        assert begun.wait(60)
        # Longer than silence that would be taken for the end.
        assert not threading.Event().wait(4.0)
        assert manager._handler.lifecycle.merging.is_busy
        may_end.set()
        assert merged(manager) is not None
        assert os.listdir(tmp_path / left_in(tmp_path)[0]) != []
        run.run(manager, [2])
        manager.wait_until_finished()
        assert manager.last_report.kind == "full"
    assert told == [("1", "")] and left_in(tmp_path) == []


def test_a_run_that_ends_leaves_nothing_behind_of_a_merge_that_goes_on(
    tiny_run: Any,
    tmp_path: Path,
    often: None,
    slow: tuple[threading.Event, threading.Event],
) -> None:
    (begun, may_end), told = slow, list[tuple[str, str]]()
    run, policy = tiny_run(), cnr.IncrementLog(merge_at=2, elsewhere=True)
    with follower(tmp_path, told):
        with run.open(tmp_path, policy=policy) as manager:
            run.run(manager, [0, 1])
            manager.wait_until_finished()
            assert begun.wait(60)
        may_end.set()
        until(lambda: told)
    assert told == [("1", "the run does not wait for it any more")]
    assert left_in(tmp_path) == [] and cnr.verify(tmp_path) == ()


def test_the_run_says_why_a_merge_elsewhere_failed(
    tiny_run: Any, tmp_path: Path, often: None, caplog: pytest.LogCaptureFixture
) -> None:
    run, told = tiny_run(), list[tuple[str, str]]()
    policy = cnr.IncrementLog(merge_at=2, elsewhere=True)
    with run.open(tmp_path, policy=policy) as manager:
        run.run(manager, [0, 1])
        manager.wait_until_finished()
        requested(tmp_path)
        chunk = next((tmp_path / "0").rglob("rows.p00000/*/c/0"))
        chunk.write_bytes(chunk.read_bytes()[:-1])
        with follower(tmp_path, told):
            assert merged(manager) is None
    ((step, problem),) = told
    assert step == "1" and str(chunk.parents[1]) in problem and problem in caplog.text


def test_only_one_of_two_takes_a_request(
    log_root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that nobody has taken it."""
    folder = log_root / "3.orbax-checkpoint-tmp-7"
    store = store_of(log_root)
    store.make_folder(folder)
    told = {"directory": "3", "item": "default", "folder": folder.name, "process": 1}
    store.write(folder / "request.json", json.dumps(told).encode(), replaces=False)
    monkeypatch.setattr(
        requests, "exists", lambda path: path.name != "signs.txt" and exists(path)
    )
    assert requests._taken(folder) == Request(**told)
    assert requests._taken(folder) is None


@each_of(
    "text", [b"", b"{", b"[]", b"{}", b'{"directory": 3}', b'"x"', b"\xff", b"null"]
)
def test_what_is_no_request_is_left_alone(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "3.orbax-checkpoint-tmp-7"
    folder.mkdir(exist_ok=True)
    (folder / "request.json").write_bytes(text)
    assert [*requests._take_requests(epath.Path(tmp_path))] == []
    assert os.listdir(folder) == ["request.json"]


def test_a_request_names_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "3.orbax-checkpoint-tmp-7"
    folder.mkdir()
    told = {"directory": "3", "item": "default", "folder": "../x", "process": 1}
    (folder / "request.json").write_text(json.dumps(told))
    assert [*requests._take_requests(epath.Path(tmp_path))] == []


def test_what_elsewhere_cannot_be() -> None:
    wrong: Any = "no"
    with pytest.raises(errors.OptionError, match="elsewhere cannot be 'no'"):
        cnr.IncrementLog(elsewhere=wrong)


@each_of("lasting", [False, True])
def test_a_merge_outlasts_storage_that_fails_for_a_moment(
    tiny_run: Any,
    tmp_path: Path,
    often: None,
    lasting: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, looks = tmp_path / str(lasting), itertools.count()
    answered, take = baselines.is_answered, baselines.take_note

    def failing(folder: Any) -> bool:
        if lasting or next(looks) % 2 == 0:
            raise OSError(errno.EIO, "failed to look")
        return answered(folder)

    def taken(root: Any, request: Request) -> MergedBaseline:
        if next(looks) < 20:
            raise OSError(errno.EIO, "failed to take")
        return take(root, request)

    monkeypatch.setattr(baselines, "is_answered", failing)
    monkeypatch.setattr(baselines, "take_note", taken)
    if lasting:
        monkeypatch.setattr(requests, "_SILENT_SECS", 0.2)
    run, told = tiny_run(), list[tuple[str, str]]()
    policy = cnr.IncrementLog(merge_at=2, elsewhere=True)
    with follower(root, told), run.open(root, policy=policy) as manager:
        run.run(manager, [0, 1])
        baseline = merged(manager)
        assert (baseline is None) == lasting == ("failed to look" in caplog.text)
        run.run(manager, [2])
        run.check(manager, 2)
    if not lasting:
        assert kinds(root)["2"] == "full" and left_in(root) == []


def test_a_look_that_fails_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 0.0, iter([OSError(errno.EIO, "failed to look"), False, True])

    class Closing:
        def wait(self, secs: float) -> bool:
            nonlocal now
            now += 40.0
            return False

    def answered(folder: Any) -> bool:
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(requests.time, "monotonic", lambda: now)
    monkeypatch.setattr(baselines, "is_answered", answered)
    monkeypatch.setattr(baselines, "take_note", lambda root, request: "the baseline")
    closing: Any = Closing()
    request = Request("1", "default", "1.orbax-checkpoint-tmp-5", 1)
    made: Any = requests.await_merge(epath.Path(tmp_path), request, closing)
    assert made == "the baseline"


@each_of("taken", [False, True])
def test_a_request_that_somebody_removes_is_given_up(
    tiny_run: Any,
    tmp_path: Path,
    often: None,
    taken: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, root = tiny_run(), tmp_path / str(taken)
    policy = cnr.IncrementLog(merge_at=2, elsewhere=True)
    with run.open(root, policy=policy) as manager:
        run.run(manager, [0, 1])
        manager.wait_until_finished()
        folder = requested(root)
        if taken:
            (root / folder / "signs.txt").write_bytes(b"0")
        shutil.rmtree(root / folder)
        assert merged(manager) is None and "the request is gone" in caplog.text


@each_of(
    "wrong",
    [
        *({"folder": "0"}, {"directory": "0"}, {"process": 7}, {"layers": "2"}),
        *({"bytes": 3.0}, {"process": True}),
    ],
)
def test_an_answer_is_taken_for_the_request_alone(
    tiny_run: Any, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    root = epath.Path(tmp_path / f"root{abs(hash(str(wrong)))}")
    run = tiny_run()
    with run.open(root, policy=cnr.Consecutive()) as manager:
        run.run(manager, [0, 1])
    request = Request("1", "default", "1.orbax-checkpoint-tmp-5", 1)
    made = write_baseline(root, request)
    baselines.note(root, made)
    note = root / request.folder / "merged.json"
    text = note.read_text()
    note.write_text(json.dumps(json.loads(text) | wrong))
    (name,) = wrong
    with pytest.raises(ValueError, match=f"its note has .* as {name}"):
        baselines.take_note(root, request)
    note.write_text(text)
    assert baselines.take_note(root, request) == made


def test_requests_are_taken_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(a: Any, b: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", a)

    monkeypatch.setattr(os, "link", link)
    path = epath.Path(tmp_path / "signs.txt")
    store_of(path).write_new(path, b"one")
    with pytest.raises(FileExistsError):
        store_of(path).write_new(path, b"two")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["signs.txt"]


def test_a_request_that_was_answered_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = epath.Path(tmp_path / "3.orbax-checkpoint-tmp-7")
    folder.mkdir()
    told = {"directory": "3", "item": "default", "folder": folder.name, "process": 1}
    (folder / "request.json").write_text(json.dumps(told))

    def read(path: Any) -> bytes:
        text = path.read_bytes()
        path.unlink()  # as the run does once it has the answer of another program
        return text

    monkeypatch.setattr(requests, "_read", read)
    assert requests._taken(folder) is None
