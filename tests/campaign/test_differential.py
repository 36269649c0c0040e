"""The differential run: of one version with itself on demand, and what its comparison sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.tools

CAMPAIGN = Path(__file__).parent
MANIFEST: dict[str, Any] = {
    "dense_files": [{"path": "dense/d/" + 32 * "a", "sha256": "1"}],
    "processes": [{"path": "manifest.p00000.json", "sha256": "2"}],
    "required_features": ["zstd"],
    "sha256": "3",
    "step": 4,
    "totals": {"dense_bytes": 5, "manifest_bytes": 6},
    "writer": {"cnr_jax": "0.1.0"},
}


@pytest.fixture
def differential(modules_in: Any) -> Any:
    return modules_in(CAMPAIGN)("differential")


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two roots of which only that differs which nothing rules."""
    for name, drawn in (("old", "a"), ("new", "b")):
        item = tmp_path / name / "4" / "default"
        (item / "dense/d").mkdir(parents=True)
        (item / "rows.p00000").mkdir()
        (item / "dense/d" / (32 * drawn)).write_text(drawn)
        (item / "dense/_METADATA").write_text("{}")
        in_flight = tmp_path / name / "5.orbax-checkpoint-tmp"
        in_flight.mkdir()
        if drawn == "a":
            (in_flight / "_CHECKPOINT_METADATA").write_text("{}")
        (item / "commit_success.txt").write_text(drawn)
        (item / "rows.p00000/0").write_bytes(bytes(range(100)))
        text = json.dumps(MANIFEST).replace(32 * "a", 32 * drawn)
        (item / "manifest.json").write_text(text.replace('"3"', f'"{drawn}"'))
    return tmp_path / "old", tmp_path / "new"


def test_what_nothing_rules_is_no_difference(
    differential: Any, roots: tuple[Path, Path]
) -> None:
    counts = differential.Counts()
    assert not list(differential.compare_roots(*roots, "here", counts))
    assert counts.files == 5


def test_a_bit_a_file_and_a_field_are_differences(
    differential: Any, roots: tuple[Path, Path], capsys: Any
) -> None:
    item = roots[1] / "4" / "default"
    data = bytearray((item / "rows.p00000/0").read_bytes())
    data[99] ^= 1
    (item / "rows.p00000/0").write_bytes(data)
    (item / "more").touch()
    (item / "dense/_METADATA").unlink()
    manifest = {**MANIFEST, "step": 5, "encoding": {}, "writer": {"cnr_jax": "0.2.0"}}
    manifest["totals"] = {"dense_bytes": 5, "manifest_bytes": 60}
    (item / "manifest.json").write_text(json.dumps(manifest))
    found = list(
        differential.compare_roots(*roots, "run: process 1", differential.Counts())
    )
    assert {each.alike for each in found} == {
        ("default/rows.p00000/0", ""),
        ("default/more", ""),
        ("default/dense/_METADATA", ""),
        ("default/manifest.json", "step"),
        ("default/manifest.json", "encoding"),
        ("default/manifest.json", "totals.manifest_bytes"),
    }
    assert differential.present(found) == 1
    out = capsys.readouterr().out
    assert "4 differences that nothing explains" in out
    assert "1 differences: manifests say how the rows of a run are encoded" in out
    explained = [each for each in found if each.field in ("encoding", "totals.manif")]
    assert len(explained) == 1 and differential.present(explained) == 0


def test_a_step_that_is_not_read_is_refused_by_the_name_of_a_feature(
    differential: Any, roots: tuple[Path, Path]
) -> None:
    text = "step 4 cannot be read\n  required features unknown here: {}"
    whole = {"listed": [4], "latest": 4, "steps": {"4": {"['w']": "bits"}}}
    none: dict[str, Any] = {"listed": [], "latest": None}

    def compared(writer: int, error: list[str]) -> tuple[list[Any], Any]:
        counts = differential.Counts()
        refused = {**none, "steps": {"4": error}}
        # Roots of the older version come first; both read that one alike.
        by = [[{**whole, "root": str(roots[0])} for _ in range(2)] for _ in range(2)]
        by[0][writer] = {**refused, "root": str(roots[writer])}
        by[1][1]["root"] = by[0][1]["root"] = str(roots[1])
        return list(differential.compare_readers(*by, "run", counts)), counts

    named = ["UnsupportedVersionError", "unsupported_version", text.format("zstd")]
    other = ["UnsupportedVersionError", "unsupported_version", text.format("else")]
    damaged = ["IntegrityError", "file_damaged", "zstd"]
    found, counts = compared(1, named)
    assert not found and (counts.refused, counts.read) == (1, 1)
    for writer, error in ((1, other), (1, damaged), (0, named)):
        found, counts = compared(writer, error)
        assert found and counts.refused == 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("old, only", [("HEAD", "audited"), ("29a61f3", "")])
def test_a_version_does_as_the_older_one(old: str, only: str) -> None:
    known = subprocess.run(
        ["git", "-C", str(CAMPAIGN), "cat-file", "-e", f"{old}^{{commit}}"],
        capture_output=True,
    )
    if known.returncode:
        pytest.skip(f"git has no revision {old} here")
    command = [sys.executable, str(CAMPAIGN / "differential.py"), "--old", old]
    done = subprocess.run(
        [*command, "--only", only], capture_output=True, text=True, timeout=2300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("3 kills") == (1 if only else 3)
    assert "\n    0 differences that" in done.stdout
