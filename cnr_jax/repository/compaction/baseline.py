"""Merged baselines: a chain as rows of one process, which a later save brings along.

A save that brings a baseline along is full, although it writes only the rows that the merged step
does not have. So training writes no baselines, and nothing that is committed is replaced: neither
retention nor readers have to know of merges.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Sequence

from cnr_jax.format import names
from cnr_jax.repository.compaction.rows import BLOCK_BYTES, MergedRows
from cnr_jax.repository.index.save_plan import MergedBaseline
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.manifest_writer import totals_of
from cnr_jax.repository.rows_writer import write_process
from cnr_jax.repository.step_reader import open_chain
from cnr_jax.repository.store import AnyPath, store_of
from cnr_jax.repository.store.kept_chunks import KeptChunks

# Bytes of chunks that are kept while rows are cut from them, and that TensorStore may keep.
_KEPT_BYTES, _CACHE_BYTES = 4 * BLOCK_BYTES, 1 << 20
# In the folder of a baseline: what became of the merge.
_NOTE = "merged.json"


def folder_for(directory: str) -> str:
    """A new name for the folder of a baseline, such that readers take it for a save in flight."""
    return f"{directory}{names.TEMPORARY_SUFFIX}-{secrets.randbelow(1 << 48)}"


def write_baseline(
    root: AnyPath, directory: str, item: str, folder: str, process: int
) -> MergedBaseline:
    """Merges the chain of a step into a folder of the root, durably.

    Args:
        root: root that holds the step.
        directory: name of its directory.
        item: name of its item.
        folder: name of the folder, which must not exist.
        process: number of the process whose rows they become.

    Raises:
        ChainError, IntegrityError, FormatError: if a part of the chain is damaged.
        OSError: if a file cannot be read or written.
    """
    path = root / folder
    store_of(path).make_folder(path)
    kept = KeptChunks(_KEPT_BYTES, _CACHE_BYTES)
    chain = open_chain(root, directory, item, kept=kept)
    last = chain[-1].manifest
    compression = last.encoding.compression if last.encoding else None
    rows = MergedRows(chain, path, compression, process=process)
    made = rows.write(last.uuid, dense=False)
    digest = write_process(path, made, syncs=rows.syncs)
    totals = totals_of([made], (digest,))
    return MergedBaseline(
        folder=folder,
        directory=directory,
        uuid=last.uuid,
        process=process,
        layers=1 + max((tile.layer for tile in made.tiles), default=0),
        digest=digest.sha256,
        bytes=digest.bytes,
        table_bytes=totals.table_bytes,
        slot_bytes=totals.slot_bytes,
        merged=len(chain),
    )


def remove_baseline(root: AnyPath, folder: str) -> None:
    """Removes the folder of a baseline, or what is left of it; what stays the next manager removes.

    The folder has a name that nobody else uses, so no lock is needed.
    """
    store_of(root).remove_tree(root / folder)


def problem_of(root: AnyPath, baseline: MergedBaseline) -> str:
    """Why a baseline cannot be brought along: files are gone, or cut short; empty if it can."""
    try:
        found_bytes = store_of(root).bytes_below(root / baseline.folder)
    except OSError as error:
        return str(error)
    if found_bytes == baseline.all_bytes:
        return ""
    return f"{baseline.folder} has {found_bytes:,} bytes of {baseline.all_bytes:,}"


def main(arguments: Sequence[str]) -> None:
    """Merges as `write_baseline` does, in a process of its own; notes what came of it.

    Args:
        arguments: root, and the other arguments of `write_baseline`.
    """
    given, directory, item, folder, process = arguments
    root = open_root(given)
    try:
        made = write_baseline(root, directory, item, folder, int(process))
        told = dataclasses.asdict(made)
    except Exception as error:
        told = {"error": str(error)}
    note = root / folder / _NOTE
    store_of(note).write(note, json.dumps(told).encode(), replaces=True)


def take_note(root: AnyPath, folder: str) -> MergedBaseline:
    """Takes the baseline out of the note that `main` has left in its folder.

    Raises:
        ValueError: saying why it could not be made.
        OSError: if there is no note, or it cannot be read.
    """
    note = root / folder / _NOTE
    told = json.loads(store_of(note).read(note))
    if "error" in told:
        raise ValueError(told["error"])
    store_of(note).remove_file(note)
    return MergedBaseline(**told)
