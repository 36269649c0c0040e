"""Dense leaves of a checkpoint that are stored as tiles: read for any sharding, or on the host.

Each part of a leaf that a local device holds is put together in host memory, from the tiles that
overlap it. What lies in a tile in one run is read straight to its place. Otherwise a tile is read
once, block by block, for all parts that it overlaps.
"""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.boxes import Box
from cnr_jax.format.dense import DenseTile
from cnr_jax.format.manifest import DenseLeaf
from cnr_jax.repository.dtypes import converted
from cnr_jax.repository.replay.regions import local_boxes, shape_of
from cnr_jax.repository.step import check_dense_tiles
from cnr_jax.repository.step_reader import StepReader
from cnr_jax.repository.store.checked import numpy_dtype
from cnr_jax.rows.tiling import aligned_empty, box_of, host_device

Path = tuple[str, ...]
# Bytes of leaves that are being read while those before them are put in place.
_AHEAD_BYTES = 64 << 20
# Bytes of a tile that are read at once where what is wanted is no run in it.
_BLOCK_BYTES = 16 << 20
# Arrays up to the first size go to their devices together, as a call costs more than they do, once
# they have as many bytes as the second.
_SMALL_BYTES = 1 << 20
_TOGETHER_BYTES = 32 << 20


class _Array(NamedTuple):
    """Array of JAX that a leaf is restored to.

    Attributes:
        path: path of the leaf.
        dtype: dtype of the elements; not used for a key.
        sharding: sharding of the array.
    """

    path: Path
    dtype: Any
    sharding: Sharding


