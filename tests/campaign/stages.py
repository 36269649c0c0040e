"""Scenarios made ready: acted without a fault once, then with one any number of times."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any, Protocol

import judging
from children import Ended, Server
from judging import Judge, TwinError
from outcomes import Outcome, Verdict
from scenarios import Scenario, System

from cnr_jax.testing.faults import Call, Fault

TRIES = 4


class Place(Protocol):
    """Where roots are made and children are forked."""

    def new_root(self) -> Path:
        """The path of a root that is not there yet."""
        ...

    def server(self) -> contextlib.AbstractContextManager[Server]:
        """A server that nobody else uses meanwhile."""
        ...


@dataclasses.dataclass(frozen=True)
class Play:
    """A scenario of one system.

    Attributes:
        template: the root as it is before; not changed once it is made.
        arms_later: whether the act says itself from when on calls count.
    """

    place: Place
    system: System
    scenario: Scenario
    template: Path
    arms_later: bool

    def copy_to(self, root: Path) -> None:
        """Makes the root as it is before."""
        if self.template.exists():
            shutil.copytree(self.template, root, symlinks=True)

    def act(self, root: Path, fault: Fault | None, **arguments: Any) -> Ended:
        """Acts the scenario in a child."""
        after = root.with_name(root.name + "-armed") if self.arms_later else None
        if after is not None:
            arguments["after"] = str(after)
        with self.place.server() as server:
            return server.run(
                self.system.name,
                self.scenario.name,
                root,
                fault,
                armed_after=after,
                **arguments,
            )

    def rehearsed(self, times: int) -> Stage:
        """Makes the template, acts without a fault so many times, and reads the twins.

        Raises:
            TwinError: if that does not end as it should.
        """
        self._make_template()
        after, ends = self.place.new_root(), []
        for _ in range(times):
            shutil.rmtree(after, ignore_errors=True)
            self.copy_to(after)
            ended = self.act(after, None)
            if ended.status != 0:
                text = f"{self.scenario.name} without a fault: {ended.status}"
                raise TwinError(f"{text} {ended.notes}")
            ends.append(ended)
        twins = [
            judging.twin_of(
                self.system, root, self.place.new_root(), self.scenario.keep
            )
            for root in (self.template, after)
        ]
        judging.check_twins(self.system, twins, ({}, self.scenario.salts))
        scratch = self.place.new_root()
        between = judging.twins_between(self.system, after, scratch, *twins)
        shutil.rmtree(after)
        # Threads take turns as they like: calls that all runs made can be struck.
        fewest = min(ends, key=lambda ended: len(ended.calls))
        return Stage(self, fewest, Judge(self.system, self.scenario, *twins, between))

    def _make_template(self) -> None:
        self.scenario.before(self.system, self.template)
        for crash in self.scenario.crashes:
            with self.place.server() as server:
                name = self.system.name
                ended = server.run(name, crash.act, self.template, crash.fault)
            if not ended.hit:
                raise TwinError(f"{crash} did not come about: {ended.notes}")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A play that was rehearsed.

    Attributes:
        clean: how it ends if nothing happens.
        judge: of what is left afterwards.
    """

    play: Play
    clean: Ended
    judge: Judge

    @property
    def calls(self) -> tuple[Call, ...]:
        """By which the scenario changes files if nothing happens."""
        return self.clean.calls

    def strike(self, fault: Fault) -> Strike:
        """Acts the scenario with a fault; again if the fault was not met."""
        for _ in range(TRIES):
            root = self.play.place.new_root()
            self.play.copy_to(root)
            ended = self.play.act(root, fault)
            if ended.hit or ended.status is None:
                break
            shutil.rmtree(root, ignore_errors=True)
        return Strike(fault, ended, root)


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault that was let loose on a root, and how the child ended.

    Attributes:
        fault: None if the child ended by itself where it had to.
        root: what is left.
        below: the root as the child saw it, if it is another.
    """

    fault: Fault | None
    ended: Ended
    root: Path
    below: Path | None = None

    def __str__(self) -> str:
        if self.fault is None:
            return "no fault"
        hits = [call for call in self.ended.calls if call.hit]
        where = "not hit"
        if hits:
            path = Path(hits[0].to or hits[0].path)
            try:
                where = str(path.relative_to((self.below or self.root).resolve()))
            except ValueError:
                where = str(path)
            where = f"{hits[0].call} {where}"
        return f"{self.fault.action} at call {self.fault.nth}, {where}"

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def unmet(self) -> Verdict | None:
        """The verdict where there is nothing to judge."""
        if self.ended.status is None:
            return Verdict(Outcome.HANG, "\n".join(map(str, self.ended.notes)))
        if self.fault is not None and not self.ended.hit:
            return Verdict(Outcome.NOT_HIT, "\n".join(map(str, self.ended.notes)))
        return None
