"""Looks at a root after a fault, as the next run would, and says what became of it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import training
from outcomes import Outcome, Verdict
from scenarios import Scenario, System
from systems import Ours
from training import Values


class TwinError(Exception):
    """A run without any fault does not come back as it was trained."""


@dataclasses.dataclass(frozen=True)
class Twin:
    """What a root must give back.

    Attributes:
        newest: the step a run goes on from; None if there is none.
        values: of each step.
        following: of the step after the newest, saved by a run that went on from there.
    """

    newest: int | None
    values: dict[int, Values]
    following: Values


def twin_of(system: System, root: Path, scratch: Path, keep: int | None) -> Twin:
    """Reads a root that no fault has met; does not change it.

    Raises:
        TwinError: if it is not what was trained.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    if root.exists():
        shutil.copytree(root, scratch)
    try:
        steps = listed(system, scratch)
        values = {step: restored(system, scratch, step) for step in steps}
    except Exception as error:
        raise TwinError(f"a root without faults: {_text(error)}") from error
    newest, following = go_on(system, scratch, keep)
    shutil.rmtree(scratch)
    return Twin(newest, values, following)


def twins_between(
    system: System, root: Path, scratch: Path, before: Twin, after: Twin
) -> tuple[Twin, ...]:
    """Twins of a root that has some of its new steps: the oldest one, the oldest two, ..."""
    *first, _ = sorted(after.values.keys() - before.values.keys()) or [0]
    found: list[Twin] = []
    for newest in first:
        shutil.copytree(root, scratch)
        for step in after.values.keys():
            if step > newest:
                shutil.rmtree(scratch / str(step))
        found.append(twin_of(system, scratch, scratch.with_suffix(".read"), None))
        shutil.rmtree(scratch)
    return tuple(found)


def check_twins(
    system: System, twins: Sequence[Twin], salts: Sequence[Mapping[int, int]]
) -> None:
    """Compares twins with runs without checkpoints: exact values, and those in 4 bits.

    Raises:
        TwinError: naming the leaves that differ.
    """
    for twin, theirs in zip(twins, salts, strict=True):
        for step, values in twin.values.items():
            want = training.values_of(training.state_after(step, theirs))
            wrong = set(training.differing(values, want))
            if system is Ours and near(values, want):
                wrong -= training.QUANTIZED
            if wrong:
                raise TwinError(
                    f"step {step}: {', '.join(sorted(wrong))} not as trained"
                )


def near(got: Values, want: Values) -> bool:
    """Whether quantized leaves are as near as 4 bits a number, or moments, can be, twice over."""
    a, b = got[training.ITEM], want[training.ITEM]
    width = np.ptp(b, axis=1, keepdims=True) / (2**4 - 1)
    found = (np.abs(a - b) <= 2 * width).all()
    if training.HAS_SUMS:
        (mu, nu), (means, squares) = (
            [values[k] for k in (training.MEANS, training.SQUARES)]
            for values in (got, want)
        )
        found &= (np.abs(mu - means) <= 0.25 * np.sqrt(squares)).all()
        found &= ((nu <= 2 * squares) & (nu >= squares / 2)).all()
    return bool(found)


def listed(system: System, root: Path) -> list[int]:
    trainer = system(root)
    steps = trainer.steps()
    trainer.close()
    return steps


def restored(system: System, root: Path, step: int | None) -> Values:
    """The values of a step, read by a manager that knows only what is on disk."""
    trainer = system(root)
    try:
        trainer.go_on(step)
    finally:
        trainer.close()
    return training.values_of(trainer.state)


def go_on(system: System, root: Path, keep: int | None) -> tuple[int | None, Values]:
    """Restores the newest step, trains and saves the next; returns what comes back of it."""
    trainer = system(root, keep=keep)
    try:
        newest = trainer.go_on()
        step = 0 if newest is None else newest + 1
        trainer.train(step)
        trainer.save(step)
        trainer.wait()
    finally:
        trainer.close()
    return newest, restored(system, root, step)


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judges roots that a fault has met while a scenario was acted.

    Attributes:
        before, after: twins of the root as it was, and as it is if nothing happens.
        between: twins with some of several new steps, the fewest first.
    """

    system: System
    scenario: Scenario
    before: Twin
    after: Twin
    between: tuple[Twin, ...] = ()

    def __call__(self, root: Path, *, durable: bool = False) -> Verdict:
        """Restores all that is listed, compares it, and goes on saving.

        Args:
            root: to be judged; changed.
            durable: whether the process was told that the new step is durable.
        """
        try:
            trainer = self.system(root)
            try:
                newest, steps = trainer.go_on(), trainer.steps()
            finally:
                trainer.close()
        except Exception as error:
            return Verdict(Outcome.LISTED, _text(error))
        for step in steps:
            verdict = self._check_step(root, step)
            if verdict is not None:
                return verdict
        twin = self._twin(newest, training.values_of(trainer.state))
        if twin is None:
            return Verdict(Outcome.LOST, self._lost(newest, steps))
        must = twin.values.keys() - (self.scenario.removes - {newest})
        if missing := sorted(must - set(steps)):
            return Verdict(Outcome.LOST, f"{missing} are gone, listed {steps}")
        lost = durable and twin is not self.after
        if lost or self._is_there(root, twin):
            return Verdict(Outcome.LOST, f"the committed step is passed over: {steps}")
        return self._check_following(root, twin)

    def _is_there(self, root: Path, twin: Twin) -> bool:
        """Whether a step that a twin does not have is on disk under its name."""
        new = self.after.values.keys() - twin.values.keys()
        return any((root / str(step)).exists() for step in new)

    def _lost(self, newest: int | None, steps: list[int]) -> str:
        wanted = {t.newest for t in (self.before, *self.between, self.after)}
        return f"newest is {newest}, expected one of {wanted}; listed {steps}"

    def _twin(self, newest: int | None, values: Values) -> Twin | None:
        for twin in (self.after, *self.between, self.before):
            if newest == twin.newest and (
                newest is None or not training.differing(values, twin.values[newest])
            ):
                return twin
        return None

    def _check_step(self, root: Path, step: int) -> Verdict | None:
        """What is wrong with one step that is listed; None: nothing."""
        try:
            got = restored(self.system, root, step)
        except Exception as error:
            return Verdict(Outcome.LISTED, f"step {step}: {_text(error)}")
        twins = [t.values[step] for t in (self.after, self.before) if step in t.values]
        if not twins:
            return Verdict(Outcome.WRONG, f"step {step} was never committed")
        wrong = [training.differing(got, twin) for twin in twins]
        if all(wrong):
            return Verdict(Outcome.WRONG, f"step {step}: {', '.join(wrong[0])}")
        return None

    def _check_following(self, root: Path, twin: Twin) -> Verdict:
        try:
            _, following = go_on(self.system, root, self.scenario.keep)
        except Exception as error:
            return Verdict(Outcome.STUCK, _text(error))
        if wrong := training.differing(following, twin.following):
            return Verdict(Outcome.WRONG, f"after the next save: {', '.join(wrong)}")
        return Verdict(Outcome.EQUAL)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
