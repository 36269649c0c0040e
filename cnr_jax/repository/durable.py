"""The order in which a step becomes durable, beyond what its writers see to.

Writers of rows and manifests sync what they write. Orbax syncs nothing: neither its own files, nor
directories it renames, nor the root. Here is what is missing, for local file systems; storage
services have nothing to sync.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from cnr_jax.repository.files import (
    AnyPath,
    exists,
    is_directory,
    is_local,
    sync_directory,
    sync_tree,
    write_durably,
)

_log = logging.getLogger(__name__)

# To write a file that somebody else removes before it has its name.
_TRIES = 10


def replace_durably(path: AnyPath, data: bytes) -> None:
    """Writes a file that is there whole or as it was before, whatever happens meanwhile."""
    if not is_local(path):
        # Storage services show an object when it is complete.
        write_durably(path, data)
        return
    for left in reversed(range(_TRIES)):
        temporary = path.parent / f"{path.name}.{secrets.token_hex(4)}.tmp"
        try:
            write_durably(temporary, data)
            os.replace(os.fspath(temporary), os.fspath(path))
            break
        except FileNotFoundError:
            # Another manager that takes over at this moment clears what it finds.
            if not left:
                raise
        except BaseException:
            Path(os.fspath(temporary)).unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def sync_step(directory: AnyPath, item: str) -> None:
    """Makes all of a step durable before it is renamed to its final name.

    Args:
        directory: of the step, under its temporary name.
        item: that holds our checkpoint. Its arrays and its dense part are durable already, of
            its directory only what Orbax has added is synced.
    """
    if not is_local(directory):
        return
    for path in directory.iterdir():
        if path.name == item:
            sync_files(path)
        elif is_directory(path):
            sync_tree(path)
    sync_files(directory)


def sync_files(directory: AnyPath) -> None:
    """Makes the files right in a local directory durable, and its entries."""
    if not is_local(directory):
        return
    for path in directory.iterdir():
        if not is_directory(path):
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)


def missing_directories(root: AnyPath) -> list[AnyPath]:
    """Which of a root and the directories above it do not exist yet, the root first."""
    found: list[AnyPath] = []
    path = root
    while is_local(root) and not exists(path) and path.parent.name != path.name:
        found.append(path)
        path = path.parent
    return found


def sync_made(made: list[AnyPath]) -> None:
    """Makes directories durable that did not exist before, as `missing_directories` found."""
    for path in made:
        if exists(path):
            try:
                sync_directory(path.parent)
            except PermissionError as error:
                # Making a directory takes no right to read the one it is in.
                _log.warning("that %s was made may not be durable: %s", path, error)
