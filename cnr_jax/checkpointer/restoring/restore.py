"""A restore by a manager: steps are tried until one is whole, then saving goes on from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from etils import epath

from cnr_jax import errors
from cnr_jax.args import DEFAULT_ITEM, attempted_args, reads_state, restore_args
from cnr_jax.checkpointer.multihost import Channel, all_succeed, on_primary, settle
from cnr_jax.checkpointer.orbax_compat.places import ExactPath
from cnr_jax.checkpointer.orbax_compat.seams import OrbaxSeams, end_interrupted_tasks
from cnr_jax.checkpointer.restoring.choose_step import StepChooser
from cnr_jax.checkpointer.restoring.listing import Listing
from cnr_jax.checkpointer.restoring.resume import Attempt, Resumption
from cnr_jax.repository.layout import find_item, open_root
from cnr_jax.repository.lineage.ledger import Ledger

_log = logging.getLogger(__name__)


def restore(
    step: int | None,
    args: Any,
    directory: epath.PathLike | None,
    *,
    orbax: OrbaxSeams,
    listing: Listing,
    channel: Channel,
    resume: Callable[[Resumption], None],
) -> tuple[int, Any]:
    """Restores a step, on all processes alike.

    Args:
        step: what to restore; None: the newest that is whole.
        args: what is asked for.
        directory: another root to restore from.
        orbax: carries it out.
        listing: of the manager's steps.
        channel: to the other processes.
        resume: goes on saving from what was restored.

    Returns:
        The step that was taken, and what was restored.

    Raises:
        CnrError: see `CheckpointManager.restore`.
    """
    item, elsewhere = listing.item, None
    args = restore_args(args, item)
    if directory is not None:
        elsewhere = ExactPath(open_root(directory))
        all_succeed(channel, lambda: listing.check_holds(elsewhere, step))
    root = elsewhere or orbax.root
    item = item or all_succeed(channel, lambda: find_item(root)) or DEFAULT_ITEM

    def ledger() -> Ledger:
        return listing.ledger_of(root, item) if elsewhere else listing.ledger

    chooser = StepChooser(root, item, ledger)
    if step is None:
        all_succeed(channel, lambda: chooser.ledger)
    elif elsewhere is None:
        on_primary(channel, lambda: listing.check_exists(step))
    while True:
        taken = on_primary(channel, chooser.newest) if step is None else step
        try:
            restored = _attempt(
                taken, args, elsewhere, root, orbax, listing, channel, resume
            )
            break
        except errors.DAMAGE as error:
            chooser.note(taken, error)
            if step is not None:
                raise
            _log.debug("step %d cannot be restored", taken, exc_info=error)
    chooser.warn(taken, asked_for=step is not None)
    return taken, restored


def _attempt(
    step: int,
    args: Any,
    elsewhere: epath.Path | None,
    root: epath.Path,
    orbax: OrbaxSeams,
    listing: Listing,
    channel: Channel,
    resume: Callable[[Resumption], None],
) -> Any:
    """Restores a step, and goes on from it if all that was asked for has succeeded."""
    reads, attempt = reads_state(args, listing.item), Attempt()
    try:
        if reads:
            listing.check_ours(root, step)
        args = attempted_args(args, attempt)
        restored = orbax.restore(step, elsewhere, args)
    except BaseException as error:
        # The other processes wait for what this one has to say.
        if reads and not attempt.is_told:
            settle(channel, error, named=True)
        raise
    finally:
        end_interrupted_tasks()
    if attempt.resumption is not None:
        resume(attempt.resumption)
    return restored
