"""Rounding of rows as by a save and a restore, on their devices, and the errors of rows.

Rows are encoded and decoded at once, and nothing is stored: to see what a codec does to rows,
without a checkpoint.
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
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.rows.codecs import Codec
from cnr_jax.rows.gather.device import LARGE_BYTES
from cnr_jax.rows.tiling import (
    Box,
    box_of,
    chunk_rows,
    host_device,
    own_settings,
    program_rows,
)

KeysOf = Callable[[Box], np.ndarray]
# Up to so many small chunks are quicker than a large one that is mostly padding.
_SMALL_CHUNKS = 8


class Off(NamedTuple):
    """Errors of rows, `||row - read|| / ||row||` of each, as sums that may be added.

    Attributes:
        rows: number of rows compared; rows of zeros do not count.
        errors: sum of their errors.
        worst: the greatest of them.
        escaped: number of rows that the codec cannot hold, and that are stored exactly beside.
    """

    rows: int = 0
    errors: float = 0.0
    worst: float = 0.0
    escaped: int = 0

    def and_of(self, other: Off) -> Off:
        """Errors of both sets of rows.

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
    """Rows as they would be read, and their errors once they are computed.

    Attributes:
        rows: the rounded rows, with the shape, dtype and sharding of those that were given.
        found: fields of `Off`, float32[1, 4], for each part of rows that this process counts; not
            waited for.
    """

    rows: jax.Array
    found: tuple[jax.Array, ...]

    def off(self) -> Off:
        """Errors of the rows; waits for them."""
        found = np.concatenate([np.zeros((1, 4)), *jax.device_get(self.found)])
        rows, errors, _, escaped = found.sum(axis=0)
        return Off(int(rows), float(errors), float(found[:, 2].max()), int(escaped))


@own_settings()
def rounded(codec: Codec, rows: jax.Array, keys: KeysOf | None = None) -> Rounded:
    """Rounds rows as a save with a codec, and then a restore, would.

    As in a save each device encodes the part of a row that it holds, in chunks, by programs that
    all tables share. With several processes all must call it.

    Args:
        codec: any codec but `Raw`, for rows of this dtype.
        rows: float[rows, ...] in any sharding, which stay as they are.
        keys: function from a box to the keys of its rows, uint32[rows], by which codes are
            dithered; None: elements take the nearest code.

    Example:
        >>> from cnr_jax.rows.codecs import make_codec
        >>> back = rounded(make_codec("asymmetric", bits=2), jnp.array([[0.0, 1.1, 3.0]]))
        >>> back.rows.tolist(), back.off().rows
        ([[0.0, 1.0, 3.0]], 1)
    """
    shape, shards = rows.sharding.shard_shape(rows.shape), rows.addressable_shards
    if not shards:  # and so none of the devices that the programs below run on
        return Rounded(rows, ())
    # Shards are stacked one below the other: one program for all devices, whatever the sharding.
    devices = sorted(rows.sharding.device_set, key=lambda device: device.id)
    below = NamedSharding(Mesh(np.array(devices), ("device",)), P("device"))

    def stacked(parts: list[Any]) -> jax.Array:
        # Shards may be in another kind of memory than arguments and results of programs.
        places = [SingleDeviceSharding(each.device) for each in shards]
        whole = (len(devices) * shape[0], *parts[0].shape[1:])
        placed = list(map(jax.device_put, parts, places))
        return jax.make_array_from_single_device_arrays(whole, below, placed)

    given = [stacked([each.data for each in shards])]
    if keys is not None:
        given.append(
            stacked([keys(box_of(s.index, rows.shape))[:, None] for s in shards])
        )
    limit_bytes = None if devices[0].platform == "cpu" else LARGE_BYTES
    large = chunk_rows(math.prod(shape[1:]), rows.dtype.itemsize, limit_bytes)
    small = program_rows(1, large)
    size = small if shape[0] <= _SMALL_CHUNKS * small else large
    out, offs = _in_chunks(codec, below, size, given)
    made = {each.device: each.data for each in out.addressable_shards}
    back = [jax.device_put(made[s.device], s.data.sharding) for s in shards]
    # Of replicas only the first one counts, or errors would be added several times.
    counted = {each.device for each in shards if not each.replica_id}
    parts = (part for off in offs for part in off.addressable_shards)
    return Rounded(
        jax.make_array_from_single_device_arrays(rows.shape, rows.sharding, back),
        tuple(part.data for part in parts if part.device in counted),
    )


