"""Chains are merged beside a manager that saves: no step is lost, and none comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.compaction import rows
from cnr_jax.repository.store import names_in
from cnr_jax.testing import inprocess

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("unsynced")

ROWS = 48
LATEST = ocp.checkpoint_managers.LatestN


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are merged in several blocks, as those of large tables are."""
    monkeypatch.setattr(rows, "BLOCK_BYTES", 400)


class Trainer:
    """A run that saves, and what each step of its branch must restore to."""

    def __init__(self, root: epath.PathLike, seed: int = 0, **options: Any) -> None:
        self.root, self._rng, self.step = root, np.random.default_rng(seed), 0
        self.value = self._rng.normal(size=(ROWS, 4)).astype(np.float32)
        self.truth: dict[int, np.ndarray] = {}
        self._options = {"codec": "raw", "policy": cnr.Consecutive(), **options}
        self.atol = 0.0 if self._options["codec"] == "raw" else 0.2
        self._tables = cnr.find_tables(self.state(), ["t"])
        self.open()

    def state(self) -> dict[str, Any]:
        return {"t": jnp.asarray(self.value), "n": jnp.int32(self.step)}

    def open(self) -> None:
        """Begins as after a restart."""
        self.manager = cnr.CheckpointManager(
            self.root,
            tables=self._tables,
            options=cnr.Options(tracking="fingerprint", **self._options),
        )
        if self.truth:
            self.go_back(max(self.truth))

    def close(self) -> None:
        self.manager.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def go_back(self, step: int) -> None:
        """Restores a step, and is to go on from there."""
        found = self.manager.restore(step, args=cnr.args.Restore(self.state())).state
        self.value = np.array(found["t"])
        if step in self.truth:
            np.testing.assert_allclose(self.value, self.truth[step], atol=self.atol)
        self.truth = {n: value for n, value in self.truth.items() if n <= step}
        self.step = step + 1

    def save(self, saves: int = 1) -> None:
        for _ in range(saves):
            ids = self._rng.choice(ROWS, 6, replace=False)
            self.value = self.value.copy()
            self.value[ids] += 1
            self.manager.save(self.step, args=cnr.args.Save(self.state()))
            self.manager.wait_until_finished()
            self.truth[self.step] = self.value
            self.step += 1

    def delete(self) -> None:
        """The newest step, if others are left, after which the run goes on from these."""
        if len(self.truth) > 2:
            self.manager.delete(newest := max(self.truth))
            del self.truth[newest]
            self.go_back(max(self.truth))

    def roll_back(self) -> None:
        """Behind some of the newest steps, and saves."""
        steps = sorted(set(self.truth) & set(self.manager.all_steps()))
        self.go_back(int(self._rng.choice(steps[-4:])))
        self.save()

    def check(self) -> None:
        """What the manager lists is what was saved, and restores to that."""
        steps = self.manager.all_steps()
        assert max(steps) == max(self.truth)
        lacking = self.truth.keys() - set(steps)
        assert set(steps) <= self.truth.keys()
        assert not lacking or "preservation_policy" in self._options
        for step in steps[-3:]:
            read = cnr.read_rows(self.root, "t", np.arange(ROWS), step=step)
            np.testing.assert_allclose(read, self.truth[step], atol=self.atol)
        assert not [p for p in cnr.verify(self.root, level="data") if p.consequence]

    def kinds(self) -> dict[str, str]:
        return {each.directory: each.kind for each in cnr.describe(self.root).steps}


@contextlib.contextmanager
def trainer(root: epath.PathLike, seed: int = 0, **options: Any) -> Iterator[Trainer]:
    made = Trainer(root, seed, **options)
    try:
        yield made
    finally:
        made.close()


def leftovers(root: Path) -> list[str]:
    found = [name for name in os.listdir(root) if names.TEMPORARY_SUFFIX in name]
    return [name for name in found if names.REMOVED_MARK not in name]


