"""A month of one run, as its engineer would live it: every value is compared at every turn.

A root of plain Orbax is taken over; the run trains on; its table grows twice; another process
evaluates one table while steps are deleted; three runs of a sweep begin at one step; the run goes
back to an older step; its last save is exact; and that is exported, and read by other programs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import cnr_jax as cnr

DIM, ITEMS = 8, 24
# Reads one table again and again while the run saves, and prints what it found, step by step.
EVALUATOR = """
import json, sys
import jax, numpy as np
import cnr_jax as cnr

root = sys.argv[1]
with cnr.CheckpointManager(root) as reader:
    for line in sys.stdin:
        for attempt in range(20):
            reader.reload()
            step = reader.latest_step()
            there = reader.item_metadata(step)["params"]["user"]
            wanted = {"params": {"user": jax.ShapeDtypeStruct(there.shape, there.dtype)}}
            args = cnr.args.Restore(wanted, partial=True)
            try:
                found = reader.restore(step, args=args).state["params"]["user"]
                break
            except cnr.errors.CnrError:  # the run has deleted it meanwhile
                if attempt == 19:
                    raise
        values = np.asarray(found).tobytes().hex()
        print(json.dumps([step, list(found.shape), values]), flush=True)
"""


@jax.jit
def train_step(state: Any, touched: Any, ids: Any, change: Any) -> Any:
    params, acc = state["params"], state["acc"]
    user, item = ids["user"], ids["item"]
    state = {
        "params": {
            "user": params["user"].at[user].add(change),
            "item": params["item"].at[item].add(-change),
        },
        "acc": {"user": acc["user"].at[user].add(change * change)},
        "layers": [state["layers"][0] + change],
    }
    return state, cnr.record(touched, ids)


class Run:
    """The model, and what its leaves must be, computed by numpy beside it."""

    def __init__(self, users: int) -> None:
        self.mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
        rng = np.random.default_rng(1)
        self.truth: dict[str, np.ndarray] = {
            "user": rng.normal(size=(users, DIM)).astype(np.float32),
            "item": rng.normal(size=(ITEMS, DIM)).astype(np.float32),
            "acc": np.zeros(users, np.float32),
            "w": np.ones(3, np.float32),
        }
        self.state = self.made(self.truth)

    def made(self, values: dict[str, np.ndarray]) -> dict[str, Any]:
        """A train state of these values; tables and slots are sharded over eight devices."""

        def put(name: str) -> jax.Array:
            spec = P() if name == "w" else P("rows")
            return jax.device_put(values[name], NamedSharding(self.mesh, spec))

        return {
            "params": {"user": put("user"), "item": put("item")},
            "acc": {"user": put("acc")},
            "layers": [put("w")],
        }

    def tables(self) -> cnr.Tables:
        return cnr.find_tables(self.state, ["user", "item"])

    def train(self, touched: Any, seed: int) -> Any:
        """A few rows of both tables change, in the state and in what it must be."""
        rng = np.random.default_rng(seed)
        ids = {
            "user": rng.choice(len(self.truth["user"]), 5, replace=False),
            "item": rng.choice(ITEMS, 3, replace=False),
        }
        change = np.float32(seed % 7 + 1) / 8
        truth = {name: values.copy() for name, values in self.truth.items()}
        truth["user"][ids["user"]] += change
        truth["item"][ids["item"]] -= change
        truth["acc"][ids["user"]] += change * change
        truth["w"] += change
        self.truth = truth
        sent = {name: jnp.asarray(each) for name, each in ids.items()}
        self.state, touched = train_step(self.state, touched, sent, change)
        return touched

    def grow(self, users: int) -> None:
        """More rows in the table and in its slot; the old ones are not there yet."""
        more = users - len(self.truth["user"])
        rows = np.full((more, DIM), -1.0, np.float32)
        self.truth |= {
            "user": np.concatenate([self.truth["user"], rows]),
            "acc": np.concatenate([self.truth["acc"], np.full(more, 9, np.float32)]),
        }
        empty = {k: np.full_like(v, -1) for k, v in self.truth.items()}
        empty["acc"][:] = 9
        self.state = self.made(empty)

    def go_on(self, state: Any, truth: dict[str, np.ndarray] | None = None) -> None:
        """Takes over a state that was restored: exact, but for items."""
        truth, found = truth or self.truth, flat(state)
        items = np.asarray(found["item"])
        np.testing.assert_allclose(items, truth["item"], atol=0.02)
        self.truth = {**truth, "item": items}
        self.check(state)
        self.state = state

    def check(self, state: Any) -> None:
        """A state has the values of this run, bit for bit."""
        for name, wanted in self.truth.items():
            np.testing.assert_array_equal(flat(state)[name], wanted, err_msg=name)


def flat(state: Any) -> dict[str, Any]:
    return {
        "user": state["params"]["user"],
        "item": state["params"]["item"],
        "acc": state["acc"]["user"],
        "w": state["layers"][0],
    }


def manager_of(run: Run, root: Path, keep: int | None = None, **options: Any) -> Any:
    """Exact but for items, which take 8 bits: their rows come back rounded."""
    items = cnr.TableOptions(codec="adaptive", bits=8)
    return cnr.CheckpointManager(
        root,
        tables=run.tables(),
        options=cnr.Options(codec="raw", tables={"item": items}, adopt=True, **options),
        orbax_options=ocp.CheckpointManagerOptions(max_to_keep=keep),
    )


def evaluate(evaluator: subprocess.Popen[str]) -> tuple[int, np.ndarray]:
    """The step that another process finds newest, and its table."""
    assert evaluator.stdin is not None and evaluator.stdout is not None
    print("", file=evaluator.stdin, flush=True)
    step, shape, data = json.loads(evaluator.stdout.readline())
    return step, np.frombuffer(bytes.fromhex(data), np.float32).reshape(shape)


# Each thing that happens in it has tests of its own.
@pytest.mark.slow
def test_a_month(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run = Run(users=40)
    truths: dict[int, dict[str, np.ndarray]] = {}

    def save(manager: Any, step: int, touched: Any, **kind: bool) -> Any:
        touched = run.train(touched, step)
        manager.save(step, args=cnr.args.Save(run.state, touched, **kind))
        truths[step] = run.truth
        return touched

    # Plain Orbax began it.
    with ocp.CheckpointManager(root) as plain:
        plain.save(100, args=ocp.args.StandardSave(run.state))

    with manager_of(run, root) as manager:
        assert manager.latest_step() == 100
        state, touched = manager.restore(None, args=cnr.args.Restore(run.state))
        run.check(state)
        for step in (110, 120, 130):
            touched = save(manager, step, touched)
        manager.wait_until_finished()
        assert manager.all_steps() == [100, 110, 120, 130]
        assert manager.last_report.kind == "delta"

    # The table grows, and grows again; each time a full save, then deltas.
    for users, first in ((56, 140), (72, 160)):
        run.grow(users)
        with manager_of(run, root) as manager:
            args = cnr.args.Restore(run.state, partial=True)
            state, touched = manager.restore(None, args=args)
            run.go_on(state)
            for step, kind in ((first, "full"), (first + 10, "delta")):
                touched = save(manager, step, touched)
                manager.wait_until_finished()
                assert manager.last_report.kind == kind

    # Another process evaluates one table while steps come and go.
    command = [sys.executable, "-c", EVALUATOR, str(root)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        manager_of(run, root, keep=2) as manager,
        subprocess.Popen(command, text=True, **pipes) as evaluator,
    ):
        state, touched = manager.restore(None, args=cnr.args.Restore(run.state))
        run.go_on(state)
        for step in range(180, 240, 10):
            touched = save(manager, step, touched)
            found, table = evaluate(evaluator)
            np.testing.assert_array_equal(table, truths[found]["user"])
        manager.wait_until_finished()
        found, table = evaluate(evaluator)
        assert found == 230
        np.testing.assert_array_equal(table, truths[230]["user"])
        evaluator.communicate()
        assert evaluator.returncode == 0
        kept = manager.all_steps()
        assert 100 not in kept and {220, 230} <= set(kept), kept

    # Three runs begin at one step, each in a root of its own.
    for rate in (1, 2, 3):
        with manager_of(run, tmp_path / f"rate_{rate}") as manager:
            args = cnr.args.Restore(run.state)
            state, touched = manager.restore(220, directory=root, args=args)
            run.go_on(state, truths[220])
            for step in (221, 222):
                touched = run.train(touched, 10 * step + rate)
                manager.save(step, args=cnr.args.Save(run.state, touched))
            manager.wait_until_finished()
            args = cnr.args.Restore(run.state)
            run.go_on(manager.restore(222, args=args).state)

    # Back to an older step: what came after it is of another branch.
    with manager_of(run, root, keep=2) as manager:
        state, touched = manager.restore(220, args=cnr.args.Restore(run.state))
        run.go_on(state, truths[220])
        touched = save(manager, 225, touched)
        manager.wait_until_finished()
        assert manager.latest_step() == manager.all_steps()[-1] == 225
        # The last save has all bits, also those that 8 bits a value would lose.
        save(manager, 300, touched, exact=True)
        manager.wait_until_finished()
        run.check(manager.restore(None, args=cnr.args.Restore(run.state)).state)
    assert cnr.verify(root) == ()

    # Others read it.
    wanted = {
        "params/user": run.truth["user"],
        "params/item": run.truth["item"],
        "acc/user": run.truth["acc"],
        "layers/0": run.truth["w"],
    }
    for form in ("orbax", "safetensors", "zarr"):
        cnr.export(root, 300, tmp_path / form, form)
    with ocp.StandardCheckpointer() as checkpointer:
        run.check(checkpointer.restore(tmp_path / "orbax"))
    found = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
        path = f"{tmp_path / 'zarr' / name}/"
        store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        read = ts.open(store, read=True).result().read().result()
        np.testing.assert_array_equal(read, values, err_msg=name)
