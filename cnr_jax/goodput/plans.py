"""Plans of saving: how often, how many saves in flight, and what each save writes."""

from __future__ import annotations

import dataclasses

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.goodput.profile import Profile
from cnr_jax.integers import take_integers
from cnr_jax.policy import Consecutive, Full, Intermittent, Policy
from cnr_jax.simulation import Followed, Schedule

# Policies of plans where none is named.
POLICIES: tuple[Policy, ...] = (Intermittent(), Consecutive(20), Full())
# The most full saves, or saves, of a schedule. Its last cycle stands for all that follow.
_FULLS, _SAVES = 3, 300


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Plan of saving: how often, how many saves in flight, and what each save writes.

    Attributes:
        name: name of the system, or of the policy.
        every: train steps between two saves.
        schedule: parent and bytes of each save. Past its end the last cycle comes again, or the
            last save if there is only one full one.
        in_flight: most saves that are being written at the same time.
        plain: whether saves are plain full ones.

    Raises:
        OptionError: if `every` or `in_flight` is less than 1.
    """

    name: str
    every: int
    schedule: Schedule
    in_flight: int = 1
    plain: bool = False

    def __post_init__(self) -> None:
        take_integers(self, "every", "in_flight")
        found = (self.every, self.in_flight)
        if not all(isinstance(each, int) and each >= 1 for each in found):
            raise OptionError(
                f"a plan saves every {self.every!r} steps with {self.in_flight!r} in flight,"
                " expected integers of 1 or more"
            )

    @property
    def cycle(self) -> slice:
        """Saves of the schedule that come again and again."""
        fulls, saves = self.schedule.fulls, len(self.schedule.parents)
        return (
            slice(fulls[-2], fulls[-1]) if len(fulls) > 1 else slice(saves - 1, saves)
        )

    @property
    def stored_bytes(self) -> int:
        """Most bytes that storage must hold: before, during and after each commit."""
        most = int(self.schedule.stored.max())
        return int(self.schedule.transient.max()) + (self.in_flight - 1) * most


def plan_of(
    profile: Profile, every: int, policy: Policy, in_flight: int = 1, name: str = ""
) -> Plan:
    """Plan of saving by this library under a policy.

    Args:
        profile: profile of the run, which says how its deltas grow.
        every: train steps between two saves.
        policy: policy that decides on each save.
        in_flight: most saves at the same time.
        name: name of the plan; if empty, that of the policy.
    """
    followed, fulls = Followed(policy), 0
    for save in range(_SAVES):
        followed.save(lambda parent, at=save: (0, _size(profile, every, at, parent)))
        fulls += followed.parents[-1] == save
        if fulls == _FULLS:
            break
    return Plan(name or policy.name, every, followed.schedule(), in_flight)


def _size(profile: Profile, every: int, save: int, parent: int) -> int:
    if save == parent:
        return int(profile.full_bytes)
    return int(profile.delta_bytes((save - parent) * every))


def plain_plan(
    profile: Profile, every: int, in_flight: int = 1, name: str = "orbax"
) -> Plan:
    """Plan of plain full saves, as Orbax makes them, one after the other."""
    fulls = Schedule((0, 1), np.full(2, int(profile.plain_bytes)))
    return Plan(name, every, fulls, in_flight, plain=True)
