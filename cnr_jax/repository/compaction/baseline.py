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
from cnr_jax.repository.compaction.rows import MergedRows, cache_for_merge
from cnr_jax.repository.index.save_plan import MergedBaseline
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.rows_writer import write_process
from cnr_jax.repository.step_reader import open_chain
from cnr_jax.repository.store import AnyPath, exists, read_small, store_of
from cnr_jax.repository.table_sizes import totals_of

# In the folder of a baseline: what came of the merge.
_NOTE, _MOST_BYTES = "merged.json", 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Request for a baseline.

    Attributes:
        directory: name of the directory of the step whose chain is to be merged.
        item: name of its item.
        folder: name of the folder for the baseline, see `folder_for`.
        process: number of the process whose rows they become.
    """

    directory: str
    item: str
    folder: str
    process: int


def folder_for(directory: str) -> str:
    """A new name for the folder of a baseline, such that readers take it for a save in flight."""
    return f"{directory}{names.TEMPORARY_SUFFIX}-{secrets.randbelow(1 << 48)}"


def write_baseline(root: AnyPath, request: Request) -> MergedBaseline:
    """Merges the chain of a step into a folder of the root, durably.

    Args:
        root: root that holds the step.
        request: what is asked for.

    Raises:
        ChainError, IntegrityError, FormatError: if a part of the chain is damaged.
        OSError: if a file cannot be read or written.
    """
    path = root / request.folder
    store_of(path).make_folder(path)
    chain = open_chain(
        root, request.directory, request.item, kept=cache_for_merge(root)
    )
    last = chain[-1].manifest
    compression = last.encoding.compression if last.encoding else None
    rows = MergedRows(chain, path, compression, process=request.process)
    made = rows.write(last.uuid, dense=False)
    digest = write_process(path, made, syncs=rows.syncs)
    totals = totals_of([made], (digest,))
    return MergedBaseline(
        folder=request.folder,
        directory=request.directory,
        uuid=last.uuid,
        process=request.process,
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
    """Merges in a process of its own, and notes what came of it.

    Args:
        arguments: the root, and a `Request` as JSON.
    """
    root, request = open_root(arguments[0]), Request(**json.loads(arguments[1]))
    try:
        made = write_baseline(root, request)
    except Exception as error:
        note_failure(root, request.folder, str(error))
    else:
        note(root, made)


def note(root: AnyPath, baseline: MergedBaseline) -> None:
    """Notes in the folder of a baseline that it is complete."""
    _note(root, baseline.folder, dataclasses.asdict(baseline))


def note_failure(root: AnyPath, folder: str, problem: str) -> None:
    """Notes in the folder of a baseline why there is none."""
    _note(root, folder, {"error": problem})


def _note(root: AnyPath, folder: str, told: dict[str, object]) -> None:
    path = root / folder / _NOTE
    store_of(path).write(path, json.dumps(told).encode(), replaces=True)


def is_answered(folder: AnyPath) -> bool:
    """Whether it is noted in the folder of a baseline what came of it."""
    return exists(folder / _NOTE)


def take_note(root: AnyPath, request: Request) -> MergedBaseline:
    """Takes the baseline out of the note in its folder.

    Raises:
        ValueError: saying why it could not be made, or that the note is of another.
        FormatError, OSError: if there is no note, or it cannot be read.
    """
    path = root / request.folder / _NOTE
    told = json.loads(read_small(path, _MOST_BYTES))
    if "error" in told:
        raise ValueError(told["error"])
    found = MergedBaseline(**told)
    for field in dataclasses.fields(MergedBaseline):
        value = getattr(found, field.name)
        # What it does not have for itself is what it was asked for.
        expected = getattr(request, field.name, value)
        if type(value).__name__ != field.type or value != expected:
            raise ValueError(f"its note has {value!r} as {field.name}")
    store_of(path).remove_file(path)
    return found
