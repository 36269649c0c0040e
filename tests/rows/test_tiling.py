from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cnr_jax import errors
from cnr_jax.rows.shards import (
    Shards,
    Tiling,
    local_shards,
    row_words,
    spot_of,
    spot_on,
)
from cnr_jax.rows.tiling import Box, boxes_of, tile_leaf
from cnr_jax.state.find import find_tables

from ..conftest import each_of

ROWS, COLUMNS = 16, 8


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def sharding(*spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), P(*spec))


class Device(NamedTuple):
    """A device of a run of several processes, of which there is none here."""

    id: int
    process_index: int


class Placed:
    """A sharding that says only which rows are where."""

    def __init__(self, rows: dict[Device, slice]) -> None:
        self.rows = rows

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, Any]:
        columns = (slice(None),) * (len(shape) - 1)
        return {device: (rows, *columns) for device, rows in self.rows.items()}


def by_rows(*processes: int) -> Any:
    """Rows 0 to 8 over devices of these processes, in equal parts."""
    size = 8 // len(processes)
    return Placed(
        {Device(i, p): slice(i * size, (i + 1) * size) for i, p in enumerate(processes)}
    )


def everywhere(*processes: int) -> Any:
    return Placed({Device(i, p): slice(None) for i, p in enumerate(processes)})


def counts(boxes: list[Box], shape: tuple[int, ...]) -> np.ndarray:
    found = np.zeros(shape, int)
    for box in boxes:
        found[tuple(slice(*pair) for pair in box)] += 1
    return found


TABLES = {
    "rows": ("a", None),
    "rows over both axes": (("a", "b"), None),
    "columns": (None, "b"),
    "rows and columns": ("a", "b"),
    "replicated": (None, None),
}
STAMPS = {"a": ("a",), "both": (("a", "b"),), "replicated": (None,)}


@each_of("stamps", STAMPS)
@each_of("table", TABLES)
def test_tiles_cover_every_element_once(table: str, stamps: str) -> None:
    shape = (ROWS, COLUMNS)
    pieces = tile_leaf("t", shape, sharding(*TABLES[table]), sharding(*STAMPS[stamps]))
    assert (counts([piece.box for piece in pieces], shape) == 1).all()


@each_of("stamps", STAMPS)
@each_of("table", TABLES)
def test_owner_holds_its_tile_and_rows_of_one_shard_of_stamps(
    table: str, stamps: str
) -> None:
    shape = (ROWS, COLUMNS)
    leaf, of_stamps = sharding(*TABLES[table]), sharding(*STAMPS[stamps])
    array = jax.device_put(np.arange(ROWS * COLUMNS).reshape(shape), leaf)
    stamp_boxes = [box[0] for box in boxes_of(of_stamps, shape[:1])]
    for box, device in tile_leaf("t", shape, leaf, of_stamps):
        index = leaf.devices_indices_map(shape)[device]
        for part, (start, stop), size in zip(index, box, shape, strict=True):
            first, last, _ = part.indices(size)
            assert first <= start and stop <= last
        assert any(a <= box[0][0] and box[0][1] <= b for a, b in stamp_boxes)
        number, first = spot_on(leaf, shape, device)
        data = local_shards(array)[number]
        assert data.devices() == {device}
        got = np.asarray(data)[box[0][0] - first : box[0][1] - first]
        expected = np.asarray(array)[tuple(slice(*pair) for pair in box)]
        assert np.array_equal(got, expected)


def test_replicated_slot_of_a_sharded_table_is_shared_by_the_devices() -> None:
    pieces = tile_leaf("slot", (ROWS,), sharding(None), sharding(("a", "b")))
    assert len({piece.device for piece in pieces}) == 8
    assert sorted(piece.box for piece in pieces) == [
        ((i, i + 2),) for i in range(0, 16, 2)
    ]


def test_single_device_has_one_tile() -> None:
    single = SingleDeviceSharding(jax.devices()[3])
    (piece,) = tile_leaf("t", (ROWS, COLUMNS), single, single)
    assert piece == (((0, ROWS), (0, COLUMNS)), jax.devices()[3])


def test_boxes_name_their_devices_in_order_of_id() -> None:
    boxes = boxes_of(sharding("a", None), (ROWS, COLUMNS))
    assert list(boxes) == [((i, i + 4), (0, COLUMNS)) for i in range(0, ROWS, 4)]
    for devices in boxes.values():
        assert [d.id for d in devices] == sorted(d.id for d in devices)
        assert len(devices) == 2


