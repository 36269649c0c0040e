"""How changed rows are found: recorded, by fingerprints, audited; and what an audit says."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
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
from cnr_jax.checkpointer.saving import plan
from cnr_jax.rows.fingerprints import rotation, watch

from .conftest import each_of

ROWS, DIM = 48, 4
SPECS = {"rows": P("r"), "columns": P(None, "r"), "replicated": P()}


@pytest.fixture(autouse=True)
def _alike(unsynced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # An error tells the leaves of a row from 8 bits: the same in every run of the tests.
    seed = np.array([1, 2], np.uint32)
    monkeypatch.setattr(watch, "_draw_seed", lambda: seed)
    monkeypatch.setattr(rotation, "_draw", lambda: (seed, 0))


def make_state(spec: str = "rows", devices: int = 2) -> dict[str, Any]:
    mesh = jax.make_mesh(
        (devices,),
        ("r",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    rng = np.random.default_rng(3)
    put = jax.device_put
    return {
        "params": {
            "user": put(
                rng.normal(size=(ROWS, DIM)).astype(np.float32),
                NamedSharding(mesh, SPECS[spec]),
            )
        },
        "acc": {"user": put(np.zeros(ROWS, np.float32), NamedSharding(mesh, P()))},
        "w": put(np.ones(3, np.float32), NamedSharding(mesh, P())),
    }


def change(state: Any, rows: Any, by: float = 1.0, *, slot: float = 1.0) -> Any:
    """The state with some rows of the table and of its slot changed."""
    rows = np.asarray(rows, np.int32)
    table = state["params"]["user"].at[rows].add(by)
    acc = state["acc"]["user"].at[rows].add(slot)
    return {**state, "params": {"user": table}, "acc": {"user": acc}}


def record(touched: Any, rows: Any) -> Any:
    return cnr.record(touched, {"user": jnp.asarray(rows, jnp.int32)})


def values(state: Any) -> Any:
    return jax.tree.map(np.array, state)


def same(got: Any, want: Any) -> None:
    """Equal bit for bit, of whatever the leaves are made."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


class World:
    """A manager, the state it saves, and what every step must give back."""

    def __init__(self, root: Path, state: Any = None, **options: Any) -> None:
        self.root, self.state = root, make_state() if state is None else state
        self.tables = cnr.find_tables(self.state, ["user"])
        self.touched = cnr.init_touched(self.state, self.tables)
        self.reports: list[cnr.SaveReport] = []
        self.truth: dict[int, Any] = {}
        self.open(**options)

    def open(self, **options: Any) -> None:
        settings = {"codec": "raw", "policy": cnr.Consecutive(), **options}
        self.manager = cnr.CheckpointManager(
            self.root,
            tables=self.tables,
            options=cnr.Options(**settings, on_save=self.reports.append),
        )

    def train(self, rows: Any, *, recorded: Any = None, **changes: Any) -> None:
        """Changes rows; records them, or those that are given."""
        self.state = change(self.state, rows, **changes)
        self.touched = record(self.touched, rows if recorded is None else recorded)

    def save(self, step: int, *, touched: bool = False) -> cnr.SaveReport:
        args = cnr.args.Save(self.state, self.touched if touched else None)
        assert self.manager.save(step, args=args)
        self.manager.wait_until_finished()
        self.truth[step] = values(self.state)
        return self.reports[-1]

    def restore(self, step: int) -> None:
        args = cnr.args.Restore(self.state)
        self.state, self.touched = self.manager.restore(step, args=args)

    def check(self) -> None:
        """Every step comes back bit for bit, in a manager of its own."""
        self.manager.close()
        for step, want in self.truth.items():
            with cnr.CheckpointManager(self.root, tables=self.tables) as reader:
                got = reader.restore(step, args=cnr.args.Restore(self.state))
            same(got.state, want)

    @property
    def steps(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.is_dir())


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    made: list[World] = []

    def make(state: Any = None, **options: Any) -> World:
        made.append(World(tmp_path, state, **options))
        return made[-1]

    yield make
    for each in made:
        each.manager.close()


# Fingerprints.


