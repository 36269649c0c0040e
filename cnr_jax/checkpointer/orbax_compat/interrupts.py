"""Tasks that never end, which an interrupt leaves of a call of Orbax."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any


def end_interrupted_tasks() -> None:
    """Ends tasks that an interrupt has left on this thread, with all that their frames hold.

    Orbax notes the task of a call on the thread until the task has ended. An interrupt in a
    handler ends the event loop instead, and the task stays as long as the thread does. It holds the
    interrupt, the frames that the interrupt went through, and so the state that was being saved.
    """
    ended: set[Any] = set()
    while (task := _interrupted_task()) is not None and task not in ended:
        with contextlib.suppress(RuntimeError):  # other threads make tasks meanwhile
            for each in asyncio.all_tasks(task.get_loop()):
                _end(each)
        # Its clean-up has put back the task noted before it, maybe that of an earlier interrupt.
        ended.add(task)


def _interrupted_task() -> Any:
    """The task that is noted on this thread, if its loop has ended.

    The loop of somebody else's task goes on. Orbax takes care not to touch such a task.
    """
    task = getattr(threading.current_thread(), "main_task", None)
    if isinstance(task, asyncio.Task) and task.get_loop().is_closed():
        return task
    return None


def _end(task: asyncio.Task[Any]) -> None:
    # The interrupt has already told what asyncio would report.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waited = getattr(task, "_fut_waiter", None)
    for handler in getattr(waited, "_children", ()):
        if handler.done() and not handler.cancelled():
            handler.exception()
    with contextlib.suppress(Exception):  # others must end all the same
        task.get_coro().close()  # type: ignore[union-attr]
