"""From which step saving goes on, and whether the next save is due, counted from there."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True, slots=True)
class Tip:
    """The step that saving goes on from: the last one saved or restored by a manager."""

    step: int
    lineage: str
    clock: int


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
