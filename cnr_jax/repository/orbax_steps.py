"""Steps that plain Orbax saved, told from ours by the names in them, without importing Orbax.

A manager with `Options(adopt=True)` restores and counts them. Only Orbax reads the values in their
files, and nothing here changes them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository import layout, store
from cnr_jax.repository.index import folders
from cnr_jax.repository.step import check_committed

# Where the handlers of Orbax's API v1 are, which gives the item of a state a name of its own.
_V1 = "orbax.checkpoint.experimental.v1."
_DEFAULT = "default"


class OrbaxStep(NamedTuple):
    """A step of plain Orbax that can be adopted.

    Attributes:
        item: name of the item that holds the state.
        uuid: 32 hex digits, the same at each time and on each process that reads the step.
    """

    item: str
    uuid: str


def orbax_step(root: store.AnyPath, directory: str, item: str) -> OrbaxStep | None:
    """Finds the state in a step of plain Orbax; None if plain Orbax did not save the step.

    Args:
        root: root that holds the step directories.
        directory: name of the step directory.
        item: name of the item that is the state, if there are several. A single item is the state,
            whatever its name.

    Raises:
        IntegrityError: if the step holds no state, or several with other names, or was not
            committed.
        OSError: if the step cannot be seen.
    """
    step = root / directory
    folder = folders.Folder.look(step, item)
    if folder.kind != "orbax":
        return None
    where = os.fspath(step)
    check_committed(root, directory)
    held = folder.states
    if not held and folders.is_state_of_orbax(step):
        raise errors.IntegrityError(
            f"{where} is a state that plain Orbax saved without a manager\n{_by_hand(step)}",
            kind="not_ours",
            path=where,
        )
    if item not in held and len(held) != 1:
        got = f"items {', '.join(held)}" if held else "no item that holds a pytree"
        raise errors.IntegrityError(
            f"{where} is a step of plain Orbax, and it is not clear what its state is\n"
            f"  got {got}, expected one, or {item!r}\n"
            "  hint: CheckpointManager(root, item=...) names it",
            kind="not_ours",
            path=where,
        )
    found = item if item in held else held[0]
    return OrbaxStep(item=found, uuid=_uuid(step, directory))


def _by_hand(path: store.AnyPath) -> str:
    return (
        f"  hint: ocp.StandardCheckpointer().restore({os.fspath(path)!r}, state) restores it;"
        " save that state with CheckpointManager(new_root, tables=...), into another root"
    )


def way_on(root: store.AnyPath, *, adopts: bool) -> str:
    """Hint how to restore what plain Orbax saved in a root that holds nothing else to restore.

    Args:
        root: a root, or a state that was taken for one.
        adopts: whether the manager already adopts steps of plain Orbax's managers.

    Returns:
        The hint; empty if plain Orbax saved nothing there, or the root cannot be seen.
    """
    try:
        steps = [root / name for name in reversed(layout.step_directories(root))]
        if not adopts and any(folders.Folder.look(step).states for step in steps):
            return (
                "  hint: plain Orbax has saved steps there, and Options(adopt=True) has a"
                " manager restore them and go on"
            )
        if (
            store.exists(root / names.ORBAX_METADATA)
            and folders.Folder.look(root).states
        ):
            above = os.fspath(root.parent)
            return f"  hint: that is a step of plain Orbax, and its root is {above}"
        bare = [path for path in (root, *steps) if folders.is_state_of_orbax(path)]
    except OSError:
        return ""
    return _by_hand(bare[0]) if bare else ""


def is_set_aside(step: store.AnyPath, directory: str, item: str) -> bool:
    """Whether a folder is an adopted step under the name that a rollback has given it.

    Args:
        step: path of the folder.
        directory: name of the step directory before the rollback.
        item: name of the item in which this library saves.

    Raises:
        OSError: if the folder cannot be seen.
    """
    if folders.Folder.look(step, item).kind != "orbax":
        return False
    return names.abandoned_step(step.name) == directory and step.name.endswith(
        f"-{_uuid(step, directory)}"
    )


def _uuid(step: store.AnyPath, directory: str) -> str:
    """Uuid that tells a step of plain Orbax from others of its name, wherever it lies now."""
    note, said = step / names.ORBAX_METADATA, b""
    if store.exists(note):
        said = store.read_small(note, folders.ORBAX_NOTE_BYTES)
    digest = hashlib.sha256(b"orbax\0" + directory.encode() + b"\0" + said)
    return digest.hexdigest()[:32]


def item_beside(
    root: store.AnyPath, is_step: Callable[[str], bool] | None
) -> str | None:
    """Name of the item in which this library saves beside the steps of plain Orbax in a root.

    It is the name of their states, so that a program only has to change the class of its arguments.
    Where Orbax's v1 has chosen that name, it is `"default"`. None if there are no such steps.

    Raises:
        OptionError: if the newest of these steps holds several states.
        OSError: if the root cannot be seen or listed.
    """
    if not store.exists(root):
        return None
    directories = sorted(layout.step_directories(root, is_step), key=names.step_number)
    for directory in reversed(directories):
        step = root / directory
        folder = folders.Folder.look(step, _DEFAULT)
        if folder.kind != "orbax":
            continue
        held = folder.states
        if len(held) > 1:
            raise errors.OptionError(
                f"{os.fspath(step)} holds several states of plain Orbax\n"
                f"  got items {', '.join(held)}, expected one\n"
                f"  hint: CheckpointManager(root, item={held[0]!r}) says which one to go on with"
            )
        if held:
            by_v1 = folders.handlers_of(step).get(held[0], "").startswith(_V1)
            return _DEFAULT if by_v1 else held[0]
    return None
