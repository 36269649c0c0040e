"""Folder of an export: made beside its place, and put there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cnr_jax import errors
from cnr_jax.repository.causes import errno_of, in_one_line
from cnr_jax.repository.layout import lies_in, open_root
from cnr_jax.repository.store import (
    can,
    is_named,
    missing_directories,
    sync_directory,
    sync_made,
    sync_tree,
)


def target_of(root: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Path:
    """Absolute path of the export, after checks that nothing is there.

    Raises:
        OptionError: if it is not a local folder, or lies in the root.
        ExportError: if something is there, or that cannot be seen.
    """
    found = open_root(directory)
    if not can(found).renames:
        raise errors.OptionError(
            f"{os.fspath(directory)} is no local folder\n"
            "  hint: export to a local one, and copy it",
            kind="no_target",
        )
    target = Path(os.path.abspath(os.fspath(found)))
    source = open_root(root)
    if lies_in(target, source):
        raise errors.OptionError(
            f"{target} lies in the root {os.fspath(source)}\n"
            "  hint: export to another place; a manager takes what lies in its root for its own",
            kind="no_target",
        )
    _check_free(target)
    return target


def _check_free(target: Path) -> None:
    """Checks that nothing is in the place of an export.

    Raises:
        ExportError: if something is, or that cannot be seen.
    """
    with _export_errors(target):
        named = is_named(target)
    if named:
        raise errors.ExportError(
            f"{target} exists already, and is left as it is\n"
            "  hint: name a folder that does not exist, or remove this one",
            kind="target_exists",
            path=os.fspath(target),
            errno=errno.EEXIST,
        )


def check_room(target: Path, needed_bytes: int) -> None:
    """Checks that there is room, before anything is written.

    Raises:
        ExportError: if there is not, or that cannot be seen.
    """
    with _export_errors(target):
        there = next(path for path in target.parents if path.exists())
        free_bytes = _free_bytes(there)
    if free_bytes is not None and needed_bytes > free_bytes:
        raise errors.ExportError(
            f"no room for an export to {target}\n"
            f"  got {free_bytes:,} bytes free, expected {needed_bytes:,}\n"
            "  hint: export some leaves alone, by tables= or leaves=, or to another place",
            kind="no_space",
            path=os.fspath(target),
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            errno=errno.ENOSPC,
        )


def _free_bytes(folder: Path) -> int | None:
    """Number of free bytes; None if the file system does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            return None
        raise
    # Some file systems that a program serves say 0 for everything.
    return usage.free if usage.total else None


@contextlib.contextmanager
def put_whole(target: Path) -> Iterator[Path]:
    """Makes a folder that becomes `target` if all goes well, and is removed otherwise.

    Raises:
        ExportError: if storage fails, or something is at `target` by then.
    """
    beside = target.parent / f".export-{secrets.token_hex(8)}.tmp"
    with _export_errors(target):
        made = missing_directories(target.parent)
        done = False
        try:
            beside.mkdir(parents=True)
            folder = beside / "export"
            yield folder
            sync_tree(folder)
            _check_free(target)  # something may have come there since
            os.rename(folder, target)
            try:
                sync_directory(target.parent)
                sync_made(made)
            except BaseException:
                os.rename(target, folder)
                raise
            done = True
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            for path in [] if done else made:
                # Not made, or of use to others by now.
                with contextlib.suppress(OSError):
                    path.rmdir()


@contextlib.contextmanager
def _export_errors(target: Path) -> Iterator[None]:
    """Turns errors of the system into an `ExportError`; others are raised as they are.

    Args:
        target: path of the export, at which there is nothing.
    """
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        number = errno_of(error, handled)
        if isinstance(error, errors.CnrError) or number is None:
            raise
        hint = ""
        if number in (errno.ENOSPC, errno.EDQUOT):
            hint = "\n  hint: make room, or export some leaves alone, by tables= or leaves="
        raise errors.ExportError(
            f"the export to {target} failed, and nothing is there\n  {in_one_line(error)}{hint}",
            path=os.fspath(target),
            errno=number,
        ) from error
