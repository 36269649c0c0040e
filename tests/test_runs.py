"""Runs that share a root: none deletes, hides or replaces what another has saved, unless asked."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.repository.step import read_manifest
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

LATEST = ocp.checkpoint_managers.LatestN


@pytest.fixture
def used(tiny_run: Any, opened: Any) -> Any:
    """A run of four steps that has ended, in the root that `opened` opens."""
    run = tiny_run()
    manager = opened(run)
    run.run(manager, [97000, 98000, 99000, 100000])
    manager.close()
    return run


def tree(root: Path) -> dict[str, bytes]:
    """All files of a root, but the lock, with what is in them."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def run_of(root: Path, step: Any) -> str | None:
    return read_manifest(root / str(step) / "default").run


def steps_in(root: Path) -> list[int]:
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit())


def earlier(root: Path) -> list[Path]:
    return sorted(root.glob("earlier-run-*.root"))


def without_touched(run: Any) -> Any:
    run.touched = None
    return run


@pytest.mark.parametrize("how", ["max_to_keep", "LatestN", "drop-in", "not due"])
def test_a_run_that_forgets_to_restore_changes_nothing(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path, how: str
) -> None:
    before, run = tree(tmp_path / "root"), tiny_run(salt=1)
    options: dict[str, Any] = {"max_to_keep": 2}
    if how == "LatestN":
        options = {"preservation_policy": LATEST(2)}
    if how == "not due":
        options["save_interval_steps"] = 7
    manager = opened(run, **options)
    run.train(1000)
    if how == "drop-in":
        run.touched = None
    for step in (1000, 2000):
        with pytest.raises(cnr.errors.UsedRootError) as caught:
            run.save(manager, step)
        assert caught.value.kind == "used_root"
    text = str(caught.value)
    assert "got 4 steps, 97000 to 100000" in text
    assert "manager.restore(None" in text and "Options(new_run=True)" in text
    manager.close()
    assert tree(tmp_path / "root") == before
    used.check(manager, None)


