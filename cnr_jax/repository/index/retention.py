"""Keeping the parents of what is kept, and deleting all else children first.

Orbax's preservation policies look at one checkpoint at a time. The policy here wraps one of them
and keeps, beside what it keeps, all that these rest on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from cnr_jax.format.names import step_number
from cnr_jax.repository.index.entries import Entry, branch_of, order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.texts import logger

_log = logger(__name__)


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What becomes of the steps of a root.

    Attributes:
        reasons: why each step stays that does, by its number; all others go.
        wanted: steps that the rule itself keeps, of the run that it counts in.
        left: steps of the run that a rollback has left behind.
        spared: steps that stay only because folders that cannot be read may rest on them.
        crowded: whether the rule lets go of a step of the run. What its rollbacks have set aside
            counts as older than all its steps, and goes then.
        fulls: full checkpoints that what is wanted rests on, and those kept beside them.
    """

    reasons: Mapping[int, str]
    wanted: Set[int]
    left: Set[int]
    spared: Sequence[int]
    crowded: bool
    fulls: Sequence[int]


def kept_steps(
    ledger: Ledger,
    steps: Iterable[int],
    rule: Callable[[list[int]], Iterable[int]],
    *,
    min_fulls: int,
    because: str,
) -> Kept:
    """Which steps stay, and why.

    Args:
        ledger: of the root; its `run` is the one whose steps are counted and may go.
        steps: all that are there.
        rule: says of steps, oldest first, which to keep. It sees those alone that restore, and
            decides about what led to the newest step by that alone; to what rollbacks have left
            behind all of that is newer.
        min_fulls: full checkpoints of the newest branch that stay if anything does.
        because: why a step stays that the rule keeps.
    """
    known = {step: ledger.by_step(step) for step in steps}
    others = {e.step for e in ledger.committed() if not e.is_of(ledger.run)}
    lost, adopted = _lost(ledger), _not_replaced(ledger)
    left, branch = _parted(known, known.keys() - lost - others - adopted)
    led = [entry.step for entry in branch]
    wanted = set(rule(led))
    if left:
        wanted |= set(rule([*left, *led])).intersection(left)
    reasons = dict.fromkeys(others & known.keys(), "it is of another run")
    text = "no full checkpoint of this library takes its place yet"
    reasons |= dict.fromkeys(adopted & known.keys(), text)
    for step in (lost - others) & known.keys():
        reasons[step] = "it cannot be restored, and may be mended"
    reasons |= dict.fromkeys(sorted(wanted), because)
    _keep_parents(ledger, reasons)
    fulls = [entry.step for entry in branch if entry.stands_alone]
    held = [step for step in fulls if step in reasons]
    for step in reversed(fulls):
        if wanted and len(held) < min_fulls and step not in held:
            reasons[step] = f"{min_fulls} full checkpoints are to be kept"
            held.append(step)
    # What steps up to the newest unreadable one rest on is not known.
    newest = max(map(step_number, ledger.unknown), default=-1)
    spared = [s for s in sorted(known) if s <= newest and s not in reasons]
    text = f"folders up to {newest} cannot be read, and may rest on it"
    reasons |= dict.fromkeys(spared, text)
    _keep_parents(ledger, reasons)
    return Kept(
        reasons=reasons,
        wanted=wanted,
        left=set(left),
        spared=spared,
        crowded=not wanted.issuperset([*left, *led]) and not ledger.unknown,
        fulls=sorted(held),
    )


def _keep_parents(ledger: Ledger, reasons: dict[int, str]) -> None:
    """Adds what the steps that stay rest on."""
    walked = set[str]()
    for step in sorted(reasons, reverse=True):
        entry = ledger.by_step(step)
        along = ledger.along(entry) if entry is not None else ()
        for each, above in itertools.pairwise(along):
            if each.directory in walked:
                break
            walked.add(each.directory)
            reasons.setdefault(above.step, f"{each.step} rests on it")


def _parted(
    known: Mapping[int, Entry | None], steps: Set[int]
) -> tuple[list[int], list[Entry]]:
    """What rollbacks have left behind, and the newest branch, which may be being written.

    Apart, since no order of all suits every rule. In that of generations "the latest three" would
    let go of the step that the run went back to before what was left behind, which is newer. And
    one that keeps a step an hour takes no step that is older than one that it saw before.
    """
    entries = [entry for step in steps if (entry := known[step])]
    tip = max(entries, key=order, default=None)
    branch = branch_of(tip, entries) if tip else []
    led = {entry.step for entry in branch}
    left = sorted((e for e in entries if e.step not in led), key=order)
    unknown = sorted(step for step in steps if known[step] is None)
    return [*unknown, *(entry.step for entry in left)], branch


