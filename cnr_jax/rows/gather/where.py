"""Where rows are hashed, gathered and encoded: on their device, or in the host's memory."""

from __future__ import annotations

import jax

from cnr_jax.rows.gather.chunk import Way, Where

# Shards up to this size are copied to the host whole: each shape and device would need programs
# of its own, a tenth of a second each, which makes minutes of a thousand tables.
SMALL_SHARD_BYTES = 1 << 20


def placing(asked: str) -> Way:
    """Where rows of a shard are hashed, gathered and encoded.

    Args:
        asked: `Options.staging`. With `"auto"` in the background on CPU, and at once on the
            device elsewhere unless the shard is small.
    """

    def way(device: jax.Device, size: int) -> Where:
        if asked == "host" or asked == "device":
            return asked
        small = size <= SMALL_SHARD_BYTES
        return "host" if small or device.platform == "cpu" else "device"

    return way