@pytest.mark.parametrize(
    ("spec", "staging"),
    [
        ("rows", "device"),
        ("columns", "host"),
        ("replicated", "host"),
        pytest.param("rows", "host", marks=pytest.mark.slow),
        pytest.param("columns", "device", marks=pytest.mark.slow),
        pytest.param("replicated", "device", marks=pytest.mark.slow),
    ],
)
def test_save_without_touched_holds_the_rows_that_differ(
    world: Any, spec: str, staging: str
) -> None:
    run = world(make_state(spec), staging=staging)
    assert run.save(0).rows == ROWS
    for step, rows in enumerate([[3, 40], [], [3], list(range(ROWS))], start=1):
        run.state = change(run.state, rows)
        report = run.save(step)
        assert (report.kind, report.tracking) == ("delta", "fingerprint")
        assert report.rows == len(rows)
    run.check()


@pytest.mark.parametrize("staging", ["host", "device"])
def test_rows_that_changed_only_in_a_slot_are_saved(world: Any, staging: str) -> None:
    run = world(staging=staging)
    run.save(0)
    run.state = change(run.state, [5, 47], by=0.0)
    assert run.save(1).rows == 2
    run.check()


def test_bits_count_and_not_values(world: Any) -> None:
    state = make_state()
    table = state["params"]["user"].at[7].set(jnp.nan).at[8].set(0.0)
    run = world({**state, "params": {"user": table}})
    run.save(0)
    run.state = {**run.state, "params": {"user": table.at[8, 1].set(-0.0)}}
    assert run.save(1).rows == 1  # a NaN equals itself, -0.0 is not 0.0
    run.check()


def test_state_put_back_in_memory_is_saved_as_it_is(world: Any) -> None:
    run = world()
    run.save(0)
    older = run.state
    run.state = change(run.state, [1, 2, 3])
    run.save(1)
    run.state = change(older, [2], by=9.0)
    assert (run.save(2).kind, run.reports[-1].rows) == ("delta", 3)
    run.check()


def test_state_from_before_an_evaluation_restore_is_saved_as_it_is(world: Any) -> None:
    run = world()
    for step in range(3):
        run.state = change(run.state, [step, 10 + step])
        run.save(step)
    going_on = run.state
    run.restore(1)
    run.state = change(going_on, [30])
    assert run.save(3).kind == "delta"
    run.check()


def test_parent_is_any_of_the_policy_s_choice(world: Any) -> None:
    run = world(policy=cnr.OneShot())
    run.save(0)
    for step in range(1, 4):
        run.state = change(run.state, [step, 20])
        assert run.save(step).rows == step + 1
    run.check()


def test_rows_of_a_save_that_failed_are_in_the_next(world: Any, storage: Any) -> None:
    run = world()
    run.save(0)
    run.state = change(run.state, [4, 5])
    with storage.failing(), pytest.raises(OSError, match="No space"):
        run.save(1)
    run.state = change(run.state, [6])
    assert run.save(2).rows == 3
    run.check()


def _no_space(*_: Any) -> None:
    raise OSError("no space")


@pytest.mark.parametrize("devices", [1, 4])
def test_state_moved_to_other_devices_in_mid_run_is_saved(
    world: Any, devices: int
) -> None:
    run = world()
    run.save(0)
    like = make_state("rows", devices)
    moved = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), run.state, like)
    run.state = change(moved, [2])
    run.save(1)
    run.state = change(run.state, [3])
    assert run.save(2).rows == 1
    run.check()


@pytest.mark.parametrize("staging", ["host", "device"])
def test_restored_run_goes_on_with_deltas(world: Any, staging: str) -> None:
    run = world(staging=staging)
    for step in range(3):
        run.state = change(run.state, [step, 10 + step])
        run.save(step)
    run.manager.close()
    run.open(staging=staging)
    run.restore(2)
    same(run.state, run.truth[2])
    run.state = change(run.state, [30])
    report = run.save(3)
    assert (report.kind, report.parent, report.rows) == ("delta", 2, 1)
    run.check()


def test_restored_run_goes_on_from_what_a_lossy_codec_gave_back(world: Any) -> None:
    run = world(codec="asymmetric", bits=8)
    for step in range(3):
        run.state = change(run.state, [step, 10 + step])
        run.save(step)
    run.restore(2)
    assert run.save(3).rows == 0
    run.state = change(run.state, [30])
    assert run.save(4).rows == 1


