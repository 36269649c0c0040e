"""Merged checkpoints that are written, and wait for who has claimed the root to commit them.

Whoever merges changes nothing that a reader sees: what it has written is no step until the writer
of the root commits it, between two saves. So a merge, a save, a rollback and retention never meet.
A merged checkpoint that comes too late, as what it stands for is gone by then, is removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest
from cnr_jax.repository.committer import Attempt, committer_for, offered
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.step import files_of, read_manifest, read_processes
from cnr_jax.repository.store import AnyPath, can, names_in, store_of
from cnr_jax.repository.store.checked import check_files, means_damage
from cnr_jax.repository.upkeep.claim import WritingLock
from cnr_jax.repository.upkeep.removal import Remover
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A merged checkpoint that waits to be committed.

    Attributes:
        attempt: that has written it.
        folder: of the root, that it lies in.
        manifest: of it.
    """

    attempt: Attempt
    folder: str
    manifest: Manifest

    @property
    def stands_for(self) -> str:
        """The uuid of the step in whose place it is to be."""
        return (self.manifest.stands_for or ("",))[0]


def merges_in(root: AnyPath) -> list[str]:
    """Folders of a root that merged checkpoints are written into; where none is renamed, steps too.

    Raises:
        OSError: if the root cannot be listed.
    """
    if can(root).renames:
        return sorted(n for n in names_in(root) if _is_unfinished(n))
    return sorted(store_of(root).folders_in(root, names.is_merged))


def _is_unfinished(name: str) -> bool:
    if names.kind_of_folder(name) != "unfinished":
        return False
    return names.is_merged(names.final_name(name))


def stood_for(ledger: Ledger, folder: str) -> Entry | None:
    """The step that what is written into a folder may stand for; None: it comes too late.

    The ledger may not know yet that it is committed.
    """
    directory = names.final_name(folder)
    found = ledger.entries.get(ledger.standing(names.plain(directory)))
    if found is None or found.stands_alone or found.directory in ledger.doomed:
        return None
    merged = names.merged(names.plain(found.directory), found.generation)
    return found if merged == directory else None


def offer_in(root: AnyPath, item: str, ledger: Ledger, folder: str) -> Offer | None:
    """What was merged into a folder, if it is whole and stands for a step of the root.

    Raises:
        CnrError: if it is damaged.
        OSError: if that cannot be seen.
    """
    above, found = stood_for(ledger, folder), offered(root, folder)
    if above is None or found is None or not found[1]:
        return None
    path = root / folder / item
    manifest = read_manifest(path)
    check_files(path, files_of(manifest, read_processes(path, manifest)).rows)
    offer = Offer(found[0], folder, manifest)
    return offer if offer.stands_for == above.uuid else None


class Offers:
    """Those of one root, as its writer knows them.

    Args:
        root: that is claimed.
        remover: of it; None: folders are not renamed there.
        check_claim: raises if somebody else has claimed it.
        on_merged: are told, on each process, of a step that stands for another from now on.

    Attributes:
        is_doubtful: whether the last one may be committed, though it was not seen to be.
    """

    def __init__(
        self,
        root: AnyPath,
        remover: Remover | None,
        check_claim: Callable[[], None],
        on_merged: Sequence[Callable[[Entry], None]],
    ) -> None:
        self._root, self._remover, self._on_merged = root, remover, on_merged
        self._committer = committer_for(root, self._discard, check_claim)
        self._found: tuple[Offer, ...] = ()
        # Of steps for which others stand: saves that may read them still.
        self._readers: dict[str, set[str]] = {}
        self.is_doubtful = False

    def _discard(self, folder: str) -> None:
        if self._remover is not None:
            self._remover.discard(folder)

    def look(self, item: str, ledger: Ledger) -> None:
        """Looks which there are, and removes what comes too late, or is not whole.

        Args:
            item: of the steps.
            ledger: of the root.
        """
        try:
            self._found = tuple(self._looked(item, ledger))
        except (errors.CnrError, OSError) as error:
            _log.warning("what was merged is looked at after the next save: %s", error)

    def _looked(self, item: str, ledger: Ledger) -> Iterator[Offer]:
        for folder in merges_in(self._root):
            told, above = offered(self._root, folder), stood_for(ledger, folder)
            if told is None or not told[1] or (above and not above.is_committed):
                continue  # it, or what it stands for, is being written
            offer, why = None, "what it stands for is gone"
            try:
                offer = offer_in(self._root, item, ledger, folder)
            except errors.CnrError as error:
                if not means_damage(error):
                    raise
                why = str(error)
            if offer is not None:
                yield offer
            else:
                _log.info("%s was merged in vain, and is removed: %s", folder, why)
                self._committer.abandon(told[0])

    def take(
        self, item: str, ledger: Ledger, writing: Collection[str]
    ) -> Sequence[Entry]:
        """Commits those that stand for steps still, durably, and takes them into the ledger.

        Args:
            item: of the steps.
            ledger: of the root.
            writing: uuids of saves that may read what they stand for.

        Returns:
            The merged steps.
        """
        taken: list[Entry] = []
        self.is_doubtful = False
        while self._found:
            offer, *rest = self._found
            self._found = tuple(rest)
            above, name = stood_for(ledger, offer.folder), offer.attempt.directory
            if (
                above is None
                or above.uuid != offer.stands_for
                or not above.is_committed
            ):
                continue  # the next look removes it
            self._readers[above.directory] = {*writing}
            try:
                self._committer.take(offer.attempt)
                self._committer.settle(offer.attempt)
                if (error := ledger.read(self._root, name, item)) is not None:
                    raise error
            except (errors.CnrError, OSError) as error:
                _log.warning("what was merged is not taken up: %s", error)
                self.is_doubtful = True
                continue
            ledger.part()
            _log.info("step %d was merged: %s stands for it", above.step, name)
            taken.append(ledger.entries[name])
        return taken

    def tell(self, entries: Iterable[Entry]) -> None:
        """Says which of some steps stand for others from now on."""
        for entry in entries:
            for tell in self._on_merged if entry.stands_for else ():
                tell(entry)

    def replaced(self, ledger: Ledger, uuid: str) -> list[str]:
        """Steps for which others stand, and that no save is reading any more.

        Args:
            ledger: of the root.
            uuid: of a save that is committed, as are all that began before it.
        """
        found = ledger.replaced()
        self._readers = {n: s for n, s in self._readers.items() if n in found}
        return [name for name in found if uuid not in self._readers.get(name, ())]

    def clear(self, ledger: Ledger) -> None:
        """Removes what merges that were killed have left.

        Where no lock tells whether one is under way, only what would come too late.

        Args:
            ledger: of the root.
        """
        lock = WritingLock(self._root, names.MERGING_LOCK)
        try:
            found = {name: offered(self._root, name) for name in merges_in(self._root)}
            left = {n: told for n, told in found.items() if not (told and told[1])}
            # Of most roots there is no such lock.
            is_alone = bool(left) and lock.acquire(0) and lock.is_proof
            for folder, told in left.items():
                if is_alone:
                    self._discard(folder)
                elif told is not None and stood_for(ledger, folder) is None:
                    self._committer.abandon(told[0])
        except (errors.CnrError, OSError) as error:
            _log.warning("what merges have left stays for now: %s", error)
        finally:
            lock.release()
