"""Baseline policies: full or delta, and against which parent.

Here are the record that a policy sees, the decision that it returns, and the policies that
need no forecast; `intermittent.py` has the default. The caller checks whether the parent is
legal (lineage, generation), and saves full if it is not. The invariant to remember: a full
save is always safe, so the decision is full whenever a history says too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, get_args

from cnr_jax.errors import OptionError
from cnr_jax.integers import integer, take_integers
from cnr_jax.texts import count_of

Kind = Literal["full", "delta"]
"""What a checkpoint holds: everything, or the rows that its parent does not have."""

NO_BASELINE = "no baseline yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRecord:
    """Record of one committed save, as policies see it.

    Attributes:
        step: number of the step.
        kind: `"full"` or `"delta"`.
        bytes: bytes written, over all processes.
        rows: rows written, over all tables and processes.
        secs: seconds from the start of the save until all its files were written, on all processes;
            the wait for the save before does not count.
        depth: number of checkpoints that a restore of the step reads, itself included; None: not
            known, because the step cannot be restored any more.
        restore_bytes: bytes that such a restore reads: rows of all these checkpoints, and dense
            leaves of the step itself; None as for `depth`.

    Example:
        >>> SaveRecord(step=100, kind="full", bytes=4096, rows=64, secs=0.5).kind
        'full'
    """

    step: int
    kind: Kind
    bytes: int
    rows: int
    secs: float
    depth: int | None = None
    restore_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision on the next save: full or delta, and on which parent.

    Attributes:
        kind: `"full"` or `"delta"`.
        parent: number of the step that a delta rests on; None for a full save.
        codec: name of the row codec to use in place of the configured one, or None.
        reason: why, in a few words, for logs and reports.
        merge: whether to merge the chain of this save, once it is committed, into a baseline. That
            takes place in the background, and a later delta that brings the baseline along is full.

    Raises:
        OptionError: if a delta has no parent, a full save has one or is to be merged, or `kind` is
            neither.

    Example:
        >>> Decision(kind="delta", parent=100, reason="rows since step 100").parent
        100
    """

    kind: Kind
    parent: int | None
    codec: str | None = None
    reason: str
    merge: bool = False

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        take_integers(self, "parent")
        if (self.kind == "delta") != (self.parent is not None):
            wanted = "the step of a parent" if self.kind == "delta" else "parent None"
            raise OptionError(
                "a decision's kind and parent do not go together\n"
                f"  {self.kind}: expected {wanted}, got parent {self.parent!r}"
            )
        if self.merge and self.kind == "full":
            raise OptionError("a full save has no chain to merge: got merge=True")


class Policy(Protocol):
    """Policy that decides what the next save writes.

    `decide` must be a pure function of its argument. It runs on process 0, which decides for all
    processes of a run.
    """

    name: ClassVar[str]
    """Short name for logs and reports."""

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns what to write next.

        Args:
            history: committed saves of the current branch from its latest full one on,
                oldest first. Empty if there is none. If there are very many, older
                neighbours share one record: it has the mean of their figures, and all
                else from the last of them.
        """
        ...


def since_baseline(history: Sequence[SaveRecord]) -> tuple[SaveRecord, ...]:
    """Returns the latest full save of a history and the deltas after it, oldest first.

    Args:
        history: committed saves, oldest first; may reach back past the latest full one.

    Returns:
        The records from the latest full one on; empty if the history has no full one.

    Example:
        >>> old = SaveRecord(step=1, kind="full", bytes=9, rows=3, secs=0.1)
        >>> new = SaveRecord(step=2, kind="full", bytes=9, rows=3, secs=0.1)
        >>> [record.step for record in since_baseline([old, new])]
        [2]
    """
    for index in range(len(history) - 1, -1, -1):
        if history[index].kind == "full":
            return tuple(history[index:])
    return ()


@dataclass(frozen=True, slots=True)
class Full:
    """Policy that makes every save full, so a restore reads one checkpoint.

    Example:
        >>> Full().decide([]).kind
        'full'
    """

    name: ClassVar[str] = "full"

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a full save, always."""
        del history
        return full_because("every save is full")


