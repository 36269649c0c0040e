"""Choice of the step that a restore takes: steps are tried until one is whole.

A restore of a given step never takes another. A restore of the newest step passes over those that
turn out damaged, and over steps that rest on them; the log names each with the reason. A step that
is whole, but has a file that could be taken for a part of it, is not passed over: its error is
raised. A step that is deleted while it is read, as by retention of another program, does not count
as damaged. A step that is merged meanwhile, or rests on a merged one, is read again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from cnr_jax import errors
from cnr_jax.args import (
    DEFAULT_ITEM,
    asked_item,
    attempted_args,
    check_restores_state,
    in_item,
    out_of_item,
    reads_state,
    restore_args,
)
from cnr_jax.checkpointer.listing import Listing
from cnr_jax.checkpointer.multihost import Channel, agree, all_succeed, on_primary
from cnr_jax.checkpointer.orbax_compat.interrupts import end_interrupted_tasks
from cnr_jax.checkpointer.orbax_compat.items import Items
from cnr_jax.checkpointer.orbax_compat.places import ExactPath
from cnr_jax.checkpointer.orbax_compat.steps import Steps
from cnr_jax.checkpointer.restoring.restore import Attempt
from cnr_jax.format import names
from cnr_jax.repository.index import suspects
from cnr_jax.repository.index.entries import Entry, order
from cnr_jax.repository.index.folders import naming_hint
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.items import find_item
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.orbax_steps import way_on
from cnr_jax.repository.step import TRIES, deleted_step, is_same_step
from cnr_jax.repository.store import AnyPath, asking_once, can, exists, names_in
from cnr_jax.repository.store.checked import UNKNOWN, UNREAD
from cnr_jax.repository.upkeep.aside import check_is_here
from cnr_jax.texts import logger

_log = logger(__name__)
_SHOWN = 10


def restore(
    step: int | None,
    args: Any,
    directory: epath.PathLike | None,
    *,
    steps: Steps,
    items: Items,
    listing: Listing,
    channel: Channel,
    resume: Callable[[Any], None],
    mend: Callable[[str], bool],
) -> tuple[int, Any, str]:
    """Restores a step, on all processes alike.

    Args:
        step: number of the step; None: the newest that is whole.
        args: arguments of the restore.
        directory: another root to restore from.
        steps: steps of the manager's root.
        items: items of a step, and how each is read.
        listing: listing of the manager's steps.
        channel: channel to the other processes.
        resume: function that goes on saving from the restored step.
        mend: function that mends a step of the manager's root, given by its folder, if it can, and
            returns whether it did. Called on process 0.

    Returns:
        The number of the step, the restored items, and the name of the state's item.

    Raises:
        CnrError: see `CheckpointManager.restore`.
    """
    elsewhere = _other_root(directory, step, listing, channel)
    root, item = elsewhere or steps.root, listing.item
    if elsewhere or item is None:
        # Another root may have another name for the state's item, and so may the arguments.
        item = all_succeed(channel, lambda: find_item(root)) or item
    asked, item = asked_item(args, listing.item, item), item or DEFAULT_ITEM
    args = restore_args(args, asked)

    def ledger() -> Ledger:
        return listing.ledger_of(root, item) if elsewhere else listing.ledger

    chooser = StepChooser(root, item, ledger, None if elsewhere else mend)
    if step is None:
        all_succeed(channel, lambda: chooser.ledger)
    elif elsewhere is None:
        on_primary(channel, lambda: listing.check_exists(step))
    tried, gone = list[int](), 0
    while True:
        taken = chooser.choose(channel) if step is None else step
        name, uuid = _find(steps, taken, root), chooser.uuid_of(taken)
        if not name and elsewhere is None:
            listing.check_is_found(taken)
        elif name:
            _check_asked(args, asked, root / name / item)
        attempt = Attempt(passed_over=tuple(tried))
        try:
            find = functools.partial(listing.find_state, root, taken, item)
            folder = functools.partial(steps.find_directory, taken, root)
            own = elsewhere is None
            restored = _attempt(args, asked, find, attempt, folder, own, items, channel)
            break
        except Exception as error:
            # All processes hear of damage that one of them meets, but not of its other errors.
            is_told = isinstance(error, errors.DAMAGE) or jax.process_count() == 1
            became = functools.partial(chooser.became, taken, name, uuid)
            if is_told and (now := on_primary(channel, became)):
                gone += 1
                if gone == TRIES or (step is not None and now == "deleted"):
                    raise deleted_step(root, taken) from error
                all_succeed(channel, chooser.look_again)
                if elsewhere is None:
                    all_succeed(channel, steps.reload)
                continue
            if not isinstance(error, errors.DAMAGE):
                raise
            if chooser.mend_for_all(name, channel):
                continue
            # Nothing of such a step is damaged. Passed over, it would make way for other steps.
            is_whole = error.kind == UNKNOWN
            (chooser.explain if is_whole else chooser.note)(taken, error)
            if is_whole or step is not None:
                raise
            tried.append(taken)
            _log.debug("step %d cannot be restored", taken, exc_info=error)
    if attempt.resumption is not None:
        resume(attempt.resumption)
    chooser.warn(taken, asked_for=step is not None)
    return taken, restored, asked


def _other_root(
    directory: epath.PathLike | None,
    step: int | None,
    listing: Listing,
    channel: Channel,
) -> epath.Path | None:
    """The root to restore from, if it is not the manager's, checked to hold the step; else None."""
    if directory is None:
        return None
    root = ExactPath(open_root(directory))
    all_succeed(channel, lambda: listing.check_holds(root, step))
    return root


