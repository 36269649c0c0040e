"""The interval of a run that decides itself how often it saves: `Options(interval="auto")`."""

from __future__ import annotations

import time

import jax

from cnr_jax.goodput.measurements import Measurements
from cnr_jax.goodput.pacing import best_interval, cost_of_saves, lost_limit
from cnr_jax.options import Options
from cnr_jax.texts import logger

_log = logger(__name__)
# The interval before anything is measured.
_FIRST_STEPS = 10


class Interval:
    """The interval: train steps between two saves, the same on all processes.

    Process 0 works it out, in the background, from its measurements. The other processes take it
    over with the message that settles a save. Between saves nothing is exchanged: a save is due
    that many steps after the one before, even if that one failed.

    Args:
        options: options of the run.

    Attributes:
        steps: number of steps between two saves.
        changed: why the interval changed with the last save; empty if it did not.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.steps, self.changed = _FIRST_STEPS, ""
        self._next: tuple[int, str] | None = None
        # The step from which the interval counts; None: the next step is due.
        self._after: int | None = None
        self._begun_at = time.monotonic()
        limit = options.max_lost_secs
        self._limit_secs = None if limit is None else limit / 2
        # Several processes have no common clock to ask between saves.
        self._asks_clock = limit is not None and jax.process_count() == 1

    def goes_on(self, step: int) -> bool:
        """Whether a step comes after the one from which the interval counts."""
        return self._after is not None and step > self._after

    def is_due(self, step: int) -> bool:
        """Whether a save at this step is due."""
        if self._after is None or step >= self._after + self.steps:
            return True
        if not self._asks_clock or self._limit_secs is None:
            return False
        return time.monotonic() >= self._begun_at + self._limit_secs

    def start_at(self, step: int | None) -> None:
        """Starts to count from a step that is saved or was restored; None: the next one is due."""
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
        """Interval after the save that is being decided, and why it changes; on process 0."""
        found, self._next = self._next, None
        return found or (self.steps, "")

    def settle(self, step: int, steps: int, why: str) -> None:
        """Takes over the interval that process 0 has decided, and logs why it changes."""
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
