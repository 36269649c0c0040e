"""Retirement of steps: which steps the user's policy removes after a save, children first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.options import (
    check_deletion,
    preservation_context,
)
from cnr_jax.checkpointer.orbax_compat.steps import StepInfo, Steps
from cnr_jax.repository.committer import Attempt
from cnr_jax.repository.index.entries import order
from cnr_jax.repository.index.gaps import Gap
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import Preserving, blockers, children_first
from cnr_jax.repository.store import can, is_named
from cnr_jax.repository.upkeep.aside import clear_aside
from cnr_jax.repository.upkeep.removal import Remover
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import logger

_log = logger(__name__)


class Retirement:
    """Decides which steps are removed after a save, and removes them, on process 0 for all.

    Args:
        steps: steps of the root.
        writer: writer of the root.
        policy: preservation policy of the user, made to keep parents too.

    Raises:
        OptionError: if the options move removed steps to a place where they cannot go.
    """

    def __init__(self, steps: Steps, writer: RootWriter, policy: Preserving) -> None:
        self._steps, self._writer, self._policy = steps, writer, policy
        check_deletion(steps.root, steps.options)
        # Names of folders that were set aside, but not by this run.
        self._not_ours: set[str] = set()
        if isinstance(writer.remover, Remover):
            given = steps.options.num_deletion_threads
            writer.remover.threads = given or writer.remover.threads

    @property
    def _ledger(self) -> Ledger:
        return self._writer.ledger or Ledger()

    def decide(self, infos: Sequence[StepInfo], attempt: Attempt) -> list[int]:
        """Decides which steps are removed, now that a save is committed.

        Steps stay for now if saves that have begun since rest on them.

        Args:
            infos: descriptions of all steps, with the new one.
            attempt: attempt of the save.
        """
        context, ledger = preservation_context(), self._ledger
        with self._deciding(attempt):
            keeps = self._policy.should_preserve(infos, context=context)
            gone = [i.step for i, keep in zip(infos, keeps, strict=True) if not keep]
            own = ledger.entries.get(attempt.directory)
            later = [
                e
                for e in ledger.in_flight()
                if own is not None and order(e) > order(own)
            ]
            needed = ledger.closure(each.directory for each in later)
            stay = [s for s in gone if self._steps.existing_directory(s) in needed]
            self.stayed(stay)
        return [step for step in gone if step not in stay]

    def note(self, steps: Sequence[int], attempt: Attempt) -> None:
        """Notes steps that are removed after a save, so that no later save rests on them.

        Called on all processes.
        """
        if jax.process_index() != 0:
            with self._deciding(attempt):
                for step in steps:
                    self._ledger.doom(self._steps.existing_directory(step))

    @contextlib.contextmanager
    def _deciding(self, attempt: Attempt) -> Iterator[None]:
        """Context in which steps are doomed in favour of a save."""
        with self._writer.looking:
            self._ledger.deciding = attempt.nonce
            try:
                yield
            finally:
                self._ledger.deciding = None

    def remove(self, steps: Sequence[int]) -> list[int]:
        """Removes folders that rollbacks have set aside, and then steps.

        A step that cannot be removed stays, and with it all that it rests on. Nothing is raised for
        it: the save that made the steps superfluous is committed all the same.

        Returns:
            The steps that stay.
        """
        writer, ledger = self._writer, self._writer.ledger
        if ledger is not None and ledger.crowded:
            if writer.place is not None:
                clear_aside(
                    writer.place,
                    ledger,
                    self._remove,
                    self._not_ours,
                    adopts=writer.adopts,
                )
        return [step for step, _ in self._removing(steps)]

    def spare(self, steps: Sequence[int], gap: Gap) -> None:
        """Keeps steps after all, as one that was to stay lacks files; the next save decides again.

        Args:
            steps: steps that the policy let go of, without knowing of the gap.
            gap: gap that was found.
        """
        with self._writer.looking:
            self.stayed(steps)
            self._ledger.crowded = (
                False  # folders that rollbacks have set aside stay too
            )
        _log.warning(
            "no step is deleted after this save, as one that was to stay is not whole: %s",
            gap.text,
        )

    def stayed(self, steps: Sequence[int]) -> None:
        """Notes steps that were not removed after all, and count again; on all processes."""
        with self._writer.looking:
            for step in steps:
                self._ledger.doomed.pop(self._steps.existing_directory(step), None)

    def let_go(self, attempt: Attempt, superfluous: bool) -> None:
        """Drops or keeps the steps that were doomed in favour of a save without a state.

        Such a save has no entry in the ledger, from which its outcome could be told.

        Args:
            attempt: attempt of the save.
            superfluous: whether the steps are superfluous, as the save is committed.
        """
        with self._writer.looking:
            self._ledger.let_go(attempt.nonce, superfluous)

    def check_unneeded(self, step: int) -> None:
        """Checks that no step depends on a step, as far as the ledger knows.

        Raises:
            DependentsExistError: if one does, or may.
        """
        found = blockers(self._ledger, self._steps.existing_directory(step))
        if found:
            raise errors.DependentsExistError(
                f"refusing to delete step {step}: {', '.join(reversed(found))}"
                " depend on it, or may\n  hint: delete those first, the newest first"
            )

    def delete(self, step: int) -> None:
        """Removes one step that no other depends on, whoever has saved since the root was read.

        Raises:
            DependentsExistError: if a step depends on it.
            WriterError: if another manager saves to this root, or has saved this step anew.
            OSError: if it cannot be removed. The step is then there as before; in a bucket it
                counts no more until the root is read anew, as its removal may have begun.
        """
        directory, place = self._steps.existing_directory(step), self._writer.place
        meant = self._ledger.entries.get(directory)
        with self._writer.alone() as ledger:
            # Where folders are renamed, the name may be that of another step by now.
            if meant is not None and place is not None and can(place.root).renames:
                with self._writer.looking:
                    ledger.read(place.root, directory, place.item)
            found = ledger.entries.get(directory)
            if meant is not None and found is not None and found.uuid != meant.uuid:
                self._writer.changed = True
                raise errors.WriterError(
                    f"step {step} is not deleted: another manager has saved it anew\n"
                    f"  got {found.uuid}, expected {meant.uuid}\n"
                    "  hint: reload() lists the steps that there are now"
                )
            self.check_unneeded(step)
            for _, error in self._removing([step]):
                raise error

    def _doubt(self, directory: str, error: BaseException) -> None:
        """Lets no save rest on a step whose removal has failed once it had begun."""
        place, why = self._writer.place, f"its removal has failed: {error!r}"
        if place is not None:
            with self._writer.looking:
                self._ledger.doubt(place.root, directory, place.item, why)
            self._writer.changed = True  # the other processes are told by the next save

    def _removing(self, steps: Sequence[int]) -> Iterator[tuple[int, Exception]]:
        """Removes steps, children first; yields each step that stays, with the error."""
        numbers = {self._steps.existing_directory(step): step for step in steps}
        ledger, stay = self._ledger, dict[str, Exception]()
        looking = self._writer.looking  # not held while storage removes files
        with looking:
            found = children_first(ledger, numbers)
        for directory in found:
            if directory not in stay:
                with looking:
                    is_known = directory in ledger.all_directories()
                    hidden = ledger.hidden_by(directory)
                try:
                    for name in (*hidden, directory):
                        self._remove(name)
                except Exception as error:
                    if is_known and directory not in ledger.all_directories():
                        _log.error("step %s is removed, but: %s", directory, error)
                        continue
                    _log.error("step %s is not removed and stays: %s", directory, error)
                    stay[directory] = error
            if directory in stay:
                with looking:
                    below = ledger.closure([directory])
                stay |= dict.fromkeys(below - stay.keys(), stay[directory])
                yield numbers[directory], stay[directory]

    def _remove(self, directory: str) -> None:
        options, remover = self._steps.options, self._writer.remover
        try:
            if options.todelete_subdir is not None and isinstance(remover, Remover):
                remover.keep(directory, options.todelete_subdir)
            else:
                remover.remove(directory, background=options.enable_background_delete)
        except FileNotFoundError:
            if is_named(self._steps.root / directory):
                raise
            _log.warning("step %s is gone already", directory)
        except BaseException as error:
            if directory in remover.avoided:
                self._doubt(directory, error)
            raise
        with self._writer.looking:
            self._ledger.left.pop(directory, None)
