"""A run as one SVG, which needs nothing beside it: the panels of the page, one below the other.

Its classes have the colours themselves: most programs that convert SVG do not know variables.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Sequence

from cnr_jax.cli.printing import printable
from cnr_jax.cli.report import svg
from cnr_jax.cli.report.page import style
from cnr_jax.cli.report.panels import Panel, panels_of, restores_of
from cnr_jax.repository.course import Course

_MARGIN, _TITLE, _LINE = 16, 34, 20
# Widths in a legend: of a letter, about, where wide ones count as two; of a swatch; of a gap.
_LETTER, _SWATCH, _GAP = 7.2, 36, 20


def picture_of(course: Course) -> str:
    """SVG picture of a run. The same course gives the same picture."""
    steps = [save.step for save in course.saves]
    restores = restores_of(course.saves)
    below, drawn = float(_TITLE + _MARGIN), list[str]()
    for number, panel in enumerate(panels_of(course)):
        lines, height = _panel(panel, steps, restores, f"chart-{number}", below)
        drawn += lines
        below += height
    width, height = svg.WIDTH + 2 * _MARGIN, below + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}"'
            f' width="{width}" height="{height:.0f}" role="img">',
            f"<style>{_plain_style()}</style>",
            '<rect class="paper" width="100%" height="100%"/>',
            f'<text class="title" x="{_MARGIN}" y="{_TITLE}">{_text(course.root.root)}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(
    panel: Panel,
    steps: Sequence[int],
    restores: Sequence[int],
    name: str,
    top: float,
) -> tuple[list[str], float]:
    """Draws a panel from `top` on; returns its height too."""
    lines = [
        f'<text class="head" id="{name}-title" x="{_MARGIN}" y="{top + _LINE:.0f}">'
        f"{_text(panel.title)}</text>",
        f'<desc id="{name}-about">{_text(panel.about)}</desc>',
    ]
    at, y = float(_MARGIN), top + 2 * _LINE
    for series in panel.series:
        width = _SWATCH + _LETTER * _letters(series.name) + _GAP
        if at > _MARGIN and at + width > svg.WIDTH:
            at, y = float(_MARGIN), y + _LINE
        lines.append(
            f'<svg x="{at:.0f}" y="{y - 11:.0f}" width="28" height="14">'
            f"{svg.swatch(series)}</svg>"
            f'<text class="name" x="{at + _SWATCH:.0f}" y="{y:.0f}">{_text(series.name)}</text>'
        )
        at += width
    y += _LINE / 2
    lines += [
        f'<svg x="{_MARGIN}" y="{y:.0f}" width="{svg.WIDTH}" height="{svg.HEIGHT}">',
        svg.drawn(panel, steps, restores, name),
        "</svg>",
    ]
    return lines, y + svg.HEIGHT + _LINE / 2 - top


def _letters(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide


def _text(words: object) -> str:
    return html.escape(printable(str(words), "utf-8"))


def _plain_style() -> str:
    """CSS classes of the page in its light colours, without variables."""
    text = style()
    values = dict(re.findall(r"--([\w-]+): ([^;}]+?)\s*[;}]", "".join(_roots(text))))
    rules = re.sub(r"var\(--([\w-]+)\)", lambda found: values[found[1]], _no_dark(text))
    own = "svg text { font: 13px system-ui, sans-serif } .title { font-size: 18px }"
    return (
        f"{rules}\n{own} .head {{ font-size: 15px }}"
        f" .title, .head, .name {{ fill: {values['ink']} }}"
        f" .paper {{ fill: {values['paper']} }}"
    )


def _roots(text: str) -> Iterator[str]:
    """Finds the `:root` rules of the light page."""
    yield from re.findall(r"^:root \{[^}]*\}", text, flags=re.M)


def _no_dark(text: str) -> str:
    """Removes the rules for dark mode and for print from a style, and its variables."""
    kept = (line for line in text.splitlines() if not line.startswith(("@", ":root")))
    return "\n".join(kept)
