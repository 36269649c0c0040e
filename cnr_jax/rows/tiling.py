"""Tiles: the parts of leaves, the device that saves each, and the place where it is handled.

Every element is saved once. All processes compute the same tiling from shardings alone, so nothing
is communicated.

A tile is a part of one shard. Its rows lie within one shard of the stamps, because they are chosen
by stamps, and the process of the tile must hold these.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from cnr_jax import errors
from cnr_jax.state.table import Leaf, Table, Tables

Box = tuple[tuple[int, int], ...]
# Leaves, by table and leaf name.
Arrays = Mapping[str, Mapping[str, jax.Array]]
Where = Literal["host", "device"]
# Chooses where rows on a device are handled, given the bytes of all of them.
Way = Callable[[jax.Device, int], Where]
# A function that compiles a program and keeps it, and its arguments; equal ones are one program.
Program = tuple[Callable[..., object], tuple[Hashable, ...]]
# Bytes of decoded rows in a chunk: large enough to hide the cost of a dispatch, small enough
# to stay in cache while it is encoded. Measured on 2 CPU cores, 4 bits, dim 64: 0.67 GB/s in
# chunks of 2 MiB, 0.45 GB/s in chunks of 16 MiB.
CHUNK_BYTES = 2 << 20
# Rows of the small chunk that holds the rest of a group, so that few touched rows cost little.
SMALL_ROWS = 512
# Shards up to this size are copied to the host whole. Otherwise each shape and device would need
# programs of its own, which compile in a tenth of a second each: minutes for a thousand tables.
SMALL_SHARD_BYTES = 1 << 20


class Piece(NamedTuple):
    """A part of a leaf and the device that saves it.

    Attributes:
        box: start and stop in each dimension of the leaf.
        device: device that holds the box; its process holds the stamps of the rows.
    """

    box: Box
    device: jax.Device


class OwnTile(NamedTuple):
    """A tile that this process saves."""

    table: Table
    leaf: Leaf
    piece: Piece

    @property
    def rows(self) -> tuple[int, int]:
        """Start and stop of its rows."""
        return self.piece.box[0]


def bytes_in(tiles: Iterable[OwnTile]) -> int:
    """Bytes of the rows of some tiles."""
    return sum(
        math.prod(stop - start for start, stop in tile.piece.box)
        * tile.leaf.dtype.itemsize
        for tile in tiles
    )


class Group(NamedTuple):
    """Tiles of one table with the same rows on the same device."""

    table: str
    device: jax.Device
    rows: tuple[int, int]


class Rows(NamedTuple):
    """Some rows of a table: start and stop."""

    table: str
    rows: tuple[int, int]


def group_tiles(tiles: Iterable[OwnTile]) -> dict[Group, tuple[OwnTile, ...]]:
    """Groups tiles; within a group they keep their order."""
    found: dict[Group, tuple[OwnTile, ...]] = {}
    for tile in tiles:
        group = Group(tile.table.name, tile.piece.device, tile.rows)
        found[group] = (*found.get(group, ()), tile)
    return found


def boxes_in(tiles: Iterable[OwnTile]) -> list[tuple[str, Box]]:
    """Boxes of tiles in their leaves."""
    return [(tile.leaf.name, tile.piece.box) for tile in tiles]


Shardings = Mapping[str, Mapping[str, Sharding]]


def own_tiles(
    tables: Tables, shardings: Shardings, stamps: Mapping[str, Sharding]
) -> tuple[OwnTile, ...]:
    """Tiles of all tables that this process saves, in the order of tables and leaves.

    Args:
        tables: the tables of a state.
        shardings: shardings of their leaves, by table and leaf name; missing ones are left out.
        stamps: sharding of each table's stamps.

    Raises:
        TableError: if for some rows no process holds both values and stamps.
    """
    here = jax.process_index()
    return tuple(
        OwnTile(table, leaf, piece)
        for name, table in tables.items()
        for leaf in table.leaves
        if leaf.name in shardings.get(name, {})
        for piece in tile_leaf(
            f"{name}.{leaf.name}", leaf.shape, shardings[name][leaf.name], stamps[name]
        )
        if piece.device.process_index == here
    )


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """Start and stop in each dimension of a part of an array, such as the index of a shard.

    Example:
        >>> box_of((slice(2, None), slice(None)), (4, 3))
        ((2, 4), (0, 3))
    """
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


@functools.lru_cache(maxsize=4096)
def boxes_of(
    sharding: Sharding, shape: tuple[int, ...]
) -> Mapping[Box, tuple[jax.Device, ...]]:
    """Distinct parts of an array, and the devices that hold each, in order of device id.

    Example:
        >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> [box for box in boxes_of(sharding, (4, 2))]
        [((0, 4), (0, 2))]
    """
    found: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(box_of(index or (), shape), []).append(device)
    return {
        box: tuple(sorted(devices, key=lambda device: device.id))
        for box, devices in sorted(found.items())
    }


@functools.lru_cache(maxsize=4096)
def tile_leaf(
    name: str, shape: tuple[int, ...], sharding: Sharding, stamp_sharding: Sharding
) -> tuple[Piece, ...]:
    """Splits a leaf into tiles, each with the device that saves it.

    Args:
        name: name of the leaf, for the error.
        shape: shape of the leaf; `shape[0]` is the table's padded rows.
        sharding: sharding of the leaf.
        stamp_sharding: sharding of the table's stamps, `[shape[0]]`.

    Raises:
        TableError: if no process holds both a part of the leaf and the stamps of its rows.
    """
    pieces: list[Piece] = []
    stamps = boxes_of(stamp_sharding, shape[:1])
    for box, devices in boxes_of(sharding, shape).items():
        for (stamp_rows,), holders in stamps.items():
            start = max(box[0][0], stamp_rows[0])
            stop = min(box[0][1], stamp_rows[1])
            if start < stop:
                owner = _choose(devices, holders)
                if owner is None:
                    raise errors.TableError(
                        f"{name} is sharded so that no process can choose its rows\n"
                        f"  rows {start} to {stop} are on processes"
                        f" {sorted({d.process_index for d in devices})}, the stamps of"
                        f" these rows on {sorted({d.process_index for d in holders})}\n"
                        "  hint: shard it like its table, or replicate it"
                    )
                pieces.append(Piece(((start, stop), *box[1:]), owner))
    return tuple(pieces)


def _choose(
    devices: tuple[jax.Device, ...], holders: tuple[jax.Device, ...]
) -> jax.Device | None:
    """Chooses the device that saves a tile: one that also holds the stamps of its rows.

    So the devices share the work for a replicated slot of a row-sharded table: each saves the rows
    of its stamps, and the first device does not save them all.
    """
    both = [device for device in devices if device in holders]
    if both:
        return both[0]
    # Else a device whose process has the stamps on another of its devices.
    processes = {device.process_index for device in holders}
    return next((d for d in devices if d.process_index in processes), None)


def chunk_rows(width: int, itemsize: int, limit_bytes: int | None = None) -> int:
    """Number of rows in a large chunk: a power of two; one if rows are very wide.

    Args:
        width: number of elements of a row.
        itemsize: bytes of an element.
        limit_bytes: bytes of decoded rows; None: `CHUNK_BYTES`.

    Example:
        >>> chunk_rows(64, 4)
        8192
    """
    limit_bytes = CHUNK_BYTES if limit_bytes is None else limit_bytes
    rows = max(1, limit_bytes // max(1, width * itemsize))
    return 1 << (rows.bit_length() - 1)


def program_rows(count: int, large: int) -> int:
    """Number of rows in the chunk for `count` rows, at most `large`: small if they fit, or large.

    Example:
        >>> program_rows(300, 8192), program_rows(600, 8192), program_rows(2, 4)
        (512, 8192, 4)
    """
    small = min(SMALL_ROWS, large)
    return small if count <= small else large


class Counted(Protocol):
    """Items that `in_chunks` cuts: rows of a run, or rows to be decoded."""

    @property
    def count(self) -> int:
        """Number of rows."""
        ...


_C = TypeVar("_C", bound=Counted)


def in_chunks(items: Iterable[_C], size: int) -> Iterator[list[tuple[_C, int, int]]]:
    """Cuts the rows of items into blocks of `size` rows; the last may have fewer.

    Yields:
        For each block, the items with rows in it, each with start and stop of these rows.
    """
    block: list[tuple[_C, int, int]] = []
    room = size
    for item in items:
        start = 0
        while start < item.count:
            stop = min(item.count, start + room)
            block.append((item, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield block
                block, room = [], size
    if block:
        yield block


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Suspends the mesh of `jax.set_mesh` and debugging settings; also a decorator.

    Programs of a save or a restore run on one device each, which jax refuses within a mesh of
    several. They transfer rows, accept NaNs, and cannot run uncompiled. Settings that forbid this
    are meant for a train step, and do not hold here. Arrays keep their own shardings. Settings are
    also part of the key under which jax keeps a compiled program: a program that was compiled in
    here is found again only in here, from any thread.
    """
    with (
        # An empty mesh, as if none were set.
        jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.no_tracing(False),
    ):
        yield


