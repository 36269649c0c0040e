"""Steps that plain Orbax saved: told from ours by names, without Orbax.

A manager with `Options(adopt=True)` restores them and counts them; what is in their files is
Orbax's to read, and nothing here changes them.
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

# In which the API that Orbax calls v1 saves a state as an item of its own naming.
_V1 = "orbax.checkpoint.experimental.v1."
_DEFAULT = "default"


class OrbaxStep(NamedTuple):
    """A step of plain Orbax that can be adopted.

    Attributes:
        item: that holds the state.
        uuid: 32 hex digits, the same whenever and by whichever process it is read.
    """

    item: str
    uuid: str


def orbax_step(root: store.AnyPath, directory: str, item: str) -> OrbaxStep | None:
    """A step of plain Orbax as it can be adopted; None where plain Orbax saved none.

    Args:
        root: holds the step directories.
        directory: name of the one in question.
        item: which item is the state, if there are several; a single one is, whatever it is
            called.

    Raises:
        IntegrityError: if it holds no state, or several of other names, or was not committed.
        OSError: if it cannot be seen.
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
    """How to restore what plain Orbax saved in a root from which nothing else restores.

    Args:
        root: a root, or a state that was taken for one.
        adopts: whether steps of managers of plain Orbax are looked at already.

    Returns:
        A hint; empty where there is nothing of plain Orbax, or it cannot be seen.
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
        step: the folder.
        directory: name of the step directory that it was.
        item: of this library beside it.

    Raises:
        OSError: if it cannot be seen.
    """
    if folders.Folder.look(step, item).kind != "orbax":
        return False
    return step.name == names.abandoned(directory, 1, _uuid(step, directory))


def _uuid(step: store.AnyPath, directory: str) -> str:
    """What tells a step of plain Orbax from others of its name, wherever it lies now."""
    note, said = step / names.ORBAX_METADATA, b""
    if store.exists(note):
        said = store.read_small(note, folders.ORBAX_NOTE_BYTES)
    digest = hashlib.sha256(b"orbax\0" + directory.encode() + b"\0" + said)
    return digest.hexdigest()[:32]


def item_beside(
    root: store.AnyPath, is_step: Callable[[str], bool] | None
) -> str | None:
    """The item in which this library saves beside the steps of plain Orbax in a root.

    That of their states, so that arguments of saves change in their class alone; but for what
    Orbax's v1 names of itself, which is `"default"` here. None where there are no such steps.

    Raises:
        OptionError: if the newest of them holds several states.
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
