"""Whatever is wrong in a root is found, all of it, with what it means for which steps."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.format.manifest import ParentRef, dump, load
from cnr_jax.testing import inprocess

from .conftest import each_of, flip
from .older_steps import leave_dense_to_orbax

ALL = ("0", "1", "2", "3")
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the root lies that is saved once for all tests."""
    return tmp_path_factory.mktemp("saved") / "root"


@pytest.fixture
def root(tiny_run: Any, first: Path, tmp_path: Path) -> Path:
    """Steps 0 (full), 1 to 3 (deltas, each on the one before), under 8 bits."""
    if not first.exists():
        run = tiny_run()
        options = cnr.Options(codec="asymmetric", bits=8, policy=cnr.Consecutive())
        with cnr.CheckpointManager(first, tables=run.tables, options=options) as m:
            run.run(m, range(4))
    shutil.copytree(first, tmp_path / "root")
    return tmp_path / "root"


def found(
    root: Path, level: Any = "data"
) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [
        (each.directory, each.file, each.kind, each.consequence)
        for each in cnr.verify(str(root), level)
    ]


def test_whole_root_has_no_problem(root: Path) -> None:
    assert found(root) == found(root, "structure") == []


def array(item: Path, name: str) -> Path:
    return item / "rows.p00000" / name / "c" / "0"


def dense(item: Path) -> Path:
    return item / "dense" / "p00000" / "c" / "0"


def dense_of_orbax(item: Path) -> Path:
    """A dense file, of which Orbax has written all."""
    leave_dense_to_orbax(item)
    (found, *_) = sorted((item / "dense" / "d").iterdir())
    return found


def stray(item: Path, *where: str) -> Path:
    path = item.joinpath(*where)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"stray")
    return path


