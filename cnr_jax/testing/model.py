"""Model of the checkpoints of a run: plain, without files, shards or clocks.

It is told what a run does. It says which steps there must be, what each restores to, on which a
delta may rest, and which one is the latest. `playing.Player` compares a real run with it.

Example:
    >>> model = Model(latest(2))
    >>> zeros, ones = {"user": np.zeros(2)}, {"user": np.ones(2)}
    >>> model.saved(0, zeros, parent=None)
    >>> model.saved(1, ones, parent=0)
    >>> model.saved(2, ones, parent=0)
    >>> sorted(model.steps)  # 0 is no longer among the latest two, but 1 and 2 rest on it
    [0, 1, 2]
    >>> model.dependents(0)
    [1, 2]
    >>> same(model.steps[1].values, ones)
    True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cnr_jax import errors

Values = Mapping[str, np.ndarray]
# Chooses the steps to keep for themselves, of steps in the order of branches, oldest first.
Keeps = Callable[[Sequence[int]], Collection[int]]


def everything(steps: Sequence[int]) -> Collection[int]:
    """Keeps every step."""
    return steps


def latest(count: int) -> Keeps:
    """Keeps the latest steps, as Orbax's `LatestN`."""
    return lambda steps: steps[-count:]


def multiples(interval: int) -> Keeps:
    """Keeps steps divisible by a number, as Orbax's `EveryNSteps`."""
    return lambda steps: [step for step in steps if step % interval == 0]


def chosen(wanted: Collection[int]) -> Keeps:
    """Keeps the steps given, as Orbax's `CustomSteps`."""
    return lambda steps: [step for step in steps if step in wanted]


def any_of(*policies: Keeps) -> Keeps:
    """Keeps what any of the policies keeps, as Orbax's `AnyPreservationPolicy`."""
    return lambda steps: {step for keeps in policies for step in keeps(steps)}


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        step: number of the step.
        values: values that it must restore to, by the name of the leaf.
        parent: checkpoint that a delta rests on; None: it is full.
        generation: generation of its branch.
        run: run that saved it.
        before: the save that it came after, which may be gone.
    """

    step: int
    values: Values
    parent: Saved | None
    generation: int
    run: int = 0
    before: Saved | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Key that sorts the newest last: a later branch is newer, whatever its step numbers."""
        return self.generation, self.step

    def chain(self) -> list[Saved]:
        """Itself and all it rests on."""
        return [self, *(self.parent.chain() if self.parent else [])]

    def line(self) -> Iterator[Saved]:
        """Itself and all that it came after, newest first, whether they are still there or not."""
        at: Saved | None = self
        while at is not None:
            yield at
            at = at.before


class PreservationPolicy:
    """Preservation policy for Orbax, made of a plain function.

    Args:
        keeps: function that chooses the steps to keep.
    """

    def __init__(self, keeps: Keeps) -> None:
        self._keeps = keeps

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> list[bool]:
        """Returns whether to keep each of the checkpoints, in the order given."""
        kept = set(self._keeps([info.step for info in checkpoints]))
        return [info.step in kept for info in checkpoints]


