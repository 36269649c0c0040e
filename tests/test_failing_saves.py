"""Saves that fail: the error comes out once, training goes on, the next save has all rows.

The faults are real ones: a full or read-only file system, no descriptors left, a file system
that returns errors, signals. What cannot be had here is skipped with a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src import asyncio_utils

import cnr_jax as cnr
from cnr_jax import handler
from cnr_jax.checkpointer.saving import capture, dense
from cnr_jax.checkpointer.saving.warm_up import WarmUp
from cnr_jax.checkpointer.tracking import tracker
from cnr_jax.errors import SaveError
from cnr_jax.format.names import REMOVED_MARK, TEMPORARY_SUFFIX
from cnr_jax.repository import rows_writer
from cnr_jax.repository.committer import RenameCommitter
from cnr_jax.repository.index import planner
from cnr_jax.repository.replay.dense_tiles import TiledDense
from cnr_jax.repository.staging import Stage
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.chunk import Chunk
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Call, Fault

from .conftest import xla_flags

WORKER = Path(__file__).parent / "saving_worker.py"
PROJECT = Path(__file__).parents[1]

# Orbax leaves coroutines behind when it cannot write its metadata.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Lets what Orbax leaves behind warn in the test that it belongs to."""
    yield
    gc.collect()


def temporaries(root: Path) -> list[str]:
    """Folders that saves may write into; those that are being deleted have other names."""
    held = [p.name for p in root.iterdir() if REMOVED_MARK not in p.name]
    return sorted(name for name in held if TEMPORARY_SUFFIX in name)


