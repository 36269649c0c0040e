"""The object of the training loop: Orbax's `CheckpointManager`, with chains that it keeps whole."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from cnr_jax import errors
from cnr_jax.args import (
    Restore,
    Save,
    as_asked,
    check_arguments,
    only_root_by_position,
    state_to_save,
)
from cnr_jax.checkpointer.listing import Listing
from cnr_jax.checkpointer.multihost import all_succeed
from cnr_jax.checkpointer.orbax_compat.items import Items, metrics_of
from cnr_jax.checkpointer.orbax_compat.logs import shorten_logs
from cnr_jax.checkpointer.orbax_compat.options import (
    checked_orbax_options,
    committer_of,
    options_of_base,
    with_retention,
)
from cnr_jax.checkpointer.orbax_compat.places import ExactPath, step_names
from cnr_jax.checkpointer.orbax_compat.steps import Steps, Unseen
from cnr_jax.checkpointer.restoring.attempts import restore
from cnr_jax.checkpointer.restoring.restore import Restored
from cnr_jax.checkpointer.saving.calls import Calls, alone
from cnr_jax.checkpointer.saving.chain_look import is_dropped
from cnr_jax.checkpointer.saving.due import Progress
from cnr_jax.checkpointer.saving.retirement import Retirement
from cnr_jax.checkpointer.saving.saves import Saves, as_json
from cnr_jax.checkpointer.saving.tiers import tiers_of
from cnr_jax.checkpointer.saving.warm_up import WarmUp
from cnr_jax.goodput.profile import Profile
from cnr_jax.handler import registry_of
from cnr_jax.integers import checked_step, step_or_newest
from cnr_jax.options import Options, checked
from cnr_jax.repository.causes import as_root_errors, using_root
from cnr_jax.repository.mirroring.report import MirrorReport
from cnr_jax.repository.store import asking_once, is_directory
from cnr_jax.repository.upkeep.verify import Level, Problem, verify
from cnr_jax.state.table import Tables
from cnr_jax.telemetry import RestoreReport, SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)


class CheckpointManager(ocp.CheckpointManager):
    """Manager of checkpoints: saves a train state, mostly as deltas, and restores it.

    It works like `ocp.CheckpointManager`, but also keeps the parents of the steps that it keeps.
    `latest_step()` is the newest whole checkpoint of the newest branch. After you restore an older
    step, saving goes on from there. Threads may share a manager: a call waits for those of others.
    An interrupt (Ctrl-C) may come in the middle of any call. The save has then happened, or the
    next one holds its rows. All calls work as before, but you may have to call `close` again.

    Args:
        root: directory of the checkpoints: a local path, or a URL of `file://`, `gs://` or `s3://`.
            It is made if it is missing, unless the manager only reads. With `Options.near` it is
            the mirror of the root where saves commit; what is said here of the root holds for that.
        tables: tables, from `find_tables`. None: the manager can only restore, for inspection.
        options: options of this library.
        orbax_options: Orbax's own options. The steps that `max_to_keep`, `keep_period` or
            `preservation_policy` keeps mostly rest on others, which stay too: `max_to_keep=3` is
            three steps and a full one below. If that is damaged, none restores: see
            `Options.min_fulls`.
        item: name of the item that holds the state, where steps have several items. None: the one
            that is found in the root, else the one that is saved first.
        metadata: metadata of the root, which Orbax stores at its first manager; see `metadata()`.

    Raises:
        NoStepError: if the manager only reads, and the root does not exist, or its steps are away.
        OptionError: if both options have a preservation policy, or removed steps are to go where
            they cannot, or the root is a URL of another store.
        RootError: if the root cannot be seen, made or listed. It is never taken for an empty one.

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

    @only_root_by_position
    def __init__(
        self,
        root: epath.PathLike,
        *,
        tables: Tables | None = None,
        options: Options | None = None,
        orbax_options: ocp.CheckpointManagerOptions | None = None,
        item: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens a root. Pass everything but its path by name; the class describes each argument.

        `CheckpointManager(root, tables=tables, options=cnr_jax.Options(...),
        orbax_options=ocp.CheckpointManagerOptions(...), item="state", metadata={...})`. Without
        `tables` it only restores. `help(cnr_jax.CheckpointManager)` tells what each is for.
        """
        options = checked(options)
        orbax_options = checked_orbax_options(orbax_options, options.interval)
        registry = registry_of(tables, options)
        self._handler = handler = registry.handler
        handler.may_save &= not orbax_options.read_only
        is_step = step_names(orbax_options)
        with as_root_errors(root):
            tiers = tiers_of(
                root,
                options,
                is_step,
                item,
                writes=handler.may_save,
                full_bytes=handler.widening.stored_bytes,
            )
        self._channel, self._root = handler.channel, ExactPath(tiers.root)
        handler.serve_manager(self._root, is_step)
        self._mirror = handler.lifecycle.mirror = tiers.mirror(options, is_step, item)
        handler.lifecycle.near_problem = tiers.problem
        policy = tiers.policy(options, self._is_far)
        kept = with_retention(
            orbax_options,
            policy,
            registry.preservation_policy,
            is_near=tiers.is_near,
        )
        writer = handler.writer
        self._steps = Steps(
            self._root, kept, lambda: writer.ledger.left if writer.ledger else ()
        )
        self._items = Items(registry, self._root)
        self._warm_up = WarmUp(tables or Tables({}), options, handler.widening)
        self._make_saves(kept, options)
        self._listing = Listing(self._steps, handler.writer, self._saves, self._channel)
        base = options_of_base(kept, Unseen(self._steps))
        with asking_once():
            with as_root_errors(self._root):
                made = self._listing.open(
                    item,
                    writes=handler.may_save,
                    recovers=lambda: self._mirror and self._mirror.way_back.bring(),
                )
                super().__init__(
                    self._root,
                    options=base,
                    metadata=metadata,
                    handler_registry=registry,
                )
                self._steps.reload(numbers_only=kept.lightweight_initialize)
            shorten_logs()
            try:
                self._listing.say_what_is_there(made)
                self._warm_up.compile(*handler.planning.foreseen())
            except BaseException:
                super().close()
                raise
        # Last: without a manager nobody would act on a signal that is noted.
        self._progress.listen()
        if self._mirror is not None:
            self._mirror.start(self._listing.ledger.restorable())

    def _is_far(self, step: int) -> bool:
        """Whether a step is in the mirror."""
        ledger = self._handler.ledger
        entry = ledger.by_step(step) if ledger is not None else None
        return bool(entry and self._mirror and self._mirror.has(entry.uuid))

    def _make_saves(
        self, orbax_options: ocp.CheckpointManagerOptions, options: Options
    ) -> None:
        """Makes the parts that its saves go through."""
        handler, channel, writer = self._handler, self._channel, self._handler.writer
        committer = committer_of(
            self._root, orbax_options, writer.discard, writer.check_claim
        )
        self._calls = Calls(
            handler.lifecycle.listener.is_here, lambda: self._saves.pipeline.is_here()
        )
        self._progress = Progress(
            self._steps,
            lambda: self._saves.flying(),
            lambda: self._saves.pipeline.is_full,
            handler.uses,
            channel,
            options,
            lambda step: self._saves.meter.tick(step),
            handler.interval,
        )
        policy: Any = orbax_options.preservation_policy
        given = orbax_options.async_options or ocp.AsyncOptions()
        self._saves = Saves(
            committer,
            self._steps,
            self._items,
            handler.lifecycle,
            writer,
            Retirement(self._steps, writer, policy),
            self._progress,
            self._calls,
            channel,
            lambda place, state, urgent: handler.plan(place, state, urgent=urgent),
            self._warm_up.compile_for,
            given.post_finalization_callback or (lambda: None),
            options,
            handler.interval.learn if handler.interval else lambda found: None,
        )

    @property
    def last_report(self) -> SaveReport | None:
        """Report of the save of this manager that was committed or dropped last; None before one.

        Known once the save is durable, without another call; see `SaveReport.outcome`.
        """
        return self._handler.last_report

    @property
    def last_restore(self) -> RestoreReport | None:
        """Report of the last restore of this manager, with the error of rows; None before one."""
        return self._handler.lifecycle.listener.last_restore

    @property
    def failure(self) -> errors.CnrError | None:
        """Error of the save that ended last; None if that is committed, or none has ended.

        It is there before the next call raises it. If the save is committed, but something after
        the commit failed, the `kind` of the error is `"after_commit"`.
        """
        return self._handler.lifecycle.last_failure

    @property
    def mirror_report(self) -> MirrorReport | None:
        """Report of the mirror: what it did, how far it is behind; None without a mirror."""
        return self._mirror.report() if self._mirror is not None else None

    def profile(self, *, restart_secs: float = 0.0) -> Profile | None:
        """Profile of the run: what its steps, saves and restores take, as measured in training.

        It covers the newest hundred saves, also those of the program before, whose measurements are
        in the root. Contention is known if you call `save` or `should_save` at each step. Each
        process returns what it has measured itself; process 0 also notes that in the root.

        Args:
            restart_secs: as in `Profile`; the manager cannot measure it.

        Returns:
            The profile, for `cnr_jax.advise`; None if fewer than four saves have timed the train
            steps before them.
        """
        return self._saves.meter.found.profile(restart_secs)

    def latest_step(self) -> int | None:
        """Number of the step that `restore(None)` takes: the newest whole one of the newest branch.

        Steps that are being written do not count, nor those that are known to be damaged.

        Raises:
            OSError: if there is none, but storage fails to give out a step.
        """
        with self._calls.asking(), using_root(self._root):
            return self._listing.latest_step()

    def all_steps(self, read: bool = False) -> list[int]:
        """Numbers of the steps of the branch of `latest_step()` that can be restored, in order.

        As far as is known. The list leaves out steps that a rollback left behind (`restore` takes
        them by number), steps being written or found damaged, and those without manifest or parent.

        Args:
            read: whether to read the root again first.
        """
        with self._calls.asking(), using_root(self._root):
            if read:
                self.reload()
            return self._listing.steps()

    def best_step(self) -> int | None:
        """The best step by `best_fn` among those that can be restored."""
        with self._calls.asking(), using_root(self._root):
            return self._listing.best_step()

    def should_save(self, step: int) -> bool:
        """Whether a save at this step is due, counted from the step that saving goes on from.

        A manager that has neither saved nor restored counts anew, whatever its root holds. Before a
        preemption a save is due whatever the interval.
        """
        return self._progress.should_save(checked_step(step))

    def reached_preemption(self, step: int) -> bool:
        """Whether the run is about to be ended, and this is the step of its last save.

        That save is due whatever the interval. It is a delta if one is legal, and durable when
        `save` returns. From the signal on this takes the rest of the train step, the rest of the
        save that is being written, and one delta. With several processes jax chooses the step: the
        one after the step that the furthest process is in. All processes must ask at every step;
        `save` and `should_save` do that.

        Example:
            `if manager.reached_preemption(step): break`, after `manager.save(step, ...)`.
        """
        return self._progress.reached_preemption(checked_step(step))

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
        """Saves if a save is due, and returns whether it did. Raises the error of an earlier save.

        If it raises that, it does not save: the next save holds the rows of both. A save that rests
        on a checkpoint that has lost files is not committed, without an error: see
        `SaveReport.outcome`. The next save is full; if the run is about to end, it comes at once.

        Raises:
            UsedRootError: if the root holds checkpoints, and none was restored; at the first call,
                whether a save is due or not. `Options(new_run=True)` moves them away.
            SaveError: if an earlier save has failed, or a process does not answer.
            StateMismatchError, TouchedError, TableError: if the state cannot be saved.
            OptionError: with `Options.near`, if there is no state.
            AuditError: if a row changed that was not recorded. Nothing is written. The error names
                the steps that may lack such rows.
            DependentsExistError: if a step that must be kept is in the way.
            WriterError: if another manager saves to this root. Nothing was changed.
            CallError: after `close`; and, but at a step that `interval="auto"` passes over, if you
                call it inside `on_save`, a handler or callback of a save, or a forked process, or
                in a signal handler in the middle of a call.
        """
        step = checked_step(step)
        # Most steps save nothing: they need no lock, and no look at the state.
        looks = force or self._calls.is_closed
        if not looks and self._progress.is_passed(step, self.should_save):
            return False
        return self._save(
            step, items, save_kwargs, metrics, force, args, custom_metadata
        )

    @alone
    def _save(self, step: int, *given: Any) -> bool:
        items, save_kwargs, metrics, force, args, custom_metadata = given
        if self._steps.options.read_only:
            _log.warning("step %d is not saved: this manager is read-only", step)
            return False
        check_arguments(args, items, save_kwargs, Save)
        state, self._listing.item = state_to_save(args, self._listing.item)
        item = str(self._listing.item)
        self._handler.check_given(self._root, item, step, state)
        if not (force or self._progress.is_due(step, state, self.should_save)):
            return False
        last = self.reached_preemption(step)
        if not (force or last) and self._progress.is_left_out(step):
            return False
        made_by_step = (state.state, state.touched) if state else None
        self._saves.meter.asked(made_by_step, waits=self._saves.pipeline.is_full)
        begin = functools.partial(
            self._saves.begin,
            step,
            item,
            args,
            state,
            metrics=metrics,
            custom_metadata=as_json("custom_metadata", custom_metadata),
            urgent=last,
        )
        waits = not self._steps.options.enable_async_checkpointing
        # Such a save is committed after those before; the last of a run must not fall with them.
        alone = last or waits or state is None
        self._handler.planning.wait(lambda: self._saves.make_room(alone=alone))
        save = begin()
        if last or waits:
            self.wait_until_finished()
        if last and is_dropped(save.error):
            # No other save would come that holds its rows.
            save = begin()
            self.wait_until_finished()
        return not (waits and is_dropped(save.error))

    @alone
    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """Restores a step. With None it takes the newest whole step of the newest branch.

        With None it passes over a step that turns out damaged, and over the steps that rest on it,
        with a warning in the log. Saving then goes on from the step that it took, in a branch of
        its own. A step that you ask for by number is restored or refused. Errors that do not mean
        damage (a state that does not match, no permission, no memory) are raised either way. After
        an error saving goes on as before. A warning names steps that an `AuditError` has said may
        lack rows.

        Args:
            step: number of the step, or None.
            items: not used; see Orbax.
            restore_kwargs: not used; see Orbax.
            directory: another root to restore from.
            args: `Restore(...)`, or a Composite of such with other items. Default: `Restore()`.
                Orbax's `StandardRestore` and `PyTreeRestore` give the state alone, in the dtypes
                that you pass, with a warning if that changes values.

        Returns:
            `Restored(state, touched)`, with a `report`; if items are named, a Composite with it.

        Raises:
            NoStepError: if there is no such step, or none that can be restored; it is a
                FileNotFoundError too.
            StateMismatchError: if the state asked for does not match.
            OptionError: if `args` are none that restore a state, or `step` is no step.
            ChainError, IntegrityError, FormatError: if the step asked for is damaged. The error
                names the file, the chain, and steps that can be restored instead.
            RootError: if the service of a bucket does not answer; saving goes on as before.
            CallError: as `save`.
        """
        step = step_or_newest(step, "restore(None) takes the newest that is whole")
        check_arguments(args, items, restore_kwargs, Restore)
        # An error may be of one process alone; other processes must not go on without it.
        all_succeed(self._channel, self.wait_until_finished)
        self._saves.settle()
        if step is not None and directory is None:
            mirrored = self._handler.options.mirror or self._handler.options.near
            self._listing.bring_back(step, self._mirror, mirrored is not None)
        taken, restored, item = restore(
            step,
            args,
            directory,
            steps=self._steps,
            items=self._items,
            listing=self._listing,
            channel=self._channel,
            resume=self._handler.resume,
            mend=lambda name: (
                self._mirror is not None and self._mirror.way_back.mend(name)
            ),
        )
        is_named = isinstance(restored, ocp.args.Composite)
        state = restored.get(item) if is_named else restored
        ours = isinstance(state, Restored)
        if ours:
            is_own = self._handler.may_save and directory is None
            root = self._root if is_own else None
            self._handler.lifecycle.listener.tell(state.report, root)
            if is_own:
                self._saves.meter.restored(state.report)
        if directory is None and ours:
            self._progress.restored(taken, state.touched)
            self._handler.go_on_with_run()
        if not self._steps.options.read_only:
            self._warm_up.compile(*self._handler.planning.foreseen())
        return as_asked(args, restored, item, state.state) if ours else restored

    def metadata(self, step: int | None = None) -> Any:
        """Metadata that Orbax gives of a step; with None, of the root.

        `item_metadata(step)` gives for a state what it gives for one that Orbax saved: nested dicts
        by path, with a `shape` (of a table with its padding) and `dtype` for each leaf.

        Raises:
            NoStepError: if there is no such step, or no longer.
        """
        step = step_or_newest(step)
        if step is None:
            return super().metadata(None)
        self._items.name(self._listing.item, Restore, self._handler)
        with using_root(self._root):
            try:
                directory = self._steps.find_directory(step, self._root)
                return self._items.metadata(directory)
            finally:
                # Orbax leaves out what it does not find, such as all of a step just deleted.
                self._listing.check_is_there(step)

    def metrics(self, step: int) -> Any:
        """Metrics that a step was saved with; None if it has none."""
        with using_root(self._root):
            directory = self._steps.find_directory(checked_step(step), self._root)
            return metrics_of(directory)

    def is_saving_in_progress(self) -> bool:
        """Whether a save is in flight, or steps go after one; False in a forked process."""
        return not self._calls.is_forked and self._saves.pipeline.is_busy

    @alone
    def verify(self, level: Level = "data") -> tuple[Problem, ...]:
        """Problems in the root of this manager, then those in its mirror; see `cnr_jax.verify`.

        `Problem.root` tells them apart. From then on the manager does not list steps that it found
        damaged in its own root, nor take them as parents. With several processes call it on all of
        them, or on process 0: each process notes only what it finds.
        """
        found = self._listing.verify(level)
        if self._mirror is not None and is_directory(self._mirror.target):
            found += verify(self._mirror.target, level, item=self._listing.item)
        return found

    @alone
    def delete(self, step: int) -> None:
        """Deletes a step that no other step depends on.

        Raises:
            NoStepError: if there is no such step.
            DependentsExistError: if steps depend on it, or may, being unreadable. It names them.
            OptionError: if `step` is no step.
            WriterError: if another manager saves here, or has saved this step anew. It stays.
            CallError: as `save`.
            OSError: if the step cannot be removed; it is there as before. In a bucket its removal
                may have begun: it counts no more until `reload` finds it whole.
        """
        step = checked_step(step)
        if self._steps.options.read_only:
            _log.warning("step %d is not deleted: this manager is read-only", step)
            return
        self._listing.delete(step)

    def reload(self) -> None:
        """Waits for saves, reads the root again, and lets the next save take over from others.

        Raises:
            SaveError: if a save failed; the root was read all the same.
            CallError: inside `on_save`, or a handler or callback of a save.
        """
        self._calls.refuse_inside("reload")
        with self._calls.lock, using_root(self._root):
            self._listing.reload()

    def wait_until_finished(self) -> None:
        """Waits for the saves that are being written, and until `on_save` has been called for them.

        Raises:
            SaveError: if one failed; once, even if others that rest on it fell with it. Also if it
                is committed, but something after that failed, such as syncing it: its `kind` is
                then `"after_commit"`. Old steps that cannot be deleted are logged, and stay.
            CallError: inside `on_save`, which would wait for itself.
        """
        self._saves.wait()

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended; does not wait.

        Raises:
            SaveError: if a save failed; raised once.
            CallError: inside `on_save`, which cannot act on it.
        """
        self._saves.check()

    def close(self) -> None:
        """Waits for saves that are being written, and for `on_save`; frees what it holds.

        With a mirror it also waits until the mirror has the last step, `Options.timeout_secs` at
        most. A program that ends without `close` or `with` may lose its last saves. A second call
        does nothing, unless an interrupt has cut the first one short: then it does the rest. In a
        forked process it does nothing.

        Raises:
            SaveError: if a save failed.
            CallError: inside `on_save`, or a handler or callback of a save, which would wait for
                itself.
        """
        if self._calls.is_forked:
            return  # such as at the end of a `with` in which a child was forked
        self._calls.refuse_inside("close")
        try:
            self.wait_until_finished()
        finally:
            self._close()
            self._handler.lifecycle.listener.close()
            self._saves.meter.keep(at_once=True)
            if self._mirror is not None:
                self._mirror.close(self._handler.options.timeout_secs)

    @alone
    def _close(self) -> None:
        self._calls.is_closed = True
        self._progress.close()
        self._saves.pipeline.close()
        super().close()
        self._items.close()
