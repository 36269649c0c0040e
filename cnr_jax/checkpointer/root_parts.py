"""Parts of a manager that belong to one root: its steps, items, saves and listing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from cnr_jax.checkpointer.listing import Listing
from cnr_jax.checkpointer.orbax_compat.items import Items
from cnr_jax.checkpointer.orbax_compat.options import before_commit_of, committer_of
from cnr_jax.checkpointer.orbax_compat.steps import Steps
from cnr_jax.checkpointer.saving.calls import Calls
from cnr_jax.checkpointer.saving.due import Progress
from cnr_jax.checkpointer.saving.retirement import Retirement
from cnr_jax.checkpointer.saving.saves import Saves
from cnr_jax.repository.index.planner import SavePlan


class RootParts(NamedTuple):
    """Parts of a manager that belong to one root."""

    steps: Steps
    items: Items
    saves: Saves
    listing: Listing


def root_parts(
    root: epath.Path,
    options: Any,
    handler: Any,
    registry: Any,
    progress: Progress,
    calls: Calls,
    warm_up: Callable[[SavePlan], None],
) -> RootParts:
    """Makes the parts of a manager that belong to one root.

    Args:
        root: root of the manager.
        options: Orbax's `CheckpointManagerOptions`, with the policy that alone says what stays.
        handler: handler of the state, a `CnrHandler`.
        registry: registry of handlers.
        progress: notes saves that begin and end.
        calls: calls of the manager.
        warm_up: function that is called with each plan, before any of its save is staged.
    """
    writer, policy = handler.writer, options.preservation_policy
    steps = Steps(root, options, lambda: writer.ledger.left if writer.ledger else ())
    items = Items(registry, root)
    saves = Saves(
        committer_of(root, options, writer.discard, writer.check_claim),
        steps,
        items,
        handler.lifecycle,
        writer,
        Retirement(steps, writer, policy),
        progress,
        calls,
        handler.channel,
        lambda place, state, urgent: handler.plan(place, state, urgent=urgent),
        warm_up,
        before_commit_of(options),
        handler.options,
        handler.interval.learn if handler.interval else lambda found: None,
    )
    return RootParts(
        steps, items, saves, Listing(steps, writer, saves, handler.channel)
    )
