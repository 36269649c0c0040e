"""One process of a run of two that saves by a log of increments."""

from __future__ import annotations

import argparse
import faulthandler
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from worker import Run

import cnr_jax as cnr
from cnr_jax.checkpointer.saving.merging import Merging
from cnr_jax.repository.compaction.baseline import Request, write_baseline
from cnr_jax.repository.index.save_plan import MergedBaseline

STEPS = 6


def merge_here(self: Merging, root: Any, request: Request) -> MergedBaseline:
    """Merges in this process: to start another one takes long on a busy machine."""
    return write_baseline(root, request)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    Merging._made = merge_here  # type: ignore[method-assign]
    run, lines = Run(), list[str]()
    truth: dict[int, dict[str, np.ndarray]] = {}
    options = cnr.Options(
        codec="raw", policy=cnr.IncrementLog(merge_at=3), timeout_secs=120
    )
    with cnr.CheckpointManager(
        args.root, tables=run.tables, options=options
    ) as manager:
        for step in range(STEPS):
            run.train(step)
            truth[step] = run.values()
            assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None
            lines.append(f"{step} {report.kind} {report.parent} {report.merged_bytes}")
            # The next save begins on all processes together.
            while manager._handler.lifecycle.merging.is_busy:
                time.sleep(0.01)
        for step in (STEPS - 3, STEPS - 1):
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
