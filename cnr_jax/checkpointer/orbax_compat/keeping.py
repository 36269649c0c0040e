"""What a manager adds to Orbax so that steps become durable, and are removed, in a safe order."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat import ChainDeleter
from cnr_jax.format import names
from cnr_jax.repository.files import (
    AnyPath,
    exists,
    is_local,
    sync_directory,
    sync_files,
    sync_step,
)
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.upkeep.removal import Remover

_log = logging.getLogger(__name__)


def with_safety(
    root: AnyPath,
    options: ocp.CheckpointManagerOptions,
    before_commit: Callable[[], None],
) -> ocp.CheckpointManagerOptions:
    """Options with which `before_commit` runs when a step is written but not yet renamed.

    Only asynchronous saves, which are the default, have such a place. In local roots Orbax does
    not delete temporary directories at a start: somebody may be writing them. The first save
    does, if nobody is.
    """
    if is_local(root):
        options = dataclasses.replace(options, cleanup_tmp_directories=False)
    if not options.enable_async_checkpointing:
        return options
    given = options.async_options or ocp.AsyncOptions()
    theirs = given.post_finalization_callback

    def both() -> None:
        before_commit()
        if theirs is not None:
            theirs()

    own = dataclasses.replace(given, post_finalization_callback=both)
    return dataclasses.replace(options, async_options=own)


def sync_uncommitted(root: AnyPath, directory: str, item: str) -> bool:
    """Makes a step durable that Orbax is about to rename.

    Returns:
        Whether it is to be renamed: not where a file in it says that it is committed.
    """
    path = root / f"{directory}{names.TEMPORARY_SUFFIX}"
    if not exists(path):
        return False
    sync_step(path, item)
    return True


def sync_committed(root: AnyPath, directory: str, item: str, *, whole: bool) -> None:
    """Makes a step and its name durable once it is renamed.

    Args:
        root: of the manager.
        directory: of the step.
        item: that holds our checkpoint.
        whole: whether it was not synced before it was renamed.

    Raises:
        IntegrityError: if there is no such step.
    """
    path = root / directory
    if not exists(path):
        raise errors.IntegrityError(
            f"step {directory} was not committed; nothing is deleted in its favour\n"
            f"  {os.fspath(path)} is missing\n"
            "  hint: wait_until_finished() says why a save failed; an error that"
            " check_for_errors() raised before is not raised again",
            kind="not_committed",
        )
    if whole:
        sync_step(path, item)
    else:
        sync_files(path)
    sync_directory(root)


def deleter(
    root: AnyPath,
    options: ocp.CheckpointManagerOptions,
    theirs: Any,
    *,
    name_of: Callable[[int], str],
    ledger: Callable[[], Ledger],
    check: Callable[[], None],
) -> ChainDeleter:
    """The deleter to put in the place of Orbax's.

    Args:
        root: of the manager.
        options: of the manager: where removed steps go, and who deletes their files.
        theirs: Orbax's deleter. It still deletes in storage services, where directories
            cannot be renamed at once.
        name_of: the step directory of a step.
        ledger: returns the ledger of the root.
        check: raises `WriterError` if another manager has taken over the root.

    Raises:
        OptionError: if removed steps are to go where they cannot.
    """

    def delete(directory: str) -> None:
        theirs.delete(names.step_number(directory))

    remove, close = delete, theirs.close
    if is_local(root):
        theirs.close()
        if options.todelete_full_path is not None:
            raise errors.OptionError(
                "todelete_full_path works in gs:// only, which this root is not\n"
                f"  got {options.todelete_full_path!r} for {os.fspath(root)}\n"
                "  hint: todelete_subdir keeps removed steps in a folder of the root"
            )
        remover = Remover(
            root,
            threads=options.num_deletion_threads,
            keep_in=options.todelete_subdir,
            background=options.enable_background_delete,
        )
        remove, close = remover.remove, remover.close
    primary = options.multiprocessing_options.primary_host
    return ChainDeleter(
        remove,
        name_of=name_of,
        ledger=ledger,
        check=check,
        close=close,
        primary=ocp.multihost.is_primary_host(primary),
    )
