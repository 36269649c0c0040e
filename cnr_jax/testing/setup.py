"""A run that is to be held against the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cnr_jax as cnr
from cnr_jax.repository.store import AnyPath
from cnr_jax.testing.model import Keeps, everything

Train = Callable[[Any, Any, int], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Setup:
    """A run to be held against the model.

    Attributes:
        state: to start with; what is restored has its structure and shardings.
        tables: in the state.
        train: makes the next state and touched rows of the ones given, by a seed.
        options: of the manager. Codecs must be exact.
        keeps: what their preservation policy keeps, in plain words; see `model`.
        orbax_options: of the manager; step directories must be named by numbers alone.
    """

    state: Any
    tables: cnr.Tables
    train: Train
    options: cnr.Options
    keeps: Keeps = everything
    orbax_options: Any = None

    def __repr__(self) -> str:
        """Without the numbers of the state."""
        return f"Setup({', '.join(self.tables)}; {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same where hypothesis prints it."""
        printer.text(repr(self))

    def open(self, root: AnyPath, *, new_run: bool = False) -> cnr.CheckpointManager:
        """The manager of the run, or of a new one that begins in the same root."""
        return cnr.CheckpointManager(
            root,
            tables=self.tables,
            options=dataclasses.replace(self.options, new_run=new_run),
            orbax_options=self.orbax_options,
        )

    def reader(self, root: AnyPath) -> cnr.CheckpointManager:
        """A manager that knows only what is stored, and keeps it."""
        options = dataclasses.replace(self.options, preservation_policy=None)
        return cnr.CheckpointManager(root, tables=self.tables, options=options)
