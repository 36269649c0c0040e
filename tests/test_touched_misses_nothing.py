"""Runs of many steps with saves that fail now and then: every restored step is the true one.

The truth is kept in numpy and never read back from the device: a view of a buffer would keep
it from being donated.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
from cnr_jax.checkpointer.saving import dense
from cnr_jax.testing import inprocess
from cnr_jax.testing.faults import Fault

# Orbax leaves coroutines behind when a save fails.
pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)

USERS, ITEMS = 64, 24
POLICIES = {
    "one_shot": cnr.OneShot(),
    "consecutive": cnr.Consecutive(max_chain=12),
    "intermittent": cnr.Intermittent(),
}

# ---- training -----------------------------------------------------------------------------


def _sharding(*spec: Any) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("r", "c"))
    return NamedSharding(mesh, P(*spec))


def _shardings() -> dict[str, Any]:
    return {
        "params": {
            "user": _sharding(("r", "c"), None),
            "item": _sharding("r", "c"),
        },
        "opt_state": {
            "acc": {"user": _sharding(), "item": _sharding(("c", "r"))},
            "mean": {"user": _sharding("c", None)},
        },
        "w": _sharding(),
    }


def initial_truth() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "params": {"user": normal(USERS, 8), "item": normal(ITEMS, 4)},
        "opt_state": {
            "acc": {"user": normal(USERS), "item": normal(ITEMS)},
            "mean": {"user": normal(USERS, 8)},
        },
        "w": normal(3),
    }


def on_devices(truth: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.device_put(a.copy(), s), truth, _shardings())


def _assign(state: Any, users: Any, items: Any, mask: Any, new: Any) -> Any:
    """Writes rows `users` and the unmasked of `items` as JAX would on a lookup's gradient."""

    def user(old: jax.Array, values: jax.Array) -> jax.Array:
        return old.at[users].set(values[users], mode="clip")

    def item(old: jax.Array, values: jax.Array) -> jax.Array:
        index = jnp.where(mask, items, ITEMS)
        return old.at[index].set(values[items], mode="drop")

    return {
        "params": {
            "user": user(state["params"]["user"], new["params"]["user"]),
            "item": item(state["params"]["item"], new["params"]["item"]),
        },
        "opt_state": {
            "acc": {
                "user": user(
                    state["opt_state"]["acc"]["user"], new["opt_state"]["acc"]["user"]
                ),
                "item": item(
                    state["opt_state"]["acc"]["item"], new["opt_state"]["acc"]["item"]
                ),
            },
            "mean": {
                "user": user(
                    state["opt_state"]["mean"]["user"], new["opt_state"]["mean"]["user"]
                )
            },
        },
        "w": new["w"],
    }


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    state: Any, touched: cnr.Touched, users: Any, items: Any, mask: Any, new: Any
) -> tuple[Any, cnr.Touched]:
    ids = {"user": [users[:3], users[3:]], "item": cnr.Lookup(items, where=mask)}
    touched = cnr.record(touched, ids)
    state = _assign(state, users, items, mask, new)
    return jax.lax.with_sharding_constraint(state, _shardings()), touched


