"""Pipeline of saves: each is begun, written, settled on all processes, committed and retired.

    begin -> prepare -> write -> settle on all processes -> wait for the commit before -> seal
          -> publish -> wait for the save before -> tell all -> retire what it makes superfluous

Several saves may be written at once. They are committed in the order in which they began, each once
the commit of the one before is durable. A save that fails takes down those that rest on it, and no
other.

The training thread only waits: a save begins and ends in threads of its own. So an interrupt
(Ctrl-C) can reach the training thread only while it waits, never in a handler, an event loop, or a
lock of other code. After an interrupt the program may make the call again.

All processes have the same saves in the same order. Process 0 makes folders, commits and removes
for all, and sends the outcome under a topic of the save. A process that does not hear it asks the
store, which alone knows what is committed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import (
    UNHEARD,
    Channel,
    agree,
    on_primary,
    raise_if_told,
)
from cnr_jax.checkpointer.save_errors import (
    after_commit,
    free_frames,
    save_error,
    taken_down,
)
from cnr_jax.checkpointer.saving.beginning import Beginning
from cnr_jax.format.names import step_number
from cnr_jax.repository.causes import StoreError, causes
from cnr_jax.repository.committer import Attempt, Committer
from cnr_jax.repository.store import AnyPath, can
from cnr_jax.texts import logger
from cnr_jax.waiting import STOP_SECS, Gate, Job, wait_for

_log = logger(__name__)


class Work(Protocol):
    """What a pipeline calls for its saves. None of these methods runs in the training thread."""

    def items(self, save: Any) -> Sequence[str]:
        """Names of the items of a save, whose folders are made before it is staged."""
        ...

    def stage(self, save: Any, folder: AnyPath) -> Sequence[Any]:
        """Starts to write what is saved into a folder, so that training may go on.

        Nothing may be written before `save.prepared` says that the folder is there.

        Returns:
            Futures; the `result()` of each waits until a part is on storage.
        """
        ...

    def cancel(self, save: Any, why: BaseException) -> None:
        """Ends staging and writing early; any thread may call it, more than once, or too late."""
        ...

    def seal(self, save: Any, folder: AnyPath) -> Collection[str]:
        """Finishes the folder on process 0, right before the commit, once all have written.

        Returns:
            Names of the entries of the folder that are durable already.
        """
        ...

    def make_durable(self, save: Any) -> None:
        """Makes a commit durable, on process 0; from then on another save may rest on it."""
        ...

    def published(self, save: Any) -> Any:
        """Returns what all processes are told of a commit, of JSON types; on process 0.

        The saves before it are over by then.
        """
        ...

    def committed(self, save: Any, told: Any) -> None:
        """Notes a commit, on all processes; `told` is None on one that has not heard process 0."""
        ...

    def retire(self, save: Any, told: Any) -> Any:
        """Removes what the commit makes superfluous, on process 0; returns what all are told."""
        ...

    def retired(self, save: Any, told: Any) -> None:
        """Notes what was removed and what stays, on all processes; `told` is as in `committed`."""
        ...

    def failed(self, save: Any, error: errors.CnrError) -> None:
        """Notes a failure, on all processes; the error's kind says if it came after the commit."""
        ...

    def ended(self, save: Any) -> None:
        """Notes, on all processes and last of all, that nothing is written or removed any more."""
        ...


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class PipelinedSave:
    """One save, and all that the pipeline knows of it.

    Attributes:
        attempt: place where it is written; its nonce identifies the save in messages.
        prepared: future of its folder, before which nothing may be written; None: it is there.
        futures: futures of the parts that are being written.
        error: why the save failed, or what comes after its commit did.
        agreed_at_secs: reading of `time.perf_counter` when all processes knew that it is written.
        is_committed: whether it is committed, as far as this process knows.
        known: gate that opens when it is known whether the save is committed.
        thread: job of the thread that does the rest once the save has begun.
    """

    attempt: Attempt
    prepared: concurrent.futures.Future[None] | None = None
    futures: Sequence[Any] = ()
    error: errors.CnrError | None = None
    agreed_at_secs: float | None = None
    is_committed: bool = False
    known: Gate = dataclasses.field(default_factory=Gate)
    thread: Job = dataclasses.field(default_factory=Job)

    @property
    def step(self) -> int:
        """Number of the step."""
        return step_number(self.attempt.directory)

    def topic(self, what: str) -> str:
        """Topic of the messages that processes exchange about a part of this save."""
        return f"{self.attempt.nonce}/{what}"

    @property
    def rests_on(self) -> str | None:
        """Nonce of the save without which this one is worth nothing; None if there is none."""
        return None

    @property
    def is_over(self) -> bool:
        """Whether all is done, and nothing is written or removed for it any more."""
        return self.thread.is_over

    @property
    def has_begun(self) -> bool:
        """Whether it got into flight; if not, the call that began it has raised the error."""
        return self.thread.has_begun


