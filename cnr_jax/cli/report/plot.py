"""A run as a picture by matplotlib: the panels of the page, one below the other."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from cnr_jax import errors
from cnr_jax.cli.printing import printable
from cnr_jax.cli.report.axes import DASHES, axis_of, named_places
from cnr_jax.cli.report.course import Course
from cnr_jax.cli.report.panels import (
    COLOURS,
    Panel,
    Series,
    panels_of,
    restores_of,
    tick_told,
)

# Of one panel, in inches.
_WIDTH, _HEIGHT = 10.0, 2.6


def check_matplotlib() -> None:
    """Checks that there is something to draw with.

    Raises:
        CnrError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.CnrError(
            "matplotlib is not installed; hint: pip install 'cnr-jax[plot]', or"
            " `cnr-jax report`, which needs nothing",
            kind="not_installed",
        )


def picture_of(course: Course, form: Literal["png", "svg"]) -> bytes:
    """The picture of a run, as the contents of a file. The same course gives the same bytes."""
    import matplotlib  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    panels = panels_of(course)
    # Names are of whoever wrote the root: no formulas in them, and any letters.
    plain: dict[Any, Any] = {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "cnr_jax",
    }
    with matplotlib.rc_context(plain), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        rows = max(1, len(panels))
        figure = Figure(figsize=(_WIDTH, _HEIGHT * rows), layout="constrained")
        figure.suptitle(printable(course.root.root, "utf-8"))
        if panels:
            axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
            for axis, panel in zip(axes, panels, strict=True):
                _draw(axis, panel, course)
        file = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(file, format=form, dpi=120, metadata=metadata)
    return file.getvalue()


def _draw(axis: Any, panel: Panel, course: Course) -> None:
    steps = [save.step for save in course.saves]
    axis.set_title(panel.title, loc="left", fontsize="medium")
    if panel.logarithmic:
        axis.set_yscale("log")
    heights: dict[int, float] = {}
    below = [0.0] * len(steps)
    handles: list[Any] = []
    for series in panel.series:
        found = enumerate(series.values)
        heights.update((place, value) for place, value in found if value is not None)
        handles.append(_drawn(axis, series, below))
    for parent, child in panel.links:
        if parent in heights and child in heights:
            path = (
                [parent, parent, child],
                [heights[parent], heights[child], heights[child]],
            )
            axis.plot(*path, color=COLOURS["grey"][0], linewidth=0.7, zorder=1)
    for place in restores_of(course.saves):
        axis.axvline(place - 0.5, color="black", linewidth=1, linestyle=":")
    scale = axis_of(panel)
    # With room for marks that lie on the edge.
    axis.set_ylim(scale.low, scale.high * (1.5 if panel.logarithmic else 1.05))
    axis.set_yticks(scale.ticks, [tick_told(tick, panel.unit) for tick in scale.ticks])
    axis.minorticks_off()
    axis.set_xlim(-0.5, len(steps) - 0.5)
    places = named_places(len(steps))
    axis.set_xticks(places, [str(steps[place]) for place in places])
    axis.grid(axis="y", alpha=0.3)
    _legend(axis, handles, [series.name for series in panel.series])


def _legend(axis: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    labels = [printable(name, "utf-8") for name in names]
    axis.legend(
        handles,
        labels,
        fontsize="small",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )


def _drawn(axis: Any, series: Series, below: list[float]) -> Any:
    """Draws a series; `below` is how high the bars stand so far. Returns what a legend shows."""
    colour = COLOURS[series.colour][0]
    known = [(i, v) for i, v in enumerate(series.values) if v is not None]
    places, values = [i for i, _ in known], [v for _, v in known]
    if series.shape == "bars":
        bottom = [below[i] for i in places]
        for i, v in known:
            below[i] += v
        return axis.bar(places, values, 0.8, bottom, color=colour)
    if series.shape in ("line", "area"):
        gaps = [float("nan") if v is None else v for v in series.values]
        if series.shape == "area":
            axis.fill_between(range(len(gaps)), gaps, color=colour, alpha=0.2)
        line = (0, DASHES[series.dashes % len(DASHES)] or None)
        single = "." if len(known) == 1 else ""
        return axis.plot(gaps, color=colour, linestyle=line, marker=single)[0]
    marks = {"dots": "o", "squares": "s", "rings": "o", "crosses": "x"}
    face = "none" if series.shape == "rings" else colour
    return axis.plot(
        places,
        values,
        color=colour,
        linestyle="none",
        marker=marks[series.shape],
        markersize=4,
        markerfacecolor=face,
        zorder=3,
    )[0]
