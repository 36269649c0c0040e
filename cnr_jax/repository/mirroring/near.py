"""A near root, such as one in memory: saves commit there, and its mirror is the root of the run.

Nothing leaves it that is not committed far.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.causes import in_one_line
from cnr_jax.repository.description import amount
from cnr_jax.repository.index.entries import order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import lies_in, open_root
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.mirroring.places import is_free
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import (
    AnyPath,
    exists,
    make_root,
    read_small,
    replace_durably,
    store_of,
    sync_directory,
)
from cnr_jax.texts import logger

_log = logger(__name__)
# As long as a path can be, and longer.
_MOST_BYTES = 1 << 16


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


def check_goes_to(near: AnyPath, far: AnyPath) -> None:
    """Checks that what lies near is of the run of the far root, or noted to be copied there.

    All of it counts, however the manager names its steps.

    Raises:
        UsedRootError: if it is of another run, or another root is noted and this one holds no step.
        OSError: if what lies near cannot be seen; or the far root, where another one is noted.
    """
    noted, item = _noted_far(near), find_item(near) if exists(near) else None
    if item is None or _is_same(noted, far):
        return
    held = sorted(Ledger.load(near, item).committed(), key=order)
    if not held:
        return
    try:
        theirs = Ledger.load(far, item) if exists(far) else Ledger()
    except (errors.CnrError, OSError):
        if noted:
            raise
        return  # who brings steps near, or copies them, meets that too
    runs = {entry.run for entry in theirs.committed() if not entry.orbax}
    if held[-1].run in runs or not (noted or runs):
        return
    here, there = os.fspath(near), os.fspath(far)
    way = f"cnr-jax mirror {shlex.quote(here)} {shlex.quote(there)}"
    hint = f"; to go on with that run here, copy them first: {way}"
    expected = f"steps of that run in {there}, which holds none that can be read"
    if runs:
        expected, hint = f"run {', '.join(sorted(map(str, runs)))}", ""
    raise errors.UsedRootError(
        f"{here} holds steps of another run than {there}\n"
        f"  got run {held[-1].run}, up to step {held[-1].step}, which is copied to"
        f" {noted[:200] or 'a root that is not noted'}; expected {expected}\n"
        "  hint: another folder for near; or delete this one, if nobody needs its steps"
        f"{hint}"
    )


def set_strays_aside(
    near: AnyPath,
    far: AnyPath,
    is_step: Callable[[str], bool] | None,
    item: str | None = None,
) -> None:
    """Sets steps of a near root aside that the run has gone on without.

    So it is on a host that comes back: what it had not copied was lost for others, and one of
    them has gone on from an older step. The newest step of the far root is of a lineage then that
    the near one does not know, and was written later than what lies near alone.

    Args:
        near: the root, which need not be there.
        far: the root of the run.
        is_step: tells names of step directories; None: all that end in a digit.
        item: of each step; None: the one that is found.
    """
    try:
        item = item or (find_item(near) if exists(near) else None)
        if item is not None and is_free(near):
            held = Ledger.load(near, item, is_step)
            _set_aside(near, far, item, held, Ledger.load(far, item, is_step))
    except (errors.CnrError, OSError) as error:
        _log.warning(
            "whether the run has gone on without steps of %s is not known: %s",
            os.fspath(near),
            in_one_line(error),
        )


def _set_aside(
    near: AnyPath, far: AnyPath, item: str, held: Ledger, theirs: Ledger
) -> None:
    """The same, by what both roots hold.

    Raises:
        CnrError, OSError: if that cannot be seen or done.
    """
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


def note_far(near: AnyPath, far: AnyPath) -> None:
    """Notes near which root its steps are copied to, so that they do not come to another one.

    Raises:
        OSError: if that cannot be stored.
    """
    if _noted_far(near) != os.fspath(far):
        make_root(near)
        replace_durably(near / names.FAR, os.fsencode(f"{os.fspath(far)}\n"))


def _noted_far(near: AnyPath) -> str:
    """The root that is noted near; empty: none is."""
    path = near / names.FAR
    try:
        return os.fsdecode(read_small(path, _MOST_BYTES)).removesuffix("\n")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except errors.FormatError as error:
        _log.warning("%s names no root: %s", os.fspath(path), in_one_line(error))
        return ""


def _is_same(noted: str, far: AnyPath) -> bool:
    """Whether a root that was noted is this one, maybe by another path."""
    if not noted or noted == os.fspath(far):
        return noted != ""
    try:
        other = open_root(noted)
        return lies_in(other, far) and lies_in(far, other)
    except errors.OptionError:
        return False
