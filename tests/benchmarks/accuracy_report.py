"""Figures of `accuracy.py`: all runs in a file, their differences, tables and marks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measures import machine
from paired import Interval, degradation_percent, interval
from results import print_mark, print_table

from cnr_jax.policy.bits import bits_for

# By restores; 100 is more than any narrower width is for.
AUTO_BITS = {restores: bits_for(restores) for restores in (1, 3, 20, 100)}
# Of tables that have hardly any of the rows, and are looked up most: it costs next to nothing.
SMALL_BITS = 8
# Percent; the paper's, and this project's where noise does not hide it.
MARK = 0.01
# Restores of a table stored exactly, which must change nothing.
EXACT_RESTORES = 3
METRICS = tuple(itertools.product(("held_out", "lifetime"), ("auc", "log_loss")))
NAMES = {
    "held_out": "held-out flights",
    "lifetime": "lifetime",
    "auc": "AUC",
    "log_loss": "log loss",
}
Run = dict[str, Any]


class Case(NamedTuple):
    """What tells runs of a seed apart.

    Attributes:
        bits: of the default codec; None: tables are stored exactly.
        restores: how often the run was restored.
        small_bits: of the table of few rows, where they differ.
    """

    bits: int | None
    restores: int
    small_bits: int | None = None

    def __str__(self) -> str:
        """Such as `4 bits (small tables 8), 20 restores`."""
        small = f" (small tables {self.small_bits})" if self.small_bits else ""
        width = "exact" if self.bits is None else f"{self.bits} bits"
        return f"{width}{small}, {self.restores} restores"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of a report have in common.

    Attributes:
        data: the data set, one of `trained_tables.NAMES`.
        flights: how many are taken, from the first on.
        held_out: how many of these, the last ones, are not trained on.
        dim: columns of the table.
        restores: numbers of restores of a run.
        bits: widths of a code.
    """

    data: str = "flights-3m"
    flights: int = 1_000_000
    held_out: int = 100_000
    dim: int = 16
    restores: tuple[int, ...] = (1, 3, 10, 20, 100)
    bits: tuple[int, ...] = (2, 3, 4, 8)

    def as_json(self) -> Run:
        """As JSON gives it back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def cases(self) -> Iterator[Case]:
        """All runs of a seed but the undisturbed one."""
        yield Case(None, EXACT_RESTORES)
        for bits, restores in itertools.product(self.bits, self.restores):
            yield Case(bits, restores)
            if AUTO_BITS.get(restores) == bits < SMALL_BITS:
                yield Case(bits, restores, SMALL_BITS)


class Report:
    """Figures of all runs, in a file that is written after each.

    Args:
        path: of the file; None: none is written. One that exists is gone on with.
        setting: of all runs.

    Raises:
        SystemExit: if the file's figures were taken otherwise.
    """

    def __init__(self, path: Path | None, setting: Setting) -> None:
        self._path = path
        if path is not None and path.exists():
            self.found: dict[str, Any] = json.loads(path.read_text())
            if self.found.get("setting") != setting.as_json():
                raise SystemExit(
                    f"{path} holds figures of another setting: {self.found.get('setting')}\n"
                    f"  expected {setting.as_json()}\n  hint: name another file"
                )
        else:
            self.found = {
                "machine": machine(),
                "setting": setting.as_json(),
                "runs": [],
            }

    @property
    def runs(self) -> list[Run]:
        """All runs so far."""
        return self.found["runs"]

    def get(self, seed: int, case: Case) -> Run | None:
        """One run; None if it is not there yet."""
        key = {"seed": seed, **case._asdict()}
        return next((run for run in self.runs if key.items() <= run.items()), None)

    def add(self, run: Run) -> None:
        """Adds a run and writes all."""
        self.runs.append(run)
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".tmp")
            beside.write_text(json.dumps(self.found, indent=1) + "\n")
            beside.replace(self._path)


def changes(runs: Sequence[Run], scope: str, metric: str) -> dict[Case, Interval]:
    """Degradation in percent by case, over the seeds.

    Args:
        runs: of a report.
        scope: of the flights, "held_out" or "lifetime".
        metric: "auc" or "log_loss".
    """
    before = {run["seed"]: run[scope][metric] for run in runs if not run["restores"]}
    found: dict[Case, list[float]] = {}
    for run in runs:
        if run["restores"]:
            case = Case(*(run[field] for field in Case._fields))
            reference = before[run["seed"]]
            percent = degradation_percent(metric, reference, run[scope][metric])
            found.setdefault(case, []).append(percent)
    return {case: interval(values) for case, values in found.items()}


def keeps(change: Interval) -> bool:
    """Whether a degradation is at most `MARK`, or cannot be told from none."""
    return change.mean <= MARK or change.low <= 0


def present(runs: Sequence[Run], setting: Setting) -> None:
    """Prints all figures."""
    _print_seeds([run for run in runs if not run["restores"]])
    found = {metric: changes(runs, *metric) for metric in METRICS}
    for (scope, metric), of in found.items():
        rows = [
            [
                f"{bits} bits",
                *(_cell(of.get(Case(bits, count))) for count in setting.restores),
            ]
            for bits in setting.bits
        ]
        print_table(
            f"{NAMES[scope]}, {NAMES[metric]}: percent worse than without restores, paired;"
            " ! where it misses the mark",
            ("restores", *map(str, setting.restores)),
            rows,
        )
    for small_bits, title in (
        (None, "Bits as the expected restores ask for them: percent worse"),
        (SMALL_BITS, f"The same, small tables at {SMALL_BITS} bits"),
    ):
        print(f"\n{title}")
        for restores, bits in AUTO_BITS.items():
            for (scope, metric), of in found.items():
                change = of.get(case := Case(bits, restores, small_bits))
                if change is not None:
                    verdict = "kept  " if keeps(change) else "MISSED"
                    label = f"{case}, {NAMES[scope]}, {NAMES[metric]}"
                    print(f"  {verdict}  {label}: {_text(change)}")
    exact = [of.get(Case(None, EXACT_RESTORES)) for of in found.values()]
    worst = max((abs(c.mean) for c in exact if c is not None), default=float("nan"))
    print_mark(
        f"{EXACT_RESTORES} restores of exact tables: greatest change, percent", worst, 0
    )


def _cell(change: Interval | None) -> str:
    if change is None:
        return "-"
    return f"{change.mean:+.4f} ± {change.margin:.4f}" + (
        "  " if keeps(change) else " !"
    )


def _text(change: Interval) -> str:
    resolved = "" if change.margin <= MARK else f"; too noisy to resolve {MARK} %"
    return f"{change.mean:+.4f} ({change.low:+.4f} to {change.high:+.4f}){resolved}"


def _print_seeds(runs: Sequence[Run]) -> None:
    """What differs from seed to seed without any restore."""
    rows = []
    for scope, metric in METRICS:
        values = [run[scope][metric] for run in runs]
        mean = statistics.fmean(values)
        deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
        rows.append(
            [
                f"{NAMES[scope]}, {NAMES[metric]}",
                f"{mean:.5f}",
                f"{deviation / mean:.4%}",
                f"{(max(values) - min(values)) / mean:.4%}",
            ]
        )
    print_table(
        f"Without restores, {len(runs)} seeds",
        ("metric", "mean", "standard deviation", "range"),
        rows,
    )
