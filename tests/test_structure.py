"""A save whose dense leaves are not as those that the tables were found with is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import cnr_jax as cnr
from cnr_jax.errors import StateMismatchError


def state_of_many() -> dict[str, Any]:
    return {
        "user": jnp.ones((8, 2)),
        "w": jnp.ones(3),
        "half": jnp.ones(3, jnp.bfloat16),
        "count": 3,
        "rate": 0.5,
        "on": True,
        "note": "a",
        "key": jax.random.key(0),
        "host": np.zeros(2),
        "none": None,
    }


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"w": jnp.ones(4)}, r"w: float32\[4\] here, was float32\[3\]"),
    "another dtype": ({"half": jnp.ones(3)}, r"half: float32\[3\] here, was bfloat16"),
    "an integer": ({"w": jnp.ones(3, jnp.int32)}, r"w: int32\[3\] here, was float32"),
    "a number for an array": ({"w": 1.0}, r"w: float here, was float32\[3\]"),
    "a fraction": ({"count": 3.5}, "count: float here, was int"),
    "an array of fractions": (
        {"count": jnp.ones(())},
        r"count: float32\[\] here, was int",
    ),
    "a string for a number": ({"rate": "1"}, "rate: str here, was float"),
    "a number for a string": ({"note": 1}, "note: int here, was str"),
    "another key": (
        {"key": jax.random.key(0, impl="rbg")},
        "key: key<rbg>.* was key<fry>",
    ),
    "bits of a key": ({"key": jax.random.key_data(jax.random.key(0))}, "key: uint32"),
    "one more": ({"more": jnp.ones(2)}, r"more: float32\[2\] here, was not"),
    "none before": (
        {"none": jnp.ones(2)},
        r"none: float32\[2\] here, was not in the state",
    ),
    "none now": ({"w": None}, r"w: not in this state, was float32\[3\]"),
    "a tree for a leaf": (
        {"w": {"a": jnp.ones(3)}},
        r"w/a: float32\[3\] here, was not.*\n  w: not in this state",
    ),
}


@pytest.fixture(scope="module", params=["manager", "orbax"])
def saving(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A manager with one save, of ours or of Orbax."""
    root = tmp_path_factory.mktemp("run")
    state = state_of_many()
    # As a program does that makes its state anew; numbers are arrays there.
    abstract = {**jax.eval_shape(lambda: {**state, "note": 0}), "note": "a"}
    tables = cnr.find_tables(
        state if request.param == "manager" else abstract, ["user"]
    )
    if request.param == "manager":
        manager: Any = cnr.CheckpointManager(root, tables=tables)
    else:
        registry = cnr.handler_registry(tables)
        policy = registry.preservation_policy()
        options = ocp.CheckpointManagerOptions(preservation_policy=policy)
        manager = ocp.CheckpointManager(
            root, options=options, handler_registry=registry
        )
    with manager:
        manager.save(0, args=cnr.args.Save(state))
        manager.wait_until_finished()
        yield manager


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_of_another_structure_is_refused_and_nothing_written(
    saving: Any, change: str
) -> None:
    changed, message = CHANGES[change]
    ours = isinstance(saving, cnr.CheckpointManager)
    if not ours:
        for number, array in (("int", "int32"), ("float", "float32")):
            message = re.sub(f"was {number}$", f"was {array}", message)
    root = Path(saving.directory)
    before = sorted(root.rglob("*"))
    with pytest.raises(StateMismatchError, match=message):
        saving.save(1, args=cnr.args.Save({**state_of_many(), **changed}))
    saving.wait_until_finished()
    assert saving.all_steps() == [0]
    # Orbax has made the folder of the step before it asks for the state.
    assert not ours or sorted(root.rglob("*")) == before


def test_all_differences_are_told_and_leaves_that_are_missing(tmp_path: Path) -> None:
    state = state_of_many()
    with cnr.CheckpointManager(
        tmp_path, tables=cnr.find_tables(state, ["user"])
    ) as manager:
        del state["w"], state["note"]
        with pytest.raises(StateMismatchError, match="2 differences") as raised:
            manager.save(0, args=cnr.args.Save(state))
        assert "w: not in this state" in str(raised.value)
        assert "note: not in this state" in str(raised.value)
        assert not manager.all_steps()


def test_what_a_jitted_step_makes_of_a_leaf_is_the_same_leaf(tmp_path: Path) -> None:
    state = state_of_many()
    numbers = {k: v for k, v in state.items() if k != "note"}
    trained = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf, x))(numbers)
    assert (
        isinstance(trained["count"], jax.Array) and trained["host"].dtype == np.float32
    )
    changed = {
        "count": np.int64(5),
        "rate": np.float32(1.5),
        "on": np.bool_(False),
        "note": "another",
        "host": np.ones(2, np.float32),
        "w": np.ones(3, np.float32),
    }
    tables = cnr.find_tables(state, ["user"])
    with cnr.CheckpointManager(tmp_path, tables=tables) as manager:
        for step, more in enumerate([state, trained, changed, {"count": 7}]):
            manager.save(step, args=cnr.args.Save({**state, **more}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 2, 3]
