"""From which step saving goes on, and whether the next save is due, counted from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from cnr_jax.rows.touched import Touched, clock_of, lineage_hex


@dataclasses.dataclass(frozen=True, slots=True)
class Tip:
    """The step that saving goes on from: the last one saved or restored by a manager."""

    step: int
    lineage: str
    clock: int


class Course:
    """The tip, from call to call of one manager.

    Args:
        uses: whether saves go by these touched rows.

    Attributes:
        tip: None for a manager that starts anew, whatever its root holds.
    """

    def __init__(self, uses: Callable[[Touched | None], bool]) -> None:
        self._uses = uses
        self.tip: Tip | None = None
        # Where the tip goes back to when the last save failed: its step is due again.
        self._before: Tip | None = None

    def begin(self) -> None:
        """A save begins."""
        self._before = self.tip

    def failed(self) -> None:
        """The save that began last is not committed."""
        self.tip = self._before

    def saved(self, step: int, touched: Touched | None) -> None:
        """A save is written, or will be."""
        self.tip = self._tip_at(step, touched)

    def restored(self, step: int, touched: Touched | None) -> None:
        """A step was restored."""
        tip = self._tip_at(step, touched)
        # Without touched rows it is not known whether the restored state goes on: if it
        # does, its next steps are due either way.
        if tip.lineage or self.tip is None or step < self.tip.step:
            self.tip = tip

    def leaves(self, step: int, touched: Touched | None) -> bool:
        """Whether an older step is no repetition but a state that does not rest on the tip.

        Such are a new run in a used root, going on after another step was evaluated, and a
        rollback in memory. If so, it starts anew: there is no tip.
        """
        tip = self.tip
        if tip is None or step > tip.step or not self._uses(touched):
            return False
        # Waits for the train step, but only here: steps after the tip are due or not due.
        new = self._tip_at(step, touched)
        if new.lineage == tip.lineage and new.clock >= tip.clock:
            return False
        self.tip = None
        return True

    def _tip_at(self, step: int, touched: Touched | None) -> Tip:
        if touched is None or not self._uses(touched):
            return Tip(step, "", 0)
        return Tip(step, lineage_hex(touched), clock_of(touched))


class Continuing:
    """Asks Orbax whether a save is due as if the tip were the latest step."""

    def __init__(self, manager: ocp.CheckpointManager, tip: Tip | None) -> None:
        self._manager, self._tip = manager, tip

    def latest_step(self) -> int | None:
        """The step of the tip, for Orbax's own rules."""
        return self._tip.step if self._tip else None

    def should_save(self, step: int) -> bool:
        """Whether a save at this step is due."""
        return ocp.CheckpointManager.should_save(self, step)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
