"""Whether a store keeps the conditions that puts are made under: tried, as some take any put.

Claims, attempts and commits rest on these conditions. `rclone serve s3` and some gateways answer as
if they kept them, so nothing but trying shows it. Nothing is noted: a root may be moved to another
service, with all that it says of itself.
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
    """Checks that a put is refused whose condition does not hold, by an object of its own.

    Raises:
        OptionError: if it is not.
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
        # Who may not delete saves all the same: it stays, as what a killed claim has left does.
        with contextlib.suppress(PermissionError):
            store.remove_file(probe)


def _text() -> bytes:
    """What no other put holds: one whose answer is lost is known by it."""
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
