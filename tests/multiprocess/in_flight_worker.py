"""One process of a run of two that has three saves in flight, of which some fail on one process."""

from __future__ import annotations

import argparse
import errno
import faulthandler
import time
from pathlib import Path

import jax
import numpy as np
from worker import Run, before_written, brief

import cnr_jax as cnr

# Where a save fails: its step, what is about to be written, and the process.
FAULTS = {(5, "rows", 1), (9, "manifest", 0), (13, "rows", 0)}
STEPS = 18


def write_late(folder: str, where: str) -> None:
    """Each process at other times, so that saves end in another order on each."""
    step, here = int(folder.split(".")[0]), jax.process_index()
    if where == "rows":
        time.sleep(0.1 * ((7 * step + 3 * here) % 5))
    if (step, where, here) in FAULTS:
        raise OSError(errno.EIO, f"at {where}")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    run, lines, told, most = Run(), list[str](), list[int](), 0
    truth: dict[int, dict[str, np.ndarray]] = {}
    options = cnr.Options(
        codec="raw",
        policy=cnr.Consecutive(),
        timeout_secs=120,
        max_in_flight=3,
        on_save=lambda report: told.append(report.step),
    )
    with cnr.CheckpointManager(
        args.root, tables=run.tables, options=options
    ) as manager:
        before_written(args.root, write_late)
        for step in range(STEPS):
            run.train(step)
            truth[step] = run.values()
            try:
                assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
            except cnr.errors.SaveError as error:
                lines.append(f"at {step}: {error.step} {brief(error)}")
            most = max(most, len(manager._saves.pipeline.in_flight()))
            if jax.process_index() == step % 2:
                manager.latest_step()  # which takes note of ends, on one process alone
        manager.wait_until_finished()
        steps = manager.all_steps()
        assert told == steps
        lines += [f"steps {steps}", f"in flight {most}"]
        for step in steps:
            restored = manager.restore(step, args=cnr.args.Restore(run.state))
            run.state = restored.state
            for path, value in run.values().items():
                np.testing.assert_array_equal(value, truth[step][path], err_msg=path)
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
