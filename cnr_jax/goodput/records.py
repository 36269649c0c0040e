"""Profile of a run from what it has noted: its manifests, and its metrics if it keeps any."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

import numpy as np

from cnr_jax.goodput.profile import ENOUGH, Profile, Seconds
from cnr_jax.repository.course import Course, Save, course_of
from cnr_jax.repository.describe import describe

# The newest saves tell what saves take now.
_MOST_SAVES = 300
# Growth of changed rows with train steps, if a run does not show it, as where look-ups are skewed.
_USUAL_EXPONENT = 0.7
# What differs by less, as a share of the largest, does not tell a slope.
_TELLING = 0.1
# Share of the time between two saves within which the later one begins as the one before ends.
_WAITED = 0.1


def recorded_profile(
    root: str | os.PathLike[str], *, restart_secs: float = 0.0, item: str | None = None
) -> Profile | None:
    """Profile of a run from what it has noted in its root.

    Imports neither jax nor Orbax. A run may be saving there.

    Args:
        root: directory of the checkpoints.
        restart_secs: seconds of a restart, which no record tells.
        item: item to look at, where steps hold several.

    Returns:
        As `profile_of`.

    Raises:
        NoStepError, OptionError: as `cnr_jax.describe`.
    """
    return profile_of(course_of(describe(root, item=item)), restart_secs)


def profile_of(course: Course, restart_secs: float = 0.0) -> Profile | None:
    """Profile of a run from its own records.

    Typical figures are medians, so that what is compiled in first saves does not count. Nothing
    tells how steps beside a save differ from others, or what several saves at once would take:
    `contention` is 0, and `in_flight` that of limited bandwidth. How long saves hold training up,
    and what restores take, is noted by `Options(metrics=True)` alone.

    Args:
        course: course of the run.
        restart_secs: seconds of a restart, which no record tells.

    Returns:
        The profile; None: too few saves tell of train steps between them. Figures on which too
        little rests have few `samples`.
    """
    saves = [save for save in course.saves if "tables" in save.parts][-_MOST_SAVES:]
    timed = [save for save in saves if save.secs is not None]
    pace = [*_step_secs(timed)]
    if len(pace) < ENOUGH - 1 or not any(pace):
        return None
    fulls = [_bytes(save) for save in saves if save.kind == "full"]
    dense = _median(save.parts["dense"] + save.parts["manifests"] for save in saves)
    plain = _median(save.plain_bytes for save in saves if save.plain_bytes)
    sizes = {
        save.step - save.parent_step: _bytes(save) - dense
        for save in saves
        if save.parent_step is not None and save.step > save.parent_step
    }
    steps = np.array([n for n, size in sizes.items() if size > 0], float)
    changed = np.array([size for size in sizes.values() if size > 0])
    exponent = _slope(np.log(steps), np.log(changed))
    exponent = _USUAL_EXPONENT if exponent is None else min(max(exponent, 0.0), 1.0)
    stalls = [save for save in timed if save.stall_secs is not None]
    return Profile(
        step=_seconds([0.0] * len(pace), pace),
        blocking=_seconds(map(_bytes, stalls), (save.stall_secs for save in stalls)),
        write=_seconds(map(_bytes, timed), map(_background_secs, timed)),
        restore=_seconds(*zip(*course.reads, strict=True))
        if course.reads
        else _seconds([], []),
        restart_secs=restart_secs,
        full_bytes=_median(fulls),
        plain_bytes=plain,
        dense_bytes=dense,
        changed_bytes=_median(changed / steps**exponent),
        exponent=exponent,
    )


def _bytes(save: Save) -> float:
    return float(save.total_bytes or 0)


def _background_secs(save: Save) -> float:
    """Seconds from the end of the blocking part of a save until it was durable."""
    commit = save.phases.get("commit", 0.0)
    return max((save.secs or 0.0) - (save.stall_secs or 0.0), 0.0) + commit


def _step_secs(saves: Iterable[Save]) -> Iterator[float]:
    """Seconds of a train step between each save and the next one, beside its blocking part.

    A save that began as soon as the one before was durable has waited for it: what lies between
    tells nothing of train steps.
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
            yield max(passed - (one.stall_secs or 0.0), 0.0) / (two.step - one.step)


def _seconds(sizes: Iterable[float], secs: Iterable[float | None]) -> Seconds:
    """Line through measured seconds by bytes, and how far a tenth of them lie from it.

    The first one is left out, as it compiles. Where it has the most bytes, as the first full save
    often has, it is what that takes at most.
    """
    x, y = np.array([*sizes], float), np.array([*secs], float)
    samples = len(y)
    if not samples:
        return Seconds(fixed=0.0, samples=0)
    first = x[0], y[0]
    if samples > ENOUGH:
        x, y = x[1:], y[1:]
    per_byte = max(_slope(x, y) or 0.0, 0.0)
    fixed = float(np.median(y - per_byte * x))
    if fixed < 0:
        fixed, per_byte = 0.0, float(np.median(y / x))
    if first[0] > x.max():
        per_byte = min(per_byte, max(first[1] - fixed, 0.0) / first[0])
    usual = fixed + per_byte * x
    low, high = np.quantile(y / usual, [0.1, 0.9]) if usual.all() else (1.0, 1.0)
    return Seconds(
        fixed=fixed,
        per_byte=float(per_byte),
        low=min(float(low), 1.0),
        high=max(float(high), 1.0),
        samples=samples,
    )


def _slope(x: np.ndarray, y: np.ndarray) -> float | None:
    """Median slope of all pairs that are far enough apart to tell one; None if none are.

    A few measurements that are far off do not move it.
    """
    i, j = np.triu_indices(len(x), 1)
    apart = x[j] - x[i]
    telling = np.abs(apart) > _TELLING * np.abs(x).max(initial=0.0)
    if not telling.any():
        return None
    return float(np.median((y[j] - y[i])[telling] / apart[telling]))


def _median(values: Iterable[float]) -> float:
    """Median of numbers; 0 of none."""
    found = [*values]
    return float(np.median(found)) if found else 0.0