def test_tile_is_saved_by_a_device_that_holds_its_stamps_if_there_is_one() -> None:
    pieces = tile_leaf("slot", (8,), everywhere(0, 1, 2, 3), by_rows(0, 1, 2, 3))
    assert [(p.box, p.device.process_index) for p in pieces] == [
        (((2 * i, 2 * i + 2),), i) for i in range(4)
    ]


def test_tile_is_saved_by_another_device_of_the_process_with_its_stamps() -> None:
    # The leaf's first half is on device 1, its stamps on device 0 of the same process.
    leaf: Any = Placed({Device(1, 0): slice(0, 4), Device(2, 1): slice(4, 8)})
    pieces = tile_leaf("slot", (8,), leaf, by_rows(0, 1))
    assert [(p.box, p.device) for p in pieces] == [
        (((0, 4),), Device(1, 0)),
        (((4, 8),), Device(2, 1)),
    ]


def test_rows_whose_stamps_no_holder_has_are_refused_by_name() -> None:
    leaf: Any = Placed({Device(0, 0): slice(4, 8), Device(1, 1): slice(0, 4)})
    with pytest.raises(errors.TableError, match=r"user\.opt") as caught:
        tile_leaf("user.opt", (8,), leaf, by_rows(0, 1))
    assert "rows 0 to 4 are on processes [1], the stamps of these rows on [0]" in str(
        caught.value
    )


def test_tiles_are_cut_where_the_stamps_are() -> None:
    pieces = tile_leaf("t", (8, 3), by_rows(0, 1), by_rows(0, 0, 1, 1))
    assert [(p.box, p.device.process_index) for p in pieces] == [
        (((0, 2), (0, 3)), 0),
        (((2, 4), (0, 3)), 0),
        (((4, 6), (0, 3)), 1),
        (((6, 8), (0, 3)), 1),
    ]


def test_local_shard_holds_the_rows_and_says_where_it_starts() -> None:
    stamps = jax.device_put(np.arange(ROWS, dtype=np.int32), sharding("a"))
    number, first = spot_of(stamps.sharding, stamps.shape, (5, 7))
    data = local_shards(stamps)[number]
    assert (first, np.asarray(data).tolist()) == (4, [4, 5, 6, 7])
    with pytest.raises(errors.TableError, match="rows 3 to 5"):
        spot_of(stamps.sharding, stamps.shape, (3, 5))


def test_shard_of_a_device_that_holds_none_is_refused() -> None:
    array = jax.device_put(np.zeros(4), jax.devices()[0])
    with pytest.raises(errors.TableError, match="no shard"):
        spot_on(array.sharding, array.shape, jax.devices()[1])


def tiling_of(leaf: jax.Array) -> Tiling:
    """How one leaf is saved, with stamps as its rows."""
    where, name = leaf.sharding, {"user": leaf}
    rows = SingleDeviceSharding(jax.devices()[0])
    shardings = {"user": {"table": where}}
    tables = find_tables(name, ["user"])
    return Tiling(tables, shardings, {"user": rows}, lambda *_: "host")


@each_of("shape", [(6,), (6, 4), (6, 3, 2), (6, 5)])
@each_of("dtype", [np.float32, np.float16, np.bool_, np.int8, jnp.bfloat16])
def test_words_of_a_shard_are_the_bits_of_its_rows(
    dtype: Any, shape: tuple[int, ...]
) -> None:
    size = np.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 2, (*shape, size), np.uint8)
    leaf = jax.device_put(bits.view(dtype).reshape(shape), jax.devices()[0])
    (words,) = Shards(tiling_of(leaf), {"user": {"table": leaf}}).words
    assert words is not None and words.dtype == row_words(np.asarray(leaf)).dtype
    assert words.tobytes() == bits.tobytes() and len(words) == 6


def test_words_of_rows_that_lie_in_another_order_are_those_of_rows() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    where = SingleDeviceSharding(jax.devices()[0])
    leaf = jax.device_put(values, Format(Layout((1, 0)), where))
    (words,) = Shards(tiling_of(leaf), {"user": {"table": leaf}}).words
    assert words is not None and words.tobytes() == values.tobytes()
