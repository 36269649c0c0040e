"""Host and device staging pick and encode the same rows, those that numpy would."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cnr_jax.rows import shards
from cnr_jax.rows.codecs import Asymmetric, Codec, Raw
from cnr_jax.rows.gather import host
from cnr_jax.rows.gather.chunk import Chunk, HostRows, Run
from cnr_jax.rows.gather.encode import EncodedChunk, encode_chunks
from cnr_jax.rows.gather.host import Buffers, touched_positions
from cnr_jax.rows.shards import Shards, Tiling, row_words
from cnr_jax.rows.tiling import Where, host_device
from cnr_jax.state.find import find_tables

from ..conftest import each_of

WAYS: tuple[Where, ...] = ("host", "device")
SMALL, LARGE = 8, 32


def gather_chunks(runs: Sequence[Run], where: Where) -> Iterator[Chunk]:
    some = runs if where == "device" else on_host(runs)
    return host.gather_chunks(some, Buffers(0))


def on_host(runs: Iterable[Run]) -> Iterator[HostRows]:
    """The same rows, gathered on the host: together where they are of one kind."""
    of_kind = itertools.groupby(runs, lambda r: (r.codec, r.data.dtype, r.width))
    for (codec, dtype, width), group in of_kind:
        some = [run for run in group if run.count]
        yield HostRows(
            codec=codec,
            dtype=np.dtype(dtype),
            width=width,
            words=[row_words(np.asarray(run.data)) for run in some],
            firsts=[run.first for run in some],
            positions=[run.positions for run in some],
            counts=[run.count for run in some],
        )


def encode(chunk: Chunk) -> EncodedChunk:
    ((_, encoded),) = encode_chunks([chunk], host_device())
    return encoded


@pytest.fixture(autouse=True)
def small_chunks(tiny_limits: Any) -> None:
    """Chunks of 8 and 32 rows, so that few rows have many."""
    tiny_limits(
        gathered_small_rows=SMALL,
        gathered_chunk_bytes=LARGE * 6 * 4,
        gathered_large_bytes=2 * LARGE * 6 * 4,
    )


def values_of(
    rows: int, width: int, dtype: Any = np.float32, seed: int = 0
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 1 << 15, (rows, width)).astype(dtype)
    return rng.normal(size=(rows, width)).astype(dtype)


def run_of(
    values: np.ndarray,
    positions: np.ndarray | None,
    codec: Codec,
    first: int = 0,
    rows: int | None = None,
) -> Run:
    rows = len(values) - first if rows is None else rows
    return Run(
        data=jnp.asarray(values),
        first=first,
        rows=rows,
        positions=positions,
        codec=codec,
    )


def expected_rows(run: Run) -> np.ndarray:
    part = np.asarray(run.data)[run.first : run.first + run.rows]
    picked = part if run.positions is None else part[run.positions]
    return picked.reshape(run.count, -1)


def encoded(
    runs: list[Run], where: Where
) -> tuple[dict[str, np.ndarray], dict[int, bytes]]:
    """Parts of all rows in order, and the escaped rows' bits by their number."""
    parts: dict[str, list[np.ndarray]] = {}
    escapes: dict[int, bytes] = {}
    done = 0
    for chunk in gather_chunks(runs, where):
        found, at, rows = encode(chunk)
        for name, part in found.items():
            assert len(part) == chunk.count
            parts.setdefault(name, []).append(part)
        for i, position in enumerate(at.tolist()):
            assert rows is not None
            escapes[done + position] = rows[i].tobytes()
        done += chunk.count
    assert done == sum(run.count for run in runs)
    return {name: np.concatenate(found) for name, found in parts.items()}, escapes


@each_of("where", WAYS)
@each_of("count", [1, SMALL, SMALL + 1, LARGE, LARGE + 1, 3 * LARGE + 5])
def test_raw_rows_are_those_of_numpy(where: Where, count: int) -> None:
    values = values_of(120, 6)
    positions = np.sort(np.random.default_rng(count).permutation(110)[:count])
    run = run_of(values, positions, Raw(), first=10)
    parts, escapes = encoded([run], where)
    assert parts["rows"].tobytes() == expected_rows(run).tobytes()
    assert escapes == {}


