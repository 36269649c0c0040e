"""Where a mirror may be, and whether another program writes there."""

from __future__ import annotations

import os

from cnr_jax import errors
from cnr_jax.repository import layout
from cnr_jax.repository.store import AnyPath, can
from cnr_jax.repository.upkeep.claim import read_writer


def check_apart(root: AnyPath, target: AnyPath) -> None:
    """Checks that of two roots neither lies in the other, and that the second can be one.

    Raises:
        OptionError: if not.
        OSError: if that cannot be seen.
    """
    if layout.lies_in(root, target) or layout.lies_in(target, root):
        raise errors.OptionError(
            f"{os.fspath(target)} is no mirror of {os.fspath(root)}: one lies in the other\n"
            "  hint: another folder, on another disk, or a bucket"
        )
    layout.check_is_no_file(target)
    if can(target).cheap_looks:  # else before it is claimed: its service may be away
        layout.check_is_root(target)


def is_free(root: AnyPath) -> bool:
    """Whether no other program is seen to save to a root."""
    writer = read_writer(root)
    return writer is None or writer.is_here or writer.process.state() != "alive"
