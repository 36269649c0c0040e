"""Places of mirrors: where a mirror may be, and whether another program writes there."""

from __future__ import annotations

import os

from cnr_jax import errors
from cnr_jax.repository import layout
from cnr_jax.repository.store import AnyPath, can
from cnr_jax.repository.upkeep.claim import read_writer


def check_apart(root: AnyPath, target: AnyPath) -> None:
    """Checks that neither of two roots lies in the other, and that the target can be a root.

    Raises:
        OptionError: if one lies in the other, or the target cannot be a root.
        OSError: if storage does not tell.
    """
    if layout.lies_in(root, target) or layout.lies_in(target, root):
        raise errors.OptionError(
            f"{os.fspath(target)} is no mirror of {os.fspath(root)}: one lies in the other\n"
            "  hint: another folder, on another disk, or a bucket"
        )
    layout.check_is_no_file(target)
    if can(
        target
    ).cheap_looks:  # else the copier checks it later: the service may be away now
        layout.check_is_root(target)


def is_free(root: AnyPath) -> bool:
    """Whether no program other than this one is known to be saving to a root."""
    writer = read_writer(root)
    return writer is None or writer.is_here or writer.process.state() != "alive"
