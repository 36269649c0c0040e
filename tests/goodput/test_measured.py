"""Measurements of saves in the training loop, by hand and of real runs, and where they are kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import cnr_jax as cnr
from cnr_jax.checkpointer.saving import meter
from cnr_jax.checkpointer.saving.saves import Saves
from cnr_jax.cli.app import app
from cnr_jax.format import names
from cnr_jax.goodput.measured import MeasuredSave, Trained, measured_profile
from cnr_jax.goodput.measurements import Measurements, read_measurements
from cnr_jax.goodput.profile import Profile

STEP_SECS, LOST = 0.02, 0.25


def save_of(number: int, **fields: Any) -> MeasuredSave:
    """A save every 10 steps; steps lose a quarter of their time beside one, for half of it."""
    nbytes = 10_000_000 if number % 8 == 0 else 100_000 * (number % 8)
    beside = STEP_SECS / (1 - LOST)
    return MeasuredSave(
        **{
            "step": 10 * number,
            "parent": 10 * (number // 8 * 8) if number % 8 else None,
            "kind": "delta" if number % 8 else "full",
            "nbytes": nbytes,
            "fixed_bytes": 500,
            "plain_bytes": 80_000_000,
            "blocking_secs": 0.001 + 1e-10 * nbytes,
            "durable_secs": 0.05 + 1e-9 * nbytes,
            "trained": (Trained(4, 4 * beside, 4 * beside), Trained(6, 0.12, 0.0))
            if number
            else (),
            **fields,
        }
    )


def found(saves: list[MeasuredSave], **given: Any) -> Profile:
    profile = measured_profile(saves, **given)
    assert profile is not None
    return profile


def test_steps_beside_a_save_and_without_one_are_told_apart() -> None:
    profile = found([save_of(n) for n in range(20)])
    assert profile.step.fixed == pytest.approx(STEP_SECS)
    assert profile.contention == pytest.approx(LOST / (1 - LOST))
    assert profile.step.samples == 19
    for line, fixed, per_byte in (
        (profile.blocking, 0.001, 1e-10),
        (profile.write, 0.05, 1e-9),
    ):
        assert line.fixed == pytest.approx(fixed)
        assert line.per_byte == pytest.approx(per_byte)
    assert (profile.full_bytes, profile.dense_bytes) == (10_000_000, 500)


def test_seconds_between_saves_tell_it_too_if_saves_take_other_times() -> None:
    # A loop that calls `save` only where one is due: nothing is known of single steps.
    saves = []
    for number, beside in enumerate(itertools.islice(itertools.cycle((1, 3, 7)), 20)):
        secs = 10 * STEP_SECS + LOST * beside * STEP_SECS
        trained = (Trained(10, secs, beside * STEP_SECS),)
        saves.append(save_of(number, trained=trained))
    profile = found(saves)
    assert profile.step.fixed == pytest.approx(STEP_SECS)
    assert profile.contention == pytest.approx(LOST / (1 - LOST))
    # If all take the same, it is not known which part of a step is contention; nor if all steps
    # are beside a save, however long they take.
    alike = (Trained(10, 10 * STEP_SECS, 5 * STEP_SECS),)
    assert found([save_of(n, trained=alike) for n in range(9)]).contention == 0
    slow = [Trained(10, STEP_SECS * n, STEP_SECS * n) for n in range(8, 20)]
    always = found([save_of(n, trained=(each,)) for n, each in enumerate(slow)])
    assert always.contention == 0


def test_slow_saves_count_with_what_training_waited_for_them() -> None:
    saves = [save_of(n, nbytes=10_000, blocking_secs=0.01) for n in range(41)]
    assert found(saves).blocking.fixed == pytest.approx(0.01)
    for number in range(1, 41, 4):
        saves[number] = dataclasses.replace(saves[number], blocking_secs=0.05)
    profile = found(saves)
    assert profile.blocking.fixed == pytest.approx((10 * 0.05 + 30 * 0.01) / 40)
    assert profile.blocking.low == pytest.approx(0.01 / profile.blocking.fixed)
    # A machine that stood still for a minute does not decide.
    saves[2] = dataclasses.replace(saves[2], blocking_secs=60.0)
    more = found(saves).blocking.fixed - profile.blocking.fixed
    assert more == pytest.approx(0.09 / 40)
    # Nor is a wait nothing because most saves did not wait at all.
    none = [dataclasses.replace(save, blocking_secs=0.0) for save in saves]
    none[5:10] = [dataclasses.replace(save, blocking_secs=0.4) for save in none[5:10]]
    assert found(none).blocking.fixed == pytest.approx(5 * 0.4 / 40)


def test_the_first_save_of_a_program_is_part_of_a_restart() -> None:
    saves = [save_of(n, nbytes=10_000, blocking_secs=0.01) for n in range(20)]
    for number in (0, 5, 10, 15):
        first = {"blocking_secs": 0.2, "trained": ()}
        saves[number] = dataclasses.replace(saves[number], **first)
    profile = found(saves)
    assert profile.blocking.fixed == pytest.approx(0.01)
    assert (profile.blocking.samples, profile.write.samples) == (17, 20)
    # Where hardly any other is known, all count.
    few = found([*saves[:5], *saves[10:11], *saves[15:16]])
    assert few.blocking.samples == 7 and few.blocking.fixed > 0.05


def test_a_first_full_save_bounds_what_its_bytes_take() -> None:
    rng = np.random.default_rng(0)
    saves = [save_of(0, nbytes=10**9, blocking_secs=1.2)]
    for number in range(1, 30):
        nbytes = int(rng.integers(500_000, 1_000_000))
        secs = 0.01 + 0.01 * rng.random()
        given = {"nbytes": nbytes, "blocking_secs": secs, "kind": "delta"}
        saves.append(save_of(number, **given, parent=0))
    assert 0.0 <= found(saves).blocking.of(1e9) < 1.25


def test_writes_beside_others_are_compared_with_those_alone() -> None:
    saves = [save_of(n) for n in range(10)]
    for count, times, many in ((2, 1.5, 8), (3, 2.5, 8), (4, 9.0, 4)):
        for number in range(len(saves), len(saves) + many):
            save = save_of(number, in_flight=count)
            slow = times * (save.durable_secs or 0.0)
            saves.append(dataclasses.replace(save, durable_secs=slow))
    profile = found(saves)
    assert profile.in_flight == pytest.approx((1.0, 1.5, 2.5))  # four are too few
    assert profile.write.fixed == pytest.approx(0.05)
    several = [dataclasses.replace(save, in_flight=2.0) for save in saves]
    assert found(several).in_flight == (1.0,)


def test_waits_for_other_processes_count_from_as_many_as_were_measured() -> None:
    saves = [save_of(n, agree_secs=0.002) for n in range(9)]
    profile = found(saves, processes=4)
    assert (profile.node_secs, profile.processes) == (0.002, 4)
    size = np.array([0.0])
    four, five = (float(profile.blocking_secs(size, n)[0]) for n in (4, 5))
    assert four == pytest.approx(0.001)
    assert five == pytest.approx(0.003)


def test_few_saves_tell_nothing_yet() -> None:
    assert measured_profile([save_of(n) for n in range(4)]) is None
    assert measured_profile([save_of(n, trained=()) for n in range(40)]) is None
    profile = found([save_of(n) for n in range(5)])
    assert not profile.is_known and profile.step.samples == 4
    assert found([save_of(n) for n in range(6)]).is_known


def test_the_newest_saves_are_kept_and_the_last_full_one() -> None:
    kept = Measurements(run="a")
    for number in range(250):
        parent = 0 if number else None
        kind = "delta" if number else "full"
        kept = kept.with_save(save_of(number, parent=parent, kind=kind))
    assert [save.step for save in kept.saves] == [0, *range(1510, 2500, 10)]
    profile = kept.profile()
    assert profile is not None and profile.full_bytes == 10_000_000
    for number in range(30):
        kept = kept.with_read(number, 1.0)
    assert [size for size, _ in kept.reads] == [*range(10, 30)]


def test_what_is_kept_is_read_again_and_what_is_damaged_is_not(tmp_path: Path) -> None:
    kept = Measurements(run="a", processes=2, reads=((1.0, 2.0),))
    for number in range(9):
        kept = kept.with_save(save_of(number))
    assert read_measurements(tmp_path) is None
    kept.write(tmp_path)
    assert read_measurements(tmp_path) == kept
    path = tmp_path / names.MEASUREMENTS
    whole = json.loads(path.read_text())
    wrong = [
        {**whole, "version": 1},
        {**whole, "saves": [{**whole["saves"][1], "nbytes": "1"}]},
        {**whole, "saves": [{**whole["saves"][1], "blocking_secs": -1}]},
        {**whole, "saves": [{**whole["saves"][1], "trained": [[1, 2]]}]},
        {**whole, "saves": [{**whole["saves"][1], "trained": [[1, 1e99, 2]]}]},
        {**whole, "saves": [{**whole["saves"][1], "trained": [[0, 1, 0]]}]},
        {**whole, "saves": [{**whole["saves"][1], "nbytes": None}]},
        {**whole, "saves": [{**whole["saves"][1], "kind": None}]},
        {**whole, "reads": [[1, float("nan")]]},
        {**whole, "reads": [[10**400, 1]]},
        {**whole, "more": 1},
        [],
        {},
    ]
    for document in wrong:
        path.write_text(json.dumps(document))
        assert read_measurements(tmp_path) is None, document
    for data in (b"", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(data)
        assert read_measurements(tmp_path) is None
    path.unlink()
    path.mkdir()
    assert read_measurements(tmp_path) is None


# ---- real runs ----------------------------------------------------------------------------------


class Loop:
    """A train loop that calls `save` at each step, of which every fifth is due."""

    def __init__(self, *, waits: bool = True, work: int = 0) -> None:
        rng = np.random.default_rng(0)
        self.state = {"user": jnp.asarray(rng.normal(size=(4000, 8)), jnp.float32)}
        self.state["w"] = jnp.ones((work or 1, work or 1))
        self.tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.step, self._waits = 0, waits

        @jax.jit
        def train(state: Any, touched: Any, ids: Any) -> Any:
            touched = cnr.record(touched, {"user": ids})
            w = state["w"]
            for _ in range(4 if work else 0):
                w = jnp.tanh(w @ w)
            return {"user": state["user"].at[ids].add(0.1), "w": w}, touched

        self._train = train

    def run(self, manager: cnr.CheckpointManager, steps: int) -> float:
        """Seconds of so many steps, saves included."""
        began = time.perf_counter()
        for _ in range(steps):
            ids = jnp.arange(100) * 7 % 4000 + self.step % 7
            self.state, self.touched = self._train(self.state, self.touched, ids)
            if self._waits:
                jax.block_until_ready(self.state)
                time.sleep(0.005)
            manager.save(self.step, args=cnr.args.Save(self.state, self.touched))
            self.step += 1
        jax.block_until_ready(self.state)
        return time.perf_counter() - began

    def manager(self, root: Path, **options: Any) -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            root,
            tables=self.tables,
            options=cnr.Options(bits=4, **options),
            orbax_options=ocp.CheckpointManagerOptions(save_interval_steps=5),
        )


def test_a_run_tells_its_profile_and_the_next_program_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is noted before the end, however long that takes here.
    monkeypatch.setattr(meter, "_NOTED_SECS", float("inf"))
    loop, root = Loop(), tmp_path / "run"
    reports: list[Any] = []
    with loop.manager(root, on_save=reports.append) as manager:
        assert manager.profile() is None
        loop.run(manager, 46)
        manager.wait_until_finished()
        profile = manager.profile(restart_secs=3.0)
        assert profile is not None and profile.is_known
        assert not (root / names.MEASUREMENTS).exists()
    assert profile.restart_secs == 3.0 and profile.processes == 1
    assert profile.write.samples == len(reports) == 10
    assert profile.step.samples == 9 and profile.blocking.samples == 10
    assert profile.step.fixed >= 0.005
    assert profile.full_bytes == reports[0].total_bytes
    assert profile.plain_bytes == reports[0].state_bytes
    assert profile.node_secs == 0 and profile.restore.samples == 0
    kept = read_measurements(root)
    assert kept is not None and kept.run == reports[0].run
    assert [save.step for save in kept.saves] == [*range(0, 50, 5)]
    for save, report in zip(kept.saves, reports, strict=True):
        assert (save.nbytes, save.parent) == (report.total_bytes, report.parent)
        assert (save.blocking_secs or 0) > 0.9 * (
            report.blocking_secs - report.wait_secs
        )
    for save in kept.saves[:-1]:
        assert save.durable_secs and save.over_secs
        assert save.durable_secs < 1.1 * save.over_secs
    # Without metrics: it is in the root all the same.
    assert cnr.goodput.recorded_profile(root, restart_secs=3.0) == profile
    words = ["advise", str(root), "--failures", "exponential:1", "--job-hours", "100"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "it rests on 9 saves" in result.output

    page = tmp_path / "run.html"
    result = CliRunner().invoke(app, ["report", str(root), "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert "<dt>a train step</dt>" in page.read_text()

    again = Loop()
    with again.manager(root) as manager:
        assert manager.profile() == manager.profile()
        restored = manager.restore(None, args=cnr.args.Restore(again.state))
        again.state, again.touched = restored.state, restored.touched
        again.step = 46
        again.run(manager, 10)
    kept = read_measurements(root)
    assert kept is not None and len(kept.saves) == 12 and len(kept.reads) == 1
    assert kept.saves[10].trained == ()  # it was restored before
    assert kept.reads[0][0] == restored.report.bytes_read

    new = Loop()
    with new.manager(root, new_run=True) as manager:
        assert manager.profile() is None
        new.run(manager, 21)
    kept = read_measurements(root)
    assert kept is not None and len(kept.saves) == 5


def test_a_loop_that_runs_ahead_of_its_device_is_measured_as_well(
    tmp_path: Path,
) -> None:
    loop = Loop(waits=False, work=600)
    reports: list[Any] = []
    with loop.manager(tmp_path / "run", on_save=reports.append) as manager:
        loop.run(manager, 11)  # compiles
        began = time.perf_counter()
        manager.wait_until_finished()
        loop.run(manager, 20)
        secs = time.perf_counter() - began
        manager.wait_until_finished()
        kept = manager._saves.meter.found.saves[-4:]
    trained = sum(part.secs for save in kept for part in save.trained)
    blocked = sum(save.blocking_secs or 0.0 for save in kept)
    waited = sum(report.wait_secs for report in reports[-4:])
    assert waited > 0.02 * secs  # in `save`, for train steps
    # Where a step was done while its save waited for the thread that begins it, nothing is known.
    steps = sum(part.steps for save in kept for part in save.trained)
    assert steps in (10, 15, 20)
    # What a save waits for the train step before it is time of that, and counted once.
    assert 0 < trained and trained + blocked < 1.2 * secs


def test_saves_that_wait_for_room_tell_of_their_train_steps(tmp_path: Path) -> None:
    loop = Loop(waits=False)
    slow = loop.manager(tmp_path / "run", on_save=lambda report: time.sleep(0.2))
    with slow as manager:
        loop.run(manager, 51)
        manager.wait_until_finished()
        _first, *rest = manager._saves.meter.found.saves
    assert len(rest) == 10 and all(save.trained for save in rest)
    assert [sum(part.steps for part in save.trained) for save in rest] == [5] * 10


def test_the_end_of_each_save_is_measured_though_others_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire = Saves.retire

    def slowly(saves: Any, save: Any, told: Any) -> Any:
        time.sleep(0.25)  # old steps are removed
        return retire(saves, save, told)

    monkeypatch.setattr(Saves, "retire", slowly)
    loop = Loop()
    with loop.manager(tmp_path / "run", max_in_flight=3) as manager:
        loop.run(manager, 51)
        manager.wait_until_finished()
        found = manager._saves.meter.found.saves
    assert max(save.in_flight for save in found) > 1.5
    assert [save.over_secs is None for save in found] == [False] * 10 + [True]
    for save in found[:-1]:
        # A save counts as durable once the removals of those before it are over.
        assert save.durable_secs and save.over_secs
        assert save.over_secs > max(0.25, 0.9 * save.durable_secs)


def test_a_save_is_over_so_long_after_its_blocking_part(tmp_path: Path) -> None:
    measuring = meter.Meter(tmp_path, list, is_noted=lambda: False, is_new=True)

    def save(step: int, over_at_secs: float | None = None) -> Any:
        took = {"started_secs": 10.0, "wait_secs": 2.0, "blocking_secs": 3.0}
        known = {"at_once": 1.0, "agree_secs": 0.0, "trained": ()}
        return SimpleNamespace(step=step, over_at_secs=over_at_secs, **took, **known)

    def report(step: int, run: str = "a") -> Any:
        took = {"total_secs": 6.0, "wait_secs": 2.0, "commit_secs": 0.5}
        sizes = dict.fromkeys(("total", "dense", "manifest", "state"), 100)
        sizes = {
            f"{name}_bytes": size for name, size in (sizes | {"merged": 0}).items()
        }
        fields = {"outcome": "committed", "run": run, "parent": None, "kind": "full"}
        return SimpleNamespace(step=step, **took, **sizes, **fields)

    one, two = save(1), save(2)
    measuring.reported(one, report(1))
    one.over_at_secs = 20.0
    measuring.reported(two, report(2))
    assert [each.over_secs for each in measuring.found.saves] == [5.0, None]
    assert [each.durable_secs for each in measuring.found.saves] == [1.5] * 2
    two.over_at_secs = 14.0  # while the call was still going on
    measuring.reported(save(3), report(3))
    assert [each.over_secs for each in measuring.found.saves] == [5.0, 0.0, None]
    # Another run has begun in the root, and goes by its own saves.
    measuring.reported(save(4, over_at_secs=20.0), report(4, "b"))
    measuring.reported(save(5, over_at_secs=20.0), report(5, "a"))
    measuring.reported(save(6), report(6, "a"))
    assert [each.over_secs for each in measuring.found.saves] == [5.0, None]


def test_a_save_that_waits_for_room_waits_for_its_step(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for _ in range(10):
            x = jnp.tanh(x @ x)
        return x

    one = jnp.ones((1000, 1000))
    step(one).block_until_ready()
    measured = meter.Meter(tmp_path, lambda: (), is_noted=lambda: False, is_new=True)
    state = step(one)
    measured.asked({"user": state}, waits=True)
    assert state.is_ready()


def test_saves_in_flight_that_fail_are_not_measured(
    tiny_run: Any, opened: Any, storage: Any
) -> None:
    run = tiny_run()
    manager = opened(run)
    run.run(manager, range(1, 4))
    manager.wait_until_finished()
    with storage.failing(), pytest.raises(cnr.errors.SaveError):
        run.run(manager, [4])
        manager.wait_until_finished()
    run.run(manager, [5])
    manager.wait_until_finished()
    saves = manager._saves.meter.found.saves
    assert [save.step for save in saves] == [1, 2, 3, 5]
    # None where a slow machine left the end of a train step unknown.
    assert sum(part.steps for part in saves[-1].trained) <= 2
