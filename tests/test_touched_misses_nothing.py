"""Two hundred steps with saves that fail now and then: every restored step is the true one.

The truth is kept in numpy and never read back from the device: a view of a buffer would keep
it from being donated.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
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
from cnr_jax import handler
from cnr_jax.checkpointer import orbax_compat
from cnr_jax.checkpointer.saving import capture
from cnr_jax.repository import rows_writer
from cnr_jax.repository.array_writer import ArrayWriter
from cnr_jax.rows.gather import chunk, host

USERS, ITEMS = 64, 24
POLICIES = {
    "full": cnr.Full(),
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


class Fault(OSError):
    """Raised on purpose."""


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise Fault("on purpose")


def _append_once_then_fault() -> Callable[..., Any]:
    first, append = iter([True]), ArrayWriter.append

    def wrapped(writer: ArrayWriter, values: np.ndarray) -> None:
        append(writer, values) if next(first, False) else _raise()

    return wrapped


def _one_chunk_then_fault(*args: Any) -> Iterator[chunk.Chunk]:
    yield next(_GATHER(*args))
    _raise()


_GATHER = host.gather_chunks

# Where a save can fail: what is replaced, by what.
IN_BACKGROUND: dict[str, tuple[Any, str, Any]] = {
    "first array": (ArrayWriter, "append", _raise),
    "later array": (ArrayWriter, "append", _append_once_then_fault),
    "end of array": (ArrayWriter, "finish", _raise),
    "encoding": (rows_writer, "encode_chunks", _raise),
    "process manifest": (rows_writer, "write_durably", _raise),
    "manifest": (handler, "write_manifest", _raise),
}
IN_FOREGROUND: dict[str, tuple[Any, str, Any]] = {
    "choosing rows": (capture, "capture", _raise),
    "gathering": (host, "gather_chunks", _one_chunk_then_fault),
    "dense leaves": (orbax_compat.DenseStore, "save", _raise),
}


@contextlib.contextmanager
def fault(where: str) -> Iterator[None]:
    owner, name, replacement = {**IN_BACKGROUND, **IN_FOREGROUND}[where]
    if replacement is _append_once_then_fault:
        replacement = replacement()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        yield


def fails_to_save(
    manager: cnr.CheckpointManager, step: int, args: cnr.args.Save, where: str
) -> None:
    """Saves with a fault; the error comes out, once."""
    manager.wait_until_finished()  # the fault must not hit the save before
    with fault(where):
        if where in IN_FOREGROUND:
            with pytest.raises(Fault):
                manager.save(step, args=args)
        else:
            assert manager.save(step, args=args)
            with pytest.raises(cnr.errors.SaveError, match=f"step {step} failed") as e:
                manager.wait_until_finished()
            assert isinstance(e.value.__cause__, Fault)
    # A retry of the step uses the same folder: nobody may still be writing into it.
    assert "cnr_write_rows" not in [thread.name for thread in threading.enumerate()]
    manager.wait_until_finished()


# ---- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_restored_step_of_a_run_with_failing_saves_is_true(
    policy: str, tmp_path: Path
) -> None:
    trainer, rng = Trainer(), np.random.default_rng(7)
    like = on_devices(trainer.truth)
    options = cnr.Options(policy=POLICIES[policy], codec="raw")
    truth: dict[int, Any] = {}
    failed: list[str] = []
    kinds: list[str] = []
    faults = [*IN_BACKGROUND, *IN_FOREGROUND]
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        for step in range(200):
            trainer.step()
            if rng.random() > 0.16:
                continue
            if rng.random() < 0.4:
                where = faults[len(failed) % len(faults)]
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
        assert set(failed) == set(faults)
        assert ("delta" in kinds) == (policy != "full")
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
    faults = [*IN_BACKGROUND, *IN_FOREGROUND]
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        for step in range(40):
            trainer.step()
            if step % 2:
                continue
            if step and rng.random() < 0.5:
                fails_to_save(manager, step, trainer.args(), faults[step % 9])
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


@pytest.mark.parametrize("where", [*IN_BACKGROUND, *IN_FOREGROUND])
def test_rows_of_a_failed_save_are_in_the_next(where: str, tmp_path: Path) -> None:
    trainer = Trainer()
    like = on_devices(trainer.truth)
    options = cnr.Options(policy=cnr.Consecutive(), codec="raw")
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        manager.save(0, args=trainer.args())
        manager.wait_until_finished()
        baseline = trainer.copy_of_truth()
        trainer.step()
        fails_to_save(manager, 1, trainer.args(), where)
        assert manager.all_steps() == [0] and manager.latest_step() == 0
        trainer.step()
        manager.save(2, args=trainer.args())
        manager.wait_until_finished()
        report = manager.last_report
        assert report is not None and (report.step, report.parent) == (2, 0)
        changed = sum(
            int((baseline["params"][name] != rows).any(axis=1).sum())
            for name, rows in trainer.truth["params"].items()
        )
        assert report.rows == changed
        assert_restores(manager, 2, trainer.truth, like)
        assert_restores(manager, 0, baseline, like)


@pytest.mark.parametrize("where", IN_BACKGROUND)
def test_error_of_a_save_in_the_background_comes_out_of_the_next_save_once(
    where: str, tmp_path: Path
) -> None:
    trainer = Trainer()
    like = on_devices(trainer.truth)
    options = cnr.Options(policy=cnr.Consecutive(), codec="raw")
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        manager.save(0, args=trainer.args())
        manager.wait_until_finished()
        trainer.step()
        with fault(where):
            manager.save(1, args=trainer.args())
            trainer.step()
            with pytest.raises(cnr.errors.SaveError, match="step 1 failed"):
                manager.save(2, args=trainer.args())
        trainer.step()
        assert manager.save(2, args=trainer.args())
        trainer_truth = trainer.copy_of_truth()
        trainer.step()
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2]
        assert_restores(manager, 2, trainer_truth, like)


def test_step_that_failed_can_be_saved_again(tmp_path: Path) -> None:
    trainer = Trainer()
    like = on_devices(trainer.truth)
    options = cnr.Options(policy=cnr.Consecutive(), codec="raw")
    with cnr.CheckpointManager(
        tmp_path, tables=trainer.tables, options=options
    ) as manager:
        manager.save(0, args=trainer.args())
        for where in (*IN_BACKGROUND, *IN_FOREGROUND):
            trainer.step()
            fails_to_save(manager, 1, trainer.args(), where)
        assert manager.save(1, args=trainer.args())
        manager.wait_until_finished()
        assert manager.last_report is not None
        assert (manager.last_report.step, manager.last_report.parent) == (1, 0)
        assert_restores(manager, 1, trainer.truth, like)


def test_save_that_fails_waits_for_its_slow_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    append = ArrayWriter.append

    def slow(writer: ArrayWriter, values: np.ndarray) -> None:
        time.sleep(0.3)
        append(writer, values)

    monkeypatch.setattr(ArrayWriter, "append", slow)
    with cnr.CheckpointManager(tmp_path, tables=trainer.tables) as manager:
        fails_to_save(manager, 0, trainer.args(), "dense leaves")
        assert manager.save(0, args=trainer.args())
        manager.wait_until_finished()
        assert manager.all_steps() == [0]


# Orbax leaves coroutines behind when it cannot write its metadata.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_run_survives_a_full_disk(tmp_path: Path) -> None:
    trainer = Trainer()
    like = on_devices(trainer.truth)
    options = cnr.Options(policy=cnr.Consecutive(), codec="raw")
    with _small_disk(tmp_path) as disk:
        filler = disk / "filler"
        with cnr.CheckpointManager(
            disk / "run", tables=trainer.tables, options=options
        ) as manager:
            manager.save(0, args=trainer.args())
            manager.wait_until_finished()
            baseline = trainer.copy_of_truth()
            trainer.step()
            _fill(filler)
            with pytest.raises(Exception, match=r"(?i)no space|exhausted"):
                manager.save(1, args=trainer.args())
                manager.wait_until_finished()
            assert_restores(manager, 0, baseline, like)
            filler.unlink()
            trainer.step()
            manager.save(2, args=trainer.args())
            manager.wait_until_finished()
            assert manager.all_steps() == [0, 2]
            assert_restores(manager, 2, trainer.truth, like)
        del manager
        gc.collect()  # their warnings belong to this test


@contextlib.contextmanager
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
