"""Whose a folder of a root is, and what that means for what is saved beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest, dump
from cnr_jax.repository.index.folders import Folder
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import blockers
from cnr_jax.repository.store.checked import UNREAD
from cnr_jax.repository.upkeep.removal import find_leftovers
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

ITEM, NOTE = "state", names.ORBAX_METADATA
OURS = json.dumps({"item_handlers": {ITEM: "cnr_jax.handler.CnrHandler"}})
THEIRS = json.dumps({"item_handlers": {"model": "orbax.Handler"}})


class Seen(NamedTuple):
    """What is expected of a folder."""

    kind: str
    is_checkpoint: bool
    may_be_a_step: bool
    is_foreign: bool
    states: tuple[str, ...] = ()


OWN = Seen("own", True, True, False)
# Files of each folder; a name that ends in a slash is that of an empty folder.
FOLDERS: dict[str, tuple[dict[str, str], Seen]] = {
    "manifest": ({f"{ITEM}/manifest.json": ""}, OWN),
    "rows alone": ({f"{ITEM}/rows.p00000/codes/c/0": ""}, OWN),
    "in another item": ({"model/manifest.p00000.json": ""}, OWN),
    "what Orbax noted of it": ({NOTE: OURS}, OWN),
    "with files of Orbax": ({f"{ITEM}/manifest.json": "", "a/_METADATA": ""}, OWN),
    "with files of Orbax in the item": (
        {f"{ITEM}/rows.p00000/codes/c/0": "", f"{ITEM}/_METADATA": ""},
        OWN,
    ),
    "of Orbax": (
        {NOTE: THEIRS, "model/_METADATA": "", "opt/_METADATA": "", "data/x": ""},
        Seen("orbax", True, True, True, ("model", "opt")),
    ),
    "note of Orbax": ({NOTE: THEIRS}, Seen("orbax", True, True, False)),
    "note of nobody": ({NOTE: "{"}, Seen("orbax", True, True, False)),
    "bare state of Orbax": (
        {"_METADATA": "", "d/0": ""},
        Seen("orbax", False, False, True),
    ),
    "item of Orbax alone": (
        {f"{ITEM}/_METADATA": ""},
        Seen("orbax", False, True, True, (ITEM,)),
    ),
    "file of the user": ({"plot.png": ""}, Seen("other", False, False, True)),
    "folder of the user": ({"plots/a.png": ""}, Seen("other", False, False, True)),
    "file in the item": ({f"{ITEM}/notes": ""}, Seen("other", False, True, True)),
    "empty item": ({f"{ITEM}/": ""}, Seen("other", False, True, False)),
    "empty": ({}, Seen("other", False, True, False)),
}


def put(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        if name.endswith("/"):
            (folder / name).mkdir()
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def seen(folder: Folder) -> Seen:
    told = folder.kind, folder.is_checkpoint, folder.may_be_a_step, folder.is_foreign
    return Seen(*told, tuple(folder.states))


@pytest.mark.parametrize("name", FOLDERS)
def test_whose_a_folder_is(tmp_path: Path, name: str) -> None:
    files, expected = FOLDERS[name]
    path = put(tmp_path / "7", files)
    found = Folder.look(path, ITEM)
    assert seen(found) == expected and (found.why, found.doubt) == ("", "")
    # Without the item what is called as it may be the user's.
    without = Folder.look(path)
    assert (without.kind, without.is_checkpoint) == expected[:2]


def test_one_that_cannot_be_seen_may_be_a_step_and_is_left_alone(
    tmp_path: Path,
) -> None:
    put(tmp_path / "7", {"plot.png": ""})
    with inprocess.failing(tmp_path, Fault("scandir", action="EACCES", times=0)):
        found = Folder.look(tmp_path / "7", ITEM)
    assert seen(found) == Seen("own", True, True, True)


@pytest.mark.parametrize(
    ("error", "doubt"),
    [
        (PermissionError(13, "no"), "withheld"),
        (errors.IntegrityError("a bad block", kind=UNREAD), "unread"),
        (errors.IntegrityError("it is cut", kind="file_damaged"), ""),
    ],
    ids=["withheld", "unread", "damaged"],
)
def test_what_storage_may_show_another_time_is_not_said_to_be_of_others(
    tmp_path: Path, error: Exception, doubt: str
) -> None:
    path = put(tmp_path / "7", {"plot.png": ""})
    found = Folder.look(path, ITEM, error)
    assert (found.why, found.doubt) == (str(error), doubt)
    assert found.is_foreign == (not doubt)


@pytest.fixture
def root(tmp_path: Path, manifest_of: Callable[..., Manifest]) -> Path:
    """All of these folders from 0 on, and 100, which is a step."""
    for number, (files, _) in enumerate(FOLDERS.values()):
        put(tmp_path / str(number), files)
    step = tmp_path / "100" / ITEM
    step.mkdir(parents=True)
    (step / names.MANIFEST).write_bytes(dump(manifest_of(100)))
    return tmp_path


def numbers(which: Callable[[Seen], bool]) -> set[str]:
    """Of the folders those of which something is so."""
    told = enumerate(expected for _, expected in FOLDERS.values())
    return {str(number) for number, expected in told if which(expected)}


def test_a_ledger_tells_what_its_folders_are(root: Path) -> None:
    ledger = Ledger.load(root, ITEM)
    assert list(ledger.entries) == ["100"]
    assert set(ledger.folders) == numbers(lambda each: True)
    assert all(each.why for each in ledger.folders.values())
    assert ledger.unknown == numbers(lambda each: each.may_be_a_step)
    there = {*numbers(lambda each: each.is_checkpoint), "100"}
    assert set(ledger.checkpoints()) == there and ledger.checkpoints()[-1] == "100"
    assert ledger.doubtful == set()
    # Nothing is older than they are.
    assert blockers(ledger, "0") == sorted(ledger.unknown - {"0"}, key=int)[::-1]


@pytest.mark.parametrize("adopts", [False, True])
def test_steps_of_orbax_are_leftovers_only_where_they_count(
    root: Path, adopts: bool
) -> None:
    ledger = Ledger.load(root, ITEM, adopts=adopts)
    kinds = ("own", "other", "orbax") if adopts else ("own", "other")
    expected = numbers(lambda each: each.may_be_a_step and each.kind in kinds)
    # Of these one has a single state, and is adopted.
    adopted = numbers(lambda each: each.states == (ITEM,)) if adopts else set()
    assert set(ledger.entries) == {"100", *adopted}
    assert set(find_leftovers(root, ledger).unreadable) == expected - adopted


@pytest.mark.parametrize("action", ["EIO", "EACCES"])
def test_what_storage_did_not_give_out_is_read_again(
    root: Path, action: str, caplog: Any
) -> None:
    fault = Fault("open_read", action=action, match="/100/", times=0)
    with inprocess.failing(root, fault):
        ledger = Ledger.load(root, ITEM)
        assert ledger.doubtful == {"100"}
        caplog.clear()
        error = ledger.ask_again(root, ITEM)
        assert (error is None) == (action == "EIO")
        assert caplog.messages == []  # it was said before
    assert ledger.ask_again(root, ITEM, newer_than=100) is None
    assert ledger.doubtful == {"100"}
    if action == "EACCES":
        assert ledger.ask_again(root, ITEM, newer_than=99) is None
    else:
        assert ledger.match(root, ITEM, ledger.directories())
    assert ledger.doubtful == set() and "100" in ledger.entries


def test_one_that_is_gone_when_it_is_read_is_none(root: Path) -> None:
    ledger = Ledger.load(root, ITEM)
    shutil.rmtree(root / "100")
    shutil.rmtree(root / "0")
    for name in ("100", "0"):
        assert ledger.read(root, name, ITEM) is None
        assert name not in ledger.directories()


def test_a_ledger_that_is_read_anew_knows_of_no_damage(root: Path) -> None:
    ledger = Ledger.load(root, ITEM)
    ledger.note_damage(f"100/{ITEM}/rows.p00000/codes/c/0", "it is cut")
    assert ledger.newest() is None
    ledger.become(Ledger.load(root, ITEM))
    assert ledger.newest() is ledger.entries["100"]
    ledger.note_folder("100", Folder.look(root / "0", ITEM))
    assert ledger.newest() is None and "100" not in ledger.entries
