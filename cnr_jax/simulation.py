"""Simulation of policies: the bytes that the saves of a run would take, from a trace of look-ups.

The trace determines the rows of each delta, and their number determines its bytes. Nothing is
saved, and neither jax nor Orbax is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cnr_jax.errors import OptionError
from cnr_jax.format.rowids import encode_rowids
from cnr_jax.integers import integer, take_integers
from cnr_jax.policy import (
    Consecutive,
    Full,
    IncrementLog,
    Intermittent,
    OneShot,
    Policy,
    SaveRecord,
    since_baseline,
)

# Bytes of `zarr.json` and the checksum for an array of one chunk, and of both manifests, as in real
# saves of one to ten tables.
_ARRAY_BYTES = 280
_MANIFEST_BYTES = 2_100
_TABLE_MANIFEST_BYTES = 900
# Bits of an element, as some codec stores it.
_WIDTHS = (1, 2, 3, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class ByteModel:
    """Model of the bytes of a save of tables that are alike: rows, row ids, slots and descriptions.

    Attributes:
        dim: number of elements of a row.
        bits: bits of a stored element. Each row also has a scale and an offset, of 2 bytes each. 32
            stores rows as they are.
        slot_bytes: bytes of the optimizer's slots for each row; 4 for one float32 a row.

    Raises:
        OptionError: if a number is one that no codec or row has.
    """

    dim: int = 64
    bits: int = 4
    slot_bytes: int = 4

    def __post_init__(self) -> None:
        take_integers(self, "dim", "bits", "slot_bytes")
        given = (self.dim, self.bits, self.slot_bytes)
        is_stored = None not in map(integer, given) and self.bits in _WIDTHS
        if not is_stored or self.dim < 1 or self.slot_bytes < 0:
            raise OptionError(
                f"no rows are stored like that: {self}\n"
                f"  expected dim of 1 or more, bits of {', '.join(map(str, _WIDTHS))}, and"
                " slot_bytes of 0 or more"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, with its slots."""
        packed = -(-self.dim * self.bits // 8)
        return packed + (4 if self.bits < 32 else 0) + self.slot_bytes

    @property
    def float32_row_bytes(self) -> int:
        """Bytes of a row in memory, with its slots."""
        return 4 * self.dim + self.slot_bytes

    def save_bytes(self, rows: int, id_bytes: int, tables: int) -> int:
        """All bytes of a save.

        Args:
            rows: number of rows of all tables.
            id_bytes: bytes of all row ids.
            tables: number of tables.
        """
        arrays = 5 if id_bytes else 4
        manifests = _MANIFEST_BYTES + tables * _TABLE_MANIFEST_BYTES
        fixed = arrays * _ARRAY_BYTES + manifests
        return rows * self.row_bytes + id_bytes + fixed


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule of saves under one policy: the parent and the bytes of each save.

    Attributes:
        parents: number of the parent of each save; for a full save its own number.
        written: int64[saves], bytes of each save.
        merged: int64[saves], bytes of the baseline that each save brings along, which training has
            not written; None: no save brings one.
    """

    parents: tuple[int, ...]
    written: np.ndarray
    merged: np.ndarray | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        same = np.array_equal(self.stored, other.stored)
        same = same and np.array_equal(self.written, other.written)
        return self.parents == other.parents and same

    @property
    def stored(self) -> np.ndarray:
        """int64[saves], bytes that each save takes on storage."""
        return self.written if self.merged is None else self.written + self.merged

    @property
    def fulls(self) -> list[int]:
        """Numbers of the full saves."""
        return [save for save, parent in enumerate(self.parents) if save == parent]

    @property
    def so_far(self) -> np.ndarray:
        """int64[saves], bytes of each save and all saves before it."""
        return np.cumsum(self.written)

    @property
    def steady(self) -> np.ndarray:
        """int64[saves], bytes that a restore of each save reads."""
        read: list[int] = []
        for save, parent in enumerate(self.parents):
            below = 0 if save == parent else read[parent]
            read.append(int(self.stored[save]) + below)
        return np.array(read)

    @property
    def transient(self) -> np.ndarray:
        """int64[saves], bytes held until each save is committed: its chain, and the one before."""
        chains = [set[int](), *(self._chain(s) for s in range(len(self.parents)))]
        both = [a | b for a, b in itertools.pairwise(chains)]
        return np.array([self._bytes(held) for held in both])

    def _chain(self, save: int) -> set[int]:
        chain = {save}
        while self.parents[save] != save:
            save = self.parents[save]
            chain.add(save)
        return chain

    def _bytes(self, saves: set[int]) -> int:
        return sum(int(self.stored[s]) for s in saves)


@dataclasses.dataclass(frozen=True, slots=True)
class Simulation:
    """Result of `simulate`: the schedule of each policy for a trace. Prints as a table.

    Attributes:
        schedules: schedule by the name of the policy.
        float32_bytes: bytes of all rows and slots in memory.
        rows: number of rows of all tables.
        touched_share: share of the rows that are looked up between two saves, on average.
    """

    schedules: Mapping[str, Schedule]
    float32_bytes: int
    rows: int
    touched_share: float

    def asdict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""
        return {
            "rows": self.rows,
            "float32_bytes": self.float32_bytes,
            "touched_share": self.touched_share,
            "policies": {
                name: {
                    "bytes": int(found.written.sum()),
                    "merged_bytes": int((found.stored - found.written).sum()),
                    "fulls": len(found.fulls),
                    "saves": len(found.parents),
                    "restore_bytes": int(found.steady.max()),
                    "stored_bytes": int(found.transient.max()),
                    "parents": list(found.parents),
                    "written": found.written.tolist(),
                }
                for name, found in self.schedules.items()
            },
        }

    def __str__(self) -> str:
        head = (
            "policy",
            "bytes",
            "smaller",
            "fulls",
            "merged beside",
            "restore reads",
            "disk holds",
        )
        lines: list[tuple[str, ...]] = [head]
        for name, found in self.schedules.items():
            written = int(found.written.sum())
            less = self.float32_bytes * len(found.parents) / written
            lines.append(
                (
                    name,
                    f"{written / 1e6:,.1f} MB",
                    f"{less:.1f}x",
                    str(len(found.fulls)),
                    f"{(found.stored - found.written).sum() / 1e6:,.1f} MB",
                    f"{found.steady.max() / 1e6:,.1f} MB",
                    f"{found.transient.max() / 1e6:,.1f} MB",
                )
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


def simulate(
    accesses: Mapping[str, np.ndarray],
    every: int,
    *,
    rows: Mapping[str, int] | None = None,
    model: ByteModel | None = None,
    policies: Sequence[Policy] | None = None,
) -> Simulation:
    """Simulates the saves of a run under several policies, and counts their bytes.

    The first save comes after the first interval, as in a run, and is full. A delta holds the rows
    that were looked up since its parent. A policy sees the bytes of the saves before, and nothing
    of what is to come.

    Args:
        accesses: trace by table: the ids of the rows that were looked up, int[steps, ...]. The
            first axis has an entry for each train step. Pad its entries with negative ids if they
            differ in length.
        every: number of train steps between two saves.
        rows: number of rows by table. A table that you leave out ends with its largest id.
        model: model of bytes; None: rows of 64 elements in 4 bits, with one float32 slot.
        policies: policies to simulate; None: all policies of this library.

    Raises:
        OptionError: if a trace is not an array of integers, has an id past the rows of its table,
            or has no id at all; if tables have different numbers of steps; if there are fewer than
            `every` steps; or if an entry of `policies` is not a policy.

    Example:
        >>> ids = np.random.default_rng(0).zipf(1.5, (100, 50)) % 1000
        >>> found = simulate({"user": ids}, 10)
        >>> found.schedules["consecutive"].fulls
        [0]
        >>> print(found)  # doctest: +SKIP
        policy          bytes  smaller  fulls  restore reads  disk holds
    """
    model = model or ByteModel()
    chosen = _checked_policies(policies)
    every = _interval(every)
    tables = _checked(accesses, every, rows or {})
    sizes = {name: size for name, (_, size) in tables.items()}
    saves = len(next(iter(tables.values()))[0]) // every
    # The save before which each row was last looked up.
    last = {name: np.full(size, -1, np.int32) for name, size in sizes.items()}
    followed = [Followed(policy) for policy in chosen]
    all_rows, share = sum(sizes.values()), 0.0
    for save in range(saves):
        touched = 0
        for name, (ids, _) in tables.items():
            found = np.unique(ids[save * every : (save + 1) * every])
            found = found[found >= 0]
            last[name][found] = save
            touched += len(found)
        share += touched / all_rows / saves
        sized = functools.partial(_sized, save, last, model)
        for each in followed:
            each.save(sized)
    # Two policies of one name are told apart by their place.
    names = [policy.name for policy in chosen]
    return Simulation(
        {
            name if names.count(name) == 1 else f"{name} {i}": each.schedule()
            for i, (name, each) in enumerate(zip(names, followed, strict=True))
        },
        all_rows * model.float32_row_bytes,
        all_rows,
        share,
    )


class Followed:
    """Policy that decides on simulated saves, with the history that it sees.

    A merge that it asks for ends before the next save, which then brings the baseline along.

    Attributes:
        parents: number of the parent of each save so far; of one that brings a baseline, its own.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._history: list[SaveRecord] = []
        self._merged: list[int] = []
        self._has_baseline = False
        self.parents: list[int] = []

    def save(self, sized: Callable[[int], tuple[int, int]]) -> None:
        """Adds a save.

        Args:
            sized: function from the number of the parent (for a full save its own number) to the
                rows and the bytes of the save.
        """
        save = len(self._history)
        if self._has_baseline:
            self._bring_baseline(sized)
            return
        decision = self._policy.decide(since_baseline(self._history))
        self._has_baseline = decision.merge
        parent = save if decision.parent is None else decision.parent
        rows, size = sized(parent)
        above = self._history[parent] if 0 <= parent < save else None
        depth, restore_bytes = (above.depth, above.restore_bytes) if above else (0, 0)
        assert depth is not None and restore_bytes is not None
        record = SaveRecord(
            step=save,
            kind=decision.kind,
            bytes=size,
            rows=rows,
            secs=1.0,  # a trace tells no times
            depth=depth + 1,
            restore_bytes=restore_bytes + size,
        )
        self._history.append(record)
        self._merged.append(0)
        self.parents.append(parent)

    def _bring_baseline(self, sized: Callable[[int], tuple[int, int]]) -> None:
        """Adds a save that brings the baseline of the one before along."""
        save = len(self._history)
        (all_rows, whole), (_, size) = sized(save), sized(save - 1)
        record = SaveRecord(
            step=save,
            kind="full",
            bytes=size + whole,
            rows=all_rows,
            secs=1.0,
            depth=1,
            restore_bytes=size + whole,
        )
        self._history.append(record)
        self._merged.append(whole)
        self.parents.append(save)
        self._has_baseline = False

    def schedule(self) -> Schedule:
        """Schedule of all saves so far."""
        merged = np.array(self._merged)
        written = np.array([record.bytes for record in self._history]) - merged
        return Schedule(tuple(self.parents), written, merged if any(merged) else None)


def _sized(
    save: int, last: Mapping[str, np.ndarray], model: ByteModel, parent: int
) -> tuple[int, int]:
    """Rows and bytes of a save on a parent; for a full save the parent is the save itself."""
    rows = id_bytes = 0
    for seen in last.values():
        count = len(seen) if parent == save else int((seen > parent).sum())
        rows += count
        id_bytes += bytes_of_ids(seen, parent, count)
    return rows, model.save_bytes(rows, id_bytes, len(last))


def bytes_of_ids(last: np.ndarray, since: int, count: int) -> int:
    """Bytes of the ids of the `count` rows that were last looked up after save `since`."""
    if count in (0, len(last)):
        return 0
    bitmap_bytes = (len(last) + 7) // 8
    if count >= bitmap_bytes:  # a gap takes a byte at least
        return bitmap_bytes
    return len(encode_rowids(np.flatnonzero(last > since), len(last))[1])


def _checked_policies(policies: Sequence[Policy] | None) -> list[Policy]:
    """Checks the policies to simulate; None: all policies of this library."""
    if policies is None:
        return [Intermittent(), OneShot(), Consecutive(), IncrementLog(), Full()]
    try:
        chosen = [] if isinstance(policies, str) else list(policies)
    except TypeError:  # one, not in a list
        chosen = []
    if not chosen or not all(map(_is_policy, chosen)):
        raise OptionError(
            f"policies are a list of policies, got {reprlib.repr(policies)}\n"
            "  hint: policies=[cnr_jax.Full(), cnr_jax.OneShot()]"
        )
    return chosen


def _is_policy(given: object) -> bool:
    """Whether an object can decide about saves; a class of policies cannot."""
    return callable(getattr(given, "decide", None)) and not isinstance(given, type)


def _interval(every: Any) -> int:
    """Checks `every`, the number of train steps between two saves."""
    found = integer(every)
    if found is None:
        raise OptionError(
            f"every is the number of train steps between two saves, got {every!r}"
        )
    return found


def _checked(
    accesses: Mapping[str, np.ndarray], every: int, rows: Mapping[str, int]
) -> dict[str, tuple[np.ndarray, int]]:
    """Checks a trace; returns the ids of each table, and its number of rows."""
    for what, given in (("traces", accesses), ("rows", rows)):
        if not isinstance(given, Mapping):
            raise OptionError(
                f"{what} are given by table, got {type(given).__name__}\n"
                "  hint: simulate({'user': ids}, every, rows={'user': 1000})"
            )
    found: dict[str, tuple[np.ndarray, int]] = {}
    for name, given in accesses.items():
        try:
            ids = np.asarray(given)
        except ValueError as error:
            raise OptionError(
                f"the trace of table {name!r} is of no one shape\n  {error}\n"
                "  hint: pad the entries of train steps by -1"
            ) from error
        if ids.dtype.kind not in "iu" or ids.ndim == 0 or not ids.size:
            raise OptionError(
                f"the trace of table {name!r} is no array of row ids\n"
                f"  got {ids.dtype}{list(ids.shape)}, expected int[steps, ...]"
            )
        size = integer(rows.get(name, int(ids.max()) + 1))
        if size is None:
            raise OptionError(
                f"rows of table {name!r} are a number, got {rows[name]!r}"
            )
        if ids.max() >= size:
            raise OptionError(
                f"the trace of table {name!r} has ids past its rows\n"
                f"  got {int(ids.max()):,}, expected less than {size:,}"
            )
        if size < 1:
            raise OptionError(
                f"the trace of table {name!r} looks up no row\n"
                f"  got ids up to {int(ids.max())}, expected one of 0 or more\n"
                "  hint: rows= says how many rows a table has that is never looked up"
            )
        found[name] = (ids, size)
    steps = {name: len(ids) for name, (ids, _) in found.items()}
    if len(set(steps.values())) != 1:
        raise OptionError(
            "the traces of tables must have the same number of train steps\n"
            f"  got {steps or 'no table'}"
        )
    unknown = sorted(set(rows) - set(found))
    if unknown:
        raise OptionError(
            f"rows are given of tables that the trace lacks: {', '.join(unknown)}"
        )
    if every < 1 or min(steps.values()) < every:
        raise OptionError(
            f"there is no save in the trace\n  got every={every} train steps between two saves,"
            f" expected 1 to {min(steps.values()):,}, the steps of the trace"
        )
    return found
