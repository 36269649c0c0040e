"""Two processes whose tables grow, get other ids and another name: each fills its own shards."""

from __future__ import annotations

import sys
from pathlib import Path

from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.upkeep.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "moved_rows_worker.py"


def test_tables_of_two_processes_change_together(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    for lines in (first, second):
        assert "ids[" in lines[0] and "is 128, expected a row of" in lines[0], lines
        assert lines[1].startswith("OptionError option processes are asked"), lines
        assert "ids of table 'item'" in lines[1], lines
        assert lines[2:] == ["latest 6"]
    kinds = [read_manifest(root / str(step) / "default").kind for step in range(7)]
    assert kinds == ["full", "delta", "delta", "full", "delta", "full", "delta"]
    assert verify(root) == ()
