"""What is relied on of Orbax's manager, its processes and its log.

Each stands behind a name; tests/test_orbax_assumptions.py asserts what is said of it here.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from cnr_jax.checkpointer.orbax_compat.interrupts import Job
from cnr_jax.checkpointer.orbax_compat.places import (
    beginning,
    checkpoint_infos,
    refuse_pipes,
)
from cnr_jax.checkpointer.orbax_compat.storage import as_storage_allows
from cnr_jax.repository.layout import step_directories
from cnr_jax.repository.store import can, exists
from cnr_jax.texts import logger

_log = logger(__name__)
_T = TypeVar("_T")
_Manager = ocp.CheckpointManager
_here = threading.local()
# Modules and functions of Orbax that log an error, with its traceback, before it comes out.
_RAISED = {
    ("async_checkpointer", "_thread_func"),
    ("checkpoint_manager", "wait_until_finished"),
}
_LONGEST = 400
# Where Orbax reads a file of metadata that it has seen to be there.
_READS = ("checkpoint", "read")
# What is said of a file that was taken away meanwhile; the last one by NFS.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
# Those whose threads belong to no manager that could be told; of the error all hear in the end.
_SHORTENED = {("future", "run"), ("checkpoint", "_write_and_log")}
# Where Orbax waits for all processes before and after the commit of a save.
COMMIT_BARRIERS = ("async_write_complete", "async_commit_complete")


class OrbaxSeams:
    """What a manager of ours asks of Orbax's below it, and what it makes that do.

    Methods of the names of Orbax's do what these do there, without what ours add.

    Args:
        manager: of which Orbax's part is meant; it need not be initialized yet.
        root: its directory.

    Attributes:
        root: the same.
    """

    def __init__(self, manager: ocp.CheckpointManager, root: epath.Path) -> None:
        self._manager: Any = manager
        self.root = root
        # What Orbax's threads do for the save that began last.
        self._commit, self._end = Job(), Job()
        self._commit.give_up()
        self._end.give_up()

    def begin(self, finalize: Callable[[int, list[int]], None]) -> None:
        """Lets the threads of the next save do their work once, or not at all.

        It begins alone of this process; the save before has ended, so it does not wait for that.

        Args:
            finalize: what runs in the place of `_finalize`.
        """
        commit, end = self._commit, self._end = Job(), Job()
        committing = self._committing
        if committing is not None:
            theirs = functools.partial(type(committing)._thread_func, committing)
            committing._thread_func = functools.partial(
                _told_elsewhere, self.root, commit, theirs
            )
        self._manager._finalize = functools.partial(end.run, finalize)
        saving = self._manager._checkpointer
        saving.save = functools.partial(
            _saved_alone, self.root, type(saving).save, saving
        )

    def end_launch(self, step: int, finalize: Callable[[int, list[int]], None]) -> bool:
        """Ends a save that was perhaps not handed over to its threads, or not to both.

        Args:
            step: of the save.
            finalize: as in `begin`.

        Returns:
            Whether it was handed over to the one that commits it: then both have done their work.
        """
        if self._commit.give_up():
            self._end.give_up()
            if self._committing is not None:
                # Nobody can wait for a thread that never started.
                self._committing._thread = None
            return False
        self._commit.wait()
        # Unless the other thread does. What that is to delete, is not known here: nothing.
        with contextlib.suppress(Exception):
            self._end.run(finalize, step, [])
        self._end.wait()
        return True

    @property
    def _committing(self) -> Any:
        """What starts the thread that commits a save; None where that is not done in one."""
        return getattr(self._manager._checkpointer, "_async_manager", None)

    def wait_until_finished(self) -> None:
        """Waits for the save that is being written; raises its error."""
        if not self.is_writing_here():
            # An interrupt while a thread is waited for makes Python take it for ended.
            self._end.wait()
        _Manager.wait_until_finished(self._manager)

    def wait_for_checkpointers(self) -> None:
        """Waits for what handlers write in the background; raises their errors."""
        _Manager._wait_for_checkpointers(self._manager)

    def finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """Waits, commits, and deletes old steps; runs in a thread of its own."""
        _Manager._finalize(self._manager, step, steps_to_remove)

    def finalize_checkpoint(self, step: int) -> None:
        """Renames a step that is written, and notes it."""
        _Manager._finalize_checkpoint(self._manager, step)

    def reload(self) -> None:
        """Reads again which step directories there are."""
        _Manager.reload(self._manager)

    def restore(
        self, step: int, directory: epath.Path | None, args: ocp.args.CheckpointArgs
    ) -> Any:
        """Restores a step of this root, or of another directory."""
        # Orbax takes from the first step that it reads whether steps have items, also from one
        # that is deleted meanwhile, or of another root.
        mode = self._manager._default_item
        known = mode.get()
        if directory is not None:
            mode.set(None)
        try:
            found = _Manager.restore(
                self._manager, step, directory=directory, args=args
            )
        except BaseException:
            mode.set(known)
            raise
        if directory is not None:
            mode.set(known)
        return found

    def restore_item(
        self, step: int, directory: epath.Path | None, args: ocp.args.Composite
    ) -> ocp.args.Composite:
        """Restores items of a step, named as there, whatever this manager calls its own."""
        folder = self.find_directory(step, directory or self.root)
        return self._manager._checkpointer.restore(folder, args=args)

    def name_item(self, item: str | None, args: type, handler: Any) -> None:
        """Says what handles an item; Orbax itself knows it only once it was saved or restored."""
        registry = self._manager._checkpointer._handler._handler_registry
        if item is not None and not registry.has(item, args):
            registry.add(item, args, handler)

    def delete(self, step: int) -> None:
        """Deletes a step; raises FileNotFoundError if there is no such step."""
        _Manager.delete(self._manager, step)

    def all_steps(self) -> list[int]:
        """Numbers of all step directories, whatever is in them, as Orbax tracks them."""
        return list(_Manager.all_steps(self._manager))

    def should_save(self, step: int, after: int | None) -> bool:
        """Whether a save is due if `after` is the latest step."""
        asked: Any = _CountingFrom(self._manager, after)
        # Such a policy takes a number of a save.
        continuous = self._manager._is_continuous_checkpointing_enabled()
        with beginning() if continuous else contextlib.nullcontext():
            return _Manager.should_save(asked, step)

    def reached_preemption(self, step: int) -> bool:
        """Whether jax has chosen this step for the last save before the run is ended."""
        return _Manager.reached_preemption(self._manager, step)

    @property
    def is_read_only(self) -> bool:
        """Whether nothing is saved."""
        return bool(self._manager._options.read_only)

    @property
    def has_best(self) -> bool:
        """Whether steps are ranked by metrics."""
        return self._manager._options.best_fn is not None

    @property
    def broadcasts_steps(self) -> bool:
        """Whether reading which steps there are is a broadcast, to which all processes come."""
        options = self._manager._options
        return jax.process_count() > 1 and options.single_host_load_and_broadcast

    @property
    def is_primary(self) -> bool:
        """Whether this process commits and deletes."""
        options = self._manager._options.multiprocessing_options
        return ocp.multihost.is_primary_host(options.primary_host)

    def is_busy(self) -> bool:
        """Whether a save is being written, or old steps are being deleted after it."""
        return not self._end.is_over

    def is_writing_here(self) -> bool:
        """Whether this is a thread of Orbax's that writes a save of this manager."""
        return self._commit.is_here or self._end.is_here

    def step_being_written(self) -> int | None:
        """The step of the save that was begun last, until it is forgotten."""
        thread = self._manager._finalize_thread.get()
        return thread.step() if thread is not None else None

    def forget_save(self) -> None:
        """Drops the errors of the save that was begun last, waiting for Orbax's metadata.

        So they come out once, and nothing holds what their frames hold.
        """
        self._manager._finalize_thread.set(None)
        metadata = self._manager._non_blocking_metadata_store
        # It raises the first of its errors, and keeps later ones for the next save. It logs
        # each, and takes it off its list before it raises it.
        while metadata._write_futures:
            with contextlib.suppress(Exception):
                metadata.wait_until_finished()

    def end_progress(self) -> None:
        """No save is in progress: one was left by an error before Orbax noted its end."""
        self._manager._save_progress_tracker.set(False)

    def new_directory(self, step: int) -> str:
        """Name of the directory that a save of this step makes."""
        return self._manager._get_write_step_directory(step, self.root).name

    def find_directory(self, step: int, root: epath.Path) -> epath.Path:
        """The directory of a step that is there, which may be in another form than new ones.

        Raises:
            ValueError: if there is none, and a format of the user's own names directories.
        """
        return self._manager._get_read_step_directory(step, root)

    def existing_directory(self, step: int) -> str:
        """Name of the directory of a step of the root; of a new one if there is none."""
        try:
            return self.find_directory(step, self.root).name
        except ValueError:
            return self.new_directory(step)

    def forget_steps(self, directories: Collection[str]) -> None:
        """Strikes steps off that are not in the way of a save any more."""
        if not directories:
            return
        steps = {
            info.step
            for info in self._manager._checkpoints
            if self.new_directory(info.step) in directories
        }
        self._manager._checkpoints.delete_if(lambda info: info.step in steps)

    def ranked_steps(self) -> list[int]:
        """Steps with metrics, the best one last."""
        manager = self._manager
        _, ranked = manager._sort_checkpoints_by_metrics(manager._checkpoints)
        return [info.step for info in ranked]

    def load_checkpoint_infos(self, skip_metadata_read: bool) -> list[Any]:
        """What Orbax tracks; damage to its own files must not keep the root closed."""
        try:
            if not skip_metadata_read and can(self.root).cheap_looks:
                for name in step_directories(self.root):
                    refuse_pipes(self.root / name)
            return _Manager._load_checkpoint_infos(self._manager, skip_metadata_read)
        except Exception as error:
            _log.debug("reading the steps one by one", exc_info=error)
            return checkpoint_infos(self._manager, skip_metadata_read)

    def barrier_keys(self, step: int) -> list[str]:
        """Keys of the barriers of a save, in the order in which they come."""
        options = self._manager._multiprocessing_options
        prefix, directory = (
            options.barrier_sync_key_prefix or "",
            self.new_directory(step),
        )
        return [f"{prefix}_{name}.{directory}" for name in COMMIT_BARRIERS]

    def replace_deleter(
        self, make: Callable[[Any, ocp.CheckpointManagerOptions], _T]
    ) -> _T:
        """Puts what deletes steps in the place of Orbax's own, and returns it.

        Args:
            make: makes it of Orbax's, which it may use, and the options of the manager.
        """
        manager = self._manager
        theirs, options = manager._checkpoint_deleter, manager._options
        manager._checkpoint_deleter = made = make(theirs, options)
        return made


