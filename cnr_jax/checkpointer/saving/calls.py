"""Who may call a manager when: one thread at a time, and nobody who would wait for himself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax.monitoring

from cnr_jax import errors
from cnr_jax.telemetry import SaveReport

_log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """The calls of one manager.

    Args:
        is_in_on_save: whether this thread is in the listener of the manager.
        is_writing_here: whether this thread is one of Orbax's that writes a save.

    Attributes:
        lock: held during calls; reentrant, for those that calls make of their own.
        current: stands for the call that whoever holds the lock is in, if it must not be nested;
            for each call another object.
        is_closed: whether nothing can be done with the manager any more, but closing it again.
    """

    def __init__(
        self, is_in_on_save: Callable[[], bool], is_writing_here: Callable[[], bool]
    ) -> None:
        self._is_in_on_save, self._is_writing_here = is_in_on_save, is_writing_here
        self.lock = threading.RLock()
        self.current: object | None = None
        self.is_closed = False
        self._naming_all: object | None = None

    def asking(self) -> contextlib.AbstractContextManager[Any]:
        """What a question about steps is asked in: the lock.

        A thread of Orbax's that writes a save, with a callback of the user in it, must not wait
        for who waits for it; meanwhile nothing changes either.
        """
        return contextlib.nullcontext() if self._is_writing_here() else self.lock

    @contextlib.contextmanager
    def all_directories(self) -> Iterator[None]:
        """Meanwhile all step directories are listed, whatever is in them.

        Orbax must know of each that a save would overwrite, or that may be deleted.
        """
        self._naming_all = self.current
        try:
            yield
        finally:
            self._naming_all = None

    @property
    def names_all(self) -> bool:
        """Whether Orbax, which asks for the steps too, is told of all directories."""
        # Not from another call, which was interrupted before it could say that it is over.
        return self._naming_all is not None and self._naming_all is self.current

    def refuse_in_on_save(self, name: str) -> None:
        """Checks that a call does not wait for the listener that makes it.

        Raises:
            CallError: if it does.
        """
        if self._is_in_on_save():
            raise errors.CallError(
                f"{name}() was called inside on_save, and would wait for on_save to end\n"
                "  hint: note the report there, and act on it in the train loop",
                kind="inside_on_save",
            )


def alone(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of a manager, during which no other thread is let in, nor a signal handler.

    The manager's `Calls` are its attribute `_calls`.
    """
    name = method.__name__.lstrip("_")

    @functools.wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        calls: Calls = self._calls
        calls.refuse_in_on_save(name)
        # Nothing of Python runs between these lines and the blocks that undo them: an interrupt
        # leaves neither the lock held nor the mark set.
        with calls.lock:
            if calls.current is not None:
                raise errors.CallError(
                    f"{name}() was called in the middle of another call of the"
                    " same manager, by the same thread\n"
                    "  hint: in a signal handler only note the signal, and save in the train"
                    " loop",
                    kind="nested",
                )
            if calls.is_closed and name != "close":
                raise errors.CallError(
                    f"{name}() was called, but this manager is closed; nothing was changed\n"
                    "  hint: call it before close(), or inside of `with`; or make another"
                    " manager of this root",
                    kind="closed",
                )
            calls.current = object()
            try:
                return method(self, *args, **kwargs)
            finally:
                calls.current = None

    return called


def record(report: SaveReport) -> None:
    """Hands a report to `jax.monitoring`, under `/cnr_jax/save/`."""
    kind, took = report.kind, jax.monitoring.record_event_duration_secs
    took("/cnr_jax/save/blocking_duration_secs", report.blocking_secs, kind=kind)
    took("/cnr_jax/save/duration_secs", report.total_secs, kind=kind)
    counted = jax.monitoring.record_scalar
    counted("/cnr_jax/save/bytes_written", report.total_bytes, kind=kind)
    counted("/cnr_jax/save/rows_touched", report.rows, kind=kind)


class Listener:
    """Tells `jax.monitoring` and `on_save` of saves, in their order, in one thread of its own.

    The thread starts with the first report; it holds reports and nothing else of a save.

    Args:
        on_save: called with each report; what it raises is logged.
    """

    def __init__(self, on_save: Callable[[SaveReport], None] | None) -> None:
        self._on_save = on_save
        # Its thread is waited for when the interpreter exits, and ends when nobody holds this.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "cnr_report")
        self._newest: concurrent.futures.Future[None] | None = None
        self._thread: int | None = None

    def tell(self, report: SaveReport) -> None:
        """Hands a report over; does not wait."""
        # A pool that cannot start its thread may have taken the report all the same.
        once = threading.Lock()
        try:
            self._newest = self._pool.submit(self._deliver, report, once)
        except RuntimeError:
            # The system has no more threads, or the interpreter exits.
            self.wait()
            self._deliver(report, once)

    def tell_here(self, report: SaveReport) -> None:
        """Tells of a save at once, in this thread."""
        self._deliver(report, threading.Lock())

    def is_here(self) -> bool:
        """Whether this is called inside `on_save`."""
        return self._thread == threading.get_ident()

    def wait(self) -> None:
        """Waits until all that was handed over is told."""
        if self._newest is not None:
            self._newest.exception()

    def close(self) -> None:
        """Waits, and ends the thread."""
        self._pool.shutdown()

    def _deliver(self, report: SaveReport, once: threading.Lock) -> None:
        if not once.acquire(blocking=False):
            return
        self._thread = threading.get_ident()
        for listener in (record, self._on_save):
            try:
                if listener is not None:
                    listener(report)
            except BaseException:
                # The step is saved, whatever a listener raises, and the next reports come.
                _log.exception("the report of step %d was not delivered", report.step)
        self._thread = None
