"""The README's code runs, it stays short, and what it says of files and commands holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import cnr_jax as cnr

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# A page that can be read at a sitting; the rest is in docs/.
MOST_WORDS, MOST_NUMBERS = 1300, 60


def block(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no block {mark!r}"
    return found[1]


def shape_of(line: str) -> str:
    """A line without its figures, which differ from machine to machine."""
    return re.sub(r"\d[\d,.]*", "N", line)


def test_example_runs_as_pasted_and_resumes_when_it_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = compile(block("example"), "README.md", "exec")
    monkeypatch.chdir(tmp_path)
    first: dict[str, Any] = {}
    exec(code, first)
    printed = capsys.readouterr().out
    assert "goes on after step 0\n" in printed
    (shown,) = re.findall(r"^step 20: .*$", README, re.MULTILINE)
    assert shape_of(shown) in map(shape_of, printed.splitlines())
    assert printed.count("full") == 1 and printed.count("delta on 10") == 2, printed
    second: dict[str, Any] = {}
    exec(code, second)
    printed = capsys.readouterr().out
    assert "goes on after step 30\n" in printed
    assert "step 40: delta on 10" in printed, printed
    assert int(second["state"]["step"]) == 60
    assert isinstance(second["touched"], cnr.Touched)
    assert isinstance(second["state"]["item"], jax.Array)
    # What was trained further is nearer to where training leads.
    away = [np.abs(run["state"]["item"] - run["TARGET"]) for run in (first, second)]
    assert away[1].mean() < away[0].mean()
    assert cnr.verify("first_run") == ()


def test_example_is_about_thirty_lines():
    lines = [line for line in block("example").splitlines() if line.strip()]
    assert len(lines) <= 30


def test_the_example_is_all_of_its_python():
    assert README.count("```python") == 1


def test_it_is_short():
    assert len(README.split()) <= MOST_WORDS
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    numbers = re.findall(r"(?<![\w.])\d[\d,.]*", prose)
    assert len(numbers) <= MOST_NUMBERS, numbers


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    for mark in ("setup", "tests", "newest"):
        assert block(mark)
        assert f"run {mark}" in script
    assert (ROOT / block("main").split()[1]).exists()
