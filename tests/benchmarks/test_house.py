"""What `house.py` counts in a small package, and that its lists name what there is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.tools

SOURCE = '''"""A module: three lines
of docstring.
"""

import os
from pathlib import Path

import orbax.checkpoint as ocp  # of another project

# A comment alone.
TEXT = """of two
lines"""


def used_once(path: Path) -> None:
    """Looks at files six times, and twice at none."""
    os.stat(os.fspath(path))
    path.iterdir()
    (path / "a").read_text()
    open("b")
    path.open("rb")
    os.path.islink(path)
    is_local(path)


def exists(manager: ocp.CheckpointManager) -> None:
    used_once(manager._checkpoints)
    exists(getattr(manager, "_finalize_thread"))
    exists(manager._nothing_of_orbax, manager.open())
'''


def test_a_small_package_is_counted(benchmarks: Any, tmp_path: Path) -> None:
    counts = benchmarks("source_counts")
    for file in ("module.py", "testing/module.py", "cli/module.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(SOURCE if file == "module.py" else "")
    assert counts.lines(tmp_path) == (17, 2, SOURCE.count("\n"))
    names = [call.name for call in counts.calls_of_files(tmp_path)]
    assert sorted(names) == sorted(
        [
            "(path / 'a').read_text",
            "open",
            "os.path.islink",
            "os.stat",
            "path.iterdir",
            "path.open",
        ]
    )
    assert [call.line for call in counts.calls_of_is_local(tmp_path)] == [23]
    assert counts.functions_used_once(tmp_path) == (1, 2)
    assert counts.private_names_of_orbax(tmp_path) == {
        "_checkpoints",
        "_finalize_thread",
    }


def test_files_of_roots_are_handled_in_the_store_alone(benchmarks: Any) -> None:
    counts, package = benchmarks("source_counts"), benchmarks("house").PACKAGE
    assert counts.calls_of_files(package) == []
    assert counts.calls_of_is_local(package) == []


def test_the_lists_name_what_there_is(benchmarks: Any) -> None:
    house = benchmarks("house")
    found = house.in_source(house.PACKAGE)
    assert set(found) < set(house.MARKS)
    assert 10_000 < found["code"] < 100_000 and found["fields"] > found["types"]
    assert len(house.table(found)) == 1 + len(house.MARKS)


def test_a_place_that_is_gone_is_named(benchmarks: Any, tmp_path: Path) -> None:
    house = benchmarks("house")
    copy = tmp_path / "package"
    shutil.copytree(house.PACKAGE, copy, ignore=shutil.ignore_patterns("testing"))
    house.check_lists(copy)
    file, function = house.CHAIN_WALKERS[0]
    text = (copy / file).read_text()
    other = tmp_path / "changed"
    shutil.copytree(copy, other)
    (other / file).write_text(text.replace(f"def {function}(", "def another("))
    file, _ = next(iter(house.STATE_OF_A_SAVE))
    text = (other / file).read_text()
    (other / file).write_text(text.replace("self.doubt", "self.other"))
    with pytest.raises(LookupError) as raised:
        house.check_lists(other)
    assert f": {function}\n" in str(raised.value)
    assert ": Lifecycle.doubt\n" in str(raised.value)


def test_syncs_of_a_delta_are_counted(benchmarks: Any) -> None:
    found = benchmarks("house").syncs()
    assert found["python"] > 0
    assert found.get("syncs", found["python"]) >= found["python"]
