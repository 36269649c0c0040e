"""The item of a root that a handler serves, once it is known which."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from cnr_jax import errors
from cnr_jax.repository.files import exists
from cnr_jax.repository.layout import Place
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Plan
from cnr_jax.repository.lineage.suspects import forget_gone
from cnr_jax.repository.upkeep.writer import Guard

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Served:
    """Where saves go: one item of one root, always the same from the first save on.

    Until then, or until a manager or a restore says which, there is none. Process 0 alone
    guards it: only there `begin` and `move_aside` are called; what ends a save does nothing
    on the others.

    Attributes:
        root: of the manager, which may hold nothing yet; None: that of the first save or
            restore.
        is_step: tells names of step directories from others; None: all that end in a digit.
        place: the root and the item, without a step.
        ledger: what the root holds.
        changed: whether steps may have come, or gone, that the other processes do not know.
        noted: whether steps of the root may be noted as suspect.
    """

    root: epath.Path | None = None
    is_step: Callable[[str], bool] | None = None
    place: Place | None = None
    ledger: Ledger | None = None
    changed: bool = False
    noted: bool = True
    _guard: Guard | None = None

    def open(self, root: Any, item: str) -> Ledger:
        """Reads what the root holds; later calls return the same ledger.

        Raises:
            OptionError: if another root or item is served already.
            OSError: if the root cannot be read; nothing has changed then.
        """
        if self.place is None or self.ledger is None:
            ledger = Ledger.load(root, item, self.is_step)
            self.serve(root, item, ledger)
            return ledger
        if not self.is_at(root, item):
            raise errors.OptionError(
                "a handler serves one item of one root\n"
                f"  got {root}, item {item!r}; it serves {self.place.root},"
                f" item {self.place.item!r}\n"
                "  hint: make a handler registry for each manager, save one state in it"
            )
        return self.ledger

    def serve(self, root: Any, item: str, ledger: Ledger) -> None:
        """Saves go to this root from now on."""
        self.place = Place(root=root, directory="", item=item)
        self.ledger = ledger
        if jax.process_index() == 0:
            self._guard = Guard(root, item)

    def is_at(self, root: Any, item: str) -> bool:
        """Whether this item of this root is served."""
        own = self.place
        return own is not None and (str(own.root), own.item) == (str(root), item)

    def ledger_to_be(self, place: Place) -> Ledger | None:
        """The ledger of a restored place, if saves are to go there but none has come yet."""
        if self.place is None and self.root in (None, place.root):
            return Ledger.load(place.root, place.item, self.is_step)
        return None

    def know(self, directories: tuple[str, ...]) -> None:
        """Holds the same steps as process 0, whoever brought them to the root."""
        assert self.ledger is not None and self.place is not None
        self.ledger.match(self.place.root, self.place.item, directories)

    def look(self) -> Ledger:
        """The ledger as the root now is, without claiming it.

        Raises:
            OSError: if the root cannot be read.
        """
        assert self.ledger is not None and self.place is not None
        if exists(self.place.root):
            self.changed |= self.ledger.refresh(self.place.root, self.place.item)
        return self.ledger

    def begin(self, own: str | None) -> Ledger:
        """Claims the root for a save; the ledger is as the root then is.

        Args:
            own: step directory of the save, if it is being made already.

        Raises:
            WriterError: if another manager saves to the root.
            OSError: if the root cannot be read or claimed.
        """
        assert self._guard is not None and self.ledger is not None
        self.changed |= self._guard.begin(self.ledger, own)
        if self.noted and self.place is not None:
            self.noted = forget_gone(self.place.root, self.ledger)
        return self.ledger

    def move_aside(self, plan: Plan) -> None:
        """Makes room for a save, until it is committed or undone."""
        assert self._guard is not None and self.ledger is not None
        entries = [self.ledger.movable(directory) for directory in plan.abandoned]
        self._guard.move_aside(plan.uuid, plan.directory, entries, plan.earlier)

    def check_claim(self) -> None:
        """Right before a commit or a removal.

        Raises:
            WriterError: if another manager has taken over the root.
        """
        if self._guard is not None:
            self._guard.check()

    def committed(self) -> None:
        """What was moved out of the way of a save stays there."""
        if self._guard is not None:
            self._guard.committed()

    def undo(self) -> None:
        """Leaves the root as it was before a save that is not committed."""
        if self._guard is None or self.ledger is None:
            return
        try:
            self.changed |= self._guard.failed(self.ledger)
        except OSError as error:
            _log.error(
                "steps that were moved aside for a failed save cannot be brought back; the"
                " next save tries again: %s",
                error,
            )

    def discard(self, directory: str) -> None:
        """Removes what a failed save has written to a step directory."""
        if self._guard is not None:
            self._guard.discard(directory)

    @property
    def is_guarded(self) -> bool:
        """Whether this process guards the root: process 0, once it is known."""
        return self._guard is not None

    def end_writing(self) -> None:
        """Lets other managers write."""
        if self._guard is not None:
            self._guard.end()

    def take_over(self) -> None:
        """Lets the next save claim the root, also from a manager that did so since."""
        if self._guard is not None:
            self._guard.give_up()

    def close(self) -> None:
        """Gives the root back."""
        if self._guard is not None:
            self._guard.close()
