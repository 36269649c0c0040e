"""What a save does in the background, in one thread that Orbax takes for the future of the save.

The thread writes the rows of this process, waits for what else the handler has begun, and hears
of the other processes: it ends well on all of them or on none.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import UNHEARD, Channel, agree, check
from cnr_jax.checkpointer.orbax_compat.places import Directories
from cnr_jax.checkpointer.save_errors import free_frames, save_error
from cnr_jax.repository.lineage.planner import Plan

# How long a failed save is waited for to stop writing; it does within a chunk or two.
STOP_SECS = 60.0
# How often a process looks whether process 0 has failed, while it waits for something else.
POLL_SECS = 1.0


class Background:
    """One save in the background; starts at once.

    Args:
        plan: of the save.
        directory: where the save will be once it is committed, for messages.
        directories: to be waited for before anything is written.
        write: writes the rows of this process.
        release: ends `write`, and frees whoever waits for it to go on.
        channel: to the other processes.
    """

    def __init__(
        self,
        plan: Plan,
        directory: str,
        directories: Directories,
        write: Callable[[], None],
        release: Callable[[], None],
        channel: Channel,
    ) -> None:
        self._plan, self._directory = plan, directory
        self._directories = directories
        self._write, self._release, self._channel = write, release, channel
        self._topic = f"{plan.uuid}/saved"
        self._parts: Sequence[Any] = ()
        self._begun = threading.Event()
        self._stopped: BaseException | None = None
        self.error: errors.SaveError | concurrent.futures.CancelledError | None = None
        self._thread = threading.Thread(target=self._run, name="cnr_write_rows")
        self._thread.start()

    def hand_over(
        self, parts: Sequence[Any], failure: BaseException | None = None
    ) -> None:
        """Says that the blocking part of the save is over; to be called once.

        Args:
            parts: futures of what else is being written.
            failure: what ended the blocking part.
        """
        self._parts = parts
        if failure is not None:
            self._stop(failure)
        self._begun.set()

    def result(self, timeout: float | None = None) -> None:
        """Waits until all processes have written their part.

        Raises:
            SaveError: if one has not.
            TimeoutError: if it takes longer than `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"step {self._plan.step} was not written in {timeout:g} s"
            )
        if self.error is not None:
            raise self.error

    def has_failed(self) -> bool:
        """Whether all processes have heard that the save has failed; waits for their word.

        A thread that hangs, as storage may, has nothing good to say.
        """
        self._thread.join(self._channel.timeout_secs)
        return self._thread.is_alive() or self.error is not None

    def cancel(self) -> None:
        """Makes the save fail; nothing is written any more soon after."""
        self._stop(concurrent.futures.CancelledError("the save was cancelled"))

    def stop(self) -> None:
        """Makes the save fail if it has not ended, and waits until nothing is written."""
        self.cancel()
        self._begun.set()
        self._thread.join(STOP_SECS)

    def _stop(self, why: BaseException) -> None:
        self._stopped = self._stopped or why
        self._release()

    def _run(self) -> None:
        failure = self._attempt(self._wait_for_directories)
        homeless = failure is not None
        if not homeless:
            failure = self._attempt(self._write_rows)
        if failure is not None:
            self._release()
        self._begun.wait()
        if homeless:
            # What waits for directories must not begin, in whatever the next save makes.
            self._directories.give_up()
        else:
            for part in self._parts:
                found = self._attempt(functools.partial(self._wait_for, part))
                failure = failure or found
        self._parts = ()
        is_heard = self._agree(self._stopped or failure)
        if homeless and is_heard:
            # All processes have given up.
            self._attempt(self._directories.release)

    def _wait_for_directories(self) -> None:
        self._directories.wait(
            self._channel.timeout_secs, lambda: check(self._channel, self._topic)
        )

    def _wait_for(self, part: Any) -> None:
        """Waits for what Orbax writes, unless it waits for a process that has failed.

        It does: other processes write into what process 0 has made.
        """
        while True:
            started = time.monotonic()
            try:
                return part.result(timeout=POLL_SECS)
            except TimeoutError:
                if time.monotonic() - started < POLL_SECS:
                    raise  # an error of its own
            try:
                check(self._channel, self._topic)
            except errors.SaveError:
                part.cancel()
                self._attempt(functools.partial(part.result, timeout=STOP_SECS))
                raise

    def _write_rows(self) -> None:
        if self._stopped is None:
            self._write()

    def _attempt(self, work: Callable[[], Any]) -> BaseException | None:
        """What work raises: also what ends a thread must be told to the other processes."""
        try:
            work()
        except BaseException as error:
            free_frames(error)
            return error
        return None

    def _agree(self, failure: BaseException | None) -> bool:
        """Ends as all processes do; returns whether none is known to be out of reach."""
        is_heard = True
        mine = failure and save_error(failure, self._plan.step, self._directory)
        try:
            agree(self._channel, mine, topic=self._topic)
        except errors.SaveError as error:
            is_heard = error.kind not in UNHEARD
            own = mine is not None and error.process == mine.process
            self.error = mine if own else error
        except Exception as error:
            # Such as jax's, when its coordination service is gone: nobody knows of success.
            self.error = mine or save_error(error, self._plan.step, self._directory)
        if isinstance(failure, concurrent.futures.CancelledError):
            self.error = failure
        return is_heard
