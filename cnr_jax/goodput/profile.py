"""Profile of a run: what a train step, a save and a restore of it take, in seconds and bytes."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.integers import integer

# A number of bytes, or several, and the seconds that follow from them.
Bytes = TypeVar("Bytes", float, np.ndarray)
# Saves or restores on which a figure has to rest to count as known.
ENOUGH = 5
# Fields of a profile that are `Seconds`.
_SECONDS = ("step", "blocking", "write", "restore", "plain_write")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds that something takes: a fixed number, and more for each byte.

    Attributes:
        fixed: seconds that it takes whatever the bytes.
        per_byte: seconds that each byte adds.
        low: factor below which a tenth of the measurements lie.
        high: factor above which a tenth of them lie.
        samples: number of measurements; None: nothing was measured, a user has given the figures.

    Example:
        >>> Seconds(fixed=0.5, per_byte=1e-9).of(2_000_000_000)
        2.5
    """

    fixed: float
    per_byte: float = 0.0
    low: float = 1.0
    high: float = 1.0
    samples: int | None = None

    def __post_init__(self) -> None:
        found = (self.fixed, self.per_byte, self.low, self.high)
        if not all(is_number(each) for each in found):
            raise OptionError(f"seconds are finite numbers of 0 or more, got {self}")

    def of(self, nbytes: Bytes) -> Bytes:
        """Seconds for a number of bytes, or for each of several numbers."""
        return self.fixed + self.per_byte * nbytes

    def times(self, factor: float) -> Seconds:
        """Seconds that are longer by a factor."""
        return dataclasses.replace(
            self, fixed=self.fixed * factor, per_byte=self.per_byte * factor
        )

    @property
    def known(self) -> bool:
        """Whether enough was measured, or a user has given the figures."""
        return self.samples is None or self.samples >= ENOUGH


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profile of a run: what its steps, saves and restores take.

    `Profile.read` reads the JSON form that `asdict` gives. Fields that are left out there have
    their defaults.

    Attributes:
        step: seconds of a train step beside no save.
        blocking: seconds for which a save holds training up.
        write: seconds of a save in the background alone, from then until it is durable.
        restore: seconds of a restore, by the bytes that it reads.
        restart_secs: seconds from a failure until programs run again and have compiled, and those
            of the call of their first save, without the restore; with traces, from when all nodes
            are back.
        full_bytes: bytes of a full save.
        plain_bytes: bytes of a plain full save, as Orbax writes it.
        dense_bytes: bytes that every save writes alike.
        changed_bytes: bytes of the rows that one train step changes.
        exponent: exponent of growth: n steps change rows of `changed_bytes * n ** exponent` bytes.
            It is below 1 if steps look up the same rows.
        contention: share by which a train step is slower while a save is being written.
        in_flight: factors by which a write takes longer if 1, 2, ... are in flight. With more in
            flight the factor grows with their number, as if bandwidth were the limit.
        plain_write: as `write`, for plain full saves, which are not encoded; None: as for saves of
            this library.
        node_secs: seconds by which each node beyond `processes` makes a save hold training up
            longer, as nodes wait for each other.
        processes: number of nodes that `blocking` was measured with, whose waits are part of it.
    """

    step: Seconds
    blocking: Seconds
    write: Seconds
    restore: Seconds
    full_bytes: float
    plain_bytes: float
    dense_bytes: float = 0.0
    changed_bytes: float
    exponent: float = 1.0
    restart_secs: float = 0.0
    contention: float = 0.0
    in_flight: tuple[float, ...] = (1.0,)
    plain_write: Seconds | None = None
    node_secs: float = 0.0
    processes: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _SECONDS:
                fits = isinstance(value, Seconds) or value is field.default is None
            elif field.name == "in_flight":
                fits = isinstance(value, Sequence) and bool(value)
                fits = fits and all(is_number(each) and each >= 1 for each in value)
            else:
                fits = is_number(value)
            if not fits:
                raise OptionError(
                    f"{field.name} of a profile cannot be {value!r}\n"
                    "  expected finite numbers of 0 or more; in_flight: of 1 or more"
                )
        if not self.step.fixed:
            raise OptionError("a train step of a profile takes no time")

    @property
    def is_known(self) -> bool:
        """Whether enough saves tell what a step and a save take."""
        return self.step.known and self.blocking.known and self.write.known

    def delta_bytes(self, steps: float) -> float:
        """Bytes of a delta of the rows that so many train steps have changed."""
        changed = self.changed_bytes * steps**self.exponent
        return min(self.dense_bytes + changed, self.full_bytes)

    def blocking_secs(self, nbytes: np.ndarray, nodes: int = 1) -> np.ndarray:
        """Seconds for which saves of so many bytes hold training up.

        A plain full save holds it up for as long as a full one: it copies the same rows.

        Args:
            nbytes: bytes of saves.
            nodes: nodes that wait for each other.
        """
        waits = max(nodes - self.processes, 0) * self.node_secs
        return self.blocking.of(np.minimum(nbytes, self.full_bytes)) + waits

    def durable_secs(self, nbytes: np.ndarray, plain: bool = False) -> np.ndarray:
        """Seconds from the end of a save's blocking part until it is durable, if it is alone.

        Args:
            nbytes: bytes of saves.
            plain: whether they are plain full saves.
        """
        write = (self.plain_write if plain else None) or self.write
        return write.of(nbytes)

    @property
    def reading(self) -> Seconds:
        """Seconds of a restore; where they are not known, those of a write of as many bytes."""
        if self.restore.known:
            return self.restore
        return dataclasses.replace(self.write, samples=0)

    def slower(self, in_flight: int) -> float:
        """Factor by which each of so many writes at the same time takes longer than one alone."""
        measured = len(self.in_flight)
        if in_flight <= measured:
            return self.in_flight[in_flight - 1]
        return self.in_flight[-1] * in_flight / measured

    def asdict(self) -> dict[str, Any]:
        """All fields as values of JSON."""
        return {**dataclasses.asdict(self), "in_flight": list(self.in_flight)}

    @classmethod
    def fromdict(cls, document: Mapping[str, Any]) -> Profile:
        """Profile from what `asdict` returns.

        Raises:
            OptionError: if fields are missing, unknown or cannot be used.
        """
        try:
            given = dict(document)
            for name in _SECONDS:
                if given.get(name) is not None:
                    given[name] = Seconds(**given[name])
            if "in_flight" in given:
                given["in_flight"] = tuple(given["in_flight"])
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"this is no profile: {error}\n"
                '  hint: seconds are written {"fixed": 0.5, "per_byte": 1e-9}'
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a JSON file that holds a profile, or a document with one as `profile`.

        Raises:
            OptionError: if there is no such file, or it holds no profile.
        """
        try:
            document = json.loads(Path(path).read_text("utf-8"))
        except FileNotFoundError as error:
            raise OptionError(f"there is no profile {path}") from error
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path} is no profile: it is no JSON") from error
        if not isinstance(document, dict):
            raise OptionError(f"{path} is no profile: it is no JSON object")
        return cls.fromdict(document.get("profile", document))


def is_number(value: object) -> bool:
    """Whether a value is a number of Python, finite and of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < math.inf


def check_numbers(above: bool = False, **values: Any) -> None:
    """Checks numbers that a program gives, by name.

    Args:
        above: whether 0 is refused too.
        values: the numbers.

    Raises:
        OptionError: if one is no number, not finite, or below 0.
    """
    expected = "a number above 0" if above else "a finite number of 0 or more"
    for what, value in values.items():
        # Those of numpy count too.
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not real or not is_number(float(value)) or (above and not value):
            raise OptionError(f"{what} is {value!r}, expected {expected}")


def check_integers(**values: Any) -> None:
    """Checks integers of 0 or more that a program gives, by name.

    Raises:
        OptionError: if one is something else.
    """
    for what, value in values.items():
        found = integer(value)
        if found is None or found < 0:
            raise OptionError(f"{what} is {value!r}, expected an integer of 0 or more")
