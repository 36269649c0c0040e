"""One process of a run of one or two, each with four CPU devices; started by the tests.

Trains two tables that span all processes, saves after every step, and writes what it ends with.
Which rows a step changes depends on the step only, so runs on any number of processes agree bit
for bit.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr
import cnr_jax.handler
from cnr_jax.repository.write import RowsWriter

ROWS = {"user": 512, "item": 128}
FOREVER_SECS = 600.0


class Run:
    """The train state on this run's mesh, and one train step."""

    def __init__(self) -> None:
        devices = jax.device_count()
        self.mesh = jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
        self.state = self._fresh()
        self.tables = cnr.find_tables(self.state, list(ROWS))
        self.touched = cnr.init_touched(self.state, self.tables)
        self._step = jax.jit(self._arrays_after, donate_argnums=(0, 1))

    def put(self, values: np.ndarray, *spec: Any) -> jax.Array:
        sharding = NamedSharding(self.mesh, P(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])

    def _fresh(self) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        tables = {
            k: rng.normal(size=(n, 8)).astype(np.float32) for k, n in ROWS.items()
        }
        return {
            "params": {
                k: {"embedding": self.put(v, "rows")} for k, v in tables.items()
            },
            # One slot is sharded like its table, the other lies on every device.
            "sharded": {
                k: {"embedding": self.put(np.zeros(n, np.float32), "rows")}
                for k, n in ROWS.items()
            },
            "replicated": {
                k: {"embedding": self.put(np.zeros((n, 2), np.float32))}
                for k, n in ROWS.items()
            },
            "w": self.put(np.ones((8, 3), np.float32), "rows"),
            "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
            "counter": jnp.int32(0),
            "scale": np.float32(0.5),
            "step": 0,
            "rate": 0.25,
            "done": False,
            "name": "run of several processes",
            "nothing": None,
        }

    @staticmethod
    def _arrays_after(arrays: Any, touched: cnr.Touched, ids: Any, change: Any) -> Any:
        touched = cnr.record(touched, ids)
        new: dict[str, Any] = {"params": {}, "sharded": {}, "replicated": {}}
        for k, rows in ids.items():
            table, sharded, replicated = (arrays[n][k]["embedding"] for n in new)
            step = change * jnp.sin(table[rows])
            new["params"][k] = {"embedding": table.at[rows].add(step)}
            new["sharded"][k] = {"embedding": sharded.at[rows].add(change)}
            new["replicated"][k] = {"embedding": replicated.at[rows].add(2 * change)}
        return {**new, "w": arrays["w"] + change}, touched

    def train(self, step: int) -> None:
        rng = np.random.default_rng(step)
        # Distinct rows, so that no order of additions can show.
        ids = {
            k: rng.choice(n, 17, replace=False).astype(np.int32)
            for k, n in ROWS.items()
        }
        arrays = {k: self.state[k] for k in ("params", "sharded", "replicated", "w")}
        placed = {k: self.put(v) for k, v in ids.items()}
        change = self.put(np.float32(1 + step / 4))
        arrays, self.touched = self._step(arrays, self.touched, placed, change)
        key = jax.random.split(self.state["key"])[0]
        counter = self.state["counter"] + 1
        new = {"key": key, "counter": counter, "step": step, "rate": 0.25 / (step + 1)}
        self.state = {**self.state, **arrays, **new}

    def changed_unrecorded(self, table: str, row: int) -> dict[str, Any]:
        """The tables, with one row changed behind the back of `record`."""
        params = self.state["params"]
        changed = jax.jit(lambda x: x.at[row].add(1))(params[table]["embedding"])
        return {**params, table: {"embedding": changed}}

    def values(self) -> dict[str, np.ndarray]:
        """Every leaf as a numpy array, global ones gathered; alike on every process."""
        found = {}
        for path, leaf in jax.tree.leaves_with_path(self.state):
            if isinstance(leaf, jax.Array):
                if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    leaf = jax.random.key_data(leaf)
                if not leaf.is_fully_addressable:
                    leaf = multihost_utils.process_allgather(leaf, tiled=True)
            found[jax.tree_util.keystr(path)] = np.asarray(leaf)
        return found


