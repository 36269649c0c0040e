"""Removing directories of a root so that no crash leaves half of one that looks like a step.

A directory is renamed to a name that no reader lists, the root is synced, and only then are its
files deleted. What a crash leaves of it is deleted later, as is what else lies in a root beside
whole steps: left by earlier runs, or by failed saves of this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterable

from cnr_jax.format import names
from cnr_jax.repository import layout, store
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.texts import logger

_log = logger(__name__)


class Remover:
    """Removes directories below one root, in a store that can rename them.

    Args:
        root: holds the step directories.

    Attributes:
        threads: how many delete files at a time.
    """

    def __init__(self, root: store.AnyPath) -> None:
        self._store = store.store_of(root)
        self._root = self._store.quick(root)
        self.threads = min(16, max(1, (os.cpu_count() or 4) // 2))
        self._purger = _Purger(self.purge)

    def remove(self, directory: str, *, background: bool = True) -> None:
        """Removes a directory: it is gone for every reader when this returns.

        Of a link only the link goes: what it leads to may belong to somebody else.

        Args:
            directory: its name.
            background: delete its files in another thread; `close` waits for it.

        Raises:
            OSError: if it cannot be renamed; then it is there as before. That files of it
                cannot be deleted is logged; the next start tries again.
        """
        renamed = self.set_aside(directory)
        if background:
            self.purge_later(renamed.name)
        else:
            self.purge(renamed)

    def keep(self, directory: str, folder: str) -> None:
        """Moves a directory to a folder of the root, where it is no step any more, durably.

        Raises:
            OSError: as `remove`.
        """
        if not store.exists(self._root / folder):
            self._store.make_folder(self._root / folder)
            store.sync_directory(self._root)
        target = self._root / folder / directory
        if store.exists(target):
            target = self._root / folder / _removed(directory)
        self._rename(directory, target)

    def discard(self, directory: str) -> None:
        """Removes a directory that no reader lists, so that its name is free.

        Nothing is synced, which may be what fails: after a power cut the rest of it may have
        its old name again, and is a leftover as before.

        Raises:
            OSError: if it cannot be renamed; then it is there as before.
        """
        target = self._root / _removed(directory)
        self._store.move(self._root / directory, target)
        self.purge_later(target.name)

    def purge_later(self, name: str) -> None:
        """Deletes a directory that no reader lists, in the background."""
        self._purger.put(self._root / name)

    def set_aside(self, directory: str) -> store.AnyPath:
        """Renames a directory so that it is no step any more, durably; returns its new path.

        Raises:
            OSError: if it cannot be renamed, or that not be synced; then it is there as before.
        """
        target = self._root / _removed(directory)
        self._rename(directory, target)
        return target

    def _rename(self, directory: str, target: store.AnyPath) -> None:
        source = self._root / directory
        self._store.move(source, target)
        try:
            if target.parent != self._root:
                store.sync_directory(target.parent)
            store.sync_directory(self._root)
        except OSError:
            # Whole still: nothing is deleted before the new name is sure to last.
            with contextlib.suppress(OSError):
                self._store.move(target, source)
            raise
        if self._store.is_link(target):
            _log.warning(
                "%s is removed, but was a link: what it leads to stays, %s",
                source,
                self._root / self._store.link_target(target),
            )

    def purge(self, path: store.AnyPath) -> bool:
        """Deletes what `set_aside` has renamed; returns whether all of it is gone."""
        failed = self._store.remove_tree(path, self.threads)
        if failed:
            _log.error(
                "%s is removed, but %d of its files and folders could not be deleted: %s;"
                " the first save of the next manager tries again",
                path,
                len(failed),
                failed[0],
            )
        return not failed

    def remove_file(self, name: str) -> None:
        """Deletes a file right below the root, if it is there and can be deleted."""
        try:
            self._store.remove_file(self._root / name)
        except OSError as error:
            _log.error("%s cannot be deleted: %s", name, error)

    def wait(self, timeout_secs: float) -> bool:
        """Waits for what is being deleted in the background; returns whether that is over."""
        return self._purger.wait(timeout_secs)

    def close(self) -> None:
        """Waits until all removed files are deleted."""
        self._purger.close()


def remove_in_place(step: store.AnyPath) -> None:
    """Removes a step where folders cannot be renamed: it is none once what commits it is gone.

    Raises:
        OSError: if something of it cannot be removed.
    """
    kept = store.store_of(step)
    kept.remove_file(step / names.ORBAX_COMMITTED)
    for error in kept.remove_tree(step):
        raise error


def clear_removed(root: store.AnyPath, ledger: Ledger) -> None:
    """Removes what is left of steps whose removal was cut short, where they are.

    Args:
        root: that is claimed, in a store that cannot rename folders.
        ledger: of it.
    """
    try:
        known = ledger.all_directories()
        found = [
            root / name
            for name in layout.step_directories(root, ledger.is_step)
            if name not in known
        ]
        for step in found:
            with contextlib.suppress(FileNotFoundError):
                if store.read_all(step / names.ATTEMPT) == names.REMOVED:
                    remove_in_place(step)
    except OSError as error:
        _log.warning(
            "what is left of removed steps stays until the next manager saves: %s",
            error,
        )


def _removed(directory: str) -> str:
    """A name for a removed directory that no other has."""
    return names.removed(directory, secrets.token_hex(8))


class _Purger:
    """A thread that deletes files, started when there are some.

    What cannot be deleted, such as a folder that somebody still writes into, is tried again
    when it is waited for, with the next ones, and at the end.

    Args:
        purge: deletes a directory; returns whether all of it is gone.
    """

    def __init__(self, purge: Callable[[store.AnyPath], bool]) -> None:
        self._purge = purge
        # What is to be deleted beside what is left; None at the end.
        self._queue: queue.SimpleQueue[list[store.AnyPath] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left: list[store.AnyPath] = []
        self._pending = 0
        # Locked itself, not through the condition: that would be left locked by an interrupt which
        # comes where Python has just locked it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def put(self, *paths: store.AnyPath) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, args=(self._queue,), name="cnr_purge", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads
                _log.warning("files are deleted later: %s", error)
                self._left += paths
                return
            self._thread = thread
        with self._lock:
            self._pending += 1
        self._queue.put([*paths])

    def _run(self, todo: queue.SimpleQueue[list[store.AnyPath] | None]) -> None:
        while (paths := todo.get()) is not None:
            self._try([*self._left, *paths])
            with self._lock:
                self._pending -= 1
                self._changed.notify_all()
        todo.put(
            None
        )  # for another thread, of whose start an interrupt kept us from knowing
        self._try(self._left)

    def _try(self, paths: list[store.AnyPath]) -> None:
        self._left = [path for path in paths if not self._is_purged(path)]

    def _is_purged(self, path: store.AnyPath) -> bool:
        try:
            return self._purge(path)
        except Exception as error:
            # Whatever it was: whoever waits for this thread must not wait in vain.
            _log.error("%s is removed, but not deleted yet", path, exc_info=error)
            return False

    def wait(self, timeout_secs: float) -> bool:
        """Whether all is tried that was put, and tried again, each in `timeout_secs`."""
        done = self._wait(timeout_secs)
        if done and self._left:
            self.put()
            done = self._wait(timeout_secs)
        return done

    def _wait(self, timeout_secs: float) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self._pending == 0, timeout_secs)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread, self._queue = None, queue.SimpleQueue()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Names of directories right below a root.

    Attributes:
        temporary: of saves that are being written, or that were killed.
        removed: removed steps that have left files.
        abandoned: steps that rollbacks have moved out of the way.
        earlier: roots that hold the steps of earlier runs.
        orphans: deltas without their parent; they cannot be restored.
        unreadable: steps without a readable manifest; they cannot be restored.
        claims: files, of claims and other files that were being replaced.
    """

    temporary: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()


