"""Due saves: whether a call of `save` saves, by the interval or as the last save of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from cnr_jax.args import Save
from cnr_jax.checkpointer.multihost import Channel, on_primary
from cnr_jax.checkpointer.orbax_compat.distributed import is_distributed
from cnr_jax.checkpointer.orbax_compat.steps import StepInfo, Steps
from cnr_jax.checkpointer.saving.interval import Interval
from cnr_jax.checkpointer.saving.preemption import Sigterm
from cnr_jax.options import Options
from cnr_jax.rows.touched import Touched, clock_of, lineage_hex
from cnr_jax.texts import logger

_log = logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Tip:
    """Tip of a run: the step that saving goes on from, the last one a manager saved or restored."""

    step: int
    lineage: str
    clock: int


class Progress:
    """Progress of the saves of one manager: where they have got to, and which step is due next.

    Args:
        steps: steps of the root; they know the user's intervals.
        flying: function that returns the steps that are being saved.
        is_full: function that says whether a further save would have to wait for one in flight.
        uses: function that says whether saves use the given touched rows.
        channel: channel to the other processes.
        options: options of the run.
        tick: function that is called with the number of each step that is done.
        interval: interval between saves, if no option of the user sets it.

    Raises:
        OptionError: if it should listen to SIGTERM, but is not made in the main thread.
    """

    def __init__(
        self,
        steps: Steps,
        flying: Callable[[], Sequence[StepInfo]],
        is_full: Callable[[], bool],
        uses: Callable[[Touched | None], bool],
        channel: Channel,
        options: Options,
        tick: Callable[[int], None],
        interval: Interval | None,
    ) -> None:
        self._tick, self._interval = tick, interval
        self._steps, self._flying, self._is_full = steps, flying, is_full
        self._uses, self._channel = uses, channel
        self._skips = options.when_busy == "skip"
        self._sigterm: Sigterm | None = None
        if options.save_on_sigterm and not is_distributed():
            self._sigterm = Sigterm()
        # `_sure` is the tip by what was committed or restored. `_begun` has the tips of saves whose
        # outcome is not known, by nonce, in order.
        self._sure: Tip | None = None
        self._begun: dict[str, Tip] = {}

    @property
    def tip(self) -> Tip | None:
        """Tip of the run; None for a manager that starts anew, whatever its root holds."""
        return next(reversed(self._begun.values()), self._sure)

    def listen(self) -> None:
        """Starts to listen to SIGTERM, which then makes a save due, if the options ask for that."""
        if self._sigterm is not None:
            self._sigterm.listen()

    def close(self) -> None:
        """Stops listening; warns if SIGTERM asked for a save and none was begun."""
        if self._sigterm is None:
            return
        self._sigterm.close()
        if self._sigterm.is_unheard:
            _log.warning(
                "SIGTERM came, and no save after it: the run can go on from %s.\n  hint: call"
                " save at every step, or `if step %% n == 0 or"
                " manager.reached_preemption(step)`",
                f"step {self.tip.step}" if self.tip else "no step",
            )

    def reached_preemption(self, step: int) -> bool:
        """Whether the run is about to be ended, and this is the step of its last save."""
        if self._sigterm is not None and self._sigterm.reached(step):
            return True
        return self._steps.reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Whether a save at this step is due, counted from the tip."""
        self._tick(step)
        if self._interval is not None and not self._interval.is_due(step):
            return self._is_last(step)
        tip = self.tip
        after = tip.step if tip else None
        if self._steps.is_due(step, after, self._flying(), is_busy=self._is_full()):
            return True
        return self._is_last(step)

    def _is_last(self, step: int) -> bool:
        tip = self.tip
        ahead = tip is None or step > tip.step
        is_read_only = self._steps.options.read_only
        return ahead and not is_read_only and self.reached_preemption(step)

    def is_passed(self, step: int, should_save: Callable[[int], bool]) -> bool:
        """Whether a step comes before the next save, so that nothing needs to be done at it.

        This only looks at the number of the step. False where that does not suffice.
        """
        interval = self._interval
        return interval is not None and interval.goes_on(step) and not should_save(step)

    def begin(self, nonce: str, step: int, touched: Touched | None) -> None:
        """Notes that a save begins; it is the tip unless it fails."""
        if self._sigterm is not None:
            self._sigterm.is_unheard = False
        self._begun[nonce] = self._tip_at(step, touched)
        if self._interval is not None:
            self._interval.start_at(step)

    def ended(self, nonce: str, *, committed: bool) -> None:
        """Notes what became of a save; if it failed, the tip is the one before it again."""
        if committed:
            self._sure = self._begun.get(nonce, self._sure)
        self._begun.pop(nonce, None)

    def restored(self, step: int, touched: Touched | None) -> None:
        """Notes that a step was restored."""
        tip = self._tip_at(step, touched)
        # Without touched rows it is not known whether training goes on from the restored state.
        # If it does, its next steps are due either way.
        if tip.lineage or self.tip is None or step < self.tip.step:
            self._start_at(tip)

    def _start_at(self, tip: Tip | None) -> None:
        self._begun, self._sure = {}, tip
        if self._interval is not None:
            self._interval.start_at(tip and tip.step)

    def _leaves(self, step: int, touched: Touched | None) -> bool:
        """Whether an older step holds a state that does not rest on the tip, rather than repeats.

        Such a state comes from a new run in a used root, from going on after another step was
        evaluated, or from a rollback in memory. If so, saving starts anew: there is no tip.
        """
        tip = self.tip
        if tip is None or step > tip.step or not self._uses(touched):
            return False
        # This waits for the train step. Steps after the tip do not get here.
        new = self._tip_at(step, touched)
        if new.lineage == tip.lineage and new.clock >= tip.clock:
            return False
        self._start_at(None)
        return True

    def is_due(
        self, step: int, state: Save | None, should_save: Callable[[int], bool]
    ) -> bool:
        """Whether a save that is not forced is due; the tip may be given up for that.

        Args:
            step: number of the step.
            state: state that is saved; None if only other items are.
            should_save: method of the manager; a subclass may have its own, as with Orbax.
        """
        if should_save(step):
            return True
        if state and self._leaves(step, state.touched) and should_save(step):
            return True
        if self.tip is not None and step < self.tip.step:
            _log.warning(
                "step %d is not saved: the run has gone on to step %d",
                step,
                self.tip.step,
            )
        return False

    def is_left_out(self, step: int) -> bool:
        """Whether a save that is due is skipped because it would have to wait."""
        # The threads of processes end at slightly different times, so process 0 decides for all.
        busy = self._skips and bool(on_primary(self._channel, self._is_full))
        if busy:
            _log.info("step %d is not saved: saves before it are being written", step)
        return busy

    def _tip_at(self, step: int, touched: Touched | None) -> Tip:
        if touched is None or not self._uses(touched):
            return Tip(step, "", 0)
        return Tip(step, lineage_hex(touched), clock_of(touched))
