"""The saves of a manager: each ends once, committed and durable, or with one error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cnr_jax import errors
from cnr_jax.args import Save, planned_args
from cnr_jax.checkpointer.multihost import Channel, agree, all_succeed
from cnr_jax.checkpointer.orbax_compat.items import Items, StepItems
from cnr_jax.checkpointer.orbax_compat.steps import StepInfo, Steps, now
from cnr_jax.checkpointer.save_errors import as_save_errors, without_frames
from cnr_jax.checkpointer.saving.calls import Calls
from cnr_jax.checkpointer.saving.chain_look import is_dropped
from cnr_jax.checkpointer.saving.due import Course
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.saving.pipeline import PipelinedSave, SavePipeline
from cnr_jax.checkpointer.saving.retirement import Retirement
from cnr_jax.checkpointer.tracking.tracker import ChangedRows
from cnr_jax.format import names
from cnr_jax.repository.committer import Attempt
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.planner import Plan
from cnr_jax.repository.layout import Place, check_is_free
from cnr_jax.repository.store import AnyPath, exists
from cnr_jax.repository.upkeep.claim import called_at, calling_line
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.tiling import settings_here
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class Saves:
    """The saves of a manager.

    Also of those that hold no state of ours, but other items.

    Args:
        pipeline: that they go through.
        steps: of the root.
        items: say how each is written.
        lifecycle: knows the save that began last.
        writer: of the root.
        retirement: of steps that they make superfluous.
        course: is told of saves that begin and fail.
        calls: of the manager.
        channel: to the other processes.
        plan: decides on the save of a state.
        warm_up: for each plan, before anything of it is staged.
        before_commit: of the user; called when a save is about to be committed.
    """

    pipeline: SavePipeline
    steps: Steps
    _items: Items
    _lifecycle: Lifecycle
    _writer: RootWriter
    retirement: Retirement
    _course: Course
    _calls: Calls
    _channel: Channel
    _plan_state: Callable[[Place, Save, bool], tuple[SaveInFlight, ChangedRows]]
    _warm_up: Callable[[Plan], None]
    before_commit: Callable[[], None]
    # The call of `save` that is beginning one. What it asks, or a signal handler in the middle of
    # it, is not to wait for it.
    _inside: object | None = dataclasses.field(default=None, init=False)
    # What has begun and of which it is not known what became.
    _begun: list[StepSave] = dataclasses.field(default_factory=list, init=False)
    # Why saves failed, until somebody raises it.
    _failures: list[errors.CnrError] = dataclasses.field(
        default_factory=list, init=False
    )

    @property
    def ledger(self) -> Ledger:
        """What the root holds; nothing, until the first save names the item."""
        return self._writer.ledger or Ledger()

    @property
    def is_dropped(self) -> bool:
        """Whether the save that began last was not committed, for want of what it rests on."""
        last = self._lifecycle.last
        return last is not None and last.gap is not None

    def flying(self) -> list[StepInfo]:
        """Steps that are being saved, as policies are told of them."""
        return [each.info for each in tuple(self._begun) if not each.is_committed]

    # Beginning.

    def begin(
        self,
        step: int,
        item: str,
        args: Any,
        state: Save | None,
        *,
        metrics: Any,
        custom_metadata: str,
        urgent: bool,
    ) -> None:
        """Plans and begins a save.

        Args:
            step: of the save.
            item: that holds the state.
            args: of all items.
            state: of these, the state; None if other items alone are saved.
            metrics: of the step.
            custom_metadata: of the step, as JSON.
            urgent: whether it is the last of a run.

        Raises:
            CnrError: if it cannot be saved; nothing has changed then.
        """
        self._inside = self._calls.current
        settings, where = settings_here(), str(self.steps.root)
        called = called_at.set(calling_line())

        def plan() -> PipelinedSave:
            with settings():
                return self._plan(
                    Place(self.steps.root, self.steps.new_directory(step), item),
                    args,
                    state,
                    step,
                    metrics,
                    custom_metadata,
                    urgent,
                    settings,
                )

        try:
            with as_save_errors(step, where):
                self.pipeline.begin(plan)
        except BaseException:
            self._inside = None
            # What an interrupt keeps this from, the next call does.
            if not self.pipeline.is_beginning:
                with contextlib.suppress(Exception):  # which would hide why
                    self._settle()
            raise
        finally:
            self._inside = None
            called_at.reset(called)
            last = self._lifecycle.last
            if last is not None:
                last.returned.open()

    def _plan(
        self,
        place: Place,
        args: Any,
        state: Save | None,
        step: int,
        metrics: Any,
        custom_metadata: str,
        urgent: bool,
        settings: Callable[[], Any],
    ) -> PipelinedSave:
        """Decides on a save, on all processes or none; in a thread of the pipeline."""
        flight, planned = SaveInFlight(place=place), None
        if state is not None:
            # The root may be such that it cannot be read or claimed.
            with as_save_errors(step, str(self.steps.root)):
                planned = self._plan_state(place, state, urgent)
            flight = planned[0]
        info = StepInfo(step, now(), metrics)
        work = StepSave(self, flight, info, custom_metadata, settings)
        self._begun.append(work)
        self._course.begin(step, state.touched if state else None)
        self._lifecycle.prepare(flight)
        nonce = self._nonce(flight)
        abandoned = flight.plan.abandoned if planned else ()
        # What was moved aside is not in the way of the new steps.
        self.steps.forget_named(abandoned)
        work.moves = bool(abandoned)
        if planned and flight.plan.changed:
            all_succeed(self._channel, self.steps.reload)
        self.steps.check_is_new(step)
        if planned is None:
            check_not_in_the_way(step, place)
        args = planned_args(args, state, planned)
        metrics = info.metrics if self._writes_metrics else None
        if self.steps.has_best and info.metrics is None:
            _log.warning("step %d is ranked by metrics, but has none", step)
        work.items = self._items.begin(args, metrics)
        work.attempt = Attempt(place.root, place.directory, nonce)
        return PipelinedSave(step, work.attempt, tuple(work.items.handlers), work)

    def _nonce(self, flight: SaveInFlight) -> str:
        """What no other save is called, alike on all processes."""
        if flight.facts is not None:
            return flight.plan.uuid
        # Not by its step: it may find what is left of another save of that, which failed.
        drawn = agree(self._channel, None, decide=lambda _: secrets.token_hex(16))
        return str(drawn)

    @property
    def _writes_metrics(self) -> bool:
        options = self.steps.options
        return self.steps.has_best and not options.prevent_write_metrics

    # Waiting.

    def wait(self) -> None:
        """Waits for the saves that are being written, and until `on_save` has been called.

        Raises:
            SaveError: if one failed; once.
            CallError: inside `on_save`.
        """
        self._calls.refuse_in_on_save("wait_until_finished")
        if self.pipeline.is_here():
            return  # a handler or a callback asks, which a save waits for
        is_inner = True
        try:
            with self._calls.lock:
                # Other calls are not to wait for `on_save`; nor is who is interrupted.
                is_inner = self._calls.current is not None
                self._wait()
        except Exception:
            if not is_inner:
                self._lifecycle.listener.wait()
            raise
        if not is_inner:
            # Without the lock: `on_save` may ask for the steps there are.
            self._lifecycle.listener.wait()

    def check(self) -> None:
        """Raises what the last save raised, if it has ended; as `wait`, but does not wait."""
        if self.pipeline.is_busy:
            return
        self._calls.refuse_in_on_save("check_for_errors")
        with self._calls.lock:
            if not self.pipeline.is_busy:
                self._wait()

    def _wait(self) -> None:
        if self._is_inside():
            return
        self.pipeline.wait()
        self._settle()
        if self._failures:
            raise self._failures.pop(0)

    def _is_inside(self) -> bool:
        """Whether this is asked in the middle of a call that begins a save."""
        return self._inside is not None and self._inside is self._calls.current

    def settle(self) -> None:
        """Notes what became of saves that have ended."""
        if not self._is_inside() and not self.pipeline.is_here():
            self._settle()

    def _settle(self) -> None:
        self.pipeline.end_beginning()
        for save in self.pipeline.take_ended():
            self._note(save.step, save.error, is_committed=save.is_committed)
        if self.pipeline.is_busy:
            return
        # What is left failed in its beginning, which has raised why, or was interrupted.
        for work in tuple(self._begun):
            self._note(work.info.step, None, is_committed=False)
        if self._lifecycle.flight is None and self._writer.is_prepared:
            self._lifecycle.withdraw()
        if self.steps.is_stale:
            self.reread()

    def _note(
        self, step: int, error: errors.CnrError | None, *, is_committed: bool
    ) -> None:
        """Finds out what became of a save, whatever is known of it in the background."""
        work = next(each for each in self._begun if each.info.step == step)
        is_seen = is_committed
        if self._lifecycle.flight is not None:
            is_seen = self._lifecycle.settle() is not None
        unseen = self._lifecycle.take_failure()
        if not is_seen:
            self._course.failed()
        if not is_committed:
            self._lifecycle.withdraw()
            if work.moves:
                self.reread()  # steps that were moved aside are back
        self._begun.remove(work)
        failure = error or (unseen if is_committed else None)
        if failure is not None and not is_dropped(failure):
            self._lifecycle.last_failure = without_frames(failure)
            self._failures.append(failure)

    def reread(self) -> None:
        """Reads which steps there are, after a fault that may last."""
        if self.steps.are_broadcast:
            # The other processes come to it in the next save.
            self._writer.changed = True
            self.steps.is_stale = False
            return
        try:
            self.steps.reload()
        except OSError as error:
            _log.warning("%s cannot be read now: %s", self.steps.root, error)
            self.steps.is_stale = True

    # In the threads of the pipeline.

    def staged(self, work: StepSave, folder: AnyPath) -> Sequence[Any]:
        """Starts to write all items of a step."""
        if work.flight.facts is not None:
            # Not before: of several processes this one alone may fail in it.
            self._warm_up(work.flight.plan)
        return work.items.stage(folder)

    def needed_later(self, work: StepSave) -> set[int]:
        """Steps that later saves in flight rest on."""
        flying = self.pipeline.in_flight()
        later = False
        found = set[int]()
        for save in flying:
            if later and save.rests_on is not None:
                found.add(save.rests_on.step)
            later = later or save.work is work
        return found

    def sealed(self, work: StepSave, folder: AnyPath) -> list[str]:
        """Ends what is written of a step; names what of it is durable already."""
        work.flight.agreed_at_secs = time.perf_counter()
        work.items.finalize(folder, work.custom_metadata)
        self.before_commit()
        self._lifecycle.look_before()
        return [work.flight.place.item, names.ORBAX_METADATA]

    def published(self, work: StepSave) -> list[int]:
        """Makes a commit durable; says which steps go."""
        try:
            self.pipeline.committer.settle(work.attempt)
        except OSError as error:
            self._lifecycle.synced(error)
            raise
        self._lifecycle.synced(None)
        infos = [each for each in self.steps.infos() if each.step != work.info.step]
        infos = sorted([*infos, work.info], key=lambda info: info.step)
        leaving = self.retirement.decide(infos, self.needed_later(work))
        self._lifecycle.look_after(leaving)
        return leaving

    def committed(self, work: StepSave, leaving: Sequence[int]) -> None:
        """Notes a commit; says so, unless the step goes at once."""
        work.is_committed = True
        self.steps.add(work.info)
        self.retirement.note(leaving)
        work.flight.is_unwanted = work.info.step in leaving
        self._lifecycle.report_commit()

    def retired(self, gone: Sequence[int], stay: Sequence[int]) -> None:
        """Notes which steps are gone, and which stay though they were to go."""
        self.retirement.stayed(stay)
        self.steps.forget(gone)

    def failed(self, work: StepSave, error: errors.CnrError) -> None:
        """Says why a save failed, or what comes after its commit."""
        self._lifecycle.end_writing()
        self._lifecycle.fail(error)

    def ended(self, work: StepSave) -> None:
        """Lets other managers write."""
        self._lifecycle.end_writing()
        self._lifecycle.report_unwanted()


class StepSave:
    """What the pipeline does for one save of a manager.

    Args:
        saves: of the manager.
        flight: what is known of its state.
        info: of the step.
        custom_metadata: of the step, as JSON.
        settings: of the thread that has called `save`.

    Attributes:
        items: that are saved.
        attempt: at the step.
        moves: whether steps were moved aside for it.
        is_committed: whether it is known to be.
    """

    items: StepItems
    attempt: Attempt

    def __init__(
        self,
        saves: Saves,
        flight: SaveInFlight,
        info: StepInfo,
        custom_metadata: str,
        settings: Callable[[], Any],
    ) -> None:
        self._saves, self.flight, self.info = saves, flight, info
        self.custom_metadata, self._settings = custom_metadata, settings
        self.moves = self.is_committed = False

    def stage(self, folder: AnyPath) -> Sequence[Any]:
        """Starts to write all items."""
        with self._settings():
            return self._saves.staged(self, folder)

    def cancel(self, why: BaseException) -> None:
        """Ends staging and writing soon."""
        self.items.cancel()
        self.flight.give_up(why)

    def seal(self, folder: AnyPath) -> Collection[str]:
        """Ends what is written; names what of it is durable already."""
        return self._saves.sealed(self, folder)

    def published(self) -> Any:
        """Makes the commit durable; says which steps go."""
        return {"leaving": self._saves.published(self)}

    def committed(self, told: Any) -> None:
        """Notes the commit."""
        self._saves.committed(self, told["leaving"] if told else ())

    def retire(self, told: Any) -> Any:
        """Removes the steps that go."""
        stay = self._saves.retirement.remove(told["leaving"])
        gone = [step for step in told["leaving"] if step not in stay]
        return {"gone": gone, "stay": stay}

    def retired(self, told: Any) -> None:
        """Notes what went."""
        if told is not None:
            self._saves.retired(told["gone"], told["stay"])

    def failed(self, error: errors.CnrError) -> None:
        """Says why it failed."""
        self._saves.failed(self, error)

    def ended(self) -> None:
        """Lets other managers write."""
        self._saves.ended(self)


def check_not_in_the_way(step: int, place: Place) -> None:
    """Checks that a save replaces no folder that is not known of, and no file.

    Raises:
        DependentsExistError: if there is one.
    """
    check_is_free(place.root, place.directory)
    path = place.root / place.directory
    if exists(path):
        raise errors.DependentsExistError(
            f"step {step} cannot be saved: {path} is there already\n"
            "  hint: save another step, or move that folder out of the root",
            kind="step_exists",
        )


def as_json(custom_metadata: Any) -> str:
    """The user's metadata of a step as text.

    Raises:
        OptionError: if they are none that JSON takes.
    """
    try:
        return json.dumps(custom_metadata or {})
    except (TypeError, ValueError) as error:
        raise errors.OptionError(
            f"custom_metadata cannot be saved: {error}\n"
            "  got what JSON does not take, expected a dict of strings, numbers, lists, dicts"
        ) from error
