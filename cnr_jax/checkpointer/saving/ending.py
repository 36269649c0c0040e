"""How the saves of a manager end: each is found out to be committed, or raises what it met."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Barriers
from cnr_jax.checkpointer.orbax_compat.interrupts import end_interrupted_tasks
from cnr_jax.checkpointer.orbax_compat.places import Directories
from cnr_jax.checkpointer.orbax_compat.seams import OrbaxSeams, told_elsewhere
from cnr_jax.checkpointer.save_errors import after_commit, save_error, without_frames
from cnr_jax.checkpointer.saving.calls import Calls
from cnr_jax.checkpointer.saving.chain_look import is_dropped
from cnr_jax.checkpointer.saving.due import Course
from cnr_jax.checkpointer.saving.in_flight import STOP_SECS, SaveInFlight
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.format.names import step_number
from cnr_jax.repository.commit import sync_committed, sync_uncommitted
from cnr_jax.repository.index.gaps import Gap
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import children_first
from cnr_jax.repository.upkeep.aside import clear_aside
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.touched import Touched
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class Ending:
    """The saves of a manager, which end once: committed and durable, or with one error.

    Also of saves that hold no state of ours, but other items.

    Args:
        orbax: what carries the saves out.
        lifecycle: knows the save that began last.
        writer: of the root.
        barriers: of saves with several processes.
        course: is told of saves that begin and fail.
        calls: of the manager.

    Attributes:
        deleter: of old steps.
    """

    _orbax: OrbaxSeams
    _lifecycle: Lifecycle
    _writer: RootWriter
    _barriers: Barriers
    _course: Course
    _calls: Calls
    deleter: ChainDeleter = dataclasses.field(init=False)
    # Steps that go once the save that is being written is committed.
    _leaving: frozenset[int] = dataclasses.field(default=frozenset(), init=False)
    # Whether Orbax's list of steps must be read again.
    _is_stale: bool = dataclasses.field(default=False, init=False)
    # The call of `save` that is between the plan and the thread that finalizes what it has
    # begun. Once that call is over, it was interrupted, and there is something to clear up.
    _launching: object | None = dataclasses.field(default=None, init=False)

    @property
    def ledger(self) -> Ledger:
        """What the root holds; nothing, until the first save names the item."""
        return self._writer.ledger or Ledger()

    @property
    def is_dropped(self) -> bool:
        """Whether the save that began last was not committed, for want of what it rests on."""
        last = self._lifecycle.last
        return last is not None and last.gap is not None

    def replace_deleter(self) -> None:
        """From now on steps are deleted as chains allow, children first."""
        self.deleter = self._orbax.replace_deleter(
            functools.partial(ChainDeleter, self._orbax, self._writer)
        )

    def begin(self, step: int, flight: SaveInFlight, touched: Touched | None) -> None:
        """Notes that the save of a step begins, with these touched rows."""
        self._orbax.begin(self.finalize)
        plan = flight.facts.plan if flight.facts else None
        # What was renamed aside must not be in the way of the new steps.
        self._orbax.forget_steps(plan.abandoned if plan else ())
        save = plan.uuid if plan else ""
        self._barriers.begin(self._orbax.barrier_keys(step), save)
        self._course.begin(step, touched)
        self._lifecycle.prepare(flight)

    def wait(self) -> None:
        """Waits for the save that is being written, and until `on_save` has been called.

        Raises:
            SaveError: if it failed; once.
            CallError: inside `on_save`.
        """
        self._calls.refuse_in_on_save("wait_until_finished")
        is_inner = True
        try:
            with self._calls.lock:
                # Other calls are not to wait for `on_save`; nor is who is interrupted.
                is_inner = self._calls.current is not None
                self._wait_for_save()
        except Exception:
            if not is_inner:
                self._lifecycle.listener.wait()
            raise
        if not is_inner:
            # Without the lock: `on_save` may ask for the steps there are.
            self._lifecycle.listener.wait()

    def check(self) -> None:
        """Raises what the last save raised, if it has ended; as `wait`, but does not wait."""
        if self._orbax.is_busy():
            return  # also in the thread that ends a save, which must not wait for others
        self._calls.refuse_in_on_save("check_for_errors")
        with self._calls.lock:
            if not self._orbax.is_busy():
                self._wait_for_save()

    def _wait_for_save(self) -> None:
        if self._is_launched_here():
            return  # Orbax asks, of the save before, which has ended
        self._end_launch()
        failure: Exception | None = None
        step = self._orbax.step_being_written()
        try:
            with told_elsewhere():
                self._orbax.wait_until_finished()
        except Exception as error:
            # Whatever Orbax or a handler of the user raised: it belongs to this save, and the
            # manager goes on.
            failure = error
            # An error in writing Orbax's metadata comes out while the rest is being written;
            # what becomes of that must not come out of the next save.
            with contextlib.suppress(Exception):
                self.wait_for_checkpointers()
            self.settle()
            self.reread()
            self._orbax.forget_save()
            if is_dropped(failure):
                failure = None  # its report is all there is to tell
        except BaseException:
            # Orbax has struck off the step, which is written nevertheless.
            self._is_stale = True
            raise
        self.settle()
        known: errors.CnrError | None = self._lifecycle.take_failure()
        if failure is not None:
            # `settle` notes a failure if, and only if, this save is not committed. Another
            # step of its number may be back, which was moved aside for it.
            committed = known is None and any(
                entry.step == step for entry in self.ledger.committed()
            )
            known = self._as_save_error(failure, step, committed=committed)
            self._lifecycle.last_failure = without_frames(known)
        try:
            if known is not None:
                raise known
        finally:
            del failure, known  # whose frames hold this one

    def settle(self) -> None:
        """Notes a committed save, unless one is still being written."""
        if self._is_launched_here() or self._orbax.is_writing_here():
            return
        self._end_launch()
        if self._orbax.is_busy():
            return
        if self._lifecycle.flight is None and self._writer.is_prepared:
            # An interrupt came between the plan of a save and its begin.
            self._lifecycle.withdraw()
        self._settle()

    def _settle(self) -> None:
        saving = self._lifecycle.flight is not None
        if saving:
            # Its error is the handler's to tell.
            with contextlib.suppress(Exception):
                self.wait_for_checkpointers()
        if self._is_stale:
            self.reread()
        if self._lifecycle.settle() is None and saving:
            self._course.failed()
        if self.deleter.take_failures():
            # Orbax struck off what it would have deleted after this save, but did not delete,
            # and lists the step that failed.
            self.reread()

    def reread(self) -> None:
        """Reads which steps there are, after a fault that may last."""
        if self._orbax.broadcasts_steps:
            # The other processes come to it in the next save.
            self._writer.changed = True
            self._is_stale = False
            return
        try:
            self._orbax.reload()
        except OSError as error:
            _log.warning("%s cannot be read now: %s", self._orbax.root, error)
            self._is_stale = True
        else:
            self._is_stale = False

    @contextlib.contextmanager
    def clearing_up(self) -> Iterator[None]:
        """Ends a save of which the blocking part is left by an error or an interrupt.

        What another interrupt keeps it from is done by the next call.
        """
        self._launching = self._calls.current
        try:
            yield
        except BaseException:
            self._end_launch()
            self._lifecycle.take_failure()  # it is on its way
            raise
        self._launching = None

    def _is_launched_here(self) -> bool:
        """Whether this is asked, by Orbax, while it begins a save."""
        return self._launching is not None and self._launching is self._calls.current

    def _end_launch(self) -> None:
        """Ends a save that was left in the middle of being begun, if there is one."""
        if self._launching is None:
            return
        # First: writing in the background goes on until the task ends that began it.
        end_interrupted_tasks()
        flight, last = self._lifecycle.flight, self._lifecycle.last
        if not self._orbax.end_launch(last.step if last else 0, self.finalize):
            # Orbax may still be making directories, of which the next save may use the names.
            with contextlib.suppress(Exception):
                Directories.being_made().wait(STOP_SECS, lambda: None)
            # Nothing of Orbax's will wait for this save, whose errors are not the next one's.
            self._orbax.forget_save()
            if flight is not None:
                flight.stop()
            else:
                self._course.failed()
                if last is not None:
                    self._writer.discard(last.place.directory)
        try:
            self._settle()
            if jax.process_count() == 1:
                self._orbax.end_progress()
        finally:
            self._is_stale, self._launching = True, None
            self._lifecycle.withdraw()
            # Steps that were moved aside are back only now.
            self.reread()

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
        return save_error(error, step, str(self._orbax.root))

    def wait_for_checkpointers(self) -> None:
        """As Orbax's; one that has failed frees processes that wait in barriers."""
        flight = self._lifecycle.flight
        try:
            self._orbax.wait_for_checkpointers()
        except BaseException as error:
            # Nobody comes to Orbax's barriers after an error that all have heard of. Of
            # another one, such as in another item or in the commit, they must hear there.
            if flight is not None and flight.has_failed():
                self._barriers.forget()
            else:
                step = flight.step if flight is not None else None
                root = str(self._orbax.root)
                self._barriers.leave(save_error(error, step, root))
            raise
        if flight is not None and flight.has_failed():
            # Orbax takes a cancelled save for a finished one, and would delete old steps.
            raise flight.error()

    def sync_uncommitted(self) -> None:
        """Makes the step durable that Orbax is about to rename."""
        flight = self._lifecycle.last
        assert flight is not None
        flight.synced_early = sync_uncommitted(flight.place)
        self._lifecycle.look_before()

    def finalize_checkpoint(self, step: int) -> None:
        """Makes the step durable; only then does Orbax delete others."""
        self._orbax.finalize_checkpoint(step)
        flight = self._lifecycle.last
        if not self._orbax.is_primary:
            return
        assert flight is not None
        try:
            sync_committed(flight.place, whole=not flight.synced_early)
        except OSError as error:
            self._lifecycle.synced(error)
            raise
        self._lifecycle.synced(None)
        self._lifecycle.look_after(self._leaving)
        self._lifecycle.report_commit()

    def finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """Ends a save in the background; what comes of it is told there and then.

        Process 0 tells of a commit once it is durable, before old steps are deleted. The others
        do so once process 0 has done all that; should it have failed to sync the step, or to
        delete others, it alone knows until the next call.
        """
        self._leaving = frozenset(steps_to_remove)
        if self._lifecycle.last is not None:
            self._lifecycle.last.is_unwanted = step in steps_to_remove
        try:
            self._orbax.finalize(step, steps_to_remove)
        except BaseException as error:
            self._lifecycle.end_writing()
            # An error in writing Orbax's metadata comes out while the rest is being written.
            with contextlib.suppress(Exception):
                self.wait_for_checkpointers()
            committed = self._lifecycle.report_commit()
            self._lifecycle.fail(self._as_save_error(error, step, committed=committed))
            raise
        self._lifecycle.end_writing()
        self._lifecycle.report_commit()
        self._lifecycle.report_unwanted()