class Model:
    """Model of a run.

    Args:
        keeps: the preservation policy; see `latest` and others, or a function of your own.
        min_fulls: full checkpoints of a branch that stay as long as any step does.

    Attributes:
        steps: the checkpoints that must be there, by step.
        tip: the checkpoint that saving goes on from; None if the run starts anew.
        legal: checkpoints that a delta may rest on.
        leaving: steps that retention has dropped, but an interruption left there.
        foreign: numbers of folders that nobody saved a checkpoint in; what they hold may rest on
            any older step, so retention deletes no older step.
        run: run that the manager saves in; None: it has neither restored nor saved.
        owner: run of the state that is saved next; None: it begins one, or goes on with `run`.
        earlier: steps that each new run has moved aside, as dictionaries like `steps`.
    """

    def __init__(self, keeps: Keeps = everything, min_fulls: int = 1) -> None:
        self.keeps, self.min_fulls = keeps, min_fulls
        self.steps: dict[int, Saved] = {}
        self.tip: Saved | None = None
        self.legal: set[Saved] = set()
        self.leaving: set[int] = set()
        self.foreign: set[int] = set()
        self.run: int | None = None
        self.owner: int | None = None
        self.earlier: list[dict[int, Saved]] = []
        self._runs = 0
        # What retention has dropped while saves were in flight, which had counted on it.
        self._dropped: set[Saved] = set()
        # Whether the state has fresh touched rows, which show that it is of no run here.
        self._fresh = False

    def ordered(self) -> list[Saved]:
        """All checkpoints, newest last."""
        return sorted(self.steps.values(), key=lambda saved: saved.order)

    def latest(self) -> set[int | None]:
        """Steps that `restore(None)` may take: one, or two if the newest is leaving."""
        steps = [saved.step for saved in self.ordered()]
        staying = [step for step in steps if step not in self.leaving]
        return {found[-1] if found else None for found in (steps, staying)}

    def branch(self, step: int | None) -> set[int]:
        """The steps that led to this one, itself among them, as far as they are there."""
        return set() if step is None else self._leading_to(self.steps[step])

    def _leading_to(self, saved: Saved) -> set[int]:
        return {at.step for at in saved.line() if self._is_there(at)}

    def dependents(self, step: int) -> list[int]:
        """The steps that rest on this one."""
        saved = self.steps[step]
        return sorted(
            other.step for other in self._with_dependents(saved) if other is not saved
        )

    def keeps_back(self, step: int) -> bool:
        """Whether a step must not be deleted: others rest on it, or unknown folders may."""
        return bool(self.dependents(step)) or any(n > step for n in self.foreign)

    def abandoned_by(self, step: int) -> set[int]:
        """Steps that a save of this step puts aside.

        There are some if an older branch of the run has the step too, or a new run begins.
        """
        old = self.steps.get(step)
        found = {other.step for other in self._with_dependents(old)} if old else set()
        return found | self._left_by(step)

    def refuses(self, step: int) -> bool:
        """Whether a step cannot be saved, as its folder belongs to another run, or to nobody."""
        if step in self.foreign:
            return True
        old, run = self.steps.get(step), self._run_of(step)
        return old is not None and old.run != run and step not in self._left_by(step)

    def _run_of(self, step: int) -> int | None:
        """The run of a save; None: it begins one."""
        if self.owner is not None:
            return self.owner
        return None if self._left_by(step) else self.run

    def _left_by(self, step: int) -> set[int]:
        """Steps that go aside because a save of this step begins a new run."""
        if self.owner is not None:
            return set()
        if self.run is None:
            return set(self.steps)
        own = [saved for saved in self.ordered() if saved.run == self.run]
        if not self._fresh or not own or step > own[-1].step:
            return set()
        later = [saved for saved in own if saved.step >= step]
        return {o.step for saved in later for o in self._with_dependents(saved)}

    def legal_parents(self) -> set[int]:
        """Steps that a delta may rest on now."""
        legal = {saved.step for saved in self.legal if self._is_there(saved)}
        if self.min_fulls > 1 and self.tip is not None:
            # The branch of the newest save has to have so many full checkpoints first.
            fulls = [saved for saved in self.tip.line() if saved.parent is None]
            there = [s for s in fulls if self._is_there(s) or s in self._dropped]
            if len(there) < self.min_fulls:
                return set()
        return legal

    def saved(
        self,
        step: int,
        values: Values,
        parent: int | None,
        needed: Collection[int] = (),
    ) -> None:
        """Notes that a save was committed.

        Args:
            step: number of the step.
            values: values that it holds.
            parent: parent of a delta; None: the save is full.
            needed: parents of saves that were in flight then; they stay for these.

        Raises:
            ChainError: if no delta may rest on that parent.
        """
        tip = self.tip
        self._add(step, values, parent)
        new, before = self.steps[step], set(self.steps.values())
        self._prune(needed)
        dropped = {saved for saved in before if not self._is_there(saved)}
        self._dropped = self._dropped | dropped if needed else set()
        if not self._is_there(new):
            self.legal.discard(new)
            self.tip = tip

    def _add(self, step: int, values: Values, parent: int | None) -> None:
        if parent is not None and parent not in self.legal_parents():
            raise errors.ChainError(
                f"step {step} rests on step {parent}\n"
                f"  expected a full checkpoint or one of {sorted(self.legal_parents())}"
            )
        above = self.steps[parent] if parent is not None else None
        run, generation = self._run_of(step), self._generation()
        if self.run is None and self.owner is None and self.steps:
            self.earlier.append(dict(self.steps))
        for aside in self.abandoned_by(step):
            del self.steps[aside]
        if run is None:
            self._runs += 1
            run = self._runs
        new = Saved(step, dict(values), above, generation, run, self._before(step, run))
        self.run = self.owner = run
        self.steps[step] = new
        self.legal.add(new)
        self.tip = new

    def interrupted(
        self,
        step: int,
        values: Values,
        *,
        committed: bool,
        parent: int | None,
        there: Collection[int],
    ) -> None:
        """Notes that a save failed or was killed, and which steps were found afterwards.

        No step may be gone that was there before. If the new step is committed, those may be gone
        that retention drops, itself perhaps among them, and those of an abandoned branch that were
        in its way.

        Args:
            step: number of the step.
            values: values that it was to hold.
            committed: whether its save was committed; if not, an older one of this number may be
                there.
            parent: parent of a delta, if it is there.
            there: the steps that are there.

        Raises:
            ChainError: if they are not what may be there.
        """
        before = set(self.steps)
        may = before | {step} if committed else before
        # As if it were full: a delta also keeps what it rests on. That makes a difference for a
        # save that retention drops at once: it may have been committed, and be gone again.
        above = [None] if committed else [None, *list(self.steps.values())[:1]]
        musts = list[set[int]]()
        for each in above:
            kept = self._kept_after(step, values, each)
            musts.append(kept - {step} if committed or step not in kept else before)
        if not any(must <= set(there) <= may for must in musts):
            must = set[int].intersection(*musts)
            raise errors.ChainError(
                f"after an interrupted save of step {step} there are steps"
                f" {sorted(there)}\n  expected {sorted(must)},"
                f" and perhaps {sorted(may - must)}"
            )
        if committed:
            self._add(step, values, parent)
            self._keep_track(set(there))
        self.steps = {k: v for k, v in self.steps.items() if k in set(there)}

    def _kept_after(self, step: int, values: Values, above: Saved | None) -> set[int]:
        """Steps that there are after a save and its retention; `above` is the parent of a delta."""
        after = Model(self.keeps, self.min_fulls)
        aside, run = self.abandoned_by(step), self._run_of(step)
        after.steps = {k: v for k, v in self.steps.items() if k not in aside}
        after.foreign, after.run = self.foreign, self._runs + 1 if run is None else run
        before = self._before(step, after.run)
        new = Saved(step, values, above, self._generation(), after.run, before)
        after.steps[step] = new
        after._prune()
        return set(after.steps)

    def _keep_track(self, there: set[int]) -> None:
        kept = Model(self.keeps, self.min_fulls)
        kept.steps, kept.run = dict(self.steps), self.run
        kept.foreign = self.foreign
        kept._prune()
        self.leaving = there - kept.steps.keys()

    def restored(self, step: int) -> None:
        """Notes that the manager restored a step, and that the run goes on from it."""
        self.tip = self.steps[step]
        self.legal = set(self.tip.chain())
        self.run = self.owner = self.tip.run

    def reopened(self) -> None:
        """Notes that there is a new manager, which has neither restored nor saved."""
        self.run = None

    def looked(self, step: int, *, recorded: bool) -> None:
        """Notes that the manager restored a step, but that the run goes on with another state.

        Args:
            step: number of the restored step.
            recorded: whether that other state has touched rows.
        """
        self.tip, self.legal = None, set()
        self.run = self.steps[step].run
        if not recorded:
            self.owner = self.run

    def started_anew(self, *, recorded: bool) -> None:
        """Notes that the run goes on with a state that rests on no checkpoint.

        Args:
            recorded: whether it has touched rows, which are fresh then.
        """
        self.tip, self.legal = None, set()
        self.owner, self._fresh = None, recorded

    def deleted(self, step: int) -> None:
        """Notes that a step was deleted.

        Raises:
            DependentsExistError: if it must not be deleted.
        """
        if self.keeps_back(step):
            raise errors.DependentsExistError(
                f"step {step} was deleted, but {self.dependents(step)} depend on it,"
                f" or what is in {sorted(self.foreign)} may"
            )
        del self.steps[step]

    def _before(self, step: int, run: int | None) -> Saved | None:
        """Save that a save comes after: the tip, or the one before it in the newest branch."""
        if self.tip is not None:
            return self.tip if self.tip.run == run else None
        own = [saved for saved in self.ordered() if saved.run == run]
        there = self.branch(own[-1].step) if own else set[int]()
        return max(
            (self.steps[number] for number in there if number < step),
            key=lambda saved: saved.order,
            default=None,
        )

    def _is_there(self, saved: Saved) -> bool:
        return self.steps.get(saved.step) is saved

    def _with_dependents(self, saved: Saved) -> list[Saved]:
        return [other for other in self.steps.values() if saved in other.chain()]

    def _generation(self) -> int:
        """Generation of the next save: that of the tip if it is the newest, else a new one."""
        ordered = self.ordered()
        if not ordered:
            return 1
        head = ordered[-1]
        return head.generation if head is self.tip else head.generation + 1

    def _prune(self, needed: Collection[int] = ()) -> None:
        """Drops steps that the current run does not keep, unless a kept step rests on them."""
        ordered, unknown = self.ordered(), max(self.foreign, default=-1)
        own = [saved.step for saved in ordered if saved.run == self.run]
        there = self.branch(own[-1]) if own else set[int]()
        # Steps that were left behind count as older than all that led to the newest, and do not
        # count in what is kept of these.
        own.sort(key=lambda step: (step in there, self.steps[step].order))
        ruled = set(self.keeps([step for step in own if step in there]))
        ruled |= set(self.keeps(own)) - there
        wanted = ruled | (self.steps.keys() - set(own))
        kept = {s for saved in ordered if saved.step in wanted for s in saved.chain()}
        below = {s for saved in ordered if saved.step in needed for s in saved.chain()}
        if ruled:
            fulls = [s for s in ordered if s.step in there and s.parent is None]
            spare = self.min_fulls - sum(saved in kept for saved in fulls)
            others = [saved for saved in reversed(fulls) if saved not in kept]
            kept |= set(others[: max(0, spare)])
        # Last: what stays only because an unknown folder may rest on it goes soon after the
        # folder, so it does not count as one of the full checkpoints.
        kept |= {s for saved in ordered if saved.step <= unknown for s in saved.chain()}
        self.steps = {saved.step: saved for saved in ordered if saved in kept | below}
        self.leaving = set()


