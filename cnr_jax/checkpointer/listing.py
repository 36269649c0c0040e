"""Listing of steps: which can be restored, as far as is known, and why others cannot."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable

import jax
from etils import epath

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Channel, all_succeed, on_primary
from cnr_jax.checkpointer.orbax_compat.steps import Steps
from cnr_jax.checkpointer.saving.saves import Saves
from cnr_jax.format import names
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.index.folders import is_own_item, naming_hint
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import (
    check_can_be_read,
    check_is_no_file,
    check_is_root,
    hint_of_names,
    step_directories,
)
from cnr_jax.repository.mirroring.mirror import Mirror
from cnr_jax.repository.orbax_steps import item_beside, orbax_step
from cnr_jax.repository.step import deleted_step
from cnr_jax.repository.store import (
    AnyPath,
    exists,
    is_directory,
    missing_directories,
    names_in,
    sync_made,
)
from cnr_jax.repository.store.checked import UNKNOWN, accessing, damage, refuse_pipe
from cnr_jax.repository.upkeep.aside import check_is_here, recover
from cnr_jax.repository.upkeep.removal import find_leftovers, report
from cnr_jax.repository.upkeep.verify import Level, Problem, verify
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import logger

_log = logger(__name__)
_SHOWN = 10
_RELOAD = "  hint: reload() lists what another process has saved or deleted since"


def _in_line(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"


class Listing:
    """Steps of a manager: which there are, which can be restored, and their deletion.

    Args:
        steps: steps of the root, whatever is in them.
        writer: writer of the root.
        saves: saves of the manager; the last one is settled first.
        channel: channel to the other processes.

    Attributes:
        item: name of the item that holds the state; None until it is known.
    """

    def __init__(
        self,
        steps: Steps,
        writer: RootWriter,
        saves: Saves,
        channel: Channel,
    ) -> None:
        self._root, self._steps, self._writer = steps.root, steps, writer
        self._saves, self._channel = saves, channel
        self._writes = False
        self.item: str | None = None

    def open(
        self, item: str | None, *, writes: bool, recovers: Callable[[], object]
    ) -> list[AnyPath]:
        """Reads the root before Orbax makes it.

        Args:
            item: name of the item that holds the state; None: the one that is found.
            writes: whether the manager saves.
            recovers: function that brings back what the root lacks, before it is read; called on
                process 0 of a manager that saves.

        Returns:
            The directories that will be made.

        Raises:
            NoStepError: if there is no root, and the manager only reads.
            OptionError: if the path cannot be a root.
            OSError: if it cannot be seen or listed.
        """
        if writes:
            check_is_no_file(self._root)
            check_is_root(self._root)
        else:
            check_can_be_read(self._root)
        made, self._writes = missing_directories(self._root), writes
        if not writes:
            self._read(item)  # maybe on one process alone, to look at it
            check_is_here(self._root)
            return made
        # Process 0 undoes an unfinished rollback before any process reads the root.
        on_primary(self._channel, functools.partial(self._recover, recovers))
        all_succeed(self._channel, lambda: self._read(item))
        return made

    def _recover(self, recovers: Callable[[], object]) -> None:
        recover(self._root)
        recovers()

    def _read(self, item: str | None) -> None:
        """Finds the item that holds the state, if it is not named; reads its ledger."""
        self.item = item or find_item(self._root)
        if self.item is None and self._writer.adopts:
            self.item = item_beside(self._root, self._writer.is_step)
        if self.item is not None:
            self._writer.open(self._root, self.item)

    def say_what_is_there(self, made: list[AnyPath]) -> None:
        """Syncs directories that were made; logs folders that are no steps of ours."""
        if jax.process_index() == 0:
            with as_root_errors(self._root):
                sync_made(made)
                report(self._root, find_leftovers(self._root, self._saves.ledger))
            listed = self._asked_again().newest()
            hint = "" if listed else naming_hint(self._root, self._writer.is_step)
            if hint:
                _log.warning("%s has no step that is listed;%s", self._root, hint[1:])
        # A root that plain Orbax has written looks empty here.
        found = self._steps.numbers() if self.item is None else []
        if found:
            _log.warning(
                "%s holds steps, but none that cnr_jax has saved: %s. They are not listed,"
                " cannot be restored here, and their numbers cannot be saved again. Restore"
                " them with Options(adopt=True), or with ocp.CheckpointManager and save into"
                " another root",
                self._root,
                ", ".join(map(str, found)),
            )

    @property
    def ledger(self) -> Ledger:
        """Ledger of the manager's root."""
        return self._saves.ledger

    def ledger_of(self, root: epath.Path, item: str) -> Ledger:
        """Reads the ledger of a root anew; this may be the manager's own root by another name."""
        return self._writer.load(root, item)

    def bring_back(self, step: int, mirror: Mirror | None, mirrored: bool) -> None:
        """Brings a step that the root lacks from the mirror, before it is restored.

        Args:
            step: number of the step.
            mirror: mirror of the root; None on processes that copy nothing.
            mirrored: whether there is one, as all processes know.
        """
        if not mirrored or step in self._steps.numbers():
            return
        if on_primary(
            self._channel, lambda: mirror is not None and mirror.way_back.bring(step)
        ):
            self.reload()

    def reload(self) -> None:
        """Reads the root again, and lets the next save take it over from another manager."""
        if not self._writes:
            check_is_here(self._root)
        try:
            if self._saves.pipeline.is_busy:
                self._saves.wait()
        finally:
            self._read_again()

    def _read_again(self) -> None:
        self._saves.settle()
        self._writer.take_over()
        self._read(self.item)
        if self.item is None:
            self._steps.reload()
            return
        ledger = self._saves.ledger
        found = self._writer.load(self._root, self.item)
        # After the ledger: a step that another process commits in between is then not listed yet.
        # The other way round it would be listed, but retention would not know of it.
        self._steps.reload(left=found.left)
        ledger.become(found)
        self._writer.gaps.forget()

    def latest_step(self) -> int | None:
        """Newest step that can be restored.

        Raises:
            OSError: if there is none, but storage withholds a step.
        """
        ledger = self._asked_again()
        if (entry := ledger.newest()) is not None:
            return entry.step
        if error := ledger.ask_again(self._root, str(self.item)):
            raise error
        return None

    def steps(self) -> list[int]:
        """Steps of the newest branch that can be restored, in order."""
        return sorted({entry.step for entry in self._asked_again().branch()})

    def best_step(self) -> int | None:
        """Best step by metrics that can be restored; the newest one if steps are not ranked."""
        if not self._steps.has_best:
            return self.latest_step()
        restorable = set(self.steps())
        found = [step for step in self._steps.ranked() if step in restorable]
        return found[-1] if found else None

    def _asked_again(self) -> Ledger:
        """Ledger of the root, after asking storage again for what it withheld."""
        self._saves.settle()
        ledger = self._saves.ledger
        if self._saves.pipeline.is_here():
            return ledger
        with self._writer.looking:
            ledger.ask_again(self._root, str(self.item))
            if ledger.newest() is None:
                # One failure to read what all steps rest on must not make the root look empty.
                ledger.take_back_unread()
        return ledger

    def verify(self, level: Level) -> tuple[Problem, ...]:
        """Lists all problems in the root; damaged steps are not listed any more."""
        self._saves.wait()
        self._saves.settle()
        ledger = self._saves.ledger
        found = verify(self._root, level, item=self.item)
        for problem in found:
            # A superfluous file, which can be moved away, does not make a step damaged.
            if problem.consequence and problem.kind != UNKNOWN:
                path = "/".join((problem.directory, problem.file)).rstrip("/")
                ledger.note_damage(path, problem.message.partition("\n")[0])
        return found

    def delete(self, step: int) -> None:
        """Deletes a step that no other depends on; see `CheckpointManager.delete`."""
        # Another process may be about to look whether the last save is there.
        all_succeed(self._channel, self._saves.wait)
        self._saves.settle()
        self.check_exists(step)
        ledger, directory = self._saves.ledger, self._steps.existing_directory(step)
        self._saves.retirement.check_unneeded(step)
        if self._steps.options.read_only:
            _log.warning("step %d is not deleted: this manager is read-only", step)
            return
        try:
            on_primary(self._channel, lambda: self._saves.retirement.delete(step))
        except BaseException:
            if directory not in ledger.all_directories():
                self._steps.forget([step])
            raise
        self._steps.forget([step])
        ledger.forget(directory)
        if jax.process_index() == 0:
            self._saves.put_catalogue()

    def check_exists(self, step: int) -> None:
        """Checks that the root has a step of this number.

        Raises:
            NoStepError: if it has none; the error names the steps that it has.
        """
        if step not in self._steps.numbers():
            raise self._no_step(step)

    def check_is_there(self, step: int | None) -> None:
        """Checks that a step is in the root now, by a look at storage.

        Raises:
            NoStepError: if it is not.
        """
        if step is not None and not self._is_in(self._root, step):
            raise self._no_step(step)

    def check_is_found(self, step: int) -> None:
        """Checks that the manager's name format finds the directory of a listed step.

        Only a name format of the user's own can fail to find it.

        Raises:
            NoStepError: if the step is there under another name.
        """
        entry = self.ledger.by_step(step)
        if entry is None or self._is_in(self._root, step):
            return
        if exists(self._root / entry.directory):
            raise errors.NoStepError(
                f"step {step} of {os.fspath(self._root)} is {entry.directory}, which this"
                " manager's step_name_format does not find\n"
                + hint_of_names([entry.directory])
            )

    def _no_step(self, step: int) -> errors.NoStepError:
        known = sorted(self._steps.numbers())
        if step in known or self.ledger.by_step(step) is not None:
            self.check_is_found(step)
            return deleted_step(self._root, step)
        restorable = {entry.step for entry in self._asked_again().restorable()} & set(
            known
        )
        return errors.NoStepError(
            f"step {step} does not exist in {os.fspath(self._root)}\n"
            f"  steps: {_in_line(known)}\n"
            f"  that can be restored: {_in_line(restorable)}\n"
            + (naming_hint(self._root, self._writer.is_step) or _RELOAD)
        )

    def _is_in(self, root: epath.Path, step: int) -> bool:
        try:
            return exists(self._steps.find_directory(step, root))
        except ValueError:
            return False

    def check_holds(self, root: epath.Path, step: int | None) -> None:
        """Checks that another path is a root, and holds the step that is asked for.

        Raises:
            NoStepError: if it is none, or does not hold the step.
        """
        check_can_be_read(root)
        check_is_here(root)
        if step is not None and not self._is_in(root, step):
            held = step_directories(root, self._writer.is_step)
            raise errors.NoStepError(
                f"step {step} does not exist in {os.fspath(root)}\n"
                f"  steps: {_in_line(map(names.step_number, held))}\n"
                + naming_hint(root, self._writer.is_step)
            )

    def find_state(self, root: epath.Path, step: int, item: str) -> str:
        """Finds the item of a step that holds the state, so that Orbax takes no other for ours.

        Args:
            root: root that holds the step.
            step: number of the step.
            item: name of the item that holds the state in other steps of the root.

        Raises:
            IntegrityError: if the step is not there, holds nothing that this library could restore,
                or has something else in the place of the file that Orbax reads first.
        """
        try:
            directory = self._steps.find_directory(step, root)
        except ValueError:
            return item  # there is no such step: Orbax says so
        held = directory / item
        with accessing(held):
            refuse_pipe(directory / names.ORBAX_METADATA)
            if exists(held / names.MANIFEST):
                return item
            if not exists(directory):
                raise damage(directory, "is not there", "file_missing")
            if is_own_item(held):
                return item
            if self._writer.adopts and (
                found := orbax_step(root, directory.name, item)
            ):
                return found.item
            items = [n for n in names_in(directory) if is_directory(directory / n)]
            raise damage(
                directory,
                "holds no checkpoint of cnr_jax\n"
                f"  got items {', '.join(items) or 'none'}, expected {item!r} with"
                f" {names.MANIFEST}\n"
                "  if plain Orbax has saved it: Options(adopt=True), or ocp.CheckpointManager("
                "root).restore(step, args=ocp.args.StandardRestore(state))",
                "not_ours",
            )
