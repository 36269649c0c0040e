"""Near roots: saves commit in memory, and travel to the root of the run behind training."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.store import LocalStore, store_of

from .bucket_proxy import Proxy
from .conftest import each_of
from .test_mirrors import (
    caught_up,
    far,
    harm,
    line_of,
    mostly_on_disk,
    proxied,
    root,
    started,
    steps_in,
    until,
)

__all__ = ["far", "proxied", "root"]  # fixtures


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


def test_saves_commit_near_and_travel_to_the_root(
    tiny_run: Any, near: Path, far: epath.Path
) -> None:
    run = tiny_run()
    options = {"near": near, "near_steps": 2, "policy": cnr.Consecutive(max_chain=2)}
    with run.open(str(far), **options) as manager:
        run.run(manager, range(3))
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
            assert manager.mirror_report.lag_steps == 0
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
    "times",
    [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["few", "many"],
)
def test_near_that_is_lost_at_any_time_loses_the_lag_alone(
    near: Path, root: Path, times: int
) -> None:
    """Every other time the process alone is killed: then nothing is lost."""
    rng, saved, sure = random.Random(5), -1, -1
    for number in range(times):
        with started(root, near=str(near), near_steps=2) as program:
            if number:
                found = int(line_of(program, "restored").split()[1])
                assert sure <= found, "what was far is there"
                assert near.exists()
                saved = found
            line_of(program, "ready")
            left, lag = rng.randrange(1, 4), saved + 2
            while left > 0 or (sure < 0 and lag > saved):
                _, saved, _, lag = map(_number, line_of(program, "saved").split())
                left -= 1
        sure = saved
        if number % 2 == 0:
            sure = max(0, saved - lag)
            shutil.rmtree(near)
        assert harm(root) == []


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 0
