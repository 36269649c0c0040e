"""What a restore means for the saves after it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from cnr_jax.checkpointer.multihost.agreement import settle
from cnr_jax.checkpointer.multihost.channel import Channel
from cnr_jax.checkpointer.orbax_compat import end_interrupted_tasks
from cnr_jax.checkpointer.restoring.read import ReadBack
from cnr_jax.checkpointer.saving import capture
from cnr_jax.checkpointer.saving.lifecycle import LastSave
from cnr_jax.checkpointer.tracking.tracker import Tracker
from cnr_jax.repository.files import is_local
from cnr_jax.repository.layout import Place
from cnr_jax.repository.lineage.entries import entry_of
from cnr_jax.repository.lineage.ledger import Ledger
from cnr_jax.repository.lineage.planner import Planner
from cnr_jax.repository.replay.leaves import restored_stamps
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.mesh import outside_mesh
from cnr_jax.rows.touched import Touched, lineage_hex
from cnr_jax.state.table import Tables

# Of all restores of this process: a state may be restored by one manager and saved by another.
# By lineage, the root and the run of the step that was restored; the oldest go first.
_restored_runs: dict[str, tuple[str, str]] = {}
_REMEMBERED = 1024


def run_restored(root: Any, lineage: str) -> str | None:
    """The run of the step of a root that was restored with touched rows of this lineage.

    None if it was not restored from there in this process. Empty where the step names no run.
    """
    known = _restored_runs.get(lineage)
    return known[1] if known is not None and known[0] == _real(root) else None


def _note_run(root: Any, touched: Touched, run: str) -> None:
    _restored_runs[lineage_hex(touched)] = _real(root), run
    while len(_restored_runs) > _REMEMBERED:
        del _restored_runs[next(iter(_restored_runs))]


def _real(root: Any) -> str:
    return os.path.realpath(root) if is_local(root) else str(root)


@dataclasses.dataclass(slots=True)
class Attempt:
    """A restore under way.

    Attributes:
        told: the processes tell each other how it went, or have done so.
        note: notes what it means for later saves.
    """

    told: bool = False
    note: Callable[[], None] | None = None


class Resuming:
    """Goes on saving from what was restored.

    A restore counts as a whole, or not at all: what it means is noted once all that was asked
    for has succeeded on all processes, and an error before changes nothing.

    Args:
        channel: to the other processes.
        served: where saves go; after the first restore perhaps where that came from.
        last_save: is settled before anything is noted.
        planner: is told what later saves may rest on.
        tracker: is told which rows are as they were restored.
        tables: that are saved; None: nothing is.
    """

    def __init__(
        self,
        channel: Channel,
        served: RootWriter,
        last_save: LastSave,
        planner: Planner,
        tracker: Tracker,
        tables: Tables | None,
    ) -> None:
        self._channel, self._served, self._last_save = channel, served, last_save
        self._planner, self._tracker, self._tables = planner, tracker, tables
        self._attempt: Attempt | None = None

    @contextlib.contextmanager
    def attempt(self, *, reads: bool) -> Iterator[None]:
        """A restore by a manager, perhaps of other items too.

        What it means for later saves is noted at the end, once all of it has succeeded. A
        failure changes nothing here, and is not kept from other processes, which wait for
        what this one has to say.

        Args:
            reads: whether this handler's item is among those that are restored.
        """
        attempt = self._attempt = Attempt()
        try:
            yield
        except BaseException as error:
            if reads and not attempt.told:
                settle(self._channel, error, named=True)
            raise
        finally:
            self._attempt = None
            end_interrupted_tasks()
        if attempt.note is not None:
            with outside_mesh():
                attempt.note()

    def begin(self) -> None:
        """From here on the processes tell each other how the restore went."""
        if self._attempt is not None:
            self._attempt.told = True

    def succeeded(
        self, place: Place, found: ReadBack, ledger: Ledger | None, touched: Touched
    ) -> None:
        """Notes a restore; where it is part of an attempt, once that has succeeded.

        Args:
            place: what was restored.
            found: what was read of it.
            ledger: of its root, if saves are to go there from now on.
            touched: the fresh touched rows that go with the restored state.
        """
        note = functools.partial(self._note, place, found, ledger, touched)
        if self._attempt is None:
            note()
        else:
            self._attempt.note = note

    def _note(
        self,
        place: Place,
        found: ReadBack,
        ledger: Ledger | None,
        touched: Touched,
    ) -> None:
        """Remembers what the fresh lineage rests on, where this handler goes on saving."""
        chain = found.chain
        _note_run(place.root, touched, chain[-1].manifest.run or "")
        if ledger is not None and self._served.place is None:
            self._served.serve(place.root, place.item, ledger)
        self._last_save.settle()  # Orbax has waited for the save in flight
        # Nothing is a legal parent until all that makes it one is known.
        self._planner.end_lineages(chain[-1].manifest.restores + 1)
        self._tracker.forget(touched)
        self._tracker.adopt(chain[-1].manifest.tracking)
        if not self._served.is_at(place.root, place.item):
            return  # restored from elsewhere: no parent here
        exact = found.wanted.exact and self._has(found.tables)
        # What was found by other means may be more, or less, than will be.
        ways = {chain[-1].manifest.tracking, self._tracker.mode(touched)}
        exact = exact and (len(ways) == 1 or "fingerprint" not in ways)
        if exact:
            self._tracker.restored(
                found.tables,
                found.arrays,
                touched,
                lambda rows: restored_stamps(
                    chain, rows.table, found.wanted.targets[rows.table], rows.rows
                ),
            )
        entries = [entry_of(r.directory.parent.name, r.manifest) for r in chain]
        self._planner.restored(lineage_hex(touched), entries, exact=exact)

    def _has(self, tables: Tables) -> bool:
        """Whether these are the tables that are saved, in whatever order."""
        own, others = (
            {entry.name: entry for entry in capture.table_entries(each or Tables({}))}
            for each in (self._tables, tables)
        )
        return own == others
