"""Two processes in a root where another run has been: both refused alike, or both go on."""

from __future__ import annotations

import sys
from pathlib import Path

from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.upkeep.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "runs_worker.py"


def test_two_processes_take_one_view_of_a_used_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    for lines in (first, second):
        for line in lines[:2]:
            assert line.startswith("UsedRootError used_root"), lines
            assert "got 3 steps, 10 to 12" in line, lines
        assert lines[2:] == [
            "joined [10, 11, 13]",
            "before [10, 11, 13]",
            "after [1, 2]",
            "again [1]",
            "2 delta dropped 1/default/manifest.p00001.json",
            "3 full committed None",
            "4 delta committed None",
            "whole [3, 4] None",
        ]
    (folder,) = root.glob("earlier-run-*.root")
    runs = {
        read_manifest(p.parent).run for p in folder.glob("1*/default/manifest.json")
    }
    assert len(runs) == 1
    assert read_manifest(root / "3" / "default").run not in runs
    assert verify(folder) == ()
