"""A training run of two processes, killed at random times, started again each time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import training
from bench import Bench
from outcomes import Outcome, Tally, Verdict
from systems import Ours

NAME = "random kills"
ABOUT = (
    "SIGKILL at random times of one or both processes of a run, started again each time"
)
PART = "two processes"
WORKER = Path(__file__).with_name("train_process.py")
KILLS = 50
START_SECS, END_SECS = 120.0, 180.0
# Saves take a fraction of a second each: a life sees none of them, or a dozen.
LIFE_SECS = 2.5
AFTER_LAST_KILL = 3
NEVER = 1_000_000
DEVICES = "--xla_force_host_platform_device_count=2"


@dataclasses.dataclass
class Life:
    """The processes of one start of the run."""

    children: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def wait_until_training(self) -> int | None:
        """The step at which it goes on; None if it ends or hangs before."""
        deadline = time.monotonic() + START_SECS
        while time.monotonic() < deadline:
            found = [
                re.search(r"goes on at (\d+)", log.read_text()) for log in self.logs
            ]
            if all(found):
                return int(found[0][1]) if found[0] else None
            if any(child.poll() is not None for child in self.children):
                return None
            time.sleep(0.02)
        return None

    def kill(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)
        for child in self.children:
            child.wait()

    def tail(self) -> str:
        return "\n---\n".join(
            log.read_text(errors="replace")[-600:] for log in self.logs
        )


def run(bench: Bench) -> Iterator[Tally]:
    if not bench.wants(NAME, PART, Ours):
        return
    tally = Tally(NAME, PART, Ours.name, frozenset({Outcome.EQUAL}))
    folder = bench.new_root()
    folder.mkdir()
    root, rng = folder / "root", bench.random(NAME)
    for number in range(1 if bench.quick else KILLS):
        found = _one_life(folder, root, rng)
        tally.add(found, f"life {number}")
    found, steps = _last_life(folder, root)
    tally.add(found, "the last life, against the twin")
    tally.notes["steps"] = steps
    yield tally


def _one_life(folder: Path, root: Path, rng: random.Random) -> Verdict:
    """Starts the run, kills it, and looks where it had gone on."""
    committed = _committed(root)
    life = _start(folder, 2, NEVER, root)
    try:
        first = life.wait_until_training()
        if first is None:
            return Verdict(Outcome.HANG, life.tail())
        if first != committed + 1:
            text = f"went on at {first}, {committed} was committed"
            return Verdict(Outcome.LOST, text)
        time.sleep(rng.uniform(0, LIFE_SECS))
        for victim in rng.choice(([0], [1], [0, 1])):
            with contextlib.suppress(ProcessLookupError):
                life.children[victim].send_signal(signal.SIGKILL)
        # The other one may go on for a while before the machine is taken away from it.
        time.sleep(rng.uniform(0, 0.5))
    finally:
        life.kill()
    return Verdict(Outcome.EQUAL)


def _last_life(folder: Path, root: Path) -> tuple[Verdict, int]:
    """Lets the run end, and compares its state with that of a run that was never killed."""
    stop = _committed(root) + 1 + AFTER_LAST_KILL
    last, twin = folder / "last.npz", folder / "twin.npz"
    for count, saves, out in ((2, root, last), (1, None, twin)):
        life = _start(folder, count, stop, saves, out)
        try:
            for child in life.children:
                child.wait(END_SECS)
        except subprocess.TimeoutExpired:
            return Verdict(Outcome.HANG, life.tail()), stop
        finally:
            life.kill()
        if not out.exists():
            return Verdict(Outcome.UNCLEAR, life.tail()), stop
    with np.load(last) as got, np.load(twin) as want:
        wrong = training.differing(dict(got), dict(want))
    outcome = Outcome.WRONG if wrong else Outcome.EQUAL
    return Verdict(outcome, ", ".join(wrong)), stop


def _committed(root: Path) -> int:
    """The newest step whose directory has its final name; -1 if there is none."""
    names = [path.name for path in root.iterdir()] if root.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _start(
    folder: Path, count: int, stop: int, root: Path | None, out: Path | None = None
) -> Life:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": DEVICES,
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    parts = ["--processes", count, "--port", port, "--stop", stop]
    parts += ["--out", out or folder / "unused.npz"]
    parts += ["--root", root] if root is not None else []
    life = Life([], [folder / f"log{number}" for number in range(count)])
    for number, log in enumerate(life.logs):
        command = [sys.executable, WORKER, "--process", number, *parts]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*map(str, command)], env=environment, stdout=output, stderr=output
            )
        life.children.append(child)
    return life
