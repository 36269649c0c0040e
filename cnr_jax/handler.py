"""The Orbax handler: saves a train state as full or delta, restores it into any sharding.

Orbax records the path of `CnrHandler` in every step: the module and the class name are part of
the format. Who calls what: `async_save` runs on every process and blocks training; what it
returns is written in the background; `finalize` runs on one process after all have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

import cnr_jax.options
from cnr_jax import capture, errors, restoring, telemetry
from cnr_jax.finalizing import Facts, write_manifest
from cnr_jax.format.manifest import DenseLeaf, HistoryEntry, ParentRef, to_json
from cnr_jax.orbax_compat import (
    Channel,
    DenseStore,
    Place,
    abstract_dense,
    digest_of_local,
    in_background,
    is_host_local,
    place_of,
    step_number,
)
from cnr_jax.paths import flatten_paths
from cnr_jax.repository.chain import resolve_chain
from cnr_jax.repository.ledger import Entry, Ledger, entry_of, rename_aside
from cnr_jax.repository.planner import Plan, Planner, Request
from cnr_jax.repository.retention import ChainPreservation, Preserving
from cnr_jax.repository.step import StepReader, read_manifest
from cnr_jax.repository.write import RowsWriter, RunPlan
from cnr_jax.rows.gather import Chunk, host_device
from cnr_jax.rows.staging import Stage
from cnr_jax.rows.touched import CLOCK_LIMIT, Touched, clock_of, lineage_hex
from cnr_jax.splitting import split
from cnr_jax.table import Tables
from cnr_jax.telemetry import SaveReport

_log = logging.getLogger(__name__)
# How long a failed save is waited for to stop writing; it does within a chunk or two.
_STOP_SECS = 60


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """What is to be saved, split and found to be in order."""

    arrays: dict[str, dict[str, jax.Array]]
    dense: dict[str, Any]
    dense_leaves: tuple[DenseLeaf, ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Prepared:
    """A save that is decided but not begun.

    Attributes:
        args: the arguments it was prepared from; another save must not use it.
    """

    args: Save
    place: Place
    plan: Plan
    arrays: dict[str, dict[str, jax.Array]]
    dense: dict[str, Any]
    dense_leaves: tuple[DenseLeaf, ...]
    lineage: str
    clock: int
    started_secs: float


@dataclasses.dataclass(slots=True, kw_only=True)
class _InFlight:
    """A save that is being written, or was until the next one settles it."""

    place: Place
    plan: Plan
    lineage: str
    clock: int
    facts: Facts
    blocking_secs: float = 0.0
    stage: Stage[Chunk] | None = None
    writing: list[Any] = dataclasses.field(default_factory=list)

    def stop(self) -> None:
        """Waits until nothing of a failed save is being written.

        Orbax raises the first error while other parts may still be writing, into a directory
        of which the same step, saved again, uses the name.
        """
        if self.stage is not None:
            self.stage.abort()
        for future in self.writing:
            # Its error, if it has one, came out already or is not the first.
            with contextlib.suppress(Exception):
                future.result(timeout=_STOP_SECS)


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
        self._place: Place | None = None
        self._planner = Planner(self.options.policy)
        self._channel = Channel()
        self._dense = DenseStore()
        self._prepared: _Prepared | None = None
        self._in_flight: _InFlight | None = None

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

    def prepare(self, place: Place, args: Save) -> Plan:
        """Checks and decides a save before anything is written.

        Waits for the train step that made the state.

        Raises:
            StateMismatchError, TouchedError, TableError: if the state cannot be saved.
            DependentsExistError: if a step is in the way that must be kept.
        """
        started = time.perf_counter()
        ledger = self.open(place.root, place.item)
        try:
            checked = self._checked(args)
        except errors.CnrError as error:
            if jax.process_count() > 1:
                self._agree(ledger, error)  # the others must not wait for this process
            raise
        assert args.touched is not None
        lineage, clock = lineage_hex(args.touched), clock_of(args.touched)
        request = Request(
            step=step_number(place.directory),
            directory=place.directory,
            lineage=lineage,
            clock=clock,
            at_limit=clock >= CLOCK_LIMIT,
            tables=capture.table_entries(self._writable_tables()),
            guarded=self.guarded,
        )
        plan = self._agree(ledger, request, checked.dense)
        self._prepared = _Prepared(
            args=args,
            place=place,
            plan=plan,
            arrays=checked.arrays,
            dense=checked.dense,
            dense_leaves=checked.dense_leaves,
            lineage=lineage,
            clock=clock,
            started_secs=started,
        )
        return plan

    def _checked(self, args: Save) -> _Checked:
        """What is to be saved, after all checks that this process can do alone."""
        tables = self._writable_tables()
        if args.touched is None:
            raise errors.TouchedError(
                "a recorded run cannot be saved without touched rows\n"
                "  hint: cnr.args.Save(state, touched), with touched from init_touched"
            )
        _check_alive(args.state, "state")
        _check_alive(args.touched, "touched")
        arrays, dense = split(args.state, tables)
        leaves = capture.dense_leaves(dense)
        capture.check_touched(args.touched, tables)
        capture.check_tiling(tables, arrays, args.touched.stamps)
        return _Checked(arrays=arrays, dense=dense, dense_leaves=leaves)

    def _writable_tables(self) -> Tables:
        if self.tables is None:
            raise errors.OptionError(
                "this handler was made without tables and can only restore\n"
                "  hint: pass tables=cnr_jax.find_tables(state, ...)"
            )
        return self.tables

    def _agree(
        self,
        ledger: Ledger,
        request: Request | errors.CnrError,
        dense: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Process 0 decides; all processes get its plan, or the same error.

        Args:
            ledger: of the root.
            request: what is to be saved, or why this process cannot save.
            dense: of the state; leaves that are not global must be the same everywhere.
        """
        told = self._tell(request, dense or {})
        if jax.process_index() == 0:
            committed = self.settle()
            try:
                _check_told(told)
                assert not isinstance(request, errors.CnrError)
                plan = self._planner.plan(ledger, request, committed)
            except errors.CnrError as error:
                self._channel.broadcast(json.dumps(_failure(error)))
                raise
            self._channel.broadcast(json.dumps(to_json(plan)))
        else:
            plan = _plan_of(json.loads(self._channel.broadcast(None)))
            self.settle(plan.committed)
        self._move_aside(ledger, plan)
        return plan

    def _tell(
        self, request: Request | errors.CnrError, dense: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Sends process 0 what all must agree on; returns what all sent, on process 0."""
        if jax.process_count() == 1:
            return []
        if isinstance(request, errors.CnrError):
            mine = _failure(request)
        else:
            mine = {
                "/".join(path): digest_of_local(leaf)
                for path, leaf in flatten_paths(dense)
                if is_host_local(leaf)
            }
        return [json.loads(text) for text in self._channel.gather(json.dumps(mine))]

    def _move_aside(self, ledger: Ledger, plan: Plan) -> None:
        assert self._place is not None
        for directory in plan.abandoned:
            if jax.process_index() == 0:
                rename_aside(self._place.root, ledger.entries[directory])
            ledger.forget(directory)

    async def async_save(self, directory: epath.Path, args: Save) -> list[Any]:
        """Gathers the rows to be written; returns what writes them."""
        try:
            return await self._begin(directory, args)
        except BaseException:
            # Orbax is still making directories, of which the next save may use the names.
            with contextlib.suppress(Exception):
                in_background(_nothing(), "cnr_wait").result(timeout=_STOP_SECS)
            raise

    async def _begin(self, directory: epath.Path, args: Save) -> list[Any]:
        place = place_of(directory)
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.args is not args or prepared.place != place:
            self.prepare(place, args)
            prepared, self._prepared = self._prepared, None
        assert prepared is not None and self.ledger is not None
        tables, plan = self._writable_tables(), prepared.plan
        self.ledger.begin(_entry(plan))
        self._in_flight = _InFlight(
            place=place,
            plan=plan,
            lineage=prepared.lineage,
            clock=prepared.clock,
            facts=Facts(
                plan=plan,
                lineage=prepared.lineage,
                clock=prepared.clock,
                tables=capture.table_entries(tables),
                dense_leaves=prepared.dense_leaves,
                started_secs=prepared.started_secs,
            ),
        )
        futures = await self._start(directory, prepared, tables)
        self._in_flight.blocking_secs = time.perf_counter() - prepared.started_secs
        return futures

    async def _start(
        self, directory: epath.Path, prepared: _Prepared, tables: Tables
    ) -> list[Any]:
        """Starts all writing and gathers; nothing of the state is needed afterwards."""
        assert prepared.args.touched is not None
        plan = prepared.plan
        found = capture.capture(
            tables,
            prepared.arrays,
            prepared.args.touched.stamps,
            plan.parent.clock if plan.parent else None,
            _with_codec(self.options, plan.codec),
        )
        stage: Stage[Chunk] = Stage(self.options.max_staging_bytes)
        # The writer starts first: a state larger than the staging budget streams through it.
        rows = in_background(
            _write_rows(directory, plan.uuid, found.plans, stage), "cnr_write_rows"
        )
        assert self._in_flight is not None
        self._in_flight.stage, self._in_flight.writing = stage, [rows]
        try:
            for chunk in found.chunks():
                if not stage.put(chunk):
                    break  # the writer has failed; its future says why
            dense = await self._dense.save(
                directory, capture.without_texts(prepared.dense)
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
        assert self._in_flight is not None
        self._dense.finalize(directory)
        write_manifest(directory, self._in_flight.facts)

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
        self._planner.saved(flight.lineage, entry, flight.clock)
        self._report(flight, entry)
        return entry.uuid

    def _report(self, flight: _InFlight, entry: Entry) -> None:
        manifest = entry.manifest
        assert manifest is not None and self.tables is not None
        path = flight.place.path / "manifest.json"
        parent = manifest.parent
        self.last_report = SaveReport(
            step=manifest.step,
            kind=manifest.kind,
            parent=step_number(parent.directory) if parent else None,
            generation=manifest.generation,
            rows=manifest.totals.rows,
            table_bytes=manifest.totals.table_bytes,
            slot_bytes=manifest.totals.slot_bytes,
            dense_bytes=manifest.totals.dense_bytes,
            manifest_bytes=manifest.totals.manifest_bytes + len(path.read_bytes()),
            full_fp32_bytes=capture.full_fp32_bytes(self.tables, manifest.dense_leaves),
            blocking_secs=flight.blocking_secs,
            total_secs=manifest.history[-1].secs,
            reason=manifest.reason,
        )
        telemetry.record(self.last_report)
        if self.options.on_save is not None:
            self.options.on_save(self.last_report)

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
        self._note_restore(place, chain, touched, exact=wanted.exact)
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
        *,
        exact: bool,
    ) -> None:
        """Remembers what the fresh lineage rests on, where this handler goes on saving."""
        if self._place is None:
            self.open(place.root, place.item)
        assert self._place is not None
        self.settle()  # Orbax has waited for the save in flight
        if str(self._place.root) != str(place.root) or self._place.item != place.item:
            self._planner.end_lineages()  # restored from elsewhere: no parent here
            return
        entries = [entry_of(r.directory.parent.name, r.manifest) for r in chain]
        self._planner.restored(lineage_hex(touched), entries, exact=exact)

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
            has must be concrete and are kept. The next save is full.
    """

    state: Any = None
    tables: Tables | None = None
    partial: bool = False


class HandlerRegistry(ocp.DefaultCheckpointHandlerRegistry):
    """A registry for plain Orbax whose handler and preservation policy belong together."""

    handler: CnrHandler

    def preservation_policy(self, inner: Preserving | None = None) -> ChainPreservation:
        """The policy to give to `ocp.CheckpointManagerOptions`; see `CnrHandler`."""
        return self.handler.preservation_policy(inner)


def handler_registry(
    tables: Tables | None, options: cnr_jax.options.Options | None = None
) -> HandlerRegistry:
    """A registry with which a plain `ocp.CheckpointManager` takes `Save` and `Restore`.

    Without `registry.preservation_policy(...)` in the manager's options only full
    checkpoints are written: plain retention would delete the parents of deltas.
    """
    registry = HandlerRegistry()
    registry.handler = CnrHandler(tables, options)
    # No item name: whatever the item is called, these arguments lead to this handler.
    registry.add(None, Save, registry.handler)
    registry.add(None, Restore, registry.handler)
    return registry


async def _nothing() -> None:
    """Does nothing, in the background: once the directories are made."""


async def _write_rows(
    directory: epath.Path, uuid: str, plans: tuple[RunPlan, ...], stage: Stage[Chunk]
) -> None:
    try:
        writer = RowsWriter(directory, uuid, jax.process_index(), plans)
        writer.write(stage, host_device())
    except BaseException:
        stage.fail()
        raise


def _check_told(told: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all processes can save, and hold the same host-local leaves.

    Raises:
        CnrError: what a process raised.
        StateMismatchError: naming leaves that differ: only one could be saved.
    """
    for document in told:
        _raise_failure(document)
    first, *others = told or [{}]
    for process, digests in enumerate(others, start=1):
        paths = first.keys() | digests.keys()
        different = sorted(p for p in paths if digests.get(p) != first.get(p))
        if different:
            raise errors.StateMismatchError(
                f"leaves of the state differ between process 0 and process {process}\n"
                f"  {', '.join(different)}\n"
                "  hint: make them global arrays, or save them as an item of their own"
            )


def _failure(error: errors.CnrError) -> dict[str, str]:
    """An error as processes send it; the key is no path of a leaf."""
    return {"/error": str(error), "class": type(error).__name__, "kind": error.kind}


def _raise_failure(document: Mapping[str, Any]) -> None:
    """Raises the error that another process sent, if it is one."""
    if "/error" in document:
        found = getattr(errors, document["class"], errors.CnrError)
        raise found(document["/error"], kind=document["kind"])


def _with_codec(
    options: cnr_jax.options.Options, codec: str | None
) -> cnr_jax.options.Options:
    return options if codec is None else dataclasses.replace(options, codec=codec)


def _entry(plan: Plan) -> Entry:
    return Entry(
        directory=plan.directory,
        step=plan.step,
        uuid=plan.uuid,
        generation=plan.generation,
        parent=plan.parent,
    )


def _plan_of(document: dict[str, Any]) -> Plan:
    """The plan that process 0 sent.

    Raises:
        CnrError: the error of process 0, if it could not make one.
    """
    _raise_failure(document)
    parent = document["parent"]
    return Plan(
        **{
            **document,
            "parent": ParentRef(**parent) if parent else None,
            "history": tuple(HistoryEntry(**entry) for entry in document["history"]),
            "abandoned": tuple(document["abandoned"]),
        }
    )


def _check_alive(tree: Any, what: str) -> None:
    """Checks that no array was donated: saving it would fail halfway."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise errors.StateMismatchError(
                f"{what}{jax.tree_util.keystr(path)} was donated to a computation\n"
                "  hint: save what the train step returned, not what it was given"
            )
