"""Simulation of one job by discrete events: it trains, saves, fails, restores, and trains again."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cnr_jax.goodput.failures import HOUR_SECS, Failures
from cnr_jax.goodput.plans import Plan
from cnr_jax.goodput.profile import Profile, check_numbers
from cnr_jax.repository.description import aligned, amount

# Share of an interval that counts as nothing: sums of floats are off by less.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """Simulated run of a job under one plan: where its time went.

    Each second in which the job had its nodes is in one of the fields in seconds.

    Attributes:
        plan: name of the plan.
        failures: name of the trace.
        every: train steps between two saves.
        in_flight: most saves at the same time.
        useful_secs: seconds of train steps that stay.
        lost_secs: seconds of train steps that failures took, and that were trained again.
        blocking_secs: seconds for which saves held training up, waits for saves before included.
        contention_secs: seconds by which train steps were slower beside saves.
        restart_secs: seconds of restarts and restores.
        down_secs: seconds in which the job lacked a node.
        failed: number of failures.
        saves: number of saves that became durable.
        written_bytes: bytes of all saves that were begun.
        stored_bytes: most bytes that storage must hold.
    """

    plan: str
    failures: str
    every: int
    in_flight: int
    useful_secs: float
    lost_secs: float
    blocking_secs: float
    contention_secs: float
    restart_secs: float
    down_secs: float
    failed: int
    saves: int
    written_bytes: int
    stored_bytes: int

    @property
    def up_secs(self) -> float:
        """Seconds in which the job had its nodes."""
        saving = self.blocking_secs + self.contention_secs
        return self.useful_secs + self.lost_secs + saving + self.restart_secs

    @property
    def goodput(self) -> float:
        """Share of `up_secs` in which it trained steps that stay."""
        return self.useful_secs / self.up_secs

    def asdict(self) -> dict[str, Any]:
        """All fields, and `goodput`, as values of JSON."""
        return {**dataclasses.asdict(self), "goodput": self.goodput}


def simulate_job(
    profile: Profile,
    failures: Failures,
    plan: Plan,
    *,
    notice_secs: float = 0.0,
) -> JobRun:
    """Simulates a job over a trace of failures.

    A failure ends whatever the job does, saves in flight included. The job then goes on from the
    last durable save. Saves become durable in the order of their steps. Those that are written at
    the same time slow each other down as the profile says. Each stretch of time in which the job
    has its nodes begins with the restart and the restore.

    Args:
        profile: profile of the run.
        failures: trace of failures.
        plan: plan of its saves.
        notice_secs: seconds before a failure at which the job is told of it. It then stops training
            and saves once more.

    Raises:
        OptionError: if `notice_secs` is no number of 0 or more.
    """
    check_numbers(notice_secs=notice_secs)
    job = _Job(profile, plan, failures.nodes)
    for begin, end in failures.up:
        job.live(begin, end, fails=end < failures.secs, notice_secs=notice_secs)
    spent = job.spent
    return JobRun(
        plan=plan.name,
        failures=failures.name,
        every=plan.every,
        in_flight=plan.in_flight,
        useful_secs=spent["training"] - spent["lost"],
        lost_secs=spent["lost"],
        blocking_secs=spent["blocking"],
        contention_secs=spent["contention"],
        restart_secs=spent["restart"],
        down_secs=failures.secs - failures.up_secs,
        failed=failures.count,
        saves=job.durable_saves,
        written_bytes=job.written_bytes,
        stored_bytes=plan.stored_bytes,
    )


class _Save:
    """Save in flight; `left` is the seconds until it is written if no other one is in flight."""

    __slots__ = ("left", "number", "trained")

    def __init__(self, number: int, trained: float, left: float) -> None:
        self.number, self.trained, self.left = number, trained, left


class _Job:
    """Job over a trace of failures.

    Attributes:
        spent: seconds by what they went to.
        durable_saves: number of saves that became durable, those after a restore included.
        written_bytes: bytes of all saves that were begun.
    """

    def __init__(self, profile: Profile, plan: Plan, nodes: int) -> None:
        self.spent = collections.defaultdict[str, float](float)
        self.durable_saves = self.written_bytes = 0
        self._profile, self._plan = profile, plan
        sizes = plan.schedule.written
        self._sizes = sizes.tolist()
        self._blocking = profile.blocking_secs(sizes, nodes).tolist()
        self._writes = profile.durable_secs(sizes, plan.plain).tolist()
        self._reads = plan.schedule.steady.tolist()
        self._cycle = plan.cycle
        self._flight = collections.deque[_Save]()
        self._now = self._end = 0.0
        # Seconds of train steps: all, and those that the last durable save holds. Numbers of
        # saves: the one that comes next, and the one after the last durable save.
        self._trained = self._durable = 0.0
        self._next = self._behind = 0

    def live(
        self, begin: float, end: float, *, fails: bool, notice_secs: float
    ) -> None:
        """Lives through a stretch of time in which the job has its nodes."""
        self._flight.clear()
        self._trained, self._next = self._durable, self._behind
        self._now, self._end = begin, end - notice_secs if fails else end
        secs, rest = self._profile.restart_secs, "restart"
        if self._behind:
            secs += self._profile.reading.of(self._reads[self._place(self._behind - 1)])
        if self._pass("restart", secs):
            self._train()
            rest = "blocking"
            if self._now < end:
                self._end = end
                self._save()
        self._end = end
        self._pass(rest, math.inf)
        if fails:
            self.spent["lost"] += self._trained - self._durable

    def _train(self) -> None:
        """Trains and saves until time is over."""
        train = self._plan.every * self._profile.step.fixed
        # A save after a notice may come within an interval: the next one is at a multiple again.
        left = train - self._trained % train
        if left < _ROUNDING * train:
            left = train
        while self._pass("training", left) and self._save():
            left = train

    def _save(self) -> bool:
        """Makes a save; returns whether time was left for its blocking part."""
        if not self._pass("blocking", math.inf, most=self._plan.in_flight - 1):
            return False
        place = self._place(self._next)
        self.written_bytes += self._sizes[place]
        if not self._pass("blocking", self._blocking[place]):
            return False
        self._flight.append(_Save(self._next, self._trained, self._writes[place]))
        self._next += 1
        return True

    def _pass(self, on: str, left: float, most: int = -1) -> bool:
        """Lets time pass until something is done; returns False if time is over before that.

        Args:
            on: what the time is spent on.
            left: seconds that it takes by itself.
            most: end also once only so many saves are in flight.
        """
        profile, flight = self._profile, self._flight
        while left > 0 and len(flight) > most:
            active = [save for save in flight if save.left > 0]
            slow = profile.slower(len(active)) if active else 1.0
            drag = 1 + profile.contention if active and on == "training" else 1.0
            rest = self._end - self._now
            written = min(save.left for save in active) * slow if active else math.inf
            secs = min(rest, left * drag, written)
            if secs < 0 or secs == math.inf:
                return False
            self._now = self._end if secs == rest else self._now + secs
            left = 0.0 if secs == left * drag else left - secs / drag
            self.spent[on] += secs / drag
            if drag > 1:
                self.spent["contention"] += secs - secs / drag
            if on == "training":
                self._trained += secs / drag
            for save in active:
                save.left = 0.0 if save.left * slow == secs else save.left - secs / slow
            self._commit()
            if secs == rest:
                return left <= 0
        return True

    def _commit(self) -> None:
        """Makes saves durable that are written, in order."""
        while self._flight and self._flight[0].left <= 0:
            save = self._flight.popleft()
            self._durable, self._behind = save.trained, save.number + 1
            self.durable_saves += 1

    def _place(self, save: int) -> int:
        """Number of a save in the schedule, which repeats its last cycle."""
        if save < len(self._sizes):
            return save
        first, after = self._cycle.start, self._cycle.stop
        return first + (save - first) % (after - first)


def run_lines(runs: Sequence[JobRun]) -> list[str]:
    """Table of simulated runs, a line each."""
    head = ["system", "every", "in flight", "goodput", "saving", "lost", "restarts"]
    rows = [[*head, "written", "held"]]
    for run in runs:
        saving = (run.blocking_secs + run.contention_secs) / run.up_secs
        rows.append(
            [
                run.plan,
                f"{run.every:,}",
                str(run.in_flight),
                f"{100 * run.goodput:.1f} %",
                f"{100 * saving:.1f} %",
                f"{run.lost_secs / HOUR_SECS:.2f} h",
                f"{run.restart_secs / HOUR_SECS:.2f} h",
                amount(run.written_bytes),
                amount(run.stored_bytes),
            ]
        )
    return aligned(rows, right=set(range(1, len(rows[0]))))
