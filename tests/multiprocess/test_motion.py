"""Two processes dither the rows of their shards alike, and agree on a width by all rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "motion_worker.py"


# Plans are told alike whatever is in them, and test_try_bits.py has rows of two processes.
@pytest.mark.slow
def test_two_processes_take_the_width_that_all_rows_ask_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Processes(2, tmp_path / "root", out, worker=WORKER) as processes:
        first, second = processes.finish()
    assert first == second
    *first, tried = first
    widths = [line.split(",")[0] for line in first[::2]]
    # Two tables of 512 rows: 8 bytes of codes each, and 4 of scale and offset.
    assert tried.split()[0] == f"{2 * 512 * 12}"
    # Alone, process 0 would save all bits, and process 1 four.
    assert widths == ["0: 4 bits", "1: 4 bits", "2: 8 bits", "3: 8 bits"]
    assert first[1] == "None"
    assert all(line.startswith("SampledMotion(rows=512") for line in first[3::2])