S = TypeVar("S", bound=PipelinedSave)


class SavePipeline(Generic[S]):
    """The saves in flight of one manager.

    Args:
        committer: committer, which makes folders and commits them.
        channel: channel to the other processes.
        work: what is done for the saves.
        most: number of saves that may be written at once.

    Attributes:
        committer: the same.
        most: the same.
    """

    def __init__(
        self, committer: Committer, channel: Channel, work: Work, most: int = 1
    ) -> None:
        self.committer, self._channel, self.most = committer, channel, most
        self._work = work
        # In the order of their beginnings. A save is here from its plan until `forget`.
        self._saves: list[S] = []
        self._beginning: Beginning[S] | None = None
        # One thread for all beginnings, as jax opens files for each new thread.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "cnr_begin_save")
        self._preparing = concurrent.futures.ThreadPoolExecutor(most, "cnr_prepare")

    # In the thread of the caller.

    def begin(
        self,
        plan: Callable[[], S],
        prepare: Callable[[S], None] = lambda save: None,
        settings: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> S:
        """Begins a save, once there is room; returns when it is staged.

        An interrupt ends staging early. The call waits for that and then raises the interrupt, so
        that the save either is in flight or is not. A second interrupt leaves the rest of that wait
        to the next call.

        Args:
            plan: function that decides on the save, in the thread of beginnings. Its error is
                raised here; with several processes all must raise it.
            prepare: function that prepares what is staged; it runs after `plan`, in the same way.
            settings: makes the context in which the save is decided and staged.

        Raises:
            Exception: as `plan`, `prepare` or, in a run of one process, staging. With several
                processes an error of staging comes out of the background, on all of them.
        """
        self.end_beginning()
        self.make_room()
        beginning = self._beginning = Beginning[S]()
        context = contextvars.copy_context()
        begin: Any = functools.partial(self._begin, beginning, plan, prepare)
        run: Any = functools.partial(beginning.run, begin, settings)
        run = functools.partial(context.run, run)
        del plan, prepare, begin  # which hold what is saved
        try:
            try:
                self._pool.submit(beginning.job.run, run)
            except RuntimeError:  # the interpreter exits
                beginning.job.start("cnr_begin_save", run)
            del run
            beginning.job.wait()
        except BaseException:
            beginning.interrupt()
            self.end_beginning()
            raise
        finally:
            if beginning.job.is_over:
                self._beginning = None
        try:
            if beginning.error is not None:
                raise beginning.error
            assert beginning.found is not None
            return beginning.found
        finally:
            beginning.error = None  # whose frames hold this one

    def end_beginning(self) -> None:
        """Waits for a beginning that an interrupt has left to itself."""
        beginning = self._beginning
        if beginning is None or beginning.job.is_here:
            return
        if not beginning.job.give_up():
            beginning.job.wait()
        self._beginning = None

    def make_room(self) -> None:
        """Waits until one more save may begin."""
        while len(flying := self.in_flight()) >= self.most:
            self._drive(flying[0])
            flying[0].thread.wait()

    def wait(self) -> None:
        """Waits until all saves are over."""
        self.end_beginning()
        for save in self.in_flight():
            self._drive(save)
            save.thread.wait()

    def close(self) -> None:
        """Ends the threads of beginnings, once all saves are over."""
        self._pool.shutdown()
        self._preparing.shutdown()

    def in_flight(self) -> list[S]:
        """Saves that are not over, in the order of their beginnings."""
        return [save for save in tuple(self._saves) if not save.is_over]

    def unnoted(self) -> list[S]:
        """Saves that are not forgotten yet, in the order of their beginnings; see `forget`."""
        return [*self._saves]

    @property
    def is_full(self) -> bool:
        """Whether a save that began now would have to wait."""
        return self.is_beginning or len(self.in_flight()) >= self.most

    @property
    def is_busy(self) -> bool:
        """Whether a save is beginning or in flight."""
        return self.is_beginning or bool(self.in_flight())

    @property
    def is_beginning(self) -> bool:
        """Whether a save is beginning, or an interrupt has left a beginning to itself."""
        beginning = self._beginning
        return beginning is not None and not beginning.job.is_over

    def is_here(self) -> bool:
        """Whether this is a thread of the pipeline; it must not wait for one that waits for it."""
        beginning = self._beginning
        if beginning is not None and beginning.job.is_here:
            return True
        return any(save.thread.is_here for save in tuple(self._saves))

    def ended(self) -> list[S]:
        """Saves that have ended, even in their beginning, and are not forgotten, in their order.

        A save is listed only if all that began before it are. Those that rest on a failed save are
        waited for and come with it; else they would look like failures of their own.
        """
        found: list[S] = []
        for save in tuple(self._saves):
            if self._fallen(save) is not None:
                save.thread.wait()
            if not save.is_over:
                break
            found.append(save)
        return found

    def forget(self, save: S) -> None:
        """Forgets a save whose outcome is noted; `ended` lists it until then."""
        self._saves.remove(save)

    def fallen_with(self, save: S) -> list[S]:
        """The failed save, and those that it takes down because they rest on it, in order."""
        found = [save]
        for each in tuple(self._saves):
            if each.rests_on in {below.attempt.nonce for below in found}:
                found.append(each)
        return found

    def _fallen(self, save: S) -> S | None:
        """The failed save that a save rests on, and that takes it down; None if there is none."""
        below = (s for s in tuple(self._saves) if s.attempt.nonce == save.rests_on)
        return next((s for s in below if s.known.is_open and not s.is_committed), None)

    # The beginning.

    def _begin(
        self,
        beginning: Beginning[S],
        plan: Callable[[], S],
        prepare: Callable[[S], None],
    ) -> S:
        save = plan()
        self._saves.append(save)
        try:
            prepare(save)
        except BaseException:
            save.known.open()
            save.thread.give_up()  # nothing is left to do
            raise
        beginning.stages(functools.partial(self._work.cancel, save))
        try:
            self._prepare(save)
            folder = self.committer.folder(save.attempt)
            save.futures = [*save.futures, *self._work.stage(save, folder)]
            beginning.is_staged()
        except BaseException as error:
            # If the save that this one rests on failed meanwhile, that cancelled the staging. It is
            # no failure of this save, and comes out of the background with the other one.
            fallen = save.error
            self._work.cancel(save, error)
            if jax.process_count() == 1 and fallen is None:
                self._stop(save)
                self._fail(save, error)
                self._end(save)
                save.thread.give_up()  # nothing is left to do
                raise
            # The other processes have begun, so this one sends them its error in the background.
            failed = concurrent.futures.Future[None]()
            failed.set_exception(fallen or error)
            save.futures = [*save.futures, failed]
        try:
            self._drive(save)
        except (RuntimeError, MemoryError):
            # The system has no more threads. The save is in flight, so nothing may be raised here.
            save.thread.run(self._run, save)
        return save

    def _prepare(self, save: S) -> None:
        """Has process 0 prepare the folder of a save, in the background if that takes requests."""
        items = self._work.items(save)

        def prepare() -> None:
            on_primary(
                self._channel,
                lambda: self.committer.prepare(save.attempt, items),
                topic=save.topic("folders"),
            )

        if can(save.attempt.root).cheap_looks:
            prepare()
            return
        try:
            save.prepared = self._preparing.submit(prepare)
        except RuntimeError:  # the interpreter exits
            prepare()
        else:
            save.futures = [save.prepared]

    def _stop(self, save: S) -> None:
        """Waits until nothing is written for a save that is cancelled."""
        for future in save.futures:
            with contextlib.suppress(BaseException):
                future.cancel()
        for future in save.futures:
            with contextlib.suppress(BaseException):
                future.result(timeout=STOP_SECS)
        save.futures = ()

    def _drive(self, save: S) -> None:
        """Starts the thread of a save, unless it runs already."""
        context = contextvars.copy_context()
        save.thread.start(f"cnr_save_{save.step}", context.run, lambda: self._run(save))

    # The thread of a save.

    def _run(self, save: S) -> None:
        try:
            self._write(save)
            told = self._commit(save)
            self._retire(save, told)
        except BaseException as error:
            self._fail(save, error)
        finally:
            self._end(save)

    def _write(self, save: S) -> None:
        """Waits until all processes have written their part; raises the same error on all."""
        failure = None
        for future in save.futures:
            try:
                wait_for(
                    future, lambda: raise_if_told(self._channel, save.topic("saved"))
                )
            except BaseException as error:
                free_frames(error)
                failure = failure or error
                self._work.cancel(save, error)
        save.futures = ()
        mine = failure and _failure_of(failure, save)
        agree(self._channel, mine, topic=save.topic("saved"))
        save.agreed_at_secs = time.perf_counter()

    def _commit(self, save: S) -> Any:
        """Waits for the turn of a save, and has process 0 commit it.

        Returns:
            What process 0 has told of it; None if it was not heard, or failed after the commit.
        """
        saves = tuple(self._saves)
        before = saves[: saves.index(save)]
        for earlier in before:
            earlier.known.wait()
        # Checked now, not at the beginning: the save below may have failed since.
        if (fallen := self._fallen(save)) is not None:
            raise taken_down(save.step, fallen.step, fallen.error)

        def publish() -> Any:
            try:
                durable = self._work.seal(save, self.committer.folder(save.attempt))
                self._publish(save.attempt, durable)
            except Exception as error:
                raise _failure_of(error, save) from error
            # From here on it is committed, whatever fails.
            save.is_committed = True
            try:
                self._work.make_durable(save)
                save.known.open()
                for earlier in before:
                    earlier.thread.wait()
                return self._work.published(save)
            except Exception as error:
                save.error = after_commit(error, save.step)
                return None

        told = None
        try:
            told = on_primary(self._channel, publish, topic=save.topic("published"))
        except BaseException:
            # Even if a process is silent, the store knows.
            if not self._is_published(save.attempt):
                raise
        save.is_committed = True
        save.known.open()
        for earlier in before:
            earlier.thread.wait()
        self._work.committed(save, told)
        return told

    def _publish(self, attempt: Attempt, durable: Collection[str]) -> None:
        try:
            self.committer.publish(attempt, durable)
        except Exception:
            if not self._is_published(attempt):
                raise

    def _is_published(self, attempt: Attempt) -> bool:
        try:
            return self.committer.is_published(attempt)
        except OSError:
            return False

    def _retire(self, save: S, told: Any) -> None:
        """Has process 0 remove what is superfluous, after all know of the commit.

        Removing may take long, and may fail.
        """

        def retire() -> Any:
            if save.error is not None:
                raise save.error  # nothing is removed in favour of a step that may not last
            try:
                return self._work.retire(save, told)
            except Exception as error:
                raise after_commit(error, save.step) from error

        try:
            found = on_primary(self._channel, retire, topic=save.topic("retired"))
        except errors.SaveError as error:
            if error.kind not in UNHEARD:
                raise
            _log.info("step %d: what else process 0 does is not known", save.step)
            found = None
        self._work.retired(save, found)

    def _fail(self, save: S, error: BaseException) -> None:
        """Notes why a save failed, or what comes after its commit did; removes a failed save."""
        free_frames(error)
        if save.is_committed:
            save.error = after_commit(error, save.step)
        else:
            save.error = _failure_of(error, save)
            self._abandon(save, save.error)
            for each in self.fallen_with(save)[1:]:
                # Else the rest of it would be written in vain.
                each.error = taken_down(each.step, save.step, save.error)
                self._work.cancel(each, each.error)
        save.known.open()
        try:
            self._work.failed(save, save.error)
        except Exception:
            _log.exception("step %d: what follows its failure", save.step)

    def _abandon(self, save: S, error: errors.CnrError) -> None:
        """Removes the files of a failed save, on process 0, when no process writes any more.

        After a process was silent, which may still be writing, they stay.
        """
        if jax.process_index() != 0 or getattr(error, "kind", None) in UNHEARD:
            return
        if any(isinstance(each, StoreError) for each in causes(error)):
            return  # the service does not answer; the next save clears the folder
        try:
            self.committer.abandon(save.attempt)
        except Exception as failure:
            _log.warning("what step %d has written stays: %s", save.step, failure)

    def _end(self, save: S) -> None:
        save.known.open()
        try:
            self._work.ended(save)
        except Exception:
            _log.exception("step %d: what ends its save", save.step)


def _failure_of(error: BaseException, save: PipelinedSave) -> errors.CnrError:
    """The error of a failed save, in the form in which it is sent to all processes and raised."""
    if isinstance(error, errors.SaveError | errors.WriterError):
        return error
    if isinstance(error, concurrent.futures.CancelledError | asyncio.CancelledError):
        if save.error is not None:
            return save.error  # it was taken down
        error = RuntimeError("the save was cancelled")
    return save_error(error, save.step, os.fspath(save.attempt.path))
