"""The ledger of a root: which checkpoints it holds, and which depend on which.

Every process reads it from the manifests at start, and saves keep it up to date, alike on all of
them. Retention asks the ledger what must be kept. The planner asks it which parents still exist.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
# Kinds of the error that reading a save raises if it is not committed.
_OF_ATTEMPTS = ("manifest_missing", "not_committed")
# Number of manifests that are read at the same time where each is a request.
_AT_ONCE = 16


class Ledger(Chains):
    """Step directories of one root by name, with their contents and chains.

    Args:
        is_step: tells whether a name is that of a step directory; None for `may_be_step`.
        adopts: whether steps of plain Orbax count as checkpoints, rather than as unreadable.
        says: whether the log says which step directories cannot be read.

    Attributes:
        root: root of the step directories; None until one was read.
        doomed: step directories to delete, each with the uuid of the save whose commit deletes it.
            The ledger knows them until `let_go`, since whoever removes them has to know what
            rests on what.
        deciding: uuid of the save for which retention is deciding. None means the save that is
            being written, if there is one.
        leaving: step directories that retention has dropped, and that may still exist.
        crowded: whether retention lets go of steps of the run, and so of those that its rollbacks
            have set aside.
        epoch: epoch of the claim when the root was read. It is empty if there was no catalogue;
            then a step that the ledger knows may be one that is being removed.
        run: run of the save that began last. Retention may drop steps of this run only. None if
            no save began.
        left: steps that are no steps of the root any more, by directory: rollbacks left them
            behind where they cannot be renamed, or another step stands for them.
        avoided: names of step directories that no save is to be written into.
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
        self.avoided: Collection[str] = ()

    @property
    def unknown(self) -> set[str]:
        """Unreadable folders that may be steps.

        Nothing older than these may be deleted, since they might depend on it.
        """
        return {name for name, each in self._folders.items() if each.may_be_a_step}

    @property
    def doubtful(self) -> set[str]:
        """Unreadable folders that storage may give out, or read, another time."""
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
            root: root that holds the step directories.
            item: name of the item in each of them.
            is_step: tells whether a name is that of a step directory; None for `may_be_step`.
            adopts: whether steps of plain Orbax count as checkpoints.

        Raises:
            OSError: if the root cannot be seen or listed.
        """
        ledger = cls(is_step, adopts=adopts)
        ledger.root = root
        if not exists(root):
            return ledger
        # With paths of Orbax, joining names would take longer than reading the files.
        plain = store_of(root).quick(root)
        held: list[str] | None = None
        with without_collections():
            for _ in range(TRIES):
                before, held = held, step_directories(plain, ledger.is_step)
                if held == before:
                    break  # storage lists some that are gone
                if ledger._read_all(plain, item, held):
                    break
        ledger.part()
        if is_step is None:
            ledger.note_strays()
        return ledger

    def _read_all(self, root: AnyPath, item: str, held: Sequence[str]) -> bool:
        """Reads the manifests of the listed step directories, and forgets all others.

        Returns:
            Whether all still exist. If one is gone, another one may have taken its place.
        """
        for directory in self.directories():
            self.forget(directory)

        def look(directory: str) -> Entry | Exception:
            return self._look(root, directory, item)

        # The epoch is read first: what is read after that holds as long as the epoch lasts.
        known = catalogue.read(root)
        self.epoch = known.epoch if known.item else ""
        # The catalogue does not list folders that plain Orbax may have saved.
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
        """Takes note of steps that other programs have put into the root or removed from it.

        Returns:
            Whether anything has changed.
        """
        found = step_directories(root, self.is_step, known=self.all_directories())
        self.leaving &= set(found)
        return self.match(root, item, [d for d in found if d not in self.leaving])

    def match(self, root: AnyPath, item: str, directories: Iterable[str]) -> bool:
        """Makes the ledger know exactly these step directories, and reads those that are new.

        It also reads those again that storage failed to give out before, since a save of this run
        may be among them. Saves that are being written stay known, wherever their folders are.

        Returns:
            Whether the ledger knew other step directories before, or less about them.
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
        """Reads the step directories again that storage did not give out.

        Args:
            root: root that holds the step directories.
            item: name of the item in each of them.
            newer_than: number of a step; only directories of higher ones are read.

        Returns:
            Error of the first that storage still does not give out; None if it gives out all.
        """
        withheld = [n for n, each in self._folders.items() if each.doubt == "withheld"]
        newer = [name for name in withheld if names.step_number(name) > newer_than]
        failed = [self.read(root, name, item) for name in sorted(newer)]
        return next((each for each in failed if isinstance(each, OSError)), None)

    def look_again(self, root: AnyPath, item: str, epoch: str) -> bool:
        """Reads all committed steps again under an epoch; for stores where looks are requests.

        Also those in `left`, which would be steps again if what left them behind is gone.

        Returns:
            Whether any is gone.
        """
        known = [*(entry.directory for entry in self.committed()), *self.left]
        found = _side_by_side(lambda name: self._look(root, name, item), known)
        for directory, each in found.items():
            self._note(root, directory, item, each)
        self.part()
        self.epoch = epoch
        return not {*known} <= self.all_directories()

    def directories(self) -> set[str]:
        """Names of all step directories that are known, readable or not."""
        return self.entries.keys() | self.folders.keys()

    def all_directories(self) -> set[str]:
        """Names of all step directories that are known, and of those in `left`."""
        return self.directories() | self.left.keys()

    def read(self, root: AnyPath, directory: str, item: str) -> Exception | None:
        """Reads a step directory, and replaces what was known of it; forgets it if it is deleted.

        Returns:
            The error with which it cannot be read; None if it was read, or is deleted.
        """
        return self._note(root, directory, item, self._look(root, directory, item))

    def doubt(self, root: AnyPath, directory: str, item: str, why: str) -> None:
        """Looks again at a step whose removal has failed, and lets no save rest on it.

        A request that takes its commit back may still be under way, so a look does not tell.
        """
        self.note_damage(f"{directory}/{item}/{names.MANIFEST}", why)
        self.read(root, directory, item)

    def _look(self, root: AnyPath, directory: str, item: str) -> Entry | Exception:
        """Entry of a step directory, or the error with which it cannot be read; notes nothing."""
        try:
            found = orbax_step(root, directory, item) if self.adopts else None
            entry = orbax_entry(directory, found) if found else None
            return entry or entry_of(directory, read_step(root, directory, item))
        except (errors.CnrError, OSError) as error:
            return error

    def _note(
        self, root: AnyPath, directory: str, item: str, found: Entry | Exception
    ) -> Exception | None:
        """Notes the entry or error that `_look` found; returns as `read` does."""
        told = self._folders.get(directory)
        self.forget(directory)
        if isinstance(found, Exception):
            if is_gone(root / directory):
                return None
            with contextlib.suppress(OSError):
                if what_is_in(root, directory) != "step":
                    return found  # its number is free
            if getattr(found, "kind", "") in _OF_ATTEMPTS and not can(root).renames:
                # The save may have been committed since `_look` read it.
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
        """Drops a step directory that is gone or about to be, also from `left`."""
        super().forget(directory)
        self.left.pop(directory, None)

    def become(self, fresh: Ledger) -> None:
        """Takes over what another ledger has read anew."""
        super().become(fresh)
        # What this manager has dropped may be there again: another one has saved it since.
        self.left, self.leaving, self.epoch = fresh.left, fresh.leaving, fresh.epoch

    # Steps that rollbacks have left behind where folders cannot be renamed.

    def part(self) -> None:
        """Finds out which steps rollbacks have left behind, and which are steps again.

        A name with a later generation leaves behind the earlier ones, and all that rests on them.
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
        """Moves steps to `left`, because a planned or committed save leaves them behind."""
        for name in directories:
            each = self._entries.get(name) or self._folders.get(name)
            if each is not None:
                self.forget(name)
                self.left[name] = each

    def replaced(self) -> list[str]:
        """Step directories that still exist, though other steps stand for them."""
        known = {**self._entries, **self._folders, **self.left}
        return sorted(_replaced(self.left, known))

    def standing(self, directory: str) -> str:
        """Step directory of the highest generation that has this plain name."""
        entries = self._derive().by_step.get(names.step_number(directory), ())
        found = [*(entry.directory for entry in entries), *self._folders]
        found = [name for name in found if names.plain(name) == directory]
        return max(found, key=names.branch_generation, default=directory)

    def hidden_by(self, directory: str) -> list[str]:
        """Directories in `left` that would be steps again without a step, dependents first."""
        left = {n: e for n, e in [*self.left.items()] if isinstance(e, Entry)}
        alike = {n for n in left if names.plain(n) == names.plain(directory)}
        found = map(left.__getitem__, with_dependents(alike, left))
        return [each.directory for each in sorted(found, key=order, reverse=True)]

    def begin(self, entry: Entry) -> None:
        """Notes a save that is being written."""
        self.add(entry)
        self.leaving.discard(entry.directory)  # the name is used again
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
            place: place of the save.
            uuid: uuid of the save.
            committed: whether it is known to be committed, None if that is not known. If it is,
                the steps it made superfluous go even if storage does not give out its manifest.
            manifest: manifest of the save, if it was read before.

        Returns:
            Its entry with its manifest, or None if it failed; a failed save is forgotten.
        """
        self.drop(place.directory)
        try:
            manifest = manifest or read_committed(
                place.root, place.directory, place.item
            )
        except (errors.CnrError, OSError) as error:
            # Gone means missing, rather than damaged or out of reach.
            kind = getattr(error, "kind", None)
            gone = kind in _OF_ATTEMPTS
            self.let_go(uuid, committed or (committed is None and not gone))
            return None
        # If the save failed, an older step may be in this directory.
        self.add(entry_of(place.directory, manifest))
        is_saved = manifest.uuid == uuid
        self.let_go(uuid, is_saved)
        if names.branch_generation(place.directory):
            self.part()
        # `get`, since retention may have dropped the very step that was saved.
        return self.entries.get(place.directory) if is_saved else None

    def let_go(self, uuid: str, superfluous: bool) -> None:
        """Drops the steps doomed for a save if it made them superfluous; else keeps them."""
        for directory in [d for d, save in self.doomed.items() if save == uuid]:
            if superfluous:
                self.leaving.add(directory)
                self.forget(directory)
            del self.doomed[directory]

    def doom(self, directory: str) -> None:
        """Notes that retention drops a step: at once, or with the commit of a save in flight."""
        # A save that is being written was added last, so it is found at once.
        entries = reversed(self._entries.values())
        writing = next((e.uuid for e in entries if not e.is_committed), None)
        favoured = self.deciding or writing
        if favoured is None:
            self.forget(directory)
        else:
            self.doomed[directory] = favoured

    def checkpoints(self) -> list[str]:
        """Step directories that hold a checkpoint of this library or of Orbax.

        Unreadable ones come first, then the readable ones, newest first.
        """
        found = [name for name, each in self._folders.items() if each.is_checkpoint]
        unknown = sorted(found, reverse=True)
        return [*unknown, *(entry.directory for entry in reversed(self.committed()))]

    def others(self) -> tuple[str, ...]:
        """Checkpoints of the root that the ledger leaves out because of their names.

        Raises:
            OSError: if the root cannot be seen or listed.
        """
        return other_checkpoints(self.root, self.is_step) if self.root else ()

    def movable(self, directory: str) -> Entry:
        """Entry of a step directory that is to be set aside; made up if it is unreadable."""
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
    """Looks at step directories in several threads, for stores where looks are requests."""
    found = sorted(directories)
    with ThreadPoolExecutor(_AT_ONCE, "cnr_look") as pool:
        return dict(zip(found, pool.map(look, found), strict=True))


def _replaced(
    steps: Iterable[str], known: Mapping[str, Entry | Folder]
) -> dict[str, Entry]:
    """Entries of the step directories for which the newest of the same name stands.

    Whatever rests on one of them then rests on that newest one.

    Args:
        steps: names of the step directories in question.
        known: all step directories by name.
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
