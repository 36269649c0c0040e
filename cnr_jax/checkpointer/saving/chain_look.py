"""Whether what a save rests on is still there: looked at right before and after its commit.

Right before, so that no delta is committed on a gap that could be seen then. After, in the
background, so that mostly the next save already knows of a gap and is full, rather than written in
vain; and so that nothing is deleted whose place is to be taken by what is not whole.

Where a look is a request, one step of the chain is looked at before each commit, any of them, and
all that stays after one in whose favour steps are deleted.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Set
from typing import TypeGuard

from cnr_jax import errors
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.format.names import step_number
from cnr_jax.repository.index.entries import Entry, entry_of
from cnr_jax.repository.index.gaps import Gap
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.planner import SavePlan
from cnr_jax.repository.store import can
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import logger

_log = logger(__name__)
# The kind of the error of a save that rests on what is not there.
_KIND = "chain_damaged"
# Full checkpoints that are looked at before one is deleted: so many are not lost at once unseen.
_FULLS = 16


def is_dropped(error: BaseException | None) -> TypeGuard[errors.SaveError]:
    """Whether a save was not committed because what it rests on is not there.

    Nothing failed in it, and the next one is full: it is told of in a report, and raised only by
    a plain manager of Orbax.
    """
    return isinstance(error, errors.SaveError) and error.kind == _KIND


def kept_for(
    plan: SavePlan, ledger: Ledger
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The chain that a save rests on, and the newest other full checkpoints of its branch."""
    parent = ledger.entries.get(plan.parent.directory) if plan.parent else None
    chain = ledger.chain(parent) if parent else []
    fulls = [entry for entry in ledger.branch() if entry.stands_alone][-_FULLS:]
    own = {entry.uuid for entry in chain}
    return tuple(chain), tuple(e for e in reversed(fulls) if e.uuid not in own)


def chain_error(writer: RootWriter, flight: SaveInFlight) -> errors.SaveError | None:
    """Why a save must not be committed: what it rests on is not there. None: it is."""
    chain = flight.chain
    if chain and not can(flight.place.root).cheap_looks:
        # By the uuid: numbers of steps and lengths of chains grow together.
        chain = (random.Random(flight.plan.uuid).choice(chain),)
    gaps = writer.gaps.look(flight.place, chain, dense=False)
    if not gaps:
        return None
    gap = gaps[0]
    return errors.SaveError(
        f"step {flight.step} is not committed: it rests on step"
        f" {step_number(gap.directory)}, which is not whole any more\n  {gap.text}\n"
        "  the next save is a full one, and contains its rows\n"
        f"  hint: find out what takes files from {os.fspath(flight.place.root)}, such as a"
        " program that cleans scratch space",
        kind=_KIND,
        problem=gap.text,
        path=gap.path,
        step=flight.step,
    )


def look_after(
    writer: RootWriter,
    flight: SaveInFlight,
    leaving: Collection[int],
    min_fulls: int,
    known: Set[Gap],
) -> None:
    """Looks at a committed save and what it rests on; `RootWriter.note_gaps` notes what is found.

    Args:
        writer: of the root.
        flight: the save.
        leaving: steps that retention is about to delete.
        min_fulls: full checkpoints that are to stay.
        known: gaps that need no further word.
    """
    if flight.manifest is None:
        return
    if not leaving and not can(flight.place.root).cheap_looks:
        return
    # But for what saves before it have let go of since it was planned, which is not missing.
    with writer.looking:
        gone = _let_go(writer.ledger or Ledger(), flight.beside)
    beside = [e for e in flight.beside if e.step in leaving or e.uuid not in gone]
    # What stays in the place of a full checkpoint that goes, or that `min_fulls` counts.
    stay = [entry for entry in beside if entry.step not in leaving]
    if len(stay) == len(beside):
        stay = stay[: min_fulls - 1]
    itself = entry_of(flight.place.directory, flight.manifest)
    found = writer.gaps.look(flight.place, (itself, *flight.chain, *stay))
    chain = {entry.directory for entry in flight.chain}
    for gap in found:
        if gap.directory == itself.directory or (
            gap.directory in chain and gap.harms_chain
        ):
            flight.harm = flight.harm or gap
        if gap in known:
            continue
        _log.warning(
            "step %d is not whole any more: %s; %s",
            step_number(gap.directory),
            gap.text,
            "no save rests on it from now on"
            if gap.harms_chain
            else "it does not restore, but what rests on it does",
        )


def _let_go(ledger: Ledger, entries: Collection[Entry]) -> set[str]:
    """The uuids of those that retention has removed, or is removing."""
    return {
        entry.uuid
        for entry in entries
        if entry.directory in ledger.doomed or entry.directory not in ledger.entries
    }
