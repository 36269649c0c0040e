"""Who may call a manager when: one thread at a time, and nobody who would wait for himself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from cnr_jax import errors

P = ParamSpec("P")
R = TypeVar("R")


class Called(Protocol):
    """What is called.

    Attributes:
        _lock: held during calls; reentrant, for those that calls make of their own.
        _is_in_call: whether whoever holds the lock is in a call that must not be nested.
        _is_closed: whether nothing can be done with it any more, but closing it again.
    """

    _lock: threading.RLock
    _is_in_call: bool
    _is_closed: bool

    def _is_in_on_save(self) -> bool: ...


def refuse_in_on_save(manager: Called, name: str) -> None:
    """Checks that a call does not wait for the listener that makes it.

    Raises:
        CallError: if it does.
    """
    if manager._is_in_on_save():
        raise errors.CallError(
            f"{name}() was called inside on_save, and would wait for on_save to end\n"
            "  hint: note the report there, and act on it in the train loop",
            kind="inside_on_save",
        )


def alone(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method during which no other thread, nor a signal handler, is let into its object."""
    name = method.__name__.lstrip("_")

    @functools.wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_in_on_save(self, name)
        # Nothing of Python runs between these lines and the blocks that undo them: an interrupt
        # leaves neither the lock held nor the mark set.
        with self._lock:
            if self._is_in_call:
                raise errors.CallError(
                    f"{name}() was called in the middle of another call of the"
                    " same manager, by the same thread\n"
                    "  hint: in a signal handler only note the signal, and save in the train"
                    " loop",
                    kind="nested",
                )
            if self._is_closed and name != "close":
                raise errors.CallError(
                    f"{name}() was called, but this manager is closed; nothing was changed\n"
                    "  hint: call it before close(), or inside of `with`; or make another"
                    " manager of this root",
                    kind="closed",
                )
            self._is_in_call = True
            try:
                return method(self, *args, **kwargs)
            finally:
                self._is_in_call = False

    return called