def test_one_shot_delta_after_a_restore_holds_what_the_chain_held(world: Any) -> None:
    run = world(policy=cnr.OneShot())
    run.save(0)
    run.state = change(run.state, [7, 9], by=0.0)  # in the slot alone
    run.save(1)
    run.restore(1)
    run.state = change(run.state, [11])
    report = run.save(2)
    assert (report.parent, report.rows) == (0, 3)
    run.check()


def test_train_step_may_donate_what_was_looked_at(world: Any) -> None:
    run = world()
    step = jax.jit(lambda state: change(state, [1, 2]), donate_argnums=0)
    run.state = step(run.state)  # what comes from numpy cannot be reused
    for number in range(4):
        given = run.state["params"]["user"]
        before = [s.data.unsafe_buffer_pointer() for s in given.addressable_shards]
        run.save(number)
        run.state = step(run.state)
        assert given.is_deleted()
        after = run.state["params"]["user"].addressable_shards
        # The same buffers: no view was left that would make XLA copy the table.
        assert [s.data.unsafe_buffer_pointer() for s in after] == before
    run.check()


def what_holds_hashes() -> list[Any]:
    gc.collect()
    kept = (watch.RowWatch, rotation.Rotation)
    return [found for found in gc.get_objects() if isinstance(found, kept)]


@pytest.mark.slow
def test_fingerprints_take_twelve_bytes_a_row(world: Any) -> None:
    before = what_holds_hashes()
    run = world()
    run.save(0)
    # Here the slot lies on one device and the table on four, cut to the same rows.
    (kept,) = [found for found in what_holds_hashes() if found not in before]
    hashed = [seen.hashed for seen in kept._seen.values()]
    assert all(each.tags is None for each in hashed)
    held = [chunk for each in hashed for chunk in each.hashes]
    assert sum(each.nbytes for each in [*held, *kept._stamps.values()]) == 12 * ROWS


# The mode.


def test_recorded_run_cannot_be_saved_without_touched(world: Any) -> None:
    run = world()
    run.train([1])
    run.save(0, touched=True)
    with pytest.raises(errors.TouchedError, match=r"(?s)recorded.*hint.*fingerprint"):
        run.save(1)
    assert run.steps == ["0"]
    run.train([2])
    assert run.save(1, touched=True).rows == 1
    run.check()


def test_fingerprint_run_takes_no_notice_of_touched(world: Any) -> None:
    run = world()
    run.save(0)
    run.train([1, 2], recorded=[5])
    report = run.save(1, touched=True)
    assert (report.tracking, report.rows) == ("fingerprint", 2)
    run.check()


@pytest.mark.parametrize("mode", ["recorded", "fingerprint", "audited"])
def test_mode_is_kept_after_a_restart(world: Any, mode: Any) -> None:
    run = world(tracking=mode)
    for step in range(2):
        run.train([step])
        run.save(step, touched=True)
    run.manager.close()
    run.open()
    run.restore(1)
    run.train([7])
    report = run.save(2, touched=True)
    assert (report.kind, report.rows, report.tracking) == ("delta", 1, mode)
    run.check()


@pytest.mark.parametrize(
    ("first", "then"),
    list(itertools.permutations(["recorded", "fingerprint", "audited"], 2)),
)
def test_mode_that_is_asked_for_goes_on_from_a_restore(
    world: Any, first: Any, then: Any
) -> None:
    run = world(tracking=first)
    for step in range(2):
        run.train([step, 20])
        run.save(step, touched=True)
    run.manager.close()
    run.open(tracking=then)
    run.restore(1)
    # What rows were found by, or will be, says nothing about the other way: all are saved.
    anew = (first == "fingerprint") != (then == "fingerprint")
    for step in range(2, 4):
        run.train([step])
        report = run.save(step, touched=True)
        expected = ("full", ROWS) if anew and step == 2 else ("delta", 1)
        assert (report.kind, report.rows, report.tracking) == (*expected, then)
    run.check()


