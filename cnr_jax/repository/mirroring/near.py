"""A near root, such as one in memory: saves commit there, and its mirror is the root of the run.

The root of the run is the far root. No step leaves the near root before it is committed far.
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
from cnr_jax.texts import count_of, logger

_log = logger(__name__)
# The most bytes of the note that are read: more than a path can have.
_MOST_BYTES = 1 << 16
# Bytes of manifests and half-filled pages of a step, for which there must be room besides.
_OTHER_BYTES = 256 << 10


def lacking_room(
    near: AnyPath,
    far: AnyPath,
    full_bytes: int,
    is_step: Callable[[str], bool] | None,
    item: str | None = None,
) -> str:
    """Line that says why a near root has no room for the saves of a run; empty if it has.

    Args:
        near: path of the near root, which need not exist.
        far: path of the root of the run.
        full_bytes: bytes of the tables in a full checkpoint, by their codecs.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        item: name of the item of each step; None: the one that is found.
    """
    free = store_of(near).free_bytes(near)
    held = store_of(near).bytes_below(near) if exists(near) else 0
    missing = _missing(near, far, is_step, item)
    full_bytes = max([full_bytes, *missing[-1:]])
    needed = max(full_bytes, sum(missing)) + full_bytes
    # What is near leaves it once it is in the root, but not before the newest chain has come.
    if free + held >= needed and free >= sum(missing):
        return ""
    return (
        f"{os.fspath(near)} has room for {amount(free + held)}, {amount(held)} of which are taken,"
        f" and a chain with the next full checkpoint takes {amount(needed)} or more"
    )


def _missing(
    near: AnyPath,
    far: AnyPath,
    is_step: Callable[[str], bool] | None,
    item: str | None,
) -> list[int]:
    """Bytes of the steps that are copied to the near root before the run goes on, newest first.

    They are the newest chain of the far root, or what of it is not near; none if near is newer.
    """
    try:
        item = item or find_item(far)
        if item is None:
            return []
        theirs = Ledger.load(far, item, is_step)
        mine = Ledger.load(near, item, is_step) if exists(near) else Ledger()
    except (errors.CnrError, OSError):
        if exists(near):
            return []  # whoever copies steps between the two meets the same error
        raise
    newest, own = theirs.newest(), mine.newest()
    if newest is None or (own is not None and order(own) >= order(newest)):
        return []
    here = {entry.uuid for entry in mine.committed()}
    chain = [entry for entry in theirs.chain(newest) if entry.uuid not in here]
    return [theirs.own_bytes(entry) + _OTHER_BYTES for entry in chain]


def empty_into(near: AnyPath, far: AnyPath, **told: Any) -> None:
    """Copies the steps that an earlier program has left near, before saves go to the far root.

    Args:
        near: path of the near root, to which no saves go any more.
        far: path of the root of the run.
        **told: settings of the `Mirror` that copies.
    """
    if exists(near):
        mirror = Mirror(near, far, **told)
        with mirror.for_a_while():
            mirror.catch_up()


def check_goes_to(near: AnyPath, far: AnyPath) -> None:
    """Checks that the steps in a near root are of the run of the far root, or are to go there.

    All steps there count, however this manager names its own. They are to go to the far root if
    that is noted near, or if none is noted and it holds no steps.

    Raises:
        UsedRootError: if they are of another run, or another root is noted and this one holds no
            steps.
        OSError: if the near root cannot be read; or the far root, where another one is noted.
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
        return  # the code that copies steps between the two meets the same error, and reports it
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
    """Sets aside those steps of a near root that the run has gone on without.

    A host that comes back may hold such steps: it had not copied them, so the run went on from an
    older step on another host. The newest step of the far root is then of a lineage that the near
    root does not know, and was written later than the steps that are only near.

    Args:
        near: path of the near root, which need not exist.
        far: path of the root of the run.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        item: name of the item of each step; None: the one that is found.
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
    """Does the work of `set_strays_aside`, given the ledgers of both roots.

    Raises:
        CnrError, OSError: if a manifest cannot be read, or a step cannot be moved.
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
        "%s of %s set aside: %s, not copied to %s, where the run went on without, up to"
        " step %d",
        count_of(len(strays), "step"),
        os.fspath(near),
        ", ".join(entry.directory for entry in strays),
        os.fspath(far),
        newest.step,
    )


def note_far(near: AnyPath, far: AnyPath) -> None:
    """Notes in a near root which root its steps are copied to, so that they go to no other.

    Raises:
        OSError: if the note cannot be stored.
    """
    if _noted_far(near) != os.fspath(far):
        make_root(near)
        replace_durably(near / names.FAR, os.fsencode(f"{os.fspath(far)}\n"))


def _noted_far(near: AnyPath) -> str:
    """Path of the far root that is noted in a near root; empty if none is."""
    path = near / names.FAR
    try:
        return os.fsdecode(read_small(path, _MOST_BYTES)).removesuffix("\n")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except errors.FormatError as error:
        _log.warning("%s names no root: %s", os.fspath(path), in_one_line(error))
        return ""


def _is_same(noted: str, far: AnyPath) -> bool:
    """Whether the noted root is this one, maybe by another path."""
    if not noted or noted == os.fspath(far):
        return noted != ""
    try:
        other = open_root(noted)
        return lies_in(other, far) and lies_in(far, other)
    except errors.OptionError:
        return False
