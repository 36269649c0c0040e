"""The trained tables that codecs are judged on, and how much of them a run takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import traces
import trained_tables

DIMS = (16, 32, 64, 128)
BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """Trained tables.

    Attributes:
        folder: where trained rows are kept.
        data: the folder of the data; None: where `traces.data_folder` finds it.
        quick: a part of them only, trained for a short while.
    """

    folder: Path
    data: Path | None
    quick: bool

    @property
    def dims(self) -> tuple[int, ...]:
        """Columns of the tables."""
        return (64,) if self.quick else DIMS

    @property
    def bits(self) -> tuple[int, ...]:
        """Widths of a code."""
        return (4, 8) if self.quick else BITS

    @property
    def turns(self) -> int:
        """Timed repetitions."""
        return 2 if self.quick else 7

    def few(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values of a sweep."""
        return values[::3] if self.quick else values

    def all(self) -> list[tuple[str, int]]:
        """Names and dims of all tables."""
        names = ("nycflights13",) if self.quick else trained_tables.NAMES
        return [(name, dim) for name in names for dim in self.dims]

    def one(self) -> tuple[str, int]:
        """The one that is looked at more closely."""
        return ("nycflights13" if self.quick else "flights-3m"), 64

    def rows(
        self, name: str, dim: int, *, most: int = 100_000, quick: int = 4096
    ) -> np.ndarray:
        """Trained rows, float32[rows, dim].

        Args:
            name: of the table.
            dim: its columns.
            most: rows at most.
            quick: rows at most in a quick run.
        """
        folder = self.folder / "quick" if self.quick else self.folder
        data = traces.data_folder(self.data) if name == "flights-3m" else Path()
        passes = 0.05 if self.quick else None
        rows = trained_tables.trained_rows(name, dim, folder, data, passes)
        return rows[: quick if self.quick else most]
