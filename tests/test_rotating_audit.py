"""Recorded runs: each save compares a part of the rows, for the life of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.repository.index import suspects
from cnr_jax.repository.step import read_manifest
from cnr_jax.rows.fingerprints import rotation
from cnr_jax.rows.fingerprints.windows import Window
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from .conftest import case_of, merged

# "item" is read whole by every save, "user" in 62 of them: half of what is left of the limit
# holds 65 rows.
ROWS, SMALL, DIM = 4000, 24, 4
LIMIT = 3000
NOTE = "cnr_jax.suspects.json"
BY_ROWS = P("r")

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def _from_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_draw", lambda: (np.array([1, 2], np.uint32), 0))


def make_state(devices: int = 1, spec: Any = BY_ROWS) -> dict[str, Any]:
    mesh = jax.make_mesh(
        (devices,),
        ("r",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    rng = np.random.default_rng(0)

    def put(*shape: int, spec: Any = spec) -> jax.Array:
        values = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, spec))

    return {
        "params": {"user": put(ROWS, DIM), "item": put(SMALL, DIM)},
        # Sharded unlike its table, where that is sharded by columns or not at all.
        "acc": {"user": put(ROWS, spec=P("r"))},
        "bias": put(3, spec=P()),
    }


record = jax.jit(cnr.record)


@jax.jit
def moved(rows: jax.Array, ids: jax.Array, by: float) -> jax.Array:
    return rows.at[ids].add(by)


class Run:
    """A run whose train steps are of SGD, until something else moves rows too."""

    def __init__(self, root: Path, state: Any = None, **options: Any) -> None:
        self.root, self.rng = root, np.random.default_rng(1)
        self.state = make_state() if state is None else state
        self.tables = cnr.find_tables(self.state, ["user", "item"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.step = -1
        self.open(**options)

    def open(self, **options: Any) -> None:
        settings = {"codec": "raw", "policy": cnr.Consecutive(), "audit_bytes": LIMIT}
        self.manager = cnr.CheckpointManager(
            self.root, tables=self.tables, options=cnr.Options(**settings | options)
        )

    def reopen(self, step: int | None = None, **options: Any) -> None:
        self.manager.close()
        self.open(**options)
        self.restore(step)

    def restore(self, step: int | None = None) -> None:
        args = cnr.args.Restore(self.state)
        self.state, self.touched = self.manager.restore(step, args=args)

    def move(self, user: Any = (), item: Any = (), by: float = 1.0) -> None:
        """Changes rows behind the back of `record`."""
        params, acc = self.state["params"], self.state["acc"]["user"]
        rows = np.asarray(user, np.int32)
        self.state = {
            **self.state,
            "params": {
                "user": moved(params["user"], rows, by),
                "item": moved(params["item"], np.asarray(item, np.int32), by),
            },
            "acc": {"user": moved(acc, rows, 1.0)},
        }

    def train(self, count: int = 40, tables: Any = ("user", "item")) -> np.ndarray:
        """Looks up rows, changes and records them."""
        ids = {
            "user": self.rng.choice(ROWS, count, replace=False),
            "item": self.rng.choice(SMALL, 2, replace=False),
        }
        self.move(**ids)
        given = {name: jnp.asarray(ids[name], jnp.int32) for name in tables}
        self.touched = record(self.touched, given)
        return ids["user"]

    def save(self) -> cnr.SaveReport:
        self.step += 1
        args = cnr.args.Save(self.state, self.touched)
        assert self.manager.save(self.step, args=args)
        self.manager.wait_until_finished()
        report = self.manager.last_report
        assert report is not None
        return report

    def go_on(self, saves: int) -> None:
        for _ in range(saves):
            self.train()
            self.save()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*args: Any, **options: Any) -> Run:
        made.append(Run(tmp_path / "root", *args, **options))
        return made[-1]

    yield make
    for run in made:
        run.manager.close()


# What is found.


def test_table_that_is_never_recorded_stops_the_first_delta(start: Any) -> None:
    run = start()
    run.train(tables=["user"])
    run.save()
    run.train(tables=["user"])
    text = (
        r"(?s)table 'item': 2 rows changed.*; all were compared.*a feature is missing"
    )
    with pytest.raises(errors.AuditError, match=text):
        run.save()
    assert run.manager.all_steps() == [0]


def test_table_that_is_recorded_no_more_stops_the_next_save(start: Any) -> None:
    run = start()
    run.go_on(12)
    run.train(tables=["user"])
    with pytest.raises(errors.AuditError, match="table 'item'"):
        run.save()


# Each moves rows at the end of an interval, of those looked up in it and those before.
def _adam(run: Run, met: list[np.ndarray]) -> None:
    run.move(np.unique(np.concatenate(met)), by=0.01)


def _momentum(run: Run, met: list[np.ndarray]) -> None:
    run.move(np.unique(np.concatenate(met[-2:])), by=0.01)


def _decay(run: Run, met: list[np.ndarray]) -> None:
    run.move(np.arange(ROWS), by=0.01)


def _slowly(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


# Staging "device" on a CPU goes the way of accelerators.
@pytest.mark.parametrize(
    ("late", "devices", "staging"),
    [
        (_adam, 1, "device"),
        _slowly(_adam, 2, "host"),
        _slowly(_momentum, 1, "device"),
        (_momentum, 2, "host"),
        (_decay, 1, "device"),
        _slowly(_decay, 2, "host"),
    ],
)
def test_what_begins_late_stops_one_of_the_next_three_saves(
    start: Any, late: Any, devices: int, staging: str
) -> None:
    run = start(make_state(devices), staging=staging)
    run.go_on(13)
    met = []
    with pytest.raises(errors.AuditError, match="table 'user'") as caught:
        for _ in range(3):
            met.append(run.train(count=400))
            late(run, met)
            run.save()
    whole = f"of {ROWS:,} rows were compared"
    assert whole in str(caught.value)
    cause = {_adam: "after the step that", _momentum: "after the step that"}
    assert cause.get(late, "weight decay") in str(caught.value)


def _read_by(number: int) -> list[int]:
    """Rows of "user" in the window of this number."""
    user = Window(rows=ROWS, block=205, blocks=1)
    assert user.count == 20
    first = [user.first(block) for block in user.visited(number, 0)]
    return [row for start in first for row in range(start, start + user.block)]


@pytest.fixture
def windows(start: Any, _from_the_first_row: None) -> Run:
    """A run whose save n compares windows n - 1 and n, in rounds of 20."""
    # Blocks of a page: 205 rows of 20 bytes.
    run = start(audit_bytes=9000)
    run.go_on(3)
    return run


@pytest.mark.parametrize("window", range(5))
def test_row_that_moves_once_is_seen_where_a_save_looks(
    windows: Run, window: int
) -> None:
    run = windows
    # Save 2 has read windows 1 and 2. Save 3 compares 2 and reads 3, of which nothing is known.
    run.move([_read_by(window)[7]])
    run.train(count=0)
    if window != 2:
        assert run.save().kind == "delta"
        return
    with pytest.raises(errors.AuditError, match=r"first rows: \d+\n"):
        run.save()
    # Nothing was kept of the save that was refused.
    rows = jnp.asarray([_read_by(window)[7], 0], jnp.int32)
    run.touched = cnr.record(run.touched, {"user": rows})
    assert run.save().rows >= 2


def test_row_that_moved_once_is_found_a_round_later(windows: Run) -> None:
    run = windows
    row = _read_by(0)[7]
    run.move([row])
    while run.step < 18:  # in none of these is its window read again
        run.train(count=0)
        run.save()
    run.train(count=0)
    with pytest.raises(errors.AuditError, match=f"first rows: {row}\n") as caught:
        for _ in range(2):
            run.save()
    error = caught.value
    # Its hash is of step 1: it was read by saves 0 and 1.
    assert (error.since, error.steps) == (1, tuple(range(2, run.step)))


def test_row_that_is_recorded_before_its_turn_stops_nothing(windows: Run) -> None:
    run = windows
    row = _read_by(0)[7]
    run.move([row])
    run.save()
    run.touched = cnr.record(run.touched, {"user": jnp.asarray([row], jnp.int32)})
    while run.step < 45:
        run.train(count=0)
        run.save()


# What is not.


@pytest.mark.parametrize(
    ("devices", "spec", "staging"),
    [
        # Each goes on where another number of devices is: those of two devices on one.
        (2, P("r"), "device"),
        # A compilation of each program for each device.
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (2, P(None, "r"), "host"),
                (2, P(), "host"),
                (1, P(), "host"),
                (8, P("r"), "device"),
                (4, P("r"), "host"),
                (4, P(None, "r"), "device"),
                (4, P(), "host"),
            )
        ),
    ],
)
def test_right_run_is_never_stopped(
    start: Any, devices: int, spec: Any, staging: str
) -> None:
    run = start(make_state(devices, spec), staging=staging, audit_bytes=9000)
    run.go_on(30)  # more than a round
    run.restore(20)
    run.step = 20
    run.go_on(5)
    run.reopen(staging=staging, audit_bytes=9000)
    run.go_on(5)
    run.touched = cnr.reset_touched(run.touched)
    run.go_on(3)
    older = run.state, run.touched
    run.go_on(1)
    run.state, run.touched = older  # put back by hand, and seen by its clock
    assert run.save().kind == "full"
    run.go_on(3)
    moved = make_state(2 if devices != 2 else 1)
    place = jax.tree.map(lambda leaf: leaf.sharding, moved)
    run.state = jax.device_put(run.state, place)
    stamps = cnr.init_touched(run.state, run.tables)
    run.touched = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), run.touched, stamps
    )
    run.train()
    assert run.save().kind == "full"
    run.go_on(3)


@pytest.mark.parametrize("staging", ["host", "device"])
def test_train_step_may_donate_what_a_save_has_read(start: Any, staging: str) -> None:
    run = start(staging=staging)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state), donate_argnums=0)
    run.state = step(run.state)  # what comes from numpy cannot be reused
    rows = {"user": jnp.arange(ROWS), "item": jnp.arange(SMALL)}
    for _ in range(4):
        given = run.state["params"]["user"]
        before = given.addressable_shards[0].data.unsafe_buffer_pointer()
        run.touched = cnr.record(run.touched, rows)
        run.save()
        run.state = step(run.state)
        assert given.is_deleted()
        after = run.state["params"]["user"].addressable_shards[0].data
        assert after.unsafe_buffer_pointer() == before


# What it costs.


def test_reads_and_memory_are_bounded(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[rotation.Glimpse] = []
    kept: list[rotation.Rotation] = []
    look = rotation.Rotation.look

    def seen(self: Any, *args: Any, **kwargs: Any) -> rotation.Glimpse:
        looks.append(look(self, *args, **kwargs))
        kept.append(self)
        return looks[-1]

    monkeypatch.setattr(rotation.Rotation, "look", seen)
    run = start(make_state(2), audit_bytes=2000)
    for number in range(50):
        run.go_on(1)
        assert len(looks) == number + 1
        assert len(looks[-1].read_bytes) == 2
        assert all(0 < size <= 2000 for size in looks[-1].read_bytes.values())
    # Four bytes a row, one a row and leaf, eight a block, and what is read at once.
    most = ROWS * (4 + 2) + SMALL * (4 + 1) + 8 * ROWS
    rings = [(r._hashes, r._tags, r._clocks) for r in kept[-1]._rings]
    held = [each for group in (*rings, *kept[-1]._buffers.values()) for each in group]
    assert sum(each.nbytes for each in held) <= most + 2 * 4 * 2000


def test_restore_begins_a_round_with_what_it_restored(start: Any) -> None:
    run = start(codec="asymmetric", bits=4)
    run.go_on(2)
    run.reopen(codec="asymmetric", bits=4)
    run.train()
    assert run.save().kind == "delta"
    run.reopen(codec="asymmetric", bits=4)
    run.move(item=[3])
    with pytest.raises(errors.AuditError, match="table 'item'") as caught:
        run.save()
    assert (caught.value.since, caught.value.steps) == (2, ())


# Which steps may lack rows.


@pytest.fixture
def lacking(windows: Run) -> Run:
    """A run that was stopped: steps 2 to 19 lack a row that moved after step 1."""
    run = windows
    run.move([_read_by(0)[7]])
    run.train(count=0)
    with pytest.raises(errors.AuditError):
        while True:
            run.save()
    return run


class PlainRun(Run):
    """Saved by Orbax's own manager: what became of a save is found out by the next."""

    def open(self, **options: Any) -> None:
        settings = {"codec": "raw", "policy": cnr.Consecutive(), "audit_bytes": LIMIT}
        registry = cnr.handler_registry(self.tables, cnr.Options(**settings | options))
        keep = registry.preservation_policy(None)
        self.manager = ocp.CheckpointManager(
            self.root,
            handler_registry=registry,
            options=ocp.CheckpointManagerOptions(preservation_policy=keep),
        )

    def save(self) -> Any:
        self.step += 1
        args = cnr.args.Save(self.state, self.touched)
        assert self.manager.save(self.step, args=args)
        self.manager.wait_until_finished()


