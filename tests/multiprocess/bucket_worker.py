"""One process of a run whose root, or the mirror of whose root, is in a bucket."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from worker import Run

import cnr_jax as cnr


class Course:
    """A run whose saved states are known, and what each of its processes tells of it."""

    def __init__(self, root: str) -> None:
        self.root, self.run = root, Run()
        self.truth: dict[int, dict[str, np.ndarray]] = {}
        self.lines: list[str] = []

    @contextlib.contextmanager
    def manager(self, **options: Any) -> Iterator[cnr.CheckpointManager]:
        """Opens the root; all processes leave together."""
        settings: dict[str, Any] = {"codec": "raw", "policy": cnr.Consecutive()}
        settings |= {"timeout_secs": 60} | options
        with cnr.CheckpointManager(
            self.root, tables=self.run.tables, options=cnr.Options(**settings)
        ) as manager:
            yield manager
        multihost_utils.sync_global_devices("closed")

    def save(self, manager: Any, step: int, way: int = 0, **asked: Any) -> None:
        """Trains one step, which differs by the way that is taken, and saves."""
        self.run.train(100 * way + step)
        args = cnr.args.Save(self.run.state, self.run.touched, **asked)
        assert manager.save(step, args=args)
        manager.wait_until_finished()
        self.truth[step] = self.run.values()
        report = manager.last_report
        told = f"{report.step} {report.kind} on {report.parent}" if report else None
        self.lines.append(f"saved {told}")

    def restore(self, manager: Any, step: int | None) -> None:
        """Goes on from a step, each row of which is the one that was saved."""
        number = manager.latest_step() if step is None else step
        got = manager.restore(step, args=cnr.args.Restore(self.run.state))
        self.run.state, self.run.touched = got
        values = self.run.values()
        assert values.keys() == self.truth[number].keys()
        for path, want in self.truth[number].items():
            np.testing.assert_array_equal(values[path], want, err_msg=path)
        self.lines.append(f"restored {number} of {manager.all_steps()}")


def goes_back(course: Course) -> None:
    """Saves, goes back, goes on another way, and lets old steps go."""
    with course.manager() as manager:
        for step in range(4):
            course.save(manager, step)
        course.restore(manager, 3)
        course.restore(manager, 1)
        for step in (2, 3):
            course.save(manager, step, way=1)
        course.lines.append(f"steps {manager.all_steps()}")
    course.run = Run()
    keep = ocp.checkpoint_managers.LatestN(2)
    with course.manager(preservation_policy=keep) as manager:
        for step in (None, 1, 2, None):
            course.restore(manager, step)
        course.save(manager, 4, full=True)
        course.save(manager, 5)
        course.lines.append(f"steps {manager.all_steps()}")
        course.restore(manager, None)


def loses_its_root(course: Course, mirror: str) -> None:
    """Saves to a disk that is lost, and has its steps from the mirror again."""
    with course.manager(mirror=mirror) as manager:
        for step in range(4):
            course.save(manager, step)
    report = manager.mirror_report
    course.lines.append(f"copied {report and (report.copied_steps, report.problems)}")
    if jax.process_index() == 0:
        shutil.rmtree(course.root)
    multihost_utils.sync_global_devices("lost")
    course.run = Run()
    with course.manager(mirror=mirror) as manager:
        for step in (None, 1, None):
            course.restore(manager, step)
        course.save(manager, 4)
    # What the mirror alone has left restores by itself.
    course.root, course.run = mirror, Run()
    with course.manager() as manager:
        for step in (0, None):
            course.restore(manager, step)


def goes_on(course: Course, stop: int) -> None:
    """Goes on from the newest step, also after saves that fail, as if nothing had happened."""
    for step in range(stop):
        course.run.train(step)
        course.truth[step] = course.run.values()
    course.run = Run()
    with course.manager() as manager:
        first = 0
        if manager.latest_step() is not None:
            course.restore(manager, None)
            first = int(course.run.state["step"]) + 1
        for step in range(first, stop):
            try:
                course.save(manager, step)
            except cnr.errors.SaveError as error:
                reason = str(error).splitlines()[1].strip()
                told = f"{error.kind} on {error.process}: {reason}"
                course.lines.append(f"failed {step} {told}")
        course.restore(manager, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out", "--environment", "--mirror"):
        parser.add_argument(name)
    parser.add_argument("--goes-on", type=int)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    os.environ |= json.loads(args.environment)  # later than this process was made
    if args.processes > 1:
        address = f"127.0.0.1:{args.port}"
        jax.distributed.initialize(address, args.processes, args.process)
    course = Course(args.root)
    if args.goes_on:
        goes_on(course, args.goes_on)
    elif args.mirror:
        loses_its_root(course, args.mirror)
    else:
        goes_back(course)
    leaves: Any = course.run.values()
    np.savez(f"{args.out}.{args.process}.npz", **leaves)
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(course.lines))


if __name__ == "__main__":
    main()
