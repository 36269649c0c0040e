"""What a save or a restore did: a report of each, for people, listeners and `jax.monitoring`."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cnr_jax.format.manifest import Manifest, to_json
from cnr_jax.format.tiles import ProcessManifest, joined_error
from cnr_jax.policy.bits import width_told
from cnr_jax.repository.description import TableDescription

# Kinds of slots that a codec can make smaller.
_FLOATS = {"float32", "bfloat16", "float16"}
# Share of a save from which on exact slots are worth a hint.
_MOSTLY = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A save that has ended: what it holds, what it cost, how far off its rows are.

    One that was dropped holds nothing: its rows and bytes are 0, and the next save holds what it
    was to. A save that failed has no report but an error.

    Bytes are those of all processes together. Seconds are of this process, and those of phases
    need not add up: what is written in the background overlaps with training, and gathering
    with writing.

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
        state_bytes: tables, slots and dense leaves as they are in memory: what a plain full
            save would write.
        blocking_secs: how long training waited, on this process.
        fingerprint_secs: of these, for hashing rows: all with fingerprints or audited, a
            part in a recorded run.
        find_secs: of these, until the save was decided: checks, hashes, and to hear of the other
            processes. Waits for the train step that made the state.
        gather_secs: of these, for gathering rows, and waiting for room where they go.
        encode_secs: in the background, for which writing waited for the codes of rows that had
            been gathered; on accelerators, for codes to come to the host.
        write_secs: in the background, for everything else until all that this process writes was
            on storage: rows, their row ids, dense leaves.
        commit_secs: from when all processes had written until the step was durable under its
            name; under a plain manager of Orbax until the manifest was.
        total_secs: from the call of `save` until the manifest was written.
        reason: why it was full or a delta; and after more restores than expected, so.
        restores: how often a run was restored along the branch of this save.
        run: that it belongs to.
        doubts: what of the dense leaves may be slots, see `Tables.doubts`.
        tables: what it holds of each table, with bytes, codecs and errors. On process 0 of what
            all processes saved, on others of what these did.
        auto_bits: width of codes that `bits="auto"` came to, where it is used; small
            tables have 8 at least. 32: all bits.
        inherited: options that were not given, and are as in the run that goes on: names, of a
            table such as `tables.user.bits`.
        sample_rows: rounded rows of tables that were read back to see how far off they are, of
            those that this process saved: at most 16,384, evenly spread, rows of zeros left
            out. None where nothing was rounded.
        mean_row_error: of these, the mean of `||row - read|| / ||row||`; None without any.
        worst_row_error: the greatest.
        outcome: `"committed"`; or `"dropped"`: it cannot be restored, because retention did not
            keep it, or because files are gone of a checkpoint that it was to rest on, or of its
            own, as was seen right after its commit; the latter process 0 alone tells.
        problem: why it was dropped, in a line; empty if it was not.
        damaged: the file that is missing or cut short, where that is why: a path below the root,
            the directory of its step first.
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
    state_bytes: int
    blocking_secs: float
    fingerprint_secs: float
    total_secs: float
    reason: str
    restores: int
    auto_bits: int | None = None
    sample_rows: int | None = None
    mean_row_error: float | None = None
    worst_row_error: float | None = None
    run: str | None = None
    find_secs: float = 0.0
    gather_secs: float = 0.0
    encode_secs: float = 0.0
    write_secs: float = 0.0
    commit_secs: float = 0.0
    doubts: tuple[str, ...] = ()
    tables: tuple[TableDescription, ...] = ()
    outcome: Literal["committed", "dropped"] = "committed"
    problem: str = ""
    damaged: str | None = None
    inherited: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All bytes written."""
        rows = self.table_bytes + self.slot_bytes
        return rows + self.dense_bytes + self.manifest_bytes

    @property
    def reduction(self) -> float:
        """How many times smaller than a plain full save this one is; 0 of one that was dropped."""
        if self.outcome == "dropped":
            return 0.0
        return self.state_bytes / max(1, self.total_bytes)

    @property
    def exact_slot_bytes(self) -> int:
        """Bytes of slots that are stored exactly, though a codec could make them smaller."""
        return sum(
            leaf.bytes
            for table in self.tables
            for leaf in table.leaves[1:]
            if leaf.codecs == ("raw",) and leaf.dtype in _FLOATS
        )

    @property
    def hint(self) -> str:
        """What would make saves like this one much smaller, in a line; empty if nothing is known.

        Example:
            `79 % of its bytes are optimizer slots that are stored exactly; ...`
        """
        hints = list(self.doubts)
        share = self.exact_slot_bytes / max(1, self.total_bytes)
        if share >= _MOSTLY:
            hints.append(
                f"{percent(share)} of its bytes are optimizer slots that are stored exactly;"
                " Options(slot_codec='auto') stores accumulators in 16 bits, off by at most"
                " 0.15 %, and momenta in 8"
            )
        return ". ".join(hints)

    def asdict(self) -> dict[str, Any]:
        """All of it, and what follows from it, as values of JSON.

        Returns:
            The fields, `total_bytes`, `reduction` and `hint`; `tables` is a list of dicts, each
            with `saved_share`, the share of its rows that the step holds.
        """
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found["tables"] = [
            {**to_json(table), "saved_share": table.saved_share}
            for table in self.tables
        ]
        found["doubts"] = list(self.doubts)
        found["inherited"] = list(self.inherited)
        found["total_bytes"], found["reduction"] = self.total_bytes, self.reduction
        return {**found, "hint": self.hint}

    def scalars(self) -> dict[str, float]:
        """Its numbers by name, as dashboards take them; of a table under `tables/NAME/`.

        Example:
            `wandb.log(report.scalars(), step=report.step)`
        """
        return _numbers(self.asdict())

    def __str__(self) -> str:
        """One line for a log.

        Example:
            `step 30: delta on 10, 1,234 rows rounded by 7.1 % (worst 9.8 %), 0.09 MB (28.1x
            smaller), stall 3.1 ms`
        """
        kind = self.kind if self.parent is None else f"{self.kind} on {self.parent}"
        if self.outcome == "dropped":
            return f"step {self.step}: {kind}, dropped: {self.problem}"
        bits = "" if self.auto_bits is None else f" {width_told(self.auto_bits)},"
        rounded = ""
        if self.mean_row_error is not None and self.worst_row_error is not None:
            rounded = (
                f" rounded by {percent(self.mean_row_error)}"
                f" (worst {percent(self.worst_row_error)})"
            )
        return (
            f"step {self.step}: {kind}, {self.rows:,} rows{rounded},{bits}"
            f" {self.total_bytes / 1e6:.2f} MB ({_compared(self.reduction)}),"
            f" stall {self.blocking_secs * 1e3:.1f} ms"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoredTable:
    """A table that was restored, and how far off its rows are.

    Errors are those that were sampled when its rows were saved, in all steps of the chain
    together: rows that a later step holds again count there too.

    Attributes:
        name: in the state.
        rows: of the table, in the state.
        sample_rows: rounded rows that were compared, in all steps that were read: a row counts in
            each of them that stores it. None where none was, or the steps were saved by a revision
            that did not note it.
        mean_row_error: of these, the mean of `||row - read|| / ||row||`.
        worst_row_error: the greatest.
    """

    name: str
    rows: int
    sample_rows: int | None = None
    mean_row_error: float | None = None
    worst_row_error: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """A restore: what was read, how long that took, how far off rows are.

    Bytes and seconds are those of this process.

    Attributes:
        step: that was restored.
        kind: `"full"` or `"delta"`; `"orbax"`: an adopted step of plain Orbax.
        generation: number of the branch that it is of.
        run: that it belongs to.
        chain: the steps that were read, the full one first, `step` last.
        bytes_read: of files of rows, of dense leaves and of process manifests; each file counts
            once, and a chunk of rows as a whole. Of an adopted step, of its leaves in memory.
        open_secs: for reading and checking manifests; of older steps also dense files, by digests.
        rows_secs: for tables and slots, until they were handed to the devices.
        dense_secs: for everything else.
        total_secs: until the state was put together, which may wait for other processes.
        tables: that were restored.
        passed_over: newer steps that were tried before, and found damaged.
    """

    step: int
    kind: str
    generation: int
    run: str | None
    chain: tuple[int, ...]
    bytes_read: int
    open_secs: float
    rows_secs: float
    dense_secs: float
    total_secs: float
    tables: tuple[RestoredTable, ...]
    passed_over: tuple[int, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """All of it, as values of JSON."""
        return to_json(self)

    def scalars(self) -> dict[str, float]:
        """Its numbers by name, as dashboards take them; of a table under `tables/NAME/`."""
        return {**_numbers(self.asdict()), "chain_length": len(self.chain)}

    def __str__(self) -> str:
        """One line for a log.

        Example:
            `step 30 restored: chain 10, 30, 4.20 MB read in 0.31 s, rows rounded by 7.1 %`
        """
        steps = ", ".join(map(str, self.chain[:3]))
        if len(self.chain) > 4:
            steps = f"{self.chain[0]} to {self.chain[-1]}, {len(self.chain)} steps"
        elif len(self.chain) == 4:
            steps += f", {self.chain[3]}"
        line = (
            f"step {self.step} restored: chain {steps},"
            f" {self.bytes_read / 1e6:.2f} MB read in {self.total_secs:.2f} s"
        )
        known = [t for t in self.tables if t.sample_rows and t.mean_row_error]
        compared = sum(t.sample_rows or 0 for t in known)
        if compared:
            off = sum((t.mean_row_error or 0) * (t.sample_rows or 0) for t in known)
            line += f", rows rounded by {percent(off / compared)}"
        if self.passed_over:
            line += f"; passed over {', '.join(map(str, self.passed_over))}"
        return line


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


def restore_report(
    manifests: Sequence[Manifest],
    processes: Sequence[ProcessManifest],
    *,
    bytes_read: int,
    reads_dense: bool,
    tables: Mapping[str, tuple[str, int]],
    laps: Laps,
) -> RestoreReport:
    """The report of a restore that has read all it needs; its total time is still to come.

    Args:
        manifests: of the chain, the full checkpoint first, the restored one last.
        processes: their process manifests.
        bytes_read: of arrays.
        reads_dense: whether dense files were read, those that Orbax has written.
        tables: what was restored: the name that it was saved under, and rows, by its name.
        laps: the phases `open`, `rows` and `dense`.
    """
    last = manifests[-1]
    digests = [digest for each in manifests for digest in each.processes]
    digests += last.dense_files if reads_dense else ()
    return RestoreReport(
        step=last.step,
        kind=last.kind,
        generation=last.generation,
        run=last.run,
        chain=tuple(each.step for each in manifests),
        bytes_read=bytes_read + sum(digest.bytes for digest in digests),
        open_secs=laps.secs["open"],
        rows_secs=laps.secs["rows"],
        dense_secs=laps.secs["dense"],
        total_secs=0.0,
        tables=tuple(
            _restored_table(name, rows, stored, processes)
            for name, (stored, rows) in sorted(tables.items())
        ),
    )


def _restored_table(
    name: str, rows: int, stored: str, processes: Sequence[ProcessManifest]
) -> RestoredTable:
    error = joined_error((each.row_errors or {}).get(stored) for each in processes)
    if error is None:
        return RestoredTable(name=name, rows=rows)
    return RestoredTable(
        name=name,
        rows=rows,
        sample_rows=error.rows,
        mean_row_error=error.mean,
        worst_row_error=error.worst,
    )


def _numbers(document: dict[str, Any]) -> dict[str, float]:
    """The numbers of a report but its step, those of its tables by their names."""
    parts = [("", document)]
    parts += [(f"tables/{table['name']}/", table) for table in document["tables"]]
    return {
        f"{prefix}{name}": value
        for prefix, part in parts
        for name, value in part.items()
        if isinstance(value, int | float) and (prefix or name != "step")
    }


def _compared(reduction: float) -> str:
    """A save beside a plain full one, such as `28.1x smaller`, or `1.3x larger`."""
    larger = 0 < reduction < 1
    return f"{1 / reduction if larger else reduction:.1f}x {'larger' if larger else 'smaller'}"


def percent(share: float) -> str:
    """A share in percent, two digits.

    Example:
        >>> percent(0.0712)
        '7.1 %'
    """
    return f"{100 * share:.2g} %"
