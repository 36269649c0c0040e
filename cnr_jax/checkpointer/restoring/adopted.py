"""Restore of a step of plain Orbax into a train state whose next save is one of this library.

Its values are those that Orbax restores, and a mismatch is reported as for steps of our own. No
delta can rest on such a step, so saving goes on with a full checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from cnr_jax import errors
from cnr_jax.args import Restore
from cnr_jax.checkpointer.orbax_compat.plain import PlainState, is_number
from cnr_jax.checkpointer.restoring.fitting import (
    as_wanted,
    asked,
    misfit,
    misfit_of_number,
    mismatch,
    say_converted,
    uneven,
    unknown_to_jax,
)
from cnr_jax.checkpointer.restoring.match import kept_leaves
from cnr_jax.checkpointer.restoring.restore import Restored
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.tracking.tracker import Tracker
from cnr_jax.format.names import step_number
from cnr_jax.plain_args import with_stored_shapes
from cnr_jax.repository.index.entries import Entry, orbax_entry
from cnr_jax.repository.index.planner import Planner
from cnr_jax.repository.index.runs import note_restored
from cnr_jax.repository.layout import Place
from cnr_jax.repository.orbax_steps import orbax_step
from cnr_jax.repository.replay.leaves import abstract_of
from cnr_jax.repository.store.checked import kind_of, means_damage, numpy_dtype
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.touched import Touched, lineage_hex, seeded, stamp_sharding
from cnr_jax.state.table import Path, Tables, check_tables, flatten_paths
from cnr_jax.telemetry import RestoredTable, RestoreReport

_HINT = (
    "pass the state that was saved, or Restore(..., partial=True) for what both have"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedState:
    """Contents of a step of plain Orbax, as this process has read them.

    Attributes:
        state: the state that was asked for.
        tables: tables of the state; empty if they are not known.
        entry: ledger entry of the step; None if this is only another item beside a state of ours.
        step: number of the step.
        read_secs: seconds that reading took.
    """

    state: Any
    tables: Tables
    entry: Entry | None
    step: int
    read_secs: float

    def put_together(
        self, started_secs: float, passed_over: tuple[int, ...]
    ) -> Restored:
        """Makes the state, and touched rows in a fresh lineage that all processes draw.

        Args:
            started_secs: reading of `time.perf_counter` when the restore began.
            passed_over: steps that were tried before.
        """
        leaves = dict(flatten_paths(self.state))
        one = SingleDeviceSharding(jax.local_devices()[0])
        shardings = {
            name: stamp_sharding(
                getattr(leaves[table.path], "sharding", None) or one, table.leaf.shape
            )
            for name, table in self.tables.items()
        }
        stamps = {n: np.zeros(t.padded_rows, np.int32) for n, t in self.tables.items()}
        touched = seeded(self.tables, shardings, stamps, 0)
        report = RestoreReport(
            step=self.step,
            kind="orbax",
            generation=0,
            run=None,
            chain=(self.step,),
            bytes_read=sum(getattr(leaf, "nbytes", 0) for leaf in leaves.values()),
            open_secs=0.0,
            rows_secs=0.0,
            dense_secs=self.read_secs,
            total_secs=time.perf_counter() - started_secs,
            tables=tuple(
                RestoredTable(name=name, rows=table.rows)
                for name, table in self.tables.items()
            ),
            passed_over=passed_over,
        )
        return Restored(self.state, touched, report)


def read_adopted(
    place: Place, directory: Any, args: Restore, tables: Tables | None
) -> AdoptedState:
    """Reads a step of plain Orbax; nothing is communicated between processes.

    Args:
        place: place of the item.
        directory: directory of the item, as Orbax opened it.
        args: arguments of the restore; without a state everything, in dicts and lists.
        tables: where the tables are in the state, if `args` does not say it.

    Raises:
        IntegrityError: if Orbax cannot read it.
        StateMismatchError: if the state asked for does not match.
        OptionError: if rows or names of tables are to change on the way.
    """
    for name in ("rename", "ids"):
        if getattr(args, name):
            raise errors.OptionError(
                f"step {place.directory} is of plain Orbax, which knows no tables: {name} is not"
                " possible\n  hint: cnr_jax.import_orbax converts it; then restore with"
                f" {name} from there"
            )
    started = time.perf_counter()
    tables = args.tables or tables or Tables({})
    check_tables(tables)
    step = orbax_step(place.root, place.directory, place.item)
    entry = orbax_entry(place.directory, step) if step else None
    plain = PlainState(directory)
    try:
        stored = _reading(place, plain.leaves)
        if args.state is None:
            state = _reading(place, plain.restore_all)
            return _adopted(state, tables, entry, place, started)
        asked_for = with_stored_shapes(args.state, lambda: stored)
        given = dict(flatten_paths(asked_for))
        numbers = _reading(place, _read_numbers, plain, stored, given)
        keys = _reading(place, _read_keys, plain, stored, given)
        wanted, kept = _match(
            stored, numbers, keys, given, args, tables, place.directory
        )
        # Arrays are asked for as Orbax can convert them, keys and strings as the state has them.
        into = {
            path: asked(numpy_dtype(str(stored[path].dtype)), value)
            if _is_array(stored[path], value)
            else value
            for path, value in wanted.items()
        }
        found = _reading(place, plain.restore, into, plain=plain) if into else {}
    finally:
        plain.close()
    _check_no_keys(found, wanted, place.directory)
    found = {
        **kept,
        **{path: as_wanted(x, given[path]) for path, x in numbers.items()},
        **{path: as_wanted(x, wanted[path]) for path, x in found.items()},
    }
    leaves = [found[path] for path in given]
    state = jax.tree.unflatten(jax.tree.structure(args.state), leaves)
    return _adopted(state, tables, entry, place, started)


def _adopted(
    state: Any, tables: Tables, entry: Entry | None, place: Place, started_secs: float
) -> AdoptedState:
    return AdoptedState(
        state=state,
        tables=_tables_in(state, tables),
        entry=entry,
        step=step_number(place.directory),
        read_secs=time.perf_counter() - started_secs,
    )


def _reading(
    place: Place, read: Any, *args: Any, plain: PlainState | None = None
) -> Any:
    """Calls a reader of Orbax; raises its errors that mean damage as an `IntegrityError`.

    Args:
        place: place of the item.
        read: function of Orbax that reads.
        args: its arguments.
        plain: the state as Orbax reads it, if an error may be due to the arguments, such as a
            sharding: it is not damage if all of the state can be read.
    """
    try:
        return read(*args)
    except Exception as error:
        if not means_damage(error) or (plain is not None and _can_be_read(plain)):
            raise
        where = os.fspath(place.path)
        raise errors.IntegrityError(
            f"{where}, which plain Orbax saved, cannot be read\n"
            f"  {type(error).__name__}: {error}",
            kind=kind_of(error, "orbax_unreadable"),
            path=where,
        ) from error


def _can_be_read(plain: PlainState) -> bool:
    try:
        plain.restore_all()
    except Exception:
        return False
    return True


def _tables_in(state: Any, tables: Tables) -> Tables:
    """Tables that a restored state holds, as they were found."""
    shapes = {path: np.shape(leaf) for path, leaf in flatten_paths(state)}
    held = {n: t for n, t in tables.items() if shapes.get(t.path) == t.leaf.shape}
    if len(held) == len(tables):
        return tables
    return Tables(held)


def _read_numbers(
    plain: PlainState, stored: Mapping[Path, Any], given: Mapping[Path, Any]
) -> dict[Path, bool | int | float]:
    """Reads Python numbers, whose values decide whether they fit leaves of a state."""
    unsure = {
        path: np.empty(0, leaf.dtype)
        for path, leaf in stored.items()
        if path in given and is_number(leaf) and misfit(leaf.dtype, given[path])
    }
    found = plain.restore(unsure) if unsure else {}
    return {path: array.item() for path, array in found.items()}


def _read_keys(
    plain: PlainState, stored: Mapping[Path, Any], given: Mapping[Path, Any]
) -> dict[Path, Any]:
    """Reads the dtypes that Orbax restores for keys of a state, as only Orbax knows their kinds."""
    keys = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in stored.items()
        if _is_key(given.get(path)) and _is_key_data(leaf, given[path])
    }
    found = plain.restore(keys) if keys else {}
    return {path: key.dtype for path, key in found.items()}


def _check_no_keys(
    found: Mapping[Path, Any], wanted: Mapping[Path, Any], step: str
) -> None:
    """Checks that leaves that were asked for as numbers are not keys.

    Raises:
        StateMismatchError: if some are; names each of them.
    """
    problems = [
        f"{'/'.join(path)}: {x.dtype} in the checkpoint, {_said(wanted[path])} in the state"
        for path, x in found.items()
        if _is_key(x) and not _is_key(wanted[path])
    ]
    if problems:
        raise mismatch(f"{step}, which plain Orbax saved", problems, (), [_HINT])


def _match(
    stored: Mapping[Path, Any],
    numbers: Mapping[Path, bool | int | float],
    keys: Mapping[Path, Any],
    given: Mapping[Path, Any],
    args: Restore,
    tables: Tables,
    step: str,
) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Compares a state with Orbax's metadata of a step.

    Returns:
        Leaves of the state that are restored, and those that keep their values, by path; numbers
        are in neither.

    Raises:
        StateMismatchError: with every difference.
    """
    leaves, problems, casts = dict(given), list[str](), list[str]()
    # Leaves of tables must be arrays of jax, of the shape that the tables give.
    rows = {leaf.path: leaf for table in tables.values() for leaf in table.leaves}
    wanted: dict[Path, Any] = {}
    is_grown = False
    for path, leaf in stored.items():
        where = "/".join(path)
        if path not in leaves:
            if not args.partial:
                problems.append(f"{where}: not in the state")
            continue
        value = leaves.pop(path)
        problem = _difference(leaf, value, keys.get(path))
        problem = problem or unknown_to_jax(value, on_device=path in rows)
        problem = problem or uneven(value)
        if problem:
            problems.append(f"{where}: {problem}")
            is_grown |= _has_other_rows(leaf, value)
            continue
        told = ""
        if path in numbers:
            told = misfit_of_number(numbers[path], value)
        else:
            if path in rows:
                if np.shape(value) != rows[path].shape:
                    problems.append(
                        f"{where}: {list(np.shape(value))} in the state, but"
                        f" {list(rows[path].shape)} in the tables that this restore goes by"
                    )
                if isinstance(value, np.ndarray):
                    value = abstract_of(value)  # a table is an array of jax
            wanted[path] = value
            if _is_array(leaf, value):
                told = misfit(numpy_dtype(str(leaf.dtype)), value)
        if told:
            casts.append(f"{where}: {told}")
    kept = kept_leaves(leaves, problems, args.partial)
    step = f"{step}, which plain Orbax saved"
    if problems or (casts and not args.cast):
        hint = _HINT
        if is_grown:
            hint = (
                "steps of plain Orbax restore with the rows that they have: cnr_jax.import_orbax"
                " converts one, and from there Restore(..., partial=True) grows tables"
            )
        raise mismatch(step, problems, () if args.cast else casts, [hint])
    say_converted(step, casts)
    return wanted, kept


