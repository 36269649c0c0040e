"""A near root, such as one in memory: saves commit there, and its mirror is the root of the run.

Nothing leaves it that is not committed far.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cnr_jax.repository.description import amount
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.store import AnyPath, exists, store_of


def lacking_room(
    near: AnyPath,
    far: AnyPath,
    full_bytes: int,
    is_step: Callable[[str], bool] | None,
    item: str | None = None,
) -> str:
    """Why a near root does not hold the saves of a run, in a line; empty: it does.

    Args:
        near: the root, which need not be there.
        far: the root of the run.
        full_bytes: of the tables in a full checkpoint, by their codecs.
        is_step: tells names of step directories; None: all that end in a digit.
        item: of each step; None: the one that is found.
    """
    held, chain_bytes = 0, full_bytes
    if exists(near):
        held = store_of(near).bytes_below(near)
    elif (item := item or find_item(far)) is not None:
        # What is to come near before the run goes on.
        ledger = Ledger.load(far, item, is_step)
        newest = ledger.newest()
        chain = ledger.chain(newest) if newest else []
        sizes = [ledger.own_bytes(entry) for entry in chain]
        full_bytes = max([full_bytes, *sizes[-1:]])
        chain_bytes = max(full_bytes, sum(sizes))
    room, needed = store_of(near).free_bytes(near) + held, chain_bytes + full_bytes
    if room >= needed:
        return ""
    return (
        f"{os.fspath(near)} has room for {amount(room)}, and a chain with the next full"
        f" checkpoint takes {amount(needed)} or more"
    )


def empty_into(near: AnyPath, far: AnyPath, **told: Any) -> None:
    """Copies what an earlier program has left in a near root, before the far one is saved to.

    Args:
        near: that is not saved to any more.
        far: the root of the run.
        **told: as a `Mirror` is told.
    """
    if exists(near):
        mirror = Mirror(near, far, **told)
        with mirror.for_a_while():
            mirror.catch_up()
