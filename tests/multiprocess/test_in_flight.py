"""Several saves in flight: of two processes, on which they end at other times; of one killed."""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parent))
from forks import server_of
from in_flight_worker import FAULTS, STEPS
from killed_worker import DIM, ROWS, change
from test_two_processes import Processes

WORKER = Path(__file__).parent / "in_flight_worker.py"
KILLED = Path(__file__).parent / "killed_worker.py"


def test_saves_in_flight_fail_and_fall_alike_on_both_processes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    *failed, steps, most = first
    assert (failed, steps) == (second[:-2], second[-2])
    assert {most, second[-1]} <= {"in flight 2", "in flight 3"}
    assert len(failed) == len(FAULTS), failed
    for line, (step, where, process) in zip(failed, sorted(FAULTS), strict=True):
        assert f": {step} save_failed process={process} errno=5" in line, failed
        assert f"at {where}" in line, failed
    found = [int(step) for step in steps.removeprefix("steps [")[:-1].split(", ")]
    assert {0, 1, 2, 3, 4, STEPS - 1} <= set(found) and 5 not in found
    assert cnr.verify(root) == ()


def said(log: Path) -> dict[str, int]:
    """What a process has said last of where it went on, and of what is durable."""
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"^(from|durable) (-?\d+)$", text, re.MULTILINE)
    return {what: int(step) for what, step in found}


def killed(root: Path, most: int, seed: int, log: Path) -> tuple[int, int]:
    """Where a run went on, and its newest durable step, when it was killed at some moment."""
    child = server_of(0).start(KILLED, [str(root), str(most), str(seed)], log)
    deadline = time.monotonic() + 90
    while "durable" not in said(log):
        assert child.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    time.sleep(random.Random(seed).random())
    child.kill()
    assert child.wait() == -signal.SIGKILL, log.read_text()
    return said(log)["from"], said(log)["durable"]


def check_root(root: Path, truth: list[np.ndarray], durable: int) -> int:
    """All steps that are listed restore bit for bit; returns the newest."""
    values = truth[-1]
    state = {"user": jnp.asarray(values), "step": jnp.int32(0)}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(root, tables=tables) as reader:
        newest = reader.latest_step()
        assert newest is not None and newest >= durable, "a durable step is lost"
        for step in reader.all_steps()[-4:]:
            while len(truth) <= step + 1:
                truth.append(truth[-1].copy())
                change(truth[-1], len(truth) - 2)
            got = reader.restore(step, args=cnr.args.Restore(state)).state
            assert int(got["step"]) == step
            np.testing.assert_array_equal(np.asarray(got["user"]), truth[step + 1])
    assert [p for p in cnr.verify(root, "structure") if p.consequence] == []
    return newest


@pytest.mark.parametrize(
    "kills", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
@pytest.mark.parametrize("most", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_durable_is_lost_when_a_run_is_killed_at_random(
    tmp_path: Path, most: int, kills: int
) -> None:
    root, truth = tmp_path / "root", [np.zeros((ROWS, DIM), np.float32)]
    newest = -1
    for number in range(kills):
        begun, durable = killed(root, most, number, tmp_path / f"log-{number}")
        assert begun == newest
        newest = check_root(root, truth, durable)
