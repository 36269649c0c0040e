"""What may be a root: local paths, `file://`, `gs://`, `s3://`; all else is refused at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
    "s3:bucket/x",
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


# A step that is named is looked for where the newest one is.
@pytest.mark.parametrize(
    "take",
    [save, restore, pytest.param(restore_step, marks=pytest.mark.slow), look, verify],
)
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


@each_of(
    "url,known",
    [
        ("s3a://bucket/a run", "s3://bucket/a run"),
        ("s3n://bucket", "s3://bucket"),
        ("S3://bucket/run", "s3://bucket/run"),
        ("gcs://bucket/run", "gs://bucket/run"),
    ],
)
def test_other_addresses_of_a_bucket_say_which_one_is_meant(
    url: str, known: str
) -> None:
    with pytest.raises(errors.OptionError, match=f"hint: {known} is the same bucket"):
        cnr.CheckpointManager(url)
    with pytest.raises(errors.OptionError, match="hint: pass URLs as strings"):
        cnr.CheckpointManager(Path(url))


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
