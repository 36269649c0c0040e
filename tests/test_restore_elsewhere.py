"""Restoring into a state, an optimizer or devices other than those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax import errors


def make_state(optimizer: Any) -> dict[str, Any]:
    params = {
        "user": jnp.arange(32.0).reshape(16, 2),
        "head": {"w": jnp.ones(4), "old": jnp.full(2, 2.0)},
    }
    key = jax.random.key(7)
    return {"params": params, "opt_state": optimizer.init(params), "key": key}


def save(root: Path, state: Any) -> None:
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(codec="raw")
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        manager.save(0, args=cnr.args.Save(state, touched))


def test_going_on_with_an_optimizer_that_moves_other_rows_is_audited(
    tmp_path: Path,
) -> None:
    save(tmp_path, make_state(optax.sgd(0.1)))
    state = make_state(optax.adam(0.1))
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        args = cnr.args.Restore(state, partial=True)
        state, touched = manager.restore(0, args=args)
        manager.save(1, args=cnr.args.Save(state, touched))
        state["params"]["user"] = state["params"]["user"].at[3].add(1)
        with pytest.raises(
            errors.AuditError, match="opt_state/0/mu of ScaleByAdamState"
        ):
            manager.save(2, args=cnr.args.Save(state, touched))
        assert manager.all_steps() == [0, 1]


def test_a_changed_dense_structure_takes_what_both_have(tmp_path: Path) -> None:
    saved = make_state(optax.adagrad(0.1))
    save(tmp_path, saved)
    state = make_state(optax.sgd(0.1))
    state["params"]["head"] = {"w": jnp.zeros(4), "new": jnp.full(3, 5.0)}
    state["params"]["user"] = jnp.zeros((16, 2))
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        args = cnr.args.Restore(state, partial=True)
        got = manager.restore(0, args=args).state
    np.testing.assert_array_equal(got["params"]["user"], saved["params"]["user"])
    np.testing.assert_array_equal(got["params"]["head"]["w"], np.ones(4))
    np.testing.assert_array_equal(got["params"]["head"]["new"], np.full(3, 5.0))
    assert got["key"] == saved["key"]


def test_inspection_and_shapes_without_shardings_come_back_on_one_device(
    tmp_path: Path,
) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    state = make_state(optax.adagrad(0.1))
    everywhere = jax.device_put(state, NamedSharding(mesh, P()))
    save(tmp_path, everywhere)
    tables = cnr.find_tables(state, ["user"])
    abstract = jax.eval_shape(lambda: make_state(optax.adagrad(0.1)))
    with cnr.CheckpointManager(tmp_path) as manager:
        seen = manager.restore(0).state
        args = cnr.args.Restore(abstract, tables=tables)
        shaped = manager.restore(0, args=args).state
    one = SingleDeviceSharding(jax.devices()[0])
    for leaf in jax.tree.leaves((seen, shaped)):
        assert leaf.sharding == one
    assert shaped["key"] == state["key"] == seen["key"]


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("text", jnp.ones(())),
        (jnp.ones(()), "text"),
        (jnp.full((), 2.5), jnp.ones((), jnp.int32)),
        (1.5, 1),
        (jnp.ones(()), jax.random.key(0)),
        (jax.random.key(0), jnp.ones(())),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
    ],
)
def test_leaves_of_another_kind_do_not_match(
    saved: Any, wanted: Any, tmp_path: Path
) -> None:
    """Orbax would convert them, or fail with an error that names no leaf."""
    state = {"user": jnp.ones((4, 2)), "x": saved}
    save(tmp_path, state)
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        with pytest.raises(errors.StateMismatchError, match=r"x: .* in the checkpoint"):
            manager.restore(0, args=cnr.args.Restore({**state, "x": wanted}))


def test_leaves_that_their_shardings_cannot_cut_are_all_named(tmp_path: Path) -> None:
    """Jax would name no leaf, after the rows of the others were read."""
    devices = np.array(jax.devices()[:4])
    mesh = Mesh(devices.reshape(2, 2), ("a", "b"))
    state = {"user": jnp.ones((6, 3)), "w": jnp.ones(5), "head": jnp.ones(4)}
    specs = {"user": P(("a", "b")), "w": P("b"), "head": P("a")}
    save(tmp_path, state)
    tables = cnr.find_tables(state, ["user"])

    def shaped(specs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, specs[name])
            )
            for name, leaf in state.items()
        }

    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        with pytest.raises(errors.StateMismatchError) as caught:
            manager.restore(0, args=cnr.args.Restore(shaped(specs)))
        even = shaped({"user": P("a"), "w": P(), "head": P("a")})
        got = manager.restore(0, args=cnr.args.Restore(even)).state
    lines = str(caught.value).splitlines()
    assert "(2 differences)" in lines[0]
    over = "over {'a': 2, 'b': 2}"
    for line, told in zip(
        lines[1:3], ("user: shape [6, 3]", "w: shape [5]"), strict=True
    ):
        assert line.strip().startswith(f"{told} cannot be cut evenly by its sharding,")
        assert line.endswith(over)
    assert "hint: pass a sharding whose axes divide the shape" in lines[3]
    assert len(lines) == 4
    assert got["user"].sharding == even["user"].sharding


@pytest.mark.parametrize("step", [0, None])
@pytest.mark.parametrize("own", [None, "state"])
def test_another_root_calls_its_state_otherwise(
    tmp_path: Path, unsynced: None, own: str | None, step: int | None
) -> None:
    """Which the arguments need not say, nor that it was saved by plain Orbax for all they know."""
    state = make_state(optax.sgd(0.1))
    tables = cnr.find_tables(state, ["user"])
    options = cnr.Options(codec="raw")
    old, both = tmp_path / "old", ocp.args.Composite
    with cnr.CheckpointManager(old, tables=tables, options=options) as manager:
        manager.save(
            0, args=both(model=cnr.args.Save(state), more=ocp.args.JsonSave({"a": 1}))
        )
    abstract = jax.eval_shape(lambda: state)
    asked, plain = cnr.args.Restore(abstract), ocp.args.StandardRestore(abstract)
    name = own or "default"
    wanted = [
        (asked, lambda found: found.state),
        (None if own is None else asked, lambda found: found.state),
        (plain, lambda found: found),
        (both(model=asked), lambda found: found["model"].state),
        (both(model=plain), lambda found: found["model"]),
        (both(**{name: asked}), lambda found: found[name].state),
        (both(**{name: plain}), lambda found: found[name]),
    ]
    for number, (args, state_in) in enumerate(wanted):
        new = tmp_path / f"new{number}"
        with cnr.CheckpointManager(
            new, tables=tables, options=options, item=own
        ) as manager:
            found = state_in(manager.restore(step, directory=old, args=args))
            np.testing.assert_array_equal(
                found["params"]["user"], state["params"]["user"]
            )
            assert manager.all_steps() == []


def test_an_empty_array_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = {"user": jnp.ones((4, 2)), "x": jnp.zeros((0, 3))}
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        touched = cnr.init_touched(state, tables)
        with pytest.raises(errors.StateMismatchError, match=r"leaf x .*\n.*\[0, 3\]"):
            manager.save(0, args=cnr.args.Save(state, touched))
    assert list(tmp_path.iterdir()) == []


def test_another_root_may_name_its_items_where_this_one_does_not(
    tmp_path: Path,
) -> None:
    state = make_state(optax.sgd(0.1))
    tables, options = cnr.find_tables(state, ["user"]), cnr.Options(codec="raw")
    one, many = cnr.args.Restore(state), {"model": cnr.args.Restore(state)}
    save(tmp_path / "one", state)

    def opened(name: str) -> cnr.CheckpointManager:
        return cnr.CheckpointManager(tmp_path / name, tables=tables, options=options)

    with opened("many") as manager:
        state, touched = manager.restore(0, directory=tmp_path / "one", args=one)
        own = {"model": cnr.args.Save(state, touched), "more": ocp.args.JsonSave({})}
        manager.save(1, args=ocp.args.Composite(**own))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
    asked = ocp.args.Composite(**many)
    with opened("new") as manager:
        got = manager.restore(1, directory=tmp_path / "many", args=asked)
        manager.save(2, args=cnr.args.Save(*got["model"]))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    with opened("one") as manager:
        manager.restore(0, args=one)
        manager.restore(1, directory=tmp_path / "many", args=asked)
        touched = manager.restore(0, args=one).touched
        manager.save(1, args=cnr.args.Save(state, touched))


@pytest.mark.parametrize("args", [cnr.args.Restore, ocp.args.StandardRestore])
@pytest.mark.parametrize("value", [ocp.PLACEHOLDER, "text"])
def test_a_table_without_a_shape_in_the_state_is_named(
    tmp_path: Path, args: Any, value: Any
) -> None:
    state = make_state(optax.sgd(0.1))
    save(tmp_path, state)
    tables = cnr.find_tables(state, ["user"])
    state["params"]["user"] = value
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        with pytest.raises(errors.StateMismatchError) as error:
            manager.restore(0, args=args(state))
    assert "params/user: shape [16, 2] in the checkpoint, and" in str(error.value)
