"""What a rollback leaves behind: what is listed, what counts on, and when it goes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format.fields import dump_document

from .conftest import flip


def there(root: Path) -> dict[str, list[str]]:
    """Steps in a root, and of which steps folders are set aside."""
    names = sorted(path.name for path in root.iterdir() if path.is_dir())
    return {
        "steps": [name for name in names if name.isdigit()],
        "aside": [name.split(".")[0] for name in names if ".abandoned-" in name],
    }


def forget_forks(root: Path) -> None:
    """Has manifests be as those of versions that did not say what a branch left."""
    for path in root.glob("*/default/manifest.json"):
        document = json.loads(path.read_bytes())
        document.pop("forks", None)
        del document["sha256"]
        path.write_bytes(dump_document(document))


def test_a_rollback_leaves_steps_that_are_not_listed_but_restore(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    manager = opened(run, policy=cnr.Full())
    run.run(manager, [10, 20, 30])
    run.restore(manager, 10)
    assert manager.all_steps() == [10, 20, 30], "nothing has been left yet"
    old = dict(run.truth)
    # Not the next number: that 20 is left behind cannot be told from numbers alone.
    run.run(manager, [25, 27])
    assert (manager.all_steps(), manager.latest_step()) == ([10, 25, 27], 27)
    # Back to a step of the new branch, and from there to one of the first.
    run.restore(manager, 25)
    run.run(manager, [26])
    assert manager.all_steps() == [10, 25, 26]
    run.restore(manager, 20)
    run.run(manager, [40])
    assert manager.all_steps() == [10, 20, 40]
    manager.close()
    # A manager that knows only what is stored; and no step is gone.
    with cnr.CheckpointManager(root) as reader:
        assert reader.all_steps() == [10, 20, 40] == reader.all_steps(read=True)
    assert there(root)["steps"] == ["10", "20", "25", "26", "27", "30", "40"]
    run.check(manager, 30, old)
    # Where manifests do not say it, numbers decide.
    forget_forks(root)
    with cnr.CheckpointManager(root) as reader:
        assert reader.all_steps() == [10, 20, 25, 26, 40]


def test_who_only_looks_at_an_older_step_leaves_none(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, [10, 20, 30])
    manager.restore(10, args=cnr.args.Restore(run.state))
    run.run(manager, [40])
    assert manager.all_steps() == [10, 20, 30, 40]


def test_a_state_of_which_nothing_is_known_follows_what_was_saved_before_its_step(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    with opened(run) as manager:
        run.run(manager, [10, 20, 30])
    # Another manager restores it: that it was step 20 the one that saves is not told.
    with opened(run) as other:
        run.restore(other, 20)
    manager = opened(run)
    run.run(manager, [25])
    assert manager.all_steps() == [10, 20, 25]


def test_what_rollbacks_set_aside_goes_with_the_first_step_of_the_run(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    manager = opened(run, policy=cnr.Full(), max_to_keep=3)
    run.run(manager, [10, 20, 30])
    run.restore(manager, 10)
    run.run(manager, [20])
    # As many as are to be kept: no step has to go, so nothing does.
    assert there(root) == {"steps": ["10", "20", "30"], "aside": ["20"]}
    (aside,) = root.glob("20.abandoned-*")
    found = cnr.describe(root)
    assert found.abandoned == (aside.name,) and aside.name in str(found)
    # Of another run, or not to be understood: retention has no business with these.
    (root / "notes.abandoned-by-me").mkdir()
    other = root / aside.name.replace("20.", "7.")
    (other / "default").mkdir(parents=True)
    document = json.loads((aside / "default" / "manifest.json").read_bytes())
    del document["sha256"]
    document["run"] = "ab" * 16
    (other / "default" / "manifest.json").write_bytes(dump_document(document))
    torn = root / aside.name.replace("20.", "8.")
    torn.mkdir()
    run.run(manager, [30])
    assert there(root)["aside"] == ["20", "30", "7", "8", "notes"]
    run.run(manager, [40])
    assert there(root) == {"steps": ["20", "30", "40"], "aside": ["7", "8", "notes"]}
    manager.close()
    run.check(manager, 20)


def test_without_retention_what_was_set_aside_stays(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.Full())
    run.run(manager, [10, 20])
    run.restore(manager, 10)
    run.run(manager, range(20, 26))
    assert there(tmp_path / "root")["aside"] == ["20"]
    # Nor does a step go with it that is deleted by its number.
    manager.delete(21)
    assert there(tmp_path / "root")["aside"] == ["20"]


def test_with_two_full_ones_no_single_file_takes_all_steps(
    tiny_run: Any, opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    caplog.set_level(logging.INFO, "cnr_jax.repository.index.retention")
    manager = opened(run, policy=cnr.OneShot(), max_to_keep=1, min_fulls=2)
    run.run(manager, range(1, 7))
    kinds = {each.step: each.kind for each in cnr.describe(root).steps}
    assert kinds == {1: "full", 2: "full", 6: "delta"}
    (said,) = (r.getMessage() for r in caplog.records if "from now on" in r.message)
    assert "first 3: the policy keeps 4; beside these stay 1, 2" in said
    assert run.manifest(manager, 2).reason.startswith("min_fulls=2")
    manager.close()
    flip(next((root / "2" / "default" / "rows.p00000").rglob("c/0")))
    manager = opened(run, policy=cnr.OneShot(), max_to_keep=1, min_fulls=2)
    run.restore(manager, None)
    assert run.state["step"] == 1
    # A full one that is damaged is none.
    run.run(manager, [8, 9])
    assert {step: run.manifest(manager, step).kind for step in (8, 9)} == {
        8: "full",
        9: "delta",
    }
    assert manager.all_steps() == [1, 8, 9]


def test_full_ones_of_a_branch_that_was_left_do_not_count(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.OneShot(), max_to_keep=2, min_fulls=2)
    run.run(manager, [10, 20, 30])
    run.restore(manager, 10)
    run.run(manager, [40, 50])
    kinds = {step: run.manifest(manager, step).kind for step in (10, 40, 50)}
    assert kinds == {10: "full", 40: "full", 50: "delta"}
    assert there(tmp_path / "root")["steps"] == ["10", "40", "50"]


def test_full_ones_that_only_an_unreadable_folder_keeps_do_not_count(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    (root / "15" / "default").mkdir(parents=True)
    keeps = ocp.checkpoint_managers.CustomSteps([20])
    manager = opened(run, policy=cnr.Full(), preservation_policy=keeps, min_fulls=2)
    run.run(manager, [10, 20, 30])
    assert manager.all_steps() == [10, 20, 30]
    # 10 goes with the folder, and then there still have to be two.
    (root / "15").rename(tmp_path / "15")
    run.run(manager, [40])
    assert manager.all_steps() == [20, 40]


def test_the_first_deletion_says_what_the_steps_that_stay_are_worth(
    tiny_run: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run()
    caplog.set_level(logging.INFO, "cnr_jax.repository.index.retention")
    manager = opened(run, policy=cnr.OneShot(), max_to_keep=2)
    run.run(manager, range(1, 6))
    (said,) = (r.getMessage() for r in caplog.records if "from now on" in r.message)
    assert "first 2: the policy keeps 3, 4; beside these stay 1" in said
    assert "one damaged file of it no step restores. Options(min_fulls=2)" in said


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "two"])
def test_min_fulls_is_a_positive_number(given: Any) -> None:
    with pytest.raises(cnr.errors.OptionError, match="min_fulls is"):
        cnr.Options(min_fulls=given)
