"""Delivery of reports of saves and restores: log, `jax.monitoring`, metrics file and `on_save`."""

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
    """Hands the seconds of a report to `jax.monitoring`, under the names that Orbax has for them.

    Exporters of Orbax's metrics show them. The blocking seconds leave out the wait for the train
    step.
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
    """Delivers reports of saves and restores, in their order, in one thread of its own.

    A report goes to the log at once, and then by the thread to `jax.monitoring`, the file of
    metrics, and `on_save`. The thread starts with the first report. It holds reports and nothing
    else of a save.

    Args:
        on_save: function that is called with the report of each save; its errors are logged.
        metrics: whether process 0 adds each report to the file of metrics in the root.

    Attributes:
        last_restore: report of the last restore; None before one.
        keep: function that is called after each report, under a manager of ours. None under a
            plain Orbax manager, which itself hands `jax.monitoring` what Orbax has names for.
    """

    def __init__(
        self, on_save: Callable[[SaveReport], None] | None, *, metrics: bool
    ) -> None:
        self._on_save, self._metrics = on_save, metrics
        self.last_restore: RestoreReport | None = None
        self.keep: Callable[[], None] | None = None
        self._has_hinted = False
        # The interpreter waits for the pool's thread when it exits. The thread also ends when this
        # object is collected.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "cnr_report")
        self._newest: concurrent.futures.Future[None] | None = None
        self._thread: int | None = None

    def tell(self, report: SaveReport | RestoreReport, root: AnyPath | None) -> None:
        """Hands over a report, and the root whose file of metrics gets it; does not wait."""
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
        """Delivers the report of a save at once, in this thread."""
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
        """Whether this is called while a report is delivered in this thread, as in `on_save`."""
        return self._thread == threading.get_ident()

    def wait(self) -> None:
        """Waits until all reports that were handed over are delivered."""
        if self._newest is not None:
            self._newest.exception()

    def close(self) -> None:
        """Waits as `wait` does, and ends the thread."""
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
                # Whatever a listener raises, the step is saved, and later reports must come.
                _log.exception("the report of step %d was not delivered", report.step)
        self._thread = None


def _note(root: AnyPath, report: SaveReport | RestoreReport) -> None:
    """Adds a report to the file of metrics of a root, without the leaves of each table."""
    found = report.asdict()
    for table in found["tables"]:
        table.pop("leaves", None)
    append_event(root, "save" if isinstance(report, SaveReport) else "restore", found)
