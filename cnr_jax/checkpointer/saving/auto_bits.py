"""The width that `bits="auto"` comes to in each save, by the restores of its run so far."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from cnr_jax.checkpointer.saving.widths import find_small, widths_of, with_codec
from cnr_jax.options import Options
from cnr_jax.policy.bits import ASSUMED_RESTORES, FALLBACK_BITS
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.state.table import Tables

_log = logging.getLogger(__name__)

_NAMED_TABLES = 12  # arbitrary: enough to see what kind of tables they are


class Widening:
    """Puts the width into plans, and says in the log when it changes.

    Args:
        options: of the run.
        tables: of the run; None: nothing is saved.
    """

    def __init__(self, options: Options, tables: Tables | None) -> None:
        self._options, self._tables = options, tables
        # By the codec that a policy names: it may be what makes widths follow the restores.
        self._follows: dict[str | None, bool] = {}
        self._found: dict[str | None, frozenset[str]] = {}
        self._said: int | None = None

    def bits(self, restores: int, codec: str | None = None) -> int | None:
        """The width in saves after so many restores; None if it is "auto" nowhere.

        Args:
            restores: of the run.
            codec: that the policy names, if it does.

        Raises:
            OptionError: if there is no such codec, or it leaves "auto" nothing to choose.
        """
        if codec not in self._follows:
            options = with_codec(self._options, codec)
            self._follows[codec] = options.follows_restores()
        return self._options.auto_bits(restores) if self._follows[codec] else None

    def widened(self, plan: Plan) -> Plan:
        """A plan with its width, and the reason where that is not the one for the expectation.

        Called on the process that plans: the others are told, so that all encode alike.
        """
        bits = self.bits(plan.restores, plan.codec)
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

    def widths(self, plan: Plan) -> Mapping[str, int]:
        """The width of each table in a save, on every process."""
        if plan.auto_bits is None:
            return {}
        assert self._tables is not None
        return widths_of(self._tables, self._small(plan), plan.auto_bits)

    def _small(self, plan: Plan) -> frozenset[str]:
        if plan.codec not in self._found:
            assert self._tables is not None
            options = with_codec(self._options, plan.codec)
            self._found[plan.codec] = find_small(options, self._tables)
        return self._found[plan.codec]

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
                "bits='auto' without expected_restores: saves take %d bits%s, for up to %d"
                " restores",
                bits,
                _but_for(self._small(plan), bits),
                ASSUMED_RESTORES,
            )
        else:
            _log.info(
                "saves take %d bits%s, for %g restores",
                bits,
                _but_for(self._small(plan), bits),
                self._expected(),
            )


def _but_for(small: frozenset[str], bits: int) -> str:
    """Such as ` (8 for 2 small tables: day, hour)`; empty where there is nothing to say."""
    if not small or bits == FALLBACK_BITS:
        return ""
    names = sorted(small)
    left_out = len(names) - _NAMED_TABLES
    shown = ", ".join(names[:_NAMED_TABLES]) + (
        f" and {left_out} more" if left_out > 0 else ""
    )
    plural = "" if len(names) == 1 else "s"
    return f" ({FALLBACK_BITS} for {len(names)} small table{plural}: {shown})"


def _times(restores: int) -> str:
    return "once" if restores == 1 else f"{restores} times"
