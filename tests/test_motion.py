"""How far rows move between restores is measured, and decides on bits or on a warning."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.checkpointer.saving.widening import Widening
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.gather import motion
from cnr_jax.rows.gather.motion import FollowedRows
from cnr_jax.rows.shards import Shards, Tiling
from tests.conftest import each_of

ROWS, DIM = 300, 16
WIDENING = "cnr_jax.checkpointer.saving.widening"


def make_state(across: int = 1, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((across,), ("r",), axis_types=(AxisType.Auto,))
    rows = rng.uniform(-0.1, 0.1, (ROWS, DIM)).astype(dtype)
    # The range of each row is known.
    rows[:, 0], rows[:, 1] = -0.1, 0.1
    return {"user": jax.device_put(rows, NamedSharding(mesh, P("r")))}


def opened(root: Path, state: Any, **options: Any) -> cnr.CheckpointManager:
    given = {"policy": cnr.Consecutive(), "tracking": "fingerprint"} | options
    tables = cnr.find_tables(state, ["user"])
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(**given))


def save(manager: cnr.CheckpointManager, step: int, state: Any) -> cnr.SaveReport:
    manager.save(step, args=cnr.args.Save(state))
    manager.wait_until_finished()
    assert manager.last_report is not None and manager.last_report.step == step
    return manager.last_report


def restore(manager: cnr.CheckpointManager, state: Any, step: int | None = None) -> Any:
    return manager.restore(step, args=cnr.args.Restore(state)).state


def moved(state: Any, step: int, by: float, rows: int = ROWS) -> Any:
    """Elements but the first two, which are the ends, move: up or down, as the step says."""
    rng = np.random.default_rng(step)
    change = by * rng.choice([-1, 1], (rows, DIM)).astype(np.float32)
    change[:, :2] = 0
    return {"user": state["user"].at[:rows].add(change.astype(state["user"].dtype))}


def in_bits(by: float) -> float:
    """What `even_bits` come to where so many elements move by so much."""
    return np.log2(0.2 * np.sqrt(DIM / 6) / (by * np.sqrt(DIM - 2)))


def run(root: Path, by: float, times: int, **options: Any) -> list[cnr.SaveReport]:
    """A run that is restored after each save, by a new manager; all reports."""
    state, reports = make_state(), []
    for step in range(times):
        with opened(root, state, **options) as manager:
            if step:
                state = moved(restore(manager, state), step, by)
            reports.append(save(manager, step, state))
    return reports


@pytest.mark.parametrize(
    "staging", ["host", pytest.param("device", marks=pytest.mark.slow)]
)
def test_manifests_tell_how_far_rows_moved_since_the_restore(
    tmp_path: Path, staging: str
) -> None:
    by, found = 0.004, []
    for across in (1, 2):
        root, state = tmp_path / f"{across}", make_state(across)
        with opened(
            root, state, bits=8, codec="asymmetric", staging=staging
        ) as manager:
            save(manager, 0, state)
            # Of the run's first save, as nothing was restored.
            state = moved(state, 1, by, rows=40)
            save(manager, 1, state)
            # Since then, however many saves there were.
            save(manager, 2, moved(state, 2, 2 * by, rows=40))
            state = moved(restore(manager, state, 1), 3, by, rows=60)
            save(manager, 3, state)
        documents = [read_manifest(root / str(s) / "default") for s in range(4)]
        found.append([each.motion for each in documents])
    assert found[0] == found[1]
    none, first, second, third = found[0]
    assert none is None
    assert (first.rows, third.rows) == (40, 60)
    assert first.even_bits == pytest.approx(in_bits(by), abs=0.02)
    assert second.even_bits == pytest.approx(in_bits(by * 5**0.5), abs=0.1)
    # Restored rows are those that the step holds: the error of eight bits is no motion.
    assert third.even_bits == pytest.approx(in_bits(by), abs=0.1)


def test_auto_takes_more_bits_where_rows_hardly_move(tmp_path: Path) -> None:
    by = 0.004  # a third of a step of four bits
    reports = run(tmp_path, by, 5, bits="auto", expected_restores=20)
    # The second is the first to know of an interval: a restore at a time it cannot foresee.
    assert [report.auto_bits for report in reports] == [4, 4, 8, 8, 8]
    assert re.fullmatch(
        r"rows since the last save \(step 1\); 8 bits: restored 2 times, between"
        r" restores rows moved 0\.\d+ times the rounding error of 4 bits, 20 expected",
        reports[2].reason,
    )
    assert reports[2].reason == read_manifest(tmp_path / "2" / "default").reason


def test_auto_takes_more_bits_before_the_first_restore_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, found = make_state(), []
    caplog.set_level(logging.INFO, WIDENING)
    with opened(tmp_path, state, bits="auto", expected_restores=1) as manager:
        for step, by in enumerate((0, 0.004, 1e-5, 0.3, 0.3)):
            state = moved(state, step, by) if by else state
            found.append(save(manager, step, state))
    # Nothing has gone otherwise than expected: no cause to warn.
    assert {record.levelname for record in caplog.records} == {"INFO"}
    # The third knows how far rows had moved by the second, the fourth by the third: never all bits.
    assert [report.auto_bits for report in found] == [2, 2, 8, 8, 2]
    assert re.search(
        r"; 8 bits: since the first save rows moved 0\.\d+ times", found[2].reason
    )


def test_a_save_of_too_few_rows_takes_back_nothing(tmp_path: Path) -> None:
    state, auto = make_state(), {"bits": "auto", "expected_restores": 1}
    with opened(tmp_path, state, **auto) as manager:
        save(manager, 0, state)
        state = moved(state, 1, 0.004)
        save(manager, 1, state)
        few = moved(state, 2, 0.004, rows=5)
        assert save(manager, 2, few).auto_bits == 8
        assert read_manifest(tmp_path / "2" / "default").motion is None
        assert save(manager, 3, moved(few, 3, 0.004, rows=5)).auto_bits == 8
    with opened(tmp_path, state, **auto) as manager:
        state = restore(manager, state, 2)
        assert save(manager, 4, moved(state, 4, 0.1)).auto_bits == 8


def test_auto_stays_with_the_expectation_where_rows_move_far(tmp_path: Path) -> None:
    reports = run(tmp_path, 0.1, 4, bits="auto", expected_restores=20)
    assert [report.auto_bits for report in reports] == [4, 4, 4, 4]
    assert "bits" not in reports[-1].reason


def test_auto_saves_all_bits_where_eight_are_too_few(tmp_path: Path) -> None:
    reports = run(tmp_path, 1e-4, 5, bits="auto", expected_restores=1)
    assert [report.auto_bits for report in reports] == [2, 2, 32, 32, 32]
    assert "all bits: restored 2 times" in reports[2].reason
    assert " all bits," in str(reports[2]) and "32 bits" not in str(reports[2])
    state = make_state()
    with opened(tmp_path, state) as manager:
        before = restore(manager, state, 3)["user"]
        after = restore(manager, state, 4)["user"]
    # Exactly what was saved: rows have moved by what they were moved by.
    expected = moved({"user": before}, 4, 1e-4)["user"]
    assert np.array_equal(np.asarray(after), np.asarray(expected))


def test_tables_that_options_keep_exact_do_not_count_when_all_bits_are_saved(
    tmp_path: Path,
) -> None:
    """Else each save of all bits would tell of them, and the next one round the others again."""
    tables, auto = {"item": cnr.TableOptions(codec="raw")}, []
    state = {name: make_state()["user"] for name in ("user", "item")}
    given = cnr.Options(
        bits="auto", codec="asymmetric", tracking="fingerprint", tables=tables
    )
    found = cnr.find_tables(state, list(state))
    for step in range(5):
        with cnr.CheckpointManager(tmp_path, tables=found, options=given) as manager:
            if step:
                state = dict(restore(manager, state))
                for name, by in (("user", 1e-4), ("item", 0.05)):
                    state[name] = moved({"user": state[name]}, step, by)["user"]
            auto.append(save(manager, step, state).auto_bits)
    assert auto == [4, 4, 32, 32, 32]


def test_tables_that_are_exact_do_not_count_beside_rounded_ones(tmp_path: Path) -> None:
    state = {name: make_state()["user"] for name in ("user", "item")}
    given = cnr.Options(
        bits=4, tracking="fingerprint", tables={"item": cnr.TableOptions(codec="raw")}
    )
    found = cnr.find_tables(state, list(state))
    with cnr.CheckpointManager(tmp_path, tables=found, options=given) as manager:
        save(manager, 0, state)
        for name, by in (("user", 0.004), ("item", 0.1)):
            state[name] = moved({"user": state[name]}, 1, by)["user"]
        save(manager, 1, state)
    motion = read_manifest(tmp_path / "1" / "default").motion
    assert motion is not None and motion.rows == ROWS
    assert motion.even_bits == pytest.approx(in_bits(0.004), abs=0.1)


def test_a_save_soon_after_a_restore_takes_no_more_than_the_last_interval_asks_for(
    tmp_path: Path,
) -> None:
    state, auto = make_state(), {"bits": "auto", "expected_restores": 20}
    with opened(tmp_path, state, **auto) as manager:
        save(manager, 0, state)
        save(manager, 1, moved(state, 1, 0.1))
        state = moved(restore(manager, state, 1), 2, 0.001)
        assert save(manager, 2, state).auto_bits == 4
        state = moved(state, 3, 0.001)
        assert save(manager, 3, state).auto_bits == 4, "rows moved far before"
        # Now they have not: the next restore may come as soon.
        state = moved(restore(manager, state, 3), 4, 0.001)
        assert save(manager, 4, state).auto_bits == 8
        # Until they have moved far again.
        state = moved(state, 5, 0.1)
        assert save(manager, 5, state).auto_bits == 8
        assert save(manager, 6, moved(state, 6, 0.1)).auto_bits == 4


@each_of("options", [{}, {"bits": 4}, {"codec": "asymmetric", "bits": 3}])
def test_fixed_bits_are_warned_of_once_where_they_are_too_few(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path_factory: Any
) -> None:
    caplog.clear()
    root, state = tmp_path_factory.mktemp("run"), make_state()
    with caplog.at_level(logging.WARNING, WIDENING):
        with opened(root, state, **options) as manager:
            for step in range(4):
                save(manager, step, state)
                found = [each for each in caplog.records if each.name == WIDENING]
                assert len(found) == (step > 1), "at the third, and once"
                state = moved(restore(manager, state), step, 0.004)
    (said,) = [record.getMessage() for record in found]
    bits = options.get("bits", 4)
    assert said.startswith(f"rounding to {bits} bits may harm this training: ")
    assert "restored 2 times, between restores rows moved 0." in said
    assert "Options(bits='auto')" in said and "bits=8" in said


def test_one_restore_is_no_cause_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state()
    with (
        caplog.at_level(logging.WARNING, WIDENING),
        opened(tmp_path, state, bits=4) as manager,
    ):
        save(manager, 0, state)
        save(manager, 1, moved(state, 1, 0.004))
        assert read_manifest(tmp_path / "1" / "default").motion is not None
        state = moved(restore(manager, state, 1), 2, 0.004)
        save(manager, 2, state)
        assert not caplog.records, "how soon others come is not known"
        save(manager, 3, moved(restore(manager, state, 2), 3, 0.004))
        assert len(caplog.records) == 1


def test_motion_before_an_earlier_restore_does_not_count(tmp_path: Path) -> None:
    state = make_state()
    with opened(tmp_path, state, bits="auto", expected_restores=20) as manager:
        save(manager, 0, state)
        save(manager, 1, moved(state, 1, 0.004))
        state = restore(manager, state, 1)
        assert save(manager, 2, moved(state, 2, 0.1, rows=5)).auto_bits == 8
        assert read_manifest(tmp_path / "2" / "default").motion is None
        state = restore(manager, state, 2)
        assert save(manager, 3, moved(state, 3, 0.1)).auto_bits == 4


def test_small_tables_are_saved_exactly_where_the_others_are() -> None:
    state = {"user": jax.numpy.ones((3000, 16)), "day": jax.numpy.ones((4, 16))}
    found = Widening(cnr.Options(bits="auto"), cnr.find_tables(state, list(state)))
    assert found.widths(4) == {"user": 4, "day": 8}
    assert found.widths(32) == {"user": 32, "day": 32}


def test_where_eight_bits_are_too_few_the_warning_names_what_options_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, WIDENING):
        run(tmp_path, 1e-4, 3, bits=8)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("rounding to 8 bits may harm this training: ")
    assert "codec='raw' would do now" in said and "bits=32" not in said


@each_of(
    ("by", "options"),
    [(0.004, {"bits": 8}), (0.1, {}), (0.004, {"codec": "raw"})],
)
def test_nothing_is_warned_of_where_bits_are_enough(
    by: float,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: Any,
) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, WIDENING):
        run(tmp_path_factory.mktemp("run"), by, 4, **options)
    assert not caplog.records


def test_all_bits_are_no_width_that_options_take() -> None:
    with pytest.raises(cnr.errors.OptionError, match="bits is 32"):
        cnr.Options(bits=32)
    with pytest.raises(cnr.errors.OptionError, match="bits is 32"):
        cnr.Options(tables={"user": cnr.TableOptions(bits=32)})


def test_tables_whose_bits_are_their_own_do_not_follow(tmp_path: Path) -> None:
    tables = {"user": cnr.TableOptions(bits=3)}
    run(tmp_path, 0.004, 4, bits="auto", expected_restores=1, tables=tables)
    stored = json.loads((tmp_path / "3/default/manifest.p00000.json").read_text())
    assert [c["configuration"]["bits"] for c in stored["codecs"]] == [3]


def test_followed_rows_are_bounded_and_come_from_each_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = make_state(4)
    tables = cnr.find_tables(state, ["user"])
    where = state["user"].sharding
    shardings = {"user": {"table": where}}
    tiling = Tiling(tables, shardings, {"user": where}, lambda *_: "host")
    monkeypatch.setattr(motion, "KEPT_BYTES", 4 * DIM * 4 * 10)  # ten rows of each tile
    followed = FollowedRows(tiling, "1" * 32)
    followed.begin(Shards(tiling, {"user": {"table": state["user"]}}))
    kept = list(followed._before.values())
    assert [len(each) for each in kept] == [10] * 4
    assert sum(each.nbytes for each in kept) == motion.KEPT_BYTES
    monkeypatch.setattr(motion, "KEPT_BYTES", 4 * DIM * 3)  # not one row of each
    followed = FollowedRows(tiling, "1" * 32)
    followed.begin(Shards(tiling, {"user": {"table": state["user"]}}))
    assert [len(each) for each in followed._before.values()] == [1, 1]
    assert followed.are_of(tiling, "1" * 32)


def test_rows_too_wide_for_any_codec_leave_the_room_to_others() -> None:
    state = {"expert": jax.numpy.ones((2, 600_000)), "user": jax.numpy.ones((300, 16))}
    tables = cnr.find_tables(state, list(state))
    where = {name: array.sharding for name, array in state.items()}
    shardings = {name: {"table": where[name]} for name in state}
    tiling = Tiling(tables, shardings, where, lambda *_: "host")
    followed = FollowedRows(tiling, "1" * 32)
    found = {t.table.name: (t.table.name, t.piece.box) for t in tiling.tiles}
    assert len(followed.among(found["user"], None)) == 300
    assert not len(followed.among(found["expert"], None))


def test_rows_too_wide_for_the_bound_are_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = {f"t{i}": (8, 64 if i % 2 == 0 else 4) for i in range(8)}
    state = {name: jax.numpy.ones(shape) for name, shape in shapes.items()}
    tables = cnr.find_tables(state, list(state))
    where = {name: state[name].sharding for name in state}
    shardings = {name: {"table": where[name]} for name in state}
    tiling = Tiling(tables, shardings, where, lambda *_: "host")
    shards = Shards(tiling, {name: {"table": state[name]} for name in state})
    for kept, found in ((4 * 63, 1), (4 * 150, 2)):
        monkeypatch.setattr(motion, "KEPT_BYTES", kept)
        followed = FollowedRows(tiling, "1" * 32)
        followed.begin(shards)
        sizes = [each.nbytes for each in followed._before.values()]
        assert len(sizes) == found and sum(sizes) <= kept


def test_rows_that_a_failed_first_save_did_not_reach_are_taken_from_the_next() -> None:
    state = make_state()
    where = state["user"].sharding
    tables = cnr.find_tables(state, ["user"])
    shardings = {"user": {"table": where}}
    tiling = Tiling(tables, shardings, {"user": where}, lambda *_: "host")
    followed = FollowedRows(tiling, "1" * 32)
    tile, rows = ("user", tiling.tiles[0].piece.box), np.asarray(state["user"])
    everything = followed.among(tile, None)
    assert not len(followed.even_bits(tile, everything[:100], rows[:100]))
    there = np.asarray(moved(state, 1, 0.004)["user"])
    found = followed.even_bits(tile, everything, there)
    assert len(found) == 100 and np.allclose(found, in_bits(0.004), atol=0.1)
    back = followed.even_bits(tile, everything, rows)
    assert len(back) == 200, "the others are as the second save had them"
