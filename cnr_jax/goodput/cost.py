"""Cost of checkpoints for a month of training: storage, requests, network, waiting accelerators."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.goodput.failures import HOUR_SECS
from cnr_jax.goodput.profile import ENOUGH, Profile, is_number
from cnr_jax.goodput.records import profile_at
from cnr_jax.repository.course import Course
from cnr_jax.repository.description import aligned, amount

MONTH_HOURS = 730.0
# Requests in a bucket: those of a save that write, those of it that read, and those for each step
# that a restore reads. Each further chunk of the last size takes one more. They are counted as in
# tests/benchmarks/bucket_requests.py: listings among writes, as services charge them.
_SAVE_WRITES, _SAVE_READS, _READ_REQUESTS, _CHUNK_BYTES = 21, 2, 7, 16 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices, in a currency of the user's.

    Attributes:
        currency: name of the currency.
        storage_gb_month: price of a GB (10^9 bytes) that is stored for a month.
        network_gb: price of a GB between accelerators and storage.
        write_requests_1000: price of a thousand requests that write or list.
        read_requests_1000: price of a thousand requests that read.
        accelerator_hour: price of an hour of one accelerator.
    """

    currency: str
    storage_gb_month: float
    network_gb: float
    write_requests_1000: float
    read_requests_1000: float
    accelerator_hour: float

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Prices:
        """Reads a file of TOML that has all fields.

        Raises:
            OptionError: if there is no such file, or fields are missing, unknown or no prices.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            given = tomllib.loads(Path(path).read_text("utf-8"))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise OptionError(f"there is no file of prices {path}") from error
        except ValueError as error:
            raise OptionError(
                f"{path} has no prices: it is no TOML\n  {error}"
            ) from error
        faults = {
            "missing": [name for name in names if name not in given],
            "unknown": [name for name in given if name not in names],
            "no price": [
                f"{name} = {given[name]!r}"
                for name in names[1:]
                if name in given and not is_number(given[name])
            ],
        }
        said = [f"{fault}: {', '.join(of)}" for fault, of in faults.items() if of]
        if said:
            raise OptionError(
                f"{path} is no whole list of prices\n  {'; '.join(said)}\n"
                f"  expected currency, and numbers of 0 or more: {', '.join(names[1:])}"
            )
        return cls(**given)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantities:
    """Quantities that checkpoints take in a month of training.

    Attributes:
        stored_bytes: bytes that are stored, with retention as it is.
        moved_bytes: bytes written by saves and read by restores.
        write_requests: requests in a bucket that write or list.
        read_requests: requests in a bucket that read.
        stall_hours: hours of accelerators that wait for saves; None: not known.
        restore_hours: hours of accelerators that restore, and train again what a failure took;
            None: not known.
    """

    stored_bytes: float
    moved_bytes: float
    write_requests: float
    read_requests: float
    stall_hours: float | None
    restore_hours: float | None

    def costs(self, prices: Prices) -> dict[str, float | None]:
        """Costs by what they are for; None: not known."""
        hour = prices.accelerator_hour
        writes = self.write_requests * prices.write_requests_1000
        return {
            "storage": self.stored_bytes / 1e9 * prices.storage_gb_month,
            "network": self.moved_bytes / 1e9 * prices.network_gb,
            "requests": (writes + self.read_requests * prices.read_requests_1000)
            / 1000,
            "stalls": None if self.stall_hours is None else self.stall_hours * hour,
            "restores": None
            if self.restore_hours is None
            else self.restore_hours * hour,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a run's checkpoints for a month of training, as they are and as plain full saves.

    Attributes:
        saves: number of saves that it rests on.
        interval_secs: seconds from save to save.
        restores: restores in a month.
        accelerators: number of accelerators that wait.
        own: quantities of this run.
        plain: quantities if all its saves were plain full ones.
        prices: prices; None: none were given.
    """

    saves: int
    interval_secs: float
    restores: float
    accelerators: int
    own: Quantities
    plain: Quantities
    prices: Prices | None = None

    def asdict(self) -> dict[str, Any]:
        """All of it as values of JSON, with `costs` of both if there are prices."""
        found = dataclasses.asdict(self)
        if self.prices is not None:
            both = {"own": self.own, "plain": self.plain}
            found["costs"] = {name: q.costs(self.prices) for name, q in both.items()}
        return found

    @property
    def rows(self) -> list[list[str]]:
        """Rows of a table below a head, with costs if there are prices."""
        hours = ("stall_hours", "restore_hours")
        rows = [["a month of training", "this run", "plain full saves"]]
        for name, told in (
            ("stored_bytes", "stored"),
            ("moved_bytes", "written and read"),
            ("write_requests", "requests that write"),
            ("read_requests", "requests that read"),
            ("stall_hours", "accelerators wait for saves"),
            ("restore_hours", "accelerators restore and repeat"),
        ):
            values = getattr(self.own, name), getattr(self.plain, name)
            shown = amount if "bytes" in name else _hours if name in hours else _count
            rows.append([told, *map(shown, values)])
        if self.prices is not None:
            own, plain = self.own.costs(self.prices), self.plain.costs(self.prices)
            rows.append([f"in {self.prices.currency}", "", ""])
            rows += [[name, _price(own[name]), _price(plain[name])] for name in own]
            sums = (sum(v or 0.0 for v in each.values()) for each in (own, plain))
            rows.append(["all that is known", *map(_price, sums)])
        return rows

    @property
    def basis(self) -> str:
        """What the figures rest on."""
        return (
            f"from {self.saves:,} saves, {self.interval_secs:,.3g} s apart, with"
            f" {self.restores:,.3g} restores a month"
        )

    def __str__(self) -> str:
        """A table, with costs if there are prices."""
        return "\n".join(aligned(self.rows, right={1, 2}))


