"""Which checkpoints a root holds and which depend on which.

Read from the manifests at start and kept up to date by saves, alike on every process. Retention
asks it what must be kept; the planner asks it which parents still exist.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest
from cnr_jax.garbage import without_collections
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.chains import Chains
from cnr_jax.repository.index.entries import (
    Entry,
    entry_of,
    orbax_entry,
    order,
    with_dependents,
)
from cnr_jax.repository.index.folders import Folder, other_checkpoints
from cnr_jax.repository.layout import Place, step_directories
from cnr_jax.repository.orbax_steps import orbax_step
from cnr_jax.repository.step import (
    TRIES,
    read_committed,
    read_step,
    what_is_in,
)
from cnr_jax.repository.store import AnyPath, can, exists, is_gone, store_of
from cnr_jax.texts import logger

_log = logger(__name__)
# The kinds of the error with which a save that is not committed is read.
_OF_ATTEMPTS = ("manifest_missing", "not_committed")
# Manifests that are read at a time where each is a request.
_AT_ONCE = 16


class Ledger(Chains):
    """The step directories of one root, by name: what they are, and their chains.

    Args:
        is_step: tells names of step directories; None: all that end in a digit.
        adopts: whether steps of plain Orbax count, rather than being unreadable.
        says: whether it is said in the log what cannot be read.

    Attributes:
        root: that holds them; None as long as none was read.
        doomed: step directories that are deleted, each with the uuid of the save with whose commit
            it is; until `let_go` they stay known, as who removes them has to know what rests on
            what.
        deciding: uuid of the save in whose favour retention is deciding; None: it is the one that
            is being written, if one is.
        leaving: step directories that retention has dropped and that may still be there.
        crowded: whether retention lets go of steps of the run, and so of what its rollbacks have
            set aside.
        epoch: of the claim, when the root was read; empty where no catalogue told of that: then a
            step that was seen may be one that is being removed.
        run: of the save that was begun last, whose steps alone retention may drop; None: none
            was begun.
        left: what rollbacks have left behind where it cannot be renamed, and what another step
            stands for, by directory: it is no step of the root any more.
    """

    def __init__(
        self,
        is_step: Callable[[str], bool] | None = None,
        *,
        adopts: bool = False,
        says: bool = True,
    ) -> None:
        self.is_step, self.adopts = is_step or names.may_be_step, adopts
        super().__init__()
        self._says = says
        self.root: AnyPath | None = None
        self.doomed: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.deciding: str | None = None
        self.crowded = False
        self.run: str | None = None
        self.epoch = ""
        self.left: dict[str, Entry | Folder] = {}

    @property
    def unknown(self) -> set[str]:
        """Those of the folders that may be steps.

        Nothing older than these may be deleted: they might depend on it.
        """
        return {name for name, each in self._folders.items() if each.may_be_a_step}

    @property
    def doubtful(self) -> set[str]:
        """Those of the folders that storage may give out, or read, another time."""
        return {name for name, each in self._folders.items() if each.doubt}

    @classmethod
    def load(
        cls,
        root: AnyPath,
        item: str,
        is_step: Callable[[str], bool] | None = None,
        *,
        adopts: bool = False,
    ) -> Ledger:
        """Reads the manifests of all step directories below `root`.

        Args:
            root: holds the step directories.
            item: name of the item in each of them.
            is_step: tells names of step directories; None: all that end in a digit.
            adopts: whether steps of plain Orbax count.

        Raises:
            OSError: if the root cannot be seen or listed.
        """
        ledger = cls(is_step, adopts=adopts)
        ledger.root = root
        if not exists(root):
            return ledger
        # Joining names to paths of Orbax takes longer than to read.
        plain = store_of(root).quick(root)
        held: list[str] | None = None
        with without_collections():
            for _ in range(TRIES):
                before, held = held, step_directories(plain, ledger.is_step)
                if held == before:
                    break  # some are listed though they are gone
                if ledger._read_all(plain, item, held):
                    break
        ledger.part()
        if is_step is None:
            ledger.note_strays()
        return ledger

    def _read_all(self, root: AnyPath, item: str, held: Sequence[str]) -> bool:
        """Reads the manifests of step directories that were listed, and of no others.

        Returns:
            Whether all are there still: in the place of one that is gone another may have come.
        """
        for directory in self.directories():
            self.forget(directory)

        def look(directory: str) -> Entry | Exception:
            return self._look(root, directory, item)

        # First: what is read now is right as long as this epoch lasts.
        known = catalogue.read(root)
        self.epoch = known.epoch if known.item else ""
        # Of folders that plain Orbax may have saved it does not tell.
        of_item = known.item == item and not self.adopts
        told = known.entries if of_item else {}
        if can(root).cheap_looks:
            found = map(look, held)
        else:
            looked = _side_by_side(look, {*held} - told.keys())
            found = [told.get(name) or looked[name] for name in held]
        gone = False
        for directory, each in zip(held, found, strict=True):
            self._note(root, directory, item, each)
            gone |= isinstance(each, Exception) and is_gone(root / directory)
        return not gone

    def refresh(self, root: AnyPath, item: str) -> bool:
        """Takes in which steps others have put into the root or taken from it.

        Returns:
            Whether anything has.
        """
        found = step_directories(root, self.is_step, known=self.all_directories())
        self.leaving &= set(found)
        return self.match(root, item, [d for d in found if d not in self.leaving])

    def match(self, root: AnyPath, item: str, directories: Iterable[str]) -> bool:
        """Knows of exactly these step directories afterwards; reads those that are new.

        And again those that storage did not let be read: a save of this run may be among them.
        Saves that are being written stay known, wherever their folders are.

        Returns:
            Whether others were known before, or less of them.
        """
        flying = {entry.directory for entry in self.in_flight()}
        known, found = self.all_directories() - flying, set(directories) - flying
        say = _log.info if self.run is None else _log.warning  # readers expect it
        for directory in known - found:
            if directory not in self.doomed:
                say("step %s is not in the root any more", directory)
            self.forget(directory)
        for directory in sorted(found - known):
            self.read(root, directory, item)
            if directory in self.all_directories():
                say("step %s has appeared in the root", directory)
        doubtful = self.doubtful & known
        for directory in sorted(doubtful):
            self.read(root, directory, item)
        self.part()
        return known != found or not doubtful <= self.doubtful

    def ask_again(
        self, root: AnyPath, item: str, newer_than: int = -1
    ) -> Exception | None:
        """Reads again what storage did not give out.

        Args:
            root: holds the step directories.
            item: name of the item in each of them.
            newer_than: number of a step; all of a higher one are read.

        Returns:
            With what it does not give out the first of these still; None if it does.
        """
        withheld = [n for n, each in self._folders.items() if each.doubt == "withheld"]
        newer = [name for name in withheld if names.step_number(name) > newer_than]
        failed = [self.read(root, name, item) for name in sorted(newer)]
        return next((each for each in failed if isinstance(each, OSError)), None)

    def look_again(self, root: AnyPath, item: str, epoch: str) -> bool:
        """Reads all committed steps again, as of a claim; for stores where looks are requests.

        Returns:
            Whether any is gone.
        """
        known = [entry.directory for entry in self.committed()]
        found = _side_by_side(lambda name: self._look(root, name, item), known)
        for directory, each in found.items():
            self._note(root, directory, item, each)
        self.part()
        self.epoch = epoch
        return not {*known} <= self.all_directories()

    def directories(self) -> set[str]:
        """All step directories that are known, readable or not."""
        return self.entries.keys() | self.folders.keys()

    def all_directories(self) -> set[str]:
        """These, and those that rollbacks have left behind."""
        return self.directories() | self.left.keys()

    def read(self, root: AnyPath, directory: str, item: str) -> Exception | None:
        """Reads a step directory, replacing what was known; one that is deleted by now is none.

        Returns:
            Why it cannot be read, if it cannot.
        """
        return self._note(root, directory, item, self._look(root, directory, item))

    def _look(self, root: AnyPath, directory: str, item: str) -> Entry | Exception:
        """What a step directory holds, or why it cannot be read; notes nothing."""
        try:
            found = orbax_step(root, directory, item) if self.adopts else None
            entry = orbax_entry(directory, found) if found else None
            return entry or entry_of(directory, read_step(root, directory, item))
        except (errors.CnrError, OSError) as error:
            return error

    def _note(
        self, root: AnyPath, directory: str, item: str, found: Entry | Exception
    ) -> Exception | None:
        """Notes what was found; see `read`."""
        told = self._folders.get(directory)
        self.forget(directory)
        if isinstance(found, Exception):
            if is_gone(root / directory):
                return None
            with contextlib.suppress(OSError):
                if what_is_in(root, directory) != "step":
                    return found  # its number is free
            if getattr(found, "kind", "") in _OF_ATTEMPTS and not can(root).renames:
                # It may have been committed since it was looked at.
                found = self._look(root, directory, item)
        if isinstance(found, Exception):
            error = found
            folder = Folder.look(root / directory, item, error)
            self.note_folder(directory, folder)
            if not self._says:
                return error
            if not self.adopts and folder.kind == "orbax":
                text = "step %s is not looked at: plain Orbax saved it, and no Options(adopt=True)"
                _log.info(text, directory)
            elif told is None or told.why != folder.why:
                _log.warning("step %s cannot be restored: %s", directory, error)
            return error
        self.add(found)
        return None

    def forget(self, directory: str) -> None:
        """Drops a step directory that is gone or about to be, left behind or not."""
        super().forget(directory)
        self.left.pop(directory, None)

    def become(self, fresh: Ledger) -> None:
        """Takes over what was read anew."""
        super().become(fresh)
        self.left = fresh.left

    # What rollbacks have left behind where it cannot be renamed.

    def part(self) -> None:
        """Finds out which steps rollbacks have left behind, and which they have not after all.

        Names tell where there is a later generation: the earlier ones, and what rests on them.
        """
        known: dict[str, Entry | Folder] = {**self._entries, **self._folders}
        known |= self.left
        if not self.left and not any(map(names.branch_generation, known)):
            return
        steps = [
            name
            for name, each in known.items()
            if isinstance(each, Entry) or each.may_be_a_step
        ]
        entries = {n: each for n, each in known.items() if isinstance(each, Entry)}
        gone = names.superseded(steps)
        replaced = _replaced(gone, known)
        there = {n: each for n, each in entries.items() if n not in replaced}
        gone = with_dependents(gone - replaced.keys(), there) | replaced.keys()
        back = self.left.keys() - gone
        self.leave(gone - self.left.keys())
        for name in back:
            each = self.left.pop(name)
            if isinstance(each, Entry):
                self.add(each)
            else:
                self.note_folder(name, each)

    def leave(self, directories: Iterable[str]) -> None:
        """Notes that a save that is planned, or committed, leaves steps behind."""
        for name in directories:
            each = self._entries.get(name) or self._folders.get(name)
            if each is not None:
                self.forget(name)
                self.left[name] = each

    def replaced(self) -> list[str]:
        """Step directories that are there still, though other steps stand for them."""
        known = {**self._entries, **self._folders, **self.left}
        return sorted(_replaced(self.left, known))

    def standing(self, directory: str) -> str:
        """The step directory of a step, of whatever generation, by its plain name."""
        entries = self._derive().by_step.get(names.step_number(directory), ())
        found = [*(entry.directory for entry in entries), *self._folders]
        found = [name for name in found if names.plain(name) == directory]
        return max(found, key=names.branch_generation, default=directory)

    def hidden_by(self, directory: str) -> list[str]:
        """What was left behind and would be a step again without a step, dependents first."""
        left = {n: e for n, e in [*self.left.items()] if isinstance(e, Entry)}
        alike = {n for n in left if names.plain(n) == names.plain(directory)}
        found = map(left.__getitem__, with_dependents(alike, left))
        return [each.directory for each in sorted(found, key=order, reverse=True)]

    def begin(self, entry: Entry) -> None:
        """Notes a save that is being written."""
        self.add(entry)
        self.run = entry.run

    def settle(
        self,
        place: Place,
        uuid: str,
        committed: bool | None = None,
        manifest: Manifest | None = None,
    ) -> Entry | None:
        """Finds out whether the save that was being written is committed.

        Args:
            place: of the save.
            uuid: of the save.
            committed: whether it is known to be, though storage may not give out its manifest:
                then what it made superfluous is gone all the same. None: not known.
            manifest: of the save, if it was seen before.

        Returns:
            Its entry with its manifest, or None if it failed; a failed save is forgotten.
        """
        self.drop(place.directory)
        try:
            manifest = manifest or read_committed(
                place.root, place.directory, place.item
            )
        except (errors.CnrError, OSError) as error:
            # Not there, rather than damaged or out of reach.
            kind = getattr(error, "kind", None)
            gone = kind in _OF_ATTEMPTS
            self.let_go(uuid, committed or (committed is None and not gone))
            return None
        # An older step may stand where a failed save was to be.
        self.add(entry_of(place.directory, manifest))
        is_saved = manifest.uuid == uuid
        self.let_go(uuid, is_saved)
        if names.branch_generation(place.directory):
            self.part()
        # None if retention drops the very step that was saved.
        return self.entries.get(place.directory) if is_saved else None

    def let_go(self, uuid: str, superfluous: bool) -> None:
        """Drops steps that are deleted with a save, if it made them superfluous; or keeps them."""
        for directory in [d for d, save in self.doomed.items() if save == uuid]:
            if superfluous:
                self.leaving.add(directory)
                self.forget(directory)
            del self.doomed[directory]

    def doom(self, directory: str) -> None:
        """Notes that retention drops a step: at once, or with the commit of a save in flight."""
        # What is being written came last, and has no manifest.
        entries = reversed(self._entries.values())
        writing = next((e.uuid for e in entries if not e.is_committed), None)
        favoured = self.deciding or writing
        if favoured is None:
            self.forget(directory)
        else:
            self.doomed[directory] = favoured

    def checkpoints(self) -> list[str]:
        """Step directories that hold a checkpoint of this library or of Orbax.

        Unknown ones come first, then the known ones, newest first.
        """
        found = [name for name, each in self._folders.items() if each.is_checkpoint]
        unknown = sorted(found, reverse=True)
        return [*unknown, *(entry.directory for entry in reversed(self.committed()))]

    def others(self) -> tuple[str, ...]:
        """Checkpoints of the root that this does not know of, as they are named otherwise.

        Raises:
            OSError: if the root cannot be seen or listed.
        """
        return other_checkpoints(self.root, self.is_step) if self.root else ()

    def movable(self, directory: str) -> Entry:
        """The entry of a step directory that goes aside; made up where it is unreadable."""
        known = self.entries.get(directory) or self.left.get(directory)
        if isinstance(known, Entry):
            return known
        return Entry(
            directory=directory,
            step=names.step_number(directory),
            uuid=secrets.token_hex(16),
            generation=0,
            parent=None,
        )


def _side_by_side(
    look: Callable[[str], Entry | Exception], directories: Iterable[str]
) -> dict[str, Entry | Exception]:
    """What each step directory holds, where each look is a request."""
    found = sorted(directories)
    with ThreadPoolExecutor(_AT_ONCE, "cnr_look") as pool:
        return dict(zip(found, pool.map(look, found), strict=True))


def _replaced(
    steps: Iterable[str], known: Mapping[str, Entry | Folder]
) -> dict[str, Entry]:
    """Those of the step directories for which the newest of the same step stands.

    What rests on them rests on that one.

    Args:
        steps: names of step directories.
        known: all step directories.
    """
    newest: dict[str, str] = {}
    for name in sorted(known, key=names.branch_generation):
        each = known[name]
        if isinstance(each, Entry) or each.may_be_a_step:
            newest[names.plain(name)] = name
    found: dict[str, Entry] = {}
    for name in steps:
        each, above = known[name], known[newest.get(names.plain(name), name)]
        if isinstance(each, Entry) and isinstance(above, Entry) and each is not above:
            if above.answers_to(each.uuid):
                found[name] = each
    return found
