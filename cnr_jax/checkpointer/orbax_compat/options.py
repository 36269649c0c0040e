"""Orbax's options: what a user may give, and what a manager makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.repository.committer import Committer, committer_for
from cnr_jax.repository.store import AnyPath

# Those of Orbax's options that say when a save is due.
_WHEN = (
    "save_interval_steps",
    "save_on_steps",
    "should_save_fn",
    "save_decision_policy",
)


def checked_orbax_options(
    orbax_options: object, interval: str | None = None
) -> ocp.CheckpointManagerOptions:
    """Checks the options for Orbax; returns them, or the default ones if none were given.

    They must leave every process its usual part. If `interval` says when a save is due, they must
    not say it too.

    Raises:
        OptionError: if they are of another kind, give the part of process 0 to another process,
            leave processes out, ask for what this library does in its own way, or say when a save
            is due though `interval` does.
    """
    if not isinstance(orbax_options, ocp.CheckpointManagerOptions | None):
        raise errors.OptionError(
            f"orbax_options is {type(orbax_options).__name__}, expected"
            " ocp.CheckpointManagerOptions\n"
            "  hint: cnr_jax.Options are given as options="
        )
    given = orbax_options.multiprocessing_options if orbax_options else None
    if given and (given.primary_host != 0 or given.active_processes is not None):
        raise errors.OptionError(
            "all processes of a run save together, and process 0 plans, commits and deletes\n"
            f"  got multiprocessing_options with primary_host={given.primary_host!r} and"
            f" active_processes={given.active_processes!r}; expected 0 and None\n"
            "  hint: leave both out; barrier_sync_key_prefix works"
        )
    if orbax_options and orbax_options.temporary_path_class is not None:
        raise errors.OptionError(
            "temporary_path_class is not taken: steps are committed by this library\n"
            f"  got {orbax_options.temporary_path_class!r}, expected None"
        )
    asked = orbax_options.async_options if orbax_options else None
    if asked and asked.barrier_sync_fn is not None:
        raise errors.OptionError(
            "barrier_sync_fn is not taken: processes tell each other by jax.distributed how a save"
            " goes, and meet at no barrier\n"
            f"  got {asked.barrier_sync_fn!r}, expected None\n"
            "  hint: Options(timeout_secs=...) says how long they wait for each other"
        )
    usual = ocp.CheckpointManagerOptions()
    orbax_options = orbax_options or usual
    for name in _WHEN if interval else ():
        if (said := getattr(orbax_options, name)) != getattr(usual, name):
            raise errors.OptionError(
                "it is said twice when a save is due: options and orbax_options\n"
                f"  got interval={interval!r} and {name}={said!r}\n"
                "  hint: leave one of them out"
            )
    return orbax_options


def check_deletion(root: AnyPath, options: ocp.CheckpointManagerOptions) -> None:
    """Checks that `todelete_full_path` is not set, as steps that go are deleted.

    Raises:
        OptionError: if it is set.
    """
    if options.todelete_full_path is None:
        return
    raise errors.OptionError(
        "todelete_full_path is not taken: steps that go are deleted\n"
        f"  got {options.todelete_full_path!r} for {root}\n"
        "  hint: todelete_subdir keeps removed steps in a folder of a local root"
    )


def with_retention(
    orbax_options: ocp.CheckpointManagerOptions,
    own: Any,
    wrap: Callable[[Any], Any],
    *,
    is_near: bool = False,
) -> ocp.CheckpointManagerOptions:
    """Options in which one policy retains steps, in whichever way the user asked for retention.

    Args:
        orbax_options: options of the user.
        own: policy that the user gave elsewhere, or that of a near root; None: neither.
        wrap: function that makes the policy from the user's, which is None if all steps stay.
        is_near: whether `own` is the policy of a near root.

    Raises:
        OptionError: if retention is given twice.
    """
    theirs = orbax_options.preservation_policy
    classic = (
        orbax_options.max_to_keep is not None  # 0: nothing is kept, as by Orbax
        or orbax_options.keep_period
        or orbax_options.keep_time_interval
    )
    if is_near and (theirs is not None or classic):
        raise errors.OptionError(
            "with Options(near=...) orbax_options retain no steps: the root is a mirror\n"
            "  hint: Options(mirror_keep=N) says which steps stay there"
        )
    if own is not None and (theirs is not None or classic):
        raise errors.OptionError(
            "retention is given twice: options.preservation_policy and orbax_options"
        )
    if own is None:
        own = theirs
    if own is None and classic:
        own = _classic_policy(orbax_options)
    return dataclasses.replace(
        orbax_options,
        # The one policy alone says what is kept, as it knows parents.
        max_to_keep=None,
        keep_period=None,
        keep_time_interval=None,
        preservation_policy=wrap(own),
    )


def _classic_policy(orbax_options: ocp.CheckpointManagerOptions) -> Any:
    """`max_to_keep` and its kin as a policy."""
    policies = ocp.checkpoint_managers
    found: list[Any] = []
    if orbax_options.best_fn is not None:
        found.append(
            policies.BestN(
                get_metric_fn=orbax_options.best_fn,
                reverse=orbax_options.best_mode == "min",
                n=orbax_options.max_to_keep,
                keep_checkpoints_without_metrics=(
                    orbax_options.keep_checkpoints_without_metrics
                ),
            )
        )
    else:
        found.append(policies.LatestN(orbax_options.max_to_keep))
    if orbax_options.keep_period is not None:
        found.append(policies.EveryNSteps(orbax_options.keep_period))
    if orbax_options.keep_time_interval is not None:
        secs = int(orbax_options.keep_time_interval.total_seconds())
        found.append(policies.EveryNSeconds(secs))
    return found[0] if len(found) == 1 else policies.AnyPreservationPolicy(found)


class _Given:
    """`should_save_fn` as a policy."""

    def __init__(self, decide: Callable[[int, int | None], bool]) -> None:
        self._decide = decide

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Whether a save is due."""
        return self._decide(
            step.step, previous_steps[-1].step if previous_steps else None
        )