def cost_of(
    course: Course, prices: Prices | None = None, accelerators: int = 1
) -> Cost | None:
    """Cost of the checkpoints of a run, for a month in which it trains and fails as it has.

    What merges write and read counts too: a merge reads what a restore of the save before would.
    Steps that `compact` has made count as stored alone. It assumes that plain full saves come as
    often as this run's, that as many are kept, that they are written and read as fast, and that
    they hold training up for as long as its full ones.

    Args:
        course: course of the run.
        prices: prices; None: quantities alone are told.
        accelerators: number of accelerators that wait.

    Returns:
        The cost; None: fewer than five saves tell how often the run saves, or all tell one time.
    """
    profile = profile_at(course.root, course=course)
    reads = [*_reads_of(course, profile)] if profile is not None else []
    known = [
        (save, read, before)
        for save, read, before in zip(
            course.saves, reads, [(0.0, 0), *reads], strict=False
        )
        if save.written_bytes is not None and save.saved_at
    ]
    times = sorted(save.saved_at.timestamp() for save, *_ in known if save.saved_at)
    if profile is None or len(times) < ENOUGH:
        return None
    interval = float(np.median(np.diff(times)))
    if not interval:
        return None
    monthly = MONTH_HOURS * HOUR_SECS / interval
    restores = sum(save.restored for save in course.saves) / len(known) * monthly
    amounts = [
        (
            *(save.written_bytes or 0, *read, save.merged_bytes),
            *(before if save.merged_bytes else (0, 0)),
        )
        for save, read, before in known
    ]
    found = _Amounts(*np.array(amounts, float).T)
    plain, none = np.array([profile.plain_bytes]), np.zeros(1)
    plain_saves = _Amounts(plain, plain, np.ones(1), none, none, none)
    given = (profile, interval, monthly, restores, accelerators)
    held = course.root.total_bytes
    return Cost(
        saves=len(known),
        interval_secs=interval,
        restores=restores,
        accelerators=accelerators,
        own=_quantities(*given, held, found),
        plain=_quantities(*given, course.plain_bytes, plain_saves, plain=True),
        prices=prices,
    )


class _Amounts(NamedTuple):
    """What saves and restores of a run take, by save.

    Attributes:
        written: bytes that the save wrote.
        read: bytes that a restore of it reads.
        depths: number of checkpoints that the restore reads.
        merged: bytes that it holds and a merge wrote; 0: no merge.
        merging: bytes that the merge read.
        merging_depths: number of checkpoints that the merge read.
    """

    written: np.ndarray
    read: np.ndarray
    depths: np.ndarray
    merged: np.ndarray
    merging: np.ndarray
    merging_depths: np.ndarray


def _quantities(
    profile: Profile,
    interval: float,
    monthly: float,
    restores: float,
    accelerators: int,
    stored: float,
    amounts: _Amounts,
    *,
    plain: bool = False,
) -> Quantities:
    """Quantities of saves and restores, and of merges, which write as many files as a save."""
    sizes, reads, depths, merged, merging, merging_depths = amounts
    stall = repeat = None
    if profile.blocking.known:
        stall = float(profile.blocking_secs(sizes).mean())
        write = float(profile.durable_secs(sizes, plain=plain).mean())
        restore = float(profile.reading.of(reads).mean())
        repeat = restores * (restore + write + interval / 2) / HOUR_SECS * accelerators
        stall = monthly * stall / HOUR_SECS * accelerators
    writes = _SAVE_WRITES * (1 + (merged > 0)) + sizes // _CHUNK_BYTES
    requests = depths * _READ_REQUESTS + reads // _CHUNK_BYTES
    merge_requests = merging_depths * _READ_REQUESTS + merging // _CHUNK_BYTES
    return Quantities(
        stored_bytes=float(stored),
        moved_bytes=float(
            monthly * (sizes + merged + merging).mean() + restores * reads.mean()
        ),
        write_requests=float(monthly * (writes + merged // _CHUNK_BYTES).mean()),
        read_requests=float(
            monthly * (_SAVE_READS + merge_requests).mean() + restores * requests.mean()
        ),
        stall_hours=stall,
        restore_hours=repeat,
    )


def _reads_of(course: Course, profile: Profile) -> Iterator[tuple[float, int]]:
    """Yields bytes and steps that a restore of each save reads: its own, and those below it."""
    found: list[tuple[float, int]] = []
    places: dict[tuple[int, int], int] = {}
    for place, save in enumerate(course.saves):
        nbytes, depth = 0.0, 0
        if save.kind == "delta":
            # Of a removed save the metrics may tell the parent, which comes before it.
            parent, told = save.parent, save.parent_step
            if parent is None and told is not None:
                parent = places.get((save.branch, told))
            nbytes, depth = profile.full_bytes, 1
            if parent is not None and course.saves[parent].parts:
                nbytes, depth = found[parent]
        found.append((nbytes + (save.total_bytes or 0), depth + 1))
        places[save.branch, save.step] = place
    yield from found


def _hours(value: float | None) -> str:
    return "not known yet" if value is None else f"{value:,.2f} h"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _price(value: float | None) -> str:
    return "not known yet" if value is None else f"{value:,.2f}"
