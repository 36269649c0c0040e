"""A restore by a manager: steps are tried until one is whole, then saving goes on from it.

A restore of a given step never substitutes. One of the newest step passes over those that turn
out damaged, and over what rests on them: each is named in the log with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from etils import epath

from cnr_jax import errors
from cnr_jax.args import DEFAULT_ITEM, attempted_args, reads_state, restore_args
from cnr_jax.checkpointer.listing import Listing
from cnr_jax.checkpointer.multihost import Channel, agree, all_succeed, on_primary
from cnr_jax.checkpointer.orbax_compat.places import ExactPath
from cnr_jax.checkpointer.orbax_compat.seams import OrbaxSeams, end_interrupted_tasks
from cnr_jax.checkpointer.restoring.read import ReadBack
from cnr_jax.checkpointer.saving.check import table_entries
from cnr_jax.checkpointer.saving.in_flight import Lifecycle
from cnr_jax.checkpointer.tracking.tracker import Tracker
from cnr_jax.format import names
from cnr_jax.format.manifest import TableEntry
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.layout import Place, find_item, open_root
from cnr_jax.repository.lineage import suspects
from cnr_jax.repository.lineage.entries import Entry, entry_of
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Planner
from cnr_jax.repository.lineage.runs import note_restored
from cnr_jax.repository.replay.leaves import restored_stamps
from cnr_jax.repository.step import read_step
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.touched import Touched, lineage_hex

_log = logging.getLogger(__name__)
_SHOWN = 10


def restore(
    step: int | None,
    args: Any,
    directory: epath.PathLike | None,
    *,
    orbax: OrbaxSeams,
    listing: Listing,
    channel: Channel,
    resume: Callable[[Resumption], None],
) -> tuple[int, Any]:
    """Restores a step, on all processes alike.

    Args:
        step: what to restore; None: the newest that is whole.
        args: what is asked for.
        directory: another root to restore from.
        orbax: carries it out.
        listing: of the manager's steps.
        channel: to the other processes.
        resume: goes on saving from what was restored.

    Returns:
        The step that was taken, and what was restored.

    Raises:
        CnrError: see `CheckpointManager.restore`.
    """
    item, elsewhere = listing.item, None
    args = restore_args(args, item)
    if directory is not None:
        elsewhere = ExactPath(open_root(directory))
        all_succeed(channel, lambda: listing.check_holds(elsewhere, step))
    root = elsewhere or orbax.root
    item = item or all_succeed(channel, lambda: find_item(root)) or DEFAULT_ITEM

    def ledger() -> Ledger:
        return listing.ledger_of(root, item) if elsewhere else listing.ledger

    chooser = StepChooser(root, item, ledger)
    if step is None:
        all_succeed(channel, lambda: chooser.ledger)
    elif elsewhere is None:
        on_primary(channel, lambda: listing.check_exists(step))
    while True:
        taken = on_primary(channel, chooser.newest) if step is None else step
        try:
            restored = _attempt(
                taken, args, elsewhere, root, orbax, listing, channel, resume
            )
            break
        except errors.DAMAGE as error:
            chooser.note(taken, error)
            if step is not None:
                raise
            _log.debug("step %d cannot be restored", taken, exc_info=error)
    chooser.warn(taken, asked_for=step is not None)
    return taken, restored


def _attempt(
    step: int,
    args: Any,
    elsewhere: epath.Path | None,
    root: epath.Path,
    orbax: OrbaxSeams,
    listing: Listing,
    channel: Channel,
    resume: Callable[[Resumption], None],
) -> Any:
    """Restores a step, and goes on from it if all that was asked for has succeeded."""
    reads, attempt = reads_state(args, listing.item), Attempt()
    try:
        if reads:
            listing.check_ours(root, step)
        args = attempted_args(args, attempt)
        restored = orbax.restore(step, elsewhere, args)
    except BaseException as error:
        # The other processes wait for what this one has to say.
        if reads and not attempt.is_told:
            agree(channel, error, named=True)
        raise
    finally:
        end_interrupted_tasks()
    if attempt.resumption is not None:
        resume(attempt.resumption)
    return restored


class StepChooser:
    """Which step of a root a restore takes, and what is said of those that are passed over.

    Args:
        root: holds the step directories.
        item: name of the item in them.
        ledger: reads what is known of them, when that is needed first; what it returns is told
            of the damage that is found.
    """

    def __init__(self, root: AnyPath, item: str, ledger: Callable[[], Ledger]) -> None:
        self._root, self._item, self._read = root, item, ledger

    @functools.cached_property
    def ledger(self) -> Ledger:
        """What is known of the steps."""
        return self._read()

    def newest(self) -> int:
        """The newest step of which no damage is known.

        Raises:
            NoStepError: if there is none.
            OSError: if none is known that is newer than one that storage does not give out.
        """
        ledger = self.ledger
        restorable = ledger.restorable()
        newest = restorable[-1].step if restorable else -1
        for directory in sorted(ledger.withheld):
            if names.step_number(directory) > newest:
                ledger.read(self._root, directory, self._item)
                if directory in ledger.withheld:
                    read_step(self._root, directory, self._item)
        restorable = ledger.restorable()
        if restorable:
            return restorable[-1].step
        lines = [f"no step in {os.fspath(self._root)} can be restored"]
        lines += [f"{name}: {why}" for name, why in self._obstacles()[:_SHOWN]]
        raise errors.NoStepError("\n  ".join(lines))

    def note(self, step: int, error: errors.CnrError) -> None:
        """Notes that a step is damaged; adds to the error what only the root tells.

        Args:
            step: that could not be restored.
            error: why; one of `errors.DAMAGE`. It gets the chain of the step, and the steps
                that could be restored instead.
        """
        ledger, reason = self.ledger, str(error).partition("\n")[0]
        entry = ledger.by_step(step)
        # Where the damage is, or else with the step itself.
        above = os.fspath(self._root).rstrip("/") + "/"
        if error.path is not None and error.path.startswith(above):
            ledger.note_damage(error.path.removeprefix(above), reason)
        if entry and entry.directory in {e.directory for e in ledger.restorable()}:
            ledger.note_damage(entry.directory, reason)
        self._explain(step, entry, error)

    def warn(self, step: int, *, asked_for: bool) -> None:
        """Says in the log what is to be known of a step that was restored.

        Args:
            step: the one.
            asked_for: by its number; else also newer ones are named, which were passed over.
        """
        for directory, reason in [] if asked_for else self._obstacles():
            taken = self.ledger.by_step(step)
            entry = self.ledger.entries.get(directory)
            if taken is None:
                is_newer = True
            elif entry is None:
                is_newer = names.step_number(directory) > step
            else:
                is_newer = entry.order > taken.order
            if is_newer:
                _log.warning(
                    "step %s is passed over, and step %d restored: %s",
                    directory,
                    step,
                    reason,
                )
        noted = suspects.read(self._root)
        if step in [each.step for each in noted] or (noted and not asked_for):
            suspects.warn(noted, self._root, self.ledger, step)

    def _explain(self, step: int, entry: Entry | None, error: errors.CnrError) -> None:
        """Adds to an error what only the root tells: the chain, and other steps."""
        text = str(error)
        if "cannot be restored" not in text.partition("\n")[0]:
            text = f"checkpoint {step} cannot be restored: {text}"
        if entry is not None and "\n  chain: " not in text:
            chain = reversed(self.ledger.chain(entry))
            kinds = [
                f"{e.directory} ({'delta' if e.parent else 'full'})" for e in chain
            ]
            text += f"\n  chain: {' <- '.join(kinds)}"
        text = text.replace(", or restore another step", "")
        others = [str(each.step) for each in reversed(self.ledger.restorable())]
        if others:
            more = f"; also {', '.join(others[1:_SHOWN])}" if others[1:] else ""
            text += (
                f"\n  hint: restore step {others[0]}, the newest of which no damage is"
                f" known{more}"
            )
        else:
            text += "\n  no other step can be restored"
        error.args = (text,)

    def _obstacles(self) -> list[tuple[str, str]]:
        """Every step directory that cannot be restored, newest first, and why."""
        ledger = self.ledger
        good = {entry.directory for entry in ledger.restorable()}
        bad = [e for e in reversed(ledger.committed()) if e.directory not in good]
        found = [(entry.directory, ledger.obstacle(entry)) for entry in bad]
        unreadable = sorted(ledger.unreadable, key=names.step_number, reverse=True)
        for name in unreadable:
            found.append((name, ledger.unreadable[name].partition("\n")[0]))
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Resumption:
    """What was restored, and what saving goes on from.

    Attributes:
        place: what was restored.
        found: what was read of it.
        ledger: of its root, if saves are to go there from now on.
        touched: the fresh touched rows that go with the restored state.
    """

    place: Place
    found: ReadBack
    ledger: Ledger | None
    touched: Touched


@dataclasses.dataclass(slots=True)
class Attempt:
    """A restore by a manager, perhaps of other items too; it counts as a whole, or not at all.

    Attributes:
        is_told: the processes tell each other how it went, or have done so.
        resumption: to go on from once all that was asked for has succeeded.
    """

    is_told: bool = False
    resumption: Resumption | None = None


def resume(
    resumption: Resumption,
    *,
    writer: RootWriter,
    lifecycle: Lifecycle,
    planner: Planner,
    tracker: Tracker,
    tables: tuple[TableEntry, ...],
) -> None:
    """Goes on saving from what was restored: its fresh lineage rests on the steps of its chain.

    Args:
        resumption: all of it has succeeded, on all processes.
        writer: where saves go; after the first restore perhaps where that came from.
        lifecycle: is settled before anything is noted.
        planner: is told what later saves may rest on.
        tracker: is told which rows are as they were restored.
        tables: that are saved, in whatever order; empty: nothing is.
    """
    place, found, touched = resumption.place, resumption.found, resumption.touched
    chain, lineage = found.chain, lineage_hex(touched)
    manifest = chain[-1].manifest
    note_restored(place.root, lineage, manifest.run or "")
    if resumption.ledger is not None and writer.place is None:
        writer.serve(place.root, place.item, resumption.ledger)
    lifecycle.settle()  # Orbax has waited for the save in flight
    # Nothing is a legal parent until all that makes it one is known.
    planner.end_lineages(manifest.restores + 1)
    tracker.forget(touched, manifest.tracking)
    if not writer.is_at(place.root, place.item):
        return  # restored from elsewhere: no parent here
    restored = {entry.name: entry for entry in table_entries(found.tables)}
    exact = found.wanted.exact and restored == {entry.name: entry for entry in tables}
    # What was found by other means may be more, or less, than will be.
    ways = {manifest.tracking, tracker.mode(touched)}
    exact = exact and (len(ways) == 1 or "fingerprint" not in ways)
    if exact:
        tracker.restored(
            found.tables,
            found.arrays,
            touched,
            lambda rows: restored_stamps(
                chain, rows.table, found.wanted.targets[rows.table], rows.rows
            ),
        )
    entries = [entry_of(r.directory.parent.name, r.manifest) for r in chain]
    planner.restored(lineage, entries, exact=exact)
