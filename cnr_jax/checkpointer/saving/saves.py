"""The saves of a manager: each ends once, committed and durable, or with one error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from cnr_jax import errors
from cnr_jax.args import Save, planned_args
from cnr_jax.checkpointer.multihost import Channel, agree, all_succeed, on_primary
from cnr_jax.checkpointer.orbax_compat.items import Items
from cnr_jax.checkpointer.orbax_compat.steps import StepInfo, Steps, now
from cnr_jax.checkpointer.save_errors import as_save_errors, without_frames
from cnr_jax.checkpointer.saving.calls import Calls
from cnr_jax.checkpointer.saving.chain_look import is_dropped
from cnr_jax.checkpointer.saving.due import Progress
from cnr_jax.checkpointer.saving.in_flight import SaveInFlight
from cnr_jax.checkpointer.saving.lifecycle import Lifecycle
from cnr_jax.checkpointer.saving.meter import Meter
from cnr_jax.checkpointer.saving.pipeline import SavePipeline
from cnr_jax.checkpointer.saving.retirement import Retirement
from cnr_jax.checkpointer.tracking.tracker import ChangedRows
from cnr_jax.format import names
from cnr_jax.goodput.measurements import Measurements
from cnr_jax.options import Options
from cnr_jax.repository.committer import Attempt, Committer
from cnr_jax.repository.index.catalogue import Noted
from cnr_jax.repository.index.entries import entry_of
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.save_plan import SavePlan
from cnr_jax.repository.layout import Place, check_is_free
from cnr_jax.repository.store import AnyPath, can, exists
from cnr_jax.repository.upkeep.claim import called_at, calling_line
from cnr_jax.repository.upkeep.writer import RootWriter
from cnr_jax.rows.tiling import settings_here
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class Saves:
    """The saves of a manager, also those that hold no state of ours but only other items.

    Args:
        committer: committer of the saves.
        steps: steps of the root.
        items: items of a step, which know how each is written.
        lifecycle: finds out what became of each save.
        writer: writer of the root.
        retirement: removes steps that saves make superfluous.
        progress: notes saves that begin and end.
        calls: calls of the manager.
        channel: channel to the other processes.
        plan: function that decides on the save of a state.
        warm_up: function that is called with each plan, before any of its save is staged.
        before_commit: function of the user that is called right before a commit.
        options: options of the run.
        learn: function that is called with measurements of what saves took.

    Attributes:
        pipeline: pipeline that the saves go through.
        steps: steps of the root.
        retirement: removes steps that saves make superfluous.
        meter: measures what saves take.
    """

    _committer: Committer
    steps: Steps
    _items: Items
    _lifecycle: Lifecycle
    _writer: RootWriter
    retirement: Retirement
    _progress: Progress
    _calls: Calls
    _channel: Channel
    _plan_state: Callable[[Place, Save, bool], tuple[SaveInFlight, ChangedRows]]
    _warm_up: Callable[[SavePlan], None]
    _before_commit: Callable[[], None]
    _options: Options
    _learn: Callable[[Measurements], None]
    # Mark of the call that is beginning a save. Neither calls inside it, nor a signal handler that
    # runs in the middle of it, may wait for that save.
    _inside: object | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.pipeline = SavePipeline[SaveInFlight](
            self._committer,
            self._channel,
            work=self,
            most=self._options.max_in_flight,
        )
        self.meter = self._lifecycle.meter = Meter(
            self.steps.root,
            self.pipeline.in_flight,
            is_noted=lambda: self._writer.writes,
            is_new=self._options.new_run,
            learn=self._learn,
        )
        self._lifecycle.listener.keep = self.meter.keep

    @property
    def ledger(self) -> Ledger:
        """Ledger of the root; empty until the first save names the item."""
        return self._writer.ledger or Ledger()

    def flying(self) -> list[StepInfo]:
        """Steps that are being saved, in the form that Orbax policies take."""
        saves = self.pipeline.unnoted()
        return [info for save in saves if (info := save.info) is not None]

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
    ) -> SaveInFlight:
        """Plans and begins a save.

        Args:
            step: number of the step.
            item: name of the item that holds the state.
            args: arguments of all items.
            state: the state among them; None if only other items are saved.
            metrics: metrics of the step.
            custom_metadata: metadata of the step, as JSON.
            urgent: whether this is the last save of a run.

        Raises:
            CnrError: if the step cannot be saved; nothing has changed then.
        """
        if self._writes_metrics:
            as_json("metrics", metrics)
        self._inside = self._calls.current
        settings, where = settings_here(), str(self.steps.root)
        called = called_at.set(calling_line())

        planned: Any = None

        def plan() -> SaveInFlight:
            nonlocal planned
            save, planned = self._plan(step, item, state, urgent)
            save.info = StepInfo(step, now(), metrics)
            return save

        def prepare(save: SaveInFlight) -> None:
            nonlocal planned
            self._note_begun(save, state)
            own, planned = planned_args(args, state, planned), None
            save.step_items = self._items.begin(
                own, self._metrics_of(metrics, step), custom_metadata
            )

        try:
            with as_save_errors(step, where):
                save = self.pipeline.begin(plan, prepare, settings)
            self.meter.returns(save)
            return save
        except BaseException:
            self._inside = None
            # If an interrupt keeps this call from it, the next call does it.
            if not self.pipeline.is_beginning:
                with contextlib.suppress(Exception):  # which would hide why
                    self._settle()
            raise
        finally:
            self._inside = None
            called_at.reset(called)
            for save in tuple(self._lifecycle.open):
                save.returned.open()

    def _plan(
        self, step: int, item: str, state: Save | None, urgent: bool
    ) -> tuple[SaveInFlight, Any]:
        """Decides on a save, on all processes or none; returns also what `planned_args` takes."""
        root, directory = self.steps.root, self.steps.new_directory(step)
        if state is not None:
            # The root may be one that cannot be read or claimed.
            with as_save_errors(step, str(root)):
                planned = self._plan_state(Place(root, directory, item), state, urgent)
            return planned[0], planned
        # The step would not do as a nonce: files of a failed save of that step may still be there.
        nonce = agree(self._channel, None, decide=lambda _: secrets.token_hex(16))
        return SaveInFlight(
            attempt=Attempt(root, directory, str(nonce)), item=item
        ), None

    def _note_begun(self, save: SaveInFlight, state: Save | None) -> None:
        """Notes a save that is decided, and the steps that are moved out of its way."""
        nonce = save.attempt.nonce
        self._progress.begin(nonce, save.step, state.touched if state else None)
        if save.decided:
            self.meter.begins(save)
        # Steps that were moved aside are not in the way of the new ones.
        self.steps.forget_named(save.decided.abandoned if save.decided else ())
        if save.decided and self._writer.changed:
            self._lifecycle.wait()  # each adds its step
            all_succeed(self._channel, self.steps.reload)
            self._writer.changed = False
        self.steps.check_is_new(save.step)
        if not save.decided:
            check_not_in_the_way(save.step, save.place)

    def _metrics_of(self, metrics: Any, step: int) -> Any:
        """Metrics that are written with a step; None: none are."""
        if self.steps.has_best and metrics is None:
            _log.warning("step %d is ranked by metrics, but has none", step)
        return metrics if self._writes_metrics else None

    @property
    def _writes_metrics(self) -> bool:
        return self.steps.has_best and not self.steps.options.prevent_write_metrics

    # Waiting.

    def make_room(self, *, alone: bool) -> None:
        """Waits until a save may begin beside those in flight, or until there are none.

        Args:
            alone: whether to wait for all saves in flight.

        Raises:
            SaveError: if a save failed; each failure is raised once.
        """
        if alone or self.pipeline.most == 1:
            self.wait()
            return

        def make() -> list[str]:
            flying = self.pipeline.in_flight()
            if all(each.decided and not each.decided.abandoned for each in flying):
                self.pipeline.make_room()
            else:
                self.pipeline.wait()
            self.pipeline.ended()  # waits for those that rest on one that failed
            return [each.attempt.nonce for each in self.pipeline.in_flight()]

        self.pipeline.end_beginning()
        # Each process sees threads end at another time, so process 0 says which saves are over,
        # and all processes raise the same.
        flying = on_primary(self._channel, make)
        for save in self.pipeline.unnoted():
            if save.attempt.nonce not in flying:
                save.thread.wait()
        self._settle()
        self._raise_failure(flying)

    def wait(self) -> None:
        """Waits for the saves that are being written, and until `on_save` has been called.

        Raises:
            SaveError: if a save failed; each failure is raised once.
            CallError: inside `on_save`.
        """
        self._calls.refuse_in_on_save("wait_until_finished")
        if self.pipeline.is_here():
            return  # the caller is a handler or a callback that a save waits for
        is_inner = True
        try:
            with self._calls.lock:
                # An inner call does not wait for `on_save`; neither does an interrupted one.
                is_inner = self._calls.current is not None
                self._wait()
        except Exception:
            if not is_inner:
                self._lifecycle.listener.wait()
            raise
        if not is_inner:
            # Without the lock, as `on_save` may ask which steps there are.
            self._lifecycle.listener.wait()
        # Last, so that an interrupt in the lines above does not take the place of the failure.
        self._raise_failure()

    def check(self) -> None:
        """Raises the error of a save that has ended; like `wait`, but does not wait."""
        self._calls.refuse_in_on_save("check_for_errors")
        if self.pipeline.is_here() or not self._have_ended():
            return
        with self._calls.lock:
            if self._have_ended() and not self._is_inside():
                self._settle()
                self._raise_failure()

    def _have_ended(self) -> bool:
        """Whether saves have ended that are not noted yet, with those that they take down."""
        over = [save for save in self.pipeline.unnoted() if save.is_over]
        failed = [save for save in over if not save.is_committed]
        fallen = (each for save in failed for each in self.pipeline.fallen_with(save))
        all_over = all(each.is_over for each in fallen)
        return bool(over) and all_over and not self.pipeline.is_beginning

    def _wait(self) -> None:
        if not self._is_inside():
            self.pipeline.wait()
            self._settle()

    def _raise_failure(self, flying: Collection[str] = ()) -> None:
        """Raises the error of a failed save, unless it was raised before.

        Saves that it has taken down failed for the same reason, which is raised only once.

        Args:
            flying: nonces of saves that process 0 still has in flight, which are left out.
        """
        with self._calls.lock:
            for save in () if self._is_inside() else self.pipeline.ended():
                failure = _failure_of(save)
                if failure is not None and save.attempt.nonce not in flying:
                    fallen = self.pipeline.fallen_with(save)
                    for each in fallen if not save.is_committed else [save]:
                        self._note(
                            each
                        )  # another thread may have begun that save since
                        self.pipeline.forget(each)
                    raise failure

    def _is_inside(self) -> bool:
        """Whether this runs inside the call that is beginning a save."""
        return self._inside is not None and self._inside is self._calls.current

    def settle(self) -> None:
        """Notes what became of saves that have ended."""
        if not self._is_inside() and not self.pipeline.is_here():
            self._settle()

    def _settle(self) -> None:
        self.pipeline.end_beginning()
        for save in self.pipeline.ended():
            self._note(save)
            if (failure := _failure_of(save)) is None:
                self.pipeline.forget(save)
            else:
                # The pipeline keeps the save until its error is raised.
                self._lifecycle.last_failure = without_frames(failure)
        if self.pipeline.is_busy:
            return
        if not self._lifecycle.open and self._writer.is_prepared:
            self.steps.is_stale |= self._lifecycle.withdraw()
        if self.steps.is_stale:
            self.reread()

    def _note(self, save: SaveInFlight) -> None:
        """Finds out what became of a save, and notes it.

        If an interrupt ends this, the next call does it again from the beginning.
        """
        is_seen = save.is_committed
        if not save.decided:
            self.retirement.let_go(save.attempt, is_seen)
        if save in self._lifecycle.open:
            is_seen = self._lifecycle.settle_one(save) is not None
        self._progress.ended(save.attempt.nonce, committed=is_seen)
        if not save.is_committed:
            self._lifecycle.withdraw(save)
            if save.decided and save.decided.abandoned:
                self.reread()  # steps that were moved aside are back
        save.info = None  # it is not being saved any more

    def reread(self) -> None:
        """Reads again which steps the root has; if it cannot be read, a later call tries again."""
        if self.steps.are_broadcast:
            # All processes reload the steps in the next save.
            self._writer.changed = True
            self.steps.is_stale = False
            return
        try:
            self.steps.reload()
        except OSError as error:
            _log.warning("%s cannot be read now: %s", self.steps.root, error)
            self.steps.is_stale = True

    # In the threads of the pipeline, as its `Work`.

    def items(self, save: SaveInFlight) -> Sequence[str]:
        """Names of the items of a step."""
        assert save.step_items is not None
        return tuple(save.step_items.handlers)

    def stage(self, save: SaveInFlight, folder: AnyPath) -> Sequence[Any]:
        """Starts to write all items of a step."""
        if save.decided is not None:
            # Only now, when the save has begun on all processes: this one alone may fail in it.
            self._warm_up(save.decided)
        assert save.step_items is not None
        if save.prepared is not None and [*save.step_items.handlers] != [save.item]:
            save.prepared.result()  # other items are written at once, and need their folder
        return save.step_items.stage(folder)

    def cancel(self, save: SaveInFlight, why: BaseException) -> None:
        """Ends staging and writing early."""
        items = save.step_items
        if items is not None:
            items.cancel()
        save.give_up(why)

    def seal(self, save: SaveInFlight, folder: AnyPath) -> Collection[str]:
        """Finishes the items of a step; returns the names of those that are durable already."""
        assert save.step_items is not None
        with self._looking(save):
            save.step_items.finalize(folder)
            self._before_commit()
        if not save.decided:
            self._writer.check_claim()  # where a state is saved, its handler does
        own = [save.item] if save.decided else []
        return [*own, names.ORBAX_METADATA]

    @contextlib.contextmanager
    def _looking(self, save: SaveInFlight) -> Iterator[None]:
        """Looks at the chain of a save: after the block, or beside it where a look is a request."""
        if can(self.steps.root).cheap_looks:
            yield
            self._lifecycle.look_before(save)
            return
        with concurrent.futures.ThreadPoolExecutor(1, "cnr_look") as pool:
            looking = pool.submit(self._lifecycle.look_before, save)
            yield
        looking.result()

    def make_durable(self, save: SaveInFlight) -> None:
        """Makes a commit durable."""
        try:
            self._committer.settle(save.attempt)
        except OSError as error:
            self._lifecycle.synced(error)
            raise
        self._lifecycle.synced(None)

    def published(self, save: SaveInFlight) -> Any:
        """Decides which steps retention removes after a commit."""
        plan = save.decided
        left = plan.abandoned if plan and plan.leaves_behind else ()
        self._writer.show(save.attempt.directory, left)
        infos = [each for each in self.steps.infos() if each.step != save.step]
        infos += [save.info] if save.info is not None else []
        infos = sorted(infos, key=lambda info: info.step)
        gaps = self._writer.gaps
        known = (
            gaps.taken()
        )  # first, so that retention decides with at least these gaps known
        leaving = self.retirement.decide(infos, save.attempt)
        try:
            self._lifecycle.look_after(save, leaving, known)
        except Exception:
            self.retirement.stayed(leaving)  # nothing is removed if the look failed
            raise
        # Only now: the next save, which may be planned from here on, takes the gaps found above.
        if leaving and (unknown := gaps.beside(known)):
            self.retirement.spare(leaving, unknown[0])
            leaving = []
        return {"leaving": leaving}

    def committed(self, save: SaveInFlight, told: Any) -> None:
        """Notes a commit and reports it, unless retention removes the step at once."""
        self.meter.durable(save)
        leaving = told["leaving"] if told else ()
        assert save.info is not None
        # First, or for a moment policies would see it neither as a step nor as a save.
        self.steps.add(save.info, save.attempt.directory)
        save.info = None
        self.retirement.note(leaving, save.attempt)
        self._lifecycle.report_commit(save)

    def retire(self, save: SaveInFlight, told: Any) -> Any:
        """Removes the steps that retention has let go of; returns which are gone and which stay."""
        stay = self.retirement.remove(told["leaving"])
        gone = [step for step in told["leaving"] if step not in stay]
        if save.step not in gone:
            self._note_own(save)
        self.put_catalogue()
        plan, manifest = save.decided, save.manifest
        # Rows that have grown out of their step make the next save full: no baseline would be used.
        has_grown = manifest is not None and bool(manifest.outgrown)
        if plan is not None and plan.merges and not has_grown and save.step not in gone:
            self._lifecycle.merge(self.steps.root, save)
        return {"gone": gone, "stay": stay}

    def _note_own(self, save: SaveInFlight) -> None:
        """Notes a committed save for the catalogue."""
        items, manifest = save.step_items, save.manifest
        if items is not None and manifest is not None:
            entry = entry_of(save.attempt.directory, manifest)
            secs = items.committed_nsecs / 1e9
            self._writer.note_own(entry, Noted(unix_secs=secs, metrics=items.metrics))

    def put_catalogue(self) -> None:
        """Writes the catalogue of steps into a root in which each look is a request; process 0."""
        if not can(self.steps.root).conditions or self._writer.place is None:
            return
        others = {
            self.steps.existing_directory(info.step): Noted(
                unix_secs=info.time.timestamp(), metrics=info.metrics
            )
            for info in self.steps.infos()
            if info.time.tzinfo is not None  # else it was not read
        }
        self._writer.put_catalogue(others)

    def retired(self, save: SaveInFlight, told: Any) -> None:
        """Notes which steps are gone, and which stay although retention let go of them."""
        if told is not None:
            self.retirement.stayed(told["stay"])
            self.steps.forget(told["gone"])

    def failed(self, save: SaveInFlight, error: errors.CnrError) -> None:
        """Logs why a save failed, or what comes after its commit did."""
        self._lifecycle.end_writing(save)
        self._lifecycle.fail(save, error)

    def ended(self, save: SaveInFlight) -> None:
        """Ends a save: from here on other managers may write, as far as it is concerned."""
        self.meter.over(save)
        save.step_items = None  # they may still hold the state
        self._lifecycle.end_writing(save)
        self._lifecycle.report_unwanted(save)


def _failure_of(save: SaveInFlight) -> errors.CnrError | None:
    """Error of a save, or of what comes after its commit, if a later call is to raise it."""
    return save.error if save.has_begun and not is_dropped(save.error) else None


def check_not_in_the_way(step: int, place: Place) -> None:
    """Checks that no unknown folder and no file has the name of a new step.

    Raises:
        DependentsExistError: if one has.
    """
    check_is_free(place.root, place.directory)
    path = place.root / place.directory
    if exists(path):
        raise errors.DependentsExistError(
            f"step {step} cannot be saved: {path} is there already\n"
            "  hint: save another step, or move that folder out of the root",
            kind="step_exists",
        )


def as_json(name: str, given: Any) -> str:
    """Converts metrics or metadata that the user gives with a step to JSON.

    Args:
        name: name of the argument of `save`.
        given: its value.

    Raises:
        OptionError: if JSON does not take it; names the key.
    """
    try:
        return json.dumps(given or {})
    except (TypeError, ValueError) as error:
        keys = given if isinstance(given, Mapping) else ()
        wrong = (f"{name}[{key!r}]" for key in keys if not _is_json(given[key]))
        raise errors.OptionError(
            f"{next(wrong, name)} cannot be saved: {error}\n"
            "  got what JSON does not take, expected a dict of strings, numbers, lists, dicts\n"
            "  hint: float(...) makes a number of an array"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
