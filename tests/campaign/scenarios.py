"""What is going on in a root when a fault strikes.

A scenario is a root as it was before, what a process then does with it, and which steps may be
gone afterwards.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from systems import SYSTEMS, Ours, PlainOrbax, Trainer

import cnr_jax as cnr
from cnr_jax.testing.faults import Fault

System = type[Ours] | type[PlainOrbax]
# Of JSON types; told to whoever judges.
Note = Callable[[Any], None]
Root = Path


@dataclasses.dataclass(frozen=True)
class Crash:
    """A process that is killed before the scenario begins, and leaves something behind.

    Attributes:
        act: name of a scenario whose act it was at.
        fault: that killed it.
    """

    act: str
    fault: Fault


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One thing that a process does with a root.

    Attributes:
        name: on the command line and in reports.
        before: makes the root as it was, up to the crashes.
        crashes: what happened to it then.
        act: what is done, in a process of its own, given the system, the root, a function
            that notes how far it came, and what else `Play.act` passes on.
        removes: steps that may be gone afterwards.
        keep: how many steps retention keeps when the run goes on; None: all.
        salts: of the steps that it trains another way than others do.
        systems: that can act it.
        outside: whether only calls outside of the new step's temporary folder are struck.
    """

    name: str
    before: Callable[[System, Root], None]
    act: Callable[..., None]
    crashes: tuple[Crash, ...] = ()
    removes: frozenset[int] = frozenset()
    keep: int | None = None
    salts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    outside: bool = False


def steps_from(trainer: Trainer, first: int, stop: int, salt: int = 0) -> None:
    """Trains and saves some steps, each to its end."""
    for step in range(first, stop):
        trainer.train(step, salt)
        trainer.save(step)
        trainer.wait()


def nothing(system: System, root: Root) -> None:
    """A root that is not there yet."""


def chain_of(stop: int) -> Callable[[System, Root], None]:
    """A root with a full step 0 and deltas that rest on each other."""

    def before(system: System, root: Root) -> None:
        trainer = system(root)
        steps_from(trainer, 0, stop)
        trainer.close()

    return before


def save_next(keep: int | None = None, **settings: Any) -> Callable[..., None]:
    """Goes on from the newest step and saves the next one."""

    def act(system: System, root: Root, note: Note, die: bool = False) -> None:
        trainer = system(root, keep=keep, **settings)
        newest = trainer.go_on()
        step = 0 if newest is None else newest + 1
        trainer.train(step)
        trainer.save(step)
        trainer.wait()
        note(f"durable {step}")
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.close()

    return act


def save_at_once(count: int) -> Callable[..., None]:
    """Goes on from the newest step and saves the next ones, all of them in flight."""

    def act(system: System, root: Root, note: Note) -> None:
        trainer = system(root, max_in_flight=count)
        newest = trainer.go_on()
        first = 0 if newest is None else newest + 1
        for step in range(first, first + count):
            trainer.train(step)
            trainer.save(step)
        trainer.wait()
        note(f"durable {first + count - 1}")
        trainer.close()

    return act


def delete_newest(system: System, root: Root, note: Note) -> None:
    trainer = system(root)
    trainer.delete(max(trainer.steps()))
    note("deleted")
    trainer.close()


def roll_back(system: System, root: Root, note: Note) -> None:
    """Goes on from step 1, another way, and saves another step 2."""
    trainer = system(root)
    trainer.go_on(1)
    trainer.train(2, salt=1)
    trainer.save(2)
    trainer.wait()
    note("durable 2")
    trainer.close()


FULL = cnr.Full()
CHAIN = chain_of(3)
SCENARIOS = (
    Scenario("first save", nothing, save_next()),
    Scenario("delta", CHAIN, save_next()),
    Scenario("three at once", CHAIN, save_at_once(3), systems=(Ours.name,)),
    Scenario(
        "full and retention",
        CHAIN,
        save_next(keep=1, policy=FULL),
        removes=frozenset({0, 1, 2}),
        keep=1,
    ),
    Scenario("delete", CHAIN, delete_newest, removes=frozenset({2})),
    Scenario(
        "start-up clean-up",
        CHAIN,
        save_next(),
        # A deletion that was cut short, and a save before and after it became complete.
        crashes=(
            Crash("full and retention", Fault("unlink", 4, match="/default/")),
            Crash("delta", Fault("rename", match=".orbax-checkpoint-tmp")),
        ),
        removes=frozenset({0, 1, 2}),
        outside=True,
    ),
    Scenario(
        "rollback",
        chain_of(4),
        roll_back,
        removes=frozenset({2, 3}),
        salts={2: 1},
        systems=(Ours.name,),
        outside=True,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
