"""Description of what a root holds, step by step, without jax, Orbax and TensorStore.

It reads and checks manifests, and looks at the sizes of the files that they name. It does not read
these files: `verify` does.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Iterable, Sequence

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import DenseLeaf, Manifest, TableEntry
from cnr_jax.format.tiles import ProcessManifest
from cnr_jax.garbage import without_collections
from cnr_jax.repository import layout, store
from cnr_jax.repository.causes import using_root
from cnr_jax.repository.description import (
    RootDescription,
    StepDescription,
)
from cnr_jax.repository.index import suspects
from cnr_jax.repository.index.chains import Harm
from cnr_jax.repository.index.entries import brings_baseline
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.step import (
    check_dense,
    files_of,
    read_processes,
    sorted_out,
)
from cnr_jax.repository.store import checked
from cnr_jax.repository.table_sizes import held_tables, totals_of
from cnr_jax.repository.upkeep.aside import check_is_here

OF_ORBAX = (
    "of plain Orbax, which restores it, as does a manager with Options(adopt=True)"
)


def describe(
    root: str | os.PathLike[str],
    *,
    item: str | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> RootDescription:
    """Describes what a root holds: kinds, parents, bytes by table, reasons, and what restores.

    It changes nothing, and a run may be saving there. It imports neither jax nor Orbax, so it takes
    milliseconds a step. Steps that cannot be read are in the description as such. Folders that are
    no steps are not.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
        item: name of the item of each step to look at; None: the one in which most of the newest
            steps hold a checkpoint of this library.
        on_step: function that is called after each step, with the number of steps looked at so far,
            and the number of all steps.

    Returns:
        The description, which prints as a table of steps; `asdict()` turns it into JSON.

    Raises:
        NoStepError: if there is no such folder, or a save that is not committed has moved its steps
            away; it is a FileNotFoundError too.
        OptionError: if the path cannot be a root, or is a file, or a step of a root.
        OSError: if the root cannot be seen or listed; for a bucket a `RootError`.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root = tempfile.mkdtemp()
        >>> state = {"user": jnp.zeros((8, 4))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> found = cnr.describe(root)
        >>> found.latest_step, found.steps[0].kind, found.steps[0].tables[0].saved_rows
        (0, 'full', 8)
    """
    path = layout.open_root(root)
    with using_root(path):
        return _description(path, item, on_step)


def _description(
    path: store.AnyPath, item: str | None, on_step: Callable[[int, int], None] | None
) -> RootDescription:
    """What a root holds; see `describe`."""
    layout.check_can_be_read(path, item)
    # Joining names to Orbax's paths takes longer than reading the files.
    plain = store.store_of(path).quick(path)
    if item is None:
        item = find_item(plain)
    index = Ledger(says=False)
    held, cut = sorted_out(plain, layout.step_directories(plain))
    found = look_into(plain, item or "default", index, held, on_step)
    check_is_here(
        plain
    )  # after the look, during which the steps may have been moved away
    index.part()
    index.note_strays()
    lacking = {each.uuid for each in suspects.read(plain)} if found else set()
    steps = [
        dataclasses.replace(
            step,
            problem=_in_a_line(_obstacle(index, name), plain),
            may_lack_rows=name in index.entries
            and any(map(index.entries[name].answers_to, lacking)),
        )
        for name, step in found.items()
        if name not in index.left
    ]
    steps.sort(key=lambda s: (s.generation, s.step, s.directory))
    newest = index.newest()
    beside = layout.beside(plain)
    beside["unfinished"] += cut
    beside["abandoned"] += tuple(sorted(index.left))
    return RootDescription(
        root=os.fspath(path),
        item=item,
        steps=tuple(steps),
        latest_step=newest.step if newest else None,
        **beside,
    )


def look_into(
    root: store.AnyPath,
    item: str,
    index: Ledger,
    directories: Sequence[str],
    on_step: Callable[[int, int], None] | None = None,
) -> dict[str, StepDescription]:
    """Looks at the files of steps, without reading what is in them.

    Args:
        root: root that holds the step directories.
        item: name of the item of this library in each of them.
        index: ledger of the root. It first reads the steps that it does not know, and notes what is
            wrong with them, and which have been removed meanwhile.
        directories: names of the step directories.
        on_step: see `describe`.

    Returns:
        The steps by directory, each without what its parents mean for it. Folders that neither this
        library nor Orbax has saved are left out.
    """
    found: dict[str, StepDescription] = {}
    known = index.directories()
    with without_collections():
        for done, directory in enumerate(directories, start=1):
            if directory not in known:
                index.read(root, directory, item)
            step, harm = _look(root, item, index, directory)
            if harm is not None or directory in index.folders:
                # It may have been replaced meanwhile.
                index.read(root, directory, item)
                step, harm = _look(root, item, index, directory)
            if step is not None:
                found[directory] = step
            if harm is not None:
                index.note_harm(directory, harm)
            if on_step is not None:
                on_step(done, len(directories))
    # Somebody may have removed some meanwhile. Steps whose parents are gone may be gone too, so
    # this goes on until no more are found.
    while gone := [
        name
        for name in found
        if _obstacle(index, name) and not store.is_directory(root / name)
    ]:
        for name in gone:
            del found[name]
            index.forget(name)
    return found


def _obstacle(index: Ledger, directory: str) -> str:
    """Why a step cannot be restored; empty: it can."""
    if directory in index.entries:
        return index.obstacle(index.entries[directory])
    folder = index.folders[directory]
    return OF_ORBAX if folder.kind == "orbax" else folder.why


def _look(
    root: store.AnyPath, item: str, index: Ledger, directory: str
) -> tuple[StepDescription | None, Harm | None]:
    """Looks at one step: describes it, without what its parents mean for it, and finds its harm.

    The description is None for a folder that is no step, or is gone.
    """
    number, where = names.step_number(directory), root / directory / item
    entry, folder = index.entries.get(directory), index.folders.get(directory)
    if (entry and entry.orbax) or (folder and folder.kind == "orbax"):
        return StepDescription(step=number, directory=directory, kind="orbax"), None
    if folder and folder.kind == "own":
        step = StepDescription(step=number, directory=directory, kind="unreadable")
        return step, None
    if entry is None or entry.manifest is None:
        return None, None
    manifest = entry.manifest
    try:
        step = _described(directory, manifest)
    except errors.CnrError as error:
        step = StepDescription(step=number, directory=directory, kind="unreadable")
        return step, Harm(str(error), itself_alone=False)
    try:
        own_bytes = step.manifest_bytes + store.size_of(where / names.MANIFEST)
        step = dataclasses.replace(step, manifest_bytes=own_bytes)
        if manifest.stands_for:
            step = _all_merged(step)
        processes = read_processes(where, manifest)
        step = dataclasses.replace(step, tables=held_tables(manifest, processes))
        if brings_baseline(manifest):
            step = _with_baseline(step, manifest, processes)
        files = files_of(manifest, processes)
        if store.can(root).cheap_looks:
            checked.check_files(where, files.rows)
    except (errors.CnrError, OSError) as error:
        return step, Harm(str(error), itself_alone=False)
    try:
        check_dense(where, manifest, processes)
        if store.can(root).cheap_looks:
            checked.check_files(where, files.dense)
            checked.refuse_misleading(where, manifest)
            checked.refuse_pipe(root / directory / names.ORBAX_METADATA)
    except (errors.CnrError, OSError) as error:
        return step, Harm(str(error), itself_alone=True)
    return step, None


def _described(directory: str, manifest: Manifest) -> StepDescription:
    """What a manifest tells of its step; its own size is left out."""
    totals, parent = manifest.totals, manifest.parent
    return StepDescription(
        step=manifest.step,
        directory=directory,
        kind=manifest.kind,
        parent=names.step_number(parent.directory) if parent else None,
        generation=manifest.generation,
        run=manifest.run,
        policy=manifest.policy,
        reason=manifest.reason,
        rows=totals.rows,
        table_bytes=totals.table_bytes,
        slot_bytes=totals.slot_bytes,
        dense_bytes=totals.dense_bytes,
        manifest_bytes=totals.manifest_bytes,
        state_bytes=state_bytes(manifest.tables, manifest.dense_leaves),
        secs=manifest.history[-1].secs if manifest.history else None,
        saved_at=utc_time(manifest.written_at_unix_secs),
        restores=manifest.restores,
    )


def _all_merged(step: StepDescription) -> StepDescription:
    """Tells that `compact` has written a step, and no save."""
    return dataclasses.replace(
        step,
        table_bytes=0,
        slot_bytes=0,
        dense_bytes=0,
        manifest_bytes=0,
        merged_bytes=step.total_bytes,
    )


def _with_baseline(
    step: StepDescription, manifest: Manifest, processes: Sequence[ProcessManifest]
) -> StepDescription:
    """Tells apart what a save has written and its baseline, which has the last manifest."""
    brought = totals_of(processes[-1:], manifest.processes[-1:])
    own_bytes = {
        name: max(getattr(step, name) - getattr(brought, name), 0)
        for name in ("table_bytes", "slot_bytes", "manifest_bytes")
    }
    merged_bytes = step.total_bytes - step.dense_bytes - sum(own_bytes.values())
    return dataclasses.replace(step, **own_bytes, merged_bytes=merged_bytes)


def state_bytes(tables: Iterable[TableEntry], dense: Iterable[DenseLeaf]) -> int:
    """Bytes of the arrays of a state in memory."""
    of_tables = [leaf for table in tables for leaf in table.leaves]
    dense = [leaf for leaf in dense if leaf.kind == "array"]
    return sum(
        math.prod(leaf.shape) * checked.numpy_dtype(leaf.dtype).itemsize
        for leaf in (*of_tables, *dense)
    )


def utc_time(unix_secs: float) -> datetime.datetime | None:
    """Time in UTC; None if there is no such year."""
    try:
        return datetime.datetime.fromtimestamp(unix_secs, tz=datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _in_a_line(text: str, root: store.AnyPath) -> str:
    """The first line of an error, with paths below the root."""
    return text.partition("\n")[0].replace(f"{os.fspath(root)}/", "")
