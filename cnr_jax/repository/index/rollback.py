"""Rollback: where a run goes back to an older step, and which steps that leaves behind.

The first save after a rollback has a higher generation, so its branch is the newest. Steps of the
branch that was left stay where they are, except for those that are set aside: those in the place of
the save, all from its step on if the loop begins again from nothing, and the whole root if a new
run begins. This module decides which. `upkeep.aside` moves them, and moves them back if the save
fails. Where folders cannot be renamed, a step in the place of a save keeps its name, and the save
gets another one, whose commit leaves that step behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.integers import LARGEST
from cnr_jax.repository.index.entries import Entry, named, order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.store import can


def generation_of_next(ledger: Ledger, tip: Entry | None, nonce: str) -> int:
    """Generation of the next save: that of the head if the save goes on from it, else a higher one.

    If the save goes on from one that is being written, it is the generation of that one.

    Unreadable steps may be of the head's generation and newer, or each of a later one. The
    generation is above all of these, so that a restored branch stays the newest should they become
    readable again.

    Args:
        ledger: ledger of the root.
        tip: checkpoint that the save goes on from; None if none is known.
        nonce: digits that uuids of saves of this process begin with.

    Raises:
        SaveError: if the generation is larger than manifests can hold.
    """
    if tip is not None and not tip.is_committed:
        return tip.generation
    head = ledger.head()
    highest = head.generation if head is not None else 0
    unknown = sum(not each.is_foreign for each in ledger.folders.values())
    if head is not None and tip is not None and tip.uuid == head.uuid:
        if not unknown or tip.uuid.startswith(nonce):
            return head.generation
    # The name of a merged step may have a higher generation than its manifest.
    named = map(names.branch_generation, ledger.all_directories())
    highest = max([highest, *(each - unknown for each in named)])
    if highest + unknown >= LARGEST:
        raise errors.SaveError(
            "nothing can be saved here: no generation is left, and saves of this branch"
            f" could not be read\n  got generation {highest}, expected less than {LARGEST}\n"
            "  hint: save into another root; cnr_jax.verify(root) tells of its steps"
        )
    return highest + unknown + 1


def in_the_way(
    ledger: Ledger, tip: Entry | None, directory: str, generation: int, run: str
) -> list[Entry]:
    """Steps of a branch left behind that are in the place of a save, dependents first.

    Args:
        ledger: ledger of the root.
        tip: checkpoint that the save goes on from; None if none is known.
        directory: step directory in the place of the save, which need not exist.
        generation: generation of the save.
        run: run of the save.

    Raises:
        DependentsExistError: if that directory must stay: another program wrote it, or it belongs
            to another run or to this branch, or the restored chain needs it.
    """
    step = names.step_number(directory)
    folder = ledger.folders.get(directory)
    if folder is not None and folder.is_foreign:
        raise errors.DependentsExistError(
            f"step {step} cannot be saved: the folder {directory}"
            " holds something that cnr_jax did not write\n"
            "  hint: save into another root, or move that folder away",
            kind="step_exists",
        )
    if folder is not None:
        return [ledger.movable(directory)]
    entry = ledger.entries.get(directory)
    if entry is None:
        return []
    # A step that nobody can restore, say a delta copied here without its parent, is set aside.
    if not entry.is_of(run) and ledger.is_whole(entry):
        raise errors.DependentsExistError(
            f"step {step} cannot be saved: the folder {directory} holds"
            " a step of another run, which is left alone\n"
            f"  got run {entry.run or 'without an id'}, expected {run}\n"
            "  hint: save another step, save into another root, or delete that one",
            kind="step_exists",
        )
    if entry.generation >= generation:
        raise errors.DependentsExistError(
            f"step {step} was saved already, in the branch that goes on here",
            kind="step_exists",
        )
    dependents = ledger.dependents(directory)
    own = {e.uuid for e in ledger.chain(tip)} if tip else set[str]()
    kept = [e for e in (*dependents, entry) if e.uuid in own]
    if kept:
        raise errors.DependentsExistError(
            f"step {step} cannot be saved: the folder {directory}"
            f" is in use\n  it belongs to generation {entry.generation} and"
            f" {named(kept)} of the restored chain needs it\n"
            f"  hint: go on with a step number after {tip.step if tip else 0}"
        )
    return [*dependents, entry]


def room_for(
    ledger: Ledger,
    tip: Entry | None,
    directory: str,
    generation: int,
    run: str,
    left: Sequence[Entry],
) -> tuple[str, list[Entry]]:
    """Finds the step directory of a save, and the steps that it sets aside or leaves behind.

    Args:
        ledger: ledger of the root.
        tip: checkpoint that the save goes on from; None if none is known.
        directory: plain name of the step directory of the save.
        generation: generation of the save.
        run: run of the save.
        left: steps that are set aside because a new run begins.

    Raises:
        DependentsExistError: see `in_the_way`.
    """
    standing, found = ledger.standing(directory), [*left]
    if all(entry.directory != standing for entry in left):
        found += in_the_way(ledger, tip, standing, generation, run)
    if left:
        # Steps in `left` of the ledger would be steps again once those beside them are moved.
        return directory, [*found, *map(ledger.movable, [*ledger.left])]
    return _directory_of(ledger, directory, standing, generation), found


def _directory_of(
    ledger: Ledger, directory: str, standing: str, generation: int
) -> str:
    """Step directory of a save that moves none of the root: a branched name if need be."""
    root = ledger.root
    # Beside a step that a rollback left behind, a plain name would count as left behind too.
    is_left = standing != directory or directory in map(names.plain, [*ledger.left])
    is_there = standing in ledger.entries or standing in ledger.folders
    stays = root is not None and not can(root).renames
    is_taken = is_left or (is_there and stays) or directory in ledger.avoided
    return names.branched(directory, generation) if is_taken else directory


def from_step_on(ledger: Ledger, run: str | None, step: int) -> list[Entry]:
    """Steps of a run from `step` on, dependents first; none if the run has not got that far.

    Fresh touched rows at such a step come from a loop that begins again from nothing. For that
    loop, retention must not count these steps.
    """
    own = [entry for entry in ledger.committed() if entry.run == run]
    if not own or step > own[-1].step:
        return []
    found = {e.uuid: e for e in own if e.step >= step}
    for entry in [*found.values()]:
        found |= {e.uuid: e for e in ledger.dependents(entry.directory)}
    return sorted(found.values(), key=order, reverse=True)


def all_of_root(ledger: Ledger) -> list[Entry]:
    """All checkpoints of a root, dependents first, which a new run sets aside.

    Raises:
        OSError: if the root cannot be seen or listed.
    """
    there = [*ledger.others(), *ledger.checkpoints()]
    return [ledger.movable(name) for name in there]
