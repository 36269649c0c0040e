"""What children do, by name."""

from __future__ import annotations

from collections.abc import Callable

import crafted
import damages
import failing
import mistakes
import once
import scenarios

OTHERS: dict[str, Callable[..., None]] = {
    crafted.NAME: crafted.act,
    "damage": damages.act,
    "failing save": failing.act,
    once.NAME: once.act,
    "one of two": mistakes.one_of_two,
    "two managers": mistakes.two_in_turns,
    "wrong clock": mistakes.under_wrong_clock,
}


def find(name: str) -> Callable[..., None]:
    """An act of a scenario, or one of another case."""
    return OTHERS[name] if name in OTHERS else scenarios.BY_NAME[name].act
