"""The Orbax handler: saves a train state as full or delta, and restores it into any sharding.

Orbax records the path of `CnrHandler` in every step, so the module and the class name are part of
the format. `async_save` runs on every process, and training waits for it. What it returns is
written in the background. `finalize` runs on one process, after all have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

import cnr_jax.options
from cnr_jax import errors
from cnr_jax.args import Restore, Save, asked_for, check_asked_alike
from cnr_jax.checkpointer.multihost import Channel, all_succeed, on_primary
from cnr_jax.checkpointer.orbax_compat.places import Directories, place_of
from cnr_jax.checkpointer.orbax_compat.plain import PlainState
from cnr_jax.checkpointer.restoring import adopted
from cnr_jax.checkpointer.restoring.from_manifest import metadata_of
from cnr_jax.checkpointer.restoring.restore import (
    ReadBack,
    Restored,
    Resumption,
    read_back,
    resume,
)
from cnr_jax.checkpointer.save_errors import as_save_errors, save_error
from cnr_jax.checkpointer.saving import capture
from cnr_jax.checkpointer.saving.check import (
    check,
    check_concrete,
    table_entries,
)
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.interval import Interval
from cnr_jax.checkpointer.saving.launch import Launcher
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.saving.plan import Planning
from cnr_jax.checkpointer.saving.reporting import report_of_begun
from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.checkpointer.tracking.tracker import (
    ChangedRows,
    Moment,
    Tracker,
    moment_of,
)
from cnr_jax.format import names
from cnr_jax.repository.committer import Attempt
from cnr_jax.repository.index.folders import is_state_of_orbax
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.planner import Planner
from cnr_jax.repository.index.retention import ChainPreservation, Preserving
from cnr_jax.repository.layout import Place
from cnr_jax.repository.manifest_writer import write_manifest
from cnr_jax.repository.metrics import check_can_append
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.table_sizes import held_tables, rows_of
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.tiling import own_settings
from cnr_jax.rows.touched import Touched
from cnr_jax.state.table import Tables, check_tables
from cnr_jax.telemetry import SaveReport
from cnr_jax.texts import logger
from cnr_jax.waiting import STOP_SECS

_log = logger(__name__)


class CnrHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler that saves and restores train states whose tables change in few rows at a time.

    One handler serves one item of one root. `CheckpointManager` or `handler_registry` usually makes
    it. Without arguments it can only restore, for inspection.

    Args:
        tables: tables, from `find_tables`. None: the handler can only restore.
        options: options of the run.

    Attributes:
        writer: writer of the root that saves go to.
        widening: owner of encodings, which knows how rows are stored.
        channel: channel to the other processes.
        planning: agreement of the processes on a save.
        lifecycle: lifecycle of saves once they are launched.
        interval: how often a save is due, if the manager decides that itself; else None.
        may_save: whether saves can come, which then go on as the run of a restore did.
    """

    def __init__(
        self,
        tables: Tables | None = None,
        options: cnr_jax.options.Options | None = None,
    ) -> None:
        self.options = cnr_jax.options.checked(options)
        self.tables = tables
        if tables is not None:
            check_tables(tables)
            self.options.check_tables(tables)
        self.writer = RootWriter(
            lambda: jax.process_index() == 0,
            adopts=self.options.adopt,
            single=self.options.single_writer,
        )
        self.may_save = tables is not None
        # Whether saves are known to be of the run in the root, on all processes alike.
        self._is_of_run = False
        self._planner = Planner(
            self.options.policy,
            min_fulls=self.options.min_fulls,
            tables=table_entries(tables or Tables({})),
            new_run=self.options.new_run,
        )
        self.lifecycle = Lifecycle(self.writer, self._planner, self.options)
        self.widening = Widening(self.options, tables)
        self.channel = Channel(self.options.timeout_secs)
        self._tracker = Tracker(self.options)
        self._has_said_at_first = False
        self._launcher = Launcher(
            self._tracker, self.widening, self.channel, self.options
        )
        is_auto = self.options.interval == "auto"
        self.interval = Interval(self.options) if is_auto else None
        self.planning = Planning(
            self.channel,
            self.writer,
            self.lifecycle,
            self._planner,
            self.widening,
            self.interval,
        )

    def serve_manager(self, root: Any, is_step: Callable[[str], bool] | None) -> None:
        """Lets saves go to the root of a manager that keeps parents and says how each save ended.

        Args:
            root: root of the manager.
            is_step: whether a name is that of a step directory; None: every name that ends in a
                digit.
        """
        if self.options.metrics:
            check_can_append(root)
        self.channel.name = f"saves in {root.name}"
        self.writer.bind(root, is_step)
        self._planner.guarded = self.lifecycle.managed = True

    def open(self, root: Any, item: str) -> Ledger:
        """Reads what the root holds, and returns its ledger; later calls return the same one.

        Raises:
            OptionError: if the handler serves another root or item already.
            OSError: if the root cannot be read. Nothing has changed then.
        """
        return self.writer.open(root, item)

    @property
    def ledger(self) -> Ledger | None:
        """Ledger of what the root holds; None until the root is known."""
        return self.writer.ledger

    @property
    def last_report(self) -> SaveReport | None:
        """Report of the save that was committed or dropped last."""
        return self.lifecycle.report

    def guard(self) -> None:
        """Lets saves be deltas, because from now on a policy keeps their parents."""
        self._planner.guarded = True

    @own_settings()
    def plan(
        self, place: Place, args: Save, *, urgent: bool = False
    ) -> tuple[SaveInFlight, ChangedRows]:
        """Checks a save and decides what it holds, before anything is written.

        Waits for the train step that made the state.

        Args:
            place: place where the save will be.
            args: state that is to be saved.
            urgent: whether to make it a delta if one is legal, whatever the policy says.

        Returns:
            The save, and its state until the rows are gathered. Nothing may keep that state longer.

        Raises:
            StateMismatchError, TouchedError, TableError: if the state cannot be saved.
            AuditError: if a row changed that was not recorded.
            DependentsExistError: if a step that must be kept is in the way.
        """
        started = time.perf_counter()
        self.channel.name = f"saves in {place.root.name}"
        changed = self._find_changes(place, args)
        try:
            plan, agree_secs = self.planning.agree(
                place.directory,
                changed,
                urgent=urgent,
                full=bool(args.full),
                exact=bool(args.exact),
            )
            self._tracker.keep(changed, Moment(plan.lineage, plan.clock))
        except BaseException:
            self.lifecycle.withdraw()
            raise
        flight = SaveInFlight(
            attempt=Attempt(place.root, plan.directory, plan.uuid),
            item=place.item,
            decided=plan,
            dense_leaves=tuple(leaf for leaf, _ in changed.dense),
            tracking=changed.mode,
            recorded_clock=changed.recorded.clock if changed.recorded else None,
            started_secs=started,
            wait_secs=changed.wait_secs,
            agree_secs=agree_secs,
            report=report_of_begun(
                plan,
                tracking=changed.mode,
                inherited=self.widening.encoding.inherited,
                doubts=self.tables.doubts if self.tables else (),
                find_secs=time.perf_counter() - started,
                wait_secs=changed.wait_secs,
                interval=self.interval,
                fingerprint_secs=changed.secs,
            ),
        )
        return flight, changed

    def check_given(self, root: Any, item: str, step: int, state: Save | None) -> None:
        """Checks that a state can be saved, or that a step may be saved without one.

        Once, it also checks that the state may begin a run or go on with it; see
        `Runs.check_origin`.

        Raises:
            StateMismatchError, TouchedError: if the state is traced, as inside `jax.jit`.
            UsedRootError: on all processes, if the root holds checkpoints of another run.
            OptionError: with `Options.near`, if there is no state.
        """
        if state is None:
            self._check_stateless(step)
            return
        check_concrete(state.state, state.touched)
        if not self._is_of_run:
            self._check_origin(root, item, state)
            self._is_of_run = True

    def _check_origin(self, root: Any, item: str, args: Save) -> None:
        def check() -> None:
            ledger = self.open(root, item)
            runs = self._planner.runs
            # Only then, as it waits for the train step.
            if runs.current is None and (ledger.checkpoints() or ledger.others()):
                runs.check_origin(ledger, moment_of(args.touched))

        with as_save_errors(None, str(root)):
            on_primary(self.channel, check)

    def _check_stateless(self, step: int) -> None:
        if self.may_save and self.options.near is not None:
            raise errors.OptionError(
                f"step {step} is not saved: it holds no train state, and with near such a step"
                " would never reach the root\n"
                "  hint: save the other items beside a state, as by ocp.args.Composite, or by a"
                " manager without near"
            )

    def go_on_with_run(self) -> None:
        """Notes that saves are of the run in the root: a step of it was restored."""
        self._is_of_run = True

    def _find_changes(self, place: Place, args: Save) -> ChangedRows:
        """Checks a state and finds its changed rows; if it cannot, tells all processes."""
        try:
            self.open(place.root, place.item)
            tables = self.tables
            if tables is None:
                raise errors.OptionError(
                    "this manager was made without tables and can only restore\n"
                    "  hint: pass tables=cnr_jax.find_tables(state, ...)"
                )
            tracking = self._tracker.mode(args.touched)
            arrays, dense = check(args.state, args.touched, tables, tracking)
            changed = self._tracker.find(
                args.state, args.touched, tables, arrays, dense
            )
        except errors.CnrError as error:
            self.planning.raise_on_all(error)
        except Exception as error:
            # Such as memory that ran out: other processes must not wait for this one.
            self.planning.refuse(save_error(error, names.step_number(place.directory)))
            raise
        if not self._has_said_at_first:
            self._has_said_at_first = True
            capture.say_at_first(arrays, self.tables, self.widening.encoding)
        return changed

    async def async_save(self, directory: epath.Path, args: Save) -> list[Any]:
        """Gathers the rows to be written, and returns futures that write them."""
        if args._planned is not None:
            flight, changed = args._planned
            return self._launch(flight, changed, directory, None)
        directories = Directories()
        try:
            # First: inside jit, jax would refuse what follows in words of its own.
            check_concrete(args.state, args.touched)
            with own_settings():
                flight, changed = self.plan(place_of(directory), args)
        except BaseException:
            # Orbax is still making directories, whose names the next save may use.
            with contextlib.suppress(OSError):
                directories.wait(STOP_SECS, lambda: None)
            self.lifecycle.end_writing(*self.lifecycle.open)
            raise
        flights = self._launch(flight, changed, directory, directories)
        # Orbax does not tell when training goes on.
        flight.returned.open()
        return flights

    def _launch(
        self,
        flight: SaveInFlight,
        changed: ChangedRows,
        directory: epath.Path,
        directories: Directories | None,
    ) -> list[Any]:
        self.lifecycle.begin(flight)
        with own_settings():
            self._launcher.launch(flight, changed, directory, directories)
        self._planner.staged(flight.plan.uuid, flight.rows)
        return [flight]

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        """Saves, and waits until that is written; Orbax itself always calls `async_save`."""
        for future in asyncio.run(self.async_save(directory, *args, **kwargs)):
            future.result()

    def finalize(self, directory: epath.Path) -> None:
        """Writes the manifest, once everything else is on storage."""
        step, found = names.final_name(directory.parent.name), self.lifecycle.open
        flight = next((each for each in found if each.attempt.directory == step), None)
        if flight is None or flight.written is None:
            # Whoever began it was interrupted, and could not know that it goes on.
            raise errors.SaveError(
                "a save that an interrupt has cut short is not committed\n"
                "  what was committed before is untouched, and the next save contains its rows"
            )
        try:
            self.writer.check_claim()
            plan, tracking = flight.plan, flight.tracking
            by_fingerprints = self._tracker.by_fingerprints(tracking)
            made, manifest_bytes, processes = write_manifest(
                directory,
                plan,
                flight.written,
                root=flight.place.root,
                history=self.lifecycle.history_before(flight),
                tables=self._planner.tables,
                dense_leaves=flight.dense_leaves,
                tracking=tracking,
                recorded_clock=flight.recorded_clock,
                fingerprint_clock=plan.clock if by_fingerprints else None,
                encoding=self.widening.encoding.entry(),
                started_secs=flight.started_secs,
            )
            flight.made = made
            self.writer.gaps.know(made, processes, manifest_bytes)
            own = processes[: jax.process_count()]
            flight.know(
                tables=held_tables(made, own),
                rows=sum(rows_of(each, plan.layer) for each in own),
                manifest_bytes=made.totals.manifest_bytes + manifest_bytes,
            )
            flight.note_commit()
            if not self.lifecycle.managed:
                self.lifecycle.look_before(flight)
        finally:
            if not self.lifecycle.managed:
                self.lifecycle.end_writing(flight)

    @own_settings()
    def restore(self, directory: epath.Path, args: Restore | None = None) -> Restored:
        """Restores a step, with all that it rests on."""
        args, started = args or Restore(), time.perf_counter()
        if (attempt := args._attempt) is not None:
            attempt.is_told = True
        place = place_of(directory, opened=attempt is not None)
        self.channel.name = f"saves in {place.root.name}"

        def read() -> tuple[ReadBack | adopted.AdoptedState, Ledger | None]:
            if self.options.adopt and is_state_of_orbax(directory):
                return adopted.read_adopted(place, directory, args, self.tables), None
            found = read_back(
                place, args, self.tables, verify=self.options.verify_reads
            )
            return found, self.writer.ledger_to_be(place)

        # Asked for unlike restores, each process would put together a part of another state.
        said = asked_for(args) if jax.process_count() > 1 else {}
        found, ledger = all_succeed(self.channel, read, said, check_asked_alike)
        restored = found.put_together(started, attempt.passed_over if attempt else ())
        if isinstance(found, adopted.AdoptedState):
            resumption = adopted.Adoption(place, found.entry, restored.touched)
        else:
            resumption = Resumption(place, found, ledger, restored.touched)
        if attempt is None:
            self.resume(resumption)
            self.lifecycle.listener.tell(restored.report, None)
        else:
            attempt.resumption = resumption
        return restored

    @own_settings()
    def resume(self, resumption: Resumption | adopted.Adoption) -> None:
        """Makes saving go on from what was restored."""
        parts: dict[str, Any] = {
            "writer": self.writer,
            "lifecycle": self.lifecycle,
            "planner": self._planner,
            "tracker": self._tracker,
        }
        if isinstance(resumption, adopted.Adoption):
            adopted.resume_adopted(resumption, **parts)
        else:
            parts |= {"channel": self.channel, "tables": self._planner.tables}
            resume(
                resumption, **parts, widening=self.widening if self.may_save else None
            )

    def uses(self, touched: Touched | None) -> bool:
        """Whether saves go by `touched`; False if rows are found by fingerprints alone."""
        return touched is not None and self._tracker.mode(touched) != "fingerprint"

    def metadata(self, directory: epath.Path) -> Any:
        """Shapes and dtypes by path, without reading data; None if there is no manifest."""
        if self.options.adopt and is_state_of_orbax(directory):
            return PlainState(directory).metadata
        try:
            return metadata_of(read_manifest(directory))
        except errors.IntegrityError:
            return None

    def close(self) -> None:
        """Frees what the handler holds."""
        self.lifecycle.close()
        self._launcher.close()
        self.writer.close()


