"""CONTRIBUTING.md names for each promise of the documents the tests that hold it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = "## Which test holds which promise"


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its rank."""
    assert text.count(f"\n{heading}\n") == 1
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


def lines() -> list[tuple[str, str, str]]:
    """Promise, source and tests of each line of the table."""
    table = section((ROOT / "CONTRIBUTING.md").read_text("utf-8"), HEADING)
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)
    assert rows[0] == ("promise", "source", "tests")
    return rows[1:]


def test_each_promise_names_tests_that_are_there() -> None:
    for promise, _, tests in lines():
        files = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert ", ".join(f"`{file}`" for file in files) == tests, promise
        assert all((ROOT / file).is_file() for file in files), promise
        assert files, promise
        assert any("def test_" in (ROOT / file).read_text("utf-8") for file in files), (
            promise
        )


def test_no_bullet_of_what_can_go_wrong_is_without_a_line() -> None:
    readme = section((ROOT / "README.md").read_text("utf-8"), "## What can go wrong")
    told = re.findall(r"^\* (\*[^*]+\*)", readme, re.MULTILINE)
    assert len(told) == len(re.findall(r"^\* ", readme, re.MULTILINE)) > 5
    held = [promise for promise, source, _ in lines() if source == "README"]
    assert [re.match(r"\*[^*]+\*", promise)[0] for promise in held] == told  # type: ignore[index]


def test_no_section_of_the_format_with_a_must_is_without_a_line() -> None:
    number, found = "", set[str]()
    for line in (
        (ROOT / "cnr_jax" / "format" / "SPEC.md").read_text("utf-8").splitlines()
    ):
        if heading := re.match(r"##+ ([\d.]+?)\.? ", line):
            number = heading[1]
        elif number and "MUST" in line:
            found.add(number)
    sources = [source for _, source, _ in lines() if source.startswith("SPEC ")]
    told = {each for s in sources for each in s.removeprefix("SPEC ").split(", ")}
    assert {"3", "5.1", "11"} <= found == told
