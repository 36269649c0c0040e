"""What an interrupt leaves of a call of Orbax: tasks that never end."""

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
    ended: set[Any] = set()
    while (task := _interrupted_task()) is not None and task not in ended:
        with contextlib.suppress(RuntimeError):  # other threads make tasks meanwhile
            for each in asyncio.all_tasks(task.get_loop()):
                _end(each)
        # Its own clean-up has put back what was noted before it: from an earlier interrupt?
        ended.add(task)


def _interrupted_task() -> Any:
    """The task that is noted on this thread, if its loop has ended.

    One of somebody else's loop, which Orbax takes care not to touch, has a loop that goes on.
    """
    task = getattr(threading.current_thread(), "main_task", None)
    if isinstance(task, asyncio.Task) and task.get_loop().is_closed():
        return task
    return None


def _end(task: asyncio.Task[Any]) -> None:
    # The interrupt has told already what asyncio would report.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waited = getattr(task, "_fut_waiter", None)
    for handler in getattr(waited, "_children", ()):
        if handler.done() and not handler.cancelled():
            handler.exception()
    with contextlib.suppress(Exception):  # others must end all the same
        task.get_coro().close()  # type: ignore[union-attr]
