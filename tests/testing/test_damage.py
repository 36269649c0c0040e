"""Damage does what it says, and undoing leaves not even another time of change."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.store import exists, store_of
from cnr_jax.testing import damage

pytestmark = pytest.mark.tools


def picture(root: Path) -> dict[str, Any]:
    """Everything there, with contents and times."""
    found: dict[str, Any] = {}
    for path in sorted([root, *root.rglob("*")]):
        time = path.stat().st_mtime_ns
        contents = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (contents, time)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in {"a": b"\x01\x80", "d/b": b"other", "d/empty": b""}.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    for path in (tmp_path / "root").rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    return tmp_path / "root"


DAMAGES: dict[str, tuple[Callable[[Path], damage.Damage], dict[str, bytes]]] = {
    "first bit": (
        lambda root: damage.flip_bit(root / "a", 0),
        {"a": b"\x00\x80", "d/b": b"other", "d/empty": b""},
    ),
    "last bit": (
        lambda root: damage.flip_bit(root / "a", 15),
        {"a": b"\x01\x00", "d/b": b"other", "d/empty": b""},
    ),
    "overwrite": (
        lambda root: damage.overwrite(root / "d/b", b"XY", at_bytes=3),
        {"a": b"\x01\x80", "d/b": b"othXY", "d/empty": b""},
    ),
    "truncate": (
        lambda root: damage.truncate(root / "d/b", 0),
        {"a": b"\x01\x80", "d/b": b"", "d/empty": b""},
    ),
    "extend": (
        lambda root: damage.extend(root / "d/empty", b"12"),
        {"a": b"\x01\x80", "d/b": b"other", "d/empty": b"12"},
    ),
    "remove": (
        lambda root: damage.remove(root / "a"),
        {"d/b": b"other", "d/empty": b""},
    ),
    "remove folder": (lambda root: damage.remove(root / "d"), {"a": b"\x01\x80"}),
    "duplicate over": (
        lambda root: damage.duplicate(root / "a", root / "d/b"),
        {"a": b"\x01\x80", "d/b": b"\x01\x80", "d/empty": b""},
    ),
    "duplicate into new folders": (
        lambda root: damage.duplicate(root / "a", root / "new/er/a"),
        {
            "a": b"\x01\x80",
            "d/b": b"other",
            "d/empty": b"",
            "new/er/a": b"\x01\x80",
        },
    ),
    "duplicate folder": (
        lambda root: damage.duplicate(root / "d", root / "e"),
        {
            "a": b"\x01\x80",
            "d/b": b"other",
            "d/empty": b"",
            "e/b": b"other",
            "e/empty": b"",
        },
    ),
    "exchange": (
        lambda root: damage.exchange(root / "a", root / "d/b"),
        {"a": b"other", "d/b": b"\x01\x80", "d/empty": b""},
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_done_and_undone_without_a_trace(name: str, folder: Path) -> None:
    do, expected = DAMAGES[name]
    before = picture(folder)
    with do(folder) as done:
        files = {k: v for k, (v, _) in picture(folder).items() if v is not None}
        assert files == expected
    assert picture(folder) == before
    done.undo()  # only once
    assert picture(folder) == before


def test_damages_on_top_of_each_other_are_undone_last_first(folder: Path) -> None:
    before = picture(folder)
    with (
        damage.exchange(folder / "a", folder / "d/b"),
        damage.truncate(folder / "a", 2),
        damage.flip_bit(folder / "a", 9),
        damage.remove(folder / "a"),
    ):
        assert not (folder / "a").exists()
    assert picture(folder) == before


def test_what_is_not_there_cannot_be_damaged(folder: Path) -> None:
    before = picture(folder)
    with pytest.raises(errors.OptionError, match="bit 16 is not in"):
        damage.flip_bit(folder / "a", 16)
    with pytest.raises(errors.OptionError, match="cannot be cut to 2 bytes"):
        damage.truncate(folder / "a", 2)
    with pytest.raises(errors.OptionError, match="has 5"):
        damage.overwrite(folder / "d/b", b"12", at_bytes=4)
    with pytest.raises(FileNotFoundError):
        damage.remove(folder / "c")
    assert picture(folder) == before


def test_every_file_of_a_real_root_has_its_kind(tiny_run: Any, tmp_path: Path) -> None:
    run = tiny_run()
    options = cnr.Options(policy=cnr.Consecutive())
    orbax = ocp.CheckpointManagerOptions(step_prefix="ck", step_format_fixed_length=4)
    with cnr.CheckpointManager(
        tmp_path, tables=run.tables, options=options, orbax_options=orbax
    ) as manager:
        run.run(manager, range(2))
    (tmp_path / "ck_0007.orbax-checkpoint-tmp/default").mkdir(parents=True)
    (tmp_path / "ck_0007.orbax-checkpoint-tmp/default/manifest.json").touch()
    files = damage.files_of(tmp_path)
    assert [file.path for file in files] == sorted(
        path
        for step in ("ck_0000", "ck_0001")
        for path in (tmp_path / step).rglob("*")
        if path.is_file()
    )
    for step in (0, 1):
        of_step = [file for file in files if file.step == step]
        assert all(
            file.path.is_relative_to(tmp_path / f"ck_000{step}") for file in of_step
        )
        kinds = collections.Counter(file.kind for file in of_step)
        assert kinds["manifest"] == kinds["process_manifest"] == 1
        # One of them is of dense leaves.
        assert kinds["zarr_metadata"] == 1 + len(
            {file.array for file in of_step if file.kind == "array"}
        )
        arrays = {file.array for file in of_step}
        assert arrays >= {"raw.rows.float32", "asymmetric.codes.uint8", ""}
        # A full checkpoint holds all rows and needs no ids.
        assert ("row_ids" in arrays) == (step == 1)
        assert kinds["dense"] == 1 and kinds["array"] >= 4
        orbax_files = {file.path.name for file in of_step if file.kind == "orbax"}
        assert orbax_files == {"_CHECKPOINT_METADATA", "commit_success.txt"}


def test_objects_of_a_root_in_a_bucket_are_damaged_as_files_are(
    tiny_run: Any, bucket: epath.Path, tmp_path: Path
) -> None:
    run, root, store = tiny_run(), bucket / "run", store_of(bucket)
    for where in (str(root), tmp_path):
        with run.open(where) as manager:
            run.run(manager, range(2))
            run.restore(manager, 0)
    with run.open(str(root)) as manager:
        run.restore(manager, 0)
        run.run(manager, [1])  # which is `1.g2.branch` there
    files = damage.files_of(str(root))
    assert {str(file.path).split("/")[4] for file in files} == {"0", "1.g2.branch"}
    # A step that commits itself by a rename has no file more.
    assert collections.Counter((file.step, file.kind) for file in files) == (
        collections.Counter(
            (file.step, file.kind) for file in damage.files_of(tmp_path)
        )
    )
    path = next(file.path for file in files if file.kind == "process_manifest")
    whole = store.read(path)
    with damage.of_stored(path, lambda copy: damage.flip_bit(copy, 11)):
        assert store.read(path) == bytes([whole[0], whole[1] ^ 8]) + whole[2:]
    with damage.of_stored(path, damage.remove):
        assert not exists(path)
    assert store.read(path) == whole
    assert [each for each in cnr.verify(str(root)) if each.consequence] == []