def _is_array(stored: Any, value: Any) -> bool:
    """Whether a leaf is an array or a number, and no PRNG key or string."""
    return getattr(stored, "dtype", None) is not None and not _is_key(value)


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", np.dtype(object))
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _is_key_data(stored: Any, value: Any) -> bool:
    """Whether the numbers of a state's key have the shape and dtype of the stored ones."""
    key = jax.eval_shape(jax.random.key_data, value)
    shape, dtype = getattr(stored, "shape", None), getattr(stored, "dtype", None)
    return shape == tuple(key.shape) and str(dtype) == str(key.dtype)


def _difference(stored: Any, value: Any, key: Any) -> str:
    """Explains why a leaf of a state cannot take a stored one, as Orbax would not; empty if it can.

    Args:
        stored: Orbax's metadata of the stored leaf.
        value: the leaf of the state.
        key: dtype that Orbax restores for a leaf that is a key; None if it is not a key.
    """
    shape, dtype = getattr(stored, "shape", None), getattr(stored, "dtype", None)
    if shape is None or isinstance(value, str):
        is_text = shape is None and isinstance(value, str)
        held = "a string" if shape is None else f"{dtype}{list(shape)}"
        return (
            "" if is_text else f"{held} in the checkpoint, {_said(value)} in the state"
        )
    if _is_key(value):
        held = f"{dtype}{list(shape)}" if key in (None, dtype) else str(key)
        same = key == value.dtype
        return "" if same else f"{held} in the checkpoint, {value.dtype} in the state"
    if tuple(np.shape(value)) != tuple(shape):
        got = list(np.shape(value))
        return f"shape {list(shape)} in the checkpoint, {got} in the state"
    return ""


