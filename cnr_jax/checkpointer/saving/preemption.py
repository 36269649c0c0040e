"""SIGTERM as a request for one last save, in runs where nothing else listens to it.

With several processes jax listens: its preemption service makes them agree on a step.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from cnr_jax import errors
from cnr_jax.texts import logger

_log = logger(__name__)

_listeners: list[Sigterm] = []
# The handler that SIGTERM had before; empty until a `Sigterm` listens.
_theirs: list[Any] = []


class Sigterm:
    """Listener to SIGTERM. While it listens, the first SIGTERM does not end the program.

    A second one does what SIGTERM did before, so that a program that hangs can be ended. Processes
    that are forked meanwhile do not listen: there the first one does what SIGTERM did before.

    Attributes:
        is_unheard: whether SIGTERM has come, and no save has begun since.

    Raises:
        OptionError: if it is not made in the main thread, which alone can listen to signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise errors.OptionError(
                "SIGTERM can be listened to in the main thread only\n"
                "  hint: make the manager there, or leave save_on_sigterm out"
            )
        self._noted = self.is_unheard = False
        self._refused: int | None = None

    def listen(self) -> None:
        """Starts to listen: from now on SIGTERM is noted."""
        if not _listeners:
            _theirs[:] = [signal.signal(signal.SIGTERM, _note)]
        _listeners.append(self)

    def note(self) -> None:
        """Notes that SIGTERM has come."""
        self._noted = self.is_unheard = True

    def reached(self, step: int) -> bool:
        """Whether SIGTERM had come when this step was first asked about.

        For one step the answer stays the same: a loop that saves and then asks whether to
        stop must not stop after a step that was not saved.
        """
        if not self._noted:
            self._refused = step
        return self._noted and step != self._refused

    def close(self) -> None:
        """Stops listening; the last `Sigterm` to do so puts the handler from before back."""
        if self in _listeners:
            _listeners.remove(self)
            if not _listeners:
                _give_back()


def _note(number: int, frame: FrameType | None) -> None:
    _give_back()
    if not _listeners:
        # The signal came while the last listener stopped, or while a process was forked.
        signal.raise_signal(number)
        return
    for listener in _listeners:
        listener.note()
    _log.warning("SIGTERM: the next save is the last one, and is due at once")


def _leave_child_alone() -> None:
    """Stops listening in a forked process, which saves nothing and so would never end."""
    _listeners.clear()
    _give_back()


os.register_at_fork(after_in_child=_leave_child_alone)


def _give_back() -> None:
    if signal.getsignal(signal.SIGTERM) is _note:
        # None: a handler that was not installed from Python cannot be put back.
        signal.signal(signal.SIGTERM, _theirs[0] or signal.SIG_DFL)
