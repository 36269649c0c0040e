"""Saves as they were measured, and the profile that follows from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cnr_jax.goodput.profile import ENOUGH, Profile, Seconds

# Exponent by which changed rows grow with train steps if a run does not show it: that of skewed
# look-ups.
_USUAL_EXPONENT = 0.7
# More than bytes or seconds of a save can be.
MOST = 1e18
# Least difference that tells a slope, as a share of the largest value.
_TELLING = 0.1
# Least difference that tells it between the parts of times that lie beside saves.
_CONTRAST = 0.25
# Where means count, one that took so many times as long as usual counts as if that long.
_RARE = 10.0
# Largest share of its time that a train step is believed to lose beside a save.
_MOST_LOST = 0.9


class Trained(NamedTuple):
    """Train steps in a row, between two saves or in a part of that time.

    Attributes:
        steps: their number.
        secs: seconds that they took.
        beside_secs: of these, seconds in which a save was in flight.
    """

    steps: int
    secs: float
    beside_secs: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSave:
    """Save as it was measured.

    Attributes:
        step: its number.
        parent: step of a delta's parent; None: it is a full one, or that is not known.
        kind: `"full"` or `"delta"`.
        nbytes: bytes that it wrote.
        fixed_bytes: of these, bytes that every save writes alike: dense leaves and manifests.
        whole_bytes: bytes of the full checkpoint that it became with a merged baseline; 0: none.
        plain_bytes: bytes that a plain full save would have written; 0: not known.
        blocking_secs: seconds for which it held training up; None: not known.
        durable_secs: seconds from the end of `blocking_secs` until it was durable; None: not known.
        over_secs: seconds from the same moment until it was over: durable, and old steps removed;
            None: not known.
        in_flight: saves in flight while it was written, itself among them, on average.
        agree_secs: seconds that process 0 waited for each other process; 0 if it is alone.
        trained: train steps between the save before and this one.
    """

    step: int
    parent: int | None
    kind: str
    nbytes: int
    fixed_bytes: int
    plain_bytes: int = 0
    whole_bytes: int = 0
    blocking_secs: float | None = None
    durable_secs: float | None = None
    over_secs: float | None = None
    in_flight: float = 1.0
    agree_secs: float = 0.0
    trained: tuple[Trained, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> MeasuredSave:
        """Reads what `dataclasses.asdict` has made of one.

        Raises:
            TypeError, ValueError: if it is something else.
        """
        trained = tuple(Trained(*each) for each in document["trained"])
        unknown = {"parent", "blocking_secs", "durable_secs", "over_secs"}
        numbers = [
            value
            for key, value in document.items()
            if key not in ("kind", "trained") and not (key in unknown and value is None)
        ]
        for each in (*numbers, *itertools.chain(*trained)):
            if not 0 <= each < MOST:
                raise ValueError(f"{each} is nothing that is measured")
        if document["kind"] not in ("full", "delta") or any(
            t.steps < 1 for t in trained
        ):
            raise ValueError(f"{document} is no save")
        return cls(**{**document, "trained": trained})


def measured_profile(
    saves: Sequence[MeasuredSave],
    reads: Sequence[tuple[float, float]] = (),
    *,
    restart_secs: float = 0.0,
    processes: int = 1,
) -> Profile | None:
    """Profile of a run from saves that were measured.

    Typical figures are medians, so that what is compiled in first saves does not count. What
    training waits for is a mean, as it adds up: a few slow saves cost as much as many quick ones.
    Saves that timed no train steps are left out of it. Such is the first one of a program, which
    also claims the root and clears it up.

    Args:
        saves: saves in their order.
        reads: bytes and seconds of restores.
        restart_secs: as in `Profile`; no save tells it.
        processes: processes that saved.

    Returns:
        The profile; None: too few saves tell of train steps between them. Figures that rest on
        too little have few `samples`.
    """
    trained = trained_of(saves)
    told = sum(bool(save.trained) for save in saves)
    if told < ENOUGH - 1 or not trained:
        return None
    lost = lost_beside(trained) or 0.0
    pace = pace_of_trained(trained, lost)
    blocked = [save for save in saves if save.blocking_secs is not None]
    later = [save for save in blocked if save.trained]
    if len(later) >= ENOUGH:
        # The first of all stays: it may be the only full one, and bounds what so many bytes take.
        blocked = [*blocked[: not blocked[0].trained], *later]
    write, in_flight = writes_of(saves)
    fixed = _median(save.fixed_bytes for save in saves)
    plain = _median(save.plain_bytes for save in saves if save.plain_bytes)
    fulls = [save.nbytes for save in saves if save.kind == "full"]
    if not fulls:
        fulls = [save.whole_bytes for save in saves if save.whole_bytes]
    steps, changed, exponent = _growth(saves, fixed)
    return Profile(
        step=dataclasses.replace(_seconds([0.0] * len(pace), pace), samples=told),
        blocking=_seconds(
            (save.nbytes for save in blocked),
            (save.blocking_secs for save in blocked),
            adds_up=True,
        ),
        write=write,
        restore=_seconds(*zip(*reads, strict=True)) if reads else _seconds([], []),
        restart_secs=restart_secs,
        full_bytes=_median(fulls) if fulls else plain,
        plain_bytes=plain,
        dense_bytes=fixed,
        changed_bytes=_median(changed / steps**exponent),
        exponent=exponent,
        contention=lost / (1 - lost),
        in_flight=in_flight,
        node_secs=_median(save.agree_secs for save in saves if save.agree_secs),
        processes=processes,
    )


def writes_of(saves: Sequence[MeasuredSave]) -> tuple[Seconds, tuple[float, ...]]:
    """What a write takes, by its bytes, and how many times longer with 1, 2, ... in flight."""
    written = [save for save in saves if save.durable_secs is not None]
    alone = [save for save in written if round(save.in_flight) <= 1]
    if len(alone) < ENOUGH:
        # The others tell what a write takes at most.
        return _durable(written), (1.0,)
    write = _durable(alone)
    return write, _slowed(written, write)


def trained_of(saves: Iterable[MeasuredSave]) -> list[Trained]:
    """Train steps before saves, as far as they took time."""
    return [each for save in saves for each in save.trained if each.secs > 0]


def lost_beside(trained: Sequence[Trained]) -> float | None:
    """Share of its time that a train step loses beside a save; None if the times do not tell.

    The larger the part of the time in which saves were in flight, the fewer steps a second.
    """
    steps, secs, beside = np.array(trained, float).T
    part, pace = beside / secs, steps / secs
    slope = _slope(part, pace, least=_CONTRAST)
    if slope is None:
        return None
    lost = -slope / float(np.median(pace - slope * part))
    return min(max(0.0, lost), _MOST_LOST)


def pace_of_trained(trained: Sequence[Trained], lost: float) -> np.ndarray:
    """Seconds of train steps without saves, if they lose such a share of their time beside one."""
    steps, secs, beside = np.array(trained, float).T
    return (secs - lost * beside) / steps


def _durable(saves: Sequence[MeasuredSave]) -> Seconds:
    return _seconds(
        (save.nbytes for save in saves), (save.durable_secs for save in saves)
    )


def _slowed(saves: Sequence[MeasuredSave], alone: Seconds) -> tuple[float, ...]:
    """How many times longer a write takes with 1, 2, ... in flight, as far as there were enough."""
    found = [1.0]
    while True:
        count = len(found) + 1
        times = [
            (save.durable_secs or 0.0) / max(alone.of(float(save.nbytes)), 1e-9)
            for save in saves
            if round(save.in_flight) == count
        ]
        if len(times) < ENOUGH:
            return tuple(found)
        found.append(max(found[-1], float(np.median(times))))


def _growth(
    saves: Sequence[MeasuredSave], fixed: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Steps of deltas since their parents, their changed bytes, and the exponent of growth."""
    sizes = {
        save.step - save.parent: save.nbytes - fixed
        for save in saves
        if save.parent is not None and save.step > save.parent
    }
    steps = np.array([n for n, size in sizes.items() if size > 0], float)
    changed = np.array([size for size in sizes.values() if size > 0])
    exponent = _slope(np.log(steps), np.log(changed))
    exponent = _USUAL_EXPONENT if exponent is None else min(max(exponent, 0.0), 1.0)
    return steps, changed, exponent


