"""Two processes save by a log of increments: both write their rows over one baseline."""

from __future__ import annotations

import sys
from pathlib import Path

from cnr_jax.format import names
from cnr_jax.repository.step import read_manifest, read_processes
from cnr_jax.repository.upkeep.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "log_worker.py"


def test_two_processes_bring_one_baseline_along(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    assert first == second
    assert [line.split()[1] for line in first[:3]] == ["full", "delta", "delta"]
    brought, after, last = (line.split() for line in first[-3:])
    assert (brought[1], brought[2]) == ("full", "None") and int(brought[3]) > 0
    assert (after[1], after[2]) == ("delta", brought[0])
    assert (last[1], last[2]) == ("delta", after[0])
    item = root / brought[0] / "default"
    manifest = read_manifest(item)
    assert names.BASELINE in manifest.required_features
    layers = [
        {tile.layer for tile in process.tiles}
        for process in read_processes(item, manifest)
    ]
    assert layers == [{1}, {1}, {0}]
    assert verify(root) == ()
