"""The object of the training loop: Orbax's `CheckpointManager` with chains it understands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from cnr_jax import errors
from cnr_jax.continuing import Continuing, Tip
from cnr_jax.handler import CnrHandler, Restore, Restored, Save
from cnr_jax.options import Options
from cnr_jax.orbax_compat import DEFAULT_ITEM, Channel, Place
from cnr_jax.registry import handler_registry
from cnr_jax.repository.ledger import Ledger, describe, find_item
from cnr_jax.retaining import inner_policy
from cnr_jax.rows.touched import Touched, clock_of, lineage_hex
from cnr_jax.table import Tables
from cnr_jax.telemetry import SaveReport
from cnr_jax.warming import warm_up

_log = logging.getLogger(__name__)


class CheckpointManager(ocp.CheckpointManager):
    """Saves a train state in every call, mostly as deltas, and restores it.

    Everything of `ocp.CheckpointManager` works as there. What differs: parents of kept steps
    are kept; `latest_step()` is the newest whole checkpoint of the newest branch; after
    restoring an older step saving goes on from there.

    Args:
        root: directory of the checkpoints; made if missing.
        tables: from `find_tables`. None: only restoring is possible, for inspection.
        options: what is particular to this library.
        orbax_options: Orbax's own. Its `max_to_keep`, `keep_period` and
            `preservation_policy` work, and are extended to parents.
        item: name of the item that holds the state, where several are saved in one step;
            None: the one found in the root, else the one first saved.

    Raises:
        OptionError: if a preservation policy is given in both options.

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
        options = options or Options()
        registry = handler_registry(tables, options)
        self._handler: CnrHandler = registry.handler
        self._handler.root = epath.Path(root).absolute()
        self._channel = Channel()
        self._tip: Tip | None = None
        # Where the tip goes back to when the last save failed: its step is due again.
        self._tip_before: Tip | None = None
        self._root = epath.Path(root).absolute()
        self._item = item or find_item(self._root)
        if self._item is not None:
            self._handler.open(self._root, self._item)
        inner = inner_policy(options, orbax_options)
        super().__init__(
            self._root,
            options=dataclasses.replace(
                orbax_options or ocp.CheckpointManagerOptions(),
                max_to_keep=None,
                keep_period=None,
                keep_time_interval=None,
                preservation_policy=self._handler.preservation_policy(inner),
            ),
            handler_registry=registry,
        )
        self._handler.guarded = True
        if tables is not None:
            warm_up(tables, options)

    @property
    def _ledger(self) -> Ledger:
        """What the root holds; nothing, until the first save names the item."""
        return self._handler.ledger or Ledger()

    @property
    def last_report(self) -> SaveReport | None:
        """What the last committed save of this manager did."""
        return self._handler.last_report

    def latest_step(self) -> int | None:
        """The step that `restore(None)` takes: the newest whole one of the newest branch.

        Steps that are being written, or whose parents are missing, do not count.
        """
        self._settle()
        whole = [e for e in self._ledger.committed() if self._ledger.is_whole(e)]
        return whole[-1].step if whole else None

    def should_save(self, step: int) -> bool:
        """Whether a save at this step is due, counted from where saving goes on.

        A manager that has neither saved nor restored starts anew, whatever its root holds.
        """
        return Continuing(self, self._tip).should_save(step)

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

        Raises:
            StateMismatchError, TouchedError, TableError: if the state cannot be saved.
            AuditError: if a row changed that was not recorded.
            DependentsExistError: if a step is in the way that must be kept.
        """
        _check_step(step)
        state = self._state_args(args)
        if not force and not self.should_save(step):
            if not self._goes_elsewhere(step, state) or not self.should_save(step):
                if self._tip is not None and step < self._tip.step:
                    _log.warning(
                        "step %d is not saved: the run has gone on to step %d",
                        step,
                        self._tip.step,
                    )
                return False
        self.wait_until_finished()
        if state is not None:
            place = Place(self._root, self._step_directory(step), str(self._item))
            abandoned = self._handler.prepare(place, state).abandoned
            if abandoned:
                # What was renamed aside must not be in the way of the new steps.
                self._forget_steps(abandoned)
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
            self._tip_before = self._tip
            self._tip = self._tip_at(step, state.touched if state else None)
        return saved

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """Restores a step; None: the newest whole one of the newest branch.

        Args:
            step: what to restore.
            items: not used; see Orbax.
            restore_kwargs: not used; see Orbax.
            directory: another root to restore from.
            args: `Restore(...)`, or a Composite of such with other items. Default: `Restore()`.
                Orbax's `StandardRestore` restores the state alone, as from Orbax's own saves.

        Returns:
            `Restored(state, touched)`, or a Composite with one where items are named.

        Raises:
            FileNotFoundError: if there is no such step, or none at all.
            StateMismatchError: if the state asked for does not match.
            ChainError, IntegrityError, FormatError: if the step cannot be restored.
        """
        self.wait_until_finished()
        self._settle()
        if step is None and directory is None:
            step = self._agreed_latest()
        if step is not None and directory is None:
            self._check_exists(step)
        if args is None:
            args = Restore()
            if self._item not in (None, DEFAULT_ITEM):
                args = ocp.args.Composite(**{str(self._item): args})
        plain = isinstance(args, ocp.args.StandardRestore)
        if isinstance(args, ocp.args.StandardRestore):
            args = Restore(args.item)
        restored = super().restore(
            step, items, restore_kwargs, directory=directory, args=args
        )
        state = restored
        if isinstance(restored, ocp.args.Composite):
            state = restored.get(str(self._item))
        if directory is None and isinstance(state, Restored) and step is not None:
            tip = self._tip_at(step, state.touched)
            # Without touched rows it is not known whether the restored state goes on: if it
            # does, its next steps are due either way.
            if tip.lineage or self._tip is None or step < self._tip.step:
                self._tip = tip
        return state.state if plain and isinstance(state, Restored) else restored

    def delete(self, step: int) -> None:
        """Deletes a step that no other depends on.

        Raises:
            DependentsExistError: naming those that do.
        """
        self.wait_until_finished()
        self._settle()
        entry = self._ledger.by_step(step)
        if entry is not None:
            dependents = self._ledger.dependents(entry.directory)
            if dependents:
                raise errors.DependentsExistError(
                    f"refusing to delete step {step}: {describe(dependents)}"
                    " depend on it\n  hint: delete those first, the newest first"
                )
        super().delete(step)
        if entry is not None:
            self._ledger.forget(entry.directory)

    def reload(self) -> None:
        """Reads the root again."""
        super().reload()
        self._settle()
        self._item = self._item or find_item(self._root)
        if self._item is not None:
            ledger = self._handler.open(self._root, self._item)
            fresh = Ledger.load(self._root, self._item)
            ledger.entries, ledger.unreadable = fresh.entries, fresh.unreadable

    def wait_until_finished(self) -> None:
        """Waits for the save that is being written, and raises what it raised."""
        try:
            super().wait_until_finished()
        except Exception:
            # An error in writing Orbax's metadata comes out while the rest is being written;
            # what becomes of that must not come out of the next save.
            with contextlib.suppress(Exception):
                self._wait_for_checkpointers()
            # Orbax struck off what it would have deleted after this save, but did not delete.
            super().reload()
            self._settle()
            raise
        self._settle()

    def close(self) -> None:
        """Waits for the save that is being written and frees what is held."""
        super().close()
        self._settle()

    def _settle(self) -> None:
        """Notes a committed save, unless one is still being written."""
        thread = self._finalize_thread.get()
        if thread is None or not thread.is_alive():
            saving = self._handler.is_saving
            if self._handler.settle() is None and saving:
                self._tip = self._tip_before

    def _goes_elsewhere(self, step: int, state: Save | None) -> bool:
        """Whether an older step is no repetition but a state that does not rest on the tip.

        Such are a new run in a used root, going on after another step was evaluated, and a
        rollback in memory. If so, it starts anew: there is no tip.
        """
        tip = self._tip
        if tip is None or step > tip.step or state is None:
            return False
        if not self._handler.uses(state.touched):
            return False
        # Waits for the train step, but only here: steps after the tip are due or not due.
        new = self._tip_at(step, state.touched)
        if new.lineage == tip.lineage and new.clock >= tip.clock:
            return False
        self._tip = None
        return True

    def _tip_at(self, step: int, touched: Touched | None) -> Tip:
        if touched is None or not self._handler.uses(touched):
            return Tip(step, "", 0)
        return Tip(step, lineage_hex(touched), clock_of(touched))

    def _state_args(self, args: ocp.args.CheckpointArgs | None) -> Save | None:
        """The arguments of the state among those of a save."""
        items = {DEFAULT_ITEM: args}
        if isinstance(args, ocp.args.Composite):
            items = dict(args.items())
        elif isinstance(args, ocp.args.StandardSave | ocp.args.PyTreeSave):
            raise errors.OptionError(
                f"this manager does not take {type(args).__name__} for the state\n"
                "  hint: cnr.args.Save(state); other items go beside it in a Composite"
            )
        found = {key: item for key, item in items.items() if isinstance(item, Save)}
        if not found:
            return None
        if self._item is None and len(found) == 1:
            self._item = next(iter(found))
        if set(found) != {self._item}:
            raise errors.OptionError(
                "a manager saves one state, always as the same item\n"
                f"  got {', '.join(map(repr, found))}, expected {self._item!r}\n"
                "  hint: make another manager with another root for another state"
            )
        return found[self._item]

    def _step_directory(self, step: int) -> str:
        return self._get_write_step_directory(step, self._root).name

    def _forget_steps(self, directories: tuple[str, ...]) -> None:
        steps = [
            info.step
            for info in self._checkpoints
            if self._step_directory(info.step) in directories
        ]
        self._checkpoints.delete_if(lambda info: info.step in steps)

    def _agreed_latest(self) -> int:
        """The newest whole step, as process 0 sees it."""
        step = json.loads(self._channel.broadcast(json.dumps(self.latest_step())))
        if step is None:
            raise FileNotFoundError(f"no step in {self._root} can be restored")
        return step

    def _check_exists(self, step: int) -> None:
        if step in self.all_steps():
            return
        known = ", ".join(str(known) for known in sorted(self.all_steps())) or "none"
        raise FileNotFoundError(
            f"step {step} does not exist in {self._root}\n  steps: {known}"
        )


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise errors.OptionError(f"a step is an integer, got {step!r}")
    if step.__index__() < 0:  # type: ignore[attr-defined]
        raise errors.OptionError(f"a step is at least 0, got {step}")
