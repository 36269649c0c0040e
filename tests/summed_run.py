"""A small run whose rows are sums of integers: what it saved, and what is stored of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

import cnr_jax as cnr
from cnr_jax.format.tiles import ProcessManifest, load_process


class SummedRun(ABC):
    """Saves the states of a run, by numbers from 0 on.

    Attributes:
        spec: of its tables.
        sharding: of leaves of the table's shape.
        touched: rows; None: they are not recorded.
        truths: what each step has saved.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self.options = root, {"rounding": "nearest", **options}
        self._rng = np.random.default_rng(0)
        self.spec: Any = ["t"]
        self.sharding: Any = None
        self.touched: Any = None
        self.truths: list[Any] = []

    @abstractmethod
    def saved(self) -> Any:
        """What there is to save, on the host."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state that is saved."""

    def open(self) -> Any:
        """A manager that saves with the options."""
        self.tables = cnr.find_tables(self.state(), self.spec)
        options = cnr.Options(**self.options)
        return cnr.CheckpointManager(self.root, tables=self.tables, options=options)

    def save(self, manager: Any, *, waits: bool = True) -> None:
        """Saves the next step."""
        step = len(self.truths)
        self.truths.append(self.saved())
        manager.save(step, args=cnr.args.Save(self.state(), self.touched))
        if waits:
            manager.wait_until_finished()

    def read(self, step: int, like: Any) -> Any:
        """The state of a step, by a manager that knows only what is stored."""
        with cnr.CheckpointManager(self.root, tables=self.tables) as manager:
            return manager.restore(step, args=cnr.args.Restore(like)).state

    def process(self, step: int) -> ProcessManifest:
        """The manifest of a step's one process."""
        item = self.root / str(step) / "default"
        return load_process((item / "manifest.p00000.json").read_bytes(), "process")