def test_who_was_refused_can_restore_and_go_on(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    run = tiny_run(salt=1)
    manager = opened(run, max_to_keep=2)
    with pytest.raises(cnr.errors.UsedRootError):
        run.save(manager, 1000)
    run.restore(manager, None)
    run.run(manager, [101000, 102000])
    root = tmp_path / "root"
    assert run_of(root, 102000) == run_of(root, 97000) is not None
    # Of one run: the older ones only stay because the deltas rest on them.
    assert steps_in(root) == [97000, 98000, 99000, 100000, 101000, 102000]
    run.check(manager, None)


def test_the_run_that_is_at_work_is_not_ended_by_one_that_is_refused(
    tiny_run: Any, opened: Any
) -> None:
    run, other = tiny_run(), tiny_run(salt=1)
    manager = opened(run)
    run.run(manager, [1])
    with pytest.raises(cnr.errors.UsedRootError):
        other.save(opened(other), 1)
    run.run(manager, [2])
    run.check(manager, 2)


def test_steps_that_come_after_opening_count_as_there(
    tiny_run: Any, opened: Any
) -> None:
    run, other = tiny_run(), tiny_run(salt=1)
    late, manager = opened(other), opened(run)
    run.run(manager, [1])
    with pytest.raises(cnr.errors.UsedRootError):
        other.save(late, 10)
    run.run(manager, [2])


def test_steps_of_plain_orbax_are_there_and_no_restore_is_offered(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    with ocp.CheckpointManager(tmp_path / "root") as plain:
        plain.save(5, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    run = tiny_run()
    manager = opened(run)
    with pytest.raises(cnr.errors.UsedRootError, match="saved by plain Orbax") as found:
        run.save(manager, 6)
    assert "restore(" not in str(found.value)
    assert "or a restore" not in str(found.value)
    assert "Options(adopt=True)" in str(found.value)
    assert "restore them with ocp.CheckpointManager" in str(found.value)
    assert "another root" in str(found.value)


def test_unreadable_steps_are_there(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    for manifest in (tmp_path / "root").glob("*/default/manifest.json"):
        manifest.write_bytes(b"{")
    run = tiny_run(salt=1)
    with pytest.raises(cnr.errors.UsedRootError, match="verify"):
        run.save(opened(run), 1)


def test_folders_of_others_are_no_checkpoints(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    for name in ("2024", "7"):
        (tmp_path / "root" / name / "notes").mkdir(parents=True)
    (tmp_path / "root" / "2024" / "notes" / "todo.txt").write_text("later")
    run = tiny_run()
    manager = opened(run)
    run.run(manager, [1, 2])
    run.check(manager, 2)


@pytest.mark.parametrize("reads", ["restore(directory=)", "reload"])
def test_looking_elsewhere_or_again_is_no_restore(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path, reads: str
) -> None:
    run = tiny_run(salt=1)
    manager = opened(run)
    if reads == "reload":
        manager.reload()
    else:
        shutil.copytree(tmp_path / "root", tmp_path / "other")
        run.state, run.touched = manager.restore(
            97000, directory=tmp_path / "other", args=cnr.args.Restore(run.state)
        )
    with pytest.raises(cnr.errors.UsedRootError):
        run.save(manager, 101000)


def test_a_state_that_another_manager_restored_from_here_goes_on(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(salt=1), tmp_path / "root"
    with opened(run, read_only=True) as reader:
        run.restore(reader, 99000)
    run.run(opened(run), [99500])
    assert run_of(root, 99500) == run_of(root, 97000)
    run.check(opened(run), 99500)


def test_touched_rows_of_a_step_here_go_on_in_another_manager(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    manager, run = opened(used, max_to_keep=1), run_of(tmp_path / "root", 97000)
    used.run(manager, [101000])
    assert run_of(tmp_path / "root", 101000) == run
    # One run, so it is retention's to drop the steps that were saved before.
    assert steps_in(tmp_path / "root") == [101000]
    used.check(manager, 101000)


def test_touched_rows_from_before_the_steps_here_do_not_go_on(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    first = run.touched
    manager = opened(run)
    run.run(manager, [1, 2])
    manager.close()
    run.touched = first
    with pytest.raises(cnr.errors.UsedRootError):
        run.save(opened(run), 3)


def test_plain_orbax_with_our_handler_is_refused_and_goes_on_after_a_restore(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(salt=1), tmp_path / "root"

    def plain() -> Any:
        registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw"))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=registry.preservation_policy(LATEST(2))
        )
        return ocp.CheckpointManager(root, options=options, handler_registry=registry)

    manager = plain()
    with pytest.raises(cnr.errors.UsedRootError):
        manager.save(100001, args=cnr.args.Save(run.state, run.touched))
    assert steps_in(root) == [97000, 98000, 99000, 100000]
    state, touched = manager.restore(100000, args=cnr.args.Restore(run.state))
    manager.save(100001, args=cnr.args.Save(state, touched))
    manager.close()
    assert run_of(root, 100001) == run_of(root, 97000)


def test_a_root_of_earlier_versions_is_one_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    shutil.copytree(Path(__file__).parent / "data" / "v1" / "root", root)
    assert {run_of(root, step) for step in (10, 20, 30)} == {None}
    with cnr.CheckpointManager(root) as reader:
        state = reader.restore(None).state
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(policy=cnr.Full(), preservation_policy=LATEST(1))
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        touched = cnr.init_touched(state, tables)
        with pytest.raises(cnr.errors.UsedRootError):
            manager.save(40, args=cnr.args.Save(state, touched))
        restored = manager.restore(
            None, args=cnr.args.Restore(state, tables=tables, partial=True)
        )
        manager.save(40, args=cnr.args.Save(restored.state, restored.touched))
        manager.wait_until_finished()
    assert run_of(root, 40) is None
    assert steps_in(root) == [40]


# ---- a new run, as asked for ----------------------------------------------------------------


def test_a_new_run_moves_the_old_steps_into_a_root_of_their_own(
    tiny_run: Any,
    opened: Any,
    used: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, run = tmp_path / "root", tiny_run(salt=1)
    # A rollback of the old run, so that something is aside.
    manager = opened(used)
    used.restore(manager, 98000)
    used.run(manager, [99000])
    manager.close()
    was = run_of(root, 99000)

    manager = opened(run, new_run=True, max_to_keep=1)
    assert manager.latest_step() == 99000  # nothing happens before the first save
    assert not earlier(root)
    run.run(manager, [99000, 99001, 99002])
    (folder,) = earlier(root)
    said = [r.getMessage() for r in caplog.records if str(folder) in r.getMessage()]
    assert len(said) == 1 and "5 steps and folders" in said[0], said
    assert manager.all_steps() == [99000, 99001, 99002]
    assert run_of(root, 99000) != was
    manager.close()

    assert cnr.verify(root) == ()
    kinds = [problem.kind for problem in cnr.verify(folder)]
    assert kinds == ["abandoned", "abandoned"]  # by the rollback, and still there
    run.check(manager, None)
    with caplog.at_level(logging.WARNING), opened(run):
        assert "holds roots of earlier runs, set aside by new ones" in caplog.text
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {
        "97000",
        "98000",
        "99000",
        "100000",
    }
    with cnr.CheckpointManager(root, tables=run.tables) as reader:
        found = reader.restore(
            99000, directory=folder, args=cnr.args.Restore(run.state)
        )
        used.same(found.state, used.truth[99000])
    with cnr.CheckpointManager(folder, tables=run.tables) as reader:
        assert reader.latest_step() == 99000
        assert reader.all_steps() == [97000, 98000, 99000]


def test_no_rule_deletes_the_steps_of_an_earlier_run(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for salt in (1, 2):
        run = tiny_run(salt=salt)
        manager = opened(run, new_run=True, max_to_keep=1, policy=cnr.Full())
        run.run(manager, [1, 2, 3])
        assert steps_in(root) == [3]
        manager.close()
    assert len(earlier(root)) == 2
    assert sorted(steps_in(folder) for folder in earlier(root)) == [
        [3],
        [97000, 98000, 99000, 100000],
    ]


def test_a_new_run_that_cannot_be_saved_leaves_the_old_one_where_it_is(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    root, run = tmp_path / "root", tiny_run(salt=1)
    manager = opened(run, new_run=True)
    run.train(1)
    fault = Fault("open", action="EIO", times=0, match="manifest")
    with inprocess.failing(root, fault):
        with pytest.raises(OSError):
            run.save(manager, 1)
            manager.wait_until_finished()
    assert manager.all_steps() == [97000, 98000, 99000, 100000]
    assert not earlier(root)
    used.check(manager, None)
    run.run(manager, [1])
    assert manager.all_steps() == [1] and len(earlier(root)) == 1


def test_a_new_run_that_dies_in_its_first_save_leaves_the_old_one(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    seen = set()
    for nth in range(1, 60, 3):
        run = tiny_run(salt=1)
        shutil.copytree(root, tmp_path / "work")
        manager = opened(run, tmp_path / "work", new_run=True)
        run.train(1)
        with inprocess.copying(tmp_path / "work", copy, nth=nth):
            run.save(manager, 1)
            manager.wait_until_finished()
        manager.close()
        shutil.rmtree(tmp_path / "work")
        if not copy.exists():
            break
        with opened(run, copy) as after:
            there = after.all_steps()
            seen.add(tuple(there))
            assert there in ([97000, 98000, 99000, 100000], [1])
            (used if there[0] != 1 else run).check(after, None)
            if there == [1]:
                (folder,) = earlier(copy)
                assert steps_in(folder) == [97000, 98000, 99000, 100000]
        shutil.rmtree(copy)
    assert (97000, 98000, 99000, 100000) in seen


def test_a_new_run_is_ignored_after_a_restore(
    tiny_run: Any,
    opened: Any,
    used: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, root = tiny_run(salt=1), tmp_path / "root"
    manager = opened(run, new_run=True)
    run.restore(manager, None)
    with caplog.at_level(logging.WARNING):
        run.run(manager, [100001, 100002])
    assert caplog.text.count("new_run=True is ignored") == 1
    assert not earlier(root)
    assert run_of(root, 100002) == run_of(root, 97000)


def test_a_new_run_in_an_empty_root_is_a_run(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    run.run(opened(run, new_run=True), [1, 2])
    assert not earlier(tmp_path / "root")
    assert run_of(tmp_path / "root", 2) == run_of(tmp_path / "root", 1) is not None


def test_a_new_run_takes_steps_of_plain_orbax_out_of_its_way(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    root, run = tmp_path / "root", tiny_run()
    with ocp.CheckpointManager(root) as plain:
        plain.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    run.run(opened(run, new_run=True), [1, 2])
    (folder,) = earlier(root)
    with ocp.CheckpointManager(folder) as plain:
        assert plain.latest_step() == 1
        found = plain.restore(1, args=ocp.args.StandardRestore({"w": jnp.zeros(3)}))
    assert (found["w"] == 1).all()


def into_link(root: Path, step: int, *, relative: bool) -> Path:
    """Puts a step's folder elsewhere, and a link in its place."""
    store = root.parent / "store" / str(step)
    store.parent.mkdir(exist_ok=True)
    (root / str(step)).rename(store)
    leads = Path("..", "store", str(step)) if relative else store
    (root / str(step)).symlink_to(leads)
    return store


def test_a_new_run_does_not_move_a_link_that_would_lead_nowhere(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    root, run = tmp_path / "root", tiny_run(salt=1)
    into_link(root, 97000, relative=True)
    before = tree(root)
    with pytest.raises(cnr.errors.OptionError, match="is a relative link"):
        run.save(opened(run, new_run=True), 1)
    after = tree(root)
    assert after.pop("cnr_jax.writer.json") != before.pop("cnr_jax.writer.json")
    assert after == before and not earlier(root)
    used.check(opened(run), None)


def test_a_new_run_moves_links_and_brings_them_back(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    root, run = tmp_path / "root", tiny_run(salt=1)
    store = into_link(root, 97000, relative=False)
    manager = opened(run, new_run=True)
    run.train(1)
    store.rename(store.with_name("away"))  # for a while it leads nowhere
    with inprocess.failing(
        root, Fault("open", action="EIO", times=0, match="manifest")
    ):
        with pytest.raises(OSError):
            run.save(manager, 1)
            manager.wait_until_finished()
    assert os.path.islink(root / "97000") and not earlier(root)
    store.with_name("away").rename(store)
    manager.reload()
    used.check(manager, None)
    run.run(manager, [1])
    (folder,) = earlier(root)
    with cnr.CheckpointManager(folder, tables=run.tables) as reader:
        assert reader.all_steps() == [97000, 98000, 99000, 100000]


@pytest.mark.parametrize("first", ["ck", None])
def test_steps_that_are_named_in_another_way_are_there(
    tiny_run: Any, opened: Any, tmp_path: Path, first: str | None
) -> None:
    old, run = tiny_run(), tiny_run(salt=1)
    second = None if first else "ck"
    manager = opened(old, step_prefix=first)
    old.run(manager, [1, 2])
    manager.close()
    with pytest.raises(cnr.errors.UsedRootError, match="got 2 steps, 1 to 2"):
        run.save(opened(run, step_prefix=second), 1)
    run.run(opened(run, step_prefix=second, new_run=True), [1, 2])
    (folder,) = earlier(tmp_path / "root")
    with opened(old, folder, step_prefix=first) as reader:
        assert reader.all_steps() == [1, 2]
        old.restore(reader, None)
        old.same(old.state, old.truth[2])


# ---- a cell that is run twice ---------------------------------------------------------------


def test_a_loop_begun_again_in_one_manager_sets_later_steps_aside_and_deletes_none(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    root, run, again = tmp_path / "root", tiny_run(), tiny_run(salt=1)
    manager = opened(run, max_to_keep=2, policy=cnr.Full())
    run.run(manager, [10, 20, 30, 40])
    assert steps_in(root) == [30, 40]
    again.run(manager, [35, 36, 37, 38])
    # 30 is of another run now: not counted, not deleted.
    assert steps_in(root) == [30, 37, 38]
    assert run_of(root, 38) != run_of(root, 30)
    (aside,) = root.glob("40.abandoned-*")
    assert (aside / "default" / "manifest.json").exists()
    run.check(manager, 30)
    again.check(manager, None)


@pytest.mark.parametrize("policy", [cnr.OneShot, cnr.Consecutive])
@pytest.mark.parametrize("step", [5, 10, 25, 30])
def test_a_loop_begun_again_rests_on_nothing_that_it_sets_aside(
    tiny_run: Any, opened: Any, tmp_path: Path, step: int, policy: Any
) -> None:
    """Fingerprints know what has changed since steps that make way for the save."""
    root, run = tmp_path / "root", tiny_run()
    options = {"tracking": "fingerprint", "policy": policy()}
    manager = opened(run, **options)
    run.run(manager, [10, 20, 30])
    run.touched = cnr.init_touched(run.state, run.tables)
    run.run(manager, [step], force=True)
    assert manager.last_report.kind == "full"
    assert steps_in(root) == [each for each in (10, 20) if each < step] + [step]
    for each in steps_in(root):
        run.check(manager, each)
    run.run(manager, [40])
    run.check(manager, None)
    assert not any(problem.consequence for problem in cnr.verify(root))


def test_a_loop_begun_again_counts_the_restores_before(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = opened(run, tracking="fingerprint")
    run.run(manager, [10, 20])
    run.restore(manager, 20)
    run.touched = cnr.init_touched(run.state, run.tables)
    run.run(manager, [15], force=True)
    assert steps_in(tmp_path / "root") == [10, 15]
    assert run.manifest(manager, 15).restores == 1


def test_touched_rows_that_went_with_a_save_are_of_its_run_where_fingerprints_choose(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    root, run = tmp_path / "root", tiny_run()
    manager = opened(run, tracking="fingerprint", policy=cnr.Consecutive())
    run.run(manager, [10, 20])
    run.run(manager, [15], force=True)
    assert steps_in(root) == [10, 15, 20]
    assert run_of(root, 15) == run_of(root, 20)
    for each in (10, 15, 20):
        run.check(manager, each)


def test_a_step_of_another_run_is_not_replaced(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, again = tiny_run(), tiny_run(salt=1)
    manager = opened(run)
    run.run(manager, [10, 20])
    again.run(manager, [15, 25])
    run.restore(manager, 10)
    with pytest.raises(cnr.errors.DependentsExistError, match="of another run") as e:
        run.save(manager, 25)
    assert e.value.kind == "step_exists"
    run.run(manager, [26])
    assert run_of(tmp_path / "root", 26) == run_of(tmp_path / "root", 10)
    again.check(manager, 25)
    run.check(manager, None)


def test_fresh_touched_rows_after_the_last_step_go_on_with_the_run(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, [1, 2])
    run.touched = cnr.init_touched(run.state, run.tables)
    run.run(manager, [3])
    assert run_of(tmp_path / "root", 3) == run_of(tmp_path / "root", 1)


def test_evaluating_another_run_mixes_nothing(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    root, run, again = tmp_path / "root", tiny_run(), tiny_run(salt=1)
    manager = opened(run, policy=cnr.Full(), max_to_keep=2)
    run.run(manager, [10, 20])
    again.run(manager, [15])
    assert steps_in(root) == [10, 15]
    own = run_of(root, 15)
    manager.restore(10, args=cnr.args.Restore(run.state))
    # Goes on with its own state: of its own run, whatever was looked at.
    again.run(manager, [25, 35])
    assert run_of(root, 25) == own != run_of(root, 10)
    assert steps_in(root) == [10, 25, 35]


# ---- what is on disk ------------------------------------------------------------------------


def test_the_claim_names_what_a_new_run_has_moved(
    tiny_run: Any, opened: Any, used: Any, tmp_path: Path
) -> None:
    """So that a start after a crash can undo it; see SPEC.md, section 9.6."""
    root, run = tmp_path / "root", tiny_run(salt=1)
    manager = opened(run, new_run=True)
    real, notes = os.rename, []

    def noting(source: Any, target: Any, **kwargs: Any) -> None:
        claim = json.loads((root / "cnr_jax.writer.json").read_text())
        notes.append((Path(source).name, claim["aside"]))
        real(source, target, **kwargs)

    run.train(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", noting)
        run.save(manager, 1)
    noted = {name: aside for name, aside in notes if name.isdigit()}
    assert set(noted) >= {"97000", "98000", "99000", "100000"}
    for name, aside in noted.items():
        folder = f"earlier-run-{aside['uuid']}.root"
        assert [name, f"{folder}/{name}"] in aside["moved"]


def test_readers_see_the_old_run_or_the_new_one_or_are_told_where_it_is(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root, policy=cnr.Consecutive(max_chain=2)) as manager:
        run.run(manager, [0, 1, 4])
    # The root as a kill leaves it, at each moment that changes what is in it.
    copies: dict[Any, Path] = {}

    def copy(call: Any) -> None:
        held = sorted(path.name for path in root.iterdir() if ".tmp" not in path.name)
        seen = (*held, (root / "cnr_jax.writer.json").read_bytes())
        if seen not in copies:
            copies[seen] = tmp_path / f"copy{len(copies)}"
            shutil.copytree(root, copies[seen])

    run = tiny_run()
    with run.open(root, policy=cnr.Full(), new_run=True) as manager:
        run.train(7)
        with inprocess.watching(root, before=copy, alone=True):
            run.save(manager, 7)
            manager.wait_until_finished()
    told = 0
    for left in copies.values():
        before = {path: path.stat().st_mtime_ns for path in left.rglob("*")}
        try:
            latest = cnr.describe(left).latest_step
        except cnr.errors.NoStepError as error:
            told += 1
            check_is_told(left, error)
        else:
            assert latest in (4, 7)
            with cnr.CheckpointManager(left) as reader:
                assert reader.latest_step() == latest
                assert reader.restore(None).state["step"] == latest
        assert before == {path: path.stat().st_mtime_ns for path in left.rglob("*")}
        # A manager that may save mends it.
        tiny_run().open(left, new_run=True).close()
        assert cnr.describe(left).latest_step in (4, 7)
    assert told >= 4 and len(copies) > told + 2, (told, len(copies))


def check_is_told(root: Path, error: cnr.errors.NoStepError) -> None:
    """Whoever reads a root of which steps are away hears where they are."""
    (folder,) = root.glob("earlier-run-*.root")
    assert (error.kind, error.path) == ("moved_aside", str(folder))
    for read in (
        lambda: cnr.CheckpointManager(root),
        lambda: cnr.verify(root),
        lambda: cnr.prune(root, keep=1),
        lambda: cnr.read_rows(root, "user", [0]),
    ):
        with pytest.raises(cnr.errors.NoStepError, match=r"are away.*\n.*they are in"):
            read()
    if "can be read as a root" in str(error):
        assert cnr.describe(folder).latest_step == 4


def test_a_reader_that_looks_again_is_told_of_a_new_run_that_begins(
    tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root) as manager:
        run.run(manager, [1, 2])
    run = tiny_run()
    with (
        cnr.CheckpointManager(root) as reader,
        run.open(root, new_run=True) as manager,
    ):
        run.train(7)
        with storage.held() as gate:
            run.save(manager, 7)
            assert gate.reached.wait(60)
            with pytest.raises(cnr.errors.NoStepError, match="it may be under way"):
                reader.reload()
            with pytest.raises(cnr.errors.NoStepError, match="are away"):
                reader.restore(None)
            with pytest.raises(cnr.errors.NoStepError, match="are away"):
                reader.restore(None, directory=root)
        manager.wait_until_finished()
        reader.reload()
        assert reader.latest_step() == 7
