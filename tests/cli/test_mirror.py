"""The verb `mirror` as a program of its own, beside one that saves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.store import exists, names_in

from ..conftest import each_of, until
from ..test_mirrors import (
    far,
    files_of,
    harm,
    mostly_on_disk,
    root,
    secs_of_copy,
    steps_in,
)

__all__ = ["far", "root"]  # fixtures


@contextlib.contextmanager
def called(*words: Any, verb: str = "mirror") -> Iterator[subprocess.Popen[str]]:
    """The command, which is ended if the test does not end it."""
    found = [str(Path(cnr.__file__).parents[1]), *filter(None, sys.path)]
    with subprocess.Popen(
        [sys.executable, "-m", "cnr_jax", verb, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


@mostly_on_disk
def test_it_follows_a_program_that_saves_until_it_is_interrupted(
    tiny_run: Any, root: Path, far: epath.Path
) -> None:
    run = tiny_run()
    with run.open(root) as manager:
        run.run(manager, [0, 1])
        with called(root, far, "--follow") as command:

            def copied(steps: list[str]) -> bool:
                assert command.poll() is None, command.communicate()
                return steps_in(far) == steps

            until(lambda: copied(["0", "1"]))
            run.run(manager, [2])
            until(lambda: copied(["0", "1", "2"]))
            run.run(manager, [3, 4])
            until(lambda: copied(["0", "1", "2", "3", "4"]))
            with pytest.raises(errors.WriterError, match="nothing was copied"):
                cnr.mirror(root, far)
            # Told as they come, and not at the end.
            assert command.stdout is not None and command.stderr is not None
            told = [command.stdout.readline()]
            while told[-1] and "5 steps copied" not in told[-1]:
                told.append(command.stdout.readline())
            assert "2 steps copied" in told[0] and "3 steps copied" in told[1]
            assert "5 steps copied" in told[-1] and command.poll() is None
            command.send_signal(signal.SIGINT)
            assert command.wait(120) == 130
            assert command.stdout.read() == command.stderr.read() == ""
        assert names.WRITER not in names_in(far)
        run.run(manager, [5])
        report = cnr.mirror(root, far)
        assert report.problems == () and report.copied_steps == 1
    assert harm(far) == []
    with run.open(root, mirror=str(far)) as manager:
        run.restore(manager, None)
        run.run(manager, [6])
    with run.open(str(far)) as manager:
        assert manager.all_steps() == [*range(7)]
        for step in (0, 4, 6):
            run.check(manager, step)


def test_it_copies_no_more_bytes_in_a_second_than_it_is_told(
    tiny_run: Any, root: Path, tmp_path: Path
) -> None:
    run, target = tiny_run(), tmp_path / "far"
    with run.open(root) as manager:
        run.run(manager, [0, 1, 2])
    sizes = [(root / f).stat().st_size for s in "012" for f in files_of(root, s)]
    limit = sum(sizes) // 3
    with called(root, target, "--bytes-per-sec", limit) as command:
        told, said = command.communicate(timeout=120)
    assert (command.returncode, said) == (0, ""), (told, said)
    assert "3 steps copied" in told
    # Three seconds; but what is written first is paid for before.
    least = 0.8 * (sum(sizes) - max(sizes)) / limit
    assert secs_of_copy(target) >= least >= 1


@pytest.mark.slow
@mostly_on_disk
@each_of("seed", range(8))
def test_interrupted_anywhere_it_leaves_the_mirror_to_others(
    tiny_run: Any, tmp_path: Path, far: epath.Path, seed: int
) -> None:
    run, root, rng = tiny_run(), tmp_path / f"root{seed}", random.Random(seed)
    target = f"{far}-{seed}"
    with run.open(root) as manager:
        run.run(manager, range(6))
    limit = () if seed % 2 else ("--bytes-per-sec", 20_000)
    with called(root, target, "--follow", *limit) as command:
        until(lambda: exists(epath.Path(target) / names.WRITER))
        time.sleep(rng.uniform(0, 1.5))
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=120)
    assert (command.returncode, said) == (130, "")
    assert names.WRITER not in names_in(epath.Path(target))
    there = steps_in(target)
    assert there == [*"012345"][: len(there)] and harm(target) == []
    report = cnr.mirror(root, target)
    assert report.problems == () and report.copied_steps == 6 - len(there)
    assert cnr.verify(target) == ()
