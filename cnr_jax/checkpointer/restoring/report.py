"""What a restore has read, as its report tells it."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence

from cnr_jax.checkpointer.restoring.match import Wanted
from cnr_jax.format.tiles import joined_error
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.state.table import Tables
from cnr_jax.telemetry import RestoredTable, RestoreReport


class Laps:
    """Seconds of phases that follow each other, and may come again.

    Attributes:
        secs: by phase.
    """

    def __init__(self) -> None:
        self.secs: collections.Counter[str] = collections.Counter()
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """All that passed since the last call was of this phase."""
        now = time.perf_counter()
        self.secs[phase] += now - self._last  # pyright: ignore[reportArgumentType]
        self._last = now


def report_of(
    chain: Sequence[StepReader],
    wanted: Wanted,
    tables: Tables,
    laps: Laps,
    *,
    reads_dense: bool,
) -> RestoreReport:
    """The report of a restore that has read all it needs; its total time is still to come.

    Args:
        chain: the full checkpoint first, the restored one last.
        wanted: what was asked for and is there.
        tables: where the tables are in the restored state.
        laps: the phases `open`, `rows` and `dense`.
        reads_dense: whether dense files were read.
    """
    manifest = chain[-1].manifest
    nbytes = sum(
        reader.read_bytes + sum(digest.bytes for digest in reader.manifest.processes)
        for reader in chain
    )
    if reads_dense:
        nbytes += sum(digest.bytes for digest in manifest.dense_files)
    restored = sorted({table for table, _, _ in wanted.tables.leaves})
    return RestoreReport(
        step=manifest.step,
        kind=manifest.kind,
        generation=manifest.generation,
        run=manifest.run,
        chain=tuple(reader.manifest.step for reader in chain),
        bytes_read=nbytes,
        open_secs=laps.secs["open"],
        rows_secs=laps.secs["rows"],
        dense_secs=laps.secs["dense"],
        total_secs=0.0,
        tables=tuple(
            _table(name, tables[name].rows, wanted.tables.stored[name], chain)
            for name in restored
        ),
    )


def _table(
    name: str, rows: int, stored: str, chain: Sequence[StepReader]
) -> RestoredTable:
    error = joined_error(
        (process.row_errors or {}).get(stored)
        for reader in chain
        for process in reader.processes
    )
    if error is None:
        return RestoredTable(name=name, rows=rows)
    return RestoredTable(
        name=name,
        rows=rows,
        sample_rows=error.rows,
        mean_row_error=error.mean,
        worst_row_error=error.worst,
    )
