"""Files of committed steps are taken by another program while a run goes on saving."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.testing import inprocess

ROWS = 64
keeping = ocp.checkpoint_managers


def state_at(step: int) -> dict[str, Any]:
    """The state after a step, each of which changes a row."""
    user = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    user[np.arange(step) % ROWS] += 1000
    return {"user": jnp.asarray(user), "w": jnp.full(3, step), "step": jnp.int32(step)}


class Run:
    """A run that saves exact deltas, and all that it is told of its saves."""

    def __init__(self, root: Path, **settings: Any) -> None:
        orbax_options = settings.pop("orbax_options", None)
        self.root, self.told = root, list[cnr.SaveReport]()
        tables = cnr.find_tables(state_at(0), ["user"])
        options = cnr.Options(codec="raw", on_save=self.told.append, **settings)
        self.manager = cnr.CheckpointManager(
            root, tables=tables, options=options, orbax_options=orbax_options
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        self.manager.close()

    def save(self, *steps: int, **how: Any) -> cnr.SaveReport:
        """Saves steps, one after the other; the report of the last."""
        for step in steps:
            metrics = how.pop("metrics", None)
            args = cnr.args.Save(state_at(step), **how)
            assert self.manager.save(step, args=args, metrics=metrics)
            self.manager.wait_until_finished()
        assert self.manager.last_report == self.told[-1]
        return self.told[-1]

    def kinds(self) -> list[tuple[int, str, str]]:
        return [(told.step, told.kind, told.outcome) for told in self.told]


def restored(root: Path, step: int | None = None) -> int:
    """Restores a step in a program that comes later, and checks every value of it."""
    with cnr.CheckpointManager(root) as manager:
        state = manager.restore(step, args=cnr.args.Restore(state_at(0))).state
    found = int(state["step"])
    jax.tree.map(np.testing.assert_array_equal, state, state_at(found))
    return found


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: list[tuple[str, Callable[[Path], None]]] = [
    ("rows.p00000/*/c/0", Path.unlink),
    ("rows.p00000/*/c/0", cut),
    ("manifest.p00000.json", Path.unlink),
    ("manifest.p00000.json", replace_by_folder),
    ("manifest.json", Path.unlink),
    ("manifest.json", cut),
]


@pytest.mark.parametrize(("files", "harm"), HARMS)
def test_no_save_is_committed_on_a_baseline_of_which_files_are_gone(
    tmp_path: Path, files: str, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run") as run:
        run.save(1)
        harmed = sorted((run.root / "1" / "default").glob(files))
        for path in harmed:
            harm(path)
        dropped = run.save(2)
        assert (dropped.outcome, dropped.kind, dropped.parent) == (
            "dropped",
            "delta",
            1,
        )
        assert dropped.rows == dropped.total_bytes == 0
        assert dropped.damaged in {str(p.relative_to(run.root)) for p in harmed}
        assert dropped.damaged in dropped.problem and dropped.problem in str(dropped)
        assert isinstance(run.manager.failure, cnr.errors.SaveError)
        assert run.manager.failure.kind == "chain_damaged"
        assert not (run.root / "2").exists() and run.manager.latest_step() is None
        said = [r for r in caplog.records if "step 2 is not committed" in r.message]
        assert [r.levelno for r in said] == [logging.WARNING]
        full = run.save(3)
        assert (full.outcome, full.kind, full.problem) == ("committed", "full", "")
        assert "1" in full.reason and run.manager.failure is None
        assert run.save(4).parent == 3
        assert run.manager.all_steps() == [3, 4]
    assert restored(run.root) == restored(run.root, 4) == 4
    assert restored(run.root, 3) == 3


def test_dense_leaves_of_a_baseline_are_not_needed_by_what_rests_on_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run") as run:
        run.save(1)
        for path in (run.root / "1" / "default" / "dense").rglob("*"):
            if path.is_file():
                path.unlink()
        assert (run.save(2).outcome, run.told[-1].parent) == ("committed", 1)
        # The look after that commit has seen that this one does not restore by itself.
        assert run.manager.all_steps() == [2]
        assert "it does not restore, but what rests on it does" in caplog.text
        assert run.save(3).kind == "full" and "restore" in run.told[-1].reason
        caplog.clear()
        assert run.save(4).parent == 3
        assert not caplog.records, "what is known is not told again"
    assert restored(run.root, 2) == 2
    assert restored(run.root) == 4


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_goes_around_a_commit_is_seen_after_it(
    tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The rename cannot be looked at from within: a report after it says what holds then."""
    with Run(tmp_path / "run") as run:
        run.save(1)

        def harm(call: Any) -> None:
            if call.call == "rename" and call.to == str(run.root / "2"):
                for path in (run.root / "1" / "default").glob("rows.p00000/*/c/0"):
                    path.unlink()

        with inprocess.watching(run.root, **{moment: harm}):
            told = run.save(2)
        assert (told.outcome, told.kind) == ("dropped", "delta") and told.damaged
        assert "step 1 is not whole any more" in caplog.text
        assert run.manager.latest_step() is None
        assert (run.save(3).kind, run.save(4).parent) == ("full", 3)
    assert restored(run.root) == 4


