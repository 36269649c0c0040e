"""Errors of Orbax in the log: told once, by whoever hears of them, and without tracebacks.

tests/test_orbax_assumptions.py asserts what is said of Orbax here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_log = logging.getLogger(__name__)
_here = threading.local()
# Modules and functions of Orbax that log an error, with its traceback, before it comes out.
_RAISED = {
    ("async_checkpointer", "_thread_func"),
    ("checkpoint_manager", "wait_until_finished"),
}
_LONGEST = 400
# Those whose threads belong to no manager that could be told; of the error all hear in the end.
_SHORTENED = {("future", "run"), ("checkpoint", "_write_and_log")}


class _Tracebacks(logging.Filter):
    """Leaves out what is told elsewhere; other errors of Orbax are logged as ever."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.module, record.funcName)
        if not record.exc_info or "orbax" not in record.pathname:
            return True
        if place in _RAISED and getattr(_here, "is_told", False):
            _log.debug("%s", record.getMessage(), exc_info=record.exc_info)
            return False
        if place in _SHORTENED:
            text = " ".join(record.getMessage().split())
            record.msg, record.args = text[:_LONGEST], None
            record.exc_info = None
        return True


_TRACEBACKS = _Tracebacks()


@contextlib.contextmanager
def told_elsewhere() -> Iterator[None]:
    """What fails in here, in this thread, is told by whoever hears of it."""
    before = getattr(_here, "is_told", False)
    _here.is_told = True
    try:
        yield
    finally:
        _here.is_told = before


def shorten_logs() -> None:
    """Keeps the tracebacks of failed saves out of the log."""
    logging.getLogger("absl").addFilter(_TRACEBACKS)
