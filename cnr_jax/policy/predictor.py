"""The history predictor: when does a new baseline pay for itself?

The arithmetic only; `baseline.Intermittent` applies it to a history. A *cycle* is one
full checkpoint and the deltas written since, each against that full. The invariant to
remember: integers in, exact comparison out, so no two processes can round to different
answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cnr_jax.errors import OptionError


class CycleCosts(NamedTuple):
    """What the next i + 1 saves cost, for each of the two choices after i deltas.

    Both are in the unit of the sizes they were computed from (bytes, or fulls).
    """

    full_now: float  # F_c: the last cycle once more, one full and i deltas
    keep_going: float  # I_c: i + 1 deltas, each at least as large as the last


def cycle_costs(sizes: Sequence[float], *, full_size: float = 1) -> CycleCosts:
    """Returns what a new full checkpoint now, and none, would cost over a cycle.

    If history repeats itself, a full one now is followed by the deltas of the last
    cycle: `F_c = full_size + S_1 + ... + S_i` for i + 1 saves. Without it deltas
    against the same baseline only grow, so i + 1 saves cost at least
    `I_c = (i + 1) * S_i`.

    Args:
        sizes: sizes S_1 ... S_i of the deltas since the latest full one, oldest first.
            As fractions of the full one, or in bytes together with `full_size`.
        full_size: size of the full checkpoint, in the unit of `sizes`.

    Returns:
        `F_c` and `I_c`. Without a delta there is nothing to go by: `I_c` is 0.

    Raises:
        OptionError: if a size is negative or not finite.

    Example:
        >>> cycle_costs([250, 500, 750], full_size=1000)
        CycleCosts(full_now=2500, keep_going=3000)

    Source: Check-N-Run (NSDI'22), intermittent differential checkpoints.
    """
    for size in (full_size, *sizes):
        if not 0 <= size < math.inf:  # False for nan too
            raise OptionError(
                "a checkpoint's size cannot be used by the predictor\n"
                f"  expected a finite number of 0 or more, got {size!r}"
            )
    if not sizes:
        return CycleCosts(full_now=full_size, keep_going=0)
    return CycleCosts(
        full_now=sum(sizes, full_size), keep_going=(len(sizes) + 1) * sizes[-1]
    )


def should_take_full(sizes: Sequence[float], *, full_size: float = 1) -> bool:
    """Returns whether the next checkpoint should be full: `F_c <= I_c`.

    Divided by i + 1: a new baseline is due as soon as the latest delta costs as much as
    the average save of its cycle. Deltas that stay flat below the full size never make
    it due. What every save writes alike (dense parameters) adds the same to both sides,
    so sizes may contain it or not.

    Differs from Check-N-Run in: 1. sizes may be bytes (payload, row ids and metadata at
    the width in force) where the paper has fractions of rows; the rule is the same.

    Args:
        sizes: as in `cycle_costs`.
        full_size: size of the full checkpoint, in the unit of `sizes`.

    Returns:
        True if a full checkpoint is due; False without any delta.

    Raises:
        OptionError: if a size is negative or not finite.

    Example:
        >>> should_take_full([0.26, 0.32]), should_take_full([0.25, 0.5, 0.75])
        (False, True)

    Source: Check-N-Run (NSDI'22), intermittent differential checkpoints.
    """
    costs = cycle_costs(sizes, full_size=full_size)
    return bool(sizes) and costs.full_now <= costs.keep_going
