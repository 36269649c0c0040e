"""Two processes that are given near roots: both are refused alike, before anything is made."""

from __future__ import annotations

import sys
from pathlib import Path

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "near_worker.py"


def test_near_is_refused_on_both_processes_and_a_mirror_is_not(tmp_path: Path) -> None:
    root, near = tmp_path / "root", tmp_path / "near"
    given = (root, tmp_path / "out", "--near", near)
    with Processes(2, *given, worker=WORKER) as processes:
        first, second = processes.finish()
    for told, made, saved in (first, second):
        assert told.startswith("OptionError "), told
        assert "got 2 processes, expected 1" in told and "hint: save to a root" in told
        assert (made, saved) == ("made []", "saved [0]")
    assert not [*tmp_path.glob("near.*")]
    assert cnr.describe(root).latest_step == cnr.describe(near).latest_step == 0
    assert cnr.verify(root) == cnr.verify(near) == ()
