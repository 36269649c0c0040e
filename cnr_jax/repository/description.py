"""The values that `describe` returns, and how they print."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from cnr_jax.format import names
from cnr_jax.texts import count_of, visible

# Folders of abandoned steps that a text names.
_SHOWN_ASIDE = 10
StepKind = Literal["full", "delta", "orbax", "unreadable"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafDescription:
    """Description of one leaf of a table, the table itself or a slot, as one step holds it.

    Attributes:
        name: `"table"`, or the name of the slot.
        path: keys that lead to the leaf in the state, joined by `/`.
        shape: shape of the leaf in the state.
        dtype: dtype of the leaf in the state.
        codecs: codecs of its rows, such as `"adaptive 4 bits"`; that of most rows first.
        rows: number of its rows that the step holds.
        bytes: bytes of its encoded rows, without row ids, checksums and array metadata.
        tiles: number of parts of it that were saved one by one, mostly one for each device.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    codecs: tuple[str, ...]
    rows: int
    bytes: int
    tiles: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableDescription:
    """Description of a table as one step holds it.

    Attributes:
        name: name of the table.
        rows: number of rows of the table.
        saved_rows: number of rows that the step holds, rows of the table's padding included.
        table_bytes: bytes of its encoded rows and row ids in the step.
        slot_bytes: bytes of the encoded rows of its slots.
        leaves: descriptions of the table itself, then of its slots.
        sample_rows: number of its rounded rows that were read back during the save, to see how far
            off they are; None if none was.
        mean_row_error: mean of `||row - read|| / ||row||` over these rows.
        worst_row_error: greatest of these errors.
    """

    name: str
    rows: int
    saved_rows: int
    table_bytes: int
    slot_bytes: int
    leaves: tuple[LeafDescription, ...]
    sample_rows: int | None = None
    mean_row_error: float | None = None
    worst_row_error: float | None = None

    @property
    def saved_share(self) -> float:
        """Share of the table's stored rows that the step holds: of a delta those that changed."""
        stored = self.leaves[0].shape[0] if self.leaves else self.rows
        return self.saved_rows / max(1, stored)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDescription:
    """Description of a step of a root.

    If the step has no manifest of this library that can be read, what the manifest would tell is
    None, 0 or empty.

    Attributes:
        step: number of the step.
        directory: name of its step directory.
        kind: `"full"` or `"delta"`; `"orbax"`: saved by plain Orbax; `"unreadable"`: its manifest
            cannot be read.
        parent: number of the step that a delta rests on.
        generation: number of the branch; a rollback starts a higher one.
        run: id of the run that it belongs to; None also if the step does not say.
        policy: name of the policy that was asked.
        reason: why it is full or a delta.
        rows: number of rows it holds, over all tables.
        table_bytes, slot_bytes, dense_bytes, manifest_bytes: as in a `SaveReport`.
        state_bytes: bytes that a plain full save would have written, as in a `SaveReport`.
        secs: seconds from the start of the save until its manifest was written.
        saved_at: time when the manifest was written, in UTC.
        restores: how often a run was restored along its branch.
        tables: descriptions of its tables; empty if they cannot be read.
        problem: why it cannot be restored, in a line; empty if it can, as far as manifests and the
            sizes of files tell.
        may_lack_rows: whether an audit found later that rows may be missing in it.
        merged_bytes: bytes that were merged from a chain and that no save wrote, not among those
            above: of a baseline that the save brings along, or all of a step that `compact` has
            made. A baseline counts among those above if its manifest cannot be read.
    """

    step: int
    directory: str
    kind: StepKind
    parent: int | None = None
    generation: int = 0
    run: str | None = None
    policy: str = ""
    reason: str = ""
    rows: int = 0
    table_bytes: int = 0
    slot_bytes: int = 0
    dense_bytes: int = 0
    manifest_bytes: int = 0
    state_bytes: int = 0
    secs: float | None = None
    saved_at: datetime.datetime | None = None
    restores: int = 0
    tables: tuple[TableDescription, ...] = ()
    problem: str = ""
    may_lack_rows: bool = False
    merged_bytes: int = 0

    @property
    def restorable(self) -> bool:
        """Whether a manager of this library can restore the step, as far as can be seen."""
        return not self.problem

    @property
    def total_bytes(self) -> int:
        """Bytes of all that the step holds, with what was merged."""
        rows = self.table_bytes + self.slot_bytes
        return rows + self.dense_bytes + self.manifest_bytes + self.merged_bytes

    @property
    def reduction(self) -> float:
        """Factor by which the step is smaller than a plain full save."""
        return self.state_bytes / max(1, self.total_bytes)

    def asdict(self) -> dict[str, Any]:
        """All fields, and figures that follow from them, as values of JSON."""
        found = dataclasses.asdict(self)
        found["saved_at"] = self.saved_at.isoformat() if self.saved_at else None
        found["total_bytes"], found["reduction"] = self.total_bytes, self.reduction
        found["restorable"] = self.restorable
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RootDescription:
    """Description of a root. Prints as a table of its steps, chain by chain.

    Attributes:
        root: path of the root.
        item: name of the item of each step that was looked at; None: no step holds one of this
            library.
        steps: descriptions of steps, branch by branch, in the order of saves; steps whose branch is
            not known come first.
        abandoned: names of folders of steps that a rollback moved aside, or left behind unrenamed.
        earlier_runs: names of folders of runs that `Options(new_run=True)` moved aside; each is a
            root.
        unfinished: names of folders of saves and merged baselines that are not committed.
        removed: names of folders of removed steps that still hold files.
        latest_step: number of the step that `restore(None)` would take; None: there is none.
    """

    root: str
    item: str | None
    steps: tuple[StepDescription, ...]
    abandoned: tuple[str, ...] = ()
    earlier_runs: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    latest_step: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all steps of this library."""
        return sum(step.total_bytes for step in self.steps)

    def asdict(self) -> dict[str, Any]:
        """All fields, and figures that follow from them, as values of JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**found, "steps": [step.asdict() for step in self.steps]}

    def __str__(self) -> str:
        """The steps as a table, and what lies beside them."""
        lines = [line for line, _ in step_lines(self)]
        return "\n".join([*lines, *footer(self)])


