"""Several saves in flight of two processes, which end at other times on each."""

from __future__ import annotations

import sys
from pathlib import Path

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parent))
from in_flight_worker import FAULTS, STEPS
from test_two_processes import Processes

WORKER = Path(__file__).parent / "in_flight_worker.py"


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
