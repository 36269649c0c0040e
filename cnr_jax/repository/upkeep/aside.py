"""Steps that are moved out of the way of a save, and moved back if it is not committed.

`index.rollback` decides which steps these are.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence

from cnr_jax import errors
from cnr_jax.format.names import (
    SUSPECTS,
    abandoned,
    abandoned_step,
    another_name,
    earlier_run,
    is_replacing,
    step_number,
)
from cnr_jax.repository.index import suspects
from cnr_jax.repository.index.entries import Entry
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.layout import Place, beside
from cnr_jax.repository.markers import is_committed
from cnr_jax.repository.orbax_steps import is_set_aside
from cnr_jax.repository.step import read_committed
from cnr_jax.repository.store import (
    AnyPath,
    can,
    is_named,
    names_in,
    store_of,
    sync_directory,
)
from cnr_jax.repository.upkeep.claim import Aside, Claim, WritingLock, read_writer
from cnr_jax.texts import count_of, logger

_log = logger(__name__)
# How often a claim is read again that another manager changes meanwhile.
_TRIES = 5


def names_aside(
    root: AnyPath, entries: Sequence[Entry], earlier: str
) -> tuple[tuple[str, str], ...]:
    """Names of what is to be moved aside, before and after, in the order of moving.

    Args:
        root: root that holds the steps.
        entries: steps in the order in which they are moved.
        earlier: folder of the root that the steps are moved into, together with what earlier
            rollbacks have moved aside. Empty: the steps stay in the root under other names.

    Raises:
        OptionError: if a step is a relative link, which would lead elsewhere once it is moved.
    """
    if not earlier:
        return tuple(
            (e.directory, abandoned(e.directory, e.generation, e.uuid)) for e in entries
        )
    for entry in entries:
        path = root / entry.directory
        if not store_of(path).is_link(path):
            continue
        leads = store_of(path).link_target(path)
        if not os.path.isabs(leads):
            raise errors.OptionError(
                f"step {entry.directory} cannot be moved aside for a new run:"
                f" {os.fspath(path)} is a relative link\n"
                f"  got {leads!r}, expected a folder, or a link with an absolute path\n"
                "  hint: save into another root, or put the folder itself in the place of"
                " the link"
            )
    own = [*(entry.directory for entry in entries), *beside(root)["abandoned"]]
    return tuple((name, f"{earlier}/{name}") for name in own)


def move_aside(root: AnyPath, aside: Aside, earlier: str) -> None:
    """Moves steps out of the way of a save, dependents first.

    Args:
        root: root that holds the steps.
        aside: what `names_aside` has found. The caller has noted it in the claim, so that the
            steps come back if the save fails.
        earlier: folder of the root that the steps are moved into, with a copy of the file that
            notes which steps may lack rows. Empty: the steps stay in the root.
    """
    store = store_of(root)
    if earlier:
        store.make_folder(root / earlier)
        sync_directory(root)
        suspects.copy(root, root / earlier)
    # A power cut may keep only some of these moves. The claim notes all, and `bring_back` undoes
    # each by itself.
    for name, now in aside.moved:
        store.move(root / name, root / now)
        if not earlier:
            _log.warning(
                "step %s, left behind as the run went back, makes way for the save of step %s:"
                " it is now %s, and goes when retention next lets go of a step of this run. To"
                " have it back, give that folder its name again, %s in the root, while no"
                " program saves there and no other folder has that name",
                name,
                aside.directory,
                os.fspath(root / now),
                name,
            )
    if earlier:
        _log.warning(
            "%d steps and folders of an earlier run make way for the new run, which begins with"
            " step %s: they are now in %s. Nothing is deleted: restore(directory=) and"
            " cnr_jax.verify read that folder",
            len(aside.moved),
            aside.directory,
            os.fspath(root / earlier),
        )
    if earlier:
        sync_directory(root / earlier)
    sync_directory(root)


def aside_of_run(
    root: AnyPath,
    item: str,
    ledger: Ledger,
    others: set[str],
    *,
    adopts: bool = False,
) -> list[str]:
    """Names of the steps that rollbacks of a run have set aside, newest first.

    In this order they can be removed, since newer ones may rest on older ones.

    Args:
        root: root that holds the steps.
        item: name of the item whose manifest tells the run of a step.
        ledger: ledger of the root. Its `run` is the one whose rollbacks are meant.
        others: names that are skipped, as they are known not to be of the run. The function adds
            names that it finds to be of another run, or cannot understand.
        adopts: whether adopted steps of plain Orbax count as steps of the run.

    Raises:
        OSError: if the root cannot be listed.
    """
    found: list[tuple[int, int, str]] = []
    for name, each in [*ledger.left.items()]:
        if isinstance(each, Entry) and (
            adopts if each.orbax else each.run == ledger.run
        ):
            found.append((each.generation, each.step, name))
        else:
            others.add(name)
    for name in beside(root)["abandoned"]:
        before = abandoned_step(name)
        if name in others or before is None:
            continue
        try:
            if adopts and is_set_aside(root / name, before, item):
                found.append((1, step_number(before), name))
                continue
            manifest = read_committed(root, name, item)
        except errors.CnrError:
            others.add(name)
        except OSError:
            pass  # storage may let it be read later
        else:
            if (manifest.run or "") == ledger.run:
                found.append((manifest.generation, manifest.step, name))
            else:
                others.add(name)
    return [name for *_, name in sorted(found, reverse=True)]


def clear_aside(
    place: Place,
    ledger: Ledger,
    remove: Callable[[str], None],
    others: set[str],
    *,
    adopts: bool,
) -> None:
    """Removes the steps that rollbacks of a run have set aside, until one cannot be removed.

    That one and the rest then stay, which a warning says.

    Args:
        place: the root, and the item that tells the run of a folder.
        ledger: see `aside_of_run`.
        remove: function that removes a directory of the root, given its name.
        others: see `aside_of_run`.
        adopts: see `aside_of_run`.
    """
    try:
        for name in aside_of_run(place.root, place.item, ledger, others, adopts=adopts):
            remove(name)
            _log.info("%s, which a rollback had set aside, is removed", name)
    except (errors.CnrError, OSError) as error:
        _log.warning("what rollbacks have set aside stays for now: %s", error)


def _is_committed(root: AnyPath, aside: Aside) -> bool:
    """Whether the save for which steps were moved aside is committed.

    If its manifest cannot be read, where it lies tells: where renames commit steps, nothing else
    gets its name, once a step that had it was moved aside.

    Raises:
        OSError: if storage gives no answer, which proves neither.
    """
    try:
        return read_committed(root, aside.directory, aside.item).uuid == aside.uuid
    except errors.CnrError:
        made_way = dict(aside.moved).get(aside.directory)
        return (
            can(root).renames
            and is_named(root / aside.directory)
            and (made_way is None or is_named(root / made_way))
        )


def check_is_here(root: AnyPath) -> None:
    """Checks, for a program that only reads, that the first save of a new run has moved no steps.

    Such a save moves all steps into a folder before it writes its own. Until it is committed, or
    the steps are back, the root holds only some of them, or none.

    Raises:
        NoStepError: if steps are away. The text says where they are, and what brings them back.
        OSError: if storage does not tell.
    """
    try:
        writer = read_writer(root)
    except PermissionError:
        return  # a user who may read the steps need not have the right to read the claim
    aside = writer.aside if writer is not None else None
    if writer is None or aside is None:
        return
    folder = root / earlier_run(aside.uuid)
    moved = [name for name, now in aside.moved if root / now == folder / name]
    away = [n for n in moved if _is_whole(folder / n) and not _is_whole(root / n)]
    if not away or _is_committed(root, aside):
        return
    state = {
        "alive": f"it may be under way, in {writer}",
        "dead": f"it was cut short, as its process has ended: {writer}",
        "unknown": f"it is under way, or was cut short: {writer}",
    }[writer.process.state()]
    held = count_of(len(away), "step or folder", "steps and folders")
    rest = "that folder can be read as a root"
    if len(away) < len(moved):
        rest = f"{len(moved) - len(away)} others are still here"
    raise errors.NoStepError(
        f"steps of {os.fspath(root)} are away: the save of step {aside.directory}, which"
        f" begins a new run, has moved {held}, and is not committed\n"
        f"  they are in {os.fspath(folder)}; {rest}\n"
        f"  {state}\n"
        "  hint: look again when it is over. After a kill a manager with tables brings them back"
        " when it is made; so do you by moving them to the root while no program saves there",
        kind="moved_aside",
        path=os.fspath(folder),
    )


def bring_back(root: AnyPath, aside: Aside) -> None:
    """Moves steps back, parents first, unless the save that they made way for is committed.

    Raises:
        OSError: if storage does not tell whether the save is committed, or a move fails.
    """
    if _is_committed(root, aside):
        return
    back: list[str] = []
    for name, now in reversed(aside.moved):
        if _is_whole(root / now) and not _is_whole(root / name):
            store_of(root).move(root / now, root / name)
            back.append(name)
        elif not can(root).renames and is_named(root / now):
            # The move aside was cut short while it copied, before it removed anything of the step.
            for error in store_of(root).remove_tree(root / now):
                raise error
    for folder in {now.rpartition("/")[0] for _, now in aside.moved} - {""}:
        # An error means that somebody has put something there, or that it was never made.
        with contextlib.suppress(OSError):
            _remove_if_empty(root / folder)
    if back:
        sync_directory(root)
        _log.warning(
            "%s back: %s, moved aside for a save that was not committed",
            count_of(len(back), "step"),
            ", ".join(back),
        )


def _is_whole(path: AnyPath) -> bool:
    """Whether a step is there; where files move one by one, with the file that moves last."""
    return is_named(path) if can(path).renames else is_committed(path)


def _remove_if_empty(folder: AnyPath) -> None:
    """Removes a folder that holds nothing but a copy of the note on suspect steps."""
    store, held = store_of(folder), names_in(folder)
    if all(name == SUSPECTS or is_replacing(name) for name in held):
        for name in held:
            store.remove_file(folder / name)
    store.remove_folder(folder)


def recover(root: AnyPath) -> None:
    """Brings back the steps that a killed save had moved aside, if surely nobody is writing.

    A manager that may save calls this when it starts. The call does not claim the root, and may be
    repeated. If the program has no right to write there, the steps stay where they are.

    Raises:
        OSError: if the claim cannot be read, or the steps cannot be moved back. The newest steps
            of the root may be among them, so the manager must not go on.
    """
    writer = read_writer(root)
    if writer is None or writer.aside is None:
        return
    lock = WritingLock(root)
    try:
        free = lock.acquire(0)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        _log.warning(
            "steps that a save has moved aside in %s, which was not committed, stay"
            " there: %s",
            os.fspath(root),
            error,
        )
        return
    try:
        writer = read_writer(root)  # it may have changed before the lock was taken
        if writer is None or writer.aside is None:
            return
        # Where there are no locks, a process that has not ended may be about to commit.
        if free and (lock.is_proof or writer.is_dead):
            bring_back(root, writer.aside)
        elif not _is_committed(root, writer.aside):
            _log.warning(
                "what a save has moved aside in %s stays there for now: that save may be under"
                " way, in %s",
                os.fspath(root),
                writer,
            )
    finally:
        lock.release()


def keep_away(root: AnyPath, directory: str, claim: Claim) -> None:
    """Keeps away what made way for a committed save, as the step of that is about to be removed.

    Without the step the save would look like one that was not committed, and `bring_back` would
    bring the others back. The manager that moved them may have been killed before its claim could
    forget them. Where folders can be renamed they get names that no claim has, which harms nobody
    who writes there; else the claim forgets them, in the name of whoever has it.

    Who may not read the claim cannot tell, and keeps nothing away.

    Args:
        root: root that holds the step.
        directory: name of the step's directory.
        claim: claim of the caller on the root, which need not be taken.

    Raises:
        WriterError: if other managers go on changing the claim.
        OSError: if storage does not tell, or it cannot be done.
    """
    for _ in range(_TRIES):
        try:
            aside = claim.aside if claim.is_taken else _noted(root)
        except PermissionError as error:
            # A user who may delete steps need not have the right to read the claim.
            _log.debug("who has the root is not known: %s", error)
            return
        if aside is None or aside.directory != directory:
            return
        if not _is_committed(root, aside):
            return
        if can(root).renames:
            _rename_again(root, aside)
            return
        if claim.forget(aside):
            return
    raise errors.WriterError(
        f"step {directory} stays: other managers go on changing the claim on {os.fspath(root)}\n"
        "  hint: delete it again when no program saves there"
    )


def _noted(root: AnyPath) -> Aside | None:
    writer = read_writer(root)
    return writer.aside if writer is not None else None


def _rename_again(root: AnyPath, aside: Aside) -> None:
    """Gives folders that were moved aside other names of the same form."""
    store = store_of(root)
    for name in dict.fromkeys(now.partition("/")[0] for _, now in aside.moved):
        if is_named(root / name):
            other = another_name(name)
            while is_named(root / other):
                other = another_name(other)
            store.move(root / name, root / other)
            _log.warning(
                "%s is now %s, as the step is removed that it made way for", name, other
            )
    sync_directory(root)
