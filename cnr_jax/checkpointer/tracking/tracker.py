"""Tracker of changed rows: recorded, by fingerprints, or both.

Two sources of stamps answer one question: which rows does a save on top of a parent hold? Recorded
stamps travel with the state, and their lineage ties them to parents. Fingerprint stamps are kept
here, and hold for whatever state is saved next.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from cnr_jax.checkpointer.tracking.audit import unrecorded_error
from cnr_jax.format.manifest import DenseLeaf, Tracking
from cnr_jax.options import Options
from cnr_jax.rows.fingerprints.rotation import Glimpse, Rotation, stamps_of
from cnr_jax.rows.fingerprints.watch import Differing, Look, RowWatch
from cnr_jax.rows.gather.host import Chosen, touched_positions
from cnr_jax.rows.gather.motion import FollowedRows
from cnr_jax.rows.shards import Shards, Tiling, local_shards, spot_of
from cnr_jax.rows.tiling import Arrays, Group, Rows, placing
from cnr_jax.rows.touched import (
    CLOCK_LIMIT,
    Touched,
    clock_of,
    lineage_hex,
    stamp_sharding,
)
from cnr_jax.state.table import Tables
from cnr_jax.texts import logger

_log = logger(__name__)


class Moment(NamedTuple):
    """Lineage of stamps, and its clock at one time."""

    lineage: str
    clock: int


_NEVER = Moment("", -1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRows:
    """A state that is to be saved, and what was found out about its rows.

    Attributes:
        mode: how rows that changed are found.
        shards: what this process saves of the tables.
        dense: dense leaves of the state, each as the manifest describes it, with its value.
        stamps: lineage and clock of the stamps that choose rows; the lineage is empty if
            fingerprints make their first stamps.
        touched: lineage and clock of the touched rows given with the state, used or not; None:
            there are none.
        look: look at all rows; None: none was needed.
        glimpse: look at some rows; None: none was needed.
        doubt: why a delta might miss rows: an audit that was due could not be made, or the clock
            has stopped; empty otherwise.
        secs: seconds that the look, or glimpse, took.
        wait_secs: seconds in which the train step was waited for.
    """

    mode: Tracking
    shards: Shards
    dense: Sequence[tuple[DenseLeaf, Any]]
    stamps: Moment
    touched: Moment | None
    look: Look | None
    glimpse: Glimpse | None
    doubt: str
    secs: float
    wait_secs: float

    @property
    def recorded(self) -> Moment | None:
        """Lineage and clock of touched rows that are used; None in fingerprint mode."""
        return None if self.mode == "fingerprint" else self.touched


class Tracker:
    """Finds changed rows for one handler.

    Args:
        options: options of the run.

    Attributes:
        followed: some rows of the tables, as they were when the run began or was restored; None:
            nothing was saved or restored yet.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tiling: Tiling | None = None
        # Shardings of the leaves and stamps that the tiling is for, in order.
        self._shardings: list[Sharding] = []
        self.followed: FollowedRows | None = None
        self._mode: Tracking | None = None
        self._watch: RowWatch | None = None
        # Lineage and newest clock of the stamps that fingerprints made.
        self._prints = _NEVER
        # Remembered rows of a recorded run, and lineage and clock of its last save.
        self._rotation: Rotation | None = None
        self._last: Moment | None = None
        self._is_of_restored = False
        # Lineage and clock of the touched rows that the last restore returned.
        self._given = _NEVER
        self._has_said_unused = False

    def mode(self, touched: Touched | None) -> Tracking:
        """Mode of tracking: that of the options, else as before, else what `touched` suggests."""
        asked = self._options.tracking or self._mode
        return asked or ("fingerprint" if touched is None else "recorded")

    def find(
        self,
        state: Any,
        touched: Touched | None,
        tables: Tables,
        arrays: Arrays,
        dense: Sequence[tuple[DenseLeaf, Any]] = (),
    ) -> ChangedRows:
        """Looks for changed rows; changes nothing here: `keep` does.

        Args:
            state: state that is to be saved.
            touched: touched rows that go with it; needed unless the mode is fingerprint.
            tables: tables of the state.
            arrays: leaves of the tables.
            dense: all other leaves of the state, as the manifest describes them.

        Raises:
            AuditError: if a row changed that was not recorded.
            TableError: if no process holds both rows and their stamps.
        """
        mode = self.mode(touched)
        started = time.perf_counter()
        if touched is not None and mode != "fingerprint":
            touched.clock.block_until_ready()  # the next line reads it
        wait_secs = time.perf_counter() - started
        given = moment_of(touched)
        recorded = None if mode == "fingerprint" else given
        if recorded is None and touched is not None:
            self._say_unused(given)
        stamps = touched.stamps if touched is not None and recorded else None
        tiling = self._tiling_of(tables, arrays, stamps)
        shards = Shards(tiling, arrays, stamps)
        look, glimpse, doubt, secs = None, None, "", 0.0
        if mode != "recorded" or self._audits(recorded):
            started = time.perf_counter()
            jax.block_until_ready(arrays)  # the train step is not to be counted
            wait_secs += time.perf_counter() - started
            started = time.perf_counter()
            if mode == "recorded":
                glimpse = self._glimpse(shards, recorded)
            else:
                look = self._watching(mode).look(shards)
            if recorded is not None:
                doubt = self._doubt(look, glimpse, recorded)
                if not doubt:
                    assert touched is not None
                    self._audit(look, glimpse, state, shards, touched, tables)
            secs = time.perf_counter() - started
        chosen_by = Moment(self._prints.lineage, self._prints.clock + 1)
        if self.by_fingerprints(mode):
            doubt = ""
        elif recorded is not None:
            chosen_by = recorded
            if recorded.clock >= CLOCK_LIMIT:
                doubt = "the clock of the stamps has reached its limit"
        return ChangedRows(
            mode=mode,
            shards=shards,
            dense=dense,
            stamps=chosen_by,
            touched=given,
            look=look,
            glimpse=glimpse,
            doubt=doubt,
            secs=secs,
            wait_secs=wait_secs,
        )

    def _say_unused(self, given: Moment | None) -> None:
        """Warns once that touched rows are not used, unless the options ask for that.

        There is no warning for touched rows of a restore in which nobody has recorded: each restore
        returns some, and a program may hand on both values that it was given.
        """
        if self._options.tracking is not None or self._has_said_unused:
            return
        if given != self._given:
            self._has_said_unused = True
            _log.warning(
                "the touched rows of Save(state, touched) are not used: this run finds rows"
                " that changed by fingerprints, %s."
                " To use them from now on, restore with a manager of"
                " Options(tracking='recorded'); else leave them out of Save and record out"
                " of the train step",
                "as the one that was restored"
                if self._is_of_restored
                else "because its first save had no touched rows",
            )

    def by_fingerprints(self, mode: Tracking) -> bool:
        """Whether fingerprints choose the rows of a save; else all recorded rows are saved.

        In an audited run they choose only recorded rows: if any other row changed, no save is made.
        """
        return mode == "fingerprint" or self._options.drop_unchanged

    def _watching(self, mode: Tracking) -> RowWatch:
        if self._watch is None:
            self._watch = RowWatch(
                stamped=self.by_fingerprints(mode), tagged=mode != "fingerprint"
            )
        return self._watch

    def _audits(self, recorded: Moment | None) -> bool:
        """Whether a recorded run audits some rows; past the limit of clocks all saves are full."""
        assert recorded is not None
        return self._options.audit_bytes > 0 and recorded.clock < CLOCK_LIMIT

    def _tiling_of(
        self,
        tables: Tables,
        arrays: Arrays,
        stamps: Mapping[str, jax.Array] | None,
    ) -> Tiling:
        """Tiling of this process's part; rows are cut as the stamps are sharded, or would be.

        It is the same object as long as tables and stamps are sharded in the same way.
        """
        found = [x.sharding for leaves in arrays.values() for x in leaves.values()]
        found += [x.sharding for x in (stamps or {}).values()]
        if self._tiling is None or found != self._shardings:
            shardings = {
                t: {n: x.sharding for n, x in arrays[t].items()} for t in arrays
            }
            of_stamps = {
                name: stamps[name].sharding
                if stamps is not None
                else stamp_sharding(shardings[name][table.leaf.name], table.leaf.shape)
                for name, table in tables.items()
            }
            way = placing(self._options.staging)
            self._tiling = Tiling(tables, shardings, of_stamps, way)
            self._shardings = found
        return self._tiling

    def _glimpse(self, shards: Shards, recorded: Moment | None) -> Glimpse:
        if self._rotation is None:
            self._rotation = Rotation(self._options.audit_bytes)
        last = self._last
        assert recorded is not None
        # What was seen in another lineage, or at a later clock, says nothing about these rows.
        known = last is not None and last.lineage == recorded.lineage
        anew = last is None or not known or last.clock > recorded.clock
        return self._rotation.look(shards, anew=anew)

    def _doubt(
        self, look: Look | None, glimpse: Glimpse | None, recorded: Moment
    ) -> str:
        """Reason why rows cannot be compared with what they were; empty if they can.

        Such a save must be full: the rows recorded since the save before are not known to be all
        that changed. The next save is audited again.
        """
        last = self._last
        if last is None or last.lineage != recorded.lineage:
            return "the save before was of other touched rows, so no audit was possible"
        if last.clock > recorded.clock:
            return "the touched rows went back, so no audit was possible"
        if last.clock >= CLOCK_LIMIT:
            return "the clock of the touched rows has stopped, so no audit was possible"
        anew = glimpse.anew if glimpse is not None else False
        if anew or (look is not None and look.changed.keys() != look.seen.keys()):
            return "tables were sharded in another way before, so no audit was possible"
        return ""

    def _audit(
        self,
        look: Look | None,
        glimpse: Glimpse | None,
        state: Any,
        shards: Shards,
        touched: Touched,
        tables: Tables,
    ) -> None:
        """Checks that the rows that differ from what they were have been recorded since.

        Raises:
            AuditError: if a row has not.
        """
        assert self._last is not None
        if glimpse is not None:
            differing = glimpse.differing
        else:
            assert look is not None and self._watch is not None
            differing = self._watch.differing(look, self._last.clock)
        # A row that differs since a clock is recorded if its stamp is later than that.
        missed = [
            np.flatnonzero(stamps_of(shards, found) <= found.since)
            for found in differing
        ]
        if not any(map(len, missed)):
            return
        # What the error needs, by group: only a save that is refused pays for it.
        of_groups: dict[Group, Differing] = {}
        missed_of: dict[Group, np.ndarray] = {}
        for found, which in zip(differing, missed, strict=True):
            for group, (alone, some) in found.by_group().items():
                of_groups[group] = alone
                mine = which[(which >= some.start) & (which < some.stop)] - some.start
                if len(mine):
                    missed_of[group] = mine

        def written(rows: Rows) -> np.ndarray:
            stamps = touched.stamps[rows.table]
            spot = spot_of(stamps.sharding, stamps.shape, rows.rows)
            shard = np.asarray(local_shards(stamps)[spot.shard])
            return shard[rows.rows[0] - spot.first : rows.rows[1] - spot.first]

        raise unrecorded_error(
            tables,
            of_groups,
            missed_of,
            written,
            self._last.lineage,
            state,
            recorded=clock_of(touched) > self._last.clock,
        )

    def keep(self, found: ChangedRows, stamps: Moment) -> None:
        """Notes that a save was decided: what was found is known from now on.

        Args:
            found: result of `find`, with nothing kept since.
            stamps: `found.stamps`, as all processes agreed on it.
        """
        self._mode = found.mode
        if self.by_fingerprints(found.mode):
            self._prints = stamps
        if found.look is not None and self._watch is not None:
            self._watch.keep(found.look, stamps.clock)
        if found.glimpse is not None and self._rotation is not None:
            assert found.recorded is not None
            self._rotation.keep(found.glimpse, found.recorded.clock)
        if found.recorded is not None:
            self._last = found.recorded
        followed, tiling = self.followed, found.shards.tiling
        if followed is None or not followed.are_of(tiling, stamps.lineage):
            self.followed = FollowedRows(tiling, stamps.lineage)

    def choose(self, found: ChangedRows, parent_clock: int | None) -> Chosen:
        """Chooses the rows of a save on a parent.

        Args:
            found: changed rows of this save, after `keep`.
            parent_clock: clock of the stamps at the parent; None chooses all rows.
        """
        tiling = found.shards.tiling
        if parent_clock is None:
            return Chosen(tiling, [None] * len(tiling.ranges))
        if not self.by_fingerprints(found.mode):
            return Chosen(tiling, touched_positions(found.shards, parent_clock))
        # At equal clocks nothing would be chosen, whatever has changed.
        watch = self._watch
        assert watch is not None and found.stamps.clock > parent_clock
        return Chosen(
            tiling, [watch.positions(rows, parent_clock) for rows in tiling.ranges]
        )

    def close(self) -> None:
        """Frees the hashes of rows, which would stay on their devices until a collection."""
        self._watch, self._rotation, self._last = None, None, None
        self.followed = None

    def forget(self, touched: Touched, mode: Tracking | None) -> None:
        """Forgets all rows, because the state was replaced by one that was restored.

        Args:
            touched: touched rows of that state; fingerprints go on in its lineage.
            mode: mode of its run, in which this one goes on unless options give another; None: its
                run has none.
        """
        self.close()
        # Later than the clocks of all parents in this lineage, so that a save that knows no rows
        # chooses all.
        self._prints = self._given = _moment(touched)
        if self._mode is None:
            self._is_of_restored = mode is not None
        self._mode = self._mode or mode

    def restored(
        self,
        tables: Tables,
        arrays: Arrays,
        touched: Touched,
        stamps: Callable[[Rows], np.ndarray],
    ) -> None:
        """Goes on, after `forget`, from a restored state that is exactly what its chain holds.

        Args:
            tables: all tables, restored whole.
            arrays: leaves of the tables.
            touched: fresh touched rows of the state; fingerprints go on in their lineage.
            stamps: function that returns the stamps of restored rows, int32.
        """
        self._last = _moment(touched)
        mode = self.mode(touched)
        tiling = self._tiling_of(tables, arrays, touched.stamps)
        shards = Shards(tiling, arrays, touched.stamps)
        self.followed = FollowedRows(tiling, self._last.lineage)
        self.followed.begin(shards)
        if mode == "recorded":
            if self._audits(self._last):
                glimpse = self._glimpse(shards, self._last)
                assert self._rotation is not None
                self._rotation.keep(glimpse, self._last.clock)
            return
        watch = self._watching(mode)
        look = watch.look(shards)
        watch.start(look, stamps)
        self._prints = self._last


def moment_of(touched: Any) -> Moment | None:
    """Lineage and clock of touched rows; None if there are none, or they hold nothing."""
    # Other values are refused elsewhere, or do not matter as fingerprints choose the rows.
    if not isinstance(touched, Touched) or not _is_alive(touched):
        return None
    return _moment(touched)


def _moment(touched: Touched) -> Moment:
    return Moment(lineage_hex(touched), clock_of(touched))


def _is_alive(touched: Touched) -> bool:
    """Whether all leaves are arrays that hold something, none donated or being traced."""
    return all(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and not leaf.is_deleted()
        for leaf in jax.tree.leaves(touched)
    )
