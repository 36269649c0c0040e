"""Whom a manager tells of saves and restores: the log, `jax.monitoring`, a file, and `on_save`."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.monitoring

from cnr_jax.repository.metrics import PHASES, append_event
from cnr_jax.repository.store import AnyPath
from cnr_jax.telemetry import RestoreReport, SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)


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


def monitor_as_orbax(report: SaveReport | RestoreReport) -> None:
    """Hands the seconds of a report to `jax.monitoring` by the names that Orbax has for them.

    Exporters of Orbax's metrics show them. What training waited for the train step is no part.
    """
    took = jax.monitoring.record_event_duration_secs
    if isinstance(report, RestoreReport):
        took("/jax/orbax/read/total_duration_secs", report.total_secs)
    elif report.outcome == "committed":
        blocking = report.blocking_secs - report.wait_secs
        took("/jax/orbax/write/blocking_duration_secs", blocking)
        total = report.total_secs + report.commit_secs
        took("/jax/orbax/write/total_duration_secs", total)


class Listener:
    """Tells who listens of saves and restores, in their order, in one thread of its own.

    These are the log, at once; `jax.monitoring`; the file of metrics; and `on_save`. The thread
    starts with the first report; it holds reports and nothing else of a save.

    Args:
        on_save: called with the report of each save; what it raises is logged.
        metrics: whether the first process adds each report to the file in its root.

    Attributes:
        last_restore: the last report of a restore; None before one.
        keep: called after each report, by a manager of ours; by one of Orbax, that says to
            `jax.monitoring` itself what it has names for.
    """

    def __init__(
        self, on_save: Callable[[SaveReport], None] | None, *, metrics: bool
    ) -> None:
        self._on_save, self._metrics = on_save, metrics
        self.last_restore: RestoreReport | None = None
        self.keep: Callable[[], None] | None = None
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
        if (keep := self.keep) is not None:
            listeners += [monitor_as_orbax, lambda report: keep()]
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