def _said(value: Any) -> str:
    return str(getattr(value, "dtype", type(value).__name__))


@dataclasses.dataclass(frozen=True, slots=True)
class Adoption:
    """Restored step of plain Orbax, from which saving goes on.

    Attributes:
        place: place of its item.
        entry: entry of the step, as in `AdoptedState`.
        touched: the fresh touched rows that go with the restored state.
    """

    place: Place
    entry: Entry | None
    touched: Touched


def resume_adopted(
    adoption: Adoption,
    *,
    writer: RootWriter,
    lifecycle: Lifecycle,
    planner: Planner,
    tracker: Tracker,
) -> None:
    """Goes on saving from a step of plain Orbax, with a full checkpoint.

    Args:
        adoption: the restored step; the restore has succeeded on all processes.
        writer: writer of the root that saves go to.
        lifecycle: lifecycle of saves, which is settled before anything is noted.
        planner: planner of saves, which notes the run of later ones.
        tracker: tracker of rows, which forgets what it knew.
    """
    root, entry = adoption.place.root, adoption.entry
    lineage = lineage_hex(adoption.touched)
    lifecycle.settle()  # Orbax has waited for the save in flight
    # No step counts as a parent until all is noted that makes it one.
    planner.end_lineages(0)
    tracker.forget(adoption.touched, None)
    if entry is None or (writer.root and str(writer.root) != str(root)):
        return  # restored from another root
    planner.adopted(lineage, entry, writer.ledger)
    note_restored(root, lineage, planner.runs.current or "", None)


def _has_other_rows(leaf: Any, value: Any) -> bool:
    """Whether two arrays differ only in the number of rows, as when a table has grown."""
    stored, given = [*(leaf.shape or ())], [*np.shape(value)]
    same = len(stored) == len(given) > 1 and stored[1:] == given[1:]
    return same and stored != given
