"""Writing `manifest.json`: checks what all processes wrote, describes it and makes it durable."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import time

import jax

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.dense import check_dense_cover
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.format.manifest import (
    DenseLeaf,
    FileDigest,
    HistoryEntry,
    Manifest,
    SampledMotion,
    TableEntry,
    Totals,
    Tracking,
    bounded_history,
    dump,
    joined_motion,
)
from cnr_jax.format.tiles import (
    ProcessManifest,
    check_cover,
    dump_process,
    load_process,
)
from cnr_jax.repository.index.save_plan import MergedBaseline, SavePlan
from cnr_jax.repository.rows_writer import Written
from cnr_jax.repository.store import (
    AnyPath,
    digest_of,
    exists,
    read_all,
    store_of,
    sync_directory,
    write_durably,
)
from cnr_jax.repository.store.checked import read_checked
from cnr_jax.repository.table_sizes import totals_of


def write_manifest(
    directory: AnyPath,
    plan: SavePlan,
    own: Written,
    *,
    root: AnyPath,
    history: tuple[HistoryEntry, ...],
    tables: tuple[TableEntry, ...],
    dense_leaves: tuple[DenseLeaf, ...],
    tracking: Tracking,
    recorded_clock: int | None,
    fingerprint_clock: int | None,
    encoding: EncodingEntry,
    started_secs: float,
) -> tuple[Manifest, int, list[ProcessManifest]]:
    """Checks that all processes have written their part of a save, and writes its manifest.

    Args:
        directory: directory of the item.
        plan: plan of the save.
        own: what this process has written.
        root: root that the save goes to.
        history: saves of the branch since its latest full save, without this one.
        tables: tables of the state, as the manifest lists them.
        dense_leaves: leaves of the state that belong to no table, as the manifest lists them.
        tracking: how changed rows were found.
        recorded_clock: clock of the touched rows; None: none were used.
        fingerprint_clock: clock of the stamps made from fingerprints; None: these did not choose
            the rows.
        encoding: encoding of the rows of the run, codecs of single saves aside.
        started_secs: reading of `time.perf_counter` when the save was asked for.

    Order: everything that the manifest names is durable before the manifest is written, and
    the manifest is durable before the step is committed.

    Returns:
        The manifest, its size in bytes, and the manifests of all processes.

    Raises:
        IntegrityError: if a process manifest is missing or belongs to another save.
        ManifestError: if the processes together have not written all of the state.
    """
    digests, processes = _read_processes(directory, plan.uuid, own)
    if plan.baseline is not None:
        digest, merged = _bring(root, directory, plan.baseline, plan.uuid)
        digests, processes = (*digests, digest), [*processes, merged]
    tiles = [tile for process in processes for tile in process.tiles]
    check_cover(tables, tiles, os.fspath(directory))
    dense = (tile for each in processes for tile in each.dense_tiles)
    check_dense_cover(dense_leaves, dense, os.fspath(directory))
    totals = totals_of(processes, digests)
    features = {each for process in processes for each in process.features}
    features |= {names.BASELINE} if plan.baseline else set()
    manifest = Manifest(
        uuid=plan.uuid,
        step=plan.step,
        kind=plan.kind,
        generation=plan.generation,
        lineage=plan.lineage,
        tracking=tracking,
        recorded_clock=recorded_clock,
        fingerprint_clock=fingerprint_clock,
        parent=plan.rests_on,
        processes=digests,
        dense_files=(),
        dense_leaves=dense_leaves,
        tables=tables,
        totals=totals,
        policy=plan.policy,
        reason=plan.reason,
        history=_history(history, plan, totals, started_secs),
        restores=plan.restores,
        written_at_unix_secs=round(time.time(), 3),
        writer=software(),
        required_features=tuple(sorted(features)),
        run=plan.run or None,
        forks=plan.forks,
        encoding=encoding,
        motion=_motion(processes, encoding),
        outgrown=tuple(sorted({name for each in processes for name in each.outgrown})),
    )
    digest = write_durably(directory / names.MANIFEST, dump(manifest))
    sync_directory(directory)
    return manifest, digest.bytes, processes


def _bring(
    root: AnyPath, directory: AnyPath, baseline: MergedBaseline, uuid: str
) -> tuple[FileDigest, ProcessManifest]:
    """Moves the rows of a baseline into the item of a save, which names them in its manifest.

    Args:
        root: root that holds the folder of the baseline.
        directory: directory of the item.
        baseline: the baseline.
        uuid: uuid of the save.

    Returns:
        Digest and contents of the process manifest, which is durable.

    Raises:
        IntegrityError: if the manifest of the baseline is missing or damaged.
        OSError: if a file cannot be read or written.
    """
    folder, process = root / baseline.folder, baseline.process
    path = names.process_manifest(process)
    known = FileDigest(path=path, bytes=baseline.bytes, sha256=baseline.digest)
    found = load_process(read_checked(folder, known), os.fspath(folder / path))
    made = dataclasses.replace(found, uuid=uuid)
    rows = names.rows_directory(process)
    if made.arrays:
        store_of(folder).move(folder / rows, directory / rows)
    digest = write_durably(directory / path, dump_process(made))
    store_of(folder).remove_tree(folder)  # what is left of it
    return digest, made


def _read_processes(
    directory: AnyPath, uuid: str, own: Written
) -> tuple[tuple[FileDigest, ...], list[ProcessManifest]]:
    digests: list[FileDigest] = []
    processes: list[ProcessManifest] = []
    for i in range(jax.process_count()):
        if i == own.manifest.process:
            digests.append(own.digest)
            processes.append(own.manifest)
            continue
        path = directory / names.process_manifest(i)
        if not exists(path):
            raise errors.IntegrityError(
                f"process {i} has not written its part of the save\n"
                f"  {os.fspath(path)} is missing",
                kind="process_missing",
            )
        data = read_all(path)
        process = load_process(data, os.fspath(path))
        if process.uuid != uuid:
            raise errors.IntegrityError(
                f"process {i} has written another save\n"
                f"  got {process.uuid}, expected {uuid}",
                kind="process_missing",
            )
        digests.append(digest_of(path.name, data))
        processes.append(process)
    return tuple(digests), processes


def _motion(
    processes: list[ProcessManifest], encoding: EncodingEntry
) -> SampledMotion | None:
    """How far rows have moved; None if that is not known."""
    counted = {table for each in processes for table in each.row_errors or ()}
    if not counted:
        # No row was rounded, such as in a save of all bits. Then the tables count that another save
        # would round, or all tables in a run that rounds nothing.
        told = {table for each in processes for table in each.motion or ()}
        counted = {n for n in told if not encoding.is_exact(n)} or told
    return joined_motion(
        motion
        for each in processes
        for table, motion in (each.motion or {}).items()
        if table in counted
    )


def _history(
    before: tuple[HistoryEntry, ...],
    plan: SavePlan,
    totals: Totals,
    started_secs: float,
) -> tuple[HistoryEntry, ...]:
    """The history of the branch, with this save as its last entry."""
    saved = HistoryEntry(
        step=plan.step,
        kind=plan.kind,
        bytes=totals.table_bytes + totals.slot_bytes,
        rows=totals.rows,
        # Rounded, because a manifest's digest is taken over its text.
        secs=round(time.perf_counter() - started_secs, 6),
    )
    return bounded_history((*before, saved))


def software() -> dict[str, str]:
    """Versions of the software that writes manifests."""
    return {"cnr_jax": _version("cnr-jax"), "jax": jax.__version__}


@functools.cache
def _version(package: str) -> str:
    # The search among all installed packages takes 1 ms.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