def test_manifest_says_which_clock_chose_the_rows(
    tiny_run: Any, tmp_path: Path
) -> None:
    clocks = {}
    for mode in ("recorded", "fingerprint", "audited"):
        run = tiny_run()
        options = cnr.Options(tracking=mode, policy=cnr.Consecutive())
        with cnr.CheckpointManager(
            tmp_path / mode, tables=run.tables, options=options
        ) as manager:
            run.run(manager, range(3))
            made = run.manifest(manager, 2)
        assert made.tracking == mode and made.parent is not None
        clocks[mode] = (made.recorded_clock, made.fingerprint_clock, made.parent.clock)
    assert clocks == {
        "recorded": (3, None, 2),
        "fingerprint": (None, 2, 1),
        "audited": (3, None, 2),
    }


def test_processes_that_find_rows_in_different_ways_are_told() -> None:
    told = [{"/tracking": "recorded"}, {"/tracking": "fingerprint"}]
    with pytest.raises(
        errors.OptionError, match=r"'fingerprint' on process 1, 'recorded' on process 0"
    ):
        plan.check_told(told)


@each_of(
    ("options", "message"),
    [
        ({"tracking": "bitmap"}, "'bitmap'.*'recorded', 'fingerprint', 'audited'"),
        ({"audit_bytes": -1}, "-1"),
        ({"audit_bytes": "3"}, "'3'"),
        ({"audit_bytes": True}, "True"),
        ({"drop_unchanged": True}, r"(?s)got tracking=None, expected .*'audited'"),
        ({"drop_unchanged": True, "tracking": "recorded"}, "'recorded'"),
    ],
)
def test_bad_options_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(errors.OptionError, match=message):
        cnr.Options(**options)


def test_standard_restore_gives_the_state_alone(world: Any) -> None:
    run = world()
    run.save(0)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, run.state)
    got = run.manager.restore(0, args=ocp.args.StandardRestore(abstract))
    same(got, run.truth[0])
    assert got["params"]["user"].sharding == run.state["params"]["user"].sharding


def test_standard_save_is_refused_with_a_hint(world: Any) -> None:
    run = world()
    with pytest.raises(
        errors.OptionError, match=r"(?s)StandardSave.*hint: cnr.args.Save"
    ):
        run.manager.save(0, args=ocp.args.StandardSave(run.state))


# The audit.


@pytest.mark.usefixtures("one_seed")
@pytest.mark.parametrize("staging", ["host", "device"])
@pytest.mark.parametrize("mode", ["recorded", "audited"])
def test_row_changed_unrecorded_stops_the_save(
    world: Any, mode: Any, staging: str
) -> None:
    run = world(tracking=mode, staging=staging)
    run.train([1, 2])
    run.save(0, touched=True)
    run.train([3, 9, 11, 40], recorded=[3])
    with pytest.raises(errors.AuditError) as caught:
        run.save(1, touched=True)
    assert caught.value.kind == "audit"
    text = str(caught.value)
    for part in (
        "table 'user': 3 rows changed without being recorded",
        "the table (about 3 rows), slot acc (about 3 rows)",
        "first rows: 9, 11, 40\n",
        "the 1 row recorded",
        "a feature left out",
        "fingerprint",
    ):
        assert part in text
    assert run.steps == ["0"]
    # The same again, as nothing has moved; until the rows are recorded.
    with pytest.raises(errors.AuditError):
        run.save(1, touched=True)
    run.touched = record(run.touched, [9, 11, 40])
    assert run.save(1, touched=True).rows == 4
    run.check()


@pytest.mark.usefixtures("one_seed")
def test_leaf_and_cause_are_told_apart(world: Any) -> None:
    def message(rows: Any, **changes: Any) -> str:
        run.train(rows, **changes)
        with pytest.raises(errors.AuditError) as caught:
            run.save(1, touched=True)
        run.state, run.touched = kept
        return str(caught.value)

    run = world(tracking="audited")
    run.train([1, 2])
    run.save(0, touched=True)
    kept = run.state, run.touched
    text = message([30], recorded=[31], by=0.0)
    assert "in slot acc (about 1 row);" in text and "changes slots of rows" in text
    text = message([1], recorded=[31], slot=0.0)
    assert "in the table (about 1 row);" in text and "after the step that" in text
    assert "no row of this table" in message([30], recorded=[])
    text = message(range(ROWS), recorded=[3])
    assert "47 rows" in text and "weight decay" in text and "0, 1, 2, 4, 5, ..." in text


