"""What a file system cannot do is done without; a root that cannot be opened is told by name."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import cnr_jax as cnr
from cnr_jax.testing import faults, inprocess
from cnr_jax.testing.faults import Fault

NO_SYNC = ["EINVAL", "ENOTSUP", "ENOSYS", "ENOTTY", "EBADF", "EISDIR"]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What file systems can do is found out anew, and forgotten after the test."""
    for known in ("_syncs", "_locks"):
        monkeypatch.setattr(f"cnr_jax.repository.store.local.{known}", {})


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [each for each in found if text in each]


@pytest.mark.parametrize(
    ("call", "action"),
    [*(("fsync", each) for each in NO_SYNC), ("open_read", "EISDIR")],
)
def test_folders_that_cannot_be_synced_are_warned_of_once(
    tiny_run: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    call: str,
    action: str,
) -> None:
    run, root = tiny_run(), tmp_path / "new" / "root"
    caplog.set_level(logging.WARNING)
    fault = Fault(call, action=action, times=0, folders=True)
    with inprocess.failing(tmp_path, fault), run.open(root, new_run=True) as manager:
        run.run(manager, [1, 2])
        run.restore(manager, 1)
        run.run(manager, [2, 3])
        run.check(manager, 3)
        cnr.prune(root, keep=1, delete=True, writer_is_dead=True)
        if call == "fsync":  # Python itself opens folders of which it removes all
            cnr.export(root, 3, tmp_path / "plain")
    (told,) = warnings_of(caplog, "cannot sync folders")
    assert os.strerror(getattr(errno, action)) in told and str(tmp_path) in told
    assert cnr.verify(root) == ()


@pytest.mark.parametrize("action", ["EIO", "ENOSPC", "EACCES"])
def test_folders_of_which_syncing_fails_fail_the_save(
    tiny_run: Any, tmp_path: Path, action: str
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root) as manager:
        run.run(manager, [1])
        run.train(2)
        fault = Fault("fsync", action=action, times=0, folders=True)
        with (
            inprocess.failing(root, fault),
            pytest.raises(cnr.errors.SaveError) as caught,
        ):
            run.save(manager, 2)
            manager.wait_until_finished()
        number = getattr(errno, action)
        assert caught.value.errno == number and str(root) in str(caught.value)
        run.run(manager, [3])
        run.check(manager, 3)


@pytest.mark.parametrize("action", ["EINVAL", "ENOTSUP", "EIO"])
def test_files_that_cannot_be_synced_fail_the_save_and_are_named(
    tiny_run: Any, tmp_path: Path, action: str
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root) as manager:
        run.run(manager, [1])
        run.train(2)
        fault = Fault("fsync", action=action, times=0, match="manifest.p00000.json")
        with (
            inprocess.failing(root, fault),
            pytest.raises(cnr.errors.SaveError) as caught,
        ):
            run.save(manager, 2)
            manager.wait_until_finished()
        assert caught.value.errno == getattr(errno, action)
        assert "manifest.p00000.json', in fsync" in str(caught.value)
        assert manager.latest_step() == 1


_PROGRAM = """
import errno, fcntl, os, sys, warnings
def refuse(*given):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = fcntl.lockf = refuse
import jax.numpy as jnp, orbax.checkpoint as ocp, cnr_jax as cnr
root = sys.argv[1] + "/root"
state = {"user": jnp.ones((64, 8)), "w": jnp.ones(30), "name": "a text"}
tables = cnr.find_tables(state, ["user"])
with cnr.CheckpointManager(root, tables=tables, options=cnr.Options(codec="raw")) as manager:
    for step in (1, 2):
        state = {**state, "user": state["user"].at[step].add(1.0), "w": state["w"] + 1}
        other = ocp.args.StandardSave({"x": jnp.arange(step)})
        both = ocp.args.Composite(state=cnr.args.Save(state), other=other)
        manager.save(step, args=both)
        manager.wait_until_finished()
    wanted = {"state": cnr.args.Restore(), "other": ocp.args.StandardRestore()}
    both = manager.restore(2, args=ocp.args.Composite(**wanted))
    assert both.other["x"].tolist() == [0, 1]
    found = both.state.state
    assert (found["user"] == state["user"]).all() and (found["w"] == state["w"]).all()
assert cnr.verify(root) == ()
for form in ("orbax", "zarr", "safetensors"):
    cnr.export(root, 2, sys.argv[1] + "/" + form, format=form)
left = [name for _, _, names in os.walk(root) for name in names if "lock" in name]
print(left)
"""


