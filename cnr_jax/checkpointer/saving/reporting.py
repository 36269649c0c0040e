"""What a save did, put together for its report once it is known what became of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.format.manifest import Manifest, TableEntry, dump
from cnr_jax.format.names import step_number
from cnr_jax.repository.describe import state_bytes
from cnr_jax.repository.step import held_tables
from cnr_jax.telemetry import SaveReport


def report_of_committed(
    flight: SaveInFlight, tables: Sequence[TableEntry], manifest: Manifest
) -> SaveReport:
    """What a save did that is committed."""
    totals = manifest.totals
    own, written = flight.manifest_bytes, flight.written
    rounding = written.row_errors if written else None
    processes = flight.processes or ([written.manifest] if written else [])
    if own is None:  # another process has written it
        own = len(dump(manifest))
    return dataclasses.replace(
        report_of_dropped(flight, tables, ""),
        outcome="committed",
        rows=totals.rows,
        table_bytes=totals.table_bytes,
        slot_bytes=totals.slot_bytes,
        dense_bytes=totals.dense_bytes,
        manifest_bytes=totals.manifest_bytes + own,
        total_secs=manifest.history[-1].secs,
        tables=held_tables(manifest, processes) if processes else (),
        sample_rows=rounding.rows if rounding else None,
        mean_row_error=rounding.mean if rounding else None,
        worst_row_error=rounding.worst if rounding else None,
    )


def report_of_dropped(
    flight: SaveInFlight,
    tables: Sequence[TableEntry],
    problem: str,
    damaged: str | None = None,
) -> SaveReport:
    """What a save did of which nothing stays; the same on all processes, but for seconds.

    Args:
        flight: the save.
        tables: of its state.
        problem: why nothing stays, in a line.
        damaged: the file because of which, below the root.
    """
    plan, written = flight.plan, flight.written
    encode_secs = written.encode_secs if written else 0.0
    waiting_secs = written.waiting_secs if written else 0.0
    return SaveReport(
        step=plan.step,
        kind=plan.kind,
        tracking=flight.tracking,
        parent=step_number(plan.parent.directory) if plan.parent else None,
        generation=plan.generation,
        rows=0,
        table_bytes=0,
        slot_bytes=0,
        dense_bytes=0,
        manifest_bytes=0,
        state_bytes=state_bytes(tables, flight.dense_leaves),
        blocking_secs=flight.blocking_secs,
        fingerprint_secs=flight.fingerprint_secs,
        find_secs=flight.find_secs,
        gather_secs=flight.gather_secs,
        encode_secs=encode_secs,
        write_secs=max(0.0, flight.written_secs - encode_secs - waiting_secs),
        commit_secs=flight.commit_secs,
        total_secs=time.perf_counter() - flight.started_secs,
        reason=plan.reason,
        restores=plan.restores,
        run=plan.run or None,
        auto_bits=plan.auto_bits,
        inherited=flight.encoding.inherited,
        outcome="dropped",
        problem=problem,
        damaged=damaged,
    )
