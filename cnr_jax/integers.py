"""Integers as programs give them: Python's, those of numpy and jax, arrays without axes.

Every function that takes an integer converts it here, and goes on with Python's own: the others
overflow, compare in 32 bits and are no JSON.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from cnr_jax.errors import OptionError

# The largest count, size, offset or step on disk. Python reads integers of any size and adds them
# up, but cannot index arrays by them, nor make texts of them.
LARGEST = 2**63 - 1
NOT_IN_JIT = "  hint: call save after the train step, outside of jax.jit"


def integer(value: Any) -> int | None:
    """Returns a value as Python's integer; None if it is none, as are truth values and 3.0.

    Example:
        >>> import numpy as np
        >>> [integer(value) for value in (3, np.uint8(3), np.array(3), 3.0, True, "3")]
        [3, 3, 3, None, None, None]
    """
    if isinstance(value, bool):
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def take_integers(owner: Any, *fields: str) -> None:
    """Replaces integers in fields of a frozen dataclass by Python's own."""
    for field in fields:
        found = integer(getattr(owner, field))
        if found is not None:
            object.__setattr__(owner, field, found)


def step_or_newest(step: Any, hint: str = "") -> int | None:
    """Returns a step as `checked_step` does, or None for the newest."""
    return None if step is None else checked_step(step, hint)


def checked_step(step: Any, hint: str = "") -> int:
    """Returns a step as Python's own integer.

    Args:
        step: step, as a user gave it.
        hint: hint of the error, if it is something else.

    Raises:
        OptionError: if it is not an integer, or out of range.
    """
    found = integer(step)
    if found is not None and 0 <= found <= LARGEST:
        return found
    if found is None:
        # By its name, as jax is not imported here: roots are read without it.
        if "Tracer" in type(step).__name__:
            raise OptionError(f"a step is an integer, got a tracer\n{NOT_IN_JIT}")
        fact = f"a step is an integer, got {reprlib.repr(step)}"
    else:
        # Python makes no text of integers of thousands of digits.
        got = f"{found}" if found.bit_length() < 1000 else f"{found:#x}"[:40] + "..."
        fact = f"a step is at most 2**63 - 1, as it is stored in 64 bits; got {got}"
        if found < 0:
            fact = f"a step is at least 0, got {got}"
    raise OptionError(fact + (hint and f"\n  hint: {hint}"))
