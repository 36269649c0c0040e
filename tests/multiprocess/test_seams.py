"""Errors of one process of two, and other managers: both processes end alike, and go on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "seams_worker.py"


def test_what_one_process_alone_meets_ends_alike_on_both(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    for process, line in ((1, 0), (0, 1)):
        for lines in (first, second):
            assert lines[line].startswith("before the first message: SaveError "), lines
            assert f"on process {process} | " in lines[line], lines
            assert "OSError: [Errno 5] at open" in lines[line], lines
    for lines in (first, second):
        assert lines[2].startswith("between saves: WriterError writer"), lines
        assert "another manager has taken over" in lines[2], lines
        assert lines[3].startswith("during a save: WriterError writer"), lines
        assert "another manager has taken over" in lines[3], lines
    assert first[4:7] == second[4:7]
    assert first[4].startswith("rollback: "), first
    assert first[5] == "steps [0, 3, 8]", "5 was left behind"
    assert first[6] == "took 5, left [0, 3, 5]"
    for lines, who in ((first, "on process 1: "), (second, "")):
        start = "given: IntegrityError data_damaged checkpoint 8 cannot be restored: "
        assert lines[7].startswith(f"{start}{who}{root}/8/"), lines
        assert "hint: restore step 5" in lines[7], lines
    failed = "deletion: process 0 has failed: OSError: [Errno 5] of 5"
    assert (first[8], second[8]) == ("deletion: [Errno 5] of 5", failed)
    assert first[9] == second[9]
    assert first[9].startswith("audit: AuditError audit table 'user': 1 row "), first
    assert first[10] == second[10] == "mended: 0, 1"
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    assert folders == {"0", "3", "5", "8", "10"}, "nothing is left of what failed"
