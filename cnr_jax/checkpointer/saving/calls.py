"""Calls of a manager: one thread at a time, and none that would wait for itself."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from cnr_jax import errors
from cnr_jax.repository.causes import using_root
from cnr_jax.texts import logger

_log = logger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """The calls of one manager, and the lock that lets in one thread at a time.

    Args:
        is_in_on_save: function that says whether this thread is running `on_save`.
        is_writing_here: function that says whether this thread begins or ends a save.

    Attributes:
        lock: lock that is held during calls; reentrant, as calls make other calls.
        current: mark of the call that the holder of the lock is in, if that call must not be
            nested; a new object for each call.
        is_closed: whether the manager is closed, so that it can only be closed again.
    """

    def __init__(
        self, is_in_on_save: Callable[[], bool], is_writing_here: Callable[[], bool]
    ) -> None:
        self._is_in_on_save, self._is_writing_here = is_in_on_save, is_writing_here
        self.lock = threading.RLock()
        self.current: object | None = None
        self.is_closed = False
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child process, in which no thread of the manager runs."""
        return os.getpid() != self._process

    def asking(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which a question about steps is answered: the lock, or nothing.

        The thread of a save, which may run a callback of the user, takes no lock: a thread that
        holds the lock may be waiting for it, and then the steps do not change either. A forked
        child takes none, as the lock may be held by a thread that the child does not have.
        """
        free = self.is_forked or self._is_writing_here()
        return contextlib.nullcontext() if free else self.lock

    def refuse_inside(self, name: str) -> None:
        """Checks that a call waits neither for `on_save` nor for a save that waits for the call.

        Raises:
            CallError: if it would wait for one of them.
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
        """Checks that a call comes neither from inside `on_save` nor from a forked process.

        Raises:
            CallError: if it does: it would wait for itself, or for threads that do not exist.
        """
        if self.is_forked:
            raise errors.CallError(
                f"{name}() was called in a process that was forked after this manager was made,"
                " and would wait for threads that are not there\n"
                f"  got process {os.getpid()}, expected process {self._process}\n"
                "  hint: save and restore where the manager was made, or make another there;"
                " multiprocessing.get_context('spawn') starts processes in which jax works",
                kind="forked",
            )
        if self._is_in_on_save():
            raise errors.CallError(
                f"{name}() was called inside on_save, and would wait for on_save to end\n"
                "  hint: note the report there, and act on it in the train loop",
                kind="inside_on_save",
            )


def alone(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorates a method of a manager so that no other thread or signal handler gets in meanwhile.

    The manager has its `Calls` in the attribute `_calls`, and its root in `_root`.
    """
    name = method.__name__.lstrip("_")

    @functools.wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        calls: Calls = self._calls
        calls.refuse_inside(name)
        # No Python code runs between these lines and the blocks that undo them, so an interrupt
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
                with using_root(self._root):
                    return method(self, *args, **kwargs)
            finally:
                calls.current = None

    return called
