"""Decoding of merged rows into arrays on devices, once, where they stay.

One program decodes the regions of all local devices. Only codes cross to an accelerator, and on
CPU the result is memory of JAX's own, which a train step can donate. The program is compiled for
the shape of a region, so only large regions use it; on_host.py decodes small ones on the host.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.repository.replay.encoded import Encoding, Merged, Patch
from cnr_jax.rows.tiling import ahead_of_time, padded


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramKey:
    """Key of a program that decodes regions of several devices: what it is compiled for.

    Attributes:
        devices: devices, each of which decodes a region of its own.
        encoding: encoding of most rows.
        rows: number of rows of each region.
        patches: encoding of each patch, and the number of rows that it has room for.
        dtype: dtype of the result.
        into: shape of the array that the rows are put into; None: the rows are the result.
        fills: whether rows that are left take the values of an array that each device has.
    """

    devices: tuple[jax.Device, ...]
    encoding: Encoding
    rows: int
    patches: tuple[tuple[Encoding, int], ...]
    dtype: np.dtype
    into: tuple[int, ...] | None
    fills: bool = False

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of all arguments and the result: one region per device, along the first axis."""
        return NamedSharding(Mesh(np.array(self.devices), ("region",)), P("region"))


def with_patches(program: ProgramKey, merged: Sequence[Merged]) -> ProgramKey:
    """Returns the key with room for the patches of these regions, one on each device."""
    room: dict[Encoding, int] = {}
    for region in merged:
        for patch in region.patches:
            room[patch.encoding] = max(
                room.get(patch.encoding, 0), _room(len(patch.rows))
            )
    patches = tuple(sorted(room.items(), key=repr))
    return dataclasses.replace(program, patches=patches)


def _room(rows: int) -> int:
    """Rows that a patch gets room for: one of few sizes, so that few programs are compiled."""
    size = 64
    while size < rows:
        size *= 4
    return size


@functools.lru_cache(maxsize=256)
def prepare(program: ProgramKey) -> concurrent.futures.Future[Any]:
    """Starts to compile a program in a thread, so that rows can be read meanwhile."""
    return _compiler().submit(_compile, program)


@functools.cache
def _compiler() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(1, "cnr_compile")


def _compile(program: ProgramKey) -> Any:
    spec = P("region")

    def decode(
        parts: dict[str, jax.Array],
        patches: tuple[tuple[jax.Array, dict[str, jax.Array]], ...],
        out: jax.Array | None,
        start: jax.Array | None,
        own: jax.Array | None,
        left: jax.Array | None,
    ) -> jax.Array:
        rows = _wanted_rows(program.encoding, parts).astype(program.dtype)
        for (encoding, _), (at, patch) in zip(program.patches, patches, strict=True):
            values = _wanted_rows(encoding, patch).astype(program.dtype)
            # Padding goes to a row past the end, which the scatter drops.
            rows = rows.at[at].set(values, mode="drop")
        first = None if start is None else [start[0, i] for i in range(rows.ndim)]
        if own is not None and left is not None:
            if first is not None:
                own = lax.dynamic_slice(own, first, rows.shape)
            rows = jnp.where(jnp.expand_dims(left, range(1, rows.ndim)), own, rows)
        if out is None or first is None:
            return rows
        return lax.dynamic_update_slice(out, rows, first)

    mapped = jax.shard_map(
        decode,
        mesh=program.sharding.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    donated = () if program.into is None else (2,)
    decoding = jax.jit(mapped, donate_argnums=donated)
    return ahead_of_time(decoding, *_arguments(program))


def _wanted_rows(encoding: Encoding, parts: Mapping[str, jax.Array]) -> jax.Array:
    rows = encoding.codec.decode(parts, dim=encoding.width, dtype=encoding.dtype)
    return rows.reshape(rows.shape[0], *encoding.trailing)[:, *encoding.slices]


def _arguments(program: ProgramKey) -> tuple[Any, ...]:
    """Returns the shapes, dtypes and shardings of a program's arguments."""
    count, sharding = len(program.devices), program.sharding

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        whole = (count * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    def encoded(encoding: Encoding, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: array((rows, part.width), part.dtype)
            for name, part in encoding.parts.items()
        }

    parts = encoded(program.encoding, program.rows)
    patches = tuple(
        (array((room,), np.int32), encoded(encoding, room))
        for encoding, room in program.patches
    )
    out = start = own = left = None
    if program.into is not None:
        out = array(program.into, program.dtype)
        start = array((1, len(program.into)), np.int32)
    if program.fills:
        shape = program.into or (program.rows, *program.encoding.shape)
        own, left = array(shape, program.dtype), array((program.rows,), np.bool_)
    return parts, patches, out, start, own, left


def run(
    program: ProgramKey,
    merged: Sequence[Merged],
    out: jax.Array | None = None,
    start: Sequence[int] | None = None,
    own: Sequence[jax.Array] | None = None,
) -> jax.Array:
    """Decodes a region on each device.

    Args:
        program: key for these regions, from `with_patches`.
        merged: one region for each device.
        out: array that the regions are put into; it is donated.
        start: indices at which they begin in each device's region of `out`.
        own: for each device its region of the array that fills in rows that are left.

    Returns:
        The regions of all devices, one after the other.
    """

    def put(values: Sequence[np.ndarray] | Sequence[jax.Array]) -> jax.Array:
        arrays = [
            jax.device_put(value, device)
            for value, device in zip(values, program.devices, strict=True)
        ]
        shape = (len(values) * len(values[0]), *values[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, program.sharding, arrays)

    parts = {
        name: put([each.parts[name] for each in merged])
        for name in program.encoding.parts
    }
    patches = tuple(
        _put_patch(put, encoding, room, program.rows, merged)
        for encoding, room in program.patches
    )
    at = None
    if start is not None:
        at = put([np.array([start], np.int32)] * len(merged))
    mine = left = None
    if program.fills:
        assert own is not None
        mine, masks = put(own), np.zeros((len(merged), program.rows), np.bool_)
        for mask, each in zip(masks, merged, strict=True):
            mask[each.left] = True
        left = put(list(masks))
    return prepare(program).result()(parts, patches, out, at, mine, left)


def _put_patch(
    put: Any, encoding: Encoding, room: int, rows: int, merged: Sequence[Merged]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    nothing = Patch(encoding, np.empty(0, np.int64), encoding.room(0))
    found = [
        next((patch for patch in each.patches if patch.encoding == encoding), nothing)
        for each in merged
    ]
    indices: list[np.ndarray] = []
    for patch in found:
        index = np.full(room, rows, np.int32)
        index[: len(patch.rows)] = patch.rows
        indices.append(index)
    parts = {
        name: put([padded(patch.parts[name], room) for patch in found])
        for name in encoding.parts
    }
    return put(indices), parts


@functools.lru_cache(maxsize=256)
def zeros(
    devices: tuple[jax.Device, ...], shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    """Compiled program that makes regions of zeros, one on each device, along the first axis."""
    sharding = NamedSharding(Mesh(np.array(devices), ("region",)), P("region"))
    whole = (len(devices) * shape[0], *shape[1:])
    make = functools.partial(jnp.zeros, whole, dtype)
    return jax.jit(make, out_shardings=sharding).lower().compile()
