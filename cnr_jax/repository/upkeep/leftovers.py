"""What lies in a root beside whole steps: left by earlier runs, or by failed saves of this one."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from typing import Any

from cnr_jax.format import names
from cnr_jax.repository.files import AnyPath, exists
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.upkeep.removal import Remover

_log = logging.getLogger(__name__)
# How long a save waits for the room that failed ones have taken.
ROOM_SECS = 10.0


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


def clear(remover: Remover, leftovers: Leftovers, temporary: Iterable[str]) -> None:
    """Deletes what is of no use any more; what cannot be deleted is logged and stays.

    Args:
        remover: of the root, which must be claimed.
        leftovers: as they were found.
        temporary: those of the temporary directories that nobody is writing.
    """
    for name in leftovers.removed:
        remover.purge_later(name)
    for name in leftovers.claims:
        remover.unlink(name)
    for name in temporary:
        try:
            remover.remove(name)
        except FileNotFoundError:
            pass  # nothing was written, or it is committed after all
        except OSError as error:
            _log.error("%s of a failed save cannot be removed: %s", name, error)


class Unfinished:
    """Folders of failed saves in one root, whose names the next saves use again.

    Args:
        root: holds the step directories.
        remover: renames them, and deletes them in the background. None, as in storage
            services: they are deleted where they are, by whoever calls `clear`.
    """

    def __init__(self, root: AnyPath, remover: Remover | None) -> None:
        self._root, self._remover = root, remover
        # By name, whether it was out of the way when `clear` looked last.
        self._gone: dict[str, bool] = {}
        self._waits = False

    def add(self, directory: str) -> None:
        """Notes a save that was to be in a step directory and is not committed."""
        self._gone[directory + names.TEMPORARY_SUFFIX] = False

    def forget(self, directory: str | None = None) -> None:
        """A folder of the same name may be another save's: of this step, or of any."""
        if directory is None:
            self._gone.clear()
        else:
            self._gone.pop(directory + names.TEMPORARY_SUFFIX, None)

    def clear(self) -> None:
        """Takes out of the way what is there; what cannot be is tried again next time.

        What has gone is looked for once more, before the next save: Orbax ends a save at its
        first error, while others of its threads may still be writing, and make folders anew.

        Nobody may be writing a save. What is not part of the state may still be written.
        """
        looked_at, self._gone = self._gone, {}
        for name, was_gone in looked_at.items():
            is_gone = self._remove(name)
            if not (is_gone and was_gone):
                self._gone[name] = is_gone

    def wait_for_room(self) -> None:
        """Waits until what was taken out of the way is deleted: a save may need the room."""
        if self._waits and self._remover is not None:
            if not self._remover.wait(ROOM_SECS):
                _log.warning("files of a failed save are still being deleted")
        self._waits = False

    def _remove(self, name: str) -> bool:
        """Whether a folder is out of the way."""
        path: Any = self._root / name
        try:
            if not exists(path):
                return True  # nothing was written, or it is committed after all
            if self._remover is None:
                path.rmtree()
            else:
                self._remover.discard(name)
                self._waits = True
        except OSError as error:
            where = os.fspath(path)
            _log.warning(
                "%s of a failed save cannot be removed; the next save tries again: %s",
                where,
                error,
            )
            return False
        return True
