"""One save, from its plan until it is committed or has failed."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

from cnr_jax import errors
from cnr_jax.checkpointer.save_errors import save_error
from cnr_jax.checkpointer.saving.background import Background
from cnr_jax.checkpointer.saving.check import full_fp32_bytes
from cnr_jax.format.manifest import DenseLeaf, Manifest, TableEntry, Tracking, dump
from cnr_jax.format.names import step_number
from cnr_jax.repository.layout import Place
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.repository.rows_writer import Written
from cnr_jax.rows.gather.rounding import RowErrors
from cnr_jax.state.table import Tables
from cnr_jax.telemetry import SaveReport


@dataclasses.dataclass(slots=True, kw_only=True)
class SaveInFlight:
    """All that is known of one save: planned, then written, then committed or failed.

    It is made by the thread that saves; the background fills in what it has written. What became
    of it is found out once, by `Lifecycle`.

    Attributes:
        place: where it will be once it is committed.
        plan: the same on all processes.
        tables: as the manifest lists them.
        dense_leaves: the leaves that belong to no table, as the manifest lists them.
        tracking: how changed rows were found.
        recorded_clock: of the touched rows, if there are any.
        fingerprint_clock: of the stamps made from fingerprints, if these chose the rows.
        fingerprint_secs: that looking for changed rows took.
        started_secs: reading of `time.perf_counter` when `save` was called.
        blocking_secs: for which training waited.
        background: what writes it; None until that has started.
        written: what this process has written, once it has.
        row_errors: of rounded rows among it; None where all are exact.
        manifest_bytes: of `manifest.json`, if this process has written it.
        is_synced: whether it was committed, and synced or found impossible to sync, before
            anything was deleted in its favour.
        manifest: of the save, once it is seen to be committed.
        is_reported: whether its report is handed over.
        is_failure_told: whether the log says why it failed.
        outcome: what became of it, once that is settled. `"dropped"`: committed, but retention
            did not keep it.
        failure: why it failed, until someone takes it to raise it.
    """

    place: Place
    plan: Plan
    tables: tuple[TableEntry, ...]
    dense_leaves: tuple[DenseLeaf, ...]
    tracking: Tracking
    recorded_clock: int | None
    fingerprint_clock: int | None
    fingerprint_secs: float
    started_secs: float
    blocking_secs: float = 0.0
    background: Background | None = None
    written: Written | None = None
    row_errors: RowErrors | None = None
    manifest_bytes: int | None = None
    is_synced: bool = False
    manifest: Manifest | None = None
    is_reported: bool = False
    is_failure_told: bool = False
    outcome: Literal["committed", "dropped", "failed"] | None = None
    failure: errors.SaveError | None = None

    def has_failed(self) -> bool:
        """Whether all processes have heard that the save has failed; waits for their word."""
        return self.background is None or self.background.has_failed()

    def error(self) -> errors.SaveError:
        """Why the save was not committed, as far as this process knows."""
        known = self.background.error if self.background is not None else None
        reason = known or RuntimeError("it was not committed")
        return save_error(reason, self.plan.step, os.fspath(self.place.path))

    def stop(self) -> None:
        """Waits until nothing of a failed save is being written.

        Orbax raises the first error while other parts may still be writing, into a directory
        of which the same step, saved again, uses the name.
        """
        if self.background is not None:
            self.background.stop()

    def end(self, outcome: Literal["committed", "dropped", "failed"]) -> None:
        """Notes what became of it, and frees what only its writing needed."""
        self.outcome = outcome
        self.background = self.written = self.manifest = None

    def report(self, manifest: Manifest, tables: Tables) -> SaveReport:
        """What a committed save did."""
        parent, totals = manifest.parent, manifest.totals
        rounding = self.row_errors
        own = self.manifest_bytes
        if own is None:  # another process has written it
            own = len(dump(manifest))
        return SaveReport(
            step=manifest.step,
            kind=manifest.kind,
            tracking=manifest.tracking,
            parent=step_number(parent.directory) if parent else None,
            generation=manifest.generation,
            rows=totals.rows,
            table_bytes=totals.table_bytes,
            slot_bytes=totals.slot_bytes,
            dense_bytes=totals.dense_bytes,
            manifest_bytes=totals.manifest_bytes + own,
            full_fp32_bytes=full_fp32_bytes(tables, manifest.dense_leaves),
            blocking_secs=self.blocking_secs,
            fingerprint_secs=self.fingerprint_secs,
            total_secs=manifest.history[-1].secs,
            reason=manifest.reason,
            restores=manifest.restores,
            auto_bits=self.plan.auto_bits,
            sample_rows=rounding.rows if rounding else None,
            mean_row_error=rounding.mean if rounding else None,
            worst_row_error=rounding.worst if rounding else None,
        )
