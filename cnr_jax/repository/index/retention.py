"""Retention: keeps the parents of the steps that are kept, and deletes others children first.

Orbax's preservation policies look at one checkpoint at a time. The policy here wraps one of them,
and also keeps all checkpoints that those it keeps rest on.
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
    """Information about a checkpoint that Orbax gives a policy."""

    @property
    def step(self) -> int:
        """Step number of the checkpoint."""
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
    """Decision about which steps of a root stay.

    Attributes:
        reasons: why a step stays, by its number; all other steps go.
        wanted: steps that the rule itself keeps, all of the run that it counts in.
        left: steps of the run that a rollback has left behind.
        spared: steps that stay only because unreadable folders may rest on them.
        crowded: whether the rule lets go of a step of the run. The steps that its rollbacks have
            set aside count as older than all others, and go then.
        fulls: full checkpoints that the wanted steps rest on, and those kept beside them.
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
    """Decides which steps stay, and why.

    Args:
        ledger: ledger of the root. Only steps of its `run` are counted, and may go.
        steps: numbers of all steps of the root.
        rule: picks from steps, oldest first, those to keep. It sees only steps that restore. It
            decides about the newest branch as if there were no other, and about what rollbacks
            have left behind as if that were older than the branch.
        min_fulls: number of full checkpoints of the newest branch that stay if any step does.
        because: reason for the steps that the rule keeps.
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
    # Unreadable folders may rest on any step that is not newer than themselves.
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
    """Adds the steps that those in `reasons` rest on."""
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
    """Parts steps into those that rollbacks have left behind, and those of the newest branch.

    The two are kept apart, since no common order suits every rule. In order of generations, "the
    latest three" would let go of the step that the run went back to before the steps that were
    left behind after it. And a rule that keeps a step an hour takes none older than one it saw.
    """
    entries = [entry for step in steps if (entry := known[step])]
    tip = max(entries, key=order, default=None)
    branch = branch_of(tip, entries) if tip else []
    led = {entry.step for entry in branch}
    left = sorted((e for e in entries if e.step not in led), key=order)
    unknown = sorted(step for step in steps if known[step] is None)
    return [*unknown, *(entry.step for entry in left)], branch


class ChainPreservation:
    """Preservation policy that keeps what an inner policy keeps, and all that this depends on.

    The inner policy sees checkpoints oldest first. It decides about those that led to the newest
    as if there were no others, and about those that rollbacks have left behind as if they were
    older than all of these. It does not see steps that cannot be restored, so that these do not
    take the place of others. Deltas without their parent are kept, in case it is brought back.
    While a step has no readable manifest, everything older is kept, since it may depend on any of
    it. Steps of other runs than the one that saves are kept too, and the inner policy does not see
    them: a run that begins beside others replaces no steps of theirs. Adopted steps of plain Orbax
    belong to the run that saves. As long as that has no full checkpoint, they are kept like steps
    of other runs.

    Args:
        inner: Orbax preservation policy; None keeps everything.
        ledger: returns the current ledger, or None before the first save or restore.
        consulted: called each time the policy is asked; from then on deltas are safe.
        min_fulls: number of full checkpoints that stay if any step does.
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
        # Folders that the log has blamed together, so that not each save names them again.
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
        # A step that is about to be deleted must not become a parent any more.
        for entry in [ledger.by_step(step) for step in dropped]:
            if entry is not None:
                ledger.doom(entry.directory)
        ledger.crowded = found.crowded
        return [info.step in found.reasons for info in checkpoints]

    def _say_what_is_spared(self, ledger: Ledger, spared: Sequence[int]) -> None:
        """Warns that the disk fills up, and says why, and what to do."""
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
    """Logs, when steps are first deleted, which steps stay, and what they rest on."""
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
    """Text of at most five step numbers, and of how many more there are."""
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return (", ".join(map(str, steps[-5:])) or "none") + more


def _lost(ledger: Ledger) -> set[int]:
    """Numbers of steps that cannot be restored: without parent or manifest, or damaged."""
    unreadable = {step_number(directory) for directory in ledger.folders}
    good = {entry.step for entry in ledger.restorable()}
    return {entry.step for entry in ledger.committed()} - good | unreadable


def _not_replaced(ledger: Ledger) -> set[int]:
    """Adopted steps, as long as the run that saves has no full checkpoint that restores."""
    for entry in ledger.restorable():
        if entry.kind == "full" and entry.run == ledger.run:
            return set()
    return {entry.step for entry in ledger.committed() if entry.orbax}


def blockers(ledger: Ledger, directory: str) -> list[str]:
    """Step directories that keep one from being deleted, the newest first.

    These are all that depend on it, even if they cannot be restored for another reason, and newer
    unreadable ones, which may depend on it.
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
    """Step directories in an order in which each comes after all that depend on it.

    Unreadable ones come first, since they might depend on any other.
    """

    def depth(directory: str) -> tuple[float, str]:
        return ledger.depth(directory) or float("inf"), directory

    return sorted(directories, key=depth, reverse=True)