class ChainPreservation:
    """Keeps what an inner policy keeps, and every checkpoint those depend on.

    The inner policy sees checkpoints oldest first. It decides about those that led to the newest
    as if there were no others, and about those that rollbacks have left behind as if they were
    older than all of these. It does not see steps that cannot be restored, so that those do not
    take the place of others. Deltas without their parent are kept, in case it is brought back.
    While a step has no readable manifest, everything older is kept: it may depend on any of it.
    Steps of other runs than the one that saves are kept, and not shown to the inner policy either:
    a run that begins beside others replaces none of theirs. Steps of plain Orbax that were adopted
    are of the run that saves, but as long as it has no full checkpoint, they are kept like those
    of others.

    Args:
        inner: an Orbax preservation policy; None keeps everything.
        ledger: returns the current ledger, or None before the first save or restore.
        consulted: called each time the policy is asked; from then on deltas are safe.
        min_fulls: full checkpoints that stay if any step does.
    """

    def __init__(
        self,
        inner: Preserving | None,
        ledger: Callable[[], Ledger | None],
        consulted: Callable[[], None] = lambda: None,
        min_fulls: int = 1,
    ) -> None:
        self._inner, self._ledger, self._consulted = inner, ledger, consulted
        self._min_fulls = min_fulls
        # Folders that were blamed together: each save would name them again.
        self._blamed: set[frozenset[str]] = set()
        self._has_explained = False

    def should_preserve(
        self, checkpoints: Sequence[StepInfo], *, context: Any = None
    ) -> list[bool]:
        """Which of the checkpoints to keep, in the order given."""
        self._consulted()
        ledger, inner = self._ledger(), self._inner
        if ledger is None or inner is None:
            return [True] * len(checkpoints)
        infos = {info.step: info for info in checkpoints}

        def rule(steps: list[int]) -> Iterable[int]:
            shown = [infos[step] for step in steps]
            keeps = inner.should_preserve(shown, context=context)
            return [step for step, keep in zip(steps, keeps, strict=True) if keep]

        found = kept_steps(
            ledger,
            infos,
            rule,
            min_fulls=self._min_fulls,
            because="the policy keeps it",
        )
        if found.spared:
            self._say_what_is_spared(ledger, found.spared)
        dropped = [step for step in infos if step not in found.reasons]
        if dropped and not self._has_explained:
            self._has_explained = True
            _explain(found, dropped, self._min_fulls)
        # What is about to be deleted must not become a parent any more.
        for entry in [ledger.by_step(step) for step in dropped]:
            if entry is not None:
                ledger.doom(entry.directory)
        ledger.crowded = found.crowded
        return [info.step in found.reasons for info in checkpoints]

    def _say_what_is_spared(self, ledger: Ledger, spared: Sequence[int]) -> None:
        """Says that the disk fills, why, and what to do."""
        blamed = [name for name in ledger.unknown if step_number(name) >= spared[0]]
        if frozenset(blamed) in self._blamed:
            return
        self._blamed.add(frozenset(blamed))
        blamed.sort(key=step_number, reverse=True)
        shown = ", ".join(blamed[:5]) + (", ..." if len(blamed) > 5 else "")
        hint = (
            "move it out of the root, or give it a name that does not end in a digit"
            if all(ledger.folders[name].is_foreign for name in blamed)
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


def _explain(found: Kept, dropped: Sequence[int], min_fulls: int) -> None:
    """Says, when steps are first deleted, what is kept and what that is worth."""
    beside = sorted(found.reasons.keys() - found.wanted)
    text = f"the policy keeps {_listed(sorted(found.wanted))}"
    if beside:
        text += (
            f"; beside these stay {_listed(beside)}, mostly because others rest on them"
        )
    if len(found.wanted) > 1 and len(found.fulls) == 1:
        text += (
            f". All that is kept rests on step {found.fulls[0]}: with one damaged file of it no"
            " step restores. Options(min_fulls=2) keeps a second full checkpoint"
        )
    elif min_fulls > 1:
        text += f". Full ones among them are {_listed(found.fulls)}"
    _log.info(
        "retention deletes steps of this run from now on, first %s: %s",
        _listed(sorted(dropped)),
        text,
    )


def _listed(steps: Sequence[int]) -> str:
    """Some step numbers, at most five."""
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return (", ".join(map(str, steps[-5:])) or "none") + more


def _lost(ledger: Ledger) -> set[int]:
    """Steps that cannot be restored: without parent or manifest, or found damaged."""
    unreadable = {step_number(directory) for directory in ledger.folders}
    good = {entry.step for entry in ledger.restorable()}
    return {entry.step for entry in ledger.committed()} - good | unreadable


def _not_replaced(ledger: Ledger) -> set[int]:
    """Adopted steps, as long as all that was saved since may be lost with one save."""
    for entry in ledger.restorable():
        if entry.kind == "full" and entry.run == ledger.run:
            return set()
    return {entry.step for entry in ledger.committed() if entry.orbax}


def blockers(ledger: Ledger, directory: str) -> list[str]:
    """Step directories that keep one from being deleted, the newest first.

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
        for other in ledger.unknown
        if other != directory and step_number(other) > step
    ]
    found = {*known, *named, *unknown}
    return sorted(found, key=lambda name: (step_number(name), name), reverse=True)


def children_first(ledger: Ledger, directories: Iterable[str]) -> list[str]:
    """Step directories in an order in which none goes before one that depends on it.

    Unknown ones come first: they might depend on any other.
    """

    def depth(directory: str) -> tuple[float, str]:
        return ledger.depth(directory) or float("inf"), directory

    return sorted(directories, key=depth, reverse=True)