def test_a_save_of_a_synchronous_manager_says_that_it_was_dropped(
    tmp_path: Path,
) -> None:
    plain = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with Run(tmp_path / "run", orbax_options=plain) as run:
        run.save(1)
        (run.root / "1" / "default" / "manifest.json").unlink()
        assert not run.manager.save(2, args=cnr.args.Save(state_at(2)))
        run.manager.wait_until_finished()
        assert run.manager.last_report.outcome == "dropped"  # type: ignore[union-attr]
        assert run.save(3).kind == "full"
    assert restored(run.root) == 3


def test_a_plain_manager_of_orbax_raises_that_a_save_is_not_committed(
    tmp_path: Path,
) -> None:
    tables, told = cnr.find_tables(state_at(0), ["user"]), list[cnr.SaveReport]()
    options = cnr.Options(codec="raw", on_save=told.append)
    registry = cnr.handler_registry(tables, options)
    with ocp.CheckpointManager(
        tmp_path / "run",
        options=ocp.CheckpointManagerOptions(
            preservation_policy=registry.preservation_policy(keeping.LatestN(5))
        ),
        handler_registry=registry,
    ) as manager:

        def save(step: int) -> None:
            manager.save(step, args=cnr.args.Save(state_at(step)))
            manager.wait_until_finished()

        # Of each save it tells when the next one begins.
        save(1), save(2)
        (tmp_path / "run" / "1" / "default" / "manifest.p00000.json").unlink()
        # Its handler looks before it decides, as nobody looks after a commit.
        save(3), save(4)
        assert [each.parent for each in told] == [None, 1, None]

        gone = tmp_path / "run" / "3" / "default" / "manifest.p00000.json"

        def harm(call: Any) -> None:
            if call.path.endswith("manifest.json") and gone.exists():
                gone.unlink()

        with inprocess.watching(tmp_path / "run", before=harm):
            with pytest.raises(cnr.errors.SaveError, match="not committed") as caught:
                save(5)
        assert caught.value.kind == "chain_damaged"
        assert (told[-1].step, told[-1].outcome) == (5, "dropped")
        save(6)
    assert restored(tmp_path / "run") == 6


def test_the_last_save_of_a_run_that_is_ended_is_made_again(tmp_path: Path) -> None:
    with Run(tmp_path / "run", save_on_sigterm=True) as run:
        run.save(1)
        (run.root / "1" / "default" / "manifest.json").unlink()
        signal.raise_signal(signal.SIGTERM)
        assert run.manager.save(2, args=cnr.args.Save(state_at(2)))
        assert run.manager.reached_preemption(2)
    assert run.kinds()[1:] == [(2, "delta", "dropped"), (2, "full", "committed")]
    assert restored(run.root) == 2


def test_a_reload_does_not_forget_what_is_gone(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.save(1, 2)
        for path in (run.root / "1" / "default").glob("rows.p00000/*/c/0"):
            path.unlink()
        run.manager.reload()
        assert (run.save(3).kind, run.told[-1].outcome) == ("full", "committed")
    assert restored(run.root) == 3


def test_full_checkpoints_that_are_to_stay_are_looked_at(tmp_path: Path) -> None:
    with Run(tmp_path / "run", min_fulls=2) as run:
        assert (run.save(1).kind, run.save(2).kind, run.save(3).parent) == (
            *("full", "full"),
            2,
        )
        (run.root / "1" / "default" / "manifest.p00000.json").unlink()
        # Its own chain is whole; the look after its commit sees that one of two is left.
        assert (run.save(4).parent, run.told[-1].outcome) == (2, "committed")
        full = run.save(5)
        assert full.kind == "full" and "min_fulls=2" in full.reason
        assert run.save(6).parent == 5
    assert restored(run.root) == 6


@pytest.mark.parametrize("files", ["manifest.json", "dense/**/*", "rows.p00000/*/c/0"])
def test_nothing_is_deleted_for_the_sake_of_what_is_not_whole(
    tmp_path: Path, files: str, caplog: pytest.LogCaptureFixture
) -> None:
    latest = keeping.LatestN(2)
    with Run(tmp_path / "run", policy=cnr.Full(), preservation_policy=latest) as run:
        run.save(1, 2)
        for path in (run.root / "2" / "default").glob(files):
            if path.is_file():
                path.unlink()
        run.save(3)
        # By its rule 2 and 3 are to stay, and 2 does not restore any more.
        assert (run.root / "1").exists() and run.manager.all_steps() == [1, 3]
        assert "no step is deleted after this save" in caplog.text
        run.save(4)
        assert run.manager.all_steps() == [3, 4] and not (run.root / "1").exists()
    assert restored(run.root, 3) == 3


def test_storage_that_does_not_answer_is_no_gap(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        run.save(1)

        def deny(call: Any) -> None:
            if call.call == "stat" and "/1/default/" in call.path:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), call.path)

        with inprocess.watching(run.root, before=deny, looks=True):
            told = run.save(2)
        assert (told.kind, told.outcome) == ("delta", "committed")
    assert restored(run.root) == 2


