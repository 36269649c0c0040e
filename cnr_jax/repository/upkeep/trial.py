"""Trial of whether a store keeps the conditions of puts; some services accept any put.

Claims, attempts and commits rest on these conditions. `rclone serve s3` and some gateways answer as
if they kept them, so only a trial shows it. The result is not noted in the root, because a root may
be copied to another service with all its notes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.store import AnyPath, can, store_of


def check_conditions(root: AnyPath) -> None:
    """Checks, with an object of its own, that the store refuses puts whose condition fails.

    Raises:
        OptionError: if the store takes such a put.
        OSError: if the store fails.
    """
    if not can(root).conditions:
        return
    store = store_of(root)
    probe = root / names.replacing(names.WRITER, secrets.token_hex(4))
    try:
        first = store.swap(probe, _text(), None)
        if not _is_refused(probe, None):
            raise _ignored(root, "on the condition that none is there")
        store.swap(probe, _text(), first)
        if not _is_refused(probe, first):
            raise _ignored(root, "on the condition that an older one is still there")
    finally:
        # A program that may not delete can save all the same. The object then stays, like that of a
        # killed claim.
        with contextlib.suppress(PermissionError):
            store.remove_file(probe)


def _text() -> bytes:
    """Text that no other put holds, by which a put whose answer was lost is recognized."""
    return secrets.token_hex(16).encode()


def _is_refused(probe: AnyPath, version: Any) -> bool:
    try:
        store_of(probe).swap(probe, _text(), version)
    except FileExistsError:
        return True
    return False


def _ignored(root: AnyPath, condition: str) -> errors.OptionError:
    where = os.fspath(root)
    return errors.OptionError(
        f"nothing is saved in {where}: its service ignores the conditions of puts, by which"
        " programs that save to one root are told apart\n"
        f"  got an object that was replaced {condition}, expected this to be refused\n"
        "  hint: save to a service that keeps If-None-Match and If-Match; or, if never two"
        " programs save there at a time, Options(single_writer=True). prune, compact and"
        " mirror take single_writer=True too, and their commands --single-writer",
        kind="no_conditions",
        path=where,
    )
