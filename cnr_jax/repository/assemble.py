"""Putting decoded rows in place: in host memory on CPU, on the device elsewhere.

On accelerators codes are uploaded, decoded and scattered where they are needed, so the host
never holds more than a block of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cnr_jax.format.tiles import Box
from cnr_jax.rows.codecs import Codec, Raw
from cnr_jax.rows.gather import chunk_rows, host_device, padded, program_rows


class Rows(Protocol):
    """Rows of a part being rebuilt."""

    def put(self, rows: np.ndarray | slice, columns: Columns, block: Block) -> None:
        """Puts decoded rows in place; `rows` are rows of the part."""
        ...

    def result(self) -> jax.Array | np.ndarray:
        """The part."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Encoded rows read from a segment."""

    codec: Codec
    parts: dict[str, np.ndarray]
    count: int
    trailing: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Where the columns of a tile lie in the part, and which of the tile's they are."""

    target: tuple[slice, ...]
    source: tuple[slice, ...]


def new_rows(box: Box, dtype: np.dtype, device: jax.Device) -> Rows:
    """Rows of zeros for a part that lies on `device`."""
    shape = tuple(stop - start for start, stop in box)
    if device.platform == "cpu":
        return _HostRows(shape, dtype)
    return _DeviceRows(shape, dtype, device)


def _program_rows(block: Block) -> int:
    """Rows of the compiled program that decodes a block: one of two sizes."""
    large = chunk_rows(
        int(np.prod(block.trailing, dtype=np.int64)), block.dtype.itemsize
    )
    return program_rows(block.count, large)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _decode(
    codec: Codec, parts: dict[str, jax.Array], dim: int, dtype: np.dtype
) -> jax.Array:
    return codec.decode(parts, dim=dim, dtype=dtype)


class _HostRows:
    """Rebuilds a part in host memory, which on CPU is where it stays."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._out = np.zeros(shape, dtype)

    def put(self, rows: np.ndarray | slice, columns: Columns, block: Block) -> None:
        if not block.count:
            return
        values = self._values(block).reshape(block.count, *block.trailing)
        chosen = values[(slice(None), *columns.source)]
        self._out[(rows, *columns.target)] = chosen.astype(self._out.dtype, copy=False)

    def _values(self, block: Block) -> np.ndarray:
        if isinstance(block.codec, Raw):
            return block.parts["rows"]
        size = _program_rows(block)
        parts = {name: padded(part, size) for name, part in block.parts.items()}
        dim = int(np.prod(block.trailing, dtype=np.int64))
        # One device for all parts: a program is compiled once for each device it runs on.
        parts = jax.device_put(parts, host_device())
        return np.asarray(_decode(block.codec, parts, dim, block.dtype))[: block.count]

    def result(self) -> np.ndarray:
        return self._out


class _DeviceRows:
    """Rebuilds a part on its device: codes are uploaded, decoded and scattered there."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device
    ) -> None:
        self._out = jax.device_put(jnp.zeros(shape, dtype), device)
        self._device = device

    def put(self, rows: np.ndarray | slice, columns: Columns, block: Block) -> None:
        if not block.count:
            return
        size = _program_rows(block)
        parts = {name: padded(part, size) for name, part in block.parts.items()}
        is_run = isinstance(rows, slice)
        at = np.arange(rows.start, rows.stop) if is_run else rows
        # Padding goes to a row past the end, which the scatter drops.
        index = np.full(size, self._out.shape[0], np.int32)
        index[: block.count] = at
        bounds = [(s.start, s.stop) for s in (*columns.source, *columns.target)]
        self._out = _scatter(
            block.codec,
            block.trailing,
            block.dtype,
            tuple(bounds),
            self._out,
            jax.device_put(parts, self._device),
            jax.device_put(index, self._device),
        )

    def result(self) -> jax.Array:
        return self._out


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _scatter(
    codec: Codec,
    trailing: tuple[int, ...],
    dtype: np.dtype,
    bounds: tuple[tuple[int, int], ...],
    out: jax.Array,
    parts: dict[str, jax.Array],
    index: jax.Array,
) -> jax.Array:
    dim = int(np.prod(trailing, dtype=np.int64))
    rows = codec.decode(parts, dim=dim, dtype=dtype)
    source = [slice(*pair) for pair in bounds[: len(trailing)]]
    target = [slice(*pair) for pair in bounds[len(trailing) :]]
    values = rows.reshape(-1, *trailing)[(slice(None), *source)].astype(out.dtype)
    return out.at[(index, *target)].set(values, mode="drop")
