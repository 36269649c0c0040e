"""Two processes go on from what was merged beside them, and know the same steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import cnr_jax as cnr

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "merged_worker.py"


@pytest.mark.slow
def test_two_processes_take_up_what_was_merged(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    root, out = tmp_path / "root", tmp_path / "out"
    with Processes(2, root, out, worker=WORKER) as processes:
        first, second = processes.finish()
    assert first == second == ["[6, 7, 8] 8"]
    steps = sorted(name for name in os.listdir(root) if name[0].isdigit())
    assert steps == ["6.g1.merged", "7", "8"]
    assert not [each for each in cnr.verify(root, level="data") if each.consequence]