@pytest.mark.parametrize("codec", ["raw", "lattice"])
def test_a_manager_takes_up_what_was_merged_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str
) -> None:
    with trainer(tmp_path, codec=codec) as run:
        run.save(4)
        done = cnr.compact(tmp_path)
        assert done.is_offered and not done.is_done
        assert done.merged_directory == "3.g1.merged"
        assert "takes it up" in str(done)
        assert sorted(run.kinds()) == ["0", "1", "2", "3"], "no reader sees it"
        again = cnr.plan_compaction(tmp_path)
        assert again.is_offered and again.execute().is_offered
        run.save()
        assert run.kinds()["4"] == "delta", "it rests on the merged step"
        run.save()
        assert run.kinds() == {
            "0": "full",
            "1": "delta",
            "2": "delta",
            "3.g1.merged": "full",
            "4": "delta",
            "5": "delta",
        }
        assert cnr.plan_compaction(tmp_path).chain == ("3.g1.merged", "4", "5")
        assert "3" not in os.listdir(tmp_path) and not leftovers(tmp_path)
        run.check()
        assert run.manager.all_steps() == [0, 1, 2, 3, 4, 5]
        run.reopen()
        run.save()
        run.check()
        assert run.kinds()["6"] == "delta"
    assert "has appeared" not in caplog.text and "not in the root" not in caplog.text


def test_what_was_merged_away_goes_by_retention(tmp_path: Path) -> None:
    with trainer(tmp_path, preservation_policy=LATEST(1)) as run:
        run.save(5)
        cnr.compact(tmp_path)
        run.save(2)
        assert run.kinds().keys() == {"4.g1.merged", "5", "6"}
        run.save(3)
        cnr.compact(tmp_path)
        run.save(2)
        assert run.kinds().keys() == {"9.g1.merged", "10", "11"}
        run.check()


def test_later_deltas_rest_on_the_merged_step(tmp_path: Path) -> None:
    """Also of a policy whose deltas all rest on one step."""
    with trainer(tmp_path, policy=cnr.OneShot()) as run:
        run.save(3)
        cnr.compact(tmp_path)
        run.save(3)
        assert cnr.plan_compaction(tmp_path).chain == ("2.g1.merged", "5")
        run.check()


def test_saves_in_flight_go_on_to_rest_on_what_was_merged(tmp_path: Path) -> None:
    with trainer(
        tmp_path, max_in_flight=3, preservation_policy=LATEST(1), codec="lattice"
    ) as run:
        run.save(3)
        for _ in range(4):
            cnr.compact(tmp_path)
            for _ in range(5):
                run.value = run.value + np.float32(1)
                run.manager.save(run.step, args=cnr.args.Save(run.state()))
                run.step += 1
            run.manager.wait_until_finished()
        assert [e.kind for e in cnr.describe(tmp_path).steps].count("full") <= 2
        merged = [n for n in os.listdir(tmp_path) if names.is_merged(n)]
        assert len(merged) == 1
        assert not [p for p in cnr.verify(tmp_path, level="data") if p.consequence]
        found = run.manager.restore(None, args=cnr.args.Restore(run.state())).state
        assert int(found["n"]) == run.step - 1
        np.testing.assert_allclose(found["t"], run.value, atol=2)


class At:
    """Does something before calls of this thread with some numbers; not in what it does."""

    def __init__(self, points: Collection[int], do: Callable[[], None]) -> None:
        self._points, self._do, self._own = points, do, threading.get_ident()
        self._count, self._inside = 0, False

    def __call__(self, call: Any) -> None:
        if self._inside or threading.get_ident() != self._own:
            return
        self._count += 1
        if self._count in self._points:
            self._inside = True
            try:
                self._do()
            finally:
                self._inside = False


class Killed:
    """Lets no call of this thread change anything any more, from some call on."""

    def __init__(self, kills: int) -> None:
        self._left, self._own = kills, threading.get_ident()

    @property
    def came(self) -> bool:
        return self._left < 0

    def __call__(self, call: Any) -> None:
        if threading.get_ident() == self._own:
            self._left -= 1
            if self._left < 0:
                raise OSError("killed")


def acts(run: Trainer) -> dict[str, Callable[[], None]]:
    """What the trainer may do while a chain is merged."""
    return {
        "save": run.save,
        "saves": lambda: run.save(3),
        "roll back": run.roll_back,
        "delete": run.delete,
        "reopen": run.reopen,
        "close": run.close,
    }


