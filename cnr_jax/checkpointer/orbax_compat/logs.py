"""Orbax's log of errors that are told elsewhere: cut to a line, or left out."""

from __future__ import annotations

import errno
import logging
from typing import Any

from etils import epath

from cnr_jax.repository.store import exists
from cnr_jax.texts import logger

_log = logger(__name__)
_LONGEST = 400
# Module and function in which Orbax reads a file of metadata that it has seen to be there.
_READS = ("checkpoint", "read")
# Numbers of errors for a file that was removed meanwhile; the last one comes from NFS.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
# Modules and functions that log an error, with its traceback, before they raise it.
_SHORTENED = {("future", "run"), ("checkpoint", "_write_and_log")}


class _Tracebacks(logging.Filter):
    """Filter that shortens or drops what is told elsewhere; Orbax's other errors pass as ever."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.module, record.funcName)
        if "orbax" not in record.pathname:
            return True
        if place == _READS and _is_gone(record.args):
            _log.debug("%s", record.getMessage())
            return False
        if not record.exc_info:
            return True
        if place in _SHORTENED:
            text = " ".join(record.getMessage().split())
            record.msg, record.args = text[:_LONGEST], None
            record.exc_info = None
        return True


def _is_gone(args: Any) -> bool:
    """Whether a record is of metadata in a folder that is gone, such as a step just deleted.

    Orbax goes on without them, and then does not find the step. Whoever asked for the step is told,
    and a restore of the newest step takes another.
    """
    if not isinstance(args, tuple) or not args:
        return False
    if any(isinstance(each, OSError) and each.errno in _GONE for each in args):
        return True
    # The file was not there at all. A step may be whole without it, but not without its folder.
    return isinstance(args[0], epath.Path) and not exists(args[0].parent)


_TRACEBACKS = _Tracebacks()


def shorten_logs() -> None:
    """Keeps the tracebacks of failed saves out of the log."""
    logging.getLogger("absl").addFilter(_TRACEBACKS)
