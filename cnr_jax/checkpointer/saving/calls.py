"""Who may call a manager when, and whom it calls: listeners of saves and restores, in a thread.

One thread at a time may call it, and nobody who would wait for himself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.monitoring

from cnr_jax import errors
from cnr_jax.repository.metrics import PHASES, append_event
from cnr_jax.repository.store import AnyPath
from cnr_jax.telemetry import RestoreReport, SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """The calls of one manager.

    Args:
        is_in_on_save: whether this thread is in the listener of the manager.
        is_writing_here: whether this thread is one that begins or ends a save.

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

    def asking(self) -> contextlib.AbstractContextManager[Any]:
        """What a question about steps is asked in: the lock.

        A thread of a save, with a callback of the user in it, must not wait for who waits for it;
        meanwhile nothing changes either.
        """
        return contextlib.nullcontext() if self._is_writing_here() else self.lock

    def refuse_inside(self, name: str) -> None:
        """Checks that a call waits neither for `on_save` nor for a save that waits for the call.

        Raises:
            CallError: if it does.
        """
        self.refuse_in_on_save(name)
        if self._is_writing_here():
            raise errors.CallError(
                f"{name}() was called inside a handler or a callback that a save of the same"
                " manager waits for, and would wait for that save\n"
                "  hint: note there what is to be done, and do it in the train loop",
                kind="nested",
            )

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
        calls.refuse_inside(name)
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


def monitor(report: SaveReport | RestoreReport) -> None:
    """Hands a report to `jax.monitoring`, under `/cnr_jax/save/` or `/cnr_jax/restore/`."""
    kind, took = report.kind, jax.monitoring.record_event_duration_secs
    counted = jax.monitoring.record_scalar
    if isinstance(report, RestoreReport):
        took("/cnr_jax/restore/duration_secs", report.total_secs, kind=kind)
        counted("/cnr_jax/restore/bytes_read", report.bytes_read, kind=kind)
        counted("/cnr_jax/restore/chain_length", len(report.chain), kind=kind)
        return
    if report.outcome == "dropped":
        counted("/cnr_jax/save/dropped", 1, kind=kind)
        return
    took("/cnr_jax/save/blocking_duration_secs", report.blocking_secs, kind=kind)
    took("/cnr_jax/save/duration_secs", report.total_secs, kind=kind)
    for phase in PHASES:
        secs = getattr(report, f"{phase}_secs")
        took(f"/cnr_jax/save/{phase}_duration_secs", secs, kind=kind)
    counted("/cnr_jax/save/bytes_written", report.total_bytes, kind=kind)
    counted("/cnr_jax/save/rows_touched", report.rows, kind=kind)
    if report.mean_row_error is not None:
        counted("/cnr_jax/save/mean_row_error", report.mean_row_error, kind=kind)


class Listener:
    """Tells who listens of saves and restores, in their order, in one thread of its own.

    These are the log, at once; `jax.monitoring`; the file of metrics; and `on_save`. The thread
    starts with the first report; it holds reports and nothing else of a save.

    Args:
        on_save: called with the report of each save; what it raises is logged.
        metrics: whether the first process adds each report to the file in its root.

    Attributes:
        last_restore: the last report of a restore; None before one.
    """

    def __init__(
        self, on_save: Callable[[SaveReport], None] | None, *, metrics: bool
    ) -> None:
        self._on_save, self._metrics = on_save, metrics
        self.last_restore: RestoreReport | None = None
        self._has_hinted = False
        # Its thread is waited for when the interpreter exits, and ends when nobody holds this.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "cnr_report")
        self._newest: concurrent.futures.Future[None] | None = None
        self._thread: int | None = None

    def tell(self, report: SaveReport | RestoreReport, root: AnyPath | None) -> None:
        """Hands a report over, and the root where it may be noted; does not wait."""
        self._say(report)
        # A pool that cannot start its thread may have taken the report all the same.
        once = threading.Lock()
        try:
            self._newest = self._pool.submit(self._deliver, report, root, once)
        except RuntimeError:
            # The system has no more threads, or the interpreter exits.
            self.wait()
            self._deliver(report, root, once)

    def tell_here(self, report: SaveReport, root: AnyPath) -> None:
        """Tells of a save at once, in this thread."""
        self._say(report)
        self._deliver(report, root, threading.Lock())

    def _say(self, report: SaveReport | RestoreReport) -> None:
        _log.info("%s", report)
        if isinstance(report, RestoreReport):
            self.last_restore = report
        elif report.kind == "delta" and not self._has_hinted and report.hint:
            self._has_hinted = True
            _log.info("step %d: %s", report.step, report.hint)

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

    def _deliver(
        self,
        report: SaveReport | RestoreReport,
        root: AnyPath | None,
        once: threading.Lock,
    ) -> None:
        if not once.acquire(blocking=False):
            return
        self._thread = threading.get_ident()
        listeners: list[Callable[[Any], None]] = [monitor]
        if self._metrics and root is not None and jax.process_index() == 0:
            listeners.append(functools.partial(_note, root))
        if self._on_save is not None and isinstance(report, SaveReport):
            listeners.append(self._on_save)
        for listener in listeners:
            try:
                listener(report)
            except BaseException:
                # The step is saved, whatever a listener raises, and the next reports come.
                _log.exception("the report of step %d was not delivered", report.step)
        self._thread = None


def _note(root: AnyPath, report: SaveReport | RestoreReport) -> None:
    """Adds a report to the file of metrics of a root, without the leaves of each table."""
    found = report.asdict()
    for table in found["tables"]:
        table.pop("leaves", None)
    append_event(root, "save" if isinstance(report, SaveReport) else "restore", found)
