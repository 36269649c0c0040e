"""One process of a run of two in which one alone meets an error, or another manager comes.

Orbax's own list of steps is read on process 0 and broadcast, where all must come.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from worker import Faults, Run, refused

import cnr_jax as cnr
import cnr_jax.handler
from cnr_jax.repository.index import suspects
from cnr_jax.repository.upkeep.claim import Claim
from cnr_jax.repository.upkeep.removal import Remover
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Call


class Seams:
    """Saves step after step; each method ends with all as it should be."""

    def __init__(self, manager: cnr.CheckpointManager, run: Run) -> None:
        self.manager, self.run = manager, run
        self.root = Path(manager.directory)
        self.lines: list[str] = []

    def save(self, step: int, **kwargs: Any) -> None:
        """One train step and a save that works."""
        self.run.train(step)
        assert self.manager.save(step, args=self.args(), **kwargs)
        self.manager.wait_until_finished()

    def args(self) -> cnr.args.Save:
        return cnr.args.Save(self.run.state, self.run.touched)

    def fails(self, step: int, what: str) -> None:
        """One train step and a save that does not work."""
        self.run.train(step)

        def save() -> None:
            self.manager.save(step, args=self.args())
            self.manager.wait_until_finished()

        self.lines.append(f"{what}: {refused(save)}")

    def one_fails_before_it_says_anything(self, step: int) -> None:
        faults = Faults(f"{step}:open:1,{step + 1}:open:0", self.root)
        for each in (step, step + 1):
            faults.begin(each)
            self.fails(each, "before the first message")
        faults.begin(step + 2)
        assert len(faults.hit) == 1
        self.save(step + 2)

    def another_takes_over_between_saves(self, step: int) -> None:
        self.take_over()
        self.fails(step, "between saves")
        self.manager.reload()
        self.save(step + 1)

    def another_takes_over_during_a_save(self, step: int) -> None:
        def taken(call: Call) -> None:
            if call.call == "open" and "/manifest.p" in call.path:
                self.take_over()

        with inprocess.watching(self.root, before=taken):
            self.fails(step, "during a save")
        self.manager.reload()
        self.save(step + 1)

    def take_over(self) -> None:
        """Another manager claims the root; only process 0 can see that."""
        if jax.process_index() == 0:
            Claim(self.root).take()

    def a_rollback_is_refused(self, back_to: int) -> None:
        """By Orbax, when steps have been moved aside already."""
        before = self.manager.all_steps()
        truth = self.manager.latest_step()
        assert truth is not None
        self.run.state, self.run.touched = self.manager.restore(
            back_to, args=cnr.args.Restore(self.run.state)
        )
        self.run.train(back_to + 1)
        items = ocp.args.Composite(default=self.args())
        try:
            self.manager.save(before[before.index(back_to) + 1], args=items, force=True)
        except ValueError as error:
            self.lines.append(f"rollback: {str(error)[:40]}")
        self.save(truth + 1)
        # All must be known, also those that were left behind.
        assert self.manager._steps.numbers() == [*before, truth + 1]
        self.manager.delete(truth)
        self.lines.append(f"steps {self.manager.all_steps()}")

    def a_deletion_fails(self, step: int) -> None:
        """Process 0 alone deletes; both must know afterwards what is there."""
        remove = Remover.remove

        def failing(remover: Remover, directory: str, *, background: bool) -> None:
            raise OSError(errno.EIO, f"of {directory}")

        Remover.remove = failing  # type: ignore[method-assign]
        try:
            self.manager.delete(5)
        except (OSError, cnr.errors.CnrError) as error:
            self.lines.append(f"deletion: {error}")
        Remover.remove = remove  # type: ignore[method-assign]
        self.save(step)
        # The state goes on from step 8, which is damaged, and not from step 5.
        assert self.manager.all_steps() == [0, 3, step]
        assert self.manager._steps.numbers() == [0, 3, 5, 8, step]
        self.manager.delete(step)

    def an_audit_cannot_be_explained(self, step: int) -> None:
        """Process 1 finds the row, process 0 fails before it can say so."""
        self.save(step)
        explain = suspects.explain

        def failing(*args: Any) -> None:
            raise MemoryError("no room")

        suspects.explain = failing
        wrong = {**self.run.state, "params": self.run.changed_unrecorded("user", 500)}
        args = cnr.args.Save(wrong, self.run.touched)
        found = refused(lambda: self.manager.save(step + 1, args=args))
        self.lines.append(f"audit: {found}")
        suspects.explain = explain

    def one_finds_damage(self) -> None:
        """Process 1 alone, such as in rows that no other reads."""
        newest, read = self.manager.latest_step(), cnr_jax.handler.read_back

        def damaged(place: Any, *args: Any, **kwargs: Any) -> Any:
            if jax.process_index() == 1 and place.directory == str(newest):
                path = f"{place.path}/rows.p00001"
                raise cnr.errors.IntegrityError(
                    f"{path} is damaged", kind="data_damaged", path=path
                )
            return read(place, *args, **kwargs)

        cnr_jax.handler.read_back = damaged
        restore = cnr.args.Restore(self.run.state)
        taken = self.manager.restore(None, args=restore).state["step"]
        self.lines.append(f"took {taken}, left {self.manager.all_steps()}")
        given = refused(lambda: self.manager.restore(newest, args=restore))
        self.lines.append(f"given: {given}")
        cnr_jax.handler.read_back = read

    def noted_damage_is_mended(self) -> None:
        """From the mirror, by process 0, when both processes have noted it."""
        self.save(0)
        self.save(1)
        if jax.process_index() == 0:
            while self.manager.mirror_report.lag_steps:
                time.sleep(0.02)
            file = next(
                p for p in self.root.glob("1/default/rows.p*/**/c/*") if p.is_file()
            )
            file.write_bytes(file.read_bytes()[::-1])
        multihost_utils.sync_global_devices("damaged")
        self.manager.verify()
        before = self.manager.latest_step()
        self.manager.restore(None, args=cnr.args.Restore(self.run.state))
        self.lines.append(f"mended: {before}, {self.manager.latest_step()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    run = Run()
    with cnr.CheckpointManager(
        args.root,
        tables=run.tables,
        options=cnr.Options(codec="raw", policy=cnr.Consecutive(), timeout_secs=120),
        orbax_options=ocp.CheckpointManagerOptions(single_host_load_and_broadcast=True),
    ) as manager:
        seams = Seams(manager, run)
        seams.save(0)
        seams.one_fails_before_it_says_anything(1)  # and saves step 3
        seams.another_takes_over_between_saves(4)  # and saves step 5
        seams.another_takes_over_during_a_save(6)  # and saves step 7
        seams.a_rollback_is_refused(3)  # and saves step 8, and deletes step 7
        seams.one_finds_damage()  # in step 8
        seams.a_deletion_fails(9)  # of step 5, and deletes step 9
        seams.an_audit_cannot_be_explained(10)  # of step 11, and saves step 10
    far = f"{args.root}.far"
    options = cnr.Options(codec="raw", policy=cnr.Consecutive(), mirror=far)
    with cnr.CheckpointManager(
        f"{args.root}.near", tables=run.tables, options=options
    ) as manager:
        mirrored = Seams(manager, run)
        mirrored.noted_damage_is_mended()
        seams.lines += mirrored.lines
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(seams.lines))


if __name__ == "__main__":
    main()
