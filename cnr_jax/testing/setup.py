"""Setup of a run that is compared with its model."""

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
    """Setup of a run that is compared with its model.

    Attributes:
        state: state to start with; what is restored has its structure and shardings.
        tables: tables in the state.
        train: function of a state, touched rows and a seed that returns the next state and touched
            rows.
        options: options of the manager. Codecs must be exact.
        keeps: the preservation policy of the options as a plain function; see `model`.
        orbax_options: Orbax's options; step directories must be named by numbers alone.
    """

    state: Any
    tables: cnr.Tables
    train: Train
    options: cnr.Options
    keeps: Keeps = everything
    orbax_options: Any = None

    def __repr__(self) -> str:
        """Names of the tables, and the options, without the numbers of the state."""
        return f"Setup({', '.join(self.tables)}; {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same where hypothesis prints it."""
        printer.text(repr(self))

    def open(self, root: AnyPath, *, new_run: bool = False) -> cnr.CheckpointManager:
        """Opens the manager of the run, or of a new run that begins in the same root."""
        return cnr.CheckpointManager(
            root,
            tables=self.tables,
            options=dataclasses.replace(self.options, new_run=new_run),
            orbax_options=self.orbax_options,
        )

    def reader(self, root: AnyPath) -> cnr.CheckpointManager:
        """Opens a manager that knows only what is stored, and deletes none of it."""
        options = dataclasses.replace(self.options, preservation_policy=None)
        return cnr.CheckpointManager(root, tables=self.tables, options=options)
