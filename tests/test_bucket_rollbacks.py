"""Rollbacks where nothing can be renamed: saves get names of their own, and leave others behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.cli.app import app
from cnr_jax.format import names
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.markers import is_committed, says_committed
from cnr_jax.repository.store import names_in, store_of
from cnr_jax.repository.upkeep.claim import Claim
from cnr_jax.testing import damage, strategies
from cnr_jax.testing.faults import Fault
from cnr_jax.testing.machine import BucketMachine, run_state_machine_as_test
from cnr_jax.testing.playing import Player
from cnr_jax.testing.setup import Setup

from .conftest import case_of
from .test_buckets import as_before, held, uncommit
from .testing.test_machine import (
    RETENTIONS,
    SHAPES,
    ignoring_what_orbax_leaves,
    settings,
)


@pytest.fixture
def root(bucket: epath.Path) -> epath.Path:
    return bucket / "run"


def folders(root: Any) -> list[str]:
    files = (names.WRITER, names.CATALOGUE, names.MEASUREMENTS)
    return [name for name in held(root) if name not in files]


def shown(root: Any) -> list[str]:
    """Step directories that hold what plain Orbax looks for."""
    return [n for n in folders(root) if names.ORBAX_COMMITTED in names_in(root / n)]


def copied(root: Any, target: Path) -> Path:
    """A copy of a root on a disk, as tools of a service make one."""
    store = store_of(root)

    def copy(path: Any, to: Path) -> None:
        for name in held(path):
            if held(path / name):
                copy(path / name, to / name)
            else:
                to.mkdir(parents=True, exist_ok=True)
                (to / name).write_bytes(store.read(path / name))

    copy(root, target)
    return target


def rolled_back(run: Any, manager: Any, to: int, steps: Any) -> None:
    run.restore(manager, to)
    run.same(run.state, run.truth[to])
    run.salt += 1  # from here on it trains otherwise
    run.run(manager, steps)


def test_a_save_of_a_number_that_is_taken_has_a_name_of_its_own(
    tiny_run: Any, root: epath.Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url) as manager:
        run.run(manager, range(4))
        rolled_back(run, manager, 1, [2, 3, 4])
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        assert folders(root) == ["0", "1", "2", "2.g2.branch", "3", "3.g2.branch", "4"]
        assert shown(root) == ["0", "1", "2.g2.branch", "3.g2.branch", "4"]
        assert all(is_committed(root / name) for name in ("2", "3")), "they are history"
        for step in (None, *range(5)):
            run.check(manager, step)
        rolled_back(run, manager, 2, [3])
        assert manager.all_steps() == [0, 1, 2, 3] and manager.latest_step() == 3
        assert "4" not in shown(root), "it rests on what was left behind"
        with pytest.raises(errors.NoStepError):
            manager.restore(4, args=cnr.args.Restore(run.state))
        rolled_back(run, manager, 3, [4, 5])
    aside = {"2", "3", "3.g2.branch", "4"}
    there = {"0", "1", "2.g2.branch", "3.g3.branch", "4.g3.branch", "5"}
    assert {*folders(root)} == aside | there and {*shown(root)} == there
    for reopened in (False, True):
        with case_of(reopened), run.open(url) as manager:
            if reopened:
                manager.reload()
            assert manager.all_steps() == [*range(6)] == manager.all_steps(read=True)
            for step in (None,) if reopened else range(6):
                run.check(manager, step)
    assert {p.directory for p in cnr.verify(url)} == aside
    assert [p for p in cnr.verify(url) if p.consequence] == []
    found = cnr.describe(url)
    assert {each.directory for each in found.steps} == there
    assert {*found.abandoned} == aside and found.latest_step == 5


def test_what_reads_a_root_takes_the_step_of_the_newest_branch(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url) as manager:
        run.run(manager, range(5))
        left = dict(run.truth)
        rolled_back(run, manager, 1, [3])
        truth = run.truth[3]
        assert manager.all_steps() == [0, 1, 3] and (left[3] is not truth)
    leaf = "['params']['user']['embedding']"
    assert left[3][leaf].tolist() != truth[leaf].tolist()
    local = copied(root, tmp_path / "copy")
    for where in (url, local):
        rows = cnr.read_rows(where, "user", [0, 3], step=3)
        assert rows.tolist() == truth[leaf][[0, 3]].tolist()
        assert cnr.changed_rows(where, 3, "user") is not None
        with pytest.raises(errors.NoStepError, match="step 4 does not exist"):
            cnr.read_rows(where, "user", [0], step=4)  # which rests on what was left
        with run.open(str(tmp_path / f"elsewhere {where == url}")) as manager:
            got = manager.restore(3, directory=where, args=cnr.args.Restore(run.state))
            run.same(got.state, truth)
            got = manager.restore(
                None, directory=where, args=cnr.args.Restore(run.state)
            )
            run.same(got.state, truth)
        for words in (
            ["ls", where],
            ["show", where, "3"],
            ["verify", where],
            ["explain", where, "3"],
            ["rows", where, "user", "3"],
            ["export", where, "3", "--to", str(tmp_path / f"out {where == url}")],
            ["prune", where, "--keep", "9"],
        ):
            with case_of(words):
                result = CliRunner().invoke(app, [*map(str, words)])
                assert result.exit_code == 0, result.output
    # Steps that no rollback has left, by their numbers alone: 2 was never in the way.
    with run.open(url) as manager:
        run.check(manager, 2, left)


def test_what_is_left_behind_goes_with_the_first_step_of_the_run(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), {"max_to_keep": 3}, policy=cnr.Full()) as manager:
        run.run(manager, range(3))
        rolled_back(run, manager, 0, [1])
        assert folders(root) == ["0", "1", "1.g2.branch", "2"], "no step has to go"
        run.run(manager, [2])
        assert folders(root) == ["0", "1", "1.g2.branch", "2", "2.g2.branch"]
        run.run(manager, [3])
        assert folders(root) == ["1.g2.branch", "2.g2.branch", "3"]
        # Nothing is in the way of these numbers any more but what is called otherwise.
        rolled_back(run, manager, 1, [2])
        assert folders(root) == ["1.g2.branch", "2.g2.branch", "2.g3.branch", "3"]
    with run.open(str(root), {"max_to_keep": 3}, policy=cnr.Full()) as manager:
        assert manager.all_steps() == [1, 2]
        run.restore(manager, None)
        run.run(manager, [3, 4])
        assert folders(root) == ["2.g3.branch", "3.g3.branch", "4"]
        for step in (2, 3, 4):
            run.check(manager, step)


def test_a_deleted_step_leaves_none_of_its_number(
    tiny_run: Any, root: epath.Path
) -> None:
    run, url = tiny_run(), str(root)
    with run.open(url) as manager:
        run.run(manager, range(4))
        rolled_back(run, manager, 1, [2])
        manager.delete(2)
        assert folders(root) == ["0", "1"], "3 rested on what was left behind"
        assert manager.all_steps() == [0, 1]
        run.restore(manager, 1)
        run.run(manager, [2, 3])
        rolled_back(run, manager, 1, [2, 3, 4])
    plan = cnr.prune(url, keep=9)
    assert {f.name for f in plan.fates if f.kind == "aside"} == {"2", "3"}
    assert not plan.going
    with run.open(url, policy=cnr.Full()) as manager:
        run.restore(manager, None)
        run.run(manager, [5])
    plan = cnr.prune(url, keep=1, delete=True, writer_is_dead=True)
    assert folders(root) == ["5"] and {"2", "3"} <= {fate.name for fate in plan.going}


@contextlib.contextmanager
def failing_commits(root: Any) -> Iterator[None]:
    store = type(store_of(root))
    real = store.swap

    def swap(self: Any, path: Any, data: bytes, version: Any) -> Any:
        if says_committed(data):
            raise OSError(5, "harm", str(path))
        return real(self, path, data, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "swap", swap)
        yield


def test_a_save_that_fails_leaves_nothing_behind(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        old = dict(run.truth)
        run.restore(manager, 1)
        with failing_commits(root), pytest.raises(errors.SaveError):
            run.run(manager, [2])
        assert manager.all_steps() == [0, 1, 2, 3] and manager.latest_step() == 3
        for step in (2, 3):
            run.check(manager, step, old)
        assert folders(root) == ["0", "1", "2", "3"] == shown(root)
        run.run(manager, [2, 3])
        assert manager.all_steps() == [0, 1, 2, 3]
        for step in range(4):
            run.check(manager, step)


def keeping_first_and(newest: int) -> dict[str, Any]:
    """Options by which step 0 stays, and so many of the newest steps."""
    policies = ocp.checkpoint_managers.preservation_policy
    rules = [policies.LatestN(newest), policies.EveryNSteps(10)]
    return {"preservation_policy": policies.AnyPreservationPolicy(rules)}


def test_a_name_that_retention_has_freed_is_a_step_again(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), keeping_first_and(1)) as manager:
        for step in range(4):
            run.train(step)
            run.truth[step] = run.values()
            manager.save(step, args=cnr.args.Save(run.state, run.touched, full=True))
        manager.wait_until_finished()
        assert folders(root) == ["0", "3"]
        rolled_back(run, manager, 0, [1, 2])
        assert folders(root) == ["0", "1", "2"]
        with failing_commits(root), pytest.raises(errors.SaveError):
            run.run(manager, [3])
        run.run(manager, [3, 4])  # looks at the root anew
        assert folders(root) == ["0", "1", "2", "3", "4"], "4 rests on all of them"
        assert sorted(catalogue.read(root).entries) == folders(root)
        run.check(manager, 4)
    assert cnr.verify(root) == ()


def test_a_name_that_was_freed_here_is_a_step_that_another_program_has_saved(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root), keeping_first_and(2), policy=cnr.Full()) as manager:
        run.run(manager, range(4))
        assert folders(root) == ["0", "2", "3"]
        with run.open(str(root)) as other:
            rolled_back(run, other, 0, [1])
        manager.reload()
        run.restore(manager, 1)
        run.run(manager, [2])
        assert manager.all_steps() == [0, 1, 2]
        assert "1" in folders(root) and "1" in catalogue.read(root).entries


def test_a_kill_before_the_commit_changes_nothing_and_one_after_it_all(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        old, catalogue = dict(run.truth), store.read(root / names.CATALOGUE)
        rolled_back(run, manager, 1, [2])
    # As a kill right before the commit leaves it.
    store.write(root / names.CATALOGUE, catalogue, replaces=True)
    uncommit(root / "2.g2.branch")
    for name in ("2", "3"):
        store.write(root / name / names.ORBAX_COMMITTED, b"", replaces=True)
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1, 2, 3]
        for step in (None, 2, 3):
            run.check(manager, step, old)
        assert cnr.describe(root).unfinished == ("2.g2.branch",)
        rolled_back(run, manager, 1, [2])
        assert folders(root) == ["0", "1", "2", "2.g2.branch", "3"]
    assert shown(root) == ["0", "1", "2.g2.branch"]
    # And right after it: what plain Orbax lists is what it was before.
    store.remove_file(root / "2.g2.branch" / names.ORBAX_COMMITTED)
    for name in ("2", "3"):
        store.write(root / name / names.ORBAX_COMMITTED, b"", replaces=True)
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1, 2]
        run.check(manager, None)
        run.restore(manager, None)
        run.run(manager, [3])
        assert shown(root) == ["0", "1", "2.g2.branch", "3.g2.branch"]
        for step in range(4):
            run.check(manager, step)


def test_what_plain_orbax_lists_is_put_right_by_the_next_save(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
        real = type(store).remove_file

        def remove_file(self: Any, path: Any) -> None:
            if path.name == names.ORBAX_COMMITTED:
                raise OSError(5, "harm", str(path))
            real(self, path)

        monkeypatch.setattr(type(store), "remove_file", remove_file)
        rolled_back(run, manager, 1, [2])
        assert manager.last_report.outcome == "committed" and manager.failure is None
        assert shown(root) == ["0", "1", "2"], "rather the old one than two"
        monkeypatch.undo()
        run.run(manager, [3])
        assert shown(root) == ["0", "1", "2.g2.branch", "3"]
        for step in range(4):
            run.check(manager, step)


def test_steps_of_before_are_left_behind_by_a_marker_of_ours(
    tiny_run: Any, root: epath.Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
        for step in range(3):
            as_before(root / str(step))
        rolled_back(run, manager, 1, [2])
    assert {*names_in(root / "2")} & {*names.MARKERS} == {names.ATTEMPT}
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1, 2]
        run.check(manager, None)


def test_a_damaged_step_is_not_taken_for_the_one_that_it_left_behind(
    tiny_run: Any, root: epath.Path
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
        rolled_back(run, manager, 1, [2])
    store.write(root / "2.g2.branch/default" / names.MANIFEST, b"{", replaces=True)
    store.remove_file(root / names.CATALOGUE)  # which would not tell
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1]
        with pytest.raises(errors.CnrError):
            manager.restore(2, args=cnr.args.Restore(run.state))
        run.restore(manager, None)
        run.same(run.state, run.truth[1])
        run.run(manager, [2])
        # In case the damaged one, of generation 2, is mended.
        assert "2.g3.branch" in folders(root)
        assert manager.all_steps() == [0, 1, 2]
        run.check(manager, 2)
    (problem,) = [p for p in cnr.verify(root) if p.consequence] or [None]
    assert problem is None


def test_a_new_run_takes_along_what_was_left_behind(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
        rolled_back(run, manager, 1, [2])
    truth, fresh = run.truth[2], tiny_run(salt=1)
    with fresh.open(str(root), new_run=True) as manager:
        fresh.run(manager, range(4))
        assert manager.all_steps() == [0, 1, 2, 3]
        for step in range(4):
            fresh.check(manager, step)
    (earlier,) = [name for name in names_in(root) if name.startswith("earlier-run-")]
    assert folders(root) == ["0", "1", "2", "3", earlier]
    assert names_in(root / earlier) == ["0", "1", "2", "2.g2.branch"]
    assert [e.step for e in cnr.describe(root / earlier).steps] == [0, 1, 2]
    with run.open(str(tmp_path / "elsewhere")) as manager:
        got = manager.restore(
            2, directory=root / earlier, args=cnr.args.Restore(run.state)
        )
        run.same(got.state, truth)


def test_an_earlier_run_stays_away_when_the_first_step_of_a_killed_one_is_deleted(
    tiny_run: Any, root: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fresh, note = tiny_run(), tiny_run(salt=1), Claim.note_aside
    with run.open(str(root)) as manager:
        run.run(manager, range(2))
    # The manager never notes that the first save of the new run is committed.
    with monkeypatch.context() as patch:
        patch.setattr(Claim, "note_aside", lambda *given: given[1] and note(*given))
        manager = fresh.open(str(root), new_run=True)
        fresh.run(manager, [0])
        manager.close()
    with fresh.open(str(root)) as manager:
        fresh.restore(manager, 0)
        manager.delete(0)
    with fresh.open(str(root)) as manager:
        assert manager.all_steps() == []
        fresh.run(manager, [2])
        assert manager.all_steps() == [2]
    step, earlier = folders(root)
    assert step == "2"
    assert names_in(root / earlier) == ["0", "1"]


def test_a_loop_that_begins_again_moves_what_comes_after_with_all_that_was_left(
    tiny_run: Any, root: epath.Path
) -> None:
    run, fresh = tiny_run(), tiny_run(salt=1)
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        rolled_back(run, manager, 1, [2, 3])
        fresh.run(manager, [2])
        assert manager.all_steps() == [2]
        fresh.check(manager, 2)
    steps = [name for name in folders(root) if names.kind_of_folder(name) is None]
    assert steps == ["0", "1", "2"]
    with run.open(str(root)) as manager:
        assert manager.latest_step() == 2
        fresh.check(manager, None)
        run.check(manager, 1)


def test_a_copy_on_a_disk_goes_on(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        rolled_back(run, manager, 1, [2, 3])
    local = copied(root, tmp_path / "copy")
    with run.open(str(local)) as manager:
        assert manager.all_steps() == [0, 1, 2, 3]
        for step in (None, *range(4)):
            run.check(manager, step)
        rolled_back(run, manager, 2, [3, 4])
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        for step in (None, *range(5)):
            run.check(manager, step)
    assert {each.name for each in local.glob("3*")} == {
        "3",
        "3.g2.branch",
        "3.g3.branch",
    }
    assert [p for p in cnr.verify(local) if p.consequence] == []


def test_plain_orbax_lists_no_step_by_such_a_name(
    tiny_run: Any, root: epath.Path, tmp_path: Path
) -> None:
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        rolled_back(run, manager, 1, [2, 3, 4])
    local = copied(root, tmp_path / "copy")
    # On a disk there is nothing by which Orbax would know that a step is not to be listed.
    for name in ("2", "3"):
        shutil.rmtree(local / name)
    with ocp.CheckpointManager(local) as manager:
        assert manager.all_steps() == [0, 1, 4]
    for prefix in (None, "4"):
        form = ocp.path.step.standard_name_format(step_prefix=prefix)
        assert {each.path.name for each in form.find_all(local)} <= {"0", "1", "4"}


def test_names_are_those_of_the_options(tiny_run: Any, root: epath.Path) -> None:
    run = tiny_run()
    options = {"step_prefix": "ck", "step_format_fixed_length": 4}
    with run.open(str(root), options) as manager:
        run.run(manager, range(3))
        rolled_back(run, manager, 1, [2])
    assert folders(root) == ["ck_0000", "ck_0001", "ck_0002", "ck_0002.g2.branch"]
    with run.open(str(root), options) as manager:
        assert manager.all_steps() == [0, 1, 2]
        run.restore(manager, 2)
        run.same(run.state, run.truth[2])
    with run.open(str(root)) as manager:
        assert manager.all_steps() == []


# ---- against the model --------------------------------------------------------------------------


class Machine(BucketMachine):
    """The machine of local roots, in a bucket."""

    setups = strategies.setups(RETENTIONS, jax.devices()[:1], SHAPES)
    counts: ClassVar[Counter[str]] = Counter()


# What a run in a bucket has to meet for its test to say something.
EXPECTED = {
    "full",
    "delta",
    "restored",
    "branched",
    "deleted",
    "crash",
    "failed save",
    "damage detected",
    "foreign folder",
    "used root refused",
    "catalogue lost",
    "catalogue exchanged",
}


def play(bucket: epath.Path, examples: int, steps: int) -> Counter[str]:
    Machine.folder, Machine.counts = str(bucket), Counter()
    # Shrinking replays hundreds of saves, longer than a test may take.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    logging.disable(logging.CRITICAL)
    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(examples, steps, derandomize=True, phases=phases),
        )
    finally:
        logging.disable(logging.NOTSET)
    return Machine.counts


@pytest.fixture
def setup() -> Setup:
    shapes = {"t0": strategies.Shape(24, 4, np.float32, ("row",))}
    state = jax.device_put(strategies.state_of(shapes, 1))
    return Setup(
        state=state,
        tables=strategies.find(shapes, state),
        train=functools.partial(strategies.train, shapes),
        options=cnr.Options(codec="raw", policy=cnr.Consecutive()),
    )


@ignoring_what_orbax_leaves
def test_a_run_in_a_bucket_is_what_the_model_says(
    bucket: epath.Path, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """All that the machine plays, in an order that is the same always."""
    caplog.set_level(logging.CRITICAL)
    with Player(f"{bucket}/run", setup) as player:
        player.save()
        player.save_several([1])
        player.restore(1)
        player.train(2)
        player.crash_while_saving(nth=14)  # of a number that is taken
        player.restore(1)
        player.train(3)
        player.save()
        player.put_catalogue(player.catalogues[0], saves=[4])
        player.delete(0)
        player.crash_while_deleting(0, nth=2, after=True)
        player.train(5)
        player.fail_while_saving(Fault("open", nth=4, action="EIO", times=0))
        player.put_catalogue(player.catalogue_elsewhere())
        player.put_catalogue(None)
        files = damage.files_of(str(player.root))
        chunk = [file.kind for file in files].index("array")
        player.damaged(chunk, damage.remove)
        player.put_folder(1)
        player.reopen(anew=True)
        player.save()
        player.check_all()
    assert set(player.counts) >= EXPECTED, player.counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@ignoring_what_orbax_leaves
def test_many_runs_in_a_bucket_are_what_the_model_says(bucket: epath.Path) -> None:
    counts = play(bucket, 20, 12)
    print(dict(counts))
    # What else there is, an order of its own plays above.
    expected = {"full", "delta", "restored", "branched", "crash", "failed save"}
    assert expected <= set(counts), counts
    assert counts["catalogue lost"] + counts["catalogue exchanged"] > 0, counts


def test_who_takes_a_root_over_sees_what_was_done_there_since(
    tiny_run: Any, root: epath.Path
) -> None:
    """A step that rests on one which another program has left behind would be lost with it."""
    run, other = tiny_run(), tiny_run()
    other.salt = 1
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
        with other.open(str(root)) as later:
            other.restore(later, None)
            run.restore(manager, 0)
            run.run(manager, [1])  # which leaves 1 and 2 behind
            other.run(later, [3])
            assert later.latest_step() == 3
    with other.open(str(root)) as reader:
        assert reader.latest_step() == 3
    for step in reader.all_steps():
        other.check(reader, step, run.truth | other.truth)
