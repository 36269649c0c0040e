"""Rollbacks and branches: each may cost bytes, none may cost a row.

Every test takes one way of leaving the straight line, then looks at what the manifests say and
at what comes back, always through a second manager that knows only what is on disk.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.checkpointer.orbax_compat.steps import Steps
from cnr_jax.rows.touched import CLOCK_LIMIT

NEW_RUN = "a new run begins"
NOT_COUNTED = "the stamps are not counted from any checkpoint here"
DIFFERS = "differs from it, or tracking does"
POLICIES = [cnr.Consecutive(), cnr.OneShot()]
by_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
# Steps of a new branch that collide with those of the old one, and steps after them.
COLLIDING, AFTER = [3, 4], [5, 6]
by_branch = pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (POLICIES[0], COLLIDING),
        (POLICIES[1], AFTER),
        pytest.param(POLICIES[0], AFTER, marks=pytest.mark.slow),
        pytest.param(POLICIES[1], COLLIDING, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)


def names(manager: Any) -> set[str]:
    return {path.name for path in Path(manager.directory).iterdir()}


def aside(manager: Any) -> set[str]:
    """Steps that have directories renamed aside, with their generation: `3 g1`."""
    found = (
        name.split(".abandoned-") for name in names(manager) if "abandoned" in name
    )
    return {f"{step} {rest.split('-')[0]}" for step, rest in found}


def uuids(manager: Any) -> set[str]:
    """Every checkpoint that is anywhere in the root."""
    return {cnr_manifest.uuid for cnr_manifest in map(_manifest, _items(manager))}


def _items(manager: Any) -> list[Path]:
    return [p.parent for p in Path(manager.directory).glob("*/default/manifest.json")]


def _manifest(item: Path) -> Any:
    from cnr_jax.repository.step import read_manifest

    return read_manifest(item)


def expect(manager: Any, run: Any, step: int, kind: str, reason: str, gen: int) -> None:
    manifest = run.manifest(manager, step)
    assert manifest.step == step
    assert (manifest.kind, manifest.generation) == (kind, gen), manifest.reason
    assert reason in manifest.reason
    assert (manifest.parent is None) == (kind == "full")


@by_policy
def test_touched_made_anew_after_a_restore_makes_the_next_save_full(
    tiny_run: Any, opened: Any, policy: Any
) -> None:
    run = tiny_run()
    manager = opened(run, policy=policy)
    run.run(manager, range(5))
    run.restore(manager, 2)
    run.touched = cnr.init_touched(run.state, run.tables)
    run.salt = 1
    run.run(manager, [5, 6])
    expect(manager, run, 5, "full", NOT_COUNTED, gen=2)
    expect(manager, run, 6, "delta", "rows since", gen=2)
    for step in range(7):
        run.check(manager, step)
    assert manager.latest_step() == 6


@by_branch
def test_old_touched_kept_after_a_restore_makes_the_next_save_full(
    tiny_run: Any, opened: Any, policy: Any, steps: list[int]
) -> None:
    """The old touched rows know nothing of the rows that the restore put back."""
    run = tiny_run()
    manager = opened(run, policy=policy)
    run.run(manager, range(5))
    run.state = manager.restore(2, args=cnr.args.Restore(run.state)).state
    run.salt = 1
    run.run(manager, steps)
    expect(manager, run, steps[0], "full", NOT_COUNTED, gen=2)
    expect(manager, run, steps[1], "delta", "rows since", gen=2)
    run.check(manager, None)
    assert manager.latest_step() == steps[1]
    for step in (0, 1, 2, *steps):
        run.check(manager, step)


def test_old_touched_kept_after_a_restore_from_another_root_makes_the_save_full(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    other, run = tiny_run(salt=3), tiny_run()
    elsewhere = opened(other, root=tmp_path / "elsewhere")
    other.run(elsewhere, range(3))
    manager = opened(run)
    run.run(manager, range(2))
    args = cnr.args.Restore(run.state)
    restored = manager.restore(2, args=args, directory=elsewhere.directory)
    run.same(restored.state, other.truth[2])
    run.state = restored.state
    run.run(manager, [2, 3])
    expect(manager, run, 2, "full", NOT_COUNTED, gen=2)
    run.check(manager, 3)


@by_policy
def test_evaluating_an_older_step_costs_a_full_save_and_no_rows(
    tiny_run: Any, opened: Any, policy: Any
) -> None:
    run = tiny_run()
    manager = opened(run, policy=policy)
    run.run(manager, range(4))
    evaluated = manager.restore(1, args=cnr.args.Restore(run.state))
    run.same(evaluated.state, run.truth[1])
    run.run(manager, [4, 5])
    expect(manager, run, 4, "full", NOT_COUNTED, gen=2)
    expect(manager, run, 5, "delta", "rows since", gen=2)
    for step in range(6):
        run.check(manager, step)
    assert manager.latest_step() == 5


def test_evaluating_a_later_step_of_another_branch_skips_no_save(
    tiny_run: Any, opened: Any
) -> None:
    first, run = tiny_run(), tiny_run(salt=1)
    manager = opened(first)
    first.run(manager, [10, 20, 30])
    run.restore(manager, 10)
    run.run(manager, [11, 12])
    run.same(
        manager.restore(30, args=cnr.args.Restore(run.state)).state, first.truth[30]
    )
    run.run(manager, [13, 14])
    expect(manager, run, 13, "full", NOT_COUNTED, gen=3)
    for step in (11, 12, 13, 14):
        run.check(manager, step)
    for step in (10, 20, 30):
        run.check(manager, step, first.truth)
    assert manager.latest_step() == 14


def test_evaluation_while_a_save_is_in_flight_still_ends_the_old_lineage(
    tiny_run: Any, opened: Any
) -> None:
    """The save is settled before the restore is noted, whoever drives the handler."""
    run = tiny_run()
    registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw"))
    root = opened(run).directory
    options = ocp.CheckpointManagerOptions(
        preservation_policy=registry.preservation_policy(None)
    )
    with ocp.CheckpointManager(
        root, options=options, handler_registry=registry
    ) as manager:
        run.run(manager, [0, 1])
        run.train(2)
        run.save(manager, 2)  # not waited for
        run.state = manager.restore(0, args=cnr.args.Restore(run.state)).state
        run.salt = 1
        run.run(manager, [3, 4])
        expect(manager, run, 3, "full", NOT_COUNTED, gen=2)
        for step in range(5):
            run.check(manager, step)


def test_going_back_leaves_the_abandoned_steps_aside_and_follows_the_new_branch(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(6))
    before = uuids(manager)
    manager.close()

    manager = opened(run)
    run.restore(manager, 2)
    run.salt = 1
    run.run(manager, [3])
    expect(manager, run, 3, "delta", "rows since the last save (step 2)", gen=2)
    # 4 and 5 rest on the old 3, so they went with it.
    assert aside(manager) == {"3 g1", "4 g1", "5 g1"}
    assert sorted(manager.all_steps()) == [0, 1, 2, 3]
    assert before < uuids(manager)
    run.run(manager, [4])
    assert manager.latest_step() == 4
    manager.close()

    manager = opened(run)
    assert manager.latest_step() == 4
    assert sorted(manager.all_steps()) == [0, 1, 2, 3, 4]
    for step in (None, 0, 1, 2, 3, 4):
        run.check(manager, step)
    assert run.manifest(manager, 4).restores == 1


def test_going_back_with_one_shot_deltas_moves_only_colliding_steps(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run, policy=cnr.OneShot())
    run.run(manager, range(6))
    old = run.truth[5]
    run.restore(manager, 2)
    run.salt = 1
    run.run(manager, [3])
    expect(manager, run, 3, "delta", "rows since the baseline (step 0)", gen=2)
    assert aside(manager) == {"3 g1"}
    # Steps 4 and 5 are of the old branch: still there by number, but not listed.
    assert manager.all_steps() == [0, 1, 2, 3]
    assert manager.latest_step() == 3
    run.check(manager, None)
    run.check(manager, 5, {5: old})
    manager.close()

    manager = opened(run, policy=cnr.OneShot())
    assert (manager.latest_step(), manager.all_steps()) == (3, [0, 1, 2, 3])
    run.check(manager, None)
    run.check(manager, 5, {5: old})
    # Without restoring first, a save would start a third branch; restored, it goes on.
    run.restore(manager, None)
    run.run(manager, [4, 5, 6])
    assert aside(manager) == {"3 g1", "4 g1", "5 g1"}
    for step in range(7):
        run.check(manager, step)
    assert {run.manifest(manager, step).generation for step in (3, 4, 5, 6)} == {2}


@by_policy
def test_a_second_rollback_loses_nothing(
    tiny_run: Any, opened: Any, policy: Any
) -> None:
    run = tiny_run()
    manager = opened(run, policy=policy)
    run.run(manager, range(5))
    seen = uuids(manager)
    for salt, (back_to, steps) in enumerate([(3, [4, 5, 6]), (1, [2, 3])], start=1):
        run.restore(manager, back_to)
        run.same(run.state, run.truth[back_to])
        run.salt = salt
        run.run(manager, steps)
        assert seen < uuids(manager), "a rollback deletes nothing"
        seen = uuids(manager)
        manager.close()
        manager = opened(run, policy=policy)
        assert manager.latest_step() == steps[-1]
        for step in (*range(back_to + 1), *steps):
            run.check(manager, step)
        assert run.manifest(manager, steps[-1]).generation == salt + 1
    assert run.manifest(manager, 3).restores == 1, (
        "restores along this chain, not in all"
    )


def test_a_step_that_the_restored_chain_needs_cannot_be_overwritten(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(6))
    run.restore(manager, 3)
    run.train(7)
    before = {name: _stat(manager, name) for name in names(manager)}
    with pytest.raises(cnr.errors.DependentsExistError, match="after 3") as caught:
        run.save(manager, 2, force=True)
    assert caught.value.kind == "dependents_exist"
    assert "restored chain needs it" in str(caught.value)
    assert {name: _stat(manager, name) for name in names(manager)} == before
    # Nothing was spoilt for the saves that follow.
    run.run(manager, [4])
    expect(manager, run, 4, "delta", "step 3", gen=2)
    for step in range(5):
        run.check(manager, step)


def _stat(manager: Any, name: str) -> tuple[int, int]:
    stat = (Path(manager.directory) / name).stat()
    return stat.st_ino, stat.st_mtime_ns


def test_a_step_of_the_same_branch_is_not_saved_twice(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(3))
    assert manager.save(1, args=cnr.args.Save(run.state, run.touched)) is False
    assert manager.save(2, args=cnr.args.Save(run.state, run.touched)) is False
    with pytest.raises(
        cnr.errors.DependentsExistError, match="saved already"
    ) as caught:
        manager.save(1, args=cnr.args.Save(run.state, run.touched), force=True)
    assert caught.value.kind == "step_exists"
    run.check(manager, 1)


def test_a_new_run_with_a_save_interval_follows_its_own_steps(
    tiny_run: Any, opened: Any
) -> None:
    old, run = tiny_run(), tiny_run(salt=1)
    first = opened(old, save_interval_steps=2)
    for step in range(8):
        old.train(step)
        assert old.save(first, step) == (step % 2 == 0)
    first.close()
    manager = opened(run, new_run=True, save_interval_steps=3)
    for step in range(5):
        run.train(step)
        assert run.save(manager, step) == (step % 3 == 0)
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 3]
    for step in (0, 3):
        run.check(manager, step)


def test_a_new_run_in_the_same_process_and_manager_skips_no_save(
    tiny_run: Any, opened: Any
) -> None:
    run, again = tiny_run(), tiny_run(salt=1)
    manager = opened(run, policy=cnr.OneShot())
    run.run(manager, [10, 20])
    again.run(manager, [5, 10])
    expect(manager, again, 5, "full", NEW_RUN, gen=2)
    assert manager.latest_step() == 10
    assert aside(manager) == {"10 g1", "20 g1"}
    for step in (5, 10):
        again.check(manager, step)


@by_branch
def test_a_clock_that_went_back_makes_the_next_save_full(
    tiny_run: Any, opened: Any, policy: Any, steps: list[int]
) -> None:
    run = tiny_run()
    manager = opened(run, policy=policy)
    run.run(manager, [0, 1])
    kept = run.state, run.touched
    run.run(manager, [2, 3, 4])
    run.state, run.touched = kept
    run.salt = 1
    run.run(manager, steps)
    expect(manager, run, steps[0], "full", "the clock of the stamps went back", 2)
    expect(manager, run, steps[1], "delta", "rows since", gen=2)
    assert manager.latest_step() == steps[1]
    for step in (0, 1, *steps):
        run.check(manager, step)


def test_a_clock_that_went_back_counts_even_if_the_full_save_fails(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    """When the clock has caught up, nothing else shows that rows went back."""
    run = tiny_run()
    manager = opened(run)
    run.run(manager, [0, 1])
    kept = run.state, run.touched
    run.run(manager, [2, 3])
    run.state, run.touched = kept
    run.salt = 1
    with storage.failing():
        run.train(4)
        run.save(manager, 4)
        with pytest.raises(OSError, match="No space"):
            manager.wait_until_finished()
    for step in (5, 6, 7):
        run.train(step)
    run.run(manager, [8, 9])
    expect(manager, run, 8, "full", "the clock of the stamps went back", gen=2)
    expect(manager, run, 9, "delta", "step 8", gen=2)
    for step in (0, 1, 2, 3, 8, 9):
        run.check(manager, step)


@by_branch
def test_a_rollback_in_memory_with_reset_touched_loses_nothing(
    tiny_run: Any, opened: Any, policy: Any, steps: list[int]
) -> None:
    run = tiny_run()
    manager = opened(run, policy=policy)
    run.run(manager, [0, 1])
    kept = run.state
    run.run(manager, [2, 3, 4])
    run.state, run.touched = kept, cnr.reset_touched(run.touched)
    run.salt = 1
    run.run(manager, steps)
    reason = NEW_RUN if steps[0] <= 4 else NOT_COUNTED
    expect(manager, run, steps[0], "full", reason, gen=2)
    expect(manager, run, steps[1], "delta", "rows since", gen=2)
    assert manager.latest_step() == steps[1]
    for step in (0, 1, *steps):
        run.check(manager, step)


def test_saves_are_full_while_the_clock_is_at_its_limit(
    tiny_run: Any, opened: Any
) -> None:
    run = tiny_run()
    clock = jnp.full_like(run.touched.clock, CLOCK_LIMIT - 2)
    run.touched = dataclasses.replace(run.touched, clock=clock)
    manager = opened(run)
    run.run(manager, range(4))
    expect(manager, run, 0, "full", "no baseline yet", gen=1)
    for step in (1, 2, 3):
        expect(manager, run, step, "full", "the clock of the stamps has", gen=1)
        assert run.manifest(manager, step).recorded_clock == CLOCK_LIMIT
    run.touched = cnr.reset_touched(run.touched)
    run.run(manager, [4, 5])
    expect(manager, run, 4, "full", NOT_COUNTED, gen=2)
    expect(manager, run, 5, "delta", "step 4", gen=2)
    for step in range(6):
        run.check(manager, step)


def test_a_state_restored_in_another_dtype_makes_the_next_save_full(
    tiny_run: Any, opened: Any
) -> None:
    first, run = tiny_run(), tiny_run(dtype=jnp.bfloat16)
    first.run(opened(first), range(3))
    manager = opened(run)
    args = cnr.args.Restore(run.state, cast=True)
    run.state, run.touched = manager.restore(None, args=args)
    path = "['params']['user']['embedding']"
    want = first.truth[2][path].astype(jnp.bfloat16)
    np.testing.assert_array_equal(run.values()[path], want)
    run.salt = 1
    run.run(manager, [3, 4])
    # Head of the branch it goes on from, so the generation stays.
    expect(manager, run, 3, "full", DIFFERS, gen=1)
    expect(manager, run, 4, "delta", "step 3", gen=1)
    run.check(manager, 3)
    run.check(manager, 4)
    first.check(manager, 2)


def test_a_state_restored_without_one_of_its_tables_makes_the_next_save_full(
    tiny_run: Any, opened: Any
) -> None:
    first, run = tiny_run(), tiny_run()
    first.run(opened(first), range(3))
    state = dict(run.state, params={"user": run.state["params"]["user"]})
    tables = cnr.find_tables(
        dict(state, acc={"user": run.state["acc"]["user"]}), ["user"]
    )
    state["acc"] = {"user": run.state["acc"]["user"]}
    run.tables = tables
    manager = opened(run)
    state, touched = manager.restore(2, args=cnr.args.Restore(state, partial=True))
    for path, value in run.values(state).items():
        np.testing.assert_array_equal(value, first.truth[2][path], err_msg=path)

    def save(step: int) -> Any:
        nonlocal state, touched
        rows = jnp.array([step, 5])
        touched = cnr.record(touched, {"user": rows})
        user = state["params"]["user"]["embedding"].at[rows].add(1.0)
        state = dict(state, step=step, params={"user": {"embedding": user}})
        assert manager.save(step, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
        return run.values(state)

    truth = {3: save(3), 4: save(4)}
    run.state = state
    expect(manager, run, 3, "full", DIFFERS, gen=1)
    expect(manager, run, 4, "delta", "step 3", gen=1)
    for step in (3, 4):
        run.check(manager, step, truth)
    first.check(manager, 2)


def test_a_partial_restore_that_kept_a_whole_table_makes_the_next_save_full(
    tiny_run: Any, opened: Any
) -> None:
    """The table that the checkpoint does not hold has never been saved."""
    first, run = tiny_run(), tiny_run(salt=1)
    small = dict(first.state, params={"user": first.state["params"]["user"]})
    small["acc"] = {"user": first.state["acc"]["user"]}
    first.tables = cnr.find_tables(small, ["user"])
    with opened(first) as manager:
        touched = cnr.init_touched(small, first.tables)
        manager.save(0, args=cnr.args.Save(small, touched))
    manager = opened(run)
    args = cnr.args.Restore(run.state, partial=True)
    run.state, run.touched = manager.restore(0, args=args)
    run.run(manager, [1, 2])
    expect(manager, run, 1, "full", DIFFERS, gen=1)
    run.check(manager, 1)
    run.check(manager, 2)


def test_a_parent_replaced_by_another_runs_step_is_found_out(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, other = tiny_run(), tiny_run(salt=1)
    with opened(other, root=tmp_path / "other") as manager:
        other.run(manager, [0, 1])
    with opened(run) as manager:
        run.run(manager, [0, 1, 2])
    root = Path(manager.directory)
    shutil.rmtree(root / "1")
    shutil.copytree(tmp_path / "other" / "0", root / "1")

    manager = opened(run)
    with pytest.raises(cnr.errors.ParentMissingError) as caught:
        manager.restore(2, args=cnr.args.Restore(run.state))
    assert caught.value.kind == "foreign_parent"
    assert "1 is not the parent it was saved with" in str(caught.value)
    assert "1 (another run) <- 2 (delta)" in str(caught.value)
    # The foreign step itself is whole; 2 is not, and is not what restore(None) takes.
    assert manager.latest_step() != 2


def test_a_parent_of_another_runs_chain_is_never_adopted_by_a_save(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run, other = tiny_run(), tiny_run(salt=1)
    with opened(other, root=tmp_path / "other") as manager:
        other.run(manager, [0, 1, 2])
    manager = opened(run)
    run.run(manager, [0, 1, 2])
    root = Path(manager.directory)
    shutil.rmtree(root / "2")
    shutil.copytree(tmp_path / "other" / "2", root / "2")
    manager.reload()
    run.run(manager, [3])
    expect(manager, run, 3, "full", "not a legal parent any more", gen=2)
    run.check(manager, 3)
    run.check(manager, None)


def test_a_moved_root_goes_on_working(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with opened(run) as manager:
        run.run(manager, range(3))
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    Path(manager.directory).rename(moved)

    manager = opened(run, root=moved)
    for step in range(3):
        run.check(manager, step)
    run.restore(manager, None)
    run.run(manager, [3, 4])
    expect(manager, run, 3, "delta", "step 2", gen=1)
    assert run.manifest(manager, 3).parent.directory == "2"
    for step in range(5):
        run.check(manager, step)


def test_values_of_all_leaves_differ_between_branches(tiny_run: Any) -> None:
    """Guards the tests above: two branches that agreed by accident would prove nothing."""
    one, two = tiny_run(), tiny_run(salt=1)
    one.train(3)
    two.train(3)
    for path, value in one.values().items():
        if "step" not in path:
            assert not np.array_equal(value, two.values()[path]), path


def test_a_subclass_decides_which_saves_are_due(tmp_path: Path) -> None:
    class Odd(cnr.CheckpointManager):
        def should_save(self, step: int) -> bool:
            return step % 2 == 1 and super().should_save(step)

    state = {"item": jnp.ones((8, 4))}
    touched = cnr.init_touched(state, cnr.find_tables(state, ["item"]))
    with Odd(tmp_path / "root", tables=cnr.find_tables(state, ["item"])) as manager:
        args = cnr.args.Save(state, touched)
        assert [manager.save(step, args=args) for step in range(4)] == [
            False,
            True,
            False,
            True,
        ]
    assert list(manager.all_steps()) == [1, 3]


def test_a_reader_lists_no_step_that_it_could_not_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may commit a step while a reader looks at the root."""
    state = {"item": jnp.ones((8, 4))}
    tables = cnr.find_tables(state, ["item"])
    trainer = cnr.CheckpointManager(tmp_path, tables=tables)
    trainer.save(0, args=cnr.args.Save(state))
    trainer.wait_until_finished()
    reader = cnr.CheckpointManager(tmp_path)
    look, steps = Steps.reload, iter([1, 2])

    def look_and_commit(known: Steps, **given: Any) -> None:
        look(known, **given)
        if known is reader._steps:
            trainer.save(next(steps), args=cnr.args.Save(state))
            trainer.wait_until_finished()

    monkeypatch.setattr(Steps, "reload", look_and_commit)
    for expected in (0, 1):
        reader.reload()
        assert reader.latest_step() == expected
        restored = reader.restore(expected, args=cnr.args.Restore())
        assert np.array_equal(restored.state["item"], state["item"])
    reader.close()
    trainer.close()


def test_reload_while_a_step_is_written_forgets_none(tmp_path: Path) -> None:
    """Orbax takes what it finds for all there is, and a step being written is not found."""
    state = {"item": jnp.ones((8, 4))}
    with cnr.CheckpointManager(
        tmp_path,
        tables=cnr.find_tables(state, ["item"]),
        options=cnr.Options(codec="raw", policy=cnr.Full()),
        orbax_options=ocp.CheckpointManagerOptions(max_to_keep=2),
    ) as manager:
        for step in range(6):
            manager.save(step, args=cnr.args.Save(state))
            manager.reload()
            assert manager.latest_step() == step
            manager.restore(step, args=cnr.args.Restore(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "4",
        "5",
    ]
