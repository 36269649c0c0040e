"""Marker files: they commit a step where folders cannot be renamed, and show it to plain Orbax.

A file of this library in the folder of a step names the attempt that holds the folder, and says
whether the attempt has committed the step. Orbax's own file follows: Orbax lists the steps that
have it. If the first file does not commit, as in older roots and in stores without conditions,
Orbax's file does.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, exists, read_all, store_of

_COMMITTED = b" committed"
_STOPPED = b" stopped"
_REMOVING = b" removing"
# Contents of Orbax's file where ours commits. It must not commit by itself: the thread that puts it
# may have slept until the step was removed.
_FOLLOWS = names.ATTEMPT.encode()
# Steps that are hidden from Orbax at the same time.
_AT_ONCE = 16


def committed(nonce: str) -> bytes:
    """Contents of the file of an attempt once the attempt is committed.

    Example:
        >>> says_committed(committed("00ff")), says_committed(b"00ff")
        (True, False)
    """
    return nonce.encode() + _COMMITTED


def says_committed(attempt: bytes) -> bool:
    """Whether contents of the file of an attempt say that the attempt is committed."""
    return attempt.endswith(_COMMITTED)


def stopped(nonce: str) -> bytes:
    """Contents of the file of an attempt that a new writer of the root has stopped."""
    return nonce.encode() + _STOPPED


def says_removed(attempt: bytes) -> bool:
    """Whether contents of the file of an attempt say that its step is being removed."""
    return attempt == names.REMOVED or attempt.endswith(_REMOVING)


def stop(
    step: AnyPath, check_claim: Callable[[], None], own: Collection[str] = ()
) -> bytes:
    """Stops the attempt that holds a folder, so that it can never be committed.

    Args:
        step: path of the folder.
        check_claim: function that raises an error if another manager has taken over the root.
        own: nonces of attempts that are not stopped.

    Returns:
        Contents of the file of the attempt as they now are; empty if there is none.

    Raises:
        WriterError: as `check_claim`.
        OSError: if storage does not tell, or cannot be written.
    """
    note = step / names.ATTEMPT
    while (found := store_of(note).read_version(note)) is not None:
        data, version = found
        if says_committed(data) or says_removed(data) or data.endswith(_STOPPED):
            return data
        if data.startswith(tuple(nonce.encode() for nonce in own)):
            return data
        # After the file was read: what a later claimant has put is not found with this claim.
        check_claim()
        with contextlib.suppress(FileExistsError):  # it has changed since
            store_of(note).swap(note, data + _STOPPED, version)
    return b""


def begin_removal(step: AnyPath, check_claim: Callable[[], None] | None) -> Any:
    """Takes the commit of a step back, unless the root was taken over.

    The claim is looked at when the commit is taken back already: another manager that has the root
    by then may have read the step before, and rest saves on it. The step is then committed again,
    unless the other manager has found that the step was to go, and goes on with that: of the two
    only one takes place.

    Args:
        step: path of the folder, in a store that cannot rename folders. Its removal may have begun.
        check_claim: function that raises an error if another manager has taken over the root;
            None: only a removal that has begun goes on.

    Returns:
        Version of the file of the attempt, with which `remove_tree` tells whether another program
        has begun to write there since.

    Raises:
        WriterError: if another manager has; or as `check_claim`.
        FileExistsError: if the folder is in use again.
        FileNotFoundError: if somebody else has ended the removal.
        OSError: if storage does not tell, or cannot be written. The step may be one no more.
    """
    note = step / names.ATTEMPT
    data, version = store_of(note).read_version(note) or (b"", None)
    if check_claim is None:
        if version is None:
            text = "the step is gone"
            raise FileNotFoundError(errno.ENOENT, text, os.fspath(step))
        if not says_removed(data):
            text = "the folder is in use again"
            raise FileExistsError(errno.EEXIST, text, os.fspath(step))
    elif says_committed(data):
        removing = data.removesuffix(_COMMITTED) + _REMOVING
        version = store_of(note).swap(note, removing, version)
        try:
            check_claim()
        except BaseException:
            with contextlib.suppress(OSError):
                store_of(note).swap(note, data, version)
            raise
    elif not data.endswith(_REMOVING):
        # Orbax's file commits the step, or nothing does. Whoever claims the root next goes on.
        version = store_of(note).swap(note, names.REMOVED, version)
        store_of(step).remove_file(step / names.ORBAX_COMMITTED)
        return version
    # If that fails, the step is none any more all the same.
    with contextlib.suppress(OSError):
        version = store_of(note).swap(note, names.REMOVED, version)
    return version


def is_committed(step: AnyPath, held: Collection[str] | None = None) -> bool:
    """Whether a folder holds a committed step; for stores that cannot rename folders.

    Args:
        step: path of the folder.
        held: names of what the folder holds; None: not known.

    Raises:
        OSError: if storage does not tell.
    """
    # The likelier file is read first, as each look is a request.
    found = (m for m in names.MARKERS if held is None or m in held)
    return any(_commits(step / marker) for marker in found)


def _commits(marker: AnyPath) -> bool:
    """Whether one of the two marker files is there, and commits its step."""
    try:
        data = read_all(marker)
    except FileNotFoundError:
        return False
    return says_committed(data) if marker.name == names.ATTEMPT else data != _FOLLOWS


def is_shown(step: AnyPath) -> bool:
    """Whether plain Orbax lists a committed step.

    Raises:
        OSError: if storage does not tell.
    """
    return exists(step / names.ORBAX_COMMITTED)


def show_alone(root: AnyPath, directory: str, left: Collection[str]) -> None:
    """Makes plain Orbax list a committed step, and none of the steps that it leaves behind.

    The latter are hidden first: Orbax had better list neither of two steps with one number than the
    wrong one.

    Args:
        root: root that holds the steps.
        directory: name of the step's directory.
        left: names of the directories of the steps that it leaves behind.

    Raises:
        OSError: if a marker file cannot be written or removed.
    """
    with ThreadPoolExecutor(_AT_ONCE, "cnr_hide") as pool:
        list(pool.map(_hide, (root / name for name in left)))
    marker = root / directory / names.ORBAX_COMMITTED
    store_of(root).write(marker, _FOLLOWS, replaces=True)


def _hide(step: AnyPath) -> None:
    """Hides a committed step from plain Orbax; the step stays committed."""
    own, shown = (step / marker for marker in names.MARKERS)
    if not exists(shown):
        return
    if not _commits(own):
        # The folder was copied here, or made by an older version: only Orbax's file commits it.
        nonce = read_all(shown).decode(errors="replace")
        store_of(own).write(own, committed(nonce), replaces=True)
    store_of(shown).remove_file(shown)
