"""The blocking part of a save: rows are gathered while a thread already writes them."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence

import jax

from cnr_jax.checkpointer.multihost import Channel
from cnr_jax.checkpointer.orbax_compat.dense import DenseStore
from cnr_jax.checkpointer.orbax_compat.places import Directories
from cnr_jax.checkpointer.saving import capture
from cnr_jax.checkpointer.saving.background import Background
from cnr_jax.checkpointer.saving.check import CheckedState, without_texts
from cnr_jax.checkpointer.saving.plan import Widening, with_codec
from cnr_jax.checkpointer.saving.save_in_flight import SaveInFlight
from cnr_jax.checkpointer.tracking.tracker import ChangedRows, Tracker
from cnr_jax.options import Options
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.rows_writer import RowsWriter, RunPlan
from cnr_jax.rows.gather.buffers import Buffers
from cnr_jax.rows.gather.chunk import Chunk, host_device
from cnr_jax.rows.gather.rounding import Comparison, RowErrors
from cnr_jax.rows.gather.stage import Stage
from cnr_jax.telemetry import percent

_log = logging.getLogger(__name__)

# Taken, for good, by the first save of this process that rounds rows.
_first_to_round = threading.Lock()
_WAYS = (
    " Neither codec nor bits were given: Options(codec='raw') saves exactly, Options(bits=8)"
    " rounds less, Options(bits=4) says that this is meant"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """A save that is decided but not begun; it holds the state, so nothing may keep it.

    Attributes:
        flight: what is known of it from now on.
        checked: the state.
        changed: its rows that changed.
    """

    flight: SaveInFlight
    checked: CheckedState
    changed: ChangedRows


async def launch(
    planned: PlannedSave,
    directory: AnyPath,
    directories: Directories,
    *,
    tracker: Tracker,
    dense: DenseStore,
    widening: Widening,
    buffers: Buffers,
    channel: Channel,
    options: Options,
) -> None:
    """Starts a save, and gathers: nothing of the state is needed afterwards.

    With several processes an error here does not come out here: other processes have begun, and
    wait in Orbax's barriers. This process goes there too, and the error comes out of the
    background, on all processes alike.

    Args:
        planned: the save; its `flight` gets what goes on in the background.
        directory: of the item, which Orbax is making.
        directories: tell when it is there.
        tracker: chooses rows among those that changed.
        dense: saves what belongs to no table.
        widening: knows the width of each table's codes.
        buffers: of the run, for the rows that wait to be written.
        channel: to the other processes.
        options: of the run.
    """
    flight, changed = planned.flight, planned.changed
    plan = flight.plan

    def in_background(write: Callable[[], None], end: Callable[[], None]) -> Background:
        where = os.fspath(flight.place.path)
        return Background(plan, where, directories, write, end, channel)

    try:
        captured = capture.capture(
            changed.tiles,
            changed.shards,
            tracker.chooser(changed, plan.parent.clock if plan.parent else None),
            with_codec(options, plan.codec),
            widening.widths(plan),
        )
        plans = captured.plans  # alone: the writer must not hold the state
        # Gathering on the host takes all cores already; on devices it waits for these.
        stage: Stage[Chunk] = Stage(
            options.max_staging_bytes, options.timeout_secs, patient=captured.on_host
        )
        # The writer starts first: a state larger than the staging budget streams through it.
        flight.background = in_background(
            lambda: _write(flight, directory, plans, stage, options), stage.abort
        )
        for chunk in captured.chunks(buffers):
            if not stage.put(chunk):
                break  # the writer has failed; its future says why
        stage.start()
        parts = await dense.save(directory, without_texts(planned.checked.dense))
        stage.close()
        flight.background.hand_over(parts)
    except BaseException as error:
        if flight.background is None:
            flight.background = in_background(_nothing, _nothing)
        # An interrupt of the loop, while nothing runs in it, closes what waits in it.
        interrupted = isinstance(error, GeneratorExit)
        flight.background.hand_over([], KeyboardInterrupt() if interrupted else error)
        if jax.process_count() == 1 or not isinstance(error, Exception):
            flight.stop()
            raise


def _nothing() -> None:
    """What is left to do of a save that failed before it wrote anything."""


def _write(
    flight: SaveInFlight,
    directory: AnyPath,
    plans: tuple[RunPlan, ...],
    stage: Stage[Chunk],
    options: Options,
) -> None:
    """Writes what comes through the stage; runs in the background."""
    compared = Comparison(capture.sample_of(plans))
    writer = RowsWriter(
        directory,
        flight.plan.uuid,
        jax.process_index(),
        plans,
        compression=options.compression,
    )
    try:
        flight.written = writer.write(stage, host_device(), compared)
    except BaseException:
        # Whatever it was: the folder may be removed, and its name used again, at once.
        writer.stop()
        raise
    flight.row_errors = compared.result()
    if flight.row_errors is not None:
        _say_rounding(flight, flight.row_errors, plans, options)


def _say_rounding(
    flight: SaveInFlight,
    found: RowErrors,
    plans: Sequence[RunPlan],
    options: Options,
) -> None:
    """Says at a process' first save of rounded rows how far off they are."""
    if found.mean is None or found.worst is None or jax.process_index() != 0:
        return
    if not _first_to_round.acquire(blocking=False):
        return
    rounded = [plan for plan in plans if plan.count and capture.is_rounded(plan)]
    chosen = with_codec(options, flight.plan.codec)
    unasked = {p.table for p in rounded if not chosen.says_rounding(p.table)}
    bits = sorted({getattr(plan.codec, "bits", 16) for plan in rounded})
    _log.log(
        logging.WARNING if unasked else logging.INFO,
        "step %d: rows of tables are not saved exactly but rounded, to %s bits an element:"
        " relative error of a row %s in the mean, %s at worst, of %s sampled rows.%s",
        flight.plan.step,
        " or ".join(map(str, bits)),
        percent(found.mean),
        percent(found.worst),
        f"{found.rows:,}",
        _WAYS if unasked else "",
    )