def _check_asked(args: Any, asked: str, held: AnyPath) -> None:
    """Checks that a state of ours is not asked for with arguments of another handler.

    Raises:
        OptionError: if it is.
        OSError: if storage does not say whether the state is one of ours.
    """
    if not reads_state(args, asked) and exists(held / names.MANIFEST):
        check_restores_state(args, asked)


@asking_once()
def _attempt(
    args: Any,
    item: str,
    find_state: Callable[[], str],
    attempt: Attempt,
    find_folder: Callable[[], epath.Path],
    is_own: bool,
    items: Items,
    channel: Channel,
) -> Any:
    """Restores a step, whose state may have another name than `item`, the one in the arguments."""
    reads = reads_state(args, item)
    try:
        held = find_state() if reads else item
        args = attempted_args(args, attempt)
        if held == item:
            return items.restore(find_folder(), args, is_own=is_own)
        found = items.restore_named(find_folder(), in_item(args, item, held))
        return out_of_item(found, args, item, held)
    except BaseException as error:
        # The other processes wait for the outcome of this one.
        if reads and not attempt.is_told:
            agree(channel, error, named=True)
        raise
    finally:
        end_interrupted_tasks()


def _find(steps: Steps, step: int, root: epath.Path) -> str:
    """Name of the directory of a step; empty if there is none."""
    try:
        return steps.find_directory(step, root).name
    except ValueError:
        return ""


