"""The pictures of a run: what they show, that names do not act in them, what is written where."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import html.parser
import importlib.resources
import itertools
import json
import os
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.cli.report.page import page_of
from cnr_jax.cli.report.panels import panels_of
from cnr_jax.format.names import abandoned
from cnr_jax.repository.course import course_of
from cnr_jax.repository.description import amount

# What a page is made of. None of them loads anything; `script` and `style` go by their digests.
TAGS = set(
    "html head meta title style body main h1 h2 p code dl div dt dd section strong ul li"
    " figure svg path text table caption thead tbody tr th td details summary pre footer"
    " script".split()
)


class Page(html.parser.HTMLParser):
    """A page taken apart: its tags with their attributes, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path"):
            self.open.append(tag)
        if tag == "table":
            self.tables[dict(attrs)["id"] or ""] = []
        if tag == "tr":
            list(self.tables.values())[-1].append([])
        if tag in ("td", "th"):
            list(self.tables.values())[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        self.texts[tag] = self.texts.get(tag, "") + data
        if tag in ("td", "th"):
            list(self.tables.values())[-1][-1][-1] += data

    def column(self, table: str, name: str) -> list[str]:
        head, *rows = self.tables[table]
        return [row[head.index(name)] for row in rows]


def call(*words: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def report(root: Path, *words: Any) -> Page:
    output = root.with_name("report.html")
    code, out, err = call("report", root, "-o", output, "--force", *words)
    assert (code, err) == (0, ""), err
    assert out.startswith(f"{output}: ")
    return Page(output.read_text("utf-8"))


def tree(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (root, *root.rglob("*"))}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the root lies that is saved once for all tests."""
    return tmp_path_factory.mktemp("saved") / "root"


@pytest.fixture
def root(tiny_run: Any, first: Path, tmp_path: Path) -> Path:
    """Steps 0 to 3, after a restore 4 and 5; each on the one before."""
    if not first.exists():
        run = tiny_run()
        for steps in (range(4), range(4, 6)):
            with run.open(first) as manager:
                if steps[0]:
                    run.restore(manager, None)
                run.run(manager, steps)
    return Path(shutil.copytree(first, tmp_path / "root"))


def test_prices_of_a_run_that_does_not_tell_and_of_charts(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root) as manager:
        run.run(manager, range(2))
    prices = Path(__file__).parents[2] / "examples" / "prices.toml"
    page = report(root, "--prices", prices)
    assert "cost" not in page.tables and "is not known yet: too few" in page.texts["p"]
    code, _, err = call("report", root, "-o", tmp_path / "a", "--prices", "none.toml")
    assert code != 0 and "there is no file of prices" in err
    svg = call("report", root, "-o", tmp_path / "a.svg", "--svg", "--prices", prices)
    assert svg[0] != 0 and "--prices is for the page" in svg[2]
    alone = call("report", root, "-o", tmp_path / "b", "--accelerators", 8)
    assert alone[0] != 0 and "what --prices tells" in alone[2]
    assert not (tmp_path / "a.svg").exists()


def test_a_page_shows_the_saves_of_a_run(root: Path) -> None:
    before = tree(root)
    page = report(root)
    assert tree(root) == before
    found = cnr.describe(root)
    assert page.column("saves", "step") == [str(step) for step in range(6)]
    assert page.column("saves", "parent") == ["", "0", "1", "2", "3", "4"]
    sizes = [amount(step.total_bytes) for step in found.steps]
    assert page.column("saves", "bytes") == sizes
    notes = page.column("saves", "note")
    assert [i for i, note in enumerate(notes) if note == "restored before it"] == [4]
    assert page.column("tables", "table") == ["user", "item"]
    charts = [attrs for tag, attrs in page.tags if attrs.get("class") == "chart"]
    assert len(charts) == 6
    # A line through the charts where the run was restored, between the fourth save and the fifth.
    left, wide = (float(charts[0][f"data-{name}"] or 0) for name in ("left", "wide"))
    marks = [a["d"] for tag, a in page.tags if a.get("class") == "restores"]
    assert len(marks) == 6
    assert {re.findall(r"M([\d.]+)", mark or "")[0] for mark in marks} == {
        f"{left + 4 * wide:.1f}"
    }
    assert sum(tag == "li" for tag, _ in page.tags) >= 6
    assert "restore(None) takes 5" in page.texts["p"]


def test_panels_hold_what_manifests_tell(root: Path) -> None:
    found = cnr.describe(root)
    panels = {panel.title: panel for panel in panels_of(course_of(found))}
    sizes = [step.total_bytes for step in found.steps]
    by_name = {
        (title, series.name): series.values
        for title, panel in panels.items()
        for series in panel.series
    }
    assert by_name["Bytes of each save", "full"] == (sizes[0], *[None] * 5)
    assert by_name["Bytes of each save", "delta"] == (None, *sizes[1:])
    assert by_name["Capacity", "as they are"][-1] == sum(sizes) == found.total_bytes
    plain = [step.state_bytes for step in found.steps]
    assert by_name["Capacity", "had all been plain full saves"][-1] == sum(plain)
    user = [step.tables[0].saved_rows / 64 for step in found.steps]
    assert by_name["Share of rows in deltas, by table", "user"] == (None, *user[1:])
    assert by_name["Chains", "delta"] == (None, 2, 3, 4, 5, 6)
    assert panels["Chains"].links == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    parts = [by_name["What the bytes are", p] for p in ("tables", "slots", "dense")]
    first = found.steps[0]
    assert [part[0] for part in parts] == [
        first.table_bytes,
        first.slot_bytes,
        first.dense_bytes,
    ]


def test_saves_that_retention_removed_are_shown_from_histories(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    orbax = {"max_to_keep": 2}
    rows: list[int] = []
    heard = {"on_save": lambda report: rows.append(report.rows)}
    with run.open(root, orbax, policy=cnr.OneShot(), **heard) as manager:
        run.run(manager, range(6))
    kept = [step.step for step in cnr.describe(root).steps]
    assert kept == [0, 4, 5]
    page = report(root)
    assert page.column("saves", "step") == [str(step) for step in range(6)]
    gone = [i for i, n in enumerate(page.column("saves", "note")) if "removed" in n]
    assert gone == [1, 2, 3]
    assert page.column("saves", "rows")[1:4] == [f"{n:,}" for n in rows[1:4]]


def test_metrics_tell_of_phases_and_of_removed_saves(
    tiny_run: Any, tmp_path: Path
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    options = {"policy": cnr.OneShot(), "metrics": True, "codec": None, "bits": 4}
    reports: list[cnr.SaveReport] = []
    with run.open(
        root, {"max_to_keep": 2}, on_save=reports.append, **options
    ) as manager:
        run.run(manager, range(6))
    # What no save has noted changes nothing, and does not fail.
    line = {"event": "save", "run": cnr.describe(root).steps[0].run, "generation": 1}
    with (root / "cnr_jax.metrics.jsonl").open("a") as file:
        for more in ({"step": "9"}, {"step": 9, "kind": "<b>"}, {"step": 1e400}, {}):
            file.write(json.dumps({**line, **more}) + "\n")
        file.write(json.dumps({**line, "run": "0" * 32, "step": 9, "kind": "full"}))
    page = report(root)
    assert page.column("saves", "step") == [str(step) for step in range(6)]
    gone = [i for i, n in enumerate(page.column("saves", "note")) if n]
    assert gone == [1, 2, 3]
    assert set(page.column("saves", "note")) == {"", "removed since"}
    sizes = [amount(each.total_bytes) for each in reports]
    assert page.column("saves", "bytes") == sizes
    waited = [f"{each.blocking_secs:.3f}" for each in reports]
    assert page.column("saves", "waited") == waited
    panels = {panel.title: panel for panel in panels_of(course_of(cnr.describe(root)))}
    phases = {
        series.name: series.values for series in panels["Seconds by phase"].series
    }
    assert phases["find"] == tuple(each.find_secs for each in reports)
    assert phases["commit"] == tuple(each.commit_secs for each in reports)
    means = panels["Error of rounding"].series[1]
    assert means.values == pytest.approx(
        [each.mean_row_error for each in reports], 1e-3
    )
    (shares,) = [
        series.values
        for series in panels["Share of rows in deltas, by table"].series
        if series.name == "user"
    ]
    assert None not in shares[1:]
    held = sum(each.total_bytes for each in reports if each.step in (0, 4, 5))
    assert panels["Capacity"].series[1].values[-1] == held
    # Earlier versions called what a plain full save would have written by another name.
    plain = page.column("saves", "plain full save")
    assert len(set(plain)) == 1
    file = root / "cnr_jax.metrics.jsonl"
    lines = file.read_text()
    file.write_text(lines.replace('"state_bytes"', '"full_fp32_bytes"'))
    assert report(root).column("saves", "plain full save") == plain
    # Of a removed save too it is told that the run was restored before it.
    with run.open(root, {"max_to_keep": 1}, **options) as manager:
        run.restore(manager, None)
        run.run(manager, range(6, 9))
    notes = report(root).column("saves", "note")
    assert notes[6] == "restored before it; removed since" and notes[8] == ""


# What may stand in any field of a line, as JSON.
ODD = [
    *("[]", "{}", "[[]]", '{"a": [1]}', "null", "true", '"x"', '"<b>"', '"\\ud800"'),
    *("NaN", "Infinity", "-Infinity", "1e400", "1e308", "1e-320", "1.5", "-1"),
    *("9223372036854775808", "1" * 400, "[null]", '[{"name": []}]', "[1, 2]"),
    '[{"name": "\\ud800\\u001b", "saved_share": 1e17}]',
]


def test_nothing_in_the_metrics_stops_a_report(
    tiny_run: Any, tmp_path: Path, unsynced: None
) -> None:
    """Each field of a save in turn is anything; and lines are none."""
    run, root = tiny_run(), tmp_path / "root"
    with run.open(root, metrics=True) as manager:
        run.run(manager, range(2))
    described = cnr.describe(root)
    path = root / "cnr_jax.metrics.jsonl"
    whole = path.read_bytes()
    fields = json.loads(whole.splitlines()[-1])
    table = fields["tables"][0]
    # A step, branch, run or kind that is none makes a line of no save.
    needed = {"step", "generation", "run", "kind", "event"}
    for odd in ODD:
        lines = [
            json.dumps({**fields, "step": 10 + i, field: "@"})
            for i, field in enumerate(fields)
        ]
        lines += [
            json.dumps({**fields, "step": 90 + i, "tables": [{**table, field: "@"}]})
            for i, field in enumerate(table)
        ]
        text = "\n".join(line.replace('"@"', odd) for line in lines)
        # And the last one unfinished, as of a program that was killed.
        path.write_bytes(whole + text.encode() + b'\n\xff\xfe\0\n{"event":"sa')
        found = course_of(described)
        page_of(found, datetime.datetime.now(datetime.UTC)).encode()
        there = {save.step for save in found.saves}
        for i, field in enumerate(fields):
            assert field in needed or 10 + i in there, (field, odd)
        assert there >= {0, 1, *range(90, 90 + len(table))}
        if odd == "[[]]":
            gone = {field for i, field in enumerate(fields) if 10 + i not in there}
            assert gone == needed
    # As the program.
    lines += ["[" * 100_000, '{"event":' * 50_000, "9" * 6000, "x" * 10_000_000]
    lines += ['{"event": "save", "step": 1, "step": []}', '{"event": "restore"}', ""]
    path.write_text("\n".join(lines).replace('"@"', "1e308"))
    assert len(report(root).column("saves", "step")) > len(fields)


def test_damage_is_named_and_marked(root: Path) -> None:
    (root / "2" / "default" / "manifest.json").write_text("{")
    next((root / "4" / "default" / "rows.p00000").rglob("c/0")).unlink()
    page = report(root)
    # Each step once, though a history tells of the one that cannot be read.
    assert page.column("saves", "step") == [str(step) for step in range(6)]
    notes = page.column("saves", "note")
    lost = [i for i, note in enumerate(notes) if "cannot be restored" in note]
    assert lost == [2, 3, 4, 5]
    assert "2/default/manifest.json is damaged" in page.texts["li"]
    (crosses,) = [
        series
        for panel in panels_of(course_of(cnr.describe(root)))
        for series in panel.series
        if series.name == "cannot be restored"
    ]
    assert [value is not None for value in crosses.values] == [False] * 2 + [True] * 4


def test_names_do_not_act_in_a_page(tmp_path: Path, unsynced: None) -> None:
    name = (
        "</title></script><script>alert(1)</script><img src=x onerror='a'>\"&\u202e$_{"
    )
    state = {name: jnp.ones((4, 2)), "_b": jnp.ones((4, 2))}
    tables = cnr.find_tables(state, [name, "_b"])
    options = cnr.Options(codec="raw", policy=cnr.OneShot())
    # A folder may have such a name too, but for the slash.
    root = tmp_path / "<script>alert(2)<script>\x1b'\""
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        for step in range(3):
            state = {**state, name: state[name].at[step].add(1.0)}
            manager.save(step, args=cnr.args.Save(state))
    (root / "7.abandoned-<script>").mkdir()
    text = page_of(course_of(cnr.describe(root)), datetime.datetime.now(datetime.UTC))
    page = Page(text)
    shown = name.replace("\u202e", r"\u202e")
    assert shown in page.column("tables", "table")
    assert {tag for tag, _ in page.tags} <= TAGS
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), tags.count("style"), tags.count("title")) == (1, 1, 1)
    loading = {"src", "href", "style", "action", "srcset", "data", "xlink:href"}
    names = {name for _, attrs in page.tags for name in attrs}
    assert not names & loading and not any(name.startswith("on") for name in names)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


def test_only_what_the_page_came_with_runs_in_it(root: Path) -> None:
    report(root)
    text = root.with_name("report.html").read_text("utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # As it is in the library: a script that is shown no name.
    own = importlib.resources.files("cnr_jax.cli.report") / "page.js"
    assert inner == own.read_text("utf-8")


def test_nothing_is_replaced_nor_written_into_a_root(root: Path) -> None:
    output = root.with_name("there.html")
    output.write_text("mine")
    before = tree(root)
    code, out, err = call("report", root, "-o", output)
    assert (code, out) == (1, "") and "is there already; --force replaces it" in err
    assert output.read_text() == "mine"
    manifest = root / "0" / "default" / "manifest.json"
    for inside in (manifest, root / "report.html", root):
        code, out, err = call("report", root, "-o", inside, "--force")
        assert (code, out) == (1, "") and "would lie in the root" in err
    code, _, err = call("report", root, "-o", root.parent / "no" / "x.html")
    assert code == 1 and "there is no folder" in err
    assert tree(root) == before
    os.mkfifo(root.with_name("pipe"))
    for forced in ([], ["--force"]):
        code, out, err = call("report", root, "-o", root.with_name("pipe"), *forced)
        assert (code, out) == (1, "") and "replace" in err
    root.with_name("pipe").unlink()
    assert call("report", root.parent / "missing", "-o", output, "--force")[0] == 10
    assert output.read_text() == "mine"
    code, out, _ = call("report", root, "-o", output, "--force", "--json")
    told = json.loads(out)
    assert code == 0 and (told["verb"], told["saves"]) == ("report", 6)
    assert told["bytes"] == output.stat().st_size
    assert sorted(path.name for path in root.parent.iterdir()) == ["root", "there.html"]


def test_a_root_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "root" / abandoned("3", 1, "0" * 32)).mkdir(parents=True)
    page = report(tmp_path / "root")
    assert page.column("saves", "step") == []
    assert "no steps" in page.texts["pre"]


def test_the_page_of_a_thousand_steps_is_small(root: Path) -> None:
    full, delta = cnr.describe(root).steps[:2]
    tables = [dataclasses.replace(delta.tables[0], name=f"t{i}") for i in range(26)]
    steps = [full]
    for step in range(1, 1000):
        each = dataclasses.replace(
            delta, step=step, parent=step - 1, tables=tuple(tables)
        )
        steps.append(each)
    found = dataclasses.replace(cnr.describe(root), steps=tuple(steps))
    text = page_of(course_of(found), datetime.datetime.now(datetime.UTC))
    assert len(Page(text).column("saves", "step")) == 1000
    assert len(text.encode()) < 2e6


# ---- a picture ------------------------------------------------------------------------------


def texts_in(svg: Path) -> set[str]:
    """Of one drawing, by itself."""
    data = svg.read_text()
    # What turns it into other forms knows no variables, and loads nothing.
    assert "var(" not in data and "@" not in data and "<script" not in data
    return {"".join(each.itertext()) for each in ET.fromstring(data).iter()}


def test_charts_are_one_svg(root: Path) -> None:
    svg = root.with_name("x.svg")
    assert call("report", root, "--svg", "-o", svg)[0] == 0
    first = svg.read_bytes()
    assert {"Chains", "user", "item", "a plain full save"} <= texts_in(svg)
    assert call("report", root, "--svg", "-o", svg, "--force")[0] == 0
    assert svg.read_bytes() == first


def test_panels_lie_below_each_other(root: Path) -> None:
    svg = root.with_name("x.svg")
    assert call("report", root, "--svg", "-o", svg)[0] == 0
    drawing = ET.fromstring(svg.read_bytes())
    name = "{http://www.w3.org/2000/svg}svg"
    tops = [
        float(e.get("y", "nan"))
        for e in drawing.findall(name)
        if e.get("height") == "220"
    ]
    assert len(tops) >= 4
    assert all(later - earlier > 220 for earlier, later in itertools.pairwise(tops))
    assert float(drawing.get("height", "0")) > tops[-1] + 220


def test_a_picture_shows_any_name(tmp_path: Path, unsynced: None) -> None:
    name = "_$\\frac{$</text>\u4e2d"
    state = {name: jnp.ones((4, 2))}
    tables = cnr.find_tables(state, [name])
    options = cnr.Options(codec="raw", policy=cnr.OneShot())
    with cnr.CheckpointManager(tmp_path / "r", tables=tables, options=options) as m:
        for step in range(2):
            m.save(step, args=cnr.args.Save({name: state[name] + step}))
    output = tmp_path / "x.svg"
    assert call("report", tmp_path / "r", "--svg", "-o", output)[::2] == (0, "")
    assert name in texts_in(output)
