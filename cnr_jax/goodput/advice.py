"""Advice on when to save: the plan of most goodput within a slowdown budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.goodput.failures import HOUR_SECS, Failures, failures_from
from cnr_jax.goodput.model import goodput_of, pace_of, stretches_of
from cnr_jax.goodput.plans import POLICIES, Plan, plan_of
from cnr_jax.goodput.profile import Profile, Seconds, check_integers, check_numbers
from cnr_jax.policy import Policy, bits_for
from cnr_jax.repository.description import aligned

# Factors between intervals that are tried: over all of them, then around the best.
_COARSE, _FINE = 1.5, 1.06
_LONGEST = 10_000_000
# What is advised keeps `Pace.busy` below this: at 1, a write that takes a little longer than usual
# makes the next save wait.
_MOST_BUSY = 0.8
# Number of draws of the profile and of the failures. The middle four fifths of them are a range.
_DRAWS, _RANGE = 200, (0.1, 0.5, 0.9)
# The most failures of a draw: draws of more hardly spread.
_MOST_DRAWN = 10_000
# Fields of a profile; a draw has a factor for each.
_MEASURED = ("step", "blocking", "write", "restore")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """Expected figure, and the range in which eight of ten draws lie."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, and the figures to expect of it.

    Attributes:
        every: train steps between two saves.
        in_flight: most saves at the same time.
        policy: policy of its saves.
        goodput: share of the time with all nodes in which the job trains steps that stay.
        slowdown: share by which training takes longer than without saves.
        interval_secs: seconds from save to save.
        lost_secs: seconds of training that a failure takes.
        restart_secs: seconds from a failure, or from when nodes are back, until training goes on.
    """

    every: int
    in_flight: int
    policy: Policy
    goodput: Figure
    slowdown: Figure
    interval_secs: Figure
    lost_secs: Figure
    restart_secs: Figure

    def asdict(self) -> dict[str, Any]:
        """All fields as values of JSON; the policy as a program writes it."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        figures = {
            k: dataclasses.asdict(v) for k, v in found.items() if isinstance(v, Figure)
        }
        return {**found, **figures, "policy": _written(self.policy)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice for a run, as `advise` gives it.

    Attributes:
        best: plan of most goodput within the budget, with saves no closer than `advise` says.
        second: best plan with another policy, or with another number of saves in flight.
        budget: slowdown that was allowed.
        mtbf_secs: mean time between failures, in seconds.
        job_hours: hours that the job trains for, restarts included.
        expected_restores: number of failures expected in that time.
        bits: width of codes for so many restores.
        min_fulls: number of full checkpoints to keep.
        young: interval in steps by Young's formula, for reference.
        daly: interval in steps by Daly's formula, for reference.
        changes: interval in steps of the same policy if one thing were otherwise, by that thing.
        saves: number of measured saves that the advice rests on; None: a user gave the figures.
        assumed: what was taken for granted, because nothing was measured.
    """

    best: Choice
    second: Choice
    budget: float
    mtbf_secs: float
    job_hours: float
    expected_restores: float
    bits: int
    min_fulls: int
    young: int
    daly: int
    changes: dict[str, int]
    saves: int | None
    assumed: tuple[str, ...]

    @property
    def is_close(self) -> bool:
        """Whether the goodput of the second best plan lies within the range of the best."""
        return self.second.goodput.value >= self.best.goodput.low

    @property
    def program(self) -> str:
        """Lines of a program that follow the advice."""
        several = f"    max_in_flight={self.best.in_flight},\n"
        return (
            "options = cnr.Options(\n"
            f"    policy={_written(self.best.policy)},\n"
            f"{several * (self.best.in_flight > 1)}"
            f"    min_fulls={self.min_fulls},\n"
            ")\n"
            "orbax_options = ocp.CheckpointManagerOptions("
            f"save_interval_steps={self.best.every})"
        )

    def asdict(self) -> dict[str, Any]:
        """All fields, and figures that follow from them, as values of JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        both = {"best": self.best.asdict(), "second": self.second.asdict()}
        more = {"is_close": self.is_close, "program": self.program}
        return {**found, **both, **more, "assumed": list(self.assumed)}

    def __str__(self) -> str:
        """What to do, what to expect of it, what else there is, and the lines to paste."""
        best, second = self.best, self.second
        rows = [["", "expected", "10 to 90 %"]]
        for what, figure, told in (
            ("goodput", best.goodput, _share),
            ("slowdown", best.slowdown, _share),
            ("interval", best.interval_secs, _secs),
            ("lost by a failure", best.lost_secs, _secs),
            ("restart and restore", best.restart_secs, _secs),
        ):
            span = f"{told(figure.low)} to {told(figure.high)}"
            rows.append([what, told(figure.value), span])
        rests = (
            "figures of a user's own" if self.saves is None else f"{self.saves} saves"
        )
        within = ", which is within the range of the best" if self.is_close else ""
        lines = [
            f"save {_phrase(best)}",
            *aligned(rows, right={1, 2}),
            f"it rests on {rests}, and {_count(self.expected_restores)} failures in"
            f" {self.job_hours:,.4g} h",
            f"second best: {_phrase(second)}, goodput {_share(second.goodput.value)}{within}",
            f"for reference: every {self.young:,} steps by Young's formula,"
            f" {self.daly:,} by Daly's",
            *(
                f"every {every:,} steps if {what}"
                for what, every in self.changes.items()
            ),
            *(f"taken for granted: {what}" for what in self.assumed),
        ]
        if best.slowdown.value > self.budget:
            lines.insert(
                1, f"no plan costs less than the budget of {_share(self.budget)}"
            )
        return "\n".join([*lines, "", self.program])


def advise(
    profile: Profile | None,
    failures: Failures | str,
    *,
    job_hours: float,
    nodes: int | None = None,
    budget: float = 0.03,
    notice_secs: float = 0.0,
    damage: float = 0.0,
    seed: int = 0,
) -> Advice | None:
    """Advises when to save: finds the plan of most goodput whose slowdown is within a budget.

    Goodput is that of `expected_goodput`. Ranges come from draws: of measurements, as far as they
    spread, and of as many failures as the job will see. Saves come at least a quarter further
    apart than storage can write them.

    Args:
        profile: profile of the run; None: not known, as `manager.profile()` has it before five
            saves.
        failures: failures, from a trace or a distribution; or a text that names them, as on the
            command line: the path of a trace, `exponential:4000` or `weibull:4000,0.7`.
        job_hours: hours that the job trains for, restarts included.
        nodes: number of nodes that the job needs, if a text names the failures; None: for a trace,
            the most that are up at a time; for a distribution one.
        budget: share by which saves may make training longer.
        notice_secs: seconds before a failure at which the job is told of it.
        damage: chance that a restore finds a full checkpoint damaged, for `min_fulls`.
        seed: number that makes the draws repeatable.

    Returns:
        The advice; None if fewer than five saves tell what a step and a save take.

    Raises:
        OptionError: if a value cannot be used, the trace has no failure, or failures come more
            often than a train step is done.

    Source: Young (CACM 1974) and Daly (FGCS 2006) for reference. Differs from them in: saves
    overlap with training, and are durable only when they are written.
    """
    check_numbers(above=True, job_hours=job_hours, budget=budget)
    check_numbers(notice_secs=notice_secs, damage=damage)
    check_integers(seed=seed)
    if budget >= 1 or damage > 1:
        wrong = f"the slowdown that is allowed is {budget!r}, expected a share below 1"
        if damage > 1:
            wrong = f"the chance of damage is {damage!r}, expected a share of 1 at most"
        raise OptionError(f"{wrong}\n  hint: 0.03 is 3 %")
    job_hours, budget, notice_secs = map(float, (job_hours, budget, notice_secs))
    failures = _failures(failures, nodes, seed)
    if profile is not None and not isinstance(profile, Profile):
        raise OptionError(
            f"a profile is what manager.profile() returns, got {type(profile).__name__}"
        )
    if profile is None or not profile.is_known:
        return None
    if failures.mtbf_secs < profile.step.fixed:
        raise OptionError(
            f"failures of {failures.name!r} come every {failures.mtbf_secs:.3g} s, and a train step"
            f" takes {profile.step.fixed:.3g} s: no interval is best\n"
            "  hint: a distribution is given with the mean hours between failures of one node"
        )
    found = _plans(profile, failures, budget, notice_secs)
    draws = [*_draws(profile, failures, job_hours, seed)]
    best, second = (
        _choice(plan, policy, profile, failures, draws, notice_secs)
        for plan, policy in found[:2]
    )
    plan, policy = found[0]
    pace = pace_of(plan, profile, failures.nodes)
    mtbf = failures.mtbf_secs
    young, daly = _references(pace.interval_secs - pace.train_secs, mtbf)
    restores = job_hours * HOUR_SECS / mtbf
    # Without a second full checkpoint damage takes all that was trained.
    lost = restores * damage * job_hours * HOUR_SECS / 2
    return Advice(
        best=best,
        second=second,
        budget=budget,
        mtbf_secs=mtbf,
        job_hours=job_hours,
        expected_restores=restores,
        bits=bits_for(restores),
        min_fulls=2 if lost > profile.blocking.of(profile.full_bytes) else 1,
        young=max(1, round(young / profile.step.fixed)),
        daly=max(1, round(daly / profile.step.fixed)),
        changes={
            what: best_plan(other, up, maker, budget, notice_secs, _MOST_BUSY).every
            for what, other, up in _otherwise(profile, failures)
            for maker in [_maker(other, policy, plan.in_flight)]
        },
        saves=_rests_on(profile),
        assumed=(*_assumed(profile, damage),),
    )


def _failures(given: Failures | str, nodes: int | None, seed: int) -> Failures:
    """Failures that were given, as `Failures`; at least one is needed."""
    if isinstance(given, str):
        given = failures_from(given, nodes, None, seed)
    elif not isinstance(given, Failures):
        raise OptionError(
            f"failures are Failures, or a text such as 'exponential:4000', got {given!r}"
        )
    elif nodes is not None:
        raise OptionError(
            f"nodes is {nodes!r}, but the failures are those of {given.nodes} nodes already"
        )
    if not given.count:
        raise OptionError(f"trace {given.name!r} has no failure: no interval is best")
    return given


def _rests_on(profile: Profile) -> int | None:
    """Number of saves behind the least known figure; None: a user gave all figures."""
    told = (profile.step.samples, profile.blocking.samples, profile.write.samples)
    return min((each for each in told if each is not None), default=None)


def advised_plan(
    profile: Profile,
    failures: Failures,
    budget: float = 0.03,
    notice_secs: float = 0.0,
) -> Plan:
    """Plan that `advise` finds best, with the name `advised`."""
    plan, _ = _plans(profile, failures, budget, notice_secs)[0]
    return dataclasses.replace(plan, name="advised")


def _plans(
    profile: Profile, failures: Failures, budget: float, notice_secs: float
) -> list[tuple[Plan, Policy]]:
    """Plans and their policies, the best first, each with its best interval.

    There is one for each policy and number of saves in flight that the profile was measured with.
    """
    found = [
        (
            best_plan(profile, failures, maker, budget, notice_secs, _MOST_BUSY),
            policy,
        )
        for policy in POLICIES
        for in_flight in range(1, len(profile.in_flight) + 1)
        for maker in [_maker(profile, policy, in_flight)]
    ]

    def worth(each: tuple[Plan, Policy]) -> tuple[float, float, float]:
        return _worth(each[0], profile, failures, budget, notice_secs, _MOST_BUSY)

    return sorted(found, key=worth, reverse=True)


def best_plan(
    profile: Profile,
    failures: Failures,
    maker: Callable[[int], Plan],
    budget: float = 0.03,
    notice_secs: float = 0.0,
    most_busy: float = 1.0,
) -> Plan:
    """Plan with the interval of most goodput within a slowdown budget.

    Args:
        profile: profile of the run.
        failures: failures of the run.
        maker: function that makes a plan from an interval.
        budget: share by which saves may make training longer. If no interval keeps it, the interval
            that costs least is taken.
        notice_secs: seconds before a failure at which the job is told of it.
        most_busy: shortest interval at which saves can follow each other, as the largest share of
            the interval that it may be. At 1 saves may wait for each other.
    """
    longest = min(max(failures.mtbf_secs, 1.0) / profile.step.fixed, _LONGEST)
    coarse = {
        round(_COARSE**n) for n in range(math.ceil(math.log(longest, _COARSE)) + 2)
    }

    def best(intervals: set[int]) -> Plan:
        plans = map(maker, sorted(intervals))
        return max(
            plans,
            key=lambda p: _worth(p, profile, failures, budget, notice_secs, most_busy),
        )

    near = best(coarse).every
    return best({max(1, round(near * _FINE**n)) for n in range(-7, 8)})


def _worth(
    plan: Plan,
    profile: Profile,
    failures: Failures,
    budget: float,
    notice_secs: float,
    most_busy: float,
) -> tuple[float, float, float]:
    """Key by which plans are compared.

    First comes by how much they exceed the budget, then by how much saves follow each other more
    closely than they may, then goodput.
    """
    pace = pace_of(plan, profile, failures.nodes)
    goodput = goodput_of(pace, profile, *stretches_of(failures), notice_secs)
    close = max(pace.busy - most_busy, 0.0)
    return -max(pace.slowdown - budget, 0.0), -close, goodput


def _maker(profile: Profile, policy: Policy, in_flight: int) -> Callable[[int], Plan]:
    return lambda every: plan_of(profile, every, policy, in_flight)


def _draws(
    profile: Profile, failures: Failures, job_hours: float, seed: int
) -> Iterator[tuple[Profile, np.ndarray, np.ndarray]]:
    """Yields profiles as measurements spread, each with as many stretches as the job will see."""
    rng = np.random.default_rng(seed)
    up, fails = stretches_of(failures)
    count = min(max(1, round(job_hours * HOUR_SECS / up.mean())), _MOST_DRAWN)
    for _ in range(_DRAWS):
        drawn: dict[str, Seconds] = {}
        for name, at in zip(_MEASURED, rng.random(len(_MEASURED)), strict=True):
            line: Seconds = getattr(profile, name)
            spread = np.interp(at, _RANGE, (line.low, 1.0, line.high))
            drawn[name] = line.times(float(spread))
        chosen = rng.integers(0, len(up), count)
        yield dataclasses.replace(profile, **drawn), up[chosen], fails[chosen]


def _choice(
    plan: Plan,
    policy: Policy,
    profile: Profile,
    failures: Failures,
    draws: list[tuple[Profile, np.ndarray, np.ndarray]],
    notice_secs: float,
) -> Choice:
    def figures(
        profile: Profile, up: np.ndarray, fails: np.ndarray
    ) -> tuple[float, ...]:
        pace = pace_of(plan, profile, failures.nodes)
        return (
            goodput_of(pace, profile, up, fails, notice_secs),
            pace.slowdown,
            pace.interval_secs,
            pace.lost_secs,
            profile.restart_secs + pace.restore_secs,
        )

    values = figures(profile, *stretches_of(failures))
    spread = np.array([figures(*draw) for draw in draws])
    low, _, high = np.quantile(spread, _RANGE, axis=0)
    goodput, slow, interval, lost, restart = map(
        Figure, values, low.tolist(), high.tolist()
    )
    return Choice(
        every=plan.every,
        in_flight=plan.in_flight,
        policy=policy,
        goodput=goodput,
        slowdown=slow,
        interval_secs=interval,
        lost_secs=lost,
        restart_secs=restart,
    )


def _references(cost_secs: float, mtbf_secs: float) -> tuple[float, float]:
    """Intervals in seconds by the formulas of Young and of Daly, for saves that cost so much."""
    young = math.sqrt(2 * cost_secs * mtbf_secs)
    share = cost_secs / (2 * mtbf_secs)
    if share >= 1:
        return young, mtbf_secs
    return young, young * (1 + math.sqrt(share) / 3 + share / 9) - cost_secs


def _otherwise(
    profile: Profile, failures: Failures
) -> Iterator[tuple[str, Profile, Failures]]:
    """Yields what could be otherwise, with the profile and the failures of each."""
    slow = profile.blocking.times(2)
    yield (
        "saves held training up for twice as long",
        _with(profile, blocking=slow),
        failures,
    )
    late = _with(profile, write=profile.write.times(2))
    yield "writes took twice as long", late, failures
    half = tuple((a / 2, b / 2) for a, b in failures.up)
    often = dataclasses.replace(failures, up=half, secs=failures.secs / 2)
    yield "failures came twice as often", profile, often


def _with(profile: Profile, **changes: Seconds) -> Profile:
    return dataclasses.replace(profile, **changes)


def _assumed(profile: Profile, damage: float) -> Iterator[str]:
    if not profile.restore.known:
        yield "restores read as fast as saves are written"
    if not profile.restart_secs:
        yield "a restart takes no time beside the restore"
    if len(profile.in_flight) == 1:
        yield "several saves in flight are worth nothing"
    if not profile.contention:
        yield "train steps are no slower beside a save"
    if not damage:
        yield "no restore finds a checkpoint damaged, so one full one is enough"


def _phrase(choice: Choice) -> str:
    several = f", {choice.in_flight} in flight" * (choice.in_flight > 1)
    return f"every {choice.every:,} steps, policy {choice.policy.name}{several}"


def _written(policy: Policy) -> str:
    """Policy as a program writes it, without the fields that have their defaults."""
    given: Any = policy
    fields = [
        f"{field.name}={getattr(given, field.name)!r}"
        for field in dataclasses.fields(given)
        if getattr(given, field.name) != field.default
    ]
    return f"cnr.{type(policy).__name__}({', '.join(fields)})"


def _count(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _secs(value: float) -> str:
    return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"
