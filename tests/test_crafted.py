"""Roots that somebody has made to do harm: refused or passed over, with no hang and no damage."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cnr_jax as cnr

UUID = "ab" * 16
WRITER = "cnr_jax.writer.json"


def claim(**aside: Any) -> dict[str, Any]:
    """A claim of a process that is no more, with what it had moved aside."""
    return {
        "id": UUID,
        "host": "nowhere",
        "pid": 2**22 + 1,
        "since": "2026-01-01T00:00:00+00:00",
        "aside": {
            "uuid": UUID,
            "directory": "9",
            "item": "default",
            "moved": [["9", f"9.abandoned-g1-{UUID}"]],
            **aside,
        },
    }


# Names before and now, of which one leads out of the root, or is of a form that no rollback makes.
RENAMES = {
    "to outside": ["../taken", f"1.abandoned-g1-{UUID}"],
    "from outside": ["9", "../victim"],
    "both": ["../taken9", f"../victim9.abandoned-g1-{UUID}"],
    "absolute": ["{out}/taken9", "{out}/victim"],
    "any folder of the root": ["9", "mine"],
    "a step": ["9", "1"],
    "to no step": ["mine", f"mine.abandoned-g1-{UUID}"],
    "of another step": ["9", f"1.abandoned-g1-{UUID}"],
    "short": ["9", "9.abandoned-g1-ab"],
    "no generation": ["9", f"9.abandoned-g-{UUID}"],
    "a file in it": ["9", f"9.abandoned-g1-{UUID}/../mine"],
    "nul": ["9", f"9\0.abandoned-g1-{UUID}"],
    "half a pair": ["\ud8009", f"\ud8009.abandoned-g1-{UUID}"],
    "three": ["9", f"9.abandoned-g1-{UUID}", "9"],
    "numbers": [9, 9],
}


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def two_steps(run: Any, root: Path) -> None:
    with cnr.CheckpointManager(
        root, tables=run.tables, options=cnr.Options(codec="raw")
    ) as manager:
        run.run(manager, range(2))


def goes_on(run: Any, root: Path) -> None:
    """Opening, restoring and saving work, and nothing that was there is gone."""
    with cnr.CheckpointManager(
        root, tables=run.tables, options=cnr.Options(codec="raw")
    ) as manager:
        assert manager.all_steps() == [0, 1]
        run.restore(manager, None)
        run.run(manager, [2])
        for step in range(3):
            run.check(manager, step)


@pytest.mark.parametrize("renames", RENAMES)
def test_crafted_claims_rename_nothing(
    tmp_path: Path, tiny_run: Any, renames: str
) -> None:
    run, root, victim = tiny_run(), tmp_path / "root", tmp_path / "victim"
    two_steps(run, root)
    for folder in (
        victim,
        tmp_path / f"victim9.abandoned-g1-{UUID}",
        root / "mine",
        root / f"1.abandoned-g1-{UUID}",
        root / f"mine.abandoned-g1-{UUID}",
    ):
        folder.mkdir()
        (folder / "file").write_text("mine")
    moved = [
        name.replace("{out}", str(tmp_path)) if isinstance(name, str) else name
        for name in RENAMES[renames]
    ]
    (root / WRITER).write_text(json.dumps(claim(moved=[moved])))
    before = {p: tree(p) for p in tmp_path.iterdir() if p != root}
    inside = tree(root).keys()
    goes_on(run, root)
    assert {p: tree(p) for p in tmp_path.iterdir() if p != root} == before
    assert inside <= tree(root).keys()


@pytest.mark.parametrize("key", ["directory", "item"])
@pytest.mark.parametrize("name", ["../victim", "", "a/b", "..", "a\0b", 3, None])
def test_claims_that_name_a_save_elsewhere_are_not_understood(
    tmp_path: Path, tiny_run: Any, caplog: pytest.LogCaptureFixture, key: str, name: Any
) -> None:
    """It would be looked there whether steps are to be brought back."""
    run, root = tiny_run(), tmp_path / "root"
    two_steps(run, root)
    (root / f"9.abandoned-g1-{UUID}").mkdir()
    (root / WRITER).write_text(json.dumps(claim(**{key: name})))
    goes_on(run, root)
    assert (root / f"9.abandoned-g1-{UUID}").is_dir()
    assert f"aside.{key}" in caplog.text


def test_claims_of_the_right_form_are_still_followed(
    tmp_path: Path, tiny_run: Any
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    two_steps(run, root)
    (root / "1").rename(root / f"1.abandoned-g1-{UUID}")
    moved = [["1", f"1.abandoned-g1-{UUID}"]]
    (root / WRITER).write_text(json.dumps(claim(moved=moved)))
    goes_on(run, root)


def deep(path: Path) -> None:
    path.write_text('{"aside": ' + "[" * 100_000 + "]" * 100_000 + "}")


def numbers(path: Path) -> None:
    text = json.dumps({**claim(), "pid": "NUMBER"})
    path.write_text(text.replace('"NUMBER"', "1e400"))


def long_number(path: Path) -> None:
    text = json.dumps({**claim(), "pid": "NUMBER"})
    path.write_text(text.replace('"NUMBER"', "9" * 4000))


def own_group(path: Path) -> None:
    path.write_text(json.dumps({**claim(), "pid": 0}))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    """A file of 1 TB, which takes no room."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\0")


def listed(path: Path) -> None:
    path.write_text("[1]")


@pytest.mark.parametrize(
    "make",
    [deep, numbers, long_number, own_group, pipe, endless, large, no_text, listed],
)
def test_whatever_is_in_the_place_of_a_claim_a_run_goes_on(
    tmp_path: Path,
    tiny_run: Any,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    two_steps(run, root)
    (root / WRITER).unlink()
    make(root / WRITER)
    goes_on(run, root)
    assert "cannot be understood" in caplog.text
    assert json.loads((root / WRITER).read_text())["pid"] == os.getpid()


def test_a_folder_in_the_place_of_a_claim_keeps_a_run_from_saving_with_an_error(
    tmp_path: Path, tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = tiny_run(), tmp_path / "root"
    caplog.set_level(logging.CRITICAL)
    two_steps(run, root)
    (root / WRITER).unlink()
    (root / WRITER).mkdir()
    with cnr.CheckpointManager(root, tables=run.tables) as manager:
        run.restore(manager, None)
        with pytest.raises((cnr.errors.CnrError, OSError), match=WRITER):
            run.run(manager, [2])
        assert manager.all_steps() == [0, 1]
