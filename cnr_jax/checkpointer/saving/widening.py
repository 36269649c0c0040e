"""Encoding and widths of the next save: what options give, what a run brings, how many bits.

Process 0 puts them into each plan, so that all processes encode alike.
"""

from __future__ import annotations

import dataclasses
import logging
import math

import jax

from cnr_jax.encoding import Encoding
from cnr_jax.format.encodings import EncodingEntry
from cnr_jax.format.manifest import SampledMotion
from cnr_jax.options import Options
from cnr_jax.policy.bits import (
    FALLBACK_BITS,
    RAW_BITS,
    bits_for_motion,
    is_harmful,
    noise_of,
    small_tables,
    width_told,
    widths_of,
)
from cnr_jax.repository.index.entries import Branch
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.rows.codecs import bytes_of
from cnr_jax.rows.codecs.dither import Dither
from cnr_jax.state.table import Tables
from cnr_jax.texts import logger

_log = logger(__name__)
_NAMED_TABLES = 12  # arbitrary: enough to see what kind of tables they are


class Widening:
    """Knows how rows are stored: as options give it, else as in the run that goes on.

    It puts the width of codes into plans. It logs when the width changes, and how many bytes an
    exact save takes.

    Args:
        options: options of the run.
        tables: tables of the run; None: nothing is saved.

    Attributes:
        encoding: encoding of the next save, unless its policy names the codec, or it is exact.
        follows: whether widths depend on the restores, unless a policy names the codec.
    """

    def __init__(self, options: Options, tables: Tables | None) -> None:
        self._given, self._tables = options.encoding, tables or Tables({})
        # Encoding of the run that goes on, and the one that was last logged.
        self._stored: EncodingEntry | None = None
        self._last_said: EncodingEntry | None = None
        self._said: int | None = None
        self._has_warned = False
        self._use(self._given)

    def _use(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.follows = encoding.follows_restores()
        # By the codec that a policy names, as that may make widths follow the restores.
        self._follows: dict[str | None, bool] = {}
        self._small: dict[str | None, frozenset[str]] = {}
        self._fixed: dict[str | None, int] = {}

    def inherit(self, stored: EncodingEntry | None) -> None:
        """Takes over the encoding of a run where options do not give it; None: no run goes on.

        Raises:
            OptionError: if that encoding does not go together with what options give.
        """
        if stored != self._stored:
            given = self._given
            self._use(given.inheriting(stored, self._tables) if stored else given)
            self._stored = stored

    def say_inherited(self, where: str) -> None:
        """Logs, once, which options are as in the run that goes on, and which differ from it."""
        stored = self._stored
        if stored is None or stored == self._last_said:
            return
        self._last_said, found = stored, self.encoding
        lines = {
            "options that were not given are as": found.told(found.inherited),
            "options were given otherwise than": found.differing(stored),
        }
        for line, told in lines.items():
            text = ", ".join(told)
            if text and jax.process_index() == 0:
                _log.info("%s %s: %s", line, where, text)

    def encoding_of(self, plan: SavePlan) -> Encoding:
        """Encoding of one save: with the codec that its policy names, or exact."""
        if plan.exact:
            return self.encoding.exact()
        return self.encoding.with_codec(plan.codec)

    def dither_of(self, plan: SavePlan) -> Dither:
        """Which codes are dithered in one save, and how.

        Codes of one width are dithered alike in all saves of a lineage, so that rows that do not
        change keep their codes.
        """
        return Dither(plan.lineage, plan.dithered_bits)

    def dithered_bits(self, restores: int, before: SampledMotion | None) -> int:
        """Bits of the widest codes that are dithered after a number of restores; 0: none are.

        Args:
            restores: number of restores of the run.
            before: motion of its rows from the restore before the last to the last one; None: not
                known.
        """
        return self.encoding.dithered_bits(restores, before and before.even_bits)

    def bits(
        self,
        restores: int,
        motion: SampledMotion | None = None,
        codec: str | None = None,
    ) -> int | None:
        """Width of codes after a number of restores; None if no width is "auto".

        Args:
            restores: number of restores of the run.
            motion: motion of its rows from restore to restore; None: not known.
            codec: codec that the policy names; None: it names none.

        Raises:
            OptionError: if there is no such codec, or it leaves "auto" nothing to choose.
        """
        if codec not in self._follows:
            named = self.encoding.with_codec(codec)
            self._follows[codec] = named.follows_restores()
        even_bits = motion.even_bits if motion else None
        return (
            self.encoding.auto_bits(restores, even_bits)
            if self._follows[codec]
            else None
        )

    def widened(self, plan: SavePlan, branch: Branch) -> SavePlan:
        """Adds to a plan its widths, and why they are not those for the expected restores.

        Called on the process that plans. The other processes take the widths from the plan, so that
        all encode alike.

        Args:
            plan: plan without widths.
            branch: branch of the plan, which knows how far rows move from restore to restore.
        """
        motion = branch.motion()
        dithered = self.dithered_bits(plan.restores, branch.motion_before)
        plan = dataclasses.replace(plan, dithered_bits=dithered)
        if plan.exact:
            self._say_bytes(plan, motion)
            return plan
        bits = self.bits(plan.restores, motion, plan.codec)
        self._warn_of_harm(plan, motion)
        if bits is None:
            return plan
        reason, usual = plan.reason, self.encoding.auto_bits(0)
        expected = self.encoding.assumed_restores
        width = width_told(bits)
        if bits != usual:
            why = self._why_wider(plan, motion, bits)
            reason += f"; {width}: {why}, {expected:g} expected"
            if bits != self._said:
                # Only the restore that exceeds the expectation is worth a warning.
                usual_before = self.encoding.auto_bits(max(0, plan.restores - 1))
                is_news = self.encoding.auto_bits(plan.restores) != usual_before
                _log.log(
                    logging.WARNING if is_news else logging.INFO,
                    "from step %d on saves take %s, not %d: %s, expected_restores=%g",
                    plan.step,
                    width,
                    usual,
                    f"the run was {why}" if plan.restores else why,
                    expected,
                )
        elif bits != self._said:
            given = self.encoding.expects
            _log.info(
                "%ssaves take %d bits%s, for %s%g restores",
                "" if given else "bits='auto' without expected_restores: ",
                bits,
                _but_for(self._small_tables(plan.codec), bits),
                "" if given else "up to ",
                expected,
            )
        self._said = bits
        return dataclasses.replace(plan, auto_bits=bits, reason=reason)

    def _why_wider(
        self, plan: SavePlan, motion: SampledMotion | None, bits: int
    ) -> str:
        """Text on why a save takes more bits than those for the expected restores."""
        usual = self.encoding.auto_bits(0)
        if motion is None or bits == self.encoding.auto_bits(plan.restores):
            return f"restored {_times(plan.restores)}"
        moved = _moved_by(motion, usual)
        if not plan.restores:
            return f"since the first save {moved}"
        when = "before or since" if plan.restores == 1 else "between restores"
        return f"restored {_times(plan.restores)}, {when} {moved}"

    def _warn_of_harm(self, plan: SavePlan, motion: SampledMotion | None) -> None:
        """Warns, once, of codes that are too short for how little rows move between restores."""
        # After one restore it is not known how soon others come.
        if self._has_warned or motion is None or plan.restores < 2:
            return
        bits = self._fewest_fixed_bits(plan.codec)
        if is_harmful(motion.even_bits, bits):
            self._has_warned = True
            _log.warning(
                "rounding to %d bits may harm this training: the run was restored"
                " %s, between restores %s. Options(bits='auto') takes as many bits as that"
                " needs, %s would do now; cnr_jax.try_bits tells more",
                bits,
                _times(plan.restores),
                _moved_by(motion, bits),
                f"bits={FALLBACK_BITS}"
                if bits_for_motion(motion.even_bits) <= FALLBACK_BITS
                else "codec='raw'",
            )

    def _fewest_fixed_bits(self, codec: str | None) -> int:
        """Least width among tables whose width is not "auto"; `RAW_BITS` if none is rounded.

        Args:
            codec: codec that the policy names; None: it names none.
        """
        if codec not in self._fixed:
            named = self.encoding.with_codec(codec)
            bits = RAW_BITS
            for name, table in self._tables.items():
                args = name, "table", math.prod(table.leaf.shape[1:]), table.leaf.dtype
                if not named.is_auto(*args):
                    bits = min(bits, getattr(named.codec_for(*args), "bits", RAW_BITS))
            self._fixed[codec] = bits
        return self._fixed[codec]

    def _say_bytes(self, plan: SavePlan, motion: SampledMotion | None) -> None:
        """Logs how many bytes the rows of an exact full checkpoint take."""
        if plan.parent is not None:
            return
        tables = self._tables.values()
        exact = sum(leaf.nbytes for table in tables for leaf in table.leaves)
        usual = self.stored_bytes(self.bits(plan.restores, motion))
        _log.info(
            "step %d is saved exactly: rows of tables and slots take %s bytes, with the codecs"
            " of the run %s",
            plan.step,
            f"{exact:,}",
            f"{usual:,}",
        )

    def stored_bytes(self, auto_bits: int | None = None) -> int:
        """Bytes of all rows of tables and slots, as their codecs store them.

        Args:
            auto_bits: width in tables at "auto" that are not small; None: that of the expected
                restores.
        """
        found, widths = 0, self.widths(auto_bits)
        for name, table in self._tables.items():
            for leaf in table.leaves:
                width, bits = math.prod(leaf.shape[1:]), widths.get(name)
                codec = self.encoding.codec_for(
                    name, leaf.name, width, leaf.dtype, bits
                )
                found += leaf.shape[0] * bytes_of(codec.parts(width, leaf.dtype))
        return found

    def widths(self, auto_bits: int | None, codec: str | None = None) -> dict[str, int]:
        """Bits of the codes of each table's leaves, where options leave them to the restores.

        Args:
            auto_bits: width in tables that are not small; None: no width is "auto".
            codec: codec that the policy names; None: it names none.
        """
        if auto_bits is None:
            return {}
        return widths_of(self._tables, self._small_tables(codec), auto_bits)

    def _small_tables(self, codec: str | None) -> frozenset[str]:
        """Tables that have `FALLBACK_BITS` in all saves, among those whose width is "auto".

        They are the same on all processes, as they depend only on the shapes of whole tables,
        without padding.
        """
        if codec not in self._small:
            named = self.encoding.with_codec(codec)
            # Number of elements that a table and its slots store in "auto" bits.
            elements: dict[str, int] = {}
            for name, table in self._tables.items():
                for leaf in table.leaves:
                    width = math.prod(leaf.shape[1:])
                    if width and named.is_auto(name, leaf.name, width, leaf.dtype):
                        elements[name] = elements.get(name, 0) + table.rows * width
            self._small[codec] = small_tables(elements)
        return self._small[codec]


def _times(restores: int) -> str:
    return "once" if restores == 1 else f"{restores} times"


def _moved_by(motion: SampledMotion, bits: int) -> str:
    """Text such as `rows moved 0.62 times the rounding error of 4 bits`."""
    times = noise_of(bits, motion.even_bits) ** -0.5
    return f"rows moved {times:.2g} times the rounding error of {bits} bits"


def _but_for(small: frozenset[str], bits: int) -> str:
    """Text such as ` (8 for 2 small tables: day, hour)`; empty if there is nothing to say."""
    if not small or bits >= FALLBACK_BITS:
        return ""
    names = sorted(small)
    shown = ", ".join(names[:_NAMED_TABLES])
    if len(names) > _NAMED_TABLES:
        shown += f" and {len(names) - _NAMED_TABLES} more"
    plural = "" if len(names) == 1 else "s"
    return f" ({FALLBACK_BITS} for {len(names)} small table{plural}: {shown})"
