"""Two processes whose root, or the mirror of whose root, is in a bucket."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.store import exists, names_in

from ..bucket_proxy import Proxy

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes, assert_same, values

WORKER = Path(__file__).parent / "bucket_worker.py"


@pytest.fixture
def root(bucket: epath.Path) -> epath.Path:
    return bucket / "runs/of two"


def processes_of(root: Any, out: Path, *options: object, count: int = 2) -> Processes:
    """Processes that see the service which the environment tells of."""
    told = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
    given = ("--environment", json.dumps(told), *options)
    return Processes(count, root, out, *given, worker=WORKER)


def told(root: Any, out: Path, *options: object) -> list[str]:
    """What both processes of a run tell alike."""
    with processes_of(root, out, *options) as processes:
        first, second = processes.finish()
    assert first == second
    return first


def check(root: Any, step: int, want: dict[str, np.ndarray]) -> None:
    """A step restores in this process, which has other devices, and nothing harms the root."""
    with cnr.CheckpointManager(str(root)) as reader:
        assert reader.latest_step() == step
        params = reader.restore(None).state["params"]
    for table, leaves in params.items():
        got = np.asarray(leaves["embedding"])
        np.testing.assert_array_equal(got, want[f"['params']['{table}']['embedding']"])
    assert cnr.verify(root) == ()


def test_two_processes_save_to_a_bucket_and_go_back(
    root: epath.Path, tmp_path: Path
) -> None:
    lines = told(root, tmp_path / "out")
    assert lines == [
        "saved 0 full on None",
        *(f"saved {step} delta on {step - 1}" for step in (1, 2, 3)),
        "restored 3 of [0, 1, 2, 3]",
        "restored 1 of [0, 1, 2, 3]",
        "saved 2 delta on 1",
        "saved 3 delta on 2",
        "steps [0, 1, 2, 3]",
        *(f"restored {step} of [0, 1, 2, 3]" for step in (3, 1, 2, 3)),
        "saved 4 full on None",
        "saved 5 delta on 4",
        "steps [4, 5]",
        "restored 5 of [4, 5]",
    ]
    there = [name for name in names_in(root) if exists(root / name)]
    folders = [name for name in there if not name.endswith(".json")]
    assert folders == ["4", "5"], "what was left behind is gone too"
    item = root / "5/default"
    assert {"rows.p00000", "rows.p00001"} < {*names_in(item)}, "both wrote rows"
    check(root, 5, values(tmp_path / "out", 0))


@pytest.mark.slow  # a bucket is a mirror of one process as of two
def test_what_process_0_has_copied_comes_back_on_both(
    root: epath.Path, tmp_path: Path
) -> None:
    near = tmp_path / "near"
    options = ("--mirror", root)
    with processes_of(near, tmp_path / "out", *options) as processes:
        first, second = processes.finish()
    copied = [lines.pop(4) for lines in (first, second)]
    assert copied == ["copied (4, ())", "copied None"], "process 1 has no mirror"
    assert first == second
    assert first == [
        "saved 0 full on None",
        *(f"saved {step} delta on {step - 1}" for step in (1, 2, 3)),
        *(f"restored {step} of [0, 1, 2, 3]" for step in (3, 1, 3)),
        "saved 4 delta on 3",
        *(f"restored {step} of [0, 1, 2, 3, 4]" for step in (0, 4)),
    ]
    for where in (near, root):
        check(where, 4, values(tmp_path / "out", 0))


@pytest.mark.slow  # as on a disk
def test_what_one_process_may_not_write_fails_the_save_on_both(
    root: epath.Path, tmp_path: Path, proxy: Proxy
) -> None:
    proxy.harm = lambda kind, path, _: (
        403 if kind == "PUT" and "/2/default/rows.p00001/" in path else None
    )
    lines = told(root, tmp_path / "out", "--goes-on", 4)
    failed = lines.pop(2)
    assert failed.startswith("failed 2 save_failed on 1: RefusedError: answer 403 ")
    assert f"{root}/2/default/rows.p00001/" in failed and "hint: " in failed
    assert lines == [
        "saved 0 full on None",
        "saved 1 delta on 0",
        "saved 3 delta on 1",
        "restored 3 of [0, 1, 3]",
    ]
    check(root, 3, values(tmp_path / "out", 0))


@pytest.mark.slow  # as on a disk
def test_a_process_that_is_killed_leaves_no_step_in_a_bucket(
    root: epath.Path, tmp_path: Path, proxy: Proxy
) -> None:
    """First process 1, before it says what it has written; then process 0, before the commit."""
    out, stop = tmp_path / "out", 6
    for step, victim, file in (
        (2, 1, names.process_manifest(1)),
        (4, 0, names.MANIFEST),
    ):
        comes, goes = threading.Event(), threading.Event()

        def harm(
            kind: str,
            path: str,
            _: int,
            held: str = f"/{step}/default/{file}",
            comes: threading.Event = comes,
            goes: threading.Event = goes,
        ) -> str | None:
            if kind != "PUT" or not path.endswith(held):
                return None
            comes.set()
            assert goes.wait(300)
            return "reset"

        proxy.harm = harm
        with processes_of(root, out, "--goes-on", stop) as processes:
            while not comes.wait(0.1):
                processes.left_secs()
                assert all(child.poll() is None for child in processes.children), (
                    processes.tail()
                )
            processes.children[victim].send_signal(signal.SIGKILL)
            assert processes.children[victim].wait() == -signal.SIGKILL
        goes.set()
        proxy.harm = lambda *_: None
        found = cnr.describe(root)
        assert [each.step for each in found.steps] == [*range(step)]
        assert found.unfinished == (str(step),)
    lines = told(root, out, "--goes-on", stop)
    assert lines == [
        "restored 3 of [0, 1, 2, 3]",
        "saved 4 delta on 3",
        "saved 5 delta on 4",
        "restored 5 of [0, 1, 2, 3, 4, 5]",
    ]
    assert_same(values(out, 1), values(out, 0))
    check(root, 5, values(out, 0))
    # One process goes on with what two have saved.
    with processes_of(root, out, "--goes-on", stop + 1, count=1) as process:
        (alone,) = process.finish()
    assert alone[:2] == ["restored 5 of [0, 1, 2, 3, 4, 5]", "saved 6 delta on 5"]
    check(root, 6, values(out, 0))
