"""One process of a run of two that saves by a log of increments."""

from __future__ import annotations

import argparse
import faulthandler
import time
from pathlib import Path

import jax
import numpy as np
from worker import Run

import cnr_jax as cnr

# A merge takes seconds to start.
STEPS, PAUSE_SECS = 40, 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    run, lines = Run(), list[str]()
    truth: dict[int, dict[str, np.ndarray]] = {}
    options = cnr.Options(
        codec="raw", policy=cnr.IncrementLog(merge_at=3), timeout_secs=120
    )
    with cnr.CheckpointManager(
        args.root, tables=run.tables, options=options
    ) as manager:
        last = STEPS
        for step in range(STEPS):
            run.train(step)
            truth[step] = run.values()
            assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None
            lines.append(f"{step} {report.kind} {report.parent} {report.merged_bytes}")
            if step == last:
                break
            if report.merged_bytes:
                last = step + 2
            time.sleep(PAUSE_SECS)
        for step in (last - 2, last):
            run.state, run.touched = manager.restore(
                step, args=cnr.args.Restore(run.state)
            )
            got = run.values()
            assert got.keys() == truth[step].keys()
            for path, want in truth[step].items():
                np.testing.assert_array_equal(got[path], want, err_msg=path)
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
