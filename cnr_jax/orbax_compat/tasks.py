"""What an interrupt leaves of the event loop in which Orbax runs handlers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any


def end_interrupted_tasks() -> None:
    """Ends tasks that an interrupt has left on this thread, with all that their frames hold.

    Orbax notes the task of a call on the thread until the task has ended. An interrupt in a
    handler ends the loop instead, and the task stays, for as long as the thread does: with the
    interrupt, hence with the frames it went through, hence with the state that was being saved.
    """
    task = getattr(threading.current_thread(), "main_task", None)
    # A task of somebody else's loop, which Orbax takes care not to touch, has one that goes on.
    if not isinstance(task, asyncio.Task) or not task.get_loop().is_closed():
        return
    for each in asyncio.all_tasks(task.get_loop()):
        _tell_nobody(each)
        # Its own clean-up runs: what it has noted on the thread is put back.
        with contextlib.suppress(RuntimeError):  # it was about to wait again
            each.get_coro().close()  # type: ignore[union-attr]


def _tell_nobody(task: asyncio.Task[Any]) -> None:
    """Keeps asyncio from reporting what the interrupt has told already."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waited = getattr(task, "_fut_waiter", None)
    for handler in getattr(waited, "_children", ()):
        if handler.done() and not handler.cancelled():
            handler.exception()
