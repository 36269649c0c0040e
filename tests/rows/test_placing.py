"""Where the rows of a shard are handled."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

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
    here = jax.local_devices(backend="cpu")[0]
    found: Any = here if device == "cpu" else Accelerator()
    assert way(found, size) == where


def test_rows_stay_in_host_memory_unless_some_of_their_leaves_are_elsewhere() -> None:
    here = SingleDeviceSharding(jax.devices()[0])
    there = here.with_memory_kind("pinned_host")
    way, device = tiling.placing("device"), jax.devices()[0]
    for held, where in (
        ([here], "device"),
        ([there], "host"),
        ([there, there], "host"),
        ([here, there], "device"),
    ):
        assert tiling.place_of(way, device, 1 << 40, held) == where


def test_an_accelerator_encodes_staged_rows_if_jax_has_no_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = jax.devices()[-1]

    def local_devices(backend: str | None = None) -> list[jax.Device]:
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")  # as with JAX_PLATFORMS=cuda
        return [accelerator]

    assert tiling.host_device().platform == "cpu"
    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert tiling.host_device() == accelerator
