"""Random programs in a bucket whose service errs: nothing is lost, and nothing is tried for ever.

One runs with the other tests. More of them, each the same for its number:

    CNR_PROGRAMS=0-199 python -m pytest -n 0 -s tests/test_bucket_programs.py
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax import errors

from .bucket_proxy import Harm, Proxy
from .conftest import TinyRun, case_of

# What befalls a request, where it may.
HARMS: tuple[Harm, ...] = ("reset", "drop", "truncate", 500, 503, 0.05)
# Said of a condition that holds, or of a request that has none.
LIES: tuple[Harm, ...] = (409, 412)
# What a call may raise meanwhile. A save that is not known to have failed may be there.
TROUBLE = (errors.RootError, errors.SaveError, errors.DependentsExistError)
MOST_SECS = 120.0

Values = dict[str, np.ndarray]


def numbers() -> list[int]:
    """Which programs are played: `CNR_PROGRAMS`, as `0-199` or `7`; else one."""
    first, _, last = os.environ.get("CNR_PROGRAMS", "0").partition("-")
    return [*range(int(first), int(last or first) + 1)]


class Program:
    """A run that saves, fails, goes back and begins again, and what must be of it.

    Attributes:
        line: the steps that lead to where the run is, with their values, as far as the program
            was told that they are durable, and retention keeps them; the newest last.
        tried: values of all saves that were begun, by step.
        counts: how often what happened.
    """

    def __init__(self, number: int, make: Callable[[], TinyRun], root: str) -> None:
        self.random = random.Random(number)
        self.make, self.root = make, root
        self.run = make()
        self.keep = self.random.choice([None, 1, 2, 3])
        chain = self.random.choice([1, 2, 4])
        self.policy = cnr.Consecutive(max_chain=chain)
        self.line: list[tuple[int, Values]] = []
        self.tried: dict[int, list[Values]] = collections.defaultdict(list)
        self.counts: collections.Counter[str] = collections.Counter()
        # Of all requests so many are harmed.
        self.share = self.random.choice([0.02, 0.05, 0.15])

    def harm(self, kind: str, path: str, number: int) -> Harm | None:
        """What is done to a request."""
        if self.random.random() >= self.share:
            return None
        lies = LIES if kind == "PUT" and self.random.random() < 0.3 else ()
        found = self.random.choice(lies or HARMS)
        self.counts[str(found)] += 1
        return found

    def open(self) -> cnr.CheckpointManager:
        """A manager, as of a program that is started until it starts."""
        for _ in range(20):
            with contextlib.suppress(errors.RootError):
                orbax = {"max_to_keep": self.keep}
                return self.run.open(self.root, orbax, policy=self.policy)  # type: ignore[arg-type]
            self.counts["not opened"] += 1
        raise AssertionError("it cannot be opened, ever")

    def play(self, acts: int, proxy: Proxy) -> None:
        """Plays the program, and looks at what it has left."""
        proxy.harm = self.harm
        self.manager = self.open()
        for _ in range(acts):
            act = self.random.choice(
                [self.save] * 6 + [self.restore] * 2 + [self.again]
            )
            begun = time.monotonic()
            act()
            assert time.monotonic() - begun < MOST_SECS, act.__name__
            self.counts[act.__name__] += 1
            if self.random.random() < 0.3:
                proxy.harm = lambda *_: None
                self.check()
                proxy.harm = self.harm
        proxy.harm = lambda *_: None
        with contextlib.suppress(errors.SaveError):
            self.manager.close()
        self.check()

    # ---- acts -------------------------------------------------------------------------------

    def save(self) -> None:
        """A train step and a save, perhaps of a number that was taken before a rollback."""
        newest = self.line[-1][0] if self.line else -1
        step = newest + 1
        if self.random.random() < 0.5 or self.counts["in doubt"]:
            step = max([newest, *self.tried]) + 1
        self.run.train(step)
        values = self.run.values()
        self.tried[step].append(values)
        try:
            assert self.run.save(self.manager, step)
            self.manager.wait_until_finished()
        except TROUBLE as error:
            self.counts[type(error).__name__] += 1
            if error.kind != "after_commit":
                self.counts["in doubt"] += 1
                return
        self.line.append((step, values))
        self.line = self.line[-(self.keep or len(self.line)) :]

    def restore(self) -> None:
        """Goes on from a step: a rollback, if it is not the newest."""
        newest = self.random.random() < 0.4
        if not self.line:
            return
        step = None if newest else self.random.choice(self.line)[0]
        try:
            self.run.restore(self.manager, step)
        except errors.RootError:
            self.counts["not restored"] += 1
            return
        self.went_to(step)

    def again(self) -> None:
        """A new process: what the last one had in flight has ended, or has failed."""
        with contextlib.suppress(errors.SaveError):
            self.manager.close()
        self.manager, self.run = self.open(), self.make()
        for _ in range(20):
            with contextlib.suppress(errors.RootError):
                if self.manager.latest_step() is None:
                    assert not self.line, "all is lost"
                else:
                    self.run.restore(self.manager, None)
                    self.went_to(None)
                return
            self.counts["not restored"] += 1
        raise AssertionError("it cannot be restored, ever")

    def went_to(self, step: int | None) -> None:
        """Notes where the run is, and that its state is one that was saved there."""
        values = self.run.values()
        at = int(values["['step']"])
        assert step in (None, at)
        assert any(same(values, each) for each in self.tried[at]), f"step {at}"
        before = [each for each in self.line if each[0] < at]
        known = [each for each in self.line if each[0] == at]
        if known:
            assert same(values, known[0][1]), f"step {at} is another one"
        if step is None and self.line:
            # The newest of all is that which was told durable, or one in doubt after it.
            assert at >= self.line[-1][0], f"step {self.line[-1][0]} is lost"
        self.line = [*before, (at, values)]

    # ---- what must be -----------------------------------------------------------------------

    def check(self) -> None:
        """Every step that is listed is one that was saved, and what is to be kept is there."""
        like = self.make()
        with cnr.CheckpointManager(self.root, tables=like.tables) as reader:
            steps = reader.all_steps()
            for step, values in tuple(self.line):
                # A later one, of which nobody was told, may count for retention.
                later = [each for each in steps if each > step]
                if step not in steps:
                    assert self.keep and len(later) >= self.keep, f"step {step} is lost"
                    self.line = [each for each in self.line if each[0] != step]
                    continue
                got = reader.restore(step, args=cnr.args.Restore(like.state)).state
                assert same(like.values(got), values), f"step {step} is another one"
            for step in self.random.sample(steps, min(2, len(steps))):
                got = reader.restore(step, args=cnr.args.Restore(like.state)).state
                found = like.values(got)
                assert any(same(found, each) for each in self.tried[step]), step


def same(values: Values, others: Values) -> bool:
    return values.keys() == others.keys() and all(
        np.array_equal(value, others[path]) for path, value in values.items()
    )


@pytest.mark.timeout(36_000)
def test_programs_lose_nothing_whatever_becomes_of_their_requests(
    tiny_run: Any, bucket: epath.Path, proxy: Proxy
) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for number in numbers():
        program = Program(number, tiny_run, f"{bucket}/{number}")
        with case_of(f"CNR_PROGRAMS={number}"):
            program.play(10, proxy)
            assert [p for p in cnr.verify(program.root) if p.consequence] == []
        counts += program.counts
    print(len(numbers()), "programs:", dict(counts))
    assert proxy.harmed and counts["save"]
