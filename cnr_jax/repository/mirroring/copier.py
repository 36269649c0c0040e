"""Copies of steps from one root into another: whole steps, under their own names, parents first.

A step is known by its uuid, whatever folder it is in. The copier claims the root that it writes to,
as a manager that saves there does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository.causes import as_root_errors
from cnr_jax.repository.committer import Attempt, committer_for
from cnr_jax.repository.index.entries import Entry, order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import Kept, children_first, kept_steps
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import Place, check_is_root
from cnr_jax.repository.mirroring.step_files import Meter, copy_files, mend_files
from cnr_jax.repository.step import is_same_step, read_manifest
from cnr_jax.repository.store import (
    AnyPath,
    can,
    digest_of,
    exists,
    read_all,
    store_of,
    sync_directory,
)
from cnr_jax.repository.upkeep.aside import clear_aside
from cnr_jax.repository.upkeep.claim import read_writer
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import logger

_log = logger(__name__)


class Copier:
    """Copier of steps from one root into another; it also mends steps that are there.

    Args:
        source: root that is only read.
        target: root that is written to. The copier claims it when something is to be written.
        is_step: function that says whether a name is that of a step; None: `names.may_be_step`.
        meter: meter that limits the bytes that are written; None: no limit.
        item: name of the item that holds the state; None: the copier finds it.
        writer: writer of the target, if it is claimed already; None: the copier makes its own.
        single: whether to skip the trial of the store's conditions, see `Options.single_writer`.

    Attributes:
        item: name of the item that holds the state; None as long as the source holds no step.
        writer: writer of the target.
    """

    def __init__(
        self,
        source: AnyPath,
        target: AnyPath,
        *,
        is_step: Callable[[str], bool] | None = None,
        meter: Meter | None = None,
        item: str | None = None,
        writer: RootWriter | None = None,
        single: bool = False,
    ) -> None:
        self._source, self._target, self._is_step = source, target, is_step
        self._meter = meter or Meter()
        self.item = item
        self._held: Ledger | None = None
        self._states: dict[str, object] = {}
        self._epoch = ""
        self._has_claimed = False
        self.writer = writer or RootWriter(lambda: True, single=single)
        if writer is None:
            self.writer.bind(target, is_step)

    def look(self) -> bool:
        """Reads which steps have come or gone in the source since the last look.

        Returns:
            Whether the source has steps of this library.

        Raises:
            UsedRootError: if the target holds another run.
            OSError: if a root cannot be read.
        """
        with as_root_errors(self._source, "read"):
            self.item = self.item or find_item(self._source)
            if self.item is None:
                return False
            self._held = self._look(self.item)
        self._check_run(self.writer.open(self._target, self.item))
        return True

    def _check_run(self, there: Ledger) -> None:
        """Checks that the target holds steps of the source's run, or no steps at all.

        Raises:
            UsedRootError: if it holds steps of other runs only.
        """
        runs = {entry.run for entry in there.committed() if not entry.orbax}
        newest = self.source.newest()
        if newest is not None and runs and newest.run not in runs:
            where = os.fspath(self._target)
            raise errors.UsedRootError(
                f"{where} holds steps of another run than {os.fspath(self._source)}\n"
                f"  got run {', '.join(sorted(runs)) or 'none'}, expected {newest.run}\n"
                "  hint: mirror to another folder, or move those steps out of it",
            )

    def _claim(self, own: str | None = None) -> None:
        """Claims the target; the first time only if no other run has come there since `look`.

        Args:
            own: as for `RootWriter.claim`.

        Raises:
            UsedRootError: if another run has come. The program that copies it goes on.
            OptionError: if the target is a step of another root.
            WriterError, OSError: as for `RootWriter.claim`.
        """
        if not self._has_claimed:
            check_is_root(self._target)
            self._check_run(self.writer.refreshed())
        self.writer.claim(own=own)
        if not self._has_claimed:
            try:
                self._check_run(self.writer.refreshed())
            except errors.UsedRootError:
                self.writer.withdraw()
                raise
            self._has_claimed = True

    def _look(self, item: str) -> Ledger:
        """Ledger of the source as it now is."""
        held, epoch = self._held, self._epoch
        self._epoch = self._epoch_of_source()
        if held is None or epoch != self._epoch:
            held = Ledger.load(self._source, item, self._is_step)
        else:
            held.refresh(self._source, item)
            for directory in sorted(held.directories()):
                # A rollback may have put another step in the place of this one.
                if self._states.get(directory) != self._state(directory):
                    held.read(self._source, directory, item)
        self._states = {each: self._state(each) for each in held.directories()}
        held.ask_again(self._source, item)
        held.take_back_unread()
        return held

    def _epoch_of_source(self) -> str:
        """Epoch of the source, which changes before a folder gets another step; for buckets.

        Empty where looks are cheap: there `_state` shows the change.
        """
        if can(self._source).cheap_looks:
            return ""
        writer = read_writer(self._source)
        return writer.epoch if writer is not None else ""

    def _state(self, directory: str) -> object:
        """State of a step's manifest file, which changes when the folder gets another step."""
        path = self._source / directory / str(self.item) / names.MANIFEST
        try:
            return store_of(path).state_of(path)
        except OSError:
            return None

    @property
    def source(self) -> Ledger:
        """Ledger of the source, as of the last look."""
        assert self._held is not None
        return self._held

    @property
    def there(self) -> Ledger:
        """Ledger of the target."""
        assert self.writer.ledger is not None
        return self.writer.ledger

    def has(self, entry: Entry) -> bool:
        """Whether the target holds a step, by the uuid in its manifest."""
        found = self.there.entries.get(entry.directory)
        return found is not None and found.uuid == entry.uuid

    def lacking(self, keep: int | None = None, min_fulls: int = 1) -> list[Entry]:
        """Steps of the newest run that the target lacks, in the order in which they are copied.

        Args:
            keep: how many of the newest steps `retire` leaves there: only steps that it would leave
                are copied. None: all are.
            min_fulls: see `retire`.
        """
        newest = self.source.newest()
        found = [
            entry
            for entry in self.source.restorable()
            if newest is not None and entry.run == newest.run and not entry.orbax
        ]
        if keep is not None:
            with _in_newest_run(self.source):
                kept = _kept(self.source, keep, min_fulls)
            stays = {*kept.wanted, *kept.fulls}
            found = [entry for entry in found if entry.step in stays]
        return self._parents_first(found)

    def _parents_first(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries and those that they rest on, parents first, without those of the target."""
        ordered = {
            each.directory: each
            for entry in entries
            for each in reversed(self.source.chain(entry))
        }
        return [entry for entry in ordered.values() if not self.has(entry)]

    def is_gone(self, entry: Entry) -> bool:
        """Whether a step is no longer in the source, or another step is in its place."""
        item = str(self.item)
        return not is_same_step(self._source, entry.directory, item, entry.uuid)

    def copy(self, entry: Entry) -> None:
        """Copies one step; the target must hold the steps that it rests on.

        Raises:
            CnrError: if a file of it is damaged, another manager or run has the target, or a folder
                there that must not make way has the step's name.
            OSError: if a root cannot be read or written.
            Stopped: if the meter is stopped.
        """
        item, writer = str(self.item), self.writer
        attempt = Attempt(self._target, entry.directory, entry.uuid)
        committer = committer_for(self._target, writer.discard, writer.check_claim)
        try:
            # `own`: files of the step that an earlier call has copied are no leftover.
            self._claim(own=entry.directory)
            if self.has(entry):
                # An earlier call has committed it, but did not hear so.
                self._note_copied(entry)
                return
            self._make_room(entry)
            committer.prepare(attempt, [])
            folder = committer.folder(attempt)
            copy_files(self._source / entry.directory, folder, self._meter)
            found = read_manifest(folder / item).uuid
            if found != entry.uuid:
                where = os.fspath(self._source / entry.directory)
                raise errors.IntegrityError(
                    f"{where} has become another step\n"
                    f"  got {found}, expected {entry.uuid}",
                    kind="file_changed",
                    path=where,
                )
            writer.check_claim()
            committer.publish(attempt, [])
            committer.settle(attempt)
            self.there.read(self._target, entry.directory, item)
            self._note_copied(entry)
        except (errors.CnrError, OSError) as error:
            writer.undo()  # the next call looks whether the copy is committed all the same
            # After other errors the files stay, and the next call copies the rest.
            if isinstance(error, errors.DAMAGE) or self.is_gone(entry):
                with contextlib.suppress(errors.CnrError, OSError):
                    committer.abandon(attempt)
            raise
        finally:
            writer.end_writing()

    def _note_copied(self, entry: Entry) -> None:
        """Notes a copy that is committed for the catalogue, and shows it to plain Orbax."""
        if (made := self.there.entries.get(entry.directory)) is not None:
            self.writer.note_own(made)
        self.writer.show(entry.directory, [*self.there.left])

    def copy_chain(self, entry: Entry) -> list[str]:
        """Copies a step and all that it rests on; returns the directories that were copied."""
        found = self._parents_first([entry])
        for each in found:
            self.copy(each)
        return [each.directory for each in found]

    def _make_room(self, entry: Entry) -> None:
        """Moves out of the way what has the name of a step in the target, and what rests on it.

        Raises:
            DependentsExistError: if that is neither a step of an older branch nor an unreadable
                copy of the step.
        """
        there, name = self.there, entry.directory
        found, folder = there.entries.get(name), there.folders.get(name)
        if found is None and folder is None:
            return
        is_older = found is not None and order(found)[0] < entry.generation
        if not (is_older or (found is None and self._may_hold(entry))):
            got = "a folder of somebody else"
            if found is not None:
                got = (
                    f"step {found.step} of {found.uuid}, generation {found.generation}"
                )
            raise errors.DependentsExistError(
                f"step {name} cannot be put into {os.fspath(self._target)}: its name is taken\n"
                f"  got {got}, expected {entry.uuid}, generation {entry.generation}\n"
                "  hint: move that folder away",
                kind="step_exists",
                path=os.fspath(self._target / name),
            )
        if found is None:
            self._remove(name)
            return
        for each in (*there.dependents(name), found):
            if can(self._target).renames:
                aside = names.abandoned(each.directory, each.generation, each.uuid)
                store_of(self._target).move(
                    self._target / each.directory, self._target / aside
                )
                sync_directory(self._target)
                there.forget(each.directory)
            else:
                self._remove(each.directory)

    def _may_hold(self, entry: Entry) -> bool:
        """Whether the target holds a step of the source, or an unreadable copy of it."""
        place, source, item = self._target, self._source, str(self.item)
        return may_hold(self.there, entry, place=place, source=source, item=item)

    def _remove(self, directory: str) -> None:
        remover = self.writer.remover
        try:
            remover.remove(directory, background=False)
        except (errors.CnrError, OSError) as error:
            if directory in remover.avoided:  # no copy may rest on what is left of it
                self.there.doubt(self._target, directory, str(self.item), str(error))
            raise
        self.there.forget(directory)

    def retire(self, keep: int, min_fulls: int = 1) -> list[int]:
        """Removes from the target all but its newest steps and those that these rest on.

        Args:
            keep: how many of the newest steps stay.
            min_fulls: how many full checkpoints of the newest branch stay.

        Returns:
            Numbers of the steps that were removed.

        Raises:
            OSError: if a step cannot be removed; it is there as before.
        """
        there = self.there
        if there.newest() is None:
            return []
        with _in_newest_run(there):
            found = _kept(there, keep, min_fulls)
        going = {
            entry.directory: entry.step
            for entry in there.committed()
            if entry.step not in found.reasons and not entry.orbax
        }
        if not going:
            return []
        try:
            self._claim()
            if found.crowded:
                place = Place(self._target, "", str(self.item))
                with _in_newest_run(there):
                    clear_aside(place, there, self._remove, set(), adopts=False)
            for directory in children_first(there, going):
                self._remove(directory)
        finally:
            self.writer.end_writing()
        return list(going.values())

    def needed(self) -> list[Entry]:
        """Steps of the source that the target lacks, but that its steps rest on; parents first."""
        named = {e.parent.uuid for e in self.there.entries.values() if e.parent}
        found = [entry for entry in self.source.committed() if entry.uuid in named]
        return self._parents_first(found)

    def mend(self, chain: Iterable[Entry]) -> list[str]:
        """Replaces files that are damaged or missing in the target by whole ones of the source.

        Args:
            chain: steps of the source, parents first.

        Returns:
            Paths of files that were mended, and of steps that were brought back.

        Raises:
            CnrError, OSError: if a file is damaged in both roots, or cannot be written.
        """
        mended = list[str]()
        for entry in chain:
            goal, name = self._target / entry.directory, entry.directory
            if name not in self.there.directories():
                self.copy(entry)
                mended.append(os.fspath(goal))
            elif self._may_hold(entry):
                try:
                    self._claim()
                    found = mend_files([goal, self._source / name], [goal])
                finally:
                    self.writer.end_writing()
                mended += map(os.fspath, found)
                self.there.read(self._target, name, str(self.item))
        return mended

    def close(self) -> None:
        """Frees the lock of the target; the claim stays, as that of a manager does."""
        self.writer.close()


@contextlib.contextmanager
def _in_newest_run(ledger: Ledger) -> Iterator[None]:
    """Gives a ledger the run of its newest step during the block: retention counts in a run.

    As long as it has no run, the ledger expects other programs to add and remove steps.
    """
    newest, before = ledger.newest(), ledger.run
    ledger.run = newest.run if newest is not None else None
    try:
        yield
    finally:
        ledger.run = before


def _kept(ledger: Ledger, keep: int, min_fulls: int) -> Kept:
    """Says which steps of its run stay in a root that keeps only its newest steps."""
    return kept_steps(
        ledger,
        {names.step_number(name) for name in ledger.directories()},
        lambda steps: steps[-keep:],
        min_fulls=min_fulls,
        because=f"it is one of the newest {keep}",
    )


def may_hold(
    held: Ledger, entry: Entry, *, place: AnyPath, source: AnyPath, item: str
) -> bool:
    """Whether a root holds a step, or in the step's folder a copy that cannot be read.

    A folder without a readable manifest counts as such a copy if the root holds other steps of the
    same run, or if the folder holds a process manifest whose digest the step names.

    Args:
        held: ledger of the root.
        entry: the step, as another root holds it.
        place: path of the root.
        source: path of the other root.
        item: name of the item of the step.
    """
    name = entry.directory
    found, folder = held.entries.get(name), held.folders.get(name)
    if found is not None:
        return found.uuid == entry.uuid
    if folder is None or not folder.is_checkpoint or folder.kind == "orbax":
        return False
    if any(each.run == entry.run for each in held.committed() if not each.orbax):
        return True
    try:
        manifest = entry.manifest or read_manifest(source / name / item)
        digests = [
            digest_of(each.path, read_all(place / name / item / each.path))
            for each in manifest.processes
            if exists(place / name / item / each.path)
        ]
    except (errors.CnrError, OSError):
        return False
    return any(each in manifest.processes for each in digests)
