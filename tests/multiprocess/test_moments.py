"""Two processes store moments of their shards as integers, and read those of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "moments_worker.py"


@pytest.mark.slow
def test_two_processes_store_differences_of_moments(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    root, out = tmp_path / "root", tmp_path / "out"
    with Processes(2, root, out, worker=WORKER) as processes:
        first, second = processes.finish()
    assert first == second
    assert first[0].startswith("delta")
    for process in range(2):
        path = root / "2" / "default" / f"manifest.p0000{process}.json"
        tiles = json.loads(path.read_bytes())["tiles"]
        assert {tile["leaf"] for tile in tiles} == {"table", "opt/mu", "opt/nu"}
        for tile in tiles:
            assert any("below_crc32" in segment for segment in tile["segments"]), tile
