"""A root that plain Orbax wrote: restored as Orbax does, gone on with, and never written to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

from .conftest import Keep, TinyRun, mesh_within, skip_below

STEPS = (1, 2, 3)

# Orbax leaves tasks behind where it cannot read what it has saved.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def state_at(step: int) -> dict[str, Any]:
    mesh = mesh_within((4,), ("rows",), (AxisType.Auto,))
    rows = jnp.arange(64.0).reshape(16, 4) + step
    user = jax.device_put(rows, NamedSharding(mesh, P("rows")))
    opt = optax.adam(0.1).init({"user": user})
    # Lists, named tuples, nodes without leaves, numbers, numpy arrays, keys.
    layers = [jnp.full(2, 0.5 + step), step, {}, None]
    rest = {"layers": layers, "w": np.arange(3.0), "key": jax.random.key(step)}
    return {"user": user, "opt": opt, **rest}


def save_v1(root: Path, state_of: Callable[[int], Any]) -> None:
    with v1.training.Checkpointer(str(root)) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state_of(step))


def save_plain(
    root: Path, wrap: Any = ocp.args.StandardSave, state_of: Any = state_at
) -> None:
    with ocp.CheckpointManager(root) as plain:
        for step in STEPS:
            plain.save(step, args=wrap(state_of(step)))


def composite(state: Any) -> Any:
    more = ocp.args.JsonSave({"rate": 0.1})
    return ocp.args.Composite(model=ocp.args.StandardSave(state), more=more)


KINDS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # How it is saved; what Orbax calls the state, and what we call it in saves beside it.
    "StandardSave": (save_plain, "default", "default"),
    "PyTreeSave": (
        lambda root: save_plain(root, ocp.args.PyTreeSave),
        "default",
        "default",
    ),
    "Composite": (lambda root: save_plain(root, composite), "model", "model"),
    "v1": (lambda root: save_v1(root, state_at), "state", "default"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots of plain Orbax of every kind; tests work on copies."""
    folder = tmp_path_factory.mktemp("orbax")
    for kind, (save, _, _) in KINDS.items():
        save(folder / kind)
    return {kind: folder / kind for kind in KINDS}


def files_of(step: Path) -> dict[str, bytes]:
    """All that is below a folder."""
    found = sorted(path for path in step.rglob("*") if path.is_file())
    return {str(path.relative_to(step)): path.read_bytes() for path in found}


def in_item(item: str, args: Any) -> Any:
    return args if item == "default" else ocp.args.Composite(**{item: args})


def out_of(item: str, found: Any) -> Any:
    return found if item == "default" else found[item]


