"""Where the rows of a shard are handled."""

from __future__ import annotations

from typing import Any

import jax

from cnr_jax.rows import tiling

from ..conftest import each_of


class Accelerator:
    """All that the choice looks at of a device that is not here."""

    platform = "gpu"


@each_of(
    ("staging", "device", "size", "where"),
    [
        ("auto", "cpu", tiling.SMALL_SHARD_BYTES + 1, "host"),
        ("auto", "cpu", 8, "host"),
        ("auto", "gpu", tiling.SMALL_SHARD_BYTES + 1, "device"),
        ("auto", "gpu", tiling.SMALL_SHARD_BYTES, "host"),
        ("device", "gpu", 8, "device"),
        ("device", "cpu", 8, "device"),
        ("host", "gpu", 1 << 40, "host"),
    ],
)
def test_rows_are_staged_by_platform_and_size(
    staging: Any, device: str, size: int, where: str
) -> None:
    way = tiling.placing(staging)
    found: Any = jax.devices()[0] if device == "cpu" else Accelerator()
    assert way(found, size) == where
