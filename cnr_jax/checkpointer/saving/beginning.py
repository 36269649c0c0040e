"""The beginning of a save, in a thread of its own, which an interrupt ends soon."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from cnr_jax.waiting import Job

S = TypeVar("S")


class Beginning(Generic[S]):
    """The beginning of one save, in a thread of its own.

    Attributes:
        job: of that thread.
        found: the save, once it is in flight.
        error: why it is not.
    """

    def __init__(self) -> None:
        self.job = Job()
        self.found: S | None = None
        self.error: BaseException | None = None
        # Ends what is being staged; why that is to end.
        self._cancel: Callable[[BaseException], None] | None = None
        self._why: BaseException | None = None

    def run(
        self,
        begin: Callable[[], S],
        settings: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Begins; in its thread."""
        try:
            with settings():
                self.found = begin()
        except BaseException as error:
            self.error = error

    def stages(self, cancel: Callable[[BaseException], None]) -> None:
        """Staging begins, which `cancel` ends."""
        self._cancel = cancel
        if self._why is not None:
            self._cancel(self._why)

    def is_staged(self) -> None:
        """Staging is over: from here on no interrupt ends the save; raises one that has come."""
        self._cancel = None
        if self._why is not None:
            raise self._why

    def interrupt(self) -> None:
        """Ends staging soon; from another thread."""
        # First the reason: either this sees what is staged, or that sees the reason.
        self._why = KeyboardInterrupt()
        cancel = self._cancel
        if cancel is not None:
            cancel(self._why)