_MEANINGS = {
    "temporary": "saves that are being written or were killed; the next save clears the latter",
    "removed": "removed steps that have left files",
    "abandoned": "steps that rollbacks set aside; they go as retention lets go of others",
    "earlier": "roots of earlier runs, set aside by new ones; delete them if you like",
    "orphans": "deltas without their parent, which cannot be restored; they are kept",
    "unreadable": "steps without a readable manifest; they, and all before, are kept",
}


def find_leftovers(root: store.AnyPath, ledger: Ledger) -> Leftovers:
    """Looks through a root whose ledger has been read."""
    if not store.exists(root):
        return Leftovers()
    held, replacing = (
        layout.beside(root),
        filter(names.is_replacing, store.names_in(root)),
    )
    theirs = {name for name, each in ledger.folders.items() if each.kind == "orbax"}
    return Leftovers(
        temporary=held["unfinished"],
        removed=held["removed"],
        abandoned=(*held["abandoned"], *sorted(ledger.left)),
        earlier=held["earlier_runs"],
        orphans=tuple(entry.directory for entry in ledger.orphans()),
        unreadable=tuple(sorted(ledger.unknown - (set() if ledger.adopts else theirs))),
        claims=tuple(name for name in replacing if not store.is_directory(root / name)),
    )


def report(root: store.AnyPath, leftovers: Leftovers) -> None:
    """Logs one line for each kind that there is something of."""
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
        remover.remove_file(name)
    for name in temporary:
        try:
            remover.remove(name)
        except FileNotFoundError:
            pass  # nothing was written, or it is committed after all
        except OSError as error:
            _log.error("%s of a failed save cannot be removed: %s", name, error)