class HandlerRegistry(ocp.DefaultCheckpointHandlerRegistry):
    """Registry for a plain manager of Orbax; its handler and preservation policy go together."""

    handler: CnrHandler

    def preservation_policy(self, inner: Preserving | None = None) -> ChainPreservation:
        """Wraps an Orbax preservation policy, so that parents of what it keeps are kept too.

        Put the policy into the options of the manager. Until the manager has asked it, the handler
        writes only full checkpoints, because plain retention would delete parents.

        Args:
            inner: policy of Orbax, such as `ocp.checkpoint_managers.LatestN(3)`; None keeps
                everything.
        """
        own = self.handler
        return ChainPreservation(
            inner, lambda: own.ledger, own.guard, own.options.min_fulls
        )


def handler_registry(
    tables: Tables | None, options: cnr_jax.options.Options | None = None
) -> HandlerRegistry:
    """Registry with which a plain `ocp.CheckpointManager` takes `Save` and `Restore`.

    Put `registry.preservation_policy(...)` into the options of the manager. Without it the handler
    writes only full checkpoints, since plain retention would delete the parents of deltas. A plain
    manager does not do all that `CheckpointManager` does. In a root that another run has used, a
    save that is not due only returns False, and is not refused. Orbax renames steps without a sync,
    and deletes them file by file. It does not look again before it deletes a folder that has come
    to the root since it started. It copies to no mirror.

    Raises:
        OptionError: if an option is not known, or works only in `CheckpointManager`.
    """
    for name in ("mirror", "near", "interval"):
        given = getattr(options, name, None)
        if given is not None:
            does = "decides on no save" if name == "interval" else "copies nothing"
            also = "" if name == "interval" else ", or the command cnr-jax mirror"
            raise errors.OptionError(
                f"{name} is {given!r}, but a plain manager of Orbax {does}\n"
                f"  hint: cnr_jax.CheckpointManager does{also}"
            )
    return registry_of(tables, options)


def registry_of(
    tables: Tables | None, options: cnr_jax.options.Options | None
) -> HandlerRegistry:
    """Registry for a manager of this library, which does more than a plain one."""
    registry = HandlerRegistry()
    registry.handler = CnrHandler(tables, options)
    # No item name: whatever the item is called, these arguments lead to this handler.
    registry.add(None, Save, registry.handler)
    registry.add(None, Restore, registry.handler)
    return registry


ocp.args.register_with_handler(CnrHandler, for_save=True)(Save)
ocp.args.register_with_handler(CnrHandler, for_restore=True)(Restore)
