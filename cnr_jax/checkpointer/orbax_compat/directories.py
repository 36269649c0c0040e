"""The directories of a save, which Orbax makes in threads of its own."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint._src.futures import future as signals
from orbax.checkpoint._src.futures import signaling_client, synchronization


class Directories:
    """The directories of the save that starts, which Orbax makes in threads of its own.

    To be made in `async_save`. Orbax signals when they are there, and says nothing if they
    cannot be made: whoever waits as Orbax does then waits five minutes.
    """

    def __init__(self) -> None:
        contract = signals.AwaitableSignalsContract
        self._operation = (
            synchronization.OperationIdGenerator.get_current_operation_id()
        )
        self._signals = contract.get_awaitable_signals_from_contract(self._operation)
        self._keys = [
            contract.get_unique_awaitable_singal_key(signal, self._operation)
            for signal in self._signals
        ]
        self._makers = [t for t in self._threads() if t._send_signals]

    def wait(self, timeout_secs: float, check: Callable[[], None]) -> None:
        """Waits until the directories are there.

        Args:
            timeout_secs: how long.
            check: called every second; what it raises ends the wait.

        Raises:
            OSError: what kept Orbax from making them; TimeoutError if it is not done.
        """
        deadline = time.monotonic() + timeout_secs
        for signal, key in zip(self._signals, self._keys, strict=True):
            while not _is_signalled(key):
                check()
                self._check_makers(signal, key)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"the directories of the save were not made in {timeout_secs:g} s"
                    )

    def _check_makers(self, signal: Any, key: str) -> None:
        """Raises what kept a signal from being sent: its sender has ended without."""
        makers = [t for t in self._makers if signal in t._send_signals]
        if jax.process_index() != 0 or any(t.is_alive() for t in makers):
            return  # process 0 makes them, and has done so, perhaps, since the last look
        if not _is_signalled(key):
            failed = [t._exception for t in makers if t._exception is not None]
            raise (
                failed[0]
                if failed
                else OSError("Orbax could not make the directories of the save")
            )

    def give_up(self) -> None:
        """Keeps all that waits for the directories from ever beginning."""
        for thread in self._threads():
            if thread._receive_signals:
                thread.cancel()

    def release(self) -> None:
        """Ends the waiting of what was given up; only once it is given up everywhere."""
        waiting = [t for t in self._threads() if t._cancelled]
        signals.set_signals(self._signals, operation_id=self._operation)
        for thread in waiting:
            _end_given_up(thread)

    def _threads(self) -> list[Any]:
        return [
            thread
            for thread in threading.enumerate()
            if isinstance(thread, signals._SignalingThread)
            and thread._operation_id == self._operation
        ]


def _is_signalled(key: str, wait_secs: int = 1) -> bool:
    """Whether a signal comes within a second."""
    try:
        signaling_client.get_signaling_client().blocking_key_value_get(key, wait_secs)
    except TimeoutError:
        return False
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise
    return True


def _end_given_up(thread: Any) -> None:
    """Waits for a cancelled thread and closes the coroutine that it never began."""
    threading.Thread.join(thread)
    target = getattr(thread, "_target", None)
    if target is not None:
        work = inspect.getclosurevars(target).nonlocals["target"]
        inspect.getclosurevars(work).nonlocals["coro"].close()