@dataclass(frozen=True, slots=True)
class OneShot:
    """Policy of one full save, then deltas on it: deltas grow, and a restore reads two checkpoints.

    Example:
        >>> saves = [SaveRecord(step=7, kind="full", bytes=9, rows=3, secs=0.1)]
        >>> OneShot().decide(saves).parent
        7

    Source: Check-N-Run (NSDI'22), one-shot differential checkpoints.
    """

    name: ClassVar[str] = "one_shot"

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a delta on the latest full save, if there is one."""
        cycle = since_baseline(history)
        if not cycle:
            return full_because(NO_BASELINE)
        return delta_on(cycle[0], "rows since the baseline")


@dataclass(frozen=True, slots=True)
class Consecutive:
    """Policy of deltas on the save before: fewest bytes, but a restore reads all of them.

    Attributes:
        max_chain: most deltas that a restore has to replay, 1 or more. The save after that many is
            full. None: no limit.

    Raises:
        OptionError: if `max_chain` is less than 1.

    Example:
        >>> saves = [
        ...     SaveRecord(step=7, kind="full", bytes=9, rows=3, secs=0.1),
        ...     SaveRecord(step=8, kind="delta", bytes=3, rows=1, secs=0.1),
        ... ]
        >>> Consecutive().decide(saves).parent
        8
        >>> Consecutive(max_chain=1).decide(saves).reason
        'the chain has 1 delta, max_chain is 1'

    Source: Check-N-Run (NSDI'22), consecutive incremental checkpoints.
    """

    name: ClassVar[str] = "consecutive"
    max_chain: int | None = None

    def __post_init__(self) -> None:
        take_limit(self, "max_chain")

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a delta on the last save, or a full one past `max_chain`."""
        cycle = since_baseline(history)
        if not cycle:
            return full_because(NO_BASELINE)
        if self.max_chain is not None and len(cycle) > self.max_chain:
            held = count_of(len(cycle) - 1, "delta")
            return full_because(f"the chain has {held}, max_chain is {self.max_chain}")
        return delta_on(cycle[-1], "rows since the last save")


@dataclass(frozen=True, slots=True)
class IncrementLog:
    """Policy of deltas on the save before, whose chains are merged in the background.

    A save writes only what has changed since the last committed one, as with `Consecutive`. Once
    its chain is long, another process merges that chain into a baseline, from stored bytes to
    stored bytes: one of low priority on the host of process 0, or a program elsewhere. The next
    save brings the baseline along: it is full, although training has written only a delta. So
    restores stay short, and training writes one baseline in a run; of rows on a lattice one more
    whenever they have grown out of their step.

    Attributes:
        merge_at: number of checkpoints in a chain, the full one among them, from which on it is
            merged; 2 or more.
        max_chain: most deltas that a restore has to replay, for runs in which merges fail or take
            longer than saves. The save after that many is full. None: four times `merge_at`.
        elsewhere: whether a program that you have started merges, `cnr-jax compact ROOT --follow`,
            and takes no time of this host. Where none does, chains grow up to `max_chain`.

    Raises:
        OptionError: if `merge_at` is less than 2, `max_chain` less than 1, or `elsewhere` no bool.

    Example:
        >>> saves = [
        ...     SaveRecord(step=7, kind="full", bytes=9, rows=3, secs=0.1, depth=1),
        ...     SaveRecord(step=8, kind="delta", bytes=3, rows=1, secs=0.1, depth=2),
        ... ]
        >>> IncrementLog(merge_at=3).decide(saves).merge
        True

    Source: DECK (PVLDB 2025), increments that are merged apart from training.
    """

    name: ClassVar[str] = "increment_log"
    merge_at: int = 4
    max_chain: int | None = None
    elsewhere: bool = False

    def __post_init__(self) -> None:
        take_integers(self, "merge_at")
        take_limit(self, "max_chain")
        if integer(self.merge_at) is None or self.merge_at < 2:
            raise OptionError(
                f"merge_at cannot be {self.merge_at!r}\n"
                "  expected a number of checkpoints, 2 or more\n"
                "  hint: Full() writes no deltas, Consecutive() merges none"
            )
        if self.max_chain is not None and self.max_chain + 1 < self.merge_at:
            raise OptionError(
                f"no chain is ever merged: it has at most {self.max_chain + 1} checkpoints\n"
                f"  got max_chain={self.max_chain}, merge_at={self.merge_at}"
            )
        if type(self.elsewhere) is not bool:
            raise OptionError(
                f"elsewhere cannot be {self.elsewhere!r}\n  expected True or False"
            )

    def decide(self, history: Sequence[SaveRecord]) -> Decision:
        """Returns a delta on the last save, to be merged with its chain if that is long."""
        cycle = since_baseline(history)
        if not cycle:
            return full_because(NO_BASELINE)
        most = self.max_chain or 4 * self.merge_at
        last = cycle[-1]
        held = last.depth or len(cycle)
        if held > most:
            return full_because(
                f"the chain has {count_of(held - 1, 'delta')}, at most {most} are to be"
                " replayed, and no merged baseline is there"
            )
        found = delta_on(last, "rows since the last save")
        return replace(found, merge=held + 1 >= self.merge_at)


def full_because(reason: str) -> Decision:
    """Returns the decision for a full save."""
    return Decision(kind="full", parent=None, reason=reason)


def delta_on(parent: SaveRecord, what: str) -> Decision:
    """Returns the decision for a delta of `what`, such as "rows since the baseline"."""
    return Decision(
        kind="delta", parent=parent.step, reason=f"{what} (step {parent.step})"
    )


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise OptionError(
            "unknown kind of checkpoint\n"
            f"  expected one of {', '.join(get_args(Kind))}, got {kind!r}"
        )


def take_limit(policy: Any, name: str) -> None:
    """Checks a field of a policy that is a limit on the number of deltas, and takes it as an int.

    Raises:
        OptionError: if it is less than 1, or not an integer.
    """
    take_integers(policy, name)
    limit = getattr(policy, name)
    if limit is not None and (integer(limit) is None or limit < 1):
        raise OptionError(
            f"{name} cannot be {limit!r}\n"
            "  expected None (no limit) or a number of deltas, 1 or more\n"
            "  hint: use Full() to write no deltas at all."
        )
