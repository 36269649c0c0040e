"""Figures of `harm.py`: all runs in a file, what pairs of them say, and the table and marks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measures import machine
from paired import Interval, degradation_percent, interval
from results import print_table

Run = dict[str, Any]
# More than this is harm, where seeds tell it from zero: points of AUC, percent of log loss.
MARKS = {"auc": 0.05, "log_loss": 0.01}
NAMES = {"auc": "AUC, points lost", "log_loss": "log loss, % more"}
SCOPES = {"held_out": "held out", "lifetime": "lifetime"}


class Case(NamedTuple):
    """A training and when it is restored.

    Attributes:
        model: as `harm.MODELS` names it.
        optimizer: as `small_trainings.OPTIMIZERS` names it.
        steps: of the run.
        restores: how often.
        apart: steps from one restore to the next.
        where: "late": the last is so many steps before the end; "early": the first is so many
            steps after the start; "spread": evenly, which `apart` then only says.
    """

    model: str
    optimizer: str
    steps: int
    restores: int
    apart: int
    where: str

    def stops(self) -> list[int]:
        """Steps after which the run is restored, ascending."""
        count = self.restores
        if self.where == "spread":
            return [round(self.steps * i / (count + 1)) for i in range(1, count + 1)]
        first = self.apart if self.where == "early" else self.steps - count * self.apart
        return [first + i * self.apart for i in range(count)]

    def __str__(self) -> str:
        """Such as `DLRM, Adam: 20 restores 7 steps apart, late`."""
        return f"{self.model}, {self.optimizer}: {self.when}"

    @property
    def when(self) -> str:
        """Such as `20 x 7`."""
        place = "" if self.where == "late" else f", {self.where}"
        return f"{self.restores} x {self.apart}{place}"


class Report:
    """Figures of all runs, in a file that is written after each seed.

    Args:
        path: of the file; None: none is written. One that exists is gone on with.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[str, Any] = {"machine": machine(), "runs": []}
        if path is not None and path.exists():
            self.found = json.loads(path.read_text())

    @property
    def runs(self) -> list[Run]:
        """All runs so far."""
        return self.found["runs"]

    def has(self, case: Case, bits: int | str | None, rounding: str, seed: int) -> bool:
        """Whether a run is there."""
        key = {**case._asdict(), "bits": bits, "rounding": rounding, "seed": seed}
        return any(key.items() <= run.items() for run in self.runs)

    def rounded(self, rounding: str) -> list[Run]:
        """All runs whose codes were rounded in this way."""
        return [run for run in self.runs if run["rounding"] == rounding]

    def write(self) -> None:
        """Writes all."""
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".tmp")
            beside.write_text(json.dumps(self.found) + "\n")
            beside.replace(self._path)