def wait_for_removal(root: Path) -> None:
    """Until everything that was removed is deleted, which goes on behind training."""
    deadline = time.monotonic() + 60
    while any(REMOVED_MARK in path.name for path in root.iterdir()):
        assert time.monotonic() < deadline, sorted(root.iterdir())
        time.sleep(0.01)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own, where the machine lets us mount one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def full_disk(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def read_only_disk(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextlib.contextmanager
def no_descriptors(disk: Path) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(open_files()), hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


@contextlib.contextmanager
def small_files_only(disk: Path) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def file_in_the_way(disk: Path) -> Iterator[None]:
    """The root is a file for a while, so that no directory can be made in it."""
    root = disk / "run"
    root.rename(disk / "aside")
    root.write_text("not a directory")
    try:
        yield
    finally:
        root.unlink()
        (disk / "aside").rename(root)


FAULTS = {
    "full": (full_disk, {errno.ENOSPC}),
    "read only": (read_only_disk, {errno.EROFS}),
    "no descriptors": (no_descriptors, {errno.EMFILE}),
    "small files": (small_files_only, {errno.EFBIG}),
    "file in the way": (file_in_the_way, {errno.ENOTDIR, errno.EEXIST}),
}


def failed_save(manager: Any, run: Any, step: int) -> SaveError:
    """Saves, and the error of the save, from whichever call it comes out of."""
    with pytest.raises(SaveError) as caught:
        manager.save(step, args=cnr.args.Save(run.state, run.touched))
        manager.wait_until_finished()
    return caught.value


@pytest.mark.parametrize(
    ("fault", "streams"),
    [*((fault, False) for fault in FAULTS), ("full", True), ("file in the way", True)],
)
def test_a_real_fault_comes_out_once_and_the_next_save_has_all_rows(
    tiny_run: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    streams: bool,
) -> None:
    run = tiny_run()
    inject, numbers = FAULTS[fault]
    with small_disk(tmp_path / "disk") as disk:
        budget = {"max_staging_bytes": 64} if streams else {}
        manager = run.open(disk / "run", **budget)
        run.run(manager, [1])
        run.train(2)
        with inject(disk):
            error = failed_save(manager, run, 2)
        manager.check_for_errors()
        manager.wait_until_finished()
        assert not [r for r in caplog.records if r.exc_info], "each is told in a line"
        assert error.errno in numbers, error
        assert error.step == 2
        assert "step 2" in str(error) and str(disk) in str(error)
        assert "next save contains" in str(error)
        assert manager.latest_step() == 1
        run.run(manager, [3])
        assert temporaries(disk / "run") == []
        manifest = run.manifest(manager, 3)
        assert manifest.parent is not None and manifest.parent.directory == "1"
        run.check(manager, 3)
        run.check(manager, 1)
        manager.close()


# ---- wherever it fails ----------------------------------------------------------------------


@contextlib.contextmanager
def no_array_can_be_made(storage: Any) -> Iterator[None]:
    """A file is where the folder of the arrays has to be."""

    def put(call: Any) -> None:
        if call.call == "mkdir" and call.path.endswith("/default"):
            Path(call.path, "rows.p00000").write_bytes(b"")

    with inprocess.watching(storage.below, after=put):
        yield


def no_memory_in(owner: Any, name: str) -> Callable[[Any], Any]:
    """No storage fails there, but memory may run out."""

    @contextlib.contextmanager
    def failing(storage: Any) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, _no_memory)
            yield

    return failing


def _no_memory(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("on purpose")


POINTS: dict[str, Callable[[Any], Any]] = {
    "finding rows": no_memory_in(tracker.Tracker, "find"),
    "choosing rows": no_memory_in(capture, "Rows"),
    "gathering": no_memory_in(host, "gather_chunks"),
    "dense leaves": no_memory_in(dense, "bytes_of"),
    "encoding": no_memory_in(rows_writer, "encode_chunks"),
    "making arrays": no_array_can_be_made,
    "ending arrays": lambda s: s.failing("/rows.p00000/", "open_read", "EIO"),
    "syncing arrays": lambda s: s.failing("/rows.p00000", "fsync", "EIO"),
    "process manifest": lambda s: s.failing("/manifest.p00000.json"),
    "syncing dense files": lambda s: s.failing("/dense", "fsync", "EIO"),
    "manifest": lambda s: s.failing("/manifest.json"),
    "syncing the manifest": lambda s: s.failing("/manifest.json", "fsync", "EIO"),
    "commit": lambda s: s.failing(TEMPORARY_SUFFIX, "rename", "EIO", times=1),
}


@pytest.mark.parametrize("point", POINTS)
def test_wherever_a_save_fails_nothing_changes_and_its_rows_are_in_the_next(
    tiny_run: Any, tmp_path: Path, storage: Any, point: str
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [1])
    run.train(2)
    with POINTS[point](storage), pytest.raises((SaveError, MemoryError)):
        manager.save(2, args=cnr.args.Save(run.state, run.touched))
        manager.wait_until_finished()
    # A retry of the step uses the same folder: nobody may still be writing into it.
    assert "cnr_write_rows" not in [thread.name for thread in threading.enumerate()]
    manager.check_for_errors()
    manager.wait_until_finished()
    assert manager.all_steps() == [1] and manager.latest_step() == 1
    run.train(3)
    run.run(manager, [2])
    report = manager.last_report
    assert report is not None and (report.step, report.parent) == (2, 1)
    tables = [path for path in run.truth[1] if "params" in path]
    changed = [(run.truth[1][at] != run.truth[2][at]).any(axis=1) for at in tables]
    assert report.rows == sum(int(rows.sum()) for rows in changed)
    assert temporaries(tmp_path) == []
    run.check(manager, 2)
    run.check(manager, 1)
    manager.close()


def test_an_error_holds_nothing_of_what_was_to_be_saved(tmp_path: Path) -> None:
    state = {"user": jnp.ones((64, 8)), "w": jnp.ones(3)}
    tables = cnr.find_tables(state, ["user"])
    fault = Fault("rename", action="EIO", match="1.orbax")
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        touched = cnr.init_touched(state, tables)
        with inprocess.failing(tmp_path, fault):
            manager.save(1, args=cnr.args.Save(state, touched))
            with pytest.raises(SaveError) as caught:
                manager.wait_until_finished()
        held = [weakref.ref(leaf) for leaf in jax.tree.leaves((state, touched))]
        del state, touched
        gc.collect()
        assert [each() for each in held if each() is not None] == []
        assert "Input/output error" in str(caught.value)


def test_each_attempt_at_a_step_is_written_into_a_folder_of_another_name(
    tiny_run: Any, tmp_path: Path
) -> None:
    """Whoever still writes for the one that failed must not write into the next."""
    run, folders = tiny_run(), list[str]()

    def note(call: Call) -> None:
        path = Path(call.path)
        if call.call == "mkdir" and path.parent == tmp_path:
            folders.append(path.name)
        elif call.call == "rename" and [path.name] == folders:
            folders.append("failed")
            raise OSError(errno.EIO, "Input/output error", call.path)

    with run.open(tmp_path) as manager, inprocess.watching(tmp_path, before=note):
        run.train(1)
        run.save(manager, 1)
        with pytest.raises(SaveError, match="step 1 failed"):
            manager.wait_until_finished()
        run.save(manager, 1)
        manager.wait_until_finished()
    first, _, second = folders
    assert first != second and first.split("-")[:-1] == second.split("-")[:-1]


def test_a_run_of_failing_saves_leaks_nothing(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    before = set(threading.enumerate())
    kept: list[SaveError] = []
    manager = run.open(tmp_path)
    run.run(manager, [0])
    descriptors = len(open_files())
    for step in range(1, 6):
        run.train(step)
        with storage.failing("/rows.p00000/", "open_read", "EIO"):
            kept.append(failed_save(manager, run, step))
    assert [error.step for error in kept] == [1, 2, 3, 4, 5]
    assert all(isinstance(error.__cause__, OSError) for error in kept)
    wait_for_removal(tmp_path)
    assert len(open_files()) == descriptors
    # The errors are kept; the rows that the failed saves had staged are not.
    assert staged_rows() == []
    assert temporaries(tmp_path) == []
    run.run(manager, [6])
    run.check(manager, 6)
    manager.close()
    left = {t.name for t in set(threading.enumerate()) - before if t.is_alive()}
    assert not {name for name in left if "save" in name or "cnr" in name}, left


def staged_rows() -> list[Chunk]:
    """What is held of any save."""
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, Chunk)]


def test_no_thread_waits_for_directories_that_never_come(
    tiny_run: Any, tmp_path: Path
) -> None:
    """Orbax's own futures would wait five minutes for each such save."""
    run = tiny_run()
    manager = run.open(tmp_path / "run")
    run.run(manager, [1])
    before = {t for t in threading.enumerate() if t.is_alive()}
    for step in (2, 3):
        run.train(step)
        with file_in_the_way(tmp_path):
            failed_save(manager, run, step)
    assert {t for t in threading.enumerate() if t.is_alive()} <= before
    run.run(manager, [4])
    run.check(manager, 4)
    manager.close()


def test_an_error_that_is_not_asked_for_comes_out_of_close_which_still_closes(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path, save_on_sigterm=True)
    with storage.failing():
        run.train(1)
        manager.save(1, args=cnr.args.Save(run.state, run.touched))
        with pytest.raises(SaveError, match="step 1 failed"):
            manager.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    manager.close()


def test_polling_for_errors_neither_waits_nor_swallows(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [1])
    with storage.held() as gate:
        run.train(2)
        manager.save(2, args=cnr.args.Save(run.state, run.touched))
        manager.check_for_errors()
        assert manager.is_saving_in_progress()
        gate.open(MemoryError("on purpose"))
        with pytest.raises(SaveError, match="step 2"):
            while True:
                manager.check_for_errors()
    manager.wait_until_finished()
    run.run(manager, [3])
    run.check(manager, 3)
    manager.close()


def test_a_plain_manager_goes_on_too(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw"))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=registry.preservation_policy()
    )
    manager = ocp.CheckpointManager(
        tmp_path, options=options, handler_registry=registry
    )
    run.run(manager, [1])
    with storage.failing():
        run.train(2)
        manager.save(2, args=cnr.args.Save(run.state, run.touched))
        with pytest.raises(SaveError, match="step 2 failed"):
            manager.wait_until_finished()
    run.run(manager, [3])
    assert temporaries(tmp_path) == []
    run.check(manager, 3)
    manager.close()


def _interrupt(*args: Any, **kwargs: Any) -> Any:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("the signal did not arrive")


async def _interrupt_while_waiting(*args: Any, **kwargs: Any) -> Any:
    """As most interrupts come: the loop waits for storage, and nothing runs in it."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, signal.raise_signal, signal.SIGINT)
    await asyncio.sleep(60)


_launch = handler.CnrHandler.async_save


async def _interrupt_after_launch(*args: Any, **kwargs: Any) -> Any:
    """As where another item of the step is waited for."""
    await _launch(*args, **kwargs)
    return await _interrupt_while_waiting()


INTERRUPTED = {
    "finding rows": (tracker.Tracker, "find"),
    "planning": (planner.Planner, "plan"),
    "gathering": (capture, "Rows"),
    "staging": (Stage, "put"),
    "dense leaves": (dense, "bytes_of"),
    "making folders": (RenameCommitter, "prepare"),
}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", INTERRUPTED)
def test_an_interrupt_during_save_leaves_a_manager_that_goes_on(
    tiny_run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [1, 2])
    owner, name, *how = INTERRUPTED[where]
    run.train(3)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, *(how or [_interrupt]))
        with pytest.raises(KeyboardInterrupt):
            manager.save(3, args=cnr.args.Save(run.state, run.touched))
    assert not manager.is_saving_in_progress()
    truth = run.values()
    if 3 in manager.all_steps():  # it had been written already
        run.check(manager, 3, {3: truth})
    else:
        assert run.save(manager, 3), "the same step can be saved again"
    run.run(manager, [4])
    run.check(manager, 4)
    assert temporaries(tmp_path) == []
    manager.close()
    assert staged_rows() == []
    assert not [r for r in caplog.records if r.name == "asyncio"], "told already"


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_while_the_first_is_cleared_up_holds_nothing_up(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_end = tiny_run(), threading.Event()
    manager = run.open(tmp_path)
    run.run(manager, [1, 2])
    run.train(3)

    def hold(*args: Any) -> Any:
        """As storage that hangs: it cannot be told that its save is to end."""
        signal.raise_signal(signal.SIGINT)
        threading.Timer(1.5, signal.raise_signal, [signal.SIGINT]).start()
        assert may_end.wait(60)
        raise OSError(errno.EIO, "too late")

    with monkeypatch.context() as patch:
        patch.setattr(RenameCommitter, "prepare", hold)
        with pytest.raises(KeyboardInterrupt):
            manager.save(3, args=cnr.args.Save(run.state, run.touched))
        assert manager.is_saving_in_progress()
        may_end.set()
        manager.wait_until_finished()
    assert manager.all_steps() == [1, 2]
    run.run(manager, [4])
    run.check(manager, 4)
    manager.close()
    assert temporaries(tmp_path) == []
    assert staged_rows() == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_restore_leaves_no_task_behind(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    run.run(manager, [1])
    manager.wait_until_finished()

    def waiting(*args: Any, **kwargs: Any) -> Any:
        return asyncio_utils.run_sync(_interrupt_while_waiting())

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(TiledDense, "restore", waiting)
            with pytest.raises(KeyboardInterrupt):
                manager.restore(1, args=cnr.args.Restore(run.state))
        assert not hasattr(threading.current_thread(), "main_task")
    run.check(manager, 1)
    manager.close()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_waiting_loses_no_step(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    main = threading.main_thread().ident
    assert main is not None
    with storage.held() as gate:
        run.train(1)
        assert run.save(manager, 1)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
            manager.wait_until_finished()
        gate.open()
        manager.wait_until_finished()
    assert manager.all_steps() == [1]
    run.run(manager, [2])
    run.check(manager, 1)
    run.check(manager, 2)
    manager.close()


# ---- saves while one is being written -------------------------------------------------------


def test_a_save_that_is_due_while_one_is_written_is_skipped_if_asked(
    tiny_run: Any,
    tmp_path: Path,
    storage: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path, when_busy="skip")
    with storage.held() as gate, caplog.at_level("INFO"):
        run.train(1)
        assert run.save(manager, 1)
        run.train(2)
        assert not run.save(manager, 2)
        assert "step 2 is not saved" in caplog.text
        run.train(3)
        threading.Timer(0.2, gate.open).start()
        assert run.save(manager, 3, force=True), "a forced save waits"
        manager.wait_until_finished()
        run.run(manager, [4])
    assert manager.all_steps() == [1, 3, 4]
    for step in (1, 3, 4):
        run.check(manager, step)
    manager.close()


def test_a_save_that_is_due_while_one_is_written_waits_by_default(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run = tiny_run()
    manager = run.open(tmp_path)
    with storage.held() as gate:
        run.train(1)
        assert run.save(manager, 1)
        threading.Timer(0.2, gate.open).start()
        for step in (2, 3):  # back to back
            run.train(step)
            assert run.save(manager, step)
        manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3]
    for step in (1, 2, 3):
        run.check(manager, step)
    manager.close()


def test_unknown_ways_of_being_busy_and_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(cnr.errors.OptionError, match="when_busy 'later'"):
        cnr.Options(when_busy="later")  # type: ignore[arg-type]
    with pytest.raises(cnr.errors.OptionError, match="timeout_secs"):
        cnr.Options(timeout_secs=0)


# ---- signals and errors of the file system, in a program of their own -----------------------


@contextlib.contextmanager
def worker(root: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training run that says what it does, line by line."""
    env = dict(os.environ, PYTHONPATH=str(PROJECT), JAX_PLATFORMS="cpu")
    env["XLA_FLAGS"] = xla_flags("--xla_force_host_platform_device_count=2")
    child = subprocess.Popen(
        [sys.executable, str(WORKER), str(root), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    killer = threading.Timer(120, child.kill)
    killer.start()
    try:
        yield child
    finally:
        killer.cancel()
        # Processes that it has forked would hold its output open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def said(child: subprocess.Popen[str], start: str) -> str:
    """The next line that starts so."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(start):
            return line.strip()
    pytest.fail(f"the run ended with {child.wait()} before it said {start!r}")


def tell(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()


def test_sigterm_leads_to_a_last_delta_and_a_second_one_ends_the_program(
    tmp_path: Path,
) -> None:
    with worker(tmp_path / "root") as child:
        said(child, "step 3")
        child.send_signal(signal.SIGTERM)
        last = int(said(child, "last").split()[1])
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM
    manifest = read_manifest(tmp_path / "root" / str(last) / "default")
    # The interval is far off, and the policy alone would have saved everything.
    assert (manifest.kind, manifest.step) == ("delta", last)
    assert "about to end" in manifest.reason
    steps = {int(p.name) for p in (tmp_path / "root").iterdir() if p.name.isdigit()}
    assert steps == {0, last}
    with cnr.CheckpointManager(tmp_path / "root") as reader:
        state = reader.restore(None).state
    with np.load(tmp_path / "root.npz") as truth:
        np.testing.assert_array_equal(state["user"], truth["user"])


def test_processes_that_a_run_has_forked_end_at_the_sigterm_that_it_saves_after(
    tmp_path: Path,
) -> None:
    """As a cluster sends it: to all processes of the job at once."""
    with worker(tmp_path / "root", "--forks", "2") as child:
        said(child, "step 3")
        os.killpg(child.pid, signal.SIGTERM)
        last = int(said(child, "last").split()[1])
        # It waits for them.
        assert child.wait(60) == 0
    assert read_manifest(tmp_path / "root" / str(last) / "default").kind == "delta"


def test_a_manager_that_could_not_be_made_listens_to_no_signal(
    tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, run = signal.getsignal(signal.SIGTERM), tiny_run()
    with monkeypatch.context() as patch:
        patch.setattr(WarmUp, "compile", _no_memory)
        with pytest.raises(MemoryError):
            run.open(tmp_path, save_on_sigterm=True)
    assert signal.getsignal(signal.SIGTERM) is before
    with run.open(tmp_path, save_on_sigterm=True) as manager:
        run.run(manager, [1])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_that_no_save_has_followed_is_told_of_at_the_end(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a loop saves at some steps only, and stops before one of these."""
    for saves in (True, False):
        run = tiny_run()
        with run.open(tmp_path / str(saves), save_on_sigterm=True) as manager:
            run.run(manager, [3])
            signal.raise_signal(signal.SIGTERM)
            assert manager.reached_preemption(4)
            if saves:
                run.run(manager, [4])
        told = "no save after it: the run can go on from step 3" in caplog.text
        assert told is not saves


def test_sigterm_is_left_alone_unless_asked_for_and_given_back(
    tiny_run: Any, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with tiny_run().open(tmp_path / "a") as manager:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not manager.reached_preemption(1)
    run = tiny_run()
    with run.open(tmp_path / "b", save_on_sigterm=True) as manager:
        assert not manager.reached_preemption(1)
        signal.raise_signal(signal.SIGTERM)
        # A loop that has saved, or not, at step 1 must not stop after it.
        assert not manager.reached_preemption(1)
        assert manager.reached_preemption(2)
        assert signal.getsignal(signal.SIGTERM) is before
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            run.open(tmp_path / "c", save_on_sigterm=True)
        except cnr.errors.OptionError as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])


@contextlib.contextmanager
def failing_calls(
    child: subprocess.Popen[str], calls: str, out: Path
) -> Iterator[None]:
    """The system returns EIO for these calls of a running program, for a while."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"]
    command = [strace, "-f", "-qq", "-o", str(out), "-p", str(child.pid), *inject]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while "TracerPid:\t0" in Path(f"/proc/{child.pid}/status").read_text():
            if tracer.poll() is not None:
                pytest.skip(f"strace may not attach: {tracer.communicate()[1]}")
            assert time.monotonic() < deadline, "strace does not attach"
            time.sleep(0.05)
        yield
    finally:
        tracer.terminate()
        tracer.communicate()
    assert "INJECTED" in out.read_text(), "nothing was hit"


@pytest.mark.slow
def test_a_file_system_that_returns_errors_for_a_while(tmp_path: Path) -> None:
    with worker(tmp_path / "root", "--asks") as child:
        said(child, "ready")
        for calls in ("fsync,fdatasync", "mkdir,mkdirat", "rename,renameat,renameat2"):
            with failing_calls(child, calls, tmp_path / "trace"):
                tell(child, "save")
                assert f"errno={errno.EIO}" in said(child, "error"), calls
            tell(child, "save")
            last = int(said(child, "saved").split()[1])
        tell(child, "end")
        assert child.wait(60) == 0
    with cnr.CheckpointManager(tmp_path / "root") as reader:
        state = reader.restore(last).state
    with np.load(tmp_path / "root.npz") as truth:
        np.testing.assert_array_equal(state["user"], truth["user"])