def test_rows_are_named_by_their_logical_ids(world: Any) -> None:
    layout = cnr.ModSharded(shards=4, rows_per_shard=ROWS // 4)
    run = world(tracking="audited")
    run.manager.close()
    spec = {"user": cnr.TableSpec(rows=40, layout=layout)}
    run.tables = cnr.find_tables(run.state, spec)
    run.touched = cnr.init_touched(run.state, run.tables)
    run.open(tracking="audited")
    run.save(0, touched=True)
    stored = layout.to_physical(np.array([13, 41]))
    run.state = change(run.state, stored)
    with pytest.raises(
        errors.AuditError, match=r"13, 41 \(padding\)|41 \(padding\), 13"
    ):
        run.save(1, touched=True)


def test_audit_can_be_switched_off(world: Any) -> None:
    before = what_holds_hashes()
    run = world(audit_bytes=0)
    for step in range(2):
        run.train([step], recorded=[9])
        report = run.save(step, touched=True)
        assert report.fingerprint_secs == 0
    run.restore(1)
    run.train([2], recorded=[9])
    report = run.save(2, touched=True)
    assert report.fingerprint_secs == 0
    assert not [found for found in what_holds_hashes() if found not in before]


def test_older_state_put_back_by_hand_is_told_or_stops_the_save(world: Any) -> None:
    run = world(tracking="audited")
    run.train([1])
    run.save(0, touched=True)
    older = run.state, run.touched
    run.train([2, 3])
    run.save(1, touched=True)
    # Told: the next save is full.
    run.state, run.touched = older[0], cnr.reset_touched(older[1])
    assert run.save(2, touched=True).kind == "full"
    # Behind the last clock: seen, and full.
    older = run.state, run.touched
    run.train([4])
    run.save(3, touched=True)
    run.state, run.touched = older
    assert run.save(4, touched=True).kind == "full"
    # Caught up with the last clock: rows 5 and 6 went back unrecorded.
    older = run.state, run.touched
    run.train([5, 6])
    run.save(5, touched=True)
    run.state, run.touched = older
    run.train([7])
    with pytest.raises(errors.AuditError, match=r"(?s)first rows: 5, 6.*reset_touched"):
        run.save(6, touched=True)
    run.check()


def test_rows_recorded_but_unchanged_can_be_left_out(
    world: Any, tmp_path: Path
) -> None:
    sizes = {}
    for drop in (False, True):
        run = World(tmp_path / str(drop), tracking="audited", drop_unchanged=drop)
        run.save(0, touched=True)
        for step in range(1, 4):
            run.train([step], recorded=range(20))
            sizes[drop] = run.save(step, touched=True).rows
        run.restore(3)
        run.train([30], recorded=range(20, 40))
        assert run.save(4, touched=True).rows == (1 if drop else 20)
        run.check()
    assert sizes == {False: 20, True: 1}


def everything(state: Any, touched: Any) -> tuple[Any, Any]:
    """A step as of dense Adam: all rows move, one is recorded."""
    return change(state, range(ROWS)), record(touched, [1])


def placed(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), tree, like)


def test_no_delta_rests_on_rows_of_another_sharding_unaudited(world: Any) -> None:
    run = world(tracking="audited")
    for step, devices in enumerate([4, 8, 4, 2, 1]):
        like = make_state("rows", devices)
        run.state = placed(run.state, like)
        run.touched = placed(run.touched, cnr.init_touched(like, run.tables))
        run.state, run.touched = everything(run.state, run.touched)
        assert run.save(step, touched=True).kind == "full"
    run.check()


def test_no_delta_rests_on_a_restore_to_elsewhere_unaudited(world: Any) -> None:
    run = world(tracking="audited")
    run.save(0, touched=True)
    restored = run.manager.restore(0)  # on one device
    run.state = placed(restored.state, run.state)
    run.touched = placed(restored.touched, run.touched)
    run.state, run.touched = everything(run.state, run.touched)
    assert run.save(1, touched=True).kind == "full"
    run.check()


def test_no_delta_of_runs_in_turns_is_unaudited(world: Any) -> None:
    run = world(tracking="audited")
    runs = [(make_state(), cnr.init_touched(run.state, run.tables)) for _ in range(2)]
    for step in range(6):
        runs[step % 2] = everything(*runs[step % 2])
        run.state, run.touched = runs[step % 2]
        assert run.save(step, touched=True).kind == "full"
    run.check()