def lost(run: Run, scope: str, metric: str) -> float:
    """Points of AUC lost, or percent of log loss gained, against the unbroken run."""
    before, after = run["unbroken"][scope][metric], run[scope][metric]
    if metric == "auc":
        return 100 * (before - after)
    return degradation_percent(metric, before, after)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What runs of a case at one width say.

    Attributes:
        case: of the runs.
        bits: the width; None: stored exactly.
        seeds: how many.
        changes: by scope and metric, see `lost`.
        noise: of a restore, see `harm.py`; None where the only restore is the first.
        mean_bits: bits of an element, the mean over restores.
    """

    case: Case
    bits: int | str | None
    seeds: int
    changes: dict[tuple[str, str], Interval]
    noise: float | None
    mean_bits: float

    def harmed(self, scope: str, metric: str) -> bool:
        """Whether more than the mark is lost, and seeds tell it from zero."""
        change = self.changes[scope, metric]
        return change.mean > MARKS[metric] and change.low > 0

    @property
    def harmful(self) -> bool:
        """Whether anything is harmed."""
        return any(self.harmed(*of) for of in self.changes)


def cells(runs: Sequence[Run]) -> list[Cell]:
    """All cells, in the order of their first runs."""
    found = []
    for case, bits, each in _grouped(runs):
        noises = [noise for run in each for noise in run["noise"][1:]]
        changes = {
            (scope, metric): interval([lost(run, scope, metric) for run in each])
            for scope in SCOPES
            for metric in MARKS
        }
        noise = float(np.mean(noises)) if noises else None
        mean_bits = float(np.mean([run["mean_bits"] for run in each]))
        found.append(Cell(case, bits, len(each), changes, noise, mean_bits))
    return found


def present(runs: Sequence[Run]) -> None:
    """Prints all cells, a table a training."""
    found = cells(runs)
    for training in dict.fromkeys(cell.case[:3] for cell in found):
        own = [cell for cell in found if cell.case[:3] == training]
        print_table(
            f"{training[0]}, {training[1]}, {training[2]} steps; ! more than"
            f" {MARKS['auc']} points or {MARKS['log_loss']} %, told from zero",
            (
                "restores x steps apart",
                "bits",
                "mean bits",
                "seeds",
                "noise",
                *(f"{SCOPES[s]}, {NAMES[m]}" for s, m in own[0].changes),
            ),
            [
                [
                    cell.case.when,
                    str(cell.bits or "raw"),
                    f"{cell.mean_bits:.2f}",
                    str(cell.seeds),
                    "-" if cell.noise is None else f"{cell.noise:.3g}",
                    *(shown(cell, *of) for of in cell.changes),
                ]
                for cell in own
            ],
        )


def present_managed(runs: Sequence[Run]) -> None:
    """Prints what restores through the manager cost, with bytes and warnings."""
    rows = []
    for case, bits, each in _grouped(runs):
        losses = [
            interval([lost(r, "held_out", metric) for r in each]) for metric in MARKS
        ]
        warned = sum(run["warnings"] > 0 for run in each)
        rows.append(
            [
                str(case),
                str(bits),
                str(len(each)),
                *(f"{of.mean:.3f} ± {of.margin:.3f}" for of in losses),
                f"{np.mean([run['bytes'] for run in each]):,.0f}",
                f"{warned} of {len(each)}",
            ]
        )
    print_table(
        "Through the manager, held out",
        ("run", "bits", "seeds", *NAMES.values(), "bytes of saves", "warned"),
        rows,
    )


def _grouped(runs: Sequence[Run]) -> Iterator[tuple[Case, Any, list[Run]]]:
    """Runs of a case at one width together, in the order of the first of each."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        case = Case(*(run[name] for name in Case._fields))
        groups.setdefault((case, run["bits"]), []).append(run)
    for (case, bits), each in groups.items():
        yield case, bits, each


def shown(cell: Cell, scope: str, metric: str) -> str:
    """Mean and half an interval, such as `0.184 ± 0.076 !`."""
    change = cell.changes[scope, metric]
    mark = " !" if cell.harmed(scope, metric) else ""
    return f"{change.mean:.3f} ± {change.margin:.3f}{mark}"


def summary(
    machine: Mapping[str, Any], runs: Sequence[Run], most_noise: float
) -> dict[str, Any]:
    """What the page shows: by cell, means and half intervals, to four digits.

    Args:
        machine: on which it was measured.
        runs: all of them.
        most_noise: up to which a width is taken to do no harm.
    """
    return {
        "machine": machine,
        "most_noise": most_noise,
        "cells": [
            {
                **cell.case._asdict(),
                "bits": cell.bits,
                "seeds": cell.seeds,
                "noise": cell.noise and _rounded(cell.noise),
                "mean_bits": _rounded(cell.mean_bits),
                "harmful": cell.harmful,
                **{
                    f"{scope}_{metric}": [
                        _rounded(change.mean),
                        _rounded(change.margin),
                    ]
                    for (scope, metric), change in cell.changes.items()
                },
            }
            for cell in cells(runs)
        ],
    }


def write_summary(path: Path, found: Mapping[str, Any]) -> None:
    """Writes a summary as JSON, a cell a line."""
    cells = ",\n".join(json.dumps(cell) for cell in found["cells"])
    rest = json.dumps({**found, "cells": []}, indent=1)
    path.write_text(rest.replace('"cells": []', f'"cells": [\n{cells}\n]') + "\n")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
