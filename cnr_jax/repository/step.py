"""The manifests of a checkpoint and of the chain it rests on, read and checked, without arrays.

Nothing is believed before its digest was compared: `manifest.json` carries its own digest and
names those of the process manifests and dense files, these name the checksums of the arrays.

A parent is named by directory and uuid. Following the names backwards ends at a full checkpoint,
or with an error that shows the chain and says what to restore instead.
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
    """The manifest of a checkpoint item.

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
    """The manifest of a step that is committed.

    Where directories cannot be renamed, one that holds a manifest need not be: a run may have
    been killed right before the file that commits it was written.

    Raises:
        IntegrityError: if it is missing, or the step is not committed.
        FormatError: see `read_manifest`.
    """
    manifest = read_manifest(root / directory / item)
    check_committed(root, directory)
    return manifest


def check_committed(root: AnyPath, directory: str) -> None:
    """Checks that a step is committed; one that is renamed for it always is.

    Raises:
        IntegrityError: if not.
    """
    commit = root / directory / names.ATTEMPT
    if not can(root).renames and not is_committed(root / directory):
        raise errors.IntegrityError(
            f"step {directory} was never committed: {os.fspath(commit)} does not say so",
            kind="not_committed",
            path=os.fspath(commit),
        )


def what_is_in(root: AnyPath, directory: str) -> Literal["step", "attempt", "nothing"]:
    """What a folder that is called like a step holds, where that can be told; else "step".

    An attempt that is not committed is being written, or was killed: where attempts hold folders,
    and where a save has a name of its own. Some stores list folders for a while in which nothing
    is any more.

    Raises:
        OSError: if that cannot be seen.
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
    """Of folders that are called like steps those that may be some, and those of attempts.

    Raises:
        OSError: if that cannot be seen.
    """
    found = {name: what_is_in(root, name) for name in directories}
    steps = [name for name, what in found.items() if what == "step"]
    return steps, tuple(name for name, what in found.items() if what == "attempt")


def read_step(root: AnyPath, directory: str, item: str) -> Manifest:
    """The manifest of a step, which must be that of the step whose directory it is in.

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
    """Which checkpoint a step is; None if it cannot be told."""
    try:
        return read_step(root, directory, item).uuid
    except (errors.CnrError, OSError):
        return None


def is_same_step(root: AnyPath, directory: str, item: str, uuid: str | None) -> bool:
    """Whether a step that failed to be read is still there, so that it is the step that is wrong.

    Retention and rollbacks give a step another name before anything of it is deleted, and those
    that rest on it before it; where nothing can be renamed, what commits it is deleted first.

    Args:
        root: holds the steps.
        directory: of the step; empty: there is none.
        item: of it.
        uuid: of the checkpoint that it was; None: not known.
    """
    try:
        if not (directory and is_directory(root / directory)):
            return False
        return uuid is None or read_step(root, directory, item).uuid == uuid
    except errors.CnrError as error:
        missing = error.kind in ("manifest_missing", "not_committed")
        return can(root).renames or not missing
    except OSError:
        return True


# How often the newest step is chosen again, where each was taken away while it was read.
TRIES = 10


def deleted_step(root: AnyPath, step: object) -> errors.NoStepError:
    """The error for a step that was in a root, and is not any more.

    Args:
        root: held it.
        step: its number, or the name of its directory.
    """
    return errors.NoStepError(
        f"step {step} is not in {os.fspath(root)} any more\n"
        "  hint: who saves there has deleted it, or moved it aside, perhaps while it was read;"
        " where no step is named, the newest that is there is taken",
        kind="step_deleted",
        path=os.fspath(root),
    )


def read_process(directory: AnyPath, manifest: Manifest, index: int) -> ProcessManifest:
    """The manifest of one process of a checkpoint item.

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
    """The manifests of all processes of a checkpoint item, which must hold all that it is of.

    Raises:
        IntegrityError: if one is missing or damaged, or rows of a full checkpoint are lacking:
            they would restore as zeros.
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
    """The files that a checkpoint item has beside `manifest.json`, with their sizes in bytes.

    Attributes:
        rows: manifests of processes, and chunks of rows: what rests on the step needs them too.
        dense: of dense leaves.
        told: `zarr.json` of arrays, for other programs: a restore goes by the manifests.
    """

    rows: tuple[tuple[str, int], ...]
    dense: tuple[tuple[str, int], ...]
    told: tuple[tuple[str, int], ...]

    @property
    def paths(self) -> set[str]:
        """Of all of them, below the item."""
        return {path for files in self for path, _ in files}


def files_of(manifest: Manifest, processes: Sequence[ProcessManifest]) -> StepFiles:
    """The files that a checkpoint item must have, whoever has written its dense leaves.

    Args:
        manifest: of the item.
        processes: whose manifests are known; nobody knows the files of others.

    Raises:
        FormatError: if an array is of a dtype that is not known.
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
    """Checks that all dense leaves of a checkpoint item are stored, as its manifests tell.

    That is no business of a step that rests on it: dense leaves come from the restored one alone.

    Args:
        directory: of the item.
        manifest: of it.
        processes: all of them; None: not known, and so no tiles are looked at.

    Raises:
        ManifestError: if tiles do not cover them.
        IntegrityError: if Orbax, where it has written them, has not come to its end.
    """
    if not manifest.has_dense_tiles:
        check_dense_index(manifest, directory)
    elif processes is not None:
        check_dense_tiles(directory, manifest, processes)


def check_dense_tiles(
    directory: AnyPath, manifest: Manifest, processes: Sequence[ProcessManifest]
) -> None:
    """Checks that tiles cover the dense leaves of a checkpoint item.

    Raises:
        ManifestError: if they do not.
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
