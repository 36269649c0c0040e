"""Orbax's barriers of a save, which a process that has failed leaves.

Orbax would let the other processes wait for it, 20 minutes by default.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
from collections.abc import Sequence

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost.agreement import settle
from cnr_jax.checkpointer.multihost.channel import UNHEARD, Channel
from cnr_jax.checkpointer.save_errors import save_error


class Barriers:
    """Where the processes meet before and after the commit of a save, as Orbax asks for it.

    Args:
        channel: through which they meet; one save at a time does.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._save, self._next = "", list[str]()
        self._met: collections.Counter[str] = collections.Counter()
        # Why a process was given up that did not come.
        self._silent: errors.SaveError | None = None

    def begin(self, barriers: Sequence[str], save: str) -> None:
        """Names the barriers of the save that starts, in the order in which they come.

        Args:
            barriers: their keys.
            save: its uuid; empty if it has none, such as one without the state.

        Raises:
            SaveError: if it has none, and a process does not come to draw one.
        """
        if not save:
            # Not by its step: it may find what is left of another save of that, which failed.
            save = settle(self._channel, None, decide=lambda _: secrets.token_hex(16))
        self._save, self._next, self._silent = save, list(barriers), None
        self._met.clear()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes are here.

        Raises:
            SaveError: on all processes alike, if one has left or does not come.
        """
        if key in self._next:
            self._next.remove(key)
        self._meet(key, None, timeout_ms / 1000)

    def leave(self, error: BaseException) -> None:
        """Frees the processes that wait, or will wait, for this one at the next barrier."""
        if self._next and jax.process_count() > 1:
            key = self._next.pop(0)
            self._next.clear()
            # It raises what this process has told, or what it has heard instead.
            with contextlib.suppress(errors.SaveError):
                self._meet(key, save_error(error, None), self._channel.timeout_secs)

    def forget(self) -> None:
        """Says that no process will come to the barriers of this save."""
        self._next.clear()

    def _meet(
        self, key: str, failure: errors.SaveError | None, timeout_secs: float
    ) -> None:
        if self._silent is not None:
            raise self._silent
        self._met[key] += 1
        try:
            settle(
                self._channel,
                failure,
                topic=f"{self._save}/{key}/{self._met[key]}",
                timeout_secs=min(timeout_secs, self._channel.timeout_secs),
            )
        except errors.SaveError as error:
            if error.kind in UNHEARD:
                self._silent = error
            raise