class Trainer:
    """A state on eight devices, its touched rows, and the truth in numpy."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.truth = initial_truth()
        self.state = on_devices(self.truth)
        self.tables = cnr.find_tables(self.state, ["user", "item"])
        assert [len(table.slots) for table in self.tables.values()] == [2, 1]
        self.touched = cnr.init_touched(self.state, self.tables)

    def step(self) -> None:
        """Looks up a few rows, some by ids that JAX wraps or clamps, some masked."""
        users = self.rng.integers(-USERS, USERS + 5, 6).astype(np.int32)
        items = self.rng.integers(0, ITEMS, (2, 2)).astype(np.int32)
        mask = self.rng.random((2, 2)) < 0.5
        new = jax.tree.map(
            lambda a: self.rng.normal(size=a.shape).astype(np.float32), self.truth
        )
        self.state, self.touched = train_step(
            self.state, self.touched, users, items, mask, new
        )
        rows = {
            "user": np.minimum(np.where(users < 0, users + USERS, users), USERS - 1),
            "item": items[mask],
        }
        self.truth["w"] = new["w"]
        for branch in ("params", *(("opt_state", name) for name in ("acc", "mean"))):
            path = (branch,) if isinstance(branch, str) else branch
            old, fresh = self.truth, new
            for key in path:
                old, fresh = old[key], fresh[key]
            for table in old:
                old[table][rows[table]] = fresh[table][rows[table]]

    def copy_of_truth(self) -> Any:
        return jax.tree.map(np.copy, self.truth)

    def args(self) -> cnr.args.Save:
        return cnr.args.Save(self.state, self.touched)


def assert_restores(
    manager: cnr.CheckpointManager, step: int, truth: Any, like: Any
) -> cnr.Restored:
    restored = manager.restore(step, args=cnr.args.Restore(like))

    def same(path: Any, got: Any, want: Any) -> None:
        where = f"step {step}, {jax.tree_util.keystr(path)}"
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=where)

    jax.tree_util.tree_map_with_path(same, restored.state, truth)
    return restored


# ---- faults -------------------------------------------------------------------------------

TEMPORARY = ".orbax-checkpoint-tmp"
# Calls of a save that fail behind training, once or until it gives up.
IN_BACKGROUND = {
    "arrays": Fault("open_read", action="EIO", match="/rows.p00000/", times=0),
    "process manifest": Fault("open", action="ENOSPC", match="/manifest.p", times=0),
    "dense leaves": Fault("fsync", action="EIO", match="/dense", times=0),
    "manifest": Fault("fsync", action="EIO", match="/manifest.json", times=0),
    "commit": Fault("rename", action="ENOSPC", match=TEMPORARY),
}
FAULTS = [*IN_BACKGROUND, "handing dense leaves over"]


class HandOver(OSError):
    """Raised on purpose, by `save` itself."""


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise HandOver("on purpose")


def fails_to_save(
    manager: cnr.CheckpointManager, step: int, args: cnr.args.Save, where: str
) -> None:
    """Saves with a fault; the error comes out, once."""
    manager.wait_until_finished()  # the fault must not hit the save before
    if where not in IN_BACKGROUND:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense, "bytes_of", _raise)
            with pytest.raises(HandOver):
                manager.save(step, args=args)
    else:
        with inprocess.failing(manager.directory, IN_BACKGROUND[where]):
            assert manager.save(step, args=args)
            with pytest.raises(cnr.errors.SaveError, match=f"step {step} failed"):
                manager.wait_until_finished()
    # A retry of the step uses the same folder: nobody may still be writing into it. A thread that
    # has said that it is done may take a moment to end, but writes no more.
    before = unfinished_files(manager.directory)
    for thread in threading.enumerate():
        if thread.name == "cnr_write_rows":
            thread.join(60)
            assert not thread.is_alive()
    assert unfinished_files(manager.directory) <= before
    manager.wait_until_finished()


def unfinished_files(root: Any) -> set[tuple[str, int, int]]:
    """Files of saves that are not committed, with their sizes and the times of their changes."""
    found = set[tuple[str, int, int]]()
    for folder, _, names in os.walk(root):
        for name in names if TEMPORARY in folder else ():
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # it is removed meanwhile
                state = os.stat(path)
                found.add((path, state.st_size, state.st_mtime_ns))
    return found


# ---- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("consecutive", marks=pytest.mark.slow),
        "one_shot",
        pytest.param("intermittent", marks=pytest.mark.slow),
    ],
)
def test_every_restored_step_of_a_run_with_failing_saves_is_true(
    policy: str, tmp_path: Path
) -> None:
    trainer, rng = Trainer(), np.random.default_rng(7)
    like = on_devices(trainer.truth)
    options = cnr.Options(policy=POLICIES[policy], codec="raw")
    truth: dict[int, Any] = {}
    failed: list[str] = []
    kinds: list[str] = []
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        for step in range(140):
            trainer.step()
            if rng.random() > 0.16:
                continue
            if rng.random() < 0.4:
                where = FAULTS[len(failed) % len(FAULTS)]
                fails_to_save(manager, step, trainer.args(), where)
                failed.append(where)
                if rng.random() < 0.5:
                    continue  # the rows go into the save of a later step
            manager.save(step, args=trainer.args())
            truth[step] = trainer.copy_of_truth()
            if manager.last_report is not None:
                kinds.append(manager.last_report.kind)
        manager.wait_until_finished()
        assert manager.all_steps() == list(truth)
        assert set(failed) == set(FAULTS)
        assert "delta" in kinds
        for step, values in truth.items():
            assert_restores(manager, step, values, like)
    with cnr.CheckpointManager(tmp_path, tables=trainer.tables) as again:
        assert again.all_steps() == list(truth)
        assert again.latest_step() == max(truth)
        assert_restores(again, max(truth), truth[max(truth)], like)


def test_rows_survive_failing_saves_while_old_steps_are_deleted(tmp_path: Path) -> None:
    trainer, rng = Trainer(seed=1), np.random.default_rng(11)
    like = on_devices(trainer.truth)
    options = cnr.Options(
        codec="raw",
        policy=cnr.OneShot(),
        preservation_policy=ocp.checkpoint_managers.LatestN(2),
    )
    truth: dict[int, Any] = {}
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        for step in range(40):
            trainer.step()
            if step % 2:
                continue
            if step and rng.random() < 0.5:
                fails_to_save(
                    manager, step, trainer.args(), FAULTS[step // 2 % len(FAULTS)]
                )
                assert manager.latest_step() == max(truth)
            else:
                manager.save(step, args=trainer.args())
                truth[step] = trainer.copy_of_truth()
        manager.wait_until_finished()
        kept = manager.all_steps()
        # The baseline is kept because the two latest rest on it.
        assert set(kept) >= {0, *sorted(truth)[-2:]} and len(kept) < len(truth)
        for step in kept:
            assert_restores(manager, step, truth[step], like)


def test_save_that_fails_waits_for_its_slow_writer(
    tmp_path: Path, storage: Any
) -> None:
    trainer = Trainer()
    slow = storage.calling(lambda _: time.sleep(0.3), "/rows.p00000/", "open_read")
    with slow, cnr.CheckpointManager(tmp_path, tables=trainer.tables) as manager:
        fails_to_save(manager, 0, trainer.args(), FAULTS[-1])
        assert manager.save(0, args=trainer.args())
        manager.wait_until_finished()
        assert manager.all_steps() == [0]
