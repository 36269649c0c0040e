"""One process of a run of two in a root where another run has been."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path
from typing import Any

import jax
from worker import Run, refused

import cnr_jax as cnr


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    lines: list[str] = []

    def opened(run: Run, **options: Any) -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            args.root,
            tables=run.tables,
            options=cnr.Options(
                codec="raw", policy=cnr.Consecutive(), timeout_secs=120, **options
            ),
        )

    def save(run: Run, manager: cnr.CheckpointManager, step: int) -> None:
        run.train(step)
        assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
        manager.wait_until_finished()

    first = Run()
    with opened(first) as manager:
        for step in (10, 11, 12):
            save(first, manager, step)

    second = Run()
    with opened(second) as manager:
        # Process 0 looks at the root for both; twice, as a loop that goes on would ask.
        for step in (1, 2):
            asked = cnr.args.Save(second.state, second.touched)
            lines.append(refused(lambda s=step, a=asked: manager.save(s, args=a)))
        second.state, second.touched = manager.restore(
            11, args=cnr.args.Restore(second.state)
        )
        save(second, manager, 13)
        lines.append(f"joined {manager.all_steps()}")

    third = Run()
    with opened(third, new_run=True) as manager:
        lines.append(f"before {manager.all_steps()}")
        for step in (1, 2):
            save(third, manager, step)
        lines.append(f"after {manager.all_steps()}")
        # The same manager, and a loop that begins again.
        third = Run()
        save(third, manager, 1)
        lines.append(f"again {manager.all_steps()}")
        # Another program takes a file of process 1; process 0 looks, and both are told.
        if args.process == 0:
            Path(args.root, "1", "default", "manifest.p00001.json").unlink()
        for step in (2, 3, 4):
            save(third, manager, step)
            told = manager.last_report
            assert told is not None and told.step == step
            lines.append(f"{told.step} {told.kind} {told.outcome} {told.damaged}")
        lines.append(f"whole {manager.all_steps()} {manager.failure}")
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