def same(got: Values, expected: Values) -> bool:
    """Whether all leaves are equal bit for bit, NaNs and signs of zeros included."""
    return not differences(got, expected)


def differences(got: Values, expected: Values) -> list[str]:
    """One line for each leaf that differs; NaNs and signs of zeros count.

    Example:
        >>> differences({"a": np.array([0.0, 1.0])}, {"a": np.array([-0.0, 1.0])})
        ['a: 1 of 2 elements differ, first at (0,): got 0.0, expected -0.0']
    """
    found = [f"{key}: only expected" for key in expected.keys() - got.keys()]
    found += [f"{key}: not expected" for key in got.keys() - expected.keys()]
    for key in sorted(got.keys() & expected.keys()):
        ours, theirs = np.asarray(got[key]), np.asarray(expected[key])
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            found.append(
                f"{key}: got {ours.shape} {ours.dtype},"
                f" expected {theirs.shape} {theirs.dtype}"
            )
            continue
        where = np.argwhere((_bits(ours) != _bits(theirs)).any(axis=-1))
        if len(where):
            at = tuple(int(i) for i in where[0])
            found.append(
                f"{key}: {len(where)} of {ours.size} elements differ, first at {at}:"
                f" got {ours[at]}, expected {theirs[at]}"
            )
    return sorted(found)


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes of each element, as one more axis."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
