"""The beginning of a save: planning and staging, in a thread that an interrupt ends early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from cnr_jax.waiting import Job

S = TypeVar("S")


class Beginning(Generic[S]):
    """The beginning of one save, which runs in a thread of its own.

    Attributes:
        job: job of that thread.
        found: the save, once it is in flight.
        error: error because of which the save did not get into flight.
    """

    def __init__(self) -> None:
        self.job = Job()
        self.found: S | None = None
        self.error: BaseException | None = None
        # `_cancel` ends the staging in progress; `_why` is the reason to end it.
        self._cancel: Callable[[BaseException], None] | None = None
        self._why: BaseException | None = None

    def run(
        self,
        begin: Callable[[], S],
        settings: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Runs `begin` and keeps its result or error; called in the thread of the beginning."""
        try:
            with settings():
                self.found = begin()
        except BaseException as error:
            self.error = error

    def stages(self, cancel: Callable[[BaseException], None]) -> None:
        """Notes that staging starts, and that `cancel` ends it."""
        self._cancel = cancel
        if self._why is not None:
            self._cancel(self._why)

    def is_staged(self) -> None:
        """Notes that staging is over: from here on no interrupt ends the save.

        Raises:
            BaseException: the interrupt, if one came during staging.
        """
        self._cancel = None
        if self._why is not None:
            raise self._why

    def interrupt(self) -> None:
        """Ends staging early; called from another thread."""
        # The reason is set first: either this method sees `_cancel`, or `stages` sees the reason.
        self._why = KeyboardInterrupt()
        cancel = self._cancel
        if cancel is not None:
            cancel(self._why)
