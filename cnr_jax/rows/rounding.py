"""Rows as a restore would bring them: encoded and decoded where they lie, and how far off they are.

A save does both halves far apart, and keeps what is between. Here nothing is kept: to see what a
codec does to rows, without a checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.rows.codecs import Codec
from cnr_jax.rows.gather.device import LARGE_BYTES
from cnr_jax.rows.tiling import Box, chunk_rows, own_settings

KeysOf = Callable[[Box], np.ndarray]


class Off(NamedTuple):
    """How far off rows are, as sums that may be added: `||row - read|| / ||row||` of each.

    Attributes:
        rows: that were compared; rows of zeros are not among them.
        errors: the sum of their errors.
        worst: the greatest.
        escaped: rows that the codec does not hold, and that are stored exactly beside.
    """

    rows: int = 0
    errors: float = 0.0
    worst: float = 0.0
    escaped: int = 0

    def and_of(self, other: Off) -> Off:
        """That of both.

        Example:
            >>> Off(2, 0.5, 0.3).and_of(Off(1, 0.4, 0.4, escaped=1))
            Off(rows=3, errors=0.9, worst=0.4, escaped=1)
        """
        return Off(
            self.rows + other.rows,
            self.errors + other.errors,
            max(self.worst, other.worst),
            self.escaped + other.escaped,
        )


class Rounded(NamedTuple):
    """Rows as they would be read, and what is known of them once they are.

    Attributes:
        rows: like those that were given, and sharded like them.
        found: of the parts of rows that this process is to count, float32[1, chunks, 4]: the
            fields of `Off` of each chunk. Not waited for.
    """

    rows: jax.Array
    found: tuple[jax.Array, ...]

    def off(self) -> Off:
        """How far off those are; waits for them."""
        chunks = [np.asarray(each)[0] for each in self.found]
        found = np.concatenate([np.zeros((1, 4)), *chunks])
        rows, errors, _, escaped = found.sum(axis=0)
        return Off(int(rows), float(errors), float(found[:, 2].max()), int(escaped))


@own_settings()
def rounded(codec: Codec, rows: jax.Array, keys: KeysOf | None = None) -> Rounded:
    """Rows as a restore would bring them, if they were saved by a codec.

    As in a save each device encodes the part of a row that it holds. In runs of several processes
    all must call it.

    Args:
        codec: any but `Raw`, for rows of this dtype.
        rows: float[rows, ...] in any sharding; stay as they are.
        keys: of the rows of a box, uint32[rows], by which codes are dithered; None: they are the
            nearest.

    Example:
        >>> from cnr_jax.rows.codecs import make_codec
        >>> back = rounded(make_codec("asymmetric", bits=2), jnp.array([[0.0, 1.1, 3.0]]))
        >>> back.rows.tolist(), back.off().rows
        ([[0.0, 1.0, 3.0]], 1)
    """
    shape = rows.sharding.shard_shape(rows.shape)
    devices = sorted(rows.sharding.device_set, key=lambda device: device.id)
    limit_bytes = None if devices[0].platform == "cpu" else LARGE_BYTES
    width = math.prod(shape[1:])
    size = min(shape[0], chunk_rows(width, rows.dtype.itemsize, limit_bytes))
    # The shards one below the other: one program for all devices, whatever the sharding.
    below = NamedSharding(Mesh(np.array(devices), ("device",)), P("device"))

    def stacked(parts: list[Any]) -> jax.Array:
        whole = (len(devices) * shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(whole, below, parts)

    shards = rows.addressable_shards
    # Their memory may be another one than that of what programs take and return.
    given = [stacked([jax.device_put(each.data, each.device) for each in shards])]
    if keys is not None:
        own = [keys(_box(each, rows.shape)) for each in shards]
        devices_of = [each.device for each in shards]
        given.append(stacked(list(map(jax.device_put, own, devices_of))))
    out, found = _program(codec, size, below, *given)
    made = {each.device: each.data for each in out.addressable_shards}
    back = jax.make_array_from_single_device_arrays(
        rows.shape,
        rows.sharding,
        [jax.device_put(made[each.device], each.data.sharding) for each in shards],
    )
    counted = {each.device for each in shards if not each.replica_id}
    mine = [each.data for each in found.addressable_shards if each.device in counted]
    return Rounded(back, tuple(mine))


def _box(shard: jax.Shard, shape: tuple[int, ...]) -> Box:
    """Start and stop of a shard in each dimension."""
    bounds = [s.indices(n) for s, n in zip(shard.index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in bounds)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _program(
    codec: Codec, size: int, below: NamedSharding, *given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    work = functools.partial(_in_chunks, codec, size)
    one = below.spec
    mapped = jax.shard_map(
        work, mesh=below.mesh, in_specs=one, out_specs=(one, one), check_vma=False
    )
    return mapped(*given)


def _in_chunks(
    codec: Codec, size: int, data: jax.Array, *keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """In chunks, so that what codecs need beside the rows is that of a chunk."""
    rows = data.reshape(data.shape[0], -1)
    count = rows.shape[0]
    chunks = -(-count // size)

    def work(
        i: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        out, found = carry
        # The last chunk begins among the rows of the one before: these come out the same.
        start = jnp.minimum(i * size, count - size)
        given, *own = (
            lax.dynamic_slice_in_dim(each, start, size) for each in (rows, *keys)
        )
        encoded = codec.encode(given, *own)
        read = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
        read = jnp.where(encoded.escaped[:, None], given, read)
        out = lax.dynamic_update_slice_in_dim(out, read, start, 0)
        new = start + jnp.arange(size) >= i * size
        return out, found.at[i].set(_off(given, read, encoded.escaped, new))

    empty = jnp.zeros_like(rows), jnp.zeros((chunks, 4), jnp.float32)
    out, found = lax.fori_loop(0, chunks, work, empty)
    return out.reshape(data.shape), found[None]


def _off(
    given: jax.Array, read: jax.Array, escaped: jax.Array, counted: jax.Array
) -> jax.Array:
    """The fields of `Off`, float32[4], over the rows that are counted."""
    given, read = given.astype(jnp.float32), read.astype(jnp.float32)
    most = jnp.abs(given).max(axis=1)
    # A float may not hold squares of what it holds.
    scale = jnp.where(most > 0, most, 1.0)[:, None]
    norm = jnp.linalg.norm(given / scale, axis=1)
    error = jnp.linalg.norm((read - given) / scale, axis=1) / norm
    # Escaped rows are exact, those with NaN and infinities too.
    compared = counted & (escaped | (most > 0))
    error = jnp.where(compared & ~escaped, error, 0.0)
    numbers = compared.sum(), error.sum(), error.max(), (counted & escaped).sum()
    return jnp.stack([each.astype(jnp.float32) for each in numbers])
