"""The writer of a root, which keeps a crash or a second program from harming the root."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.names import final_name
from cnr_jax.repository import markers
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.entries import Entry, order
from cnr_jax.repository.index.gaps import Gaps
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.index.suspects import forget_gone
from cnr_jax.repository.layout import Place
from cnr_jax.repository.store import (
    AnyPath,
    can,
    exists,
    make_root,
    replace_durably,
    store_of,
)
from cnr_jax.repository.upkeep import aside, removal
from cnr_jax.repository.upkeep.claim import Aside, Claim, Writer, WritingLock
from cnr_jax.repository.upkeep.trial import check_conditions
from cnr_jax.repository.upkeep.unfinished import Unfinished
from cnr_jax.texts import logger

_log = logger(__name__)
# Stands in `_writing` for a save that is planned and has not begun, or for a removal by hand.
_PLANNED = "planned"


class RootWriter:
    """Writer of one item of one root, which stay the same once they are set.

    A manager, a restore or the first save sets them. Each process of a run has a writer, and all
    know the same steps. Only that of the first process touches the root: only there `refreshed`,
    `claim` and `move_aside` are called, and the methods that end a save do nothing elsewhere.

    A save calls `claim` (before anything is decided), `move_aside` if needed, `begin_writing`,
    `check_claim` (right before the commit), `committed` or `undo`, and `end_writing`. Several saves
    may be written at once, but none beside one that has moved steps aside.

    Args:
        is_first: function that says whether this is the first process; called with the item known.
        adopts: whether steps of plain Orbax count.
        single: whether to skip the trial of the store's conditions, see `Options.single_writer`.

    Attributes:
        adopts: whether steps of plain Orbax count.
        stops: whether a claim stops saves of others in a bucket.
        root: root of the manager; None until the first save or restore sets it.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        remover: remover of steps, which are removed only while the claim is this manager's; there
            once the root is known.
        place: the root and the item, without a step.
        ledger: ledger of the root.
        writes: whether this process touches the root, once the item is known.
        changed: whether steps may have come or gone that the other processes do not know of.
        noted: whether steps of the root may be noted as suspect.
        gaps: files found missing of the checkpoints that saves rest on.
        looking: lock that is held while the ledger, the notes for the catalogue or `_tidy` change,
            or are read in the background. Not held while storage removes steps.
    """

    # Made together with the place; nothing is claimed or locked before `claim`.
    _claim: Claim
    _lock: WritingLock
    _unfinished: Unfinished
    remover: removal.Remover | removal.InPlaceRemover

    def __init__(
        self,
        is_first: Callable[[], bool],
        *,
        adopts: bool = False,
        single: bool = False,
    ) -> None:
        self._is_first, self._single, self.adopts = is_first, single, adopts
        self.stops = not single
        self.root: AnyPath | None = None
        self.is_step: Callable[[str], bool] | None = None
        self.place: Place | None = None
        self.ledger: Ledger | None = None
        self.gaps = Gaps()
        self.looking = threading.RLock()
        # Uuids of the saves for which the lock is held.
        self._writing = set[str]()
        self._holding = threading.Lock()
        self.writes, self.changed, self.noted = False, False, True
        self._tidy = False
        # Whether `claim` was called: before, nothing is locked or moved aside.
        self._has_claimed = False
        # Whether steps may have come or gone without the ledger knowing it.
        self._doubtful = False
        # Whether no save that another manager has begun can be committed any more.
        self._is_alone = False
        self._before: Writer | None = None
        # By directory, steps that this manager has committed, with their notes for the catalogue;
        # steps that the catalogue of this epoch has named; steps that are gone, or were to go.
        self._own: dict[str, tuple[Entry, catalogue.Noted | None]] = {}
        self._named: frozenset[str] = frozenset()
        self._removed: set[str] = set()

    def bind(self, root: AnyPath, is_step: Callable[[str], bool] | None = None) -> None:
        """Sets the root that saves go to; `serve` sets the item later."""
        self.remover = removal.remover_for(root, self.check_removal, self.check_claim)
        self.root, self.is_step = root, is_step

    def open(self, root: AnyPath, item: str) -> Ledger:
        """Reads the ledger of the root; later calls return the same ledger.

        Raises:
            OptionError: if saves go to another root or item already.
            OSError: if the root cannot be read; nothing has changed then.
        """
        if self.place is None or self.ledger is None:
            ledger = self.load(root, item)
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

    def serve(self, root: AnyPath, item: str, ledger: Ledger) -> None:
        """Sets the item and the root that saves go to from now on."""
        if self.root is None:
            self.bind(root)
        self._claim, self._lock = Claim(root), WritingLock(root)
        self._unfinished = Unfinished(root, self.remover)
        self.writes = self._is_first()
        # Set last: a `place` tells callers that all the rest is there.
        self.place, self.ledger = Place(root=root, directory="", item=item), ledger
        ledger.avoided = self.remover.avoided

    def is_at(self, root: AnyPath, item: str) -> bool:
        """Whether saves go to this item of this root."""
        own = self.place
        return own is not None and (str(own.root), own.item) == (str(root), item)

    def ledger_to_be(self, place: Place) -> Ledger | None:
        """Reads the ledger of a restored place, if saves are to go there but none has come yet."""
        if self.place is None and self.root in (None, place.root):
            return self.load(place.root, place.item)
        return None

    def load(self, root: AnyPath, item: str) -> Ledger:
        """Reads the ledger of a root anew: this writer's, or another with steps named alike."""
        return Ledger.load(root, item, self.is_step, adopts=self.adopts)

    def _known(self) -> tuple[AnyPath, str, Ledger]:
        """The root, the item and the ledger."""
        assert self.place is not None and self.ledger is not None
        return self.place.root, self.place.item, self.ledger

    def know(self, directories: Sequence[str], gaps: Sequence[tuple[str, str]]) -> None:
        """Makes the ledger hold the same steps as that of the first process.

        Args:
            directories: names of the step directories.
            gaps: what the first process found missing of them, from `note_gaps`.
        """
        root, item, ledger = self._known()
        ledger.match(root, item, directories)
        for path, text in gaps:
            ledger.note_damage(path, text)

    def note_gaps(self) -> tuple[tuple[str, str], ...]:
        """Notes the files that checkpoints were found to lack, so that no save rests on these.

        Returns:
            What other processes have to know, as `know` takes it: paths of files, and texts.
        """
        *_, ledger = self._known()
        # Under the lock, so that the ledger knows each gap that retention sees to be taken.
        with self.looking:
            found = tuple((gap.path, gap.text) for gap in self.gaps.take())
            for path, text in found:
                ledger.note_damage(path, text)
        return found

    def refreshed(self) -> Ledger:
        """The ledger, read again as the root now is, without claiming the root.

        Raises:
            OSError: if the root cannot be read.
        """
        root, item, ledger = self._known()
        if exists(root):
            self.changed |= ledger.refresh(root, item)
        return ledger

    def claim(self, own: str | None = None) -> Ledger:
        """Claims the root for a save, so that this manager alone writes there.

        Args:
            own: step directory of a save that is already being made, so that it is no leftover.

        Returns:
            The ledger, brought up to date.

        Raises:
            WriterError: if another manager has taken over, or is still writing.
            OptionError: if its store cannot tell writers apart.
            OSError: if the root cannot be read or claimed.
        """
        root, _, ledger = self._known()
        make_root(root)
        self._has_claimed = True
        if not self._claim.is_taken:
            if not self._single:
                check_conditions(root)
            # The ledger may have been read before another manager saved there.
            self._doubtful, self._is_alone = True, False
            self._before = self._claim.take()
            with self.looking:
                self._tidy, self._named = False, frozenset()
                self._own, self._removed = {}, set()
            self._unfinished.forget()
        with self._holding:
            self._writing.add(_PLANNED)
        try:
            if not self._lock.acquire(0):
                # If the manager that holds the lock has taken the root over, waiting is of no use.
                self._claim.check()
            self._lock.wait(self._before)
            # Otherwise `Committer.prepare` checks the claim later, while training goes on.
            if not can(root).conditions or self._doubtful or self._unfinished.any:
                self._claim.check()
        except BaseException:
            self.end_writing()
            raise
        if own is not None:
            self._unfinished.forget(own)
        self._unfinished.clear()
        self._unfinished.wait_for_room()
        if not self._is_alone and not can(root).renames:
            # Before the refresh, which finds what they have committed by now.
            known = {e.directory for e in ledger.committed() if self._is_of_epoch}
            known |= {own or ""}
            mine = {*self._writing} if self.stops else None
            found = removal.end_attempts(
                root, ledger.is_step, known, self._claim.check, mine
            )
            self.remover.avoided.update(found)
        self._is_alone = True
        changed = self._bring_back() | self._refresh()
        with self.looking:
            if not self._tidy:
                self._tidy_up(own)
                self._tidy = True
        self.changed |= changed
        if self.noted:
            self.noted = forget_gone(root, ledger)
        return ledger

    def stand_in(self, other: Writer, *, alone: bool) -> None:
        """Lets `claim` leave the root to a manager that may still be running; see `Claim`.

        Raises:
            WriterError: if somebody else has claimed the root meanwhile.
            OptionError: if its store cannot tell writers apart.
        """
        if not self._single:
            check_conditions(self._known()[0])
        self._doubtful, self._is_alone = True, False
        self._before = self._claim.stand_in(other, alone=alone)

    @property
    def _is_of_epoch(self) -> bool:
        """Whether the ledger was read in the epoch of the claim before.

        If not, what it takes for a step may have been removed since, and begun again.
        """
        before, ledger = self._before, self._known()[-1]
        return before is not None and before.epoch == ledger.epoch != ""

    def _refresh(self) -> bool:
        """Refreshes the ledger where that is cheap, or in doubt; returns whether it changed."""
        root, item, ledger = self._known()
        if not self._doubtful and not can(root).cheap_looks:
            return False
        changed = ledger.refresh(root, item)
        before = self._before.epoch if self._before is not None else ""
        if before and ledger.epoch != before:
            # Steps that the ledger knows may be half removed by now: folders alone do not tell.
            changed |= ledger.look_again(root, item, before)
        self._doubtful = False
        return changed

    def _tidy_up(self, own: str | None) -> None:
        """Deletes what killed programs have left."""
        root, _, ledger = self._known()
        if not isinstance(self.remover, removal.Remover):
            self._show_newest()
            return
        # Without locks, a manager that is not known to have ended may still be writing.
        before = self._before
        alone = before is not None and (self._lock.is_proof or before.is_dead)
        found = removal.find_leftovers(root, ledger)
        temporary = [n for n in found.temporary if alone and final_name(n) != own]
        removal.clear(self.remover, found, temporary)

    def _show_newest(self) -> None:
        """Does what `show` does for the newest steps, if that failed when they were committed."""
        root, _, ledger = self._known()
        for entry in reversed(ledger.committed()):
            if markers.is_shown(root / entry.directory):
                return
            markers.show_alone(root, entry.directory, [*ledger.left])

    def show(self, directory: str, left: Collection[str] = ()) -> None:
        """Makes plain Orbax list a step that was just committed, now or before the next save.

        Args:
            directory: name of the step directory.
            left: names of steps that it leaves behind, which Orbax is to list no more.
        """
        root = self.root
        if root is None or can(root).renames:
            return
        try:
            markers.show_alone(root, directory, left)
        except OSError as error:
            with self.looking:
                self._tidy = False
            _log.warning(
                "step %s is saved, but what plain Orbax lists is not right before the next one: %s",
                directory,
                error,
            )

    def move_aside(self, plan: SavePlan) -> None:
        """Moves steps out of the way of a save, until it is committed or undone."""
        moves = plan.abandoned and not plan.leaves_behind
        if moves or plan.directory in self._named:
            self._end_catalogue(plan.directory, *(plan.abandoned if moves else ()))
        if not plan.abandoned:
            return
        if not moves:
            _log.warning(
                "the run went back, and saves step %d as %s: once that is saved, the run is"
                " without %s, which stay until retention next deletes a step of this run",
                plan.step,
                plan.directory,
                ", ".join(reversed(plan.abandoned)),
            )
            return
        root, item, ledger = self._known()
        entries = [ledger.movable(directory) for directory in plan.abandoned]
        moving = Aside(
            uuid=plan.uuid,
            directory=plan.directory,
            item=item,
            moved=aside.names_aside(root, entries, plan.earlier),
        )
        # Noted first, so that the next manager knows after a kill what to bring back.
        self._claim.note_aside(moving)
        aside.move_aside(root, moving, plan.earlier)

    def check_claim(self) -> None:
        """Checks, right before a commit or a removal, that the claim is this manager's.

        Raises:
            WriterError: if another manager has taken over the root.
        """
        if self.writes:
            self._claim.check()

    def check_removal(self, directory: str) -> None:
        """Calls `check_claim` before a step is removed, and ends what counts on the step.

        That is a catalogue that names it, or a claim that notes what made way for it.

        Raises:
            WriterError: if another manager has taken over the root.
            OSError: if storage does not tell, or it cannot be done.
        """
        self.check_claim()
        if self.writes:
            aside.keep_away(self._known()[0], directory, self._claim)
            self._end_catalogue(directory)

    def _end_catalogue(self, *directories: str) -> None:
        """Ends catalogues that name steps that are about to go, or whose names are used again."""
        with self.looking:
            self._removed.update(directories)
            # Another save may add other steps to the catalogue meanwhile, but not these.
            named, self._named = self._named, frozenset()
        try:
            if not self._claim.is_taken:
                # The catalogue is of another manager, or was written before a reload.
                root = self._known()[0]
                if can(root).conditions:
                    store_of(root).remove_file(root / names.CATALOGUE)
            elif named:
                self._claim.begin_epoch()
        except BaseException:
            with self.looking:
                self._named |= named
            raise

    def note_own(self, entry: Entry, noted: catalogue.Noted | None = None) -> None:
        """Notes a step that was committed, and what the catalogue is to say of it, if known."""
        with self.looking:
            self._removed.discard(entry.directory)
            self._own[entry.directory] = entry, noted

    def put_catalogue(
        self, others: Mapping[str, catalogue.Noted] | None = None
    ) -> None:
        """Writes the catalogue after a commit or a removal.

        Args:
            others: by directory, notes on steps that other managers have committed; None: none.
        """
        root, item, ledger = self._known()
        with self.looking:
            epoch = self._claim.epoch
            if not epoch:
                return
            committed = ledger.committed() if self._is_of_epoch else ()
            known = {e.directory: e for e in committed if e.known}
            known |= {name: own for name, (own, _) in self._own.items()}
            gone = self._removed | ledger.leaving
            entries = sorted((e for n, e in known.items() if n not in gone), key=order)
            told = dict(others or {})
            told |= {name: own for name, (_, own) in self._own.items() if own}
            self._named |= {each.directory for each in entries}
        try:
            data = catalogue.dumped(item, epoch, entries, told)
            replace_durably(root / names.CATALOGUE, data)
        except OSError as error:
            _log.warning(
                "the catalogue of %s is old, and managers look at more steps: %s",
                os.fspath(root),
                error,
            )

    def committed(self) -> None:
        """Notes that the save is durable, so that the steps moved out of its way stay there."""
        if self.writes and self._claim.aside is not None and self._is_own():
            try:
                self._claim.note_aside(None)
            except OSError as error:
                # `bring_back` sees that the save is committed, as long as its step is there.
                _log.warning("cannot note that a rollback is committed: %s", error)

    def undo(self) -> bool:
        """Leaves the root as it was before a save that failed; returns whether steps came back.

        The save may be committed after all, if storage just fails to show its manifest. So the next
        save looks at the root first, whatever that costs.
        """
        if self.ledger is not None:
            self.ledger.part()  # the steps that the save was to leave behind count again
        if not self.writes:
            return False
        self._doubtful = True
        try:
            self.changed |= (came := self._bring_back())
            return came
        except OSError as error:
            _log.error(
                "steps that were moved aside for a failed save cannot be brought back; the"
                " next save tries again: %s",
                error,
            )
            return False

    def _bring_back(self) -> bool:
        """Brings back what was moved aside for an uncommitted save; returns whether it did."""
        if self._claim.aside is None or not self._is_own():
            return False
        moved = self._claim.aside  # as `_is_own` has found it
        if moved is not None:
            aside.bring_back(self._known()[0], moved)
        self._doubtful = True
        self._claim.note_aside(None)
        return self._refresh()

    def discard(self, folder: str) -> None:
        """Removes the folder of a failed save, at once if nobody is writing, else later.

        Args:
            folder: name of the folder that the save was written into.
        """
        if not self.writes:
            return
        self._unfinished.add(folder)
        if not isinstance(self.remover, removal.Remover):
            return  # each look is a request, for which the report of the failure would wait
        held = self._lock.is_held
        try:
            # A manager that takes over uses the same names, but writes only with the lock held.
            if self._lock.acquire(0) and self._is_own():
                self._unfinished.clear()
        except OSError as error:
            _log.warning(
                "what a failed save has written stays until the next save: %s", error
            )
        finally:
            if not held:
                self._lock.release()

    def _is_own(self) -> bool:
        """Whether the claim is still this manager's; a new one inherits what is moved aside."""
        try:
            self._claim.check()
        except (errors.WriterError, OSError):
            return False
        return True

    @property
    def is_prepared(self) -> bool:
        """Whether a save has been allowed to begin, and has neither ended nor been undone."""
        if not self._has_claimed:
            return False
        return self._lock.is_held or self._claim.aside is not None

    def begin_writing(self, uuid: str) -> None:
        """Notes that a save that was planned is being written, until `end_writing`."""
        with self._holding:
            self._writing.add(uuid)
            self._writing.discard(_PLANNED)

    def end_writing(self, uuid: str = _PLANNED) -> None:
        """Lets other managers write once no save is planned or being written.

        Args:
            uuid: uuid of a save for which no thread writes any more. By default the save that was
                planned, and has not begun.
        """
        with self._holding:
            self._writing.discard(uuid)
            if self.writes and not self._writing:
                self._lock.release()

    @contextlib.contextmanager
    def alone(self) -> Iterator[Ledger]:
        """Keeps other managers from writing, if there are locks; yields the ledger, read again."""
        with self._holding:
            self._writing.add(_PLANNED)
        try:
            self._lock.wait(self._before)
            self.check_claim()
            root, _, ledger = self._known()
            is_alone = self._claim.is_taken and not can(root).cheap_looks
            yield ledger if is_alone else self.refreshed()
        finally:
            self.end_writing()

    def take_over(self) -> None:
        """Lets the next save claim the root, even if another manager has claimed it since."""
        if self.writes:
            self._claim.give_up()

    @contextlib.contextmanager
    def for_a_while(self) -> Iterator[None]:
        """Withdraws when the block ends, so that the next manager knows that this one has ended.

        Raises:
            WriterError: if another manager has taken over the root.
        """
        with contextlib.closing(self):
            try:
                yield
            except BaseException:
                with contextlib.suppress(errors.WriterError, OSError):
                    self.withdraw()
                raise
            self.withdraw()

    def withdraw(self) -> None:
        """Leaves the root to the manager that this one stood in for, or to nobody.

        Raises:
            WriterError: if another manager has taken over the root.
        """
        if self.place is not None:
            self._claim.withdraw()

    def close(self) -> None:
        """Waits for deletions in the background, and frees the lock."""
        self._writing.clear()
        self.end_writing()
        if self.root is not None:
            self.remover.close()
