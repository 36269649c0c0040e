"""Every call on a root fails once: one error, or what the call was for is right all the same."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import operator
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import training
from bench import Bench
from children import Ended
from failing import disarm, is_clear, text_of, told
from outcomes import Outcome, Tally, Verdict
from scenarios import FULL, Note, System, steps_from
from stages import TRIES, Strike
from systems import Ours
from training import Values

import cnr_jax as cnr
from cnr_jax.testing.faults import Fault

NAME = "once"
ABOUT = "each call on a root fails once, while it is opened, restored from or saved to"
KINDS = (
    *("stat", "scandir", "open_read", "open"),
    *("mkdir", "rename", "unlink", "rmdir", "fsync"),
)
ERRORS = ("EIO", "EACCES", "ESTALE", "EMFILE")
QUICK, REHEARSALS = 8, 3
ALLOWED = frozenset({Outcome.EQUAL, Outcome.ONE_ERROR})
# A file that cannot be read for EIO is damaged, of which the other errors say nothing.
ALLOWED_OF_EIO = ALLOWED | {Outcome.OLDER}
STEPS = 4  # in the root when it begins
# What is done while calls fail; and whether each save is full, and only the newest two stay.
PARTS = {
    "open": ("open", True),
    "restore": ("restore", False),
    "save, delta": ("save", False),
    "save, full and retention": ("save", True),
}
KEPT = 2


def act(
    system: System,
    root: Path,
    note: Note,
    after: str,
    *,
    doing: str,
    full: bool,
    keep: int | None,
) -> None:
    """Opens, restores or saves while a call fails; then goes on as a run would."""
    raised: list[str] = []
    opened = functools.partial(system, root, keep=keep, policy=FULL if full else None)

    def attempt(what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raised.append(f"{what}: {text_of(error)}")
            return None

    def go_on(step: int | None = None) -> int | None:
        """Notes which step is restored, and what came back."""
        found = trainer.go_on(step)
        note({"restored": [found, digest_of(training.values_of(trainer.state))]})
        return found

    trainer: Any = None if doing == "open" else opened()
    if doing == "save":
        go_on()
        steps_from(trainer, STEPS, STEPS + 1)  # so that the root is claimed
        trainer.train(STEPS + 1)
    found = None
    Path(after).touch()
    if doing == "save":
        attempt("save", lambda: trainer.save(STEPS + 1))
        attempt("wait", trainer.wait)
        attempt("close", trainer.close)
        trainer = None
    else:
        trainer = trainer or attempt("open", opened)
        if trainer is not None and doing == "restore":
            attempt("restore by number", lambda: go_on(STEPS - 2))
        if trainer is not None and not raised:
            found = attempt("restore", go_on)
    os.unlink(after)
    disarm()
    note({"raised": raised})
    if trainer is None or raised:
        trainer = trainer or opened()
        found = go_on()
    note({"newest": found})
    if found is None or (doing != "save" and found == STEPS - 1) or found >= STEPS:
        step = 0 if found is None else found + 1
        steps_from(trainer, step, step + 1)
        note({"durable": step})
    trainer.close()


def digest_of(values: Values) -> str:
    """Tells values of a state apart, for notes."""
    digest = hashlib.sha256()
    for path in sorted(values):
        digest.update(path.encode() + values[path].tobytes())
    return digest.hexdigest()


def run(bench: Bench) -> Iterator[Tally]:
    for part in PARTS:
        if Ours in bench.systems and bench.wants(NAME, part, Ours):
            yield from _tallies(bench, part)


def _tallies(bench: Bench, part: str) -> Iterator[Tally]:
    allowed = {error: ALLOWED for error in ERRORS} | {"EIO": ALLOWED_OF_EIO}
    tallies = {
        error: Tally(NAME, f"{part}; {error}", Ours.name, allowed[error])
        for error in ERRORS
    }
    play = Play(bench, part)
    counts = play.rehearse()
    faults = [
        Fault(kind, nth, error)
        for kind in KINDS
        for nth in range(1, counts[kind] + 1)
        for error in ERRORS
    ]
    for fault, strike in bench.side_by_side(play.strike, bench.sample(faults, QUICK)):
        verdict = play.verdict(strike)
        tallies[fault.action].add(verdict, f"{fault.call} {strike}")
        strike.remove()
    for tally in tallies.values():
        tally.notes["calls"] = sum(counts.values())
        yield tally


@dataclasses.dataclass
class Play:
    """One part, ready to be acted any number of times.

    Attributes:
        template: the root as it is before.
        values: what each step must come back as, learnt from a run without faults.
    """

    bench: Bench
    part: str
    template: Path = dataclasses.field(init=False)
    values: dict[int, Values] = dataclasses.field(default_factory=dict)

    def rehearse(self) -> collections.Counter[str]:
        """Makes the template and acts without a fault; returns how often each call is made."""
        _, full = PARTS[self.part]
        self.template = self.bench.new_root()
        trainer = Ours(self.template, policy=FULL if full else None)
        steps_from(trainer, 0, STEPS)
        trainer.close()
        self.values |= self._read(self.template)
        counts = []
        # Once with all steps kept, so that it is known of each what it holds.
        for keep in (None, *[KEPT if full else None] * REHEARSALS):
            root = self._new_root()
            ended = self._act(root, None, keep)
            assert ended.status == 0, f"{self.part} without a fault: {ended.notes}"
            found = self._read(root)
            for step in found.keys() & self.values.keys():
                assert not training.differing(found[step], self.values[step])
            self.values |= found
            counts.append(collections.Counter(call.call for call in ended.calls))
            shutil.rmtree(root)
        # Threads take turns as they like: calls that all runs made can be struck.
        return functools.reduce(operator.and_, counts[1:])

    def _new_root(self) -> Path:
        root = self.bench.new_root()
        shutil.copytree(self.template, root)
        return root

    def _act(self, root: Path, fault: Fault | None, keep: int | None) -> Ended:
        doing, full = PARTS[self.part]
        after = root.with_name(root.name + "-armed")
        with self.bench.server() as server:
            return server.run(
                Ours.name,
                NAME,
                root,
                fault,
                looks=True,
                armed_after=after,
                after=str(after),
                doing=doing,
                full=full,
                keep=keep,
            )

    def strike(self, fault: Fault) -> Strike:
        """Acts with a fault; again if it was not met."""
        keep = KEPT if PARTS[self.part][1] else None
        for _ in range(TRIES):
            root = self._new_root()
            ended = self._act(root, fault, keep)
            if ended.hit or ended.status is None:
                break
            shutil.rmtree(root)
        return Strike(fault, ended, root)

    @staticmethod
    def _read(root: Path) -> dict[int, Values]:
        """Every listed step, read by a manager that knows only what is on disk."""
        trainer = Ours(root)
        with contextlib.closing(trainer):
            found: dict[int, Values] = {}
            for step in trainer.steps():
                trainer.go_on(step)
                found[step] = training.values_of(trainer.state)
        return found

    def verdict(self, strike: Strike) -> Verdict:
        """What became of the acts, of the root, and of what was said about it."""
        unmet = strike.unmet()
        if unmet is not None:
            return unmet
        notes, told_of = strike.ended.notes, told(strike.ended.notes)
        if strike.ended.status != 0 or "newest" not in told_of:
            return Verdict(Outcome.STUCK, f"{notes}")
        raised, newest = told_of["raised"], told_of["newest"]
        for each in notes:
            step, digest = each.get("restored", (None, None))
            if step is not None and digest != digest_of(self.values[step]):
                return Verdict(Outcome.WRONG, f"step {step} was restored; {raised}")
        wrong = self._root_verdict(strike.root, newest, told_of.get("durable"))
        if wrong is not None:
            return dataclasses.replace(wrong, detail=f"{wrong.detail}; {raised}")
        doing, _ = PARTS[self.part]
        last = STEPS + 1 if doing == "save" else STEPS - 1
        if newest not in ({last, last - 1} if raised and doing == "save" else {last}):
            older = newest is not None and doing != "save"
            outcome = Outcome.OLDER if older else Outcome.LOST
            return Verdict(outcome, f"restored {newest}; {raised}")
        if not raised:
            return Verdict(Outcome.EQUAL)
        if len(raised) > 1 or not is_clear(raised[0], strike.fault.action):
            return Verdict(Outcome.UNCLEAR, f"{raised}")
        return Verdict(Outcome.ONE_ERROR)

    def _root_verdict(
        self, root: Path, newest: int | None, durable: int | None
    ) -> Verdict | None:
        """What is wrong with the root; None: nothing."""
        problems = [str(found) for found in cnr.verify(root) if found.consequence]
        if problems:
            return Verdict(Outcome.LISTED, f"{problems}")
        try:
            found = self._read(root)
        except Exception as error:
            return Verdict(Outcome.LISTED, text_of(error))
        there = {int(path.name) for path in root.iterdir() if path.name.isdigit()}
        if there != found.keys():
            return Verdict(Outcome.LOST, f"on disk {there}, listed {sorted(found)}")
        _, full = PARTS[self.part]
        must: set[int | None] = {newest, durable} - {None}
        if not full or durable is None:
            must |= set(range(STEPS))
        if not must <= found.keys():
            return Verdict(Outcome.LOST, f"{must - found.keys()} of {sorted(found)}")
        for step, values in found.items():
            if step not in self.values:
                return Verdict(Outcome.WRONG, f"step {step} was never trained")
            if wrong := training.differing(values, self.values[step]):
                return Verdict(Outcome.WRONG, f"step {step}: {', '.join(wrong)}")
        return None