def deciding(options: ocp.CheckpointManagerOptions) -> Any:
    """The policy that says when a save is due, made of the user's options as Orbax makes it."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    policies = ocp.checkpoint_managers
    preempted = policies.PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        given: Any = _Given(options.should_save_fn)
        return policies.AnySavePolicy([given, preempted])
    found: list[Any] = []
    if options.save_interval_steps is not None:
        found.append(policies.FixedIntervalPolicy(options.save_interval_steps))
    if options.save_on_steps is not None:
        found.append(policies.SpecificStepsPolicy(options.save_on_steps))
    return policies.AnySavePolicy([*found, preempted, policies.InitialSavePolicy()])


def preservation_context() -> Any:
    """Context in which Orbax's preservation policies are asked."""
    return ocp.checkpoint_managers.PreservationContext()


def committer_of(
    root: AnyPath,
    options: ocp.CheckpointManagerOptions,
    discard: Callable[[str], None],
    check_claim: Callable[[], None],
) -> Committer:
    """Chooses how steps of a root are committed: by a rename where its store can.

    `atomicity_options` are not asked: readers of a store that renames take every folder with the
    name of a step for a committed one, so no file could commit it there.

    Args:
        root: root of the manager.
        options: options of the user.
        discard: removes a folder of the root that no reader lists.
        check_claim: raises if the root was taken over by another writer.
    """
    mode = options.file_options.path_permission_mode
    return committer_for(root, discard, check_claim, mode)


def options_of_base(
    options: ocp.CheckpointManagerOptions, names: Any
) -> ocp.CheckpointManagerOptions:
    """Options with which a manager of Orbax neither looks for steps nor saves or deletes any.

    Args:
        options: options of the user.
        names: format of the names of steps.
    """
    return dataclasses.replace(
        options,
        step_name_format=names,
        single_host_load_and_broadcast=False,
        cleanup_tmp_directories=False,
        enable_async_checkpointing=False,
        async_options=None,
        todelete_subdir=None,
        enable_background_delete=False,
        preservation_policy=None,
        lightweight_initialize=True,
    )
