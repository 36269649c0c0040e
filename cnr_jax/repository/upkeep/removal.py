"""Removal of directories of a root, such that no crash leaves half of one that looks like a step.

A directory is renamed to a name that no reader lists, the root is synced, and only then are its
files deleted. Where folders cannot be renamed, the commit of the step is taken back instead. A
later save deletes what a crash leaves of it. It also clears what else earlier runs, or failed saves
of this one, have left beside whole steps.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cnr_jax.format import names
from cnr_jax.repository import layout, markers, store
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.texts import logger

_log = logger(__name__)
# Folders that are looked at at the same time where each look is a request.
_AT_ONCE = 16
_LEFT = (
    "%s is removed, but not all of its files could be deleted: %s; the next removal, or the first"
    " save of the next manager, tries again"
)


class Remover:
    """Remover of directories below one root, in a store that can rename them.

    Args:
        root: root that holds the step directories.
        before: function that is called with the name of a directory right before that is removed;
            if it raises an error, the directory stays.

    Attributes:
        threads: number of threads that delete files at the same time.
        avoided: see `InPlaceRemover`; here the names of removed steps are free at once.
    """

    def __init__(
        self, root: store.AnyPath, before: Callable[[str], object] = lambda _: None
    ) -> None:
        self._store, self._before = store.store_of(root), before
        self.avoided: set[str] = set()
        self._root = self._store.quick(root)
        self.threads = min(16, max(1, (os.cpu_count() or 4) // 2))
        self._purger = _Purger(self.purge)

    def remove(self, directory: str, *, background: bool = True) -> None:
        """Removes a directory, which is gone for every reader when this returns.

        If it is a link, only the link goes: what it leads to may belong to somebody else.

        Args:
            directory: name of the directory.
            background: whether to delete its files in another thread; `close` waits for that.

        Raises:
            OSError: if the directory cannot be renamed; it is then there as before. If files of it
                cannot be deleted, that is only logged, and the next manager tries again.
            CnrError: as `before` raises.
        """
        self._before(directory)
        renamed = self._root / _removed(directory)
        if not self._rename(directory, renamed):
            return
        if background:
            self.purge_later(renamed.name)
        else:
            self.purge(renamed)

    def keep(self, directory: str, folder: str) -> None:
        """Moves a directory durably to a folder of the root, where it is no longer a step.

        Raises:
            OSError, CnrError: as for `remove`.
        """
        self._before(directory)
        if not store.exists(self._root / folder):
            self._store.make_folder(self._root / folder)
            store.sync_directory(self._root)
        target = self._root / folder / directory
        if store.exists(target):
            target = self._root / folder / _removed(directory)
        self._rename(directory, target)

    def discard(self, directory: str) -> None:
        """Removes a directory that no reader lists, so that its name is free.

        Nothing is synced, since syncing may be what failed. After a power cut the rest of the
        directory may have its old name again, and is a leftover as before.

        Raises:
            OSError: if the directory cannot be renamed; it is then there as before.
        """
        target = self._root / _removed(directory)
        self._store.move(self._root / directory, target)
        self.purge_later(target.name)

    def purge_later(self, name: str) -> None:
        """Deletes a directory that no reader lists, in the background."""
        self._purger.put(self._root / name)

    def _rename(self, directory: str, target: store.AnyPath) -> bool:
        """Renames a directory, so that it is no longer a step; returns whether that is durable.

        Raises:
            OSError: if the directory cannot be renamed, or the new name cannot be synced. It is
                then there as before.
        """
        source = self._root / directory
        try:
            self._store.move(source, target)
        except OSError:
            # Storage may have renamed it, and only the answer was lost.
            if self._is_there(source) or not self._is_there(target):
                raise
        try:
            if target.parent != self._root:
                store.sync_directory(target.parent)
            store.sync_directory(self._root)
        except OSError as error:
            # The directory is still whole: nothing is deleted before the new name is durable.
            try:
                self._store.move(target, source)
            except OSError:
                if self._is_there(source):
                    raise error from None
                _log.error(
                    "%s is removed, but a power cut may bring it back, as its new name, %s,"
                    " cannot be synced: %s",
                    source,
                    target,
                    error,
                )
                return False
            raise
        if self._store.is_link(target):
            _log.warning(
                "%s is removed, but was a link: what it leads to stays, %s",
                source,
                self._root / self._store.link_target(target),
            )
        return True

    def _is_there(self, path: store.AnyPath) -> bool:
        """Whether a path exists, as far as storage tells: in doubt it does."""
        try:
            return self._store.is_named(path)
        except OSError:
            return True

    def purge_left(self, directories: Sequence[str]) -> None:
        """Deletes removed directories that an earlier manager has left, in the background."""
        if not directories:
            return
        try:
            store.sync_directory(self._root)  # their names may not be durable yet
        except OSError as error:
            _log.error("%s cannot be synced: %s", self._root, error)
        else:
            for name in directories:
                self.purge_later(name)

    def purge(self, path: store.AnyPath) -> bool:
        """Deletes a directory that is renamed; returns whether all of it is gone."""
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
        """Waits for deletions in the background; returns whether all of them are over."""
        return self._purger.wait(timeout_secs)

    def close(self) -> None:
        """Waits until all removed files are deleted."""
        self._purger.close()


class InPlaceRemover:
    """Remover of steps below one root, in a store that cannot rename them.

    Args:
        root: root that holds the step directories.
        before: as `Remover` takes it.
        check_claim: function that raises an error if another manager has taken over the root.

    Attributes:
        avoided: names of steps whose removal has begun, and was not seen to end well. A request
            that deletes may still be under way, so no save is to be written there.
    """

    def __init__(
        self,
        root: store.AnyPath,
        before: Callable[[str], object],
        check_claim: Callable[[], None],
    ) -> None:
        self._root, self._before, self._check_claim = root, before, check_claim
        self.avoided: set[str] = set()
        # Removed steps of which files may be left.
        self._left: set[str] = set()

    def remove(self, directory: str, *, background: bool = False) -> None:
        """Removes a step, which is gone for every reader when this returns.

        Files that cannot be deleted are tried again with the next step that is removed.

        Args:
            directory: name of the step's directory.
            background: is not used: deleting takes a few requests.

        Raises:
            WriterError: if another manager has taken over the root; the step stays.
            OSError: if its commit cannot be taken back, or is not known to be. If files of it
                cannot be deleted, that is only logged.
            CnrError: as `before` raises.
        """
        self._before(directory)
        is_new, step = directory not in self.avoided, self._root / directory
        self.avoided.add(directory)
        version = markers.begin_removal(step, self._check_claim)
        self._left.add(directory)
        if _empty(step, version):
            self._left.discard(directory)
            if is_new:
                self.avoided.discard(directory)
        for name in self._left - {directory}:
            if go_on(self._root / name):
                self._left.discard(name)

    def close(self) -> None:
        """Does nothing: the next manager that saves goes on with what could not be deleted."""


def remover_for(
    root: store.AnyPath,
    before: Callable[[str], object],
    check_claim: Callable[[], None],
) -> Remover | InPlaceRemover:
    """Remover of the steps below a root; see the classes for the arguments."""
    if store.can(root).renames:
        return Remover(root, before)
    return InPlaceRemover(root, before, check_claim)


def go_on(step: store.AnyPath) -> bool:
    """Goes on with a removal that was cut short, in a store that cannot rename folders.

    Returns:
        Whether nothing is left of the step, or the folder is in use again.
    """
    try:
        return _empty(step, markers.begin_removal(step, None))
    except (FileNotFoundError, FileExistsError):
        return True
    except OSError as error:
        _log.error(_LEFT, step, error)
        return False


def _empty(step: store.AnyPath, attempt: Any) -> bool:
    """Deletes the files of a step whose commit was taken back; returns whether all are gone."""
    kept = store.store_of(step)
    try:
        # Plain Orbax goes by this file.
        kept.remove_file(step / names.ORBAX_COMMITTED)
        failed = kept.remove_tree(step, attempt=attempt)
    except OSError as error:
        failed = [error]
    if failed:
        _log.error(_LEFT, step, failed[0])
    return not failed


def end_attempts(
    root: store.AnyPath,
    is_step: Callable[[str], bool],
    known: Set[str],
    check_claim: Callable[[], None],
    own: Set[str] | None,
) -> set[str]:
    """Ends what others have begun in a root that was just claimed, where nothing is renamed.

    Saves that are not committed yet can be committed no more, and what is left of steps whose
    removal was cut short goes. A manager that has lost the root may have looked at its claim right
    before. Without this it could commit a save long after the new one has removed what that rests
    on.

    Args:
        root: root that is claimed, in a store that cannot rename folders.
        is_step: function that says whether a name is that of a step.
        known: names of folders that are not looked at: they hold committed steps, or are one's own.
        check_claim: function that raises an error if another manager has taken over the root.
        own: nonces of saves that go on; None: no save is stopped, and only leftovers go.

    Returns:
        Names of the steps whose removal was cut short, or may still go on elsewhere.

    Raises:
        WriterError: if another manager has claimed the root meanwhile.
        OSError: if storage does not tell what there is, or a save cannot be stopped.
    """

    def look(step: store.AnyPath) -> bytes:
        try:
            if own is not None:
                return markers.stop(step, check_claim, own)
            return store.read_all(step / names.ATTEMPT)
        except FileNotFoundError:
            return b""
        except PermissionError as error:
            _log.warning("a save that another program may commit goes on: %s", error)
            return b""

    found = {*layout.step_directories(root, is_step)} - known
    with ThreadPoolExecutor(_AT_ONCE, "cnr_stop") as pool:
        steps = [root / name for name in sorted(found)]
        looked = zip(steps, pool.map(look, steps), strict=True)
        removed = [step for step, data in looked if markers.says_removed(data)]
    for step in removed:
        go_on(step)
    return {step.name for step in removed}


def _removed(directory: str) -> str:
    """A unique name for a removed directory."""
    return names.removed(directory, secrets.token_hex(8))


class _Purger:
    """A thread that deletes directories, started when there are some.

    A directory that cannot be deleted, such as one that somebody still writes into, is tried again
    with the next ones, by `wait`, and by `close`.

    Args:
        purge: function that deletes a directory, and returns whether all of it is gone.
    """

    def __init__(self, purge: Callable[[store.AnyPath], bool]) -> None:
        self._purge = purge
        # Directories to delete, in addition to those in `_left`; None ends the thread.
        self._queue: queue.SimpleQueue[list[store.AnyPath] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left: list[store.AnyPath] = []
        self._pending = 0
        # The lock is taken directly, not through the condition: an interrupt that comes right after
        # Python has locked it would leave the condition locked.
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
        )  # also ends a second thread, in case an interrupt kept us from noting the first
        self._try(self._left)

    def _try(self, paths: list[store.AnyPath]) -> None:
        self._left = [path for path in paths if not self._is_purged(path)]

    def _is_purged(self, path: store.AnyPath) -> bool:
        try:
            return self._purge(path)
        except Exception as error:
            # Any error is caught, so that nobody waits in vain for a thread that has died.
            _log.error("%s is removed, but not deleted yet", path, exc_info=error)
            return False

    def wait(self, timeout_secs: float) -> bool:
        """Waits until all directories were tried, and those that failed tried again.

        Returns:
            Whether that is so; each of the two may take `timeout_secs`.
        """
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
    """Names of leftovers right below a root: all are directories but `claims`.

    Attributes:
        temporary: folders of saves that are being written, or that were killed.
        removed: removed steps that have left files.
        abandoned: steps that rollbacks have set aside or left behind.
        earlier: roots that hold the steps of earlier runs.
        orphans: deltas without their parent; they cannot be restored.
        unreadable: steps without a readable manifest; they cannot be restored.
        claims: temporary files with which the claim and other files were being replaced.
    """

    temporary: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()


_MEANINGS = {
    "temporary": "saves and merged baselines that are not committed; what kills have left"
    " goes with the first save of a manager",
    "removed": "removed steps that have left files",
    "abandoned": "steps that rollbacks set aside; they go as retention lets go of others",
    "earlier": "roots of earlier runs, set aside by new ones; delete them if you like",
    "orphans": "deltas without their parent, which cannot be restored; they are kept",
    "unreadable": "steps without a readable manifest; they, and all before, are kept",
}


def find_leftovers(root: store.AnyPath, ledger: Ledger) -> Leftovers:
    """Finds what is left over in a root, given its ledger."""
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
    """Logs one line for each kind of leftovers that the root holds."""
    for kind, meaning in _MEANINGS.items():
        found: tuple[str, ...] = getattr(leftovers, kind)
        if found:
            more = [f"and {len(found) - 5} more"] if len(found) > 5 else []
            shown = ", ".join([*found[:5], *more])
            _log.warning("%s holds %s: %s", os.fspath(root), meaning, shown)


def clear(remover: Remover, leftovers: Leftovers, temporary: Iterable[str]) -> None:
    """Deletes leftovers that are of no use; those that cannot be deleted are logged and stay.

    Args:
        remover: remover of the root, which must be claimed.
        leftovers: what `find_leftovers` has found.
        temporary: those of the temporary directories into which nobody is writing.
    """
    remover.purge_left(leftovers.removed)
    for name in leftovers.claims:
        remover.remove_file(name)
    for name in temporary:
        try:
            remover.remove(name)
        except FileNotFoundError:
            pass  # nothing was written, or it is committed after all
        except OSError as error:
            _log.error("%s of a failed save cannot be removed: %s", name, error)
