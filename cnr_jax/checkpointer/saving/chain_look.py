"""Checks that the chain of a save is still in the root, right before and right after its commit.

The look before the commit keeps a delta from being committed on a gap that can be seen by then.
The look after it runs in the background. Mostly the next save then knows of a gap already and is
full, rather than written in vain. And retention deletes no step in favour of one that is not whole.

In a store where each look is a request, the look before a commit takes the parent, which is the
first of the chain that another manager can delete, and one more step at random. The look after it
takes all steps that stay, but only if retention is about to delete some.
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
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.store import can
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.texts import logger

_log = logger(__name__)
# Kind of the error of a save whose chain has a gap.
_KIND = "chain_damaged"
# How many full checkpoints are looked at before one is deleted. The loss of so many at once does
# not go unseen.
_FULLS = 16


def is_dropped(error: BaseException | None) -> TypeGuard[errors.SaveError]:
    """Whether a save was not committed because its chain has a gap.

    Nothing failed in the save itself, and the next one is full. So a report tells of the error, and
    only a plain Orbax manager raises it.
    """
    return isinstance(error, errors.SaveError) and error.kind == _KIND


def kept_for(
    plan: SavePlan, ledger: Ledger
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The chain below a save, and the newest other full checkpoints of its branch."""
    below = plan.rests_on
    parent = ledger.entries.get(below.directory) if below else None
    chain = ledger.chain(parent) if parent else []
    fulls = [entry for entry in ledger.branch() if entry.stands_alone][-_FULLS:]
    own = {entry.uuid for entry in chain}
    return tuple(chain), tuple(e for e in reversed(fulls) if e.uuid not in own)


def chain_error(writer: RootWriter, flight: SaveInFlight) -> errors.SaveError | None:
    """Error because of which a save must not be committed: a gap in its chain; None without one."""
    chain = flight.chain
    if len(chain) > 2 and not can(flight.place.root).cheap_looks:
        # The random choice depends on the uuid, not on the step: the number of the step grows
        # together with the length of the chain.
        chain = chain[0], random.Random(flight.plan.uuid).choice(chain[1:])
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
    """Looks for gaps in a committed save and its chain; `RootWriter.note_gaps` notes them.

    Args:
        writer: writer of the root.
        flight: the save.
        leaving: steps that retention is about to delete.
        min_fulls: number of full checkpoints that are to stay.
        known: gaps that are known, and of which no warning is logged again.
    """
    if flight.manifest is None:
        return
    if not leaving and not can(flight.place.root).cheap_looks:
        return
    # Steps that retention has removed for earlier saves since this one was planned are not missing.
    with writer.looking:
        gone = _let_go(writer.ledger or Ledger(), flight.beside)
    beside = [e for e in flight.beside if e.step in leaving or e.uuid not in gone]
    # Full checkpoints that stay in place of one that goes, or that `min_fulls` counts.
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
    """Uuids of the entries that retention has removed, or is removing."""
    return {
        entry.uuid
        for entry in entries
        if entry.directory in ledger.doomed or entry.directory not in ledger.entries
    }
