"""Which rows a look reads: all of them in a round, no more than the limit at a time."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cnr_jax as cnr
from cnr_jax.rows.fingerprints import rotation
from cnr_jax.rows.fingerprints.rotation import Glimpse, Rotation
from cnr_jax.rows.fingerprints.watch import Differing
from cnr_jax.rows.fingerprints.windows import Ring, Window, windows_of
from cnr_jax.rows.shards import Shards, Tiling

SIZES = st.integers(1, 5000)


@settings(deadline=None)
@given(rows=SIZES, block=SIZES, blocks=st.integers(1, 9), start=SIZES)
def test_windows_meet_all_blocks_once_in_a_round(
    rows: int, block: int, blocks: int, start: int
) -> None:
    window = Window(rows, min(rows, block), blocks)
    numbers = range(-(-window.count // blocks))
    visits = [b for n in numbers for b in window.visited(n, start)][: window.count]
    assert sorted(visits) == list(range(window.count))
    read = {
        row
        for visit in visits
        for row in range(window.first(visit), window.first(visit) + window.block)
    }
    assert read == set(range(rows))


def _tables(rows: list[int], dims: list[int], by: Any = "host") -> tuple[Any, Any, Any]:
    state = {
        f"table{i}": jnp.zeros(shape, jnp.float32)
        for i, shape in enumerate(zip(rows, dims, strict=True))
    }
    tables = cnr.find_tables(state, list(state))
    arrays = {name: {"table": leaf} for name, leaf in state.items()}
    where = {name: leaf.sharding for name, leaf in state.items()}
    shardings = {n: {"table": x} for n, x in where.items()}
    tiling = Tiling(tables, shardings, where, lambda device, size: by)
    return tables, arrays, tiling


def by_group(look: Glimpse) -> dict[Any, Differing]:
    """What differs of each group alone."""
    return {g: d for f in look.differing for g, (d, _) in f.by_group().items()}


# Each shape is a compilation.
@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), max_size=5),
    limit=st.integers(1, 5000),
)
def test_looks_read_a_part_of_each_table_within_a_limit(
    shapes: list[tuple[int, int]], limit: int
) -> None:
    shapes = [*shapes, (3, 2)]
    rows, dims = map(list, zip(*shapes, strict=True))
    _, arrays, tiling = _tables(rows, dims)
    watch = Rotation(limit)
    for clock in range(3):
        look = watch.look(Shards(tiling, arrays))
        assert look.anew == (clock == 0)
        least = sum(min(2, r) * 4 * d for r, d in shapes)
        assert max(look.read_bytes.values()) <= limit + least
        assert all(len(read.blocks) for read in look.read)
        assert not any(len(found.rows) for found in look.differing)
        watch.keep(look, clock)


@pytest.mark.parametrize(
    "where", ["host", pytest.param("device", marks=pytest.mark.slow)]
)
def test_rows_are_found_as_often_as_is_said(where: Any) -> None:
    """Of k rows that keep moving, n looks miss all with probability about (1 - n w / N)^k."""
    rows, k, n, limit = 3000, 25, 4, 800
    _, arrays, tiling = _tables([rows], [2], where)
    (window,) = windows_of(tiling.groups, limit).values()
    share = window.block * window.blocks / rows
    rng, missed, times = np.random.default_rng(0), 0, 400
    same = arrays["table0"]["table"]
    for _ in range(times):
        watch = Rotation(limit)
        found = False
        moving = rng.choice(rows, k, replace=False)
        for clock in range(n + 1):
            values = np.array(same)
            values[moving] += clock
            moved = {"table0": {"table": jax.device_put(values, same.sharding)}}
            look = watch.look(Shards(tiling, moved))
            found |= any(len(each.rows) for each in look.differing)
            watch.keep(look, clock)
        missed += not found
    expected = (1 - n * share) ** k
    deviation = (expected * (1 - expected) / times) ** 0.5
    assert abs(missed / times - expected) < 4 * deviation


@pytest.mark.usefixtures("one_seed")
def test_last_block_that_overlaps_counts_its_rows_once() -> None:
    _, arrays, tiling = _tables([10], [1])
    watch = Rotation(10**6)
    ring = Ring(((1, "uint32"),), Window(10, 4, 3), tiling.groups, 0)
    watch._tiling, watch._rings = tiling, (ring,)
    same = arrays["table0"]["table"]
    watch.keep(watch.look(Shards(tiling, arrays)), 0)
    moved = {"table0": {"table": same.at[7].set(1.0)}}
    (found,) = watch.look(Shards(tiling, moved)).differing
    assert (found.rows.tolist(), found.since.tolist()) == ([7], [0])
    assert found.leaves(np.array([0])).tolist() == [[True]]


def test_buffers_are_read_in_pieces_where_a_look_is_large(tiny_limits: Any) -> None:
    tiny_limits(audited_chunk_bytes=64 * 8)
    _, arrays, tiling = _tables([1000, 333], [2, 2])
    watch = Rotation(10**6)
    watch.keep(watch.look(Shards(tiling, arrays)), 0)
    for name, row in itertools.product(arrays, [0, 63, 64, 332]):
        moved = {k: dict(v) for k, v in arrays.items()}
        moved[name]["table"] = moved[name]["table"].at[row].set(1.0)
        look = watch.look(Shards(tiling, moved))
        found = {g.table: d.rows.tolist() for g, d in by_group(look).items()}
        assert found == {key: [row] if key == name else [] for key in arrays}


@pytest.mark.usefixtures("one_seed")
def test_tables_of_one_shape_are_compared_together_and_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is done for each shape is not done for each table, and no answer is another's."""
    rows = [300] * 20 + [7] * 20 + [300, 5]
    _, arrays, tiling = _tables(rows, [2] * 40 + [3, 2])
    watch, compared = Rotation(20_000), []
    differing = rotation.Ring.differing

    def counted(ring: Any, *args: Any) -> Any:
        compared.append(ring)
        return differing(ring, *args)

    monkeypatch.setattr(rotation.Ring, "differing", counted)
    first = watch.look(Shards(tiling, arrays))
    assert len(compared) == 4
    watch.keep(first, 0)
    second = watch.look(Shards(tiling, arrays))
    assert sorted(g.table for g in by_group(second)) == sorted(arrays)
    kept = {
        g.table: r.blocks
        for ring, r in zip(first.rings, first.read, strict=True)
        for g in ring.groups
    }
    windows = {g.table: ring.window for ring in first.rings for g in ring.groups}
    for number, name in enumerate(arrays):
        window, block = windows[name], int(kept[name][number % len(kept[name])])
        row = window.first(block) + number % window.block
        leaf = arrays[name]["table"]
        moved = arrays | {name: {"table": leaf.at[row].set(number + 1.0)}}
        look = watch.look(Shards(tiling, moved))
        found = {g.table: d for g, d in by_group(look).items() if len(d.rows)}
        assert list(found) == [name]
        assert (found[name].rows.tolist(), found[name].since.tolist()) == ([row], [0])
        assert found[name].names == (("table",),)
        assert found[name].leaves(np.array([0])).tolist() == [[True]]
    assert {d.compared for d in by_group(second).values()} == {
        min(w.rows, len(kept[name]) * w.block) for name, w in windows.items()
    }
