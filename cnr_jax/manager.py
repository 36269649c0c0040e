"""The object of the training loop: Orbax's `CheckpointManager` with chains it understands."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from cnr_jax import errors
from cnr_jax.checkpointer.items import (
    check_arguments,
    check_restored_step,
    check_step,
    reads_state,
    restore_args,
    state_to_save,
)
from cnr_jax.checkpointer.multihost.agreement import all_succeed, on_primary
from cnr_jax.checkpointer.orbax_compat import (
    DEFAULT_ITEM,
    ExactPath,
    is_distributed,
    shorten_logs,
    step_names,
)
from cnr_jax.checkpointer.orbax_compat.options import (
    check_orbax_options,
    deleter,
    with_retention,
    with_safety,
)
from cnr_jax.checkpointer.restoring.choose_step import Restorer
from cnr_jax.checkpointer.restoring.listing import ListingManager
from cnr_jax.checkpointer.save_errors import as_save_errors
from cnr_jax.checkpointer.saving.calls import alone, refuse_in_on_save
from cnr_jax.checkpointer.saving.due import Continuing, Course
from cnr_jax.checkpointer.saving.preemption import Sigterm
from cnr_jax.checkpointer.saving.save_in_flight import check_concrete
from cnr_jax.checkpointer.saving.warm_up import Warmth
from cnr_jax.format import names
from cnr_jax.handler import CnrHandler, Restore, Restored, Save
from cnr_jax.options import Options, checked
from cnr_jax.registry import handler_registry
from cnr_jax.repository.files import exists, missing_directories, sync_made
from cnr_jax.repository.layout import (
    Place,
    check_is_no_file,
    check_is_root,
    check_is_there,
    find_item,
    open_root,
    step_directories,
)
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.repository.upkeep.aside import recover
from cnr_jax.repository.upkeep.leftovers import find_leftovers, report
from cnr_jax.state.table import Tables
from cnr_jax.telemetry import SaveReport

_log = logging.getLogger(__name__)


class CheckpointManager(ListingManager):
    """Saves a train state in every call, mostly as deltas, and restores it.

    Everything of `ocp.CheckpointManager` works as there. What differs: parents of kept steps
    are kept; `latest_step()` is the newest whole checkpoint of the newest branch; after
    restoring an older step saving goes on from there. Threads may share one: a call waits for
    those of others.

    Args:
        root: directory of the checkpoints; made if missing, unless the manager only reads. A
            local path, a `file://` URL, or a `gs://` URL, which Orbax and TensorStore take as it
            is.
        tables: from `find_tables`. None: only restoring is possible, for inspection.
        options: what is particular to this library.
        orbax_options: Orbax's own. Its `max_to_keep`, `keep_period` and
            `preservation_policy` work, and are extended to parents.
        item: name of the item that holds the state, where several are saved in one step;
            None: the one found in the root, else the one first saved.

    Raises:
        NoStepError: if the manager only reads and there is no such root.
        OptionError: if a preservation policy is given in both options, or removed steps are
            to go where they cannot, or the root is a URL of another store.
        OSError: if the root cannot be seen or listed; it is never taken for an empty one.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, cnr_jax as cnr
        >>> state = {"user": jnp.zeros((8, 4)), "w": jnp.ones(3)}
        >>> tables = cnr.find_tables(state, ["user"])
        >>> touched = cnr.init_touched(state, tables)
        >>> with cnr.CheckpointManager(tempfile.mkdtemp(), tables=tables) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(state, touched))
        ...     manager.wait_until_finished()
        ...     restored = manager.restore(0, args=cnr.args.Restore(state))
        >>> restored.state["user"].shape
        (8, 4)
    """

    def __init__(
        self,
        root: epath.PathLike,
        *,
        tables: Tables | None = None,
        options: Options | None = None,
        orbax_options: ocp.CheckpointManagerOptions | None = None,
        item: str | None = None,
    ) -> None:
        self._lock = threading.RLock()
        options = checked(options)
        check_orbax_options(orbax_options)
        registry = handler_registry(tables, options)
        self._handler: CnrHandler = registry.handler
        self._channel = self._handler.channel
        self._course = Course(self._handler.uses)
        self._root = ExactPath(open_root(root))
        self._channel.name = f"saves in {self._root.name}"
        self._handler.served.bind(self._root, step_names(orbax_options))
        self._sigterm: Sigterm | None = None
        if options.save_on_sigterm and not is_distributed():
            self._sigterm = Sigterm()
        writes = tables is not None and not (orbax_options and orbax_options.read_only)
        if not writes:
            check_is_there(self._root)
        check_is_no_file(self._root)
        check_is_root(self._root)
        made = missing_directories(self._root)
        if writes:
            self._recover()
            self._item = all_succeed(self._channel, lambda: self._open(item))
        else:
            self._item = self._open(item)  # maybe on one process alone, to look at it
        self._skips_when_busy = options.when_busy == "skip"
        orbax_options = orbax_options or ocp.CheckpointManagerOptions()
        orbax_options = dataclasses.replace(
            with_retention(orbax_options, options, registry.preservation_policy),
            async_options=self._with_barriers(orbax_options.async_options),
        )
        super().__init__(
            self._root,
            options=with_safety(self._root, orbax_options, self._sync_uncommitted),
            handler_registry=registry,
        )
        shorten_logs(self._checkpointer)
        self._handler.guarded = self._handler.last_save.managed = True
        self._deleter = deleter(
            self._handler.served,
            orbax_options,
            self._checkpoint_deleter,
            self._existing_directory,
        )
        self._checkpoint_deleter = self._deleter
        # Whether the first save may be of the run that it is, as all processes found alike.
        self._may_save = False
        try:
            if jax.process_index() == 0:
                sync_made(made)
                report(self._root, find_leftovers(self._root, self._ledger))
            self._say_if_foreign()
            self._warmth = Warmth(tables, options) if tables is not None else None
            self._warm_up(self._handler.auto_bits())
        except BaseException:
            super().close()
            raise
        # Last: without a manager nobody would act on a signal that is noted.
        if self._sigterm is not None:
            self._sigterm.listen()

    def _warm_up(self, auto_bits: int | None) -> None:
        """Compiles what saves with codes of this width need, once."""
        if self._warmth is not None:
            self._warmth.warm_up(auto_bits)

    @property
    def last_report(self) -> SaveReport | None:
        """What the last committed save of this manager did; known once it is durable.

        No call is needed for that. With several processes, on all but the first: once the
        first has committed it.
        """
        return self._handler.last_report

    @property
    def failure(self) -> errors.CnrError | None:
        """Why the save that ended last failed; None if it is committed, or none has ended.

        Known as soon as the save has failed, before the next call raises it. A save that is
        committed while what comes after it failed has `kind` `"after_commit"`.

        Example:
            `if manager.failure is not None: alert(str(manager.failure))`, in a train loop that
            saves every hour.
        """
        return self._handler.last_save.last_failure

    def should_save(self, step: int) -> bool:
        """Whether a save at this step is due, counted from where saving goes on.

        A manager that has neither saved nor restored starts anew, whatever its root holds.
        Before a preemption a save is due whatever the interval.
        """
        tip = self._course.tip
        if Continuing(self, tip).should_save(step):
            return True
        ahead = tip is None or step > tip.step
        writable = not self._options.read_only
        return ahead and writable and self.reached_preemption(step)

    def reached_preemption(self, step: int) -> bool:
        """Whether the run is about to be ended, and this is the step of its last save.

        That save is due whatever the interval, is a delta if one is legal, and `save` returns
        when it is durable. From the signal on this takes: the rest of the train step, the rest
        of the save that is being written, and one delta. With several processes jax chooses
        the step, the one after the step in which the furthest process is; all must ask at
        every step, which `save` and `should_save` do.

        Example:
            `if manager.reached_preemption(step): break`, after `manager.save(step, ...)`.
        """
        if self._sigterm is not None and self._sigterm.reached(step):
            return True
        return super().reached_preemption(step)

    @alone
    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: ocp.args.CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves if a save is due; returns whether it did. Raises what the last save raised.

        If it raises that, it does not save: the next save contains the rows of both.

        Raises:
            UsedRootError: if the root holds checkpoints, and none was restored; at the first
                call, whether a save is due or not. `Options(new_run=True)` moves them away.
            SaveError: if the save before has failed, or a process does not answer.
            StateMismatchError, TouchedError, TableError: if the state cannot be saved.
            AuditError: if a row changed that was not recorded. Nothing is written; it names the
                steps that may lack such rows.
            DependentsExistError: if a step is in the way that must be kept.
            WriterError: if another manager saves to this root; nothing was changed.
            CallError: inside `on_save`, in a signal handler in the middle of a call, or after
                `close`.
        """
        check_step(step)
        if self._options.read_only:
            _log.warning("step %d is not saved: this manager is read-only", step)
            return False
        check_arguments(args, items, save_kwargs, Save)
        state, self._item = state_to_save(args, self._item)
        if state is not None:
            check_concrete(state.state, state.touched)
        self._check_origin(state)
        if not force and not self._is_due(step, state):
            return False
        last = self.reached_preemption(step)
        if not force and not last and self._is_left_out(step):
            return False
        self._wait_before_save()
        plan: Plan | None = None
        if state is not None:
            place = Place(self._root, self._step_directory(step), str(self._item))
            plan = self._prepared(place, state, last)
        with self._clearing_up(), as_save_errors(step, str(self._root)):
            self._begin(step, plan)
            if plan is not None:
                # Not foreseen where touched rows were made anew.
                self._warm_up(plan.auto_bits)
            if plan is not None and plan.changed:
                all_succeed(self._channel, super().reload)
            with self._all_directories():
                if state is None:
                    self._check_not_in_the_way(step)
                saved = super().save(
                    step,
                    items,
                    save_kwargs,
                    metrics=metrics,
                    force=True,
                    args=args,
                    custom_metadata=custom_metadata,
                )
        if saved:
            self._course.saved(step, state.touched if state else None)
        if last:
            self.wait_until_finished()
        return saved

    @alone
    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """Restores a step; None: the newest of the newest branch that is whole.

        With None, a step that turns out damaged is passed over, as is what rests on it, with a
        warning in the log for each. Saving then goes on from the step that was taken, in a
        branch of its own. A step that is asked for by number is restored or refused. Errors
        that do not mean damage (a state that does not match, no permission to read, no memory)
        are raised either way. An error changes nothing: saving goes on as before. Steps that may
        lack rows, as an `AuditError` has said, are named in a warning.

        Args:
            step: what to restore.
            items: not used; see Orbax.
            restore_kwargs: not used; see Orbax.
            directory: another root to restore from.
            args: `Restore(...)`, or a Composite of such with other items. Default: `Restore()`.
                Orbax's `StandardRestore` restores the state alone, as from Orbax's own saves,
                in its dtypes whatever they are, with a warning where that changes values.

        Returns:
            `Restored(state, touched)`, or a Composite with one where items are named.

        Raises:
            NoStepError: if there is no such step, or none that can be restored; it is a
                FileNotFoundError too.
            StateMismatchError: if the state asked for does not match.
            ChainError, IntegrityError, FormatError: if the step asked for is damaged. They
                name the file, the chain, and the steps that could be restored instead.
            CallError: as `save`.
        """
        check_restored_step(step)
        check_arguments(args, items, restore_kwargs, Restore)
        # An error may be of one process alone; the others must not go on without it.
        all_succeed(self._channel, self.wait_until_finished)
        self._settle()
        plain = isinstance(args, ocp.args.StandardRestore)
        args = restore_args(args, self._item)
        reads = reads_state(args, self._item)
        elsewhere = None
        if directory is not None:
            elsewhere = ExactPath(open_root(directory))
            all_succeed(self._channel, lambda: self._check_holds(elsewhere, step))

        def attempt(step: int) -> Any:
            with self._handler.resuming.attempt(reads=reads):
                if reads:
                    self._check_ours(elsewhere or self._root, step)
                return super(CheckpointManager, self).restore(
                    step, items, restore_kwargs, directory=elsewhere, args=args
                )

        step, restored = self._restore_by(attempt, step, elsewhere)
        state = restored
        if isinstance(restored, ocp.args.Composite):
            state = restored.get(str(self._item))
        if directory is None and isinstance(state, Restored):
            self._course.restored(step, state.touched)
            self._may_save = True
        if not self._options.read_only:
            self._warm_up(self._handler.auto_bits())
        return state.state if plain and isinstance(state, Restored) else restored

    def _check_holds(self, root: epath.Path, step: int | None) -> None:
        """Checks that another root is one, and that a step which is asked for is in it."""
        check_is_there(root)
        check_is_root(root)
        if step is None:
            return
        try:
            found = exists(self._get_read_step_directory(step, root))
        except ValueError:
            found = False
        if not found:
            held = step_directories(root, self._handler.served.is_step)
            known = sorted(map(names.step_number, held))
            raise errors.NoStepError(
                f"step {step} does not exist in {os.fspath(root)}\n"
                f"  steps: {', '.join(map(str, known)) or 'none'}"
            )

    def _restore_by(
        self, attempt: Callable[[int], Any], step: int | None, elsewhere: Any
    ) -> tuple[int, Any]:
        """The step that is taken, and what an attempt at it has restored."""
        root = elsewhere or self._root
        item = self._item or all_succeed(self._channel, lambda: find_item(root))
        item = item or DEFAULT_ITEM

        def ledger() -> Ledger:
            if elsewhere is None:
                return self._ledger
            return Ledger.load(root, item, self._handler.served.is_step)

        restorer = Restorer(root, item, ledger, attempt)
        if step is None:
            all_succeed(self._channel, restorer.look)
            return restorer.newest(lambda choose: on_primary(self._channel, choose))
        if elsewhere is None:
            on_primary(self._channel, lambda: self._check_exists(step))
        return step, restorer.asked_for(step)

    def reload(self) -> None:
        """Reads the root again, and lets the next save take it over from another manager.

        Raises:
            CallError: inside `on_save`.
        """
        refuse_in_on_save(self, "reload")
        with self._lock:
            super().reload()
            self._settle()
            self._handler.served.take_over()
            self._item = self._item or find_item(self._root)
            if self._item is not None:
                ledger = self._handler.open(self._root, self._item)
                ledger.become(Ledger.load(self._root, self._item, ledger.is_step))

    def close(self) -> None:
        """Waits for the save that is being written, and for `on_save`; frees what is held.

        A program that ends without it, or `with`, may lose its last save. Again it does nothing.

        Raises:
            SaveError: if the save failed.
            CallError: inside `on_save`, which would wait for itself.
        """
        refuse_in_on_save(self, "close")
        try:
            self.wait_until_finished()
        finally:
            self._close()
            self._handler.last_save.listener.close()

    @alone
    def _close(self) -> None:
        self._is_closed = True
        if self._sigterm is not None:
            self._sigterm.close()
        super().close()

    def _check_origin(self, state: Save | None) -> None:
        """Makes sure, once, that a save of this state may begin or go on with a run here."""
        if self._may_save or state is None:
            return
        with as_save_errors(None, str(self._root)):
            on_primary(
                self._channel,
                lambda: self._handler.check_origin(self._root, str(self._item), state),
            )
        self._may_save = True

    def _is_due(self, step: int, state: Save | None) -> bool:
        """Whether a save that is not forced is due; it may have to start anew for that."""
        if self.should_save(step):
            return True
        leaves = state is not None and self._course.leaves(step, state.touched)
        if leaves and self.should_save(step):
            return True
        tip = self._course.tip
        if tip is not None and step < tip.step:
            _log.warning(
                "step %d is not saved: the run has gone on to step %d", step, tip.step
            )
        return False

    def _is_left_out(self, step: int) -> bool:
        """Whether a save that is due is skipped because one is being written."""
        if not self._skips_when_busy:
            return False
        # Threads end at slightly different times; the processes must do the same.
        busy = bool(on_primary(self._channel, self._is_busy))
        if busy:
            _log.info("step %d is not saved: the save before is being written", step)
        return busy

    def _wait_before_save(self) -> None:
        try:
            self.wait_until_finished()
        except errors.CnrError as error:
            # The others may know of no error, such as one in deleting old steps, or of another.
            self._handler.planning.refuse(error)
            raise

    def _prepared(self, place: Place, state: Save, urgent: bool) -> Plan:
        """Prepares a save."""
        # The root may be such that it cannot be read or claimed.
        with as_save_errors(names.step_number(place.directory), str(self._root)):
            return self._handler.prepare(place, state, urgent=urgent)

    def _recover(self) -> None:
        """Process 0 undoes an unfinished rollback before any process reads the root."""
        on_primary(self._channel, lambda: recover(self._root))

    def _open(self, item: str | None) -> str | None:
        """The item that holds the state, if it is known; then also reads what there is."""
        item = item or find_item(self._root)
        if item is not None:
            self._handler.open(self._root, item)
        return item