def is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", np.float32)
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def same(got: Any, want: Any) -> None:
    """Values, types, dtypes and shardings are the same, in the same structure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(a) is type(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
        if is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def adopting(root: Path, tables: Any = None, **options: Any) -> cnr.CheckpointManager:
    settings = {"codec": "raw", "policy": cnr.Consecutive(), "adopt": True} | options
    return cnr.CheckpointManager(root, tables=tables, options=cnr.Options(**settings))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_a_root_of_orbax(
    kept: dict[str, Path], kind: str, tmp_path: Path, unsynced: None
) -> None:
    _, theirs, ours = KINDS[kind]
    root = shutil.copytree(kept[kind], tmp_path / "root")
    before = {step: files_of(root / str(step)) for step in STEPS}
    state = state_at(0)
    tables = cnr.find_tables(state, ["user"])
    keep = ocp.checkpoint_managers.LatestN(2)
    asked = in_item(ours, cnr.args.Restore(state))
    with ocp.CheckpointManager(root) as plain:
        wanted: Any = ocp.args.PyTreeRestore(
            state, restore_args=ocp.checkpoint_utils.construct_restore_args(state)
        )
        as_orbax = out_of(theirs, plain.restore(3, args=in_item(theirs, wanted)))
    with adopting(root, tables, preservation_policy=keep) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([*STEPS], 3)
        second = out_of(ours, manager.restore(2, args=asked))
        np.testing.assert_array_equal(second.state["user"], state_at(2)["user"])
        # Of shapes that neither tells; of keys Orbax does not say that they are any.
        shapeless = jax.tree.map(lambda x: x if is_key(x) else object(), state)
        wanted = ocp.args.PyTreeRestore(shapeless, restore_args=wanted.restore_args)
        third = out_of(ours, manager.restore(3, args=in_item(ours, wanted)))
        same(third, as_orbax)
        state, touched = out_of(ours, manager.restore(None, args=asked))
        same(state, as_orbax)
        same(state, state_at(3))
        truth: dict[int, Any] = {}
        for step in (4, 5, 6):
            ids = {"user": jnp.array([step])}
            touched = cnr.record(touched, ids)
            state = {**state, "user": state["user"].at[step].add(1.0)}
            args = in_item(ours, cnr.args.Save(state, touched))
            assert manager.save(step, args=args)
            manager.wait_until_finished()
            truth[step] = np.asarray(state["user"])
            report = manager.last_report
            assert report and report.kind == ("full" if step == 4 else "delta")
            if step == 4:
                # Nothing goes before what takes its place was seen to be durable.
                assert manager.all_steps() == [1, 2, 3, 4]
                assert "plain Orbax" in report.reason
                assert {s: files_of(root / str(s)) for s in STEPS} == before
            else:
                assert manager.all_steps() == [*range(4, step + 1)]
    assert not {"1", "2", "3"} & {path.name for path in root.iterdir()}
    with adopting(root, tables) as manager:
        found = out_of(ours, manager.restore(None, args=asked)).state
        np.testing.assert_array_equal(found["user"], truth[6])
        assert manager.latest_step() == 6


def test_restoring_without_adopting_says_how_to_adopt(kept: dict[str, Path]) -> None:
    for kind in KINDS:
        with (
            cnr.CheckpointManager(kept[kind]) as reader,
            pytest.raises(errors.NoStepError, match=r"hint: .*Options\(adopt=True\)"),
        ):
            reader.restore(None)


@pytest.mark.parametrize("place", ["root/5", "5"])
def test_state_that_orbax_saved_without_a_manager_is_refused_with_the_way_on(
    tmp_path: Path, place: str
) -> None:
    state, path = state_at(5), tmp_path / place
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    before = files_of(path)
    root = tmp_path / "root" if place == "root/5" else path
    tables, new = cnr.find_tables(state, ["user"]), tmp_path / "new"
    hint = rf"StandardCheckpointer\(\)\.restore\('{path}', state\)"
    calls: list[Callable[[], Any]] = [
        lambda: cnr.import_orbax(root, new, tables),
        lambda: cnr.import_orbax(root, new, tables, state=state),
    ]
    for manager in (adopting(root, tables), cnr.CheckpointManager(root)):
        with manager, pytest.raises(errors.NoStepError, match=hint):
            manager.restore(None)
    for call in calls:
        with pytest.raises(errors.NoStepError, match=hint):
            call()
    if root != path:
        with (
            adopting(root) as manager,
            pytest.raises(errors.IntegrityError, match=hint),
        ):
            manager.restore(5)
    assert files_of(path) == before and not new.exists()
    # What the hint says.
    found = ocp.StandardCheckpointer().restore(path, state)
    with cnr.CheckpointManager(new, tables=tables) as manager:
        assert manager.save(5, args=cnr.args.Save(found))


def test_other_items_are_restored_along(kept: dict[str, Path]) -> None:
    args = ocp.args.Composite(
        model=cnr.args.Restore(state_at(0)), more=ocp.args.JsonRestore()
    )
    with adopting(kept["Composite"]) as reader:
        found = reader.restore(None, args=args)
    assert found["more"] == {"rate": 0.1}
    same(found["model"].state, state_at(3))


@pytest.mark.parametrize("kind", ["StandardSave", "v1"])
def test_a_reader_needs_no_state_and_no_tables(
    kept: dict[str, Path], kind: str
) -> None:
    root = kept[kind]
    before = files_of(root)
    with adopting(root) as reader:
        found = reader.restore(2).state
        assert found["layers"][1] == 2 and found["layers"][2] == {}
        np.testing.assert_array_equal(found["user"], state_at(2)["user"])
        # Of 64 bits, which jax would cut off here.
        assert found["w"].dtype == np.float64
        standard = ocp.args.StandardRestore(state_at(0))
        same(reader.restore(None, args=standard), state_at(3))
        if kind == "StandardSave":
            assert reader.item_metadata(2)["user"].shape == (16, 4)
    assert files_of(root) == before


def test_a_state_that_does_not_match_is_told_with_all_differences(
    kept: dict[str, Path],
) -> None:
    state = state_at(0)
    tables = cnr.find_tables(state, ["user"])
    bad = {
        **state,
        "user": state["user"].astype(jnp.bfloat16),
        "layers": [jnp.zeros(3), "text", {}, None],
        "w": np.arange(3),
        "new": jnp.zeros(1),
    }
    del bad["key"]
    with adopting(kept["StandardSave"], tables) as manager:
        with pytest.raises(errors.StateMismatchError) as caught:
            manager.restore(None, args=cnr.args.Restore(bad))
        told = str(caught.value)
        for line in (
            "checkpoint 3, which plain Orbax saved (6 differences)",
            "user: float32 in the checkpoint, bfloat16 in the state",
            "layers/0: shape [2] in the checkpoint, [3] in the state",
            "layers/1: int64[] in the checkpoint, str in the state",
            "w: float64 in the checkpoint, int64 in the state",
            "new: not in the checkpoint",
            "key: not in the state",
            "Restore(..., cast=True)",
        ):
            assert line in told
        some = {"user": bad["user"], "new": jnp.full(1, 7.0)}
        args = cnr.args.Restore(some, partial=True, cast=True)
        got = manager.restore(None, args=args).state
        assert got["user"].dtype == jnp.bfloat16 and got["new"] == 7
        assert got.keys() == some.keys()
        grown = {**state, "user": jnp.zeros((20, 4))}
        for partial in (False, True):
            args = cnr.args.Restore(grown, partial=partial)
            with pytest.raises(
                errors.StateMismatchError, match=r"hint: .*import_orbax"
            ):
                manager.restore(None, args=args)
        with pytest.raises(errors.OptionError, match="import_orbax"):
            ids = {"user": np.arange(16)}
            manager.restore(None, args=cnr.args.Restore(state, ids=ids))


def test_leaves_go_where_orbax_puts_them(kept: dict[str, Path]) -> None:
    skip_below(4)
    root, state = kept["StandardSave"], state_at(0)
    tables = cnr.find_tables(state, ["user"])

    def abstract(leaf: Any) -> Any:
        if getattr(leaf, "shape", ()) != (16, 4):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    asked = jax.tree.map(abstract, state)
    with ocp.CheckpointManager(root) as plain:
        want = plain.restore(3, args=ocp.args.StandardRestore(asked))
    with adopting(root, tables) as manager:
        got, touched = manager.restore(3, args=cnr.args.Restore(asked))
        same(got, want)
        assert len(got["user"].sharding.device_set) == 4
        assert (
            touched.stamps["user"].sharding.device_set
            == got["user"].sharding.device_set
        )
        # On the host a table would be none.
        asked = {**state, "user": np.zeros((16, 4), np.float32)}
        got = manager.restore(3, args=cnr.args.Restore(asked)).state
        assert isinstance(got["user"], jax.Array)
        np.testing.assert_array_equal(got["user"], state_at(3)["user"])


def test_a_leaf_that_its_sharding_cannot_cut_is_named(kept: dict[str, Path]) -> None:
    skip_below(7)
    state = state_at(0)
    mesh = jax.make_mesh((7,), ("x",), devices=jax.devices()[:7])
    user = jax.ShapeDtypeStruct(
        state["user"].shape,
        state["user"].dtype,
        sharding=NamedSharding(mesh, P("x")),
    )
    with adopting(kept["StandardSave"], cnr.find_tables(state, ["user"])) as manager:
        with pytest.raises(errors.StateMismatchError, match=r"user: .* cut evenly"):
            manager.restore(None, args=cnr.args.Restore({**state, "user": user}))


def damage(step: Path) -> None:
    """Makes what Orbax stores unreadable."""
    for path in step.rglob("d/*"):
        path.write_bytes(b"")


@pytest.fixture
def tiny_root(tiny_run: Any, tmp_path: Path) -> tuple[TinyRun, Path]:
    """A run saved by plain Orbax, which remembers what must come back."""
    run, root = tiny_run(), tmp_path / "root"
    with ocp.CheckpointManager(root) as plain:
        for step in STEPS:
            run.train(step)
            plain.save(step, args=ocp.args.StandardSave(run.state))
            run.truth[step] = run.values()
    return run, root


def test_damage_is_passed_over_and_what_is_in_the_way_goes_aside_whole(
    tiny_root: tuple[TinyRun, Path], opened: Any, tmp_path: Path
) -> None:
    run, root = tiny_root
    damage(root / "3")
    held = files_of(root / "3")
    manager = opened(run, root, adopt=True)
    with pytest.raises(errors.IntegrityError, match="restore step 2,") as caught:
        manager.restore(3, args=cnr.args.Restore(run.state))
    assert str(root / "3" / "default") in str(caught.value)
    assert "chain: 3 (orbax)" in str(caught.value)
    run.restore(manager, None)
    run.same(run.state, run.truth[2])
    assert manager.all_steps() == [1, 2]
    run.salt = 1
    # If the save fails, all is as it was.
    run.train(3)
    with inprocess.failing(root, Fault("rename", action="ENOSPC", match="/3")):
        with pytest.raises(errors.SaveError):
            run.save(manager, 3)
            manager.wait_until_finished()
    assert files_of(root / "3") == held
    run.run(manager, [3, 4])
    assert manager.latest_step() == 4
    run.check(manager, 3)
    (aside,) = (path for path in root.iterdir() if "abandoned" in path.name)
    assert files_of(aside) == held
    manager.close()
    # It is older than every step of the run: as soon as one goes, it goes too.
    other = root / f"3.abandoned-g1-{'0' * 32}"  # of which nothing is known
    shutil.copytree(aside, other)
    manager = opened(run, root, adopt=True, max_to_keep=3)
    run.run(manager, [5])
    assert manager.all_steps() == [3, 4, 5]
    assert not aside.exists() and files_of(other) == held


def test_a_rollback_outranks_later_steps_of_orbax(
    tiny_root: tuple[TinyRun, Path], opened: Any
) -> None:
    run, root = tiny_root
    manager = opened(run, root, adopt=True)
    run.restore(manager, 1)
    run.salt = 1
    run.run(manager, [2])
    assert manager.latest_step() == 2
    with adopting(root, run.tables) as again:
        got = again.restore(None, args=cnr.args.Restore(run.state)).state
        run.same(got, run.truth[2])


def test_retention_drops_what_a_rollback_left_before_what_it_went_back_to(
    tiny_root: tuple[TinyRun, Path], opened: Any
) -> None:
    run, root = tiny_root
    manager = opened(run, root, adopt=True, policy=cnr.Full(), max_to_keep=3)
    run.restore(manager, 1)
    run.salt = 1
    run.run(manager, [10, 11])
    # 2 and 3 have higher numbers than 1, but did not lead here.
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"1", "10", "11"}
    assert manager.all_steps() == [1, 10, 11]
    manager.close()
    # Nor do they count among its steps for who knows only what is stored.
    with adopting(root, run.tables) as again:
        assert again.all_steps() == [1, 10, 11]


def test_a_branch_of_which_no_older_step_is_left_has_none_of_those_left_behind(
    tiny_root: tuple[TinyRun, Path], opened: Any
) -> None:
    run, root = tiny_root
    manager = opened(run, root, adopt=True, policy=cnr.Full())
    run.restore(manager, 1)
    run.salt = 1
    run.run(manager, [10])
    manager.delete(1)
    run.run(manager, [11])
    # Numbers alone would take 2 and 3 for older steps of it.
    assert manager.all_steps() == [10, 11]
    assert manager.reload() is None and manager.all_steps() == [10, 11]


def test_who_does_not_ask_for_it_adopts_nothing(
    tiny_root: tuple[TinyRun, Path], opened: Any
) -> None:
    run, root = tiny_root
    with pytest.raises(errors.UsedRootError, match=r"Options\(adopt=True\)"):
        run.save(opened(run, root), 4)
    manager = opened(run, root, adopt=True)
    with pytest.raises(errors.UsedRootError, match=r"manager.restore\(None"):
        run.save(manager, 4)
    run.restore(manager, None)
    run.run(manager, [4, 5])
    plain = opened(run, root)
    assert plain.all_steps() == [4, 5]


def test_what_the_root_holds_is_shown_as_what_it_is(
    tiny_root: tuple[TinyRun, Path], opened: Any
) -> None:
    run, root = tiny_root
    manager = opened(run, root, adopt=True, preservation_policy=Keep(3, 4, 5))
    run.restore(manager, None)
    run.run(manager, [4, 5])
    # What verify does not look into is not taken for lost.
    assert {p.kind for p in manager.verify()} == {"orbax"}
    assert manager.all_steps() == [3, 4, 5]
    kinds = [(each.step, each.kind) for each in cnr.describe(root).steps]
    assert kinds == [(3, "orbax"), (4, "full"), (5, "delta")]
    with pytest.raises(errors.NoStepError, match=r"plain Orbax.*\n.*import_orbax"):
        cnr.read_rows(root, "user", [0], step=3)
    manager.delete(3)
    assert manager.all_steps() == [4, 5]


def test_of_several_states_one_has_to_be_named(tmp_path: Path, unsynced: None) -> None:
    states = {"one": {"a": jnp.ones(3)}, "two": {"a": jnp.zeros(3)}}
    args = {name: ocp.args.StandardSave(state) for name, state in states.items()}
    with ocp.CheckpointManager(tmp_path) as plain:
        plain.save(0, args=ocp.args.Composite(**args))
    with pytest.raises(errors.OptionError, match="items one, two, expected one"):
        adopting(tmp_path)
    options = cnr.Options(adopt=True)
    with cnr.CheckpointManager(tmp_path, options=options, item="two") as reader:
        asked = ocp.args.Composite(two=cnr.args.Restore(states["one"]))
        assert not reader.restore(None, args=asked)["two"].state["a"].any()


def test_a_plain_manager_with_our_handler_adopts_too(
    tiny_root: tuple[TinyRun, Path],
) -> None:
    run, root = tiny_root
    registry = cnr.handler_registry(run.tables, cnr.Options(codec="raw", adopt=True))
    with ocp.CheckpointManager(root, handler_registry=registry) as plain:
        run.restore(plain, 3)
        run.same(run.state, run.truth[3])
        run.run(plain, [4])
    with adopting(root, run.tables) as manager:
        got = manager.restore(None, args=cnr.args.Restore(run.state)).state
        run.same(got, run.truth[4])


# ---- conversion -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Composite", "v1"])
def test_a_step_is_imported_into_a_new_root(
    kept: dict[str, Path], kind: str, tmp_path: Path, unsynced: None
) -> None:
    old, new = kept[kind], tmp_path / "new"
    before = files_of(old)
    exact = cnr.Options(codec="raw")
    report = cnr.import_orbax(old, new, ["user"], options=exact)
    assert (report.step, report.kind, report.tracking) == (3, "full", "fingerprint")
    assert files_of(old) == before
    state = state_at(0)
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(new, tables=tables, options=exact) as manager:
        got, touched = manager.restore(None, args=cnr.args.Restore(state))
        same(got, state_at(3))
        got = {**got, "user": got["user"].at[2].add(1)}
        assert manager.save(4, args=cnr.args.Save(got, touched))
        manager.wait_until_finished()
        report = manager.last_report
        assert report and (report.kind, report.rows) == ("delta", 1)
    np.testing.assert_array_equal(
        cnr.read_rows(new, "user", [3], step=3), state_at(3)["user"][3:4]
    )
    with pytest.raises(errors.UsedRootError, match="expected a folder without"):
        cnr.import_orbax(old, new, ["user"])


def test_an_import_makes_nothing_in_the_root_that_it_reads(
    kept: dict[str, Path], tmp_path: Path, unsynced: None
) -> None:
    old = shutil.copytree(kept["StandardSave"], tmp_path / "old")
    (tmp_path / "link").symlink_to(old)
    (tmp_path / "below").symlink_to(old / "new")
    before = files_of(old)
    with pytest.raises(errors.UsedRootError):
        cnr.import_orbax(old, tmp_path / "link", ["user"])
    for new in (
        old / "new",
        old / "3" / "new",
        tmp_path / "link" / "a" / "b",
        tmp_path / "below",
        f"file://{old}/new",
        tmp_path / "beside" / ".." / "old" / "new",
    ):
        with pytest.raises(errors.OptionError, match="lies in the root") as caught:
            cnr.import_orbax(old, new, ["user"])
        assert caught.value.kind == "no_target"
    with pytest.raises(errors.OptionError, match="lies in the root"):
        cnr.import_orbax(tmp_path / "link", old / "new", ["user"])
    assert files_of(old) == before and not (old / "new").exists()
    assert cnr.import_orbax(old, tmp_path / "older", ["user"]).step == 3


def test_an_import_is_of_steps_of_orbax(
    kept: dict[str, Path], tmp_path: Path, unsynced: None
) -> None:
    old = shutil.copytree(kept["StandardSave"], tmp_path / "old")
    ours, new = tmp_path / "ours", tmp_path / "new"
    state = state_at(0)
    tables = cnr.find_tables(state, ["user"])
    for root, step in ((ours, 0), (old, 4)):
        with adopting(root, tables) as manager:
            if root == old:
                manager.restore(None, args=cnr.args.Restore(state))
            manager.save(step, args=cnr.args.Save(state))
    for root, step in ((ours, None), (ours, 0), (old, None), (old, 4)):
        with pytest.raises(errors.OptionError, match="is a checkpoint of cnr_jax"):
            cnr.import_orbax(root, new, tables, step=step)
    with pytest.raises(errors.NoStepError, match=f"its root is {old}"):
        cnr.import_orbax(old / "3", new, tables)
    assert not new.exists()
    assert cnr.import_orbax(old, new, tables, step=3).step == 3


def test_an_import_takes_the_state_and_the_step_that_are_given(
    kept: dict[str, Path], tmp_path: Path, unsynced: None
) -> None:
    old, state = kept["StandardSave"], state_at(0)
    options = cnr.Options(codec="raw", tracking="recorded")
    tables = cnr.find_tables(state, ["user"])
    report = cnr.import_orbax(
        old, tmp_path / "a", tables, step=1, state=state, options=options
    )
    assert (report.step, report.tracking) == (1, "recorded")
    with pytest.raises(errors.NoStepError):
        cnr.import_orbax(old, tmp_path / "b", ["user"], step=9)
    with pytest.raises(errors.TableError):
        cnr.import_orbax(old, tmp_path / "b", ["item"])
    with pytest.raises(errors.StateMismatchError):
        cnr.import_orbax(old, tmp_path / "b", ["user"], state={"user": state["user"]})
    with pytest.raises(errors.NoStepError):
        cnr.import_orbax(tmp_path / "none", tmp_path / "b", ["user"])
    assert not (tmp_path / "b").exists()
    named = ocp.CheckpointManagerOptions(
        step_prefix="ck", step_format_fixed_length=4, max_to_keep=1
    )
    other = tmp_path / "named"
    other.mkdir()
    for step in (1, 2):
        shutil.copytree(old / str(step), other / f"ck_000{step}")
    before = files_of(other)
    report = cnr.import_orbax(
        other, tmp_path / "of_named", ["user"], options=options, orbax_options=named
    )
    assert report.step == 2 and files_of(other) == before
    assert cnr.describe(tmp_path / "of_named").steps[0].step == 2
    broken = shutil.copytree(old, tmp_path / "broken")
    damage(broken / "3")
    assert cnr.import_orbax(broken, tmp_path / "c", ["user"]).step == 2


def test_a_reader_of_an_adopted_root_is_not_alarmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"user": jnp.ones((8, 4))}
    with ocp.CheckpointManager(tmp_path) as plain:
        plain.save(1, args=ocp.args.StandardSave(state))
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(adopt=True, codec="raw")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.restore(None, args=cnr.args.Restore(state))
        manager.save(2, args=cnr.args.Save(state))
    caplog.clear()
    with (
        caplog.at_level("INFO", "cnr_jax"),
        cnr.CheckpointManager(tmp_path) as reader,
    ):
        assert reader.all_steps() == [2]
        reader.restore(None, args=cnr.args.Restore(state))
    told = [r for r in caplog.records if "plain Orbax saved it" in r.getMessage()]
    assert told and not [r for r in caplog.records if r.levelname == "WARNING"]


def test_keys_of_one_kind_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    rows = jnp.ones((8, 2))
    keys = {
        "legacy": jax.random.PRNGKey(3),
        "new": jax.random.key(3),
        "rbg": jax.random.key(3, impl="rbg"),
        "urbg": jax.random.key(3, impl="unsafe_rbg"),
    }
    tables = cnr.find_tables({"user": rows, "rng": keys["new"]}, ["user"])
    for saved, key in keys.items():
        with ocp.CheckpointManager(tmp_path / saved) as plain:
            plain.save(1, args=ocp.args.StandardSave({"user": rows, "rng": key}))
        options = cnr.Options(adopt=True)
        with cnr.CheckpointManager(
            tmp_path / saved, tables=tables, options=options
        ) as manager:
            for asked, given in keys.items():
                for rng in (given, jax.ShapeDtypeStruct(given.shape, given.dtype)):
                    args = cnr.args.Restore({"user": rows, "rng": rng})
                    if asked == saved:
                        got = manager.restore(1, args=args).state["rng"]
                        assert got.dtype == key.dtype and bool((got == key).all())
                        continue
                    with pytest.raises(errors.StateMismatchError, match="rng: "):
                        manager.restore(1, args=args)
