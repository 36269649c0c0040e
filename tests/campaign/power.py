"""Power cuts: a file system of its own loses all that it was not told to sync.

The process is killed before a call, then the kernel shuts the file system down without writing
its journal, as `xfs_io -x -c shutdown` does. What is there after mounting it again is judged.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import Bench
from judging import TwinError
from kills import verdict
from outcomes import Outcome, Tally, Verdict
from scenarios import BY_NAME, System
from stages import TRIES, Stage, Strike

from cnr_jax.testing.faults import Call, Fault

NAME = "power cut"
ABOUT = "an ext4 file system that loses what was not synced"
SCENARIOS = ("delta", "full and retention")
PARTS = ("at the end of a save", "after wait_until_finished")
ALLOWED = frozenset({Outcome.EQUAL})
BEFORE_COMMIT, AFTER_COMMIT = 30, 60
SIZE_BYTES = 48 << 20
SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
WITHOUT_JOURNAL = 2
UNMOUNT_TRIES = 100


def run(bench: Bench) -> Iterator[Tally]:
    wanted = [
        (system, part, name)
        for system in bench.systems
        for part in PARTS
        for name in SCENARIOS[-1 if bench.quick else 0 :]
        if bench.wants(NAME, f"{part}, {name}", system)
    ]
    reason = why_not() if wanted else None
    if reason:
        print(f"{NAME}: left out, {reason}")
        return
    for system, part, name in wanted:
        yield _cut_power(bench, system, name, part)


@functools.cache
def why_not() -> str | None:
    """Why power cannot be cut here; None where it can."""
    if os.geteuid() != 0:
        return "it needs root"
    tools = [t for t in ("mkfs.ext4", "mount", "umount") if shutil.which(t) is None]
    if tools:
        return f"it needs {', '.join(tools)}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            disk = Disk(Path(folder))
            with disk.mounted() as mounted:
                disk.lose_power(mounted)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"a file system in a file cannot be mounted or shut down: {error}"
    return None


class Disk:
    """A small ext4 file system in a file.

    Args:
        folder: for the file and the mount point.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._image, self._point = folder / "image", folder / "mounted"
        self._point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        _command("mkfs.ext4", "-q", "-F", self._image)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        # The journal is written when something is synced, not because time has passed.
        _command("mount", "-o", "loop,commit=300", self._image, self._point)
        try:
            yield self._point
        finally:
            self._unmount()

    def _unmount(self) -> None:
        """Unmounts, as soon as nothing is open there any more.

        What another thread starts meanwhile holds our open files for a moment: between its fork
        and its exec.
        """
        for left in reversed(range(UNMOUNT_TRIES)):
            try:
                _command("umount", self._point)
                return
            except subprocess.CalledProcessError:
                if not left:
                    raise
                time.sleep(0.1)

    @staticmethod
    def lose_power(mounted: Path) -> None:
        """From now on nothing reaches the disk, and what was not synced is lost."""
        directory = os.open(mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
        finally:
            os.close(directory)


def _command(*parts: object) -> None:
    subprocess.run([str(part) for part in parts], check=True, capture_output=True)


def _cut_power(bench: Bench, system: System, name: str, part: str) -> Tally:
    scenario = BY_NAME[name]
    tally = Tally(NAME, f"{part}, {name}", system.name, ALLOWED)
    try:
        stage = bench.stage(system, scenario)
    except TwinError as error:
        tally.add(Verdict(Outcome.UNCLEAR, str(error)), "before any fault")
        return tally
    if part == PARTS[0]:
        faults: Sequence[Fault | None] = bench.sample(_end_of(stage.calls), 3)
    else:
        # Again and again: what the kernel wrote by itself meanwhile must not matter.
        faults = [None] * (1 if bench.quick else 10)
    strike = functools.partial(_strike, stage)
    for _, struck in bench.side_by_side(strike, faults):
        tally.add(verdict(stage.judge, struck), str(struck))
        struck.remove()
    return tally


def _end_of(calls: Sequence[Call]) -> list[Fault]:
    """A kill before each call around the one that commits the step, and after the last."""
    commit = max(
        call.number
        for call in calls
        if call.call == "rename" and ".orbax-checkpoint-tmp" in Path(call.path).name
    )
    first = max(1, commit - BEFORE_COMMIT)
    last = min(len(calls), commit + AFTER_COMMIT)
    faults = [Fault("any", number, "kill") for number in range(first, last + 1)]
    return [*faults, Fault("any", last, "kill_after")]


def _strike(stage: Stage, fault: Fault | None) -> Strike:
    """Acts on a disk of its own, cuts the power, and copies what is left."""
    for _ in range(TRIES):
        folder = stage.play.place.new_root()
        disk, left = Disk(folder), stage.play.place.new_root()
        with disk.mounted() as mounted:
            root = mounted / "root"
            stage.play.copy_to(root)
            os.sync()
            ended = stage.play.act(root, fault, **({} if fault else {"die": True}))
            disk.lose_power(mounted)
        with disk.mounted() as mounted:
            if (mounted / "root").exists():
                shutil.copytree(mounted / "root", left)
        shutil.rmtree(folder)
        if ended.hit or fault is None or ended.status is None:
            break
        shutil.rmtree(left, ignore_errors=True)
    return Strike(fault, ended, left, below=root)
