"""One process of a run of two that decides itself how often it saves, of which one save fails."""

from __future__ import annotations

import argparse
import errno
import faulthandler
import time
from pathlib import Path

import jax
from worker import Run, before_written, brief

import cnr_jax as cnr

STEPS = 260
# Of the saves, the one that fails, on process 1.
FAILS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    run, lines, reports = Run(), list[str](), list[cnr.SaveReport]()
    begun = list[int]()

    def fail(folder: str, where: str) -> None:
        if where == "rows" and args.process == 1 and len(begun) == FAILS:
            raise OSError(errno.EIO, "once")

    options = cnr.Options(
        interval="auto",
        slowdown=0.3,
        max_lost_secs=60,
        timeout_secs=120,
        on_save=reports.append,
    )
    with cnr.CheckpointManager(
        args.root, tables=run.tables, options=options
    ) as manager:
        before_written(args.root, fail)
        for step in range(STEPS):
            run.train(step)
            jax.block_until_ready(run.state)
            # Each process has another idea of what a step takes.
            time.sleep(0.002 + 0.004 * args.process)
            try:
                if manager.should_save(step):
                    begun.append(step)
                if manager.save(step, args=cnr.args.Save(run.state, run.touched)):
                    assert begun[-1] == step
            except cnr.errors.SaveError as error:
                lines.append(f"at {step}: {error.step} {brief(error)}")
            if args.process == step % 2:
                manager.latest_step()  # which takes note of ends, on one process alone
        manager.wait_until_finished()
        lines.append(f"asked {begun}")
        lines.append(f"steps {manager.all_steps()}")
        told = [(r.step, r.interval_steps, r.interval_changed) for r in reports]
        lines += map(str, told)
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
