"""How the processes of a run plan a save: what is known of the root comes first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost.channel import Channel
from cnr_jax.checkpointer.saving.agree import agree
from cnr_jax.checkpointer.saving.auto_bits import Widening
from cnr_jax.checkpointer.saving.lifecycle import LastSave
from cnr_jax.checkpointer.saving.served import Served
from cnr_jax.repository.lineage import suspects
from cnr_jax.repository.lineage.ledger import entry_of
from cnr_jax.repository.lineage.planner import Plan, Planner, Request


class Planning:
    """Makes one plan for all processes, after which all know the same steps.

    Process 0 finds out what became of the last save, claims the root, plans, and makes room;
    the others take over what it found.

    Args:
        channel: to the other processes.
        served: where saves go.
        last_save: is settled by each plan.
        planner: decides, on process 0.
        widening: puts the width of codes into the plan.
    """

    def __init__(
        self,
        channel: Channel,
        served: Served,
        last_save: LastSave,
        planner: Planner,
        widening: Widening,
    ) -> None:
        self._channel, self._served, self._last_save = channel, served, last_save
        self._planner, self._widening = planner, widening

    def refuse(self, obstacle: errors.CnrError) -> None:
        """Tells the other processes, which prepare a save, that this one does not."""
        if jax.process_count() > 1:
            with contextlib.suppress(errors.CnrError):
                self.agree(obstacle, {}, "", "", None)

    def agree(
        self,
        obstacle: errors.CnrError | None,
        dense: Mapping[str, Any],
        tracking: str,
        doubt: str,
        request: Request | None,
    ) -> Plan:
        """The plan of process 0, which first finds out what became of the last save.

        Args:
            obstacle: why this process cannot save, if it cannot.
            dense: of the state.
            tracking: how this process finds changed rows.
            doubt: why this process doubts its stamps; empty if it does not.
            request: what is asked for; None with an obstacle.

        Raises:
            CnrError: the same on all processes, if one has an obstacle or nothing can be
                planned.
        """
        step = request.step if request else None

        def decide(doubt: str) -> Plan:
            assert request is not None
            return self._decide(request, doubt)

        plan = agree(
            self._channel,
            obstacle,
            dense,
            tracking,
            doubt,
            decide,
            self._explain,
            step,
        )
        self._served.changed = False
        if jax.process_index() != 0:
            self._last_save.settle_as(plan.committed)
            self._served.know(plan.known)
        return plan

    def _explain(self, error: errors.CnrError) -> None:
        """Says in the error of an audit which steps may lack rows."""
        ledger, place = self._served.ledger, self._served.place
        if not isinstance(error, errors.AuditError) or not ledger or not place:
            return
        self._served.noted = True
        branch = self._planner.branches.get(error.lineage)
        clocks = dict(branch.parents) if branch else {}
        committed = ledger.committed()
        # Under a plain manager of Orbax the last save is settled by the next plan only.
        last, flight = ledger.pending, self._last_save.flight
        manifest = ledger.look(place.root, place.item) if last and flight else None
        if last and flight and manifest:
            entry = entry_of(last.directory, manifest)
            committed = [*committed, entry]
            committed = [e for e in committed if e.directory not in ledger.doomed]
            if flight.plan.lineage == error.lineage:
                clocks[entry.uuid] = flight.plan.clock
        suspects.explain(error, place.root, committed, clocks)

    def _decide(self, request: Request, doubt: str) -> Plan:
        committed = self._last_save.settle()
        if self._planner.run is None:
            # First: who claims a root ends the saves of the run that is at work there.
            self._planner.check_origin(self._served.look(), request.origin)
        # A plain manager of Orbax is making the folder of this save by now.
        own = None if self._last_save.managed else request.directory
        ledger = self._served.begin(own)
        asked = dataclasses.replace(request, doubt=doubt or self._last_save.doubt)
        plan = self._planner.plan(ledger, asked, committed)
        plan = self._widening.widened(plan)
        plan = dataclasses.replace(plan, changed=self._served.changed)
        # Before the others hear of the plan, and of an error here instead.
        self._served.move_aside(plan)
        return plan
