"""What a root holds, step by step, without jax, Orbax and TensorStore.

Manifests are read and checked, and the sizes of the files that they name; what is in those files
is not: `verify` reads it.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Iterable, Mapping

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import DenseLeaf, Manifest, TableEntry
from cnr_jax.format.tiles import ProcessManifest
from cnr_jax.repository.description import (
    RootDescription,
    StepDescription,
)
from cnr_jax.repository.index import suspects
from cnr_jax.repository.index.chains import Chains
from cnr_jax.repository.index.entries import Entry, entry_of
from cnr_jax.repository.index.folders import saved_by
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import (
    beside,
    check_can_be_read,
    open_root,
    step_directories,
)
from cnr_jax.repository.step import (
    held_tables,
    read_processes,
    read_step,
    without_collections,
)
from cnr_jax.repository.store import (
    AnyPath,
    can,
    is_directory,
    size_of,
    store_of,
)
from cnr_jax.repository.store.checked import (
    MISTAKABLE,
    UNKNOWN,
    check_dense_index,
    check_size,
    damage,
    file_bytes,
    mistakable_files,
    numpy_dtype,
    refuse_pipe,
)
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
    """What a root holds: kinds, parents, bytes by table, reasons, and what can be restored.

    Changes nothing, and imports neither jax nor Orbax, so it takes milliseconds a step. A run
    may be saving there. Steps that cannot be read are described as that; folders that are no
    steps are left out.

    Args:
        root: directory of the checkpoints: a local path, a `file://` or a `gs://` URL.
        item: the item of each step to look at; None: the one in which most of the newest steps
            hold a checkpoint of this library.
        on_step: called after each step with the number of steps that were looked at, and of
            all.

    Returns:
        A value that prints as a table of steps; `asdict()` makes JSON of it.

    Raises:
        NoStepError: if there is no such folder, or a save that is not committed has moved its
            steps away; it is a FileNotFoundError too.
        OptionError: if checkpoints cannot be kept in such a root, or it is a file, or a step
            of a root.
        OSError: if the root cannot be seen or listed.

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
    path = open_root(root)
    check_can_be_read(path, item)
    # Joining names to paths of Orbax takes longer than to read.
    plain = store_of(path).quick(path)
    if item is None:
        item = find_item(plain)
    found = _look_at_all(plain, item, on_step)
    check_is_here(plain)  # after the look, before which nothing may have been moved yet
    lacking = {(s.directory, s.uuid) for s in suspects.read(plain)} if found else set()
    chains = _chains(found)
    steps = [
        dataclasses.replace(
            each.step,
            problem=_in_a_line(_obstacle(each, chains), plain),
            may_lack_rows=each.entry is not None and (name, each.entry.uuid) in lacking,
        )
        for name, each in found.items()
    ]
    steps.sort(key=lambda s: (s.generation, s.step, s.directory))
    newest = chains.newest()
    return RootDescription(
        root=os.fspath(path),
        item=item,
        steps=tuple(steps),
        latest_step=newest.step if newest else None,
        **beside(plain),
    )