CODES, IDS = "asymmetric.codes.uint8", "row_ids"
ROWS = f"default/rows.p00000/{CODES}"
# What is done to step 1; the file that is named; kind; which steps it costs; and whether the
# structure alone tells.
CASES: dict[str, tuple[Damage, str, str, tuple[str, ...], bool]] = {
    "chunk flipped": (
        lambda item: flip(array(item, CODES)),
        ROWS,
        "data_damaged",
        ("1", "2", "3"),
        False,
    ),
    "checksum of a chunk flipped": (
        lambda item: flip(array(item, CODES), -1),
        f"{ROWS}/c/0",
        "foreign_chunk",
        ("1", "2", "3"),
        False,
    ),
    "chunk of another array": (
        lambda item: shutil.copy(
            array(item.parents[1] / "2" / "default", CODES), array(item, CODES)
        ),
        f"{ROWS}/c/0",
        "foreign_chunk",
        ("1", "2", "3"),
        False,
    ),
    "chunk gone": (
        lambda item: array(item, CODES).unlink(),
        f"{ROWS}/c/0",
        "file_missing",
        ("1", "2", "3"),
        True,
    ),
    "chunk too long": (
        lambda item: array(item, CODES).write_bytes(
            array(item, CODES).read_bytes() + b"x"
        ),
        f"{ROWS}/c/0",
        "file_damaged",
        ("1", "2", "3"),
        True,
    ),
    "metadata of an array flipped": (
        lambda item: flip(item / "rows.p00000" / CODES / "zarr.json"),
        f"{ROWS}/zarr.json",
        "file_damaged",
        (),
        True,
    ),
    "manifest flipped": (
        lambda item: flip(item / "manifest.json"),
        "default/manifest.json",
        "manifest",
        ("1", "2", "3"),
        True,
    ),
    "manifest gone": (
        lambda item: (item / "manifest.json").unlink(),
        "default/manifest.json",
        "manifest_missing",
        ("1", "2", "3"),
        True,
    ),
    "process manifest flipped": (
        lambda item: flip(item / "manifest.p00000.json"),
        "default/manifest.p00000.json",
        "file_damaged",
        ("1", "2", "3"),
        True,
    ),
    "dense flipped": (
        lambda item: flip(dense(item)),
        "default/dense/p00000",
        "data_damaged",
        ("1",),
        False,
    ),
    "dense gone": (
        lambda item: dense(item).unlink(),
        "default/dense/",
        "file_missing",
        ("1",),
        True,
    ),
    "dense flipped that Orbax wrote": (
        lambda item: flip(dense_of_orbax(item)),
        "default/dense/",
        "file_damaged",
        ("1",),
        False,
    ),
    "dense gone that Orbax wrote": (
        lambda item: dense_of_orbax(item).unlink(),
        "default/dense/",
        "file_missing",
        ("1",),
        True,
    ),
    "dense file too many for Orbax": (
        lambda item: stray(dense_of_orbax(item).parents[1], "d", "00ff" * 8),
        "default/dense/d/00ff",
        "file_unknown",
        ("1",),
        True,
    ),
    "dense file too many": (
        lambda item: stray(item, "dense", "d", "00ff" * 8),
        "default/dense/d/00ff",
        "file_unknown",
        (),
        True,
    ),
    "dense file of others": (
        lambda item: stray(item, "dense", "stray"),
        "default/dense/stray",
        "file_unknown",
        (),
        True,
    ),
    "other file too many": (
        lambda item: stray(item, "rows.p00000", "more", "0"),
        "default/rows.p00000/more/0",
        "file_unknown",
        (),
        True,
    ),
    "rows of another process": (
        lambda item: stray(item, "rows.p00001", "0"),
        "default/rows.p00001/0",
        "file_unknown",
        (),
        True,
    ),
    "what Orbax says of the step": (
        lambda item: (item.parent / "_CHECKPOINT_METADATA").write_text("{"),
        "_CHECKPOINT_METADATA",
        "orbax_metadata",
        (),
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_found_with_its_consequence(root: Path, name: str) -> None:
    damage, file, kind, consequence, structural = CASES[name]
    damage(root / "1" / "default")
    (problem,) = found(root)
    assert problem[0] == "1" and problem[1].startswith(file)
    assert problem[2:] == (kind, consequence)
    assert bool(found(root, "structure")) == structural
    assert str(cnr.verify(str(root))[0]).startswith(f"1/{file}")


# One that costs all that rests on the step, one the step alone, and one nothing.
RESTORED = ("chunk flipped", "dense gone", "other file too many")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in RESTORED))
        for name in CASES
    ],
)
def test_what_restores_is_what_has_no_problem(
    root: Path, name: str, tiny_run: Any
) -> None:
    CASES[name][0](root / "1" / "default")
    lost = {step for problem in found(root) for step in problem[3]}
    run = tiny_run()
    with cnr.CheckpointManager(root) as manager:
        for step in ALL:
            args = cnr.args.Restore(run.state, tables=run.tables)
            if step in lost:
                with pytest.raises(cnr.errors.DAMAGE):
                    manager.restore(int(step), args=args)
            else:
                manager.restore(int(step), args=args)


def test_nothing_stops_at_the_first_problem(root: Path) -> None:
    for step in ALL:
        flip(array(root / step / "default", CODES))
        flip(array(root / step / "default", "raw.rows.float32"))
        flip(dense(root / step / "default"))
    problems = found(root)
    assert len(problems) == 12
    assert [problem[0] for problem in problems] == sorted(ALL * 3)
    shutil.rmtree(root / "0")
    problems = found(root)
    assert ("1", "default/manifest.json", "parent_missing", ("1", "2", "3")) in problems
    assert len(problems) == 10


def test_parents_that_are_others_or_their_own(root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root / "1")
    shutil.copytree(root / "0", root / "1")
    assert found(root) == [
        ("1", "default/manifest.json", "foreign_step", ("1", "2", "3"))
    ]
    for step, parent in (("0", "1"), ("1", "0")):
        with_parent(root / step / "default", step, parent)
    kinds = {(each[0], each[2], each[3]) for each in found(root, "structure")}
    both = ("0", "1", "2", "3")
    assert {("0", "circle", both), ("1", "circle", both)} <= kinds


