"""What a save did: one report for each committed save, for listeners and `jax.monitoring`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A committed save.

    Bytes are those of all processes together.

    Attributes:
        kind: `"full"` or `"delta"`.
        tracking: how changed rows were found.
        parent: step of the parent of a delta.
        generation: number of the branch; a rollback starts a higher one.
        rows: rows written, over all tables.
        table_bytes: codes, row metadata, row ids and array metadata of tables.
        slot_bytes: the same of optimizer slots.
        dense_bytes: files of everything that is not a table.
        manifest_bytes: all manifests.
        full_fp32_bytes: tables, slots and dense leaves as they are in memory, tables in
            float32: what a plain full save would write.
        blocking_secs: how long training waited, on this process.
        fingerprint_secs: of these, for hashing rows: all with fingerprints or audited, a
            part in a recorded run.
        total_secs: from the call of `save` until the manifest was written.
        reason: why it was full or a delta; and after more restores than expected, so.
        restores: how often a run was restored along the branch of this save.
        auto_bits: width of codes that `bits="auto"` came to, where it is used; small
            tables have 8.
        sample_rows: rounded rows of tables that were read back to see how far off they are, of
            those that this process saved: at most 16,384, evenly spread, rows of zeros left
            out. None where nothing was rounded.
        mean_row_error: of these, the mean of `||row - read|| / ||row||`; None without any.
        worst_row_error: the greatest.
    """

    step: int
    kind: str
    tracking: str
    parent: int | None
    generation: int
    rows: int
    table_bytes: int
    slot_bytes: int
    dense_bytes: int
    manifest_bytes: int
    full_fp32_bytes: int
    blocking_secs: float
    fingerprint_secs: float
    total_secs: float
    reason: str
    restores: int
    auto_bits: int | None = None
    sample_rows: int | None = None
    mean_row_error: float | None = None
    worst_row_error: float | None = None

    @property
    def total_bytes(self) -> int:
        """All bytes written."""
        rows = self.table_bytes + self.slot_bytes
        return rows + self.dense_bytes + self.manifest_bytes

    @property
    def reduction(self) -> float:
        """How many times smaller than a plain full save this one is."""
        return self.full_fp32_bytes / max(1, self.total_bytes)

    def __str__(self) -> str:
        """One line for a log.

        Example:
            `step 30: delta on 10, 1,234 rows rounded by 7.1 % (worst 9.8 %), 0.09 MB (28.1x
            smaller), stall 3.1 ms`
        """
        kind = self.kind if self.parent is None else f"{self.kind} on {self.parent}"
        bits = "" if self.auto_bits is None else f" {self.auto_bits} bits,"
        rounded = ""
        if self.mean_row_error is not None and self.worst_row_error is not None:
            rounded = (
                f" rounded by {percent(self.mean_row_error)}"
                f" (worst {percent(self.worst_row_error)})"
            )
        return (
            f"step {self.step}: {kind}, {self.rows:,} rows{rounded},{bits}"
            f" {self.total_bytes / 1e6:.2f} MB ({self.reduction:.1f}x smaller),"
            f" stall {self.blocking_secs * 1e3:.1f} ms"
        )


def percent(share: float) -> str:
    """A share in percent, two digits.

    Example:
        >>> percent(0.0712)
        '7.1 %'
    """
    return f"{100 * share:.2g} %"
