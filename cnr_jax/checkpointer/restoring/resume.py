"""What a restore means for the saves after it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from cnr_jax.checkpointer.describe import table_entries
from cnr_jax.checkpointer.restoring.read import ReadBack
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.tracking.tracker import Tracker
from cnr_jax.format.manifest import TableEntry
from cnr_jax.repository.files import is_local
from cnr_jax.repository.layout import Place
from cnr_jax.repository.lineage.entries import entry_of
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Planner
from cnr_jax.repository.replay.leaves import restored_stamps
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.touched import Touched, lineage_hex

# Of all restores of this process: a state may be restored by one manager and saved by another.
# By lineage, the root and the run of the step that was restored; the oldest go first.
_restored_runs: dict[str, tuple[str, str]] = {}
_REMEMBERED = 1024


def run_restored(root: Any, lineage: str) -> str | None:
    """The run of the step of a root that was restored with touched rows of this lineage.

    None if it was not restored from there in this process. Empty where the step names no run.
    """
    known = _restored_runs.get(lineage)
    return known[1] if known is not None and known[0] == _real(root) else None


def _note_run(root: Any, touched: Touched, run: str) -> None:
    _restored_runs[lineage_hex(touched)] = _real(root), run
    while len(_restored_runs) > _REMEMBERED:
        del _restored_runs[next(iter(_restored_runs))]


def _real(root: Any) -> str:
    return os.path.realpath(root) if is_local(root) else str(root)


@dataclasses.dataclass(frozen=True, slots=True)
class Resumption:
    """What was restored, and what saving goes on from.

    Attributes:
        place: what was restored.
        found: what was read of it.
        ledger: of its root, if saves are to go there from now on.
        touched: the fresh touched rows that go with the restored state.
    """

    place: Place
    found: ReadBack
    ledger: Ledger | None
    touched: Touched


@dataclasses.dataclass(slots=True)
class Attempt:
    """A restore by a manager, perhaps of other items too; it counts as a whole, or not at all.

    Attributes:
        is_told: the processes tell each other how it went, or have done so.
        resumption: to go on from once all that was asked for has succeeded.
    """

    is_told: bool = False
    resumption: Resumption | None = None


def resume(
    resumption: Resumption,
    *,
    writer: RootWriter,
    lifecycle: Lifecycle,
    planner: Planner,
    tracker: Tracker,
    tables: tuple[TableEntry, ...],
) -> None:
    """Goes on saving from what was restored: its fresh lineage rests on the steps of its chain.

    Args:
        resumption: all of it has succeeded, on all processes.
        writer: where saves go; after the first restore perhaps where that came from.
        lifecycle: is settled before anything is noted.
        planner: is told what later saves may rest on.
        tracker: is told which rows are as they were restored.
        tables: that are saved, in whatever order; empty: nothing is.
    """
    place, found, touched = resumption.place, resumption.found, resumption.touched
    chain = found.chain
    _note_run(place.root, touched, chain[-1].manifest.run or "")
    if resumption.ledger is not None and writer.place is None:
        writer.serve(place.root, place.item, resumption.ledger)
    lifecycle.settle()  # Orbax has waited for the save in flight
    # Nothing is a legal parent until all that makes it one is known.
    planner.end_lineages(chain[-1].manifest.restores + 1)
    tracker.forget(touched)
    tracker.adopt(chain[-1].manifest.tracking)
    if not writer.is_at(place.root, place.item):
        return  # restored from elsewhere: no parent here
    restored = {entry.name: entry for entry in table_entries(found.tables)}
    exact = found.wanted.exact and restored == {entry.name: entry for entry in tables}
    # What was found by other means may be more, or less, than will be.
    ways = {chain[-1].manifest.tracking, tracker.mode(touched)}
    exact = exact and (len(ways) == 1 or "fingerprint" not in ways)
    if exact:
        tracker.restored(
            found.tables,
            found.arrays,
            touched,
            lambda rows: restored_stamps(
                chain, rows.table, found.wanted.targets[rows.table], rows.rows
            ),
        )
    entries = [entry_of(r.directory.parent.name, r.manifest) for r in chain]
    planner.restored(lineage_hex(touched), entries, exact=exact)
