"""Pages of figures say what was measured, name what exists, and agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FIGURE = r"\d[\d,]*(?:\.\d+)?"


def test_tables_of_accuracy_are_those_of_the_drawings(benchmarks: Any) -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    filled = benchmarks("figure_tables").filled(page)
    assert page.count("<!-- table: ") >= 8
    assert page == filled, "run tests/benchmarks/figure_tables.py"


def test_tables_from_drawings_are_what_was_printed(benchmarks: Any) -> None:
    # As the programs printed them of the runs that are drawn.
    tables = benchmarks("figure_tables").tables()
    assert "| greedy 45 | 0.795 | 0.757 |" in tables["errors, flights-3m, 2 bits"]
    assert "| 0.084 ± 0.076 ! | 0.22 ± 0.14 ! |" in tables["lifetime, AUC"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_and_commands_of_pages_exist(page: Path) -> None:
    code = re.findall(
        r"`([^`\n]+)`|^((?:python|\.venv/bin/python) .*)$", page.read_text(), re.M
    )
    found = re.findall(
        r"(?<![\w/.])(?:cnr_jax|tests|examples|docs|\.ci)/[\w./-]*",
        "\n".join(map("\n".join, code)),
    )
    missing = [path for path in found if not (ROOT / path).exists()]
    assert not missing


def test_figures_beside_claims_stand_where_they_were_measured() -> None:
    page = (ROOT / "docs" / "from-the-paper.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells = [row[3] for row in rows if not row[0].startswith("| claim")]
    names = ("benchmarks", "accuracy", "faults")
    others = " ".join((ROOT / "docs" / f"{name}.md").read_text() for name in names)
    known = set(re.findall(FIGURE, others))
    told = {figure for cell in cells for figure in re.findall(FIGURE, cell)}
    assert len(told) > 20
    assert told <= known


def test_figures_of_the_readme_stand_where_they_were_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    tables = re.findall(r"^\|.*stall.*\n\|-.*\n((?:\|.*\n)+)", readme, re.MULTILINE)
    known = set(re.findall(FIGURE, (ROOT / "docs" / "benchmarks.md").read_text()))
    cells = [cell for row in "".join(tables).splitlines() for cell in row.split("|")]
    told = {cell.strip() for cell in cells if re.fullmatch(FIGURE, cell.strip())}
    assert told <= known