def chains(steps: Iterable[StepDescription]) -> list[list[StepDescription]]:
    """Groups steps: one that rests on no other, then all that rest on it, each group in order.

    A delta whose parent is not there begins the group of the steps that rest on it.
    """
    groups: dict[str, list[StepDescription]] = {}
    # Group of the steps of each number; if there are several, that of the newest generation.
    group_of: dict[int, list[StepDescription]] = {}
    waiting = sorted(steps, key=lambda s: (s.generation, s.step, s.directory))
    while waiting:
        left: list[StepDescription] = []
        for each in waiting:
            above = None if each.parent is None else group_of.get(each.parent)
            if above is not None:
                above.append(each)
                group_of[each.step] = above
            elif each.parent is None:
                group_of[each.step] = groups[each.directory] = [each]
            else:
                left.append(each)
        if len(left) == len(waiting):  # no parent of these is there
            first = left.pop(0)
            group_of[first.step] = groups[first.directory] = [first]
        waiting = left
    return sorted(
        groups.values(), key=lambda group: (group[0].step, group[0].generation)
    )


def step_lines(
    root: RootDescription, now: datetime.datetime | None = None
) -> list[tuple[str, StepDescription | None]]:
    """Returns a header, then a line for each step with the step, chain by chain.

    Args:
        root: description to print.
        now: time from which ages are counted; None: the lines give times instead.
    """
    groups = chains(root.steps)
    steps = [each for group in groups for each in group]
    if not steps:
        return [("no steps", None)]
    several = len({each.generation for each in steps if each.generation}) > 1
    head = ["step", "kind", "parent", "rows", "bytes", "smaller", "secs"]
    head += ["age" if now else "saved (UTC)", *["branch"] * several, "restorable"]
    rows = [head]
    for group in groups:
        for i, each in enumerate(group):
            mark = "" if not i else "└ " if i == len(group) - 1 else "├ "
            known = each.kind in ("full", "delta")
            when = ""
            if each.saved_at is not None:
                when = (
                    age(now - each.saved_at)
                    if now
                    else f"{each.saved_at:%Y-%m-%d %H:%M}"
                )
            cells = [
                f"{each.rows:,}",
                amount(each.total_bytes),
                f"{each.reduction:.1f}x",
                f"{each.secs or 0:.2f}",
            ]
            verdict = f"no: {each.problem}" if each.problem else "yes"
            if each.kind == "orbax":
                verdict = "by Orbax"
            elif each.may_lack_rows and not each.problem:
                verdict = "yes, but may lack rows"
            rows.append(
                [
                    f"{mark}{each.step}",
                    each.kind,
                    "" if each.parent is None else str(each.parent),
                    *(cells if known else [""] * len(cells)),
                    when,
                    *[str(each.generation or "")] * several,
                    verdict,
                ]
            )
    lines = aligned(rows, right={2, 3, 4, 5, 6})
    return list(zip(lines, [None, *steps], strict=True))