def test_a_newest_step_that_retention_does_not_keep_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = ocp.CheckpointManagerOptions(best_fn=lambda m: m["auc"], max_to_keep=1)
    with Run(tmp_path / "run", orbax_options=best) as run:
        assert run.save(1, metrics={"auc": 0.9}).outcome == "committed"
        for step in (2, 3):
            told = run.save(step, metrics={"auc": 0.1})
            assert (told.step, told.outcome, told.damaged) == (step, "dropped", None)
            assert "retention" in told.problem and told.total_bytes == 0
            assert told.scalars()["reduction"] == 0
        said = [r for r in caplog.records if "LatestN(1)" in r.message]
        assert [r.levelno for r in said] == [logging.WARNING]
        assert run.save(4, metrics={"auc": 0.95}).outcome == "committed"
    assert restored(run.root) == 4


# What a program may do to a run: the moment, counted in calls of the writer, and the file.


class Harm:
    """Takes or cuts one file of a committed step, once, at a moment of the run."""

    def __init__(self, root: Path, chance: random.Random, calls: int) -> None:
        self._root, self._chance = root, chance
        self._at = chance.randrange(calls)
        self._lock = threading.RLock()  # what it does is a call too
        self.path: Path | None = None
        self.told_before = 0
        self.told: list[cnr.SaveReport] = []

    def __call__(self, call: Any) -> None:
        with self._lock:
            self._at -= 1
            if self._at > 0 or self.path is not None:
                return
            steps = [each for each in self._root.iterdir() if each.name.isdigit()]
            if not steps:
                return
            inside = self._chance.choice(sorted(steps))
            files = sorted(each for each in inside.rglob("*") if each.is_file())
            if not files:
                return
            self.path = self._chance.choice(files)
            size = self.path.stat().st_size
            if size and self._chance.random() < 0.5:
                os.truncate(self.path, self._chance.randrange(size))
            else:
                self.path.unlink()
            self.told_before = len(self.told)


def settings_of(chance: random.Random) -> dict[str, Any]:
    return {
        "policy": chance.choice(
            [cnr.Intermittent(), cnr.Consecutive(max_chain=4), cnr.OneShot()]
        ),
        "min_fulls": chance.choice([1, 1, 2]),
        "preservation_policy": chance.choice([None, keeping.LatestN(2)]),
    }


def play(root: Path, seed: int, *, harmed: bool) -> Iterator[str]:
    """A program of saves with harm at a random moment; what is wrong about it."""
    chance = random.Random(seed)
    saves = chance.randrange(4, 9)
    with Run(root, **settings_of(chance)) as run:
        harm = Harm(root, chance, 30 * saves)
        harm.told = run.told
        with inprocess.watching(root, after=harm if harmed else lambda call: None):
            step, lost = 1, 0
            while step <= saves:
                try:
                    run.manager.save(step, args=cnr.args.Save(state_at(step)))
                    step += 1
                    if chance.random() < 0.5 or step > saves:
                        run.manager.wait_until_finished()
                except cnr.errors.SaveError:
                    lost += 1  # the manifest of a step is harmed before it is seen
    lost += sum(told.outcome == "dropped" for told in run.told)
    if lost > (harm.path is not None):
        yield f"lost: {lost} of {run.kinds()}"
    if not harmed and len(run.told) != saves:
        yield f"reports: {run.kinds()}"
    after = run.told[harm.told_before :]
    kept = {int(each.name) for each in root.iterdir() if each.name.isdigit()}
    for told in after:
        # What the harm itself hit after its report is lost, whoever looks.
        itself = harm.path is not None and harm.path.is_relative_to(
            root / str(told.step)
        )
        if told.outcome == "committed" and told.step in kept and not itself:
            try:
                if restored(root, told.step) != told.step:
                    yield f"step {told.step}: another was restored"
            except (cnr.errors.CnrError, AssertionError) as error:
                yield f"step {told.step}: {error}; harm: {harm.path}"


@pytest.mark.parametrize("harmed", [True, False])
def test_random_harm_costs_one_save_at_most(tmp_path: Path, harmed: bool) -> None:
    for seed in range(5 if harmed else 2):
        assert not list(play(tmp_path / str(seed), seed, harmed=harmed)), seed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("harmed", [True, False])
def test_much_random_harm_costs_one_save_at_most(tmp_path: Path, harmed: bool) -> None:
    wrong = {
        seed: found
        for seed in range(1000, 1300)
        if (found := list(play(tmp_path / str(seed), seed, harmed=harmed)))
    }
    assert not wrong
