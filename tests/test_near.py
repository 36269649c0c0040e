"""Near roots: saves commit in memory, and travel to the root of the run behind training."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.mirroring.copier import Copier
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import (
    LocalStore,
    exists,
    store_of,
)

from . import mirror_program
from .bucket_proxy import Proxy
from .conftest import Gate, case_of, each_of, until
from .test_mirrors import (
    caught_up,
    copying,
    far,
    harm,
    line_of,
    mostly_on_disk,
    proxied,
    root,
    started,
    steps_in,
)

__all__ = ["copying", "far", "proxied", "root"]  # fixtures


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


def test_saves_commit_near_and_travel_to_the_root(
    tiny_run: Any, near: Path, far: epath.Path, copying: Gate
) -> None:
    run = tiny_run()
    options = {"near": near, "near_steps": 2, "policy": cnr.Consecutive(max_chain=2)}
    with run.open(str(far), **options) as manager:
        copying.shut()
        run.run(manager, range(3))
        copying.open()
        assert manager.last_report.mirror_lag_steps >= 1
        assert manager.last_report.near_problem == ""
        caught_up(manager)
        run.run(manager, [3, 4, 5])
        assert steps_in(near) == ["3", "4", "5"], "two, and their chain"
    assert len(steps_in(far)) == 6 and cnr.verify(far) == ()
    with run.open(str(far), **options) as manager:
        assert manager.latest_step() == 5
        run.restore(manager, None)
        run.same(run.state, run.truth[5])
        run.restore(manager, 1)
        run.same(run.state, run.truth[1])
    shutil.rmtree(near)
    with run.open(str(far)) as manager:
        for step in range(6):
            run.check(manager, step)


def test_after_near_is_lost_the_root_restores(
    tiny_run: Any, near: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(far), near=near) as manager:
        run.run(manager, range(4))
    shutil.rmtree(near)
    with run.open(str(far), near=near) as manager:
        run.restore(manager, None)
        run.same(run.state, run.truth[3])
        assert steps_in(near) == ["0", "1", "2", "3"]
        run.run(manager, [4])
        assert manager.last_report.kind == "delta"
    assert "4" in steps_in(far) and harm(far) == []


def test_nothing_leaves_near_before_it_is_far(
    tiny_run: Any, near: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    with run.open(root, near=near, near_steps=1, policy=cnr.Full()) as manager:
        run.run(manager, [0])
        caught_up(manager)
        with monkeypatch.context() as patch:
            patch.setattr("cnr_jax.repository.mirroring.copier.copy_files", fails)
            run.run(manager, range(1, 6))
            assert steps_in(near) == ["1", "2", "3", "4", "5"]
            until(lambda: manager.mirror_report.problems)
        run.run(manager, [6])
        caught_up(manager)
        run.run(manager, [7])
        assert steps_in(near) == ["7"]
    assert steps_in(root) == [str(step) for step in range(8)]


def test_what_the_program_before_has_not_copied_is_reported_from_the_first_save_on(
    tiny_run: Any,
    near: Path,
    root: Path,
    copying: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also before the root, which may answer late, was looked at."""
    run, gate = tiny_run(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("cnr_jax.repository.mirroring.copier.copy_files", fails)
        with run.open(root, near=near) as manager:
            run.run(manager, range(5))
    real = Copier.look

    def late(self: Copier) -> bool:
        assert gate.wait(60)
        return real(self)

    monkeypatch.setattr(Copier, "look", late)
    with run.open(root, near=near) as manager:
        assert manager.mirror_report.lag_steps == 5
        assert manager.mirror_report.backlog_bytes > 0
        run.restore(manager, None)
        run.run(manager, [5])
        assert manager.last_report.mirror_lag_steps == 6
        gate.set()
        caught_up(manager)
        assert steps_in(root) == [str(step) for step in range(6)]
        copying.shut()
        run.run(manager, [6])
        copying.open()
        assert manager.last_report.mirror_lag_steps == 1
        assert manager.mirror_report.skipped_steps == ()


@mostly_on_disk
@each_of("newest", [2, 4])
def test_steps_that_the_run_has_gone_on_without_are_set_aside(
    tiny_run: Any, far: epath.Path, tmp_path: Path, newest: int
) -> None:
    """A host is lost before it has copied them, and comes back when others have gone on."""
    lost, other, root = (tmp_path / f"{n}{newest}" for n in ("lost", "other", "root"))
    if "://" in str(far):
        root = f"{far}-{newest}"
    run = tiny_run()
    with run.open(root, near=lost) as manager:
        run.run(manager, [0, 1])
        caught_up(manager)
    with run.open(lost) as manager:  # not copied
        run.restore(manager, None)
        run.run(manager, sorted({2, newest}))
    elsewhere = tiny_run()
    elsewhere.salt, elsewhere.truth = 1, {k: run.truth[k] for k in (0, 1)}
    with elsewhere.open(root, near=other) as manager:
        elsewhere.restore(manager, None)
        elsewhere.run(manager, [2, 3])
        caught_up(manager)
    for _ in range(2):
        with elsewhere.open(root, near=lost) as manager:
            assert manager.all_steps() == [0, 1, 2, 3]
            for step in manager.all_steps():
                elsewhere.check(manager, step)
            caught_up(manager)
            assert manager.mirror_report.problems == ()
    aside = {n.partition(".")[0] for n in os.listdir(lost) if names.ABANDONED_MARK in n}
    assert aside == {"2", str(newest)}
    with elsewhere.open(root, near=lost) as manager:
        elsewhere.restore(manager, None)
        elsewhere.run(manager, [5])
        assert manager.last_report.kind == "delta"
        caught_up(manager)
    assert not harm(epath.Path(root))


@mostly_on_disk
def test_a_step_that_the_root_lacks_is_not_set_aside_while_near_knows_its_newest(
    tiny_run: Any, far: epath.Path, near: Path
) -> None:
    run, root = tiny_run(), str(far)
    with run.open(root, near=near, near_steps=4, policy=cnr.Full()) as manager:
        run.run(manager, range(4))
        caught_up(manager)
    store_of(far).remove_tree(far / "2")
    with run.open(root, near=near, near_steps=4, policy=cnr.Full()) as manager:
        run.check(manager, 2)
        caught_up(manager)
    assert not [n for n in os.listdir(near) if names.ABANDONED_MARK in n]


@mostly_on_disk
def test_steps_that_are_not_copied_yet_are_not_set_aside(
    tiny_run: Any, far: epath.Path, near: Path
) -> None:
    """Also where nothing near tells any more of the newest step of the root."""
    run, root = tiny_run(), str(far)
    with run.open(root, near=near) as manager:
        run.run(manager, [0])
        caught_up(manager)
    with run.open(near, {"max_to_keep": 2}, policy=cnr.Full()) as manager:
        run.restore(manager, None)
        run.run(manager, [1, 2, 3])
        assert manager.all_steps() == [2, 3]
    with run.open(root, near=near) as manager:
        assert manager.latest_step() == 3
        run.check(manager, 2)
        run.check(manager, 3)
        caught_up(manager)
    assert not [n for n in os.listdir(near) if names.ABANDONED_MARK in n]


def fails(*_: Any, **__: Any) -> None:
    raise OSError(5, "away")


def test_what_does_not_fit_goes_to_the_root_with_a_report(
    tiny_run: Any, near: Path, far: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    with run.open(str(far), near=near) as manager:
        run.run(manager, range(2))
    # The last step is near alone. Some services go on listing its folder, which is empty.
    assert store_of(far).remove_tree(far / "1") == []
    store_of(far).remove_file(far / names.CATALOGUE)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda *_: 1000)
    monkeypatch.setattr(LocalStore, "bytes_below", lambda *_: 0)
    with run.open(str(far), near=near) as manager:
        assert str(manager.directory) == str(far)
        assert manager.all_steps() == [0, 1], "what was near alone came first"
        run.restore(manager, None)
        run.run(manager, [2])
        report = manager.last_report
        assert "has room for" in report.near_problem
        assert report.mirror_lag_steps is None and manager.mirror_report is None
    assert steps_in(far) == ["0", "1", "2"] and harm(far) == []


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes file systems in memory of so many bytes, where this process may."""
    made: list[Path] = []

    def make(size_bytes: int) -> Path:
        folder = tmp_path / f"memory{len(made)}"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", folder]
        try:
            done = subprocess.run(words, capture_output=True, check=False, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount")
        if done.returncode:
            pytest.skip(f"no file systems may be mounted: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "-l", folder], check=True)


def test_near_that_fills_up_while_the_root_is_away_fails_saves_and_loses_none(
    tiny_run: Any,
    small_memory: Callable[[int], Path],
    proxied: tuple[Proxy, str],
    impatient: None,
) -> None:
    run, (proxy, url), memory = tiny_run(), proxied, small_memory(500_000)
    near, others = memory / "near", memory / "others"
    others.write_bytes(bytes(200_000))
    policy = cnr.Consecutive(max_chain=2)
    with run.open(url, near=near, near_steps=1, policy=policy) as manager:
        assert str(manager.directory) == str(near)
        run.run(manager, [0])
        caught_up(manager)
        proxy.harm = lambda *_: 503
        for _ in range(2):  # and not once alone
            error = fill_up(run, manager)
            assert error.errno == errno.ENOSPC
            assert "hint: make room" in str(error)
            committed = manager.all_steps()
            assert committed == [*range(len(committed))] and len(committed) > 2
            assert harm(near) == [] and numbers_in(near) == committed
            for step in committed[-3:]:
                run.check(manager, step)
        # As the hint says.
        others.unlink()
        newest = run.state["step"] + 1
        run.run(manager, [newest])
        assert manager.all_steps() == [*committed, newest]
        run.check(manager, newest)
        until(lambda: manager.mirror_report.problems)
        proxy.harm = lambda *_: None
        run.run(manager, [newest + 1])
        caught_up(manager)
    assert numbers_in(url) == [*committed, newest, newest + 1]
    assert cnr.verify(url) == ()
    with run.open(url) as manager:
        for step in (*committed[-2:], newest, newest + 1):
            run.check(manager, step)


def numbers_in(root: Any) -> list[int]:
    return sorted(map(int, steps_in(root)))


def fill_up(run: Any, manager: Any) -> errors.SaveError:
    """Trains and saves until a save fails; returns its error."""
    for _ in range(100):
        try:
            run.run(manager, [run.state["step"] + 1])
        except errors.SaveError as error:
            return error
    raise AssertionError("there is room for all")


@pytest.mark.xfail(
    strict=True, reason="a save that finds no room removes nothing, and no other does"
)
def test_near_that_was_full_has_room_once_its_steps_are_far(
    tiny_run: Any,
    small_memory: Callable[[int], Path],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, near = tiny_run(), small_memory(300_000) / "near"
    options = {"near": near, "near_steps": 1, "policy": cnr.Consecutive(max_chain=2)}
    with run.open(root, **options) as manager:
        with monkeypatch.context() as patch:
            patch.setattr("cnr_jax.repository.mirroring.copier.copy_files", fails)
            run.run(manager, [0])
            fill_up(run, manager)
    with run.open(root, **options) as manager:
        run.restore(manager, None)
        caught_up(manager)
        assert numbers_in(root) == numbers_in(near) == manager.all_steps()
        run.run(manager, [run.state["step"] + 1])


def test_near_that_is_old_and_has_no_room_for_what_came_since_is_passed_by(
    tiny_run: Any, small_memory: Callable[[int], Path], root: Path
) -> None:
    run, memory = tiny_run(), small_memory(4_000_000)
    others, options = memory / "near/others", {"near": memory / "near"}
    with run.open(root, **options) as manager:
        run.run(manager, range(20))
    with run.open(root) as manager:
        run.restore(manager, None)
        run.run(manager, [20, 21])
    others.write_bytes(bytes(store_of(memory).free_bytes(memory) - 40_000))
    with run.open(root, **options) as manager:
        assert str(manager.directory) == str(root)
        assert manager.latest_step() == 21


def test_memory_that_is_too_small_from_the_beginning_is_passed_by(
    far: epath.Path, small_memory: Callable[[int], Path], unsynced: None
) -> None:
    memory = small_memory(400_000)  # one full checkpoint, and not two
    state = {"user": jnp.arange(65_536.0).reshape(4096, 16)}
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw", near=memory / "near")
    with cnr.CheckpointManager(str(far), tables=tables, options=options) as manager:
        assert str(manager.directory) == str(far)
        for step in range(2):
            assert manager.save(step, args=cnr.args.Save(state))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None and "has room for" in report.near_problem
            assert str(memory) in report.near_problem
            assert steps_in(far)[-1] == str(step)
        got = manager.restore(1, args=cnr.args.Restore(state)).state
        np.testing.assert_array_equal(got["user"], state["user"])
    assert not [*memory.iterdir()] and cnr.verify(far) == ()


def test_rules_of_orbax_are_refused_beside_it(
    tiny_run: Any, near: Path, root: Path
) -> None:
    with pytest.raises(errors.OptionError, match="mirror_keep"):
        tiny_run().open(root, {"max_to_keep": 2}, near=near)


def test_a_root_in_a_bucket_that_is_not_there(
    tiny_run: Any, near: Path, s3: str
) -> None:
    with pytest.raises(errors.RootError, match=r"NoSuchBucket(?s:.*)hint: make the"):
        tiny_run().open("s3://nowhere/run", near=near)


def test_saves_without_a_state_are_refused(
    tiny_run: Any, near: Path, root: Path
) -> None:
    run = tiny_run()
    with run.open(root, near=near) as manager:
        run.run(manager, [0])
        alone = ocp.args.Composite(meta=ocp.args.JsonSave({"epoch": 3}))
        with pytest.raises(errors.OptionError, match="no train state"):
            manager.save(1, args=alone)
        run.run(manager, [1])
    assert steps_in(root) == ["0", "1"]


def test_a_near_root_of_another_run_is_refused(
    tiny_run: Any, near: Path, root: Path, tmp_path: Path
) -> None:
    run, other = tiny_run(), tiny_run(salt=1)
    with other.open(tmp_path / "other", near=near) as manager:
        other.run(manager, range(2))
    with run.open(root) as manager:
        run.run(manager, [0])
    with pytest.raises(errors.UsedRootError, match="another run"):
        run.open(root, near=near)
    # What is near is still known to be the other's.
    shutil.rmtree(root)
    (root / "2024").mkdir(parents=True)
    for prefix in (None, "ck"):
        with pytest.raises(errors.UsedRootError, match=f"copied to {tmp_path}/other"):
            run.open(root, {"step_prefix": prefix}, near=near)
    shutil.rmtree(tmp_path / "other")
    with other.open(tmp_path / "other", near=near) as manager:
        other.restore(manager, None)
        caught_up(manager)
    assert steps_in(tmp_path / "other") == ["0", "1"]


@each_of("odd", ["folder", "loop", "bytes", "url", "long"])
def test_a_note_of_the_root_that_names_none_harms_nothing(
    tiny_run: Any, tmp_path: Path, odd: str
) -> None:
    run, near, root = tiny_run(), tmp_path / f"near-{odd}", tmp_path / f"far-{odd}"
    with run.open(root, near=near) as manager:
        run.run(manager, [0])
    note = near / names.FAR
    note.unlink()
    match odd:
        case "folder":
            note.mkdir()
        case "loop":
            note.symlink_to(note)
        case _:
            held = {"bytes": b"\xff\0\n", "url": b"file://[::1/x", "long": b"a" * 10**6}
            note.write_bytes(held[odd])
    if odd == "folder":
        with pytest.raises(errors.RootError, match=names.FAR):
            run.open(root, near=near)
        return
    with run.open(root, near=near) as manager:
        run.restore(manager, None)
        run.run(manager, [1])
    assert steps_in(root) == ["0", "1"] and note.read_text() == f"{root}\n"


def test_a_near_root_of_the_run_of_another_root_is_refused_for_an_empty_one(
    tiny_run: Any, near: Path, far: epath.Path, tmp_path: Path
) -> None:
    run, fresh = tiny_run(), far.parent / "fresh"
    with run.open(str(far), near=near) as manager:
        run.run(manager, range(2))
    with pytest.raises(errors.UsedRootError, match="of another run") as caught:
        run.open(str(fresh), near=near)
    assert f"up to step 1, which is copied to {far};" in str(caught.value)
    assert steps_in(near) == ["0", "1"] and not store_of(fresh).exists(fresh)
    # As the hint says.
    cnr.mirror(near, str(fresh))
    with run.open(str(fresh), near=near) as manager:
        run.restore(manager, None)
        run.run(manager, [2])
    assert steps_in(fresh) == ["0", "1", "2"]
    # So it is for what has come near and was not gone on with.
    shutil.rmtree(near)
    with run.open(str(fresh), near=near):
        assert "2" in steps_in(near)
    with pytest.raises(errors.UsedRootError, match="of another run"):
        run.open(str(far.parent / "third"), near=near)
    # Whose root was emptied goes on from what is near.
    store_of(fresh).remove_tree(fresh)
    with run.open(str(fresh), near=near) as manager:
        run.restore(manager, None)
        caught_up(manager)
    assert steps_in(fresh) == ["0", "1", "2"]


def test_a_root_that_cannot_be_seen_is_not_taken_for_that_of_what_is_near(
    tiny_run: Any, near: Path, root: Path, proxied: tuple[Proxy, str]
) -> None:
    run, (proxy, url) = tiny_run(), proxied
    with run.open(root, near=near) as manager:
        run.run(manager, [0])
    proxy.harm = lambda *_: 403
    with pytest.raises(errors.RootError, match="answer 403"):
        run.open(url, near=near)
    proxy.harm = lambda *_: None
    with pytest.raises(errors.UsedRootError, match="of another run"):
        run.open(url, near=near)


def test_the_root_of_what_is_near_may_have_several_paths(
    tiny_run: Any, near: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run = tiny_run()
    with run.open(tmp_path / "link/run", near=near) as manager:
        run.run(manager, [0])
    shutil.rmtree(tmp_path / "disk/run")
    with run.open(tmp_path / "disk/run", near=near) as manager:
        run.restore(manager, None)
        caught_up(manager)
    assert steps_in(tmp_path / "disk/run") == ["0"]


@mostly_on_disk
def test_a_step_of_another_root_is_no_root_of_what_is_near(
    tiny_run: Any, near: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(far)) as manager:
        run.run(manager, [0])
    with pytest.raises(errors.OptionError, match="is a step of the root"):
        run.open(str(far / "0"), near=near)


@pytest.mark.parametrize(
    "seeds",
    [[0], pytest.param([*range(1, 11)], marks=pytest.mark.slow)],
    ids=["one", "ten"],
)
@pytest.mark.timeout(1800)
@mostly_on_disk
def test_hosts_that_are_lost_and_come_back_go_on_from_what_is_far(
    far: epath.Path, tmp_path: Path, seeds: list[int]
) -> None:
    """Programs of two hosts, each of which is killed before its newest steps are far."""
    for seed in seeds:
        with case_of(seed):
            lose_hosts(tmp_path, f"{far}-{seed}", seed)


def lose_hosts(folder: Path, root: str, seed: int) -> None:
    rng = random.Random(seed)
    hosts = [folder / f"{name}{seed}" for name in ("first", "second")]
    # Which program has made each of the steps that are far.
    salts: list[int] = []
    gone: set[str] = set()
    rounds = 3 if seed == 0 else rng.randrange(3, 6)
    for number in range(rounds):
        near, salt, before = hosts[number % 2], number + 1, uuids_in(root)
        back = uuids_in(near)
        # Of its last round: the other host has gone on from what was far.
        gone |= {*back} - {*before}
        last, begun = number == rounds - 1, len(salts)
        told = {"near": str(near), "near_steps": 2, "mirror_bytes_per_sec": 60_000}
        saves = rng.randrange(1, 4) if last else 0
        with started(root, salt=salt, saves=saves, **told) as program:
            if salts:
                words = line_of(program, "restored").split()
                assert int(words[1]) == begun - 1
                assert [*map(int, words[3:])] == salts
                there = line_of(program, "holds").split()
                aside = {n.rpartition("-")[2] for n in there if names.abandoned_step(n)}
                assert {*back} - {*before} <= aside
                assert int(line_of(program, "lists").split()[-1]) == begun - 1
            line_of(program, "ready")
            if last:
                assert program.wait(600) == 0
            else:
                until_it_goes_on(near, root, before)
                time.sleep(rng.uniform(0, 1))
        held, copied = uuids_in(near), uuids_in(root)
        assert not gone.intersection((*held, *copied))
        assert last or {*held} - {*copied}, "it has lost steps"
        salts += [salt] * (max(copied.values()) + 1 - begun)
        assert last or len(salts) > begun
        # All that are listed; of a killed program some may not have come near any more.
        for place in (near, root):
            assert harm(place) == []
    assert sorted(uuids_in(root).values()) == [*range(len(salts))]
    template = mirror_program.bucket_program.first_state()
    tables = cnr.find_tables(template, ["user"])
    for place in (root, hosts[(rounds - 1) % 2]):
        with cnr.CheckpointManager(place, tables=tables) as reader:
            assert reader.latest_step() == len(salts) - 1
            for step in reader.all_steps():
                state = reader.restore(step, args=cnr.args.Restore(template)).state
                made = mirror_program.bucket_program.check(state, step)
                assert made == salts[: step + 1]


def uuids_in(root: Any) -> dict[str, int]:
    """Numbers of the steps that are listed in a root, by their uuids; the programs may save."""
    place, found = epath.Path(root), dict[str, int]()
    # Who claims a bucket first puts an object there to try it, and takes it away again.
    with contextlib.suppress(errors.NoStepError):
        for each in cnr.describe(str(root)).steps:
            with contextlib.suppress(errors.IntegrityError):  # it has gone since
                found[read_manifest(place / each.directory / "default").uuid] = (
                    each.step
                )
    return found


def until_it_goes_on(near: Any, far: Any, before: dict[str, int]) -> None:
    """Waits until a new step is far, and another one is not yet."""
    until(lambda: {*uuids_in(far)} - {*before} and {*uuids_in(near)} - {*uuids_in(far)})


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="cnr_jax_near_", dir=memory) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "times",
    [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["few", "many"],
)
def test_near_that_is_lost_at_any_time_loses_the_lag_alone(
    in_memory: Path, root: Path, times: int
) -> None:
    """Every other time the process alone is killed: then nothing is lost."""
    rng, near = random.Random(5), in_memory / "near"
    # The newest steps that were reported, and reported as far; and the one that is there.
    saved = sure = -1
    there: int | None = None
    for number in range(times):
        # Retention meets steps that are not far in some rounds, and few of them in others.
        limit = rng.choice([None, 60_000])
        told = {"near": str(near), "near_steps": 2, "mirror_bytes_per_sec": limit}
        with case_of(number), started(root, **told) as program:
            if there is not None:
                found = int(line_of(program, "restored").split()[1])
                assert found == there
            line_of(program, "ready")
            # In saves, copies, and retention; the first save compiles.
            time.sleep(rng.uniform(0, 2.5))
            program.kill()
            for step, lag in reports_of(program):
                saved, sure = step, max(sure, step - lag)
        if number % 2 == 0:
            shutil.rmtree(near)
            there, least = newest_in(root), sure
        else:
            there, least = newest_in(near), saved
        saved = -1 if there is None else there
        assert saved >= least
        assert harm(root) == []
        # None has left near before it was there.
        far = numbers_in(root)
        assert far == [*range(len(far))]


def newest_in(root: Any) -> int | None:
    """The newest step that restores, as a reader finds it."""
    found = cnr.describe(str(root)).latest_step if exists(epath.Path(root)) else None
    return None if found is None else int(found)


def reports_of(program: subprocess.Popen[str]) -> list[tuple[int, int]]:
    """Steps that an ended program has reported, each with how many were not far."""
    assert program.stdout is not None
    told = [line.split() for line in program.stdout if line.endswith("\n")]
    return [(int(w[1]), int(w[3])) for w in told if w[0] == "saved"]
