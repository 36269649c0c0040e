"""Course of a run: its saves in order, as the manifests of a root describe them."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cnr_jax import errors
from cnr_jax.repository.describe import utc_time
from cnr_jax.repository.description import (
    RootDescription,
    StepDescription,
    TableDescription,
)
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.metrics import PHASES, read_metrics
from cnr_jax.repository.step import read_step

ROWS = "rows"
# Parts of the bytes of a save, by what reports and descriptions call them.
_PARTS = {
    "tables": "table",
    "slots": "slot",
    "dense": "dense",
    "manifests": "manifest",
    "merged": "merged",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Save of a run.

    Attributes:
        step: number of the step.
        kind: kind of the step, as in a `StepDescription`.
        kept: whether the root still holds it. Otherwise the metrics of the run describe it, or the
            history of a later step has its rows, bytes of rows and seconds.
        branch: number of the branch; 0: not known.
        parent: place in the course of a delta's parent; None: it is not there.
        parent_step: step of that parent, wherever it is; None: not known.
        depth: number of checkpoints that a restore of the step reads; 0: not known.
        restores: how often the run was restored along its branch; None: not known.
        restored: whether the run was restored between the save before and this one.
        rows: number of rows over all tables.
        parts: bytes by kind: `tables`, `slots`, `dense`, `manifests`, and `merged`, which no save
            wrote, as in a `StepDescription`; or `ROWS` alone, if only the bytes of rows are known.
        plain_bytes: bytes that a plain full save would have written; None: not known.
        secs: seconds from its start until its manifest was written; None: not known.
        stall_secs: part of `secs` in which training waited; None: not known.
        wait_secs: part of `stall_secs` in which the train step before the save went on.
        phases: seconds by phase, in their order; empty if they are not known.
        saved_at: time at which the manifest was written, in UTC; None: not known.
        shares: share of each table's rows that the step holds, by table; empty if not known.
        mean_error: mean relative error of rounded rows that were sampled; None: not known.
        worst_error: greatest of these errors.
        problem: why it cannot be restored; empty if it can.
        may_lack_rows: whether an audit found later that rows may be missing in it.
    """

    step: int
    kind: str
    kept: bool = True
    branch: int = 0
    parent: int | None = None
    parent_step: int | None = None
    depth: int = 0
    restores: int | None = None
    restored: bool = False
    rows: int = 0
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plain_bytes: int | None = None
    secs: float | None = None
    stall_secs: float | None = None
    wait_secs: float = 0.0
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    saved_at: datetime.datetime | None = None
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mean_error: float | None = None
    worst_error: float | None = None
    problem: str = ""
    may_lack_rows: bool = False

    @property
    def total_bytes(self) -> int | None:
        """All bytes of the step, as far as they are known; None: none are."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def merged_bytes(self) -> int:
        """Bytes of the step that were merged from a chain."""
        return self.parts.get("merged", 0)

    @property
    def written_bytes(self) -> int | None:
        """Bytes that the save wrote; None: not known, or `compact` has made the step."""
        if "tables" not in self.parts:
            return None
        return sum(self.parts.values()) - self.merged_bytes or None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Course of a run: the root, and the saves that it tells of.

    Attributes:
        root: description of the root.
        saves: saves in order: branch by branch, and in each by step.
        reads: bytes and seconds of each restore that the metrics of the run tell of.
    """

    root: RootDescription
    saves: tuple[Save, ...]
    reads: tuple[tuple[int, float], ...] = ()

    @property
    def kept(self) -> tuple[Save, ...]:
        """Saves of this library that the root still holds."""
        return tuple(s for s in self.saves if s.kept and s.kind in ("full", "delta"))

    @property
    def plain_bytes(self) -> int:
        """Bytes that the kept steps would take as plain full saves."""
        return sum(save.plain_bytes or 0 for save in self.kept)


