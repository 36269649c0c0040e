"""What reaches our steps by other ways than a manager of ours that knows them already."""

from __future__ import annotations

import dataclasses
import json
import os
import re
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


WITHOUT_US = """
import sys
sys.modules["cnr_jax"] = None
import orbax.checkpoint as ocp
with ocp.CheckpointManager({root!r}) as manager:
    for args in (None, ocp.args.StandardRestore()):
        try:
            manager.restore(1, args=args)
        except (ValueError, FileNotFoundError) as error:
            print(error)
"""


def test_who_looks_where_plain_orbax_fails_is_told_what_it_is(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        run.run(manager, [1])
    program = WITHOUT_US.format(root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    item, folder = done.stdout.splitlines()[:2]
    assert '"default"' in item and str(tmp_path / "1" / "default") in folder
    claim = (tmp_path / "cnr_jax.writer.json").read_text().splitlines()
    assert "The steps here were saved by cnr_jax" in claim[1]
    (call,) = re.findall(r"cnr_jax\.CheckpointManager.*?\(None\)", claim[1])
    assert "cnr_jax.export(<this folder>, step, directory)" in claim[1]
    call = call.replace("<this folder>", repr(str(tmp_path)))
    assert int(eval(call, {"cnr_jax": cnr}).state["step"]) == 1


ASKED_WITHOUT_US = """
import json, sys
sys.modules["cnr_jax"] = None
import numpy as np
import orbax.checkpoint as ocp
state = {{"w": np.ones(2)}}
folder = {root!r} + "/1/default"
with ocp.CheckpointManager({root!r}) as manager:
    assert manager.item_metadata(1) is None
    ways = [
        lambda: manager.restore(1),
        lambda: manager.restore(1, args=ocp.args.StandardRestore()),
        lambda: manager.restore(1, args=ocp.args.StandardRestore(state)),
        lambda: manager.restore(1, args=ocp.args.PyTreeRestore()),
        lambda: ocp.StandardCheckpointer().restore(folder, state),
        lambda: ocp.PyTreeCheckpointer().restore(folder + "/dense"),
    ]
    for way in ways:
        try:
            way()
        except Exception as error:
            print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
"""


def test_the_guide_has_what_plain_orbax_says_of_our_steps(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with cnr.CheckpointManager(tmp_path, tables=run.tables) as manager:
        run.run(manager, [1])
    program = ASKED_WITHOUT_US.format(root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 6
    guide = (Path(__file__).parents[1] / "docs/guides/from-orbax.md").read_text("utf-8")
    told = re.findall(r"^\| .* \| (\w+Error: .*) \|$", guide, re.MULTILINE)
    assert len(told) == 5
    patterns = [re.escape(each).replace(re.escape("..."), ".*") for each in told]
    # Each is said, and nothing else.
    for each in said:
        assert any(re.match(pattern, each) for pattern in patterns), each
    for pattern in patterns:
        assert any(re.match(pattern, each) for each in said), pattern


DENSE_WITHOUT_US = """
import sys
sys.modules["cnr_jax"] = None
import orbax.checkpoint as ocp
with ocp.StandardCheckpointer() as checkpointer:
    try:
        print(float(checkpointer.restore({folder!r})["params"]["dense"].sum()))
    except (ValueError, FileNotFoundError) as error:
        print(error)
"""


def dense_without_us(folder: Path) -> str:
    program = DENSE_WITHOUT_US.format(folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program],
        # Orbax asks for a target where devices are others than those of the save.
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_plain_orbax_reads_dense_leaves_of_older_steps_and_exports_of_newer_ones(
    tmp_path: Path,
) -> None:
    data = Path(__file__).parent / "data"
    for version in ("v1", "v1-dense"):
        root, step = data / version / "root", 10
        with np.load(data / version / "expected.npz") as file:
            expected = float(file[f"restored/{step}/params/dense"].sum())
        if version == "v1":
            assert float(dense_without_us(root / "10/default/dense")) == expected
            continue
        assert "_METADATA" in dense_without_us(root / "10/default/dense")
        cnr.export(root, step, tmp_path / "back", leaves=["params/dense"])
        assert float(dense_without_us(tmp_path / "back")) == expected


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


class FailingHandler(ocp.CheckpointHandler):
    """Saves nothing, and cannot be restored."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "file").write_text("")

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise LookupError("this item does not restore")


@ocp.args.register_with_handler(FailingHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Failing(ocp.args.CheckpointArgs):
    pass


def test_a_restore_from_elsewhere_that_fails_leaves_saving_as_it_was(
    tiny_run: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    other = tmp_path / "other"

    def save(manager: Any, step: int, item: str) -> None:
        run.train(step)
        items = {item: cnr.args.Save(run.state, run.touched), "z": Failing()}
        assert manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()

    with run.open(other) as manager:
        save(manager, 1, "model")
    run.touched = cnr.init_touched(run.state, run.tables)
    with run.open(tmp_path / "own") as manager:
        save(manager, 1, "state")
        save(manager, 2, "state")
        # Items are restored in the order of their names: z comes after the state.
        asked = ocp.args.Composite(model=cnr.args.Restore(run.state), z=Failing())
        with pytest.raises(LookupError):
            manager.restore(1, directory=other, args=asked)
        save(manager, 3, "state")
        report = manager.last_report
        assert report is not None and (report.kind, report.parent) == ("delta", 2)
