"""Managers without tables: they read some of a state, in any sharding, and change nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat import steps
from cnr_jax.checkpointer.orbax_compat.items import Items
from cnr_jax.testing import inprocess

from .conftest import flip

USER, ACC = ("params", "user", "embedding"), ("acc", "user", "embedding")


@pytest.fixture
def saved(tiny_run: Any, opened: Any) -> Any:
    """A run with a chain of three steps, in few bits, and the values that come back of each."""
    run = tiny_run()
    manager = opened(run, codec="adaptive", bits=4)
    run.run(manager, range(3))
    for step in range(3):
        with cnr.CheckpointManager(manager.directory, tables=run.tables) as whole:
            state = whole.restore(step, args=cnr.args.Restore(run.state)).state
        run.truth[step] = run.values(state)
    manager.close()
    run.root = Path(manager.directory)
    return run


@pytest.fixture
def reader(saved: Any) -> Iterator[cnr.CheckpointManager]:
    with cnr.CheckpointManager(saved.root) as manager:
        yield manager


def only(path: tuple[str, ...], value: Any) -> Any:
    """A tree of one leaf."""
    for key in reversed(path):
        value = {key: value}
    return value


def key_of(path: tuple[str, ...]) -> str:
    return "".join(f"['{part}']" for part in path)


def sharding(*spec: Any) -> NamedSharding:
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    return NamedSharding(mesh, P(*spec))


@pytest.mark.parametrize(
    "where",
    [
        None,
        SingleDeviceSharding(jax.devices()[5]),
        sharding(("a", "b"), None),
        sharding("a", "b"),
    ],
    ids=["nowhere", "one", "rows", "both"],
)
def test_one_table_comes_without_its_slots_in_any_sharding(
    saved: Any, reader: Any, where: Any
) -> None:
    wanted = only(USER, jax.ShapeDtypeStruct((64, 4), np.float32, sharding=where))
    for step in (2, 0, None):
        args = cnr.args.Restore(wanted, partial=True)
        found = reader.restore(step, args=args)
        array = found.state["params"]["user"]["embedding"]
        assert jax.tree.structure(found.state) == jax.tree.structure(wanted)
        assert where is None or array.sharding == where
        want = saved.truth[2 if step is None else step]
        np.testing.assert_array_equal(array, want[key_of(USER)])
        assert set(found.touched.stamps) == {"user"}


def test_leaves_come_alone_slots_and_dense_ones_too(saved: Any, reader: Any) -> None:
    slot = only(ACC, jax.ShapeDtypeStruct((64,), np.float32))
    wanted = {**slot, "w": jax.ShapeDtypeStruct((3,), np.float32)}
    found = reader.restore(1, args=cnr.args.Restore(wanted, partial=True)).state
    np.testing.assert_array_equal(
        found["acc"]["user"]["embedding"], saved.truth[1][key_of(ACC)]
    )
    np.testing.assert_array_equal(found["w"], saved.truth[1]["['w']"])
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


def test_the_whole_state_comes_back_where_it_was(saved: Any, reader: Any) -> None:
    for given in (saved.state, jax.eval_shape(lambda: saved.state)):
        found = reader.restore(2, args=cnr.args.Restore(given)).state
        saved.same(found, saved.truth[2])


def test_a_plain_reader_of_orbax_needs_no_tables_either(saved: Any) -> None:
    wanted = only(USER, jax.ShapeDtypeStruct((64, 4), np.float32))
    registry = cnr.handler_registry(None)
    with ocp.CheckpointManager(saved.root, handler_registry=registry) as plain:
        found = plain.restore(2, args=cnr.args.Restore(wanted, partial=True)).state
    got = found["params"]["user"]["embedding"]
    np.testing.assert_array_equal(got, saved.truth[2][key_of(USER)])


def test_rows_come_with_or_without_their_padding(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(16, 4)
    values[10:] = 0
    state = {"user": jnp.asarray(values)}
    tables = cnr.find_tables(state, {"user": cnr.TableSpec(rows=10)})
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    with cnr.CheckpointManager(tmp_path) as reader:
        for rows in (10, 16):
            wanted = {"user": jax.ShapeDtypeStruct((rows, 4), np.float32)}
            found = reader.restore(0, args=cnr.args.Restore(wanted)).state
            np.testing.assert_array_equal(found["user"], values[:rows])
        wrong = {"user": jax.ShapeDtypeStruct((12, 4), np.float32)}
        with pytest.raises(cnr.errors.StateMismatchError, match="12 rows"):
            reader.restore(0, args=cnr.args.Restore(wrong, partial=True))


def test_rows_of_another_layout_come_as_they_are_stored(tmp_path: Path) -> None:
    layout = cnr.ModSharded(shards=4, rows_per_shard=3)
    state = {"user": jnp.arange(48.0).reshape(12, 4)}
    spec = cnr.TableSpec(rows=10, layout=layout)
    tables = cnr.find_tables(state, {"user": spec})
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(tmp_path, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state))
    with cnr.CheckpointManager(tmp_path) as reader:
        wanted = {"user": jax.ShapeDtypeStruct((12, 4), np.float32)}
        found = reader.restore(0, args=cnr.args.Restore(wanted)).state
        stored = layout.to_physical(np.arange(10))
        want = np.asarray(state["user"])[stored]
        np.testing.assert_array_equal(np.asarray(found["user"])[stored], want)
        logical = {"user": jax.ShapeDtypeStruct((10, 4), np.float32)}
        with pytest.raises(cnr.errors.StateMismatchError, match="10 rows"):
            reader.restore(0, args=cnr.args.Restore(logical))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (only(USER, 0.0), "params/user/embedding: rows of a table"),
        (only(USER, jax.ShapeDtypeStruct((64, 5), np.float32)), r"\[4\].*\[5\]"),
        ({"nowhere": jax.ShapeDtypeStruct((3,), np.float32)}, "nowhere: not in the"),
    ],
    ids=["number", "width", "path"],
)
def test_what_does_not_match_is_named(reader: Any, wanted: Any, said: str) -> None:
    with pytest.raises(cnr.errors.StateMismatchError, match=said):
        reader.restore(2, args=cnr.args.Restore(wanted, partial=True))


def test_no_dense_file_is_read_before_the_state_fits_nor_for_tables_alone(
    saved: Any, reader: Any
) -> None:
    dense = [path for path in (saved.root / "2/default/dense").rglob("*")]
    for path in dense:
        if path.is_file():
            flip(path)
    wanted = only(USER, jax.ShapeDtypeStruct((64, 4), np.float32))
    found = reader.restore(2, args=cnr.args.Restore(wanted, partial=True)).state
    np.testing.assert_array_equal(
        found["params"]["user"]["embedding"], saved.truth[2][key_of(USER)]
    )
    with pytest.raises(cnr.errors.StateMismatchError):
        reader.restore(2, args=cnr.args.Restore(wanted))
    wanted["w"] = jax.ShapeDtypeStruct((3,), np.float32)
    for args in (cnr.args.Restore(wanted, partial=True), cnr.args.Restore()):
        with pytest.raises(cnr.errors.IntegrityError):
            reader.restore(2, args=args)


def test_shapes_of_a_step_that_is_not_there_are_refused(reader: Any) -> None:
    with pytest.raises(cnr.errors.NoStepError, match="step 9 does not exist in"):
        reader.item_metadata(9)


def tree(root: Path) -> dict[str, tuple[int, ...]]:
    """Every file and folder of a root: its size, and when it and what is in it was changed."""
    paths = [root, *sorted(root.rglob("*"))]
    looks = {str(path): path.stat() for path in paths}
    return {p: (s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in looks.items()}


def test_a_reader_never_creates_or_changes_anything(saved: Any) -> None:
    paths = [saved.root, *saved.root.rglob("*")]
    for path in paths:
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    before = tree(saved.root)
    try:
        with inprocess.watching(saved.root) as changes:
            with cnr.CheckpointManager(saved.root) as reader:
                wanted = only(USER, jax.ShapeDtypeStruct((64, 4), np.float32))
                reader.restore(None, args=cnr.args.Restore(wanted, partial=True))
                reader.restore(1)
                reader.item_metadata(2)
                reader.metadata(2)
                reader.reload()
                assert reader.all_steps(read=True) == [0, 1, 2]
                assert reader.latest_step() == 2
                assert reader.verify() == ()
                with pytest.raises(cnr.errors.NoStepError):
                    reader.restore(7)
        assert changes == []
        assert tree(saved.root) == before
    finally:
        for path in paths:
            os.chmod(path, 0o755 if path.is_dir() else 0o644)


def shapes(found: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), found)


def test_metadata_are_those_that_orbax_tells_of_its_own(
    tmp_path: Path, unsynced: None
) -> None:
    state = {
        "user": jnp.ones((16, 4), jnp.bfloat16),
        "opt": [{"mu": jnp.ones((16, 4))}, jnp.int32(4)],
        "step": 3,
        "rate": 0.5,
    }
    with ocp.CheckpointManager(tmp_path / "orbax") as theirs:
        theirs.save(0, args=ocp.args.StandardSave(state))
        theirs.wait_until_finished()
        want = shapes(theirs.item_metadata(0).tree)
    state |= {"key": jax.random.key(0, impl="rbg"), "name": "ours"}
    tables = cnr.find_tables(state, ["user"])
    # Made before there is a step: what its item is called is not known yet.
    (tmp_path / "ours").mkdir()
    early = cnr.CheckpointManager(tmp_path / "ours")
    with cnr.CheckpointManager(tmp_path / "ours", tables=tables) as manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        mine = manager.item_metadata(0)
    early.reload()
    with early, cnr.CheckpointManager(tmp_path / "ours") as reader:
        for found in (mine, reader.item_metadata(0), early.item_metadata(0)):
            assert isinstance(found.pop("name"), ocp.metadata.StringMetadata)
            key = found.pop("key")
            assert (key.shape, key.dtype) == ((), state["key"].dtype)
            # Lists are dicts by index, as in what `Restore()` gives.
            found["opt"] = [found["opt"]["0"], found["opt"]["1"]]
            assert shapes(found) == want
        asked = {"user": jax.ShapeDtypeStruct((16, 4), found["user"].dtype)}
        got = reader.restore(0, args=cnr.args.Restore(asked, partial=True)).state
        np.testing.assert_array_equal(got["user"], np.ones((16, 4)))


def test_metadata_of_a_state_beside_other_items(tmp_path: Path, unsynced: None) -> None:
    state = {"user": jnp.ones((16, 4))}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        items = {"state": cnr.args.Save(state), "more": ocp.args.JsonSave({"a": 1})}
        manager.save(0, args=ocp.args.Composite(**items))
    with cnr.CheckpointManager(tmp_path) as reader:
        found = reader.item_metadata(0)
        assert found["state"]["user"].shape == (16, 4)
        restore = ocp.args.Composite(state=cnr.args.Restore(state))
        np.testing.assert_array_equal(
            reader.restore(0, args=restore)["state"].state["user"], state["user"]
        )


def taken_away(root: Path, step: int) -> None:
    """As retention and rollbacks do it, before anything of the step is deleted."""
    if (root / str(step)).exists():
        (root / str(step)).rename(root / f"{step}.removed-00")


@pytest.mark.parametrize(
    ("place", "call"), [("rows.p00000", "open_read"), ("dense/", "open_read")]
)
def test_a_step_that_is_deleted_while_it_is_read_is_gone_and_not_damaged(
    saved: Any, storage: Any, place: str, call: str
) -> None:
    root, of_two = saved.root, f"/root/2/default/{place}"
    with cnr.CheckpointManager(root) as reader:
        with storage.calling(lambda _: taken_away(root, 2), of_two, call):
            with pytest.raises(errors.NoStepError, match="step 2 is not in") as caught:
                reader.restore(2, args=cnr.args.Restore(saved.state))
        assert caught.value.kind == "step_deleted"
        # The same manager reads on, although its first restore has failed.
        got = reader.restore(1, args=cnr.args.Restore(saved.state)).state
        saved.same(got, saved.truth[1])
        with pytest.raises(errors.NoStepError) as caught:
            reader.restore(2, args=cnr.args.Restore(saved.state))
        assert caught.value.kind == "step_deleted"


@pytest.mark.parametrize("call", ["metadata", "item_metadata", "restore"])
def test_a_listed_step_that_is_deleted_is_said_to_be_gone(
    saved: Any, call: str
) -> None:
    with cnr.CheckpointManager(saved.root) as reader:
        assert reader.latest_step() == 2
        taken_away(saved.root, 2)
        with pytest.raises(errors.NoStepError, match="step 2 is not in") as caught:
            getattr(reader, call)(2)
        assert caught.value.kind == "step_deleted"
        # Once it has been read that it is not there, it is a step like any that never was.
        reader.reload()
        with pytest.raises(errors.NoStepError) as caught:
            getattr(reader, call)(2)
        assert caught.value.kind == "no_step"
        assert "steps: 0, 1\n  that can be restored: 0, 1\n" in str(caught.value)


def test_steps_may_go_and_come_while_a_root_is_read(
    saved: Any, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = "/root/2/default/manifest.json"
    with storage.calling(lambda _: taken_away(saved.root, 2), manifest, "open_read"):
        reader = cnr.CheckpointManager(saved.root)
    with reader:
        assert reader.all_steps() == [0, 1]
        (saved.root / "2.removed-00").rename(saved.root / "2")
        reader.reload()
        assert reader.all_steps() == [0, 1, 2]
    assert "cannot be restored" not in caplog.text


def test_orbax_leaves_out_a_step_that_is_deleted_while_its_time_is_read(
    saved: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def deleted(step: Path) -> None:
        if step.name == "2":
            taken_away(saved.root, 2)

    with cnr.CheckpointManager(saved.root) as reader:
        monkeypatch.setattr(steps, "refuse_pipes", deleted)
        found = steps.Steps(reader.directory, ocp.CheckpointManagerOptions())
        found.reload()
    assert found.numbers() == [0, 1]
    assert "goes without" not in caplog.text


def test_a_step_that_never_was_cannot_be_deleted(saved: Any, opened: Any) -> None:
    with opened(saved) as manager:
        with pytest.raises(errors.NoStepError, match="step 77 does not exist in"):
            manager.delete(77)


def test_a_step_that_is_deleted_before_orbax_looks_at_it_tells_nothing_of_others(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: Any = Items.restore

    def restore(items: Items, folder: Any, args: Any, **others: Any) -> Any:
        if folder.name == "2":
            taken_away(saved.root, 2)
        return theirs(items, folder, args, **others)

    monkeypatch.setattr(Items, "restore", restore)
    with cnr.CheckpointManager(saved.root) as reader:
        with pytest.raises(errors.NoStepError) as caught:
            reader.restore(2, args=cnr.args.Restore(saved.state))
        assert caught.value.kind == "step_deleted"
        # Of a folder that is not there Orbax would take all steps for such as hold items.
        got = reader.restore(1, args=cnr.args.Restore(saved.state)).state
        saved.same(got, saved.truth[1])


def test_who_wants_the_newest_step_takes_the_one_that_came_meanwhile(
    saved: Any, opened: Any, storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    root = saved.root
    with cnr.CheckpointManager(root) as reader:
        with opened(saved) as writer:
            saved.restore(writer, 2)
            saved.run(writer, [3])

        def replaced(_: Any) -> None:
            taken_away(root, 2)

        with storage.calling(replaced, "/root/2/default/rows.p00000", "open_read"):
            found = reader.restore(None, args=cnr.args.Restore(saved.state))
        # Step 3, which the reader did not know, rests on 2: none of it can be restored.
        assert found.report.step == 1 and found.report.passed_over == ()
        saved.same(found.state, saved.truth[1])
        assert reader.all_steps() == [0, 1]
        (root / "2.removed-00").rename(root / "2")
        assert reader.all_steps(read=True) == [0, 1, 2, 3]


def test_a_reader_finds_steps_that_replace_those_it_knew(
    tiny_run: Any, opened: Any, tmp_path: Path
) -> None:
    run = tiny_run()
    with opened(run, policy=cnr.Full(), max_to_keep=1) as writer:
        run.run(writer, [0])
        with cnr.CheckpointManager(tmp_path / "root") as reader:
            run.run(writer, [1, 2])
            assert reader.all_steps() == [0], "as it was when it was opened"
            found = reader.restore(None, args=cnr.args.Restore(run.state))
            run.same(found.state, run.truth[2])
            # What it lists then can be asked for.
            assert reader.all_steps() == [2] == [reader.latest_step()]
            again = reader.restore(2, args=cnr.args.Restore(run.state))
            run.same(again.state, run.truth[2])
            writer.delete(2)
            with pytest.raises(errors.NoStepError, match="no step in"):
                reader.restore(None, args=cnr.args.Restore(run.state))


@pytest.mark.parametrize("ask", ["item_metadata", "metadata"])
def test_a_step_deleted_while_its_metadata_are_read_is_no_error_in_the_log(
    saved: Any, reader: Any, caplog: pytest.LogCaptureFixture, ask: str
) -> None:
    assert reader.latest_step() == 2

    def delete(call: inprocess.Call) -> None:
        # Orbax has seen that the file is there, and is about to read it.
        if call.call == "open_read" and call.path.endswith("/2/_CHECKPOINT_METADATA"):
            (saved.root / "2").rename(saved.root.parent / "deleted")

    with caplog.at_level(logging.WARNING):
        with inprocess.watching(saved.root, before=delete, looks=True):
            with pytest.raises(errors.NoStepError):
                getattr(reader, ask)(2)
    assert not (saved.root / "2").exists()
    assert [each for each in caplog.records if "etadata" in each.getMessage()] == []


def test_metadata_that_cannot_be_read_are_an_error_in_the_log(
    saved: Any, reader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (saved.root / "2" / "_CHECKPOINT_METADATA").write_text("{")
    reader.metadata(2)
    assert "Failed to json parse Metadata file" in caplog.text