def with_parent(item: Path, step: str, parent: str) -> None:
    """Makes a step a delta on another one; of a uuid of its own."""
    manifest = load((item / "manifest.json").read_bytes(), "here")
    ref = ParentRef(directory=parent, uuid=parent * 32, clock=0)
    manifest = dataclasses.replace(
        manifest, uuid=step * 32, step=int(step), parent=ref, kind="delta"
    )
    (item / "manifest.json").write_bytes(dump(manifest))


def test_steps_of_another_run_are_no_parents(root: Path, tiny_run: Any) -> None:
    run = tiny_run(salt=1)
    other = root.parent / "other"
    with cnr.CheckpointManager(other, tables=run.tables) as manager:
        run.run(manager, [1])
    shutil.rmtree(root / "1")
    shutil.copytree(other / "1", root / "1")
    assert found(root) == [("2", "default/manifest.json", "foreign_parent", ("2", "3"))]


def test_leftovers_are_listed_as_harmless(root: Path) -> None:
    expected = {
        f"4{names.TEMPORARY_SUFFIX}": "unfinished",
        names.abandoned("3", 1, "0" * 32): "abandoned",
        names.removed("3", "00ff" * 4): "removed",
    }
    for name in (*expected, "notes", "3.removed-parts", "4.orbax-checkpoint-tmp.bak"):
        (root / name).mkdir()
    assert {each[0]: each[2] for each in found(root)} == expected
    assert not any(each[3] for each in found(root))


