"""The client through which the processes of a run coordinate, and whether there is one."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp


def distributed_client() -> Any:
    """The client through which the processes of a run coordinate.

    Raises:
        ValueError: if the run has not called `jax.distributed.initialize`.
    """
    return ocp.multihost.get_jax_distributed_client()


def is_distributed() -> bool:
    """Whether the run has called `jax.distributed.initialize`."""
    return ocp.multihost.is_jax_distributed_client_initialized()
