"""Two processes in a root that plain Orbax wrote: they restore, pass over and go on together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.upkeep.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
from test_two_processes import Processes

WORKER = Path(__file__).parent / "adopt_worker.py"


@pytest.mark.slow
def test_two_processes_adopt_a_root_of_orbax(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Processes(2, root, tmp_path / "out", worker=WORKER) as processes:
        first, second = processes.finish()
    for lines in (first, second):
        assert lines[0].startswith("UsedRootError used_root"), lines
        # Of process 1 alone the state does not match.
        assert "step: not in the state" in lines[1], lines
        assert lines[2:] == [
            "restored 1, of [0, 1]",
            "saved [0, 1, 2]",
            "saved [2, 3]",
            "imported 1 full",
        ]
    kinds = [read_manifest(root / str(step) / "default").kind for step in (2, 3)]
    assert kinds == ["full", "delta"]
    # Retention has let go of the steps that were adopted, also of the one that was in the way.
    assert [path for path in root.iterdir() if ".abandoned-" in path.name] == []
    assert verify(root) == ()
    assert verify(Path(f"{root}.new")) == ()
