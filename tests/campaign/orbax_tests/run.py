"""Orbax's tests of its own manager, with this library's in its place.

    git clone https://github.com/google/orbax && git -C orbax checkout 628edb25a9
    python -m venv v
    v/bin/pip install orbax-checkpoint==0.12.4 flax optax chex portpicker pytest pytest-xdist -e .
    v/bin/python tests/campaign/orbax_tests/run.py orbax

Prints how many tests pass, fail and are skipped, and ends with an error if one fails, or is
skipped, that `expected.json` does not name with its reason, or if one that it names passes. Of
Orbax's code nothing is kept: it is copied into a temporary folder, beside `adapter.py`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
PACKAGE = Path("checkpoint/orbax/checkpoint")
TESTS = PACKAGE / "checkpoint_manager_test.py"
HELPERS = PACKAGE / "_src/testing"
COPIED = ("multiprocess_test.py", "oss/multiprocess_test.py")
EXPECTED = HERE / "expected.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a test.

    Attributes:
        how: "passed", "failed" or "skipped"; with subtests failed if one of these is.
        restored: its managers restored before they saved, as `UsedRootError` asks.
    """

    how: str
    restored: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("orbax", type=Path, help="a clone of github.com/google/orbax")
    parser.add_argument("--theirs", action="store_true", help="with Orbax's manager")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orbax-tests-") as folder:
        outcomes = run(args.orbax, Path(folder), theirs=args.theirs)
    counts = collections.Counter(each.how for each in outcomes.values())
    print(", ".join(f"{n} {how}" for how, n in sorted(counts.items())))
    restored = sum(each.restored for each in outcomes.values())
    print(f"{restored} restored before they saved")
    if args.theirs:
        print(*named(outcomes, "failed"), sep="\n")
        return
    expected = json.loads(EXPECTED.read_text())
    wrong = compare(outcomes, expected)
    for reason, names in expected["failed"].items():
        print(f"{len(names):3} are to fail: {reason}")
    for reason, names in expected["skipped"].items():
        print(f"{len(names):3} are to be skipped: {reason} not taken")
    if wrong:
        sys.exit("\n".join(wrong))


def run(orbax: Path, folder: Path, *, theirs: bool) -> dict[str, Outcome]:
    """Runs the tests in a folder; what became of each, by name."""
    for name in COPIED:
        copy = folder / "helpers" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(orbax / HELPERS / name, copy)
    shutil.copyfile(orbax / TESTS, folder / TESTS.name)
    shutil.copyfile(HERE / "adapter.py", folder / "conftest.py")
    (folder / "tmp").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(folder / "tmp"),
        "MANAGER": "theirs" if theirs else "ours",
    }
    report = folder / "report.xml"
    command = f"-m pytest -q -n 2 -p no:cacheprovider --tb=short --junitxml={report}"
    subprocess.run(
        [sys.executable, *command.split(), TESTS.name],
        cwd=folder,
        env=environment,
        check=False,
    )
    return outcomes_in(report)


def outcomes_in(report: Path) -> dict[str, Outcome]:
    """What a report of pytest says of each test; subtests are in it under their test's name."""
    found: dict[str, Outcome] = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        name = str(case.get("name"))
        kinds = {part.tag for part in case}
        how = "failed" if kinds & {"failure", "error"} else "passed"
        how = "skipped" if "skipped" in kinds and how == "passed" else how
        marks = {part.get("name") for part in case.iter("property")}
        before = found.get(name)
        if before is not None and "failed" in (how, before.how):
            how = "failed"
        is_marked = "restored first" in marks or bool(before and before.restored)
        found[name] = Outcome(how, is_marked)
    return found


def named(outcomes: dict[str, Outcome], how: str) -> list[str]:
    return sorted(name for name, each in outcomes.items() if each.how == how)


def compare(outcomes: dict[str, Outcome], expected: dict) -> list[str]:
    """How tests that fail or are skipped differ from those that are said to, with the reasons."""
    wrong: list[str] = []
    for how in ("failed", "skipped"):
        said = {name for names in expected[how].values() for name in names}
        got = set(named(outcomes, how))
        wrong += [f"{how}, not expected: {name}" for name in sorted(got - said)]
        wrong += [f"not {how}, as expected: {name}" for name in sorted(said - got)]
    restored = {name for name, each in outcomes.items() if each.restored}
    said = set(expected["restored first"])
    wrong += [f"restored first, not expected: {n}" for n in sorted(restored - said)]
    return wrong


if __name__ == "__main__":
    main()
