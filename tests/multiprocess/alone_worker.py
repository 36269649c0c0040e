"""One process of a run of two in which each has made managers and registries of its own before."""

from __future__ import annotations

import argparse
import faulthandler
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from worker import Run, refused

import cnr_jax as cnr
import cnr_jax.handler

TIMEOUT_SECS = 20


def manager_of(root: Path, run: Run, **options: Any) -> cnr.CheckpointManager:
    given = {"codec": "raw", "policy": cnr.Consecutive(), "timeout_secs": TIMEOUT_SECS}
    return cnr.CheckpointManager(
        root, tables=run.tables, options=cnr.Options(**{**given, **options})
    )


def save(manager: cnr.CheckpointManager, run: Run, step: int) -> str:
    run.train(step)
    assert manager.save(step, args=cnr.args.Save(run.state, run.touched))
    manager.wait_until_finished()
    report = manager.last_report
    assert report is not None
    return f"{report.kind} {report.step}, {len(manager.all_steps())} listed"


def make_alone(process: int, run: Run) -> None:
    """Registries of which the other process does not know; managers of Orbax it would miss."""
    for _ in range(1 + 2 * process):
        cnr.handler_registry(run.tables)


def save_items(manager: cnr.CheckpointManager, run: Run) -> str:
    """Saves with the state and without it, by turns; each is of all processes."""
    for step in range(4):
        run.train(step)
        items: dict[str, Any] = {"meta": ocp.args.JsonSave({"at": step})}
        if step % 2 == 0:
            items["state"] = cnr.args.Save(run.state, run.touched)
        assert manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    there = sorted(int(p.name) for p in Path(manager.directory).glob("[0-9]"))
    return f"items {there}"


def fails_unlike(manager: cnr.CheckpointManager, run: Run, process: int) -> str:
    """A save that one process alone cannot make: both raise the same, one its own."""
    mine = cnr.errors.ManifestError("made up", ["one: line", "two: lines"], path="/m")
    check = cnr_jax.handler.check

    def failing(*args: Any) -> Any:
        if process == 1:
            raise mine
        return check(*args)

    cnr_jax.handler.check = failing
    try:
        manager.save(99, args=cnr.args.Save(run.state, run.touched))
    except cnr.errors.ManifestError as error:
        same = (str(error), error.problems, error.path) == (
            str(mine),
            mine.problems,
            mine.path,
        )
        return f"same {same}, own {error is mine}"
    finally:
        cnr_jax.handler.check = check
    return "nothing raised"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--process", "--processes", "--port"):
        parser.add_argument(name, type=int)
    for name in ("--root", "--out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(380)
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    run, process, root = Run(), args.process, args.root
    root.mkdir(exist_ok=True)
    lines: list[str] = []
    make_alone(process, run)
    if process == 0:
        # It waits for the other, which does not come; nothing of that is left.
        lines.append(
            refused(lambda: manager_of(root.parent / "alone", run, timeout_secs=1))
        )
    else:
        lines.append("")
    with manager_of(root, run) as manager:
        lines += [save(manager, run, step) for step in (0, 1)]
        make_alone(1 - process, run)
        lines.append(fails_unlike(manager, run, process))
        lines.append(save(manager, run, 2))
    # Once more, and another of the same name beside it.
    other = Run()
    (root.parent / "else").mkdir(exist_ok=True)
    with manager_of(root.parent / "else" / root.name, other) as beside:
        with manager_of(root, run) as manager:
            run.state, run.touched = manager.restore(
                None, args=cnr.args.Restore(run.state)
            )
            lines.append(save(manager, run, 3))
            lines.append(save(beside, other, 0))
            lines.append(save(manager, run, 4))
            lines.append(save(beside, other, 1))
    run = Run()
    with manager_of(root.parent / "items", run) as manager:
        lines.append(save_items(manager, run))
    Path(f"{args.out}.{process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
