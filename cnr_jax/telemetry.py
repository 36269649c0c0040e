"""Reports of saves and restores, for people, listeners and `jax.monitoring`."""

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
    """Report of a save that has ended: what it holds, what it cost, how far off its rows are.

    A save that was dropped holds nothing: its rows and bytes are 0, and the next save holds its
    rows. A save that failed has an error instead of a report.

    Bytes are those of all processes together. Seconds are those of this process. The seconds of
    phases need not add up: writing in the background overlaps with training, and gathering with
    writing.

    Attributes:
        step: number of the step.
        kind: `"full"` or `"delta"`.
        tracking: how changed rows were found.
        parent: number of the step that a delta rests on.
        generation: number of the branch; a rollback starts a higher one.
        rows: number of rows written, over all tables.
        table_bytes: bytes of codes, row metadata, row ids and array metadata of tables.
        slot_bytes: bytes of the same for optimizer slots.
        dense_bytes: bytes of the files of everything that is not a table.
        manifest_bytes: bytes of all manifests.
        merged_bytes: bytes of the baseline that the save brings along, which a process of its own
            has merged; not among the bytes above. 0 for a save without one.
        state_bytes: bytes of tables, slots and dense leaves in memory, which a plain full save
            would write.
        blocking_secs: seconds that training waited, on this process. They begin once the save may:
            a wait for earlier saves is over by then.
        fingerprint_secs: part of `blocking_secs`: hashing rows. With fingerprints or audited all
            rows are hashed, in a recorded run some of them.
        find_secs: part of `blocking_secs`: checks, hashes and messages, until the save was decided.
            This includes the wait for the train step that made the state.
        wait_secs: part of `find_secs`: that wait, in which training went on.
        gather_secs: part of `blocking_secs`: gathering rows, and waiting for room for them.
        encode_secs: seconds in the background that writing waited for the codes of gathered rows;
            on accelerators, for codes to come to the host.
        write_secs: seconds in the background of everything else, until all that this process writes
            was on storage: rows, their row ids, dense leaves.
        commit_secs: seconds from when all processes had written until the step was durable under
            its name; under a plain manager of Orbax, until the manifest was durable.
        total_secs: seconds from the call of `save` until the manifest was written.
        reason: why the save was full or a delta, and whether there were more restores than
            expected.
        restores: how often a run was restored along the branch of this save.
        run: id of the run that the save belongs to.
        doubts: dense leaves that may be slots, see `Tables.doubts`.
        tables: contents of the save by table, with bytes, codecs and errors. On process 0 they
            count what all processes saved, on another process what that one saved.
        auto_bits: width of codes that `bits="auto"` came to, if it is used; small tables have at
            least 8. 32 means all bits.
        inherited: names of options that were not given, and are as in the run that goes on; those
            of a table are written `tables.user.bits`.
        sample_rows: number of rounded rows of tables that were read back to see how far off they
            are, among those that this process saved: at most 16,384, evenly spread, rows of zeros
            left out. None if nothing was rounded.
        mean_row_error: mean of `||row - read|| / ||row||` over the sample; None without one.
        worst_row_error: greatest of these errors.
        outcome: `"committed"` or `"dropped"`. A dropped save cannot be restored, for one of three
            reasons: retention did not keep it; a checkpoint that it was to rest on has lost files;
            or right after its commit, files of its own were gone. Only process 0 reports the last
            one.
        problem: why the save was dropped, in a line; empty if it was not.
        mirror_lag_steps: number of committed steps that are not in the mirror, this one among them,
            and are lost with the root. None without a mirror, and on processes other than 0.
        mirror_lag_secs: seconds since the oldest of these steps was committed.
        mirror_backlog_bytes: bytes of these steps.
        mirror_problem: why steps are not copied to the mirror, in a line; empty if they are.
        interval_steps: train steps until the next save, with `Options(interval="auto")`.
        interval_changed: why `interval_steps` has changed, in a line; empty if it has not.
        near_problem: why the save went to the root directly, though `Options.near` is given; empty
            if it did not.
        damaged: path below the root of the file that is missing or cut short, beginning with the
            directory of its step; None if that is not the problem.
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
    merged_bytes: int = 0
    auto_bits: int | None = None
    sample_rows: int | None = None
    mean_row_error: float | None = None
    worst_row_error: float | None = None
    run: str | None = None
    find_secs: float = 0.0
    wait_secs: float = 0.0
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
    mirror_lag_steps: int | None = None
    mirror_lag_secs: float | None = None
    mirror_backlog_bytes: int | None = None
    mirror_problem: str = ""
    near_problem: str = ""
    interval_steps: int | None = None
    interval_changed: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all that was written."""
        rows = self.table_bytes + self.slot_bytes
        return rows + self.dense_bytes + self.manifest_bytes

    @property
    def reduction(self) -> float:
        """Factor by which a plain full save is larger than this one; 0 if it was dropped."""
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
        """Advice, in a line, on making saves like this one much smaller; empty if there is none.

        Example:
            `79 % of its bytes are optimizer slots that are stored exactly; ...`
        """
        hints = list(self.doubts)
        share = self.exact_slot_bytes / max(1, self.total_bytes)
        if share >= _MOSTLY:
            hints.append(
                f"{percent(share)} of its bytes are optimizer slots that are stored exactly;"
                " Options(slot_codec='auto') stores accumulators in 16 bits, off by at most"
                " 0.15 %, and momenta in 8; 'moments' takes fewest bytes under dense Adam"
            )
        return ". ".join(hints)

    def asdict(self) -> dict[str, Any]:
        """All fields, and figures that follow from them, as values of JSON.

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
        """Numbers by name, for dashboards; those of a table are under `tables/NAME/`.

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
        merged = ""
        if self.merged_bytes:
            merged = f" brings {self.merged_bytes / 1e6:.2f} MB that were merged,"
        bits = "" if self.auto_bits is None else f" {width_told(self.auto_bits)},"
        rounded = ""
        if self.mean_row_error is not None and self.worst_row_error is not None:
            rounded = (
                f" rounded by {percent(self.mean_row_error)}"
                f" (worst {percent(self.worst_row_error)})"
            )
        return (
            f"step {self.step}: {kind}, {self.rows:,} rows{rounded},{bits}"
            f" {self.total_bytes / 1e6:.2f} MB ({_compared(self.reduction)}),{merged}"
            f" stall {self.blocking_secs * 1e3:.1f} ms"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoredTable:
    """Report of a table that was restored: its rows, and how far off they are.

    The errors are those that were sampled when its rows were saved, in all steps of the chain
    together. Rows that a later step holds again count there too.

    Attributes:
        name: name of the table in the state.
        rows: number of its rows in the state.
        sample_rows: number of rounded rows that were compared, in all steps that were read. A row
            counts in each step that stores it. None if none was compared, or if the revision that
            saved the steps did not note it.
        mean_row_error: mean of `||row - read|| / ||row||` over these rows.
        worst_row_error: greatest of these errors.
    """

    name: str
    rows: int
    sample_rows: int | None = None
    mean_row_error: float | None = None
    worst_row_error: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """Report of a restore: what it read, how long that took, how far off rows are.

    Bytes and seconds are those of this process.

    Attributes:
        step: number of the restored step.
        kind: `"full"` or `"delta"`; `"orbax"` for an adopted step of plain Orbax.
        generation: number of its branch.
        run: id of its run.
        chain: numbers of the steps that were read, the full one first, `step` last.
        bytes_read: bytes of files of rows, of dense leaves and of process manifests. Each file
            counts once, and a chunk of rows as a whole. For an adopted step, bytes of its leaves in
            memory.
        open_secs: seconds of reading and checking manifests; for older steps also dense files, by
            digests.
        rows_secs: seconds of tables and slots, until they were handed to the devices.
        dense_secs: seconds of everything else.
        total_secs: seconds until the state was put together, which may wait for other processes.
        tables: reports of the restored tables.
        passed_over: numbers of newer steps that were tried before, and found damaged.
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
        """All fields as values of JSON."""
        return to_json(self)

    def scalars(self) -> dict[str, float]:
        """Numbers by name, for dashboards; those of a table are under `tables/NAME/`."""
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
    """Stopwatch of phases that follow each other, and may come again.

    Attributes:
        secs: seconds by phase.
    """

    def __init__(self) -> None:
        self.secs: collections.Counter[str] = collections.Counter()
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """Counts the time since the last call to a phase."""
        now = time.perf_counter()
        # A Counter is typed for counts, and adds seconds as well.
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
    """Report of a restore that has read everything; its total time is set later.

    Args:
        manifests: manifests of the chain, the full checkpoint first, the restored one last.
        processes: their process manifests.
        bytes_read: bytes read of arrays.
        reads_dense: whether dense files that Orbax has written were read.
        tables: restored tables by name: the name each was saved under, and its number of rows.
        laps: seconds of the phases `open`, `rows` and `dense`.
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
    """Numbers of a report without its step; those of its tables under their names."""
    parts = [("", document)]
    parts += [(f"tables/{table['name']}/", table) for table in document["tables"]]
    return {
        f"{prefix}{name}": value
        for prefix, part in parts
        for name, value in part.items()
        if isinstance(value, int | float) and (prefix or name != "step")
    }


def _compared(reduction: float) -> str:
    """Text that compares a save with a plain full one: `28.1x smaller`, or `1.3x larger`."""
    larger = 0 < reduction < 1
    return f"{1 / reduction if larger else reduction:.1f}x {'larger' if larger else 'smaller'}"


def percent(share: float) -> str:
    """A share in percent, two digits.

    Example:
        >>> percent(0.0712)
        '7.1 %'
    """
    return f"{100 * share:.2g} %"