def settings_here() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Captures the settings of jax in this thread on which arrays depend, for another thread."""
    config: Any = jax.config
    x64, device = config.jax_enable_x64, config.jax_default_device

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.enable_x64(bool(x64)), jax.default_device(device):
            yield

    return settings


def compiled(
    work: Callable[..., Any],
    device: jax.Device,
    *arrays: tuple[tuple[int, ...], DTypeLike],
) -> Callable[..., Any]:
    """Compiles a function ahead of time, for arrays of these shapes and dtypes on one device.

    Calling a jitted function to warm it up would need arrays as large as a shard. jax does not
    keep a program that was compiled like this; each caller keeps it by `functools.cache`.
    """
    where = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*each, sharding=where) for each in arrays]
    return ahead_of_time(jax.jit(work), *shapes)


@own_settings()
def ahead_of_time(program: Any, *arguments: Any) -> Callable[..., Any]:
    """Compiles a jitted function for arrays like these.

    If an array has elements of less than a byte, the function is compiled only at its first call:
    a program that is compiled ahead of time expects another layout of such arrays, and refuses
    them (jax 0.10).
    """
    leaves = jax.tree.leaves(arguments)
    if any(jax.dtypes.itemsize_bits(leaf.dtype) < 8 for leaf in leaves):
        return program
    return program.lower(*arguments).compile()


def in_host_memory(sharding: Sharding) -> bool:
    """Whether a sharding keeps arrays not in the memory of their devices but in that of the host.

    Example:
        >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> in_host_memory(one), in_host_memory(one.with_memory_kind("pinned_host"))
        (False, True)
    """
    own = next(iter(sharding.device_set)).default_memory().kind
    return sharding.memory_kind not in (None, own)


def in_memory_of(device: jax.Device, sharding: Sharding) -> Sharding:
    """Sharding of what one device holds of an array, in the same kind of memory."""
    return jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def is_on_host(shard: jax.Array) -> bool:
    """Whether an array on one device is in memory that numpy sees without a copy."""
    return next(iter(shard.devices())).platform == "cpu"


def host_device() -> jax.Device:
    """Device that encodes the rows that are staged on the host: a CPU, if jax has one.

    It has none with `JAX_PLATFORMS=cuda`. The first accelerator then does this work too.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    """Pads `values` with rows of zeros to `rows` in all; returns them as they are if full."""
    if len(values) == rows:
        return values
    longer = np.zeros((rows, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like `np.empty`, at an address from which JAX on CPU need not copy it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def placing(asked: str) -> Way:
    """Makes the function that chooses where rows of a shard are hashed, gathered and encoded.

    Args:
        asked: `Options.staging`. `"auto"` means in the background on CPU; elsewhere it means at
            once on the device, unless the shard is small. Rows in host memory stay there: see
            `place_of`.
    """

    def way(device: jax.Device, size: int) -> Where:
        if asked == "host" or asked == "device":
            return asked
        small = size <= SMALL_SHARD_BYTES
        return "host" if small or device.platform == "cpu" else "device"

    return way


def place_of(
    way: Way, device: jax.Device, size: int, shardings: Iterable[Sharding]
) -> Where:
    """Chooses where rows of a device are handled, given the shardings of all leaves they are in.

    Programs of a device take no arrays in memory of the host, as slots may be that it has no room
    for.
    """
    return "host" if all(map(in_host_memory, shardings)) else way(device, size)