def _seconds(
    sizes: Iterable[float], secs: Iterable[float | None], *, adds_up: bool = False
) -> Seconds:
    """Line through measured seconds by bytes, and how far a tenth of them lie from it.

    The first measurement is left out, as it compiles. If it has the most bytes, as a first full
    save often has, it is what so many bytes take at most.

    Args:
        sizes: bytes of each.
        secs: seconds of each.
        adds_up: whether the line is moved to the mean, as `capped_mean` has it.
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
    if adds_up:
        fixed = max(fixed + capped_mean(y, usual) - float(usual.mean()), 0.0)
        usual = fixed + per_byte * x
    low, high = np.quantile(y / usual, [0.1, 0.9]) if usual.all() else (1.0, 1.0)
    return Seconds(
        fixed=fixed,
        per_byte=float(per_byte),
        low=min(float(low), 1.0),
        high=max(float(high), 1.0),
        samples=samples,
    )


def capped_mean(values: Iterable[float], usual: np.ndarray | None = None) -> float:
    """Mean of values as `capped` leaves them; 0 of none."""
    found = capped(values, usual)
    return float(found.mean()) if len(found) else 0.0


def capped(values: Iterable[float], usual: np.ndarray | None = None) -> np.ndarray:
    """Values; one of more than ten times the usual is replaced by ten times the usual.

    So a machine that stood still for a minute does not decide. Values that a tenth of all exceed
    count in full: where most saves take no time, those that do are not rare.

    Args:
        values: measurements.
        usual: what is usual for each of them; None: their median.
    """
    y = np.array([*values], float)
    if not len(y):
        return y
    most = np.maximum(
        _RARE * (np.median(y) if usual is None else usual),
        np.quantile(y, 0.9, method="lower"),
    )
    return np.minimum(y, most)


def _slope(x: np.ndarray, y: np.ndarray, least: float = 0.0) -> float | None:
    """Median slope of all pairs that are far enough apart to tell one; None if none are.

    Pairs that differ by less than `least` do not tell one either. A few measurements that are far
    off do not move the median.
    """
    i, j = np.triu_indices(len(x), 1)
    apart = x[j] - x[i]
    telling = np.abs(apart) > max(_TELLING * np.abs(x).max(initial=0.0), least)
    if not telling.any():
        return None
    return float(np.median((y[j] - y[i])[telling] / apart[telling]))


def _median(values: Iterable[float]) -> float:
    """Median of numbers; 0 of none."""
    found = [*values]
    return float(np.median(found)) if found else 0.0