@pytest.mark.skipif(not faults.available(), reason="faults cannot be injected here")
def test_a_program_saves_and_exports_where_neither_folders_sync_nor_files_lock(
    tmp_path: Path,
) -> None:
    fault = Fault("fsync", action="EINVAL", times=0, folders=True)
    program = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    ran = faults.run(program, below=tmp_path, fault=fault)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "['cnr_jax.writer.lock']\n"
    assert ran.stderr.count("cannot sync folders") == 1
    # Of what is named every file is synced all the same.
    synced = {call.path for call in ran.calls if call.call == "fsync" and not call.hit}
    for path in (tmp_path / "root" / "2").rglob("*"):
        if path.is_file() and "commit_success" not in path.name:
            name = path.relative_to(tmp_path / "root" / "2")
            assert any(str(name.name) in each for each in synced), name


@pytest.mark.parametrize(
    ("call", "action", "reads"),
    [
        ("stat", "ESTALE", True),
        ("stat", "EACCES", False),
        ("scandir", "EACCES", True),
        ("scandir", "EIO", False),
        ("mkdir", "EROFS", False),
        ("mkdir", "ENOSPC", False),
        ("fsync", "EIO", False),
    ],
)
def test_a_root_that_cannot_be_opened_is_named_with_call_and_number(
    tiny_run: Any, tmp_path: Path, call: str, action: str, reads: bool
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    if call in ("stat", "scandir"):
        root.mkdir()
    with (
        inprocess.failing(tmp_path, Fault(call, action=action, times=0)),
        pytest.raises(cnr.errors.RootError) as caught,
    ):
        cnr.CheckpointManager(root, tables=None if reads else run.tables)
    found = caught.value
    assert isinstance(found, OSError)
    assert (found.path, found.call) == (str(root), call)
    assert found.errno == getattr(errno, action)
    assert str(found).startswith(f"the root {root} cannot be opened\n")
    assert f"in {call}\n" in str(found) and f"[Errno {found.errno}]" in str(found)
    # Nothing is in the way of the next one.
    run.open(root).close()


def test_paths_that_can_be_no_root_are_named(tiny_run: Any, tmp_path: Path) -> None:
    tables = tiny_run().tables
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "file").touch()
    known = [
        ("loop", "EEXIST", "mkdir"),
        ("gone", "EEXIST", "mkdir"),
        ("n" * 300, "ENAMETOOLONG", "open"),
    ]
    for name, number, call in known:
        with pytest.raises(cnr.errors.RootError, match=name) as caught:
            cnr.CheckpointManager(tmp_path / name, tables=tables)
        assert caught.value.errno == getattr(errno, number)
        assert caught.value.call == call
    for name in ("file", "file/below"):
        with pytest.raises(cnr.errors.OptionError, match="is a file"):
            cnr.CheckpointManager(tmp_path / name, tables=tables)


@pytest.mark.parametrize(
    ("call", "action"), [("open", "ENOSPC"), ("open", "EROFS"), ("rename", "ESTALE")]
)
def test_a_claim_that_cannot_be_written_is_named_with_call_and_number(
    tiny_run: Any, tmp_path: Path, call: str, action: str
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root) as manager:
        run.train(1)
        fault = Fault(call, action=action, times=0, match="cnr_jax.writer")
        with (
            inprocess.failing(root, fault),
            pytest.raises(cnr.errors.SaveError) as caught,
        ):
            run.save(manager, 1)
        assert caught.value.errno == getattr(errno, action)
        assert f"in {call}\n" in str(caught.value) and str(root) in str(caught.value)
        run.run(manager, [2])
        run.check(manager, 2)


def test_an_export_goes_on_where_nobody_says_how_much_room_there_is(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root) as manager:
        run.run(manager, [1])

    def refuse(path: Any) -> Any:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)

    told = os.statvfs_result([4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255])
    for name, answer in (("refused", refuse), ("nothing", lambda path: told)):
        monkeypatch.setattr("os.statvfs", answer)
        cnr.export(root, 1, tmp_path / name)
        assert (tmp_path / name).is_dir()
