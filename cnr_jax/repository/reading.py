"""Reads single rows of a table, and which rows a step holds, from a root without a manager."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import numpy as np

from cnr_jax import errors
from cnr_jax.format.manifest import Manifest, TableEntry
from cnr_jax.format.names import branch_generation, step_number
from cnr_jax.integers import checked_step, step_or_newest
from cnr_jax.repository.causes import using_root
from cnr_jax.repository.index.folders import Folder
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import (
    Place,
    check_can_be_read,
    open_root,
    step_directories,
)
from cnr_jax.repository.replay.encoded import check_rows_stored
from cnr_jax.repository.replay.picked import picked_rows
from cnr_jax.repository.step import (
    TRIES,
    deleted_step,
    is_same_step,
    read_step,
    uuid_of_step,
)
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.repository.store.checked import about
from cnr_jax.repository.store.kept_chunks import KeptChunks
from cnr_jax.repository.upkeep.aside import check_is_here
from cnr_jax.state.layouts import Identity, layout_from
from cnr_jax.state.table import few
from cnr_jax.texts import count_of

_FORMS = (
    "read_rows(root, table, ids, step=...), changed_rows(root, step, table),"
    " export(root, step, directory)"
)
_IMPORT = (
    "  hint: cnr_jax.import_orbax(root, new, tables) makes a checkpoint of cnr_jax of a step of"
    " plain Orbax"
)
_NO_ROOT = (
    "  hint: it holds no steps at all; pass the folder that the manager was given"
)
T = TypeVar("T")


@overload
def read_rows(
    root: str | os.PathLike[str],
    table: str,
    ids: Any,
    step: int | None = None,
    *,
    slots: Literal[False] = False,
    item: str | None = None,
) -> np.ndarray: ...


@overload
def read_rows(
    root: str | os.PathLike[str],
    table: str,
    ids: Any,
    step: int | None = None,
    *,
    slots: Literal[True],
    item: str | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray]]: ...


def read_rows(
    root: str | os.PathLike[str],
    table: str,
    ids: Any,
    step: int | None = None,
    *,
    slots: bool = False,
    item: str | None = None,
) -> Any:
    """Reads rows of a table, as a restore of the step would give them, without reading the others.

    It reads all row ids of the table, and of each array of the chain only the chunks that the rows
    lie in, up to 16 MiB each. It checks every chunk as a restore does, and changes nothing.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
        table: name of the table, as it was given to `find_tables`.
        ids: ids of rows, as `record` takes them: integers in any shape and order, also repeated.
            Negative ones count from the end, as in `table[ids]`.
        step: number of the step; None: the newest of the newest branch whose chain is there.
        slots: whether to read the rows of the table's optimizer slots too.
        item: name of the item of the step; None: the one that holds a checkpoint of this library.

    Returns:
        The rows, `[*shape of ids, *shape of a row]`, in the dtype that was saved. With `slots`, a
        pair of these rows and a dict of the rows of slots by name.

    Raises:
        OptionError: if there is no such table, `ids` are no integers or out of range, `step` is no
            integer, or the root is a file, or a step of a root.
        NoStepError: if there is no such root or step, or no longer; it is a FileNotFoundError too.
        ChainError, IntegrityError, FormatError: if what is read is damaged or missing.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root = tempfile.mkdtemp()
        >>> state = {"user": jnp.arange(12.0).reshape(6, 2)}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> options = cnr.Options(codec="raw")
        >>> with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        >>> cnr.read_rows(root, "user", [4, 1, 4]).tolist()
        [[8.0, 9.0], [2.0, 3.0], [8.0, 9.0]]
    """
    return of_step(root, step, item, lambda place: _rows(place, table, ids, slots))


def _rows(place: Place, table: str, ids: Any, slots: bool) -> Any:
    """Rows as `read_rows` returns them."""
    chain = open_chain(place.root, place.directory, place.item)
    entry = table_entry(chain[-1].manifest, table)
    wanted = _checked_ids(ids, entry)
    logical, where = np.unique(wanted.reshape(-1), return_inverse=True)
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    stored = layout.to_physical(logical)
    order = np.argsort(stored)
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    found: dict[str, np.ndarray] = {}
    for leaf in entry.leaves if slots else entry.leaves[:1]:
        rows = picked_rows(chain, table, leaf.name, stored[order])
        taken = rows[place_of[where.reshape(-1)]]
        found[leaf.name] = taken.reshape((*wanted.shape, *leaf.shape[1:]))
    rows = found.pop("table")
    return (rows, found) if slots else rows


def changed_rows(
    root: str | os.PathLike[str], step: int, table: str, *, item: str | None = None
) -> np.ndarray:
    """Reads which rows of a table a step holds itself: for a delta, those changed since its parent.

    A full step holds all rows. The policy decides which step is the parent: the step before, or the
    latest full one. The call reads manifests and row ids, but no rows, and changes nothing.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
        step: number of the step.
        table: name of the table.
        item: name of the item of the step; None: the one that holds a checkpoint of this library.

    Returns:
        int64[n], ids of rows as `record` takes them, sorted.

    Raises:
        OptionError: if there is no such table, or the root is a file, or a step of a root.
        NoStepError: if there is no such root or step, or no longer; it is a FileNotFoundError too.
        IntegrityError, FormatError: if what is read is damaged or missing.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> root, state = tempfile.mkdtemp(), {"user": jnp.zeros((6, 2))}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state))
        ...     state = {"user": state["user"].at[jnp.array([4, 1])].add(1.0)}
        ...     _ = manager.save(1, args=cnr.args.Save(state))
        >>> cnr.changed_rows(root, 1, "user").tolist()
        [1, 4]
    """
    return of_step(
        root, checked_step(step, _FORMS), item, lambda place: _held_rows(place, table)
    )


def _held_rows(place: Place, table: str) -> np.ndarray:
    """Ids of the rows that a step holds itself, sorted."""
    manifest = read_step(place.root, place.directory, place.item)
    entry = table_entry(manifest, table)
    # A table and its slots mostly hold the same rows, which are listed once.
    held: dict[tuple[int, tuple[int, int], int], np.ndarray] = {}
    with about(place.path):
        reader = StepReader(place.path, manifest, verify=True, kept=KeptChunks())
        for leaf in entry.leaves:
            for process, tile in reader.tiles(table, leaf.name):
                start, stop = tile.box[0]
                for segment in tile.segments:
                    check_rows_stored(reader, process, tile, segment)
                    key = (process, tile.box[0], segment.row_ids)
                    if key not in held:
                        found = reader.positions(process, segment.row_ids, stop - start)
                        rows = (
                            np.arange(start, stop) if found is None else start + found
                        )
                        held[key] = rows
    layout = layout_from(entry.layout.name, entry.layout.configuration)
    none = np.empty(0, np.int64)
    logical = layout.to_logical(np.unique(np.concatenate([none, *held.values()])))
    return np.sort(logical[logical < entry.rows])


def of_step(
    root: str | os.PathLike[str],
    step: int | None,
    item: str | None,
    read: Callable[[Place], T],
) -> T:
    """Reads from a step; if the newest (None) is removed meanwhile, from the one newest then.

    Retention and rollbacks rename a step before any file of it is deleted, and the steps that rest
    on it before that. So a step that is no longer under its name is gone, not damaged.

    Raises:
        NoStepError: if there is no such step, or no longer.
        ChainError, IntegrityError, FormatError: as `read` raises them, if the step is still there.
        RootError: if the service of a bucket does not answer.
    """
    with using_root(root):
        for _ in range(TRIES):
            place = _find(root, step, item)
            uuid = uuid_of_step(place.root, place.directory, place.item)
            try:
                return read(place)
            except errors.DAMAGE:
                if is_same_step(place.root, place.directory, place.item, uuid):
                    raise
                if step is not None:
                    break
        raise deleted_step(place.root, place.directory)


def _find(root: str | os.PathLike[str], step: int | None, item: str | None) -> Place:
    """Finds a step; None: the newest one that can be restored, as far as manifests tell."""
    step = step_or_newest(step, _FORMS)
    path = open_root(root)
    check_can_be_read(path, item)
    check_is_here(path)
    item = item or find_item(path)
    if item is None:
        # Plain Orbax, which knows no tables, may have saved the steps that are there.
        hint = _IMPORT if step_directories(path) else _NO_ROOT
        raise errors.NoStepError(
            f"no step in {os.fspath(path)} holds a checkpoint of cnr_jax\n{hint}",
            path=str(path),
        )
    steps = {name: step_number(name) for name in step_directories(path)}
    ledger = None
    if step is None or any(map(branch_generation, steps)):
        ledger = Ledger.load(path, item)
        steps = {n: number for n, number in steps.items() if n not in ledger.left}
    named = [name for name, number in steps.items() if number == step]
    if step is not None and not named:
        raise errors.NoStepError(
            f"step {step!r} does not exist in {os.fspath(path)}\n"
            f"  steps: {', '.join(map(str, sorted(steps.values()))) or 'none'}",
            path=os.fspath(path),
        )
    if len(named) == 1 and Folder.look(path / named[0], item).kind == "orbax":
        raise errors.NoStepError(
            f"step {named[0]} in {os.fspath(path)} was saved by plain Orbax, which knows no"
            f" tables\n{_IMPORT}",
            path=os.fspath(path / named[0]),
        )
    if len(named) == 1:
        return Place(path, named[0], item)
    ledger = ledger or Ledger.load(path, item)
    newest = ledger.newest() if step is None else ledger.by_step(step)
    if newest is None and step is None:
        raise errors.NoStepError.nothing_restores(os.fspath(path), ledger.obstacles())
    return Place(path, newest.directory if newest else named[0], item)


def table_entry(manifest: Manifest, table: str) -> TableEntry:
    """The entry of a table in a manifest.

    Raises:
        OptionError: if there is no table of that name; the error's kind is `"no_table"`.
    """
    for entry in manifest.tables:
        if entry.name == table:
            return entry
    known = few(repr(entry.name) for entry in manifest.tables)
    raise errors.OptionError(
        f"no table {table!r} in step {manifest.step}, expected one of: {known}\n"
        "  hint: tables have the names that find_tables was given",
        kind="no_table",
    )


def _checked_ids(ids: Any, entry: TableEntry) -> np.ndarray:
    """Checks that row ids are rows of the table; returns them as int64, counted from the start."""
    try:
        given = np.asarray(ids)
    except ValueError as error:
        raise errors.OptionError(
            f"row ids of table {entry.name!r} are of no one shape\n  {error}"
        ) from error
    if given.size and given.dtype.kind not in "iu":
        raise errors.OptionError(
            f"row ids of table {entry.name!r} are {given.dtype}, expected integers"
        )
    # JAX counts negative ids from the end of the array, which has padding in a table without a
    # layout.
    end = entry.padded_rows if entry.layout.name == Identity.name else entry.rows
    # Compared before the conversion, which makes a large uint64 negative.
    wrong = given >= entry.rows
    found = given.astype(np.int64)
    found = np.where(found < 0, found + end, found)
    wrong = wrong | (found < 0) | (found >= entry.rows)
    if wrong.any():
        first = tuple(int(at) for at in np.argwhere(wrong)[0])
        count = int(np.count_nonzero(wrong))
        ids = count_of(count, "row id")
        verb = "is" if count == 1 else "are"
        raise errors.OptionError(
            f"{ids} of table {entry.name!r} {verb} out of range\n"
            f"  got {given[first]} at {list(first)}, expected 0 to {entry.rows - 1}, or"
            f" {-end} to {-1 - (end - entry.rows)} from the end",
            kind="no_row",
        )
    return found
