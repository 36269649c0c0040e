"""Which device saves which part of a leaf, and where and by how many rows it is handled.

Every element is saved once, decided alike everywhere.

A tile is a part of one shard whose rows lie within one shard of the stamps, because the rows
of a tile are chosen by stamps that its process must hold. All processes compute the same tiling
from shardings alone; nothing is communicated.
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
# Where rows that lie on a device are handled, given the bytes of all there are.
Way = Callable[[jax.Device, int], Where]
# A call that compiles something and keeps it: equal ones compile the same.
Program = tuple[Callable[..., object], tuple[Hashable, ...]]
# Bytes of decoded rows in a chunk: large enough to hide the cost of a dispatch, small enough
# to stay in cache while it is encoded. Measured on 2 CPU cores, 4 bits, dim 64: 0.67 GB/s in
# chunks of 2 MiB, 0.45 GB/s in chunks of 16 MiB.
CHUNK_BYTES = 2 << 20
# Rows of the small chunk that holds the rest of a group, so that few touched rows cost little.
SMALL_ROWS = 512
# Shards up to this size are copied to the host whole: each shape and device would need programs
# of its own, a tenth of a second each, which makes minutes of a thousand tables.
SMALL_SHARD_BYTES = 1 << 20
# Of ranges of as many rows stamps are copied to be compared together: below, a call of numpy takes
# longer than its work.
_SMALL_RANGE = 1 << 14


class Piece(NamedTuple):
    """A part of a leaf and the device that saves it.

    Attributes:
        box: start and stop in each dimension of the leaf.
        device: holds the box; its process holds the stamps of the rows.
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
    """The groups that tiles form, each with its tiles in the order of leaves."""
    found: dict[Group, tuple[OwnTile, ...]] = {}
    for tile in tiles:
        group = Group(tile.table.name, tile.piece.device, tile.rows)
        found[group] = (*found.get(group, ()), tile)
    return found


def boxes_in(tiles: Iterable[OwnTile]) -> list[tuple[str, Box]]:
    """Which parts of which leaves tiles are."""
    return [(tile.leaf.name, tile.piece.box) for tile in tiles]


Shardings = Mapping[str, Mapping[str, Sharding]]


def own_tiles(
    tables: Tables, shardings: Shardings, stamps: Mapping[str, Sharding]
) -> tuple[OwnTile, ...]:
    """The tiles of all tables that this process saves, in the order of tables and leaves.

    Args:
        tables: the tables of a state.
        shardings: of their leaves, by table and leaf name; those missing are left out.
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
    """The distinct parts of an array and the devices that hold each, in order of device id.

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
        name: of the leaf, for the error.
        shape: of the leaf; `shape[0]` is the table's padded rows.
        sharding: of the leaf.
        stamp_sharding: of the table's stamps, `[shape[0]]`.

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
    """The device that saves a tile: one that holds its stamps too, so that replicas share.

    A replicated slot of a row-sharded table is so saved by all devices, each the rows whose
    stamps it holds, and not by the first device alone.
    """
    both = [device for device in devices if device in holders]
    if both:
        return both[0]
    processes = {device.process_index for device in holders}
    return next((d for d in devices if d.process_index in processes), None)


class Spot(NamedTuple):
    """Where rows of an array are: the number of a local shard, and the row it starts with."""

    shard: int
    first: int


@functools.lru_cache(maxsize=4096)
def _local_boxes(
    sharding: Sharding, shape: tuple[int, ...]
) -> Mapping[jax.Device, tuple[int, Box]]:
    """Number and box of the shard on each device of this process, in jax's order of shards."""
    # As jax itself goes through them where it reads a whole array.
    indices = sharding.addressable_devices_indices_map(shape)
    return {
        device: (number, box_of(index or (), shape))
        for number, (device, index) in enumerate(indices.items())
    }


def spot_on(sharding: Sharding, shape: tuple[int, ...], device: jax.Device) -> Spot:
    """Where an array is on a device of this process.

    Raises:
        TableError: if it has no shard there.
    """
    boxes = _local_boxes(sharding, shape)
    if device not in boxes:
        raise errors.TableError(f"the array has no shard on {device}")
    number, box = boxes[device]
    return Spot(number, box[0][0])


def spot_of(sharding: Sharding, shape: tuple[int, ...], rows: tuple[int, int]) -> Spot:
    """Where rows of an array are on this process.

    Raises:
        TableError: if no shard holds all of them.
    """
    for number, box in _local_boxes(sharding, shape).values():
        start, stop = box[0]
        if start <= rows[0] and rows[1] <= stop:
            return Spot(number, start)
    raise errors.TableError(f"rows {rows[0]} to {rows[1]} are not on this process")