def course_of(root: RootDescription) -> Course:
    """Reads the course of the run that a root holds.

    Reads the metrics of the run, if it keeps any, and the last manifest of each cycle once more,
    for saves that retention has removed.
    """
    lines = _noted(root)
    found_saves = [each for each in map(_save_noted, lines) if each is not None]
    noted = {(save.branch, save.step): save for save in found_saves}
    placed: list[tuple[int, int, StepDescription | Save]] = [
        (_branch_of(step, root.steps), step.step, step) for step in root.steps
    ]
    there = {(branch, step) for branch, step, _ in placed}
    gone = [save for place, save in noted.items() if place not in there]
    # Histories have no branch: a removed save is the one of this step with as many rows, or, as
    # metrics do not count merged rows, the full one of this step.
    known = {(save.step, save.rows) for save in gone}
    merged = {save.step for save in gone if save.merged_bytes}
    gone += [
        save
        for save in _removed(root)
        if (save.step, save.rows) not in known
        and not (save.kind == "full" and save.step in merged)
    ]
    placed += [(save.branch, save.step, save) for save in gone]
    placed.sort(key=lambda found: found[:2])
    saves: list[Save] = []
    at: dict[int, int] = {}  # place of the latest save so far, by step
    for branch, number, found in placed:
        if isinstance(found, Save):
            saves.append(found)
            continue
        parent = None if found.parent is None else at.get(found.parent)
        depth = 1 if found.parent is None else 0
        if parent is not None:
            depth = saves[parent].depth and saves[parent].depth + 1
        at[number] = len(saves)
        save = _save_kept(found, branch, parent, depth)
        more = noted.get((branch, number))
        if more is not None and save.parts:
            save = dataclasses.replace(
                save,
                stall_secs=more.stall_secs,
                wait_secs=more.wait_secs,
                phases=more.phases,
            )
        saves.append(save)
    reads = [each for each in map(_read_noted, lines) if each is not None]
    return Course(root=root, saves=tuple(_with_restores(saves)), reads=tuple(reads))


def _with_restores(saves: Sequence[Save]) -> Iterator[Save]:
    """Marks the saves before which the run was restored."""
    before: int | None = None
    for save in saves:
        if save.restores is None:
            yield save
            continue
        restored = before is not None and save.restores > before
        before = save.restores
        yield dataclasses.replace(save, restored=restored)


def _branch_of(step: StepDescription, steps: Sequence[StepDescription]) -> int:
    """Branch of a step; if the step does not say, the newest branch of lower steps."""
    if step.generation:
        return step.generation
    return max((each.generation for each in steps if each.step < step.step), default=0)


def _save_kept(
    step: StepDescription, branch: int, parent: int | None, depth: int
) -> Save:
    known = step.kind in ("full", "delta")
    mean, worst = _errors(step.tables)
    parts = {part: getattr(step, f"{name}_bytes") for part, name in _PARTS.items()}
    return Save(
        step=step.step,
        kind=step.kind,
        branch=branch,
        parent=parent,
        parent_step=step.parent,
        depth=depth,
        restores=step.restores if known else None,
        rows=step.rows,
        parts=parts if known else {},
        plain_bytes=step.state_bytes if known else None,
        secs=step.secs,
        saved_at=step.saved_at,
        shares={table.name: table.saved_share for table in step.tables},
        mean_error=mean,
        worst_error=worst,
        problem="" if step.kind == "orbax" else step.problem,
        may_lack_rows=step.may_lack_rows,
    )


def _errors(
    tables: Sequence[TableDescription],
) -> tuple[float | None, float | None]:
    """Mean and worst error of the sampled rows of all tables."""
    found = [
        (each.sample_rows, each.mean_row_error, each.worst_row_error)
        for each in tables
        if each.sample_rows
    ]
    rows = sum(count or 0 for count, _, _ in found)
    if not rows:
        return None, None
    mean = sum((count or 0) * (mean or 0.0) for count, mean, _ in found) / rows
    return mean, max(worst or 0.0 for _, _, worst in found)


def _noted(root: RootDescription) -> list[dict[str, Any]]:
    """Lines of a root's metrics that tell of the runs of its steps."""
    runs = list({s.run for s in root.steps if s.kind in ("full", "delta")})
    try:
        lines = read_metrics(root.root)
    except (errors.CnrError, OSError):
        return []
    return [line for line in lines if line.get("run") in runs]


