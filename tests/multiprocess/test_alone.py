"""What one process makes or does alone does not keep it from saving with the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "alone_worker.py"


# By default test_seams.py stands for it: there too one process meets what the other does not.
@pytest.mark.slow
def test_managers_made_on_one_process_alone_keep_no_other_from_saving(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        processes.allow(300)
        first, second = processes.finish()
    assert first[0].startswith("SaveError process_silent process 1 does not"), first
    assert first[1:3] == ["full 0, 1 listed", "delta 1, 2 listed"]
    assert first[3] == "same True, own False"
    assert second[3] == "same True, own True"
    assert first[4:] == [
        "delta 2, 3 listed",
        "delta 3, 4 listed",
        "full 0, 1 listed",
        "delta 4, 5 listed",
        "delta 1, 2 listed",
        "items [0, 1, 2, 3]",
    ]
    assert first[4:] == second[4:] and first[1:3] == second[1:3]