def test_rollback_after_a_save_that_failed_is_not_a_delta_unaudited(
    world: Any, storage: Any
) -> None:
    run = world(tracking="audited")
    run.train([0])
    run.save(0, touched=True)
    before = run.state, run.touched
    run.train([1])
    run.train([2])
    with storage.failing(), pytest.raises(OSError, match="No space"):
        run.save(1, touched=True)
    run.state, run.touched = everything(*before)
    assert run.save(1, touched=True).kind == "full"
    run.check()


@pytest.mark.parametrize("mode", ["fingerprint", "audited"])
def test_state_restored_by_other_tables_is_saved_full_or_right(
    world: Any, mode: Any
) -> None:
    run = world(tracking=mode)
    run.save(0, touched=True)
    # The same leaves elsewhere, as an evaluation may have them: all come back exactly.
    params, acc = run.state["params"], run.state["acc"]
    state = {"params": {"eval": params}, "acc": {"eval": acc}, "w": run.state["w"]}
    tables = cnr.find_tables(state, {"user": "eval/user"})
    args = cnr.args.Restore(state, tables=tables)
    run.touched = run.manager.restore(0, args=args).touched
    run.train([4])
    assert run.save(1, touched=True).kind == "full"
    run.check()


def test_restore_that_fails_to_look_at_the_rows_makes_the_next_save_full(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world()
    run.save(0)
    with monkeypatch.context() as patch:
        patch.setattr(watch.RowWatch, "look", _no_space)
        with pytest.raises(OSError, match="no space"):
            run.restore(0)
    run.state = change(run.state, [4])
    assert run.save(1).kind == "full"
    run.check()


def test_run_goes_on_after_an_abandoned_step_was_evaluated(world: Any) -> None:
    run = world(policy=cnr.OneShot())
    for step in range(5):
        run.state = change(run.state, [step])
        run.save(step)
    run.restore(1)
    run.state = change(run.state, [20])
    run.save(2)
    going_on = run.state
    run.restore(4)
    run.state = change(going_on, [21])
    run.save(3)
    for step in (0, 1, 2, 3):  # 4 was given up, and lies beside
        run.manager.close()
        with cnr.CheckpointManager(run.root, tables=run.tables) as reader:
            got = reader.restore(step, args=cnr.args.Restore(run.state))
        same(got.state, run.truth[step])


@pytest.mark.parametrize("mode", ["fingerprint", "audited"])
def test_mode_is_kept_in_another_root(world: Any, tmp_path: Path, mode: Any) -> None:
    run = world(tracking=mode)
    run.save(0, touched=True)
    run.manager.close()
    other = World(tmp_path / "other")
    args = cnr.args.Restore(other.state)
    other.state, other.touched = other.manager.restore(0, directory=run.root, args=args)
    for step in range(2):
        report = other.save(step, touched=True)
        assert (report.tracking, report.kind) == (mode, "delta" if step else "full")
    other.check()


def test_donated_touched_is_none_of_the_business_of_fingerprints(world: Any) -> None:
    run = world()
    run.save(0)
    jax.tree.map(lambda x: x.delete(), run.touched)
    run.state = change(run.state, [3])
    assert run.save(1, touched=True).rows == 1
    run.check()


def test_rows_cut_in_several_ways_are_counted_once(world: Any) -> None:
    state = make_state("replicated")
    acc = jax.device_put(state["acc"]["user"], make_state()["params"]["user"].sharding)
    run = world({**state, "acc": {"user": acc}}, tracking="audited")
    run.save(0, touched=True)
    run.train([3, 9, 30], recorded=[9, 10])
    text = r"(?s)2 rows changed .*first rows: 3, 30\n.*the 2 rows recorded"
    with pytest.raises(errors.AuditError, match=text):
        run.save(1, touched=True)


def test_audit_before_anything_says_nothing_of_what_it_cannot_compare(
    world: Any,
) -> None:
    run = world(tracking="audited")
    run.save(0, touched=True)
    moved = make_state("rows", 8)
    run.state = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding), run.state, moved
    )
    run.touched = cnr.init_touched(run.state, run.tables)
    run.train([4], recorded=[5])
    assert run.save(1, touched=True).kind == "full"
    run.check()