def _look_at_all(
    root: AnyPath, item: str | None, on_step: Callable[[int, int], None] | None
) -> dict[str, _Found]:
    """The steps of a root by directory, each by itself."""
    found: dict[str, _Found] = {}
    directories = step_directories(root)
    with without_collections():
        for done, directory in enumerate(directories, start=1):
            each = _look(root, directory, item)
            if each is not None and (each.damage or each.spoilt):
                # It may have been replaced meanwhile.
                each = _look(root, directory, item)
            if each is not None:
                found[directory] = each
            if on_step is not None:
                on_step(done, len(directories))
    _drop_removed(root, found)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A step by itself.

    Attributes:
        step: described without what its parents mean for it.
        entry: None if there is no manifest that can be read.
        damage: why neither it nor what rests on it can be restored.
        spoilt: why it cannot be restored, though others can rest on it.
    """

    step: StepDescription
    entry: Entry | None = None
    damage: str = ""
    spoilt: str = ""


def _chains(found: Mapping[str, _Found]) -> Chains:
    """What the chains of steps come to."""
    chains = Chains()
    for name, each in found.items():
        if each.entry is None:
            chains.note_unreadable(name, each.damage or each.spoilt)
            continue
        chains.add(each.entry)
        if each.damage or each.spoilt:
            reason = each.damage or each.spoilt
            chains.harm(name, reason, only_dense=not each.damage)
    return chains


def _obstacle(found: _Found, chains: Chains) -> str:
    """Why a step cannot be restored; empty: it can."""
    own = found.damage or found.spoilt
    return own if found.entry is None else chains.obstacle(found.entry)


def _look(root: AnyPath, directory: str, item: str | None) -> _Found | None:
    """A step by itself; None for a folder that is no step."""
    number = names.step_number(directory)
    where = root / directory / (item or "default")
    kind = saved_by(root / directory, where.name)
    if kind == "orbax":
        step = StepDescription(step=number, directory=directory, kind="orbax")
        return _Found(step=step, spoilt=OF_ORBAX)
    if kind is None:
        return None
    unreadable = StepDescription(step=number, directory=directory, kind="unreadable")
    try:
        manifest = read_step(root, directory, where.name)
        step = _described(directory, manifest, size_of(where / names.MANIFEST))
    except (errors.CnrError, OSError) as error:
        return _Found(step=unreadable, damage=str(error))
    entry, spoilt = entry_of(directory, manifest), ""
    try:
        processes = read_processes(where, manifest)
        step = dataclasses.replace(step, tables=held_tables(manifest, processes))
        if can(root).cheap_looks:
            _check_rows(where, processes)
    except (errors.CnrError, OSError) as error:
        return _Found(step=step, entry=entry, damage=str(error))
    try:
        check_dense_index(manifest, where)
        if can(root).cheap_looks:
            _check_dense(where, manifest, processes)
            refuse_pipe(root / directory / names.ORBAX_METADATA)
    except (errors.CnrError, OSError) as error:
        spoilt = str(error)
    return _Found(step=step, entry=entry, spoilt=spoilt)


def _drop_removed(root: AnyPath, found: dict[str, _Found]) -> None:
    """Forgets steps that somebody has removed since they were looked at."""
    # A parent goes after its children: until no more is found to be gone.
    while gone := _gone(root, found):
        for name in gone:
            del found[name]


def _gone(root: AnyPath, found: Mapping[str, _Found]) -> list[str]:
    """Steps that cannot be restored and are not there any more."""
    chains = _chains(found)
    return [
        name
        for name, each in found.items()
        if _obstacle(each, chains) and not is_directory(root / name)
    ]


def _described(directory: str, manifest: Manifest, own_bytes: int) -> StepDescription:
    """What a manifest tells of its step; `own_bytes` is the size of the manifest."""
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
        manifest_bytes=totals.manifest_bytes + own_bytes,
        state_bytes=state_bytes(manifest.tables, manifest.dense_leaves),
        secs=manifest.history[-1].secs if manifest.history else None,
        saved_at=_time(manifest.written_at_unix_secs),
        restores=manifest.restores,
    )


def state_bytes(tables: Iterable[TableEntry], dense: Iterable[DenseLeaf]) -> int:
    """Bytes of the arrays of a state, as they are in memory."""
    of_tables = [leaf for table in tables for leaf in table.leaves]
    dense = [leaf for leaf in dense if leaf.kind == "array"]
    return sum(
        math.prod(leaf.shape) * numpy_dtype(leaf.dtype).itemsize
        for leaf in (*of_tables, *dense)
    )


def _time(unix_secs: float) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromtimestamp(unix_secs, tz=datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return None  # no year that there is


def _check_rows(item: AnyPath, processes: Iterable[ProcessManifest]) -> None:
    """Checks that files of arrays are there and as long as they should be.

    Raises:
        IntegrityError: at the first that is not.
    """
    for process in processes:
        rows = names.rows_directory(process.process)
        for name, entry in process.arrays.items():
            for chunk, nbytes in enumerate(file_bytes(entry)):
                _check_file(item, f"{rows}/{name}/c/{chunk}", nbytes)


def _check_dense(
    item: AnyPath, manifest: Manifest, processes: Iterable[ProcessManifest]
) -> None:
    """Checks that files in `dense/` are there, as long as they should be, and no misleading ones.

    Raises:
        IntegrityError: at the first that is not.
    """
    if manifest.has_dense_tiles:
        for process in processes:
            sizes = file_bytes(process.dense.array) if process.dense else ()
            for chunk, nbytes in enumerate(sizes):
                array = names.dense_array(process.process)
                _check_file(item, f"{array}/c/{chunk}", nbytes)
        return
    for digest in manifest.dense_files:
        _check_file(item, digest.path, digest.bytes)
    for path in mistakable_files(
        item, [digest.path for digest in manifest.dense_files]
    ):
        raise damage(item / path, MISTAKABLE, UNKNOWN)


def _check_file(item: AnyPath, path: str, nbytes: int) -> None:
    # A step has a dozen files, a root thousands of steps: only what is wrong is looked at closely.
    try:
        is_right = next(store_of(item).amiss(item, [(path, nbytes)]), None) is None
    except OSError:
        is_right = False
    if not is_right:
        check_size(item / path, nbytes)


def _in_a_line(text: str, root: AnyPath) -> str:
    """The first line of an error, with paths below the root."""
    return text.partition("\n")[0].replace(f"{os.fspath(root)}/", "")
