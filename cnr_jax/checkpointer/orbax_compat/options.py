"""The preservation policy that a user gave, from whichever options hold it."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.options import Options


def check_orbax_options(orbax_options: object) -> None:
    """Checks that options for Orbax are Orbax's, and that processes have the usual parts.

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


def inner_policy(
    options: Options, orbax_options: ocp.CheckpointManagerOptions | None
) -> Any:
    """The user's own preservation policy; None keeps everything.

    Raises:
        OptionError: if it is given twice.
    """
    if orbax_options is None:
        return options.preservation_policy
    classic = any(
        (
            orbax_options.max_to_keep,
            orbax_options.keep_period,
            orbax_options.keep_time_interval,
        )
    )
    theirs = orbax_options.preservation_policy
    if options.preservation_policy is not None and (theirs is not None or classic):
        raise errors.OptionError(
            "retention is given twice: options.preservation_policy and orbax_options"
        )
    if options.preservation_policy is not None:
        return options.preservation_policy
    if theirs is None and classic:
        theirs = _classic_policy(orbax_options)
    return theirs


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
