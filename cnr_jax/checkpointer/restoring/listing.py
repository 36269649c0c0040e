"""The steps of a manager: which of them are listed, verified and deleted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from etils import epath

from cnr_jax import errors
from cnr_jax.checkpointer.items import check_step
from cnr_jax.checkpointer.multihost.agreement import all_succeed
from cnr_jax.checkpointer.multihost.channel import Channel
from cnr_jax.checkpointer.orbax_compat import (
    DEFAULT_ITEM,
    checkpoint_infos,
    refuse_pipes,
)
from cnr_jax.checkpointer.restoring.choose_step import check_ours, no_such_step
from cnr_jax.checkpointer.saving.calls import alone
from cnr_jax.checkpointer.saving.ending import EndingManager
from cnr_jax.repository.files import exists, is_local
from cnr_jax.repository.layout import step_directories
from cnr_jax.repository.lineage.entries import Entry
from cnr_jax.repository.lineage.retention import blockers
from cnr_jax.repository.step import read_step
from cnr_jax.repository.upkeep.verify import Level, Problem, verify

_log = logging.getLogger(__name__)


class ListingManager(EndingManager):
    """Orbax's manager, whose steps are those that can be restored, as far as is known.

    Orbax asks for its steps too, when it saves or deletes one: it is told of all directories
    then, so that none is in its way or overwritten unseen.
    """

    _channel: Channel
    _lists_all = False

    def latest_step(self) -> int | None:
        """The step that `restore(None)` takes: the newest whole one of the newest branch.

        Steps that are being written, or damaged as far as is known, do not count.

        Raises:
            OSError: if there is none, but a step that storage does not give out.
        """
        with self._asking():
            restorable = self._restorable()
            if restorable:
                return restorable[-1].step
            for directory in sorted(self._ledger.withheld):
                read_step(self._root, directory, str(self._item))
        return None

    def all_steps(self, read: bool = False) -> list[int]:
        """Steps that can be restored, as far as is known, in order.

        Those that are being written do not count, nor those of which a manifest or a parent
        is missing or damaged, or in which a restore or `verify` has found damage.

        Args:
            read: read the root again before.
        """
        with self._asking():
            if self._lists_all:
                return list(super().all_steps(read))
            if read:
                self.reload()
            return sorted({entry.step for entry in self._restorable()})

    def _restorable(self) -> list[Entry]:
        """Steps that can be restored, newest last; storage is asked again what it withheld."""
        self._settle()
        if not self._is_writing_here():
            for directory in sorted(self._ledger.withheld):
                self._ledger.read(self._root, directory, str(self._item))
        return self._ledger.restorable()

    def best_step(self) -> int | None:
        """The best step by `best_fn` among those that can be restored."""
        if self._options.best_fn is None:
            return self.latest_step()
        restorable = set(self.all_steps())
        _, ranked = self._sort_checkpoints_by_metrics(self._checkpoints)
        found = [info.step for info in ranked if info.step in restorable]
        return found[-1] if found else None

    def _load_checkpoint_infos(self, skip_metadata_read: bool = False) -> list[Any]:
        """What Orbax tracks; damage to its own files must not keep the root closed."""
        try:
            if not skip_metadata_read and is_local(self._root):
                for name in step_directories(self._root):
                    refuse_pipes(self._root / name)
            return super()._load_checkpoint_infos(skip_metadata_read)
        except Exception as error:
            _log.debug("reading the steps one by one", exc_info=error)
            return checkpoint_infos(self, skip_metadata_read)

    def _say_if_foreign(self) -> None:
        """A root that plain Orbax has written looks empty here: says so."""
        with self._all_directories():
            found = list(self.all_steps())
        if self._item is None and found:
            _log.warning(
                "%s holds steps, but none that cnr_jax has saved: %s. They are not listed,"
                " cannot be restored here, and their numbers cannot be saved again. Restore"
                " them with ocp.CheckpointManager, and save into another root",
                self._root,
                ", ".join(map(str, found)),
            )

    @contextlib.contextmanager
    def _all_directories(self) -> Iterator[None]:
        """Meanwhile all step directories are listed, whatever is in them.

        Orbax must know of each that a save would overwrite, or that may be deleted.
        """
        self._lists_all = True
        try:
            yield
        finally:
            self._lists_all = False

    @alone
    def verify(self, level: Level = "data") -> tuple[Problem, ...]:
        """What is wrong in the root of this manager; see `cnr_jax.verify`.

        Steps that are found damaged are not listed any more, nor taken as parents. With
        several processes call it on all of them, or on process 0: each notes what it finds.
        """
        self.wait_until_finished()
        self._settle()
        found = verify(self._root, level, item=self._item)
        for problem in found:
            if problem.consequence:
                path = "/".join((problem.directory, problem.file)).rstrip("/")
                self._ledger.note_damage(path, problem.message.partition("\n")[0])
        return found

    @alone
    def delete(self, step: int) -> None:
        """Deletes a step that no other depends on.

        Raises:
            FileNotFoundError: if there is no such step.
            DependentsExistError: naming steps that depend on it, or that may because they
                cannot be read.
            OptionError: if it is no step.
            WriterError: if another manager saves to this root; nothing was deleted.
            CallError: as `save`.
            OSError: if the step cannot be removed; it is there as before.
        """
        check_step(step)
        # The others may be about to look whether the last save is there.
        all_succeed(self._channel, self.wait_until_finished)
        self._settle()
        directory = self._existing_directory(step)
        found = blockers(self._ledger, directory)
        with self._all_directories():
            if found and step in self.all_steps():
                raise errors.DependentsExistError(
                    f"refusing to delete step {step}: {', '.join(reversed(found))}"
                    " depend on it, or may\n  hint: delete those first, the newest first"
                )
            super().delete(step)
        try:
            all_succeed(self._channel, self._raise_failures)
        except Exception:
            self._reread()
            raise
        self._ledger.forget(directory)

    def _raise_failures(self) -> None:
        """Raises why a step was not deleted; only process 0 deletes any."""
        failures = self._deleter.take_failures()
        if failures:
            raise failures[0]

    def _check_not_in_the_way(self, step: int) -> None:
        """Makes sure that Orbax deletes no folder that it does not know of.

        Raises:
            DependentsExistError: if there is one.
        """
        path = self._root / self._step_directory(step)
        if step not in self.all_steps() and exists(path):
            raise errors.DependentsExistError(
                f"step {step} cannot be saved: {path} is there already\n"
                "  hint: save another step, or move that folder out of the root",
                kind="step_exists",
            )

    def _existing_directory(self, step: int) -> str:
        """Name of a step's directory, which may be in another form than new ones."""
        with contextlib.suppress(ValueError):
            return self._get_read_step_directory(step, self._root).name
        return self._step_directory(step)

    def _check_exists(self, step: int) -> None:
        with self._all_directories():
            known = sorted(self.all_steps())
        if step not in known:
            raise no_such_step(self._root, step, known, self.all_steps())

    def _check_ours(self, root: epath.Path, step: int) -> None:
        """Tells a step of another kind from ours, before Orbax takes it for what it is not."""
        try:
            directory = self._get_read_step_directory(step, root)
        except ValueError:
            return  # there is none: Orbax says so
        check_ours(directory, self._item or DEFAULT_ITEM)
