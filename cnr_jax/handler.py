"""The Orbax handler: saves a train state as full or delta, restores it into any sharding.

Orbax records the path of `CnrHandler` in every step: the module and the class name are part of
the format. Who calls what: `async_save` runs on every process and blocks training; what it
returns is written in the background; `finalize` runs on one process after all have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

import cnr_jax.options
from cnr_jax import capture, errors, restoring, telemetry
from cnr_jax.agreement import agree
from cnr_jax.finalizing import Facts, write_manifest
from cnr_jax.format.manifest import Tracking, to_json
from cnr_jax.meshes import outside_mesh
from cnr_jax.orbax_compat import (
    Channel,
    DenseStore,
    Place,
    abstract_dense,
    in_background,
    place_of,
    step_number,
)
from cnr_jax.repository.chain import resolve_chain
from cnr_jax.repository.ledger import Entry, Ledger, entry_of, rename_aside
from cnr_jax.repository.planner import Plan, Planner, Request
from cnr_jax.repository.restore import restored_stamps
from cnr_jax.repository.retention import ChainPreservation, Preserving
from cnr_jax.repository.step import StepReader, read_manifest
from cnr_jax.rows.chunk import Chunk
from cnr_jax.rows.staging import Stage
from cnr_jax.rows.touched import Touched, lineage_hex
from cnr_jax.saving import (
    STOP_SECS,
    Checked,
    InFlight,
    Prepared,
    check,
    pending_entry,
    report_of,
    write_rows,
)
from cnr_jax.table import Tables
from cnr_jax.telemetry import SaveReport
from cnr_jax.tracking import Found, Moment, Tracker

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What a restore returns.

    Attributes:
        state: in the structure that was asked for; nested dicts by path if none was.
        touched: goes on with the state: pass both to the next train step.
    """

    state: Any
    touched: Touched

    def __iter__(self) -> Any:
        """Unpacks as `state, touched`."""
        return iter((self.state, self.touched))


class CnrHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores train states whose tables change in few rows at a time.

    One handler serves one item of one root. It is usually made by `CheckpointManager` or
    `handler_registry`; default-constructed it can restore, for inspection.

    Args:
        tables: from `find_tables`. None: only restoring is possible.
        options: of the run.
    """

    def __init__(
        self,
        tables: Tables | None = None,
        options: cnr_jax.options.Options | None = None,
    ) -> None:
        self.options = options or cnr_jax.options.Options()
        self.tables = tables
        if tables is not None:
            self.options.check_tables(tables)
        self.ledger: Ledger | None = None
        self.last_report: SaveReport | None = None
        self.guarded = False
        # Of the manager, which may hold nothing yet; else that of the first save or restore.
        self.root: epath.Path | None = None
        self._place: Place | None = None
        self._planner = Planner(self.options.policy)
        self._channel = Channel()
        self._dense = DenseStore()
        self._prepared: Prepared | None = None
        self._in_flight: InFlight | None = None
        self._last_plan: Plan | None = None
        self._tracker = Tracker(self.options)

    def open(self, root: Any, item: str) -> Ledger:
        """Reads what the root holds; later calls return the same ledger.

        Raises:
            OptionError: if the handler serves another root or item already.
        """
        place = Place(root=root, directory="", item=item)
        if self._place is None or self.ledger is None:
            self._place, self.ledger = place, Ledger.load(root, item)
        elif (str(self._place.root), self._place.item) != (str(root), item):
            raise errors.OptionError(
                "a handler serves one item of one root\n"
                f"  got {root}, item {item!r}; it serves {self._place.root},"
                f" item {self._place.item!r}\n"
                "  hint: make a handler registry for each manager, save one state in it"
            )
        return self.ledger

    def preservation_policy(self, inner: Preserving | None) -> ChainPreservation:
        """Wraps an Orbax preservation policy: parents of what it keeps are kept too.

        Until a manager has asked this policy, the handler writes only full checkpoints,
        because plain retention would delete parents.

        Args:
            inner: such as `ocp.checkpoint_managers.LatestN(3)`; None keeps everything.
        """

        def consulted() -> None:
            self.guarded = True

        return ChainPreservation(inner, lambda: self.ledger, consulted)

    @outside_mesh()
    def prepare(self, place: Place, args: Save) -> Plan:
        """Checks and decides a save before anything is written.

        Waits for the train step that made the state.

        Raises:
            StateMismatchError, TouchedError, TableError: if the state cannot be saved.
            AuditError: if a row changed that was not recorded.
            DependentsExistError: if a step is in the way that must be kept.
        """
        started = time.perf_counter()
        ledger = self.open(place.root, place.item)
        tables = self._writable_tables()
        tracking = self._tracker.mode(args.touched)
        checked, found = self._look(args, tables, tracking)
        request = Request(
            step=step_number(place.directory),
            directory=place.directory,
            lineage=found.stamps.lineage,
            clock=found.stamps.clock,
            at_limit=found.at_limit,
            tables=capture.table_entries(tables),
            guarded=self.guarded,
        )
        plan = self._agree(None, checked.dense, tracking, found.doubt, request)
        self._tracker.keep(found, Moment(plan.lineage, plan.clock))
        self._move_aside(ledger, plan)
        self._prepared = Prepared(
            args=args,
            place=place,
            plan=plan,
            checked=checked,
            found=found,
            started_secs=started,
        )
        return plan

    def _look(
        self, args: Save, tables: Tables, tracking: Tracking
    ) -> tuple[Checked, Found]:
        """Checks a state and finds its changed rows; tells all processes if it cannot."""
        try:
            checked = check(args.state, args.touched, tables, tracking)
            found = self._tracker.find(args.state, args.touched, tables, checked.arrays)
            return checked, found
        except errors.CnrError as error:
            self._agree(error, {}, tracking, "", None)
            raise
        except Exception as error:
            # Such as memory that ran out: the others must not wait for this process.
            told = errors.CnrError(f"{type(error).__name__}: {error}")
            with contextlib.suppress(errors.CnrError):
                self._agree(told, {}, tracking, "", None)
            raise

    def _writable_tables(self) -> Tables:
        if self.tables is None:
            raise errors.OptionError(
                "this handler was made without tables and can only restore\n"
                "  hint: pass tables=cnr_jax.find_tables(state, ...)"
            )
        return self.tables

    def _agree(
        self,
        obstacle: errors.CnrError | None,
        dense: Mapping[str, Any],
        tracking: str,
        doubt: str,
        request: Request | None,
    ) -> Plan:
        """The plan of process 0, which first finds out what became of the last save."""

        def decide(doubt: str) -> Plan:
            assert self.ledger is not None and request is not None
            committed = self.settle()
            asked = dataclasses.replace(request, doubt=doubt)
            return self._planner.plan(self.ledger, asked, committed)

        plan = agree(self._channel, obstacle, dense, tracking, doubt, decide)
        if jax.process_index() != 0:
            self._settle_as(plan.committed)
        return plan

    def _settle_as(self, committed: str | None) -> None:
        """Notes what process 0 found, though this process' view of the root may be older."""
        assert self.ledger is not None and self._place is not None
        last = self._in_flight.plan if self._in_flight else self._last_plan
        self.settle(committed)
        if committed is not None and last is not None and last.uuid == committed:
            if last.directory not in self.ledger.entries:
                self.ledger.read(self._place.root, last.directory, self._place.item)

    def _move_aside(self, ledger: Ledger, plan: Plan) -> None:
        assert self._place is not None
        for directory in plan.abandoned:
            if jax.process_index() == 0:
                rename_aside(self._place.root, ledger.entries[directory])
            ledger.forget(directory)

    async def async_save(self, directory: epath.Path, args: Save) -> list[Any]:
        """Gathers the rows to be written; returns what writes them."""
        try:
            with outside_mesh():
                return await self._begin(directory, args)
        except BaseException:
            # Orbax is still making directories, of which the next save may use the names.
            with contextlib.suppress(Exception):
                in_background(_nothing(), "cnr_wait").result(timeout=STOP_SECS)
            raise

    async def _begin(self, directory: epath.Path, args: Save) -> list[Any]:
        place = place_of(directory)
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.args is not args or prepared.place != place:
            self.prepare(place, args)
            prepared, self._prepared = self._prepared, None
        assert prepared is not None and self.ledger is not None
        plan, found = prepared.plan, prepared.found
        self.ledger.begin(pending_entry(plan))
        self._last_plan = plan
        self._in_flight = InFlight(
            place=place,
            plan=plan,
            fingerprint_secs=found.secs,
            facts=Facts(
                plan=plan,
                tracking=found.mode,
                recorded_clock=found.recorded.clock if found.recorded else None,
                fingerprint_clock=plan.clock if found.by_fingerprints else None,
                tables=capture.table_entries(self._writable_tables()),
                dense_leaves=prepared.checked.dense_leaves,
                started_secs=prepared.started_secs,
            ),
        )
        futures = await self._start(directory, prepared)
        self._in_flight.blocking_secs = time.perf_counter() - prepared.started_secs
        return futures

    async def _start(self, directory: epath.Path, prepared: Prepared) -> list[Any]:
        """Starts all writing and gathers; nothing of the state is needed afterwards."""
        plan, checked = prepared.plan, prepared.checked
        choose = self._tracker.chooser(
            prepared.found,
            prepared.args.touched,
            plan.parent.clock if plan.parent else None,
        )
        captured = capture.capture(
            prepared.found.tiles,
            checked.arrays,
            choose,
            _with_codec(self.options, plan.codec),
        )
        # Gathering on the host takes all cores already; on devices it waits for these.
        stage: Stage[Chunk] = Stage(
            self.options.max_staging_bytes, patient=captured.on_host
        )
        # The writer starts first: a state larger than the staging budget streams through it.
        assert self._in_flight is not None
        rows = in_background(
            write_rows(directory, self._in_flight, captured.plans, stage),
            "cnr_write_rows",
        )
        self._in_flight.stage, self._in_flight.writing = stage, [rows]
        try:
            for chunk in captured.chunks():
                if not stage.put(chunk):
                    break  # the writer has failed; its future says why
            stage.start()
            dense = await self._dense.save(
                directory, capture.without_texts(checked.dense)
            )
        except BaseException:
            self._in_flight.stop()
            raise
        stage.close()
        self._in_flight.writing = [rows, *dense]
        return self._in_flight.writing

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        """Saves and waits; Orbax itself always calls `async_save`."""
        import asyncio

        for future in asyncio.run(self.async_save(directory, *args, **kwargs)):
            future.result()

    def finalize(self, directory: epath.Path) -> None:
        """Writes the manifest, after everything else is on storage."""
        flight = self._in_flight
        assert flight is not None and flight.written is not None
        self._dense.finalize(directory)
        write_manifest(directory, flight.facts, flight.written)

    @property
    def is_saving(self) -> bool:
        """Whether there is a save of which `settle` has not found out what became of it."""
        return self._in_flight is not None

    def settle(self, committed: str | None = None) -> str | None:
        """Finds out whether the last save is committed and notes it if so.

        Only to be called when no save is being written.

        Args:
            committed: uuid that process 0 found to be committed; on process 0 itself, None.

        Returns:
            Its uuid if it is committed.
        """
        flight, self._in_flight = self._in_flight, None
        if self.ledger is None or flight is None:
            return None
        dropped = flight.place.directory in self.ledger.doomed
        entry = self.ledger.settle(flight.place.root, flight.place.item)
        if entry is None and dropped:
            _log.info("retention did not keep step %d, the newest", flight.plan.step)
            return None
        if entry is None or (committed is not None and entry.uuid != committed):
            flight.stop()
            _log.warning(
                "the save of step %d was not committed; its rows are in the next one",
                flight.plan.step,
            )
            return None
        self._planner.saved(flight.plan, entry)
        self._report(flight, entry)
        return entry.uuid

    def _report(self, flight: InFlight, entry: Entry) -> None:
        assert entry.manifest is not None
        self.last_report = report_of(flight, entry.manifest, self._writable_tables())
        telemetry.record(self.last_report)
        if self.options.on_save is not None:
            self.options.on_save(self.last_report)

    @outside_mesh()
    def restore(self, directory: epath.Path, args: Restore | None = None) -> Restored:
        """Restores a step and all it rests on."""
        args = args or Restore()
        place = place_of(directory)
        chain = resolve_chain(
            place.root, place.directory, place.item, verify=self.options.verify_reads
        )
        chain[-1].check_dense()
        manifest = chain[-1].manifest
        if args.state is None:
            tables = restoring.tables_of(manifest)
            state = restoring.abstract_state(manifest, tables)
        else:
            tables, state = args.tables or self.tables, args.state
        if tables is None:
            raise errors.OptionError(
                "restoring into a state needs to know its tables\n"
                "  hint: Restore(state, tables=cnr_jax.find_tables(state, ...))"
            )
        wanted = restoring.match(
            manifest, state, tables, partial=args.partial, step=place.directory
        )
        arrays = restoring.rebuild(chain, wanted)
        dense = self._restore_dense(directory, wanted, args.state is None)
        touched = restoring.reseed(chain, wanted, tables)
        self._note_restore(place, chain, touched, tables, wanted, arrays)
        whole = restoring.assemble(state, wanted, tables, arrays, dense)
        return Restored(whole, touched)

    def _restore_dense(
        self, directory: epath.Path, wanted: restoring.Wanted, everything: bool
    ) -> Any:
        if everything:
            return self._dense.restore(directory, None)
        abstract = {path: abstract_dense(leaf) for path, leaf in wanted.dense.items()}
        return self._dense.restore(directory, restoring.nest(abstract))

    def _note_restore(
        self,
        place: Place,
        chain: tuple[StepReader, ...],
        touched: Touched,
        tables: Tables,
        wanted: restoring.Wanted,
        arrays: dict[str, dict[str, jax.Array]],
    ) -> None:
        """Remembers what the fresh lineage rests on, where this handler goes on saving."""
        if self._place is None and self.root in (None, place.root):
            self.open(place.root, place.item)
        self.settle()  # Orbax has waited for the save in flight
        # Nothing is a legal parent until all that makes it one is known.
        self._planner.end_lineages()
        self._tracker.forget(touched)
        self._tracker.adopt(chain[-1].manifest.tracking)
        own = self._place
        if own is None or (str(own.root), own.item) != (str(place.root), place.item):
            return  # restored from elsewhere: no parent here
        exact = wanted.exact and self._has(tables)
        if exact:
            self._tracker.restored(
                tables,
                arrays,
                touched,
                lambda rows: restored_stamps(
                    chain, rows.table, wanted.targets[rows.table], rows.rows
                ),
            )
        entries = [entry_of(r.directory.parent.name, r.manifest) for r in chain]
        self._planner.restored(lineage_hex(touched), entries, exact=exact)

    def _has(self, tables: Tables) -> bool:
        """Whether these are the tables that this handler saves, in whatever order."""
        own, others = (
            {entry.name: entry for entry in capture.table_entries(each or Tables({}))}
            for each in (self.tables, tables)
        )
        return own == others

    def uses(self, touched: Touched | None) -> bool:
        """Whether saves go by `touched`: not if rows are found by fingerprints alone."""
        return touched is not None and self._tracker.mode(touched) != "fingerprint"

    def metadata(self, directory: epath.Path) -> dict[str, Any] | None:
        """What the manifest says, without reading data; None where there is none."""
        try:
            return to_json(read_manifest(directory))
        except errors.IntegrityError:
            return None

    def close(self) -> None:
        """Frees what the handler holds."""
        self._dense.close()


@ocp.args.register_with_handler(CnrHandler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """A train state to be saved.

    Attributes:
        state: the whole state, tables and everything else.
        touched: the touched rows that went through the same train steps.
    """

    state: Any
    touched: Touched | None = None


@ocp.args.register_with_handler(CnrHandler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """What to restore.

    Attributes:
        state: abstract or concrete pytree that gives structure, shapes, dtypes and shardings.
            None: everything as nested dicts by path, on one device.
        tables: where the tables are in `state`, if not where the manager's are.
        partial: restore what both the checkpoint and `state` have. Leaves that only `state`
            has must be concrete and are kept. Unless all tables come back exactly, the
            next save is full.
    """

    state: Any = None
    tables: Tables | None = None
    partial: bool = False


async def _nothing() -> None:
    """Does nothing, in the background: once the directories are made."""


def _with_codec(
    options: cnr_jax.options.Options, codec: str | None
) -> cnr_jax.options.Options:
    return options if codec is None else dataclasses.replace(options, codec=codec)
