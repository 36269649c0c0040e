"""What a fault can lead to, and the counts of it by case and system."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DETAILS = 12


class Outcome(enum.StrEnum):
    """What became of one fault, as somebody sees it who restores afterwards."""

    EQUAL = "restored equal"
    OLDER = "fell back, equal"
    REFUSED = "refused, names the file"
    NOTHING = "no step restores, said so"
    FAILED_ONCE = "save failed once, rows in the next"
    ONE_ERROR = "one error, nothing lost"
    UNCLEAR = "other error"
    LISTED = "LISTED, NOT RESTORABLE"
    NOT_RAISED = "COMMITTED IN SPITE OF A FAILED SYNC"
    STUCK = "NEXT SAVE FAILS"
    LEAK = "LEAK"
    LOST = "STEP LOST"
    FOREIGN = "A STEP OF ANOTHER RUN"
    HANG = "HANG"
    NOT_HIT = "FAULT NOT HIT"
    WRONG = "WRONG VALUES"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """An outcome, and what led to it where that is not plain."""

    outcome: Outcome
    detail: str = ""


@dataclasses.dataclass
class Tally:
    """Outcomes of one kind of fault on one system.

    Attributes:
        case: the command line's name of it.
        what: the part of the case.
        system: that was put to the test.
        allowed: outcomes that are right.
        counts: by outcome.
        details: of the first outcomes that are not right.
        notes: what else was measured.
    """

    case: str
    what: str
    system: str
    allowed: frozenset[Outcome]
    counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    details: list[str] = dataclasses.field(default_factory=list)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    secs: float = 0.0
    _started: float = dataclasses.field(default_factory=time.monotonic, repr=False)

    def add(self, verdict: Verdict, label: str) -> None:
        """Counts one verdict; `label` says how to bring it about again."""
        self.counts[verdict.outcome] += 1
        if verdict.outcome not in self.allowed and len(self.details) < DETAILS:
            self.details.append(f"{label}: {verdict.outcome}: {verdict.detail}")
        self.secs = time.monotonic() - self._started

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def wrong(self) -> int:
        """Faults that ended as they should not."""
        return sum(
            n for outcome, n in self.counts.items() if outcome not in self.allowed
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "what": self.what,
            "system": self.system,
            "faults": self.total,
            "wrong": self.wrong,
            "outcomes": {outcome.value: self.counts[outcome] for outcome in Outcome},
            "details": self.details,
            "notes": self.notes,
            "secs": round(self.secs, 1),
        }


def print_tallies(tallies: Sequence[Tally]) -> None:
    """One line for each, its outcomes by number."""
    width = max((len(f"{t.case}: {t.what}") for t in tallies), default=0)
    for tally in tallies:
        found = ", ".join(
            f"{tally.counts[outcome]} {outcome.value}"
            for outcome in Outcome
            if tally.counts[outcome]
        )
        name = f"{tally.case}: {tally.what}"
        mark = "wrong" if tally.wrong else "ok"
        print(
            f"{name:{width}} | {tally.system:7} | {tally.total:5} | {mark:5} | {found or '-'}"
            + "".join(f", {key} {value}" for key, value in tally.notes.items()),
            flush=True,
        )


def write_json(path: Path, tallies: Sequence[Tally], quick: bool) -> None:
    """Writes the report; what it has of other cases is kept."""
    mine = {tally.case for tally in tallies}
    others: list[Any] = []
    if path.exists():
        others = [
            tally
            for tally in json.loads(path.read_text())["tallies"]
            if tally["case"] not in mine
        ]
    report = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "quick": quick,
        "tallies": [*others, *(tally.as_json() for tally in tallies)],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
