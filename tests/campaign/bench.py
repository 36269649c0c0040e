"""What all cases need: servers of children, scenarios with their twins, samples."""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from children import Server
from scenarios import Scenario, System
from stages import Play, Stage
from systems import SYSTEMS, Ours

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 8
QUICK_PEERS = (
    "kill: delete",
    "damage: flips, orbax, data",
    "damage: files, missing",
    "power cut: after wait_until_finished, full and retention",
    "mistakes: stale deltas",
)


class Bench:
    """One run of the campaign.

    Args:
        folder: everything is written below it.
        quick: take samples instead of everything.
        only: texts of which one must be in `case: part`; empty: everything.
        servers: that fork children.
        systems: names of those that are put to the test; None: all.
    """

    def __init__(
        self,
        folder: Path,
        servers: Sequence[Server],
        *,
        quick: bool,
        only: Sequence[str] = (),
        systems: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.quick, self.only = folder, quick, tuple(only)
        self.systems: tuple[System, ...] = tuple(
            system
            for name, system in SYSTEMS.items()
            if systems is None or name in systems
        )
        self._idle: queue.Queue[Server] = queue.Queue()
        for server in servers:
            self._idle.put(server)
        self._workers = len(servers)
        self._names = itertools.count()
        self._stages: dict[tuple[str, str], Stage] = {}

    def wants(self, case: str, part: str, system: System) -> bool:
        """Whether a part of a case was asked for; peers have few of them in quick runs."""
        name = f"{case}: {part}"
        if self.quick and system is not Ours and name not in QUICK_PEERS:
            return False
        return not self.only or any(text in name for text in self.only)

    def new_root(self) -> Path:
        """The path of a root that is not there yet."""
        return self.folder / f"root{next(self._names)}"

    def sample(
        self, points: Sequence[T], quick: int, full: int | None = None
    ) -> list[T]:
        """Points spread evenly over all, the last one among them: so many, or all."""
        count = quick if self.quick else full
        if count is None or count >= len(points):
            return list(points)
        size = len(points)
        return [points[(i + 1) * size // count - 1] for i in range(count)]

    @staticmethod
    def random(name: str) -> random.Random:
        """Random numbers that are the same in every run of the campaign."""
        return random.Random(f"campaign {name}")

    @contextlib.contextmanager
    def server(self) -> Iterator[Server]:
        """A server that nobody else uses meanwhile."""
        server = self._idle.get()
        try:
            yield server
        finally:
            self._idle.put(server)

    def side_by_side(
        self, strike: Callable[[T], R], points: Iterable[T]
    ) -> Iterator[tuple[T, R]]:
        """What `strike` returns for each point, in order, computed on all servers, a bit ahead."""
        with ThreadPoolExecutor(self._workers) as pool:
            waiting: list[tuple[T, Future[R]]] = []
            for point in points:
                waiting.append((point, pool.submit(strike, point)))
                if len(waiting) >= AHEAD:
                    first, done = waiting.pop(0)
                    yield first, done.result()
            for first, done in waiting:
                yield first, done.result()

    def stage(
        self, system: System, scenario: Scenario, *, arms_later: bool = False
    ) -> Stage:
        """A scenario that is ready to be acted; made once.

        Args:
            system: that acts it.
            scenario: what is acted.
            arms_later: whether the act says itself from when on calls count.

        Raises:
            TwinError: if it does not go as it should without a fault.
        """
        key = system.name, scenario.name
        if key not in self._stages:
            play = Play(self, system, scenario, self.new_root(), arms_later)
            self._stages[key] = play.rehearsed(1 if self.quick else 2)
        return self._stages[key]
