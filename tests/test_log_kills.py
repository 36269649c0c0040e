"""A log of increments whose trainer, merges, readers and copies are killed at random."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.store import names_in
from cnr_jax.testing.faults import Fault, FaultNotHitError, run

from . import bucket_program
from .test_buckets import check_all, environment

PROGRAM = Path(__file__).parent / "log_program.py"
pytestmark = pytest.mark.slow


class Program:
    """A program that is started again whenever it is killed.

    Attributes:
        name: of the program.
        refused: how often it has ended by itself.
    """

    def __init__(self, name: str, folder: Path, *given: str) -> None:
        self.name, self._given = name, given
        self._out, self._errors = (folder / f"{name}.{end}" for end in ("out", "err"))
        self._running: subprocess.Popen[bytes] | None = None
        self._starts = self.refused = 0

    def start(self) -> None:
        given = [each.format(start=self._starts) for each in self._given]
        self._starts += 1
        with self._out.open("ab") as out, self._errors.open("ab") as errors:
            self._running = subprocess.Popen(
                [sys.executable, *given], env=environment(), stdout=out, stderr=errors
            )

    def _told(self) -> int:
        said = self._errors.read_text().split("\n")
        return sum(line.startswith("cnr_jax.errors.WriterError") for line in said)

    def kill(self) -> None:
        """Kills the program, which ends by itself only if `prune` has got the root before it."""
        assert self._running is not None
        if self._told() > self.refused:
            self._running.wait(60)  # it has said why it ends, and is about to
        ended = self._running.poll() is not None
        self.close()
        said = self._errors.read_text().split("\n")
        found = sum(line.startswith("Traceback") for line in said)
        self.refused += ended
        told = self._told()
        # An error comes with those that it was raised from.
        assert told == self.refused, (self.name, said[-30:])
        assert found <= 3 * told, (self.name, said[-30:])

    def close(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def kill_merge(self) -> bool:
        """Kills the process that merges for this program, if there is one."""
        assert self._running is not None
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self._running.pid and "compaction.baseline" in command:
                os.kill(int(path.name), 9)
                return True
        return False

    def lines(self) -> list[list[str]]:
        """Whole lines that it has printed, as words."""
        if not self._out.exists():
            return []
        return [line.split() for line in self._out.read_text().split("\n")[:-1]]


def newest_told(trainer: Program) -> int:
    return max(
        (int(line[1]) for line in trainer.lines() if line[0] == "saved"), default=-1
    )


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_programs_of_a_log_that_are_killed_lose_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    """For as many minutes as `CNR_MINUTES` says."""
    minutes = float(os.environ.get("CNR_MINUTES", "2"))
    root, mirror = (str(tmp_path / name) for name in ("run", "mirror"))
    if where == "bucket":
        bucket = request.getfixturevalue("bucket")
        root, mirror = str(bucket / "run"), str(bucket / "mirror")
    trainer = Program("train", tmp_path, str(PROGRAM), "train", root, "{start}")
    programs = [
        trainer,
        Program("read", tmp_path, str(PROGRAM), "read", root),
        Program("prune", tmp_path, str(PROGRAM), "prune", root),
        Program(
            "mirror", tmp_path, "-m", "cnr_jax", "mirror", root, mirror, "--follow"
        ),
        Program("compact", tmp_path, "-m", "cnr_jax", "compact", root, "--follow"),
    ]
    for each in programs:
        request.addfinalizer(each.close)
        each.start()
        while each is trainer and newest_told(trainer) < 0:
            time.sleep(0.1)
    seed = int(os.environ.get("CNR_SEED", secrets.randbelow(1 << 30)))
    print(f"CNR_SEED={seed}")
    rng, killed = random.Random(seed), Counter[str]()
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.3, 6))
        victim = rng.choice([*programs, trainer, None, None])
        if victim is None:
            for _ in range(50):  # until one goes on
                if trainer.kill_merge():
                    killed["merge"] += 1
                    break
                time.sleep(0.1)
            continue
        victim.kill()
        killed[victim.name] += 1
        if victim is trainer:
            time.sleep(rng.choice([0, 0, 2]))  # in which what is superfluous is deleted
            assert newest_in(root) >= newest_told(trainer)
        victim.start()
    for each in programs:
        each.kill()
    steps = check_all(path_of(root))
    assert steps[-1] >= newest_told(trainer), "what was told to be durable is there"
    goes_on(root, steps[-1])
    cnr.mirror(root, mirror)
    copied = check_all(path_of(mirror))
    assert copied[-1] == steps[-1] + 3
    counts = Counter(
        (each.name, *line[: 1 if line[0] in ("read", "step") else 3 : 2])
        for each in programs
        for line in each.lines()
    )
    print(dict(killed), {" ".join(k): n for k, n in counts.items()})
    print("ended by themselves", {each.name: each.refused for each in programs})
    assert counts["train", "saved", "full"] > 1, "a chain was merged"
    assert counts["compact", "step"] > 1, "and one elsewhere"


@pytest.mark.timeout(7200)
def test_a_merge_that_is_killed_before_any_call_loses_nothing(tmp_path: Path) -> None:
    """Calls that change files, every `CNR_EVERY`th of them; saves go on beside the merge."""
    every, killed = int(os.environ.get("CNR_EVERY", "1")), 0
    for nth in itertools.count(1, every):
        root = tmp_path / str(nth)
        root.mkdir()
        # The variable is one of those that merges get, and trainers do not.
        fault = Fault("any", nth, process="TPU_VISIBLE_DEVICES=")
        command = [sys.executable, str(PROGRAM), "train", str(root), "1", "6"]
        try:
            done = run(command, below=root, fault=fault, env=environment())
        except FaultNotHitError:
            break
        assert done.returncode == 0, (nth, done)
        killed += 1
        assert check_all(path_of(str(root)))[-3:] == [3, 4, 5]
        goes_on(str(root), 5)
        shutil.rmtree(root)
    print(f"{killed} merges were killed")
    assert killed * every > 20


def newest_in(root: str) -> int:
    """The newest step; all listed ones that `prune` does not delete meanwhile are whole."""
    like = bucket_program.first_state()
    with cnr.CheckpointManager(root) as manager:
        steps = manager.all_steps()
        for step in steps:
            try:
                got = manager.restore(step, args=cnr.args.Restore(like))
            except cnr.errors.NoStepError:
                assert step != steps[-1]
            else:
                bucket_program.check(got.state, step)
    return steps[-1]


def goes_on(root: str, newest: int) -> None:
    """Saves three more steps, after which nothing is left of what was killed."""
    state = bucket_program.first_state()
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        args: Any = cnr.args.Restore(state)
        state, touched = manager.restore(None, args=args)
        assert len(bucket_program.check(state, newest)) == newest + 1
        for step in range(newest + 1, newest + 4):
            rows = bucket_program.rows_at(step)
            state = {
                "user": state["user"].at[rows].set(1000 + step),
                "salts": state["salts"].at[step].set(1),
                "step": state["step"] + 1,
            }
            touched = cnr.record(touched, {"user": rows})
            manager.save(step, args=cnr.args.Save(state, touched))
        manager.wait_until_finished()
    held = names_in(path_of(root))
    assert [name for name in held if names.TEMPORARY_SUFFIX in name] == []


def path_of(root: str) -> Any:
    from etils import epath

    return epath.Path(root)
