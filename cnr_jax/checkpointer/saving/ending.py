"""How the saves of a manager end: each is found out to be committed, or raises what it met."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat import (
    COMMIT_BARRIERS,
    end_interrupted_tasks,
    told_elsewhere,
)
from cnr_jax.checkpointer.save_errors import after_commit, save_error, without_frames
from cnr_jax.checkpointer.saving.calls import refuse_in_on_save
from cnr_jax.checkpointer.saving.due import Course
from cnr_jax.handler import CnrHandler
from cnr_jax.repository.commit import sync_committed, sync_uncommitted
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.repository.upkeep.removal import ChainDeleter

_log = logging.getLogger(__name__)


class EndingManager(ocp.CheckpointManager):
    """Orbax's manager, whose saves end once: committed and durable, or with one error.

    What it is made from, and names a save that begins, is for the class below to say.
    """

    _root: epath.Path
    _handler: CnrHandler
    _deleter: ChainDeleter
    _course: Course
    _item: str | None
    _lock: threading.RLock
    _is_in_call = False
    _is_closed = False
    _failure: errors.SaveError | None = None
    # Whether Orbax's list of steps must be read again.
    _is_stale = False
    # Whether retention is to delete the very step that is being written.
    _is_dropped = False
    # Whether `save` is between the plan and the thread that finalizes what it has begun.
    _is_launching = False
    # The directory of the save that is being written, and whether it is durable.
    _saving, _is_synced = "", False

    @property
    def _ledger(self) -> Ledger:
        """What the root holds; nothing, until the first save names the item."""
        return self._handler.ledger or Ledger()

    def _step_directory(self, step: int) -> str:
        return self._get_write_step_directory(step, self._root).name

    def _begin(self, step: int, plan: Plan | None) -> None:
        """Notes that a save begins; there is no plan for what is not part of the state."""
        # What was renamed aside must not be in the way of the new steps.
        self._forget_steps(plan.abandoned if plan else ())
        save = plan.uuid if plan else ""
        self._handler.barriers.begin(self._barrier_keys(step), save)
        self._course.begin()
        self._saving, self._is_synced = self._step_directory(step), False

    def _forget_steps(self, directories: tuple[str, ...]) -> None:
        if not directories:
            return
        steps = [
            info.step
            for info in self._checkpoints
            if self._step_directory(info.step) in directories
        ]
        self._checkpoints.delete_if(lambda info: info.step in steps)

    def wait_until_finished(self) -> None:
        """Waits for the save that is being written, and until `on_save` has been called.

        Raises:
            SaveError: if it failed; once. Also if it is committed but what comes after that
                failed, such as syncing it: its `kind` then is `"after_commit"`. Old steps that
                cannot be deleted are logged, and stay.
            CallError: inside `on_save`, which would wait for itself.
        """
        refuse_in_on_save(self, "wait_until_finished")
        is_inner = True
        try:
            with self._lock:
                # Other calls are not to wait for `on_save`; nor is who is interrupted.
                is_inner = self._is_in_call
                self._wait_for_save()
        except Exception:
            if not is_inner:
                self._handler.last_save.listener.wait()
            raise
        if not is_inner:
            # Without the lock: `on_save` may ask for the steps there are.
            self._handler.last_save.listener.wait()

    def _wait_for_save(self) -> None:
        failure: Exception | None = None
        thread = self._finalize_thread.get()
        try:
            with told_elsewhere():
                super().wait_until_finished()
        except Exception as error:
            # Whatever Orbax or a handler of the user raised: it belongs to this save, and the
            # manager goes on.
            failure = error
            # An error in writing Orbax's metadata comes out while the rest is being written;
            # what becomes of that must not come out of the next save.
            with contextlib.suppress(Exception):
                self._wait_for_checkpointers()
            self._settle()
            self._reread()
            self._forget_finalize_thread()
        except BaseException:
            # Orbax has struck off the step, which is written nevertheless.
            self._is_stale = True
            raise
        self._settle()
        known, self._failure = self._failure, None
        if failure is not None:
            step = thread.step() if thread is not None else None
            # `_settle` notes a failure if, and only if, this save is not committed. Another
            # step of its number may be back, which was moved aside for it.
            committed = known is None and any(
                entry.step == step for entry in self._ledger.committed()
            )
            known = self._as_save_error(failure, step, committed=committed)
            self._handler.last_save.last_failure = without_frames(known)
        try:
            if known is not None:
                raise known
        finally:
            del failure, known  # whose frames hold this one

    def check_for_errors(self) -> None:
        """Raises what the last save raised, if it has ended; does not wait.

        Orbax's own takes an error away from the thread that is about to delete old steps.

        Raises:
            SaveError: if it failed; once.
            CallError: inside `on_save`, which cannot act on it.
        """
        if self._is_busy():
            return  # also in the thread that ends a save, which must not wait for others
        refuse_in_on_save(self, "check_for_errors")
        with self._lock:
            if not self._is_busy():
                self._wait_for_save()

    def _settle(self) -> None:
        """Notes a committed save, unless one is still being written."""
        if self._is_launching or self._is_busy():
            return
        saving = self._handler.last_save.flight is not None
        if saving:
            # After an interrupt there may be no thread that finalizes a save, or one that
            # Python takes for ended, but one that writes.
            # Its error is the handler's to tell.
            with contextlib.suppress(Exception):
                self._wait_for_checkpointers()
        if self._is_stale:
            self._reread()
        if self._handler.last_save.settle() is None and saving:
            self._course.failed()
            self._failure = self._handler.last_save.take_failure()
        if self._deleter.take_failures():
            # Orbax struck off what it would have deleted after this save, but did not delete,
            # and lists the step that failed.
            self._reread()

    def _reread(self) -> None:
        """Reads which steps there are, after a fault that may last."""
        if jax.process_count() > 1 and self._options.single_host_load_and_broadcast:
            # It is a broadcast, to which the others come in the next save.
            self._handler.served.changed = True
            self._is_stale = False
            return
        try:
            super().reload()
        except OSError as error:
            _log.warning("%s cannot be read now: %s", self._root, error)
            self._is_stale = True
        else:
            self._is_stale = False

    def _is_in_on_save(self) -> bool:
        return self._handler.last_save.listener.is_here()

    def _asking(self) -> contextlib.AbstractContextManager[Any]:
        """What a question about steps is asked in: the lock.

        A thread of Orbax's that writes a save, with a callback of the user in it, must not wait
        for who waits for it; meanwhile nothing changes either.
        """
        return contextlib.nullcontext() if self._is_writing_here() else self._lock

    def _is_writing_here(self) -> bool:
        """Whether this is a thread of Orbax's that writes a save of this manager."""
        committing = getattr(self._checkpointer, "_async_manager", None)
        writers = (self._finalize_thread.get(), getattr(committing, "_thread", None))
        return threading.current_thread() in writers

    def _is_busy(self) -> bool:
        """Whether a save is being written, or old steps are being deleted after it."""
        thread = self._finalize_thread.get()
        if thread is threading.current_thread():
            return True
        return thread is not None and thread.is_alive()

    @contextlib.contextmanager
    def _clearing_up(self) -> Iterator[None]:
        """Ends a save of which the blocking part is left by an error or an interrupt."""
        self._is_launching = True
        try:
            yield
        except BaseException:
            self._is_launching = False
            try:
                # First: what is written behind goes on until the task ends that began it.
                end_interrupted_tasks()
                self._settle()
                self._failure = None  # it is on its way
                if jax.process_count() == 1:
                    self._save_progress_tracker.set(False)
            finally:
                self._handler.last_save.withdraw()
                # Steps that were moved aside are back only now.
                self._reread()
            raise
        finally:
            self._is_launching = False

    def _as_save_error(
        self, error: BaseException, step: int | None, *, committed: bool
    ) -> errors.CnrError:
        """What was raised in the background as an error that says which save it was."""
        if isinstance(error, errors.WriterError):
            return error
        if isinstance(error.__context__, errors.SaveError):
            # The last barrier of a save was in vain too.
            return error.__context__
        if committed:
            return after_commit(error, step)
        return save_error(error, step, str(self._root))

    def _forget_finalize_thread(self) -> None:
        """So that the error comes out once, and nothing holds what its frames hold."""
        self._finalize_thread.set(None)

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except BaseException as error:
            # Nobody comes to Orbax's barriers after an error that all have heard of. Of
            # another one, such as in another item or in the commit, they must hear there.
            if self._handler.last_save.has_failed():
                self._handler.barriers.forget()
            else:
                flight = self._handler.last_save.flight
                step = flight.plan.step if flight is not None else None
                self._handler.barriers.leave(save_error(error, step, str(self._root)))
            raise
        if self._handler.last_save.has_failed():
            # Orbax takes a cancelled save for a finished one, and would delete old steps.
            raise self._handler.last_save.failure()

    def _with_barriers(self, options: Any) -> Any:
        """Orbax's options of saves in the background, with barriers that do not hang."""
        options = options or ocp.AsyncOptions()
        if jax.process_count() == 1 or options.barrier_sync_fn is not None:
            return options
        return dataclasses.replace(options, barrier_sync_fn=self._handler.barriers)

    def _barrier_keys(self, step: int) -> list[str]:
        prefix = self._multiprocessing_options.barrier_sync_key_prefix or ""
        directory = self._step_directory(step)
        return [f"{prefix}_{name}.{directory}" for name in COMMIT_BARRIERS]

    def _sync_uncommitted(self) -> None:
        item = str(self._item)
        self._is_synced = sync_uncommitted(self._root, self._saving, item)

    def _finalize_checkpoint(self, step: int) -> None:
        """Makes the step durable; only then does Orbax delete others."""
        super()._finalize_checkpoint(step)
        options = self._options
        if ocp.multihost.is_primary_host(options.multiprocessing_options.primary_host):
            directory, whole = self._step_directory(step), not self._is_synced
            try:
                sync_committed(self._root, directory, str(self._item), whole=whole)
            except OSError as error:
                self._handler.last_save.synced(error)
                raise
            self._handler.last_save.synced(None)
            self._look()

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """Ends a save in the background; what comes of it is told there and then.

        Process 0 tells of a commit once it is durable, before old steps are deleted. The others
        do so once process 0 has done all that; should it have failed to sync the step, or to
        delete others, it alone knows until the next call.
        """
        last_save = self._handler.last_save
        self._is_dropped = step in steps_to_remove
        try:
            super()._finalize(step, steps_to_remove)
        except BaseException as error:
            last_save.end_writing()
            # An error in writing Orbax's metadata comes out while the rest is being written.
            with contextlib.suppress(Exception):
                self._wait_for_checkpointers()
            committed = self._look()
            last_save.fail(self._as_save_error(error, step, committed=committed))
            raise
        last_save.end_writing()
        self._look()

    def _look(self) -> bool:
        """Whether the save in flight is seen to be committed; then it is reported."""
        return not self._is_dropped and self._handler.last_save.look()
