"""The handler and its arguments, as plain Orbax managers are told of them."""

from __future__ import annotations

import orbax.checkpoint as ocp

from cnr_jax.handler import CnrHandler, Restore, Save
from cnr_jax.options import Options
from cnr_jax.repository.lineage.retention import ChainPreservation, Preserving
from cnr_jax.state.table import Tables


class HandlerRegistry(ocp.DefaultCheckpointHandlerRegistry):
    """A registry for plain Orbax whose handler and preservation policy belong together."""

    handler: CnrHandler

    def preservation_policy(self, inner: Preserving | None = None) -> ChainPreservation:
        """Wraps an Orbax preservation policy: parents of what it keeps are kept too.

        Until a manager has asked this policy, which is to be in its options, the handler writes
        only full checkpoints, because plain retention would delete parents.

        Args:
            inner: such as `ocp.checkpoint_managers.LatestN(3)`; None keeps everything.
        """
        return ChainPreservation(inner, lambda: self.handler.ledger, self.handler.guard)


def handler_registry(
    tables: Tables | None, options: Options | None = None
) -> HandlerRegistry:
    """A registry with which a plain `ocp.CheckpointManager` takes `Save` and `Restore`.

    Without `registry.preservation_policy(...)` in the manager's options only full
    checkpoints are written: plain retention would delete the parents of deltas. What only
    `CheckpointManager` does: refuse a save that is not due in a root that another run has used,
    which here only returns False; sync what Orbax renames, remove steps at once rather than file by
    file, and look before Orbax deletes a folder that has come to the root since it started.
    """
    registry = HandlerRegistry()
    registry.handler = CnrHandler(tables, options)
    # No item name: whatever the item is called, these arguments lead to this handler.
    registry.add(None, Save, registry.handler)
    registry.add(None, Restore, registry.handler)
    return registry