@pytest.mark.parametrize(
    "seed",
    [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))],
)
@pytest.mark.parametrize("keep", [None, 1])
def test_random_interleavings(tmp_path: Path, seed: int, keep: int | None) -> None:
    """At random points of each merge the trainer does something."""
    rng = np.random.default_rng(seed)
    policy = {} if keep is None else {"preservation_policy": LATEST(keep)}
    with trainer(tmp_path, seed, **policy) as run:
        run.save(3)
        for _ in range(4):
            points = set(rng.integers(1, 31, 2).tolist())
            act = str(rng.choice([*acts(run)]))
            points = {min(points)} if act == "close" else points
            with inprocess.watching(tmp_path, before=At(points, acts(run)[act])):
                try:
                    cnr.compact(tmp_path)
                except cnr.errors.NoStepError as error:
                    assert error.kind == "step_deleted"
            if act == "close":
                run.open()
            run.save(2)
            run.check()
            assert not leftovers(tmp_path)


def test_a_merge_that_comes_too_late_is_removed(tmp_path: Path) -> None:
    with trainer(tmp_path) as run:
        run.save(4)
        cnr.compact(tmp_path)
        run.delete()
        assert run.manager.all_steps() == [0, 1, 2]
        run.save(2)
        assert sorted(run.kinds()) == ["0", "1", "2", "3", "4"]
        assert not leftovers(tmp_path)
        cnr.compact(tmp_path)
        run.go_back(1)
        run.save(2)
        assert not leftovers(tmp_path)
        run.check()


def test_a_compactor_that_is_killed_beside_a_trainer(tmp_path: Path) -> None:
    """At whatever call: nothing is lost, and the next one merges."""
    with trainer(tmp_path, preservation_policy=LATEST(2)) as run:
        run.save(3)
        kills, kill = 0, Killed(0)
        while kills == 0 or kill.came:
            kill = Killed(kills)
            with contextlib.suppress(cnr.errors.CnrError):
                with inprocess.watching(tmp_path, before=kill):
                    cnr.compact(tmp_path)
            kills += 3
            run.save()
            run.check()
        assert kills > 20
        cnr.compact(tmp_path)
        run.save(2)
        run.check()
        assert not leftovers(tmp_path)
        assert [n for n in os.listdir(tmp_path) if names.is_merged(n)]


_PROGRAM = """
import sys, cnr_jax as cnr
print("ready", flush=True)
while True:
    try:
        cnr.compact(sys.argv[1])
    except cnr.errors.CnrError as error:
        print(error, flush=True)
"""


def test_merges_of_another_process_that_is_killed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with trainer(tmp_path, preservation_policy=LATEST(2)) as run:
        run.save(2)
        for _ in range(2):
            with subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, os.fspath(tmp_path)],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
            ) as process:
                assert process.stdout is not None
                process.stdout.readline()
                ends = time.monotonic() + 30
                taken = run.kinds().keys()
                while time.monotonic() < ends:
                    run.save()
                    if any(map(names.is_merged, run.kinds().keys() - taken)):
                        break
                time.sleep(float(rng.uniform(0, 0.3)))
                process.send_signal(signal.SIGKILL)
            run.save(2)
            run.check()
            assert any(map(names.is_merged, run.kinds()))
        run.reopen()
        run.save()
        run.check()
        assert not leftovers(tmp_path)


def test_a_mirror_follows(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    with trainer(root, mirror=mirror, preservation_policy=LATEST(2)) as run:
        run.save(4)
        for _ in range(2):
            cnr.compact(root)
            run.save(3)
    own = [e.directory for e in cnr.describe(root).steps]
    there = [e.directory for e in cnr.describe(mirror).steps]
    assert there[-len(own) :] == own and not {"3", "6"} & {*there}
    assert not [p for p in cnr.verify(mirror, level="data") if p.consequence]
    for step in (8, 9):
        read = cnr.read_rows(mirror, "t", np.arange(ROWS), step=step)
        np.testing.assert_array_equal(read, run.truth[step])


def test_a_trainer_in_a_bucket(bucket: epath.Path) -> None:
    """Where no folder is renamed."""
    root = bucket / "root"
    with trainer(root, preservation_policy=LATEST(1)) as run:
        run.save(4)
        assert cnr.compact(root).is_offered
        assert sorted(run.kinds()) == ["0", "1", "2", "3"]
        assert cnr.plan_compaction(root).is_offered
        run.save(2)
        assert sorted(run.kinds()) == ["3.g1.merged", "4", "5"]
        cnr.compact(root)
        run.delete()
        run.save(2)
        assert not [n for n in names_in(root) if n == "5.g1.merged"]
        cnr.compact(root)
        run.go_back(4)
        run.save(3)
        run.check()
        run.reopen()
        run.save()
        run.check()
