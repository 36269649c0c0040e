"""Orbax's options: what a user may give, and what a manager makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.options import Options
from cnr_jax.repository.store import AnyPath, can


def checked_orbax_options(orbax_options: object) -> ocp.CheckpointManagerOptions:
    """The options for Orbax that were given, or its default ones.

    Processes must have the usual parts in them.

    Raises:
        OptionError: if they are of another kind, or give the part of process 0 to another, or
            leave processes out.
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
    return orbax_options or ocp.CheckpointManagerOptions()


def with_retention(
    orbax_options: ocp.CheckpointManagerOptions,
    options: Options,
    wrap: Callable[[Any], Any],
) -> ocp.CheckpointManagerOptions:
    """Options in which a single policy retains steps, whichever way the user asked for one.

    Args:
        orbax_options: the user's.
        options: the user's own policy may be here instead.
        wrap: makes the policy from the user's own, which is None where all is to be kept.

    Raises:
        OptionError: if retention is given twice.
    """
    own, theirs = options.preservation_policy, orbax_options.preservation_policy
    classic = (
        orbax_options.max_to_keep is not None  # 0: nothing is kept, as by Orbax
        or orbax_options.keep_period
        or orbax_options.keep_time_interval
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
        # What is to be kept is for the one policy to say, which knows parents.
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


def with_safety(
    root: AnyPath,
    options: ocp.CheckpointManagerOptions,
    before_commit: Callable[[], None],
    barriers: Callable[..., None],
) -> ocp.CheckpointManagerOptions:
    """Options with which `before_commit` runs when a step is written but not yet renamed.

    Only asynchronous saves, which are the default, have such a place. In local roots Orbax does
    not delete temporary directories at a start: somebody may be writing them. The first save
    does, if nobody is.

    Args:
        root: of the manager.
        options: the user's.
        before_commit: called in the background.
        barriers: where processes meet, unless the user gave others; they do not hang.
    """
    if can(root).renames:
        options = dataclasses.replace(options, cleanup_tmp_directories=False)
    if not options.enable_async_checkpointing:
        return options
    given = options.async_options or ocp.AsyncOptions()
    callback, theirs = before_commit, given.post_finalization_callback
    if theirs is not None:

        def callback() -> None:
            before_commit()
            theirs()

    own = dataclasses.replace(given, post_finalization_callback=callback)
    if jax.process_count() > 1 and given.barrier_sync_fn is None:
        own = dataclasses.replace(own, barrier_sync_fn=barriers)
    return dataclasses.replace(options, async_options=own)
