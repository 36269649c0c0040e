"""Roots of a manager: which one it saves to, and which one mirrors that, as the options say."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cnr_jax import errors
from cnr_jax.options import Options
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.mirroring.near import (
    check_goes_to,
    empty_into,
    lacking_room,
    note_far,
    set_strays_aside,
)
from cnr_jax.repository.mirroring.places import check_apart
from cnr_jax.repository.store import AnyPath, can
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """The roots of a manager.

    Attributes:
        root: root in which saves are committed.
        target: root that mirrors it; None: none does.
        is_near: whether `root` is the near root.
        problem: why saves do not go to the near root that `Options.near` names; empty if they do,
            or none is named.
    """

    root: AnyPath
    target: AnyPath | None = None
    is_near: bool = False
    problem: str = ""

    def mirror(
        self,
        options: Options,
        is_step: Callable[[str], bool] | None,
        item: str | None,
    ) -> Mirror | None:
        """Makes the mirror on process 0, which copies; None on others, and without a target."""
        if self.target is None or jax.process_index() != 0:
            return None
        return Mirror(
            self.root, self.target, **_mirror_settings(options, is_step, item)
        )

    def policy(self, options: Options, is_far: Callable[[int], bool]) -> Any:
        """Preservation policy: that of a near root, or else the user's."""
        if self.is_near:
            return NearSteps(options.near_steps, is_far)
        return options.preservation_policy


class NearSteps:
    """A preservation policy of Orbax that keeps the newest steps, and those not yet in the mirror.

    Args:
        count: how many of the newest steps stay.
        is_far: function that says whether a step, by its number, is committed in the mirror.
    """

    def __init__(self, count: int, is_far: Callable[[int], bool]) -> None:
        self._count, self._is_far = count, is_far

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any = None
    ) -> list[bool]:
        """Says which steps stay in the near root."""
        newest = {info.step for info in checkpoints[-self._count :]}
        return [
            info.step in newest or not self._is_far(info.step) for info in checkpoints
        ]


def tiers_of(
    root: Any,
    options: Options,
    is_step: Callable[[str], bool] | None,
    item: str | None,
    *,
    writes: bool,
    full_bytes: Callable[[], int],
) -> Tiers:
    """Finds the roots of a manager; a manager that only restores uses the root that it is given.

    Args:
        root: root that the manager is given.
        options: options of the run.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        item: name of the item that holds the state; None: the one that is found.
        writes: whether the manager saves.
        full_bytes: function that returns the bytes of the tables in a full checkpoint.

    Raises:
        OptionError: if a root cannot be at its path, one lies in the other, or several processes
            are to save to a near root.
        UsedRootError: if the near root holds another run.
        OSError: if a root cannot be seen or written.
    """
    far = open_root(root)
    if not writes or (options.near is None and options.mirror is None):
        return Tiers(far)
    if options.near is None:
        target = open_root(str(options.mirror))
        check_apart(far, target)
        return Tiers(far, target)
    if jax.process_count() > 1:
        raise errors.OptionError(
            "near is for runs of one process: others would not see what is near this one\n"
            f"  got {jax.process_count()} processes, expected 1\n"
            "  hint: save to a root that all processes share, with mirror= if you like"
        )
    near = open_root(options.near)
    if not can(near).cheap_looks:
        raise errors.OptionError(
            f"near is {os.fspath(near)}, expected a local path, such as one below /dev/shm"
        )
    check_apart(far, near)
    check_goes_to(near, far)
    set_strays_aside(near, far, is_step, item)
    problem = lacking_room(near, far, full_bytes(), is_step, item)
    if not problem:
        with as_root_errors(near):
            note_far(near, far)
        return Tiers(near, far, is_near=True)
    _log.warning(
        "%s: saves go to %s directly; give it more room, as by docker run --shm-size",
        problem,
        os.fspath(far),
    )
    empty_into(near, far, **_mirror_settings(options, is_step, item))
    return Tiers(far, problem=problem)


def _mirror_settings(
    options: Options, is_step: Callable[[str], bool] | None, item: str | None
) -> dict[str, Any]:
    return {
        "is_step": is_step,
        "item": item,
        "keep": options.mirror_keep,
        "min_fulls": options.min_fulls,
        "bytes_per_sec": options.mirror_bytes_per_sec,
        "single": options.single_writer,
    }
