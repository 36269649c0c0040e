"""What an Orbax manager deletes steps through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.upkeep.removal import children_first

_log = logging.getLogger(__name__)


class ChainDeleter:
    """What an Orbax manager deletes steps through: children first, and only its own.

    Args:
        remove: removes a step directory, by name.
        name_of: the step directory of a step.
        ledger: returns the ledger of the root.
        check: raises `WriterError` if another manager has taken over the root.
        close: frees what `remove` needs.
        primary: whether this process removes anything.
    """

    def __init__(
        self,
        remove: Callable[[str], None],
        *,
        name_of: Callable[[int], str],
        ledger: Callable[[], Ledger],
        check: Callable[[], None],
        close: Callable[[], None],
        primary: bool,
    ) -> None:
        self._remove, self._name_of, self._ledger = remove, name_of, ledger
        self._check, self._close, self._primary = check, close, primary
        self._failed: list[Exception] = []

    def delete(self, step: int) -> None:
        """Removes one step; what fails is kept for `take_failures`."""
        self.delete_steps([step])

    def delete_steps(self, steps: Sequence[int]) -> None:
        """Removes steps, those first that others do not depend on.

        A step that cannot be removed stays, and with it all that it rests on. Nothing is raised:
        the save that made the steps superfluous is committed all the same.
        """
        if not self._primary:
            return
        ledger, stay = self._ledger(), set[str]()
        directories = [self._name_of(step) for step in steps]
        for directory in children_first(ledger, directories):
            try:
                if directory not in stay:
                    self._check()
                    self._remove(directory)
                    continue
            except FileNotFoundError:
                _log.warning("step %s is gone already", directory)
                continue
            except Exception as error:
                self._failed.append(error)
                _log.error("step %s is not removed and stays: %s", directory, error)
            # It counts on, and the next retention decides about it again.
            ledger.doomed.discard(directory)
            stay |= ledger.closure([directory])

    def take_failures(self) -> list[Exception]:
        """Why steps were not removed since this was asked last."""
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Waits for what is being deleted in the background."""
        self._close()
