"""Keeping the parents of what is kept, and deleting all else children first.

Orbax's preservation policies look at one checkpoint at a time. The policy here wraps one of them
and keeps, beside what it keeps, all that these rest on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from cnr_jax.format.names import step_number
from cnr_jax.repository.lineage.ledger import Ledger

_log = logging.getLogger(__name__)


class StepInfo(Protocol):
    """What Orbax tells a policy about a checkpoint."""

    @property
    def step(self) -> int:
        """Its step."""
        ...


class Preserving(Protocol):
    """An Orbax preservation policy."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Which of the checkpoints to keep."""
        ...


class ChainPreservation:
    """Keeps what an inner policy keeps, and every checkpoint those depend on.

    The inner policy sees checkpoints oldest first in the order of generations, so that "the
    latest three" are those of the current branch; it does not see steps that cannot be restored,
    so that those do not take the place of others. Deltas without their parent are kept, in case
    it is brought back. While a step has no readable manifest, everything older is kept: it may
    depend on any of it. Steps of other runs than the one that saves are kept, and not shown to
    the inner policy either: a run that begins beside others replaces none of theirs. Steps of
    plain Orbax that were adopted are of the run that saves, but as long as it has no full
    checkpoint, they are kept like those of others.

    Args:
        inner: an Orbax preservation policy; None keeps everything.
        ledger: returns the current ledger, or None before the first save or restore.
        consulted: called each time the policy is asked; from then on deltas are safe.
    """

    def __init__(
        self,
        inner: Preserving | None,
        ledger: Callable[[], Ledger | None],
        consulted: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner, self._ledger, self._consulted = inner, ledger, consulted
        # Folders that were blamed together: each save would name them again.
        self._told: set[frozenset[str]] = set()

    def should_preserve(
        self, checkpoints: Sequence[StepInfo], *, context: Any = None
    ) -> list[bool]:
        """Which of the checkpoints to keep, in the order given."""
        self._consulted()
        ledger = self._ledger()
        if ledger is None or self._inner is None:
            return [True] * len(checkpoints)
        others = {e.step for e in ledger.committed() if not e.is_of(ledger.run)}
        lost = _lost(ledger) | others | _not_replaced(ledger)
        known = {info.step: ledger.by_step(info.step) for info in checkpoints}
        ordered = sorted(
            (info for info in checkpoints if info.step not in lost),
            key=lambda info: e.order if (e := known[info.step]) else (0, info.step),
        )
        kept = self._inner.should_preserve(ordered, context=context)
        wanted = {i.step for i, keep in zip(ordered, kept, strict=True) if keep}
        all_steps = [info.step for info in checkpoints]
        steps = _with_parents(ledger, wanted | lost)
        # What steps up to the newest unreadable one rest on is not known.
        newest = max(map(step_number, ledger.unreadable), default=-1)
        unsafe = {step for step in all_steps if step <= newest}
        if not unsafe <= steps:
            self._say_what_is_spared(ledger, sorted(unsafe - steps))
            steps = _with_parents(ledger, steps | unsafe)
        # What is about to be deleted must not become a parent any more.
        for step, entry in known.items():
            if step not in steps and entry is not None:
                ledger.doom(entry.directory)
        return [step in steps for step in all_steps]

    def _say_what_is_spared(self, ledger: Ledger, spared: Sequence[int]) -> None:
        """Says that the disk fills, why, and what to do."""
        blamed = [name for name in ledger.unreadable if step_number(name) >= spared[0]]
        if frozenset(blamed) in self._told:
            return
        self._told.add(frozenset(blamed))
        blamed.sort(key=step_number, reverse=True)
        shown = ", ".join(blamed[:5]) + (", ..." if len(blamed) > 5 else "")
        hint = (
            "move it out of the root, or give it a name that does not end in a digit"
            if ledger.foreign.issuperset(blamed)
            else "cnr_jax.verify says what is wrong there; move it out of the root or mend it"
        )
        _log.warning(
            "retention deletes none of %d steps, %d to %d, that are not to be kept: newer folders"
            " have no manifest that can be read, and may rest on them: %s; %s",
            len(spared),
            spared[0],
            spared[-1],
            shown,
            hint,
        )


def _with_parents(ledger: Ledger, steps: set[int]) -> set[int]:
    """Steps, and all that they rest on."""
    found = (ledger.by_step(step) for step in steps)
    closure = ledger.closure(entry.directory for entry in found if entry)
    return {e.step for d, e in ledger.entries.items() if d in closure} | steps


def _lost(ledger: Ledger) -> set[int]:
    """Steps that cannot be restored: without parent or manifest, or found damaged."""
    unreadable = {step_number(directory) for directory in ledger.unreadable}
    good = {entry.step for entry in ledger.restorable()}
    return {entry.step for entry in ledger.committed()} - good | unreadable


def _not_replaced(ledger: Ledger) -> set[int]:
    """Adopted steps, as long as all that was saved since may be lost with one save."""
    for entry in ledger.restorable():
        if entry.kind == "full" and entry.run == ledger.run:
            return set()
    return {entry.step for entry in ledger.committed() if entry.orbax}


def blockers(ledger: Ledger, directory: str) -> list[str]:
    """Step directories because of which one must not be deleted, the newest first.

    These are all that depend on it, also those that cannot be restored for another reason, and
    those of which that is not known.
    """
    known = [entry.directory for entry in ledger.dependents(directory)]
    named = [
        entry.directory
        for entry in ledger.entries.values()
        if entry.parent is not None and entry.parent.directory == directory
    ]
    step = step_number(directory)
    unknown = [
        other
        for other in ledger.unreadable
        if other != directory and step_number(other) > step
    ]
    found = {*known, *named, *unknown}
    return sorted(found, key=lambda name: (step_number(name), name), reverse=True)


def children_first(ledger: Ledger, directories: Iterable[str]) -> list[str]:
    """Step directories in an order in which none goes before one that depends on it.

    Those of which nothing is known come first: they might depend on any other.
    """

    def depth(directory: str) -> tuple[float, str]:
        return ledger.depth(directory) or float("inf"), directory

    return sorted(directories, key=depth, reverse=True)
