"""What programs and scripts rely on by name changes only with `tests/data/public_face.json`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest

import cnr_jax as cnr


@pytest.fixture(name="public_face")
def fixture_public_face(modules_in: Any) -> Any:
    return modules_in(Path(__file__).parent)("public_face")


def test_no_public_name_option_error_or_exit_code_changes_unsaid(
    public_face: Any,
) -> None:
    before = public_face.FILE.read_text("utf-8").splitlines()
    now = public_face.text().splitlines()
    changes = list(
        difflib.unified_diff(before, now, "file", "package", lineterm="", n=2)
    )
    told = "\n".join(changes)
    assert not changes, (
        f"run tests/public_face.py and tell of it in CHANGELOG.md:\n{told}"
    )


def test_kinds_are_found_wherever_they_stand(public_face: Any) -> None:
    kinds = set(public_face.kinds())
    own = {each.kind for each in vars(cnr.errors).values() if hasattr(each, "to_json")}
    assert own <= kinds
    assert {
        "no_root",
        "step_exists",
        "file_unreadable",
        "process_failed",
        "row_ids",
    } <= kinds
