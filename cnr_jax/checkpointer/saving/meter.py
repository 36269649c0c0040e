"""Meter of saves: measures in the training loop what they take, without slowing the loop down.

The training thread only reads the clock, at steps that save. The measurement of a save is put
together when it is reported, in the background; its end is added with the report of the next one.
Now and then measurements are noted in the root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.goodput.measured import MeasuredSave, Trained
from cnr_jax.goodput.measurements import Measurements, read_measurements
from cnr_jax.goodput.profile import ENOUGH
from cnr_jax.repository.store import AnyPath
from cnr_jax.telemetry import RestoreReport, SaveReport
from cnr_jax.texts import logger

_log = logger(__name__)
# Seconds between two notes of measurements in the root; there is another one at the end.
_NOTED_SECS = 60.0
# The part of a train step that a save may wait for room in a loop whose calls of `save` tell when a
# step is done. Other loops run ahead of the device.
_IN_STEP = 0.1
# The error with which the time between two saves may be known, as a part of that time.
_TOLD = 0.1
# A wait shorter than this means that the train step was done already.
_WAIT_SECS = 1e-4
# How many leaves are asked at each end of a state.
_FEW = 4


class Meter:
    """Measures the saves of one manager, and the train steps between them.

    Args:
        root: root in which measurements are noted.
        flying: function that returns the saves in flight.
        is_noted: function that says whether this process notes its measurements in the root.
        is_new: whether measurements that are noted there are those of an earlier run.
        learn: function that is called with all measurements, after each save.
    """

    def __init__(
        self,
        root: AnyPath,
        flying: Callable[[], Sequence[SaveInFlight]],
        *,
        is_noted: Callable[[], bool],
        is_new: bool,
        learn: Callable[[Measurements], None] = lambda found: None,
    ) -> None:
        self._learn = learn
        self._root, self._flying, self._is_noted = root, flying, is_noted
        self._found = Measurements() if is_new else None
        self._has_news, self._noted_at = False, time.perf_counter()
        # Step of the last save, and when that let training go on.
        self._since: tuple[int, float] | None = None
        # Step and time of the first call after that at which no save was in flight any more.
        self._alone: tuple[int, float] | None = None
        self._is_alone = False  # whether the next call is that one
        self._over_at = 0.0
        # The save that was reported last, and when it let training go on. It was not over yet. It
        # is when the next one is reported, as a commit waits for the threads of the saves before.
        self._last: tuple[SaveInFlight, float] | None = None
        self._lock = threading.Lock()  # of what is found
        self._asked_at, self._was_ready = 0.0, True

    # In the training thread, or the thread in which it begins a save.

    def tick(self, step: int) -> None:
        """Notes a step; called at each step at which the program calls `save` or `should_save`."""
        if self._is_alone:
            self._is_alone, self._alone = False, (step, time.perf_counter())

    def asked(self, state: Any, *, waits: bool) -> None:
        """Notes that a save is due, of a state that a train step has made or is still making.

        Args:
            state: the state.
            waits: whether the save has to wait for room. If so, this waits until the train step is
                done, as the save would do anyway. Else the step could end during the wait for room,
                at a time that nobody knows.
        """
        leaves = jax.tree.leaves(state)
        # A few of thousands of leaves suffice, as a train step makes them together.
        pending = [*filter(_is_pending, (*leaves[:_FEW], *leaves[-_FEW:]))]
        if waits and pending:
            with contextlib.suppress(Exception):  # the save raises what has failed
                jax.block_until_ready(pending)
        self._asked_at, self._was_ready = time.perf_counter(), waits or not pending

    def begins(self, save: SaveInFlight) -> None:
        """Notes a save that is decided, before anything of it is written."""
        others = sum(each is not save for each in self._flying())
        save.trained, save.at_once = self._trained(save, others > 0), others + 1

    def returns(self, save: SaveInFlight) -> None:
        """Notes that a save lets training go on."""
        now = time.perf_counter()
        save.blocking_secs = now - save.started_secs - save.wait_secs
        self._alone, self._since = None, (save.step, now)
        self._is_alone = not self._flying()

    def _trained(self, save: SaveInFlight, has_others: bool) -> tuple[Trained, ...]:
        """Train steps since the save before, with their seconds; empty if these are not known."""
        if self._since is None or save.step <= self._since[0]:
            return ()
        first, since = self._since
        steps, asked = save.step - first, self._asked_at
        end = asked if self._was_ready else save.started_secs + save.wait_secs
        in_step = end - asked < _IN_STEP * (end - since) / steps
        told = end - asked < _TOLD * (end - since) or save.wait_secs >= _WAIT_SECS
        if not (in_step or told):
            return ()  # the step was done at an unknown time while the save waited
        if in_step and self._alone and first < self._alone[0] < save.step:
            turn, at = self._alone
            return (
                Trained(turn - first, at - since, at - since),
                Trained(save.step - turn, end - at, 0.0),
            )
        beside = end if has_others else min(self._over_at, end)
        return (Trained(steps, end - since, max(beside - since, 0.0)),)

    def restored(self, report: RestoreReport) -> None:
        """Notes a restore: the steps that follow do not go on from the save before."""
        self._since = self._alone = None
        with self._lock:
            self._note(self.found.with_read(report.bytes_read, report.total_secs))

    # In any thread.

    def durable(self, save: SaveInFlight) -> None:
        """Notes that a save is durable."""
        save.at_once = (save.at_once + len(self._flying())) / 2

    def over(self, save: SaveInFlight) -> None:
        """Notes that nothing is written or removed for a save any more."""
        self._over_at = save.over_at_secs = time.perf_counter()
        self._is_alone = all(each is save for each in self._flying())

    def reported(self, save: SaveInFlight, report: SaveReport) -> None:
        """Measures a save from its report; one that was dropped does not count."""
        if not save.at_once or report.outcome == "dropped":
            return
        blocking = save.blocking_secs
        if blocking is None:
            blocking = report.blocking_secs - report.wait_secs
        blocking = max(blocking, 0.0)
        written = report.total_secs - report.wait_secs - blocking
        measured = MeasuredSave(
            step=report.step,
            parent=report.parent,
            # It has written a delta, whatever baseline it has brought along.
            kind="delta" if report.merged_bytes else report.kind,
            nbytes=report.total_bytes,
            fixed_bytes=report.dense_bytes + report.manifest_bytes,
            plain_bytes=report.state_bytes,
            whole_bytes=report.total_bytes + report.merged_bytes
            if report.merged_bytes
            else 0,
            blocking_secs=blocking,
            durable_secs=max(written, 0.0) + report.commit_secs,
            in_flight=save.at_once,
            agree_secs=save.agree_secs,
            trained=save.trained,
        )
        with self._lock:
            found = self.found
            if found.run not in (None, report.run):
                found, self._last = Measurements(), None
            if self._last is not None:
                last, since = self._last
                if last.over_at_secs is not None:
                    found = found.with_end(max(last.over_at_secs - since, 0.0))
            self._last = save, save.started_secs + save.wait_secs + blocking
            found = found.with_save(measured)
            found = dataclasses.replace(
                found, run=report.run, processes=jax.process_count()
            )
            self._note(found)
        self._learn(found)

    # In the thread of reports.

    def keep(self, *, at_once: bool = False) -> None:
        """Notes measurements in the root if that is due, or `at_once`; a failure is logged."""
        now = time.perf_counter()
        is_due = at_once or now > self._noted_at + _NOTED_SECS
        if not (is_due and self._has_news and self._is_noted()):
            return
        if len(self.found.saves) < ENOUGH:
            return  # too few saves tell nothing
        self._has_news, self._noted_at = False, now
        try:
            self.found.write(self._root)
        except OSError as error:
            _log.info("what saves took is not noted: %s", error)

    @property
    def found(self) -> Measurements:
        """All measurements of the run, with those noted in the root before this program began."""
        if self._found is None:
            self._found = read_measurements(self._root) or Measurements()
        return self._found

    def _note(self, found: Measurements) -> None:
        self._found, self._has_news = found, True


def _is_pending(leaf: Any) -> bool:
    """Whether a leaf is an array that is being computed."""
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return False
    is_ready: Callable[[], bool] | None = getattr(leaf, "is_ready", None)
    return is_ready is not None and not is_ready()  # PRNG keys have no `is_ready`
