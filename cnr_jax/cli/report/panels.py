"""Panels of a run: its charts, over one axis with its saves in order."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from cnr_jax.goodput.profile import Profile
from cnr_jax.repository.course import ROWS, Course, Save
from cnr_jax.repository.description import amount
from cnr_jax.repository.metrics import PHASES

Shape = Literal["line", "area", "bars", "dots", "squares", "rings", "crosses"]
Unit = Literal["bytes", "share", "secs", "count"]
Values = tuple[float | None, ...]

# Colours of Okabe and Ito, which people who see few colours tell apart: on white, and on black.
COLOURS = {
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#e69f00", "#e69f00"),
    "green": ("#009e73", "#2bc79a"),
    "red": ("#d55e00", "#ff8533"),
    "purple": ("#b0578d", "#cc79a7"),
    "sky": ("#56b4e9", "#a6dcff"),
    "yellow": ("#b3a500", "#f0e442"),
    "grey": ("#767676", "#9a9a9a"),
}
# Lines of at most this many tables are drawn, each in a colour of its own.
SHOWN_TABLES = 7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one kind, one for each save; None: no value there.

    Attributes:
        name: name of the kind.
        colour: a key of `COLOURS`.
        shape: shape in which they are drawn; bars of a panel stand on each other.
        values: one for each save.
        dashes: number of the dash pattern of a line; 0: none.
    """

    name: str
    colour: str
    shape: Shape
    values: Values
    dashes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart.

    Attributes:
        title: title, in a few words.
        about: explanation of how to read it, in a sentence or two.
        unit: unit of its values.
        series: series in the order in which they are drawn, the last on top.
        logarithmic: whether equal distances are equal factors.
        links: pairs of places of saves, to be joined.
    """

    title: str
    about: str
    unit: Unit
    series: tuple[Series, ...]
    logarithmic: bool = False
    links: tuple[tuple[int, int], ...] = ()


def told(value: float, unit: Unit) -> str:
    """Formats a value of a panel.

    Example:
        >>> told(1500, "bytes"), told(0.125, "share"), told(0.5, "secs"), told(3, "count")
        ('1.50 kB', '12.5 %', '0.5 s', '3')
    """
    if unit == "bytes":
        return amount(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{value:.3g} s" if unit == "secs" else f"{value:,.0f}"


def tick_told(value: float, unit: Unit) -> str:
    """Formats a round value beside an axis.

    Example:
        >>> tick_told(1e6, "bytes"), told(1e6, "bytes")
        ('1 MB', '1.00 MB')
    """
    return re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", told(value, unit)).replace(". ", " ")


def panels_of(course: Course) -> list[Panel]:
    """All panels of a run for which something is known."""
    panels = [
        _bytes(course.saves),
        _parts(course.saves),
        _capacity(course.saves),
        _shares(course.saves),
        _seconds(course.saves),
        _phases(course.saves),
        _errors(course.saves),
        _chains(course.saves),
    ]
    shown: list[Panel] = []
    for panel in panels:
        known = [s for s in panel.series if any(v is not None for v in s.values)]
        if known:
            shown.append(dataclasses.replace(panel, series=tuple(known)))
    return shown


def restores_of(saves: Sequence[Save]) -> list[int]:
    """Places of saves before which the run was restored."""
    return [place for place, save in enumerate(saves) if save.restored]


def _where(
    saves: Sequence[Save],
    value: Callable[[Save], float | None],
    among: Callable[[Save], bool],
) -> Values:
    return tuple(value(save) if among(save) else None for save in saves)


def _bytes(saves: Sequence[Save]) -> Panel:
    def size(save: Save) -> float | None:
        return save.total_bytes or None  # a logarithmic axis has no place for zero

    def kept(kind: str) -> Callable[[Save], bool]:
        return lambda save: save.kept and save.kind == kind

    about = "On this axis equal distances are equal factors."
    if any(ROWS in save.parts for save in saves):
        about += " Of a save that is removed since only the rows are known, not what was dense."
    return Panel(
        title="Bytes of each save",
        about=about,
        unit="bytes",
        logarithmic=True,
        series=(
            Series(
                name="a plain full save",
                colour="grey",
                shape="line",
                values=tuple(save.plain_bytes or None for save in saves),
            ),
            Series(
                name="removed since",
                colour="grey",
                shape="rings",
                values=_where(saves, size, lambda save: not save.kept),
            ),
            Series(
                name="delta",
                colour="orange",
                shape="dots",
                values=_where(saves, size, kept("delta")),
            ),
            Series(
                name="full",
                colour="blue",
                shape="squares",
                values=_where(saves, size, kept("full")),
            ),
        ),
    )


def _parts(saves: Sequence[Save]) -> Panel:
    colours = {
        "tables": "blue",
        "slots": "orange",
        "dense": "green",
        "manifests": "purple",
        "merged": "sky",
    }
    return Panel(
        title="What the bytes are",
        about="Slots are the optimizer's values of a row; dense is all that is no table.",
        unit="bytes",
        series=tuple(
            Series(
                name=part,
                colour=colour,
                shape="bars",
                values=tuple(save.parts.get(part) for save in saves),
            )
            for part, colour in colours.items()
            if any(save.parts.get(part) for save in saves)
        ),
    )


def _capacity(saves: Sequence[Save]) -> Panel:
    def summed(value: Callable[[Save], int | None]) -> Values:
        kept = [(value(save) or 0) if save.kept else 0 for save in saves]
        # Without any known value there is no series at all.
        return tuple(itertools.accumulate(kept)) if any(kept) else (None,) * len(saves)

    return Panel(
        title="Capacity",
        about="Bytes of the steps that the root still holds, summed up save by save.",
        unit="bytes",
        series=(
            Series(
                name="had all been plain full saves",
                colour="grey",
                shape="line",
                values=summed(lambda save: save.plain_bytes),
                dashes=1,
            ),
            Series(
                name="as they are",
                colour="blue",
                shape="area",
                values=summed(lambda save: save.total_bytes),
            ),
        ),
    )


def _shares(saves: Sequence[Save]) -> Panel:
    deltas = [save for save in saves if save.kind == "delta"]
    weights: Counter[str] = Counter()
    for save in deltas:
        weights.update(save.shares)
    names = [name for name, _ in weights.most_common()]
    more = len(names) - SHOWN_TABLES
    about = "How much of each table a delta holds: rows that changed since its parent."
    if more > 0:
        about += f" The {SHOWN_TABLES} tables with the highest shares; the table below has all."

    def share(name: str) -> Callable[[Save], float | None]:
        return lambda save: save.shares.get(name)

    return Panel(
        title="Share of rows in deltas, by table",
        about=about,
        unit="share",
        series=tuple(
            Series(
                name=name,
                colour=colour,
                shape="line",
                values=_where(saves, share(name), lambda s: s.kind == "delta"),
                dashes=i,
            )
            for i, (name, colour) in enumerate(
                zip(names[:SHOWN_TABLES], COLOURS, strict=False)
            )
        ),
    )


def _seconds(saves: Sequence[Save]) -> Panel:
    return Panel(
        title="Seconds of each save",
        about="From its start until its manifest was written; training waits for a part of them.",
        unit="secs",
        series=(
            Series(
                name="in all",
                colour="sky",
                shape="bars",
                values=tuple(save.secs for save in saves),
            ),
            Series(
                name="of these training waited",
                colour="red",
                shape="dots",
                values=tuple(save.stall_secs for save in saves),
            ),
        ),
    )


def _phases(saves: Sequence[Save]) -> Panel:
    return Panel(
        title="Seconds by phase",
        about="Phases overlap: writing goes on in the background while training does, and while"
        " rows are still gathered.",
        unit="secs",
        series=tuple(
            Series(
                name=phase,
                colour=colour,
                shape="line",
                values=tuple(save.phases.get(phase) for save in saves),
                dashes=i,
            )
            for i, (phase, colour) in enumerate(zip(PHASES, COLOURS, strict=False))
        ),
    )


def _errors(saves: Sequence[Save]) -> Panel:
    return Panel(
        title="Error of rounding",
        about="How far rows that were saved are off, relative to their length, of a sample.",
        unit="share",
        series=(
            Series(
                name="worst row",
                colour="red",
                shape="line",
                values=tuple(save.worst_error for save in saves),
                dashes=1,
            ),
            Series(
                name="mean",
                colour="blue",
                shape="line",
                values=tuple(save.mean_error for save in saves),
            ),
        ),
    )


def _chains(saves: Sequence[Save]) -> Panel:
    links = tuple(
        (save.parent, place)
        for place, save in enumerate(saves)
        if save.parent is not None
    )

    def depth(save: Save) -> float:
        return max(1, save.depth)

    def whole(kind: str) -> Callable[[Save], bool]:
        return lambda save: save.kept and save.kind == kind and not save.problem

    return Panel(
        title="Chains",
        about="Each delta is joined to its parent. The height is the number of checkpoints that a"
        " restore of it reads.",
        unit="count",
        links=links,
        series=(
            Series(
                name="delta",
                colour="orange",
                shape="dots",
                values=_where(saves, depth, whole("delta")),
            ),
            Series(
                name="full",
                colour="blue",
                shape="squares",
                values=_where(saves, depth, whole("full")),
            ),
            Series(
                name="of plain Orbax",
                colour="green",
                shape="dots",
                values=_where(saves, depth, whole("orbax")),
            ),
            Series(
                name="may lack rows",
                colour="yellow",
                shape="rings",
                values=_where(
                    saves, depth, lambda save: save.may_lack_rows and not save.problem
                ),
            ),
            Series(
                name="cannot be restored",
                colour="red",
                shape="crosses",
                values=_where(saves, depth, lambda save: bool(save.problem)),
            ),
        ),
    )


def figures_of(course: Course, profile: Profile | None = None) -> list[tuple[str, str]]:
    """Key figures of a run, as pairs of a name and a text.

    Args:
        course: course of the run.
        profile: what its steps and saves take, as far as that is known.
    """
    root, kept = course.root, course.kept
    latest, held = root.latest_step, root.total_bytes
    secs = [save.secs for save in kept if save.secs is not None]
    restores = max((step.restores for step in root.steps), default=0)
    found = [
        ("steps", f"{len(root.steps):,}"),
        ("a restore takes", "none" if latest is None else f"step {latest}"),
        ("bytes held", amount(held)),
    ]
    if kept:
        found += [
            ("as plain full saves", amount(course.plain_bytes)),
            ("times smaller", f"{course.plain_bytes / max(1, held):.1f}"),
        ]
    if secs:
        found.append(("median seconds", told(statistics.median(secs), "secs")))
    if profile is not None:
        step, share = profile.step.fixed, told(profile.contention, "share")
        found.append(("a train step", told(step, "secs")))
        found.append(("slower beside a save", share))
    lost = sum(bool(save.problem) for save in course.saves)
    found.append(("restores", f"{restores:,}"))
    return [*found, ("cannot be restored", f"{lost:,}")] if lost else found
