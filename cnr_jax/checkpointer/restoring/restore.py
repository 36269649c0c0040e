"""Restore of one step: reading it, and putting the state together."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from cnr_jax import errors
from cnr_jax.args import (
    Restore,
)
from cnr_jax.checkpointer.multihost import Channel, on_primary
from cnr_jax.checkpointer.orbax_compat.dense_part import OrbaxDense, open_dense
from cnr_jax.checkpointer.orbax_compat.leaves import abstract_dense
from cnr_jax.checkpointer.restoring.fitting import (
    as_wanted,
    misfit_of_number,
    mismatch,
    say_converted,
)
from cnr_jax.checkpointer.restoring.from_manifest import (
    abstract_state,
    leaves_of,
    tables_in,
    tables_of,
)
from cnr_jax.checkpointer.restoring.inherited import Step, encoding_in, renamed
from cnr_jax.checkpointer.restoring.match import Wanted, match
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.checkpointer.tracking.tracker import Tracker
from cnr_jax.format.encodings import EncodingEntry, encoding_told
from cnr_jax.format.manifest import TableEntry
from cnr_jax.garbage import without_collections
from cnr_jax.plain_args import with_stored_shapes
from cnr_jax.repository.index.entries import entry_of, order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.planner import Planner
from cnr_jax.repository.index.runs import note_restored
from cnr_jax.repository.layout import Place
from cnr_jax.repository.replay.dense_tiles import TiledDense
from cnr_jax.repository.replay.leaves import (
    restore_leaves,
    restore_stamps,
    restored_stamps,
)
from cnr_jax.repository.step import read_processes
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.touched import Touched, lineage_hex, seeded, stamp_sharding
from cnr_jax.state.table import Tables, check_tables, flatten_paths, merge, nest
from cnr_jax.telemetry import Laps, RestoreReport, restore_report
from cnr_jax.texts import logger

_log = logger(__name__)
# Bytes that are read ahead of a chain in a store where each read is a request.
_AHEAD_BYTES = 128 << 20


@dataclasses.dataclass(slots=True)
class Attempt:
    """Attempt of a manager to restore, perhaps other items too; it counts as a whole or not at all.

    Attributes:
        passed_over: steps that were tried before, and found damaged.
        is_told: whether the processes exchange the outcome of the attempt, or have done so.
        resumption: a `Resumption` or an `Adoption`, from which saving goes on once everything
            that was asked for has succeeded.
    """

    passed_over: tuple[int, ...] = ()
    is_told: bool = False
    resumption: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore: the state, its touched rows, and a report.

    Attributes:
        state: train state in the structure that was asked for; nested dicts by path if none was.
        touched: touched rows that go with the state: pass both to the next train step. Each restore
            returns some. A run by fingerprints does not look at them; you may hand them to `Save`
            or leave them out.
        report: report of what was read, and how far off the rows of each table are.
    """

    state: Any
    touched: Touched
    report: RestoreReport

    def __iter__(self) -> Any:
        """Unpacks as `state, touched`."""
        return iter((self.state, self.touched))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Contents of a restored step, as this process has read them: only computation is left.

    Attributes:
        chain: readers of the chain, the full checkpoint first, the restored one last.
        state: state that gives the structure of the restored one.
        tables: where the tables are in the restored state.
        wanted: leaves that were asked for and are there.
        arrays: tables and slots, by table and leaf.
        dense: everything else, as nested dicts.
        stamps: shardings and values of the stamps of the touched rows.
        report: report of what was read.
    """

    chain: tuple[StepReader, ...]
    state: Any
    tables: Tables
    wanted: Wanted
    arrays: dict[str, dict[str, jax.Array]]
    dense: Any
    stamps: tuple[dict[str, Sharding], dict[str, Any]]
    report: RestoreReport

    def put_together(
        self, started_secs: float, passed_over: tuple[int, ...]
    ) -> Restored:
        """Makes the state that was asked for, and touched rows in a fresh lineage.

        With several processes each must make this call: they draw the lineage together.

        Args:
            started_secs: reading of `time.perf_counter` when the restore began.
            passed_over: steps that were tried before.
        """
        touched = seeded(self.tables, *self.stamps, len(self.chain) - 1)
        whole = _assemble(self.state, self.wanted, self.tables, self.arrays, self.dense)
        secs = time.perf_counter() - started_secs
        report = dataclasses.replace(
            self.report, total_secs=secs, passed_over=passed_over
        )
        return Restored(whole, touched, report)


def read_back(
    place: Place,
    args: Restore,
    tables: Tables | None,
    *,
    verify: bool,
) -> ReadBack:
    """Reads a step and its chain; nothing is communicated between processes.

    Args:
        place: place of the item.
        args: arguments of the restore; without a state everything, by path, on one device.
        tables: where the tables are in the state, if `args` does not say it; None: where they
            were when it was saved.
        verify: compare every chunk with the manifest.

    Raises:
        ChainError, IntegrityError, FormatError: if the step is damaged.
        StateMismatchError: if the state asked for does not match.
    """
    laps = Laps()
    chain = open_chain(place.root, place.directory, place.item, verify=verify)
    # Each of several processes reads only a part, so none of them reads ahead.
    if not args.partial and jax.process_count() == 1:
        left_bytes = _AHEAD_BYTES
        for reader in chain:
            left_bytes = reader.read_ahead(left_bytes)
    manifest = chain[-1].manifest
    state = with_stored_shapes(args.state, lambda: leaves_of(manifest))
    tables = args.tables or tables
    everything = state is None
    if everything:
        tables = tables_of(manifest)
        state = abstract_state(manifest, tables)
    elif tables is None:
        tables = tables_in(manifest, state)
    check_tables(tables)
    with without_collections():
        wanted = match(manifest, state, tables, args, place.directory)
    # Dense files are checked before rows are read, so that damage is found early. A restore of a
    # few tables alone does not wait for that.
    is_read = bool(wanted.dense) or not args.partial
    dense = open_dense(chain[-1])
    if is_read:
        dense.check()
    values = dense.values(leaf.path for leaf in wanted.numbers)
    numbers = _fit_numbers(values, wanted, args.cast, place.directory)
    laps.end("open")
    arrays = _rebuild(chain, wanted)
    laps.end("rows")
    rest = _dense_leaves(dense, wanted, everything=everything)
    rest = nest((rest | numbers).items())
    laps.end("dense")
    stamps = _read_stamps(chain, wanted, tables)
    laps.end("rows")
    return ReadBack(
        chain=chain,
        state=state,
        tables=tables,
        wanted=wanted,
        arrays=arrays,
        dense=rest,
        stamps=stamps,
        report=restore_report(
            [reader.manifest for reader in chain],
            [process for reader in chain for process in reader.processes],
            bytes_read=sum(reader.read_bytes for reader in chain),
            reads_dense=is_read,
            tables={
                name: (wanted.tables.stored[name], tables[name].rows)
                for name, _, _ in wanted.tables.leaves
            },
            laps=laps,
        ),
    )


def _dense_leaves(
    dense: TiledDense | OrbaxDense, wanted: Wanted, *, everything: bool
) -> dict[tuple[str, ...], Any]:
    """Reads all dense leaves but numbers, and converts them to what the state wants.

    Args:
        dense: dense leaves of the step.
        wanted: leaves that were asked for.
        everything: whether no state was given, so that all leaves come as they were saved.
    """
    if everything:
        return dense.restore(None)
    asked = {path: abstract_dense(leaf) for path, leaf in wanted.asked.items()}
    found = dense.restore(asked)
    return {path: as_wanted(x, wanted.dense[path]) for path, x in found.items()}


def _fit_numbers(
    numbers: Mapping[tuple[str, ...], bool | int | float],
    wanted: Wanted,
    cast: bool,
    step: str,
) -> dict[tuple[str, ...], Any]:
    """Converts numbers of Python to leaves of the state; checks those that would change.

    Raises:
        StateMismatchError: if some values would change, and that was not asked for.
    """
    casts, found = list(wanted.casts), dict[tuple[str, ...], Any]()
    for path, number in numbers.items():
        if told := misfit_of_number(number, wanted.dense[path]):
            casts.append(f"{'/'.join(path)}: {told}")
        found[path] = as_wanted(number, wanted.dense[path])
    if casts and not cast:
        raise mismatch(step, (), casts, ())
    say_converted(step, casts)
    return found


def _rebuild(
    chain: Sequence[StepReader], wanted: Wanted
) -> dict[str, dict[str, jax.Array]]:
    """Reads the table leaves, by table and leaf name."""
    found: dict[str, dict[str, jax.Array]] = {}
    tables = wanted.tables
    leaves = [
        (tables.stored[table], leaf, tables.targets[table], abstract)
        for table, leaf, abstract in tables.leaves
    ]
    # If values do not fit, `cast` was asked for, and one warning of our own names the leaves.
    with np.errstate(over="ignore", invalid="ignore"):
        arrays = restore_leaves(chain, leaves)
    for (table, leaf, _), array in zip(tables.leaves, arrays, strict=True):
        found.setdefault(table, {})[leaf] = array
    return found


def _read_stamps(
    chain: Sequence[StepReader], wanted: Wanted, tables: Tables
) -> tuple[dict[str, Sharding], dict[str, Any]]:
    """Reads shardings and values of the stamps, such that the next delta holds the right rows.

    Tables that were not restored get stamps of zero.
    """
    shardings: dict[str, Sharding] = {}
    stamps: dict[str, Any] = {}
    found = wanted.tables
    abstract = {table: array for table, leaf, array in found.leaves if leaf == "table"}
    for name, table in tables.items():
        array = abstract.get(name)
        source = array.sharding if array is not None else table.leaf.sharding
        source = source or SingleDeviceSharding(jax.local_devices()[0])
        shardings[name] = stamp_sharding(source, table.leaf.shape)
        if array is None:
            stamps[name] = np.zeros(table.padded_rows, np.int32)
    names = [name for name in tables if name not in stamps]
    restored = restore_stamps(
        chain, [(found.stored[n], found.targets[n], shardings[n]) for n in names]
    )
    stamps |= dict(zip(names, restored, strict=True))
    return shardings, stamps


@without_collections()
def _assemble(
    state: Any,
    wanted: Wanted,
    tables: Tables,
    arrays: Mapping[str, Mapping[str, jax.Array]],
    dense: Mapping[str, Any],
) -> Any:
    """Assembles the state, in the structure of the one that was asked for.

    Args:
        state: state, abstract or concrete, that gives the structure.
        wanted: what `match` returned for this state.
        tables: tables of the state, which give the paths of their leaves.
        arrays: the table leaves, by table and leaf name.
        dense: the restored dense leaves as nested dicts.
    """
    rest = {**wanted.kept, **wanted.texts, **dict(flatten_paths(dense))}
    return merge(state, tables, arrays, nest(rest.items()))


@dataclasses.dataclass(frozen=True, slots=True)
class Resumption:
    """Restored step, and the ledger and touched rows from which saving goes on.

    Attributes:
        place: place of the restored item.
        found: its contents, as they were read.
        ledger: ledger of its root, if saves are to go there from now on.
        touched: the fresh touched rows that go with the restored state.
    """

    place: Place
    found: ReadBack
    ledger: Ledger | None
    touched: Touched


def resume(
    resumption: Resumption,
    *,
    writer: RootWriter,
    lifecycle: Lifecycle,
    planner: Planner,
    tracker: Tracker,
    tables: tuple[TableEntry, ...],
    channel: Channel,
    widening: Widening | None,
) -> None:
    """Goes on saving from a restored step: its fresh lineage rests on the steps of its chain.

    Args:
        resumption: the restored step; the restore has succeeded on all processes.
        writer: writer of the root that saves go to, after the first restore perhaps the root that
            was read.
        lifecycle: lifecycle of saves, which is settled before anything is noted.
        planner: planner of saves, which notes what later ones may rest on.
        tracker: tracker of rows, which notes the rows that are as they were restored.
        tables: tables that are saved, in any order; empty: nothing is saved.
        channel: channel to the other processes.
        widening: owner of encodings, which notes how rows of the run are stored; None: nothing is
            saved.

    Raises:
        OptionError: if the given options and that encoding do not go together; nothing is noted
            then.
    """
    place, found, touched = resumption.place, resumption.found, resumption.touched
    chain, lineage = found.chain, lineage_hex(touched)
    manifest = chain[-1].manifest
    encoding = _encoding_of(resumption, channel, writer)
    goes_on = resumption.ledger is not None or writer.is_at(place.root, place.item)
    if goes_on and widening is not None:
        widening.inherit(encoding)
        widening.say_inherited(f"at step {manifest.step}")
    note_restored(place.root, lineage, manifest.run or "", encoding)
    if resumption.ledger is not None and writer.place is None:
        writer.serve(place.root, place.item, resumption.ledger)
    lifecycle.settle()  # Orbax has waited for the save in flight
    # No step counts as a parent until all is noted that makes it one.
    planner.end_lineages(manifest.restores + 1)
    tracker.forget(touched, manifest.tracking)
    if not writer.is_at(place.root, place.item):
        return  # restored from another root, so no step here can be a parent
    saved = {entry.name: entry for entry in manifest.tables}
    unchanged = found.wanted.tables.unchanged and saved == {
        entry.name: entry for entry in tables
    }
    # If the checkpoint's tracking finds changed rows by other means than this run will, the two may
    # find different rows.
    ways = {manifest.tracking, tracker.mode(touched)}
    unchanged = unchanged and (len(ways) == 1 or "fingerprint" not in ways)
    if unchanged:
        tracker.restored(
            found.tables,
            found.arrays,
            touched,
            lambda rows: restored_stamps(
                chain, rows.table, found.wanted.tables.targets[rows.table], rows.rows
            ),
        )
    entries = [entry_of(r.directory.parent.name, r.manifest) for r in chain]
    planner.restored(lineage, entries, unchanged=unchanged, encoding=encoding)


def _encoding_of(
    resumption: Resumption, channel: Channel, writer: RootWriter
) -> EncodingEntry | None:
    """Encoding of the run of a restored step; None if no step tells.

    If the manifest does not have it, process 0 looks at the codecs of the full step of its chain,
    or, if that was saved exactly, of other steps.

    Raises:
        OptionError: if a codec is not known here.
    """
    place, found = resumption.place, resumption.found
    entry = found.chain[-1].manifest.encoding
    if entry is None:

        def tell() -> EncodingEntry | None:
            return encoding_in(_telling(place, found.chain, writer))

        told = on_primary(channel, tell)
        entry = encoding_told(told) if isinstance(told, dict) else told
    return entry and renamed(entry, found.wanted.tables.stored)


def _telling(
    place: Place, chain: Sequence[StepReader], writer: RootWriter
) -> Iterator[Step]:
    """Yields steps whose codecs may tell: the full one of a chain, its deltas, older full ones."""
    for reader in chain:
        yield Step(reader.manifest, reader.processes)
    first = chain[0].manifest
    for entry in reversed(writer.load(place.root, place.item).restorable()):
        manifest = entry.manifest
        if manifest is None or manifest.kind != "full" or manifest.run != first.run:
            continue
        if order(entry) < order(entry_of(entry.directory, first)):
            where = place.root / entry.directory / place.item
            with contextlib.suppress(errors.CnrError, OSError):
                yield Step(manifest, read_processes(where, manifest))
