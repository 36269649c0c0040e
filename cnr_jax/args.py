"""What is passed as `args=` to `CheckpointManager.save` and `restore`."""

from cnr_jax.handler import Restore as Restore
from cnr_jax.handler import Save as Save

__all__ = ["Restore", "Save"]
