"""One process of a run of two, each of which is given a near root of its own."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path

import jax
from worker import Run, refused

import cnr_jax as cnr


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out", "--near"):
        parser.add_argument(name)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    run = Run()

    def opened(**options: object) -> cnr.CheckpointManager:
        given = {"codec": "raw", "policy": cnr.Consecutive(), "timeout_secs": 60}
        return cnr.CheckpointManager(
            args.root,
            tables=run.tables,
            options=cnr.Options(**{**given, **options}),  # type: ignore[arg-type]
        )

    near = f"{args.near}.{args.process}"
    lines = [refused(lambda: opened(near=near))]
    made = (args.root, f"{args.near}.0", f"{args.near}.1")
    lines.append(f"made {[path for path in made if Path(path).exists()]}")
    # As the hint says; on one that processes share.
    with opened(mirror=args.near) as manager:
        run.train(0)
        assert manager.save(0, args=cnr.args.Save(run.state, run.touched))
        manager.wait_until_finished()
        lines.append(f"saved {manager.all_steps()}")
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
