"""Profiles and costs of runs from their records, by hand and of a real root."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.cli.app import app
from cnr_jax.errors import OptionError
from cnr_jax.format import names
from cnr_jax.goodput.cost import Prices, cost_of
from cnr_jax.goodput.profile import Profile
from cnr_jax.goodput.records import profile_of, recorded_profile
from cnr_jax.repository.course import Course, Save, course_of

BEGAN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
PRICES = {
    "currency": "EUR",
    "storage_gb_month": 1.0,
    "network_gb": 2.0,
    "write_requests_1000": 3.0,
    "read_requests_1000": 4.0,
    "accelerator_hour": 5.0,
}


def save_of(number: int, **fields: Any) -> Save:
    """A save every ten steps of 0.5 s: full at first, then deltas on it, which grow.

    It holds training up for 1 s and 2 s a MB, and is durable 1 s and 3 s a MB after that.
    """
    step = 10 * number + 10
    rows = 20_000_000 if number == 0 else int(100_000 * (step - 10) ** 0.5)
    stall, write = 1 + 2e-6 * (rows + 1000), 1 + 3e-6 * (rows + 1000)
    # The saves before have held training up, too.
    begun = 0.5 * step + sum(
        1 + 2e-6 * (1000 + (20_000_000 if n == 0 else int(100_000 * (10 * n) ** 0.5)))
        for n in range(number)
    )
    at = BEGAN + datetime.timedelta(seconds=begun + stall + write - 1)
    save = Save(
        step=step,
        kind="delta" if number else "full",
        branch=1,
        parent_step=10 if number else None,
        rows=rows,
        parts={"tables": rows, "slots": 0, "dense": 600, "manifests": 400},
        plain_bytes=50_000_000,
        secs=stall + write - 1,
        stall_secs=stall,
        phases={"commit": 1.0},
        saved_at=at,
    )
    return dataclasses.replace(save, **fields)


def course(*saves: Save, **fields: Any) -> Course:
    root = cnr.RootDescription(root="run", item="default", steps=())
    return Course(root=root, saves=saves, **fields)


def noted(*saves: Save, **fields: Any) -> Profile:
    found = profile_of(course(*saves, **fields))
    assert found is not None
    return found


def test_a_profile_is_that_of_the_run() -> None:
    saves = [save_of(n) for n in range(9)]
    found = noted(*saves, reads=((10_000_000, 3.0), (20_000_000, 5.0)))
    assert found.step.fixed == pytest.approx(0.5)
    assert found.step.samples == 8
    assert found.write.samples == found.blocking.samples == 9
    for line, fixed, per_byte in (
        (found.blocking, 1, 2e-6),
        (found.write, 1, 3e-6),
        (found.restore, 1, 2e-7),
    ):
        assert line.fixed == pytest.approx(fixed, rel=1e-3)
        assert line.per_byte == pytest.approx(per_byte, rel=1e-3)
        assert line.low == pytest.approx(1) == line.high
    assert (found.full_bytes, found.plain_bytes) == (20_001_000, 50_000_000)
    assert found.dense_bytes == 1000
    assert found.exponent == pytest.approx(0.5, abs=0.001)
    assert found.changed_bytes == pytest.approx(100_000, rel=0.001)
    assert found.delta_bytes(40) == pytest.approx(save_of(4).total_bytes, rel=0.001)
    # Two restores are too few.
    assert not found.restore.known
    assert found.reading == dataclasses.replace(found.write, samples=0)


def test_what_is_compiled_in_the_first_saves_does_not_count() -> None:
    slow = save_of(0, stall_secs=300.0, secs=400.0)
    found = noted(slow, *(save_of(n) for n in range(1, 12)))
    assert found.blocking.fixed == pytest.approx(1, rel=0.01)
    assert found.write.per_byte == pytest.approx(3e-6, rel=0.01)
    assert found.blocking.high < 1.1


def test_spread_is_that_of_nine_tenths() -> None:
    rng = np.random.default_rng(0)
    factors = rng.uniform(0.5, 1.5, 200)
    saves = [save_of(n) for n in range(200)]
    saves = [
        dataclasses.replace(save, stall_secs=factor)
        for save, factor in zip(saves, factors, strict=True)
    ]
    found = noted(*saves).blocking
    assert found.fixed == pytest.approx(1, rel=0.1)
    assert (found.low, found.high) == pytest.approx((0.6, 1.4), rel=0.1)


def test_without_metrics_stalls_and_restores_are_not_known() -> None:
    bare = [save_of(n, stall_secs=None, phases={}) for n in range(9)]
    found = noted(*bare)
    assert (found.blocking.samples, found.restore.samples) == (0, 0)
    assert not found.blocking.known
    assert found.step.known


def test_gaps_of_a_run_are_no_train_steps() -> None:
    late = BEGAN + datetime.timedelta(days=3)
    saves = [save_of(n) for n in range(6)]
    again = save_of(6, saved_at=late, restored=True)
    other = save_of(7, saved_at=late, branch=2)
    found = noted(*saves, again, other)
    assert found.step.fixed == pytest.approx(0.5)
    assert found.step.samples == 5


def test_saves_that_waited_for_the_one_before_tell_no_train_step() -> None:
    saves = [save_of(n) for n in range(9)]
    late = [save_of(9)]
    for n in (10, 11, 12, 13, 14):
        # They began when the one before was durable, a second after its manifest.
        before, save = late[-1], save_of(n)
        assert before.saved_at is not None and save.secs is not None
        passed = datetime.timedelta(seconds=1.0 + save.secs)
        late.append(dataclasses.replace(save, saved_at=before.saved_at + passed))
    found = noted(*saves, *late)
    assert found.step.samples == 9
    assert found.step.fixed == pytest.approx(0.5)
    assert profile_of(course(*late)) is None


@pytest.mark.parametrize("saves", [0, 1, 4])
def test_few_saves_tell_nothing_yet(saves: int) -> None:
    few = course(*(save_of(n) for n in range(saves)))
    assert profile_of(few) is None
    assert cost_of(few) is None


def test_growth_that_a_run_does_not_show_is_the_usual_one() -> None:
    chain = [
        save_of(n, parent_step=10 * n if n else None, kind="delta" if n else "full")
        for n in range(6)
    ]
    assert noted(*chain).exponent == 0.7


# ---- cost ---------------------------------------------------------------------------------------


def test_quantities_of_a_month_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    # Saves of one size, 6 s apart, each of ten restored before: 438,000 saves a month.
    saves = [
        save_of(
            n,
            kind="full",
            parent_step=None,
            parts={"tables": 2_000_000, "slots": 0, "dense": 0, "manifests": 0},
            stall_secs=1.0,
            secs=2.0,
            phases={"commit": 0.0},
            saved_at=BEGAN + datetime.timedelta(seconds=6 * n),
            restored=n == 5,
        )
        for n in range(10)
    ]
    (tmp_path / "p.toml").write_text(
        "\n".join(f"{k} = {json.dumps(v)}" for k, v in PRICES.items())
    )
    found = cost_of(course(*saves), Prices.read(tmp_path / "p.toml"), accelerators=3)
    assert found is not None
    own, plain = found.own, found.plain
    assert (found.saves, found.interval_secs) == (10, 6.0)
    monthly = 730 * 600
    assert found.restores == pytest.approx(monthly / 10)
    assert own.moved_bytes == pytest.approx(monthly * 2e6 * 1.1)
    assert plain.moved_bytes == pytest.approx(monthly * 50e6 * 1.1)
    assert own.read_requests == pytest.approx(monthly * (2 + 7 / 10))
    assert own.write_requests == pytest.approx(monthly * 21)
    assert plain.write_requests == pytest.approx(monthly * (21 + 2))
    assert plain.read_requests == pytest.approx(monthly * (2 + (7 + 2) / 10))
    # Restores are taken to read as fast as saves are written; both last a second here.
    assert own.stall_hours == pytest.approx(3 * monthly / 3600)
    assert own.restore_hours == pytest.approx(3 * monthly / 10 * (1 + 1 + 3) / 3600)
    costs = found.asdict()["costs"]["own"]
    assert costs["network"] == pytest.approx(2 * own.moved_bytes / 1e9)
    assert costs["stalls"] == pytest.approx(5 * 3 * monthly / 3600)
    assert costs["requests"] == pytest.approx(
        (3 * own.write_requests + 4 * own.read_requests) / 1000
    )
    assert "in EUR" in str(found)
    unknown = cost_of(course(*(dataclasses.replace(s, stall_secs=None) for s in saves)))
    assert unknown is not None
    assert (unknown.own.stall_hours, unknown.own.restore_hours) == (None, None)
    assert "not known yet" in str(unknown)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"network_gb": None}, "missing: network_gb"),
        ({"gold": 3}, "unknown: gold"),
        ({"accelerator_hour": -1}, "no price: accelerator_hour = -1"),
        ({"accelerator_hour": "2"}, "no price: accelerator_hour = '2'"),
    ],
)
def test_prices_are_all_that_there_are(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    given = {k: v for k, v in {**PRICES, **change}.items() if v is not None}
    path = tmp_path / "prices.toml"
    path.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in given.items()))
    with pytest.raises(OptionError, match=said):
        Prices.read(path)


def test_files_that_have_no_prices_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no file of prices"):
        Prices.read(tmp_path / "nowhere.toml")
    with pytest.raises(OptionError, match="there is no file of prices"):
        Prices.read(tmp_path)
    (tmp_path / "wrong.toml").write_text("currency =")
    with pytest.raises(OptionError, match="it is no TOML"):
        Prices.read(tmp_path / "wrong.toml")
    shown = Prices.read(Path(__file__).parents[2] / "examples" / "prices.toml")
    assert shown.currency == "USD"


# ---- a real run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight saves with metrics, restored once, that keeps its newest three steps."""
    path = tmp_path_factory.mktemp("goodput") / "run"
    rng = np.random.default_rng(0)
    state = {"user": jnp.asarray(rng.normal(size=(4000, 8)), jnp.float32)}
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(metrics=True, bits=4)
    for steps in (range(10, 60, 10), range(60, 90, 10)):
        with cnr.CheckpointManager(path, tables=tables, options=options) as manager:
            if manager.latest_step() is not None:
                state, touched = manager.restore(None, args=cnr.args.Restore(state))
            for step in steps:
                time.sleep(0.1)  # as train steps would
                ids = jnp.asarray(rng.integers(0, 4000, 100))
                touched = cnr.record(touched, {"user": ids})
                state = {"user": state["user"].at[ids].add(0.1)}
                manager.save(step, args=cnr.args.Save(state, touched))
                manager.wait_until_finished()
    return path