class ChainDeleter:
    """What an Orbax manager deletes steps through: children first, and only its own.

    Args:
        orbax: names the directories of steps.
        writer: of the root.
        theirs: Orbax's deleter. It still deletes in storage services, where directories
            cannot be renamed at once.
        options: of the manager, as Orbax has them: where removed steps go, and who deletes their
            files.

    Raises:
        OptionError: if removed steps are to go where they cannot.
    """

    def __init__(
        self,
        orbax: OrbaxSeams,
        writer: RootWriter,
        theirs: Any,
        options: Any,
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
        """Removes what retention lets go of: steps, and first what rollbacks have set aside.

        Not as long as steps that are to stay were found to lack files, and the rule, which
        decided without knowing that, was not asked again.
        """
        writer, ledger = self._writer, self._writer.ledger
        if writer.gaps.found and steps and self._orbax.is_primary:
            self._spare(steps, writer.gaps.found[0])
            return
        if self._orbax.is_primary and ledger is not None and ledger.crowded:
            if writer.remover is not None and writer.place is not None:
                clear_aside(
                    writer.place,
                    ledger.run,
                    self._remove,
                    self._not_ours,
                    adopts=writer.adopts,
                )
        self._delete(steps)

    def _spare(self, steps: Sequence[int], gap: Gap) -> None:
        """Keeps steps that others were to take the place of, until retention decides again."""
        error = errors.IntegrityError(gap.text, path=gap.path)
        # So that Orbax lists them again, on all processes.
        self._failed.append(error)
        self._writer.changed = True
        ledger = self._writer.ledger or Ledger()
        for step in steps:
            ledger.doomed.discard(self._orbax.existing_directory(step))
        _log.warning(
            "no step is deleted after this save, as one that was to stay is not whole: %s",
            gap.text,
        )

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
