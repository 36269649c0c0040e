"""Manifests of a checkpoint, read and checked, without its arrays.

No file is believed before its digest was compared. `manifest.json` carries its own digest, and
names those of the process manifests and dense files. The process manifests name the checksums of
the arrays.

A manifest names its parent by directory and uuid, so that another step in that directory is not
taken for the parent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.boxes import box_json
from cnr_jax.format.dense import check_dense_cover
from cnr_jax.format.manifest import Manifest, load
from cnr_jax.format.tiles import (
    ProcessManifest,
    check_cover,
    lacking_rows,
    load_process,
)
from cnr_jax.repository.markers import is_committed
from cnr_jax.repository.store import (
    AnyPath,
    can,
    exists,
    is_directory,
    names_in,
    read_all,
)
from cnr_jax.repository.store.checked import (
    about,
    check_dense_index,
    damage,
    file_bytes,
    numpy_dtype,
    read_checked,
    reading,
)


def read_manifest(directory: AnyPath) -> Manifest:
    """Reads the manifest of a checkpoint item.

    Raises:
        IntegrityError: if there is none, or it cannot be read.
        ManifestError: if it is damaged or breaks the format's rules.
        UnsupportedVersionError: if it needs a newer reader.
    """
    path = directory / names.MANIFEST
    try:
        with reading(path):
            data = read_all(path)
    except errors.IntegrityError as error:
        if error.kind != "file_missing":
            raise
        raise errors.IntegrityError(
            f"{os.fspath(directory)} holds no checkpoint: {names.MANIFEST} is missing",
            kind="manifest_missing",
            path=os.fspath(path),
        ) from error
    with about(path):
        return load(data, os.fspath(path))


def read_committed(root: AnyPath, directory: str, item: str) -> Manifest:
    """Reads the manifest of a committed step.

    Where directories cannot be renamed, a step with a manifest need not be committed: the run may
    have been killed right before it wrote the file that commits the step.

    Raises:
        IntegrityError: if it is missing, or the step is not committed.
        FormatError: see `read_manifest`.
    """
    manifest = read_manifest(root / directory / item)
    check_committed(root, directory)
    return manifest


def check_committed(root: AnyPath, directory: str) -> None:
    """Checks that a step is committed; where a rename commits steps, each step is.

    Raises:
        IntegrityError: if it is not.
    """
    commit = root / directory / names.ATTEMPT
    if not can(root).renames and not is_committed(root / directory):
        raise errors.IntegrityError(
            f"step {directory} was never committed: {os.fspath(commit)} does not say so",
            kind="not_committed",
            path=os.fspath(commit),
        )


def what_is_in(root: AnyPath, directory: str) -> Literal["step", "attempt", "nothing"]:
    """What a folder with the name of a step holds; "step" where that cannot be told.

    "attempt": a save that is being written or was killed, as the file of an attempt or the name of
    a branched step shows. "nothing": some stores list folders for a while after all files in them
    are gone.

    Raises:
        OSError: if storage does not tell.
    """
    step = root / directory
    if can(root).renames or is_committed(step):
        return "step"
    held = names_in(step)
    if names.ATTEMPT in held:
        return "attempt"
    if not any(exists(step / name) for name in held if name != names.ORBAX_COMMITTED):
        return "nothing"
    return "attempt" if names.branch_generation(directory) else "step"


def sorted_out(
    root: AnyPath, directories: Iterable[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Sorts folders with names of steps into those that may be steps, and those of attempts.

    Raises:
        OSError: if storage does not tell.
    """
    found = {name: what_is_in(root, name) for name in directories}
    steps = [name for name, what in found.items() if what == "step"]
    return steps, tuple(name for name, what in found.items() if what == "attempt")


def read_step(root: AnyPath, directory: str, item: str) -> Manifest:
    """Reads the manifest of a step, and checks that its number is that in the directory's name.

    Raises:
        IntegrityError: if it is missing, not committed, or of another step.
        FormatError: see `read_manifest`.
    """
    where = root / directory / item
    manifest = read_committed(root, directory, item)
    number = names.step_number(directory)
    if manifest.step != number:
        raise damage(
            where / names.MANIFEST,
            "is of the checkpoint of another step\n"
            f"  got step {manifest.step}, expected {number}, as the folder says\n"
            "  hint: give the folder its name back, if it was copied or renamed",
            "foreign_step",
        )
    return manifest


def uuid_of_step(root: AnyPath, directory: str, item: str) -> str | None:
    """Uuid of the checkpoint of a step; None if its manifest cannot be read."""
    try:
        return read_step(root, directory, item).uuid
    except (errors.CnrError, OSError):
        return None


def is_same_step(root: AnyPath, directory: str, item: str, uuid: str | None) -> bool:
    """Whether a step that could not be read is still there, so that the step itself is damaged.

    Retention and rollbacks rename a step before any file of it is deleted, and the steps that rest
    on it before that. Where nothing can be renamed, the file that commits it is deleted first.

    Args:
        root: root that holds the steps.
        directory: name of the step's directory; empty: there is none.
        item: name of its item.
        uuid: uuid of the checkpoint that it was; None: not known.
    """
    try:
        if not (directory and is_directory(root / directory)):
            return False
        if uuid is None:
            return can(root).renames or is_committed(root / directory)
        return read_step(root, directory, item).uuid == uuid
    except errors.CnrError as error:
        missing = error.kind in ("manifest_missing", "not_committed")
        return can(root).renames or not missing
    except OSError:
        return True


# How often a reader chooses the newest step again if that was removed while it was being read.
TRIES = 10


