"""The logic of the benchmark on real traces: schedules, optima and bytes by brute force."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cnr_jax.format.rowids import encode_rowids
from cnr_jax.policy import Consecutive, Full, Intermittent, OneShot
from cnr_jax.rows.codecs import bytes_of, make_codec

pytestmark = pytest.mark.tools

BENCHMARKS = Path(__file__).parent
SAVES = 6


@pytest.fixture(name="schedules")
def fixture_schedules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("schedules")


@pytest.fixture(name="traces")
def fixture_traces(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("traces")


def small_trace(traces: Any, seed: int, rows: int = 40) -> Any:
    """Two tables; how much is looked up, and where, changes as time passes."""
    rng = np.random.default_rng(seed)
    busy = rng.integers(1, 12, SAVES)
    ids = np.concatenate(
        [rng.zipf(1.3, (9 * n, 2)) * rng.integers(1, 9) % rows for n in busy]
    )
    return traces.Trace("small", (rows, rows), ids.astype(np.int32))


def all_parents(saves: int) -> Iterator[tuple[int, ...]]:
    """Every choice of parents; a save that is its own parent is full."""
    return itertools.product(*(range(save + 1) for save in range(saves)))


def depth_of(parents: Sequence[int]) -> int:
    """Most deltas that the restore of any save replays."""
    depths: list[int] = []
    for save, parent in enumerate(parents):
        depths.append(0 if save == parent else depths[parent] + 1)
    return max(depths)


@pytest.mark.parametrize("seed", range(4))
def test_optimum_is_the_least_of_all_schedules(
    seed: int, schedules: Any, traces: Any
) -> None:
    touched = traces.find_touched(small_trace(traces, seed), SAVES)
    # Rows for bytes: small fulls, so that they pay now and then.
    cost = touched.rows
    for saves in range(1, SAVES + 1):
        written = [
            (depth_of(parents), sum(cost[p, s] for s, p in enumerate(parents)))
            for parents in all_parents(saves)
        ]
        for depth in (1, 2, 3, SAVES - 1):
            least = min(total for deltas, total in written if deltas <= depth)
            assert schedules.least_bytes(cost, depth)[saves] == least


@pytest.mark.parametrize("seed", range(4))
def test_best_schedule_is_one_that_costs_the_least(
    seed: int, schedules: Any, traces: Any
) -> None:
    cost = traces.find_touched(small_trace(traces, seed), 24).rows
    best = schedules.best_schedule(cost)
    assert best.so_far[-1] == schedules.least_bytes(cost, 1)[-1]
    assert depth_of(best.parents) == 1
    assert len(best.fulls) > 1
    for policy in (Full(), OneShot(), Intermittent()):
        assert schedules.follow(policy, cost).so_far[-1] >= best.so_far[-1]


def test_consecutive_is_the_optimum_where_any_parent_will_do(
    schedules: Any, traces: Any
) -> None:
    cost = traces.find_touched(small_trace(traces, 0), SAVES).rows
    chain = schedules.follow(Consecutive(), cost)
    assert (chain.so_far == schedules.least_bytes(cost, SAVES)[1:]).all()


def test_rows_and_ids_are_those_between_two_saves(traces: Any) -> None:
    trace = small_trace(traces, 1)
    touched = traces.find_touched(trace, SAVES)
    windows = list(trace.windows(SAVES))
    assert sum(map(len, windows)) == len(trace.ids)
    for i, j in itertools.combinations(range(SAVES), 2):
        since = np.concatenate(windows[i + 1 : j + 1])
        sets = [np.unique(since[:, table]) for table in range(2)]
        encoded = [encode_rowids(ids, 40)[1] for ids in sets]
        assert touched.rows[i, j] == sum(map(len, sets))
        assert touched.id_bytes[i, j] == sum(map(len, encoded))
    assert (touched.rows.diagonal() == 80).all()
    assert (touched.id_bytes.diagonal() == 0).all()


def test_ids_of_few_and_of_many_rows_are_exact(traces: Any) -> None:
    rng = np.random.default_rng(0)
    for rows, lookups in ((3_000, 4), (3_000, 200), (3_000, 2_000)):
        ids = rng.integers(0, rows, (2 * lookups, 1)).astype(np.int32)
        touched = traces.find_touched(traces.Trace("few", (rows,), ids), 2)
        found = np.unique(ids[lookups:])
        assert touched.id_bytes[0, 1] == len(encode_rowids(found, rows)[1])


def test_bytes_are_rows_slots_ids_and_a_little(traces: Any) -> None:
    model = traces.ByteModel(dim=64, bits=4)
    assert (
        model.row_bytes == bytes_of(make_codec("adaptive", 4).parts(64, np.float32)) + 4
    )
    assert model.row_bytes == 32 + 2 + 2 + 4
    assert 0 < model.save_bytes(1000, 77, 1) - (40 * 1000 + 77) < 5_000


def test_capacity_counts_chains_and_the_save_before(schedules: Any) -> None:
    cost = np.array([[100, 10, 20, 30], [0, 100, 11, 21], [0, 0, 100, 12], [0] * 4])
    cost[3, 3] = 100
    found = schedules.schedule_of((0, 0, 1, 3), cost)
    assert found.written.tolist() == [100, 10, 11, 100]
    assert found.steady.tolist() == [100, 110, 121, 100]
    assert found.transient.tolist() == [100, 110, 121, 221]
    assert found.fulls == [0, 3]


def test_missing_data_are_said_to_be_missing(traces: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="hint: name their folder by --data"):
        traces.data_folder(tmp_path)