def _in_chunks(
    codec: Codec, below: NamedSharding, size: int, given: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """Rounds the rows of all devices chunk by chunk; also returns the errors of each chunk.

    Args:
        codec: codec of the rows.
        below: sharding that splits arrays over the devices.
        size: number of rows of a chunk.
        given: the rows, and their keys if codes are dithered.
    """
    out, offs = given[0], list[jax.Array]()
    count = out.shape[0] // below.mesh.size
    for begin in range(0, count, size):
        # The last chunk overlaps the one before; rows in both come out the same.
        start = max(0, min(begin, count - size))
        chunk = [_taken(below, size, each, np.int32(start)) for each in given]
        fresh = np.array([begin - start, count - start], np.int32)
        read, off = _there_and_back(codec, below, fresh, *chunk)
        if offs:  # else queued chunks would hold all rows once more
            offs[-1].block_until_ready()
        offs.append(off)
        # The first call makes another array, into which the later ones write.
        put = _put if begin else _put_first
        out = put(below, out, read, np.int32(start))
    return out, offs


def off_on_host(codec: Codec, rows: np.ndarray) -> Off:
    """Returns the errors of rows in host memory, `[rows, ...]`.

    Example:
        >>> from cnr_jax.rows.codecs import make_codec
        >>> off_on_host(make_codec("bfloat16", 4), np.ones((3, 2), np.float32))
        Off(rows=3, errors=0.0, worst=0.0, escaped=0)
    """
    return rounded(codec, jax.device_put(rows, host_device())).off()


def _on_each(
    work: Callable[..., Any], below: NamedSharding, wholes: int = 0
) -> Callable[..., Any]:
    """Maps a function over devices: each gets its part of arrays, but the last `wholes` whole."""

    def mapped(*given: Any) -> Any:
        specs = (below.spec,) * (len(given) - wholes) + (P(),) * wholes
        on_each = jax.shard_map(
            work,
            mesh=below.mesh,
            in_specs=specs,
            out_specs=below.spec,
            check_vma=False,
        )
        return on_each(*given)

    return mapped


@functools.partial(jax.jit, static_argnums=(0, 1))
def _taken(
    below: NamedSharding, size: int, data: jax.Array, start: jax.Array
) -> jax.Array:
    """Takes `size` rows of each device from `start` on, `[size, width]`; zeros fill them up."""

    def take(data: jax.Array, start: jax.Array) -> jax.Array:
        rows = data.reshape(data.shape[0], -1)
        lacking = max(0, size - rows.shape[0])
        rows = jnp.pad(rows, ((0, lacking), (0, 0)))
        return lax.dynamic_slice_in_dim(rows, start, size)

    return _on_each(take, below, 1)(data, start)


def _in_place(
    below: NamedSharding, out: jax.Array, read: jax.Array, start: jax.Array
) -> jax.Array:
    """Writes rounded rows of each device into `out`, from `start` on."""

    def put(out: jax.Array, read: jax.Array, start: jax.Array) -> jax.Array:
        rows = read[: out.shape[0]].reshape(-1, *out.shape[1:])
        return lax.dynamic_update_slice_in_dim(out, rows, start, 0)

    return _on_each(put, below, 1)(out, read, start)


_put_first = jax.jit(_in_place, static_argnums=0)
_put = jax.jit(_in_place, static_argnums=0, donate_argnums=1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _there_and_back(
    codec: Codec,
    below: NamedSharding,
    fresh: jax.Array,
    rows: jax.Array,
    *keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Encodes and decodes rows; also returns the errors of those in the range `fresh`."""

    def work(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, *keys, fresh = given
        encoded = codec.encode(rows, *(each[:, 0] for each in keys))
        read = codec.decode(encoded.parts, dim=rows.shape[1], dtype=rows.dtype)
        read = jnp.where(encoded.escaped[:, None], rows, read)
        at = jnp.arange(rows.shape[0], dtype=jnp.int32)
        counted = (at >= fresh[0]) & (at < fresh[1])
        return read, _off(rows, read, encoded.escaped, counted)[None]

    return _on_each(work, below, 1)(rows, *keys, fresh)


def _off(
    given: jax.Array, read: jax.Array, escaped: jax.Array, counted: jax.Array
) -> jax.Array:
    """Returns the fields of `Off`, float32[4], over the rows that are `counted`."""
    given, read = given.astype(jnp.float32), read.astype(jnp.float32)
    most = jnp.abs(given).max(axis=1)
    # Unscaled, squares may overflow.
    scale = jnp.where(most > 0, most, 1.0)[:, None]
    norm = jnp.linalg.norm(given / scale, axis=1)
    error = jnp.linalg.norm((read - given) / scale, axis=1) / norm
    # Escaped rows come back exactly, also those with NaNs and infinities.
    compared = counted & (escaped | (most > 0))
    error = jnp.where(compared & ~escaped, error, 0.0)
    numbers = compared.sum(), error.sum(), error.max(), (counted & escaped).sum()
    return jnp.stack([each.astype(jnp.float32) for each in numbers])