def test_roots_that_are_empty_or_of_others(tmp_path: Path) -> None:
    assert cnr.verify(str(tmp_path)) == ()
    with ocp.CheckpointManager(tmp_path) as plain:
        plain.save(0, args=ocp.args.JsonSave({"a": 1}))
    for name in ("tensorboard2", "logs-2024", "-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "logs-2024" / "events").write_text("")
    assert found(tmp_path) == [("0", "", "orbax", ())]
    with pytest.raises(cnr.errors.OptionError, match="'structure' or 'data'"):
        cnr.verify(str(tmp_path), "deep")  # type: ignore[arg-type]


def test_an_empty_folder_counts_as_a_step_if_it_is_named_as_steps_are(
    root: Path,
) -> None:
    for name in ("ck_9", "9"):
        (root / name).mkdir()
    assert [each[:2] for each in found(root)] == [("9", "")]
    (root / "9").rmdir()
    assert found(root) == []


def test_every_item_is_looked_at(root: Path) -> None:
    for step in ALL:
        shutil.copytree(root / step / "default", root / step / "more")
    flip(dense(root / "2" / "more"))
    (problem,) = cnr.verify(str(root))
    assert problem.file.startswith("more/dense/") and problem.consequence == ("2",)
    assert cnr.verify(str(root), item="default") == ()


def test_removal_meanwhile_is_no_problem(root: Path, storage: Any) -> None:
    """Retention removes children before parents, while they are being looked at."""

    def late(call: Any) -> None:
        for step in ("3", "2", "1"):
            shutil.rmtree(root / step, ignore_errors=True)

    with storage.calling(late, "/0/default/rows.p00000", "open_read"):
        assert found(root) == []
    assert not (root / "1").exists()


def test_steps_that_go_at_any_moment_are_no_problem(root: Path, storage: Any) -> None:
    going = [root / "2", root / "3"]

    def listed(call: Any) -> None:
        if len(going) == 2:
            shutil.rmtree(going.pop())

    with storage.calling(listed, "/root/3", None):
        assert found(root) == []
    assert not (root / "3").exists()
    for step in ("0", "1", "2"):
        (root / step / "_CHECKPOINT_METADATA").write_bytes(b"{")

    def gone(call: Any) -> None:
        """It is open by now, and is read though its step is there no more."""
        if going and call.path.endswith("/2/_CHECKPOINT_METADATA"):
            shutil.rmtree(going.pop())

    with inprocess.watching(root, after=gone, looks=True):
        assert [each[:3] for each in found(root)] == [
            (step, "_CHECKPOINT_METADATA", "orbax_metadata") for step in ("0", "1")
        ]
    assert not (root / "2").exists()


def test_a_step_that_is_replaced_meanwhile_is_looked_at_again(
    root: Path, tiny_run: Any, tmp_path: Path, storage: Any
) -> None:
    """A rollback saves a step of the same number, with other files of the same names."""
    other, run = tmp_path / "other", tiny_run(salt=1)
    shutil.copytree(root, other)
    options = cnr.Options(codec="asymmetric", bits=8, policy=cnr.Consecutive())
    with cnr.CheckpointManager(other, tables=run.tables, options=options) as manager:
        run.restore(manager, 2)
        run.run(manager, [3])
    replaced: list[Any] = []

    def late(call: Any) -> None:
        if not replaced:
            replaced.append(call)
            shutil.rmtree(root / "3")
            shutil.copytree(other / "3", root / "3")

    with storage.calling(late, "/root/3/default/rows.p00000/raw", "open_read"):
        assert found(root) == []
    assert replaced


@each_of("first", ["there", "not there"])
def test_parents_that_are_replaced_meanwhile_are_looked_at_again(
    root: Path, tiny_run: Any, tmp_path: Path, storage: Any, first: str
) -> None:
    """A run goes back and saves steps 2 and 3 of another branch, step 2 after it was looked at."""
    other, run, kept = tmp_path / "other", tiny_run(salt=1), tmp_path / "kept"
    for copy in (other, kept):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
    with run.open(other) as manager:
        run.restore(manager, 1)
        run.run(manager, [2, 3])
    if first == "not there":  # as of a listing that has met step 3 alone
        shutil.rmtree(root / "2")
    saved: list[Any] = []

    def late(call: Any) -> None:
        if not saved:
            saved.append(call)
            for step in ("2", "3"):
                shutil.rmtree(root / step, ignore_errors=True)
                shutil.copytree(other / step, root / step)

    with storage.calling(late, "/root/3/default/manifest.json", "open_read"):
        assert found(root) == []
    assert saved
    # What is missing and stays so is a problem.
    shutil.rmtree(root / "2")
    assert [each[2] for each in found(root)] == ["parent_missing"]
    shutil.rmtree(root)
    shutil.copytree(kept, root)


def test_save_meanwhile_is_no_problem(tiny_run: Any, tmp_path: Path) -> None:
    run, root = tiny_run(), tmp_path / "root"
    orbax = ocp.CheckpointManagerOptions(max_to_keep=2)
    options = cnr.Options(policy=cnr.OneShot())
    done = threading.Event()
    problems: list[Any] = []

    def watch() -> None:
        while not done.is_set():
            problems.extend(cnr.verify(str(root)))

    with cnr.CheckpointManager(
        root, tables=run.tables, options=options, orbax_options=orbax
    ) as manager:
        run.run(manager, [0])
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            run.run(manager, range(1, 12))
        finally:
            done.set()
            watcher.join()
    assert {problem.kind for problem in problems} <= {"unfinished", "removed"}
    assert not any(problem.consequence for problem in problems)


_IMPORTS = """
import sys, threading
from importlib.abc import MetaPathFinder
found = []
class Watch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("cnr_jax") and threading.current_thread() is not threading.main_thread():
            found.append(name)
sys.meta_path.insert(0, Watch())
import cnr_jax as cnr
assert cnr.verify(sys.argv[1]) == ()
print(*found)
"""


def test_no_thread_imports_a_module(root: Path) -> None:
    """Threads that import modules which import each other may deadlock."""
    words = [sys.executable, "-c", _IMPORTS, str(root)]
    told = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(words, capture_output=True, text=True, check=True, env=told)
    assert ran.stdout.split() == []
