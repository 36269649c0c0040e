"""The training program of `scaled_runs.py`: a small model that is saved, killed and started again.

Programs are forked from a server that has imported all they need, so that a restart takes a second
instead of six. A train step takes a fixed time, as on an accelerator that leaves the host alone,
and syncs of files below the roots take longer, as on a store that answers late.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cnr_jax.testing import faults
from cnr_jax.testing.faults import Fault

STEP_SECS, SYNC_SECS = 0.02, 0.03
ROWS, DIM, CHANGED = 20_000, 32, 300
# Fields of what a program shares with whoever started it.
STEP, TRAINING_AT, RESTORE_SECS, FIRST_SAVE_SECS = range(4)


class Programs:
    """Starts programs.

    Args:
        folder: all roots lie below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        slow = Fault("fsync", 1, "delay", times=0, secs=SYNC_SECS)
        os.environ |= {
            **faults.environment(below=folder, log="/dev/null", fault=slow),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            # A thread of BLAS would not survive the fork.
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["jax", "cnr_jax.manager"])

    def start(self, root: Path, given: dict[str, Any]) -> Program:
        """Starts a program in a root, see `trains`."""
        return Program(self._context, root, given)


class Program:
    """A program that was started.

    Attributes:
        started: reading of `time.monotonic` then.
        shared: see the fields above; `TRAINING_AT` is 0 until it trains, and `FIRST_SAVE_SECS`
            until the first call of `save` has returned.
    """

    def __init__(self, context: Any, root: Path, given: dict[str, Any]) -> None:
        path = root.with_suffix(".shared")
        self.shared = np.memmap(path, np.float64, "w+", shape=(4,))
        self.started = time.monotonic()
        self._process = context.Process(target=trains, args=(root, path, given))
        self._process.start()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._process.kill()
        self._process.join()

    def wait(self) -> None:
        """Waits until it ends by itself.

        Raises:
            RuntimeError: if it fails.
        """
        self._process.join()
        if self._process.exitcode:
            raise RuntimeError(f"a program ended with {self._process.exitcode}")

    @property
    def restart_secs(self) -> float:
        """Seconds from its start until it trained, and of its first call of `save`.

        That call waits until the root is the program's, and clear of what the one before left. The
        restore does not count.
        """
        took = self.shared[TRAINING_AT] - self.started - self.shared[RESTORE_SECS]
        return float(took + self.shared[FIRST_SAVE_SECS])

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process.exitcode is not None


def trains(root: Path, path: Path, given: dict[str, Any]) -> None:
    """Goes on from the newest checkpoint, trains, and saves; the body of a program.

    Args:
        root: of the checkpoints.
        path: file of what it shares.
        given: `policy`, by its name; `in_flight`; and `saves`, pairs of an interval in steps and
            how many saves to make at it, of which the last goes on for ever if it is 0.
    """
    import jax

    import cnr_jax as cnr

    shared = np.memmap(path, np.float64, "r+", shape=(4,))
    state, step_of = _model()
    tables = cnr.find_tables(state, ["user"])
    touched = cnr.init_touched(state, tables)
    options = cnr.Options(
        codec="raw",
        policy=policy_of(given["policy"]),
        max_in_flight=given["in_flight"],
    )
    with cnr.CheckpointManager(root, tables=tables, options=options) as manager:
        step, begun = 0, time.monotonic()
        if manager.latest_step() is not None:
            args = cnr.args.Restore(state)
            state, touched = manager.restore(None, args=args)
            jax.block_until_ready((state, touched))
            step = int(state["step"])
            shared[RESTORE_SECS] = time.monotonic() - begun
        shared[STEP] = step
        state, touched = jax.block_until_ready(step_of(state, touched, step + 1))
        step = int(state["step"])
        shared[STEP], shared[TRAINING_AT] = step, time.monotonic()
        for every in _intervals(given["saves"]):
            while True:
                begun = time.perf_counter()
                step += 1
                state, touched = jax.block_until_ready(step_of(state, touched, step))
                time.sleep(max(0.0, begun + STEP_SECS - time.perf_counter()))
                shared[STEP] = step
                if step % every == 0:
                    begun = time.perf_counter()
                    manager.save(step, args=cnr.args.Save(state, touched))
                    if not shared[FIRST_SAVE_SECS]:
                        shared[FIRST_SAVE_SECS] = time.perf_counter() - begun
                    break


def policy_of(name: str) -> Any:
    """A policy of those that `advise` knows, by its name."""
    from cnr_jax.goodput.plans import POLICIES

    return next(policy for policy in POLICIES if policy.name == name)


def _intervals(saves: Sequence[tuple[int, int]]) -> Any:
    """The interval to each save."""
    for every, count in saves:
        made = 0
        while not count or made < count:
            yield every
            made += 1


def _model() -> tuple[dict[str, Any], Callable[..., Any]]:
    """A state, and a train step that looks up the rows of a step's number."""
    import jax
    import jax.numpy as jnp

    import cnr_jax as cnr

    rng = np.random.default_rng(0)
    state = {
        "user": jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32),
        "dense": jnp.ones((DIM, DIM)),
        "step": jnp.int32(0),
    }

    @jax.jit
    def run(state: Any, touched: Any, ids: Any) -> tuple[Any, Any]:
        touched = cnr.record(touched, {"user": ids})
        rows = state["user"][ids]
        change = 0.1 * jnp.cos(rows @ state["dense"])
        return {
            "user": state["user"].at[ids].add(change),
            "dense": state["dense"] + 1e-4,
            "step": state["step"] + 1,
        }, touched

    def step_of(state: Any, touched: Any, step: int) -> tuple[Any, Any]:
        ids = np.random.default_rng(step).zipf(1.2, CHANGED) % ROWS
        return run(state, touched, ids.astype(np.int32))

    return state, step_of