class StepChooser:
    """Chooses the step that a restore takes, and explains the ones that are passed over.

    Args:
        root: root with the step directories.
        item: name of the item in them.
        ledger: function that reads the ledger of the root when it is first needed; damage that is
            found is noted in that ledger.
        mend: function that mends a step, given by its folder, if it can, and returns whether it
            did. None: no step can be mended.
    """

    def __init__(
        self,
        root: AnyPath,
        item: str,
        ledger: Callable[[], Ledger],
        mend: Callable[[str], bool] | None,
    ) -> None:
        self._root, self._item, self._read = root, item, ledger
        self._mend, self._mended = mend, {""}
        self._has_asked_again = False

    @functools.cached_property
    def ledger(self) -> Ledger:
        """Ledger of the root, read when it is first needed."""
        return self._read()

    def uuid_of(self, step: int) -> str | None:
        """Uuid of a step's checkpoint, as far as it is known without reading; else None."""
        known = self.__dict__.get("ledger")
        entry = known.by_step(step) if known is not None else None
        return entry.uuid if entry is not None and entry.known else None

    def became(self, step: int, directory: str, uuid: str | None) -> str:
        """Finds out what became of a step while it was read.

        Args:
            step: number of the step.
            directory: name of its directory.
            uuid: uuid of its checkpoint; None: not known.

        Returns:
            `"replaced"` if another directory has taken the place of its own, or of one that it
            rests on; `"deleted"` if it is gone; empty if it is there.
        """
        entry = self.ledger.by_step(step)
        chain = [each.directory for each in self.ledger.chain(entry)] if entry else []
        held = {*names_in(self._root)}
        for name in {directory, *chain} - held:
            if any(names.plain(each) == names.plain(name) for each in held):
                return "replaced"
        is_there = is_same_step(self._root, directory, self._item, uuid)
        return "" if is_there else "deleted"

    def look_again(self) -> None:
        """Looks for steps that have come or gone since the root was read."""
        ledger = self.ledger
        if not can(self._root).cheap_looks:
            # Some buckets list folders for minutes after the last object in them has gone.
            ledger.look_again(self._root, self._item, ledger.epoch)
        ledger.refresh(self._root, self._item)

    def choose(self, channel: Channel) -> int:
        """Chooses the newest step on process 0 for all processes; see `newest`."""
        taken, mended = on_primary(channel, self.newest)
        self.ledger.take_back(mended)
        return taken

    def newest(self) -> tuple[int, list[str]]:
        """Newest step that is not known to be damaged, or that could be mended.

        Returns:
            The number of the step, and the directories that were mended: whoever noted damage of
            these has to take it back.

        Raises:
            NoStepError: if there is none.
            OSError: if storage withholds a step, and no newer one is known.
        """
        ledger = self.ledger
        newest = entry.step if (entry := ledger.newest()) else -1
        if error := ledger.ask_again(self._root, self._item, newer_than=newest):
            raise error
        mended = self._mend_newer()
        ledger.take_back(mended)
        if ledger.newest() is None and not self._has_asked_again:
            self._has_asked_again = True
            ledger.take_back_unread()
        if (entry := ledger.newest()) is not None:
            return entry.step, mended
        check_is_here(self._root)
        hint = naming_hint(self._root, ledger.is_step)
        hint = hint or way_on(self._root, adopts=ledger.adopts)
        raise errors.NoStepError.nothing_restores(
            os.fspath(self._root), ledger.obstacles(), hint
        )

    def _mend_newer(self) -> list[str]:
        """Mends the newest step that would be passed over for damage that was found before.

        The damage was found by `verify`, for example, or by a restore while the mirror was away.

        Returns:
            The directories of the step and its chain; none if no step was mended.
        """
        ledger, newest = self.ledger, self.ledger.newest()
        for entry in reversed(ledger.committed()):
            if newest is not None and order(entry) <= order(newest):
                break
            if any(ledger.harm_of(each) for each in ledger.chain(entry)):
                if mended := self.mend(entry.directory):
                    return mended
        return []

    def mend_for_all(self, directory: str, channel: Channel) -> bool:
        """Tries once to mend a damaged step, on process 0; returns whether that did anything."""
        mended = on_primary(channel, lambda: self.mend(directory))
        if mended:
            self.ledger.take_back(mended)
        return bool(mended)

    def mend(self, directory: str) -> list[str]:
        """Tries once to mend a damaged step; returns the directories of its chain if it did."""
        is_first = directory not in self._mended
        self._mended.add(directory)
        if not is_first or self._mend is None or not self._mend(directory):
            return []
        entry = self.ledger.entries.get(directory)
        chain = self.ledger.chain(entry) if entry else []
        return [directory, *(each.directory for each in chain)]

    def note(self, step: int, error: errors.CnrError) -> None:
        """Notes that a step is damaged, and adds to its error what is known of the root.

        Args:
            step: number of the step that could not be restored.
            error: its error, one of `errors.DAMAGE`. The chain of the step, and the steps that
                could be restored instead, are added to it.
        """
        ledger, reason = self.ledger, str(error).partition("\n")[0]
        entry = ledger.by_step(step)
        # The damage is noted at its path, and if that does not rule the step out, at the step too.
        above = os.fspath(self._root).rstrip("/") + "/"
        if error.path is not None and error.path.startswith(above):
            path, unread = error.path.removeprefix(above), error.kind == UNREAD
            ledger.note_damage(path, reason, unread=unread)
        if entry and entry.directory in {e.directory for e in ledger.restorable()}:
            ledger.note_damage(entry.directory, reason)
        self.explain(step, error)

    def warn(self, step: int, *, asked_for: bool) -> None:
        """Logs warnings about a restored step: which were passed over, and which rows it may lack.

        Args:
            step: number of the restored step.
            asked_for: whether it was asked for by its number; if not, newer steps that were
                passed over are named too.
        """
        for directory, reason in [] if asked_for else self.ledger.obstacles():
            taken = self.ledger.by_step(step)
            entry = self.ledger.entries.get(directory)
            if taken is None:
                is_newer = True
            elif entry is None:
                is_newer = names.step_number(directory) > step
            else:
                is_newer = order(entry) > order(taken)
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

    def explain(self, step: int, error: errors.CnrError) -> None:
        """Adds to an error the chain of its step, and the steps that can be restored instead."""
        entry: Entry | None = self.ledger.by_step(step)
        text = str(error)
        if "cannot be restored" not in text.partition("\n")[0]:
            text = f"checkpoint {step} cannot be restored: {text}"
        if entry is not None and "\n  chain: " not in text:
            chain = reversed(self.ledger.chain(entry))
            kinds = [f"{e.directory} ({e.kind})" for e in chain]
            text += f"\n  chain: {' <- '.join(kinds)}"
        text = text.replace(", or restore another step", "")
        restorable = reversed(self.ledger.restorable())
        others = [str(each.step) for each in restorable if each is not entry]
        if others:
            more = f"; also {', '.join(others[1:_SHOWN])}" if others[1:] else ""
            text += (
                f"\n  hint: restore step {others[0]}, the newest without known damage"
                f"{more}"
            )
        else:
            text += "\n  no other step can be restored"
        error.args = (text,)
