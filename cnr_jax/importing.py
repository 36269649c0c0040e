"""Import from plain Orbax: one of its steps becomes the first checkpoint of a new root."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.args import DEFAULT_ITEM, Restore, Save, in_item
from cnr_jax.checkpointer.orbax_compat.places import step_names
from cnr_jax.format.names import step_number
from cnr_jax.manager import CheckpointManager
from cnr_jax.options import Options, checked
from cnr_jax.repository.index.folders import Folder, is_state_of_orbax
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import (
    check_can_be_read,
    check_is_no_file,
    lies_in,
    open_root,
    step_directories,
)
from cnr_jax.repository.orbax_steps import item_beside
from cnr_jax.repository.store import AnyPath, exists, is_directory, names_in
from cnr_jax.rows.touched import init_touched
from cnr_jax.state.find import find_tables
from cnr_jax.state.table import Tables, TableSpec
from cnr_jax.telemetry import SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)
_SHOWN = 10


def import_orbax(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    tables: Tables | Sequence[str] | Mapping[str, str | TableSpec],
    *,
    step: int | None = None,
    state: Any = None,
    options: Options | None = None,
    item: str | None = None,
    orbax_options: ocp.CheckpointManagerOptions | None = None,
) -> SaveReport:
    """Saves a step of a root of plain Orbax as a full checkpoint in a new root.

    The step keeps its number. The call only reads `old`. It does not convert other items of the
    step, such as a data reader; the log names them. The whole state is in memory during the import.

    Args:
        old: root that `ocp.CheckpointManager` or Orbax's v1 wrote.
        new: new root. The folder is made if it is missing; it must hold no steps.
        tables: names or specifications of tables, as for `find_tables`, or what that returned.
        step: number of the step of `old`; None: the newest that can be restored.
        state: abstract or concrete pytree that gives structure, shapes, dtypes and shardings, as
            for `args.Restore`. None takes them from Orbax's metadata, on one device, or replicated
            on the devices of all processes.
        options: options of the run that begins in `new`, and that goes on with
            `CheckpointManager(new, ...)`. By default rows of tables are rounded;
            `Options(codec="raw")` keeps all bits.
        item: name of the item that holds the state in `old`. Needed if several items of a step are
            states.
        orbax_options: options of the manager that wrote `old`, if they say how steps are named. In
            `new`, steps have the usual names.

    Returns:
        The report of the save, once it is durable.

    Raises:
        NoStepError: if there is no such root or step, or none that can be restored.
        UsedRootError: if `new` holds steps.
        OptionError: if `new` lies in `old`, where no file may change; or if the step is a
            checkpoint of this library, and not of plain Orbax.
        TableError, StateMismatchError: if `tables` or `state` do not fit the step.
        IntegrityError: if the step that you asked for is damaged.
        SaveError: if the step cannot be saved. `old` stays as it is in any case.

    Example:
        >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp, cnr_jax as cnr
        >>> old, new = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> with ocp.CheckpointManager(old) as manager:
        ...     state = {"user": jnp.ones((8, 4)), "w": jnp.zeros(3)}
        ...     _ = manager.save(7, args=ocp.args.StandardSave(state))
        >>> report = import_orbax(old, new, ["user"])
        >>> report.step, report.kind, report.rows
        (7, 'full', 8)
    """
    options, source, root = checked(options), open_root(old), open_root(new)
    check_can_be_read(source, item)
    _check_is_new(root)
    _check_is_outside(root, source)
    reading = Options(adopt=True, timeout_secs=options.timeout_secs)
    named = step_names(orbax_options)
    item = item or find_item(source) or item_beside(source, named) or DEFAULT_ITEM
    with CheckpointManager(
        source, options=reading, item=item, orbax_options=orbax_options
    ) as reader:
        newest = reader.latest_step() if step is None else step
        _check_is_of_orbax(source, item, newest, named)
        taken, found = _restored(reader, item, step, state)
    _check_is_of_orbax(source, item, taken, named)
    _say_what_is_left(source, taken, named)
    if not isinstance(tables, Tables):
        tables = find_tables(found, tables)
    touched = None
    if options.tracking in ("recorded", "audited"):
        touched = init_touched(found, tables)
    with CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(taken, args=Save(found, touched, full=True), force=True)
        manager.wait_until_finished()
        report = manager.last_report
    assert report is not None
    return report


def _restored(
    reader: CheckpointManager, item: str, step: int | None, state: Any
) -> tuple[int, Any]:
    """Restores the state of the step that is taken; returns its number too."""
    asked: Any = Restore(state)
    if item != DEFAULT_ITEM:
        asked = in_item(asked, item, item)
    found = reader.restore(step, args=asked)
    restored = found if item == DEFAULT_ITEM else found[item]
    return restored.report.step, restored.state


def _check_is_new(root: AnyPath) -> None:
    """Checks that a root holds no steps.

    Raises:
        UsedRootError: if it does.
    """
    check_is_no_file(root)
    held = step_directories(root) if exists(root) else []
    if held:
        raise errors.UsedRootError(
            f"{os.fspath(root)} is no new root: it holds steps\n"
            f"  got {', '.join(held[:_SHOWN])}, expected a folder without, or none\n"
            "  hint: import into another folder; Options(adopt=True) goes on in the root that"
            " plain Orbax wrote"
        )


def _check_is_outside(root: AnyPath, source: AnyPath) -> None:
    """Checks that the new root does not lie in the old one, where no file may change.

    Raises:
        OptionError: if it does.
    """
    if lies_in(root, source):
        raise errors.OptionError(
            f"{os.fspath(root)} lies in the root {os.fspath(source)}, which is only read\n"
            "  hint: import into a folder outside of it; Options(adopt=True) goes on in the root"
            " that plain Orbax wrote",
            kind="no_target",
        )


def _check_is_of_orbax(
    root: AnyPath, item: str, step: int | None, named: Callable[[str], bool] | None
) -> None:
    """Checks that plain Orbax saved a step: values that this library saved may be rounded.

    Raises:
        OptionError: if this library saved it.
    """
    for directory in step_directories(root, named):
        if step_number(directory) != step:
            continue
        if Folder.look(root / directory, item).kind == "own":
            raise errors.OptionError(
                f"step {step} of {os.fspath(root)} is a checkpoint of cnr_jax, expected one of"
                " plain Orbax\n"
                "  hint: CheckpointManager(root, tables=...) goes on in that root; of steps of"
                " plain Orbax beside those of cnr_jax, step=... names the one to import"
            )


def _say_what_is_left(
    root: AnyPath, step: int, named: Callable[[str], bool] | None
) -> None:
    """Logs the other items of a step, which are not converted."""
    for directory in step_directories(root, named):
        if step_number(directory) == step:
            found = [root / directory / name for name in names_in(root / directory)]
            held = [path for path in found if is_directory(path)]
            left = [path.name for path in held if not is_state_of_orbax(path)]
            if left:
                _log.warning(
                    "items of step %d are not imported: %s", step, ", ".join(left)
                )
