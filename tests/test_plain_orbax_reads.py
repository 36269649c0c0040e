"""What reaches our steps by other ways than a manager of ours that knows them already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr

PROGRAM = """
import orbax.checkpoint as ocp
import cnr_jax as cnr
with ocp.CheckpointManager({root!r}) as manager:
    restored = manager.restore(1{args})
    assert type(restored).__name__ == "Restored", restored
"""


@pytest.mark.parametrize("args", ["", ", args=cnr.args.Restore()"])
def test_plain_orbax_finds_the_handler_of_our_steps(
    tiny_run: Any, tmp_path: Path, args: str
) -> None:
    run = tiny_run()
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        run.run(manager, [1])
    program = PROGRAM.format(root=str(tmp_path), args=args)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_the_managers_own_root_is_read_anew_when_it_is_named(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        with cnr.CheckpointManager(tmp_path) as reader:
            run.run(manager, [1])
            manager.wait_until_finished()
            found = reader.restore(None, directory=tmp_path)
            run.run(manager, [2])
            manager.wait_until_finished()
            later = reader.restore(None, directory=tmp_path)
    assert (int(found.state["step"]), int(later.state["step"])) == (1, 2)


def test_a_restore_from_elsewhere_that_fails_leaves_saving_as_it_was(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    other = tmp_path / "other"
    with run.open(other) as manager:
        run.train(1)
        args = cnr.args.Save(run.state, run.touched)
        items = {"model": args, "z": ocp.args.StandardSave({"a": np.ones(2)})}
        manager.save(1, args=ocp.args.Composite(**items))
    with run.open(tmp_path / "own") as manager:
        run.run(manager, [1, 2])
        bad = ocp.args.StandardRestore({"b": np.ones(3)})
        asked = ocp.args.Composite(model=cnr.args.Restore(run.state), z=bad)
        with pytest.raises((ValueError, KeyError, TypeError)):
            manager.restore(1, directory=other, args=asked)
        run.run(manager, [3])
        manager.wait_until_finished()
        report = manager.last_report
        assert report is not None and (report.kind, report.parent) == ("delta", 2)
