"""A run as one page of HTML, which needs nothing beside it: no network, fonts or images.

Names of tables, folders and errors come from whoever wrote the root. They are escaped. Should one
ever not be, the page's policy keeps it from running: only its own script may, by its digest.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import importlib.resources
from collections.abc import Iterator, Sequence

from cnr_jax.cli.printing import printable
from cnr_jax.cli.report import svg
from cnr_jax.cli.report.panels import (
    COLOURS,
    Panel,
    figures_of,
    panels_of,
    restores_of,
    told,
)
from cnr_jax.goodput.cost import Cost
from cnr_jax.goodput.profile import Profile
from cnr_jax.repository.course import ROWS, Course, Save
from cnr_jax.repository.description import (
    TableDescription,
    amount,
    footer,
    step_lines,
)

# Said in the place of a cost.
TOO_FEW = "What a month of training costs is not known yet: too few saves tell."


def page_of(
    course: Course,
    now: datetime.datetime,
    profile: Profile | None = None,
    cost: Cost | str | None = None,
) -> str:
    """HTML page of a run.

    Args:
        course: course of the run.
        now: time at which it was read, in UTC.
        profile: what its steps and saves take, as far as that was measured.
        cost: what a month of it costs, or why that is not known; None: nobody asks.
    """
    css, script = style(), _own_file("page.js")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none';"
        f" style-src '{_digest(css)}'; script-src '{_digest(script)}'"
    )
    root = course.root
    title = f"Report of {_text(root.root)}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{css}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{title}</h1>",
            *(f"<p>{_text(line)}</p>" for line in footer(root)),
            *_figures(course, profile),
            *_problems(course.saves),
            *_charts(course),
            *_cost(cost),
            *_tables(course),
            *_saves(course.saves),
            *_as_text(course),
            "</main>",
            f"<footer>Made by <code>cnr-jax report</code>, {now:%Y-%m-%d %H:%M} UTC. Times are"
            " UTC; bytes are those of whole steps, in thousands (kB, MB, GB).</footer>",
            f"<script>{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def _text(words: object) -> str:
    """Text of a page or of an attribute: markup escaped, invisible characters spelled out."""
    return html.escape(printable(str(words), "utf-8"))


def _own_file(name: str) -> str:
    return (
        importlib.resources.files("cnr_jax.cli.report")
        .joinpath(name)
        .read_text("utf-8")
    )


def style() -> str:
    """CSS of the page, and of the drawings in it."""
    light, dark = (
        " ".join(f"--{name}: {pair[which]};" for name, pair in COLOURS.items())
        for which in (0, 1)
    )
    classes = "".join(f".{name} {{ color: var(--{name}) }}\n" for name in COLOURS)
    return (
        f":root {{ {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"{classes}{_own_file('page.css')}"
    )


def _digest(text: str) -> str:
    found = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(found).decode()}"


def _figures(course: Course, profile: Profile | None) -> Iterator[str]:
    yield '<dl class="figures">'
    for name, figure in figures_of(course, profile):
        yield f"<div><dt>{name}</dt><dd>{_text(figure)}</dd></div>"
    yield "</dl>"


def _problems(saves: Sequence[Save]) -> Iterator[str]:
    found = [(save, save.problem) for save in saves if save.problem]
    suspect = "an audit found that rows may be missing in it"
    found += [(s, suspect) for s in saves if s.may_lack_rows and not s.problem]
    if not found:
        return
    yield '<section class="problems"><strong>What is wrong</strong><ul>'
    for save, problem in found:
        yield f"<li>step {save.step}: {_text(problem)}</li>"
    yield "</ul></section>"


def _charts(course: Course) -> Iterator[str]:
    steps = [save.step for save in course.saves]
    restores = restores_of(course.saves)
    if restores:
        yield "<p>Dotted lines from top to bottom: the run was restored there.</p>"
    for number, panel in enumerate(panels_of(course)):
        yield from _chart(panel, steps, restores, f"chart-{number}")


def _chart(
    panel: Panel, steps: Sequence[int], restores: Sequence[int], name: str
) -> Iterator[str]:
    yield f'<figure><h2 id="{name}-title">{_text(panel.title)}</h2>'
    yield f'<p id="{name}-about">{_text(panel.about)}</p>'
    yield '<ul class="legend">'
    for series in panel.series:
        yield f"<li>{svg.swatch(series)}{_text(series.name)}</li>"
    yield "</ul>"
    yield svg.drawn(panel, steps, restores, name)
    yield "</figure>"


def _cost(cost: Cost | str | None) -> Iterator[str]:
    """What a month of training costs."""
    if cost is None or isinstance(cost, str):
        yield from () if cost is None else (f"<p>{_text(cost)}</p>",)
        return
    (_, *heads), *rows = cost.rows
    caption = f"A month of training, {cost.basis}"
    yield from _table("cost", caption, ["", *(f"{h}#" for h in heads)], rows)


def _table(
    name: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    """HTML table; a head that ends in `#` has figures below it, one in `...` long texts."""
    classes = [
        ' class="number"'
        if head.endswith("#")
        else ' class="text"'
        if head.endswith("...")
        else ""
        for head in heads
    ]
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}">'
    yield f'<table id="{name}"><caption>{_text(caption)}</caption><thead><tr>'
    for head, given in zip(heads, classes, strict=True):
        yield f'<th scope="col"{given}>{_text(head.rstrip("#."))}</th>'
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = zip(row, classes, strict=True)
        yield f"<tr>{''.join(f'<td{c}>{_text(cell)}</td>' for cell, c in cells)}</tr>"
    yield "</tbody></table></div>"


def _tables(course: Course) -> Iterator[str]:
    own = [step for step in course.root.steps if step.tables]
    if not own:
        return
    newest = max(own, key=lambda step: (step.generation, step.step))
    rows: list[list[str]] = []
    for table in newest.tables:
        held = [
            each
            for step in own
            if step.kind == "delta"
            for each in step.tables
            if each.name == table.name
        ]
        rows.append(_table_row(table, held))
    heads = ["table...", "rows#", "dtype", "codecs in deltas", "mean share#"]
    heads += ["highest share#", "bytes in deltas#", "of slots in deltas#"]
    yield "<h2>Tables</h2>"
    yield "<p>As the newest step names them; shares and bytes over all deltas.</p>"
    yield from _table("tables", "Tables of the run", heads, rows)


def _table_row(table: TableDescription, held: Sequence[TableDescription]) -> list[str]:
    shares = [each.saved_share for each in held]
    codecs = dict.fromkeys(codec for each in held for codec in each.leaves[0].codecs)
    return [
        table.name,
        f"{table.rows:,}",
        table.leaves[0].dtype,
        ", ".join(codecs),
        told(sum(shares) / len(shares), "share") if shares else "",
        told(max(shares), "share") if shares else "",
        amount(sum(each.table_bytes for each in held)) if held else "",
        amount(sum(each.slot_bytes for each in held)) if held else "",
    ]


def _saves(saves: Sequence[Save]) -> Iterator[str]:
    heads = ["step#", "kind", "parent#", "branch#", "saved", "rows#", "bytes#"]
    heads += ["plain full save#", "times smaller#", "seconds#", "waited#"]
    heads += ["mean error#", "note..."]
    rows: list[list[str]] = []
    for save in saves:
        size, plain = save.total_bytes, save.plain_bytes
        smaller = f"{plain / max(1, size):.1f}" if plain and size is not None else ""
        notes = ["restored before it"] * save.restored
        rows_alone = ": bytes of its rows alone" if ROWS in save.parts else ""
        notes += [f"removed since{rows_alone}"] * (not save.kept)
        notes += ["may lack rows"] * save.may_lack_rows
        notes += [f"cannot be restored: {save.problem}"] * bool(save.problem)
        rows.append(
            [
                str(save.step),
                save.kind,
                "" if save.parent is None else str(saves[save.parent].step),
                str(save.branch or ""),
                f"{save.saved_at:%Y-%m-%d %H:%M:%S}" if save.saved_at else "",
                f"{save.rows:,}" if size is not None else "",
                "" if size is None else amount(size),
                amount(plain) if plain else "",
                smaller,
                "" if save.secs is None else f"{save.secs:.3f}",
                "" if save.stall_secs is None else f"{save.stall_secs:.3f}",
                "" if save.mean_error is None else told(save.mean_error, "share"),
                "; ".join(notes),
            ]
        )
    yield "<h2>Saves</h2>"
    yield "<p>All that the charts show, a line for each save.</p>"
    yield from _table("saves", "Saves of the run, in order", heads, rows)


def _as_text(course: Course) -> Iterator[str]:
    lines = "\n".join(_text(line) for line, _ in step_lines(course.root))
    yield "<details><summary>Chain by chain, as <code>cnr-jax ls</code> lists it</summary>"
    yield '<div class="scroll" tabindex="0" role="region" aria-label="Chains">'
    yield f"<pre>{lines}</pre></div>"
    yield "</details>"
