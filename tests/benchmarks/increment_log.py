"""A long run by a log of increments: depth, capacity and restores, which are not to grow.

    python tests/benchmarks/increment_log.py [--quick] [--json PATH] [--dir FOLDER]

A table of 50,000 x 64 float32 with an accumulator a row is saved 1,000 times, by `IncrementLog()`
and by `Intermittent()`; 5 % of its rows change between two saves, and the latest two steps are kept
with what they rest on. Training takes so long between two saves that each merge, in a process of
its own, ends before the next one. *Depth* is the number of checkpoints that a restore reads,
*capacity* what all steps take, in full float32 saves, with the baseline that waits for a save
(*waiting*) and without. Every tenth step is restored, by a manager of its own, with warm files; the
last one is compared. Restores, and nothing else, are timed: medians (ranges) of a window of saves.
A full run takes about 20 minutes, as each of the 250 merges starts a process, a quick one 90 s.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
import workload
from checks import check_quantized
from commandline import make_parser, write_figures
from results import print_mark, print_table, spread

import cnr_jax as cnr
from cnr_jax.format.names import may_be_step

ROWS, DIM, SHARE = 50_000, 64, 0.05
POLICIES = {"IncrementLog": cnr.IncrementLog(), "Intermittent": cnr.Intermittent()}
WINDOW = 50


def bytes_of(root: Path, *, steps_only: bool) -> int:
    """Bytes of all that lies in a root, or of its steps alone."""
    folders = (each for each in root.iterdir() if each.is_dir())
    held = (each for each in folders if may_be_step(each.name) or not steps_only)
    files = (path for each in held for path in each.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def restore(root: Path, abstract: Any) -> tuple[Any, float]:
    """The newest state, and the seconds of its restore."""
    tables = workload.tables_of(abstract)
    with cnr.CheckpointManager(root, tables=tables) as manager:
        started = time.perf_counter()
        found = manager.restore(None, args=cnr.args.Restore(abstract))
        jax.block_until_ready(found.state)
        return found.state, time.perf_counter() - started


def run(policy: Any, root: Path, saves: int) -> list[dict[str, float]]:
    """Saves of a run: for each what it wrote, and what a restore would read."""
    state = workload.table_state(ROWS, DIM)
    abstract, tables = workload.abstract_of(state), workload.tables_of(state)
    touched, rng = cnr.init_touched(state, tables), np.random.default_rng(0)
    kept = ocp.checkpoint_managers.LatestN(2)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found: list[dict[str, float]] = []
    with cnr.CheckpointManager(
        root,
        tables=tables,
        options=cnr.Options(policy=policy, bits=4),
        orbax_options=ocp.CheckpointManagerOptions(preservation_policy=kept),
    ) as manager:
        for step in range(saves):
            ids = np.sort(rng.choice(ROWS, round(SHARE * ROWS), replace=False))
            state, touched = workload.touch(state, touched, ids)
            manager.save(step, args=cnr.args.Save(state, touched))
            manager.wait_until_finished()
            report = manager.last_report
            assert report is not None and report.outcome == "committed"
            plan = cnr.plan_compaction(root)
            each = {
                "depth": float(len(plan.chain) or 1),
                "written_bytes": float(report.total_bytes),
                "merged_bytes": float(report.merged_bytes),
                "capacity": bytes_of(root, steps_only=True) / whole,
            }
            while manager._handler.lifecycle.merging.is_busy:
                time.sleep(0.02)
            each["waiting"] = bytes_of(root, steps_only=False) / whole
            if step % 10 == 9:
                got, each["restore_secs"] = restore(root, abstract)
            found.append(each)
        check_quantized(
            "table", np.asarray(got["table"]), np.asarray(state["table"]), 4
        )
    return found


def windows(saves: int) -> list[range]:
    """The windows that are compared: from save 50 on, in the middle, at the end."""
    middle = saves // 2
    return [
        range(at, at + WINDOW)
        for at in sorted({min(WINDOW, saves - WINDOW), middle, saves - WINDOW})
        if at + WINDOW <= saves
    ]


def main() -> None:
    parser = make_parser(__doc__, quick="100 saves", dir="where to save")
    args = parser.parse_args()
    saves, figures = 100 if args.quick else 1000, {}
    lines: list[list[str]] = []
    for name, policy in POLICIES.items():
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            figures[name] = found = run(policy, Path(folder) / "root", saves)
        for window in windows(saves):
            some = [found[at] for at in window]
            secs = [each["restore_secs"] for each in some if "restore_secs" in each]
            lines.append(
                [
                    f"{name}, saves {window.start} to {window.stop - 1}",
                    f"{np.mean([each['written_bytes'] for each in some]) / 1e3:.0f}",
                    f"{np.mean([each['merged_bytes'] for each in some]) / 1e3:.0f}",
                    f"{max(each['depth'] for each in some):.0f}",
                    f"{max(each['capacity'] for each in some):.2f}",
                    f"{max(each['waiting'] for each in some):.2f}",
                    spread(secs, "{:.3f}"),
                ]
            )
    header = (
        *("policy", "kB a save", "merged kB a save", "depth", "capacity", "waiting"),
        "s of a restore",
    )
    print_table(f"{saves:,} saves of {SHARE:.0%} of the rows", header, lines)
    log = figures["IncrementLog"]
    first, *_, last = windows(saves)
    for key, most in (("depth", 1.0), ("capacity", 1.05)):
        early, late = (max(log[at][key] for at in window) for window in (first, last))
        print_mark(
            f"greatest {key} at the end to that from save 50", late / early, most
        )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
