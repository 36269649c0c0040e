"""The README's code runs, and its claims about files and names hold."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import cnr_jax as cnr

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no block {mark!r}"
    return found[1]


def test_example_runs_as_pasted_saves_deltas_and_restores_them(
    tmp_path, capsys, monkeypatch
):
    code = block("example")
    scope: dict = {}
    # The example makes its root where temporary folders go.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(compile(code, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.count("delta on 0") == 3, printed
    assert int(scope["state"]["step"]) == 4
    assert np.allclose(scope["state"]["item"][120], 0.2, atol=1e-6)
    assert isinstance(scope["touched"], cnr.Touched)
    assert isinstance(scope["state"]["item"], jax.Array)
    assert jnp.max(scope["state"]["item"]) < 1


def test_example_has_about_fifteen_lines_of_code():
    lines = [line for line in block("example").splitlines() if line.strip()]
    assert len(lines) <= 16


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    for mark in ("setup", "tests"):
        assert block(mark)
        assert f"run {mark}" in script
