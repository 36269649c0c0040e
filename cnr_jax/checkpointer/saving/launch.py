"""The blocking part of a save: rows are gathered while a thread already writes them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

import jax

from cnr_jax.checkpointer.multihost.channel import Channel
from cnr_jax.checkpointer.orbax_compat import DenseStore, Directories
from cnr_jax.checkpointer.saving import capture
from cnr_jax.checkpointer.saving.auto_bits import Widening, with_codec
from cnr_jax.checkpointer.saving.background import Background
from cnr_jax.checkpointer.saving.save_in_flight import InFlight, Prepared
from cnr_jax.checkpointer.tracking.tracker import Tracker
from cnr_jax.format.manifest import TableEntry
from cnr_jax.options import Options
from cnr_jax.repository.commit import Facts
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


def in_flight(prepared: Prepared, tables: tuple[TableEntry, ...]) -> InFlight:
    """A save of these tables that begins now."""
    plan, found = prepared.plan, prepared.found
    return InFlight(
        place=prepared.place,
        plan=plan,
        fingerprint_secs=found.secs,
        facts=Facts(
            plan=plan,
            tracking=found.mode,
            recorded_clock=found.recorded.clock if found.recorded else None,
            fingerprint_clock=plan.clock if found.by_fingerprints else None,
            tables=tables,
            dense_leaves=prepared.checked.dense_leaves,
            started_secs=prepared.started_secs,
        ),
    )


class Launch:
    """Starts one save.

    Args:
        flight: the save; gets what goes on behind training.
        directory: of the item, which Orbax is making.
        directories: tell when it is there.
        channel: to the other processes.
        options: of the run.
        widening: knows the width of each table's codes.
        buffers: of the run, for the rows that wait to be written.
    """

    def __init__(
        self,
        flight: InFlight,
        directory: AnyPath,
        directories: Directories,
        channel: Channel,
        options: Options,
        widening: Widening,
        buffers: Buffers,
    ) -> None:
        self._flight, self._directory, self._directories = (
            flight,
            directory,
            directories,
        )
        self._channel, self._options, self._buffers = channel, options, buffers
        self._widening = widening

    async def go(self, prepared: Prepared, tracker: Tracker, dense: DenseStore) -> None:
        """Gathers; nothing of the state is needed afterwards.

        With several processes an error here does not come out here: the others have begun, and
        wait in Orbax's barriers. This process goes there too, and the error comes out of the
        background, on all processes alike.
        """
        try:
            await self._gather(prepared, tracker, dense)
        except BaseException as error:
            background = self._flight.background or self._in_background(
                _nothing, _nothing
            )
            # An interrupt of the loop, while nothing runs in it, closes what waits in it.
            interrupted = isinstance(error, GeneratorExit)
            background.hand_over([], KeyboardInterrupt() if interrupted else error)
            if jax.process_count() == 1 or not isinstance(error, Exception):
                self._flight.stop()
                raise

    async def _gather(
        self, prepared: Prepared, tracker: Tracker, dense: DenseStore
    ) -> None:
        plan, checked = prepared.plan, prepared.checked
        choose = tracker.chooser(
            prepared.found, plan.parent.clock if plan.parent else None
        )
        captured = capture.capture(
            prepared.found.tiles,
            prepared.found.shards,
            choose,
            with_codec(self._options, plan.codec),
            self._widening.widths(plan),
        )
        # Gathering on the host takes all cores already; on devices it waits for these.
        stage: Stage[Chunk] = Stage(
            self._options.max_staging_bytes,
            self._options.timeout_secs,
            patient=captured.on_host,
        )
        # The writer starts first: a state larger than the staging budget streams through it.
        background = self._in_background(
            lambda: self._write(captured.plans, stage), stage.abort
        )
        for chunk in captured.chunks(self._buffers):
            if not stage.put(chunk):
                break  # the writer has failed; its future says why
        stage.start()
        leaves = capture.without_texts(checked.dense)
        parts = await dense.save(self._directory, leaves)
        stage.close()
        background.hand_over(parts)

    def _in_background(
        self, write: Callable[[], None], end: Callable[[], None]
    ) -> Background:
        flight = self._flight
        flight.background = Background(
            flight.plan,
            os.fspath(flight.place.path),
            self._directories,
            write,
            end,
            self._channel,
        )
        return flight.background

    def _write(self, plans: tuple[RunPlan, ...], stage: Stage[Chunk]) -> None:
        """Writes what comes through the stage; runs in the background."""
        uuid = self._flight.plan.uuid
        compared = Comparison(capture.sample_of(plans))
        writer = RowsWriter(
            self._directory,
            uuid,
            jax.process_index(),
            plans,
            compression=self._options.compression,
        )
        try:
            self._flight.written = writer.write(stage, host_device(), compared)
        except BaseException:
            # Whatever it was: the folder may be removed, and its name used again, at once.
            writer.stop()
            raise
        self._flight.row_errors = compared.result()
        if self._flight.row_errors is not None:
            self._say_rounding(self._flight.row_errors, plans)

    def _say_rounding(self, found: RowErrors, plans: Sequence[RunPlan]) -> None:
        """Says at a process' first save of rounded rows how far off they are."""
        if found.mean is None or found.worst is None or jax.process_index() != 0:
            return
        if not _first_to_round.acquire(blocking=False):
            return
        rounded = [plan for plan in plans if plan.count and capture.is_rounded(plan)]
        options = with_codec(self._options, self._flight.plan.codec)
        unasked = {p.table for p in rounded if not options.says_rounding(p.table)}
        bits = sorted({getattr(plan.codec, "bits", 16) for plan in rounded})
        _log.log(
            logging.WARNING if unasked else logging.INFO,
            "step %d: rows of tables are not saved exactly but rounded, to %s bits an element:"
            " relative error of a row %s in the mean, %s at worst, of %s sampled rows.%s",
            self._flight.plan.step,
            " or ".join(map(str, bits)),
            percent(found.mean),
            percent(found.worst),
            f"{found.rows:,}",
            _WAYS if unasked else "",
        )


def _nothing() -> None:
    """What is left to do of a save that failed before it wrote anything."""
