"""What is relied on of Orbax's manager, its processes and its log.

Each stands behind a name; tests/test_orbax_assumptions.py asserts what is said of it here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.interrupts import Job
from cnr_jax.checkpointer.orbax_compat.logs import told_elsewhere
from cnr_jax.checkpointer.orbax_compat.places import checkpoint_infos, refuse_pipes
from cnr_jax.format.names import step_number
from cnr_jax.repository.files import is_local
from cnr_jax.repository.layout import step_directories
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.retention import children_first
from cnr_jax.repository.upkeep.aside import clear_aside
from cnr_jax.repository.upkeep.writer import RootWriter

_log = logging.getLogger(__name__)
_Manager = ocp.CheckpointManager
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

        Args:
            finalize: what runs in the place of `_finalize`.
        """
        commit, end = self._commit, self._end = Job(), Job()
        committing = self._committing
        if committing is not None:
            theirs = functools.partial(type(committing)._thread_func, committing)
            committing._thread_func = functools.partial(_told_elsewhere, commit, theirs)
        self._manager._finalize = functools.partial(end.run, finalize)

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
        return _Manager.restore(self._manager, step, directory=directory, args=args)

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
            if not skip_metadata_read and is_local(self.root):
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

    def replace_deleter(self, writer: RootWriter) -> ChainDeleter:
        """Puts a deleter that knows chains in the place of Orbax's, and returns it.

        Args:
            writer: of the root.

        Raises:
            OptionError: if removed steps are to go where they cannot.
        """
        manager = self._manager
        theirs, options = manager._checkpoint_deleter, manager._options
        manager._checkpoint_deleter = ChainDeleter(self, writer, theirs, options)
        return manager._checkpoint_deleter


def _told_elsewhere(commit: Job, theirs: Callable[..., None], *args: Any) -> None:
    with told_elsewhere():
        commit.run(theirs, *args)


class ChainDeleter:
    """What an Orbax manager deletes steps through: children first, and only its own.

    Args:
        orbax: names the directories of steps.
        writer: of the root.
        theirs: Orbax's deleter. It still deletes in storage services, where directories
            cannot be renamed at once.
        options: of the manager: where removed steps go, and who deletes their files.

    Raises:
        OptionError: if removed steps are to go where they cannot.
    """

    def __init__(
        self,
        orbax: OrbaxSeams,
        writer: RootWriter,
        theirs: Any,
        options: ocp.CheckpointManagerOptions,
    ) -> None:
        self._orbax, self._writer = orbax, writer
        self._theirs, self._options = theirs, options
        self._failed: list[Exception] = []
        # What was set aside, but not by this run.
        self._not_ours: set[str] = set()
        remover = writer.remover
        if remover is None:
            return
        theirs.close()  # it may have a thread, which nothing would end
        if options.todelete_full_path is not None:
            raise errors.OptionError(
                "todelete_full_path works in gs:// only, which this root is not\n"
                f"  got {options.todelete_full_path!r} for {writer.root}\n"
                "  hint: todelete_subdir keeps removed steps in a folder of the root"
            )
        remover.threads = options.num_deletion_threads or remover.threads

    def delete(self, step: int) -> None:
        """Removes one step; what fails is kept for `take_failures`."""
        self._delete([step])

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Removes what retention lets go of: steps, and first what rollbacks have set aside."""
        writer, ledger = self._writer, self._writer.ledger
        if self._orbax.is_primary and ledger is not None and ledger.crowded:
            if writer.remover is not None and writer.place is not None:
                clear_aside(writer.place, ledger.run, self._remove, self._not_ours)
        self._delete(steps)

    def _delete(self, steps: Sequence[int]) -> None:
        """Removes steps, those first that others do not depend on.

        A step that cannot be removed stays, and with it all that it rests on. Nothing is raised:
        the save that made the steps superfluous is committed all the same.
        """
        if not steps or not self._orbax.is_primary:
            return
        ledger, stay = self._writer.ledger or Ledger(), set[str]()
        directories = map(self._orbax.existing_directory, steps)
        for directory in children_first(ledger, directories):
            try:
                if directory not in stay:
                    self._remove(directory)
                    continue
            except FileNotFoundError:
                _log.warning("step %s is gone already", directory)
                continue
            except Exception as error:
                self._failed.append(error)
                _log.error("step %s is not removed and stays: %s", directory, error)
            # It counts on, and the next retention decides about it again.
            ledger.doomed.discard(directory)
            stay |= ledger.closure([directory])

    def _remove(self, directory: str) -> None:
        self._writer.check_claim()
        remover, folder = self._writer.remover, self._options.todelete_subdir
        if remover is None:
            self._theirs.delete(step_number(directory))
        elif folder is not None:
            remover.keep(directory, folder)
        else:
            background = self._options.enable_background_delete
            remover.remove(directory, background=background)

    def take_failures(self) -> list[Exception]:
        """Why steps were not removed since this was asked last."""
        failed, self._failed = self._failed, []
        return failed

    def raise_failure(self) -> None:
        """Raises why a step was not removed; only process 0 removes any."""
        failures = self.take_failures()
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Waits for what is being deleted in the background."""
        (self._writer.remover or self._theirs).close()


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
