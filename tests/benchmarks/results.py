"""Figures of a benchmark: every run of every case, and how they are shown."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

Figures = dict[str, float | int | str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """All runs of one case.

    Attributes:
        label: names the case; unique.
        group: cases that are shown together.
        params: what the child was given.
        runs: figures, by number of the repetition; a failed one is not in it.
        failures: the last lines that failed runs wrote, by number of the repetition.
    """

    label: str
    group: str
    params: dict[str, Any]
    runs: dict[int, Figures] = dataclasses.field(default_factory=dict)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)

    def values(self, key: str) -> list[float]:
        """One figure of all runs that have it."""
        found = (run.get(key) for run in self.runs.values())
        return [float(v) for v in found if isinstance(v, int | float)]

    def median(self, key: str) -> float:
        """Median over runs; nan without any."""
        return middle(self.values(key))

    def text(self, key: str, form: str = "{:.2f}", scale: float = 1.0) -> str:
        """Median and range, such as `1.24 (1.19-2.12)`; `-` without any run.

        Args:
            key: the figure.
            form: of each number.
            scale: what each number is multiplied by.
        """
        return spread([value * scale for value in self.values(key)], form)

    def as_json(self) -> dict[str, Any]:
        """Runs, and median, least and greatest of each figure that is a number."""
        keys = {
            key: None
            for run in self.runs.values()
            for key, value in run.items()
            if isinstance(value, int | float)
        }
        return {
            "label": self.label,
            "group": self.group,
            "params": self.params,
            "runs": [self.runs[number] for number in sorted(self.runs)],
            "failures": self.failures,
            "median": {key: self.median(key) for key in keys},
            "min": {key: min(self.values(key)) for key in keys},
            "max": {key: max(self.values(key)) for key in keys},
        }


@dataclasses.dataclass(frozen=True)
class Results:
    """All cases of a benchmark, in order."""

    cases: list[Measured]
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[Measured]:
        return iter(self.cases)

    def __contains__(self, label: str) -> bool:
        return any(case.label == label for case in self.cases)

    def __getitem__(self, label: str) -> Measured:
        """The case of that label.

        Raises:
            KeyError: if there is none: it was left out.
        """
        for case in self.cases:
            if case.label == label:
                return case
        raise KeyError(label)

    def group(self, name: str) -> list[Measured]:
        """Cases of a group, in order."""
        return [case for case in self.cases if case.group == name]

    def ratios(
        self, label: str, to: str, key: str, to_key: str | None = None
    ) -> list[float]:
        """A figure of one case against that of another, run by run.

        Runs of one repetition follow each other, so other work on the machine weighs
        less on their ratio than on the ratio of medians. Where the other figure is not
        positive (a stall that is lost in noise), there is no ratio.

        Args:
            label: of the one case.
            to: of the other.
            key: the figure of the one.
            to_key: that of the other, if it has another name there.
        """
        to_key = to_key or key
        if label not in self or to not in self:
            return []
        ours, theirs = self[label].runs, self[to].runs
        return [
            float(ours[number][key]) / float(theirs[number][to_key])
            for number in sorted(set(ours) & set(theirs))
            if key in ours[number] and float(theirs[number].get(to_key, 0)) > 0
        ]


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median and range, such as `1.24 (1.19-2.12)`; `-` without any value."""
    if not values:
        return "-"
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))}-{form.format(max(values))})"


def middle(values: Sequence[float]) -> float:
    """Median; nan without any value."""
    return statistics.median(values) if values else float("nan")


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Prints a table with aligned columns; the first one to the left."""
    print(f"\n{title}")
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1])]
        cells += [cell.rjust(width) for cell, width in others]
        print("  ".join(cells).rstrip())


def print_mark(what: str, got: float, limit: float, *, least: bool = False) -> None:
    """Prints whether a figure keeps to its mark.

    Args:
        what: the figure's name and its mark, in words.
        got: the figure.
        limit: at most this; with `least`, at least this.
        least: see there.
    """
    if math.isnan(got):
        print(f"  not measured  {what}")
        return
    kept = got >= limit if least else got <= limit
    sign = ">=" if least else "<="
    print(f"  {'kept  ' if kept else 'MISSED'}  {what}: {got:.3g} {sign} {limit:.3g}")
