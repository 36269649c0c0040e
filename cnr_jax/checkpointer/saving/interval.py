"""The interval of a run that decides itself how often it saves: `Options(interval="auto")`."""

from __future__ import annotations

import time

import jax

from cnr_jax.goodput.measurements import Measurements
from cnr_jax.goodput.pacing import best_interval, cost_of_saves, lost_limit
from cnr_jax.options import Options
from cnr_jax.texts import logger

_log = logger(__name__)
# Before anything is measured.
_FIRST_STEPS = 10


class Interval:
    """Steps between two saves, on all processes the same.

    Process 0 works it out, in the background, from what it has measured. The others take it over
    with the message that settles a save. Between saves nothing is exchanged: a save is due so many
    steps after the one before, whatever became of that.

    Args:
        options: of the run.

    Attributes:
        steps: the interval.
        changed: why it has changed with the last save; empty if it has not.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.steps, self.changed = _FIRST_STEPS, ""
        self._next: tuple[int, str] | None = None
        # The step that is counted from; None: the next one is due.
        self._after: int | None = None
        self._begun_at = time.monotonic()
        limit = options.max_lost_secs
        self._limit_secs = None if limit is None else limit / 2
        # Several processes cannot ask one clock between saves.
        self._asks_clock = limit is not None and jax.process_count() == 1

    def goes_on(self, step: int) -> bool:
        """Whether a step comes after the one that is counted from."""
        return self._after is not None and step > self._after

    def is_due(self, step: int) -> bool:
        """Whether a save is due."""
        if self._after is None or step >= self._after + self.steps:
            return True
        if not self._asks_clock or self._limit_secs is None:
            return False
        return time.monotonic() >= self._begun_at + self._limit_secs

    def start_at(self, step: int | None) -> None:
        """Counts from a step that was restored; None: the next one is due."""
        self._after, self._begun_at = step, time.monotonic()

    def learn(self, found: Measurements) -> None:
        """Works out the next interval, in the background."""
        cost = cost_of_saves(found.saves)
        if cost is None:
            return
        limit = self._options.max_lost_secs
        if limit is not None:
            self._limit_secs = lost_limit(cost, limit)
        self._next = best_interval(
            cost,
            self.steps,
            slowdown=self._options.slowdown,
            max_lost_secs=limit,
            in_flight=self._options.max_in_flight,
        )

    def decided(self) -> tuple[int, str]:
        """On process 0: the interval after the save that is being decided, and why it changes."""
        found, self._next = self._next, None
        return found or (self.steps, "")

    def settle(self, step: int, steps: int, why: str) -> None:
        """Takes over what process 0 has decided."""
        self.changed = why
        if why:
            _log.info(
                "step %d: from here on a save is due every %d steps instead of %d, %s",
                step,
                steps,
                self.steps,
                why,
            )
        self.steps = steps
