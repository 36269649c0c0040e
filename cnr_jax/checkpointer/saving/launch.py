"""Launch of a save: the blocking part gathers rows and leaves while a thread writes them.

The writing thread writes the rows and dense leaves of this process, and learns how the other
processes fared: the save succeeds on all of them or on none.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cnr_jax import errors
from cnr_jax.checkpointer.multihost import Channel, agree, raise_if_told
from cnr_jax.checkpointer.orbax_compat.places import Directories
from cnr_jax.checkpointer.save_errors import free_frames, save_error
from cnr_jax.checkpointer.saving import capture, dense
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.checkpointer.tracking.tracker import ChangedRows, Tracker
from cnr_jax.encoding import Encoding
from cnr_jax.format.dense import DenseTile
from cnr_jax.options import Options
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.parent_rows import ParentRows, TileKey
from cnr_jax.repository.rows_writer import RowsWriter
from cnr_jax.repository.run_plan import RunPlan
from cnr_jax.repository.staging import Room, Stage
from cnr_jax.repository.store import AnyPath
from cnr_jax.rows.codecs.lattice import Parts
from cnr_jax.rows.codecs.residual import Residual
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.chunk import HostRows
from cnr_jax.rows.gather.encode import Comparison, RowErrors, Sample
from cnr_jax.rows.gather.host import Buffers
from cnr_jax.rows.gather.motion import FollowedRows
from cnr_jax.rows.tiling import host_device, own_settings
from cnr_jax.telemetry import percent
from cnr_jax.texts import logger
from cnr_jax.waiting import wait_for

_log = logger(__name__)

# How long the writing thread waits for training to go on: far longer than that takes, unless
# training is held up.
_HEAD_START_SECS = 0.1
# The first save of this process that rounds rows takes this lock and keeps it.
_first_to_round = threading.Lock()
_WAYS = (
    " Neither codec nor bits were given: Options(codec='raw') saves exactly, Options(bits=8)"
    " rounds less, Options(bits=4) says that this is meant"
)


@dataclasses.dataclass(eq=False, repr=False)
class Launcher:
    """Starts the saves of a handler.

    Args:
        tracker: tracker that chooses rows among those that changed.
        widening: knows the width of each table's codes.
        channel: channel to the other processes.
        options: options of the run.
    """

    _tracker: Tracker
    _widening: Widening
    _channel: Channel
    _options: Options

    def __post_init__(self) -> None:
        # Memory for the rows that wait to be written.
        self._buffers = Buffers(self._options.kept_staging_bytes)
        self._room = Room(self._options.max_staging_bytes)
        self._coding: capture.Coding | None = None
        self._parents = ParentRows(self._options.max_parent_bytes)

    def _coding_of(
        self, changed: ChangedRows, plan: SavePlan, encoding: Encoding
    ) -> capture.Coding:
        """Coding of the rows of a save; the same object as long as nothing of it changes."""
        made_of = (
            changed.shards.tiling,
            encoding,
            self._widening.widths(plan.auto_bits, plan.codec),
            self._widening.dither_of(plan),
        )
        if self._coding is None or not self._coding.is_of(*made_of):
            self._coding = capture.Coding(*made_of)
        return self._coding

    def launch(
        self,
        flight: SaveInFlight,
        changed: ChangedRows,
        directory: AnyPath,
        directories: Directories | None,
    ) -> None:
        """Starts the writing of a save, and gathers its rows and leaves.

        Afterwards nothing of the state is needed.

        In a run of several processes this raises no error: the others have begun, and wait for a
        message of each process. The error is the message of this one, and comes out of the
        background, on all processes alike.

        Args:
            flight: the save; it notes what goes on in the background.
            changed: its state, which nothing may keep.
            directory: directory of the item.
            directories: directories that Orbax makes, to be waited for, where a plain Orbax
                manager saves; None: the pipeline makes them, and settles the save on all processes.
        """
        plan, options, started = flight.plan, self._options, time.perf_counter()
        try:
            encoding = self._widening.encoding_of(plan)
            followed = self._tracker.followed
            parent_clock = plan.parent.clock if plan.parent else None
            chosen = self._tracker.choose(changed, parent_clock)
            # The writing thread gets only this object, as it must not hold the state.
            rows = capture.Rows(self._coding_of(changed, plan, encoding), chosen)
            flight.rows = int(chosen.counts.sum()) * jax.process_count()
            pieces = dense.pieces_of(changed.dense)
            tiles = [piece.tile for piece in pieces]
            sources = rows.sources(changed.shards, looks=plan.merges)
            sample = None
            on_host = all(isinstance(each, HostRows) for each in sources)
            if not on_host:
                sample = capture.sample_of(rows.plans(), followed)
                sources = capture.with_samples(sources, sample)
            # Gathering on the host keeps all cores busy; gathering on devices waits for them.
            stage = Stage(self._room, options.timeout_secs, patient=on_host)
            self._parents.begin(plan.uuid, lambda: flight.writing.is_over)
            # Writing starts first: a state larger than the staging budget streams through it.
            write_in_background(
                flight,
                directories,
                lambda: _write_rows(
                    flight,
                    directory,
                    rows,
                    tiles,
                    stage,
                    encoding,
                    sample,
                    followed,
                    self._parents,
                ),
                stage.abort,
                self._channel,
            )
            for chunk in host.gather_chunks(sources, self._buffers):
                if not stage.put(chunk):
                    break  # the writing has failed, and its thread notes why
            # Else views of the state would still be alive when the next train step gets its memory.
            del sources
            changed.shards.release()
            gather_secs = time.perf_counter() - started
            for some in dense.bytes_of(pieces, stage.limit_bytes, self._buffers):
                if not stage.put(some):
                    break
            stage.close()
            blocking_secs = time.perf_counter() - flight.started_secs
            flight.know(gather_secs=gather_secs, blocking_secs=blocking_secs)
            flight.launched.open()
        except BaseException as error:
            flight.give_up(error)
            flight.launched.open()
            # There may be nothing to write, but the thread must tell the other processes.
            write_in_background(
                flight, directories, lambda: None, flight.release, self._channel
            )
            if jax.process_count() == 1 or not isinstance(error, Exception):
                flight.stop()
                raise

    def close(self) -> None:
        """Frees memory that is kept for the next save, and what is remembered of rows."""
        self._buffers.close()
        self._tracker.close()
        self._parents.close()


# Settings of jax that a program makes for all threads would hold in this thread too.
@own_settings()
def _write_rows(
    flight: SaveInFlight,
    directory: AnyPath,
    rows: capture.Rows,
    tiles: Sequence[DenseTile],
    stage: Stage,
    encoding: Encoding,
    sample: Sample | None,
    followed: FollowedRows | None,
    parents: ParentRows,
) -> None:
    """Writes what comes through the stage; runs in the writing thread."""
    with parents.writing(flight.plan.uuid):
        stage.wait()
        if stage.is_closed:
            # Training has only Python code to run before it goes on. This thread would hold the
            # interpreter for long each time.
            flight.returned.wait(_HEAD_START_SECS)
        plans = rows.plans()
        if sample is None:
            sample = capture.sample_of(plans, followed)
        compared = Comparison(sample, followed)
        writer = RowsWriter(
            directory,
            flight.plan.uuid,
            jax.process_index(),
            plans,
            tiles,
            compression=encoding.packing,
            below=_below(flight, plans, parents),
            layer=flight.plan.layer,
        )
        try:
            flight.written = writer.write(stage, host_device(), compared)
        except BaseException:
            # After any error the folder may be removed, and its name used again, at once.
            writer.stop()
            raise
        finally:
            stage.fail()  # the stage takes nothing more, and other saves may have its room
        parents.note(flight.plan.uuid, flight.plan.parent, flight.written.tiles)
        if flight.written.row_errors is not None:
            _say_rounding(flight, flight.written.row_errors, plans, encoding)


def _below(
    flight: SaveInFlight, plans: Sequence[RunPlan], parents: ParentRows
) -> dict[TileKey, Parts]:
    """Rows of the parent that differences are taken from, by tile.

    Tiles whose rows cannot be read are missing, and are stored without differences.
    """
    keys = {
        plan.key: plan.codec
        for plan in plans
        if plan.count and isinstance(plan.codec, Residual)
    }
    place, parent = flight.place, flight.plan.parent
    if parent is None or not keys:
        return {}
    try:
        found = parents.of(place.root, place.item, parent, keys)
    except (errors.CnrError, OSError) as error:
        # Files are missing if the parent is still being written.
        is_early = getattr(error, "kind", None) in ("file_missing", "not_committed")
        _log.log(
            logging.INFO if is_early else logging.WARNING,
            "step %d is stored without differences: %s cannot be read: %s",
            flight.step,
            parent.directory,
            error,
        )
        return {}
    # Squares are stored as differences only if the means beside them can be too.
    for plan in plans:
        if plan.beside is not None and plan.key not in found:
            found.pop(plan.beside, None)
    return found


def _say_rounding(
    flight: SaveInFlight,
    found: RowErrors,
    plans: Sequence[RunPlan],
    encoding: Encoding,
) -> None:
    """Logs how far off rounded rows are, at the first save of this process that has some."""
    if found.mean is None or found.worst is None or jax.process_index() != 0:
        return
    if not _first_to_round.acquire(blocking=False):
        return
    rounded = [plan for plan in plans if plan.count and capture.is_rounded(plan)]
    unasked = {p.table for p in rounded if not encoding.says_rounding(p.table)}
    bits = sorted({getattr(plan.codec, "bits", 16) for plan in rounded})
    _log.log(
        logging.WARNING if unasked else logging.INFO,
        "step %d: rows of tables are not saved exactly but rounded, to %s bits an element:"
        " relative error of a row %s on average, %s at worst, of %s sampled rows.%s",
        flight.step,
        " or ".join(map(str, bits)),
        percent(found.mean),
        percent(found.worst),
        f"{found.rows:,}",
        _WAYS if unasked else "",
    )


def write_in_background(
    flight: SaveInFlight,
    directories: Directories | None,
    write: Callable[[], None],
    release: Callable[[], None],
    channel: Channel,
) -> None:
    """Starts the writing thread of a save, unless it runs; it notes in `flight` how it ends.

    Args:
        flight: the save.
        directories: directories to wait for before writing; None: see `Launcher.launch`.
        write: function that writes the part of this process.
        release: function that ends `write`, and frees any thread that waits for it to go on.
        channel: channel to the other processes.
    """
    flight.release = release
    flight.writing.start(
        "cnr_write_rows", _in_background, flight, directories, write, channel
    )


def _in_background(
    flight: SaveInFlight,
    directories: Directories | None,
    write: Callable[[], None],
    channel: Channel,
) -> None:
    """Waits for directories, writes, and waits for all processes."""
    topic, failure = flight.topic("saved"), None

    def check() -> None:
        raise_if_told(channel, topic)
        if flight.stopped is not None:
            raise flight.stopped

    if directories is not None:
        failure = _raised_by(directories.wait, channel.timeout_secs, check)
    elif flight.prepared is not None:
        failure = _raised_by(wait_for, flight.prepared, check)
    started = time.perf_counter()
    if failure is None and flight.stopped is None:
        failure = _raised_by(write)
    if failure is not None or flight.stopped is not None:
        flight.release()
    flight.launched.wait()
    _note_secs(flight, time.perf_counter() - started)
    failure = flight.stopped or failure
    if directories is not None:
        _end_alike(flight, failure, channel, topic)
        flight.agreed_at_secs = time.perf_counter()
    elif failure is not None:
        flight.write_error = _as_told(flight, failure)


def _note_secs(flight: SaveInFlight, secs: float) -> None:
    """Notes how long writing took, without the seconds of encoding and of waiting for rows."""
    written = flight.written
    encode_secs = written.encode_secs if written else 0.0
    waiting_secs = written.waiting_secs if written else 0.0
    flight.know(
        encode_secs=encode_secs, write_secs=max(0.0, secs - encode_secs - waiting_secs)
    )


def _as_told(
    flight: SaveInFlight, failure: BaseException
) -> errors.SaveError | concurrent.futures.CancelledError:
    if isinstance(failure, concurrent.futures.CancelledError):
        return failure
    return save_error(failure, flight.step, os.fspath(flight.place.path))


def _end_alike(
    flight: SaveInFlight, failure: BaseException | None, channel: Channel, topic: str
) -> None:
    """Notes in `flight` the outcome that all processes agree on."""
    where = os.fspath(flight.place.path)
    mine = failure and save_error(failure, flight.step, where)
    try:
        agree(channel, mine, topic=topic)
    except errors.SaveError as error:
        own = mine is not None and error.process == mine.process
        flight.write_error = mine if own else error
    except Exception as error:
        # Such as an error of jax whose coordination service is gone. Nobody knows of a success.
        flight.write_error = mine or save_error(error, flight.step, where)
    if isinstance(failure, concurrent.futures.CancelledError):
        flight.write_error = failure


def _raised_by(work: Callable[..., Any], *args: Any) -> BaseException | None:
    """Returns what `work` raises, even what ends a thread: other processes must be told of it."""
    try:
        work(*args)
    except BaseException as error:
        free_frames(error)
        return error
    return None
