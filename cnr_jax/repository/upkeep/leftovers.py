"""What earlier runs have left in a root beside whole steps."""

from __future__ import annotations

import dataclasses
import logging
import os

from cnr_jax.format import names
from cnr_jax.repository.files import AnyPath, exists
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.upkeep.removal import Remover

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Names of directories right below a root.

    Attributes:
        temporary: of saves that are being written, or that were killed.
        removed: removed steps of which files are left.
        abandoned: steps that rollbacks have moved out of the way.
        earlier: roots that hold the steps of earlier runs.
        orphans: deltas without their parent; they cannot be restored.
        unreadable: steps without a readable manifest; they cannot be restored.
        claims: files, of claims that were being written.
    """

    temporary: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()


# What is left of a file in the root that was being replaced.
_REPLACED = f"{names.WRITER}.", f"{names.SUSPECTS}."
_MEANINGS = {
    "temporary": "saves that are being written or were killed",
    "removed": "removed steps of which files are left",
    "abandoned": "steps of abandoned branches; they are kept, delete them if you like",
    "earlier": "roots of earlier runs, set aside by new ones; delete them if you like",
    "orphans": "deltas without their parent, which cannot be restored; they are kept",
    "unreadable": "steps without a readable manifest; they, and all before, are kept",
}


def find_leftovers(root: AnyPath, ledger: Ledger) -> Leftovers:
    """Looks through a root of which the ledger has been read."""
    present = sorted(path.name for path in root.iterdir()) if exists(root) else []
    # A removed directory may have been temporary or abandoned before.
    removed = [name for name in present if names.REMOVED_MARK in name]
    rest = [name for name in present if name not in removed]
    return Leftovers(
        temporary=tuple(name for name in rest if names.TEMPORARY_SUFFIX in name),
        removed=tuple(removed),
        abandoned=tuple(name for name in rest if names.ABANDONED_MARK in name),
        earlier=tuple(name for name in rest if name.startswith(names.EARLIER_RUN)),
        orphans=tuple(entry.directory for entry in ledger.orphans()),
        unreadable=tuple(sorted(ledger.unreadable)),
        claims=tuple(name for name in rest if name.startswith(_REPLACED)),
    )


def report(root: AnyPath, leftovers: Leftovers) -> None:
    """Logs one line for each kind of which there is something."""
    for kind, meaning in _MEANINGS.items():
        found: tuple[str, ...] = getattr(leftovers, kind)
        if found:
            shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
            _log.warning(
                "%s holds %d %s: %s", os.fspath(root), len(found), meaning, shown
            )


def clear(remover: Remover, leftovers: Leftovers, *, temporary: bool) -> None:
    """Deletes what is of no use any more; what cannot be deleted is logged and stays.

    Args:
        remover: of the root, which must be claimed.
        leftovers: as they were found.
        temporary: also temporary directories: nobody is writing them.
    """
    for name in leftovers.removed:
        remover.purge_later(name)
    for name in leftovers.claims:
        remover.unlink(name)
    for name in leftovers.temporary if temporary else ():
        remove_temporary(remover, name)


def remove_temporary(remover: Remover, name: str) -> None:
    """Removes what a save has written that nobody goes on with."""
    try:
        remover.remove(name)
    except FileNotFoundError:
        pass  # nothing was written, or it is committed after all
    except OSError as error:
        _log.error("%s of a failed save cannot be removed: %s", name, error)
