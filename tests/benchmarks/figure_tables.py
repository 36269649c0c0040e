"""Puts the figures in `results/` into the tables of docs/accuracy.md.

    python tests/benchmarks/figure_tables.py

A drawing holds what was measured, to four digits and more: the places of its points. Tables are
read from these, so that a page cannot say other than the picture beside it; that of `harm.py` is
read from `harm.json`, of which its picture is drawn. Each stands between
`<!-- table: NAME -->` and `<!-- end -->`. Run it after `figure_plots.py` has drawn anew;
tests/test_figures.py fails where that was forgotten.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
# The paper's, in percent: more is marked where noise does not hide it.
MARK = 0.01
Rows = list[list[str]]


def tables() -> dict[str, str]:
    """All tables in Markdown, by name."""
    return {**_codec_errors(), **_accuracy(), "harm": harm(RESULTS / "harm.json")}


def filled(text: str) -> str:
    """A page with its tables as the drawings have them.

    Raises:
        KeyError: if a drawing has no table of that name.
    """
    found = tables()
    return re.sub(
        r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)",
        lambda block: f"{block[1]}\n{found[block[2]]}\n\n{block[3]}",
        text,
        flags=re.DOTALL,
    )


def _codec_errors() -> dict[str, str]:
    """By data set and bits: l2 error by codec and dim, as a share of plain asymmetric."""
    svg = (RESULTS / "codec_errors.svg").read_text()
    schemes = re.findall(r"<text[^>]*>([^<]*)</text>", svg.split('id="legend_1"')[1])
    ticks = re.findall(r">(\d+)</text>", _axes(svg)[-1])
    found: dict[str, str] = {}
    colors: dict[str, str] = {}
    for axes in _axes(svg):
        title = next(t for t in _texts(axes) if t.endswith("bits"))
        value = _scale([(y, float(v)) for y, v in _labels(axes) if v])
        rows: Rows = []
        lines = re.findall(r'd="([^"]*)"[^>]*stroke: (#\w+); stroke-width: 1.5', axes)
        for path, color in lines:
            if color not in colors:
                colors[color] = schemes[len(colors)]
            rows.append([colors[color], *(f"{value(y):.3f}" for _, y in _points(path))])
        header = ["codec", *(f"dim {dim}" for dim in ticks)]
        found[f"errors, {title}"] = _markdown(header, rows)
    return found


def _accuracy() -> dict[str, str]:
    """By metric: percent worse than without restores, by bits and number of restores."""
    svg = (RESULTS / "accuracy_after_restores.svg").read_text()
    widths = re.findall(r"<text[^>]*>([^<]*)</text>", svg.split('id="legend_1"')[1])
    found: dict[str, str] = {}
    for axes in _axes(svg):
        title = next(t for t in _texts(axes) if ", " in t)
        value = _symlog({_power(v): y for y, v in _labels(axes)})
        xs = [(x, text) for x, text in _labels(axes, "xtick") if text]
        rows: Rows = []
        bars = re.split(r'<g id="LineCollection_\d+">', axes)[1:]
        for width, bar in zip(widths, bars, strict=True):
            cells = dict.fromkeys((text for _, text in xs), "")
            for path in re.findall(r'd="([^"]*)"', bar.split("</g>")[0]):
                (x, one), (_, other) = _points(path)
                nearest = min(xs, key=lambda tick: abs(tick[0] - x))[1]
                cells[nearest] = _interval(*sorted((value(one), value(other))))
            rows.append([f'`"{width}"`' if width == "auto" else width, *cells.values()])
        plural = [f"{n} restore{'s' * (n != '1')}" for _, n in xs]
        found[title] = _markdown(["width", *plural], rows)
    return found


def harm(summary: Path) -> str:
    """By training and restores: points of AUC lost, by bits.

    Args:
        summary: what `harm.py` wrote.
    """
    cells = json.loads(summary.read_text())["cells"]
    widths = (2, 3, 4, 8, "auto")
    rows: dict[tuple[str, ...], dict[Any, Any]] = {}
    for cell in cells:
        names = ("model", "optimizer", "steps", "restores", "apart", "where")
        key = tuple(str(cell[name]) for name in names)
        rows.setdefault(key, {})[cell["bits"]] = cell
    header = ["model", "optimizer", "steps", "restores", "steps apart", "where"]
    header += ["noise at 4 bits"]
    header += [f"{bits} bits" if bits != "auto" else '`"auto"`' for bits in widths]
    lines = []
    for key, found in rows.items():
        noise = found[4]["noise"] if 4 in found else None
        line = [*key, "" if noise is None else f"{noise:.2g}"]
        for bits in widths:
            cell = found.get(bits)
            if cell is None:
                line.append("")
                continue
            mean, margin = cell["held_out_auc"]
            shown = _interval(mean - margin, mean + margin, mark=math.inf)
            line.append(shown + " !" * cell["harmful"])
        lines.append(line)
    return _markdown(header, lines)


def _interval(low: float, high: float, mark: float = MARK) -> str:
    """Mean and half an interval, such as `0.084 ± 0.076 !`."""
    mean, margin = (low + high) / 2, (high - low) / 2
    form = "{:.2f}" if margin >= 0.1 else "{:.3f}"
    shown = form.format(mean)
    shown = shown.lstrip("-") if float(shown) == 0 else shown
    worse = " !" if mean > mark and low > 0 else ""
    return f"{shown} ± {form.format(margin)}{worse}"


def _axes(svg: str) -> list[str]:
    return [
        part.split('<g id="legend_1"')[0]
        for part in re.split(r'<g id="axes_\d+">', svg)[1:]
    ]


def _texts(axes: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", axes)


def _labels(axes: str, kind: str = "ytick") -> Iterator[tuple[float, str]]:
    """Where an axis has ticks, and what is written there."""
    for tick in re.split(rf'<g id="{kind}_\d+">', axes)[1:]:
        at = re.search(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', tick)
        text = re.search(r"mathdefault\{(.*)\}\$|<text[^>]*>([^<]*)</text>", tick)
        assert at is not None
        place = float(at[1] if kind == "xtick" else at[2])
        yield place, (text[1] or text[2]) if text else ""


def _points(path: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)
    ]


def _scale(ticks: list[tuple[float, float]]) -> Callable[[float], float]:
    (low, least), (high, most) = ticks[0], ticks[-1]
    return lambda y: least + (y - low) * (most - least) / (high - low)


def _power(text: str) -> float:
    """What a label such as `-10^{-2}` means."""
    found = re.fullmatch(r"(-?)10\^\{(-?\d+)\}", text)
    return (-1 if found[1] else 1) * 10.0 ** int(found[2]) if found else float(text)


def _symlog(ticks: dict[float, float]) -> Callable[[float], float]:
    """Values of an axis with equal steps up to the mark, logarithmic beyond it."""
    zero, mark = ticks[0.0], ticks[MARK] - ticks[0.0]
    decade = ticks[10 * MARK] - ticks[MARK]

    def value(y: float) -> float:
        steps = (y - zero) / mark
        if abs(steps) <= 1:
            return MARK * steps
        beyond = (abs(steps) - 1) * mark / decade
        return MARK * 10**beyond * (1 if steps > 0 else -1)

    return value


def _markdown(header: list[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
