"""Figures of `accuracy.py`: all runs in a file, their differences, tables and marks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from measures import machine
from paired import Interval, degradation_percent, interval
from results import print_mark, print_table

from cnr_jax.policy.bits import bits_for

AUTO: Literal["auto"] = "auto"
# The most restores that 2, 3 and 4 bits are for, and more than any narrower width is for.
AUTO_RESTORES = (1, 3, 20, 100)
# Restores of tables on a lattice, and at the error of how many bits.
LATTICE_RESTORES, LATTICE_BITS = (1, 3, 20), 4
# Percent; the paper's, and this project's where noise does not hide it.
MARK = 0.01
# Restores of a table stored exactly, which must change nothing.
EXACT_RESTORES = 3
# Lifetime metrics are the paper's, and what it judges by.
JUDGED = "lifetime"
METRICS = tuple(itertools.product((JUDGED, "held_out"), ("auc", "log_loss")))
NAMES = {
    "held_out": "held-out flights",
    "lifetime": "lifetime",
    "auc": "AUC",
    "log_loss": "log loss",
}
Run = dict[str, Any]
# Runs that were made before there was a choice.
_EXACT: Run = {"slots": "raw", "codec": "adaptive"}


class Case(NamedTuple):
    """What tells runs of a seed apart.

    Attributes:
        bits: of the codec; "auto": as chosen for so many restores; None: tables are stored
            exactly.
        restores: how often the run was restored.
        slots: how those of the optimizer are stored, as `Options(slot_codec=...)` takes it.
        codec: of tables that are not stored exactly.
    """

    bits: int | Literal["auto"] | None
    restores: int
    slots: str = "raw"
    codec: str = "adaptive"

    def __str__(self) -> str:
        """Such as `auto (4 bits), 20 restores`."""
        chosen = f"auto ({bits_for(self.restores)} bits)"
        width = {None: "exact", AUTO: chosen}.get(self.bits, f"{self.bits} bits")
        width += "" if self.codec == "adaptive" else f", {self.codec}"
        width += "" if self.slots == "raw" else f", slots {self.slots}"
        return f"{width}, {self.restores} restore{'s' if self.restores > 1 else ''}"


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
        sparse: the optimizer of the table, by its name in `flights_dlrm.SPARSES`.
    """

    data: str = "flights-3m"
    flights: int = 3_000_000
    held_out: int = 300_000
    dim: int = 16
    restores: tuple[int, ...] = (1, 3, 10, 20, 100)
    bits: tuple[int, ...] = (2, 3, 4, 8)
    sparse: str = "rowwise_adagrad"

    def as_json(self) -> Run:
        """As JSON gives it back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def cases(
        self, *, fixed: bool = True, slots: bool = False, lattice: bool = False
    ) -> Iterator[Case]:
        """All runs of a seed but the undisturbed one, those that are judged first.

        Args:
            fixed: also those at fixed bits.
            slots: instead of all these those of exact tables with rounded slots.
            lattice: instead of all these those on a lattice, with exact slots and as integers.
        """
        yield Case(None, EXACT_RESTORES)
        if lattice:
            for restores in LATTICE_RESTORES:
                for codec in ("raw", "moments"):
                    yield Case(LATTICE_BITS, restores, codec, "lattice")
            return
        if slots:
            yield from (Case(None, restores, "auto") for restores in self.restores)
            return
        for restores in self.restores:
            if restores in AUTO_RESTORES:
                yield Case(AUTO, restores)
        if fixed:
            yield from itertools.starmap(
                Case, itertools.product(self.bits, self.restores)
            )


# By scope and metric.
Changes = dict[tuple[str, str], dict[Case, Interval]]


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
        found = (run for run in self.runs if key.items() <= {**_EXACT, **run}.items())
        return next(found, None)

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
            case = Case(*({**_EXACT, **run}[field] for field in Case._fields))
            reference = before[run["seed"]]
            percent = degradation_percent(metric, reference, run[scope][metric])
            found.setdefault(case, []).append(percent)
    return {case: interval(values) for case, values in found.items()}


def ways(change: Interval) -> list[str]:
    """In which ways a degradation keeps the mark; none: it misses it."""
    found = {
        f"mean at most {MARK} %": change.mean <= MARK,
        "not told from zero": change.low <= 0,
    }
    return [way for way, kept in found.items() if kept]


def present(runs: Sequence[Run], setting: Setting) -> None:
    """Prints all figures: those that are judged first."""
    _print_seeds([run for run in runs if not run["restores"]])
    found: Changes = {metric: changes(runs, *metric) for metric in METRICS}
    exact = [of.get(Case(None, EXACT_RESTORES)) for of in found.values()]
    worst = max((abs(c.mean) for c in exact if c is not None), default=float("nan"))
    print_mark(
        f"{EXACT_RESTORES} restores of exact tables: greatest change, percent", worst, 0
    )
    _print_judged(found, "bits as chosen", lambda case: case.bits == AUTO)
    _print_judged(
        found, "slots", lambda case: case.bits is None and case.slots != "raw"
    )
    _print_judged(found, "lattice", lambda case: case.codec == "lattice")
    _print_fixed(found, setting)


def _print_judged(found: Changes, what: str, chosen: Callable[[Case], bool]) -> None:
    """What some cases cost, and over the lifetime, how they keep the mark."""
    for (scope, metric), of in found.items():
        judged = scope == JUDGED
        header = [what, "mean", "from", "to"]
        header += ["mark", "how"] if judged else []
        rows = [
            [str(case), *_cells(of[case]), *(_verdict(of[case]) if judged else ())]
            for case in sorted(filter(chosen, of), key=lambda case: case.restores)
        ]
        if rows:
            print_table(
                f"{NAMES[scope]}, {NAMES[metric]}: percent worse than without restores, of"
                f" pairs, 95 %; {f'mark: {MARK} %' if judged else 'not judged'}",
                header,
                rows,
            )


def _verdict(change: Interval) -> tuple[str, str]:
    """Whether the mark is kept, in which way, and whether noise would hide as much."""
    if change.count < 2:
        return "open", "one seed tells nothing of noise"
    noise = "can be resolved" if change.margin <= MARK else "is hidden by noise"
    kept = ways(change)
    how = " and ".join(kept) or f"more than {MARK} %, told from zero"
    return "kept" if kept else "MISSED", f"{how}; {MARK} % {noise}"


def _print_fixed(found: Changes, setting: Setting) -> None:
    """The same for every number of bits and restores."""
    for (scope, metric), of in found.items():
        rows = [
            [
                f"{bits} bits",
                *(_cell(of.get(Case(bits, count))) for count in setting.restores),
            ]
            for bits in setting.bits
            if any(case.bits == bits for case in of)
        ]
        if rows:
            print_table(
                f"{NAMES[scope]}, {NAMES[metric]}: percent worse than without restores, of"
                " pairs; ! where that is too much for the mark",
                ("restores", *map(str, setting.restores)),
                rows,
            )


def _cell(change: Interval | None) -> str:
    if change is None:
        return "-"
    return f"{change.mean:+.4f} ± {change.margin:.4f}" + (
        "  " if ways(change) else " !"
    )


def _cells(change: Interval) -> list[str]:
    return [f"{value:+.4f}" for value in (change.mean, change.low, change.high)]


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
