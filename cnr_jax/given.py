"""The value `NOT_GIVEN` for options that a program leaves out, and the options of single tables."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any, Final, Literal

from cnr_jax.integers import take_integers
from cnr_jax.rows.codecs import Codec


class NotGiven(enum.Enum):
    """The type of `NOT_GIVEN`."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        """`NOT_GIVEN`, the name in programs."""
        return self.name

    def __bool__(self) -> bool:
        """False: nothing was given."""
        return False


NOT_GIVEN: Final = NotGiven.NOT_GIVEN
"""In the place of an option: as in the run that goes on, else the default."""


def unset_nones(options: Any, names: Collection[str]) -> None:
    """Replaces None by `NOT_GIVEN` in a frozen dataclass, as programs pass None for it."""
    for name in names:
        if getattr(options, name) is None:
            object.__setattr__(options, name, NOT_GIVEN)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """Options of one table, where they differ from those of the run.

    If you do not give a field, or give None, the table keeps its own value from the run that goes
    on. Without such a value it goes by `Options`.
    """

    codec: str | Codec | NotGiven | None = NOT_GIVEN
    bits: int | Literal["auto"] | NotGiven | None = NOT_GIVEN
    slot_codec: str | Codec | NotGiven | None = NOT_GIVEN

    def __post_init__(self) -> None:
        unset_nones(self, ("codec", "bits", "slot_codec"))
        take_integers(self, "bits")
