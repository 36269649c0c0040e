"""Restores a root that somebody has damaged, and compares what comes back."""

from __future__ import annotations

from pathlib import Path

import judging
import training
from judging import Twin
from outcomes import Outcome, Verdict
from scenarios import System

import cnr_jax as cnr

# The worst first: what a damage led to is the worst that it led to.
WORST = (
    Outcome.WRONG,
    Outcome.LOST,
    Outcome.UNCLEAR,
    Outcome.OLDER,
    Outcome.REFUSED,
    Outcome.EQUAL,
)


class Reader:
    """Knows what every step of a root must restore to.

    Args:
        system: that wrote it.
        root: not damaged yet.
        scratch: for a copy, that is removed again.
    """

    def __init__(self, system: System, root: Path, scratch: Path) -> None:
        self.system, self.root = system, root
        self.twin: Twin = judging.twin_of(system, root, scratch, None)
        judging.check_twins(system, [self.twin], [{}])
        self._restores: dict[int, bool] = {}

    @property
    def steps(self) -> list[int]:
        return sorted(self.twin.values)

    def explicit(self, step: int, damaged: Path) -> Verdict:
        """Restores the damaged step, and the newest, which may rest on it."""
        found = {
            wanted: self._restore(wanted, damaged) for wanted in {step, self.steps[-1]}
        }
        self._restores = {
            wanted: verdict.outcome is Outcome.EQUAL
            for wanted, verdict in found.items()
        }
        return min(found.values(), key=lambda verdict: WORST.index(verdict.outcome))

    def verified(self) -> Verdict:
        """Whether `cnr_jax.verify` says of the steps restored last what a restore said."""
        try:
            problems = cnr.verify(self.root)
        except Exception as error:
            return Verdict(Outcome.UNCLEAR, f"verify: {_whole_text(error)}")
        broken = {name for problem in problems for name in problem.consequence}
        wrong = [
            step
            for step, restores in self._restores.items()
            # Nothing can be said of a step that is not there.
            if restores == (str(step) in broken) and (self.root / str(step)).exists()
        ]
        if wrong:
            told = "; ".join(map(str, problems))[:600]
            text = f"verify is wrong of steps {wrong}, restores: {self._restores}"
            return Verdict(Outcome.UNCLEAR, f"{text}; problems: {told}")
        whole = all(self._restores.values())
        return Verdict(Outcome.EQUAL if whole else Outcome.REFUSED)

    def newest(self, damaged: Path) -> Verdict:
        """Restores whatever the system takes for the newest."""
        found = self._restore(None, damaged)
        if found.outcome not in (Outcome.REFUSED, Outcome.LOST):
            return found
        # Of exchanged files both may be of full checkpoints, on which all others rest.
        ways = {self._restore(step, damaged).outcome for step in self.steps}
        return (
            found if ways & {Outcome.EQUAL, Outcome.WRONG} else Verdict(Outcome.NOTHING)
        )

    def _restore(self, wanted: int | None, damaged: Path) -> Verdict:
        try:
            trainer = self.system(self.root)
            try:
                step = trainer.go_on(wanted)
            finally:
                trainer.close()
        except Exception as error:
            text = _whole_text(error)
            named = names_file(text, damaged, self.root)
            outcome = Outcome.REFUSED if named else Outcome.UNCLEAR
            return Verdict(outcome, f"restore({wanted}): {text[:600]}")
        if step is None:
            return Verdict(Outcome.LOST, f"restore({wanted}): there is no step")
        want = self.twin.values.get(step if wanted is None else wanted)
        got = training.values_of(trainer.state)
        wrong = ["the step"] if want is None else training.differing(got, want)
        if wrong:
            return Verdict(Outcome.WRONG, f"restore({wanted}): {', '.join(wrong)}")
        older = wanted is None and step != self.steps[-1]
        return Verdict(Outcome.OLDER if older else Outcome.EQUAL)


def names_file(text: str, path: Path, root: Path) -> bool:
    """Whether an error says where the damage is: the step, and the file or its array."""
    parts = path.relative_to(root).parts
    step, names = parts[0], {path.name, *parts[2:]}
    if "c" in names and len(parts) > 4:  # a chunk: the array says enough
        names = {parts[3]}
    return f"{step}" in text and any(name in text for name in names - {"c"})


def _whole_text(error: BaseException | None) -> str:
    """The error and those that led to it."""
    texts = []
    while error is not None and len(texts) < 5:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(texts)