def _read_noted(line: Mapping[str, Any]) -> tuple[int, float] | None:
    """Bytes and seconds of a restore from a line of the metrics; None if it has none."""
    read, secs = _whole(line, "bytes_read"), _number(line, "total_secs")
    if line["event"] != "restore" or read is None or secs is None:
        return None
    return read, secs


def _save_noted(line: Mapping[str, Any]) -> Save | None:
    """Reads a save from a line of the metrics; None if the line has none.

    Each field is checked by itself, here and nowhere else: a value that no report can have there
    counts as not known.
    """
    step, branch = _whole(line, "step"), _whole(line, "generation")
    kind = line.get("kind")
    if line["event"] != "save" or kind not in ("full", "delta"):
        return None
    if line.get("outcome") == "dropped":
        return None  # nothing of it stays
    if step is None or branch is None:
        return None
    parts = {part: _whole(line, f"{name}_bytes") for part, name in _PARTS.items()}
    phases = {phase: _number(line, f"{phase}_secs") for phase in PHASES}
    given = line.get("tables")
    tables = given if isinstance(given, list) else []
    shares = {
        table["name"]: _number(table, "saved_share")
        for table in tables
        if isinstance(table, dict) and isinstance(table.get("name"), str)
    }
    return Save(
        step=step,
        kind=kind,
        kept=False,
        branch=branch,
        parent_step=_whole(line, "parent"),
        restores=_whole(line, "restores"),
        rows=_whole(line, "rows") or 0,
        parts={part: size for part, size in parts.items() if size is not None},
        # Lines of earlier versions took tables for float32.
        plain_bytes=_whole(line, "state_bytes") or _whole(line, "full_fp32_bytes"),
        secs=_number(line, "total_secs"),
        stall_secs=_number(line, "blocking_secs"),
        wait_secs=_number(line, "wait_secs") or 0.0,
        phases={phase: secs for phase, secs in phases.items() if secs is not None},
        saved_at=_time_noted(line, phases["commit"]),
        shares={name: share for name, share in shares.items() if share is not None},
        mean_error=_number(line, "mean_row_error"),
        worst_error=_number(line, "worst_row_error"),
    )


def _time_noted(
    line: Mapping[str, Any], commit_secs: float | None
) -> datetime.datetime | None:
    """Time at which the manifest of a save was written: its line comes after the commit."""
    written = _number(line, "written_at_unix_secs")
    return None if written is None else utc_time(written - (commit_secs or 0.0))


def _number(line: Mapping[str, Any], name: str) -> float | None:
    """A value as a number of 0 or more; None if it is none, or is implausibly large."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e18 else None


def _whole(line: Mapping[str, Any], name: str) -> int | None:
    value = line.get(name)
    return value if isinstance(value, int) and _number(line, name) is not None else None


def _removed(root: RootDescription) -> Iterator[Save]:
    """Saves that histories mention and the root does not hold.

    Entries that stand for several saves are left out.
    """
    own = [step for step in root.steps if step.kind in ("full", "delta")]
    known = {(step.step, step.rows, step.secs) for step in own}
    unreadable = {step.step for step in root.steps if step.kind == "unreadable"}
    # The last delta of each cycle: its history tells of all saves of the cycle.
    tips: list[StepDescription] = []
    for step, after in itertools.pairwise([*own, None]):
        if step is None or step.kind == "full":
            continue
        if after is None or after.kind == "full" or after.generation != step.generation:
            tips.append(step)
    for step in tips:
        try:
            item = root.item or "default"
            manifest = read_step(open_root(root.root), step.directory, item)
        except (errors.CnrError, OSError):
            continue  # removed since it was described
        for entry in manifest.history:
            key = entry.step, entry.rows, entry.secs
            if entry.saves == 1 and key not in known and entry.step not in unreadable:
                known.add(key)
                yield Save(
                    step=entry.step,
                    kind=entry.kind,
                    kept=False,
                    branch=step.generation,
                    rows=entry.rows,
                    parts={ROWS: entry.bytes},
                    secs=entry.secs,
                )
