"""A near root, such as one in memory: saves commit there, and its mirror is the root of the run.

Nothing leaves it that is not committed far.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.causes import in_one_line
from cnr_jax.repository.description import amount
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.mirroring.places import is_free
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import AnyPath, exists, store_of, sync_directory
from cnr_jax.repository.upkeep.claim import read_writer
from cnr_jax.texts import logger

_log = logger(__name__)


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


def meet(
    near: AnyPath,
    far: AnyPath,
    is_step: Callable[[str], bool] | None,
    item: str | None = None,
) -> None:
    """Checks that what lies near is not of another root's run, and sets strays aside.

    Args:
        near: the root, which need not be there.
        far: the root of the run.
        is_step: tells names of step directories; None: all that end in a digit.
        item: of each step; None: the one that is found.

    Raises:
        UsedRootError: if the far root is empty, and what lies near is of another one's run.
    """
    try:
        item = item or (find_item(near) if exists(near) else None)
        if item is None:
            return
        held = Ledger.load(near, item, is_step)
        theirs = Ledger.load(far, item, is_step)
        if theirs.newest() is None:
            _check_goes_to(near, far, held)
        _set_strays_aside(near, far, item, held, theirs)
    except errors.UsedRootError:
        raise
    except (errors.CnrError, OSError) as error:
        _log.warning(
            "whether the run has gone on without steps of %s is not known: %s",
            os.fspath(near),
            in_one_line(error),
        )


def _check_goes_to(near: AnyPath, far: AnyPath, held: Ledger) -> None:
    """Makes sure that what lies near is not to be copied to another root than this one.

    The claim of who saved near tells. Where this one holds steps, these tell of which run it is.

    Raises:
        UsedRootError: if it is.
    """
    steps, writer = [each.step for each in held.committed()], read_writer(near)
    here, there = os.fspath(near), os.fspath(far)
    if not steps or writer is None or writer.far in ("", there):
        return
    raise errors.UsedRootError(
        f"{here} holds steps of the run of another root\n"
        f"  got steps for {writer.far}, up to step {max(steps)}; expected steps for {there},"
        " which holds none\n"
        "  hint: another folder for near; or delete this one, if nobody needs its steps; to go on"
        f" with that run here, copy them first: cnr-jax mirror {here} {there}"
    )


def _set_strays_aside(
    near: AnyPath, far: AnyPath, item: str, held: Ledger, theirs: Ledger
) -> None:
    """Sets steps of a near root aside that the run has gone on without.

    So it is on a host that comes back: what it had not copied was lost for others, and one of
    them has gone on from an older step. The newest step of the far root is of a lineage then that
    the near one does not know, and was written later than what lies near alone.

    Raises:
        CnrError, OSError: if that cannot be seen or done.
    """
    if not is_free(near):
        return
    mine = held.committed()
    newest, known = theirs.newest(), {entry.uuid for entry in theirs.committed()}
    strays = [entry for entry in mine if entry.uuid not in known and entry.manifest]
    if newest is None or newest.known is None or not strays:
        return
    lineages = {entry.known.lineage for entry in mine if entry.known}
    if newest.known.lineage in lineages or newest.run != strays[-1].run:
        return
    made = newest.manifest or read_manifest(far / newest.directory / item)
    if any(
        entry.manifest.written_at_unix_secs > made.written_at_unix_secs
        for entry in strays
        if entry.manifest
    ):
        return
    for entry in reversed(strays):
        aside = names.abandoned(entry.directory, entry.generation, entry.uuid)
        store_of(near).move(near / entry.directory, near / aside)
    sync_directory(near)
    _log.warning(
        "steps %s of %s are set aside: they were not copied to %s, where the run went on"
        " without them, up to step %d",
        ", ".join(entry.directory for entry in strays),
        os.fspath(near),
        os.fspath(far),
        newest.step,
    )
