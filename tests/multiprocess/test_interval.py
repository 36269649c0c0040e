"""Two processes that decide themselves how often they save come to the same steps."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parent))
from interval_worker import FAILS
from test_two_processes import Processes

WORKER = Path(__file__).parent / "interval_worker.py"


def test_both_save_at_the_same_steps_and_again_after_a_failure(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    assert first == second
    failed, asked, steps, *told = first
    saved = ast.literal_eval(steps.removeprefix("steps "))
    begun = ast.literal_eval(asked.removeprefix("asked "))
    lost = begun[FAILS - 1]
    assert f": {lost} save_failed process=1 errno=5" in failed
    at = int(failed.removeprefix("at ").split(":")[0])
    # What the failure is raised at is no save; the step after it is.
    assert [*begun] == sorted({*saved, lost, at}) and at + 1 in saved
    reports = {step: (every, why) for step, every, why in map(ast.literal_eval, told)}
    assert [*reports] == saved
    for one, two in itertools.pairwise(saved):
        if one < lost < two:
            continue
        assert two - one == reports[one][0]
    assert any(why for _, why in reports.values())
    profile = cnr.goodput.recorded_profile(root)
    assert profile is not None
    assert profile.processes == 2 and profile.node_secs > 0
    assert cnr.verify(root) == ()