def test_a_real_run_tells_what_it_took(root: Path, tmp_path: Path) -> None:
    lines = cnr.read_metrics(root)
    found = course_of(cnr.describe(root))
    profile = profile_of(found)
    measured = recorded_profile(root)  # in the loop, where it tells as much
    assert profile is not None and measured is not None
    assert measured.write.samples == 8 and measured.full_bytes == profile.full_bytes
    assert measured.restore == profile.restore
    saves = [line for line in lines if line["event"] == "save"]
    assert profile.write.samples == len(saves) == 8
    assert profile.blocking.samples == 7, "all but the first save of the second"
    assert len(found.reads) == 1
    assert profile.plain_bytes == 4000 * 8 * 4
    wrote = [sum(save.parts.values()) for save in found.saves]
    assert profile.full_bytes == max(wrote)
    assert profile.delta_bytes(10) == pytest.approx(wrote[1], rel=0.3)
    secs = [line["blocking_secs"] - line["wait_secs"] for line in saves]
    # A line through few points lies near them.
    assert min(secs) / 2 <= profile.blocking.of(wrote[-1]) <= 2 * max(secs)
    cost = cost_of(found)
    assert cost is not None
    assert cost.own.stored_bytes == found.root.total_bytes
    assert cost.plain.stored_bytes == 8 * 4000 * 8 * 4
    # As a run without metrics does: its manager has noted how long saves hold training up.
    silent = shutil.copytree(root, tmp_path / "silent")
    (silent / names.METRICS).unlink()
    noted = cost_of(course_of(cnr.describe(silent)))
    assert noted is not None and noted.own.stall_hours == cost.own.stall_hours
    result = CliRunner().invoke(app, ["cost", str(root), "--json"])
    assert result.exit_code == 0
    document = json.loads(result.output)
    assert document["cost"] == json.loads(json.dumps(cost.asdict()))