def deleted_step(root: AnyPath, step: object) -> errors.NoStepError:
    """Error for a step that was in a root, and is there no longer.

    Args:
        root: root that held the step.
        step: number of the step, or the name of its directory.
    """
    return errors.NoStepError(
        f"step {step} is not in {os.fspath(root)} any more\n"
        "  hint: who saves there has deleted it, or moved it aside, perhaps while it was read;"
        " where no step is named, the newest that is there is taken",
        kind="step_deleted",
        path=os.fspath(root),
    )


def read_process(directory: AnyPath, manifest: Manifest, index: int) -> ProcessManifest:
    """Reads the manifest of one process of a checkpoint item.

    Raises:
        IntegrityError: if it is missing or damaged.
        ManifestError: if it breaks the format's rules or is of another checkpoint.
    """
    expected = manifest.processes[index]
    where = os.fspath(directory / expected.path)
    data = read_checked(directory, expected)
    with about(directory / expected.path):
        process = load_process(data, where)
    if process.uuid != manifest.uuid or process.process != index:
        raise errors.ManifestError(
            f"{where} belongs to another checkpoint\n"
            f"  got process {process.process} of {process.uuid},"
            f" expected process {index} of {manifest.uuid}",
            path=where,
        )
    return process


def read_processes(
    directory: AnyPath, manifest: Manifest
) -> tuple[ProcessManifest, ...]:
    """Reads the manifests of all processes of a checkpoint item, and checks that no row is missing.

    Raises:
        IntegrityError: if one is missing or damaged, or a full checkpoint lacks rows, which would
            restore as zeros.
        ManifestError: if one breaks the format's rules or is of another checkpoint, or their
            tiles do not cover the tables.
    """
    found: list[ProcessManifest] = []
    for i, expected in enumerate(manifest.processes):
        process = read_process(directory, manifest, i)
        lacking = lacking_rows(process) if manifest.kind == "full" else []
        if lacking:
            where, tile = os.fspath(directory / expected.path), lacking[0]
            raise errors.IntegrityError(
                f"{where}: a full checkpoint lacks rows of {tile.table}.{tile.leaf}\n"
                f"  no segment of tile {box_json(tile.box)} holds all of its rows;"
                f" {len(lacking)} such tiles",
                kind="rows_missing",
                path=where,
            )
        found.append(process)
    tiles = (tile for process in found for tile in process.tiles)
    check_cover(manifest.tables, tiles, os.fspath(directory))
    return tuple(found)


class StepFiles(NamedTuple):
    """Files that a checkpoint item has beside `manifest.json`: paths, and sizes in bytes.

    Attributes:
        rows: manifests of processes, and chunks of rows. Steps that rest on this one need them too.
        dense: files of dense leaves.
        told: `zarr.json` of arrays, which only other programs read: a restore goes by manifests.
    """

    rows: tuple[tuple[str, int], ...]
    dense: tuple[tuple[str, int], ...]
    told: tuple[tuple[str, int], ...]

    @property
    def paths(self) -> set[str]:
        """Paths of all files, below the item."""
        return {path for files in self for path, _ in files}


def files_of(manifest: Manifest, processes: Sequence[ProcessManifest]) -> StepFiles:
    """Files that a checkpoint item must have, whoever has written its dense leaves.

    Args:
        manifest: manifest of the item.
        processes: process manifests that are known. The files of other processes are left out.

    Raises:
        FormatError: if an array has a dtype that is not known.
    """
    rows = [(digest.path, digest.bytes) for digest in manifest.processes]
    dense = [(digest.path, digest.bytes) for digest in manifest.dense_files]
    told: list[tuple[str, int]] = []
    for process in processes:
        folder = names.rows_directory(process.process)
        arrays = [(f"{folder}/{name}", a, rows) for name, a in process.arrays.items()]
        if process.dense is not None:
            path = names.dense_array(process.process)
            arrays.append((path, process.dense.array, dense))
        for path, array, found in arrays:
            sizes = enumerate(file_bytes(array))
            found += [(f"{path}/c/{chunk}", size) for chunk, size in sizes]
            told.append((f"{path}/zarr.json", array.metadata_bytes))
    return StepFiles(tuple(rows), tuple(dense), tuple(told))


def check_dense(
    directory: AnyPath,
    manifest: Manifest,
    processes: Sequence[ProcessManifest] | None,
) -> None:
    """Checks that all dense leaves of a checkpoint item are stored, by its manifests.

    Only a restore of this step needs that: steps that rest on it have dense leaves of their own.

    Args:
        directory: directory of the item.
        manifest: manifest of the item.
        processes: manifests of all processes; None: not known, so tiles are not checked.

    Raises:
        ManifestError: if tiles do not cover the dense leaves.
        IntegrityError: if Orbax has written the dense leaves, but has not finished.
    """
    if not manifest.has_dense_tiles:
        check_dense_index(manifest, directory)
    elif processes is not None:
        check_dense_tiles(directory, manifest, processes)


def check_dense_tiles(
    directory: AnyPath, manifest: Manifest, processes: Sequence[ProcessManifest]
) -> None:
    """Checks that tiles cover the dense leaves of a checkpoint item, with elements of their size.

    Raises:
        ManifestError: if they do not cover them.
        FormatError: if the elements of a tile have another size than the leaf's dtype.
    """
    tiles = [tile for each in processes for tile in each.dense_tiles]
    check_dense_cover(manifest.dense_leaves, tiles, os.fspath(directory))
    for tile in tiles:
        leaf, size = manifest.dense_leaves[tile.leaf], tile.element_bytes
        is_key = leaf.kind == "key"
        if (is_key and size % 4) or (
            leaf.kind == "array" and size != numpy_dtype(leaf.dtype).itemsize
        ):
            where = os.fspath(directory)
            raise errors.FormatError(
                f"{where}: dense leaf {'/'.join(leaf.path)} has elements of {size} bytes:"
                f" no {leaf.dtype}",
                path=where,
            )