class TiledDense:
    """Dense leaves of a checkpoint that stores them as tiles.

    Args:
        reader: reader of the checkpoint.
    """

    def __init__(self, reader: StepReader) -> None:
        self._reader = reader
        check_dense_tiles(reader.directory, reader.manifest, reader.processes)
        leaves = reader.manifest.dense_leaves
        self._leaves = {leaf.path: leaf for leaf in leaves}
        self._tiles: dict[Path, list[tuple[int, DenseTile]]] = {
            leaf.path: [] for leaf in leaves
        }
        for process in reader.processes:
            for tile in process.dense_tiles:
                path = leaves[tile.leaf].path
                self._tiles[path].append((process.process, tile))

    def check(self) -> None:
        """Checks that all files exist and have the right sizes.

        Raises:
            IntegrityError: at the first file that does not.
        """
        for process in self._reader.processes:
            if process.dense is not None:
                array = self._reader.dense_array(process.process)
                array.check_stored(0, process.dense.array.length)

    def value(self, path: Path) -> Any:
        """Reads a leaf to the host: a numpy array, a number of Python, or keys on the CPU.

        Raises:
            IntegrityError: if its data is missing or damaged.
        """
        leaf = self._leaves[path]
        if leaf.kind == "key":
            where = SingleDeviceSharding(host_device())
            (found,) = self._arrays([_Array(path, None, where)])
            return found
        return self.part(path, tuple((0, size) for size in leaf.shape))

    def values(self, paths: Iterable[Path]) -> dict[Path, Any]:
        """Reads several leaves as `value` does; returns them by path."""
        return {path: self.value(path) for path in paths}

    def part(self, path: Path, box: Box) -> Any:
        """Reads a part of a leaf that is no key, as `value` does.

        Raises:
            IntegrityError: if its data is missing or damaged.
        """
        leaf = self._leaves[path]
        found = self._start(leaf, [box])()[box]
        return _number(leaf, found) if leaf.kind == "scalar" else found

    def restore(self, asked: Mapping[Path, Any] | None) -> dict[Path, Any]:
        """Restores the leaves that a state asks for.

        Args:
            asked: abstract arrays of JAX with their shardings, by path; leaves with another value
                there stay on the host, as they were saved. None: all leaves come as they were
                saved, arrays of JAX on one device, or on all devices of several processes.

        Raises:
            IntegrityError: if their data is missing or damaged.
        """
        found: dict[Path, Any] = {}
        arrays: list[_Array] = []
        for path, leaf in self._leaves.items():
            if leaf.kind == "text" or not (asked is None or path in asked):
                continue
            array = _as_saved(leaf) if asked is None else _as_asked(leaf, asked[path])
            if array is None:
                found[path] = self.value(path)
            else:
                arrays.append(array)
        for each, array in zip(arrays, self._arrays(arrays), strict=True):
            found[each.path] = array
        return found

    def _arrays(self, wanted: Sequence[_Array]) -> Iterator[jax.Array]:
        """Yields leaves as arrays of JAX, in the order in which they are wanted.

        Raises:
            IntegrityError: if data is missing or damaged.
        """
        waiting: collections.deque[tuple[_Array, int, Callable[[], Any]]] = (
            collections.deque()
        )
        together: list[tuple[_Array, np.ndarray]] = []
        nbytes = ready = 0
        left = collections.deque(wanted)
        while left or waiting:
            while left and (not waiting or nbytes < _AHEAD_BYTES):
                each = left.popleft()
                boxes = self._boxes(each)
                size = sum(math.prod(shape_of(box)) for box in boxes)
                size *= self._element_bytes(each.path)
                waiting.append(
                    (each, size, self._start(self._leaves[each.path], boxes))
                )
                nbytes += size
            each, size, finish = waiting.popleft()
            nbytes -= size
            regions = finish()
            if size <= _SMALL_BYTES and each.sharding.is_fully_addressable:
                (whole,) = regions.values()
                together.append((each, whole))
                ready += size
                if ready < _TOGETHER_BYTES:
                    continue
            yield from self._put(together)
            together, ready = [], 0
            if size > _SMALL_BYTES or not each.sharding.is_fully_addressable:
                yield self._placed(each, regions)
        yield from self._put(together)

    def _boxes(self, wanted: _Array) -> list[Box]:
        """Boxes of the parts in which a leaf is read for the devices of this process."""
        shape, sharding = self._leaves[wanted.path].shape, wanted.sharding
        size = math.prod(shape) * self._element_bytes(wanted.path)
        if size <= _SMALL_BYTES and sharding.is_fully_addressable:
            return [tuple((0, n) for n in shape)]
        return list(local_boxes(sharding, shape))

    def _put(self, found: Sequence[tuple[_Array, np.ndarray]]) -> Iterator[jax.Array]:
        """Puts small arrays on their devices in one call, and yields the leaves."""
        values = [self._finished(each, value) for each, value in found]
        shardings = [self._data_sharding(each) for each, _ in found]
        for (each, _), array in zip(
            found, jax.device_put(values, shardings) if found else (), strict=True
        ):
            yield self._wrapped(each, array)

    def _placed(self, wanted: _Array, regions: Mapping[Box, np.ndarray]) -> jax.Array:
        leaf = self._leaves[wanted.path]
        shape, rank = (*leaf.shape, *self._elements(leaf)[1]), len(leaf.shape)
        parts = {box: self._finished(wanted, part) for box, part in regions.items()}
        dtype = np.uint32 if leaf.kind == "key" else wanted.dtype
        array = jax.make_array_from_callback(
            shape,
            self._data_sharding(wanted),
            lambda index: parts[box_of(index or (), shape)[:rank]],
            dtype=dtype,
        )
        return self._wrapped(wanted, array)

    def _finished(self, wanted: _Array, part: np.ndarray) -> np.ndarray:
        if self._leaves[wanted.path].kind == "key":
            return part
        return converted(part, np.dtype(wanted.dtype))

    def _data_sharding(self, wanted: _Array) -> Sharding:
        """Sharding of the data of a leaf; for keys, of their words."""
        sharding, leaf = wanted.sharding, self._leaves[wanted.path]
        if leaf.kind != "key" or isinstance(
            sharding, NamedSharding | SingleDeviceSharding
        ):
            return sharding
        # Other kinds do not shard the words' further dimension, so the keys are moved afterwards.
        return SingleDeviceSharding(jax.local_devices()[0])

    def _wrapped(self, wanted: _Array, array: jax.Array) -> jax.Array:
        leaf = self._leaves[wanted.path]
        if leaf.kind != "key":
            return array
        try:
            keys = jax.random.wrap_key_data(array, impl=leaf.dtype)
        except (TypeError, ValueError) as error:
            raise self._misfit(leaf, f"holds no keys of {leaf.dtype}") from error
        if self._data_sharding(wanted) is not wanted.sharding:
            keys = jax.device_put(keys, wanted.sharding)
        return keys

    def _element_bytes(self, path: Path) -> int:
        return self._tiles[path][0][1].element_bytes

    def _start(
        self, leaf: DenseLeaf, boxes: Sequence[Box]
    ) -> Callable[[], dict[Box, np.ndarray]]:
        """Starts to read parts of a leaf.

        Returns:
            A function that waits for the parts and returns them: those of a key with a further
            dimension for its words, that of a number as its bytes.

        Raises:
            FormatError: if the elements are of another size than their dtype.
        """
        dtype, more = self._elements(leaf)
        found = {box: aligned_empty((*shape_of(box), *more), dtype) for box in boxes}
        endings: list[Callable[[], object]] = []
        for process, tile in self._tiles[leaf.path]:
            cut = dict[Box, np.ndarray]()
            for box, out in found.items():
                both = _overlap(box, tile.box)
                if both is None:
                    continue
                if _is_run(both, tile.box) and _is_run(both, box):
                    # Indexing an array without dimensions would make a copy.
                    flat = out[_within(both, box)] if both else out
                    flat = flat.reshape(-1).view(np.uint8)
                    first = tile.offset + _rows_before(both, tile)
                    endings.append(self._reading(process, first, flat))
                else:
                    cut[box] = out
            if cut:
                endings.append(_Cutting(self, process, tile, dtype, more, cut))

        def finish() -> dict[Box, np.ndarray]:
            try:
                for end in endings:
                    end()
            except errors.IntegrityError as error:
                raise errors.IntegrityError(
                    f"{error}\n  dense leaf {'/'.join(leaf.path)} cannot be read",
                    kind=error.kind,
                    path=error.path,
                ) from error
            return found

        return finish

    def _reading(
        self, process: int, first: int, out: np.ndarray
    ) -> Callable[[], np.ndarray]:
        array = self._reader.dense_array(process)
        return array.start(first, first + out.size, out)

    def _elements(self, leaf: DenseLeaf) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype in which elements are read, and how many of it make an element, if not one."""
        size = self._element_bytes(leaf.path)
        if leaf.kind == "scalar":
            return np.dtype(np.uint8), (size,)
        dtype = numpy_dtype("uint32" if leaf.kind == "key" else leaf.dtype)
        return dtype, (size // dtype.itemsize,) if leaf.kind == "key" else ()

    def _misfit(self, leaf: DenseLeaf, fact: str) -> errors.FormatError:
        """Error for a leaf whose data are not values of its dtype."""
        where = os.fspath(self._reader.directory / names.DENSE)
        name = "/".join(leaf.path)
        return errors.FormatError(f"{where}: dense leaf {name} {fact}", path=where)


def fallback_sharding() -> Sharding:
    """Sharding of leaves that have none: one device, or all devices of several processes."""
    if jax.process_count() == 1:
        return SingleDeviceSharding(jax.local_devices()[0])
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("all",))
    return NamedSharding(mesh, jax.sharding.PartitionSpec())


def _as_asked(leaf: DenseLeaf, asked: Any) -> _Array | None:
    """The array of JAX that a leaf is wanted as; None: the leaf stays on the host."""
    if not isinstance(asked, jax.ShapeDtypeStruct):
        return None
    is_key = leaf.kind == "key"
    dtype = None if is_key else jax.dtypes.canonicalize_dtype(asked.dtype)
    return _Array(leaf.path, dtype, asked.sharding or fallback_sharding())


def _as_saved(leaf: DenseLeaf) -> _Array | None:
    """The array of JAX that a leaf was; None: it was none, or JAX has no such dtype now."""
    if leaf.kind == "key":
        return _Array(leaf.path, None, fallback_sharding())
    if leaf.kind == "scalar" or leaf.numpy:
        return None
    dtype: np.dtype = numpy_dtype(leaf.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    return _Array(leaf.path, dtype, fallback_sharding())


class _Cutting(NamedTuple):
    """Reading of a tile block by block, for parts that have other columns than the tile."""

    stored: TiledDense
    process: int
    tile: DenseTile
    dtype: np.dtype
    more: tuple[int, ...]
    parts: Mapping[Box, np.ndarray]

    def __call__(self) -> None:
        (low, _), *columns = self.tile.box
        width = math.prod(stop - start for start, stop in columns)
        row_bytes = width * self.tile.element_bytes
        both = [_overlap(box, self.tile.box) for box in self.parts]
        first = min(each[0][0] for each in both if each)
        last = max(each[0][1] for each in both if each)
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(first, last, step):
            stop = min(start + step, last)
            data = np.empty((stop - start) * row_bytes, np.uint8)
            at = self.tile.offset + (start - low) * row_bytes
            self.stored._reading(self.process, at, data)()
            block: Box = ((start, stop), *columns)
            shape = (*shape_of(block), *self.more)
            values = data.view(self.dtype).reshape(shape)
            for box, out in self.parts.items():
                shared = _overlap(box, block)
                if shared is not None:
                    out[_within(shared, box)] = values[_within(shared, block)]


def _overlap(box: Box, other: Box) -> Box | None:
    """Box that two boxes share; None if they share nothing."""
    both = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True)
    )
    return None if any(start >= stop for start, stop in both) else both


def _is_run(part: Box, box: Box) -> bool:
    """Whether the elements of a part lie one after the other in a box that holds the part."""
    return part[1:] == box[1:]


def _within(part: Box, box: Box) -> tuple[slice, ...]:
    """Index of a part within a box that holds it."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))


def _rows_before(part: Box, tile: DenseTile) -> int:
    """Number of bytes of a tile before a part, which is a run in the tile."""
    if not part:
        return 0
    rows = tile.box[0][1] - tile.box[0][0]
    return (part[0][0] - tile.box[0][0]) * (tile.bytes // rows)


def _number(leaf: DenseLeaf, data: np.ndarray) -> bool | int | float:
    """Makes a number of Python from its bytes."""
    if leaf.dtype == "float":
        return float(data.view("<f8")[0])
    number = int.from_bytes(data.tobytes(), "little", signed=leaf.dtype == "int")
    return bool(number) if leaf.dtype == "bool" else number
