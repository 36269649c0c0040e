"""Reports of saves: what is known when a save begins, and what became of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.interval import Interval
from cnr_jax.format.manifest import Manifest, TableEntry, Tracking, dump
from cnr_jax.format.names import step_number
from cnr_jax.repository.describe import state_bytes
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.mirroring.report import MirrorReport
from cnr_jax.repository.table_sizes import held_tables
from cnr_jax.telemetry import SaveReport


def report_of_begun(
    plan: SavePlan,
    *,
    tracking: Tracking,
    inherited: tuple[str, ...],
    doubts: tuple[str, ...],
    find_secs: float,
    wait_secs: float,
    interval: Interval | None,
    fingerprint_secs: float,
) -> SaveReport:
    """Makes the report of a save that is decided; sizes and other seconds are 0 until known.

    Args:
        plan: plan of the save.
        tracking: how changed rows were found.
        inherited: names of options that are as in the run that goes on.
        doubts: dense leaves that may be slots.
        find_secs: seconds until the save was decided.
        wait_secs: seconds among them of waiting for the train step that made the state.
        interval: interval to the next save, if the manager decides on it.
        fingerprint_secs: seconds among them of looking for changed rows.
    """
    return SaveReport(
        step=plan.step,
        kind=plan.kind,
        tracking=tracking,
        parent=step_number(plan.rests_on.directory) if plan.rests_on else None,
        generation=plan.generation,
        rows=0,
        table_bytes=0,
        slot_bytes=0,
        dense_bytes=0,
        manifest_bytes=0,
        state_bytes=0,
        blocking_secs=0.0,
        fingerprint_secs=fingerprint_secs,
        total_secs=0.0,
        reason=plan.reason,
        restores=plan.restores,
        auto_bits=plan.auto_bits,
        run=plan.run or None,
        find_secs=find_secs,
        wait_secs=wait_secs,
        interval_steps=interval and interval.steps,
        interval_changed=interval.changed if interval else "",
        doubts=doubts,
        inherited=inherited,
    )


def report_of_committed(
    known: SaveReport,
    flight: SaveInFlight,
    tables: Sequence[TableEntry],
    manifest: Manifest,
) -> SaveReport:
    """Completes the report of a committed save from its manifest.

    Process 0 knows the tables and manifest bytes of all processes before, the others only now.
    """
    totals, written, merged = manifest.totals, flight.written, flight.plan.baseline
    rounding = written.row_errors if written else None
    tables_held, manifest_bytes = known.tables, known.manifest_bytes
    rows = known.rows
    if not manifest_bytes:  # another process has written the manifest
        manifest_bytes = totals.manifest_bytes + len(dump(manifest))
        tables_held = held_tables(manifest, [written.manifest]) if written else ()
        rows = totals.rows if merged is None else flight.rows
    return dataclasses.replace(
        known,
        state_bytes=state_bytes(tables, flight.dense_leaves),
        rows=rows,
        table_bytes=totals.table_bytes - (merged.table_bytes if merged else 0),
        slot_bytes=totals.slot_bytes - (merged.slot_bytes if merged else 0),
        merged_bytes=merged.all_bytes if merged else 0,
        dense_bytes=totals.dense_bytes,
        manifest_bytes=manifest_bytes - (merged.bytes if merged else 0),
        total_secs=manifest.history[-1].secs,
        tables=tables_held,
        sample_rows=rounding.rows if rounding else None,
        mean_row_error=rounding.mean if rounding else None,
        worst_row_error=rounding.worst if rounding else None,
    )


def report_of_dropped(
    known: SaveReport,
    flight: SaveInFlight,
    tables: Sequence[TableEntry],
    problem: str,
    damaged: str | None = None,
) -> SaveReport:
    """Completes the report of a dropped save; the same on all processes, except for seconds.

    Args:
        known: report of what is known so far.
        flight: the save.
        tables: tables of its state.
        problem: why the save was dropped, in one line.
        damaged: path of the file that is the reason, below the root.
    """
    return dataclasses.replace(
        known,
        rows=0,
        manifest_bytes=0,
        tables=(),
        state_bytes=state_bytes(tables, flight.dense_leaves),
        total_secs=time.perf_counter() - flight.started_secs,
        outcome="dropped",
        problem=problem,
        damaged=damaged,
    )


def with_mirror(report: SaveReport, found: MirrorReport) -> SaveReport:
    """Adds to the report of a committed save how far the mirror is behind."""
    return dataclasses.replace(
        report,
        mirror_lag_steps=found.lag_steps,
        mirror_lag_secs=found.lag_secs,
        mirror_backlog_bytes=found.backlog_bytes,
        mirror_problem=found.problems[-1] if found.problems else "",
    )
