"""The width that `bits="auto"` comes to in each save, by the restores of its run so far."""

from __future__ import annotations

import dataclasses
import logging

from cnr_jax.options import Options
from cnr_jax.policy.bits import ASSUMED_RESTORES
from cnr_jax.repository.planner import Plan

_log = logging.getLogger(__name__)


class Widening:
    """Puts the width into plans, and says in the log when it changes.

    Args:
        options: of the run.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._follows = options.follows_restores()
        self._said: int | None = None

    def bits(self, restores: int) -> int | None:
        """The width in saves after so many restores; None if it is "auto" nowhere."""
        return self._options.auto_bits(restores) if self._follows else None

    def widened(self, plan: Plan) -> Plan:
        """A plan with its width, and the reason where that is not the one for the expectation.

        Called on the process that plans: the others are told, so that all encode alike.
        """
        bits = self.bits(plan.restores)
        if bits is None:
            return plan
        reason, usual = plan.reason, self._options.auto_bits(0)
        if bits != usual:
            exceeded = (
                f"restored {_times(plan.restores)}, {self._expected():g} expected"
            )
            reason = f"{reason}; {bits} bits: {exceeded}"
        self._say(bits, usual, plan)
        return dataclasses.replace(plan, auto_bits=bits, reason=reason)

    def _expected(self) -> float:
        expected = self._options.expected_restores
        return ASSUMED_RESTORES if expected is None else expected

    def _say(self, bits: int, usual: int, plan: Plan) -> None:
        if bits == self._said:
            return
        self._said = bits
        if bits != usual:
            _log.warning(
                "from step %d on saves take %d bits, not %d: the run was restored %s,"
                " expected_restores=%g",
                plan.step,
                bits,
                usual,
                _times(plan.restores),
                self._expected(),
            )
        elif self._options.expected_restores is None:
            _log.info(
                "bits='auto' without expected_restores: saves take %d bits, for up to %d"
                " restores",
                bits,
                ASSUMED_RESTORES,
            )
        else:
            _log.info("saves take %d bits, for %g restores", bits, self._expected())


def _times(restores: int) -> str:
    return "once" if restores == 1 else f"{restores} times"
