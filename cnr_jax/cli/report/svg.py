"""A panel as SVG: a few paths, one for each series, coloured by classes of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cnr_jax.cli.report.axes import DASHES, Axis, axis_of, named_places
from cnr_jax.cli.report.panels import Panel, Series, Unit, tick_told

WIDTH, HEIGHT = 960, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 10, 24
_BASE = HEIGHT - _BOTTOM
# Patterns of dashes, by number.
_DASHES = tuple(" ".join(map(str, pattern)) for pattern in DASHES)


def drawn(
    panel: Panel, steps: Sequence[int], restores: Sequence[int], name: str
) -> str:
    """Draws a panel as an `svg` element.

    Args:
        panel: panel to be drawn, with a value for each save in at least one series.
        steps: number of each save, in order.
        restores: places of saves before which the run was restored.
        name: id of the element, by which others refer to it.
    """
    axis = axis_of(panel)
    wide = (WIDTH - _LEFT - _RIGHT) / len(steps)

    def x(place: int) -> float:
        return _LEFT + (place + 0.5) * wide

    lines = [
        f'<svg id="{name}" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-labelledby="{name}-title {name}-about"'
        f' data-left="{_LEFT}" data-wide="{wide:.6g}" data-span="{_TOP}V{_BASE}">',
        *_grid(axis, panel.unit),
        f'<text class="beside" x="{_LEFT - 30}" y="{HEIGHT - 8}">step</text>',
        *(
            f'<text class="below" x="{x(place):.1f}" y="{HEIGHT - 8}">{steps[place]}</text>'
            for place in named_places(len(steps))
        ),
    ]
    if restores:
        path = "".join(
            f"M{x(place) - wide / 2:.1f} {_TOP}V{_BASE}" for place in restores
        )
        lines.append(f'<path class="restores" d="{path}"/>')
    if panel.links:
        lines.append(f'<path class="links" d="{_links(panel, axis, x)}"/>')
    below = [0.0] * len(steps)  # height of the bars of each save so far
    for each in panel.series:
        lines += _drawn(each, axis, x, wide, below)
    return "\n".join([*lines, "</svg>"])


def _y(axis: Axis, value: float) -> float:
    """Vertical position of a value, from the top."""
    return _BASE - axis.height_of(value) * (_BASE - _TOP)


def _grid(axis: Axis, unit: Unit) -> Iterator[str]:
    for tick in axis.ticks:
        y = _y(axis, tick)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'
        yield f'<text class="beside" x="{_LEFT - 8}" y="{y + 4:.1f}">{tick_told(tick, unit)}</text>'


def _links(panel: Panel, axis: Axis, x: Callable[[int], float]) -> str:
    heights: dict[int, float] = {}
    for each in panel.series:
        found = enumerate(each.values)
        heights.update((place, value) for place, value in found if value is not None)
    return "".join(
        f"M{x(parent):.1f} {_y(axis, heights[parent]):.1f}"
        f"V{_y(axis, heights[child]):.1f}H{x(child):.1f}"
        for parent, child in panel.links
        if parent in heights and child in heights
    )


def _drawn(
    series: Series,
    axis: Axis,
    x: Callable[[int], float],
    wide: float,
    below: list[float],
) -> Iterator[str]:
    """Draws the paths of a series; `below` is the height of the bars so far."""
    known = [(i, v) for i, v in enumerate(series.values) if v is not None]
    colour, size = series.colour, max(3.0, min(9.0, 0.8 * wide))
    if series.shape == "bars":
        path = ""
        for place, value in known:
            base, below[place] = below[place], below[place] + value
            if value:
                path += (
                    f"M{x(place):.1f} {_y(axis, base):.1f}V{_y(axis, below[place]):.1f}"
                )
        # Gaps where there is room for them.
        width = min(40.0, 0.8 * wide) if wide > 4 else wide + 0.1
        yield f'<path class="bars {colour}" stroke-width="{width:.1f}" d="{path}"/>'
    elif series.shape in ("line", "area"):
        runs = list(_runs(known))
        path = "".join(_line(run, axis, x) for run in runs)
        if series.shape == "area":
            under = "".join(
                f"{_line(run, axis, x)}V{_BASE}H{x(run[0][0]):.1f}Z" for run in runs
            )
            yield f'<path class="area {colour}" d="{under}"/>'
        dashes = _DASHES[series.dashes % len(DASHES)]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<path class="line {colour}"{dashed} d="{path}"/>'
        # A value between two gaps has no line.
        single = "".join(_dot(*run[0], axis, x) for run in runs if len(run) == 1)
        if single:
            yield f'<path class="dots {colour}" stroke-width="{size:.1f}" d="{single}"/>'
    elif series.shape == "crosses":
        path = "".join(
            f"M{x(i) - 4:.1f} {_y(axis, v) - 4:.1f}l8 8m-8 0l8-8" for i, v in known
        )
        yield f'<path class="line {colour}" d="{path}"/>'
    else:
        path = "".join(_dot(i, v, axis, x) for i, v in known)
        form = "squares" if series.shape == "squares" else "dots"
        yield f'<path class="{form} {colour}" stroke-width="{size:.1f}" d="{path}"/>'
        if series.shape == "rings":
            inner = 0.5 * size
            yield f'<path class="dots hole" stroke-width="{inner:.1f}" d="{path}"/>'


def _dot(place: int, value: float, axis: Axis, x: Callable[[int], float]) -> str:
    # A line without length: only its ends are drawn, round or square, as wide as the line.
    return f"M{x(place):.1f} {_y(axis, value):.1f}h.01"


def _line(
    run: Sequence[tuple[int, float]], axis: Axis, x: Callable[[int], float]
) -> str:
    points = [f"{x(place):.1f} {_y(axis, value):.1f}" for place, value in run]
    return f"M{'L'.join(points)}"


def _runs(known: Sequence[tuple[int, float]]) -> Iterator[list[tuple[int, float]]]:
    """Splits values into runs of neighbouring places."""
    run: list[tuple[int, float]] = []
    for place, value in known:
        if run and place != run[-1][0] + 1:
            yield run
            run = []
        run.append((place, value))
    if run:
        yield run


def swatch(series: Series) -> str:
    """Small picture for a legend that shows how a series is drawn."""
    colour = series.colour
    dashes = _DASHES[series.dashes % len(DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    inner = {
        "line": f'<path class="line {colour}"{dashed} d="M1 7H27"/>',
        "area": f'<path class="area {colour}" d="M1 13V7H27V13Z"/>'
        f'<path class="line {colour}" d="M1 7H27"/>',
        "bars": f'<path class="bars {colour}" stroke-width="12" d="M14 14V1"/>',
        "dots": f'<path class="dots {colour}" stroke-width="9" d="M14 7h.01"/>',
        "squares": f'<path class="squares {colour}" stroke-width="9" d="M14 7h.01"/>',
        "rings": f'<path class="dots {colour}" stroke-width="9" d="M14 7h.01"/>'
        '<path class="dots hole" stroke-width="4.5" d="M14 7h.01"/>',
        "crosses": f'<path class="line {colour}" d="M10 3l8 8m-8 0l8-8"/>',
    }[series.shape]
    return f'<svg class="swatch" viewBox="0 0 28 14" aria-hidden="true">{inner}</svg>'