def test_newest_step_is_named_under_a_manager_of_orbax(
    tmp_path: Path, _from_the_first_row: None
) -> None:
    run = PlainRun(tmp_path / "root", audit_bytes=9000)
    run.go_on(3)
    run.move([_read_by(0)[7]])
    run.train(count=0)
    with pytest.raises(errors.AuditError) as caught:
        while True:
            run.save()
    assert run.manager.latest_step() == run.step - 1
    error = caught.value
    assert (error.since, error.steps) == (1, tuple(range(2, run.step)))
    noted = json.loads((run.root / NOTE).read_text())["steps"]
    assert [int(each["directory"]) for each in noted] == list(error.steps)
    run.manager.close()


def test_rows_were_right_in_the_newest_step_under_a_manager_of_orbax(
    tmp_path: Path,
) -> None:
    run = PlainRun(tmp_path / "root")
    run.go_on(4)
    run.move(item=[1])
    with pytest.raises(errors.AuditError) as caught:
        run.save()
    assert (caught.value.since, caught.value.steps) == (3, ())
    run.manager.close()


def warnings_of(caplog: Any) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [text for text in found if "may lack rows" in text]


def test_steps_that_may_lack_rows_are_named_wherever_they_are_restored(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    newest = run.manager.latest_step()
    assert newest == run.step - 1
    noted = json.loads((run.root / NOTE).read_text())["steps"]
    assert [each["directory"] for each in noted] == [
        str(step) for step in range(2, run.step)
    ]
    assert {each["since"] for each in noted} == {1}
    run.reopen()
    (told,) = warnings_of(caplog)
    for part in (f"{newest} and 8 before may lack", "after step 1 ", "is one of them"):
        assert part in told
    caplog.clear()
    run.restore(1)
    assert not warnings_of(caplog)
    run.restore(5)
    (told,) = warnings_of(caplog)
    assert "Step 5, which is restored, is one of them" in told
    caplog.clear()
    with cnr.CheckpointManager(run.root.parent / "other", tables=run.tables) as other:
        other.restore(None, directory=run.root, args=cnr.args.Restore(run.state))
    assert len(warnings_of(caplog)) == 1


def test_steps_that_bring_a_merged_baseline_are_named_too(
    start: Any, quick: None, _from_the_first_row: None
) -> None:
    run = start(audit_bytes=9000, policy=cnr.IncrementLog(merge_at=3))

    def save() -> None:
        run.save()
        merged(run.manager)

    for _ in range(3):
        run.train()
        save()
    run.move([_read_by(0)[7]])
    run.train(count=0)
    with pytest.raises(errors.AuditError) as caught:
        while True:
            save()
    kinds = [
        read_manifest(run.root / str(step) / "default").kind for step in range(run.step)
    ]
    assert kinds[3:7] == ["full", "delta", "delta", "full"]
    assert (caught.value.since, caught.value.steps) == (1, tuple(range(2, run.step)))


def test_merged_steps_may_lack_what_those_lack_that_they_stand_for(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    run.manager.close()
    newest = run.step - 1
    cnr.compact(run.root, writer_is_dead=True)
    described = {each.step: each for each in cnr.describe(run.root).steps}
    assert described[newest].directory == f"{newest}.g1.branch"
    assert described[newest].may_lack_rows and not described[1].may_lack_rows
    run.open()
    run.restore()
    (told,) = warnings_of(caplog)
    assert f"Step {newest}, which is restored, is one of them" in told
    run.manager.close()
    caplog.clear()
    cnr.compact(run.root, step=1, writer_is_dead=True)
    run.open()
    run.restore(1)
    assert not warnings_of(caplog)


def test_note_goes_with_the_steps(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    keep = ocp.checkpoint_managers.LatestN(2)
    run.reopen(preservation_policy=keep, policy=cnr.Full())
    run.step = 100
    caplog.clear()
    for _ in range(3):
        run.go_on(1)
        run.manager.wait_until_finished()
    run.go_on(1)
    assert json.loads((run.root / NOTE).read_text()) == {"steps": []}
    run.restore()
    assert not warnings_of(caplog)


def test_note_goes_with_steps_that_a_new_run_moves(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    noted = suspects.read(run.root)
    newest = run.step - 1
    run.manager.close()
    run.open(policy=cnr.Full(), new_run=True)
    run.touched = cnr.init_touched(run.state, run.tables)
    run.step = 0
    fault = Fault("open", action="EIO", times=0, match="manifest")
    with inprocess.failing(run.root, fault), pytest.raises(OSError):
        run.save()
    assert run.manager.latest_step() == newest
    assert not list(run.root.glob("earlier-run-*"))
    assert suspects.read(run.root) == noted
    run.go_on(3)
    assert not suspects.read(run.root)
    (earlier,) = run.root.glob("earlier-run-*")
    caplog.clear()
    with cnr.CheckpointManager(earlier, tables=run.tables) as manager:
        manager.restore(None, args=cnr.args.Restore(run.state))
    (told,) = warnings_of(caplog)
    assert f"Step {newest}, which is restored, is one of them" in told


def test_note_of_a_step_that_storage_withholds_is_kept(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    noted = suspects.read(run.root)
    run.manager.close()
    fault = Fault("open_read", action="EACCES", times=0, match="/5/default/manifest")
    with inprocess.failing(run.root, fault):
        run.open(policy=cnr.Full())
        run.restore(3)
        run.step = 100
        run.go_on(2)
    assert suspects.read(run.root) == noted
    caplog.clear()
    run.reopen(step=5)
    assert "Step 5, which is restored, is one of them" in warnings_of(caplog)[0]


def test_note_that_storage_does_not_give_out_is_not_replaced(lacking: Run) -> None:
    run = lacking
    note = json.loads((run.root / NOTE).read_text())
    note["steps"].append({"directory": "77", "uuid": "a" * 32, "since": None})
    before = json.dumps(note)
    (run.root / NOTE).write_text(before)
    fault = Fault("open_read", action="EIO", match=NOTE)
    with inprocess.failing(run.root, fault):
        with pytest.raises(errors.AuditError, match=r"could not be noted.*Errno 5"):
            run.save()
    assert (run.root / NOTE).read_text() == before


def test_rows_that_changed_since_the_last_save_make_no_step_suspect(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.go_on(4)
    run.move(item=[1])
    with pytest.raises(
        errors.AuditError, match=r"none that is known; these rows were right in step 3"
    ) as caught:
        run.save()
    assert (caught.value.since, caught.value.steps) == (3, ())
    assert not (run.root / NOTE).exists()
    run.reopen()
    assert not warnings_of(caplog)


GOOD = {"directory": "19", "uuid": "0" * 32, "since": 1}


NO_NOTES = [
    b"",
    b"{",
    b"\xff",
    b"[" * 100_000,
    b"{}",
    b'{"steps": 3}',
    b'{"steps": [3]}',
    b'{"steps": [{"directory": "1"}]}',
    b'{"steps": [{"directory": 1, "uuid": "", "since": null}]}',
    b'{"steps": [{"directory": "1", "uuid": "", "since": 1e400}]}',
    b" " * (1 << 21),
    *(
        json.dumps({"steps": [GOOD | changed]}).encode()
        for changed in (
            {"directory": "9" * 5000},
            {"directory": "9" * 256},
            {"directory": "../9"},
            {"directory": ""},
            {"directory": "x"},
            {"directory": "\u00b2"},
            {"directory": "\ud8009"},
            {"uuid": "0"},
            {"uuid": "G" * 32},
            {"since": True},
            {"since": -1},
        )
    ),
    None,
]


def test_note_that_cannot_be_understood_is_in_nobody_s_way(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    for data in NO_NOTES:
        caplog.clear()
        (run.root / NOTE).unlink(missing_ok=True)
        if data is None:
            os.mkfifo(run.root / NOTE)
        else:
            (run.root / NOTE).write_bytes(data)
        with case_of(data and data[:80]):
            run.reopen(policy=cnr.Full())
            assert "is not known" in warnings_of(caplog)[0]
            run.step += 100
            run.go_on(1)


def test_note_of_another_step_of_the_same_name_means_nothing(
    lacking: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run = lacking
    note = json.loads((run.root / NOTE).read_text())
    for each in note["steps"]:
        each["uuid"] = "0" * 32
    (run.root / NOTE).write_text(json.dumps(note))
    run.reopen()
    assert not warnings_of(caplog)


def test_audit_that_cannot_be_noted_says_so(windows: Run, storage: Any) -> None:
    run = windows
    run.move([_read_by(0)[7]])
    run.train(count=0)
    with (
        storage.failing(NOTE),
        pytest.raises(errors.AuditError, match=r"could not be noted.*No space left"),
    ):
        while True:
            run.save()


def test_audit_stops_a_save_whatever_keeps_it_from_being_explained(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(suspects, "explain", broken)
    run = start()
    run.go_on(2)
    run.move(item=[1])
    with pytest.raises(errors.AuditError, match="table 'item': 1 row"):
        run.save()
    assert "no room" in caplog.text
