"""A service that ignores conditions, of which one program may promise to be the only one.

It is `rclone serve s3`, started where there is such a program.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.cli.app import app

from .bucket_proxy import KEY, SECRET
from .conftest import case_of
from .test_mirrors import caught_up

pytestmark = [
    pytest.mark.slow,  # a proxy that leaves conditions out stands for it by default
    pytest.mark.skipif(shutil.which("rclone") is None, reason="there is no rclone"),
]
ALONE: dict[str, Any] = {"single_writer": True}
DEAD: dict[str, Any] = {"single_writer": True, "writer_is_dead": True}


@pytest.fixture
def served(
    tmp_path: Path, benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder in which the one bucket of the service lies, `runs`."""
    pytest.importorskip("obstore")
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    folder = tmp_path / "served"
    (folder / "runs").mkdir(parents=True)
    with benchmarks("object_stores").rclone(str(folder)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield folder / "runs"


@pytest.fixture
def root(served: Path) -> epath.Path:
    return epath.Path("s3://runs/lr=[0.1] #1")


def files_in(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]


def test_the_first_save_is_refused_before_anything_is_written(
    tiny_run: Any, root: epath.Path, served: Path, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.train(0)
        with pytest.raises(errors.OptionError, match="ignores the cond") as caught:
            run.save(manager, 0)
        assert caught.value.kind == "no_conditions"
    assert files_in(served) == []
    run = tiny_run()
    with run.open(tmp_path / "near", mirror=str(root)) as manager:
        run.run(manager, [0])
    assert "ignores the cond" in " ".join(manager.mirror_report.problems)
    assert files_in(served) == []


def test_a_single_writer_does_there_what_it_does_elsewhere(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url, **ALONE) as manager:
        run.run(manager, range(4))
        assert manager.last_report.kind == "delta"
        for step in (None, *range(4)):
            run.check(manager, step)
        run.restore(manager, 1)
        run.salt = 1
        run.run(manager, [2, 3])  # whose numbers are taken
        assert manager.all_steps() == [0, 1, 2, 3]
    assert {p.kind for p in cnr.verify(url)} <= {"abandoned"}
    rows = cnr.read_rows(url, "user", [0, 3])
    want = run.truth[3]["['params']['user']['embedding']"]
    assert rows.tolist() == want[[0, 3]].tolist()
    settings = {"max_to_keep": 2}
    with run.open(url, settings, policy=cnr.Full(), **ALONE) as manager:
        run.restore(manager, None)
        run.run(manager, range(4, 8))
        assert manager.all_steps() == [6, 7]
        for step in (6, 7):
            run.check(manager, step)
    assert cnr.verify(url) == ()
    with pytest.raises(errors.OptionError, match="commands --single-writer"):
        cnr.prune(url, keep=1, delete=True, writer_is_dead=True)
    assert cnr.prune(url, keep=1, delete=True, **DEAD).is_done
    with run.open(url, **ALONE) as manager:
        assert manager.all_steps() == [7]
        run.restore(manager, None)
        run.run(manager, [8, 9])
    assert cnr.compact(url, **DEAD).is_done
    assert cnr.verify(url) == ()
    for words in (["ls"], ["show", "9"], ["verify"], ["rows", "user", "3"]):
        with case_of(words):
            result = CliRunner().invoke(app, [words[0], url, *words[1:]])
            assert result.exit_code == 0, result.output
    with run.open(url) as reader:
        assert reader.all_steps() == [7, 8, 9]
        for step in (7, 8, 9):
            run.check(reader, step)


def test_a_mirror_there_brings_a_lost_root_back(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run, near, far = tiny_run(), tmp_path / "near", str(root)
    with run.open(near, mirror=far, mirror_keep=2, **ALONE) as manager:
        run.run(manager, range(3))
        caught_up(manager)
        assert manager.mirror_report.problems == ()
    assert cnr.verify(far) == ()
    shutil.rmtree(near)
    with run.open(near, mirror=far, **ALONE) as manager:
        assert manager.latest_step() == 2
        run.restore(manager, None)
        run.same(run.state, run.truth[2])
        run.run(manager, [3])
        assert manager.last_report.kind == "delta", "its chain came back"
    with run.open(near) as manager:
        run.restore(manager, None)
        run.run(manager, [4])
    assert cnr.mirror(near, far, **ALONE).copied_steps == 1
    assert cnr.mirror(near, far, repair=True, **DEAD).problems == ()
    with run.open(far) as reader:
        for step in range(5):
            run.check(reader, step)
    assert cnr.verify(far) == ()