def footer(root: RootDescription) -> list[str]:
    """Lines with the total of a root, and what lies beside its steps."""
    lost = sum(bool(step.problem) for step in root.steps if step.kind != "orbax")
    latest = root.latest_step
    verdict = "none restores"
    if latest is not None:
        verdict = f"restore(None) takes {latest}"
    elif any(step.kind == "orbax" for step in root.steps):
        verdict += " but by Orbax, or with Options(adopt=True)"
    line = f"{count_of(len(root.steps), 'step')}, {amount(root.total_bytes)}; {verdict}"
    if lost and latest is not None:
        line += f"; {lost} cannot be restored"
    beside = [
        (root.abandoned, "abandoned by rollbacks"),
        (root.earlier_runs, "of earlier runs"),
        (root.unfinished, "unfinished"),
        (root.removed, "being removed"),
    ]
    told = [f"{len(folders)} {what}" for folders, what in beside if folders]
    if not told:
        return [line]
    # What a rollback has set aside can be had back by its name.
    now = {names.plain(step.directory): step.directory for step in root.steps}
    aside = [
        # Where folders cannot be renamed, it has kept its name, and the new step has another one.
        f"  {visible(name)}"
        + (
            f", not step {name}, which is in {visible(now[name])}"
            if name in now
            else ""
        )
        for name in root.abandoned[:_SHOWN_ASIDE]
    ]
    if len(root.abandoned) > _SHOWN_ASIDE:
        aside.append(f"  ({len(root.abandoned) - _SHOWN_ASIDE} more)")
    return [line, f"beside them: {', '.join(told)}", *aside]


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Aligns cells in columns; returns the lines.

    Args:
        rows: rows of equally many cells.
        right: numbers of the columns whose cells end below each other.

    Example:
        >>> aligned([["step", "rows"], ["7", "1,024"]], right={1})
        ['step   rows', '7     1,024']
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def share_told(part: float | None) -> str:
    """A share in percent, three digits; `-` where it is not known.

    Example:
        >>> share_told(0.0712345), share_told(None)
        ('7.12 %', '-')
    """
    return "-" if part is None else f"{100 * part:.3g} %"


def amount(nbytes: float) -> str:
    """Bytes for people, three digits.

    Example:
        >>> amount(417), amount(1_234), amount(1_040_000_000), amount(99_960)
        ('417 B', '1.23 kB', '1.04 GB', '100 kB')
    """
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"


def age(passed: datetime.timedelta) -> str:
    """A time that has passed, in its largest unit.

    Example:
        >>> age(datetime.timedelta(seconds=90)), age(datetime.timedelta(days=3, hours=9))
        ('1 min', '3 d')
    """
    secs = max(0, int(passed.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs // length} {unit}"
    return f"{secs} s"
