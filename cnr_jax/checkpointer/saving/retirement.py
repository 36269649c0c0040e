"""Which steps go after a save, by the user's rule, and how they go: children first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax

from cnr_jax.checkpointer.orbax_compat.options import (
    check_deletion,
    preservation_context,
)
from cnr_jax.checkpointer.orbax_compat.steps import StepInfo, Steps
from cnr_jax.repository.committer import Attempt
from cnr_jax.repository.index.entries import order
from cnr_jax.repository.index.gaps import Gap
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import Preserving, children_first
from cnr_jax.repository.upkeep.aside import clear_aside
from cnr_jax.repository.upkeep.removal import remove_in_place
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import logger

_log = logger(__name__)


class Retirement:
    """Decides which steps go, and removes them; process 0 does, for all.

    Args:
        steps: of the root.
        writer: of the root.
        policy: the user's rule, which knows of parents.

    Raises:
        OptionError: if removed steps are to go where they cannot.
    """

    def __init__(self, steps: Steps, writer: RootWriter, policy: Preserving) -> None:
        self._steps, self._writer, self._policy = steps, writer, policy
        check_deletion(steps.root, steps.options)
        # What was set aside, but not by this run.
        self._not_ours: set[str] = set()
        if writer.remover is not None:
            given = steps.options.num_deletion_threads
            writer.remover.threads = given or writer.remover.threads

    @property
    def _ledger(self) -> Ledger:
        return self._writer.ledger or Ledger()

    def decide(self, infos: Sequence[StepInfo], attempt: Attempt) -> list[int]:
        """Steps that go, now that a save is committed.

        What saves rest on that have begun since stays for now.

        Args:
            infos: of all steps, the new one among them.
            attempt: of the save.
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
        """On all processes: these go with a save, so nothing may rest on them any more."""
        if jax.process_index() != 0:
            with self._deciding(attempt):
                for step in steps:
                    self._ledger.doom(self._steps.existing_directory(step))

    @contextlib.contextmanager
    def _deciding(self, attempt: Attempt) -> Iterator[None]:
        """What is doomed meanwhile goes in favour of a save."""
        with self._writer.looking:
            self._ledger.deciding = attempt.nonce
            try:
                yield
            finally:
                self._ledger.deciding = None

    def remove(self, steps: Sequence[int]) -> list[int]:
        """Removes what retention lets go of: steps, and first what rollbacks have set aside.

        A step that cannot be removed stays, and with it all that it rests on. Nothing is raised:
        the save that made the steps superfluous is committed all the same.

        Returns:
            Those that stay.
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
        """Keeps what was to go, as steps that were to stay lack files: retention decides again.

        Args:
            steps: that the rule let go of without knowing that.
            gap: what was found.
        """
        with self._writer.looking:
            self.stayed(steps)
            self._ledger.crowded = False  # and what rollbacks have set aside stays
        _log.warning(
            "no step is deleted after this save, as one that was to stay is not whole: %s",
            gap.text,
        )

    def stayed(self, steps: Sequence[int]) -> None:
        """On all processes: these did not go after all, and count on."""
        with self._writer.looking:
            for step in steps:
                self._ledger.doomed.pop(self._steps.existing_directory(step), None)

    def let_go(self, attempt: Attempt, superfluous: bool) -> None:
        """Drops what a save without a state has made superfluous, or keeps it; no step says so."""
        with self._writer.looking:
            self._ledger.let_go(attempt.nonce, superfluous)

    def delete(self, step: int) -> None:
        """Removes one step.

        Raises:
            WriterError: if another manager saves to this root.
            OSError: if it cannot be removed; it is there as before.
        """
        for _, error in self._removing([step]):
            raise error

    def _removing(self, steps: Sequence[int]) -> Iterator[tuple[int, Exception]]:
        """Removes steps, those first that others do not depend on; yields what stays, and why."""
        numbers = {self._steps.existing_directory(step): step for step in steps}
        ledger, stay = self._ledger, dict[str, Exception]()
        looking = self._writer.looking  # not while storage removes
        with looking:
            found = children_first(ledger, numbers)
        for directory in found:
            if directory not in stay:
                try:
                    with looking:
                        hidden = ledger.hidden_by(directory)
                    for name in (*hidden, directory):
                        self._remove(name)
                except FileNotFoundError:
                    _log.warning("step %s is gone already", directory)
                except Exception as error:
                    _log.error("step %s is not removed and stays: %s", directory, error)
                    stay[directory] = error
            if directory in stay:
                with looking:
                    below = ledger.closure([directory])
                stay |= dict.fromkeys(below - stay.keys(), stay[directory])
                yield numbers[directory], stay[directory]

    def _remove(self, directory: str) -> None:
        self._writer.check_removal(directory)
        options, remover = self._steps.options, self._writer.remover
        if remover is None:
            remove_in_place(self._steps.root / directory)
        elif options.todelete_subdir is not None:
            remover.keep(directory, options.todelete_subdir)
        else:
            remover.remove(directory, background=options.enable_background_delete)
        with self._writer.looking:
            self._ledger.left.pop(directory, None)
