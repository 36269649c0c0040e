"""Folders of failed saves, which are removed before their names are used again.

Where folders cannot be renamed, also those of merged baselines that killed programs have left.
"""

from __future__ import annotations

import os
import threading

from cnr_jax.format import names
from cnr_jax.repository.layout import beside
from cnr_jax.repository.store import AnyPath, exists, store_of
from cnr_jax.repository.upkeep.removal import InPlaceRemover, Remover
from cnr_jax.texts import logger

_log = logger(__name__)
# How long a save waits until the files of failed saves are deleted and their room is free.
ROOM_SECS = 10.0


class Unfinished:
    """Folders of failed saves in one root, whose names the next saves use again.

    Args:
        root: root that holds the step directories.
        remover: remover of the root. One that renames folders deletes them in the background. If
            folders cannot be renamed, the caller of `clear` deletes them where they are.
    """

    def __init__(self, root: AnyPath, remover: Remover | InPlaceRemover) -> None:
        self._root = root
        self._remover = remover if isinstance(remover, Remover) else None
        # For each name, whether the folder was gone when `clear` looked last.
        self._gone: dict[str, bool] = {}
        self._waits = False
        # Elsewhere `RootWriter` finds what killed programs have left.
        self._has_looked = self._remover is not None
        self._clearing = threading.Lock()

    @property
    def any(self) -> bool:
        """Whether there may be such folders."""
        return bool(self._gone)

    def add(self, folder: str) -> None:
        """Notes a folder into which a save was written that is not committed."""
        self._gone[folder] = False

    def forget(self, directory: str | None = None) -> None:
        """Forgets the folder of a step, or all: another save may now write under that name."""
        if directory is None:
            self._gone.clear()
            self._has_looked = self._remover is not None
        else:
            self._gone.pop(directory + names.TEMPORARY_SUFFIX, None)

    def clear(self) -> None:
        """Removes the noted folders; what cannot be removed is tried again next time.

        The next call looks for a removed folder once more: a plain manager of Orbax ends a save at
        its first error, while others of its threads may still be writing, and make the folder anew.

        Call it only while nobody writes a save. Items other than the state may still be written.
        """
        with self._clearing:
            self._look()
            for name, was_gone in list(self._gone.items()):
                is_gone = self._remove(name)
                if is_gone and was_gone:
                    del self._gone[name]
                else:
                    self._gone[name] = is_gone

    def _look(self) -> None:
        """Notes the folders that killed programs have left, at the first call."""
        if self._has_looked:
            return
        try:
            found = beside(self._root)["unfinished"]
        except OSError:
            return  # the next save looks again
        self._gone |= dict.fromkeys(found, False)
        self._has_looked = True

    def wait_for_room(self) -> None:
        """Waits until the removed folders are deleted, as a save may need the room."""
        if self._waits and self._remover is not None:
            if not self._remover.wait(ROOM_SECS):
                _log.warning("files of a failed save are still being deleted")
        self._waits = False

    def _remove(self, name: str) -> bool:
        """Removes a folder, if it is there; returns whether its name is free now."""
        path = self._root / name
        try:
            if not exists(path):
                return True  # nothing was written, or it is committed after all
            if self._remover is None:
                for error in store_of(path).remove_tree(path):
                    raise error
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
