"""The course of a run: its saves in order, as the manifests of a root tell of them."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence

from cnr_jax import errors
from cnr_jax.format.manifest import HistoryEntry
from cnr_jax.repository.description import RootDescription, StepDescription
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.step import read_step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save of a run.

    Attributes:
        step: its number.
        kind: as in a `StepDescription`.
        kept: whether the root still holds it; else only its rows, bytes of rows and seconds are
            known, from the history that a later step carries.
        branch: number of the branch; 0: not known.
        parent: where in the course the parent of a delta is; None: nowhere.
        depth: how many checkpoints a restore of it reads; 0: not known.
        restored: whether the run was restored between the save before and this one.
        rows: over all tables.
        parts: its bytes by what they are: `tables`, `slots`, `dense`, `manifests`.
        plain_bytes: what a plain full save would have written; None: not known.
        secs: from the start of the save until its manifest was written; None: not known.
        saved_at: when the manifest was written, in UTC; None: not known.
        shares: by table, how much of its rows it holds; empty where that is not known.
        problem: why it cannot be restored; empty if it can.
        may_lack_rows: whether an audit found later that rows may be missing in it.
    """

    step: int
    kind: str
    kept: bool = True
    branch: int = 0
    parent: int | None = None
    depth: int = 0
    restored: bool = False
    rows: int = 0
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plain_bytes: int | None = None
    secs: float | None = None
    saved_at: datetime.datetime | None = None
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    problem: str = ""
    may_lack_rows: bool = False

    @property
    def total_bytes(self) -> int | None:
        """All bytes written for it, as far as they are known; None: none is."""
        return sum(self.parts.values()) if self.parts else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a root tells of a run.

    Attributes:
        root: what the root holds.
        saves: in order: branch by branch, in each by step.
    """

    root: RootDescription
    saves: tuple[Save, ...]

    @property
    def kept(self) -> tuple[Save, ...]:
        """Saves of this library that the root still holds."""
        return tuple(s for s in self.saves if s.kept and s.kind in ("full", "delta"))

    @property
    def plain_bytes(self) -> int:
        """What the steps that are kept would take as plain full saves."""
        return sum(save.plain_bytes or 0 for save in self.kept)


def course_of(root: RootDescription) -> Course:
    """The course of the run that a root holds.

    Reads the last manifest of each cycle once more, for the saves that retention has removed.
    """
    placed: list[tuple[int, int, StepDescription | HistoryEntry]] = [
        (_branch_of(step, root.steps), step.step, step) for step in root.steps
    ]
    placed += [(branch, entry.step, entry) for branch, entry in _removed(root)]
    placed.sort(key=lambda found: found[:2])
    saves: list[Save] = []
    at: dict[int, int] = {}  # of each step the latest save so far
    restores: int | None = None
    for branch, number, found in placed:
        if isinstance(found, HistoryEntry):
            saves.append(_save_removed(found, branch))
            continue
        parent = None if found.parent is None else at.get(found.parent)
        depth = 1 if found.parent is None else 0
        if parent is not None:
            depth = saves[parent].depth and saves[parent].depth + 1
        known = found.kind in ("full", "delta")
        restored = known and restores is not None and found.restores > restores
        restores = found.restores if known else restores
        at[number] = len(saves)
        saves.append(_save_kept(found, branch, parent, depth, restored))
    return Course(root=root, saves=tuple(saves))


def _branch_of(step: StepDescription, steps: Sequence[StepDescription]) -> int:
    """The branch of a step; of one that does not say, that of the steps before it."""
    if step.generation:
        return step.generation
    return max((each.generation for each in steps if each.step < step.step), default=0)


def _save_kept(
    step: StepDescription, branch: int, parent: int | None, depth: int, restored: bool
) -> Save:
    known = step.kind in ("full", "delta")
    parts = {
        "tables": step.table_bytes,
        "slots": step.slot_bytes,
        "dense": step.dense_bytes,
        "manifests": step.manifest_bytes,
    }
    return Save(
        step=step.step,
        kind=step.kind,
        branch=branch,
        parent=parent,
        depth=depth,
        restored=restored,
        rows=step.rows,
        parts=parts if known else {},
        plain_bytes=step.full_fp32_bytes if known else None,
        secs=step.secs,
        saved_at=step.saved_at,
        shares={table.name: table.saved_rows / table.rows for table in step.tables},
        problem="" if step.kind == "orbax" else step.problem,
        may_lack_rows=step.may_lack_rows,
    )


def _save_removed(entry: HistoryEntry, branch: int) -> Save:
    return Save(
        step=entry.step,
        kind=entry.kind,
        kept=False,
        branch=branch,
        rows=entry.rows,
        parts={"rows": entry.bytes},
        secs=entry.secs,
    )


def _removed(root: RootDescription) -> Iterator[tuple[int, HistoryEntry]]:
    """Saves that histories tell of and the root does not hold, with their branches.

    What a history has put together is left out: of no single save.
    """
    own = [step for step in root.steps if step.kind in ("full", "delta")]
    known = {(step.step, step.rows, step.secs) for step in own}
    unreadable = {step.step for step in root.steps if step.kind == "unreadable"}
    # The last delta of each cycle: its history holds those of all before it.
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
                yield step.generation, entry
