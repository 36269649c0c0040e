"""Profile of a run from what it has noted: measurements of its saves, or manifests and metrics."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

from cnr_jax.goodput.measured import MeasuredSave, Trained, measured_profile
from cnr_jax.goodput.measurements import read_measurements
from cnr_jax.goodput.profile import Profile
from cnr_jax.repository.course import Course, Save, course_of
from cnr_jax.repository.describe import describe
from cnr_jax.repository.description import RootDescription

# The newest saves tell what saves take now.
_MOST_SAVES = 300
# A save waited for the one before if it began as that ended, but for this share of the time.
_WAITED = 0.1


def recorded_profile(
    root: str | os.PathLike[str], *, restart_secs: float = 0.0, item: str | None = None
) -> Profile | None:
    """Profile of a run from what it has noted in its root.

    It comes from what the manager has measured, if that tells enough, else from manifests and
    metrics. Imports neither jax nor Orbax. A run may be saving there.

    Args:
        root: directory of the checkpoints.
        restart_secs: seconds of a restart, which no record tells.
        item: item to look at, where steps hold several.

    Returns:
        As `profile_of`.

    Raises:
        NoStepError, OptionError: as `cnr_jax.describe`.
    """
    return profile_at(describe(root, item=item), restart_secs)


def profile_at(
    root: RootDescription, restart_secs: float = 0.0, course: Course | None = None
) -> Profile | None:
    """Profile as of `recorded_profile`, for a root that is described; its course may be given."""
    measured = read_measurements(root.root)
    found = measured and measured.profile(restart_secs)
    if found is not None and found.is_known:
        return found
    return profile_of(course or course_of(root), restart_secs)


def profile_of(course: Course, restart_secs: float = 0.0) -> Profile | None:
    """Profile of a run from its manifests and metrics.

    Nothing there tells how steps beside a save differ from others, or what several saves at once
    would take: `contention` is 0, and `in_flight` that of limited bandwidth. How long saves hold
    training up, and what restores take, is noted by `Options(metrics=True)` alone.

    Args:
        course: course of the run.
        restart_secs: seconds of a restart, which no record tells.

    Returns:
        As `measured_profile`.
    """
    saves = [each for each in course.saves if each.written_bytes is not None]
    saves = saves[-_MOST_SAVES:]
    timed = [save for save in saves if save.secs is not None]
    trained = dict(_between(timed))
    measured = [_measured(save, trained.get(id(save))) for save in saves]
    return measured_profile(measured, course.reads, restart_secs=restart_secs)


def _measured(save: Save, trained: Trained | None) -> MeasuredSave:
    timed = save.secs is not None
    blocks = timed and save.stall_secs is not None
    return MeasuredSave(
        step=save.step,
        parent=save.parent_step,
        # It has written a delta, whatever baseline it has brought along.
        kind="delta" if save.merged_bytes else save.kind,
        nbytes=save.written_bytes or 0,
        whole_bytes=(save.total_bytes or 0) if save.merged_bytes else 0,
        fixed_bytes=save.parts.get("dense", 0) + save.parts.get("manifests", 0),
        plain_bytes=save.plain_bytes or 0,
        blocking_secs=_blocking_secs(save) if blocks else None,
        durable_secs=_background_secs(save) if timed else None,
        trained=(trained,) if trained else (),
    )


def _blocking_secs(save: Save) -> float:
    """Seconds for which a save held training up, without its wait for the train step before it."""
    return max((save.stall_secs or 0.0) - save.wait_secs, 0.0)


def _background_secs(save: Save) -> float:
    """Seconds from the end of the blocking part of a save until it was durable."""
    commit = save.phases.get("commit", 0.0)
    return max((save.secs or 0.0) - (save.stall_secs or 0.0), 0.0) + commit


def _between(saves: Iterable[Save]) -> Iterator[tuple[int, Trained]]:
    """Yields the train steps between each save and the next one, with the `id` of the next one.

    A save that began as soon as the one before was durable has waited for it: the time between
    them tells nothing of train steps.
    """
    for one, two in itertools.pairwise(saves):
        if one.saved_at is None or two.saved_at is None or two.restored:
            continue
        if two.branch != one.branch or two.step <= one.step:
            continue
        passed = two.saved_at.timestamp() - one.saved_at.timestamp()
        passed -= (two.secs or 0.0) - (one.secs or 0.0)
        durable = (one.secs or 0.0) + one.phases.get("commit", 0.0)
        if abs(passed - durable) > _WAITED * passed:
            secs = max(passed - (one.stall_secs or 0.0) + two.wait_secs, 0.0)
            yield id(two), Trained(two.step - one.step, secs, 0.0)