@each_of("where", WAYS)
@each_of("dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.uint8])
def test_every_dtype_is_gathered_as_bits(where: Where, dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 256, (50, 6 * size), np.uint8)
    values = bits.view(dtype)
    parts, _ = encoded([run_of(values, np.arange(3, 47), Raw())], where)
    assert parts["rows"].tobytes() == bits[3:47].tobytes()


@pytest.mark.parametrize("where", WAYS)
@each_of("rows", [70, 80])
def test_all_rows_of_a_tile_within_a_shard_are_gathered(
    where: Where, rows: int
) -> None:
    """Up to the end of the shard too, after which chunks have padding."""
    run = run_of(values_of(100, 6), None, Raw(), first=20, rows=rows)
    parts, _ = encoded([run], where)
    assert np.array_equal(parts["rows"], expected_rows(run))


@pytest.mark.parametrize("where", WAYS)
def test_slot_without_columns_has_rows_of_one_element(where: Where) -> None:
    values = np.arange(40, dtype=np.float32)
    parts, _ = encoded([run_of(values, np.array([0, 7, 39]), Raw())], where)
    assert parts["rows"].tolist() == [[0], [7], [39]]


@pytest.mark.parametrize("where", WAYS)
def test_rows_of_more_dimensions_are_flattened(where: Where) -> None:
    values = values_of(20, 6).reshape(20, 2, 3)
    parts, _ = encoded([run_of(values, np.array([4, 19]), Raw())], where)
    assert np.array_equal(parts["rows"], values[[4, 19]].reshape(2, 6))


@pytest.mark.parametrize("where", WAYS)
def test_runs_of_one_group_follow_each_other(where: Where) -> None:
    runs = [
        run_of(
            values_of(60, 6, seed=i),
            np.sort(np.random.default_rng(i).permutation(60)[:n]),
            Raw(),
        )
        for i, n in enumerate((3, 50, 1, 20, 9))
    ]
    parts, _ = encoded(runs, where)
    assert np.array_equal(
        parts["rows"], np.concatenate([expected_rows(r) for r in runs])
    )


@each_of("where", WAYS)
@each_of("codec", [Asymmetric(bits=4), Asymmetric(bits=3, refits=0)])
def test_quantized_rows_are_those_that_the_codec_makes(
    where: Where, codec: Codec
) -> None:
    values = values_of(120, 6)
    values[5] = 2.0
    values[17, 3] = np.nan
    values[100] = 0
    run = run_of(values, np.arange(1, 110), codec, first=4, rows=116)
    parts, escapes = encoded([run], where)
    rows = expected_rows(run)
    direct = jax.jit(codec.encode)(rows)
    for name, part in direct.parts.items():
        assert parts[name].tobytes() == np.asarray(part).tobytes(), name
    # Rows 5 and 17 of the shard: 4 rows precede the tile, and row 0 of it is not chosen.
    assert escapes == {0: rows[0].tobytes(), 12: rows[12].tobytes()}


def test_escaped_rows_do_not_depend_on_what_happens_to_the_state_later() -> None:
    values = values_of(20, 6)
    values[3] = np.inf
    for where in WAYS:
        data = jnp.array(values)
        run = dataclasses.replace(run_of(values, None, Asymmetric(bits=4)), data=data)
        chunks = list(gather_chunks([run], where))
        data.delete()
        found = [encode(chunk) for chunk in chunks]
        rows = [rows for _, _, rows in found if rows is not None]
        assert np.concatenate(rows).tobytes() == values[[3]].tobytes()


def test_host_chunks_are_of_two_sizes_and_shared_by_runs() -> None:
    runs = [run_of(values_of(60, 6, seed=i), None, Raw()) for i in range(2)]
    chunks = list(gather_chunks(runs, "host"))
    assert [chunk.count for chunk in chunks] == [32, 32, 32, 24]
    assert {len(chunk.rows) for chunk in chunks if chunk.rows is not None} == {LARGE}
    few = list(gather_chunks([run_of(values_of(60, 6), np.arange(5), Raw())], "host"))
    assert [(chunk.count, chunk.rows.shape) for chunk in few] == [(5, (SMALL, 6))]


def test_host_chunks_of_other_groups_are_apart() -> None:
    runs = [
        run_of(values_of(5, 6), None, Raw()),
        run_of(values_of(5, 6), None, Asymmetric(bits=4)),
        run_of(values_of(5, 3), None, Asymmetric(bits=4)),
        run_of(values_of(5, 3, ml_dtypes.bfloat16), None, Asymmetric(bits=4)),
    ]
    chunks = list(gather_chunks(runs, "host"))
    assert [chunk.codec for chunk in chunks] == [run.codec for run in runs]


def test_padding_of_a_chunk_is_never_handed_out() -> None:
    rows = np.full((SMALL, 6), np.nan, np.float32)
    rows[:3] = values_of(3, 6)
    chunk = Chunk(codec=Asymmetric(bits=4), count=3, rows=rows)
    parts, escaped, found = encode(chunk)
    assert {len(part) for part in parts.values()} == {3}
    assert len(escaped) == 0 and found is None


@pytest.mark.parametrize("where", WAYS)
def test_chunk_counts_the_bytes_that_it_keeps(where: Where) -> None:
    values = values_of(20, 6)
    values[0] = np.nan
    (chunk,) = gather_chunks([run_of(values, None, Asymmetric(bits=4))], where)
    if where == "host":
        assert chunk.nbytes == LARGE * 6 * 4
    else:
        assert chunk.nbytes == LARGE * (3 + 2 + 2) + LARGE * 6 * 4


@each_of("where", WAYS)
@each_of("clock", [-1, 0, 4, 9])
@each_of("together", [False, True])
@each_of("of_stamps", ["by rows", "on one device"])
def test_touched_positions_are_rows_with_a_later_stamp(
    where: Where,
    clock: int,
    together: bool,
    of_stamps: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "_SMALL_RANGE", 8 if together else 7)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("rows"))
    values = np.random.default_rng(0).integers(0, 10, 64).astype(np.int32)
    one = SingleDeviceSharding(jax.devices()[2])
    stamps = jax.device_put(values, by_rows if of_stamps == "by rows" else one)
    rows = {"user": jax.device_put(np.zeros((64, 2), np.float32), by_rows)}
    found = Tiling(
        find_tables(rows, ["user"]),
        {"user": {"table": by_rows}},
        {"user": stamps.sharding},
        lambda *_: where,
    )
    some = Shards(found, {"user": {"table": rows["user"]}}, {"user": stamps})
    got = touched_positions(some, clock)
    assert {each.dtype for each in got} == {np.dtype(np.int64)}
    assert [each.tolist() for each in got] == [
        np.flatnonzero(values[start : start + 8] > clock).tolist()
        for start in range(0, 64, 8)
    ]