def _told_elsewhere(
    root: epath.Path, commit: Job, theirs: Callable[..., None], *args: Any
) -> None:
    # Other items than the state are merged here too.
    with told_elsewhere(), as_storage_allows(root):
        commit.run(theirs, *args)


def _saved_alone(
    root: epath.Path, theirs: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    with beginning(), as_storage_allows(root):
        theirs(*args, **kwargs)


class _CountingFrom:
    """A manager as it would be if another step were its latest."""

    def __init__(self, manager: Any, latest: int | None) -> None:
        self._manager, self._latest = manager, latest

    def latest_step(self) -> int | None:
        return self._latest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def distributed_client() -> Any:
    """The client through which the processes of a run coordinate.

    Raises:
        ValueError: if the run has not called `jax.distributed.initialize`.
    """
    return ocp.multihost.get_jax_distributed_client()


def is_distributed() -> bool:
    """Whether the run has called `jax.distributed.initialize`."""
    return ocp.multihost.is_jax_distributed_client_initialized()


class _Tracebacks(logging.Filter):
    """Leaves out what is told elsewhere; other errors of Orbax are logged as ever."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.module, record.funcName)
        if "orbax" not in record.pathname:
            return True
        if place == _READS and _is_gone(record.args):
            _log.debug("%s", record.getMessage())
            return False
        if not record.exc_info:
            return True
        if place in _RAISED and getattr(_here, "is_told", False):
            _log.debug("%s", record.getMessage(), exc_info=record.exc_info)
            return False
        if place in _SHORTENED:
            text = " ".join(record.getMessage().split())
            record.msg, record.args = text[:_LONGEST], None
            record.exc_info = None
        return True


def _is_gone(args: Any) -> bool:
    """Whether a record is of metadata in a folder that is no more, as of a step just deleted.

    Orbax goes on without them, and then does not find the step: whoever asked for it is told, and
    a restore of the newest step takes another.
    """
    if not isinstance(args, tuple) or not args:
        return False
    if any(isinstance(each, OSError) and each.errno in _GONE for each in args):
        return True
    # It was not there at all, without which other steps may be whole.
    return isinstance(args[0], epath.Path) and not exists(args[0].parent)


_TRACEBACKS = _Tracebacks()


@contextlib.contextmanager
def told_elsewhere() -> Iterator[None]:
    """What fails in here, in this thread, is told by whoever hears of it."""
    before = getattr(_here, "is_told", False)
    _here.is_told = True
    try:
        yield
    finally:
        _here.is_told = before


def shorten_logs() -> None:
    """Keeps the tracebacks of failed saves out of the log."""
    logging.getLogger("absl").addFilter(_TRACEBACKS)
