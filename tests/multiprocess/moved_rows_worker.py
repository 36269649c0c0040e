"""One process of a run of two whose tables grow, get other ids and another name."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path
from typing import Any

import jax
import numpy as np
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

    def opened(run: Run) -> cnr.CheckpointManager:
        options = cnr.Options(codec="raw", policy=cnr.Consecutive(), timeout_secs=120)
        return cnr.CheckpointManager(args.root, tables=run.tables, options=options)

    def save(run: Run, manager: cnr.CheckpointManager, *steps: int) -> None:
        for step in steps:
            run.train(step)
            assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
            manager.wait_until_finished()

    def restore(run: Run, manager: cnr.CheckpointManager, **given: Any) -> None:
        asked = cnr.args.Restore(run.state, **given)
        run.state, run.touched = manager.restore(None, args=asked)

    old = Run()
    with opened(old) as manager:
        save(old, manager, 0, 1, 2)
    truth = old.values()

    run = Run({"user": 640, "item": 128})
    own = run.values()
    order = np.random.default_rng(0).permutation(128)
    ids = {"item": np.where(order % 3 == 0, -1, order)}
    with opened(run) as manager:
        # Ids that process 1 alone gets wrong: both refuse, and go on together.
        bad = {"item": order + jax.process_index()}
        asked = cnr.args.Restore(run.state, ids=bad, partial=True)
        lines.append(refused(lambda: manager.restore(None, args=asked)))
        # Ids that are right by themselves, but not the same: half a table of each.
        mine = {"item": np.roll(order, jax.process_index())}
        apart = cnr.args.Restore(run.state, ids=mine, partial=True)
        lines.append(refused(lambda: manager.restore(None, args=apart)))
        restore(run, manager, partial=True, ids=ids)
        got = run.values()
        for path, value in got.items():
            want = truth[path]
            if "'user'" in path:
                want = np.concatenate([want, own[path][512:]])
            if "'item'" in path:
                taken = ids["item"].reshape(-1, *[1] * (want.ndim - 1))
                want = np.where(taken < 0, own[path], want[order])
            np.testing.assert_array_equal(value, want, err_msg=path)
        save(run, manager, 3, 4)
        truth = run.values()

    named = Run({"who": 640, "item": 128})
    with opened(named) as manager:
        restore(named, manager, rename={"user": "who"})
        got = {path.replace("'who'", "'user'"): v for path, v in named.values().items()}
        assert got.keys() == truth.keys()
        for path, value in truth.items():
            np.testing.assert_array_equal(got[path], value, err_msg=path)
        save(named, manager, 5, 6)
        lines.append(f"latest {manager.latest_step()}")
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