def hold_at(step: int, where: str) -> None:
    """Makes this process stand still in the middle of the save of `step`."""
    if where == "rows":
        write = RowsWriter.write

        def slow(self: RowsWriter, *args: Any) -> Any:
            if self._directory.parent.name.split(".")[0] == str(step):
                time.sleep(FOREVER_SECS)
            return write(self, *args)

        RowsWriter.write = slow  # type: ignore[method-assign]
    else:
        finish = cnr_jax.handler.write_manifest

        def slow_finish(directory: Any, facts: Any, own: Any) -> Any:
            if facts.plan.step == step:
                time.sleep(FOREVER_SECS)
            return finish(directory, facts, own)

        cnr_jax.handler.write_manifest = slow_finish  # type: ignore[assignment]


def refused(save: Callable[[], Any]) -> str:
    """The error of a save, in one line."""
    try:
        save()
    except cnr.errors.CnrError as error:
        text = f"{type(error).__name__} {error.kind} {error}"
        return text.replace("\n", " | ")
    return "not refused"


def try_bad_saves(manager: cnr.CheckpointManager, run: Run, step: int) -> list[str]:
    """Saves that one process alone gets wrong, each in its own way."""
    here = jax.process_index()
    good, touched = run.state, run.touched
    wrong = [
        dict(good, counter=jnp.int32(100 + here)),
        dict(good, key=jax.random.key(here)),
        dict(good, step=1000 + here),
        dict(good, name=f"process {here}"),
        dict(good, scale=np.float32(here)),
        dict(good, **({"extra": 1} if here else {})),
        # Row 500 lies on the devices of process 1, which alone sees that it changed.
        dict(good, params=run.changed_unrecorded("user", 500)),
        # Process 1 alone sees that its state is not the one of the tables.
        dict(good, params={"user": good["params"]["user"]} if here else good["params"]),
    ]
    found = [
        refused(lambda s=s: manager.save(step, args=cnr.args.Save(s, touched)))
        for s in wrong
    ]
    found.append(
        refused(
            lambda: manager.save(
                step, args=cnr.args.Save(good, None if here else touched)
            )
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--policy", default="consecutive")
    parser.add_argument("--tracking")
    parser.add_argument("--hold-step", type=int)
    parser.add_argument("--hold-where", choices=["rows", "manifest"])
    parser.add_argument("--hold-process", type=int)
    parser.add_argument("--bad-saves", action="store_true")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(60)
    if args.processes > 1:
        address = f"127.0.0.1:{args.port}"
        jax.distributed.initialize(address, args.processes, args.process)
    if args.hold_step is not None and args.hold_process == args.process:
        hold_at(args.hold_step, args.hold_where)
    run = Run()
    policies = {"consecutive": cnr.Consecutive(), "one_shot": cnr.OneShot()}
    options = cnr.Options(
        codec="raw", policy=policies[args.policy], tracking=args.tracking
    )
    lines: list[str] = []
    with cnr.CheckpointManager(
        args.root, tables=run.tables, options=options
    ) as manager:
        start, latest = 0, manager.latest_step()
        if latest is not None:
            run.state, run.touched = manager.restore(
                None, args=cnr.args.Restore(run.state)
            )
            start = run.state["step"] + 1
        lines.append(f"restored {latest}, starts at {start}")
        for step in range(start, args.stop):
            run.train(step)
            touched = None if args.tracking == "fingerprint" else run.touched
            assert manager.save(step, args=cnr.args.Save(run.state, touched))
        manager.wait_until_finished()
        if args.bad_saves:
            lines += try_bad_saves(manager, run, args.stop)
            # Nothing is out of step afterwards: the next good save works.
            run.train(args.stop)
            assert manager.save(args.stop, args=cnr.args.Save(run.state, run.touched))
        manager.wait_until_finished()
        lines.append(f"latest {manager.latest_step()}")
    np.savez(f"{args.out}.{args.process}.npz", **run.values())
    Path(f"{args.out}.{args.process}.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
