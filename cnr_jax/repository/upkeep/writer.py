"""What one process of a run does so that a root is never harmed by a crash or a second writer."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Sequence

from cnr_jax import errors
from cnr_jax.format.names import ABANDONED_MARK, SUSPECTS, final_name
from cnr_jax.repository.files import (
    AnyPath,
    is_local,
    is_named,
    missing_directories,
    sync_directory,
    sync_made,
)
from cnr_jax.repository.lineage import suspects
from cnr_jax.repository.lineage.entries import Entry, aside_name
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.step import read_committed
from cnr_jax.repository.upkeep import leftovers
from cnr_jax.repository.upkeep.claim import (
    Aside,
    Claim,
    Writer,
    other_writer,
    read_writer,
)
from cnr_jax.repository.upkeep.lock import WritingLock
from cnr_jax.repository.upkeep.removal import Remover
from cnr_jax.repository.upkeep.unfinished import Unfinished

_log = logging.getLogger(__name__)
# How long a manager that takes a root over waits for the one before it to notice.
HAND_OVER_SECS = 60.0


class Guard:
    """Watches over the saves of one manager in one root; lives on the first process only.

    A save goes `begin` (nothing is decided yet), maybe `move_aside`, `check` (right before the
    commit), then `committed` or `failed`, and `end`.
    """

    def __init__(self, root: AnyPath, item: str) -> None:
        self._root, self._item = root, item
        self._claim, self._lock = Claim(root), WritingLock(root)
        self._remover = Remover(root, background=True) if is_local(root) else None
        self._unfinished = Unfinished(root, self._remover)
        self._tidy = False
        # Whether steps may be there, or gone, that the ledger does not know to be.
        self._doubtful = False
        self._before: Writer | None = None

    def begin(self, ledger: Ledger, own: str | None = None) -> bool:
        """Makes sure that this manager alone writes, and that the ledger is what is there.

        Args:
            ledger: of the root.
            own: step directory of a save that is being made already: no leftover.

        Returns:
            Whether steps have come or gone by other hands.

        Raises:
            WriterError: if another manager has taken over, or is still writing.
        """
        made = missing_directories(self._root)
        if made or not is_local(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        sync_made(made)
        if not self._claim.is_taken:
            self._before, self._tidy = self._claim.take(), False
            self._unfinished.forget()
        self._claim.check()
        if not self._lock.acquire(HAND_OVER_SECS):
            raise errors.WriterError(
                f"another manager is writing a save in {os.fspath(self._root)}\n"
                f"  it is {self._before or 'not known which'}; waited {HAND_OVER_SECS:g} s\n"
                f"  hint: {other_writer(self._before)}; then save again",
                kind="writer_busy",
            )
        # While it waited a third one may have come.
        self._claim.check()
        if own is not None:
            self._unfinished.forget(own)
        self._unfinished.clear()
        self._unfinished.wait_for_room()
        changed = self._bring_back(ledger)
        if not self._tidy:
            self._tidy_up(ledger, own)
            self._tidy = True
        return self._refresh(ledger) or changed

    def _refresh(self, ledger: Ledger) -> bool:
        """Looks at the root before each save where that is cheap; else only in doubt."""
        if not self._doubtful and not is_local(self._root):
            return False
        changed = ledger.refresh(self._root, self._item)
        self._doubtful = False
        return changed

    def _tidy_up(self, ledger: Ledger, own: str | None) -> None:
        """Deletes what kills have left."""
        if self._remover is None:
            return
        # Without locks, one that is not known to have ended may still be writing.
        before = self._before
        alone = before is not None and (self._lock.is_proof or before.is_dead)
        found = leftovers.find_leftovers(self._root, ledger)
        others = [name for name in found.temporary if final_name(name) != own]
        found = dataclasses.replace(found, temporary=tuple(others))
        leftovers.clear(self._remover, found, temporary=alone)

    def check(self) -> None:
        """Right before a commit or a removal.

        Raises:
            WriterError: if another manager has taken over.
        """
        self._claim.check()

    def move_aside(
        self,
        uuid: str,
        directory: str,
        entries: Sequence[Entry],
        earlier: str = "",
    ) -> None:
        """Moves steps of an abandoned branch out of the way of a save, dependents first.

        What is moved is noted in the claim before, so that it comes back if the save fails.

        Args:
            uuid: of the save.
            directory: of the save.
            entries: in the order in which they are moved.
            earlier: folder of the root that they are moved into, and with them what earlier
                rollbacks have moved aside, and which of them may lack rows; empty: they
                stay in the root under other names.
        """
        if not entries:
            return
        moved = [(entry.directory, aside_name(entry)) for entry in entries]
        for entry in entries if earlier else ():
            self._check_movable(entry.directory)
        if earlier:
            left = [p.name for p in self._root.iterdir() if ABANDONED_MARK in p.name]
            own = [*(entry.directory for entry in entries), *sorted(left)]
            moved = [(name, f"{earlier}/{name}") for name in own]
        aside = Aside(
            uuid=uuid, directory=directory, item=self._item, moved=tuple(moved)
        )
        self._claim.note_aside(aside)
        if earlier:
            (self._root / earlier).mkdir()
            sync_directory(self._root)
            suspects.copy(self._root, self._root / earlier)
        why = f"left behind as the run went back, makes way for the save of step {directory}"
        way = (
            "to have it back, give that folder its name again, {} in the root, while no"
            " program saves there and no other folder has that name"
        )
        if earlier:
            why = f"of an earlier run, makes way for the new run of step {directory}"
            way = "restore(directory=) and cnr_jax.verify read the folder that it is in"
        for name, now in moved:
            (self._root / name).rename(self._root / now)
            _log.warning(
                "step %s, %s: it is now %s. Nothing is deleted: %s",
                name,
                why,
                os.fspath(self._root / now),
                way.format(name),
            )
        if earlier:
            sync_directory(self._root / earlier)
        sync_directory(self._root)

    def _check_movable(self, directory: str) -> None:
        """Makes sure that a step is not a link that leads elsewhere from another folder.

        Raises:
            OptionError: if it is.
        """
        path = self._root / directory
        if is_local(path) and os.path.islink(path):
            leads = os.readlink(path)
            if not os.path.isabs(leads):
                raise errors.OptionError(
                    f"step {directory} cannot be moved aside for a new run: {os.fspath(path)}"
                    f" is a relative link\n  got {leads!r}, expected a folder, or a link with"
                    " an absolute path\n  hint: save into another root, or put the folder"
                    " itself in the place of the link"
                )

    def committed(self) -> None:
        """The save is durable: what was moved out of its way stays there."""
        if self._claim.aside is not None and self.is_own():
            try:
                self._claim.note_aside(None)
            except OSError as error:
                # Whether the save is committed can be seen, as long as it is there.
                _log.warning("cannot note that a rollback is committed: %s", error)

    def failed(self, ledger: Ledger) -> bool:
        """Brings back what was moved aside for a save that is not there.

        It may be there after all: storage that fails to show its manifest looks alike. So the
        next save looks at the root first, whatever that costs.

        Args:
            ledger: of the root.

        Returns:
            Whether steps are back.
        """
        self._doubtful = True
        return self._bring_back(ledger)

    def _bring_back(self, ledger: Ledger) -> bool:
        aside = self._claim.aside
        if aside is None or not self.is_own():
            return False
        bring_back(self._root, aside)
        self._doubtful = True
        self._claim.note_aside(None)
        return self._refresh(ledger)

    def discard(self, directory: str) -> None:
        """Removes what a failed save has written, at once if nobody is writing, else later.

        Args:
            directory: step directory of the save, which is not there.
        """
        self._unfinished.add(directory)
        held = self._lock.is_held
        try:
            # Whoever takes over uses the same names, but writes with the lock only.
            if self._lock.acquire(0) and self.is_own():
                self._unfinished.clear()
        except OSError as error:
            _log.warning(
                "what a failed save has written stays until the next save: %s", error
            )
        finally:
            if not held:
                self._lock.release()

    def is_own(self) -> bool:
        """Whether the claim still holds; who takes over also takes what was moved aside."""
        try:
            self._claim.check()
        except (errors.WriterError, OSError):
            return False
        return True

    def end(self) -> None:
        """Nothing is being written any more."""
        self._lock.release()

    def give_up(self) -> None:
        """Lets the next save claim the root anew."""
        self._claim.give_up()

    def close(self) -> None:
        """Waits for what is being deleted and frees what is held."""
        self.end()
        if self._remover is not None:
            self._remover.close()


def bring_back(root: AnyPath, aside: Aside) -> None:
    """Undoes a move aside unless the save that it was for is committed, parents first.

    Raises:
        OSError: if storage does not say whether it is, or cannot undo it.
    """
    try:
        found = read_committed(root, aside.directory, aside.item)
        if found.uuid == aside.uuid:
            return
    except errors.CnrError:
        pass
    back: list[str] = []
    for name, now in reversed(aside.moved):
        if is_named(root / now) and not is_named(root / name):
            (root / now).rename(root / name)
            back.append(name)
    for folder in {now.rpartition("/")[0] for _, now in aside.moved} - {""}:
        # Stays if somebody has put something there, or if it was never made.
        with contextlib.suppress(OSError):
            _remove_if_empty(root / folder)
    if back:
        sync_directory(root)
        _log.warning(
            "steps %s are back: the save that they were moved aside for was not committed",
            ", ".join(back),
        )


def _remove_if_empty(folder: AnyPath) -> None:
    """Removes a local folder that holds nothing but a copy of what is noted of its steps."""
    held = [path.name for path in folder.iterdir()]
    if all(name.startswith(SUSPECTS) for name in held):
        for name in held:
            os.unlink(folder / name)
    os.rmdir(folder)


def recover(root: AnyPath) -> None:
    """Brings back what a killed save had moved aside, if surely nobody is writing.

    For a manager that starts and may save: without claiming the root, and again at will. Where
    it may not write, what was moved stays where it is.

    Raises:
        OSError: if it cannot be seen or undone: the newest steps may be among what was moved.
    """
    writer = read_writer(root)
    if writer is None or writer.aside is None:
        return
    lock = WritingLock(root)
    try:
        free = lock.acquire(0)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        _log.warning(
            "steps that a save has moved aside in %s, which was not committed, stay"
            " there: %s",
            os.fspath(root),
            error,
        )
        return
    try:
        if free and (lock.is_proof or writer.is_dead):
            bring_back(root, writer.aside)
    finally:
        lock.release()