@pytest.mark.parametrize("where", WAYS)
def test_no_runs_and_runs_without_rows_give_no_chunks(where: Where) -> None:
    assert list(gather_chunks([], where)) == []
    empty = run_of(values_of(9, 6), np.empty(0, np.int64), Raw())
    assert list(gather_chunks([empty], where)) == []


def test_chunks_are_gathered_as_they_are_asked_for() -> None:
    """However many there are: a save that does not fit into memory streams."""
    filled: list[int] = []
    fill = host._fill

    def noted(*args: Any) -> Chunk:
        filled.append(1)
        return fill(*args)

    chunks = gather_chunks([run_of(values_of(40 * LARGE, 6), None, Raw())], "host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_fill", noted)
        next(chunks)
        assert 1 <= len(filled) <= 2 * host._THREADS + 2
        assert len(list(chunks)) == 39
    assert len(filled) == 40


def test_device_chunks_are_of_three_sizes_and_little_is_padded() -> None:
    run = run_of(values_of(200, 6), np.arange(0, 200, 2)[:75], Asymmetric(bits=4))
    chunks = list(gather_chunks([run], "device"))
    assert [chunk.count for chunk in chunks] == [64, 11]
    sizes = [len(chunk.encoded.escaped) for chunk in chunks if chunk.encoded]
    assert sizes == [64, 32]
    # One chunk with some padding rather than several small ones.
    more = run_of(values_of(200, 6), np.arange(10, 114), Asymmetric(bits=4))
    chunks = list(gather_chunks([more], "device"))
    assert [chunk.count for chunk in chunks] == [64, 40]
    few = run_of(values_of(200, 6), np.arange(5), Asymmetric(bits=4))
    (chunk,) = gather_chunks([few], "device")
    assert chunk.encoded is not None and len(chunk.encoded.escaped) == SMALL


def test_runs_of_both_ways_come_in_order() -> None:
    runs = [run_of(values_of(40, 6, seed=i), None, Raw()) for i in range(3)]
    some = [*runs[:2], *on_host(runs[2:])]
    found = [
        encode(chunk).parts["rows"] for chunk in host.gather_chunks(some, Buffers(0))
    ]
    expected = np.concatenate([expected_rows(run) for run in runs])
    assert np.concatenate(found).tobytes() == expected.tobytes()


def test_chunks_beyond_some_do_not_wait_on_their_device(tiny_limits: Any) -> None:
    """A train step may need its memory."""
    values = values_of(300, 6)
    values[290] = np.nan
    run = run_of(values, None, Asymmetric(bits=4))
    tiny_limits(waiting_device_bytes=2 * LARGE * (3 + 2 + 2))
    chunks = list(gather_chunks([run], "device"))
    kinds = [isinstance(c.encoded.escaped, np.ndarray) for c in chunks if c.encoded]
    assert kinds[0] is False and kinds[1:] == [True] * (len(chunks) - 1)
    tiny_limits(waiting_device_bytes=1 << 30)
    for found, want in zip(chunks, gather_chunks([run], "device"), strict=True):
        assert found.nbytes == want.nbytes
        one, other = encode(found), encode(want)
        for name, part in one.parts.items():
            assert part.tobytes() == other.parts[name].tobytes()
        assert (one.rows is None) == (other.rows is None)
    assert one.rows is not None and one.rows.tobytes() == values[[290]].tobytes()
