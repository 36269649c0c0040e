"""`describe` says what a root holds, whatever state it is in, and changes nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.format.manifest import ParentRef, dump, load
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from .conftest import flip, skip_below
from .older_steps import leave_dense_to_orbax
from .test_verify import CASES

FROZEN = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the root lies that is saved once for all tests."""
    return tmp_path_factory.mktemp("saved") / "root"


@pytest.fixture
def root(tiny_run: Any, first: Path, tmp_path: Path) -> Path:
    """Steps 0 (full), 1 to 3 (deltas, each on the one before), under 8 bits."""
    if not first.exists():
        run = tiny_run()
        options = cnr.Options(codec="asymmetric", bits=8, policy=cnr.Consecutive())
        with cnr.CheckpointManager(first, tables=run.tables, options=options) as m:
            run.run(m, range(4))
    shutil.copytree(first, tmp_path / "root")
    return tmp_path / "root"


def problems(root: Path) -> dict[int, str]:
    """Steps that cannot be restored, and why."""
    return {s.step: s.problem for s in cnr.describe(root).steps if s.problem}


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """All that is in a root, with when it changed."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in (root, *root.rglob("*"))
    }


# ---- whole roots ----------------------------------------------------------------------------


def test_a_step_is_described_as_its_save_was_reported(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, reports = tiny_run(), list[cnr.SaveReport]()
    with run.open(
        tmp_path, on_save=reports.append, codec="adaptive", bits=4
    ) as manager:
        run.run(manager, range(3))
    found = cnr.describe(str(tmp_path))
    assert (found.root, found.item) == (str(tmp_path), "default")
    assert [each.step for each in found.steps] == [0, 1, 2]
    alike = (
        "step",
        "kind",
        "parent",
        "generation",
        "rows",
        "table_bytes",
        "slot_bytes",
    )
    alike += ("dense_bytes", "manifest_bytes", "state_bytes", "reason")
    alike += ("total_bytes", "reduction")
    for each, report in zip(found.steps, reports, strict=True):
        for name in alike:
            assert getattr(each, name) == getattr(report, name), name
        assert each.secs == report.total_secs
        assert each.policy == "consecutive" and each.restorable
        manifest = run.manifest(manager, each.step)
        assert each.run == manifest.run
        assert each.saved_at is not None
        assert each.saved_at.timestamp() == manifest.written_at_unix_secs


def test_bytes_are_compared_with_the_state_as_it_is_in_memory(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(3000, 32))
    state = {
        "params": {
            "user": jnp.asarray(rows, jnp.bfloat16),
            "item": jnp.asarray(rows, jnp.float16),
            "tag": jnp.asarray(rows, jnp.int8),
            "word": jnp.asarray(rows, jnp.float32),
        },
        "dense": jnp.ones((7, 5), jnp.bfloat16),
    }
    tables = cnr.find_tables(state, ["user", "item", "tag", "word"])
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        report = manager.last_report
    assert report is not None
    assert report.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # Beside the values there is what describes them.
    assert 0.95 < report.reduction < 1
    (step,) = cnr.describe(tmp_path).steps
    assert (step.state_bytes, step.reduction) == (report.state_bytes, report.reduction)


def test_tables_are_described_with_what_the_step_holds_of_them(
    tiny_run: Any, tmp_path: Path
) -> None:
    skip_below(4)
    run = tiny_run()
    with run.open(tmp_path, codec="adaptive", bits=4) as manager:
        run.run(manager, range(2))
    full, delta = cnr.describe(tmp_path).steps
    user, item = delta.tables
    assert (user.name, user.rows, item.name, item.rows) == ("user", 64, "item", 32)
    assert [t.saved_rows for t in full.tables] == [64, 32]
    assert user.saved_rows + item.saved_rows == delta.rows < 20
    table, slot = full.tables[0].leaves
    assert (table.name, table.path) == ("table", "params/user/embedding")
    assert (table.shape, table.dtype, table.rows) == ((64, 4), "float32", 64)
    assert table.codecs == ("adaptive 4 bits",) and slot.codecs == ("raw",)
    assert table.tiles == slot.tiles == 4  # one for each device
    # 2 bytes of codes, and 2 of scale and 2 of offset, a row.
    assert table.bytes == 64 * 6
    assert slot.bytes == 64 * 4
    for step in (full, delta):
        assert sum(each.slot_bytes for each in step.tables) == step.slot_bytes
        held = sum(each.table_bytes for each in step.tables)
        assert 0 < held <= step.table_bytes


def test_frozen_roots_are_described(tmp_path: Path) -> None:
    found = cnr.describe(FROZEN / "v1" / "root")
    assert [(s.step, s.kind, s.parent) for s in found.steps] == [
        (10, "full", None),
        (20, "delta", 10),
        (30, "delta", 20),
    ]
    # An escaped row is in the table's bytes, and counts once.
    user = found.steps[1].tables[0]
    assert user.leaves[0].codecs == ("adaptive 4 bits", "raw")
    assert (user.saved_rows, user.slot_bytes) == (5, 20)
    (packed,) = cnr.describe(FROZEN / "v1-zstd" / "root").steps
    held = sum(each.table_bytes + each.slot_bytes for each in packed.tables)
    assert 0 < held <= packed.table_bytes + packed.slot_bytes
    assert packed.restorable


def test_printed_as_a_table_of_chains(tiny_run: Any, opened: Any) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.Consecutive(max_chain=2))
    run.run(manager, range(5))
    text = str(cnr.describe(manager.directory))
    shown = re.sub(
        r"[\d.]+ [kM]?B|[\d.]+x|\d\.\d\d|\d{4}-\d\d-\d\d \d\d:\d\d", "#", text
    )
    lines = [line.split() for line in shown.splitlines()]
    assert lines == [
        "step kind parent rows bytes smaller secs saved (UTC) restorable".split(),
        "0 full 96 # # # # yes".split(),
        ["├", *"1 delta 0 10 # # # # yes".split()],
        ["└", *"2 delta 1 10 # # # # yes".split()],
        "3 full 96 # # # # yes".split(),
        ["└", *"4 delta 3 10 # # # # yes".split()],
        "5 steps, #; restore(None) takes 4".split(),
    ]
    assert len({line.index("yes") for line in text.splitlines()[1:-1]}) == 1


def test_all_of_it_is_json(root: Path) -> None:
    shutil.rmtree(root / "1")
    found = json.loads(json.dumps(cnr.describe(root).asdict()))
    assert found["latest_step"] == 0 and found["item"] == "default"
    step = found["steps"][1]
    assert step["step"] == 2 and step["problem"] == "its parent 1 is missing"
    assert step["restorable"] is False and step["saved_at"].endswith("+00:00")
    assert step["tables"][0]["leaves"][0]["shape"] == [64, 4]


# ---- roots that something happened to -------------------------------------------------------


# Only what is inside files tells, and that is not read; or the step restores without.
UNSEEN = {name for name, case in CASES.items() if not case[4]}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_told_with_all_steps_that_it_costs(root: Path, name: str) -> None:
    damage, _, _, consequence, _ = CASES[name]
    damage(root / "1" / "default")
    before = tree(root)
    found = cnr.describe(root)
    lost = {each.directory: each.problem for each in found.steps if each.problem}
    assert tuple(lost) == (() if name in UNSEEN else consequence)
    assert [each.step for each in found.steps] in ([0, 1, 2, 3], [1, 0, 2, 3])
    for step, problem in lost.items():
        assert "\n" not in problem and str(root) not in problem
        assert f"no: {problem}" in str(found)
        if step != "1":
            assert problem.startswith(("it rests on", "its parent 1 cannot be read"))
    assert tree(root) == before


def test_chains_that_lead_nowhere(root: Path, tiny_run: Any) -> None:
    run, other = tiny_run(salt=1), root.parent / "other"
    with run.open(other) as manager:
        run.run(manager, [1])
    shutil.rmtree(root / "1")
    assert problems(root) == {
        2: "its parent 1 is missing",
        3: "it rests on 2, which cannot be restored: its parent 1 is missing",
    }
    shutil.copytree(other / "1", root / "1")
    assert problems(root)[2] == "1 is not the parent it was saved with"
    shutil.rmtree(root / "1")
    (root / "1").mkdir()
    found = cnr.describe(root)
    assert [each.step for each in found.steps] == [0, 2, 3]
    assert problems(root)[2] == "its parent 1 cannot be read"


def test_parents_that_lead_in_a_circle(root: Path) -> None:
    path = root / "0" / "default" / "manifest.json"
    manifest = load(path.read_bytes(), "here")
    last = load((root / "3" / "default" / "manifest.json").read_bytes(), "here")
    above = ParentRef(directory="3", uuid=last.uuid, clock=0)
    manifest = dataclasses.replace(manifest, kind="delta", parent=above)
    path.write_bytes(dump(manifest))
    found = problems(root)
    assert set(found) == {0, 1, 2, 3}
    assert "its parents lead in a circle" in found.values()
    assert "none restores" in str(cnr.describe(root))


def test_a_step_of_a_later_version_says_so(root: Path) -> None:
    manifest = root / "3" / "default" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":9'))
    (step,) = (each for each in cnr.describe(root).steps if each.problem)
    assert step.kind == "unreadable"
    assert "cannot be read by this version" in step.problem


def test_steps_that_storage_does_not_give_out_are_told(root: Path) -> None:
    fault = Fault(
        "open_read", action="EACCES", times=0, match="/2/default/manifest.json"
    )
    with inprocess.failing(root, fault):
        found = problems(root)
    assert "Permission denied" in found[2]
    assert found[3] == "its parent 2 cannot be read"


def test_steps_of_orbax_and_folders_of_others(root: Path) -> None:
    with ocp.CheckpointManager(root.parent / "plain") as plain:
        plain.save(7, args=ocp.args.StandardSave({"a": jnp.ones(3)}))
    shutil.copytree(root.parent / "plain" / "7", root / "7")
    for folder in ("logs1", "tensorboard", "2024"):
        (root / folder / "events").mkdir(parents=True)
    (root / "8").write_text("a file")
    found = cnr.describe(root)
    assert [each.kind for each in found.steps].count("orbax") == 1
    assert {each.step for each in found.steps} == {0, 1, 2, 3, 7}
    assert found.latest_step == 3 and "by Orbax" in str(found)
    alone = cnr.describe(root.parent / "plain")
    assert [(s.step, s.kind, s.restorable) for s in alone.steps] == [
        (7, "orbax", False)
    ]
    assert (alone.item, alone.latest_step) == (None, None)


def test_a_step_of_ours_of_which_nothing_is_left_is_no_step_of_orbax(
    root: Path,
) -> None:
    shutil.rmtree(root / "3" / "default")
    (step,) = (each for each in cnr.describe(root).steps if each.problem)
    assert (step.step, step.kind) == (3, "unreadable")
    assert step.problem == "3/default holds no checkpoint: manifest.json is missing"


def test_what_lies_beside_the_steps_is_counted(tiny_run: Any, opened: Any) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(4))
    run.restore(manager, 1)
    run.salt = 1
    run.run(manager, [2])
    root = Path(manager.directory)
    manager.close()
    (root / f"9{names.TEMPORARY_SUFFIX}").mkdir()
    (root / names.removed("8", "00ff" * 4)).mkdir()
    found = cnr.describe(root)
    assert [(s.step, s.generation, s.parent) for s in found.steps] == [
        (0, 1, None),
        (1, 1, 0),
        (2, 2, 1),
    ]
    assert [name.split(".")[0] for name in found.abandoned] == ["2", "3"]
    assert "2 abandoned by rollbacks, 1 unfinished, 1 being removed" in str(found)
    # Branches are told where there are several.
    assert " branch " in str(found).splitlines()[0]

    fresh = tiny_run(salt=2)
    manager = opened(fresh, new_run=True)
    fresh.run(manager, [0])
    found = cnr.describe(root)
    (earlier,) = found.earlier_runs
    assert [each.step for each in found.steps] == [0] and not found.abandoned
    inner = cnr.describe(root / earlier)
    assert [each.step for each in inner.steps] == [0, 1, 2]


def test_steps_that_may_lack_rows_are_marked(root: Path) -> None:
    uuid = json.loads((root / "2" / "default" / "manifest.json").read_text())["uuid"]
    noted = [{"directory": "2", "uuid": uuid, "since": 1}]
    noted += [{"directory": "3", "uuid": "0" * 32, "since": 1}]
    (root / names.SUSPECTS).write_text(json.dumps({"steps": noted}))
    found = cnr.describe(root)
    assert [each.step for each in found.steps if each.may_lack_rows] == [2]
    assert "yes, but may lack rows" in str(found)
    (root / names.SUSPECTS).write_text("{")
    assert not any(each.may_lack_rows for each in cnr.describe(root).steps)


def test_other_items_are_described_when_asked_for(root: Path) -> None:
    for step in range(4):
        shutil.copytree(root / f"{step}" / "default", root / f"{step}" / "more")
    flip(root / "2" / "more" / "manifest.json")
    assert problems(root) == {}
    found = cnr.describe(root, item="more")
    assert [each.step for each in found.steps if each.problem] == [2, 3]


def test_saves_and_removals_meanwhile_are_no_problem(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    orbax = {"max_to_keep": 2}
    done, seen, found = threading.Event(), list[int](), list[Any]()

    def watch() -> None:
        while not done.is_set():
            steps = cnr.describe(root).steps
            seen.append(len(steps))
            found.extend(each for each in steps if each.problem)

    with run.open(root, orbax, policy=cnr.OneShot()) as manager:
        run.run(manager, [0])
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run.run(manager, range(1, 12))
        finally:
            done.set()
            watcher.join()
    assert found == [] and max(seen) > 1


# ---- roots that are none --------------------------------------------------------------------


def test_what_is_no_root_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(cnr.errors.NoStepError) as caught:
        cnr.describe(tmp_path / "nowhere")
    assert caught.value.kind == "no_root" and not (tmp_path / "nowhere").exists()
    with pytest.raises(cnr.errors.OptionError, match="is a step of the root"):
        cnr.describe(root / "1")
    (tmp_path / "file").write_text("")
    with pytest.raises(cnr.errors.OptionError, match="is a file"):
        cnr.describe(tmp_path / "file")
    with pytest.raises(cnr.errors.OptionError, match="az://"):
        cnr.describe("az://bucket/run")


def test_an_empty_folder_is_a_root_without_steps(tmp_path: Path) -> None:
    found = cnr.describe(tmp_path)
    assert (found.steps, found.item, found.latest_step) == ((), None, None)
    assert str(found).startswith("no steps\n")
    assert os.listdir(tmp_path) == []


def test_progress_is_told_step_by_step(root: Path) -> None:
    told: list[tuple[int, int]] = []
    cnr.describe(root, on_step=lambda done, of: told.append((done, of)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_root_is_described_without_jax_orbax_and_tensorstore(root: Path) -> None:
    (root / "3" / "default" / "manifest.json").unlink()
    code = (
        "import sys, cnr_jax\n"
        "found = cnr_jax.describe(sys.argv[1])\n"
        "assert len(found.steps) == 4 and str(found) and found.asdict()\n"
        "assert not {'jax', 'orbax', 'tensorstore'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True, timeout=120)


def test_a_step_that_looks_damaged_once_is_looked_at_again(
    tmp_path: Path, tiny_run: Any
) -> None:
    run = tiny_run()
    with run.open(tmp_path) as manager:
        run.run(manager, range(2))
    fault = Fault("open_read", action="EIO", match="/1/default/manifest.p00000.json")
    with inprocess.failing(tmp_path, fault):
        assert [step.restorable for step in cnr.describe(tmp_path).steps] == [True] * 2


def test_what_no_restore_takes_is_not_said_to_be_restorable(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with opened(run) as manager:
        run.run(manager, [0, 1, 2])
    leave_dense_to_orbax(root / "2/default")
    (root / "2/default/dense/checkpoint").symlink_to(tmp_path)
    (root / "1/_CHECKPOINT_METADATA").unlink()
    os.mkfifo(root / "1/_CHECKPOINT_METADATA")
    found = cnr.describe(root)
    assert found.latest_step == 0
    for step in found.steps[1:]:
        assert step.problem
        with (
            cnr.CheckpointManager(root, tables=run.tables) as reader,
            pytest.raises(cnr.errors.IntegrityError),
        ):
            reader.restore(step.step, args=cnr.args.Restore(run.state))