def test_a_report_tells_what_a_month_costs(root: Path, tmp_path: Path) -> None:
    prices = Path(__file__).parents[2] / "examples" / "prices.toml"
    words = ["report", str(root), "-o", str(tmp_path / "run.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert 'id="cost"' not in (tmp_path / "run.html").read_text()
    words += ["--force", "--prices", str(prices), "--accelerators", "8"]
    assert CliRunner().invoke(app, words).exit_code == 0
    page = (tmp_path / "run.html").read_text()
    found = cost_of(course_of(cnr.describe(root)), Prices.read(prices), 8)
    assert found is not None and found.basis in page
    table = page[page.index('<table id="cost">') :]
    for name, *figures in found.rows[1:]:
        row = table[table.index(f">{name}<") :]
        for figure in figures:
            assert row.index(f">{figure}<") < row.index("</tr>")


def test_a_run_is_a_profile_of_a_simulation(root: Path, tmp_path: Path) -> None:
    words = ["simulate", "--failures", "exponential:1", "--hours", "1", "--profile"]
    result = CliRunner().invoke(app, [*words, str(root), "--json"])
    assert result.exit_code == 0
    assert len(json.loads(result.output)["jobs"]) == 8
    (tmp_path / "few").mkdir()
    state = {"user": jnp.zeros((8, 4))}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path / "few", tables=tables) as manager:
        manager.save(1, args=cnr.args.Save(state))
    result = CliRunner().invoke(app, [*words, str(tmp_path / "few")])
    assert result.exit_code == 12
    assert "has not saved often enough" in result.output
    result = CliRunner().invoke(app, ["cost", str(tmp_path / "few")])
    assert (result.exit_code, result.output.split(":")[0]) == (0, "not known yet")


def test_what_a_merge_has_written_tells_what_full_saves_have() -> None:
    """The full save is gone; one step is merged by `compact`, another brings a baseline along."""
    saves = [save_of(n) for n in range(1, 20)]
    parts = {**saves[3].parts, "merged": 7_000_000}
    saves[3] = brings = dataclasses.replace(saves[3], kind="full", parts=parts)
    nothing = dict.fromkeys(("tables", "slots", "dense", "manifests"), 0)
    parts = {**nothing, "merged": 9_000_000}
    saves[9] = dataclasses.replace(saves[9], kind="full", parts=parts)
    found = noted(*saves)
    assert found.full_bytes == brings.total_bytes
    assert found.write.samples == 18
    assert found.write.per_byte == pytest.approx(3e-6)
    assert found.dense_bytes == 1000


def test_metrics_that_lack_bytes_or_tell_one_time_are_no_error() -> None:
    saves = [save_of(n, parts={"tables": 5_000_000}) for n in range(20)]
    assert noted(*saves).dense_bytes == 0
    assert cost_of(course(*saves)) is not None
    at_once = [dataclasses.replace(save, saved_at=BEGAN) for save in saves]
    assert cost_of(course(*at_once)) is None


def test_a_merge_writes_a_request_for_each_further_chunk() -> None:
    parts = {"tables": 1_000_000, "slots": 0, "dense": 0, "manifests": 0}
    more = [{}, {}, {}, {}, {"merged": 40_000_000}]
    saves = [
        save_of(
            n,
            parts={**parts, **more[n % 5]},
            saved_at=BEGAN + datetime.timedelta(seconds=6 * n),
        )
        for n in range(10)
    ]
    found = cost_of(course(*saves))
    assert found is not None
    monthly = 730 * 600
    assert found.own.write_requests == pytest.approx(monthly * (21 + (21 + 2) / 5))


@pytest.mark.parametrize("merged", [False, True])
def test_a_restore_reads_what_its_save_rests_on(merged: bool) -> None:
    bases = (0, 5) if merged else (0,)
    saves = [
        save_of(
            n,
            kind="full" if n in bases else "delta",
            parent=None if n in bases else n - 1,
            parent_step=None if n in bases else 10 * (n - 1),
            kept=n != 5 or not merged,
            parts={"tables": 1_000_000, "slots": 0, "dense": 0, "manifests": 0}
            | ({"merged": 1_000_000} if n == 5 and merged else {}),
            saved_at=BEGAN + datetime.timedelta(seconds=6 * n),
            restored=n == 5,
        )
        for n in range(10)
    ]
    found = cost_of(course(*saves))
    assert found is not None
    restores, monthly = found.restores, 730 * 600
    assert restores == pytest.approx(monthly / 10)
    # From one save to ten, or to five; save 5 and those that rest on it read a baseline too.
    depth, read = (3, 3.5) if merged else (5.5, 5.5)
    # One save in ten has what a merge of the five checkpoints before it has written.
    merges = monthly / 10 if merged else 0
    reads = 2 * monthly + 7 * (5 * merges + depth * restores)
    assert found.own.read_requests == pytest.approx(reads)
    assert found.own.write_requests == pytest.approx(21 * (monthly + merges))
    moved = monthly + merges * (1 + 5) + restores * read
    assert found.own.moved_bytes == pytest.approx(1e6 * moved)
