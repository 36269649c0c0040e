from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnr_jax.errors import FormatError, TableError
from cnr_jax.state.layouts import Identity, ModSharded, RowLayout, layout_from

from ..conftest import each_of

LAYOUTS = [
    Identity(),
    ModSharded(shards=1, rows_per_shard=7),
    ModSharded(shards=4, rows_per_shard=5),
    ModSharded(shards=9, rows_per_shard=1),
]


@given(shards=st.integers(1, 12), rows_per_shard=st.integers(1, 12))
def test_mod_sharded_is_a_bijection_on_its_rows(shards: int, rows_per_shard: int):
    layout = ModSharded(shards=shards, rows_per_shard=rows_per_shard)
    logical = range(shards * rows_per_shard)
    physical = [layout.to_physical(row) for row in logical]
    assert sorted(physical) == list(logical)
    assert [layout.to_logical(row) for row in physical] == list(logical)


def test_mod_sharded_deals_rows_round_robin():
    layout = ModSharded(shards=3, rows_per_shard=2)
    assert [layout.to_physical(row) for row in range(6)] == [0, 2, 4, 1, 3, 5]


@each_of("layout", LAYOUTS)
def test_ints_numpy_and_traced_arrays_agree(layout: RowLayout):
    rows = np.arange(7)  # no layout above has fewer
    for method in (layout.to_physical, layout.to_logical):
        expected = [method(int(row)) for row in rows]
        assert method(rows).tolist() == expected
        assert jax.jit(method)(jnp.asarray(rows, jnp.int32)).tolist() == expected


def test_mod_sharded_stays_right_near_the_end_of_int32():
    layout = ModSharded(shards=3, rows_per_shard=(2**31 - 1) // 3)
    last = 3 * layout.rows_per_shard - 1
    rows = [0, 1, last - 2, last - 1, last]
    narrow = np.array(rows, np.int32)
    physical = layout.to_physical(narrow)
    assert physical.dtype == np.int32
    assert physical.tolist() == [layout.to_physical(row) for row in rows]
    assert layout.to_logical(physical).tolist() == rows
    assert jax.jit(layout.to_physical)(narrow).tolist() == physical.tolist()


@each_of("layout", LAYOUTS)
def test_layout_from_rebuilds_an_equal_layout(layout: RowLayout):
    rebuilt = layout_from(layout.name, layout.configuration())
    assert rebuilt == layout
    assert hash(rebuilt) == hash(layout)


def test_layouts_differ_by_their_configuration():
    assert ModSharded(shards=2, rows_per_shard=3) != ModSharded(
        shards=3, rows_per_shard=2
    )
    assert Identity() != ModSharded(shards=1, rows_per_shard=1)


def test_unknown_layout_error_lists_the_known_ones():
    with pytest.raises(FormatError, match=r"'zigzag'.*\n.*identity, mod"):
        layout_from("zigzag", {})


@each_of(
    ("name", "configuration"),
    [
        ("identity", {"shards": 1}),
        ("mod", {}),
        ("mod", {"shards": 2}),
        ("mod", {"shards": 2, "rows_per_shard": 3, "offset": 0}),
        ("mod", {"shards": 0, "rows_per_shard": 3}),
        ("mod", {"shards": 2, "rows_per_shard": "3"}),
        ("mod", {"shards": True, "rows_per_shard": 3}),
    ],
)
def test_configuration_that_does_not_fit_is_a_format_error(name, configuration):
    with pytest.raises(FormatError, match=f"'{name}'"):
        layout_from(name, configuration)


def test_mod_sharded_rejects_an_empty_shard():
    with pytest.raises(TableError, match="rows_per_shard=0"):
        ModSharded(shards=2, rows_per_shard=0)