def local_shards(array: jax.Array) -> Sequence[jax.Array]:
    """The shards of an array on this process, by their number in `Spot`."""
    return _ways_to_shards(array.sharding)(array)


def _ways_to_shards(
    sharding: Sharding,
) -> Callable[[jax.Array], Sequence[jax.Array]]:
    """The quickest way to the shards of arrays that are sharded so."""
    count = len(sharding.addressable_devices)
    if len(sharding.device_set) == 1:
        return lambda array: (array,)
    if sharding.is_fully_replicated:
        # Of which `addressable_data` gives the first one alone.
        return lambda array: [shard.data for shard in array.addressable_shards]
    return lambda array: [array.addressable_data(number) for number in range(count)]


class Tiling:
    """The tiles of tables that are sharded in one way, and all that follows from that alone.

    Made once for each such way: what a save of thousands of tiles would have to find out for each
    of them, it looks up by the number of a tile, or of a range of rows. Holds no arrays.

    Args:
        tables: the tables of a state.
        shardings: of their leaves, by table and leaf name; those missing are left out.
        stamps: sharding of each table's stamps.
        way: where rows on a device are handled.

    Attributes:
        tiles: that this process saves, in the order of tables and leaves.
        wheres: of each tile, where its rows are handled.
        firsts: of each tile, the row of its shard at which it starts.
        groups: of tiles with the same rows on the same device.
        numbers: of the tiles of each group.
        ranges: the rows that tiles have, each once.
        range_of: of each tile, the number of its rows.
        range_rows: int64[ranges], how many rows.
        stamps: of each range, where its stamps are handled, and the row of their shard at which
            they start.
        parts: numbers of ranges whose stamps are handled together in host memory.
        part_of: int64[ranges], the part of each range; -1: its stamps stay on their device.
        starts: int64[ranges], the row of its part at which a range starts.

    Raises:
        TableError: if for some rows no process holds both values and stamps.
    """

    def __init__(
        self,
        tables: Tables,
        shardings: Shardings,
        stamps: Mapping[str, Sharding],
        way: Way,
    ) -> None:
        self.way = way
        self.tiles = own_tiles(tables, shardings, stamps)
        self.groups = group_tiles(self.tiles)
        of_groups: dict[Group, list[int]] = {group: [] for group in self.groups}
        ranges: dict[Rows, int] = {}
        leaves: dict[tuple[str, str], list[int]] = {}
        range_of, firsts, wheres = list[int](), list[int](), list[Where]()
        words: list[tuple[int, int, np.dtype]] = []
        for number, tile in enumerate(self.tiles):
            table, leaf, device = tile.table.name, tile.leaf, tile.piece.device
            of_groups[Group(table, device, tile.rows)].append(number)
            range_of.append(ranges.setdefault(Rows(table, tile.rows), len(ranges)))
            sharding = shardings[table][leaf.name]
            spot = spot_on(sharding, leaf.shape, device)
            leaves.setdefault((table, leaf.name), []).append(spot.shard)
            firsts.append(tile.rows[0] - spot.first)
            rows, *row = sharding.shard_shape(leaf.shape)
            size, word = _row_words(tuple(row), leaf.dtype)
            nbytes = size * leaf.dtype.itemsize
            words.append((rows, nbytes // word.itemsize, word))
            wheres.append(way(device, rows * nbytes))
        self.numbers = {group: tuple(found) for group, found in of_groups.items()}
        self.range_of, self.firsts = tuple(range_of), tuple(firsts)
        self.wheres, self._words = tuple(wheres), tuple(words)
        self._leaves = [
            (table, leaf, _ways_to_shards(shardings[table][leaf]), found)
            for (table, leaf), found in leaves.items()
        ]
        self.ranges = tuple(ranges)
        self.range_rows = np.array([r.rows[1] - r.rows[0] for r in ranges], np.int64)
        self._place_stamps(tables, stamps)

    def _place_stamps(self, tables: Tables, stamps: Mapping[str, Sharding]) -> None:
        """Finds out where the stamps of each range are, and which are compared together."""
        shards: dict[str, list[int]] = {}
        found: list[tuple[Where, int]] = []
        for table, rows in self.ranges:
            shape, sharding = tables[table].leaf.shape[:1], stamps[table]
            spot = spot_of(sharding, shape, rows)
            shards.setdefault(table, []).append(spot.shard)
            boxes = _local_boxes(sharding, shape).items()
            device = next(d for d, (number, _) in boxes if number == spot.shard)
            where = self.way(device, 4 * sharding.shard_shape(shape)[0])
            found.append((where, rows[0] - spot.first))
        self.stamps = tuple(found)
        self._stamps = [
            (table, _ways_to_shards(stamps[table]), numbers)
            for table, numbers in shards.items()
        ]
        on_host = np.array([where == "host" for where, _ in found], bool)
        is_small = on_host & (self.range_rows <= _SMALL_RANGE)
        small = np.flatnonzero(is_small)
        large = np.flatnonzero(on_host & ~is_small)
        self.parts = [small] * bool(len(small)) + [np.array([each]) for each in large]
        self.part_of = np.full(len(found), -1, np.int64)
        for part, numbers in enumerate(self.parts):
            self.part_of[numbers] = part
        self.starts = np.zeros(len(found), np.int64)
        sizes = self.range_rows[small]
        self.starts[small] = np.cumsum(sizes) - sizes

    @functools.cached_property
    def boxes(self) -> tuple[tuple[str, str, Piece], ...]:
        """Which parts of which leaves the tiles are, and the devices they are on."""
        return tuple((t.table.name, t.leaf.name, t.piece) for t in self.tiles)

    def data_in(self, arrays: Arrays) -> list[jax.Array]:
        """The shard that each tile is in, of arrays that are sharded in this way."""
        found: list[jax.Array] = []
        for table, leaf, shards_of, numbers in self._leaves:
            found += map(shards_of(arrays[table][leaf]).__getitem__, numbers)
        return found

    def stamps_in(self, stamps: Mapping[str, jax.Array]) -> list[jax.Array]:
        """The shard that the stamps of each range are in."""
        found: list[jax.Array] = []
        for table, shards_of, numbers in self._stamps:
            found += map(shards_of(stamps[table]).__getitem__, numbers)
        return found

    def words_in(self, data: Sequence[jax.Array]) -> list[np.ndarray | None]:
        """Of the shard of each tile the rows in host memory, as `row_words`; None on a device."""
        for shard, tile, where in zip(data, self.tiles, self.wheres, strict=True):
            if where == "host" and tile.piece.device.platform != "cpu":
                shard.copy_to_host_async()
        found: list[np.ndarray | None] = []
        for shard, where, (rows, count, word) in zip(
            data, self.wheres, self._words, strict=True
        ):
            if where == "device":
                found.append(None)
                continue
            memory: Any = shard
            try:
                # What `row_words` makes of views, in half of the time.
                found.append(np.frombuffer(memory, word).reshape(rows, count))
            except (BufferError, ValueError):  # of a dtype that no buffers are told of
                found.append(row_words(np.asarray(shard)))
        return found


class Shards:
    """The parts of one state that its save reads, on this process.

    They are of the state, which may be donated after the save has begun: nothing may keep them.
    Looked up once, as jax makes the shards of an array anew each time.

    Args:
        tiling: of the state.
        arrays: its leaves, by table and leaf name.
        stamps: by table, if rows are chosen by those that `record` wrote.

    Attributes:
        data: of each tile, the shard that it is in.
    """

    def __init__(
        self,
        tiling: Tiling,
        arrays: Arrays,
        stamps: Mapping[str, jax.Array] | None = None,
    ) -> None:
        self.tiling = tiling
        self.data = tiling.data_in(arrays)
        self._of_tables = stamps
        self._stamps: list[jax.Array] | None = None
        self._words: list[np.ndarray | None] | None = None
        self._stamp_parts: list[np.ndarray] | None = None

    @property
    def stamps(self) -> list[jax.Array]:
        """Of each range of rows, the shard that its stamps are in.

        Raises:
            AssertionError: if no stamps were given.
        """
        if self._stamps is None:
            assert self._of_tables is not None
            self._stamps = self.tiling.stamps_in(self._of_tables)
        return self._stamps

    @property
    def words(self) -> list[np.ndarray | None]:
        """Of each tile the rows of its shard in host memory, as `row_words`; None on a device.

        Views where rows are in host memory already. A view that is alive when its buffer is
        donated makes XLA copy the whole table instead of reusing it: see `release`.
        """
        if self._words is None:
            self._words = self.tiling.words_in(self.data)
        return self._words

    @property
    def stamp_parts(self) -> list[np.ndarray]:
        """The stamps of each part of `Tiling.parts`, int32, range by range."""
        if self._stamp_parts is None:
            tiling, shards = self.tiling, self.stamps
            rows = tiling.range_rows.tolist()
            found: list[np.ndarray] = []
            for numbers in tiling.parts:
                some: list[np.ndarray] = []
                for number in numbers.tolist():
                    first = tiling.stamps[number][1]
                    stop = first + rows[number]
                    some.append(np.asarray(shards[number])[first:stop])
                found.append(some[0] if len(some) == 1 else np.concatenate(some))
            self._stamp_parts = found
        return self._stamp_parts

    def release(self) -> None:
        """Lets go of all of it: the save has read what it needs."""
        self.data, self._words = [], None
        self._of_tables, self._stamps, self._stamp_parts = None, None, None


def row_words(leaf: np.ndarray) -> np.ndarray:
    """Returns the bytes of each row as the widest words they fill, [rows, words].

    A view where rows lie one after the other. numpy copies such words faster than it does some
    numbers, and never takes them for numbers.

    Example:
        >>> row_words(np.zeros((3, 5), np.float16)).dtype
        dtype('uint16')
    """
    leaf = np.ascontiguousarray(leaf)
    size, word = _row_words(leaf.shape[1:], leaf.dtype)
    flat = leaf if leaf.ndim == 2 else leaf.reshape(len(leaf), size)
    return flat.view(word)


@functools.cache
def _row_words(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, np.dtype]:
    """Elements of a row of this shape, and the words that its bytes fill."""
    elements = math.prod(shape)
    nbytes = elements * dtype.itemsize
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return elements, np.dtype(f"u{width}")


def chunk_rows(width: int, itemsize: int, limit_bytes: int | None = None) -> int:
    """Rows of a large chunk: a power of two, one where rows are very wide.

    Args:
        width: elements of a row.
        itemsize: bytes of an element.
        limit_bytes: of decoded rows; None: `CHUNK_BYTES`.

    Example:
        >>> chunk_rows(64, 4)
        8192
    """
    limit_bytes = CHUNK_BYTES if limit_bytes is None else limit_bytes
    rows = max(1, limit_bytes // max(1, width * itemsize))
    return 1 << (rows.bit_length() - 1)


def program_rows(count: int, large: int) -> int:
    """Rows of the chunk, large or small, that holds `count` rows, at most `large`.

    Example:
        >>> program_rows(300, 8192), program_rows(600, 8192), program_rows(2, 4)
        (512, 8192, 4)
    """
    small = min(SMALL_ROWS, large)
    return small if count <= small else large


class Counted(Protocol):
    """What `in_chunks` cuts: rows of a run, or rows to be decoded."""

    @property
    def count(self) -> int:
        """How many rows."""
        ...


_C = TypeVar("_C", bound=Counted)


def in_chunks(items: Iterable[_C], size: int) -> Iterator[list[tuple[_C, int, int]]]:
    """Cuts the rows of items into blocks of `size`, the last of fewer.

    Yields:
        The items that a block has rows of, each with start and stop of these.
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
    """Leaves the mesh of `jax.set_mesh` and what debugs a user's programs; also a decorator.

    Programs of a save or a restore run on one device each, which jax refuses within a mesh of
    several. Moving rows is what they are for, rows are theirs as they are, NaN or not, and none
    of them can be run without being compiled. So what forbids these, for a train step's sake,
    is not asked here. Arrays keep their own shardings. What is set also decides under what jax
    keeps a program: one that was compiled in here is found again only here, from any thread.
    """
    with (
        jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.no_tracing(False),
    ):
        yield


def compiled(
    work: Callable[..., Any],
    device: jax.Device,
    *arrays: tuple[tuple[int, ...], DTypeLike],
) -> Callable[..., Any]:
    """A program for arrays on one device, of these shapes and dtypes, compiled ahead of time.

    Calling a jitted function to warm it up would need arrays as large as a shard. jax keeps no
    program that is made so: each caller does, in a function under `functools.cache`.
    """
    where = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*each, sharding=where) for each in arrays]
    return ahead_of_time(jax.jit(work), *shapes)


@own_settings()
def ahead_of_time(program: Any, *arguments: Any) -> Callable[..., Any]:
    """A jitted function, compiled for arrays like these.

    Where one of them has elements of less than a byte, only at its first call: such arrays have
    another layout than programs that were compiled before, which refuse them (jax 0.10).
    """
    leaves = jax.tree.leaves(arguments)
    if any(jax.dtypes.itemsize_bits(leaf.dtype) < 8 for leaf in leaves):
        return program
    return program.lower(*arguments).compile()


def host_device() -> jax.Device:
    """The device that encodes rows which are staged on the host."""
    return jax.local_devices(backend="cpu")[0]


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    """`values` with rows of zeros after them, `rows` in all; itself if it has as many."""
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
