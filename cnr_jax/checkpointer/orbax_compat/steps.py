"""Step directories of a root as Orbax's options name them, and what Orbax's policies are told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from cnr_jax.checkpointer.orbax_compat.items import METRICS, metrics_of
from cnr_jax.checkpointer.orbax_compat.options import deciding
from cnr_jax.checkpointer.orbax_compat.places import beginning, refuse_pipes
from cnr_jax.format.names import (
    ORBAX_METADATA,
    branch_generation,
    may_be_step,
    plain,
    step_number,
    superseded,
)
from cnr_jax.repository.index import catalogue
from cnr_jax.repository.index.folders import ORBAX_NOTE_BYTES
from cnr_jax.repository.markers import is_committed
from cnr_jax.repository.store import can, exists, names_in, read_small, store_of
from cnr_jax.texts import logger

_log = logger(__name__)
# Fewer steps are looked at one after the other.
_FEW = 8
# Number of requests at a time.
_AT_ONCE = 16
# Time of a step whose commit time is not read: before all others, and in a time zone as they are.
_UNKNOWN = datetime.datetime.min.replace(tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class StepInfo:
    """What policies of Orbax are told of a step.

    Attributes:
        step: number of the step.
        time: time at which this manager began to save the step, as Orbax tells policies. For a step
            that was there before, or is listed anew, the time of its commit.
        metrics: metrics that the step was saved with; None: there are none.
    """

    step: int
    time: datetime.datetime
    metrics: Any = None


class Steps:
    """All step directories of a root, whatever is in them.

    Args:
        root: root of the manager.
        options: options of Orbax, by which steps are named, due and ranked.
        left: function that returns the names of directories that rollbacks have left behind, and
            that are called like steps.

    Attributes:
        root: as given.
        options: as given.
        is_stale: whether the steps must be read again: that failed, or some may have come back.
    """

    def __init__(
        self,
        root: epath.Path,
        options: ocp.CheckpointManagerOptions,
        left: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.root, self.options = root, options
        self._names: Any = options.step_name_format
        self._names = self._names or ocp.path.step.standard_name_format(
            step_prefix=options.step_prefix,
            step_format_fixed_length=options.step_format_fixed_length,
            single_host_load_and_broadcast=options.single_host_load_and_broadcast,
            atomicity_options=options.atomicity_options,
        )
        self._policy, self._left = deciding(options), left
        self.is_stale = False
        # Replaced, never changed: other threads read it.
        self._infos: tuple[StepInfo, ...] = ()
        # Names of directories with a branch in them, which options do not give, by step number.
        self._branched: Mapping[int, str] = {}

    # Which steps there are.

    def reload(
        self, *, numbers_only: bool = False, left: Collection[str] | None = None
    ) -> None:
        """Reads again which steps there are.

        Times and metrics that cannot be read are left out with a warning; the time at which the
        directory last changed takes the place of the time. A step that is deleted meanwhile is left
        out without a warning.

        Args:
            numbers_only: whether to leave times and metrics for the next time.
            left: names of directories that rollbacks have left behind, as read anew; None: the
                class asks its own argument.
        """
        steps = self._found(self._left() if left is None else left)
        if numbers_only:
            found = [StepInfo(step.step, _UNKNOWN) for step in steps]
        elif len(steps) < _FEW:
            found = list(map(_info_of, steps))
        else:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                found = list(pool.map(_info_of, steps))
        self._keep(info for info in found if info is not None)
        called = {step.step: step.path.name for step in steps}
        self._branched = {
            n: name for n, name in called.items() if branch_generation(name)
        }
        self.is_stale = False

    def _found(self, left: Collection[str]) -> list[Any]:
        """Finds the steps: those that Orbax finds, and those that only this library knows.

        The latter are steps with a branch in their names, and the committed steps of a bucket.
        """
        is_known = can(self.root).paths
        if is_known and not exists(self.root):
            return []
        by_orbax = list(self._names.find_all(self.root)) if is_known else []
        held = store_of(self.root).folders_in(
            self.root, lambda n: may_be_step(n) and not (is_known and n == plain(n))
        )
        paths = [self.root / n for n in held if self._is_called_so(n) and n not in left]
        noted = catalogue.read(self.root).noted
        found = [step for step in by_orbax if step.path.name not in left]
        found += [
            _NotedStep(path, noted[path.name]) for path in paths if path.name in noted
        ]
        paths = [path for path in paths if path.name not in noted]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            looked = [*pool.map(_Listed.look, paths)]
            if not can(self.root).renames:
                is_step = pool.map(lambda s: is_committed(s.path, s.held), looked)
                looked = [
                    s for s, is_one in zip(looked, is_step, strict=True) if is_one
                ]
        found += looked
        gone = superseded(step.path.name for step in found)
        return [step for step in found if step.path.name not in gone]

    def _is_called_so(self, name: str) -> bool:
        """Whether a step directory is called as the options say, of whatever generation."""
        try:
            return self.new_directory(step_number(name)) == plain(name)
        except ValueError:  # of a format of the user's own
            return False

    def _keep(self, infos: Iterable[StepInfo]) -> None:
        self._infos = tuple(sorted(infos, key=lambda info: info.step))

    def infos(self) -> tuple[StepInfo, ...]:
        """What policies are told of each step, in the order of steps."""
        return self._infos

    def numbers(self) -> list[int]:
        """Numbers of all steps, in order."""
        return [info.step for info in self._infos]

    def add(self, info: StepInfo, directory: str) -> None:
        """Adds a step that was committed."""
        if branch_generation(directory):
            self._branched = {**self._branched, info.step: directory}
        self._keep([*(each for each in self._infos if each.step != info.step), info])

    def forget(self, steps: Collection[int]) -> None:
        """Leaves out steps that are no longer there."""
        known = self._branched.items()
        self._branched = {n: name for n, name in known if n not in steps}
        self._keep(info for info in self._infos if info.step not in steps)

    def forget_named(self, directories: Collection[str]) -> None:
        """Leaves out steps by their directories, which were moved out of the way of a save."""
        if directories:
            steps = self.numbers()
            named = {n: self._branched.get(n) or self.new_directory(n) for n in steps}
            self.forget([s for s, name in named.items() if name in directories])

    def check_is_new(self, step: int) -> None:
        """Checks that there is no such step.

        Raises:
            StepAlreadyExistsError: of Orbax, a ValueError, if there is.
        """
        if step in self.numbers():
            raise StepAlreadyExistsError(f"Checkpoint for step {step} already exists.")

    @property
    def are_broadcast(self) -> bool:
        """Whether reading the steps is a broadcast, in which all processes must take part."""
        return jax.process_count() > 1 and self.options.single_host_load_and_broadcast

    # What steps are called.

    def new_directory(self, step: int) -> str:
        """Name of the directory that a save of this step makes."""
        return self._names.build_name(step)

    def find_directory(self, step: int, root: epath.Path) -> epath.Path:
        """Path of the directory of a step that is there; new ones may have names of another form.

        Raises:
            ValueError: if there is no such step, and a format of the user's own names directories.
        """
        if root == self.root and step in self._branched:
            return root / self._branched[step]
        if root != self.root and (branched := self._branched_in(root, step)):
            return root / branched
        if self.options.step_name_format is not None:
            return self._names.find_step(root, step).path
        return root / self.new_directory(step)

    def _branched_in(self, root: epath.Path, step: int) -> str:
        """Name of a step with a branch in it, in another root; empty if there is none."""
        kept = store_of(root)
        if not kept.is_directory(root):
            return ""
        found = kept.folders_in(root, lambda n: plain(n) != n and may_be_step(n))
        found = [n for n in found if step_number(n) == step and self._is_called_so(n)]
        found = [n for n in found if can(root).renames or is_committed(root / n)]
        return max(found, key=branch_generation, default="")

    def existing_directory(self, step: int) -> str:
        """Name of the directory of a step of the root; if there is none, the one a save makes."""
        try:
            return self.find_directory(step, self.root).name
        except ValueError:
            return self.new_directory(step)

    # What is due, and best.

    def is_due(
        self,
        step: int,
        after: int | None,
        flying: Sequence[StepInfo],
        *,
        is_busy: bool,
    ) -> bool:
        """Whether a save is due.

        Args:
            step: number of the step to save.
            after: newest step that was saved or restored; no step up to it is due. None: none was.
            flying: steps that are being saved, which count too.
            is_busy: whether a save that began now would have to wait.
        """
        if self.options.read_only:
            _log.warning("%s is read only: nothing is saved", self.root)
            return False
        if after is not None and after >= step:
            return False
        checks = self.options.enable_should_save_is_saving_in_progress_check
        context = ocp.checkpoint_managers.DecisionContext(
            is_saving_in_progress=is_busy and checks,
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self.options.multiprocessing_options,
        )
        flown = {info.step for info in flying}
        before = [info for info in self._infos if info.step not in flown]
        before = sorted([*before, *flying], key=lambda info: info.step)
        # A continuous policy takes the number of a save of Orbax's.
        with beginning() if self._is_continuous else contextlib.nullcontext():
            asked = StepInfo(step, now())
            return bool(self._policy.should_save(asked, before, context=context))

    @property
    def _is_continuous(self) -> bool:
        policies = ocp.checkpoint_managers
        policy: Any = self.options.save_decision_policy
        inner = (
            policy.policies if isinstance(policy, policies.AnySavePolicy) else [policy]
        )
        kind = policies.ContinuousCheckpointingPolicy
        return any(isinstance(each, kind) for each in inner)

    def reached_preemption(self, step: int) -> bool:
        """Whether jax has chosen this step for the last save before the run is ended."""
        return bool(ocp.multihost.reached_preemption(step))

    @property
    def has_best(self) -> bool:
        """Whether steps are ranked by metrics."""
        return self.options.best_fn is not None

    def ranked(self) -> list[int]:
        """Steps with metrics, the best one last."""
        best: Any = self.options.best_fn
        ranked = sorted(
            (info for info in self._infos if info.metrics is not None),
            key=lambda info: best(info.metrics),
            reverse=self.options.best_mode == "min",
        )
        return [info.step for info in ranked]


def now() -> datetime.datetime:
    """The time, as policies are told it."""
    return datetime.datetime.now(tz=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class _Listed:
    """A step whose folder was looked into."""

    step: int
    path: Any
    held: Collection[str]

    @classmethod
    def look(cls, path: Any) -> _Listed:
        return cls(step_number(path.name), path, names_in(path))

    @property
    def commit_timestamp(self) -> datetime.datetime:
        noted = json.loads(read_small(self.path / ORBAX_METADATA, ORBAX_NOTE_BYTES))
        secs = noted["commit_timestamp_nsecs"] / 1e9
        return datetime.datetime.fromtimestamp(secs, tz=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class _NotedStep:
    """A step that a catalogue tells of."""

    path: Any
    noted: catalogue.Noted

    @property
    def step(self) -> int:
        return step_number(self.path.name)

    @property
    def info(self) -> StepInfo:
        time = datetime.datetime.fromtimestamp(self.noted.unix_secs, tz=datetime.UTC)
        return StepInfo(self.step, time, self.noted.metrics)


def _info_of(step: Any) -> StepInfo | None:
    """What policies are told of a step; None if it is gone."""
    if isinstance(step, _NotedStep):
        return step.info
    time, metrics = _UNKNOWN, None
    damaged: dict[str, Exception] = {}
    # Whatever those files hold, no error of reading them is raised.
    try:
        refuse_pipes(step.path)
        time = step.commit_timestamp
    except Exception as error:
        damaged["its time"] = error
    try:
        refuse_pipes(step.path)
        if not isinstance(step, _Listed) or METRICS in step.held:
            metrics = metrics_of(step.path)
    except Exception as error:
        damaged["its metrics"] = error
    if damaged:
        try:
            secs = store_of(step.path).modified_unix_secs(step.path)
        except FileNotFoundError:
            return None
        if "its time" in damaged:
            time = datetime.datetime.fromtimestamp(secs, tz=datetime.UTC)
    for what, error in damaged.items():
        _log.warning(
            "step %s goes without %s: what Orbax wrote there cannot be read (%s)",
            step,
            what,
            error,
        )
    return StepInfo(step.step, time, metrics)


class Unseen:
    """Format of the names of steps, for a manager of Orbax that must not look for any.

    Args:
        steps: steps of the root, which knows what steps are called.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def build_name(self, step: int) -> str:
        """Name of the directory of a step."""
        return self._steps.new_directory(step)

    def find_all(self, base_path: Any) -> Any:
        """Finds no steps."""
        return iter(())

    def find_step(self, base_path: Any, step: int) -> Any:
        """Finds no step.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"step {step} is not looked for below {base_path}")
