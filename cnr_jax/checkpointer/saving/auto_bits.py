"""The width that `bits="auto"` comes to in each save, by the restores of its run so far."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping

from cnr_jax.options import Options
from cnr_jax.policy.bits import FALLBACK_BITS, small_tables
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
        self._options, self._tables = options, tables or Tables({})
        # By the codec that a policy names: it may be what makes widths follow the restores.
        self._follows: dict[str | None, bool] = {}
        self._small: dict[str | None, frozenset[str]] = {}
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

        Called on the process that plans: other processes are told, so that all encode alike.
        """
        bits = self.bits(plan.restores, plan.codec)
        if bits is None:
            return plan
        reason, usual = plan.reason, self._options.auto_bits(0)
        expected = self._options.assumed_restores
        times = "once" if plan.restores == 1 else f"{plan.restores} times"
        if bits != usual:
            reason += f"; {bits} bits: restored {times}, {expected:g} expected"
        if bits != self._said and bits != usual:
            _log.warning(
                "from step %d on saves take %d bits, not %d: the run was restored %s,"
                " expected_restores=%g",
                plan.step,
                bits,
                usual,
                times,
                expected,
            )
        elif bits != self._said:
            given = self._options.expected_restores is not None
            _log.info(
                "%ssaves take %d bits%s, for %s%g restores",
                "" if given else "bits='auto' without expected_restores: ",
                bits,
                _but_for(self._small_tables(plan), bits),
                "" if given else "up to ",
                expected,
            )
        self._said = bits
        return dataclasses.replace(plan, auto_bits=bits, reason=reason)

    def widths(self, plan: Plan) -> Mapping[str, int]:
        """The width of each table in a save, on every process."""
        if plan.auto_bits is None:
            return {}
        return widths_of(self._tables, self._small_tables(plan), plan.auto_bits)

    def _small_tables(self, plan: Plan) -> frozenset[str]:
        if plan.codec not in self._small:
            options = with_codec(self._options, plan.codec)
            self._small[plan.codec] = find_small(options, self._tables)
        return self._small[plan.codec]


def with_codec(options: Options, codec: str | None) -> Options:
    """Options of a save for which the policy names a codec; None: they stay."""
    return options if codec is None else dataclasses.replace(options, codec=codec)


def find_small(options: Options, tables: Tables) -> frozenset[str]:
    """Tables that have `FALLBACK_BITS` in all saves, among those whose width is "auto".

    The same on all processes: nothing but shapes of whole tables, without padding, is asked.

    Args:
        options: of the save.
        tables: all of the run.
    """
    elements: dict[str, int] = {}  # that a table and its slots store in "auto" bits
    for name, table in tables.items():
        for leaf in table.leaves:
            width = math.prod(leaf.shape[1:])
            if width and options.is_auto(name, leaf.name, width, leaf.dtype):
                elements[name] = elements.get(name, 0) + table.rows * width
    return small_tables(elements)


def widths_of(
    tables: Tables, small: frozenset[str], auto_bits: int | None
) -> Mapping[str, int]:
    """Bits of the codes of each table's leaves, where options leave them to the restores.

    Args:
        tables: all of the run.
        small: those of them that are; see `find_small`.
        auto_bits: of the others; None: no bits are "auto".
    """
    if auto_bits is None:
        return {}
    return {name: FALLBACK_BITS if name in small else auto_bits for name in tables}


def _but_for(small: frozenset[str], bits: int) -> str:
    """Such as ` (8 for 2 small tables: day, hour)`; empty where there is nothing to say."""
    if not small or bits == FALLBACK_BITS:
        return ""
    names = sorted(small)
    shown = ", ".join(names[:_NAMED_TABLES])
    if len(names) > _NAMED_TABLES:
        shown += f" and {len(names) - _NAMED_TABLES} more"
    plural = "" if len(names) == 1 else "s"
    return f" ({FALLBACK_BITS} for {len(names)} small table{plural}: {shown})"
