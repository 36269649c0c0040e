"""Comparison of two steps, block by block, by the rows that a restore would give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cnr_jax.format.manifest import LeafEntry
from cnr_jax.repository.replay.encoded import Target
from cnr_jax.repository.replay.on_host import host_rows
from cnr_jax.repository.replay.regions import (
    WantedLeaf,
    columns_in,
    region_of,
    shape_of,
)
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.rows.tiling import aligned_empty
from cnr_jax.state.layouts import Identity

# Decoded bytes that are compared at a time.
_BLOCK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """How a table, or one of its slots, differs between two steps.

    The *change* of a row is `||after - before|| / ||before||`. Rows that were zero before, and rows
    with a NaN or an infinity, have none.

    Attributes:
        table: name of the table.
        leaf: `"table"`, or the name of the slot.
        rows: number of rows that both steps have, all of which were compared.
        changed_rows: number of these rows in which any element differs.
        mean_change: mean change of the changed rows that have one; None if none has one.
        worst_change: greatest of these changes; None if there is none.
        note: why the leaf could not be compared, or what else differs; mostly empty.
    """

    table: str
    leaf: str
    rows: int = 0
    changed_rows: int = 0
    mean_change: float | None = None
    worst_change: float | None = None
    note: str = ""


def logical_rows(
    chain: Sequence[StepReader], table: str, leaf: str, start: int, stop: int
) -> np.ndarray:
    """Reads some rows of a leaf by their logical ids, as a restore gives them.

    Args:
        chain: readers of the chain: the full checkpoint first, the step itself last.
        table: name of the table.
        leaf: `"table"`, or the name of a slot.
        start: id of the first row.
        stop: id after the last row.

    Returns:
        `[stop - start, ...]` in the dtype of the leaf.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    entry = chain[-1].tables[table]
    found = next(each for each in entry.leaves if each.name == leaf)
    dtype = chain[-1].dtypes[table, leaf]
    target = Target(rows=entry.rows, layout=Identity(), padded_rows=entry.rows)
    wanted = WantedLeaf(chain, table, leaf, target, dtype, dtype)
    region = region_of(wanted, ((start, stop), *((0, n) for n in found.shape[1:])))
    out = aligned_empty(shape_of(region.box), dtype)
    for piece in region.pieces:
        columns = columns_in(region.box, piece)
        host_rows(wanted.merged(piece), region.rows, out[:, *columns])
    return out


def compare(
    before: Sequence[StepReader],
    after: Sequence[StepReader],
    on_rows: Callable[[int, int], None],
) -> Iterator[LeafDifference]:
    """Yields how each leaf of all tables differs between two steps, of the same root or not.

    Args:
        before: readers of the first step's chain, the full checkpoint first.
        after: readers of the second step's chain, likewise.
        on_rows: function that is called after each block, with the number of elements compared so
            far, and the number of all elements.

    Raises:
        IntegrityError: if data is missing or damaged.
    """
    old, new = before[-1].tables, after[-1].tables
    pairs: list[tuple[str, LeafEntry, LeafEntry, int]] = []
    for name in [*old, *(n for n in new if n not in old)]:
        if name not in old or name not in new:
            which = "second" if name not in old else "first"
            yield LeafDifference(table=name, leaf="table", note=f"only in the {which}")
            continue
        leaves = {leaf.name: leaf for leaf in new[name].leaves}
        for leaf in old[name].leaves:
            other = leaves.get(leaf.name)
            if other is None or other.shape[1:] != leaf.shape[1:]:
                note = "only in the first" if other is None else "of another row shape"
                yield LeafDifference(table=name, leaf=leaf.name, note=note)
            else:
                rows = min(old[name].rows, new[name].rows)
                pairs.append((name, leaf, other, rows))
    total = sum(rows * math.prod(leaf.shape[1:]) for _, leaf, _, rows in pairs)
    done = 0
    for name, leaf, other, rows in pairs:
        notes = []
        if old[name].rows != new[name].rows:
            notes.append(f"{old[name].rows:,} rows, then {new[name].rows:,}")
        if leaf.dtype != other.dtype:
            notes.append(f"{leaf.dtype}, then {other.dtype}")
        width = math.prod(leaf.shape[1:])
        tally = _Tally()
        step = max(1, _BLOCK_BYTES // (8 * width))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            tally.add(
                logical_rows(before, name, leaf.name, start, stop),
                logical_rows(after, name, leaf.name, start, stop),
            )
            done += (stop - start) * width
            on_rows(done, total)
        yield LeafDifference(
            table=name,
            leaf=leaf.name,
            rows=rows,
            changed_rows=tally.changed,
            mean_change=tally.sum / tally.measured if tally.measured else None,
            worst_change=tally.worst if tally.measured else None,
            note="; ".join(notes),
        )


@dataclasses.dataclass(slots=True)
class _Tally:
    changed: int = 0
    measured: int = 0
    sum: float = 0.0
    worst: float = 0.0

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        """Adds a block of rows, `[rows, ...]` of each step."""
        old, new = (each.reshape(len(each), -1) for each in (before, after))
        if old.dtype == new.dtype:
            # Bits are compared, so that a NaN that stays is no change.
            differs = (old.view(np.uint8) != new.view(np.uint8)).any(axis=1)
        else:
            differs = (old.astype(np.float64) != new.astype(np.float64)).any(axis=1)
        self.changed += int(differs.sum())
        first = old[differs].astype(np.float64)
        with np.errstate(all="ignore"):
            apart = np.linalg.norm(new[differs].astype(np.float64) - first, axis=1)
            change = apart / np.linalg.norm(first, axis=1)
        change = change[np.isfinite(change)]
        if len(change):
            self.measured += len(change)
            self.sum += float(change.sum())
            self.worst = max(self.worst, float(change.max()))
